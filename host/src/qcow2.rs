//! Reads the header of a qcow2 file, so that nothing else opens a file whose header was not checked.
//!
//! A qcow2 header may name other files of the host: a backing file, an external data file. A tool or VMM that opens the
//! image opens those too and hands their bytes to a guest. So we parse the header first, refuse what we do not know, and
//! let each caller say which other files it allows: [`Qcow2Info::check_standalone`] allows none,
//! [`Qcow2Info::check_overlay`] the one that the caller made itself.
//!
//! Only the header cluster is read. What the tables behind it say stays the reader's matter: they address the image's own
//! file and nothing else.
//!
//! Source of all offsets, bits and limits: `docs/interop/qcow2.txt` and `block/qcow2.h` of QEMU.

use std::{fs::File, io, os::unix::fs::FileExt};

/// `QFI\xfb`, the first four bytes.
pub const MAGIC: [u8; 4] = *b"QFI\xfb";
/// The largest virtual size that we take: what a volume can have at most (1 PiB).
pub const MAX_VIRTUAL_SIZE: u64 = 1 << 50;

/// The least and greatest `cluster_bits` (`MIN_CLUSTER_BITS`, `MAX_CLUSTER_BITS`).
const CLUSTER_BITS: std::ops::RangeInclusive<u32> = 9..=21;
/// `QCOW_MAX_L1_SIZE`, in bytes.
const MAX_L1_BYTES: u64 = 32 << 20;
/// `QCOW_MAX_REFTABLE_SIZE`, in bytes.
const MAX_REFCOUNT_TABLE_BYTES: u64 = 8 << 20;
/// `QCOW_MAX_SNAPSHOTS`.
const MAX_SNAPSHOTS: u32 = 65_536;
/// The length of a version 2 header.
const V2_HEADER: usize = 72;
/// The least length of a version 3 header.
const V3_HEADER: usize = 104;
/// The longest name of a backing file.
const MAX_BACKING_NAME: usize = 1023;
/// How much is read at first: all that a usual header needs.
const FIRST_READ: usize = 4096;

/// Incompatible feature: the refcounts may be wrong, a repair is due.
const DIRTY: u64 = 1 << 0;
/// Incompatible feature: a reader found the image corrupt.
const CORRUPT: u64 = 1 << 1;
/// Incompatible feature: guest data is in another file.
const DATA_FILE: u64 = 1 << 2;
/// Incompatible feature: a compression type other than deflate.
const COMPRESSION_TYPE: u64 = 1 << 3;
/// Incompatible feature: L2 entries with subclusters.
const EXTENDED_L2: u64 = 1 << 4;
/// What we know of them.
const KNOWN_INCOMPATIBLE: u64 = DIRTY | CORRUPT | DATA_FILE | COMPRESSION_TYPE | EXTENDED_L2;

/// Header extension: the format of the backing file.
const EXT_BACKING_FORMAT: u32 = 0xE279_2ACA;
/// Header extension: where the key material of a LUKS-encrypted image is.
const EXT_CRYPTO: u32 = 0x0537_BE77;
/// Header extension: the name of the external data file.
const EXT_DATA_FILE: u32 = 0x4441_5441;

