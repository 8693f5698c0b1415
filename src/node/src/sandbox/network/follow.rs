//! Follows changes while the pod runs: the pod's network as the CNI configures it, the node's path to the VM, the VM's
//! address, the node's own addresses. A change notification is only a hint; the inspection that follows decides.

use std::net::IpAddr;

use peerpod_proto::guest::{NetworkPlan, Status};
use protobuf::Message;
use sha2::{Digest, Sha256};
use tokio::sync::watch;
use tracing::{error, info, warn};

use crate::sandbox::lifecycle::{Completion, Phase, Task, Unapplied, Which, address};
use crate::sandbox::ports::{Changes, CloudError, Followed, NetworkError, NodeEndpoints};

const MOST_ADDRESSES: usize = 8;

/// Network plan for the guest, with its digest.
#[derive(Clone, Debug)]
pub(crate) struct PlannedNetwork {
    pub(crate) network: NetworkPlan,
    digest: String,
}

impl PlannedNetwork {
    pub(crate) fn new(network: NetworkPlan) -> PlannedNetwork {
        // A plan that cannot be encoded fails when it is sent.
        let digest = Sha256::digest(network.write_to_bytes().unwrap_or_default());
        PlannedNetwork { network, digest: hex::encode(digest) }
    }

    /// Returns the digest that the record stores once the guest has applied the plan.
    pub(crate) fn digest(&self, node_endpoints: &NodeEndpoints) -> String {
        match node_endpoints {
            None => self.digest.clone(),
            Some(node_endpoints) => {
                format!("{}/{}", self.digest, hex::encode(Sha256::digest(node_endpoints.join(" "))))
            }
        }
    }
}

#[derive(Default)]
pub(crate) struct Following {
    /// The VM's address and the change counter of the netns watcher; set while the sandbox runs.
    pub(crate) netns_watcher: Option<(IpAddr, watch::Receiver<Changes>)>,
    /// Change count at the start of the last successful inspection.
    done: Option<Changes>,
    /// Source address for which the cloud was queried, and whether the guest's status, which may lag, listed it then.
    asked: Option<(IpAddr, bool)>,
    /// Differences that were not followed, as last logged.
    left: Vec<String>,
    /// Possible obstacles to the pod's traffic, as last logged.
    obstacles: Vec<String>,
}

impl Following {
    /// Waits for the next change; pending forever without a watcher.
    pub(crate) async fn changed(&mut self) {
        if let Some((_, netns_watcher)) = &mut self.netns_watcher
            && netns_watcher.changed().await.is_ok()
        {
            return;
        }
        std::future::pending().await
    }
}

impl Task {
    /// Starts an inspection if one is due. Only a running sandbox is inspected: no start waits for this.
    pub(crate) fn follow(&mut self) {
        let (Some(netns), Some(network), Some(vm)) =
            (self.record.netns.clone(), self.record.network.clone(), address(&self.record))
        else {
            return;
        };
        let changes = match &mut self.network.following.netns_watcher {
            Some((of, netns_watcher)) if *of == vm => *netns_watcher.borrow_and_update(),
            _ => {
                let mut netns_watcher = self.ports.network.netns_watcher(&netns, &network, vm);
                let changes = *netns_watcher.borrow_and_update();
                // The first inspection covers the changes from before the watcher existed.
                self.network.following.netns_watcher = Some((vm, netns_watcher));
                self.network.following.done = None;
                changes
            }
        };
        let idle = self.in_flight.network.is_idle() && !self.network.given_up && self.guest.plan.is_some();
        if !idle || self.network.following.done == Some(changes) {
            return;
        }
        let (ports, id) = (self.ports.clone(), self.record.id.clone());
        self.in_flight.network.start(async move {
            let result = ports.network.follow(&netns, &id, &network, vm).await;
            Completion::Followed { changes, result: result.map(Box::new) }
        });
    }

    /// Applies the result of an inspection. After a failed one the pod keeps its network, and the inspection is repeated.
    pub(crate) async fn followed(
        &mut self,
        changes: Changes,
        result: Result<Box<Followed>, NetworkError>,
    ) -> Result<(), Unapplied> {
        let followed = match result {
            Ok(followed) => followed,
            Err(error) if error.permanent => {
                // Only another change can help; the reaper handles a namespace that is gone.
                warn!(error = error.text, "cannot follow a change of the pod's network");
                self.network.following.done = Some(changes);
                self.in_flight.network.worked();
                return Ok(());
            }
            Err(error) => {
                self.later(Which::Network, error.text);
                return Ok(());
            }
        };
        if !self.record.phase.is_live() {
            return Ok(());
        }
        if let Some(network) = followed.network {
            self.change(|record| record.network = Some(network)).await?;
            // Where the relay carries the tunnels, it admits the VNIs in the record.
            if !followed.changes.is_empty() {
                self.put_again();
            }
        }
        self.network.following.done = Some(changes);
        self.in_flight.network.worked();
        if self.network.following.left != followed.left {
            for what in &followed.left {
                warn!(
                    what,
                    "the pod's network in the VM differs from its namespace on the node, and stays so"
                );
            }
            self.network.following.left = followed.left;
        }
        if self.network.following.obstacles != followed.obstacles {
            for what in &followed.obstacles {
                error!(what, "the pod's traffic may not reach its VM");
                self.metrics.guests.obstacles.inc();
            }
            self.network.following.obstacles = followed.obstacles;
        }
        let plan = PlannedNetwork::new(followed.plan);
        if self.guest.plan.as_ref().is_none_or(|old| old.digest != plan.digest) {
            info!(changes = followed.changes.join("; "), "the pod's network changed; the guest will follow");
            self.metrics.guests.network_changes.inc();
            self.guest.plan = Some(plan);
        }
        Ok(())
    }

