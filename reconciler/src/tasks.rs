//! The tasks of a running reconciler: what wakes objects, and what works on them.

use std::{sync::Arc, time::Duration};

use drivers_api::{EventKind, EventStream, HostEvent, ObjectRef, VmPower};
use tokio::time::{Instant, sleep, timeout};

use crate::{
    call::panic_text,
    engine::Engine,
    listers::keep,
    observe::shown_by,
    pass,
    plan::Action,
    seen::{DriverId, Listing},
    status::{Phase, Status, StatusEvent},
    wanted::{Key, Wanted, WantedSpec},
};

/// How long a comparison waits for lists that are on their way.
const GATHER: Duration = Duration::from_millis(500);

/// How long a driver's event stream that ended is left alone.
const RESUBSCRIBE: Duration = Duration::from_secs(1);

/// Starts all tasks.
pub(crate) fn start(engine: &Arc<Engine>) {
    let set = engine.known().set.clone();
    for object in set.iter() {
        announce(engine, object);
    }
    let drivers = &engine.drivers;
    for (id, driver) in drivers.hypervisors() {
        let driver = Arc::clone(driver);
        listen(engine, id, vec![Listing::Vms], move || driver.events());
    }
    for (id, driver) in drivers.networks() {
        let driver = Arc::clone(driver);
        listen(engine, id, vec![Listing::Networks, Listing::Ports], move || driver.events());
    }
    for (id, driver) in drivers.volumes() {
        let driver = Arc::clone(driver);
        listen(engine, id, vec![Listing::Volumes], move || driver.events());
    }
    for at in 0..engine.listers.len() {
        engine.run(keep(Arc::clone(engine), at));
    }
    engine.run(follow_store(Arc::clone(engine)));
    engine.run(dispatch(Arc::clone(engine)));
    engine.run(compare_all(Arc::clone(engine)));
}

/// The first status of an object.
fn announce(engine: &Engine, object: &Wanted) {
    if let WantedSpec::Instance(spec) = &object.spec
        && spec.power == VmPower::Running
        && !object.deleting
    {
        engine.gate.expect(&object.key(), spec.start_order);
    }
    let status = Status {
        key: object.key(),
        uuid: object.uuid,
        phase: if object.deleting { Phase::Deleting } else { Phase::Pending },
        observed_generation: 0,
        message: "not looked at yet".to_owned(),
        blocked_by: None,
        failure: None,
        executed: Vec::new(),
        observed: serde_json::Map::new(),
    };
    engine.publish(status, false);
}

/// Takes what is due and has it worked on, each in a task of its own.
async fn dispatch(engine: Arc<Engine>) {
    loop {
        let (key, cancel) = engine.queue.next().await;
        let pass = Box::pin(pass::run(Arc::clone(&engine), key.clone(), cancel));
        let task = engine.spawn(pass);
        let engine_ = Arc::clone(&engine);
        engine.run(async move {
            let looked = match task.await {
                Ok(Some(looked)) => looked,
                Ok(None) => return,
                Err(join) => {
                    let panic = join.try_into_panic().ok();
                    let text = panic.map_or_else(String::new, |panic| panic_text(panic.as_ref()));
                    pass::panicked(&engine_, &key, &text);
                    engine_.queue.clock()
                }
            };
            engine_.queue.finish(&key, looked, engine_.settings.event_delay);
        });
    }
}

/// Follows the wanted state.
async fn follow_store(engine: Arc<Engine>) {
    let mut revision = engine.store.revision();
    loop {
        follow(&engine);
        if revision.changed().await.is_err() {
            // The store is gone; what was wanted last stays so.
            return;
        }
    }
}

/// Takes in what changed in the store.
pub(crate) fn follow(engine: &Engine) {
    let mut changes = Vec::new();
    {
        let mut known = engine.known_mut();
        // Under the lock, so that of two who follow none puts an older state in place of a newer one.
        let new = engine.store.snapshot();
        for key in known.set.diff(&new) {
            let (before, after) = (known.set.get(&key).cloned(), new.get(&key).cloned());
            known.index.change(&key, before.as_deref(), after.as_deref());
            changes.push((key, before, after));
        }
        known.set = new;
    }
    for (key, before, after) in changes {
        changed(engine, &key, before.as_deref(), after.as_deref());
    }
}

