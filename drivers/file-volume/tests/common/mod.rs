//! What the tests of this driver share: a pool in a directory of its own, and tools to look at what is in it.

#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::{
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
};

use driver_file_volume::{FileVolume, FileVolumeConfig};
use drivers_api::{
    AttachRequest, BackingKind, Change, Context, DetachRequest, DiskFormat, HostId, SizeGib, VmId,
    Volume, VolumeId, VolumeSource, VolumeSpec,
};
use host::run::Run;

/// One GiB in bytes.
pub(crate) const GIB: u64 = 1 << 30;

/// A pool and a directory for images beside it, removed at the end.
pub(crate) struct Bench {
    /// The directory of both.
    pub(crate) dir: tempfile::TempDir,
}

impl Default for Bench {
    fn default() -> Self {
        Self::new()
    }
}

impl Bench {
    pub(crate) fn new() -> Self {
        Self::under(&std::env::temp_dir())
    }

    pub(crate) fn under(parent: &Path) -> Self {
        let dir = tempfile::tempdir_in(parent).unwrap();
        // Passable for VMMs of other users, as the parents of a pool must be.
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o711)).unwrap();
        Self { dir }
    }

    pub(crate) fn pool(&self) -> PathBuf {
        self.dir.path().join("pool")
    }

    pub(crate) fn driver(&self) -> FileVolume {
        FileVolume::open(self.config()).unwrap()
    }

    pub(crate) fn config(&self) -> FileVolumeConfig {
        FileVolumeConfig::new(node(1), "host-1", self.pool())
    }

    pub(crate) fn volume_dir(&self, id: VolumeId) -> PathBuf {
        self.pool().join(id.to_string())
    }

    /// A file outside the pool.
    pub(crate) fn file(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.dir.path().join(name);
        fs::write(&path, bytes).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        path
    }

    /// A qcow2 image that `qemu-img` makes, with `text` at its start.
    pub(crate) async fn qcow2_image(&self, name: &str, megabytes: u64, text: &str) -> PathBuf {
        let raw = self.file(&format!("{name}.raw"), text.as_bytes());
        fs::OpenOptions::new().write(true).open(&raw).unwrap().set_len(megabytes << 20).unwrap();
        let path = self.dir.path().join(name);
        tool("qemu-img", &["convert", "-f", "raw", "-O", "qcow2", text_of(&raw), text_of(&path)])
            .await;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        fs::remove_file(raw).unwrap();
        path
    }

    /// What is in the pool: names, modes, owners and sizes, without the times of writes.
    pub(crate) fn contents(&self) -> Vec<String> {
        let timeless = |line: &String| line.rsplit_once(' ').unwrap().0.to_owned();
        self.census().iter().map(timeless).collect()
    }

    /// All that is in the pool, with what a driver could have changed of it; access times apart.
    pub(crate) fn census(&self) -> Vec<String> {
        let mut lines = Vec::new();
        walk(&self.pool(), &mut lines);
        // The lock file is made once and stays.
        lines.retain(|line| !line.contains("/.lock ") && !line.ends_with("/bases"));
        lines.sort();
        lines
    }
}

fn walk(dir: &Path, lines: &mut Vec<String>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let meta = fs::symlink_metadata(&path).unwrap();
        if meta.is_dir() {
            walk(&path, lines);
            if path.ends_with("bases") {
                lines.push(path.display().to_string());
                continue;
            }
        }
        lines.push(format!(
            "{} {:o} {} {} {}.{}",
            path.display(),
            meta.mode(),
            meta.uid(),
            if meta.is_dir() { 0 } else { meta.len() },
            meta.mtime(),
            meta.mtime_nsec(),
        ));
    }
}

/// A node's id.
pub(crate) fn node(n: u8) -> HostId {
    format!("0d9e8f7a-6b5c-4d3e-8f2a-1b0c9d8e7f{n:02x}").parse().unwrap()
}

/// A VM's id.
pub(crate) fn vm(n: u8) -> VmId {
    format!("aa9e8f7a-6b5c-4d3e-8f2a-1b0c9d8e7f{n:02x}").parse().unwrap()
}

/// A volume's id.
pub(crate) fn id(n: u8) -> VolumeId {
    format!("3f2b8c1e-9a4d-4e6f-8b7a-1c2d3e4f5a{n:02x}").parse().unwrap()
}

