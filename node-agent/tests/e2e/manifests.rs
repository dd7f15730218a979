//! The manifests that the tests apply.

/// A network, a blank volume and a running instance with both, from the guest artifact of a registry.
pub(crate) fn hello(registry: &str) -> String {
    format!(
        "\
api_version: bcd/v1
kind: Image
name: guest
spec: {{ref: {registry}/guest:latest}}
---
api_version: bcd/v1
kind: Network
name: lan
spec: {{type: nat, cidr: 10.77.0.0/24, gateway: 10.77.0.1}}
---
api_version: bcd/v1
kind: Volume
name: data
spec: {{size_gib: 1, format: qcow2}}
---
{}",
        instance("hello", EXTRA_NONE)
    )
}

/// No extra lines.
pub(crate) const EXTRA_NONE: Extra<'static> = Extra { disks: "", nics: "", more: "" };

/// What an instance has beside the disk `data` and the NIC `lan`, as lines of its manifest.
#[derive(Clone, Copy)]
pub(crate) struct Extra<'a> {
    /// Lines after the disks.
    pub(crate) disks: &'a str,
    /// Lines after the NICs.
    pub(crate) nics: &'a str,
    /// Lines of the spec.
    pub(crate) more: &'a str,
}

/// The instance `name` with the volume `data` and the network `lan`.
pub(crate) fn instance(name: &str, extra: Extra<'_>) -> String {
    let Extra { disks, nics, more } = extra;
    format!(
        "\
api_version: bcd/v1
kind: Instance
name: {name}
spec:
  cpus: 1
  memory_mib: 192
  boot: {{kind: oci_image, ref: guest}}
  disks:
    - {{name: data, volume: data}}
{disks}  nics:
    - {{name: lan, network: lan}}
{nics}  user_data: |
    #cloud-config
    hostname: {name}
  stop_grace_seconds: 20
{more}"
    )
}
