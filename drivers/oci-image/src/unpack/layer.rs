//! Finds the one disk in the layers of a container image.
//!
//! Nothing of an archive is extracted but the bytes of one regular file under `disk/`, into a file whose name we chose. So
//! no path, link, device or mode of an archive ever reaches the file system.

use std::{
    cell::Cell,
    fs::File,
    io::{self, Read},
    path::Path,
    rc::Rc,
    sync::Arc,
};

use host::files::FileError;
use tar::{Archive, Entry, EntryType};

use super::{Budget, SparseFile, Stop, StopFlag, Unpacked, copy, read_error};
use crate::{
    error::{ImageError, Result, shown},
    media::Packing,
};

/// The most bytes that the headers of one entry may take, long names and extended headers included: the archive reader
/// holds them in memory.
const MAX_HEADERS: u64 = 1 << 20;
/// The most entries of a layer.
const MAX_ENTRIES: u64 = 1_000_000;

/// The disk that was found.
#[derive(Debug)]
pub(crate) struct FoundDisk {
    /// Its name under `disk/`.
    pub(crate) name: String,
    /// The digest of its bytes.
    pub(crate) digest: String,
}

/// What a layer's entry is to us.
enum Seen {
    /// The disk.
    Disk(String),
    /// Nothing.
    Ignored,
}

/// Looks through one layer. A disk goes to `target`; a second one is an error.
pub(crate) fn scan(
    what: &str,
    blob: &Path,
    packing: Packing,
    target: &Path,
    work: &mut Scan<'_>,
) -> Result<()> {
    let file = File::open(blob).map_err(FileError::of("open", blob))?;
    let unpacked = Unpacked::new(&file, packing, work.budget, Arc::clone(work.stop))
        .map_err(|error| read_error(what, blob, error))?;
    let allowance = Rc::new(Cell::new(None));
    let taken = Rc::new(Cell::new(0));
    let metered =
        Metered { inner: unpacked, allowance: Rc::clone(&allowance), taken: Rc::clone(&taken) };
    let mut archive = Archive::new(metered);
    let fail = |error| read_error(what, blob, error);
    let mut entries = archive.entries().map_err(fail)?;
    let mut count = 0_u64;
    loop {
        allowance.set(Some(MAX_HEADERS));
        let Some(entry) = entries.next() else { break };
        let mut entry = entry.map_err(fail)?;
        allowance.set(None);
        count += 1;
        if count > MAX_ENTRIES {
            return Err(ImageError::malformed(what, "more than a million entries"));
        }
        if let Seen::Disk(name) = judge(what, &entry)? {
            if work.found.is_some() {
                return Err(ImageError::malformed(what, "there are several files under disk/"));
            }
            let mut output = SparseFile::create(target)?;
            copy(what, blob, &mut entry, &mut output)?;
            work.found = Some(FoundDisk { name, digest: output.finish()? });
        }
        // To the entry's end, so that the next step reads headers only.
        io::copy(&mut entry, &mut io::sink()).map_err(fail)?;
    }
    // What follows the archive's end is unpacked too, and counts: it could be a bomb of its own.
    let mut rest = archive.into_inner();
    allowance.set(None);
    io::copy(&mut rest, &mut io::sink()).map_err(fail)?;
    let expanded = taken.get();
    drop(rest);
    // The manifest names this layer so often; each time it would be unpacked.
    let repeats = expanded.saturating_mul(work.times.saturating_sub(1));
    work.budget.take(repeats).map_err(|error| read_error(what, blob, error))
}

/// What a scan works with.
#[derive(Debug)]
pub(crate) struct Scan<'a> {
    pub(crate) budget: &'a mut Budget,
    pub(crate) stop: &'a StopFlag,
    /// How often the manifest names the layer.
    pub(crate) times: u64,
    /// The disk of this layer or an earlier one.
    pub(crate) found: Option<FoundDisk>,
}

/// Decides about one entry by its path and type.
fn judge(what: &str, entry: &Entry<'_, impl Read>) -> Result<Seen> {
    let path = entry.path_bytes();
    let refuse = |reason: &str| {
        let path = shown(&String::from_utf8_lossy(&path));
        ImageError::malformed(what, format!("entry \"{path}\" {reason}"))
    };
    if path.first() == Some(&b'/') {
        return Err(refuse("has an absolute path"));
    }
    let mut parts =
        path.split(|byte| *byte == b'/').filter(|part| !part.is_empty() && *part != b".");
    if parts.clone().any(|part| part == b"..") {
        return Err(refuse("leaves the archive"));
    }
    if parts.next() != Some(b"disk") {
        return Ok(Seen::Ignored);
    }
    let kind = entry.header().entry_type();
    match (parts.next(), parts.next()) {
        (None, _) if kind == EntryType::Directory => Ok(Seen::Ignored),
        (None, _) => Err(refuse("is no directory")),
        (Some(_), Some(_)) => Err(refuse("is deeper than one level under disk/")),
        (Some(_), None) if kind == EntryType::Directory => {
            Err(refuse("is a directory under disk/"))
        }
        (Some(name), None) if name.starts_with(b".wh.") => {
            Err(refuse("removes a file of an earlier layer, which is not supported"))
        }
        (Some(name), None) if matches!(kind, EntryType::Regular | EntryType::Continuous) => {
            Ok(Seen::Disk(String::from_utf8_lossy(name).into_owned()))
        }
        (Some(_), None) => Err(refuse("is no regular file")),
    }
}

/// Bounds what the archive reader takes for the headers of one entry.
struct Metered<R> {
    inner: R,
    allowance: Rc<Cell<Option<u64>>>,
    taken: Rc<Cell<u64>>,
}

impl<R: Read> Read for Metered<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buffer)?;
        let bytes = u64::try_from(count).unwrap_or(u64::MAX);
        self.taken.set(self.taken.get().saturating_add(bytes));
        if let Some(left) = self.allowance.get() {
            let left = left.checked_sub(bytes).ok_or_else(|| io::Error::other(Stop::Headers))?;
            self.allowance.set(Some(left));
        }
        Ok(count)
    }
}

#[cfg(test)]
mod tests;
