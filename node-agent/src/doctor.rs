//! What the host and the agent need: there, missing, and what to do.

use std::{
    fs::OpenOptions,
    path::{Path, PathBuf},
    time::Duration,
};

use driver_linux_bridge::FirewallMode;
use drivers_api::Context;
use host::run::{FIXED_PATH, Run};

use crate::{
    config::{Accel, Config},
    inventory,
    node::Node,
};

/// How a need is met.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It is.
    Ok,
    /// The agent works without it, with less.
    Warning,
    /// Something cannot work.
    Missing,
}

impl Verdict {
    /// The word on the wire and for people.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Missing => "missing",
        }
    }
}

/// One need.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Check {
    /// What is needed.
    pub name: String,
    /// How it is met.
    pub verdict: Verdict,
    /// What was found.
    pub found: String,
    /// What to do, unless it is met.
    pub remedy: String,
}

impl Check {
    fn new(
        name: &str,
        verdict: Verdict,
        found: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        let remedy = if verdict == Verdict::Ok { String::new() } else { remedy.into() };
        Self { name: name.to_owned(), verdict, found: found.into(), remedy }
    }
}

/// What can be seen without an agent.
pub async fn of_config(config: &Config) -> Vec<Check> {
    let mut checks = vec![root(), machine_id(config)];
    checks.push(
        program("qemu", &config.qemu.binary, "--version", "apt-get install qemu-system-x86").await,
    );
    checks.push(
        program("qemu-img", Path::new("qemu-img"), "--version", "apt-get install qemu-utils").await,
    );
    checks.push(kvm(config));
    checks.push(ovmf(config));
    checks.push(
        program("dnsmasq", &config.network.dnsmasq, "--version", "apt-get install dnsmasq-base")
            .await,
    );
    checks.push(program("nft", &config.network.nft, "--version", "apt-get install nftables").await);
    checks.push(nftables(config).await);
    checks.push(device("tun", "/dev/net/tun", Verdict::Missing, "modprobe tun"));
    checks.push(forwarding());
    checks.push(cgroup(config));
    checks.push(space("space for state", &config.state_dir));
    checks.push(space("space for volumes", &config.volumes_dir()));
    checks.push(space("space for images", &config.images_dir()));
    checks.push(socket_paths(config));
    checks
}

/// What an agent sees: the host, its store and its drivers.
pub async fn of_node(node: &Node) -> Vec<Check> {
    let mut checks = of_config(node.config()).await;
    let store = node.trouble().map_or_else(
        || {
            let found = node.store().dir().display().to_string();
            Check::new("store", Verdict::Ok, found, "")
        },
        |trouble| {
            let remedy = "see \"The state directory\" in docs/config.md";
            Check::new("store", Verdict::Missing, trouble.to_string(), remedy)
        },
    );
    checks.push(store);
    if node.trouble().is_none() {
        checks.push(match node.unclaimed().await {
            Ok(found) if found.is_empty() => Check::new("claims", Verdict::Ok, "all that is on the host is wanted", ""),
            Ok(found) => {
                let names: Vec<_> = found
                    .iter()
                    .take(10)
                    .map(|one| format!("{:?} {}", one.object, one.name.as_deref().unwrap_or("?")))
                    .collect();
                let text = format!("{} objects on the host are claimed by nobody: {}", found.len(), names.join(", "));
                let remedy = "apply their manifests: what has the same name is adopted. Nothing of it is removed meanwhile";
                Check::new("claims", Verdict::Warning, text, remedy)
            }
            Err(faults) => Check::new("claims", Verdict::Warning, faults.to_string(), "see the driver's line"),
        });
    }
    for driver in inventory::drivers(node.drivers()).await {
        let name = format!("driver {}", driver.id);
        checks.push(match driver.error {
            None => {
                let found =
                    if driver.backend.is_empty() { "answers".to_owned() } else { driver.backend };
                Check::new(&name, Verdict::Ok, found, "")
            }
            Some(error) => Check::new(
                &name,
                Verdict::Missing,
                error,
                "mend the cause; the agent tries again by itself",
            ),
        });
    }
    checks
}

