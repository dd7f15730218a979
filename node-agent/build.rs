//! Compiles the API's definition without `protoc`.

use std::{env, error::Error, fs, path::PathBuf};

use protox::prost::Message;

fn main() -> Result<(), Box<dyn Error>> {
    let proto = "proto/bcd/node/v1/node.proto";
    println!("cargo::rerun-if-changed={proto}");
    let descriptors = protox::compile([proto], ["proto"])?;
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("cargo sets OUT_DIR")?);
    // Kept for the reflection service.
    fs::write(out.join("node.bin"), descriptors.encode_to_vec())?;
    tonic_prost_build::configure().compile_fds(descriptors)?;
    Ok(())
}
