//! The configuration file: `/etc/bcd-node/config.toml`.
//!
//! Every key has a default; [`DEFAULT_TEXT`] is the file with all of them, and `docs/config.md` tells what they mean.
//! Unknown keys are refused with their path and the nearest known one.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

use drivers_api::{HostId, HostPath, SecretRef};
use serde::{Deserialize, Deserializer, Serialize, de::Error as _};

use crate::{
    secrets::is_variable,
    strict::{self, Problem},
};

/// Where the file is looked for when nothing else is said.
pub const DEFAULT_PATH: &str = "/etc/bcd-node/config.toml";
/// The file with every key at its default, and what each key means.
pub const DEFAULT_TEXT: &str = include_str!("config.default.toml");
/// The most bytes of a configuration file.
const MAX_BYTES: u64 = 1 << 20;

/// Why there is no configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file is not there, and it was named.
    #[error("there is no configuration file {}", .0.display())]
    Absent(PathBuf),
    /// The file cannot be read.
    #[error("the configuration cannot be read")]
    Read(#[source] host::files::FileError),
    /// The file is no TOML.
    #[error("{}: line {line}: {reason}", path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// Why.
        reason: String,
    },
    /// A key or a value is wrong.
    #[error("{}: {problem}", path.display())]
    Value {
        /// The file.
        path: PathBuf,
        /// What is wrong with which key.
        problem: Problem,
    },
}

/// The configuration of an agent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// The Unix socket of the API.
    pub socket: PathBuf,
    /// The socket's permissions, octal. Who may open it may read; who may write is [`Config::write_group`]'s.
    pub socket_mode: String,
    /// The group whose members may write beside root: a name of `/etc/group` or a number. Empty for root alone.
    pub write_group: String,
    /// Where the wanted state and what must outlive a reboot is kept.
    pub state_dir: PathBuf,
    /// Where what belongs to this boot is kept: monitors, pids, locks.
    pub run_dir: PathBuf,
    /// The node's identity; derived from the machine's when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node_id: Option<HostId>,
    /// The node's name; the host's own when empty.
    pub hostname: String,
    /// The availability zone, a label.
    pub az: String,
    /// The log.
    pub log: Log,
    /// How much of the host instances may take.
    pub capacity: Capacity,
    /// The hypervisor `qemu-kvm`.
    pub qemu: Qemu,
    /// Where secrets come from.
    pub secrets: Secrets,
    /// The image driver `oci-image`.
    pub images: Images,
    /// The volume driver `file-volume`.
    pub volumes: Volumes,
    /// The network driver `linux-bridge`.
    pub network: Network,
    /// How the reconciler works.
    pub reconcile: Reconcile,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            socket: "/run/bcd-node/bcd-node.sock".into(),
            socket_mode: "0660".to_owned(),
            write_group: String::new(),
            state_dir: "/var/lib/bcd-node".into(),
            run_dir: "/run/bcd-node".into(),
            node_id: None,
            hostname: String::new(),
            az: String::new(),
            log: Log::default(),
            capacity: Capacity::default(),
            qemu: Qemu::default(),
            secrets: Secrets::default(),
            images: Images::default(),
            volumes: Volumes::default(),
            network: Network::default(),
            reconcile: Reconcile::default(),
        }
    }
}

/// The form of a log line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// One line of text an event, control characters escaped.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

/// The log, on standard error.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Log {
    /// The form.
    pub format: LogFormat,
    /// What is logged: `error`, `warn`, `info`, `debug`, `trace`, or directives such as `info,driver_qemu_kvm=debug`.
    pub level: String,
}

impl Default for Log {
    fn default() -> Self {
        Self { format: LogFormat::Text, level: "info".to_owned() }
    }
}

/// How much of the host instances may take.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Capacity {
    /// Virtual CPUs of running instances for each of the host's.
    pub cpu_overcommit: f64,
    /// Memory of running instances as a multiple of the host's, after the reserve.
    pub memory_overcommit: f64,
    /// Memory that is left to the host, in MiB.
    pub reserved_memory_mib: u64,
}

impl Default for Capacity {
    fn default() -> Self {
        Self { cpu_overcommit: 4.0, memory_overcommit: 1.0, reserved_memory_mib: 512 }
    }
}

/// How guest code runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Accel {
    /// KVM where a short probe guest runs at real speed, TCG where allowed.
    #[default]
    Auto,
    /// KVM or nothing.
    Kvm,
    /// Emulation.
    Tcg,
}

