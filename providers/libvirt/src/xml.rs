//! Writes the XML for libvirt: domains, volumes, disks. Pure; escapes all text from outside.

use std::fmt::Write as _;

use peerpod_provider_api::Confidential;
use roxmltree::Node;

use crate::config::{Firmware, LibvirtConfig, Plug};
use crate::disks::{DiskServer, DiskSource};
use crate::marks::{Marks, VmNames, uuid_text};

/// Architecture of all VMs.
pub(crate) const ARCH: &str = "x86_64";

pub(crate) struct Machine<'a> {
    pub(crate) identity: &'a VmNames,
    pub(crate) marks: &'a Marks,
    /// `kvm`, `qemu` or `test`.
    pub(crate) kind: &'a str,
    pub(crate) config: &'a LibvirtConfig,
    pub(crate) vcpus: u32,
    pub(crate) memory_mib: u64,
    pub(crate) start: &'a Start,
    /// Path of the file that fw_cfg shows.
    pub(crate) fw_cfg: Option<String>,
    /// Path of the file that the console is written to.
    pub(crate) console: String,
    pub(crate) disks: &'a [DomainDisk],
    pub(crate) nics: Vec<(String, &'a Plug)>,
    pub(crate) confidential: Option<Confidential>,
}

/// Boot source, with paths on libvirtd's host.
pub(crate) enum Start {
    Kernel { kernel: String, initrd: Option<String>, cmdline: String },
    Disk(Firmware),
    Nothing,
}

/// Disk as it is described to libvirt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DomainDisk {
    pub(crate) source: DiskSource,
    pub(crate) format: &'static str,
    pub(crate) serial: String,
    /// Target device, like `vda`.
    pub(crate) target: String,
    pub(crate) read_only: bool,
}

/// Returns the first child element with this name.
pub(crate) fn child<'a, 'i>(node: Node<'a, 'i>, name: &str) -> Option<Node<'a, 'i>> {
    node.children().find(|child| child.has_tag_name(name))
}

/// Escapes text for content and attributes.
pub(crate) fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '&' => escaped.push_str("&amp;"),
            '\'' => escaped.push_str("&apos;"),
            '"' => escaped.push_str("&quot;"),
            // XML cannot contain these characters.
            c if c.is_control() => escaped.push(' '),
            c => escaped.push(c),
        }
    }
    escaped
}

/// Appends formatted text; writing to a `String` cannot fail.
macro_rules! add {
    ($to:expr, $($arguments:tt)*) => { $to.write_fmt(format_args!($($arguments)*)).expect("a String takes everything") };
}

