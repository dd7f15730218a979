use std::sync::atomic::AtomicBool;

use super::*;

struct Case {
    dir: tempfile::TempDir,
    limit: u64,
    times: u64,
}

impl Case {
    fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap(), limit: 64 << 20, times: 1 }
    }

    fn scan(&self, archive: &[u8]) -> Result<Option<FoundDisk>> {
        let blob = self.dir.path().join("blob");
        std::fs::write(&blob, archive).unwrap();
        let target = self.dir.path().join("disk");
        drop(std::fs::remove_file(&target));
        let mut budget = Budget::new(self.limit);
        let stop: StopFlag = Arc::new(AtomicBool::new(false));
        let mut work = Scan { budget: &mut budget, stop: &stop, times: self.times, found: None };
        scan("layer", &blob, Packing::Plain, &target, &mut work)?;
        Ok(work.found)
    }
}

fn entry(kind: EntryType, name: &str, link: Option<&str>, data: &[u8]) -> Vec<u8> {
    let mut header = tar::Header::new_gnu();
    let bytes = header.as_old_mut();
    bytes.name[..name.len()].copy_from_slice(name.as_bytes());
    if let Some(link) = link {
        bytes.linkname[..link.len()].copy_from_slice(link.as_bytes());
    }
    header.set_entry_type(kind);
    header.set_mode(0o6755);
    header.set_size(u64::try_from(data.len()).unwrap());
    header.set_cksum();
    let mut out = header.as_bytes().to_vec();
    out.extend_from_slice(data);
    out.resize(out.len().div_ceil(512) * 512, 0);
    out
}

fn file(name: &str, data: &[u8]) -> Vec<u8> {
    entry(EntryType::Regular, name, None, data)
}

#[test]
fn the_one_file_under_disk_is_found_wherever_it_stands() {
    let case = Case::new();
    for name in ["disk/a.img", "./disk/a.img", "disk//a.img"] {
        let archive = [file("etc/passwd", b"x"), file(name, b"hello"), vec![0; 1024]].concat();
        let found = case.scan(&archive).unwrap().unwrap();
        assert_eq!(found.name, "a.img");
        assert_eq!(std::fs::read(case.dir.path().join("disk")).unwrap(), b"hello");
    }
    assert!(case.scan(&[file("a", b"x"), vec![0; 1024]].concat()).unwrap().is_none());
}

#[test]
fn pth_01_entries_that_are_no_plain_file_under_disk_are_refused() {
    let case = Case::new();
    for bad in [
        file("../x", b""),
        file("disk/../../x", b""),
        file("/disk/x", b""),
        file("disk/a/b", b""),
        file("disk/.wh.a", b""),
        file("disk", b""),
        entry(EntryType::Symlink, "disk", Some("/tmp"), b""),
        entry(EntryType::Symlink, "disk/a", Some("/etc/shadow"), b""),
        entry(EntryType::Link, "disk/a", Some("/etc/shadow"), b""),
        entry(EntryType::Char, "disk/a", None, b""),
        entry(EntryType::Fifo, "disk/a", None, b""),
        entry(EntryType::Directory, "disk/a", None, b""),
        entry(EntryType::GNUSparse, "disk/a", None, b""),
    ] {
        let error = case.scan(&[bad, vec![0; 1024]].concat()).unwrap_err();
        assert!(matches!(error, ImageError::Malformed { .. }), "{error}");
        assert!(!case.dir.path().join("disk").exists());
    }
    let two = [file("disk/a", b"1"), file("disk/b", b"2"), vec![0; 1024]].concat();
    assert!(case.scan(&two).unwrap_err().to_string().contains("several"));
}

#[test]
fn res_01_what_is_thrown_away_counts_and_so_does_each_repeat() {
    let mut case = Case::new();
    case.limit = 8 << 10;
    let archive = [file("a", &[0; 16 << 10]), vec![0; 1024]].concat();
    assert!(matches!(case.scan(&archive), Err(ImageError::TooLarge { .. })));
    let tail = [file("a", b"x"), vec![0; 16 << 10]].concat();
    assert!(matches!(case.scan(&tail), Err(ImageError::TooLarge { .. })), "beyond the end too");
    case.times = 100;
    let small = [file("disk/a", b"x"), vec![0; 1024]].concat();
    assert!(matches!(case.scan(&small), Err(ImageError::TooLarge { .. })));
}

#[test]
fn res_01_a_long_name_of_many_bytes_is_refused_before_it_is_held_in_memory() {
    let case = Case::new();
    let long = entry(EntryType::GNULongName, "././@LongLink", None, &vec![b'a'; 4 << 20]);
    let error = case.scan(&[long, file("x", b""), vec![0; 1024]].concat()).unwrap_err();
    assert!(error.to_string().contains("headers"), "{error}");
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig::with_cases(64))]
    #[test]
    fn no_bytes_make_the_scan_panic(bytes in proptest::collection::vec(0_u8.., 0..3000)) {
        drop(Case::new().scan(&bytes));
    }

    #[test]
    fn no_broken_header_makes_the_scan_panic(at in 0_usize..512, value in 0_u8..) {
        let mut archive = [file("disk/a", b"hello"), vec![0; 1024]].concat();
        archive[at] = value;
        drop(Case::new().scan(&archive));
    }
}
