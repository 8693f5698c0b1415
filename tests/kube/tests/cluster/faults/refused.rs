//! A second node, whose provider is a fake Google Cloud that refuses VMs.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::Path;

use peerpod_client::Annotations;
use peerpod_test_clouds::gcp::{PROJECT, ZONES};
use peerpod_test_clouds::{Cloud, Gcp};
use peerpod_tests::fresh_id;
use peerpod_world::proxy::Proxy;
use peerpod_world::{Daemons, Settings, World};

use super::super::node_common::{LIMIT, OWN, Rig};
use super::{Texts, describe};

const NODE: &str = "worker-2";

/// Injects the refusals of a cloud.
pub(super) async fn all(rig: &Rig, kubeconfig: &Path) -> Texts {
    let world = World::new().unwrap();
    let listener = world.node().run(|| TcpListener::bind((Ipv4Addr::LOCALHOST, 0))).unwrap().unwrap();
    let cloud = Cloud::start_on(listener, Gcp::default()).await.unwrap();
    let server = SocketAddr::from(([127, 0, 0, 1], rig.cluster.port()));
    let _proxy = Proxy::to_outside(world.node(), rig.cluster.port(), server).unwrap();
    let mut daemons = Daemons::prepare(&world, settings(rig, &cloud, kubeconfig)).unwrap();
    daemons.start_relay().unwrap();
    daemons.start_node().unwrap();
    daemons.ready().await.unwrap();

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
                cloud.heal();
                cloud.set_stock("*", "*", "*", 0);
            }
            _ => {}
        }
        let uid = rig.pod_on(NODE, pod);
        let (id, shim, network) = (fresh_id(pod), daemons.shim().await.unwrap(), world.pod().unwrap());
        let refused = async {
            shim.create_vm(&id, annotations, &network.namespace().path()).await?;
            shim.start_vm(&id).await
        };
        let error =
            tokio::time::timeout(LIMIT, refused).await.unwrap_or_else(|_| panic!("{}", daemons.log_tails()));
        let (event, _) = rig.event(&uid, "VMRefused").await;
        texts.add(fault, event, Some(error.unwrap_err().to_string()), describe(&daemons, &id));
    }
    texts
}

fn settings(rig: &Rig, cloud: &Cloud<Gcp>, kubeconfig: &Path) -> Settings {
    let of_node = Settings::none()
        .with_volume(rig.cluster.folder())
        .set("kubernetes.kubeconfig", kubeconfig.to_str().unwrap())
        .set("cluster.node-name", NODE)
        .set("cluster.namespace", OWN)
        .set("cluster.capacity", -1)
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
