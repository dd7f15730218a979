//! Tests of the contract's own types.

use std::{
    collections::BTreeSet,
    fmt::{Debug, Display},
    str::FromStr,
    sync::Arc,
    time::Duration,
};

use proptest::prelude::*;

use crate::*;

/// What a type prints, it reads back as the same value, in one spelling.
fn round_trips<T: FromStr<Err: Debug> + Display + PartialEq + Debug>(text: &str) {
    if let Ok(value) = text.parse::<T>() {
        let printed = value.to_string();
        let again: T = printed.parse().unwrap_or_else(|error| {
            panic!("{value:?} prints as {printed:?}, which is refused: {error:?}")
        });
        assert_eq!(again, value, "through {printed:?}");
        assert_eq!(again.to_string(), printed, "a second print differs");
    }
}

/// Every text type of the contract over one text.
fn all_round_trip(text: &str) {
    round_trips::<Uuid>(text);
    round_trips::<VmId>(text);
    round_trips::<NetworkId>(text);
    round_trips::<PortId>(text);
    round_trips::<VolumeId>(text);
    round_trips::<SecurityGroupId>(text);
    round_trips::<ProjectId>(text);
    round_trips::<HostId>(text);
    round_trips::<MacAddr>(text);
    round_trips::<IfName>(text);
    round_trips::<IpCidr>(text);
    round_trips::<Endpoint>(text);
    round_trips::<WireguardPublicKey>(text);
    round_trips::<DisplayName>(text);
    round_trips::<DeviceName>(text);
    round_trips::<HostPath>(text);
    round_trips::<Digest>(text);
    round_trips::<SecretRef>(text);
    round_trips::<ImageRef>(text);
}

/// Texts that are near to something valid: pieces of every grammar, put together at random.
fn nearly_valid() -> impl Strategy<Value = String> {
    let pieces = prop::sample::select(vec![
        "3f2b8c1e-9a4d-4e6f-8b7a-1c2d3e4f5a6b",
        "0",
        "ff",
        ":",
        "::",
        "/",
        "//",
        ".",
        "..",
        "-",
        "@",
        "#",
        "[",
        "]",
        "%",
        "sha256:",
        "oci://",
        "https://",
        "http://",
        "file://",
        "secret://",
        "vault://",
        "env://",
        "localhost",
        "registry.test",
        ":5000",
        "a",
        "A",
        "z9",
        "52:54:00:12:34:56",
        "10.77.0.0",
        "/24",
        "fd77::",
        "/64",
        "010",
        "latest",
        "=",
        "+",
        "\u{0}",
        "\n",
        " ",
        "é",
        "\u{202e}",
        "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
    ]);
    prop::collection::vec(pieces, 0..8).prop_map(|pieces| pieces.concat())
}

