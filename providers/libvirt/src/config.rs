//! Defines and reads the settings of the libvirt provider, `provider.libvirt.*`. Reads configuration, touches nothing
//! else.

use std::path::PathBuf;
use std::time::Duration;

use peerpod_base::config::Reader;
use peerpod_provider_api::Confidential;

use crate::rpc::link::Address;

/// Settings of the libvirt provider.
#[derive(Debug, Clone)]
pub struct LibvirtConfig {
    /// Whether VMs are created, not only listed and deleted.
    pub creates: bool,
    /// Whether the preflight starts no VM to try KVM.
    pub dry: bool,
    /// Address of libvirtd, and the driver to use.
    pub address: Address,
    /// Storage pool (of files) for images, overlays, user-data and consoles.
    pub pool: String,
    /// Network or bridge of the VMs.
    pub network: Plug,
    /// Network or bridge of second NICs; `None`: there are no second NICs.
    pub second_network: Option<Plug>,
    /// Kernel or disk that VMs boot.
    pub boot: Boot,
    /// Minimum size of the root disk, in GiB; 0: the size of the image. With [`Boot::Kernel`]: size of an empty disk
    /// beside the kernel; 0: no disk.
    pub root_disk_gib: u64,
    /// Virtual CPUs of a pod that requests none.
    pub vcpus: u32,
    /// Memory of a pod that requests none, in MiB.
    pub memory_mib: u64,
    /// CPUs of the host that VMs may run on (`0-3,8`); `None`: all.
    pub cpuset: Option<String>,
    /// Hardware or software virtualisation.
    pub acceleration: Acceleration,
    /// QEMU's machine type.
    pub machine: String,
    /// Transport of user-data to the VM.
    pub user_data: UserData,
    /// Technology that hides a VM's memory from the host, for pods that request none.
    pub confidential: Option<Confidential>,
    /// Folders with files that may be attached as disks.
    pub volume_dirs: Vec<PathBuf>,
    /// Ceph user, and the libvirt secret with its key, for `rbd:` disks.
    pub rbd: Option<(String, String)>,
    /// Number of disks that can be attached to a running VM.
    pub hotplug_ports: u32,
    /// Longest wait for one answer of libvirtd.
    pub call_timeout: Duration,
    /// Longest wait for a VM with volumes to shut down before its power is cut.
    pub shutdown_timeout: Duration,
}

/// Network or bridge that a NIC is attached to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Plug {
    /// A libvirt network.
    Network(String),
    /// A bridge of the host.
    Bridge(String),
}

/// Kernel or disk that VMs boot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Boot {
    /// A kernel that QEMU itself loads.
    Kernel {
        /// Kernel file on the node.
        kernel: File,
        /// File of the initial RAM disk on the node.
        initrd: Option<File>,
        /// The kernel's command line.
        cmdline: String,
    },
    /// A disk.
    Disk {
        /// Image of the disk.
        image: LibvirtImage,
        /// Firmware that boots the disk.
        firmware: Firmware,
    },
    /// No kernel or disk is configured.
    Nothing,
}

/// File on the node, with the digest that it must have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct File {
    /// Path.
    pub path: PathBuf,
    /// SHA-256 as hex, if one is configured.
    pub sha256: Option<String>,
}

/// Source of a disk image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LibvirtImage {
    /// A file on the node; uploaded once, by digest.
    File(File),
    /// A volume that is in the pool.
    Volume(String),
}

/// Firmware that boots a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Firmware {
    /// SeaBIOS.
    Bios,
    /// UEFI that libvirt finds on its host, and that requires no signature.
    Efi,
    /// UEFI with this path.
    Loader(String),
}

/// Hardware or software virtualisation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Acceleration {
    /// KVM if a VM can be started with it.
    Auto,
    /// KVM, or an error without it.
    Kvm,
    /// Emulation by QEMU.
    Emulated,
}

/// Transport of user-data to the VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UserData {
    /// QEMU's fw_cfg: `opt/io.peerpod/user-data`.
    FwCfg,
    /// A disk with the label `cidata`.
    NoCloud,
}

/// QEMU's machine type.
const MACHINE: &str = "q35";
/// Number of disks that can be attached to a running VM. A machine has room for 24.
const HOTPLUG_PORTS: u32 = 8;
/// Longest wait for a VM with volumes to shut down: a guest's last flush may take 30 s, and then its systemd 60 s.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(95);
/// Longest wait for one answer of libvirtd.
const CALL_TIMEOUT: Duration = Duration::from_secs(30);

