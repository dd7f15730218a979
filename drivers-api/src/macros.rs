//! How an async, dyn-compatible trait is declared over std alone.
//!
//! `async-trait` 0.1 expands a method into one that returns a boxed future and names one lifetime per borrowed
//! argument. [`driver_trait!`] declares the trait in exactly that shape, so that a driver author may write
//! `#[async_trait] impl Hypervisor for Mine { async fn … }` while this crate depends on nothing.
//!
//! Grammar of a method: the context first, then the arguments taken by value in brackets, then at most one borrowed
//! argument; `= expression` after the result type is the default body.

/// Declares a driver trait. See the module's documentation for the grammar.
macro_rules! driver_trait {
    (
        $(#[$meta:meta])*
        pub trait $name:ident $(: $first:ident $(+ $more:ident)*)? {
            sync { $($sync:tt)* }
            $(
                $(#[$fmeta:meta])*
                async fn $f:ident(&self, cx: &Context, [$($v:ident : $vt:ty),*] $(, $a:ident : &$t:ty)?) -> $r:ty $(= $default:expr)?;
            )*
        }
    ) => {
        $(#[$meta])*
        pub trait $name: Send + Sync $(+ $first $(+ $more)*)? {
            $($sync)*
            $( driver_trait!(@method [$(#[$fmeta])*] $f [$($v : $vt),*] [$($a : $t)?] $r [$($default)?]); )*
        }
    };
    (@method [$($m:tt)*] $f:ident [$($v:ident : $vt:ty),*] [] $r:ty []) => {
        $($m)*
        fn $f<'life0, 'life1, 'async_trait>(
            &'life0 self, cx: &'life1 $crate::Context $(, $v: $vt)*
        ) -> $crate::BoxFuture<'async_trait, $r>
        where 'life0: 'async_trait, 'life1: 'async_trait, Self: 'async_trait;
    };
    (@method [$($m:tt)*] $f:ident [$($v:ident : $vt:ty),*] [$a:ident : $t:ty] $r:ty []) => {
        $($m)*
        fn $f<'life0, 'life1, 'life2, 'async_trait>(
            &'life0 self, cx: &'life1 $crate::Context $(, $v: $vt)*, $a: &'life2 $t
        ) -> $crate::BoxFuture<'async_trait, $r>
        where 'life0: 'async_trait, 'life1: 'async_trait, 'life2: 'async_trait, Self: 'async_trait;
    };
    (@method [$($m:tt)*] $f:ident [$($v:ident : $vt:ty),*] [] $r:ty [$default:expr]) => {
        $($m)*
        fn $f<'life0, 'life1, 'async_trait>(
            &'life0 self, _cx: &'life1 $crate::Context $(, $v: $vt)*
        ) -> $crate::BoxFuture<'async_trait, $r>
        where 'life0: 'async_trait, 'life1: 'async_trait, Self: 'async_trait
        {
            $(let _ = $v;)*
            let answer: $r = $default;
            Box::pin(std::future::ready(answer))
        }
    };
    (@method [$($m:tt)*] $f:ident [$($v:ident : $vt:ty),*] [$a:ident : $t:ty] $r:ty [$default:expr]) => {
        $($m)*
        fn $f<'life0, 'life1, 'life2, 'async_trait>(
            &'life0 self, _cx: &'life1 $crate::Context $(, $v: $vt)*, $a: &'life2 $t
        ) -> $crate::BoxFuture<'async_trait, $r>
        where 'life0: 'async_trait, 'life1: 'async_trait, 'life2: 'async_trait, Self: 'async_trait
        {
            $(let _ = $v;)*
            let _ = $a;
            let answer: $r = $default;
            Box::pin(std::future::ready(answer))
        }
    };
}
