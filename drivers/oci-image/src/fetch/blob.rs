//! Reads a body into a partial file, hashed while it streams, and goes on where an earlier attempt ended.

use std::{
    fs::{File, OpenOptions},
    io::{Read, Seek, SeekFrom, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use bytes::Bytes;
use drivers_api::Digest;
use futures_util::StreamExt;
use host::files::{self, FileError};
use reqwest::{Response, StatusCode, Url, header::CONTENT_RANGE};
use sha2::{Digest as _, Sha256};
use tokio::sync::{OwnedMutexGuard, mpsc, oneshot};

use super::{Ask, Fetcher, STALL_LIMIT, auth::Session, chain, gate::jittered};
use crate::error::{ImageError, Result};

/// How many pieces may wait for the disk. A piece is what the connection gave at once, at most a few hundred KiB.
const BACKLOG: usize = 8;
/// How much of a file is read at once.
pub(crate) const BUFFER: usize = 256 << 10;
/// How often in a row an attempt may end without a new byte.
const BARREN_ATTEMPTS: u32 = 3;
/// How often a download is taken up again at all.
const MAX_ATTEMPTS: u32 = 20;

/// What is downloaded, and where to.
#[derive(Debug)]
pub(crate) struct Wanted<'a> {
    pub(crate) url: Url,
    pub(crate) what: &'a str,
    pub(crate) digest: &'a Digest,
    /// The exact size, where it is known.
    pub(crate) size: Option<u64>,
    /// The most bytes, where it is not.
    pub(crate) limit: u64,
    /// The partial file.
    pub(crate) path: PathBuf,
}

impl Fetcher {
    /// Downloads to the partial file and checks it. The file is removed when it is wrong, and stays when the connection
    /// ends early, so that the next attempt goes on from there.
    ///
    /// The lock on the digest goes with the thread that writes, which may live a moment longer than this future. It is
    /// answered, so that nobody else takes the file before the caller has.
    pub(crate) async fn download(
        &self,
        wanted: &Wanted<'_>,
        session: Option<&Session>,
        lock: OwnedMutexGuard<()>,
        mut progress: impl FnMut(u64),
    ) -> Result<OwnedMutexGuard<()>> {
        let (mut writer, mut have) = Writer::start(wanted, lock).await?;
        let (mut restarted, mut barren, mut attempts) = (false, 0_u32, 0_u32);
        loop {
            let before = have;
            let ended = if wanted.size == Some(have) {
                Ok(())
            } else {
                self.attempt(wanted, session, &mut writer, &mut have, &mut progress).await
            };
            match ended {
                Ok(()) => match writer.finish().await? {
                    Verdict::Good(lock) => return Ok(lock),
                    // What an earlier attempt left may be the fault: once more from the start.
                    Verdict::Wrong(error, lock) if before > 0 && !restarted => {
                        tracing::warn!(%error, "a resumed download is wrong and begins anew");
                        restarted = true;
                        (writer, have) = Writer::start(wanted, lock).await?;
                    }
                    Verdict::Wrong(error, _) => return Err(error),
                },
                Err(error @ ImageError::Unavailable { .. }) => {
                    barren = if have > before { 0 } else { barren + 1 };
                    attempts += 1;
                    if barren >= BARREN_ATTEMPTS || attempts >= MAX_ATTEMPTS {
                        return Err(writer.end(None, error).await);
                    }
                    tracing::debug!(%error, have, "a download is taken up again");
                    tokio::time::sleep(jittered(Duration::from_millis(200) * 3_u32.pow(barren)))
                        .await;
                }
                Err(error) => return Err(writer.end(Some(Step::Discard), error).await),
            }
        }
    }

    /// One request and its body. An `Unavailable` error may be tried again from where it ended.
    async fn attempt(
        &self,
        wanted: &Wanted<'_>,
        session: Option<&Session>,
        writer: &mut Writer,
        have: &mut u64,
        progress: &mut impl FnMut(u64),
    ) -> Result<()> {
        let ask = Ask { url: wanted.url.clone(), what: wanted.what, accept: None, from: *have };
        let answer = self.get(&ask, session).await?;
        if *have > 0 && !continues(&answer, *have) {
            *have = 0;
            writer.send(Step::Restart).await?;
        }
        if let (Some(size), Some(length)) = (wanted.size, answer.content_length())
            && have.saturating_add(length) != size
        {
            let got = format!("{} bytes", have.saturating_add(length));
            return Err(size_mismatch(wanted, size, got));
        }
        let mut stream = answer.bytes_stream();
        loop {
            let piece = match tokio::time::timeout(STALL_LIMIT, stream.next()).await {
                Ok(Some(Ok(piece))) => piece,
                Ok(Some(Err(error))) => {
                    return Err(ImageError::unavailable(wanted.what, chain(error)));
                }
                Ok(None) => return Ok(()),
                Err(_) => {
                    return Err(ImageError::unavailable(wanted.what, "the server stopped sending"));
                }
            };
            *have = have.saturating_add(u64::try_from(piece.len()).unwrap_or(u64::MAX));
            writer.send(Step::Bytes(piece)).await?;
            progress(*have);
        }
    }
}

/// Whether an answer goes on at the byte that was asked for.
fn continues(answer: &Response, from: u64) -> bool {
    let said = answer.headers().get(CONTENT_RANGE).and_then(|value| value.to_str().ok());
    let start = said
        .and_then(|text| text.strip_prefix("bytes "))
        .and_then(|text| text.split_once('-'))
        .and_then(|(start, _)| start.parse::<u64>().ok());
    answer.status() == StatusCode::PARTIAL_CONTENT && start == Some(from)
}

fn size_mismatch(wanted: &Wanted<'_>, size: u64, got: String) -> ImageError {
    ImageError::Mismatch {
        what: wanted.what.to_owned(),
        wanted: format!("{size} bytes of {}", wanted.digest),
        got,
    }
}

enum Step {
    Bytes(Bytes),
    Restart,
    Discard,
    Finish,
}

/// How a finished file is.
enum Verdict {
    Good(OwnedMutexGuard<()>),
    /// Removed already.
    Wrong(ImageError, OwnedMutexGuard<()>),
}

/// The thread that hashes and writes.
struct Writer {
    steps: mpsc::Sender<Step>,
    /// Gone once its answer was taken.
    thread: Option<tokio::task::JoinHandle<Result<Verdict>>>,
}

impl Writer {
    /// Opens the partial file and hashes what is there; answers how much that is.
    async fn start(wanted: &Wanted<'_>, lock: OwnedMutexGuard<()>) -> Result<(Self, u64)> {
        let (steps, queue) = mpsc::channel(BACKLOG);
        let (ready, begun) = oneshot::channel();
        let sink = Sink {
            path: wanted.path.clone(),
            what: wanted.what.to_owned(),
            digest: wanted.digest.clone(),
            size: wanted.size,
            limit: wanted.size.unwrap_or(wanted.limit),
        };
        let thread = tokio::task::spawn_blocking(move || sink.run(lock, ready, queue));
        let mut writer = Self { steps, thread: Some(thread) };
        match begun.await {
            Ok(have) => Ok((writer, have)),
            // The thread ended before it was ready: its error says why.
            Err(_) => Err(writer.error().await),
        }
    }

    async fn send(&mut self, step: Step) -> Result<()> {
        match self.steps.send(step).await {
            Ok(()) => Ok(()),
            Err(_) => Err(self.error().await),
        }
    }

    async fn finish(mut self) -> Result<Verdict> {
        self.send(Step::Finish).await?;
        self.join().await
    }

    /// Ends the thread with a last step, and waits for it, so that nothing is written any more when the caller looks.
    async fn end(mut self, last: Option<Step>, error: ImageError) -> ImageError {
        if let Some(step) = last {
            // A thread that has ended has given its reason already: it is `error`.
            drop(self.steps.send(step).await);
        }
        // Without a sender the thread ends.
        self.steps = mpsc::channel(1).0;
        match self.join().await {
            Ok(_) | Err(_) => error,
        }
    }

    /// Why the thread ended early.
    async fn error(&mut self) -> ImageError {
        match self.join().await {
            Err(error) | Ok(Verdict::Wrong(error, _)) => error,
            Ok(Verdict::Good(_)) => ImageError::Internal("a writer ended early".to_owned()),
        }
    }

    async fn join(&mut self) -> Result<Verdict> {
        match self.thread.take() {
            Some(thread) => thread
                .await
                .unwrap_or_else(|_| Err(ImageError::Internal("a writer panicked".to_owned()))),
            None => Err(ImageError::Abandoned),
        }
    }
}

struct Sink {
    path: PathBuf,
    what: String,
    digest: Digest,
    size: Option<u64>,
    limit: u64,
}

impl Sink {
    /// Works until the end; a file that nobody can go on with is removed.
    fn run(
        self,
        lock: OwnedMutexGuard<()>,
        ready: oneshot::Sender<u64>,
        queue: mpsc::Receiver<Step>,
    ) -> Result<Verdict> {
        let answer = self.write(lock, ready, queue);
        if let Err(error) = &answer
            && !matches!(error, ImageError::Abandoned)
        {
            // A full disk must not stay full of what cannot be finished.
            files::remove_file(&self.path)?;
        }
        answer
    }

    fn write(
        &self,
        lock: OwnedMutexGuard<()>,
        ready: oneshot::Sender<u64>,
        mut queue: mpsc::Receiver<Step>,
    ) -> Result<Verdict> {
        let (mut file, mut hash, mut have) = self.open()?;
        if ready.send(have).is_err() {
            // The download was given up meanwhile.
            return Err(ImageError::Abandoned);
        }
        let write = |error| FileError::of("write", &self.path)(error);
        while let Some(step) = queue.blocking_recv() {
            match step {
                Step::Bytes(bytes) => {
                    have = have.saturating_add(u64::try_from(bytes.len()).unwrap_or(u64::MAX));
                    if have > self.limit {
                        return Err(self.too_long());
                    }
                    hash.update(&bytes);
                    file.write_all(&bytes).map_err(write)?;
                }
                Step::Restart => {
                    file.set_len(0).map_err(write)?;
                    file.seek(SeekFrom::Start(0)).map_err(write)?;
                    hash = Sha256::new();
                    have = 0;
                }
                Step::Discard => {
                    files::remove_file(&self.path)?;
                    return Err(ImageError::Abandoned);
                }
                Step::Finish => {
                    let got = hex(&hash.finalize());
                    let short = self.size.is_some_and(|size| size != have);
                    if got == self.digest.as_str() && !short {
                        return Ok(Verdict::Good(lock));
                    }
                    files::remove_file(&self.path)?;
                    return Ok(Verdict::Wrong(self.wrong(got, have), lock));
                }
            }
        }
        if have == 0 {
            files::remove_file(&self.path)?;
        }
        Err(ImageError::Abandoned)
    }

    /// Opens the file at its end, with the hash of what it holds. One that is longer than what is wanted is emptied.
    fn open(&self) -> Result<(File, Sha256, u64)> {
        let fail = |error| FileError::of("open", &self.path)(error);
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&self.path)
            .map_err(fail)?;
        let length = file.metadata().map_err(fail)?.len();
        if length > self.limit {
            file.set_len(0).map_err(fail)?;
        }
        let (hash, have) = hash_rest(&mut file, &self.path, &AtomicBool::new(false))?;
        Ok((file, hash, have))
    }

    fn too_long(&self) -> ImageError {
        match self.size {
            Some(size) => ImageError::Mismatch {
                what: self.what.clone(),
                wanted: format!("{size} bytes of {}", self.digest),
                got: "more".to_owned(),
            },
            None => ImageError::TooLarge { what: self.what.clone(), limit: self.limit },
        }
    }

    fn wrong(&self, got: String, have: u64) -> ImageError {
        let wanted = self.size.map_or_else(
            || self.digest.to_string(),
            |size| format!("{size} bytes of {}", self.digest),
        );
        let got = if self.size.is_some() { format!("{have} bytes of {got}") } else { got };
        ImageError::Mismatch { what: self.what.clone(), wanted, got }
    }
}

