//! Where secrets come from: files of a private directory, and variables of the agent's environment that are listed.
//!
//! A value is read when a driver asks for it, handed to that driver, and not kept here. Messages name the reference and the
//! file, never what is in it.

use std::{
    collections::BTreeSet,
    ffi::OsStr,
    fmt,
    io::Read,
    os::unix::ffi::OsStringExt,
    path::{Path, PathBuf},
};

use drivers_api::{BoxFuture, Error, ErrorKind, Result, SecretRef, SecretResolver, SecretValue};
use rustix::fs::{FileType, Mode, OFlags, Stat};

/// The most bytes of a secret.
const MAX_BYTES: u64 = 64 << 10;
/// What is done, in messages.
const OPERATION: &str = "read";

/// Resolves `secret://NAME` from a file and `env://NAME` from a variable.
#[derive(Clone)]
pub struct Secrets {
    dir: PathBuf,
    variables: BTreeSet<String>,
}

impl fmt::Debug for Secrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Secrets").field("dir", &self.dir).finish_non_exhaustive()
    }
}

impl Secrets {
    /// Secrets from the files of `dir`, and from the `variables` of this process's environment.
    pub fn new(dir: impl Into<PathBuf>, variables: impl IntoIterator<Item = String>) -> Self {
        Self { dir: dir.into(), variables: variables.into_iter().collect() }
    }

    fn variable(&self, reference: &SecretRef, name: &str) -> Result<SecretValue> {
        if !self.variables.contains(name) {
            let reason = "the configuration does not allow this variable";
            return Err(Error::new(ErrorKind::Denied, OPERATION, reference, reason)
                .with_remedy("list it in secrets.env, and start the agent again"));
        }
        let value = std::env::var_os(name).ok_or_else(|| {
            Error::not_found(OPERATION, reference)
                .with_remedy("set the variable in the agent's environment")
        })?;
        value_of(reference, value.into_vec())
    }
}

impl SecretResolver for Secrets {
    fn resolve<'a>(&'a self, reference: &'a SecretRef) -> BoxFuture<'a, Result<SecretValue>> {
        Box::pin(async move {
            let text = reference.as_str();
            if let Some(name) = text.strip_prefix("env://") {
                return self.variable(reference, name);
            }
            let Some(name) = text.strip_prefix("secret://") else {
                return Err(Error::unsupported("resolve", reference).with_remedy(
                    "this agent reads secret://NAME (a file of secrets.dir) and env://NAME (a variable of secrets.env)",
                ));
            };
            let (dir, name, reference) = (self.dir.clone(), name.to_owned(), reference.clone());
            host::bound::blocking(OPERATION, move || file(&dir, &name, &reference)).await
        })
    }
}

/// Whether a name stays in its directory and is no hidden file.
fn is_file_name(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    name.len() <= 128 && !name.starts_with('.') && name.chars().all(plain)
}

fn file(dir: &Path, name: &str, reference: &SecretRef) -> Result<SecretValue> {
    if !is_file_name(name) {
        let reason = "the name of a secret has up to 128 letters, digits, \".\", \"_\" and \"-\", and begins with no dot";
        return Err(Error::new(ErrorKind::InvalidSpec, OPERATION, reference, reason));
    }
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let opened = rustix::fs::open(dir, flags | OFlags::DIRECTORY, Mode::empty());
    let folder = opened.map_err(|error| failed(reference, dir, error))?;
    let stat = rustix::fs::fstat(&folder).map_err(|error| failed(reference, dir, error))?;
    private(reference, dir, &stat, 0o077, "chmod 0700")?;
    let path = dir.join(name);
    let opened = rustix::fs::openat(&folder, name, flags, Mode::empty());
    let file = opened.map_err(|error| failed(reference, &path, error))?;
    let stat = rustix::fs::fstat(&file).map_err(|error| failed(reference, &path, error))?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(denied(reference, format!("{} is no regular file", path.display())));
    }
    private(reference, &path, &stat, 0o177, "chmod 0600")?;
    let size = u64::try_from(stat.st_size).unwrap_or(u64::MAX);
    if size > MAX_BYTES {
        let reason = format!("{} has more than {MAX_BYTES} bytes", path.display());
        return Err(Error::new(ErrorKind::InvalidSpec, OPERATION, reference, reason));
    }
    // All at once: a vector that grows leaves copies of its bytes behind.
    let mut bytes = Vec::with_capacity(usize::try_from(MAX_BYTES).unwrap_or_default());
    let read = std::fs::File::from(file).take(MAX_BYTES).read_to_end(&mut bytes);
    read.map_err(|error| {
        let reason = format!("{}: {error}", path.display());
        Error::new(ErrorKind::Unavailable, OPERATION, reference, reason)
    })?;
    value_of(reference, bytes)
}