/// The hypervisor `qemu-kvm`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Qemu {
    /// The program; looked up in the fixed search path when it is no path.
    pub binary: PathBuf,
    /// How guest code runs.
    pub accel: Accel,
    /// Whether `auto` may fall back to emulation.
    pub allow_tcg: bool,
    /// The UEFI firmware's code, read-only; found in the distribution's places when empty.
    pub ovmf_code: PathBuf,
    /// The template of the UEFI variables; found in the distribution's places when empty.
    pub ovmf_vars: PathBuf,
    /// The first uid of the range under which VMMs run, one a VM; 0 runs them as the agent's own user.
    pub uid_base: u32,
    /// How many uids the range has.
    pub uid_count: u32,
    /// The systemd slice in which each VM has a scope of its own; none when empty.
    pub slice: String,
}

impl Default for Qemu {
    fn default() -> Self {
        Self {
            binary: "qemu-system-x86_64".into(),
            accel: Accel::Auto,
            allow_tcg: true,
            ovmf_code: PathBuf::new(),
            ovmf_vars: PathBuf::new(),
            uid_base: 0x7000_0000,
            uid_count: 0x0800_0000,
            slice: "bcd-vms.slice".to_owned(),
        }
    }
}

impl Qemu {
    fn check(&self) -> Result<(), Problem> {
        if self.uid_count == 0 {
            return Err(Problem::new("qemu.uid_count", "wanted 1 or more")
                .with_remedy("set qemu.uid_base to 0 for VMMs under the agent's own user"));
        }
        let last = u64::from(self.uid_base) + u64::from(self.uid_count) - 1;
        // Below are people, services and systemd's DynamicUser=; above, tools that take a uid for a signed number fail.
        if self.uid_base != 0 && (self.uid_base < 65_536 || last > 0x7fff_ffff) {
            let reason = "wanted 0, or a range within 65536 to 2147483647 with uid_count";
            return Err(Problem::new("qemu.uid_base", reason));
        }
        if !self.slice.is_empty() && !driver_qemu_kvm::is_slice(&self.slice) {
            let reason = "wanted the name of a systemd slice such as \"bcd-vms.slice\", or \"\"";
            return Err(Problem::new("qemu.slice", reason));
        }
        Ok(())
    }
}

/// Where the values of secret references come from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Secrets {
    /// The directory of the files that `secret://NAME` names: mode 0700, its files 0600, all of root or the agent's user.
    pub dir: PathBuf,
    /// The variables of the agent's environment that `env://NAME` may name.
    pub env: Vec<String>,
}

impl Default for Secrets {
    fn default() -> Self {
        Self { dir: "/etc/bcd-node/secrets".into(), env: Vec::new() }
    }
}

/// Who the agent is to a registry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Registry {
    /// The registry as references name it: `HOST` or `HOST:PORT`.
    pub host: String,
    /// The user's name.
    pub username: String,
    /// Where the password or token is.
    #[serde(deserialize_with = "reference")]
    pub password: SecretRef,
}

/// A secret reference. What is none may be a password itself: no message repeats it.
fn reference<'de, D: Deserializer<'de>>(value: D) -> Result<SecretRef, D::Error> {
    let value = serde_json::Value::deserialize(value)?;
    value.as_str().and_then(|text| text.parse().ok()).ok_or_else(|| {
        D::Error::custom(
            "wanted secret://NAME or env://NAME; the password itself never stands here",
        )
    })
}

/// The image driver `oci-image`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Images {
    /// The cache; `images` in the state directory when empty.
    pub dir: PathBuf,
    /// Registries (`HOST:PORT`) that are spoken to without TLS. Loopback addresses always are.
    pub insecure_registries: Vec<String>,
    /// Who the agent is to which registry.
    pub registry: Vec<Registry>,
    /// Hosts (`HOST` or `HOST:PORT`) that a registry on another host may name as its token service.
    pub token_hosts: Vec<String>,
    /// The most bytes of one artifact, unpacked.
    pub max_bytes: u64,
    /// The most bytes of the whole cache; 0 for what the file system has.
    pub max_cache_bytes: u64,
    /// Seconds between two looks at whether the cache is too large.
    pub collect_seconds: u32,
    /// Bytes that a pull leaves free on the file system.
    pub reserve_bytes: u64,
    /// How many artifacts are downloaded or unpacked at once.
    pub concurrency: u32,
    /// PEM files with certificates that are trusted beside the host's own.
    pub extra_roots: Vec<PathBuf>,
    /// Directories under which `file://` sources are allowed. Empty: none are.
    pub file_roots: Vec<HostPath>,
}