fn root() -> Check {
    let uid = rustix::process::geteuid().as_raw();
    let verdict = if uid == 0 { Verdict::Ok } else { Verdict::Missing };
    Check::new(
        "root",
        verdict,
        format!("uid {uid}"),
        "run the agent as root: it makes links, rules and VMs",
    )
}

fn machine_id(config: &Config) -> Check {
    if let Some(id) = config.node_id {
        return Check::new("node id", Verdict::Ok, format!("{id}, from the configuration"), "");
    }
    match crate::node_id::of_this_machine() {
        Ok(id) => Check::new("node id", Verdict::Ok, id.to_string(), ""),
        Err(error) => {
            let remedy = "set node_id in the configuration, or run systemd-machine-id-setup";
            Check::new("node id", Verdict::Missing, error.to_string(), remedy)
        }
    }
}

/// A program and the first line that it says of its version.
async fn program(name: &str, binary: &Path, flag: &str, install: &str) -> Check {
    let Some(path) = find(binary) else {
        let found = format!("{} is not in {FIXED_PATH}", binary.display());
        return Check::new(name, Verdict::Missing, found, install);
    };
    let run = Run::new(&path).arg(flag).limit(Duration::from_secs(5));
    match run.success(&Context::new()).await {
        Ok(output) => {
            let text = String::from_utf8_lossy(&output.stdout);
            let line = crate::logging::for_terminal(text.lines().next().unwrap_or_default());
            Check::new(name, Verdict::Ok, format!("{}: {line}", path.display()), "")
        }
        Err(error) => Check::new(name, Verdict::Missing, error.to_string(), install),
    }
}

/// A program by its path, or by its name in the fixed search path.
pub(crate) fn find(binary: &Path) -> Option<PathBuf> {
    if binary.is_absolute() {
        return binary.exists().then(|| binary.to_owned());
    }
    FIXED_PATH.split(':').map(|dir| Path::new(dir).join(binary)).find(|path| path.exists())
}

fn device(name: &str, path: &str, lack: Verdict, remedy: &str) -> Check {
    match OpenOptions::new().read(true).write(true).open(path) {
        Ok(_) => Check::new(name, Verdict::Ok, format!("{path} opens"), ""),
        Err(error) => Check::new(name, lack, format!("{path}: {error}"), remedy),
    }
}

fn kvm(config: &Config) -> Check {
    kvm_with("/dev/kvm", config)
}

fn kvm_with(path: &str, config: &Config) -> Check {
    let lack = match (config.qemu.accel, config.qemu.allow_tcg) {
        (Accel::Tcg, _) => {
            return Check::new("kvm", Verdict::Ok, "not used: qemu.accel is \"tcg\"", "");
        }
        (Accel::Auto, true) => Verdict::Warning,
        (Accel::Auto, false) | (Accel::Kvm, _) => Verdict::Missing,
    };
    let remedy = "enable virtualisation in the firmware, or nested virtualisation on the outer host, and modprobe kvm; \
                  without it guests are emulated where qemu.allow_tcg permits, many times slower";
    let check = device("kvm", path, lack, remedy);
    if check.verdict != Verdict::Ok {
        return check;
    }
    let device = check.found;
    let (verdict, found) = match driver_qemu_kvm::probed_kvm(&config.run_dir.join("qemu")) {
        // Taken without a probe.
        None if config.qemu.accel == Accel::Kvm => {
            (Verdict::Ok, "used unprobed: qemu.accel is \"kvm\"".to_owned())
        }
        None => {
            (Verdict::Ok, "not probed in this boot: the first start of a VM does it".to_owned())
        }
        Some((true, version)) => {
            (Verdict::Ok, format!("the probe guest ran at real speed ({version})"))
        }
        Some((false, version)) => (
            lack,
            format!("the probe guest did not run at real speed ({version}): KVM is not used"),
        ),
    };
    let remedy = "use a host whose KVM is not emulated itself (nested virtualisation by hardware); remove accel.json in \
                  run_dir/qemu and start the agent again to probe anew";
    Check::new("kvm", verdict, format!("{device}; {found}"), remedy)
}

