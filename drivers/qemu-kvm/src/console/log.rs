//! The serial log on disk: what the guest wrote, in two files of bounded size.

use std::{
    fs::{self, File, OpenOptions},
    io::{Read, Seek, SeekFrom, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use host::files::FileError;

/// The log: `serial.log`, and `serial.log.1` with what came before it.
#[derive(Debug)]
pub(crate) struct SerialLog {
    path: PathBuf,
    limit: u64,
}

impl SerialLog {
    /// The log at `path`, of which about `limit` bytes are kept.
    pub(crate) const fn new(path: PathBuf, limit: u64) -> Self {
        Self { path, limit }
    }

    fn older(&self) -> PathBuf {
        let mut name = self.path.clone().into_os_string();
        name.push(".1");
        name.into()
    }

    /// Adds bytes; the older half goes when the file is full.
    pub(crate) fn append(&self, bytes: &[u8]) -> Result<(), FileError> {
        let half = (self.limit / 2).max(1);
        for part in bytes.chunks(usize::try_from(half).unwrap_or(usize::MAX)) {
            let fail = || FileError::of("write", &self.path);
            let mut file = OpenOptions::new()
                .append(true)
                .create(true)
                .mode(0o600)
                .custom_flags(libc::O_NOFOLLOW)
                .open(&self.path)
                .map_err(fail())?;
            let length = file.metadata().map_err(fail())?.len();
            if length + u64::try_from(part.len()).unwrap_or(0) > half && length > 0 {
                fs::rename(&self.path, self.older()).map_err(fail())?;
                file = host::files::create_new(&self.path)?;
            }
            file.write_all(part).map_err(fail())?;
        }
        Ok(())
    }

    /// The last `most` bytes.
    pub(crate) fn tail(&self, most: usize) -> Result<Vec<u8>, FileError> {
        let newer = tail_of(&self.path, most)?;
        let missing = most.saturating_sub(newer.len());
        if missing == 0 {
            return Ok(newer);
        }
        let mut all = tail_of(&self.older(), missing)?;
        all.extend(newer);
        Ok(all)
    }
}

fn tail_of(path: &Path, most: usize) -> Result<Vec<u8>, FileError> {
    let fail = || FileError::of("read", path);
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let mut file: File = match OpenOptions::new().read(true).custom_flags(flags).open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(fail()(error)),
    };
    let most = u64::try_from(most).unwrap_or(u64::MAX);
    let length = file.metadata().map_err(fail())?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(most))).map_err(fail())?;
    let mut bytes = Vec::new();
    file.take(most).read_to_end(&mut bytes).map_err(fail())?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_keeps_the_end_within_its_bound() {
        let dir = tempfile::tempdir().unwrap();
        let log = SerialLog::new(dir.path().join("serial.log"), 1000);
        assert_eq!(log.tail(100).unwrap(), b"");
        let mut all = Vec::new();
        for turn in 0..300 {
            let line = format!("line {turn}\n");
            log.append(line.as_bytes()).unwrap();
            all.extend_from_slice(line.as_bytes());
        }
        let size: u64 = fs::read_dir(dir.path())
            .unwrap()
            .map(|entry| entry.unwrap().metadata().unwrap().len())
            .sum();
        assert!(size <= 1000, "{size}");
        assert_eq!(log.tail(500).unwrap(), all[all.len() - 500..]);
        assert_eq!(log.tail(3).unwrap(), all[all.len() - 3..]);
        log.append(&[b'x'; 5000]).unwrap();
        assert_eq!(log.tail(600).unwrap(), [b'x'; 600]);
    }
}
