//! Another node of the cluster, with daemons and pods of its own.

use std::net::SocketAddr;
use std::path::Path;

use peerpod_client::{Annotations, Error};
use peerpod_tests::fresh_id;
use peerpod_world::proxy::Proxy;
use peerpod_world::{Daemons, Settings, World};

use super::super::node_common::{OWN, Rig, Running};

pub(super) struct Side {
    pub(super) world: World,
    pub(super) daemons: Daemons,
    pub(super) name: &'static str,
    _proxy: Proxy,
}

impl Side {
    /// Starts the node's daemons. It advertises no capacity.
    pub(super) async fn start(
        rig: &Rig,
        world: World,
        (name, kubeconfig): (&'static str, &Path),
        settings: Settings,
    ) -> Side {
        let server = SocketAddr::from(([127, 0, 0, 1], rig.cluster.port()));
        let proxy = Proxy::to_outside(world.node(), rig.cluster.port(), server).unwrap();
        let settings = settings
            .with_volume(rig.cluster.folder())
            .set("kubernetes.kubeconfig", kubeconfig.to_str().unwrap())
            .set("cluster.node-name", name)
            .set("cluster.namespace", OWN)
            .set("cluster.capacity", -1);
        let mut daemons = Daemons::prepare(&world, settings).unwrap();
        daemons.start_relay().unwrap();
        daemons.start_node().unwrap();
        daemons.ready().await.unwrap();
        Side { world, daemons, name, _proxy: proxy }
    }

    /// Calls CreateVM for a pod. Returns also its answer.
    pub(super) async fn create(&self, pod: &str, annotations: Annotations) -> (Running, Result<(), Error>) {
        let (shim, network) = (self.daemons.shim().await.unwrap(), self.world.pod().unwrap());
        let running = Running { id: fresh_id(pod), shim, network };
        let netns = running.network.namespace().path();
        let made = running.shim.create_vm(&running.id, annotations, &netns).await.map(drop);
        (running, made)
    }
}
