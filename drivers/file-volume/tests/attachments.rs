//! Who has a volume: exclusive and shared attachments, their users, and what runs with them.

#![cfg(test)]

mod common;

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    os::{fd::OwnedFd, unix::fs::MetadataExt, unix::net::UnixStream},
    path::Path,
};

use common::*;
use driver_file_volume::{FileVolume, FileVolumeConfig};
use drivers_api::{
    AttachRequest, AttachedVolume, Backing, BackingKind, Change, Context, DiskFormat, ErrorKind,
    Outcome, Result, Volume,
};
use host::{
    daemon::{Daemon, Started},
    run::Run,
};
use rustix::process::Signal;

async fn take(driver: &FileVolume, request: &AttachRequest) -> Result<Outcome<AttachedVolume>> {
    driver.attach_volume(&Context::new(), request).await
}

async fn give(driver: &FileVolume, n: u8, vm_number: u8) -> Change {
    driver.detach_volume(&Context::new(), &detach(n, vm_number)).await.unwrap()
}

fn reader(n: u8, vm_number: u8) -> AttachRequest {
    let mut request = attach(n, vm_number);
    request.read_only = true;
    request
}

#[tokio::test]
async fn a_writer_has_a_volume_alone_and_a_conflict_names_it() {
    let bench = Bench::new();
    let driver = bench.driver();
    assert!(ensure(&driver, &spec(1, 1, DiskFormat::Raw)).await.unwrap().wrote());
    let first = take(&driver, &attach(1, 1)).await.unwrap();
    assert_eq!(first.change, Change::Created);
    let Backing::File { path, format } = &first.value.backing else { panic!("no file") };
    assert_eq!(path.as_path(), bench.volume_dir(id(1)).join("disk.raw"));
    assert_eq!(*format, DiskFormat::Raw);
    let before = bench.census();
    // A restart of the agent, and the same call again.
    let driver = bench.driver();
    let again = take(&driver, &attach(1, 1)).await.unwrap();
    assert_eq!((again.change, again.value), (Change::Unchanged, first.value));
    for request in [attach(1, 2), reader(1, 2)] {
        let error = take(&driver, &request).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Conflict);
        assert!(error.to_string().contains(&vm(1).to_string()), "{error}");
    }
    let error = destroy(&driver, 1).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Conflict);
    assert!(error.to_string().contains(&vm(1).to_string()), "{error}");
    assert_eq!(give(&driver, 1, 2).await, Change::Unchanged, "another VM's is left alone");
    assert_eq!(bench.census(), before);
    let status = driver.get(&Context::new(), id(1)).await.unwrap().unwrap();
    assert_eq!(status.attachments.len(), 1);
    assert_eq!((status.attachments[0].vm_uuid, status.attachments[0].read_only), (vm(1), false));
    assert_eq!(give(&driver, 1, 1).await, Change::Changed);
    assert_eq!(give(&driver, 1, 1).await, Change::Unchanged);
    assert_eq!(take(&driver, &attach(1, 2)).await.unwrap().change, Change::Created);
}

#[tokio::test]
async fn readers_share_what_nobody_writes() {
    let bench = Bench::new();
    let driver = bench.driver();
    assert!(ensure(&driver, &spec(1, 1, DiskFormat::Qcow2)).await.unwrap().wrote());
    for n in 1..=3 {
        let answer = take(&driver, &reader(1, n)).await.unwrap();
        assert!(answer.value.read_only && answer.change == Change::Created);
    }
    let error = take(&driver, &attach(1, 1)).await.unwrap_err().to_string();
    assert!(error.contains(&vm(2).to_string()) && error.contains(&vm(3).to_string()), "{error}");
    assert!(!error.contains(&vm(1).to_string()), "a VM is not in its own way: {error}");
    assert!(give(&driver, 1, 2).await.wrote() && give(&driver, 1, 3).await.wrote());
    assert_eq!(take(&driver, &attach(1, 1)).await.unwrap().change, Change::Changed);
}

#[tokio::test]
async fn what_the_hypervisor_cannot_open_and_other_hosts_are_refused() {
    let bench = Bench::new();
    let driver = bench.driver();
    assert!(ensure(&driver, &spec(1, 1, DiskFormat::Raw)).await.unwrap().wrote());
    let mut request = attach(1, 1);
    request.accepts = vec![BackingKind::Rbd];
    assert_eq!(take(&driver, &request).await.unwrap_err().kind(), ErrorKind::Unsupported);
    let mut request = attach(1, 1);
    request.host_uuid = node(2);
    assert_eq!(take(&driver, &request).await.unwrap_err().kind(), ErrorKind::InvalidSpec);
}

