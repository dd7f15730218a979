//! Removes a volume: unpublished by one rename, then taken apart.

use std::{fs, sync::Arc};

use drivers_api::{Change, VolumeId};
use host::{
    fault,
    files::{self, FileError},
};

use crate::{
    bases,
    error::VolumeError,
    locks::{Held, Key, try_lock_image},
    observe::{Live, observe, open_regular},
    plan,
    pool::{Pool, with},
};

pub(crate) async fn destroy(pool: Arc<Pool>, id: VolumeId) -> Result<Change, VolumeError> {
    let gate = pool.locks.gate(Key::volume(id)).await;
    with(&pool, move |pool| {
        let held = pool.locks.hold(gate, Key::volume(id))?;
        let observed = observe(&pool.layout, id)?;
        let mut changed = files::remove_tree(&pool.layout.trash(id))?;
        let mut had_base = changed;
        if let Some(live) = observed.live {
            let live = check(pool, live)?;
            had_base |= live.sidecar.base.is_some();
            unpublish(pool, &held, &live, id)?;
            changed = true;
        }
        let staged = files::remove_tree(&pool.layout.staging(id))?;
        if had_base || staged {
            // The volume is gone; a copy that stays is found by the next removal or start.
            if let Err(error) = bases::collect(pool) {
                tracing::warn!(error = %error, "unused copies of images stay for now");
            }
        }
        Ok(Change::changed_if(changed || staged))
    })
    .await
}

/// Refuses what is not ours alone to remove.
fn check(pool: &Pool, live: Live) -> Result<Live, VolumeError> {
    live.check_node(pool.node)?;
    plan::destroy(&live.records)?;
    let live = live.attachments_known()?;
    if let Some(path) = &live.stranger {
        return Err(VolumeError::Stranger { path: path.clone() });
    }
    // A VMM that still runs although its attachment was released. What is no regular file is open nowhere.
    let path = live.disk_path()?;
    if let Ok(disk) = open_regular(&path, true)
        && try_lock_image(&disk).map_err(FileError::of("lock", &path))?.is_none()
    {
        return Err(VolumeError::InUse { path });
    }
    Ok(live)
}

fn unpublish(pool: &Pool, held: &Held, live: &Live, id: VolumeId) -> Result<(), VolumeError> {
    held.check()?;
    let trash = pool.layout.trash(id);
    fs::rename(&live.dir, &trash).map_err(FileError::of("unpublish", &live.dir))?;
    fault::point("file.destroy.unpublished")?;
    files::sync_parent(&trash)?;
    files::remove_tree(&trash)?;
    fault::point("file.destroy.removed")?;
    Ok(())
}
