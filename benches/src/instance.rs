//! One instance: from the accepted spec to QEMU's exec, from there to running, and its stop.

use std::{path::Path, sync::Arc, time::Duration};

use driver_file_volume::{FileVolume, FileVolumeConfig};
use driver_linux_bridge::{BridgeConfig, LinuxBridge};
use driver_oci_image::{OciImage, OciImageConfig};
use driver_qemu_kvm::{AccelChoice, QemuConfig, QemuKvm};
use drivers_api::{Context, Hypervisor};
use host::run::Run;
use reconciler::{
    Drivers,
    wanted::{Key, Kind},
};
use serde_json::json;
use testbed::{
    guest,
    netns::in_netns,
    registry::{Artifact, Blob, RealRegistry},
};
use tokio::time::Instant;

use crate::{
    Options,
    figures::{Figures, Times, say},
    rig::{Rig, key, node, wanted},
    vmm_clock,
};

/// Measures; see the module.
pub(crate) fn measure(options: &Options) -> Figures {
    let rounds = if options.quick { 4 } else { 40 };
    let hand = in_netns(move || by_hand(rounds.min(20)));
    let ours = in_netns(move || ours(rounds));
    let mut figures = Figures::default();
    let [prepare, boot, stop] = hand.map(|times| times.quantile_ms(0.5));
    let exec = ours.exec.quantile_ms(0.5);
    let by_script = format!("{prepare:.1} ms by script");
    figures.at_most("accepted spec to QEMU exec, p50", exec, "ms", 5.0, &by_script);
    figures.at_most(
        "accepted spec to QEMU exec, p99",
        ours.exec.quantile_ms(0.99),
        "ms",
        15.0,
        &by_script,
    );
    figures.plain("the script takes that many times as long", prepare / exec, "x", "");
    let running = ours.running.quantile_ms(0.5);
    figures.at_most(
        "QEMU exec to running, p50",
        running / boot,
        "x",
        1.1,
        &format!("{running:.1} ms, bare QEMU {boot:.1} ms"),
    );
    let stopped = ours.stop.quantile_ms(0.5);
    figures.at_most(
        "stop of a tiny guest over QEMU's own, p50",
        stopped - stop,
        "ms",
        20.0,
        &format!("{stopped:.1} ms, QEMU's own {stop:.1} ms"),
    );
    figures
}

struct Ours {
    exec: Times,
    running: Times,
    stop: Times,
}

async fn ours(rounds: u32) -> Ours {
    let dir = tempfile::Builder::new().prefix("bcd-").tempdir_in("/tmp").expect("a directory");
    let registry = RealRegistry::start().await.expect("docker-registry starts");
    push(&registry, dir.path()).await;
    let qemu = Arc::new(open_qemu(dir.path()).await);
    let drivers = Drivers::new()
        .hypervisor("qemu-kvm", Arc::clone(&qemu) as _)
        .network(
            "linux-bridge",
            Arc::new(
                LinuxBridge::open(BridgeConfig::new(
                    node(),
                    "bench",
                    dir.path().join("net"),
                    dir.path().join("netrun"),
                ))
                .expect("the bridge driver opens"),
            ),
        )
        .volume(
            "file",
            Arc::new(
                FileVolume::open(FileVolumeConfig::new(
                    node(),
                    "bench",
                    dir.path().join("volumes"),
                ))
                .expect("the pool opens"),
            ),
        )
        .image(
            "oci",
            Arc::new(
                OciImage::open(OciImageConfig::new(node(), "bench", dir.path().join("images")))
                    .expect("the cache opens"),
            ),
        );
    let rig = Rig::new(drivers, Duration::from_secs(3600));
    let host = registry.host();
    rig.store.put(wanted(Kind::Image, "tiny", &json!({ "ref": format!("{host}/tiny:latest") })));
    rig.store.put(wanted(Kind::Image, "base", &json!({ "ref": format!("{host}/base:latest") })));
    rig.store.put(wanted(Kind::Network, "lan", &json!({ "type": "nat", "cidr": "10.77.0.0/24" })));
    rig.ready(&[key(Kind::Image, "tiny"), key(Kind::Image, "base"), key(Kind::Network, "lan")])
        .await;

    let mut measured =
        Ours { exec: Times::default(), running: Times::default(), stop: Times::default() };
    for round in 0..rounds {
        let (name, volume) = (format!("vm{round:02}"), format!("root{round:02}"));
        let keys: [Key; 2] = [key(Kind::Instance, &name), key(Kind::Volume, &volume)];
        let before = vmm_clock::execs(dir.path()).len();
        let accepted = vmm_clock::now();
        rig.store.put(wanted(
            Kind::Volume,
            &volume,
            &json!({ "size_gib": 1, "source": { "image": "base" } }),
        ));
        rig.store.put(wanted(Kind::Instance, &name, &json!({
            "cpus": 1, "memory_mib": 64, "boot": { "kind": "oci_image", "ref": "tiny", "cmdline": "mode=i" },
            "disks": [{ "name": "root", "volume": volume }], "nics": [{ "name": "lan", "network": "lan" }],
        })));
        rig.ready(&keys).await;
        let running = vmm_clock::now();
        if round + 1 == rounds {
            show_steps(&rig, &keys);
        }
        if let Some(exec) = vmm_clock::execs(dir.path()).get(before) {
            measured.exec.push(exec.saturating_sub(accepted));
            measured.running.push(running.saturating_sub(*exec));
        }
        measured.stop.push(stop(&rig, &qemu, &name).await);
        rig.remove(&keys).await;
    }
    rig.reconciler.shutdown().await;
    measured
}

