//! A second node, whose provider is a fake Google Cloud that refuses VMs.

use std::net::{Ipv4Addr, TcpListener};
use std::path::Path;

use peerpod_client::Annotations;
use peerpod_test_clouds::gcp::{PROJECT, ZONES};
use peerpod_test_clouds::{Cloud, Gcp};
use peerpod_world::{Settings, World};
use tokio::time::timeout;

use super::super::node_common::{LIMIT, Rig};
use super::side::Side;
use super::{Texts, describe};

const NODE: &str = "worker-2";

/// Injects the refusals of a cloud.
pub(super) async fn all(rig: &Rig, kubeconfig: &Path) -> Texts {
    let world = World::new().unwrap();
    let listener = world.node().run(|| TcpListener::bind((Ipv4Addr::LOCALHOST, 0))).unwrap().unwrap();
    let cloud = Cloud::start_on(listener, Gcp::default()).await.unwrap();
    let side = Side::start(rig, world, (NODE, kubeconfig), settings(&cloud)).await;

    let mut texts = Texts::default();
    let plain = |name: &str| Annotations::new("shop", name).size("1", 512);
    let image = Gcp::image("gone");
    for (fault, pod, annotations) in [
        ("the VM image is missing", "image", plain("image").image(&image)),
        ("the account's quota is used up", "quota", plain("quota").machine_type("e2-standard-4")),
        ("the cloud has no capacity", "capacity", plain("capacity").machine_type("n2d-standard-2")),
    ] {
        match pod {
            "quota" => cloud.with(|gcp, _| gcp.quota = Some(0)),
            "capacity" => {
                cloud.with(|gcp, _| gcp.quota = None);
                cloud.set_stock("*", "*", "*", 0);
            }
            _ => {}
        }
        let uid = rig.pod_on(NODE, pod);
        let (running, made) = side.create(pod, annotations).await;
        made.unwrap();
        let start = timeout(LIMIT, running.shim.start_vm(&running.id)).await;
        let error = start.unwrap_or_else(|_| panic!("{}", side.daemons.log_tails())).unwrap_err();
        let (event, _) = rig.event(&uid, "VMRefused").await;
        texts.add(fault, event, Some(error.to_string()), describe(&side.daemons, &running.id));
    }
    texts
}

fn settings(cloud: &Cloud<Gcp>) -> Settings {
    let of_node = Settings::none()
        .set("node.relay-addresses", vec!["192.0.2.1:15151"])
        .set("node.batch", "off")
        .set("provider.kind", "gcp");
    let all = [
        ("endpoint", cloud.endpoint()),
        ("metadata", cloud.endpoint()),
        ("project-id", PROJECT.to_owned()),
        ("zones", ZONES.join(",")),
        ("image", "peerpod".to_owned()),
        ("subnetwork", "pods".to_owned()),
        ("instance-types", "n2d-standard-2,e2-standard-4".to_owned()),
        ("confidential", "none".to_owned()),
        ("arch", "x86_64".to_owned()),
        ("market", "on-demand".to_owned()),
    ];
    all.into_iter()
        .fold(of_node, |settings, (key, value)| settings.set(&format!("provider.gcp.{key}"), value))
}