proptest! {
    #[test]
    fn an_arbitrary_text_is_refused_or_round_trips(text in any::<String>()) {
        all_round_trip(&text);
    }

    #[test]
    fn a_nearly_valid_text_is_refused_or_round_trips(text in nearly_valid()) {
        all_round_trip(&text);
    }

    #[test]
    fn a_uuid_is_one_value_in_either_case(bytes in any::<[u8; 16]>()) {
        if let Some(uuid) = Uuid::from_bytes(bytes) {
            let text = uuid.to_string();
            prop_assert_eq!(text.parse::<Uuid>().unwrap(), uuid);
            prop_assert_eq!(text.to_uppercase().parse::<Uuid>().unwrap(), uuid);
            prop_assert_eq!(*uuid.as_bytes(), bytes);
        }
    }

    #[test]
    fn a_mac_round_trips_or_names_its_fault(bytes in any::<[u8; 6]>()) {
        match MacAddr::new(bytes) {
            Ok(mac) => {
                prop_assert_eq!(mac.to_string().parse::<MacAddr>().unwrap(), mac);
                prop_assert_eq!(mac.to_string().to_uppercase().parse::<MacAddr>().unwrap(), mac);
                prop_assert_eq!(bytes[0] & 1, 0);
            }
            Err(error) => prop_assert!(bytes[0] & 1 == 1 || bytes[0] == 0xfe || bytes == [0; 6], "{}", error),
        }
    }

    #[test]
    fn a_range_holds_what_it_counts(v4 in any::<u32>(), length in 1_u8..=32, index in any::<u32>()) {
        let host_mask = u32::MAX.checked_shr(u32::from(length)).unwrap_or(0);
        let address = std::net::Ipv4Addr::from_bits(v4 & !host_mask);
        if let Ok(range) = IpCidr::new(address.into(), length) {
            prop_assert_eq!(range.to_string().parse::<IpCidr>().unwrap(), range);
            prop_assert!(range.overlaps(&range));
            prop_assert!(!range.is_host_address(address.into()));
            match range.nth(u128::from(index)) {
                Some(nth) => prop_assert!(index <= host_mask && range.contains(nth)),
                None => prop_assert!(index > host_mask),
            }
        }
    }

    #[test]
    fn a_v6_range_holds_what_it_counts(v6 in any::<u128>(), length in 1_u8..=128, index in any::<u128>()) {
        let host_mask = u128::MAX.checked_shr(u32::from(length)).unwrap_or(0);
        let address = std::net::Ipv6Addr::from_bits(v6 & !host_mask);
        if let Ok(range) = IpCidr::new(address.into(), length) {
            prop_assert_eq!(range.to_string().parse::<IpCidr>().unwrap(), range);
            let nth = range.nth(index & host_mask).unwrap();
            prop_assert!(range.contains(nth));
            prop_assert_eq!(range.broadcast(), None);
        }
    }

    #[test]
    fn every_number_is_refused_or_kept(value in any::<u64>()) {
        for kept in [
            CpuCount::new(value).map(u64::from), MemoryMib::new(value).map(u64::from),
            SizeGib::new(value).map(u64::from), MtuBytes::new(value).map(u64::from),
            VlanId::new(value).map(u64::from),
        ].into_iter().flatten() {
            prop_assert_eq!(kept, value);
        }
    }

    #[test]
    fn a_refusal_never_repeats_more_than_a_little_of_its_input(text in "\\PC{200,400}") {
        if let Err(error) = text.parse::<Uuid>() {
            prop_assert!(error.to_string().chars().count() < 200);
        }
        if let Err(error) = format!("{text}\n\u{1b}[31m").parse::<IfName>() {
            prop_assert!(!error.to_string().chars().any(char::is_control));
        }
    }
}

/// A UUID of its own for each number.
fn uuid(n: u32) -> Uuid {
    let [a, b, c, d] = n.to_be_bytes();
    Uuid::from_bytes([0xaa, 0xaa, 0xaa, 0xaa, 0xbb, 0xbb, 0x4c, 0xcc, 0x8d, 0xdd, 0, 0, a, b, c, d])
        .unwrap()
}

#[test]
fn ten_thousand_derived_macs_are_unicast_local_and_distinct() {
    let macs: BTreeSet<_> = (0..10_000).map(|n| MacAddr::derived(PortId::new(uuid(n)))).collect();
    assert_eq!(macs.len(), 10_000);
    for mac in macs {
        let first = mac.octets()[0];
        assert_eq!(first & 0b11, 0b10, "{mac} is not unicast and locally administered");
        assert_eq!(MacAddr::new(mac.octets()), Ok(mac));
    }
}

#[test]
fn ten_thousand_derived_interface_names_are_distinct_and_fit() {
    let names: BTreeSet<_> =
        (0..10_000).map(|n| IfName::derived("tap", uuid(n)).unwrap()).collect();
    assert_eq!(names.len(), 10_000);
    assert!(names.iter().all(|name| name.as_str().len() <= IfName::MAX_BYTES));
    assert!(IfName::derived("", uuid(1)).is_err());
    assert!(IfName::derived("five5", uuid(1)).is_err());
    assert!(IfName::derived("-", uuid(1)).is_err());
}

#[test]
fn derived_names_never_change() {
    // What an older version put on a host, a newer one must find: these values are for ever.
    let id: Uuid = "3f2b8c1e-9a4d-4e6f-8b7a-1c2d3e4f5a6b".parse().unwrap();
    assert_eq!(IfName::derived("bcn", id).unwrap().as_str(), "bcnrrkygh7mvsb");
    assert_eq!(MacAddr::derived(PortId::new(id)).to_string(), "56:67:ce:6c:2a:31");
}