impl Machine<'_> {
    pub(crate) fn xml(&self) -> String {
        let mut xml = String::new();
        let VmNames { name, uuid } = self.identity;
        add!(xml, "<domain type='{}'>\n<name>{}</name>\n", self.kind, escape(name));
        add!(xml, "<uuid>{}</uuid>\n<metadata>{}</metadata>\n", uuid_text(uuid), self.marks.xml());
        add!(xml, "<memory unit='MiB'>{}</memory>\n", self.memory_mib);
        let cpuset = self.config.cpuset.as_ref();
        let cpuset = cpuset.map(|set| format!(" cpuset='{}'", escape(set))).unwrap_or_default();
        add!(xml, "<vcpu{cpuset}>{}</vcpu>\n", self.vcpus);
        if let Some(path) = &self.fw_cfg {
            xml.push_str("<sysinfo type='fwcfg'>\n");
            add!(xml, "<entry name='opt/io.peerpod/user-data' file='{}'/>\n</sysinfo>\n", escape(path));
        }
        self.os(&mut xml);
        if self.kind != "test" {
            xml.push_str("<features><acpi/><apic/></features>\n");
            add!(xml, "{}\n<clock offset='utc'/>\n", cpu(self.kind));
            // The memory of a pod must not get into a core file.
            xml.push_str("<on_poweroff>destroy</on_poweroff><on_reboot>destroy</on_reboot><on_crash>destroy</on_crash>\n");
        }
        self.devices(&mut xml);
        self.launch_security(&mut xml);
        xml.push_str("</domain>\n");
        xml
    }

    fn os(&self, xml: &mut String) {
        let efi = matches!(self.start, Start::Disk(Firmware::Efi));
        add!(xml, "<os{}>", if efi { " firmware='efi'" } else { "" });
        match self.kind {
            "test" => xml.push_str("<type>hvm</type>"),
            _ => add!(xml, "<type arch='{ARCH}' machine='{}'>hvm</type>", escape(&self.config.machine)),
        }
        match self.start {
            Start::Kernel { kernel, initrd, cmdline } => {
                add!(xml, "<kernel>{}</kernel>", escape(kernel));
                if let Some(initrd) = initrd {
                    add!(xml, "<initrd>{}</initrd>", escape(initrd));
                }
                add!(xml, "<cmdline>{}</cmdline>", escape(cmdline));
            }
            Start::Disk(Firmware::Loader(path)) => {
                add!(xml, "<loader readonly='yes' type='pflash'>{}</loader>", escape(path));
            }
            // libvirt takes the first firmware that fits. That is often one with Microsoft's keys, which boots only
            // code that Microsoft has signed, and the image is not signed. The firmware of a confidential VM follows
            // from its technology.
            Start::Disk(Firmware::Efi) if self.confidential.is_none() => {
                xml.push_str("<firmware><feature enabled='no' name='secure-boot'/></firmware>");
            }
            Start::Disk(_) | Start::Nothing => {}
        }
        if self.kind != "test" {
            xml.push_str("<bios useserial='no'/>");
        }
        xml.push_str("</os>\n");
    }

    fn devices(&self, xml: &mut String) {
        xml.push_str("<devices>\n");
        if self.kind != "test" {
            xml.push_str("<controller type='usb' model='none'/>\n<memballoon model='none'/>\n");
            xml.push_str("<rng model='virtio'><backend model='random'>/dev/urandom</backend></rng>\n");
            // Only machines with PCI Express need ports for hotplug.
            let machine = &self.config.machine;
            if machine.contains("q35") || machine.contains("virt") {
                xml.push_str("<controller type='pci' index='0' model='pcie-root'/>\n");
                // The initial devices need such ports, too: the RNG, NICs and disks.
                let taken = 1 + self.nics.len() + self.disks.len();
                for _ in 0..self.config.hotplug_ports as usize + taken {
                    xml.push_str("<controller type='pci' model='pcie-root-port'/>\n");
                }
            }
            add!(
                xml,
                "<serial type='file'><source path='{}' append='on'/><target port='0'/></serial>\n",
                escape(&self.console)
            );
        }
        for (index, disk) in self.disks.iter().enumerate() {
            let boots = index == 0 && matches!(self.start, Start::Disk(_));
            xml.push_str(&disk.xml(boots));
        }
        for (mac, plug) in &self.nics {
            let (kind, name) = match plug {
                Plug::Network(name) => ("network", name),
                Plug::Bridge(name) => ("bridge", name),
            };
            // The boot ROM would only wait for a server that does not exist.
            add!(
                xml,
                "<interface type='{kind}'><source {kind}='{}'/><mac address='{mac}'/><model type='virtio'/>\
                 <rom enabled='no'/></interface>\n",
                escape(name)
            );
        }
        xml.push_str("</devices>\n");
    }

    fn launch_security(&self, xml: &mut String) {
        // Policy bits: no debugging; for SNP also SMT allowed (bit 16) and the reserved bit 17.
        xml.push_str(match self.confidential {
            Some(Confidential::Sev) => {
                "<launchSecurity type='sev'><policy>0x0001</policy></launchSecurity>\n"
            }
            Some(Confidential::SevSnp) => {
                "<launchSecurity type='sev-snp'><policy>0x00030000</policy></launchSecurity>\n"
            }
            Some(Confidential::Tdx) => "<launchSecurity type='tdx'/>\n",
            Some(Confidential::SecureExecution) => "<launchSecurity type='s390-pv'/>\n",
            None => "",
        });
    }
}

