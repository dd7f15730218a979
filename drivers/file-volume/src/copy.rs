//! Copies of disk images: by sharing blocks where the filesystem can, else of the parts that are not holes.

use std::{fs::File, io, os::unix::fs::FileExt};

use drivers_api::{Context, Progress};
use rustix::{
    fs::{SeekFrom, copy_file_range, ioctl_ficlone, seek},
    io::Errno,
};

/// How much is copied between two looks at the caller's context.
const PIECE: u64 = 8 << 20;
/// How much is copied through memory at once, where the kernel cannot copy between the two filesystems.
const BUFFER: usize = 1 << 20;

/// Makes `to`, an empty file, a copy of `length` bytes of `from`. Ends early, with an error of the contract, when the
/// context ends. Nothing is synced.
pub(crate) fn copy(
    cx: &Context,
    from: &File,
    to: &File,
    length: u64,
) -> io::Result<drivers_api::Result<()>> {
    if share(from, to) {
        return Ok(Ok(()));
    }
    to.set_len(length)?;
    let mut at = 0;
    while at < length {
        let (start, end) = next_data(from, at, length)?;
        at = start;
        while at < end {
            if let Err(ended) = host::bound::check(cx, "copy", "image") {
                return Ok(Err(ended));
            }
            let copied = copy_piece(from, to, at, (end - at).min(PIECE))?;
            if copied == 0 {
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the image was cut off"));
            }
            at += copied;
            cx.report(&Progress::new("copy", "copying the image").with_amount(at, Some(length)));
        }
    }
    Ok(Ok(()))
}

/// Makes `to` share the blocks of `from`; false when the filesystem cannot.
pub(crate) fn share(from: &File, to: &File) -> bool {
    ioctl_ficlone(to, from).is_ok()
}

/// The next part from `at` on that is no hole; empty at the end.
fn next_data(file: &File, at: u64, length: u64) -> io::Result<(u64, u64)> {
    let start = match seek(file, SeekFrom::Data(at)) {
        Ok(start) => start.min(length),
        // No data from here on.
        Err(Errno::NXIO) => return Ok((length, length)),
        // A filesystem without the notion: all is data.
        Err(Errno::INVAL | Errno::OPNOTSUPP) => return Ok((at, length)),
        Err(error) => return Err(error.into()),
    };
    match seek(file, SeekFrom::Hole(start)) {
        Ok(end) => Ok((start, end.min(length))),
        Err(error) => Err(error.into()),
    }
}

fn copy_piece(from: &File, to: &File, at: u64, most: u64) -> io::Result<u64> {
    let (mut from_at, mut to_at) = (at, at);
    let most = usize::try_from(most).unwrap_or(usize::MAX);
    match copy_file_range(from, Some(&mut from_at), to, Some(&mut to_at), most) {
        Ok(copied) => Ok(u64::try_from(copied).unwrap_or(u64::MAX)),
        Err(Errno::XDEV | Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => {
            let mut buffer = vec![0; most.min(BUFFER)];
            let read = from.read_at(&mut buffer, at)?;
            buffer.truncate(read);
            to.write_all_at(&buffer, at)?;
            Ok(u64::try_from(read).unwrap_or(u64::MAX))
        }
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    fn sparse(dir: &std::path::Path) -> File {
        let file = tempfile::tempfile_in(dir).unwrap();
        file.set_len(64 << 20).unwrap();
        file.write_all_at(b"head", 0).unwrap();
        file.write_all_at(&[7; 5_000], 40 << 20).unwrap();
        file
    }

    fn same(a: &File, b: &File) {
        for at in [0, 40 << 20, (64 << 20) - 4096] {
            let (mut one, mut two) = ([0; 4096], [0; 4096]);
            a.read_exact_at(&mut one, at).unwrap();
            b.read_exact_at(&mut two, at).unwrap();
            assert_eq!(one, two);
        }
        let copied = b.metadata().unwrap();
        assert_eq!(copied.len(), 64 << 20);
        assert!(copied.blocks() * 512 < 1 << 20, "holes stay holes");
    }

    #[test]
    fn a_copy_has_the_data_and_the_holes() {
        let from = sparse(std::path::Path::new("/var/tmp"));
        // Within one filesystem, and onto another where the kernel does not copy.
        for dir in ["/var/tmp", "/dev/shm"] {
            let to = tempfile::tempfile_in(dir).unwrap();
            copy(&Context::new(), &from, &to, 64 << 20).unwrap().unwrap();
            same(&from, &to);
        }
    }

    #[test]
    fn a_copy_ends_when_the_caller_cancels() {
        let cx = Context::new();
        cx.cancel().cancel();
        let from = sparse(std::path::Path::new("/dev/shm"));
        let to = tempfile::tempfile_in("/var/tmp").unwrap();
        let error = copy(&cx, &from, &to, 64 << 20).unwrap().unwrap_err();
        assert_eq!(error.kind(), drivers_api::ErrorKind::Cancelled);
    }
}
