//! The names of the calls, for faults and counters.

use std::fmt;

macro_rules! ops {
    ($($(#[$meta:meta])* $name:ident = $text:literal $kind:ident;)*) => {
        /// A call of one of the traits.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        pub enum Op { $($(#[$meta])* #[doc = concat!("`", $text, "`")] $name,)* }

        impl Op {
            /// All calls.
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            /// The method's name; the traits that share one have it with the trait: `Network::list`.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }

            /// Whether the call only looks.
            #[must_use]
            pub const fn is_read(self) -> bool {
                match self { $(Self::$name => ops!(@$kind),)* }
            }
        }
    };
    (@read) => { true };
    (@write) => { false };
}

ops! {
    CreateVm = "create_vm" write;
    StartVm = "start_vm" write;
    StopVm = "stop_vm" write;
    RebootVm = "reboot_vm" write;
    DeleteVm = "delete_vm" write;
    AttachDisk = "attach_disk" write;
    DetachDisk = "detach_disk" write;
    AttachNic = "attach_nic" write;
    DetachNic = "detach_nic" write;
    EnsureVm = "ensure_vm" write;
    ResizeDisk = "resize_disk" write;
    ResizeCpus = "resize_cpus" write;
    ResizeMemory = "resize_memory" write;
    OpenConsole = "open_console" read;
    ConsoleLog = "console_log" read;
    ListVms = "Hypervisor::list" read;
    GetVm = "Hypervisor::get" read;
    EnsureNetwork = "ensure_network" write;
    DestroyNetwork = "destroy_network" write;
    AttachPort = "attach_port" write;
    DetachPort = "detach_port" write;
    RotateMeshPeer = "rotate_mesh_peer" write;
    EnsureSecurityGroup = "ensure_security_group" write;
    DestroySecurityGroup = "destroy_security_group" write;
    ListNetworks = "Network::list" read;
    GetNetwork = "Network::get" read;
    ListPorts = "list_ports" read;
    GetPort = "get_port" read;
    EnsureVolume = "ensure_volume" write;
    DestroyVolume = "destroy_volume" write;
    AttachVolume = "attach_volume" write;
    DetachVolume = "detach_volume" write;
    ListVolumes = "Volume::list" read;
    GetVolume = "Volume::get" read;
    Pull = "pull" write;
    LocalPath = "local_path" read;
    DeleteImage = "Image::delete" write;
    InCache = "in_cache" read;
    CollectImages = "collect" write;
    ListImages = "Image::list" read;
    GetImage = "Image::get" read;
    HostInfo = "host_info" read;
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
