//! Volumes as raw files in one directory: an example of a driver that somebody else writes.
//!
//! It depends on `drivers-api` and `async-trait` alone and runs on any executor. Each volume is two files: `UUID.raw`, the
//! disk, and `UUID.meta`, the mark with the spec as applied. The mark is written first and removed last, so whatever a
//! crash leaves is known as ours. A file without a mark is somebody else's and is never touched.

mod offload;
mod sidecar;

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::Arc,
};

use async_trait::async_trait;
use drivers_api::{
    AttachRequest, AttachedVolume, Attachment, Backing, BackingKind, Change, Context,
    DetachRequest, DiskFormat, Error, ErrorKind, HostId, HostInfo, HostPath, Mark, Outcome, Result,
    Volume, VolumeId, VolumeSpec, VolumeStatus,
};

use crate::{
    offload::{Wanted, offload},
    sidecar::{Sidecar, State, sync_directory_of},
};

/// The driver over one directory.
#[derive(Clone, Debug)]
pub struct PlainVolume {
    node: HostId,
    directory: Arc<Path>,
}

impl PlainVolume {
    /// A driver over a directory, which is made if it is not there.
    ///
    /// # Errors
    /// `Denied` or `Unavailable` when it cannot be made, `InvalidSpec` for a path that no [`HostPath`] can hold.
    pub fn open(node: HostId, directory: impl Into<PathBuf>) -> Result<Self> {
        let directory: PathBuf = directory.into();
        let object = directory.display().to_string();
        let path = directory.to_str().unwrap_or_default().parse::<HostPath>();
        path.map_err(|error| error.in_field("directory"))?;
        fs::create_dir_all(&directory)
            .and_then(|()| {
                let lock = directory.join(LOCK);
                OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(lock)
            })
            .map_err(|error| failed("open", &object, error))?;
        Ok(Self { node, directory: directory.into() })
    }
}

/// The lock's file, which also says that the directory is there: a missing mount has none.
const LOCK: &str = ".plain-volume.lock";

/// An error of the operating system, by what it means for the caller.
fn failed(operation: &'static str, object: impl std::fmt::Display, error: io::Error) -> Error {
    let (kind, remedy) = match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            (ErrorKind::Exhausted, "make room in the driver's directory")
        }
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            (ErrorKind::Denied, "let the agent write to the driver's directory")
        }
        _ => (ErrorKind::Unavailable, "check that the driver's directory is mounted and healthy"),
    };
    Error::new(kind, operation, object, "the directory cannot be used")
        .with_remedy(remedy)
        .with_source(error)
}

/// What a call works on: one volume's two files.
struct Files {
    driver: PlainVolume,
    volume: VolumeId,
    operation: &'static str,
    raw: PathBuf,
    meta: PathBuf,
}

impl Files {
    fn new(driver: PlainVolume, volume: VolumeId, operation: &'static str) -> Self {
        let raw = driver.directory.join(format!("{volume}.raw"));
        let meta = driver.directory.join(format!("{volume}.meta"));
        Self { driver, volume, operation, raw, meta }
    }

    fn object(&self) -> String {
        format!("volume {}", self.volume)
    }

    fn io(&self, error: io::Error) -> Error {
        failed(self.operation, self.object(), error)
    }

    fn error(&self, kind: ErrorKind, reason: impl std::fmt::Display) -> Error {
        Error::new(kind, self.operation, self.object(), reason)
    }

    /// One call at a time changes the directory; the kernel frees the lock of a process that dies. A directory that went
    /// away has no lock, and nothing in it is said to be absent.
    fn lock(&self, wanted: &Wanted) -> Result<File> {
        let lock = File::open(self.driver.directory.join(LOCK)).map_err(|error| self.io(error))?;
        lock.lock().map_err(|error| self.io(error))?;
        wanted.check()?;
        Ok(lock)
    }

    /// Our sidecar; `None` when the volume was seen not to be there.
    fn find(&self) -> Result<Option<Sidecar>> {
        File::open(self.driver.directory.join(LOCK)).map_err(|error| self.io(error))?;
        let found = Sidecar::read(&self.meta).map_err(|error| self.io(error))?;
        let foreign = match &found {
            Some(sidecar) => sidecar.node != self.driver.node || sidecar.spec.uuid != self.volume,
            None => self.raw.exists() || self.meta.exists(),
        };
        if foreign {
            let reason = format!("{} is there without our mark", self.raw.display());
            return Err(self.error(ErrorKind::Conflict, reason).with_remedy("move it away"));
        }
        Ok(found)
    }

    fn write(&self, sidecar: &Sidecar) -> Result<()> {
        sidecar.write(&self.meta).map_err(|error| self.io(error))
    }