/// Where distributions keep UEFI firmware: its code, and the template of its variables.
const OVMF: [(&str, &str); 4] = [
    ("/usr/share/OVMF/OVMF_CODE_4M.fd", "/usr/share/OVMF/OVMF_VARS_4M.fd"),
    ("/usr/share/OVMF/OVMF_CODE.fd", "/usr/share/OVMF/OVMF_VARS.fd"),
    ("/usr/share/edk2/ovmf/OVMF_CODE.fd", "/usr/share/edk2/ovmf/OVMF_VARS.fd"),
    ("/usr/share/edk2/x64/OVMF_CODE.4m.fd", "/usr/share/edk2/x64/OVMF_VARS.4m.fd"),
];

/// The firmware's code and variables: as configured, else where distributions keep them.
pub(crate) fn firmware(config: &Config) -> Option<(PathBuf, PathBuf)> {
    let given = |path: &PathBuf| Some(path.clone()).filter(|path| !path.as_os_str().is_empty());
    let there =
        OVMF.into_iter().find(|(code, vars)| Path::new(code).exists() && Path::new(vars).exists());
    let code = given(&config.qemu.ovmf_code).or_else(|| there.map(|(code, _)| code.into()))?;
    let vars = given(&config.qemu.ovmf_vars).or_else(|| there.map(|(_, vars)| vars.into()))?;
    Some((code, vars))
}

fn ovmf(config: &Config) -> Check {
    match firmware(config).filter(|(code, vars)| code.exists() && vars.exists()) {
        Some((code, _)) => Check::new("uefi firmware", Verdict::Ok, code.display().to_string(), ""),
        None => Check::new(
            "uefi firmware",
            Verdict::Warning,
            "not found: instances with boot kind uki or firmware cannot start",
            "apt-get install ovmf",
        ),
    }
}

async fn nftables(config: &Config) -> Check {
    let Some(path) = find(&config.network.nft) else {
        return Check::new(
            "nftables",
            Verdict::Missing,
            "nft is not there",
            "apt-get install nftables",
        );
    };
    let run = Run::new(&path).args(["list", "tables"]).limit(Duration::from_secs(5));
    if let Err(error) = run.success(&Context::new()).await {
        let remedy = "run as root on a kernel with nf_tables";
        return Check::new("nftables", Verdict::Missing, error.to_string(), remedy);
    }
    let deadline = tokio::time::Instant::now() + Duration::from_secs(5);
    let cx = Context::new().with_deadline(deadline.into_std());
    match FirewallMode::look(&path, &cx).await {
        Ok(mode) => firewall_mode(mode),
        Err(error) => Check::new("nftables", Verdict::Missing, error.chain(), "mend the cause"),
    }
}

fn firewall_mode(mode: FirewallMode) -> Check {
    let (verdict, found) = match mode {
        FirewallMode::Native => {
            (Verdict::Ok, "native: the kernel tracks connections on bridges (nf_conntrack_bridge)")
        }
        FirewallMode::Mark => (
            Verdict::Ok,
            "mark: br_netfilter tracks connections of bridged frames, which pass through the inet tables too",
        ),
        FirewallMode::Stateless => (
            Verdict::Warning,
            "none: connections on bridges are not tracked; only what is routed is",
        ),
    };
    let remedy = "modprobe nf_conntrack_bridge, or modprobe br_netfilter; the agent tries the latter by itself when it makes \
                  its first rules";
    Check::new("nftables", verdict, found, remedy)
}

fn forwarding() -> Check {
    let read = std::fs::read_to_string("/proc/sys/net/ipv4/ip_forward");
    let on = read.as_deref().is_ok_and(|text| text.trim() == "1");
    let (verdict, found) =
        if on { (Verdict::Ok, "on") } else { (Verdict::Warning, "net.ipv4.ip_forward is off") };
    let remedy = "guests of nat networks reach the outside only with it; the agent turns it on for the links of its networks \
                  where it can";
    Check::new("forwarding", verdict, found, remedy)
}

fn cgroup(config: &Config) -> Check {
    if config.qemu.slice.is_empty() {
        let found = "not used: qemu.slice is \"\", so VMs stay in the agent's own cgroup";
        return Check::new("service manager", Verdict::Ok, found, "");
    }
    let v2 = Path::new("/sys/fs/cgroup/cgroup.controllers").exists();
    let systemd = host::scope::systemd_runs();
    match (v2, systemd) {
        (true, true) => {
            let found = format!("systemd, cgroup v2: a scope per VM in {}", config.qemu.slice);
            Check::new("service manager", Verdict::Ok, found, "")
        }
        (_, false) => Check::new(
            "service manager",
            Verdict::Warning,
            "no systemd: VMs outlive the agent as sessions of their own, without a cgroup each",
            "nothing, unless you want limits per VM",
        ),
        (false, true) => Check::new(
            "service manager",
            Verdict::Warning,
            "systemd with cgroup v1",
            "boot with systemd.unified_cgroup_hierarchy=1",
        ),
    }
}