#[tokio::test]
async fn an_attachment_that_cannot_be_understood_is_not_overlooked() {
    let bench = Bench::new();
    let driver = bench.driver();
    assert!(ensure(&driver, &spec(1, 1, DiskFormat::Raw)).await.unwrap().wrote());
    let record = bench.volume_dir(id(1)).join(format!("vm-{}", vm(7)));
    std::os::unix::fs::symlink("of a later version", &record).unwrap();
    assert_eq!(destroy(&driver, 1).await.unwrap_err().kind(), ErrorKind::Conflict);
    assert_eq!(take(&driver, &attach(1, 1)).await.unwrap_err().kind(), ErrorKind::Conflict);
    let status = driver.get(&Context::new(), id(1)).await.unwrap().unwrap();
    assert!(status.message.unwrap().contains("cannot be understood"));
}

/// Case LCK-01: an agent with another identity refuses the pool and what is in it.
#[tokio::test]
async fn another_nodes_agent_gets_neither_the_pool_nor_a_volume_of_it() {
    let bench = Bench::new();
    let driver = bench.driver();
    assert!(ensure(&driver, &spec(1, 1, DiskFormat::Raw)).await.unwrap().wrote());
    let before = bench.census();
    let link = bench.dir.path().join("link");
    std::os::unix::fs::symlink(bench.pool(), &link).unwrap();
    for path in [bench.pool(), link] {
        let error = FileVolume::open(FileVolumeConfig::new(node(2), "host-2", path)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Conflict);
        assert!(error.to_string().contains(&node(1).to_string()), "{error}");
    }
    assert_eq!(bench.census(), before);
    // A volume that was moved here from the pool of another node.
    let other = Bench::new();
    let foreign = FileVolume::open(FileVolumeConfig::new(node(2), "host-2", other.pool())).unwrap();
    assert!(ensure(&foreign, &spec(2, 1, DiskFormat::Raw)).await.unwrap().wrote());
    fs::rename(other.volume_dir(id(2)), bench.volume_dir(id(2))).unwrap();
    let before = bench.census();
    for error in [
        ensure(&driver, &spec(2, 2, DiskFormat::Raw)).await.unwrap_err(),
        destroy(&driver, 2).await.unwrap_err(),
        take(&driver, &attach(2, 1)).await.unwrap_err(),
        driver.get(&Context::new(), id(2)).await.unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::Conflict);
        assert!(error.to_string().contains(&node(2).to_string()), "{error}");
    }
    let found = driver.list(&Context::new()).await.unwrap();
    let marks: Vec<_> = found.iter().map(|status| status.mark.node).collect();
    assert_eq!(marks, [node(1), node(2)], "the list shows whose each is");
    assert_eq!(bench.census(), before);
}

/// Case LCK-01: the lock is the kernel's, on the file that is at the path.
#[tokio::test]
async fn a_volume_that_another_process_works_on_is_unavailable_and_free_when_it_is_killed() {
    let bench = Bench::new();
    let driver = bench.driver();
    let lock = bench.pool().join(".lock");
    // A stranger to the gates of this process: it locks every byte, as a worker of another process locks one.
    let script = "import fcntl,struct,sys,time\n\
        f=open(sys.argv[1],'r+')\n\
        fcntl.fcntl(f,37,struct.pack('hhqqi4x',1,0,0,0,0))\n\
        open(sys.argv[2],'w')\n\
        time.sleep(600)";
    let ready = bench.dir.path().join("ready");
    let other = Daemon::new("python3")
        .args(["-c", script, text_of(&lock), text_of(&ready)])
        .start()
        .unwrap();
    wait_for(|| ready.exists()).await;
    let error = ensure(&driver, &spec(1, 1, DiskFormat::Raw)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.to_string().contains("another process"), "{error}");
    assert!(driver.list(&Context::new()).await.unwrap().is_empty(), "looking needs no lock");
    end(&other).await;
    assert_eq!(ensure(&driver, &spec(1, 1, DiskFormat::Raw)).await.unwrap(), Change::Created);
    // A lock file that somebody removed is made anew, and both workers see the new one.
    fs::remove_file(&lock).unwrap();
    assert_eq!(destroy(&driver, 1).await.unwrap(), Change::Changed);
    assert!(lock.exists());
}