impl Default for Images {
    fn default() -> Self {
        Self {
            dir: PathBuf::new(),
            insecure_registries: Vec::new(),
            registry: Vec::new(),
            token_hosts: vec!["auth.docker.io".to_owned()],
            max_bytes: 64 << 30,
            max_cache_bytes: 0,
            collect_seconds: 600,
            reserve_bytes: 256 << 20,
            concurrency: 3,
            extra_roots: Vec::new(),
            file_roots: Vec::new(),
        }
    }
}

/// The volume driver `file-volume`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Volumes {
    /// Where the files are; `volumes` in the state directory when empty.
    pub dir: PathBuf,
}

/// The network driver `linux-bridge`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Network {
    /// The DHCP and DNS server; looked up in the fixed search path when it is no path.
    pub dnsmasq: PathBuf,
    /// The user that the DHCP and DNS server becomes, where there is such a user.
    pub dnsmasq_user: String,
    /// The firewall's tool; looked up in the fixed search path when it is no path.
    pub nft: PathBuf,
    /// What the names of all links and tables begin with: 1 to 3 lower-case letters or digits.
    pub prefix: String,
}

impl Default for Network {
    fn default() -> Self {
        Self {
            dnsmasq: "dnsmasq".into(),
            dnsmasq_user: "dnsmasq".to_owned(),
            nft: "nft".into(),
            prefix: "bcd".to_owned(),
        }
    }
}

/// How the reconciler works.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Reconcile {
    /// Seconds between two looks at everything, beside events.
    pub resync_seconds: u32,
    /// How many objects are worked on at the same time.
    pub workers: u32,
    /// How many VMs start at the same time.
    pub parallel_starts: u32,
    /// The longest wait before a failed object is tried again, in seconds.
    pub max_backoff_seconds: u32,
    /// Seconds that a pull of an image may take.
    pub pull_timeout_seconds: u32,
}

impl Default for Reconcile {
    fn default() -> Self {
        Self {
            resync_seconds: 30,
            workers: 32,
            parallel_starts: 8,
            max_backoff_seconds: 60,
            pull_timeout_seconds: 1800,
        }
    }
}

impl Config {
    /// Reads a file. The default file may be absent: then every key has its default.
    ///
    /// # Errors
    /// When the file cannot be read, or a key or value is wrong.
    pub fn load(path: Option<&Path>) -> Result<Self, ConfigError> {
        let file = path.unwrap_or(Path::new(DEFAULT_PATH));
        // Canonical first: a configuration behind a symbolic link is usual.
        let real = std::fs::canonicalize(file).unwrap_or_else(|_| file.to_owned());
        match host::files::read_bounded(&real, MAX_BYTES).map_err(ConfigError::Read)? {
            Some(bytes) => Self::parse(&String::from_utf8_lossy(&bytes), file),
            None if path.is_none() => Ok(Self::default()),
            None => Err(ConfigError::Absent(file.to_owned())),
        }
    }

    /// Reads a text; `path` is for messages.
    ///
    /// # Errors
    /// As [`Config::load`].
    pub fn parse(text: &str, path: &Path) -> Result<Self, ConfigError> {
        let value = |problem| ConfigError::Value { path: path.to_owned(), problem };
        let table = toml::from_str::<serde_json::Value>(text).map_err(|error| {
            let offset = error.span().map_or(0, |span| span.start);
            let line = 1 + text.bytes().take(offset).filter(|byte| *byte == b'\n').count();
            let reason = error.message().to_owned();
            ConfigError::Syntax { path: path.to_owned(), line, reason }
        })?;
        let config: Self = strict::from_value(table).map_err(value)?;
        config.check().map_err(value)?;
        Ok(config)
    }