/// KVM if a VM can really be started with it, otherwise emulation.
const ACCELERATION: &str = "auto";
const KERNEL_CMDLINE: &str = "console=ttyS0 panic=1 quiet";

impl LibvirtConfig {
    /// Reads `provider.libvirt.*`. The reader collects the mistakes. A process that does not create (the cluster's
    /// controller) needs libvirtd and the pool, but no image.
    pub fn read(reader: &mut Reader, creates: bool) -> LibvirtConfig {
        reader.section("provider.libvirt", |section| LibvirtConfig {
            creates,
            dry: false,
            address: address(section),
            pool: section.get("pool", "default", "storage pool (of files) for images, overlays and consoles"),
            network: network(section),
            second_network: section
                .optional("second-network", "libvirt network of second NICs; default: there are none")
                .map(Plug::Network),
            boot: boot(section, creates),
            root_disk_gib: section.get(
                "root-disk-gib",
                "0",
                "least size of the root disk in GiB, 0: the image's size; with `kernel`: size of an empty \
                 disk for containers' images, 0: none, images are in memory",
            ),
            vcpus: vcpus(section),
            memory_mib: memory_mib(section),
            cpuset: cpuset(section),
            acceleration: acceleration(section),
            machine: section.constant("machine", "MACHINE", MACHINE.to_owned()),
            user_data: user_data(section),
            confidential: confidential(section),
            volume_dirs: volume_dirs(section),
            rbd: rbd(section),
            hotplug_ports: section.constant("hotplug-ports", "HOTPLUG_PORTS", HOTPLUG_PORTS),
            call_timeout: section.constant("call-timeout", "CALL_TIMEOUT", CALL_TIMEOUT),
            shutdown_timeout: section.constant("shutdown-timeout", "SHUTDOWN_TIMEOUT", SHUTDOWN_TIMEOUT),
        })
    }
}

fn address(section: &mut Reader) -> Address {
    let help = "libvirtd's URI: qemu:///system, qemu:///session, or qemu+unix:///system?socket=PATH";
    let uri: String = section.get("uri", "qemu:///system", help);
    Address::parse(&uri).unwrap_or_else(|why| {
        section.mistake("uri", why);
        Address { driver: String::new(), sockets: Vec::new(), is_own: false }
    })
}

fn network(section: &mut Reader) -> Plug {
    let network = section.get("network", "default", "libvirt network of the VMs");
    let help = "bridge of the host to plug VMs into, instead of a libvirt network";
    section.optional("bridge", help).map_or(Plug::Network(network), Plug::Bridge)
}

fn vcpus(section: &mut Reader) -> u32 {
    let vcpus = section.get("vcpus", "2", "virtual CPUs of a pod that asks for none");
    if vcpus == 0 {
        section.mistake("vcpus", "a VM needs at least one");
    }
    vcpus
}

fn memory_mib(section: &mut Reader) -> u64 {
    let memory_mib = section.get("memory-mib", "2048", "memory in MiB of a pod that asks for none");
    if memory_mib < 64 {
        section.mistake("memory-mib", "less than 64 MiB boots nothing");
    }
    memory_mib
}

fn cpuset(section: &mut Reader) -> Option<String> {
    let cpuset: Option<String> =
        section.optional("cpuset", "host CPUs that VMs may run on, like 0-3,8; default: all");
    if cpuset.as_deref().is_some_and(|text| !is_cpuset(text)) {
        section.mistake("cpuset", "not a list of CPUs; write it like 0-3,8,10-12");
    }
    cpuset
}

fn user_data(section: &mut Reader) -> UserData {
    let help = "channel of the guest's user-data: QEMU's fw_cfg, or a disk with the label cidata";
    match section.choice("user-data", "fw-cfg", &["fw-cfg", "nocloud"], help).as_str() {
        "nocloud" => UserData::NoCloud,
        _ => UserData::FwCfg,
    }
}

fn volume_dirs(section: &mut Reader) -> Vec<PathBuf> {
    let help = "folders of libvirtd's host below which files may be attached as disks";
    let dirs: Vec<String> = section.get("volume-dirs", "", help);
    for dir in dirs.iter().filter(|dir| !dir.starts_with('/') || dir.contains("..")) {
        section.mistake("volume-dirs", format!("{dir}: not an absolute path"));
    }
    dirs.into_iter().map(PathBuf::from).collect()
}

