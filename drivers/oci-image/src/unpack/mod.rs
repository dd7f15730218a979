//! From checked blobs to the files of an image. Blocking code: it runs off the executor and looks at a stop flag for each
//! piece.
//!
//! Only blobs whose digest was checked are unpacked. What is unpacked counts against one budget an image, the parts that
//! are thrown away too.

pub(crate) mod layer;
mod sparse;

use std::{
    fs::File,
    io::{self, BufReader, Read},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use host::files::FileError;

pub(crate) use self::sparse::SparseFile;
use crate::{
    error::{ImageError, Result},
    fetch::blob::BUFFER,
    media::Packing,
};

/// The largest window of a zstd frame, as a power of two: 32 MiB, what level 20 uses (RFC 8878 section 3.1.1.1.2 asks
/// decoders for 8 MiB at least). It bounds the memory of one unpacking.
const ZSTD_WINDOW_LOG: u32 = 25;

/// How much an image may still expand.
#[derive(Debug)]
pub(crate) struct Budget {
    limit: u64,
    left: u64,
}

impl Budget {
    pub(crate) const fn new(limit: u64) -> Self {
        Self { limit, left: limit }
    }

    /// Takes bytes off the budget.
    pub(crate) fn take(&mut self, bytes: u64) -> io::Result<()> {
        match self.left.checked_sub(bytes) {
            Some(left) => {
                self.left = left;
                Ok(())
            }
            None => Err(io::Error::other(Stop::TooLarge(self.limit))),
        }
    }

    pub(crate) const fn left(&self) -> u64 {
        self.left
    }
}

/// Why reading ended early. Travels through libraries inside an `io::Error`.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Stop {
    #[error("too large: more than {0} bytes when unpacked")]
    TooLarge(u64),
    #[error("nobody waits for it any more")]
    Abandoned,
    #[error("more than 1 MiB of headers for one entry")]
    Headers,
}

/// Raised when nobody waits for the image any more.
pub(crate) type StopFlag = Arc<AtomicBool>;

/// Reads what a blob holds, unpacked, and takes each byte off the budget.
pub(crate) struct Unpacked<'a> {
    inner: Box<dyn Read + 'a>,
    budget: &'a mut Budget,
    stop: StopFlag,
}

impl<'a> Unpacked<'a> {
    pub(crate) fn new(
        blob: &'a File,
        packing: Packing,
        budget: &'a mut Budget,
        stop: StopFlag,
    ) -> io::Result<Self> {
        let input = BufReader::with_capacity(BUFFER, blob);
        let inner: Box<dyn Read + 'a> = match packing {
            Packing::Plain => Box::new(input),
            // Checks the CRC and the length in the trailer of each member.
            Packing::Gzip => Box::new(flate2::bufread::MultiGzDecoder::new(input)),
            Packing::Zstd => {
                let mut decoder = zstd::stream::read::Decoder::with_buffer(input)?;
                decoder.window_log_max(ZSTD_WINDOW_LOG)?;
                Box::new(decoder)
            }
        };
        Ok(Self { inner, budget, stop })
    }
}

impl Read for Unpacked<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.stop.load(Ordering::Relaxed) {
            return Err(io::Error::other(Stop::Abandoned));
        }
        let count = self.inner.read(buffer)?;
        self.budget.take(u64::try_from(count).unwrap_or(u64::MAX))?;
        Ok(count)
    }
}

/// The error for reading a blob: what a library says about the bytes is the publisher's fault, what the kernel says is not.
pub(crate) fn read_error(what: &str, path: &Path, error: io::Error) -> ImageError {
    if let Some(stop) = error.get_ref().and_then(|inner| inner.downcast_ref::<Stop>()) {
        return match stop {
            Stop::TooLarge(limit) => ImageError::TooLarge { what: what.to_owned(), limit: *limit },
            Stop::Abandoned => ImageError::Abandoned,
            Stop::Headers => ImageError::malformed(what, stop.to_string()),
        };
    }
    if error.raw_os_error().is_some() {
        return FileError::of("read", path)(error).into();
    }
    let text = error.to_string();
    // The library's own words for ZSTD_error_frameParameter_windowTooLarge.
    let text = if text.contains("too much memory") || text.contains("window") {
        format!(
            "unsupported window: more than {} MiB are asked for",
            (1_u64 << ZSTD_WINDOW_LOG) >> 20
        )
    } else {
        crate::error::shown(&text)
    };
    ImageError::malformed(what, text)
}

/// Unpacks a blob that is one file.
pub(crate) fn unpack_file(
    what: &str,
    blob: &Path,
    packing: Packing,
    target: &Path,
    budget: &mut Budget,
    stop: &StopFlag,
) -> Result<String> {
    let file = File::open(blob).map_err(FileError::of("open", blob))?;
    let mut input = Unpacked::new(&file, packing, budget, Arc::clone(stop))
        .map_err(|error| read_error(what, blob, error))?;
    let mut output = SparseFile::create(target)?;
    copy(what, blob, &mut input, &mut output)?;
    output.finish()
}

/// Copies in pieces.
pub(crate) fn copy(
    what: &str,
    path: &Path,
    input: &mut impl Read,
    output: &mut SparseFile,
) -> Result<()> {
    let mut buffer = vec![0_u8; BUFFER];
    loop {
        let count = input.read(&mut buffer).map_err(|error| read_error(what, path, error))?;
        match buffer.get(..count) {
            Some(bytes) if !bytes.is_empty() => output.write(bytes)?,
            _ => return Ok(()),
        }
    }
}
