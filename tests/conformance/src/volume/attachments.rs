//! Who has a volume open.

use drivers_api::{Attachment, Backing, Change, DiskFormat, ErrorKind, Volume, VolumeSpec};

use super::{Kit, vm};
use crate::kit::{Check, expect, not_applicable, same};

impl Kit<'_> {
    pub(super) async fn made(&self, driver: &dyn Volume, n: u32) -> Check<VolumeSpec> {
        let spec = self.volume(n).await;
        let _ = self.ensure(driver, &spec).await?;
        Ok(spec)
    }

    /// Checks who has a volume open.
    pub(super) async fn open_in(
        &self,
        driver: &dyn Volume,
        spec: &VolumeSpec,
        vms: &[(u8, bool)],
    ) -> Check {
        let mut found = self.status(driver, spec).await?.attachments;
        let mut wanted = Vec::new();
        for (n, read_only) in vms {
            wanted.push(Attachment::new(self.bench.node(), vm(*n)?, *read_only));
        }
        found.sort_by_key(|attachment| attachment.vm_uuid);
        wanted.sort_by_key(|attachment| attachment.vm_uuid);
        same("who has the volume open", &found, &wanted)
    }
}

pub(super) async fn attach(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let spec = kit.made(&*driver, 0).await?;
    let request = kit.request(&*driver, &spec, 0)?;
    let answer = kit.attach(&*driver, &request).await?;
    expect(answer.change.wrote(), "attach_volume says that it changed nothing")?;
    let attached = answer.value;
    expect(!attached.read_only, "a writable attachment is answered as read-only")?;
    let kind = attached.backing.kind();
    expect(request.accepts.contains(&kind), format_args!("the kind {kind:?} was not asked for"))?;
    kit.open_in(&*driver, &spec, &[(0, false)]).await?;
    if let Backing::File { path, format } = &attached.backing {
        same("the format of the file", format, &spec.format)?;
        // The reference host has no files; any other host that is this one has them.
        if let Ok(file) = tokio::fs::metadata(path.as_path()).await
            && *format == DiskFormat::Raw
        {
            same("the length of the raw file", &file.len(), &spec.size_gib.bytes())?;
        }
    }
    Ok(())
}

pub(super) async fn attach_again(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let spec = kit.made(&*driver, 0).await?;
    let request = kit.request(&*driver, &spec, 0)?;
    let first = kit.attach(&*driver, &request).await?;
    let before = kit.bench.census().await;
    let again = kit.attach(&*driver, &request).await?;
    same("attach_volume again", &again.change, &Change::Unchanged)?;
    same("its answer", &again.value, &first.value)?;
    same("ensure_volume", &kit.ensure(&*driver, &spec).await?, &Change::Unchanged)?;
    kit.open_in(&*driver, &spec, &[(0, false)]).await?;
    kit.unwritten(&before).await
}

pub(super) async fn attach_other(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let spec = kit.made(&*driver, 0).await?;
    let first = kit.request(&*driver, &spec, 0)?;
    let _ = kit.attach(&*driver, &first).await?;
    for read_only in [false, true] {
        let mut other = kit.request(&*driver, &spec, 1)?;
        other.read_only = read_only;
        let cx = kit.run.cx();
        let call = driver.attach_volume(&cx, &other);
        let what = "attach_volume of a volume that another VM writes";
        let error = kit.run.fails(what, &[ErrorKind::Conflict], call).await?;
        let text = error.chain();
        expect(
            text.contains(&first.vm_uuid.to_string()),
            format_args!("the conflict does not name the VM that has the volume: {text}"),
        )?;
    }
    kit.open_in(&*driver, &spec, &[(0, false)]).await
}