async fn end(process: &Started) {
    process.pidfd.signal(Signal::KILL).unwrap();
    process.pidfd.ended().await.unwrap();
}

/// What only a file can tell, since the other side is a script: looked at every few milliseconds, for ten seconds at most.
async fn wait_for(mut done: impl FnMut() -> bool) {
    for _ in 0..2_000 {
        if done() {
            return;
        }
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    panic!("it did not come to pass within ten seconds");
}

/// What a user of that number reads at the start of a file through `qemu-img`; `None` when it may not.
async fn read_as(uid: u32, path: &Path, format: &str) -> Option<()> {
    let uid = uid.to_string();
    let run = Run::new("setpriv")
        .args(["--reuid", &uid, "--regid", &uid, "--clear-groups", "--"])
        .args(["qemu-io", "-r", "-f", format, "-c", "read 0 512", text_of(path)]);
    let output = run.output(&Context::new()).await.unwrap();
    output.status.success().then_some(())
}

#[tokio::test]
async fn the_user_of_the_vmm_opens_the_disk_and_its_base_and_nobody_else_does() {
    let bench = Bench::new();
    let driver = bench.driver();
    let image = bench.qcow2_image("image", 8, "the image").await;
    let wanted = copy_of(1, 1, DiskFormat::Qcow2, &image, DiskFormat::Qcow2);
    assert!(ensure(&driver, &wanted).await.unwrap().wrote());
    let disk = bench.volume_dir(id(1)).join("disk.qcow2");
    assert!(read_as(64_001, &disk, "qcow2").await.is_none());
    let mut request = attach(1, 1);
    request.owner_uid = Some(64_001);
    assert_eq!(take(&driver, &request).await.unwrap().change, Change::Created);
    assert_eq!(take(&driver, &request).await.unwrap().change, Change::Unchanged);
    assert_eq!(fs::metadata(&disk).unwrap().uid(), 64_001);
    assert!(read_as(64_001, &disk, "qcow2").await.is_some());
    assert!(read_as(64_002, &disk, "qcow2").await.is_none());
    let base = bench.volume_dir(id(1)).join("base.qcow2");
    assert!(read_as(64_002, &base, "qcow2").await.is_none(), "the base is behind the directory");
    // The VM moves to another user: the old one is out.
    request.owner_uid = Some(64_002);
    assert_eq!(take(&driver, &request).await.unwrap().change, Change::Changed);
    assert!(read_as(64_001, &disk, "qcow2").await.is_none());
    assert!(read_as(64_002, &disk, "qcow2").await.is_some());
    assert_eq!(give(&driver, 1, 1).await, Change::Changed);
    assert!(read_as(64_002, &disk, "qcow2").await.is_none());
    let meta = fs::metadata(&disk).unwrap();
    assert_eq!((meta.uid(), meta.mode() & 0o777), (0, 0o600));
    assert_eq!(fs::metadata(bench.volume_dir(id(1))).unwrap().mode() & 0o777, 0o700);
}

#[tokio::test]
async fn readers_of_several_users_read_and_do_not_write() {
    let bench = Bench::new();
    let driver = bench.driver();
    assert!(ensure(&driver, &spec(1, 1, DiskFormat::Raw)).await.unwrap().wrote());
    let disk = bench.volume_dir(id(1)).join("disk.raw");
    for n in [1_u8, 2] {
        let mut request = reader(1, n);
        request.owner_uid = Some(64_000 + u32::from(n));
        assert_eq!(take(&driver, &request).await.unwrap().change, Change::Created);
    }
    for uid in [64_001, 64_002] {
        assert!(read_as(uid, &disk, "raw").await.is_some());
        let text = uid.to_string();
        let write = Run::new("setpriv")
            .args(["--reuid", &text, "--clear-groups", "--", "qemu-io", "-f", "raw"])
            .args(["-c", "write 0 512", text_of(&disk)]);
        assert!(!write.output(&Context::new()).await.unwrap().status.success());
    }
    assert_eq!(give(&driver, 1, 1).await, Change::Changed);
    assert!(read_as(64_001, &disk, "raw").await.is_none());
    assert!(read_as(64_002, &disk, "raw").await.is_some());
}

/// A ramfs has neither access control lists nor shared blocks.
#[tokio::test]
async fn without_access_control_lists_a_writer_has_its_disk_and_readers_do_not_share() {
    let test = "without_access_control_lists_a_writer_has_its_disk_and_readers_do_not_share";
    if !inside_own_mounts(test).await {
        return;
    }
    let root = Path::new("/tmp/plain");
    fs::create_dir(root).unwrap();
    tool("mount", &["-t", "ramfs", "-o", "mode=0711", "ramfs", text_of(root)]).await;
    let bench = Bench::under(root);
    let driver = bench.driver();
    let image = bench.qcow2_image("image", 4, "the image").await;
    let wanted = copy_of(1, 1, DiskFormat::Qcow2, &image, DiskFormat::Qcow2);
    assert!(ensure(&driver, &wanted).await.unwrap().wrote());
    let disk = bench.volume_dir(id(1)).join("disk.qcow2");
    let mut request = attach(1, 1);
    request.owner_uid = Some(64_001);
    assert_eq!(take(&driver, &request).await.unwrap().change, Change::Created);
    assert_eq!(take(&driver, &request).await.unwrap().change, Change::Unchanged);
    assert!(read_as(64_001, &disk, "qcow2").await.is_some());
    assert!(read_as(64_002, &disk, "qcow2").await.is_none());
    assert_eq!(give(&driver, 1, 1).await, Change::Changed);
    let mut request = reader(1, 1);
    request.owner_uid = Some(64_001);
    let error = take(&driver, &request).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("access control lists"), "{error}");
    // What was refused holds nothing.
    assert_eq!(destroy(&driver, 1).await.unwrap(), Change::Changed);
}

