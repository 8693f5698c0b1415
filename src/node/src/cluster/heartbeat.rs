//! Renews a Lease while this daemon serves. By its age the controller knows whether the node still cleans up.

use std::time::Duration;

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::{ObjectMeta, PostParams};
use peerpod_kube::client::Error;
use peerpod_kube::heartbeat::name_of;
use tokio::time::sleep;
use tracing::warn;

use super::calls::Calls;
use super::config::ClusterConfig;

const EVERY: Duration = Duration::from_secs(10);
/// Validity that the Lease declares, in seconds.
const HOLDS: i32 = 40;

pub(super) async fn run(calls: Calls, config: &ClusterConfig) {
    let leases: Api<Lease> = Api::namespaced(calls.client.clone(), &config.namespace);
    let name = name_of(&config.node_name);
    let (mut known, mut said) = (None, false);
    loop {
        match renew(&calls, &leases, &name, config, known.take()).await {
            Ok(renewed) => (known, said) = (Some(renewed), false),
            Err(error) if !said => {
                warn!(%error, lease = format!("{}/{name}", config.namespace), "the heartbeat is not written; trying again");
                said = true;
            }
            Err(_) => {}
        }
        sleep(EVERY).await;
    }
}

/// Replaces `known` where it is the newest version, so that a renewal is one call.
async fn renew(
    calls: &Calls,
    leases: &Api<Lease>,
    name: &str,
    config: &ClusterConfig,
    known: Option<Lease>,
) -> Result<Lease, Error> {
    let (post, what) = (PostParams::default(), format!("Lease {}/{name}", config.namespace));
    if let Some(known) = known {
        let replaced =
            calls.call("beat", what.clone(), leases.replace(name, &post, &beat(known, config))).await;
        match replaced {
            Err(error) if error.is_conflict() || error.is_not_found() => {}
            done => return done,
        }
    }
    match calls.call("beat", what.clone(), leases.get(name)).await {
        Ok(there) => calls.call("beat", what, leases.replace(name, &post, &beat(there, config))).await,
        Err(error) if error.is_not_found() => {
            let metadata = ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() };
            let new = beat(Lease { metadata, ..Lease::default() }, config);
            calls.call("beat", what, leases.create(&post, &new)).await
        }
        Err(error) => Err(error),
    }
}

fn beat(mut lease: Lease, config: &ClusterConfig) -> Lease {
    let now = MicroTime(Timestamp::now());
    let spec = lease.spec.get_or_insert_with(LeaseSpec::default);
    let holder = config.pod_uid.clone().unwrap_or_else(|| config.node_name.clone());
    if spec.holder_identity.as_ref() != Some(&holder) {
        spec.acquire_time = Some(now.clone());
        spec.holder_identity = Some(holder);
    }
    spec.lease_duration_seconds = Some(HOLDS);
    spec.renew_time = Some(now);
    lease
}