/// Why a file is no qcow2 image that we take. The text names the feature, never a byte of the file's content.
#[derive(Debug, thiserror::Error)]
pub enum Qcow2Error {
    /// The file cannot be read.
    #[error("the qcow2 header cannot be read")]
    Read(#[source] io::Error),
    /// The file is something else.
    #[error("it is no qcow2 image: the magic number is missing")]
    NoQcow2,
    /// The file ends within its header.
    #[error("the qcow2 header is cut off")]
    Truncated,
    /// A version other than 2 and 3.
    #[error("qcow2 version {0} is unknown")]
    Version(u32),
    /// A field has a value that no writer of qcow2 makes.
    #[error("the qcow2 header is malformed: {0}")]
    Malformed(&'static str),
    /// Feature bits that we do not know: what they mean for the host cannot be judged.
    #[error("the qcow2 image needs unknown features (bits {0:#x})")]
    UnknownFeatures(u64),
    /// The image uses a feature that is not allowed here.
    #[error("the qcow2 image has {0}, which is not allowed here")]
    Refused(&'static str),
}

/// Another file that a header names as the one below it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackingFile {
    /// Its name as it stands in the header. Hostile: compare it, never open or print it.
    pub name: Vec<u8>,
    /// Its format as it stands in the header; without one a reader would probe, which is never safe.
    pub format: Option<Vec<u8>>,
}

/// What a qcow2 header says.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Qcow2Info {
    /// 2 or 3.
    pub version: u32,
    /// The size that a guest sees, in bytes.
    pub virtual_size: u64,
    /// The cluster size is two to the power of this.
    pub cluster_bits: u32,
    /// How many entries the first-level table has.
    pub l1_entries: u32,
    /// Where the first-level table is in the file, in bytes.
    pub l1_offset: u64,
    /// How many internal snapshots it has.
    pub snapshots: u32,
    /// Whether guest data is encrypted.
    pub encrypted: bool,
    /// Whether guest data, or a part of it, is in another file.
    pub external_data: bool,
    /// The file below it, if it names one.
    pub backing: Option<BackingFile>,
    /// The incompatible feature bits; all of them are known ones.
    pub incompatible: u64,
    /// The auto-clear feature bits.
    pub autoclear: u64,
}

impl Qcow2Info {
    /// The size of a cluster, in bytes.
    #[must_use]
    pub const fn cluster_size(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Whether the image was left in a state that needs a repair.
    #[must_use]
    pub const fn is_dirty(&self) -> bool {
        self.incompatible & DIRTY != 0
    }

    /// Whether a reader has marked the image as corrupt.
    #[must_use]
    pub const fn is_corrupt(&self) -> bool {
        self.incompatible & CORRUPT != 0
    }

    /// Whether its L2 entries have subclusters.
    #[must_use]
    pub const fn has_extended_l2(&self) -> bool {
        self.incompatible & EXTENDED_L2 != 0
    }

    /// How many bytes of the disk one entry of the first-level table stands for.
    #[must_use]
    pub const fn bytes_per_l1_entry(&self) -> u64 {
        bytes_per_l1_entry(self.cluster_bits, self.has_extended_l2())
    }

    /// Refuses all but a whole, clean image of one file: no backing file, no data file, no encryption, no internal
    /// snapshot, neither dirty nor corrupt. What an image from outside must be.
    ///
    /// # Errors
    /// [`Qcow2Error::Refused`] with the first feature that is not allowed.
    pub fn check_standalone(&self) -> Result<(), Qcow2Error> {
        if self.backing.is_some() {
            return Err(Qcow2Error::Refused("a backing file"));
        }
        self.check_contained()?;
        if self.snapshots != 0 {
            return Err(Qcow2Error::Refused("internal snapshots"));
        }
        if self.is_dirty() {
            return Err(Qcow2Error::Refused("the dirty bit set"));
        }
        Ok(())
    }

    /// Refuses all but an image over exactly this backing file, named byte for byte and with its format: the check of an
    /// overlay that we made ourselves and that a VMM has since written to.
    ///
    /// # Errors
    /// [`Qcow2Error::Refused`] with the first feature that is not allowed.
    pub fn check_overlay(&self, name: &str, format: &str) -> Result<(), Qcow2Error> {
        let Some(backing) = &self.backing else {
            return Err(Qcow2Error::Refused("no backing file where one belongs"));
        };
        if backing.name != name.as_bytes() {
            return Err(Qcow2Error::Refused("another backing file than its own"));
        }
        if backing.format.as_deref() != Some(format.as_bytes()) {
            return Err(Qcow2Error::Refused("another backing format than its own"));
        }
        self.check_contained()
    }

    /// Refuses an image whose data is not all in the clear in this file and the backing file, or that is corrupt.
    ///
    /// # Errors
    /// [`Qcow2Error::Refused`] with the first feature that is not allowed.
    pub fn check_contained(&self) -> Result<(), Qcow2Error> {
        if self.external_data {
            return Err(Qcow2Error::Refused("an external data file"));
        }
        if self.encrypted {
            return Err(Qcow2Error::Refused("encryption"));
        }
        if self.is_corrupt() {
            return Err(Qcow2Error::Refused("the corrupt bit set"));
        }
        Ok(())
    }
}

/// How many bytes of the disk one entry of the first-level table stands for: a cluster of L2 entries, each a cluster.
const fn bytes_per_l1_entry(cluster_bits: u32, extended_l2: bool) -> u64 {
    let entry_bits = if extended_l2 { 4 } else { 3 };
    1 << (2 * cluster_bits - entry_bits)
}

/// Reads and checks the header of an open file. The position of the file is not moved; a file that another process writes
/// to may be read (a VMM writes its header as one sector).
///
/// # Errors
/// [`Qcow2Error`]; what is allowed beyond a sane header is the caller's to say.
pub fn inspect(file: &File) -> Result<Qcow2Info, Qcow2Error> {
    let length = file.metadata().map_err(Qcow2Error::Read)?.len();
    let mut bytes = read_head(file, FIRST_READ)?;
    match parse(&bytes, length) {
        // Nearly all headers end within the first pages; the rest is read up to the end of the first cluster.
        Err(Qcow2Error::Truncated) if bytes.len() == FIRST_READ => {
            let bits = u32_at(&bytes, 20)?;
            if !CLUSTER_BITS.contains(&bits) {
                return Err(Qcow2Error::Malformed("cluster_bits is out of bounds"));
            }
            bytes = read_head(file, 1 << bits)?;
            parse(&bytes, length)
        }
        answer => answer,
    }
}

fn read_head(file: &File, most: usize) -> Result<Vec<u8>, Qcow2Error> {
    let mut bytes = vec![0; most];
    let mut filled = 0;
    while let Some(rest) = bytes.get_mut(filled..).filter(|rest| !rest.is_empty()) {
        let at = u64::try_from(filled).unwrap_or(u64::MAX);
        match file.read_at(rest, at) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(Qcow2Error::Read(error)),
        }
    }
    bytes.truncate(filled);
    Ok(bytes)
}

/// Parses a header from the first bytes of a file that is `file_length` bytes long. Never panics, whatever the bytes are.
///
/// # Errors
/// [`Qcow2Error::Truncated`] when the header goes beyond `bytes`, else as [`inspect`].
pub fn parse(bytes: &[u8], file_length: u64) -> Result<Qcow2Info, Qcow2Error> {
    match bytes.get(..4) {
        Some(magic) if magic == MAGIC => {}
        _ => return Err(Qcow2Error::NoQcow2),
    }
    let version = u32_at(bytes, 4)?;
    if !(2..=3).contains(&version) {
        return Err(Qcow2Error::Version(version));
    }
    let cluster_bits = u32_at(bytes, 20)?;
    if !CLUSTER_BITS.contains(&cluster_bits) {
        return Err(Qcow2Error::Malformed("cluster_bits is out of bounds"));
    }
    let features = Features::parse(bytes, version, cluster_bits)?;
    let mut info = Qcow2Info {
        version,
        virtual_size: u64_at(bytes, 24)?,
        cluster_bits,
        l1_entries: u32_at(bytes, 36)?,
        l1_offset: u64_at(bytes, 40)?,
        snapshots: u32_at(bytes, 60)?,
        encrypted: match u32_at(bytes, 32)? {
            0 => false,
            1 | 2 => true,
            _ => return Err(Qcow2Error::Malformed("the encryption method is unknown")),
        },
        external_data: features.incompatible & DATA_FILE != 0,
        backing: None,
        incompatible: features.incompatible,
        autoclear: features.autoclear,
    };
    check_tables(&info, bytes, file_length)?;
    let backing = backing_name(bytes, &info, features.header_length)?;
    let end = backing.map_or_else(
        || usize::try_from(info.cluster_size()).unwrap_or(usize::MAX),
        |(start, _)| start,
    );
    let extensions = Extensions::parse(bytes, features.header_length, end)?;
    info.external_data |= extensions.data_file;
    info.encrypted |= extensions.crypto;
    info.backing = backing
        .map(|(_, name)| BackingFile { name: name.to_owned(), format: extensions.backing_format });
    Ok(info)
}

/// The version 3 part of the header.
struct Features {
    incompatible: u64,
    autoclear: u64,
    header_length: usize,
}

impl Features {
    fn parse(bytes: &[u8], version: u32, cluster_bits: u32) -> Result<Self, Qcow2Error> {
        if version == 2 {
            return Ok(Self { incompatible: 0, autoclear: 0, header_length: V2_HEADER });
        }
        let incompatible = u64_at(bytes, 72)?;
        if incompatible & !KNOWN_INCOMPATIBLE != 0 {
            return Err(Qcow2Error::UnknownFeatures(incompatible & !KNOWN_INCOMPATIBLE));
        }
        if u32_at(bytes, 96)? > 6 {
            return Err(Qcow2Error::Malformed("refcount_order is out of bounds"));
        }
        let header_length = usize::try_from(u32_at(bytes, 100)?).unwrap_or(usize::MAX);
        if header_length < V3_HEADER
            || header_length > (1 << cluster_bits)
            || !header_length.is_multiple_of(8)
        {
            return Err(Qcow2Error::Malformed("header_length is out of bounds"));
        }
        // Byte 104, where the header reaches that far: 0 is deflate, 1 is zstd.
        let compression =
            if header_length > V3_HEADER { field::<1>(bytes, V3_HEADER)? } else { [0] };
        if compression > [1] || (compression != [0]) != (incompatible & COMPRESSION_TYPE != 0) {
            return Err(Qcow2Error::Malformed("the compression type is unknown"));
        }
        Ok(Self { incompatible, autoclear: u64_at(bytes, 88)?, header_length })
    }
}

/// Checks sizes and offsets of the tables that the header names against the format's limits and the file's length.
fn check_tables(info: &Qcow2Info, bytes: &[u8], file_length: u64) -> Result<(), Qcow2Error> {
    let cluster = info.cluster_size();
    if info.virtual_size > MAX_VIRTUAL_SIZE {
        return Err(Qcow2Error::Malformed("the virtual size is beyond 1 PiB"));
    }
    let l1_bytes = u64::from(info.l1_entries) * 8;
    if l1_bytes > MAX_L1_BYTES {
        return Err(Qcow2Error::Malformed("the first-level table is too large"));
    }
    if u64::from(info.l1_entries) < info.virtual_size.div_ceil(info.bytes_per_l1_entry()) {
        return Err(Qcow2Error::Malformed(
            "the first-level table is too small for the virtual size",
        ));
    }
    let in_file = |offset: u64, length: u64| {
        offset.is_multiple_of(cluster)
            && offset >= cluster
            && offset.checked_add(length).is_some_and(|end| end <= file_length.max(cluster))
    };
    if info.l1_entries != 0 && !in_file(info.l1_offset, l1_bytes) {
        return Err(Qcow2Error::Malformed("the first-level table is not within the file"));
    }
    let refcount_bytes = u64::from(u32_at(bytes, 56)?) * cluster;
    if refcount_bytes == 0 || refcount_bytes > MAX_REFCOUNT_TABLE_BYTES {
        return Err(Qcow2Error::Malformed("the refcount table's size is out of bounds"));
    }
    // Its first entry must be there; a short file may end within the table's last cluster.
    if !in_file(u64_at(bytes, 48)?, 8) {
        return Err(Qcow2Error::Malformed("the refcount table is not within the file"));
    }
    if info.snapshots > MAX_SNAPSHOTS {
        return Err(Qcow2Error::Malformed("there are too many snapshots"));
    }
    Ok(())
}

/// The offset and the bytes of the backing file's name.
fn backing_name<'a>(
    bytes: &'a [u8],
    info: &Qcow2Info,
    header_length: usize,
) -> Result<Option<(usize, &'a [u8])>, Qcow2Error> {
    let offset = u64_at(bytes, 8)?;
    if offset == 0 {
        return Ok(None);
    }
    let length = usize::try_from(u32_at(bytes, 16)?).unwrap_or(usize::MAX);
    let start = usize::try_from(offset).unwrap_or(usize::MAX);
    if length == 0 || length > MAX_BACKING_NAME {
        return Err(Qcow2Error::Malformed("the backing file's name is too long or empty"));
    }
    let end = start.saturating_add(length);
    if start < header_length || u64::try_from(end).unwrap_or(u64::MAX) > info.cluster_size() {
        return Err(Qcow2Error::Malformed("the backing file's name is not in the first cluster"));
    }
    Ok(Some((start, bytes.get(start..end).ok_or(Qcow2Error::Truncated)?)))
}