/// A QEMU without a machine that has a disk open, and its monitor.
struct Vmm {
    process: Started,
    to: UnixStream,
    from: BufReader<UnixStream>,
}

impl Vmm {
    fn open(disk: &Path, format: &str) -> Self {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut daemon = Daemon::new("qemu-system-x86_64");
        let fd = daemon.pass(OwnedFd::from(theirs));
        let file = format!("driver=file,filename={},node-name=file", text_of(disk));
        let node = format!("driver={format},file=file,node-name=disk");
        let monitor = format!("socket,id=monitor,fd={fd}");
        let process = daemon
            .args(["-machine", "none", "-nodefaults", "-display", "none", "-S"])
            .args(["-chardev", &monitor, "-mon", "chardev=monitor,mode=control"])
            .args(["-blockdev", &file, "-blockdev", &node])
            .start()
            .unwrap();
        ours.set_read_timeout(Some(std::time::Duration::from_secs(20))).unwrap();
        let from = BufReader::new(ours.try_clone().unwrap());
        let mut vmm = Self { process, to: ours, from };
        assert!(vmm.line().contains("QMP"), "the greeting comes when the disks are open");
        assert_eq!(vmm.call("{\"execute\":\"qmp_capabilities\"}"), "{\"return\": {}}");
        vmm
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.from.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    fn call(&mut self, command: &str) -> String {
        writeln!(self.to, "{command}").unwrap();
        self.line()
    }

    fn resize(&mut self, bytes: u64) {
        let command = format!(
            "{{\"execute\":\"block_resize\",\"arguments\":{{\"node-name\":\"disk\",\"size\":{bytes}}}}}"
        );
        assert_eq!(self.call(&command), "{\"return\": {}}");
    }
}

#[tokio::test]
async fn a_qcow2_disk_that_a_vmm_has_open_is_left_to_the_vmm_to_grow() {
    let bench = Bench::new();
    let driver = bench.driver();
    assert!(ensure(&driver, &spec(1, 1, DiskFormat::Qcow2)).await.unwrap().wrote());
    assert!(take(&driver, &attach(1, 1)).await.unwrap().change.wrote());
    let disk = bench.volume_dir(id(1)).join("disk.qcow2");
    let mut vmm = Vmm::open(&disk, "qcow2");
    let bytes = fs::read(&disk).unwrap();
    assert_eq!(ensure(&driver, &spec(1, 2, DiskFormat::Qcow2)).await.unwrap(), Change::Changed);
    assert_eq!(ensure(&driver, &spec(1, 2, DiskFormat::Qcow2)).await.unwrap(), Change::Unchanged);
    assert_eq!(fs::read(&disk).unwrap(), bytes, "the file is QEMU's");
    let status = driver.get(&Context::new(), id(1)).await.unwrap().unwrap();
    assert_eq!(status.spec, Some(spec(1, 2, DiskFormat::Qcow2)));
    assert_eq!((status.size_bytes, status.complete), (GIB, true));
    assert!(status.message.unwrap().contains("must grow it"));
    vmm.resize(2 * GIB);
    let status = driver.get(&Context::new(), id(1)).await.unwrap().unwrap();
    assert_eq!((status.size_bytes, status.message), (2 * GIB, None));
    // The VM is stopped before it was told of the next growth.
    assert_eq!(ensure(&driver, &spec(1, 3, DiskFormat::Qcow2)).await.unwrap(), Change::Changed);
    end(&vmm.process).await;
    assert_eq!(ensure(&driver, &spec(1, 3, DiskFormat::Qcow2)).await.unwrap(), Change::Changed);
    assert_eq!(virtual_size(&disk, "qcow2").await, 3 * GIB);
    check_image(&disk).await;
}

#[tokio::test]
async fn a_growth_that_a_vmm_was_not_told_of_is_done_before_the_vms_next_start() {
    let bench = Bench::new();
    let driver = bench.driver();
    assert!(ensure(&driver, &spec(1, 1, DiskFormat::Qcow2)).await.unwrap().wrote());
    assert!(take(&driver, &attach(1, 1)).await.unwrap().change.wrote());
    let disk = bench.volume_dir(id(1)).join("disk.qcow2");
    let vmm = Vmm::open(&disk, "qcow2");
    assert_eq!(ensure(&driver, &spec(1, 2, DiskFormat::Qcow2)).await.unwrap(), Change::Changed);
    let again = take(&driver, &attach(1, 1)).await.unwrap();
    assert_eq!(again.change, Change::Unchanged, "the VMM has it open");
    end(&vmm.process).await;
    assert_eq!(virtual_size(&disk, "qcow2").await, GIB);
    assert_eq!(take(&driver, &attach(1, 1)).await.unwrap().change, Change::Changed);
    assert_eq!(take(&driver, &attach(1, 1)).await.unwrap().change, Change::Unchanged);
    assert_eq!(virtual_size(&disk, "qcow2").await, 2 * GIB);
    check_image(&disk).await;
}

#[tokio::test]
async fn a_raw_disk_that_a_vmm_has_open_grows_at_once() {
    let bench = Bench::new();
    let driver = bench.driver();
    assert!(ensure(&driver, &spec(1, 1, DiskFormat::Raw)).await.unwrap().wrote());
    assert!(take(&driver, &attach(1, 1)).await.unwrap().change.wrote());
    let mut vmm = Vmm::open(&bench.volume_dir(id(1)).join("disk.raw"), "raw");
    assert_eq!(ensure(&driver, &spec(1, 2, DiskFormat::Raw)).await.unwrap(), Change::Changed);
    vmm.resize(2 * GIB);
    let status = driver.get(&Context::new(), id(1)).await.unwrap().unwrap();
    assert_eq!((status.size_bytes, status.message), (2 * GIB, None));
    end(&vmm.process).await;
}

#[tokio::test]
async fn a_disk_that_a_process_still_has_open_is_not_removed() {
    let bench = Bench::new();
    let driver = bench.driver();
    assert!(ensure(&driver, &spec(1, 1, DiskFormat::Qcow2)).await.unwrap().wrote());
    // Never attached, and yet open.
    let vmm = Vmm::open(&bench.volume_dir(id(1)).join("disk.qcow2"), "qcow2");
    let error = destroy(&driver, 1).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Conflict);
    assert!(error.to_string().contains("a process holds"), "{error}");
    end(&vmm.process).await;
    assert_eq!(destroy(&driver, 1).await.unwrap(), Change::Changed);
}

#[tokio::test]
async fn an_overlay_is_opened_by_a_real_vmm_over_its_base() {
    let bench = Bench::new();
    let driver = bench.driver();
    let image = bench.qcow2_image("image", 8, "the image").await;
    let wanted = copy_of(1, 1, DiskFormat::Qcow2, &image, DiskFormat::Qcow2);
    assert!(ensure(&driver, &wanted).await.unwrap().wrote());
    assert!(take(&driver, &attach(1, 1)).await.unwrap().change.wrote());
    let mut vmm = Vmm::open(&bench.volume_dir(id(1)).join("disk.qcow2"), "qcow2");
    let nodes = vmm.call("{\"execute\":\"query-named-block-nodes\",\"arguments\":{\"flat\":true}}");
    let base = bench.volume_dir(id(1)).join("base.qcow2");
    assert!(nodes.contains(text_of(&base)), "{nodes}");
    end(&vmm.process).await;
}