/// Where the time of a round went.
fn show_steps(rig: &Rig, keys: &[Key]) {
    for key in keys {
        for executed in rig.reconciler.status(key).map(|status| status.executed).unwrap_or_default()
        {
            let ms = executed.took.as_secs_f64() * 1000.0;
            say(&format!("{ms:>9.2} ms  {}", executed.step));
        }
    }
}

/// Stops a VM by its driver once its guest listens to the button.
async fn stop(rig: &Rig, qemu: &QemuKvm, name: &str) -> Duration {
    let cx = Context::new();
    let instance = key(Kind::Instance, name);
    let vm = drivers_api::VmId::new(rig.reconciler.status(&instance).expect("a status").uuid);
    let console = qemu.console().expect("a console");
    loop {
        let log = console.console_log(&cx, vm, 4096).await.expect("a log");
        if String::from_utf8_lossy(&log).contains("IDLE") {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let begun = Instant::now();
    let change = qemu.stop_vm(&cx, vm, Duration::from_secs(20)).await.expect("it stops");
    assert!(change.wrote(), "it ran");
    begun.elapsed()
}

async fn open_qemu(dir: &Path) -> QemuKvm {
    let mut config = QemuConfig::new(node(), "bench", dir.join("vms"), dir.join("run"));
    config.qemu = vmm_clock::install(dir).expect("a copy of the bench");
    config.accel = AccelChoice::Tcg;
    QemuKvm::open(config).await.expect("the QEMU driver opens")
}

async fn push(registry: &RealRegistry, dir: &Path) {
    let kernel = std::fs::read(guest::tiny(dir).expect("as and ld make the tiny guest"))
        .expect("the tiny guest");
    let tiny =
        Artifact::new(vec![Blob::new("application/vnd.bcd.kernel.v1", kernel).title("kernel")]);
    let disk = Blob::new("application/vnd.bcd.disk.raw.v1", vec![0x5a; 8 << 20]).title("disk.raw");
    registry.push("tiny", "latest", &tiny).await.expect("the registry takes the guest");
    registry
        .push("base", "latest", &Artifact::new(vec![disk]))
        .await
        .expect("the registry takes the disk");
}

async fn by_hand(rounds: u32) -> [Times; 3] {
    let dir = tempfile::tempdir().expect("a directory");
    let kernel = guest::tiny(dir.path()).expect("as and ld make the tiny guest");
    let lines = script(&[
        "instance",
        &dir.path().display().to_string(),
        &kernel.display().to_string(),
        &rounds.to_string(),
    ])
    .await;
    ["prepare", "boot", "stop"].map(|name| times_of(&lines, name))
}

/// Runs the script beside which we are measured.
pub(crate) async fn script(args: &[&str]) -> String {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("by-hand");
    let run = Run::new(script).args(args).limit(Duration::from_secs(200));
    let output = run.success(&Context::new()).await.expect("benches/by-hand runs");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The times of one name in the script's lines.
pub(crate) fn times_of(lines: &str, name: &str) -> Times {
    let mut times = Times::default();
    for line in lines.lines() {
        if let Some((found, micros)) = line.split_once(' ')
            && found == name
            && let Ok(micros) = micros.parse()
        {
            times.push(Duration::from_micros(micros));
        }
    }
    times
}