    fn ensure(&self, wanted: &Wanted, spec: &VolumeSpec) -> Result<Change> {
        let _lock = self.lock(wanted)?;
        let found = self.find()?;
        let mut sidecar = match &found {
            Some(sidecar) => sidecar.clone(),
            None => Sidecar {
                node: self.driver.node,
                state: State::Partial,
                spec: spec.clone(),
                attachments: Vec::new(),
            },
        };
        let there = fs::metadata(&self.raw).map(|file| file.len()).unwrap_or_default();
        if spec.size_gib.bytes() < there {
            let reason = format!("the volume has {there} bytes and is grow-only");
            return Err(Error::invalid("size_gib", reason).during(self.operation, self.object()));
        }
        let complete = sidecar.state == State::Ready && there == spec.size_gib.bytes();
        if found.is_some() && complete && sidecar.spec == *spec {
            return Ok(Change::Unchanged);
        }
        if found.is_none() {
            self.write(&sidecar)?;
            wanted.check()?;
        }
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&self.raw)
            .map_err(|error| self.io(error))?;
        // A sparse file: a growth that fails leaves the old length.
        file.set_len(spec.size_gib.bytes()).map_err(|error| self.io(error))?;
        file.sync_all().map_err(|error| self.io(error))?;
        sidecar.state = State::Ready;
        sidecar.spec = spec.clone();
        self.write(&sidecar)?;
        Ok(if found.is_none() { Change::Created } else { Change::Changed })
    }

    fn destroy(&self, wanted: &Wanted) -> Result<Change> {
        let _lock = self.lock(wanted)?;
        let Some(mut sidecar) = self.find()? else { return Ok(Change::Unchanged) };
        if let Some(user) = sidecar.attachments.first() {
            let reason = format!("vm {} on host {} has it open", user.vm_uuid, user.host_uuid);
            return Err(self.error(ErrorKind::Conflict, reason).with_remedy("detach it first"));
        }
        sidecar.state = State::Partial;
        self.write(&sidecar)?;
        for path in [&self.raw, &self.meta] {
            match fs::remove_file(path) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(self.io(error)),
            }
            sync_directory_of(path).map_err(|error| self.io(error))?;
        }
        Ok(Change::Changed)
    }

    fn attach(&self, wanted: &Wanted, request: &AttachRequest) -> Result<Outcome<AttachedVolume>> {
        let _lock = self.lock(wanted)?;
        let found = self.find()?.filter(|sidecar| sidecar.state == State::Ready);
        let Some(mut sidecar) = found else {
            return Err(self.error(ErrorKind::NotFound, "there is no such volume"));
        };
        if request.host_uuid != self.driver.node {
            let reason = "files of this host cannot be opened on another one";
            return Err(self.error(ErrorKind::Unsupported, reason));
        }
        let mine = Attachment::new(request.host_uuid, request.vm_uuid, request.read_only);
        let others = sidecar.attachments.iter().filter(|other| other.vm_uuid != mine.vm_uuid);
        if let Some(other) = others.into_iter().find(|o| !(o.read_only && mine.read_only)) {
            let reason = format!("vm {} on host {} has it open", other.vm_uuid, other.host_uuid);
            return Err(self.error(ErrorKind::Conflict, reason).with_remedy("detach it there"));
        }
        let path: HostPath = self.raw.to_str().unwrap_or_default().parse().map_err(
            |error: drivers_api::ParseError| {
                self.error(ErrorKind::Internal, "the volume's path is none").with_source(error)
            },
        )?;
        let backing = Backing::File { path, format: DiskFormat::Raw };
        let answer = AttachedVolume::new(backing, request.read_only);
        if let Some(uid) = request.owner_uid {
            std::os::unix::fs::chown(&self.raw, Some(uid), None).map_err(|error| self.io(error))?;
        }
        if sidecar.attachments.contains(&mine) {
            return Ok(Outcome::new(Change::Unchanged, answer));
        }
        sidecar.attachments.retain(|other| other.vm_uuid != mine.vm_uuid);
        sidecar.attachments.push(mine);
        self.write(&sidecar)?;
        Ok(Outcome::new(Change::Created, answer))
    }

    fn detach(&self, wanted: &Wanted, request: &DetachRequest) -> Result<Change> {
        let _lock = self.lock(wanted)?;
        let Some(mut sidecar) = self.find()? else { return Ok(Change::Unchanged) };
        let before = sidecar.attachments.len();
        sidecar.attachments.retain(|other| {
            other.vm_uuid != request.vm_uuid || other.host_uuid != request.host_uuid
        });
        if sidecar.attachments.len() == before {
            return Ok(Change::Unchanged);
        }
        self.write(&sidecar)?;
        Ok(Change::Changed)
    }

    fn status(&self) -> Result<Option<VolumeStatus>> {
        let Some(sidecar) = self.find()? else { return Ok(None) };
        let file = fs::metadata(&self.raw).ok();
        let bytes = file.as_ref().map_or(0, fs::Metadata::len);
        // `st_blocks` counts units of 512 bytes: stat(3type).
        let allocated = file.as_ref().map_or(0, |file| file.blocks() * 512);
        let complete = sidecar.state == State::Ready && bytes == sidecar.spec.size_gib.bytes();
        let spec = (sidecar.state == State::Ready).then_some(sidecar.spec);
        let mark = Mark::new(sidecar.node, self.volume.uuid());
        let mut status = VolumeStatus::new(self.volume, mark, spec, bytes, allocated);
        status.complete = complete;
        status.attachments = sidecar.attachments;
        if !complete {
            status.message = Some("it was not finished, or its file was changed".to_owned());
        }
        Ok(Some(status))
    }
}

