//! The file beside each volume that says whose it is, what it is, and who has it open.
//!
//! Lines of `key=value`. Names cannot hold control characters ([`DisplayName`]), so a line is a line. The file is
//! replaced as a whole: after a crash it is the old one or the new one.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read, Write},
    os::unix::fs::OpenOptionsExt,
    path::Path,
};

use drivers_api::{Attachment, DiskFormat, DisplayName, HostId, SizeGib, VolumeId, VolumeSpec};

/// The first line. Another version is not ours to understand.
const HEADER: &str = "plain-volume 1";

/// No sidecar is longer; what is longer is none.
const MOST_BYTES: u64 = 64 << 10;

/// How far a volume is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// Being made, or being removed: `ensure` finishes the first, `destroy` clears both.
    Partial,
    /// The file has its size.
    Ready,
}

/// What a sidecar says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Sidecar {
    pub(crate) node: HostId,
    pub(crate) state: State,
    pub(crate) spec: VolumeSpec,
    pub(crate) attachments: Vec<Attachment>,
}

impl Sidecar {
    pub(crate) fn to_text(&self) -> String {
        let state = if self.state == State::Ready { "ready" } else { "partial" };
        let mut text = format!(
            "{HEADER}\nnode={}\nstate={state}\nuuid={}\nname={}\nsize_gib={}\n",
            self.node, self.spec.uuid, self.spec.name, self.spec.size_gib
        );
        if let Some(project) = self.spec.project_uuid {
            text.push_str(&format!("project={project}\n"));
        }
        for attachment in &self.attachments {
            let access = if attachment.read_only { "ro" } else { "rw" };
            let (host, vm) = (attachment.host_uuid, attachment.vm_uuid);
            text.push_str(&format!("attachment={host} {vm} {access}\n"));
        }
        text
    }

    /// `None` for a text that is no sidecar of this driver.
    pub(crate) fn from_text(text: &str) -> Option<Self> {
        let mut lines = text.lines();
        if lines.next() != Some(HEADER) {
            return None;
        }
        let (mut node, mut state, mut uuid) = (None, None, None);
        let (mut name, mut size, mut project) = (None::<DisplayName>, None, None);
        let mut attachments = Vec::new();
        for line in lines {
            let (key, value) = line.split_once('=')?;
            match key {
                "node" => node = Some(value.parse().ok()?),
                "state" => {
                    state = match value {
                        "ready" => Some(State::Ready),
                        "partial" => Some(State::Partial),
                        _ => return None,
                    }
                }
                "uuid" => uuid = Some(value.parse::<VolumeId>().ok()?),
                "name" => name = Some(value.parse().ok()?),
                "size_gib" => size = Some(SizeGib::new(value.parse().ok()?).ok()?),
                "project" => project = Some(value.parse().ok()?),
                "attachment" => {
                    let mut parts = value.split(' ');
                    let host = parts.next()?.parse().ok()?;
                    let vm = parts.next()?.parse().ok()?;
                    attachments.push(Attachment::new(host, vm, parts.next()? == "ro"));
                }
                _ => return None,
            }
        }
        let mut spec = VolumeSpec::new(uuid?, name?, size?, DiskFormat::Raw);
        spec.project_uuid = project;
        Some(Self { node: node?, state: state?, spec, attachments })
    }

    /// Reads a sidecar; `None` where there is none, or none of this driver.
    pub(crate) fn read(path: &Path) -> io::Result<Option<Self>> {
        let file = match File::open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let mut bytes = Vec::new();
        file.take(MOST_BYTES + 1).read_to_end(&mut bytes)?;
        if bytes.len() as u64 > MOST_BYTES {
            return Ok(None);
        }
        Ok(std::str::from_utf8(&bytes).ok().and_then(Self::from_text))
    }

    /// Replaces the sidecar: on disk before this returns, whole or not at all.
    pub(crate) fn write(&self, path: &Path) -> io::Result<()> {
        let temporary = path.with_extension("tmp");
        let mut file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&temporary)?;
        file.write_all(self.to_text().as_bytes())?;
        file.sync_all()?;
        fs::rename(&temporary, path)?;
        sync_directory_of(path)
    }
}

/// Makes a rename or removal in the file's directory durable.
pub(crate) fn sync_directory_of(path: &Path) -> io::Result<()> {
    match path.parent() {
        Some(directory) => File::open(directory)?.sync_all(),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sidecar_reads_back_as_it_was_written() {
        let id = "3f2b8c1e-9a4d-4e6f-8b7a-1c2d3e4f5a6b";
        let size = SizeGib::new(3).unwrap();
        let name = "a=b \u{202e}<x>".parse().unwrap();
        let mut spec = VolumeSpec::new(id.parse().unwrap(), name, size, DiskFormat::Raw);
        spec.project_uuid = Some(id.parse().unwrap());
        let attachment = Attachment::new(id.parse().unwrap(), id.parse().unwrap(), true);
        let attachments = vec![attachment];
        let sidecar = Sidecar { node: id.parse().unwrap(), state: State::Ready, spec, attachments };
        assert_eq!(Sidecar::from_text(&sidecar.to_text()), Some(sidecar.clone()));
        // A text that was cut off is none, or says less of who has it open; it never says something else.
        let text = sidecar.to_text();
        assert_eq!(Sidecar::from_text(&text[..text.len() / 2]), None);
        assert_eq!(Sidecar::from_text("plain-volume 2\n"), None);
    }
}
