use std::{collections::BTreeMap, sync::Mutex};

use async_trait::async_trait;
use drivers_api::{
    AttachRequest, AttachedVolume, BackingKind, Change, Context, DetachRequest, Error, HostId,
    HostInfo, Mark, Outcome, Result, Volume, VolumeId, VolumeSpec, VolumeStatus,
};

/// A first version: it remembers volumes, and makes none.
pub struct MyVolume {
    pub node: HostId,
    pub known: Mutex<BTreeMap<VolumeId, VolumeSpec>>,
}

impl MyVolume {
    fn status(&self, spec: &VolumeSpec) -> VolumeStatus {
        let mark = Mark::new(self.node, spec.uuid.uuid());
        VolumeStatus::new(spec.uuid, mark, Some(spec.clone()), spec.size_gib.bytes(), 0)
    }
}

#[async_trait]
impl Volume for MyVolume {
    fn name(&self) -> &str {
        "mine"
    }

    fn local(&self) -> bool {
        true
    }

    fn backings(&self) -> &[BackingKind] {
        &[BackingKind::File]
    }

    async fn host_info(&self, _cx: &Context) -> Result<HostInfo> {
        Ok(HostInfo::new(Some(self.node), "this-host", "my-volume"))
    }

    async fn ensure_volume(&self, _cx: &Context, spec: &VolumeSpec) -> Result<Change> {
        let mut known = self.known.lock().expect("no panic before");
        match known.insert(spec.uuid, spec.clone()) {
            None => Ok(Change::Created),
            Some(before) => Ok(Change::changed_if(before != *spec)),
        }
    }

    async fn destroy_volume(&self, _cx: &Context, volume: VolumeId) -> Result<Change> {
        let removed = self.known.lock().expect("no panic before").remove(&volume);
        Ok(Change::changed_if(removed.is_some()))
    }

    async fn attach_volume(
        &self,
        _cx: &Context,
        _request: &AttachRequest,
    ) -> Result<Outcome<AttachedVolume>> {
        Err(Error::unsupported("attach a volume with", "my-volume"))
    }

    async fn detach_volume(&self, _cx: &Context, _request: &DetachRequest) -> Result<Change> {
        Ok(Change::Unchanged)
    }

    async fn list(&self, _cx: &Context) -> Result<Vec<VolumeStatus>> {
        let known = self.known.lock().expect("no panic before");
        Ok(known.values().map(|spec| self.status(spec)).collect())
    }

    async fn get(&self, _cx: &Context, volume: VolumeId) -> Result<Option<VolumeStatus>> {
        let known = self.known.lock().expect("no panic before");
        Ok(known.get(&volume).map(|spec| self.status(spec)))
    }
}
