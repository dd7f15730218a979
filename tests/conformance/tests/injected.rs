//! No call of a driver can fail, hang or answer with the wrong kind without a case that sees it.

use std::time::Duration;

use conformance::{
    Options, Report, check_hypervisor, check_image, check_network, check_volume,
    reference::{Fault, Host, Op, ReferenceBench, When},
};
use drivers_api::ErrorKind;

/// Which kits use a call.
#[expect(clippy::wildcard_enum_match_arm, reason = "the rest are the hypervisor's")]
fn kits(op: Op) -> &'static [&'static str] {
    match op {
        Op::HostInfo => &["hypervisor", "network", "volume", "image"],
        Op::EnsureNetwork
        | Op::DestroyNetwork
        | Op::AttachPort
        | Op::DetachPort
        | Op::EnsureSecurityGroup
        | Op::DestroySecurityGroup
        | Op::ListNetworks
        | Op::GetNetwork
        | Op::ListPorts
        | Op::GetPort => &["network"],
        Op::RotateMeshPeer => &["mesh"],
        Op::EnsureVolume
        | Op::DestroyVolume
        | Op::AttachVolume
        | Op::DetachVolume
        | Op::ListVolumes
        | Op::GetVolume => &["volume"],
        Op::Pull
        | Op::LocalPath
        | Op::DeleteImage
        | Op::InCache
        | Op::CollectImages
        | Op::ListImages
        | Op::GetImage => &["image"],
        _ => &["hypervisor"],
    }
}

fn options() -> Options {
    Options {
        call_limit: Duration::from_millis(200),
        prompt: Duration::from_millis(100),
        settle: Duration::from_millis(50),
        drop_points: 8,
        parallel: 2,
        // The tests of this file run side by side.
        process_census: false,
        ..Options::default()
    }
}

async fn check(kit: &str, host: &Host) -> Report {
    let (bench, options) = (ReferenceBench::new(host.clone()), options());
    match kit {
        "hypervisor" => check_hypervisor(&bench, &options).await,
        "network" => check_network(&bench, &options).await,
        "mesh" => check_network(&bench.with_meshes(), &options).await,
        "volume" => check_volume(&bench, &options).await,
        _ => check_image(&bench, &options).await,
    }
}

/// What the kits cannot see from outside: the reference driver resizes no CPUs and memory in a case, since only some
/// drivers can, and each in bounds of its own.
const UNSEEN: [Op; 2] = [Op::ResizeCpus, Op::ResizeMemory];

async fn each_is_caught(fault: impl Fn(Op) -> Fault) {
    for op in Op::ALL.iter().copied().filter(|op| !UNSEEN.contains(op)) {
        for kit in kits(op) {
            let host = Host::new();
            host.inject(fault(op));
            let report = check(kit, &host).await;
            assert!(!report.passed(), "{kit} passes with {:?}:\n{report}", fault(op));
        }
    }
}

#[tokio::test]
async fn a_call_that_always_fails_is_caught() {
    each_is_caught(|op| Fault::new(op, ErrorKind::Internal).for_ever()).await;
}

#[tokio::test]
async fn a_call_that_works_and_says_that_it_failed_is_caught() {
    each_is_caught(|op| Fault::new(op, ErrorKind::UnknownOutcome).at(When::After).for_ever()).await;
}

#[tokio::test]
async fn a_driver_without_faults_passes_under_the_same_options() {
    for kit in ["hypervisor", "network", "mesh", "volume", "image"] {
        let report = check(kit, &Host::new()).await;
        assert!(report.passed(), "{report}");
    }
}

#[tokio::test]
async fn a_call_that_hangs_at_its_deadline_is_no_hang_of_the_kit() {
    for (kit, op) in [
        ("hypervisor", Op::StartVm),
        ("network", Op::AttachPort),
        ("volume", Op::EnsureVolume),
        ("image", Op::Pull),
    ] {
        let host = Host::new();
        host.hang(op, None);
        let only = |name: &str| name.to_owned();
        let options = Options {
            only: vec![only("start-stop"), only("attach"), only("ensure"), only("pull")],
            ..options()
        };
        let bench = ReferenceBench::new(host.clone());
        let report = match kit {
            "hypervisor" => check_hypervisor(&bench, &options).await,
            "network" => check_network(&bench, &options).await,
            "volume" => check_volume(&bench, &options).await,
            _ => check_image(&bench, &options).await,
        };
        assert!(!report.passed(), "{kit} passes while {op} hangs");
    }
}