/// A volume without a source.
pub(crate) fn spec(n: u8, gib: u64, format: DiskFormat) -> VolumeSpec {
    VolumeSpec::new(
        id(n),
        format!("volume-{n}").parse().unwrap(),
        SizeGib::new(gib).unwrap(),
        format,
    )
}

/// A copy of an image.
pub(crate) fn copy_of(
    n: u8,
    gib: u64,
    format: DiskFormat,
    image: &Path,
    of: DiskFormat,
) -> VolumeSpec {
    let mut spec = spec(n, gib, format);
    spec.source = Some(VolumeSource::new(
        "localhost/images/test:1".parse().unwrap(),
        Some(text_of(image).parse().unwrap()),
        of,
    ));
    spec
}

/// A request for writing.
pub(crate) fn attach(n: u8, vm_number: u8) -> AttachRequest {
    AttachRequest::new(id(n), node(1), vm(vm_number), vec![BackingKind::File])
}

/// The end of it.
pub(crate) fn detach(n: u8, vm_number: u8) -> DetachRequest {
    DetachRequest::new(id(n), node(1), vm(vm_number))
}

/// Makes or grows a volume.
pub(crate) async fn ensure(driver: &FileVolume, spec: &VolumeSpec) -> drivers_api::Result<Change> {
    driver.ensure_volume(&Context::new(), spec).await
}

/// Removes a volume.
pub(crate) async fn destroy(driver: &FileVolume, n: u8) -> drivers_api::Result<Change> {
    driver.destroy_volume(&Context::new(), id(n)).await
}

/// A path as text.
pub(crate) fn text_of(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Runs a tool that must succeed, and answers what it printed.
pub(crate) async fn tool(program: &str, args: &[&str]) -> String {
    let output = Run::new(program).args(args).success(&Context::new()).await;
    String::from_utf8(output.unwrap_or_else(|error| panic!("{program} {args:?}: {error}")).stdout)
        .unwrap()
}

/// Has QEMU's own checker look at an image.
pub(crate) async fn check_image(path: &Path) {
    let text = tool("qemu-img", &["check", "-f", "qcow2", text_of(path)]).await;
    assert!(text.contains("No errors were found"), "{text}");
}

/// The size that QEMU sees.
pub(crate) async fn virtual_size(path: &Path, format: &str) -> u64 {
    let text =
        tool("qemu-img", &["info", "-U", "-f", format, "--output=json", text_of(path)]).await;
    let info: serde_json::Value = serde_json::from_str(&text).unwrap();
    info["virtual-size"].as_u64().unwrap()
}

/// The first bytes that a guest would read.
pub(crate) async fn guest_reads(path: &Path, format: &str, length: usize) -> String {
    let out = tempfile::NamedTempFile::new().unwrap();
    let count = format!("count={length}");
    let (from, to) = (format!("if={}", text_of(path)), format!("of={}", text_of(out.path())));
    tool("qemu-img", &["dd", "-f", format, "-O", "raw", "bs=1", &count, &from, &to]).await;
    let bytes = fs::read(out.path()).unwrap();
    String::from_utf8_lossy(&bytes[..length]).into_owned()
}

/// Whether this process has mounts of its own, with an empty `/tmp`. If not, the test of this name is run in one that has, and must pass there:
/// the caller then returns. Needs root.
pub(crate) async fn inside_own_mounts(test: &str) -> bool {
    const INSIDE: &str = "BCD_TEST_INSIDE";
    if std::env::var_os(INSIDE).is_some() {
        mount_tmpfs(Path::new("/tmp"), "size=2g,mode=1777").await;
        return true;
    }
    let program = std::env::current_exe().unwrap();
    Run::new("unshare")
        .args(["--mount", "--propagation", "private", "--", text_of(&program)])
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .env(INSIDE, "1")
        .success(&Context::new())
        .await
        .unwrap_or_else(|error| panic!("{test}, in a mount namespace (needs root): {error}"));
    false
}

/// Mounts a filesystem in memory; it goes away with the mount namespace.
pub(crate) async fn mount_tmpfs(at: &Path, options: &str) {
    fs::create_dir_all(at).unwrap();
    tool("mount", &["-t", "tmpfs", "-o", options, "tmpfs", text_of(at)]).await;
}