fn rbd(section: &mut Reader) -> Option<(String, String)> {
    let user: Option<String> = section.optional("rbd-user", "Ceph's user for rbd: disks");
    let secret: Option<String> =
        section.optional("rbd-secret", "UUID of the libvirt secret that holds that user's key");
    if user.is_some() != secret.is_some() {
        section.mistake("rbd-secret", "rbd-user and rbd-secret go together");
    }
    user.zip(secret)
}

fn boot(section: &mut Reader, creates: bool) -> Boot {
    let help = "kernel file on the node that QEMU boots directly; uploaded once";
    let kernel = file(section, "kernel", "kernel-sha256", help);
    let initrd = file(section, "initrd", "initrd-sha256", "initial RAM disk of that kernel");
    let cmdline = section.get("cmdline", KERNEL_CMDLINE, "command line of that kernel");
    let help = "disk image on the node (qcow2 or raw), instead of a kernel; uploaded once";
    let image = file(section, "image", "image-sha256", help);
    let volume: Option<String> =
        section.optional("volume", "disk image that is in the pool, by its volume's name");
    let help =
        "firmware that starts a disk image: efi (without secure boot), bios, or the path of a UEFI loader";
    let firmware: String = section.get("firmware", "efi", help);
    let firmware = match firmware.as_str() {
        "efi" => Firmware::Efi,
        "bios" => Firmware::Bios,
        path if path.starts_with('/') => Firmware::Loader(firmware),
        _ => {
            section.mistake("firmware", "write efi, bios or an absolute path");
            Firmware::Efi
        }
    };
    match (kernel, image, volume) {
        (Some(kernel), None, None) => Boot::Kernel { kernel, initrd, cmdline },
        (None, Some(file), None) => Boot::Disk { image: LibvirtImage::File(file), firmware },
        (None, None, Some(volume)) => Boot::Disk { image: LibvirtImage::Volume(volume), firmware },
        (None, None, None) => {
            if creates {
                section
                    .mistake("kernel", "no boot source for VMs; set kernel and initrd, or image, or volume");
            }
            Boot::Nothing
        }
        _ => {
            section.mistake("kernel", "only one of kernel, image and volume can be booted");
            Boot::Nothing
        }
    }
}

fn file(
    section: &mut Reader,
    key: &'static str,
    digest_key: &'static str,
    help: &'static str,
) -> Option<File> {
    let path: Option<PathBuf> = section.optional(key, help);
    let sha256: Option<String> =
        section.optional(digest_key, "SHA-256 that this file must have, as hex; default: any");
    if sha256.as_ref().is_some_and(|hex| hex.len() != 64 || !hex.bytes().all(|b| b.is_ascii_hexdigit())) {
        section.mistake(digest_key, "not a SHA-256; write 64 hexadecimal digits");
    }
    Some(File { path: path?, sha256: sha256.map(|hex| hex.to_ascii_lowercase()) })
}

fn acceleration(section: &mut Reader) -> Acceleration {
    match section.constant("acceleration", "ACCELERATION", ACCELERATION.to_owned()).as_str() {
        "kvm" => Acceleration::Kvm,
        "emulated" => Acceleration::Emulated,
        _ => Acceleration::Auto,
    }
}

fn confidential(section: &mut Reader) -> Option<Confidential> {
    let help = "technology that keeps VMs' memory from the host: none, sev, sev_snp or tdx";
    let word = section.choice("confidential", "none", &["none", "sev", "sev_snp", "tdx"], help);
    Confidential::from_word(&word)
}

/// Checks a list of CPUs like `0-3,8`: libvirt's syntax without its exclusions.
fn is_cpuset(text: &str) -> bool {
    let number = |text: &str| !text.is_empty() && text.len() < 6 && text.bytes().all(|b| b.is_ascii_digit());
    text.split(',').all(|part| match part.split_once('-') {
        Some((from, to)) => number(from) && number(to),
        None => number(part),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_of_cpus_are_told_from_other_text() {
        for good in ["0", "0,2,4,6", "0-3", "0-3,8,10-12"] {
            assert!(is_cpuset(good), "{good}");
        }
        for bad in ["", ",", "a", "0-", "-3", "0-3,", "1'/><x y='"] {
            assert!(!is_cpuset(bad), "{bad}");
        }
    }
}
