//! Whether KVM is fit for use.
//!
//! A host can have `/dev/kvm` and still not be able to run a guest: under some nested hypervisors kernel code is emulated
//! at half a million instructions a second, where real KVM does more than fifty million. So `auto` runs a tiny guest that
//! counts down in 32-bit protected mode and then leaves through QEMU's debug exit; only when it is back in time KVM is
//! used. The answer is kept for the boot and the version of QEMU.

use std::{path::Path, time::Duration};

use drivers_api::{Context, Error, ErrorKind, Result};
use host::{bound::blocking, files, process::boot_id, run::Run};
use serde::{Deserialize, Serialize};

use crate::{config::AccelChoice, driver::Inner, record::Accel};

/// How many instructions the probe guest runs: `dec` and `jnz`, as often as its counter says.
const INSTRUCTIONS: u64 = 2 * 0x0200_0000;
/// How long it may take with QEMU's own start: 67 million instructions take 1.3 s at the least speed of real KVM.
const LIMIT: Duration = Duration::from_millis(2000);
/// What `isa-debug-exit` makes of the value 0x2a: `(value << 1) | 1`.
const EXIT_CODE: i32 = 0x55;
/// Where the answer is kept, in the driver's `run_dir`.
const CACHE: &str = "accel.json";
/// The size of the probe's firmware image.
const ROM_BYTES: usize = 65_536;

/// The probe guest: the last bytes of a ROM. A test assembles `probe.s` beside this file and compares.
const CODE: &[u8] = include_bytes!("probe/probe.bin");

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Cached {
    boot: String,
    version: String,
    kvm: bool,
}

/// What the probe guest of a driver with this `run_dir` found in this boot: whether KVM runs guests at real speed, and the
/// version of QEMU that ran it. `None` when there was none yet: the first start of a VM runs it, where KVM is wanted.
///
/// Reads one small file.
#[must_use]
pub fn probed(run_dir: &Path) -> Option<(bool, String)> {
    let boot = boot_id()?;
    let cached = load(&run_dir.join(CACHE)).filter(|cached| cached.boot == boot)?;
    Some((cached.kvm, cached.version))
}

/// How the guests of this host run.
pub(crate) async fn decide(inner: &Inner, cx: &Context) -> Result<Accel> {
    let decided = inner.accel.get_or_try_init(|| async {
        match inner.config.accel {
            AccelChoice::Tcg => Ok(Accel::Tcg),
            AccelChoice::Kvm => Ok(Accel::Kvm),
            AccelChoice::Auto if has_real_kvm(inner, cx).await? => Ok(Accel::Kvm),
            AccelChoice::Auto if inner.config.allow_tcg => Ok(Accel::Tcg),
            AccelChoice::Auto => {
                let reason = "KVM is absent or does not run guests at real speed here";
                Err(Error::new(ErrorKind::Unavailable, "choose", "accelerator", reason)
                    .with_remedy("use a host with KVM, or allow TCG"))
            }
        }
    });
    decided.await.copied()
}

async fn has_real_kvm(inner: &Inner, cx: &Context) -> Result<bool> {
    let cache = inner.config.run_dir.join(CACHE);
    let boot = boot_id().unwrap_or_default();
    let version = inner.version.clone();
    let known = {
        let (cache, boot, version) = (cache.clone(), boot.clone(), version.clone());
        blocking(
            "read",
            move || Ok(load(&cache).filter(|c| c.boot == boot && c.version == version)),
        )
    };
    if let Some(known) = known.await? {
        return Ok(known.kvm);
    }
    let kvm = probe(inner, cx, "kvm").await?;
    tracing::info!(kvm, "probed KVM");
    blocking("write", move || {
        let bytes = serde_json::to_vec(&Cached { boot, version, kvm });
        let kept = bytes
            .map_err(std::io::Error::other)
            .and_then(|bytes| files::write_atomic(&cache, &bytes).map_err(|error| error.source));
        if let Err(error) = kept {
            tracing::warn!(%error, "the answer of the KVM probe is not kept");
        }
        Ok(())
    })
    .await?;
    Ok(kvm)
}

fn load(cache: &Path) -> Option<Cached> {
    serde_json::from_slice(&files::read_bounded(cache, 4096).ok()??).ok()
}

/// Runs the probe guest; whether it was back in time.
async fn probe(inner: &Inner, cx: &Context, accel: &str) -> Result<bool> {
    if accel == "kvm" && !Path::new("/dev/kvm").exists() {
        return Ok(false);
    }
    let rom = files::temporary_beside(&inner.config.run_dir.join("probe.rom"));
    let path = rom.clone();
    blocking("write", move || {
        files::write_new(&path, &image()).map_err(|error| error.into_error("write", "KVM probe"))
    })
    .await?;
    let remove = RemoveOnDrop(rom);
    let bios = remove.0.to_str().ok_or_else(|| Error::invalid("run_dir", "wanted UTF-8"))?;
    let run = Run::new(&inner.config.qemu)
        .args(["-nodefaults", "-no-user-config", "-display", "none", "-m", "size=1M"])
        .args([
            "-sandbox",
            "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
        ])
        .args(["-machine", "pc", "-accel", accel, "-bios", bios])
        .args(["-device", "isa-debug-exit,iobase=0xf4,iosize=4"])
        .limit(LIMIT);
    let output = run.output(cx).await;
    host::bound::check(cx, "choose", "accelerator")?;
    match output {
        Ok(output) => Ok(output.status.code() == Some(EXIT_CODE)),
        Err(error) => {
            tracing::info!(accel, %error, INSTRUCTIONS, "the probe guest did not come back");
            Ok(false)
        }
    }
}

struct RemoveOnDrop(std::path::PathBuf);

impl Drop for RemoveOnDrop {
    fn drop(&mut self) {
        if let Err(error) = files::remove_file(&self.0) {
            tracing::debug!(%error, "a probe's image stays");
        }
    }
}

/// The ROM: the code at its end, where the reset vector is.
fn image() -> Vec<u8> {
    let mut rom = vec![0xf4; ROM_BYTES.saturating_sub(CODE.len())];
    rom.extend_from_slice(CODE);
    rom
}

#[cfg(test)]
mod tests;