#[test]
fn every_error_kind_survives_its_code() {
    let codes: BTreeSet<_> = ErrorKind::ALL.iter().map(|kind| kind.code()).collect();
    assert_eq!(codes.len(), ErrorKind::ALL.len(), "two kinds share a code");
    for kind in ErrorKind::ALL {
        assert_eq!(ErrorKind::from_code(kind.code()), kind);
        assert_eq!(kind.to_string(), kind.code());
    }
    for unknown in ["", "INTERNAL", "not_found", "some-kind-of-tomorrow"] {
        assert_eq!(ErrorKind::from_code(unknown), ErrorKind::Internal);
    }
}

#[test]
fn an_error_prints_its_own_part_and_the_chain_prints_all() {
    let cause = std::io::Error::other("disk on fire");
    let error = Error::new(ErrorKind::Unavailable, "attach disk", "vm 1", "the host said no")
        .with_field("disks[0]")
        .with_remedy("put it out")
        .with_retry_after(Duration::from_secs(3))
        .with_source(cause);
    assert_eq!(
        error.to_string(),
        "cannot attach disk vm 1: disks[0]: the host said no (put it out)"
    );
    assert_eq!(error.chain(), format!("{error}: disk on fire"));
    assert_eq!(error.retry_after(), Some(Duration::from_secs(3)));
    let moved = error.during("start", "vm 2");
    assert_eq!((moved.operation(), moved.object()), ("start", "vm 2"));
    assert_eq!(moved.kind(), ErrorKind::Unavailable);
}

#[test]
fn a_secret_is_never_printed() {
    let secret = SecretValue::new(b"hunter2".to_vec());
    assert!(!format!("{secret:?}").contains("hunter2"));
    assert_eq!(secret.expose(), b"hunter2");
}

#[tokio::test]
async fn a_raised_flag_wakes_all_who_wait_and_stays_raised() {
    let flag = CancelFlag::new();
    let waiters: Vec<_> = (0..8).map(|_| tokio::spawn(flag.cancelled())).collect();
    tokio::task::yield_now().await;
    assert!(!flag.is_cancelled());
    flag.clone().cancel();
    for waiter in waiters {
        tokio::time::timeout(Duration::from_secs(5), waiter).await.unwrap().unwrap();
    }
    flag.cancelled().await;
    assert!(flag.is_cancelled());
}

#[tokio::test]
async fn a_dropped_wait_is_forgotten_and_a_polled_one_is_woken_where_it_was_polled_last() {
    let flag = CancelFlag::new();
    drop(flag.cancelled());
    let mut moved = Box::pin(flag.cancelled());
    assert!(
        std::future::poll_fn(|cx| std::task::Poll::Ready(moved.as_mut().poll(cx)))
            .await
            .is_pending()
    );
    // The waker of the last poll counts.
    let task = tokio::spawn(moved);
    tokio::task::yield_now().await;
    flag.cancel();
    tokio::time::timeout(Duration::from_secs(5), task).await.unwrap().unwrap();
}

#[test]
fn a_context_carries_what_it_is_given() {
    struct Sink(std::sync::Mutex<Vec<Progress>>);
    impl ProgressSink for Sink {
        fn report(&self, progress: &Progress) {
            self.0.lock().unwrap().push(progress.clone());
        }
    }
    let sink = Arc::new(Sink(std::sync::Mutex::default()));
    let cx = Context::new()
        .with_traceparent("00-1-2-01")
        .with_idempotency_key("key")
        .with_progress(sink.clone());
    let progress = Progress::new("download", "layer 1").with_amount(3, Some(9));
    cx.clone().report(&progress);
    Context::new().report(&progress);
    assert_eq!(*sink.0.lock().unwrap(), [progress]);
    assert_eq!((cx.traceparent(), cx.idempotency_key()), (Some("00-1-2-01"), Some("key")));
    assert_eq!((cx.deadline(), cx.secrets().is_some()), (None, false));
}

#[test]
fn the_greater_change_of_two_parts_is_the_whole_one() {
    use Change::{Changed, Created, Unchanged};
    assert_eq!(Unchanged.and(Changed), Changed);
    assert_eq!(Created.and(Unchanged), Created);
    assert_eq!((Unchanged.wrote(), Changed.wrote(), Created.wrote()), (false, true, true));
    assert_eq!((Change::changed_if(false), Change::changed_if(true)), (Unchanged, Changed));
}
