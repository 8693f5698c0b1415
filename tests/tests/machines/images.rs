//! Tests the storage of container images in machines that boot: on a disk, if the machine has one. Needs root and `make
//! image`.

use super::images_common;

use images_common::{Image, LayerBuilder, Packing, Registry, ordinary};
use peerpod_client::exec_request;
use peerpod_tests::machines::{PATIENCE, Place};
use peerpod_tests::{CONTAINER, Sandbox, of_image, stop_in_time};
use peerpod_world::{Daemons, World, eventually};

const IMAGE: &str = "team/app:v1";
const OTHER: &str = "team/other:v1";
/// Script that kills the guest's `serve` process, not pid 1 of the same name.
const KILL: &str = "for p in /proc/[0-9]*; do\n\
                    case \"$(tr '\\000' ' ' < $p/cmdline 2>/dev/null)\" in 'peerpod-guest serve '*) kill -9 ${p#/proc/};; esac\n\
                    done\n";

fn registry(world: &World) -> Registry {
    let other = Image::of(&[LayerBuilder::new().file("other", 0o644, b"x").build(Packing::Gzip)]);
    Registry::for_machines(world, &[(IMAGE, &ordinary()), (OTHER, &other)])
}

/// Pod in its own machine.
struct Machine {
    sandbox: Sandbox,
    image: String,
}

impl Machine {
    async fn start(place: &Place, daemons: &Daemons, registry: &Registry) -> Machine {
        let sandbox = place.machine(daemons, "images").await;
        Machine { sandbox, image: format!("{}/{IMAGE}", registry.address) }
    }

    /// Runs two containers of the pulled image, which print files of it. The image is fetched only once.
    async fn runs_the_image(&self, daemons: &Daemons) {
        let command = ["/bin/sh", "-c", "busybox cat /old/one /tmp/made; echo"];
        for id in ["first", "second"] {
            self.sandbox.agent.create_container(&of_image(&self.image, id, &command)).await.unwrap();
            self.sandbox.agent.start_container(id).await.unwrap();
            assert_eq!(self.sandbox.agent.output(id, "").await.unwrap().stdout, b"onemade\n");
        }
        let log = std::fs::read_to_string(daemons.log("relay")).unwrap();
        let fetched: Vec<&str> = log.lines().filter(|line| line.contains("image is here")).collect();
        assert_eq!(fetched.iter().filter(|line| line.contains("fetched=3")).count(), 1, "{fetched:#?}");
    }

    async fn looks(&self) -> String {
        self.sandbox.prints(LOOK).await.unwrap()
    }

    async fn stop(self, place: &Place, daemons: &Daemons) {
        stop_in_time(&self.sandbox.shim, &self.sandbox.id).await.unwrap();
        daemons.gone(&self.sandbox.id, *PATIENCE).await.unwrap();
        place.assert_clean();
    }
}

/// Script that prints the file system type of the images' mount, and the number of layers.
const LOOK: &str =
    "grep ' /var/lib/peerpod ' /proc/mounts | cut -d' ' -f3; ls /var/lib/peerpod/images/l | wc -l";

#[tokio::test(flavor = "multi_thread")]
async fn images_are_stored_on_the_machines_own_empty_disk() {
    let mut place = Place::new();
    place.settings = place.settings.set("provider.libvirt.root-disk-gib", 1);
    let registry = registry(&place.world);
    let daemons = Daemons::start(&place.world, registry.settings(&place.settings, IMAGE)).await.unwrap();
    let machine = Machine::start(&place, &daemons, &registry).await;
    machine.runs_the_image(&daemons).await;
    assert_eq!(machine.looks().await, "ext4\n3\n", "{}", place.consoles());
    // The restarted guest finds its disk mounted, and continues to pull.
    drop(machine.sandbox.agent.exec(&exec_request(CONTAINER, "kill", &["/bin/sh", "-c", KILL])).await);
    let rejoined = eventually("the node hears of it", *PATIENCE, async || {
        let log = std::fs::read_to_string(daemons.log("node")).ok()?;
        log.contains("the guest rejoined").then_some(())
    });
    rejoined.await.unwrap_or_else(|error| panic!("{error:#}\n{}", place.consoles()));
    eventually("the agent answers again", *PATIENCE, async || machine.sandbox.agent.check().await.ok())
        .await
        .unwrap();
    let other = format!("{}/{OTHER}", registry.address);
    machine.sandbox.agent.create_container(&of_image(&other, "third", &["/none"])).await.unwrap();
    assert_eq!(machine.looks().await, "ext4\n4\n", "{}", place.consoles());
    machine.stop(&place, &daemons).await;
}

/// The machine is to have no disk, or the promised disk does not appear, which the guest reports.
#[tokio::test(flavor = "multi_thread")]
async fn without_a_disk_images_are_in_memory_apart_from_the_roots() {
    for promised in [false, true] {
        let mut place = Place::new();
        if promised {
            let line = place.settings.text("provider.libvirt.cmdline").unwrap();
            let line = format!("{line} peerpod.scratch=absent");
            place.settings = place.settings.set("provider.libvirt.cmdline", line);
        }
        let registry = registry(&place.world);
        let daemons = Daemons::start(&place.world, registry.settings(&place.settings, IMAGE)).await.unwrap();
        let machine = Machine::start(&place, &daemons, &registry).await;
        machine.runs_the_image(&daemons).await;
        assert_eq!(machine.looks().await, "tmpfs\n3\n", "{}", place.consoles());
        let said = "is not used: no disk with serial number";
        let log = std::fs::read_to_string(daemons.log("node")).unwrap();
        let heard = log.lines().any(|line| line.contains("note of the guest") && line.contains(said));
        assert_eq!(heard, promised, "{log}\n{}", place.consoles());
        machine.stop(&place, &daemons).await;
    }
}
