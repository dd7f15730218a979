//! Collection of what is no longer used.

use std::{sync::Arc, time::SystemTime};

use drivers_api::{CollectReport, Digest, ImageRef};
use host::{
    fault,
    files::{self, FileError},
};

use crate::{
    cache::{Cache, Cached, allocated, busy, names, staging},
    error::Result,
};

/// One content with its references.
struct Candidate<'a> {
    key: String,
    bytes: u64,
    refs: Vec<&'a Cached>,
    last_used: SystemTime,
    kept: bool,
}

/// Removes the least recently used images that are not in `keep` until the cache takes at most `limit` bytes, and
/// everything that interrupted pulls and deletes left.
pub(crate) fn collect(cache: &Arc<Cache>, limit: u64, keep: &[ImageRef]) -> Result<CollectReport> {
    let mut report = CollectReport::new(Vec::new(), 0);
    let mut trash = Vec::new();
    {
        let _held = cache.catalogue();
        // Everything is read before anything is removed: what cannot be read destroys nothing.
        let all = cache.all()?;
        let mut candidates = candidates(cache, &all, keep)?;
        candidates.sort_by_key(|candidate| candidate.last_used);
        let mut used: u64 = candidates.iter().map(|candidate| candidate.bytes).sum();
        for candidate in candidates {
            let orphan = candidate.refs.is_empty();
            if candidate.kept || (!orphan && used <= limit) || is_busy(cache, &candidate)? {
                continue;
            }
            for cached in &candidate.refs {
                let reference = &cached.reference.reference;
                let path = cache.reference(reference);
                files::remove_file(&path)?;
                files::sync_parent(&path)?;
                report.removed.push(reference.clone());
            }
            fault::point("image.collect.references-removed")?;
            trash.extend(staging::take_away(cache, &cache.content(&candidate.key))?);
            used = used.saturating_sub(candidate.bytes);
            report.freed_bytes = report.freed_bytes.saturating_add(candidate.bytes);
        }
        dangling(cache)?;
    }
    for dir in trash {
        dir.remove()?;
    }
    report.freed_bytes = report.freed_bytes.saturating_add(partials(cache)?);
    Ok(report)
}

fn candidates<'a>(
    cache: &Cache,
    all: &'a [Cached],
    keep: &[ImageRef],
) -> Result<Vec<Candidate<'a>>> {
    let mut found = Vec::new();
    for key in cache.keys()? {
        let refs: Vec<&Cached> =
            all.iter().filter(|cached| cached.reference.content == key).collect();
        let last_used =
            refs.iter().map(|cached| cached.last_used).max().unwrap_or(SystemTime::UNIX_EPOCH);
        let kept = refs.iter().any(|cached| keep.contains(&cached.reference.reference));
        let bytes = allocated(&cache.content(&key))?;
        found.push(Candidate { key, bytes, refs, last_used, kept });
    }
    Ok(found)
}

fn is_busy(cache: &Cache, candidate: &Candidate<'_>) -> Result<bool> {
    let pulled = cache.is_pinned(&candidate.key)
        || candidate
            .refs
            .iter()
            .any(|cached| cache.pulls.is_flying(cached.reference.reference.as_str()));
    Ok(pulled || busy::is_read(&cache.content(&candidate.key))?)
}

/// Removes references whose content is gone, journals of pulls that have ended, and half-written records. The catalogue
/// must be held: nobody writes a record now.
fn dangling(cache: &Cache) -> Result<()> {
    let mut whole: Vec<String> = Vec::new();
    for cached in cache.all()? {
        let reference = &cached.reference.reference;
        let path = cache.reference(reference);
        whole.extend(path.file_name().map(|name| name.to_string_lossy().into_owned()));
    }
    for key in cache.pulls.flying() {
        let Ok(reference) = key.parse::<ImageRef>() else { continue };
        let path = cache.reference(&reference).with_extension("pull");
        whole.extend(path.file_name().map(|name| name.to_string_lossy().into_owned()));
    }
    let dir = cache.root().join("refs");
    for name in names(&dir)? {
        if !whole.contains(&name) {
            files::remove_file(&dir.join(name))?;
        }
    }
    Ok(())
}

/// Removes downloads that nobody goes on with; answers the bytes.
fn partials(cache: &Cache) -> Result<u64> {
    let mut freed = 0_u64;
    for name in names(&cache.root().join("partial"))? {
        let Ok(digest) = format!("sha256:{name}").parse() else {
            files::remove_file(&cache.root().join("partial").join(name))?;
            continue;
        };
        // Held while the file goes, so that no download of this moment writes to a file without a name.
        if let Ok(_held) = cache.blob_lock(&digest).try_lock_owned() {
            freed = freed.saturating_add(remove_partial(cache, &digest)?);
        }
    }
    Ok(freed)
}

/// Removes one download, whose lock must be held; answers the bytes.
pub(crate) fn remove_partial(cache: &Cache, digest: &Digest) -> Result<u64> {
    let path = cache.partial(digest);
    let bytes = match std::fs::symlink_metadata(&path) {
        Ok(found) => found.len(),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => 0,
        Err(error) => return Err(FileError::of("look at", &path)(error).into()),
    };
    files::remove_file(&path)?;
    Ok(bytes)
}
