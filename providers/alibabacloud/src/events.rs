//! Watches for spot VMs that Alibaba Cloud takes back. It announces this five minutes ahead: in the VM's metadata, as an
//! event, and as the lock `Recycling` of the VM. The provider looks at the locks, which needs no setup in the account: one
//! call for 100 VMs, while there are any. May call DescribeInstances.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures_util::StreamExt;
use futures_util::stream::{self, BoxStream};
use parking_lot::Mutex;
use peerpod_provider_api::{Error, EventKind, InstanceId, Market, ProviderEvent};
use peerpod_provider_cloud::{Offering, until};

use crate::Alibaba;
use crate::vms::{self, AlibabaCloudVm, MOST};

/// Time between the notice and the end of the VM ("RunInstances", `SpotDuration`).
const NOTICE: Duration = Duration::from_secs(300);
/// Maximum number of watched VMs, more than any node has. Further VMs are not watched.
const MOST_VMS: usize = 10_000;

/// Existing spot VMs.
#[derive(Debug, Default)]
pub(crate) struct Spots(Mutex<HashMap<String, Spot>>);

#[derive(Debug, Default)]
struct Spot {
    offering: Option<Offering>,
    /// Whether the cloud has shown it: then its absence is its end.
    is_seen: bool,
    is_noticed: bool,
}

impl Spots {
    /// Records a VM that was made on the spot market.
    pub(crate) fn made(&self, id: &str, offering: &Offering) {
        let mut all = self.0.lock();
        if all.len() < MOST_VMS {
            all.entry(id.to_owned()).or_default().offering.get_or_insert_with(|| offering.clone());
        }
    }

    /// Records a VM that the cloud shows. VMs of an earlier process are watched from then on.
    pub(crate) fn seen(&self, vm: &AlibabaCloudVm) {
        let mut all = self.0.lock();
        // One that ends is being deleted: its absence is no event.
        if !vm.is_spot || !vm.state.lives() || (all.len() >= MOST_VMS && !all.contains_key(&vm.id)) {
            return;
        }
        let spot = all.entry(vm.id.clone()).or_default();
        spot.is_seen = true;
        if let (Some(machine), Some(zone)) = (&vm.machine, &vm.zone) {
            spot.offering.get_or_insert_with(|| Offering {
                machine: machine.clone(),
                zone: zone.clone(),
                subnet: None,
                market: Market::Spot,
            });
        }
    }

    /// Removes a VM that is being deleted or is gone.
    pub(crate) fn forget(&self, id: &str) {
        self.0.lock().remove(id);
    }

    fn ids(&self) -> Vec<String> {
        self.0.lock().keys().cloned().collect()
    }

    /// Returns the event of a look at a VM that was not reported before, and the offering that the cloud has no capacity
    /// for. `vm`: as the cloud shows it; `None`: it does not.
    fn note(
        &self,
        id: &str,
        vm: Option<&AlibabaCloudVm>,
        now: SystemTime,
    ) -> Option<(EventKind, Option<Offering>)> {
        let mut all = self.0.lock();
        let spot = all.get_mut(id)?;
        match vm {
            Some(vm) if vm.is_recalled && !spot.is_noticed => {
                spot.is_noticed = true;
                Some((EventKind::Interruption { at: now + NOTICE }, spot.offering.clone()))
            }
            None if spot.is_seen => {
                let spot = all.remove(id)?;
                let reason = "Alibaba Cloud does not show the spot VM any more: it took it back, or another \
                              program deleted it";
                let offering = spot.offering.filter(|_| spot.is_noticed);
                Some((EventKind::Ended { reason: reason.to_owned() }, offering))
            }
            _ => None,
        }
    }
}

/// Returns a stream of events of spot VMs. The watch runs while the stream is polled.
pub(crate) fn follow(alibaba: Arc<Alibaba>) -> BoxStream<'static, ProviderEvent> {
    let looks = stream::unfold(alibaba, |alibaba| async move {
        tokio::time::sleep(alibaba.config.spot_watch).await;
        let mut received = Vec::new();
        for ids in alibaba.spots.ids().chunks(MOST) {
            match inspect(&alibaba, ids).await {
                Ok(events) => received.extend(events),
                Err(error) => tracing::warn!(
                    vms = ids.len(),
                    "cannot find out whether Alibaba Cloud takes spot VMs back: {error}"
                ),
            }
        }
        Some((received, alibaba))
    });
    looks.flat_map(stream::iter).boxed()
}

async fn inspect(alibaba: &Alibaba, ids: &[String]) -> Result<Vec<ProviderEvent>, Error> {
    let found = vms::by_ids(alibaba.connected()?.ecs.clone(), ids.to_vec(), until()).await?;
    found.values().for_each(|vm| alibaba.spots.seen(vm));
    let now = SystemTime::now();
    let event = |id: &String| {
        let (kind, offering) = alibaba.spots.note(id, found.get(id), now)?;
        if let Some(offering) = offering {
            // The lost pod will be replaced, but not from an offering that the cloud has just run out of.
            alibaba.planner.exhausted(&offering, "Recycling");
        }
        Some(ProviderEvent { id: InstanceId::new(id.clone()).ok()?, kind })
    };
    Ok(ids.iter().filter_map(event).collect())
}

#[cfg(test)]
mod tests {
    use peerpod_provider_cloud::{Marks, VmState};

    use super::*;

    fn vm(is_recalled: bool) -> AlibabaCloudVm {
        AlibabaCloudVm {
            id: "i-1".into(),
            state: VmState::Running,
            machine: Some("ecs.g8i.xlarge".into()),
            zone: Some("z".into()),
            private: vec![],
            public: None,
            marks: Marks::default(),
            created: None,
            is_spot: true,
            is_recalled,
        }
    }

    #[test]
    fn a_notice_is_reported_once_and_then_the_end() {
        let (spots, now) = (Spots::default(), SystemTime::now());
        assert_eq!(spots.note("i-1", Some(&vm(true)), now), None, "not one of our VMs");
        let offering = Offering {
            machine: "ecs.g8i.xlarge".into(),
            zone: "z".into(),
            subnet: None,
            market: Market::Spot,
        };
        spots.made("i-1", &offering);
        assert_eq!(spots.note("i-1", None, now), None, "the cloud does not show it yet");
        spots.seen(&vm(false));
        assert_eq!(spots.note("i-1", Some(&vm(false)), now), None);
        let noticed = spots.note("i-1", Some(&vm(true)), now);
        assert_eq!(noticed, Some((EventKind::Interruption { at: now + NOTICE }, Some(offering))));
        assert_eq!(spots.note("i-1", Some(&vm(true)), now), None, "once");
        let (kind, offering) = spots.note("i-1", None, now).unwrap();
        assert!(matches!(kind, EventKind::Ended { .. }) && offering.is_some(), "{kind:?}");
        assert!(spots.ids().is_empty());
    }
}