    /// Queries the cloud when the guest connects from an address that the record does not list.
    pub(crate) fn trace(&mut self) {
        let Phase::Running { vm } = &self.record.phase else { return };
        let (connected, from) = {
            let guest = self.guest.state.borrow();
            (guest.connected, guest.address)
        };
        let Some(from) = from.filter(|from| connected && !self.record.addresses.contains(from)) else {
            return;
        };
        if self.network.following.asked == Some((from, self.is_guests_own(from)))
            || !self.in_flight.cloud.is_idle()
        {
            return;
        }
        let (ports, vm, known) = (self.ports.clone(), vm.clone(), address(&self.record));
        self.in_flight.cloud.start(async move {
            let near = match known {
                Some(known) => ports.network.is_one_way(known, from).await,
                None => false,
            };
            Completion::Traced { from, near, result: ports.cloud.addresses(&vm).await }
        });
    }

    /// Returns the address of a VM without a known one, as the link saw it: the guest, authenticated by its certificate,
    /// connects from it and has it on its own interface, so no NAT is between.
    pub(crate) fn seen_by_link(&self) -> Option<IpAddr> {
        if !self.record.addresses.is_empty() || self.record.enrolment.shared_ticket().is_some() {
            return None;
        }
        let from = {
            let guest = self.guest.state.borrow();
            guest.address.filter(|_| guest.connected)?
        };
        self.is_guests_own(from).then_some(from)
    }

    /// Whether the guest reports this address on its own interface.
    fn is_guests_own(&self, address: IpAddr) -> bool {
        let status = Status::parse_from_bytes(&self.guest.state.borrow().status).unwrap_or_default();
        status.uplink_addresses.iter().any(|text| text.parse() == Ok(address))
    }

    /// Applies the cloud's answer about the source address `from`. The address belongs to the VM if the cloud lists it.
    /// It also belongs to the VM if the guest, authenticated by its certificate, has it on its own interface: then no
    /// NAT is between. In that case it must also lie on the same path as the known address: a guest can also connect
    /// through its own pod, and a tunnel to the pod's address would end in itself.
    pub(crate) async fn traced(
        &mut self,
        from: IpAddr,
        near: bool,
        result: Result<Vec<IpAddr>, CloudError>,
    ) -> Result<(), Unapplied> {
        let cloud = match result {
            Ok(addresses) => addresses,
            Err(error) => {
                warn!(%error, %from, "the guest comes from a new address, and the cloud does not report the VM's addresses");
                Vec::new()
            }
        };
        let own = self.is_guests_own(from);
        self.network.following.asked = Some((from, own));
        self.in_flight.cloud.worked();
        let is_the_vms = cloud.contains(&from) || (near && own);
        if !is_the_vms {
            info!(%from, "the guest comes from an address that is not the VM's own: NAT is in the path");
            return Ok(());
        }
        let before = self.record.addresses.iter().map(IpAddr::to_string).collect::<Vec<_>>().join(" ");
        // The tunnel uses the first address of its family. Addresses that the cloud no longer lists come last.
        let mut addresses = vec![from];
        for address in cloud.iter().chain(&self.record.addresses) {
            if !addresses.contains(address) && addresses.len() < MOST_ADDRESSES {
                addresses.push(*address);
            }
        }
        self.change(|record| record.addresses = addresses).await?;
        self.put_again();
        info!(before, now = %from, "the VM has another address; its tunnel follows");
        Ok(())
    }

    /// Whether this session has, or refused, the current plan, node endpoints and pull secrets.
    pub(crate) fn is_assigned(&self, session: &str) -> bool {
        let Some(plan) = &self.guest.plan else { return true };
        let digest = plan.digest(&self.network.node_endpoints.borrow());
        // Just after the node's start its endpoints may be unknown; the guest's last ones stay valid.
        let same = |told: &str| told.starts_with(&digest);
        // A record of an earlier version has no digest; its guest has the plan it was given then.
        let told = self.record.assigned.session.as_deref() == Some(session)
            && self.record.assigned.plan.as_deref().is_none_or(same)
            && self.guest.pull.is_same(self.record.assigned.secret.as_deref());
        let refused = self.guest.refused.as_ref().is_some_and(|(who, what, secret)| {
            who == session && same(what) && self.guest.pull.is_same(secret.as_deref())
        });
        told || refused
    }
}