impl DomainDisk {
    /// Returns the element, for a domain or for hotplug.
    pub(crate) fn xml(&self, boots: bool) -> String {
        let mut xml = String::new();
        let (kind, source) = match &self.source {
            DiskSource::Volume { pool, name } => {
                ("volume", format!("<source pool='{}' volume='{}'/>", escape(pool), escape(name)))
            }
            DiskSource::File(path) => ("file", format!("<source file='{}'/>", escape(path))),
            DiskSource::Network { protocol, name, places, user } => {
                ("network", network(protocol, name, places, user))
            }
        };
        add!(
            xml,
            "<disk type='{kind}' device='disk'><driver name='qemu' type='{}' discard='unmap'/>",
            self.format
        );
        add!(
            xml,
            "{source}<target dev='{}' bus='virtio'/><serial>{}</serial>",
            self.target,
            escape(&self.serial)
        );
        if self.read_only {
            xml.push_str("<readonly/>");
        }
        if boots {
            xml.push_str("<boot order='1'/>");
        }
        xml.push_str("</disk>\n");
        xml
    }
}

/// Returns the CPU: all features of the host's CPU, or all that QEMU emulates. An emulated CPU does not declare
/// `rep movsb` and `rep stosb` as fast. They are not, and the kernel would clear and copy its pages byte by byte.
fn cpu(kind: &str) -> &'static str {
    match kind {
        "kvm" => "<cpu mode='host-passthrough'/>",
        _ => {
            "<cpu mode='maximum'><feature policy='disable' name='erms'/><feature policy='disable' name='fsrm'/></cpu>"
        }
    }
}

fn network(protocol: &str, name: &str, places: &[DiskServer], user: &Option<(String, String)>) -> String {
    let mut xml = format!("<source protocol='{protocol}' name='{}'>", escape(name));
    for place in places {
        match place {
            DiskServer::Host { host, port } => {
                let port = port.map(|port| format!(" port='{port}'")).unwrap_or_default();
                add!(xml, "<host name='{}'{port}/>", escape(host));
            }
            DiskServer::Socket(path) => add!(xml, "<host transport='unix' socket='{}'/>", escape(path)),
        }
    }
    if let Some((user, secret)) = user {
        add!(xml, "<auth username='{}'><secret type='ceph' uuid='{}'/></auth>", escape(user), escape(secret));
    }
    xml.push_str("</source>");
    xml
}

/// Describes a volume in a pool of files, which only its owner may read.
pub(crate) fn volume(name: &str, format: &str, bytes: u64, backing: Option<(&str, &str)>) -> String {
    let mut xml = format!("<volume><name>{}</name><capacity unit='bytes'>{bytes}</capacity>", escape(name));
    // Space is allocated as it is written.
    xml.push_str("<allocation>0</allocation>");
    add!(xml, "<target><format type='{format}'/><permissions><mode>0600</mode></permissions></target>");
    if let Some((path, format)) = backing {
        add!(xml, "<backingStore><path>{}</path><format type='{format}'/></backingStore>", escape(path));
    }
    xml.push_str("</volume>");
    xml
}

/// Describes a domain that boots the disk `sector`, or finds nothing to boot, and resets, which ends it. It can only do
/// so where guest code really runs. It has the CPU that VMs get, which may be more than the host can do.
pub(crate) fn probe(name: &str, kind: &str, machine: &str, sector: &str) -> String {
    format!(
        "<domain type='{kind}'><name>{}</name><memory unit='MiB'>32</memory><vcpu>1</vcpu>\
         <os><type arch='{ARCH}' machine='{}'>hvm</type><bootmenu enable='no'/><bios rebootTimeout='0'/></os>\
         <features><acpi/><apic/></features>{}\
         <on_reboot>destroy</on_reboot><on_crash>destroy</on_crash><devices>\
         <disk type='file' device='disk'><driver name='qemu' type='raw'/><source file='{}'/><target dev='vda' bus='virtio'/><readonly/></disk>\
         <controller type='usb' model='none'/><memballoon model='none'/></devices>\
         </domain>",
        escape(name),
        escape(machine),
        cpu(kind),
        escape(sector)
    )
}
