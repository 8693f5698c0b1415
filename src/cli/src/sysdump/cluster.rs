//! The parts of a cluster: custom resources, Peerpod's workloads and logs, Events, Leases, Nodes, RuntimeClasses,
//! configuration. Secrets are not read.

use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ConfigMap, Event, Node, Pod};
use k8s_openapi::api::node::v1::RuntimeClass;
use kube::ResourceExt;
use kube::api::ListParams;
use peerpod_kube::crds::{PeerPod, PeerPodConfig, PeerpodVolume};
use serde_json::{Value, json};

use super::Dump;
use crate::logs;
use crate::source::Cluster;

/// Kinds of the objects with Events about peer pods.
const KINDS: [&str; 3] = ["Pod", "PeerPod", "Node"];
/// Prefix of the sources of Peerpod's Events.
const COMPONENT: &str = "peerpod";

pub(super) async fn collect(dump: &mut Dump, cluster: &Cluster) -> anyhow::Result<()> {
    dump.value_of("peerpods", cluster.raw::<PeerPod>().await.map_err(Into::into))?;
    dump.value_of("peerpodconfigs", cluster.raw::<PeerPodConfig>().await.map_err(Into::into))?;
    dump.value_of("peerpodvolumes", cluster.raw::<PeerpodVolume>().await.map_err(Into::into))?;
    dump.value_of("daemonsets", cluster.ours::<DaemonSet>("DaemonSets").await.map_err(Into::into))?;
    dump.value_of("deployments", cluster.ours::<Deployment>("Deployments").await.map_err(Into::into))?;
    dump.value_of("pods", cluster.ours::<Pod>("Pods").await.map_err(Into::into))?;
    let every = ListParams::default;
    dump.value_of("nodes", cluster.list::<Node>("Nodes", every()).await.map_err(Into::into))?;
    let classes = cluster.list::<RuntimeClass>("RuntimeClasses", every()).await;
    dump.value_of("runtimeclasses", classes.map_err(Into::into))?;
    let leases = cluster.list::<Lease>("Leases", every()).await.map(|mut leases| {
        leases.retain(|lease| lease.name_any().contains(COMPONENT));
        leases
    });
    dump.value_of("leases", leases.map_err(Into::into))?;
    let events = cluster.list::<Event>("Events", every()).await.map(|mut events| {
        events.retain(|event| {
            let of_kind = |kind: &str| event.involved_object.kind.as_deref() == Some(kind);
            let ours = event.source.iter().filter_map(|source| source.component.as_deref());
            KINDS.into_iter().any(of_kind)
                && ours.chain(event.reporting_component.as_deref()).any(|name| name.starts_with(COMPONENT))
        });
        events
    });
    dump.value_of("events", events.map_err(Into::into))?;
    dump.value_of("configuration", configuration(cluster).await)?;
    match logs::containers(cluster, None).await {
        Ok(found) => {
            let read = async |(pod, container): &(Pod, String)| Ok(cluster.log(pod, container).await?);
            each_log(dump, found, read).await
        }
        Err(error) => dump.failed("logs", &error),
    }
}

/// Adds one log after the other, and names those that the archive's limit leaves out.
async fn each_log<T>(
    dump: &mut Dump,
    logs: Vec<(String, T)>,
    read: impl AsyncFn(&T) -> anyhow::Result<String>,
) -> anyhow::Result<()> {
    for (name, log) in logs {
        let name = format!("logs/{name}.log");
        if dump.is_full {
            dump.failures.push(format!("{name}: left out, the archive is full"));
        } else {
            dump.text_of(&name, read(&log).await)?;
        }
    }
    Ok(())
}

/// Returns Peerpod's ConfigMaps with their documents parsed, so that [`super::hide`] sees the keys' names.
async fn configuration(cluster: &Cluster) -> anyhow::Result<Value> {
    let maps = cluster.ours::<ConfigMap>("ConfigMaps").await?;
    let parsed = maps.iter().map(|map| {
        let documents = map.data.iter().flatten().map(|(name, text)| {
            let document: Value = serde_yaml::from_str(text).unwrap_or_else(|_| "(not YAML; hidden)".into());
            (name.clone(), document)
        });
        json!({"name": map.name_any(), "namespace": map.namespace(), "files": documents.collect::<serde_json::Map<_, _>>()})
    });
    Ok(parsed.collect())
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::sysdump::tests::small;

    #[tokio::test]
    async fn no_log_is_read_after_the_limit() {
        let mut dump = small("full", 10);
        let reads = Cell::new(0);
        let logs = ["a", "b", "c"].map(|name| (name.to_owned(), ()));
        let read = async |(): &()| {
            reads.set(reads.get() + 1);
            Ok("12345678".to_owned())
        };
        each_log(&mut dump, logs.into(), read).await.unwrap();
        assert_eq!((reads.get(), dump.parts.len(), dump.failures.len()), (2, 1, 2));
        assert!(dump.failures[1].starts_with("logs/c.log: left out"), "{:?}", dump.failures);
    }
}
