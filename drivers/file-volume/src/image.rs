//! Writes and grows qcow2 images without a tool (see `docs/decisions/0004-qcow2-written-in-process.md`).
//!
//! An empty image and an overlay are four tables in known places; the rest of the file is holes:
//!
//! ```text
//! cluster 0        header, backing format, end of extensions, backing file's name
//! cluster 1        refcount table, one entry
//! cluster 2        refcount block, one entry for each cluster that is in use
//! cluster 3 …      first-level table, all entries empty
//! ```
//!
//! Source of offsets and limits: `docs/interop/qcow2.txt` of QEMU.

use std::{fs::File, io, os::unix::fs::FileExt};

use host::qcow2::{MAGIC, Qcow2Info};

/// 64 KiB: what `qemu-img` takes when nothing else is asked for.
const CLUSTER_BITS: u32 = 16;
const CLUSTER: u64 = 1 << CLUSTER_BITS;
/// How much of the disk one first-level entry stands for: a cluster of 8-byte entries, each a cluster.
const BYTES_PER_L1_ENTRY: u64 = CLUSTER / 8 * CLUSTER;
const REFCOUNT_TABLE: u64 = CLUSTER;
const REFCOUNT_BLOCK: u64 = 2 * CLUSTER;
const L1_TABLE: u64 = 3 * CLUSTER;
/// The version 3 header without the optional compression type, which deflate does not need.
const HEADER_LENGTH: u32 = 104;
/// 16-bit refcounts.
const REFCOUNT_ORDER: u32 = 4;
/// Header extension: the format of the backing file.
const EXT_BACKING_FORMAT: u32 = 0xE279_2ACA;
/// Where `size`, `crypt_method` and `l1_size` are: 16 bytes within one sector, written in one go.
const SIZE_FIELDS: u64 = 24;

/// The file below an overlay, as its header names it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Below {
    pub(crate) name: &'static str,
    pub(crate) format: &'static str,
}

/// Writes an image of `size` bytes into an empty file. Nothing is synced.
pub(crate) fn write(file: &File, size: u64, below: Option<Below>) -> io::Result<()> {
    let l1_entries = size.div_ceil(BYTES_PER_L1_ENTRY);
    // At least one whole cluster, so that a growth up to 4 TiB moves no table.
    let l1_clusters = (l1_entries * 8).div_ceil(CLUSTER).max(1);
    let used = L1_TABLE / CLUSTER + l1_clusters;
    // One refcount block has 32,768 entries; the largest volume (1 PiB) needs 256 clusters of first-level table.
    let references: Vec<u8> = (0..used).flat_map(|_| 1_u16.to_be_bytes()).collect();
    file.set_len(L1_TABLE + l1_clusters * CLUSTER)?;
    file.write_all_at(&REFCOUNT_BLOCK.to_be_bytes(), REFCOUNT_TABLE)?;
    file.write_all_at(&references, REFCOUNT_BLOCK)?;
    let l1_entries = u32::try_from(l1_entries).map_err(io::Error::other)?;
    file.write_all_at(&header(size, l1_entries, below)?, 0)
}

fn header(size: u64, l1_entries: u32, below: Option<Below>) -> io::Result<Vec<u8>> {
    let mut extensions = Vec::new();
    if let Some(below) = below {
        extensions.extend_from_slice(&EXT_BACKING_FORMAT.to_be_bytes());
        extensions.extend_from_slice(&length(below.format)?.to_be_bytes());
        extensions.extend_from_slice(below.format.as_bytes());
        extensions.resize(extensions.len().next_multiple_of(8), 0);
    }
    // The end of the extensions: type 0, length 0.
    extensions.extend_from_slice(&[0; 8]);
    let name = below.map_or("", |below| below.name);
    let name_at =
        u64::from(HEADER_LENGTH) + u64::try_from(extensions.len()).map_err(io::Error::other)?;

    let mut bytes = Vec::with_capacity(256);
    bytes.extend_from_slice(&MAGIC);
    bytes.extend_from_slice(&3_u32.to_be_bytes());
    bytes.extend_from_slice(&if below.is_some() { name_at } else { 0 }.to_be_bytes());
    bytes.extend_from_slice(&length(name)?.to_be_bytes());
    bytes.extend_from_slice(&CLUSTER_BITS.to_be_bytes());
    bytes.extend_from_slice(&size_fields(size, l1_entries));
    bytes.extend_from_slice(&L1_TABLE.to_be_bytes());
    bytes.extend_from_slice(&REFCOUNT_TABLE.to_be_bytes());
    // The refcount table's clusters; no snapshots, and no table of them.
    bytes.extend_from_slice(&1_u32.to_be_bytes());
    bytes.extend_from_slice(&[0; 12]);
    // No incompatible, compatible or auto-clear features.
    bytes.extend_from_slice(&[0; 24]);
    bytes.extend_from_slice(&REFCOUNT_ORDER.to_be_bytes());
    bytes.extend_from_slice(&HEADER_LENGTH.to_be_bytes());
    bytes.extend_from_slice(&extensions);
    bytes.extend_from_slice(name.as_bytes());
    Ok(bytes)
}