pub(super) async fn readers(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let spec = kit.made(&*driver, 0).await?;
    for n in 0..2 {
        let mut request = kit.request(&*driver, &spec, n)?;
        request.read_only = true;
        let cx = kit.run.cx();
        match kit.run.call("attach_volume", driver.attach_volume(&cx, &request)).await? {
            Ok(answer) => expect(answer.value.read_only, "a reader may write")?,
            Err(error) if error.kind() == ErrorKind::Unsupported => {
                return not_applicable("the driver shares no volumes");
            }
            Err(error) => {
                return crate::kit::failed(format_args!("attach_volume of reader {n}: {error:?}"));
            }
        }
    }
    kit.open_in(&*driver, &spec, &[(0, true), (1, true)]).await?;
    let writer = kit.request(&*driver, &spec, 2)?;
    let cx = kit.run.cx();
    let call = driver.attach_volume(&cx, &writer);
    kit.run.fails("attach_volume of a writer beside readers", &[ErrorKind::Conflict], call).await?;
    kit.open_in(&*driver, &spec, &[(0, true), (1, true)]).await
}

pub(super) async fn kinds(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let spec = kit.made(&*driver, 0).await?;
    let mut request = kit.request(&*driver, &spec, 0)?;
    request.accepts.clear();
    let cx = kit.run.cx();
    let call = driver.attach_volume(&cx, &request);
    kit.run.fails("attach_volume of no kind", &[ErrorKind::Unsupported], call).await?;
    kit.open_in(&*driver, &spec, &[]).await
}

pub(super) async fn detach(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let spec = kit.made(&*driver, 0).await?;
    let request = kit.request(&*driver, &spec, 0)?;
    let _ = kit.attach(&*driver, &request).await?;
    let other = kit.request(&*driver, &spec, 1)?;
    let untouched = kit.detach(&*driver, &other).await?;
    same("detach_volume by a VM that does not have it", &untouched, &Change::Unchanged)?;
    kit.open_in(&*driver, &spec, &[(0, false)]).await?;
    same("detach_volume", &kit.detach(&*driver, &request).await?, &Change::Changed)?;
    same("detach_volume again", &kit.detach(&*driver, &request).await?, &Change::Unchanged)?;
    kit.whole(&*driver, &spec).await?;
    kit.open_in(&*driver, &spec, &[]).await?;
    let _ = kit.attach(&*driver, &other).await?;
    kit.open_in(&*driver, &spec, &[(1, false)]).await
}

pub(super) async fn destroy_attached(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let spec = kit.made(&*driver, 0).await?;
    let request = kit.request(&*driver, &spec, 0)?;
    let _ = kit.attach(&*driver, &request).await?;
    let cx = kit.run.cx();
    let call = driver.destroy_volume(&cx, spec.uuid);
    let error =
        kit.run.fails("destroy_volume of an open volume", &[ErrorKind::Conflict], call).await?;
    let text = error.chain();
    expect(
        text.contains(&request.vm_uuid.to_string()),
        format_args!("the conflict does not name who has the volume: {text}"),
    )?;
    kit.whole(&*driver, &spec).await?;
    let _ = kit.detach(&*driver, &request).await?;
    same("destroy_volume", &kit.destroy(&*driver, &spec).await?, &Change::Changed)
}

pub(super) async fn fresh_start(kit: &Kit<'_>) -> Check {
    let driver = kit.open().await?;
    let spec = kit.made(&*driver, 0).await?;
    let request = kit.request(&*driver, &spec, 0)?;
    let first = kit.attach(&*driver, &request).await?;
    drop(driver);
    let driver = kit.open().await?;
    kit.open_in(&*driver, &spec, &[(0, false)]).await?;
    let again = kit.attach(&*driver, &request).await?;
    same("attach_volume after a fresh start", &again.change, &Change::Unchanged)?;
    same("its answer", &again.value, &first.value)?;
    let cx = kit.run.cx();
    let other = kit.request(&*driver, &spec, 1)?;
    let call = driver.attach_volume(&cx, &other);
    let what = "attach_volume by another VM after a fresh start";
    kit.run.fails(what, &[ErrorKind::Conflict], call).await?;
    same("detach_volume", &kit.detach(&*driver, &request).await?, &Change::Changed)
}
