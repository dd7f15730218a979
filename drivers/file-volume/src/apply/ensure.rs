//! Brings a volume to its spec: makes it, or grows it.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use drivers_api::{Change, Context, DiskFormat, VolumeSpec};
use host::{fault, files::FileError, run::Run};

use super::{
    alone,
    create::{self, Making},
};
use crate::{
    error::VolumeError,
    image,
    layout::disk_name,
    locks::{Held, Key, try_lock_image},
    observe::{Live, check_header, observe, open_part},
    plan,
    pool::{Pool, off, with},
    sidecar::Sidecar,
};

/// How long `qemu-img resize` may take; it moves tables, never data.
const RESIZE_LIMIT: Duration = Duration::from_secs(120);

/// What the first, blocking, part left to do.
enum Begun {
    Done(Change),
    Making(Making),
    /// The image's tables must move, which `qemu-img` does.
    ToolGrows {
        held: Arc<Held>,
        disk: PathBuf,
        bytes: u64,
        undo: Option<Undo>,
    },
}

/// The record as it was, to be written again when the growth fails.
struct Undo {
    dir: PathBuf,
    sidecar: Sidecar,
}

impl Undo {
    fn run(&self) {
        // The disk has its old size, which the old record says too. Without the undo the growth stays recorded, and the
        // next call finishes it.
        if let Err(error) = self.sidecar.write(&self.dir) {
            tracing::debug!(error = %error, "a growth that failed stays recorded");
        }
    }
}

pub(crate) async fn ensure(
    pool: Arc<Pool>,
    cx: Context,
    spec: VolumeSpec,
) -> Result<Change, VolumeError> {
    disk_name(spec.format)?;
    let gate = pool.locks.gate(Key::volume(spec.uuid)).await;
    let inner = cx.clone();
    let begun = with(&pool, move |pool| {
        host::bound::check(&inner, "ensure", "volume")?;
        let held = Arc::new(pool.locks.hold(gate, Key::volume(spec.uuid))?);
        let observed = observe(&pool.layout, spec.uuid)?;
        match observed.live {
            Some(live) => {
                live.check_node(pool.node)?;
                bring(held, &live.usable()?, &spec)
            }
            None => create::begin(pool, &inner, held, spec).map(Begun::Making),
        }
    })
    .await?;
    match begun {
        Begun::Done(change) => Ok(change),
        Begun::Making(making) => create::finish(pool, cx, making).await,
        Begun::ToolGrows { held, disk, bytes, undo } => {
            let grown = grow_by_tool(&pool, &cx, &disk, bytes).await;
            off(move || {
                if let (Err(_), Some(undo)) = (&grown, undo) {
                    undo.run();
                }
                drop(held);
                grown
            })
            .await?;
            Ok(Change::Changed)
        }
    }
}

/// Brings a volume that is there to its spec.
fn bring(held: Arc<Held>, live: &Live, spec: &VolumeSpec) -> Result<Begun, VolumeError> {
    let plan = plan::ensure(&live.sidecar.spec, live.size, spec)?;
    let mut undo = None;
    let recorded = plan.record.is_some();
    if let Some(applied) = plan.record {
        let mut sidecar = live.sidecar.clone();
        sidecar.spec = applied;
        held.check()?;
        sidecar.write(&live.dir)?;
        fault::point("file.ensure.recorded")?;
        undo = Some(Undo { dir: live.dir.clone(), sidecar: live.sidecar.clone() });
    }
    let Some(bytes) = plan.grow_to else {
        return Ok(Begun::Done(Change::changed_if(recorded)));
    };
    let disk = live.disk_path()?;
    match grow(live, bytes) {
        Ok(Grown::Yes) => Ok(Begun::Done(Change::Changed)),
        Ok(Grown::InUse) => Ok(Begun::Done(Change::changed_if(recorded))),
        Ok(Grown::NeedsTool) => Ok(Begun::ToolGrows { held, disk, bytes, undo }),
        Err(error) => {
            if let Some(undo) = undo {
                undo.run();
            }
            Err(error)
        }
    }
}

/// Does a growth that was recorded when a VMM had the disk open and that the VMM was not told of before it ended. Answers
/// whether the disk grew.
pub(super) fn catch_up(live: &Live) -> bool {
    let bytes = live.sidecar.spec.size_gib.bytes();
    if live.size >= bytes {
        return false;
    }
    match grow(live, bytes) {
        Ok(Grown::Yes) => true,
        Ok(Grown::InUse | Grown::NeedsTool) => false,
        // The old size is valid, and the status says that it is not the wanted one: no reason to keep a VM from its disk.
        Err(error) => {
            tracing::warn!(volume = %live.sidecar.volume, error = %error, "a growth that is due failed");
            false
        }
    }
}

/// What became of a growth.
enum Grown {
    Yes,
    /// A VMM has the image open and is the one who must grow it.
    InUse,
    NeedsTool,
}

fn grow(live: &Live, bytes: u64) -> Result<Grown, VolumeError> {
    let path = live.disk_path()?;
    let file = open_part(&path, true)?;
    let fail = || FileError::of("grow", &path);
    if live.sidecar.spec.format == DiskFormat::Raw {
        // A longer file is all there is to it, also under a VMM that has it open.
        file.set_len(bytes).map_err(fail())?;
        fault::point("file.ensure.grown")?;
        file.sync_all().map_err(fail())?;
        return Ok(Grown::Yes);
    }
    let Some(_locked) = try_lock_image(&file).map_err(fail())? else {
        return Ok(Grown::InUse);
    };
    // Read again under the image's lock: a VMM that ended meanwhile may have changed it.
    let info = check_header(&file, &path, live.sidecar.base)?;
    if info.virtual_size >= bytes {
        return Ok(Grown::Yes);
    }
    if !image::grows_in_place(&info, bytes) {
        return Ok(Grown::NeedsTool);
    }
    image::grow(&file, &info, bytes, || fault::point("file.ensure.table-cleared"))
        .map_err(fail())??;
    fault::point("file.ensure.grown")?;
    Ok(Grown::Yes)
}

/// The header was checked; all the same the tool is told to open no backing file, whatever the header says by now.
async fn grow_by_tool(
    pool: &Pool,
    cx: &Context,
    disk: &Path,
    bytes: u64,
) -> Result<(), VolumeError> {
    let grown = Run::new(&pool.qemu_img)
        .args(["resize", "-q", "--"])
        .arg(alone(disk)?)
        .arg(bytes.to_string())
        .limit(RESIZE_LIMIT)
        .success(cx)
        .await;
    if grown.is_err() {
        host::bound::check(cx, "grow", "volume")?;
    }
    grown?;
    Ok(())
}