fn length(text: &str) -> io::Result<u32> {
    u32::try_from(text.len()).map_err(io::Error::other)
}

/// `size`, `crypt_method` (none) and `l1_size`.
fn size_fields(size: u64, l1_entries: u32) -> [u8; 16] {
    let packed = (u128::from(size) << 64) | u128::from(l1_entries);
    packed.to_be_bytes()
}

/// Whether [`grow`] can bring the image to `size`; if not, `qemu-img` must. It can where the first-level table has room and
/// nothing else in the image depends on the size.
pub(crate) fn grows_in_place(info: &Qcow2Info, size: u64) -> bool {
    let room = (u64::from(info.l1_entries) * 8).next_multiple_of(info.cluster_size());
    // Bitmaps (auto-clear) and snapshots keep sizes of their own; version 2 and foreign features are not ours.
    info.version == 3
        && info.incompatible == 0
        && info.autoclear == 0
        && info.snapshots == 0
        && info.l1_entries > 0
        && size.div_ceil(info.bytes_per_l1_entry()) * 8 <= room
}

/// Grows an image for which [`grows_in_place`] holds and which nobody else has open. The old size is valid until the last
/// write, and the new one from then on; both are durable when it returns.
pub(crate) fn grow(
    file: &File,
    info: &Qcow2Info,
    size: u64,
    between: impl FnOnce() -> drivers_api::Result<()>,
) -> io::Result<drivers_api::Result<()>> {
    let entries = size.div_ceil(info.bytes_per_l1_entry());
    let old_end = info.l1_offset + u64::from(info.l1_entries) * 8;
    let new_end = info.l1_offset + entries * 8;
    if new_end > old_end {
        // What follows a table in its cluster is not said to be zero.
        let gap = usize::try_from(new_end - old_end).map_err(io::Error::other)?;
        file.write_all_at(&vec![0; gap], old_end)?;
        file.sync_data()?;
    }
    if let Err(fault) = between() {
        return Ok(Err(fault));
    }
    let entries = u32::try_from(entries).map_err(io::Error::other)?.max(info.l1_entries);
    file.write_all_at(&size_fields(size, entries), SIZE_FIELDS)?;
    file.sync_data()?;
    Ok(Ok(()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_back_by_the_parser() {
        for (size, entries) in [(1 << 30, 2), (1 << 42, 8192), (1 << 50, 2_097_152)] {
            let file = tempfile::tempfile().unwrap();
            write(&file, size, None).unwrap();
            let info = host::qcow2::inspect(&file).unwrap();
            info.check_standalone().unwrap();
            assert_eq!((info.virtual_size, info.l1_entries), (size, entries));
        }
    }

    #[test]
    fn an_overlay_names_its_base_and_format() {
        let file = tempfile::tempfile().unwrap();
        write(&file, 1 << 30, Some(Below { name: "base.qcow2", format: "qcow2" })).unwrap();
        host::qcow2::inspect(&file).unwrap().check_overlay("base.qcow2", "qcow2").unwrap();
    }

    #[test]
    fn an_image_grows_in_place_up_to_four_tebibytes() {
        let file = tempfile::tempfile().unwrap();
        write(&file, 1 << 30, None).unwrap();
        let info = host::qcow2::inspect(&file).unwrap();
        assert!(grows_in_place(&info, 4 << 40) && !grows_in_place(&info, (4 << 40) + 1));
        grow(&file, &info, 4 << 40, || Ok(())).unwrap().unwrap();
        assert_eq!(host::qcow2::inspect(&file).unwrap().virtual_size, 4 << 40);
    }

    #[test]
    fn a_growth_clears_what_was_behind_the_table() {
        let file = tempfile::tempfile().unwrap();
        write(&file, 1 << 30, None).unwrap();
        file.write_all_at(&[0xff; 800], L1_TABLE + 16).unwrap();
        let info = host::qcow2::inspect(&file).unwrap();
        grow(&file, &info, 50 << 30, || Ok(())).unwrap().unwrap();
        let mut table = vec![1; 800];
        file.read_exact_at(&mut table, L1_TABLE).unwrap();
        assert_eq!(table, vec![0; 800], "100 entries of 512 MiB");
    }
}
