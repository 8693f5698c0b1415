//! Real machines for tests: a libvirtd of the test's own, and the minimal image with tools in it, or the disk image. KVM
//! where it works, emulation where not. Needs root and `make image`.

#![allow(clippy::unwrap_used)] // test code outside of test functions

use std::{fs, time::Duration};

use peerpod_client::Annotations;
use peerpod_world::{
    Daemons, Libvirtd, Pod, Settings, World,
    libvirtd::{POOL, Shape},
};

use crate::{CONTAINER, Sandbox, image};

/// Where machines boot.
pub struct Place {
    /// What makes them.
    pub libvirtd: Libvirtd,
    /// A node's settings that has its VMs there.
    pub settings: Settings,
    /// The world around it.
    pub world: World,
    memory_mib: u64,
}

/// An emulated machine on a busy one.
pub const BOOT: Duration = Duration::from_secs(240);

impl Place {
    /// With machines of about 512 MiB, of which a pod may use 128, and one processor.
    #[expect(clippy::new_without_default, reason = "it starts programs")]
    pub fn new() -> Place {
        Place::with(&[])
    }

    /// The same, with these files in the image: paths from its root, contents.
    pub fn with(files: &[(&str, &[u8])]) -> Place {
        Place::on(Shape::default(), files)
    }

    /// The same on a network of this shape.
    pub fn on(network: Shape, files: &[(&str, &[u8])]) -> Place {
        let world = World::new().unwrap();
        let libvirtd = Libvirtd::start_with(&world, network).unwrap();
        let image = image::with_tools(world.folder(), files).unwrap();
        let settings = libvirtd.settings(&image, Settings::none().set("provider.libvirt.vcpus", 1)).unwrap();
        Place::of(libvirtd, settings, world, 128)
    }

    /// With machines of about 1 GiB and one processor that boot the disk image by UEFI, from a disk that is larger than it.
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

    /// A pod in a machine of its own, which waits in its container (the minimal image's tools).
    pub async fn machine(&self, daemons: &Daemons, name: &str) -> Sandbox {
        let machine = self.boot(daemons, self.world.pod().unwrap(), name).await;
        machine.create_container(CONTAINER, &["sleep", "infinity"]).await.unwrap();
        machine
    }

    /// The same for this pod, without a container.
    pub async fn boot(&self, daemons: &Daemons, pod: Pod, name: &str) -> Sandbox {
        let size = |annotations: Annotations| annotations.size("1", self.memory_mib);
        let machine = Sandbox::boot(daemons, pod, name, size, BOOT).await;
        machine.unwrap_or_else(|error| panic!("{error:#}\n{}\n{}", daemons.log_tails(), self.consoles()))
    }

    /// What the witnesses have to say.
    pub fn assert_clean(&self) {
        assert_eq!(self.libvirtd.domains().unwrap(), Vec::<String>::new());
        assert_eq!(self.libvirtd.files(POOL).unwrap(), Vec::<String>::new());
        assert_eq!(self.libvirtd.firmware().unwrap(), Vec::<String>::new());
        let links = self.world.node().ip("link show\n").unwrap();
        assert!(!links.contains("vnet"), "{links}");
    }

    /// What the VMs said on their consoles.
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
