//! Closes the difference between what is wanted and what is there.
//!
//! Level-triggered, per object: a pass takes a snapshot of the wanted state ([`wanted`]) and of the host, plans
//! ([`plan`], pure: the same code answers `bcd-node plan`), executes the planned steps and writes the [`status`]. The
//! crate knows the drivers' traits and no driver.
//!
//! # What holds
//!
//! * **What is not known is not touched.** An object whose parts cannot be seen gets no step; only a wished deletion of a
//!   VM, and a wished stop, are tried all the same. Only tombstones are deleted. What carries our mark and nobody wants is
//!   listed ([`Reconciler::unclaimed`]) and left alone.
//! * **One worker for an object, and none is held up by another.** A driver call runs in a task of its own. One that takes
//!   long gives its worker's place back; one that panics is a failure; one that never returns is abandoned after its deadline
//!   and [`Settings::abandon_after`]. Until it ends after all, no other call is made for its object; a deletion alone is tried
//!   beside it, and is not finished before it has ended and the host was seen clear. A look or a list that never returns
//!   hinders nothing: it is made again, until three are out.
//! * **A deletion wins.** It cancels the running step, clears the failures, waits for no back-off and needs nothing to have
//!   been made. It waits for users of the object only, by name. What is there without our mark is not ours: then nothing of
//!   ours is there, and the deletion is done.
//! * **No step is only remembered in memory.** Addresses, attachments, ports and what is half made are found on the host. The
//!   store keeps what the host cannot: tombstones, requests that are not done, and the names of NICs that went
//!   ([`wanted::Wanted::former_nics`]), by which ports are found that do not say whose they are.
//!
//! # What was decided
//!
//! * **The same name again while it is deleted.** The tombstone holds the new object as its successor
//!   ([`wanted::Wanted::successor`]), under an identity of its own. [`store::WantedStore::forget`] puts it in the tombstone's
//!   place; nothing of it is made before.
//! * **Requests.** A reboot, and a start of what its restart policy left stopped, are counters in the document. They are done
//!   at least once: the record ([`store::WantedStore::acknowledge`]) follows the deed, so a crash between the two repeats it. A
//!   reboot of a VM whose spec has changed is a stop and a start, which apply the change.
//! * **Growth.** A volume's own pass grows it. The instance's pass then tells the running VM, once for each new size; after a
//!   start of the agent it tells again what it cannot know the VM was told, which a driver answers with "unchanged".
//! * **Addresses** are what the NIC asks for, else what the host shows for its port, else the lowest free one. On a bridged
//!   network none is given, since others give them out there.
//! * **A VM that ends by itself** is started again at once, then after 1, 2, 4 … 60 seconds; the row ends after a minute of
//!   running, a new generation or a request.
//! * **Host events do not shorten a back-off**, so that a failing step that stirs up events does not run in circles. A VM's
//!   own events do, where the failure was not about the VM itself.
//! * **The driver does not show what it was asked to make**: after [`Settings::rounds`] plans whose steps all succeeded the
//!   object is a failure like others, with back-off.
//!
//! # Inside
//!
//! A task follows the store, one for each driver its events, one for each list of a driver; a comparison after each list finds
//! what differs, without a call for what does not. All wake objects in one queue, from which a dispatcher starts passes.

mod admit;
mod allocate;
mod backoff;
mod board;
mod call;
mod check;
mod drivers;
mod engine;
mod execute;
mod gate;
mod index;
mod listers;
mod note;
mod observe;
mod observed;
mod pass;
pub mod plan;
mod queue;
mod reconciler;
mod resolve;
mod seen;
mod settings;
pub mod status;
pub mod store;
mod tasks;
pub mod wanted;

pub use drivers::Drivers;
pub use reconciler::Reconciler;
pub use settings::{Backoff, Capacity, Deadlines, Settings, StepHook};