/// The header extensions that matter.
#[derive(Default)]
struct Extensions {
    backing_format: Option<Vec<u8>>,
    data_file: bool,
    crypto: bool,
}

impl Extensions {
    /// Walks the extensions from `at` to the end mark, or to `end`.
    fn parse(bytes: &[u8], mut at: usize, end: usize) -> Result<Self, Qcow2Error> {
        let mut found = Self::default();
        // A type and a length need eight bytes: each turn goes on by at least that much, so the walk ends.
        while at.saturating_add(8) <= end {
            let kind = u32_at(bytes, at)?;
            let length = usize::try_from(u32_at(bytes, at + 4)?).unwrap_or(usize::MAX);
            if kind == 0 {
                break;
            }
            let start = at + 8;
            let stop = start.saturating_add(length);
            if stop > end {
                return Err(Qcow2Error::Malformed("a header extension is too long"));
            }
            match kind {
                EXT_BACKING_FORMAT => {
                    let format = bytes.get(start..stop).ok_or(Qcow2Error::Truncated)?;
                    found.backing_format = Some(format.to_owned());
                }
                EXT_DATA_FILE => found.data_file = true,
                EXT_CRYPTO => found.crypto = true,
                // Names of features, bitmaps, and what the specification lets a reader ignore.
                _ => {}
            }
            at = start.saturating_add(length.next_multiple_of(8));
        }
        Ok(found)
    }
}

