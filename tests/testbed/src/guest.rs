//! A guest of 8 KiB for QEMU.