/// The value without the line end that editors add.
fn value_of(reference: &SecretRef, mut bytes: Vec<u8>) -> Result<SecretValue> {
    if bytes.last() == Some(&b'\n') {
        bytes.pop();
        if bytes.last() == Some(&b'\r') {
            bytes.pop();
        }
    }
    if bytes.is_empty() {
        return Err(Error::new(ErrorKind::Unavailable, OPERATION, reference, "it is empty"));
    }
    Ok(SecretValue::new(bytes))
}

/// Refuses what anybody but root and the agent's own user could have written or can read.
fn private(reference: &SecretRef, path: &Path, stat: &Stat, open: u32, how: &str) -> Result<()> {
    let own = rustix::process::geteuid().as_raw();
    if stat.st_uid != 0 && stat.st_uid != own {
        let reason = format!("{} belongs to user {}", path.display(), stat.st_uid);
        return Err(denied(reference, reason).with_remedy(format!("chown root {}", path.display())));
    }
    let mode = stat.st_mode & 0o7777;
    if mode & open != 0 {
        let reason =
            format!("{} has mode {mode:04o}: others could read or change it", path.display());
        return Err(denied(reference, reason).with_remedy(format!("{how} {}", path.display())));
    }
    Ok(())
}

fn denied(reference: &SecretRef, reason: String) -> Error {
    Error::new(ErrorKind::Denied, OPERATION, reference, reason)
}

fn failed(reference: &SecretRef, path: &Path, error: rustix::io::Errno) -> Error {
    let path = path.display();
    match error {
        rustix::io::Errno::NOENT => Error::not_found(OPERATION, reference).with_remedy(format!(
            "put it into {path}: a file with mode 0600 in a directory with mode 0700"
        )),
        rustix::io::Errno::LOOP | rustix::io::Errno::NOTDIR => denied(
            reference,
            format!("{path} is a symbolic link, or no directory where one is wanted"),
        ),
        error => {
            Error::new(ErrorKind::Unavailable, OPERATION, reference, format!("{path}: {error}"))
        }
    }
}