/// Hashes a file from where it stands to its end, unless `stop` is raised.
fn hash_rest(file: &mut File, path: &Path, stop: &AtomicBool) -> Result<(Sha256, u64)> {
    let mut hash = Sha256::new();
    let mut have = 0_u64;
    let mut buffer = vec![0_u8; BUFFER];
    loop {
        if stop.load(Ordering::Relaxed) {
            return Err(ImageError::Abandoned);
        }
        let count = file.read(&mut buffer).map_err(FileError::of("read", path))?;
        let Some(bytes) = buffer.get(..count).filter(|bytes| !bytes.is_empty()) else {
            return Ok((hash, have));
        };
        hash.update(bytes);
        have = have.saturating_add(u64::try_from(count).unwrap_or(u64::MAX));
    }
}

/// The digest of a whole file.
pub(crate) fn digest_of_file(file: &mut File, path: &Path, stop: &AtomicBool) -> Result<String> {
    let (hash, _) = hash_rest(file, path, stop)?;
    Ok(hex(&hash.finalize()))
}

/// A hash as OCI writes it.
pub(crate) fn hex(hash: &[u8]) -> String {
    let digits = hash.iter().flat_map(|byte| [byte >> 4, byte & 15]);
    let letters = digits.filter_map(|digit| char::from_digit(u32::from(digit), 16));
    "sha256:".chars().chain(letters).collect()
}
