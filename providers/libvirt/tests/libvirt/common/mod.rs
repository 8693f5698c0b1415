//! Real libvirtd, and providers that use it. Its VMs boot a disk with a boot sector that halts the CPU.

#![allow(unreachable_pub, missing_docs)] // a module of tests
use std::collections::BTreeMap;
use std::fs;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use peerpod_base::config::{Reader, Sources};
use peerpod_provider_api::{
    CreateRequest, Created, Error, IdempotencyKey, InstanceId, Owned, OwnedState, Owner, Provider, Size,
};
use peerpod_provider_libvirt::{LibvirtConfig, LibvirtProvider};
use peerpod_world::{Libvirtd, World, libvirtd};

pub const PATIENCE: Duration = Duration::from_secs(60);

pub struct Place {
    pub libvirtd: Libvirtd,
    pub image: PathBuf,
    // Last field: its drop removes the remains of the others.
    pub world: World,
}

/// Owner of a node's VMs.
pub fn owner(node: &str) -> Owner {
    Owner { cluster_id: "cluster".to_owned(), node_name: node.to_owned(), installation: "i".to_owned() }
}

impl Place {
    pub fn new() -> Place {
        let world = World::bare().unwrap();
        let libvirtd = Libvirtd::start(&world).unwrap();
        let image = world.folder().join("halt.img");
        fs::write(&image, halt()).unwrap();
        Place { libvirtd, image, world }
    }

    pub fn settings(&self) -> BTreeMap<String, String> {
        [
            ("uri", self.libvirtd.uri()),
            ("pool", libvirtd::POOL.to_owned()),
            ("network", libvirtd::NETWORK.to_owned()),
            ("image", self.image.display().to_string()),
            ("firmware", "bios".to_owned()),
            ("memory-mib", "64".to_owned()),
            // A trial of KVM in every test would show nothing new.
            ("acceleration", "emulated".to_owned()),
            ("hotplug-ports", "2".to_owned()),
            // Halted machines do not shut down.
            ("shutdown-timeout", "1s".to_owned()),
            // libvirtd changes a network for one caller after the other. The last one waits long on a busy machine.
            ("call-timeout", "120s".to_owned()),
        ]
        .into_iter()
        .map(|(key, value)| (format!("provider.libvirt.{key}"), value))
        .collect()
    }

    /// Returns a configuration with these settings beside the usual ones; an empty value removes a setting.
    pub fn config(&self, more: &[(&str, &str)]) -> LibvirtConfig {
        let mut flags = self.settings();
        for (key, value) in more {
            let key = format!("provider.libvirt.{key}");
            if value.is_empty() {
                flags.remove(&key)
            } else {
                flags.insert(key, (*value).to_owned())
            };
        }
        config(flags).unwrap()
    }

    pub fn provider(&self) -> Arc<LibvirtProvider> {
        self.provider_with(&[])
    }

    pub fn provider_with(&self, more: &[(&str, &str)]) -> Arc<LibvirtProvider> {
        Arc::new(LibvirtProvider::new(self.config(more), owner("node")))
    }

    /// The provider of a node with equal names in another cluster.
    pub fn stranger(&self, more: &[(&str, &str)]) -> Arc<LibvirtProvider> {
        let owner = Owner { installation: "another".to_owned(), ..owner("node") };
        Arc::new(LibvirtProvider::new(self.config(more), owner))
    }

    /// Ids of the QEMU processes of this world's node.
    pub fn machines(&self) -> Vec<u32> {
        let mut pids = Vec::new();
        for entry in fs::read_dir("/proc").unwrap().flatten() {
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
            let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
            let line = String::from_utf8_lossy(&line).into_owned();
            if line.contains("qemu-system")
                && line.contains(&*self.world.folder().to_string_lossy())
                && !line.contains("setpriv")
            {
                pids.push(pid);
            }
        }
        pids
    }

    /// The DHCP host entries of a running network: MAC and address by name, as `virsh` shows them.
    pub fn reservations(&self, network: &str) -> BTreeMap<String, (String, Ipv4Addr)> {
        let xml = self.libvirtd.virsh(&["net-dumpxml", network]).unwrap();
        let hosts = xml.lines().filter(|line| line.trim_start().starts_with("<host "));
        let read = |line: &str| {
            let get = |key: &str| line.split(&format!(" {key}='")).nth(1)?.split('\'').next();
            Some((get("name")?.to_owned(), (get("mac")?.to_owned(), get("ip")?.parse().ok()?)))
        };
        hosts.filter_map(read).collect()
    }