    fn check(&self) -> Result<(), Problem> {
        let paths = [
            ("socket", &self.socket),
            ("state_dir", &self.state_dir),
            ("run_dir", &self.run_dir),
            ("images.dir", &self.images.dir),
            ("volumes.dir", &self.volumes.dir),
            ("secrets.dir", &self.secrets.dir),
            ("qemu.ovmf_code", &self.qemu.ovmf_code),
            ("qemu.ovmf_vars", &self.qemu.ovmf_vars),
        ];
        for (key, path) in paths {
            let optional = key.contains('.') && key != "secrets.dir";
            if !(path.is_absolute() || optional && path.as_os_str().is_empty()) {
                return Err(Problem::new(key, "wanted an absolute path"));
            }
        }
        // sockaddr_un has 108 bytes with the final NUL (unix(7)).
        if self.socket.as_os_str().len() > 107 {
            let reason = "a Unix socket's path has at most 107 bytes";
            return Err(Problem::new("socket", reason).with_remedy("choose a shorter path"));
        }
        if self.mode().is_none() {
            let reason = "wanted an octal mode such as \"0660\"";
            return Err(Problem::new("socket_mode", reason));
        }
        self.qemu.check()?;
        let factors = [
            ("capacity.cpu_overcommit", self.capacity.cpu_overcommit),
            ("capacity.memory_overcommit", self.capacity.memory_overcommit),
        ];
        for (key, factor) in factors {
            if !(factor.is_finite() && factor > 0.0 && factor <= 1000.0) {
                return Err(Problem::new(key, "wanted a number above 0, at most 1000"));
            }
        }
        let counts = [
            ("reconcile.resync_seconds", self.reconcile.resync_seconds),
            ("reconcile.workers", self.reconcile.workers),
            ("reconcile.parallel_starts", self.reconcile.parallel_starts),
            ("reconcile.max_backoff_seconds", self.reconcile.max_backoff_seconds),
            ("reconcile.pull_timeout_seconds", self.reconcile.pull_timeout_seconds),
            ("images.concurrency", self.images.concurrency),
            ("images.collect_seconds", self.images.collect_seconds),
        ];
        for (key, count) in counts {
            if !(1..=86_400).contains(&count) {
                return Err(Problem::new(key, "wanted 1 to 86400"));
            }
        }
        if let Some(index) = self.secrets.env.iter().position(|name| !is_variable(name)) {
            let reason = "wanted the name of a variable: letters, digits and _";
            return Err(Problem::new(format!("secrets.env[{index}]"), reason));
        }
        self.check_registries()
    }

    fn check_registries(&self) -> Result<(), Problem> {
        let mut seen = BTreeSet::new();
        for (index, registry) in self.images.registry.iter().enumerate() {
            let problem =
                |field, reason| Problem::new(format!("images.registry[{index}].{field}"), reason);
            let bad = |c: char| !c.is_ascii_graphic() || "/@?#".contains(c);
            if registry.host.is_empty() || registry.host.contains(bad) {
                return Err(problem("host", "wanted HOST or HOST:PORT, as references name it"));
            }
            if !seen.insert(registry.host.as_str()) {
                return Err(problem("host", "the registry stands twice"));
            }
            // RFC 7617, section 2: a colon ends the user's name.
            let bad = |c: char| c.is_control() || c == ':';
            if registry.username.is_empty() || registry.username.contains(bad) {
                return Err(problem("username", "wanted a name without a colon"));
            }
        }
        Ok(())
    }

    /// The socket's mode as a number.
    #[must_use]
    pub fn mode(&self) -> Option<u32> {
        let digits = self.socket_mode.strip_prefix("0o").unwrap_or(&self.socket_mode);
        u32::from_str_radix(digits, 8).ok().filter(|mode| *mode <= 0o777)
    }

    /// Where images are kept.
    #[must_use]
    pub fn images_dir(&self) -> PathBuf {
        or_below(&self.images.dir, &self.state_dir, "images")
    }

    /// Where volumes are kept.
    #[must_use]
    pub fn volumes_dir(&self) -> PathBuf {
        or_below(&self.volumes.dir, &self.state_dir, "volumes")
    }
}

