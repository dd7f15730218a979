//! Writes a file with holes where the bytes are zero, hashed while it is written.

use std::{
    fs::File,
    io::{Seek, SeekFrom, Write},
    path::{Path, PathBuf},
};

use host::files::{self, FileError};
use sha2::{Digest as _, Sha256};

use crate::{error::Result, fetch::blob::hex};

/// The least run of zeros that becomes a hole.
const HOLE: usize = 64 << 10;

/// A file that is being written. It must not be there before.
#[derive(Debug)]
pub(crate) struct SparseFile {
    file: File,
    path: PathBuf,
    hash: Sha256,
    length: u64,
}

impl SparseFile {
    pub(crate) fn create(path: &Path) -> Result<Self> {
        let file = files::create_new(path)?;
        Ok(Self { file, path: path.to_owned(), hash: Sha256::new(), length: 0 })
    }

    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.hash.update(bytes);
        for piece in bytes.chunks(HOLE) {
            let length = u64::try_from(piece.len()).unwrap_or(u64::MAX);
            if piece.len() == HOLE && piece.iter().all(|byte| *byte == 0) {
                let step = i64::try_from(length).unwrap_or_default();
                self.file
                    .seek(SeekFrom::Current(step))
                    .map_err(FileError::of("seek", &self.path))?;
            } else {
                self.file.write_all(piece).map_err(FileError::of("write", &self.path))?;
            }
            self.length = self.length.saturating_add(length);
        }
        Ok(())
    }

    /// Sets the length, which a hole at the end needs; answers the digest.
    pub(crate) fn finish(self) -> Result<String> {
        self.file.set_len(self.length).map_err(FileError::of("write", &self.path))?;
        Ok(hex(&self.hash.finalize()))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn zeros_become_holes_and_the_bytes_stay_the_same() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        let mut bytes = vec![0_u8; 4 << 20];
        bytes[5] = 1;
        bytes[3 << 20] = 2;
        let mut file = SparseFile::create(&path).unwrap();
        for piece in bytes.chunks(256 << 10) {
            file.write(piece).unwrap();
        }
        assert_eq!(file.finish().unwrap(), hex(&Sha256::digest(&bytes)));
        assert_eq!(std::fs::read(&path).unwrap(), bytes);
        assert!(std::fs::metadata(&path).unwrap().blocks() * 512 < 1 << 20, "holes take no space");
    }
}