/// One document changed.
fn changed(engine: &Engine, key: &Key, before: Option<&Wanted>, after: Option<&Wanted>) {
    let replaced = before.filter(|before| after.is_none_or(|after| after.uuid != before.uuid));
    if let Some(gone) = replaced {
        engine.drop_note(key);
        engine.gate.settled(key);
        let waiters = engine.board().remove(key);
        engine.tell(StatusEvent::Gone { key: key.clone(), uuid: gone.uuid });
        engine.wake_all(&waiters);
    }
    let Some(after) = after else {
        wake_users(engine, key);
        return;
    };
    let Some(before) = before.filter(|before| before.uuid == after.uuid) else {
        announce(engine, after);
        engine.queue.wake_now(key);
        wake_users(engine, key);
        return;
    };
    if !is_news(before, after) {
        return;
    }
    let asks = is_asked(before, after);
    engine.with_note(key, |note| {
        note.forgive();
        note.crashes.forgive();
        note.asked |= asks;
    });
    let deleted = after.deleting && !before.deleting;
    let other_image = matches!(after.spec, WantedSpec::Image(_)) && before.spec != after.spec;
    if deleted || other_image {
        engine.queue.cancel(key);
    }
    if deleted {
        engine.gate.settled(key);
    }
    engine.queue.wake_now(key);
    let waiters = engine.board().change(key);
    engine.wake_all(&waiters);
    // What it named before may wait for it to let go.
    let named: Vec<Key> = before.references();
    let waits = |named: &&Key| {
        engine.board().get(named).is_some_and(|status| status.phase == Phase::Deleting)
    };
    engine.wake_all(named.iter().filter(waits));
}

fn wake_users(engine: &Engine, key: &Key) {
    let users: Vec<Key> = engine.known().index.users(key).cloned().collect();
    engine.wake_all(&users);
}

/// Whether a change of a document is one that anything is to be done for.
fn is_news(before: &Wanted, after: &Wanted) -> bool {
    before.spec != after.spec
        || before.generation != after.generation
        || before.deleting != after.deleting
        || before.reboots != after.reboots
        || before.starts != after.starts
        || before.project != after.project
}

/// Whether a change asks for a start.
fn is_asked(before: &Wanted, after: &Wanted) -> bool {
    let power = |object: &Wanted| match &object.spec {
        WantedSpec::Instance(spec) => Some(spec.power),
        WantedSpec::Image(_) | WantedSpec::Volume(_) | WantedSpec::Network(_) => None,
    };
    after.starts > before.starts
        || (power(before) == Some(VmPower::Stopped) && power(after) == Some(VmPower::Running))
}

/// Follows a driver's events, and subscribes anew when they end.
fn listen(
    engine: &Arc<Engine>,
    driver: &str,
    lists: Vec<Listing>,
    subscribe: impl Fn() -> Option<EventStream> + Send + 'static,
) {
    let (engine_, driver) = (Arc::clone(engine), DriverId::from(driver));
    // Subscribed here, before the first list is asked for: no change falls between the two.
    let mut stream = subscribe();
    engine.run(async move {
        loop {
            let Some(mut events) = stream.take() else { return };
            let (engine, id) = (Arc::clone(&engine_), Arc::clone(&driver));
            let asked = lists.clone();
            let task = engine_.spawn(async move {
                while let Some(event) = events.next().await {
                    take(&engine, &id, &asked, event);
                }
            });
            // A stream that panics is one that ended.
            if matches!(task.await, Ok(None)) {
                return;
            }
            sleep(RESUBSCRIBE).await;
            stream = subscribe();
            relist(&engine_, &driver, &lists);
        }
    });
}

fn relist(engine: &Engine, driver: &str, lists: &[Listing]) {
    let all = engine.listers.iter();
    for lister in all.filter(|one| &*one.driver == driver && lists.contains(&one.listing)) {
        lister.ask.notify_one();
    }
}