fn or_below(dir: &Path, base: &Path, name: &str) -> PathBuf {
    if dir.as_os_str().is_empty() { base.join(name) } else { dir.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(text: &str) -> String {
        Config::parse(text, Path::new("c.toml")).unwrap_err().to_string()
    }

    #[test]
    fn the_default_file_holds_every_key_at_its_default() {
        let read = Config::parse(DEFAULT_TEXT, Path::new("default")).unwrap();
        assert_eq!(read, Config::default());
        let all = serde_json::to_value(Config::default()).unwrap();
        let told: serde_json::Value = toml::from_str(DEFAULT_TEXT).unwrap();
        assert_eq!(told, all, "a key is missing in the default file");
        let docs =
            std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/config.md"));
        let docs = docs.unwrap();
        let mut keys = vec!["node_id".to_owned()];
        for (key, value) in all.as_object().unwrap() {
            match value.as_object() {
                Some(section) => keys.extend(section.keys().map(|inner| format!("{key}.{inner}"))),
                None => keys.push(key.clone()),
            }
        }
        for key in keys {
            assert!(docs.contains(&format!("`{key}`")), "docs/config.md does not tell of {key}");
        }
    }

    #[test]
    fn an_empty_file_is_the_default() {
        assert_eq!(Config::parse("", Path::new("c")).unwrap(), Config::default());
    }

    #[test]
    fn bad_keys_and_values_are_told_with_their_path() {
        let cases = [
            ("sokcet = \"/a\"", "c.toml: sokcet: unknown field (did you mean \"socket\"?)"),
            (
                "[qemu]\nbinry = \"a\"",
                "c.toml: qemu.binry: unknown field (did you mean \"binary\"?)",
            ),
            ("[qemuu]", "c.toml: qemuu: unknown field (did you mean \"qemu\"?)"),
            (
                "[qemu]\naccel = \"kmv\"",
                "c.toml: qemu.accel: \"kmv\" is not one of auto, kvm, tcg (did you mean \"kvm\"?)",
            ),
            (
                "[qemu]\nuid_base = 1000",
                "c.toml: qemu.uid_base: wanted 0, or a range within 65536 to 2147483647 with uid_count",
            ),
            (
                "[qemu]\nuid_base = 2147483647\nuid_count = 2",
                "c.toml: qemu.uid_base: wanted 0, or a range within 65536 to 2147483647 with uid_count",
            ),
            (
                "[qemu]\nslice = \"bcd-vms\"",
                "c.toml: qemu.slice: wanted the name of a systemd slice such as \"bcd-vms.slice\", or \"\"",
            ),
            (
                "[qemu]\nallow_tcg = 1",
                "c.toml: qemu.allow_tcg: wanted true or false, found the number 1",
            ),
            ("socket = \"a\"", "c.toml: socket: wanted an absolute path"),
            ("socket_mode = \"999\"", "c.toml: socket_mode: wanted an octal mode such as \"0660\""),
            (
                "[capacity]\ncpu_overcommit = 0.0",
                "c.toml: capacity.cpu_overcommit: wanted a number above 0, at most 1000",
            ),
            ("[secrets]\ndir = \"\"", "c.toml: secrets.dir: wanted an absolute path"),
            (
                "[secrets]\nenv = [\"A=B\"]",
                "c.toml: secrets.env[0]: wanted the name of a variable: letters, digits and _",
            ),
            (
                "[[images.registry]]\nhost = \"a/b\"\nusername = \"u\"\npassword = \"env://P\"",
                "c.toml: images.registry[0].host: wanted HOST or HOST:PORT, as references name it",
            ),
            (
                "[[images.registry]]\nhost = \"a\"\nusername = \"u:v\"\npassword = \"env://P\"",
                "c.toml: images.registry[0].username: wanted a name without a colon",
            ),
            ("[reconcile]\nworkers = 0", "c.toml: reconcile.workers: wanted 1 to 86400"),
            (
                "[reconcile]\nworkers = -1",
                "c.toml: reconcile.workers: wanted a whole number that is not negative, found the number -1",
            ),
        ];
        for (text, wanted) in cases {
            assert_eq!(problem(text), wanted);
        }
        let id = problem("node_id = \"{3f2b8c1e-9a4d-4e6f-8b7a-1c2d3e4f5a6b}\"");
        assert!(id.contains("node_id: ") && id.contains("not a valid UUID"), "{id}");
        assert!(problem("a = \n b").starts_with("c.toml: line 2: "), "{}", problem("a = \n b"));
        let long = format!("socket = \"/{}\"", "x".repeat(120));
        assert!(problem(&long).contains("at most 107 bytes"));
    }

    #[test]
    fn a_password_in_place_of_a_reference_is_refused_and_not_repeated() {
        for password in ["\"CANARY-7c2e\"", "72727272", "[\"CANARY-7c2e\"]", "\"secret://\""] {
            let text = format!(
                "[[images.registry]]\nhost = \"r.test:5000\"\nusername = \"u\"\npassword = {password}\n"
            );
            let told = problem(&text);
            let wanted = "c.toml: images.registry[0].password: wanted secret://NAME or env://NAME; the password itself \
                          never stands here";
            assert_eq!(told, wanted);
        }
        let one =
            "[[images.registry]]\nhost = \"r.test\"\nusername = \"u\"\npassword = \"secret://r\"\n";
        let config = Config::parse(one, Path::new("c")).unwrap();
        assert_eq!(config.images.registry[0].password.as_str(), "secret://r");
        assert!(
            problem(&one.repeat(2)).contains("images.registry[1].host: the registry stands twice")
        );
    }

    #[test]
    fn a_named_file_must_be_there_and_the_default_one_need_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("none.toml");
        assert!(matches!(Config::load(Some(&path)), Err(ConfigError::Absent(_))));
    }
}
