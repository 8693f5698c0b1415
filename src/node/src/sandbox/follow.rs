//! Follows what changes while the pod runs: its network as the CNI keeps it, the node's way to the VM, the VM's
//! address, the node's own addresses. What is heard is only a hint; what counts is what a new look shows.

use std::{net::IpAddr, sync::Arc};

use peerpod_proto::guest::{NetworkPlan, Status};
use protobuf::Message;
use sha2::{Digest, Sha256};
use tokio::sync::watch;
use tracing::{error, info, warn};

use super::{
    effects::{CloudError, Followed, NetworkError},
    outcomes::clip,
    phase::Phase,
    slots::{Outcome, Which},
    steps::address,
    task::{Task, Unapplied},
};

/// Addresses of one VM that are kept.
const MOST_ADDRESSES: usize = 8;

/// How often something changed around a sandbox's network.
pub type Heard = u64;

/// Where guests find the node; `None` until that is known.
pub type Homes = Option<Arc<Vec<String>>>;

/// What the guest is to make of the pod's network.
#[derive(Clone, Debug)]
pub(super) struct Told {
    pub(super) network: NetworkPlan,
    digest: String,
}

impl Told {
    pub(super) fn new(network: NetworkPlan) -> Told {
        // What cannot be written is refused when it is sent.
        let digest = Sha256::digest(network.write_to_bytes().unwrap_or_default());
        Told { network, digest: hex::encode(&digest) }
    }

    /// For the record, when the guest has carried it out.
    pub(super) fn digest(&self, homes: &Homes) -> String {
        match homes {
            None => self.digest.clone(),
            Some(homes) => {
                format!("{}/{}", self.digest, hex::encode(&Sha256::digest(homes.join(" "))))
            }
        }
    }
}

/// How far a sandbox has followed.
#[derive(Default)]
pub(super) struct Following {
    /// Hears of changes; made when the sandbox runs.
    pub(super) ear: Option<(IpAddr, watch::Receiver<Heard>)>,
    /// What had been heard when the last look that went well began.
    done: Option<Heard>,
    /// A guest's address that the cloud was asked about, and whether the guest said then that it has it: its link may
    /// come from there before its status does.
    asked: Option<(IpAddr, bool)>,
    /// What was not followed, as it was last said.
    left: Vec<String>,
    /// What may be in the traffic's way, as it was last said.
    obstacles: Vec<String>,
}

impl Following {
    /// Waits until something is heard; for ever, where nothing can be.
    pub(super) async fn heard(&mut self) {
        if let Some((_, ear)) = &mut self.ear
            && ear.changed().await.is_ok()
        {
            return;
        }
        std::future::pending().await
    }
}

impl Task {
    /// Starts the look that is due. Only for a sandbox that runs: nothing here is on the way to a start.
    pub(super) fn follow(&mut self) {
        let (Some(netns), Some(network), Some(vm)) =
            (self.record.netns.clone(), self.record.network.clone(), address(&self.record))
        else {
            return;
        };
        let heard = match &mut self.following.ear {
            Some((of, ear)) if *of == vm => *ear.borrow_and_update(),
            _ => {
                let mut ear = self.fx.ear(&netns, &network, vm);
                let heard = *ear.borrow_and_update();
                // The first look is for what happened before anybody listened.
                self.following.ear = Some((vm, ear));
                self.following.done = None;
                heard
            }
        };
        let idle = self.slots.network.is_idle() && !self.network_given_up && self.plan.is_some();
        if !idle || self.following.done == Some(heard) {
            return;
        }
        let (fx, id) = (self.fx.clone(), self.record.id.clone());
        self.slots.network.start(async move {
            let result = fx.follow(&netns, &id, &network, vm).await;
            Outcome::Followed { heard, result: result.map(Box::new) }
        });
    }

    /// A look came back.
    pub(super) async fn followed(&mut self, heard: Heard, followed: Followed) -> Result<(), Unapplied> {
        if !self.record.phase.is_live() {
            return Ok(());
        }
        if let Some(network) = followed.network {
            let mut record = self.record.clone();
            record.network = Some(network);
            self.save(record).await.map_err(Unapplied::Disk)?;
            // The relay lets in what the record has, where the tunnels go through it.
            if !followed.changes.is_empty() {
                self.put_wanted += 1;
                self.slots.relay.wake();
            }
        }
        self.following.done = Some(heard);
        self.slots.network.worked();
        if self.following.left != followed.left {
            for what in &followed.left {
                warn!(
                    what,
                    "something of the pod's network is not as in its namespace on the node, and stays so"
                );
            }
            self.following.left = followed.left;
        }
        if self.following.obstacles != followed.obstacles {
            for what in &followed.obstacles {
                error!(what, "the pod's traffic may not reach its VM");
                self.metrics.obstacles.inc();
            }
            self.following.obstacles = followed.obstacles;
        }
        let told = Told::new(followed.plan);
        if self.plan.as_ref().is_none_or(|plan| plan.digest != told.digest) {
            info!(changes = followed.changes.join("; "), "the pod's network changed; the guest will follow");
            self.metrics.network_changes.inc();
            self.plan = Some(told);
        }
        Ok(())
    }