impl PlainVolume {
    fn list_all(&self, wanted: &Wanted) -> Result<Vec<VolumeStatus>> {
        let unreadable = |error| failed("list", "volumes", error);
        File::open(self.directory.join(LOCK)).map_err(unreadable)?;
        let mut all = Vec::new();
        for entry in fs::read_dir(&self.directory).map_err(unreadable)? {
            wanted.check()?;
            let path = entry.map_err(unreadable)?.path();
            let is_meta = path.extension().is_some_and(|extension| extension == "meta");
            let stem = path.file_stem().and_then(|stem| stem.to_str());
            let Some(volume) = stem.filter(|_| is_meta).and_then(|stem| stem.parse().ok()) else {
                continue;
            };
            match Files::new(self.clone(), volume, "list").status() {
                Ok(status) => all.extend(status),
                // Not ours: in no list.
                Err(error) if error.kind() == ErrorKind::Conflict => {}
                Err(error) => return Err(error),
            }
        }
        Ok(all)
    }
}

#[async_trait]
impl Volume for PlainVolume {
    fn name(&self) -> &str {
        "plain"
    }

    fn local(&self) -> bool {
        true
    }

    fn backings(&self) -> &[BackingKind] {
        &[BackingKind::File]
    }

    async fn host_info(&self, cx: &Context) -> Result<HostInfo> {
        let node = self.node;
        offload(cx, "ask", "the host's name", move |_| {
            let name = fs::read_to_string("/proc/sys/kernel/hostname")
                .map_err(|error| failed("ask", "the host's name", error))?;
            Ok(HostInfo::new(Some(node), name.trim(), "plain-volume"))
        })
        .await
    }

    async fn ensure_volume(&self, cx: &Context, spec: &VolumeSpec) -> Result<Change> {
        if spec.format != DiskFormat::Raw {
            return Err(Error::invalid("format", "this driver has raw volumes only"));
        }
        if spec.source.is_some() {
            return Err(
                Error::unsupported("copy an image with", "plain-volume").with_field("source")
            );
        }
        let files = Files::new(self.clone(), spec.uuid, "ensure");
        let spec = spec.clone();
        let object = files.object();
        offload(cx, "ensure", object, move |wanted| files.ensure(wanted, &spec)).await
    }

    async fn destroy_volume(&self, cx: &Context, volume: VolumeId) -> Result<Change> {
        let files = Files::new(self.clone(), volume, "destroy");
        let object = files.object();
        offload(cx, "destroy", object, move |wanted| files.destroy(wanted)).await
    }

    async fn attach_volume(
        &self,
        cx: &Context,
        request: &AttachRequest,
    ) -> Result<Outcome<AttachedVolume>> {
        if !request.accepts.contains(&BackingKind::File) {
            return Err(Error::unsupported("attach a file with", "a hypervisor that opens none"));
        }
        let files = Files::new(self.clone(), request.volume_uuid, "attach");
        let request = request.clone();
        let object = files.object();
        offload(cx, "attach", object, move |wanted| files.attach(wanted, &request)).await
    }

    async fn detach_volume(&self, cx: &Context, request: &DetachRequest) -> Result<Change> {
        let files = Files::new(self.clone(), request.volume_uuid, "detach");
        let request = *request;
        let object = files.object();
        offload(cx, "detach", object, move |wanted| files.detach(wanted, &request)).await
    }

    async fn list(&self, cx: &Context) -> Result<Vec<VolumeStatus>> {
        let driver = self.clone();
        offload(cx, "list", "volumes", move |wanted| driver.list_all(wanted)).await
    }

    async fn get(&self, cx: &Context, volume: VolumeId) -> Result<Option<VolumeStatus>> {
        let files = Files::new(self.clone(), volume, "get");
        let object = files.object();
        offload(cx, "get", object, move |_| files.status()).await
    }
}