fn space(name: &str, dir: &Path) -> Check {
    let there = dir.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
    match rustix::fs::statvfs(there) {
        Ok(fs) => {
            let free = fs.f_bavail.saturating_mul(fs.f_frsize) >> 20;
            let verdict = if free >= 1024 { Verdict::Ok } else { Verdict::Warning };
            let found = format!("{free} MiB are free at {}", there.display());
            Check::new(name, verdict, found, "make space, or use another directory")
        }
        Err(error) => {
            let found = format!("{}: {error}", there.display());
            Check::new(name, Verdict::Missing, found, "make the directory reachable")
        }
    }
}

/// A VM's directory has its UUID as name, and a socket in it a name of up to 16 bytes.
const BELOW_RUN_DIR: usize = "/qemu/".len() + 36 + 1 + 16;

fn socket_paths(config: &Config) -> Check {
    let longest = config.run_dir.as_os_str().len() + BELOW_RUN_DIR;
    let verdict = if longest <= 107 { Verdict::Ok } else { Verdict::Missing };
    let found = format!("the longest socket path has {longest} of 107 bytes");
    Check::new("socket paths", verdict, found, "choose a shorter run_dir")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn every_need_that_is_not_met_says_what_to_do() {
        let mut config = Config::default();
        config.qemu.binary = "/nonexistent/qemu".into();
        config.run_dir = format!("/{}", "x".repeat(80)).into();
        config.volumes.dir = "/nonexistent/volumes".into();
        let checks = of_config(&config).await;
        for check in &checks {
            assert_eq!(check.verdict == Verdict::Ok, check.remedy.is_empty(), "{check:?}");
            assert!(!check.found.is_empty(), "{check:?}");
        }
        let verdict = |name: &str| checks.iter().find(|check| check.name == name).unwrap().verdict;
        assert_eq!(verdict("qemu"), Verdict::Missing);
        assert_eq!(verdict("socket paths"), Verdict::Missing);
        let mode = checks.iter().find(|check| check.name == "nftables").unwrap();
        assert!(
            ["native:", "mark:", "none:"].iter().any(|one| mode.found.starts_with(one)),
            "{mode:?}"
        );
        assert_eq!(verdict("nft"), Verdict::Ok, "nftables belongs to the test machine");
    }

    #[test]
    fn the_line_on_kvm_tells_what_the_probe_guest_found() {
        let dir = tempfile::tempdir().unwrap();
        let mut config = Config { run_dir: dir.path().into(), ..Config::default() };
        std::fs::create_dir(dir.path().join("qemu")).unwrap();
        let boot = host::process::boot_id().unwrap();
        let mut told = |kvm: bool, allow_tcg: bool| {
            let text = format!("{{\"boot\":\"{boot}\",\"version\":\"QEMU 9.9\",\"kvm\":{kvm}}}");
            std::fs::write(dir.path().join("qemu/accel.json"), text).unwrap();
            config.qemu.allow_tcg = allow_tcg;
            kvm_with("/dev/null", &config)
        };
        let good = told(true, true);
        assert!(
            good.verdict == Verdict::Ok && good.found.contains("at real speed (QEMU 9.9)"),
            "{good:?}"
        );
        let slow = told(false, true);
        assert!(slow.verdict == Verdict::Warning && slow.found.contains("did not run"), "{slow:?}");
        assert_eq!(told(false, false).verdict, Verdict::Missing);
        config.qemu.accel = Accel::Kvm;
        std::fs::remove_file(dir.path().join("qemu/accel.json")).unwrap();
        assert_eq!(kvm_with("/dev/null", &config).verdict, Verdict::Ok);
        assert_eq!(kvm_with("/nonexistent", &config).verdict, Verdict::Missing);
    }
}
