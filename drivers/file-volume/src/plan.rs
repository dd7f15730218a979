//! What is to be done: pure functions of what is wanted and what is there.

use drivers_api::{AttachRequest, VmId, VolumeSpec};

use crate::{attachments::Record, error::VolumeError};

/// How a volume that is there is brought to its spec.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct EnsurePlan {
    /// The spec to be recorded, where the recorded one differs.
    pub(crate) record: Option<VolumeSpec>,
    /// The size to which the disk is to grow, where it is smaller.
    pub(crate) grow_to: Option<u64>,
}

/// Compares the wanted spec with the recorded one and the disk's size. The source is not compared: it is looked at only
/// when a volume is made, and the recorded one stays.
///
/// # Errors
/// For a shrink and another format. A growth that was recorded and not done may be taken back.
pub(crate) fn ensure(
    recorded: &VolumeSpec,
    size: u64,
    wanted: &VolumeSpec,
) -> Result<EnsurePlan, VolumeError> {
    if wanted.format != recorded.format {
        return Err(VolumeError::Format { wanted: wanted.format, is: recorded.format });
    }
    let bytes = wanted.size_gib.bytes();
    if bytes < size && bytes < recorded.size_gib.bytes() {
        return Err(VolumeError::Shrink { wanted: bytes, is: size });
    }
    let mut applied = wanted.clone();
    applied.source.clone_from(&recorded.source);
    Ok(EnsurePlan {
        record: (applied != *recorded).then_some(applied),
        grow_to: (bytes > size).then_some(bytes),
    })
}

/// How an attachment is made.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum AttachPlan {
    /// It is there.
    Keep,
    /// The VM has it in another way.
    Replace,
    /// It is new.
    Add,
}

/// Decides who may have the volume: one writer, or any number of readers.
///
/// # Errors
/// When other VMs have it in a way that excludes this one.
pub(crate) fn attach(
    records: &[Record],
    request: &AttachRequest,
) -> Result<AttachPlan, VolumeError> {
    let vms: Vec<VmId> = records
        .iter()
        .map(|record| record.attachment)
        .filter(|other| other.vm_uuid != request.vm_uuid)
        .filter(|other| !request.read_only || !other.read_only)
        .map(|other| other.vm_uuid)
        .collect();
    if !vms.is_empty() {
        return Err(VolumeError::Attached { vms });
    }
    let own = records.iter().find(|record| record.attachment.vm_uuid == request.vm_uuid);
    Ok(match own {
        Some(own) if *own == Record::wanted(request) => AttachPlan::Keep,
        Some(_) => AttachPlan::Replace,
        None => AttachPlan::Add,
    })
}

/// Refuses to remove what a VM has.
///
/// # Errors
/// Names the VMs.
pub(crate) fn destroy(records: &[Record]) -> Result<(), VolumeError> {
    if records.is_empty() {
        return Ok(());
    }
    Err(VolumeError::Attached {
        vms: records.iter().map(|record| record.attachment.vm_uuid).collect(),
    })
}

#[cfg(test)]
mod tests {
    use drivers_api::{DiskFormat, DisplayName, SizeGib};

    use super::*;

    const GIB: u64 = 1 << 30;

    fn spec(gib: u64) -> VolumeSpec {
        VolumeSpec::new(
            "3f2b8c1e-9a4d-4e6f-8b7a-1c2d3e4f5a6b".parse().unwrap(),
            "data".parse::<DisplayName>().unwrap(),
            SizeGib::new(gib).unwrap(),
            DiskFormat::Qcow2,
        )
    }

    #[test]
    fn the_same_spec_needs_nothing() {
        let plan = ensure(&spec(2), 2 * GIB, &spec(2)).unwrap();
        assert_eq!(plan, EnsurePlan { record: None, grow_to: None });
    }

    #[test]
    fn a_larger_size_is_recorded_and_grown_and_a_smaller_one_refused() {
        let plan = ensure(&spec(2), 2 * GIB, &spec(3)).unwrap();
        assert_eq!(plan, EnsurePlan { record: Some(spec(3)), grow_to: Some(3 * GIB) });
        let error = ensure(&spec(2), 2 * GIB, &spec(1)).unwrap_err();
        assert!(error.to_string().contains("grow-only"), "{error}");
    }

    #[test]
    fn a_growth_that_was_only_recorded_is_finished_or_taken_back() {
        let plan = ensure(&spec(3), 2 * GIB, &spec(3)).unwrap();
        assert_eq!(plan, EnsurePlan { record: None, grow_to: Some(3 * GIB) });
        let plan = ensure(&spec(3), 2 * GIB, &spec(2)).unwrap();
        assert_eq!(plan, EnsurePlan { record: Some(spec(2)), grow_to: None });
        assert!(ensure(&spec(3), 2 * GIB, &spec(1)).is_err());
    }

    #[test]
    fn a_disk_that_somebody_grew_by_hand_still_is_what_was_wanted() {
        let plan = ensure(&spec(2), 5 * GIB, &spec(2)).unwrap();
        assert_eq!(plan, EnsurePlan { record: None, grow_to: None });
    }

    #[test]
    fn a_later_source_is_not_a_change() {
        let mut wanted = spec(2);
        wanted.source = Some(drivers_api::VolumeSource::new(
            "localhost/images/debian:12".parse().unwrap(),
            None,
            DiskFormat::Qcow2,
        ));
        assert_eq!(ensure(&spec(2), 2 * GIB, &wanted).unwrap().record, None);
    }
}
