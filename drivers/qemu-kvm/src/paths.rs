//! Where things are. Every path is built from the driver's two directories and a checked UUID, never from a name.
//!
//! ```text
//! STATE/UUID/mark.json     who made it; written first, never rewritten
//! STATE/UUID/vm.json       the spec with disks and NICs, as the next start takes it
//! STATE/UUID/exit.json     how the last run ended
//! STATE/UUID/boot/         kernel, initrd or uki: links or copies of our own
//! STATE/UUID/seed.img      the NoCloud seed
//! STATE/UUID/nvram.fd      the UEFI variables
//! STATE/UUID/serial.log    what the guest wrote, with serial.log.1 before it
//! STATE/UUID/vmm.lock      held by the VMM's process for as long as it lives
//! STATE/.new-UUID-…        a VM that is being made; STATE/.del-UUID-… one that is being removed
//! RUN/UUID.lock            held by an agent while it changes the VM
//! RUN/UUID/vmm             the identity of the VMM's process
//! RUN/UUID/running.json    what the VMM was started with and what changed since
//! RUN/UUID/requested       somebody asked for the end of the VMM
//! RUN/UUID/{qmp0…3,serial}.sock, qemu.log
//! ```

use std::path::{Path, PathBuf};

use drivers_api::VmId;

/// The longest path of a Unix socket (`sun_path` of unix(7), without the final NUL).
pub(crate) const SOCKET_PATH_MAX: usize = 107;
/// What this driver adds to `run_dir` for a socket: a slash, a UUID, and the longest name.
pub(crate) const SOCKET_SUFFIX: usize = 1 + 36 + "/serial.sock".len();

/// How many monitors a VMM has: for the agent, one that takes over while the old one still ends, and people.
pub(crate) const MONITORS: usize = 4;

/// The prefix of a directory in the making.
pub(crate) const NEW_PREFIX: &str = ".new-";
/// The prefix of a directory on its way out.
pub(crate) const DEL_PREFIX: &str = ".del-";

/// The paths of one VM.
#[derive(Clone, Debug)]
pub(crate) struct VmPaths {
    /// The VM.
    pub(crate) id: VmId,
    state: PathBuf,
    /// Its persistent directory.
    pub(crate) dir: PathBuf,
    /// Its volatile directory.
    pub(crate) run: PathBuf,
    /// The lock of the agent that changes it.
    pub(crate) gate: PathBuf,
}

impl VmPaths {
    pub(crate) fn new(state: &Path, run: &Path, id: VmId) -> Self {
        let name = id.to_string();
        Self {
            id,
            state: state.to_owned(),
            dir: state.join(&name),
            run: run.join(&name),
            gate: run.join(format!("{name}.lock")),
        }
    }

    /// The same VM with its persistent directory at `dir`: for a directory in the making.
    pub(crate) fn with_dir(&self, dir: PathBuf) -> Self {
        Self { dir, ..self.clone() }
    }

    /// A name for a directory in the making or on its way out.
    pub(crate) fn aside(&self, prefix: &str) -> PathBuf {
        let unique = host::files::temporary_beside(Path::new("x"));
        let unique = unique.to_string_lossy().replace(".tmp-", "").replace("-x", "");
        self.state.join(format!("{prefix}{}-{unique}", self.id))
    }

    /// The directory of all VMs' persistent directories.
    pub(crate) fn state(&self) -> &Path {
        &self.state
    }

    pub(crate) fn mark(&self) -> PathBuf {
        self.dir.join("mark.json")
    }
    pub(crate) fn record(&self) -> PathBuf {
        self.dir.join("vm.json")
    }
    pub(crate) fn exit(&self) -> PathBuf {
        self.dir.join("exit.json")
    }
    pub(crate) fn boot(&self, name: &str) -> PathBuf {
        self.dir.join("boot").join(name)
    }
    pub(crate) fn seed(&self) -> PathBuf {
        self.dir.join("seed.img")
    }
    pub(crate) fn nvram(&self) -> PathBuf {
        self.dir.join("nvram.fd")
    }
    pub(crate) fn serial_log(&self) -> PathBuf {
        self.dir.join("serial.log")
    }
    pub(crate) fn vmm_lock(&self) -> PathBuf {
        self.dir.join("vmm.lock")
    }
    pub(crate) fn identity(&self) -> PathBuf {
        self.run.join("vmm")
    }
    pub(crate) fn running(&self) -> PathBuf {
        self.run.join("running.json")
    }
    pub(crate) fn requested(&self) -> PathBuf {
        self.run.join("requested")
    }
    /// The sockets of the monitors. Each talks to one client at a time; whoever comes second takes the next.
    pub(crate) fn qmp(&self) -> [PathBuf; MONITORS] {
        std::array::from_fn(|number| self.run.join(format!("qmp{number}.sock")))
    }
    pub(crate) fn serial(&self) -> PathBuf {
        self.run.join("serial.sock")
    }
    pub(crate) fn qemu_log(&self) -> PathBuf {
        self.run.join("qemu.log")
    }
}