    /// The file that dnsmasq reads a network's host entries from.
    pub fn hosts_file(&self, network: &str) -> PathBuf {
        self.world.folder().join(format!("libvirt/lib/dnsmasq/{network}.hostsfile"))
    }

    pub fn assert_clean(&self) {
        let (domains, files) =
            (self.libvirtd.domains().unwrap(), self.libvirtd.files(libvirtd::POOL).unwrap());
        let firmware = self.libvirtd.firmware().unwrap();
        let left = !domains.is_empty() || !files.is_empty() || !firmware.is_empty();
        assert!(!left, "left: {domains:?} {files:?} {firmware:?}");
        assert_eq!(self.reservations(libvirtd::NETWORK), BTreeMap::new());
        assert_eq!(self.machines(), Vec::<u32>::new());
    }
}

pub fn config(flags: BTreeMap<String, String>) -> Result<LibvirtConfig, String> {
    let flags = flags.into_iter().collect();
    let mut reader =
        Reader::load(Sources { flags, ..Sources::default() }.for_tests(), &["provider"], &[]).unwrap();
    let config = LibvirtConfig::read(&mut reader, true);
    reader.finish().map(|_| config).map_err(|mistakes| mistakes.to_string())
}

/// Returns a disk with the boot sector `cli; hlt; jmp` back.
pub fn halt() -> Vec<u8> {
    let mut disk = vec![0; 1 << 20];
    disk[..4].copy_from_slice(&[0xfa, 0xf4, 0xeb, 0xfd]);
    disk[510..512].copy_from_slice(&[0x55, 0xaa]);
    disk
}

/// Returns a disk with a boot sector that waits for the power button, and then switches the machine off. It writes
/// [`WATCHES`] to the console first, and discards the first press, as a VM that still boots does.
pub fn button() -> Vec<u8> {
    let program: [&[u8]; 8] = [
        &[0xfa],                                                 // cli
        &[0xba, 0x02, 0x06, 0xb8, 0x00, 0x01, 0xef], // out 0x602, 0x100: enables the button's event
        &[0xba, 0xf8, 0x03, 0xb0, WATCHES, 0xee],    // out 0x3f8, WATCHES
        &[0xba, 0x00, 0x06, 0xed, 0xf6, 0xc4, 0x01, 0x74, 0xfa], // in 0x600, until it has the event's bit
        &[0xb8, 0x00, 0x01, 0xef],                   // out 0x600, 0x100: clears the bit
        &[0xed, 0xf6, 0xc4, 0x01, 0x74, 0xfa],       // in 0x600, until it has the event's bit again
        &[0xba, 0x04, 0x06, 0xb8, 0x00, 0x20, 0xef], // out 0x604, 0x2000: power off
        &[0xf4, 0xeb, 0xfd],                         // hlt, jmp back
    ];
    let (program, mut disk) = (program.concat(), halt());
    disk[..program.len()].copy_from_slice(&program);
    disk
}

/// Byte on the console of a machine that watches its power button.
pub const WATCHES: u8 = b'W';

pub fn request(name: &str) -> CreateRequest {
    CreateRequest {
        name: name.to_owned(),
        user_data: "{\"ticket\":\"s3cr3t\"}".to_owned(),
        size: Size { vcpus: 1, memory_mib: 64, ..Size::default() },
        ..CreateRequest::default()
    }
}

pub fn key(number: u32) -> IdempotencyKey {
    IdempotencyKey::derive("cluster", "test", number)
}

pub async fn create(provider: &dyn Provider, number: u32) -> Created {
    provider.create(&request("vm"), &key(number)).await.unwrap()
}

pub async fn state(provider: &dyn Provider, id: &InstanceId) -> Option<OwnedState> {
    let owned: Vec<Owned> = provider.list_owned().await.unwrap();
    owned.into_iter().find(|one| one.id == *id).map(|one| one.state)
}

/// Returns the text of an error, and asserts its class.
pub fn text_of<T: std::fmt::Debug>(outcome: Result<T, Error>, class: &str) -> String {
    let error = outcome.unwrap_err();
    assert_eq!(error.class(), class, "{error}");
    let text = error.to_string();
    assert!(!text.contains("s3cr3t"), "{text}");
    text
}
