//! The driver on real QEMU, with a guest of 8 KiB.

#[cfg(test)]
#[expect(dead_code, reason = "the fault tests use the rest")]
mod common;
#[cfg(test)]
mod console;
#[cfg(test)]
mod devices;
#[cfg(test)]
mod life;
#[cfg(test)]
mod recovery;