/// Whether a text can name a variable of the environment.
pub(crate) fn is_variable(name: &str) -> bool {
    let bytes = OsStr::new(name).as_encoded_bytes();
    !bytes.is_empty() && bytes.iter().all(|byte| byte.is_ascii_alphanumeric() || *byte == b'_')
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    const CANARY: &str = "CANARY-7c2e";

    fn set_mode(path: &Path, mode: u32) {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }

    fn write(path: &Path, text: &str, mode: u32) {
        std::fs::write(path, text).unwrap();
        set_mode(path, mode);
    }

    fn place() -> (tempfile::TempDir, Secrets) {
        let dir = tempfile::tempdir().unwrap();
        set_mode(dir.path(), 0o700);
        // A variable that cargo sets for every test.
        let secrets =
            Secrets::new(dir.path(), ["CARGO_PKG_NAME".to_owned(), "BCD_NONE".to_owned()]);
        (dir, secrets)
    }

    async fn kind(secrets: &Secrets, reference: &str) -> ErrorKind {
        let error = secrets.resolve(&reference.parse().unwrap()).await.unwrap_err();
        let told = format!("{} {error:?}", error.chain());
        assert!(!told.contains(CANARY), "{told}");
        assert!(told.contains(reference), "{told}");
        error.kind()
    }

    #[tokio::test]
    async fn a_private_file_and_a_listed_variable_are_read_and_never_shown() {
        let (dir, secrets) = place();
        write(&dir.path().join("registry"), &format!("{CANARY}\n"), 0o600);
        let value = secrets.resolve(&"secret://registry".parse().unwrap()).await.unwrap();
        assert_eq!(value.expose(), CANARY.as_bytes());
        assert!(!format!("{value:?} {secrets:?}").contains(CANARY));
        set_mode(&dir.path().join("registry"), 0o400);
        assert!(secrets.resolve(&"secret://registry".parse().unwrap()).await.is_ok());
        let value = secrets.resolve(&"env://CARGO_PKG_NAME".parse().unwrap()).await.unwrap();
        assert_eq!(value.expose(), b"node-agent");
    }

    #[tokio::test]
    async fn what_others_could_read_or_change_is_refused() {
        let (dir, secrets) = place();
        for mode in [0o640, 0o604, 0o620, 0o602, 0o700, 0o666] {
            write(&dir.path().join("a"), CANARY, mode);
            assert_eq!(kind(&secrets, "secret://a").await, ErrorKind::Denied, "{mode:o}");
        }
        write(&dir.path().join("a"), CANARY, 0o600);
        for mode in [0o750, 0o705, 0o711, 0o770] {
            set_mode(dir.path(), mode);
            assert_eq!(kind(&secrets, "secret://a").await, ErrorKind::Denied, "{mode:o}");
        }
        set_mode(dir.path(), 0o700);
        std::os::unix::fs::chown(dir.path().join("a"), Some(61234), None).unwrap();
        assert_eq!(kind(&secrets, "secret://a").await, ErrorKind::Denied);
        std::os::unix::fs::chown(dir.path(), Some(61234), None).unwrap();
        assert_eq!(kind(&secrets, "secret://a").await, ErrorKind::Denied);
    }

    #[tokio::test]
    async fn no_link_no_way_out_and_no_odd_file_is_followed() {
        let (dir, secrets) = place();
        let outside = tempfile::tempdir().unwrap();
        write(&outside.path().join("a"), CANARY, 0o600);
        symlink(outside.path().join("a"), dir.path().join("link")).unwrap();
        assert_eq!(kind(&secrets, "secret://link").await, ErrorKind::Denied);
        std::fs::create_dir(dir.path().join("folder")).unwrap();
        assert_eq!(kind(&secrets, "secret://folder").await, ErrorKind::Denied);
        let mode = Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(rustix::fs::CWD, dir.path().join("fifo"), FileType::Fifo, mode, 0)
            .unwrap();
        assert_eq!(kind(&secrets, "secret://fifo").await, ErrorKind::Denied);
        for name in ["../a", "..", ".", ".hidden", "folder/a", "/etc/passwd", "a%2f"] {
            let reference = format!("secret://{name}");
            assert_eq!(kind(&secrets, &reference).await, ErrorKind::InvalidSpec, "{name}");
        }
        symlink(dir.path(), outside.path().join("secrets")).unwrap();
        write(&dir.path().join("a"), CANARY, 0o600);
        let through = Secrets::new(outside.path().join("secrets"), []);
        assert_eq!(kind(&through, "secret://a").await, ErrorKind::Denied);
    }

    #[tokio::test]
    async fn what_is_absent_empty_huge_unlisted_or_of_another_scheme_says_so() {
        let (dir, secrets) = place();
        assert_eq!(kind(&secrets, "secret://none").await, ErrorKind::NotFound);
        write(&dir.path().join("empty"), "\n", 0o600);
        assert_eq!(kind(&secrets, "secret://empty").await, ErrorKind::Unavailable);
        write(&dir.path().join("huge"), &CANARY.repeat(10_000), 0o600);
        assert_eq!(kind(&secrets, "secret://huge").await, ErrorKind::InvalidSpec);
        assert_eq!(kind(&secrets, "env://PATH").await, ErrorKind::Denied);
        assert_eq!(kind(&secrets, "env://BCD_NONE").await, ErrorKind::NotFound);
        assert_eq!(kind(&secrets, "vault://kv/registry").await, ErrorKind::Unsupported);
        let error = secrets.resolve(&"vault://kv/a".parse().unwrap()).await.unwrap_err();
        assert!(error.remedy().unwrap().contains("secret://NAME"));
    }
}
