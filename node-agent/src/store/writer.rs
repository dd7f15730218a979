//! The writer thread: takes what is queued, commits it as one transaction, then publishes.

use std::{
    sync::{Arc, mpsc},
    thread::JoinHandle,
};

use drivers_api::{Error, ErrorKind};
use host::lock::FileLock;
use reconciler::wanted::{Key, Wanted};
use rusqlite::{Connection, ErrorCode, Transaction, params};
use tokio::sync::oneshot;

use super::{Op, Shared, database::SCHEMA};

/// How many requests are committed together at most.
const BATCH: usize = 256;

struct Job {
    ops: Vec<Op>,
    reply: oneshot::Sender<drivers_api::Result<u64>>,
}

/// The thread and its queue. Dropping it commits what is queued and waits for the thread.
#[derive(Debug)]
pub(super) struct Writer {
    queue: Option<mpsc::Sender<Job>>,
    thread: Option<JoinHandle<()>>,
}

impl Writer {
    pub(super) fn start(
        connection: Connection,
        shared: &Arc<Shared>,
        lock: &Arc<FileLock>,
    ) -> std::io::Result<Self> {
        let (queue, jobs) = mpsc::channel();
        let (shared, lock) = (Arc::clone(shared), Arc::clone(lock));
        let thread = std::thread::Builder::new()
            .name("store".to_owned())
            .spawn(move || run(connection, &jobs, &shared, &lock))?;
        Ok(Self { queue: Some(queue), thread: Some(thread) })
    }

    /// Not cancel-safe in the sense that a dropped future's change may still be committed; each change is safe to repeat.
    pub(super) async fn commit(&self, ops: Vec<Op>) -> drivers_api::Result<u64> {
        let (reply, answer) = oneshot::channel();
        let queue = self.queue.as_ref().ok_or_else(gone)?;
        queue.send(Job { ops, reply }).map_err(|_| gone())?;
        answer.await.map_err(|_| gone())?
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        drop(self.queue.take());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the store's writer panicked");
        }
    }
}

pub(super) fn gone() -> Error {
    Error::new(ErrorKind::Internal, "write", "the wanted state", "the writer has ended")
        .with_remedy("restart the agent; VMs run on")
}

/// Whether the lock file is still the one that is locked.
pub(super) fn still_ours(lock: &FileLock, shared: &Shared) -> bool {
    let ours = lock.is_current();
    if !ours {
        let text = "the lock file of the state directory was removed or replaced: another agent may have it";
        shared.lost.send_if_modified(|lost| {
            let first = lost.is_none();
            lost.get_or_insert_with(|| text.to_owned());
            first
        });
    }
    ours
}

fn run(mut connection: Connection, jobs: &mpsc::Receiver<Job>, shared: &Shared, lock: &FileLock) {
    while let Ok(first) = jobs.recv() {
        let mut batch = vec![first];
        while batch.len() < BATCH
            && let Ok(job) = jobs.try_recv()
        {
            batch.push(job);
        }
        if batch.len() > 1
            && still_ours(lock, shared)
            && let Ok(revision) =
                write(&mut connection, batch.iter().flat_map(|job| &job.ops), shared)
        {
            batch.into_iter().for_each(|job| answer(job, Ok(revision)));
            continue;
        }
        // One by one: a request that cannot be written must not fail its neighbours.
        for job in batch {
            let written = if still_ours(lock, shared) {
                write(&mut connection, job.ops.iter(), shared)
            } else {
                let reason = shared.lost.borrow().clone().unwrap_or_default();
                Err(Error::new(ErrorKind::Unavailable, "write", "the wanted state", reason))
            };
            answer(job, written);
        }
    }
    if let Err((_, error)) = connection.close() {
        tracing::warn!(%error, "the store was not closed in order; nothing that was answered is lost");
    }
}

fn answer(job: Job, written: drivers_api::Result<u64>) {
    // Whoever asked may have gone; what was committed stands.
    drop(job.reply.send(written));
}

fn write<'a>(
    connection: &mut Connection,
    ops: impl Iterator<Item = &'a Op>,
    shared: &Shared,
) -> drivers_api::Result<u64> {
    let before = shared.snapshot();
    let after = ops.fold(before.clone(), |set, op| op.apply(&set));
    let changed = before.diff(&after);
    let next = *shared.revision.borrow() + 1;
    if changed.is_empty() {
        return Ok(next - 1);
    }
    let transaction = connection.transaction().map_err(into_error)?;
    host::fault::point("store.write.begun")?;
    // Removed rows first: an object may take the identity that another one gives up.
    for key in changed.iter().filter(|key| after.get(key).is_none()) {
        remove(&transaction, key)?;
    }
    for object in changed.iter().filter_map(|key| after.get(key)) {
        put(&transaction, object)?;
        host::fault::point("store.write.row-written")?;
    }
    let revision = i64::try_from(next).unwrap_or(i64::MAX);
    transaction
        .execute("UPDATE counter SET value = ?1 WHERE name = 'revision'", params![revision])
        .map_err(into_error)?;
    host::fault::point("store.write.before-commit")?;
    transaction.commit().map_err(into_error)?;
    shared.publish(after, next);
    host::fault::point("store.write.committed")?;
    Ok(next)
}

fn put(transaction: &Transaction<'_>, object: &Wanted) -> drivers_api::Result<()> {
    let key = object.key();
    let document = serde_json::to_string(object).map_err(|error| {
        Error::new(ErrorKind::Internal, "write", &key, "the document is no JSON").with_source(error)
    })?;
    transaction
        .prepare_cached(
            "INSERT INTO object (kind, name, uuid, schema, document) VALUES (?1, ?2, ?3, ?4, ?5)
             ON CONFLICT (kind, name) DO UPDATE SET uuid = excluded.uuid, schema = excluded.schema,
             document = excluded.document",
        )
        .and_then(|mut statement| {
            let (kind, name, uuid) =
                (key.kind.as_str(), key.name.as_str(), object.uuid.to_string());
            statement.execute(params![kind, name, uuid, SCHEMA, document])
        })
        .map(drop)
        .map_err(into_error)
}

fn remove(transaction: &Transaction<'_>, key: &Key) -> drivers_api::Result<()> {
    transaction
        .prepare_cached("DELETE FROM object WHERE kind = ?1 AND name = ?2")
        .and_then(|mut statement| statement.execute(params![key.kind.as_str(), key.name.as_str()]))
        .map(drop)
        .map_err(into_error)
}

fn into_error(error: rusqlite::Error) -> Error {
    let code = error.sqlite_error_code();
    let (kind, reason, remedy) = match code {
        Some(ErrorCode::DiskFull) => (
            ErrorKind::Exhausted,
            "no space is left on the device",
            Some("make space where state_dir is; the old state is intact"),
        ),
        Some(ErrorCode::ReadOnly | ErrorCode::PermissionDenied | ErrorCode::CannotOpen) => (
            ErrorKind::Denied,
            "the file cannot be written",
            Some("look at the permissions of state_dir"),
        ),
        Some(ErrorCode::ConstraintViolation) => {
            (ErrorKind::Conflict, "another object has this uuid", None)
        }
        Some(_) | None => (ErrorKind::Unavailable, "the database failed", None),
    };
    let built = Error::new(kind, "write", "the wanted state", reason).with_source(error);
    match remedy {
        Some(remedy) => built.with_remedy(remedy),
        None => built,
    }
}
