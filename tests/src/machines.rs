//! Boots real machines for tests: its own libvirtd runs the minimal image with tools in it, or the disk image.
//!
//! Uses KVM where it works, and emulation elsewhere. Needs root and `make image`.

#![allow(clippy::unwrap_used)] // test code outside of test functions

use std::fs;
use std::sync::LazyLock;
use std::time::Duration;

use peerpod_client::Annotations;
use peerpod_world::libvirtd::{POOL, Shape};
use peerpod_world::qemu;
use peerpod_world::{Daemons, Libvirtd, Pod, Settings, World};

use crate::{CONTAINER, Sandbox, image};

/// Test environment with a libvirtd and machines that boot.
pub struct Place {
    /// The libvirtd that makes the machines.
    pub libvirtd: Libvirtd,
    /// Settings of a node that makes its VMs with this libvirtd.
    pub settings: Settings,
    /// The world that contains the node.
    pub world: World,
    memory_mib: u64,
}

/// Time limit of one step of a machine, such as its boot or shutdown.
pub static PATIENCE: LazyLock<Duration> =
    LazyLock::new(|| qemu::patience(&image::minimal().unwrap()).unwrap());

impl Place {
    /// Makes an environment with machines of about 512 MiB, of which a pod may use 128 MiB, and one processor.
    #[expect(clippy::new_without_default, reason = "it starts programs")]
    pub fn new() -> Place {
        Place::with(&[])
    }

    /// Makes the same environment with these files in the image (path from the image's root, content).
    pub fn with(files: &[(&str, &[u8])]) -> Place {
        Place::on(Shape::default(), files)
    }

    /// Makes the same environment with a network of this shape.
    pub fn on(network: Shape, files: &[(&str, &[u8])]) -> Place {
        let world = World::new().unwrap();
        let libvirtd = Libvirtd::start_with(&world, network).unwrap();
        let image = image::with_tools(world.folder(), files).unwrap();
        let settings = libvirtd.settings(&image, Settings::none().set("provider.libvirt.vcpus", 1)).unwrap();
        Place::of(libvirtd, settings, world, 128)
    }

    /// Makes an environment with machines of about 1 GiB and one processor. They boot the disk image by UEFI from a
    /// disk larger than the image.
    pub fn uefi() -> Place {
        let world = World::new().unwrap();
        let libvirtd = Libvirtd::start(&world).unwrap();
        let settings =
            Settings::none().set("provider.libvirt.vcpus", 1).set("provider.libvirt.root-disk-gib", 1);
        let settings = libvirtd.disk_settings(&image::disk().unwrap(), settings);
        Place::of(libvirtd, settings, world, 768)
    }

    fn of(libvirtd: Libvirtd, settings: Settings, world: World, memory_mib: u64) -> Place {
        Place { libvirtd, settings, world, memory_mib }
    }

    /// Boots a pod in its own machine, with a container that sleeps (from the minimal image's tools).
    pub async fn machine(&self, daemons: &Daemons, name: &str) -> Sandbox {
        let machine = self.boot(daemons, self.world.pod().unwrap(), name).await;
        machine.create_container(CONTAINER, &["sleep", "infinity"]).await.unwrap();
        machine
    }

    /// Boots the given pod in its own machine, without a container.
    pub async fn boot(&self, daemons: &Daemons, pod: Pod, name: &str) -> Sandbox {
        let size = |annotations: Annotations| annotations.size("1", self.memory_mib);
        let machine = Sandbox::boot(daemons, pod, name, size, *PATIENCE).await;
        machine.unwrap_or_else(|error| panic!("{error:#}\n{}\n{}", daemons.log_tails(), self.consoles()))
    }

    /// Asserts that no domain, file, NVRAM file or network device of a VM is left.
    pub fn assert_clean(&self) {
        assert_eq!(self.libvirtd.domains().unwrap(), Vec::<String>::new());
        assert_eq!(self.libvirtd.files(POOL).unwrap(), Vec::<String>::new());
        assert_eq!(self.libvirtd.firmware().unwrap(), Vec::<String>::new());
        let links = self.world.node().ip("link show\n").unwrap();
        assert!(!links.contains("vnet"), "{links}");
    }

    /// Returns the consoles of the VMs.
    pub fn consoles(&self) -> String {
        let mut all = String::new();
        for name in self.libvirtd.files(POOL).unwrap_or_default() {
            if name.ends_with(".console") {
                let text = fs::read(self.libvirtd.pool_folder(POOL).join(&name)).unwrap_or_default();
                all += &format!("--- {name} ---\n{}\n", String::from_utf8_lossy(&text));
            }
        }
        all
    }
}