/// Takes in one event.
fn take(engine: &Engine, driver: &DriverId, lists: &[Listing], event: HostEvent) {
    let Some(object) = event.object.filter(|_| event.kind != EventKind::Resync) else {
        relist(engine, driver, lists);
        let driver = driver.to_string();
        engine.tell(StatusEvent::Host { driver, key: None, message: event.message });
        return;
    };
    let key = {
        let known = engine.known();
        let owner = match object {
            ObjectRef::Vm(id) => known.index.owner(id.uuid()),
            ObjectRef::Network(id) => known.index.owner(id.uuid()),
            ObjectRef::Volume(id) => known.index.owner(id.uuid()),
            ObjectRef::Port(id) => known.index.port_owner(id).or_else(|| {
                let place = engine.seen().place_of(id).map(|(vm, ..)| vm);
                place.and_then(|vm| known.index.owner(vm.uuid()))
            }),
            _ => None,
        };
        owner.cloned()
    };
    let message = event.message;
    engine.tell(StatusEvent::Host { driver: driver.to_string(), key: key.clone(), message });
    let Some(key) = key else { return };
    match pass::held(engine, &key) {
        None => engine.queue.event(&key, engine.settings.event_delay),
        // What a failing step itself stirs up must not undo its back-off; but a VM that ends is not to wait for a disk.
        Some(_) if matches!(object, ObjectRef::Vm(_)) && !fails_at_vm(engine, &key) => {
            engine.queue.event(&key, RESUBSCRIBE);
        }
        Some(_) => {}
    }
}

fn fails_at_vm(engine: &Engine, key: &Key) -> bool {
    let board = engine.board();
    let failure = board.get(key).and_then(|status| status.failure.as_ref());
    failure.is_none_or(|failure| {
        matches!(
            failure.step.action,
            Action::Observe
                | Action::EnsureVm
                | Action::CreateVm
                | Action::StartVm
                | Action::StopVm
                | Action::RebootVm
                | Action::DeleteVm
        )
    })
}

/// Compares everything with what was listed, each time lists have come in. What is as wanted costs no call.
async fn compare_all(engine: Arc<Engine>) {
    loop {
        engine.compare.notified().await;
        let mut listing = engine.listing.subscribe();
        // Lists that take longer are compared when they come.
        drop(timeout(GATHER, listing.wait_for(|running| *running == 0)).await);
        let keys: Vec<Key> = engine.known().set.iter().map(|object| object.key()).collect();
        for (at, key) in keys.iter().enumerate() {
            compare_one(&engine, key);
            if at % 64 == 63 {
                tokio::task::yield_now().await;
            }
        }
        mark_unlisted(&engine, &keys).await;
    }
}

fn compare_one(engine: &Arc<Engine>, key: &Key) {
    let now = Instant::now();
    if engine.queue.is_due(key, now) || !engine.queue.claim(key) {
        return;
    }
    let looked = engine.queue.clock();
    let as_wanted = pass::compare(engine, key);
    engine.queue.finish(key, looked, engine.settings.event_delay);
    if as_wanted {
        return;
    }
    let unknown = engine.board().get(key).is_some_and(|status| status.phase == Phase::Unknown);
    if unknown || pass::held(engine, key).is_none() {
        engine.queue.wake(key, now);
    }
}

/// Marks what a list would have shown that failed.
async fn mark_unlisted(engine: &Engine, keys: &[Key]) {
    let failing = engine
        .listers
        .iter()
        .any(|lister| engine.seen().list_failure(lister.listing, &lister.driver).is_some());
    if !failing {
        return;
    }
    for (at, key) in keys.iter().enumerate() {
        let error = engine.with_world(|world| {
            let object = world.wanted.get(key)?;
            let mut lists = shown_by(world, object).into_iter();
            lists.find_map(|(listing, driver)| world.seen.list_failure(listing, &driver))
        });
        if let Some(error) = error {
            pass::unlisted(engine, key, &error);
        }
        if at % 64 == 63 {
            tokio::task::yield_now().await;
        }
    }
}