fn field<const N: usize>(bytes: &[u8], at: usize) -> Result<[u8; N], Qcow2Error> {
    at.checked_add(N)
        .and_then(|end| bytes.get(at..end))
        .and_then(|part| part.try_into().ok())
        .ok_or(Qcow2Error::Truncated)
}

fn u32_at(bytes: &[u8], at: usize) -> Result<u32, Qcow2Error> {
    field(bytes, at).map(u32::from_be_bytes)
}

fn u64_at(bytes: &[u8], at: usize) -> Result<u64, Qcow2Error> {
    field(bytes, at).map(u64::from_be_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A minimal header: version 3, 64 KiB clusters, one L1 entry, four clusters long.
    fn header() -> Vec<u8> {
        let mut bytes = vec![0; 65_536];
        put(&mut bytes, 0, &MAGIC);
        put(&mut bytes, 4, &3_u32.to_be_bytes());
        put(&mut bytes, 20, &16_u32.to_be_bytes());
        put(&mut bytes, 24, &(8_u64 << 20).to_be_bytes());
        put(&mut bytes, 36, &1_u32.to_be_bytes());
        put(&mut bytes, 40, &0x30000_u64.to_be_bytes());
        put(&mut bytes, 48, &0x10000_u64.to_be_bytes());
        put(&mut bytes, 56, &1_u32.to_be_bytes());
        put(&mut bytes, 96, &4_u32.to_be_bytes());
        put(&mut bytes, 100, &104_u32.to_be_bytes());
        bytes
    }

    fn put(bytes: &mut [u8], at: usize, what: &[u8]) {
        bytes[at..at + what.len()].copy_from_slice(what);
    }

    const LENGTH: u64 = 0x40000;

    fn changed(at: usize, what: &[u8]) -> Result<Qcow2Info, Qcow2Error> {
        let mut bytes = header();
        put(&mut bytes, at, what);
        parse(&bytes, LENGTH)
    }

    #[test]
    fn a_plain_header_is_read_and_stands_alone() {
        let info = parse(&header(), LENGTH).unwrap();
        assert_eq!((info.virtual_size, info.cluster_size()), (8 << 20, 65_536));
        info.check_standalone().unwrap();
    }

    #[test]
    fn absurd_fields_are_refused() {
        for (at, what, why) in [
            (4, &1_u32.to_be_bytes()[..], "version 1"),
            (20, &63_u32.to_be_bytes()[..], "cluster_bits"),
            (20, &0_u32.to_be_bytes()[..], "cluster_bits"),
            (24, &u64::MAX.to_be_bytes()[..], "virtual size"),
            (24, &(1_u64 << 40).to_be_bytes()[..], "too small"),
            (32, &3_u32.to_be_bytes()[..], "encryption method"),
            (36, &u32::MAX.to_be_bytes()[..], "first-level table is too large"),
            (40, &u64::MAX.to_be_bytes()[..], "first-level table is not within"),
            (40, &0_u64.to_be_bytes()[..], "first-level table is not within"),
            (40, &0x40000_u64.to_be_bytes()[..], "first-level table is not within"),
            (48, &0x12345_u64.to_be_bytes()[..], "refcount table is not within"),
            (56, &u32::MAX.to_be_bytes()[..], "refcount table's size"),
            (60, &u32::MAX.to_be_bytes()[..], "snapshots"),
            (72, &(1_u64 << 40).to_be_bytes()[..], "unknown features"),
            (72, &COMPRESSION_TYPE.to_be_bytes()[..], "compression type"),
            (96, &7_u32.to_be_bytes()[..], "refcount_order"),
            (100, &8_u32.to_be_bytes()[..], "header_length"),
            (100, &u32::MAX.to_be_bytes()[..], "header_length"),
            (108, &u32::MAX.to_be_bytes()[..], "fine: no extension before its type"),
        ] {
            match changed(at, what) {
                Err(error) => assert!(error.to_string().contains(why), "{why}: {error}"),
                Ok(_) => assert!(why.starts_with("fine"), "{why} was accepted"),
            }
        }
    }

    #[test]
    fn features_that_reach_beyond_the_file_are_seen_and_refused() {
        let data_file = changed(72, &DATA_FILE.to_be_bytes()).unwrap();
        let named =
            changed(104, &[&EXT_DATA_FILE.to_be_bytes()[..], &[0, 0, 0, 4], b"/etc"].concat());
        let encrypted = changed(32, &2_u32.to_be_bytes()).unwrap();
        let corrupt = changed(72, &CORRUPT.to_be_bytes()).unwrap();
        let dirty = changed(72, &DIRTY.to_be_bytes()).unwrap();
        let snapshots = changed(60, &1_u32.to_be_bytes()).unwrap();
        for (info, feature) in [
            (data_file, "external data file"),
            (named.unwrap(), "external data file"),
            (encrypted, "encryption"),
            (corrupt, "corrupt bit"),
            (dirty, "dirty bit"),
            (snapshots, "internal snapshots"),
        ] {
            let error = info.check_standalone().unwrap_err().to_string();
            assert!(error.contains(feature), "{feature}: {error}");
        }
    }

    fn overlay(name: &str, format: Option<&str>) -> Qcow2Info {
        let mut bytes = header();
        if let Some(format) = format {
            put(&mut bytes, 104, &EXT_BACKING_FORMAT.to_be_bytes());
            put(&mut bytes, 108, &u32::try_from(format.len()).unwrap().to_be_bytes());
            put(&mut bytes, 112, format.as_bytes());
        }
        put(&mut bytes, 8, &512_u64.to_be_bytes());
        put(&mut bytes, 16, &u32::try_from(name.len()).unwrap().to_be_bytes());
        put(&mut bytes, 512, name.as_bytes());
        parse(&bytes, LENGTH).unwrap()
    }

    #[test]
    fn an_overlay_is_taken_over_its_own_base_and_format_only() {
        overlay("base", Some("qcow2")).check_overlay("base", "qcow2").unwrap();
        for (info, why) in [
            (overlay("/etc/shadow", Some("qcow2")), "another backing file"),
            (overlay("base", Some("raw")), "another backing format"),
            (overlay("base", None), "another backing format"),
            (parse(&header(), LENGTH).unwrap(), "no backing file"),
        ] {
            let error = info.check_overlay("base", "qcow2").unwrap_err().to_string();
            assert!(error.contains(why), "{why}: {error}");
        }
        let error = overlay("/etc/shadow", None).check_standalone().unwrap_err().to_string();
        assert!(error.contains("a backing file") && !error.contains("shadow"), "{error}");
    }

    #[test]
    fn a_header_that_is_cut_off_anywhere_is_refused() {
        let bytes = header();
        for length in 0..112 {
            assert!(parse(&bytes[..length], LENGTH).is_err(), "{length}");
        }
        assert!(parse(&bytes[..112], LENGTH).is_ok());
    }

    #[test]
    fn an_extension_behind_the_first_pages_is_read_from_the_file() {
        let mut bytes = header();
        // A long extension that may be ignored, then one that may not.
        put(&mut bytes, 104, &0x1234_5678_u32.to_be_bytes());
        put(&mut bytes, 108, &8_000_u32.to_be_bytes());
        put(&mut bytes, 112 + 8_000, &EXT_DATA_FILE.to_be_bytes());
        put(&mut bytes, 112 + 8_004, &8_u32.to_be_bytes());
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&bytes, 0).unwrap();
        file.set_len(LENGTH).unwrap();
        assert!(inspect(&file).unwrap().external_data);
    }

    proptest::proptest! {
        #[test]
        fn no_bytes_make_the_parser_panic(tail in proptest::collection::vec(proptest::num::u8::ANY, 0..600), length: u64) {
            let mut bytes = MAGIC.to_vec();
            bytes.extend_from_slice(&tail);
            drop(parse(&bytes, length));
            drop(parse(&tail, length));
        }

        #[test]
        fn no_change_of_a_good_header_makes_the_parser_panic(
            changes in proptest::collection::vec((0_usize..160, proptest::num::u8::ANY), 1..12), length: u64,
        ) {
            let mut bytes = header();
            for (at, byte) in changes {
                bytes[at] = byte;
            }
            if let Ok(info) = parse(&bytes, length) {
                proptest::prop_assert!(info.virtual_size <= MAX_VIRTUAL_SIZE);
                proptest::prop_assert!(u64::from(info.l1_entries) * 8 <= MAX_L1_BYTES);
            }
        }
    }
}