    /// A look failed: the pod goes on with what it has, and the look is repeated.
    pub(super) fn not_followed(&mut self, heard: Heard, error: NetworkError) {
        if error.permanent {
            // Nothing to be done until something changes again; the reaper looks for a namespace that is gone.
            warn!(error = error.text, "a change of the pod's network cannot be followed");
            self.following.done = Some(heard);
            self.slots.network.worked();
        } else {
            self.later(Which::Network, error.text);
        }
    }

    /// Asks the cloud about an address that it did not name and the guest comes from.
    pub(super) fn trace(&mut self) {
        let Phase::Running { vm } = &self.record.phase else { return };
        let (connected, from) = {
            let guest = self.guest.borrow();
            (guest.connected, guest.address)
        };
        let Some(from) = from.filter(|from| connected && !self.record.addresses.contains(from)) else {
            return;
        };
        if self.following.asked == Some((from, self.is_guests_own(from))) || !self.slots.cloud.is_idle() {
            return;
        }
        let (fx, vm, known) = (self.fx.clone(), vm.clone(), address(&self.record));
        self.slots.cloud.start(async move {
            let near = match known {
                Some(known) => fx.is_one_way(known, from).await,
                None => false,
            };
            Outcome::Traced { from, near, result: fx.addresses(&vm).await }
        });
    }

    /// Whether the guest says that it has this address on its own interface.
    fn is_guests_own(&self, address: IpAddr) -> bool {
        let status = Status::parse_from_bytes(&self.guest.borrow().status).unwrap_or_default();
        status.uplink_addresses.iter().any(|text| text.parse() == Ok(address))
    }

    /// What the cloud says. The address counts where the cloud names it; or where the guest, whom its certificate
    /// proves, has it on its own interface (then no NAT is between) and it lies the same way as the one that is known:
    /// a guest can also come through its own pod, and a tunnel to the pod's address would end in itself.
    pub(super) async fn traced(
        &mut self,
        from: IpAddr,
        near: bool,
        result: Result<Vec<IpAddr>, CloudError>,
    ) -> Result<(), Unapplied> {
        let cloud = match result {
            Ok(addresses) => addresses,
            Err(error) => {
                warn!(%error, %from, "the guest comes from a new address, and the cloud does not say whether it is the VM's");
                Vec::new()
            }
        };
        let own = self.is_guests_own(from);
        self.following.asked = Some((from, own));
        self.slots.cloud.worked();
        let is_the_vms = cloud.contains(&from) || (near && own);
        if !is_the_vms {
            info!(%from, "the guest comes from an address that is not the VM's own: a NAT is between");
            return Ok(());
        }
        let mut record = self.record.clone();
        let before = record.addresses.iter().map(IpAddr::to_string).collect::<Vec<_>>().join(" ");
        // The tunnel goes to the first of its family; what nobody names any more stays behind the others.
        let mut addresses = vec![from];
        for address in cloud.into_iter().chain(record.addresses) {
            if !addresses.contains(&address) && addresses.len() < MOST_ADDRESSES {
                addresses.push(address);
            }
        }
        record.addresses = addresses;
        self.save(record).await.map_err(Unapplied::Disk)?;
        self.redial();
        info!(before, now = %from, "the VM has another address; its tunnel follows");
        Ok(())
    }

    /// Whether this session has heard all there is: the plan, where the node is, the pod's pull secrets.
    pub(super) fn is_told(&self, session: &str) -> bool {
        let Some(plan) = &self.plan else { return true };
        let digest = plan.digest(&self.homes.borrow());
        // Where the node is may not be known yet after its start; what was told before still holds.
        let same = |told: &str| told.starts_with(&digest);
        // Nothing told: a record of an earlier version, whose guest has what it was given then.
        let told = self.record.session.as_deref() == Some(session)
            && self.record.told.as_deref().is_none_or(same)
            && self.pull.is_same(self.record.told_secret.as_deref());
        let refused = self.refused.as_ref().is_some_and(|(who, what, secret)| {
            who == session && same(what) && self.pull.is_same(secret.as_deref())
        });
        told || refused
    }

    /// The guest did not take a plan while the pod runs.
    pub(super) fn refused_plan(
        &mut self,
        session: String,
        digest: String,
        secret: Option<String>,
        error: &str,
    ) {
        error!(error = clip(error), "the guest cannot follow the pod's network");
        self.refused = Some((session, digest, secret));
    }
}
