//! Watches for spot VMs that EC2 takes back. EC2 announces this two minutes ahead: in the VM's metadata, on
//! EventBridge, and as the status of the spot request. The provider polls the status, which needs no setup in the
//! account: one call for 200 VMs, while there are any. May call DescribeSpotInstanceRequests.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use aws_sdk_ec2::types::{Filter, SpotInstanceRequest};
use futures_util::StreamExt;
use futures_util::stream::{self, BoxStream};
use parking_lot::Mutex;
use peerpod_provider_api::{Error, EventKind, InstanceId, Market, ProviderEvent};
use peerpod_provider_cloud::{Offering, until};

use crate::ec2::Aws;
use crate::ec2::vms::AwsVm;

/// Time between the notice and the end of the VM (EC2 User Guide, "Spot Instance interruption notices").
const NOTICE: Duration = Duration::from_secs(120);
/// Maximum number of values in a filter.
const MOST: usize = 200;
/// Maximum number of watched VMs, more than any node has. Further VMs are not watched.
const MOST_VMS: usize = 10_000;

/// Existing spot VMs, and whether their interruption was reported.
#[derive(Debug, Default)]
pub(crate) struct Spots(Mutex<HashMap<String, Spot>>);

#[derive(Debug, Default)]
struct Spot {
    machine: Option<String>,
    zone: Option<String>,
    is_noticed: bool,
}

impl Spots {
    /// Records a VM that was made on the spot market.
    pub(crate) fn made(&self, id: &str, machine: Option<&str>) {
        let mut all = self.0.lock();
        if all.len() < MOST_VMS {
            let spot = all.entry(id.to_owned()).or_default();
            spot.machine = spot.machine.take().or_else(|| machine.map(str::to_owned));
        }
    }

    /// Records a VM that EC2 lists. VMs of an earlier process are watched from then on.
    pub(crate) fn seen(&self, vm: &AwsVm) {
        if !vm.is_spot {
            return;
        }
        self.made(&vm.id, vm.machine.as_deref());
        if let Some(spot) = self.0.lock().get_mut(&vm.id) {
            spot.zone = vm.zone.clone();
        }
    }

    /// Removes a VM that is being deleted or is gone.
    pub(crate) fn forget(&self, id: &str) {
        self.0.lock().remove(id);
    }

    fn ids(&self) -> Vec<String> {
        self.0.lock().keys().cloned().collect()
    }

    /// Returns the event for a status that was not reported before, and the offering that EC2 has no capacity for.
    fn note(
        &self,
        id: &str,
        code: &str,
        message: &str,
        since: SystemTime,
    ) -> Option<(EventKind, Option<Offering>)> {
        let mut all = self.0.lock();
        let spot = all.get_mut(id)?;
        let kind = match code {
            "marked-for-termination" | "marked-for-stop" if !spot.is_noticed => {
                EventKind::Interruption { at: since + NOTICE }
            }
            _ if is_taken(code) => {
                EventKind::Ended { reason: format!("EC2 took the spot VM back: {code}: {message}") }
            }
            _ => return None,
        };
        spot.is_noticed = true;
        let offering = match (&spot.machine, &spot.zone) {
            (Some(machine), Some(zone)) => Some(Offering {
                machine: machine.clone(),
                zone: zone.clone(),
                subnet: None,
                market: Market::Spot,
            }),
            _ => None,
        };
        if matches!(kind, EventKind::Ended { .. }) {
            all.remove(id);
        }
        Some((kind, offering))
    }
}

/// Returns whether a status code means that EC2 itself ended the VM. `instance-terminated-by-user` follows a delete by
/// the provider.
fn is_taken(code: &str) -> bool {
    let ended = code.starts_with("instance-terminated-") || code.starts_with("instance-stopped-");
    ended && !code.ends_with("-by-user")
}

/// Returns a stream of events of spot VMs. The watch runs while the stream is polled.
pub(crate) fn follow(aws: Arc<Aws>) -> BoxStream<'static, ProviderEvent> {
    let looks = stream::unfold(aws, |aws| async move {
        tokio::time::sleep(aws.config.spot_watch).await;
        let mut received = Vec::new();
        for ids in aws.spots.ids().chunks(MOST) {
            match inspect(&aws, ids).await {
                Ok(events) => received.extend(events),
                Err(error) => tracing::warn!(
                    vms = ids.len(),
                    "cannot find out whether EC2 takes spot VMs back: {error}"
                ),
            }
        }
        Some((received, aws))
    });
    looks.flat_map(stream::iter).boxed()
}

async fn inspect(aws: &Aws, ids: &[String]) -> Result<Vec<ProviderEvent>, Error> {
    let ec2 = &aws.ec2().await?.ec2;
    let filter = Filter::builder().name("instance-id").set_values(Some(ids.to_vec())).build();
    let ask = ec2.client.describe_spot_instance_requests().filters(filter);
    let what = "check whether EC2 takes spot VMs back";
    let found =
        ec2.call("DescribeSpotInstanceRequests", "events", what, until(), || ask.clone().send()).await?;
    let requests = found.spot_instance_requests.unwrap_or_default();
    Ok(requests.into_iter().filter_map(|request| event(aws, request)).collect())
}

fn event(aws: &Aws, request: SpotInstanceRequest) -> Option<ProviderEvent> {
    let (id, status) = (request.instance_id?, request.status?);
    let since =
        status.update_time.and_then(|at| SystemTime::try_from(at).ok()).unwrap_or_else(SystemTime::now);
    let (code, message) = (status.code.unwrap_or_default(), status.message.unwrap_or_default());
    let (kind, offering) = aws.spots.note(&id, &code, &message, since)?;
    if let Some(offering) = offering {
        // The lost pod will be replaced, but not from an offering that EC2 has just run out of.
        aws.planner.exhausted(&offering, &code);
    }
    Some(ProviderEvent { id: InstanceId::new(id).ok()?, kind })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_notice_is_reported_once_and_then_the_end() {
        let (spots, now) = (Spots::default(), SystemTime::now());
        assert_eq!(spots.note("i-1", "marked-for-termination", "", now), None, "not one of our VMs");
        spots.made("i-1", Some("m6a.large"));
        assert_eq!(spots.note("i-1", "fulfilled", "", now), None);
        let (kind, offering) = spots.note("i-1", "marked-for-termination", "", now).unwrap();
        assert_eq!(
            (kind, offering),
            (EventKind::Interruption { at: now + NOTICE }, None),
            "its zone is not known"
        );
        assert_eq!(spots.note("i-1", "marked-for-termination", "", now), None, "once");
        assert_eq!(spots.note("i-1", "instance-terminated-by-user", "", now), None, "our own doing");
        let (kind, _) = spots.note("i-1", "instance-terminated-no-capacity", "None left.", now).unwrap();
        let EventKind::Ended { reason } = kind else { panic!("{kind:?}") };
        assert!(reason.contains("instance-terminated-no-capacity: None left"), "{reason}");
        assert!(spots.ids().is_empty());
    }
}
