//! Changes to the host. Each call holds its volume's lock from its look at what is there to its last effect; blocking work
//! runs off the executor and takes the lock along, so a dropped call lets nobody else in before its work has ended.

use std::path::Path;

use crate::error::VolumeError;

mod attach;
mod create;
mod destroy;
mod ensure;

pub(crate) use attach::{attach, detach};
pub(crate) use destroy::destroy;
pub(crate) use ensure::ensure;

/// A qcow2 file as `qemu-img` takes it: with its format, and without the file below it, whatever the header says.
fn alone(path: &Path) -> Result<String, VolumeError> {
    let Some(name) = path.to_str() else {
        return Err(VolumeError::Path { path: path.to_owned() });
    };
    let image = serde_json::json!({
        "driver": "qcow2",
        "backing": null,
        "file": { "driver": "file", "filename": name },
    });
    Ok(format!("json:{image}"))
}
