//! Attaches disks to VMs by the driver's own ControllerPublishVolume, and detaches them: it follows this driver's
//! PeerpodVolumes, on one replica at a time. The intent is written to the object before the driver is asked. A failed
//! step is repeated until it succeeds, and the finalizer stays until then.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{PersistentVolume, Secret};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::runtime::controller::{self, Action, Config};
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use kube::runtime::{Controller as Runtime, watcher};
use kube::{Api, Client, Resource, ResourceExt};
use parking_lot::Mutex;
use peerpod_common::backoff::Backoff;
use peerpod_kube::client::{explain, within};
use peerpod_kube::crds::PeerpodVolume;
use peerpod_kube::lease::{Election, ElectionConfig, LeaseOwner, Standing, Term};
use peerpod_proto::csi::{
    ControllerPublishVolumeRequest, ControllerPublishVolumeResponse, ControllerUnpublishVolumeRequest, Empty,
};
use peerpod_volume::VolumeId;
use serde::Deserialize;
use serde_json::json;
use tokio::sync::watch;
use tracing::{info, warn};

use super::lookup::Lookup;
use super::proof::{self, Failure};
use crate::capability::Capability;
use crate::cluster::Published;
use crate::config::CsiConfig;
use crate::grpc::{Code, Status};
use crate::metrics::CsiMetrics;
use crate::node::ownership::{lease_owner, release_lease};
use crate::objects::{self, ATTACH, ATTACHED, DRIVER, RELEASED};
use crate::upstream::Upstream;
use crate::{drivers, optin};

/// Deadline of the driver, which calls its cloud. The sidecars use the same.
const ATTACH_WITHIN: Duration = Duration::from_secs(180);
/// Objects processed at once.
const CONCURRENCY: u16 = 16;
/// Pauses after the failures of an object.
const RETRY: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(60));
/// Interval for another question for the driver's name.
const ASK_AGAIN: Duration = Duration::from_secs(2);
/// Interval for another check of a deleted object until its node marks it as released.
const LOOK_AGAIN: Duration = Duration::from_secs(30);

struct Context {
    client: Client,
    upstream: Arc<Upstream>,
    node_id: String,
    leases: Api<Lease>,
    lookup: Arc<Lookup>,
    events: Recorder,
    metrics: CsiMetrics,
    term: Term,
    /// Pauses of failed objects, by namespace and name.
    failures: Mutex<HashMap<(String, String), Backoff>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Asked {
    readonly: bool,
    capability: Capability,
}

#[derive(Default)]
struct Volume {
    context: HashMap<String, String>,
    secrets: HashMap<String, String>,
}

pub(super) fn start(
    config: &CsiConfig,
    client: Client,
    upstream: Arc<Upstream>,
    lookup: Arc<Lookup>,
    metrics: CsiMetrics,
) {
    let (namespace, node_id) = (config.namespace.clone(), config.node_id.clone());
    tokio::spawn(async move {
        let name = loop {
            match upstream.driver().await {
                Ok(name) => break name.to_owned(),
                Err(why) => warn!(error = %why, "waiting for the CSI driver"),
            }
            tokio::time::sleep(ASK_AGAIN).await;
        };
        let identity = std::env::var("POD_NAME")
            .or_else(|_| std::env::var("HOSTNAME"))
            .unwrap_or_else(|_| format!("pid-{}", std::process::id()));
        let reporter = Reporter { controller: "peerpod-csi".to_owned(), instance: Some(identity.clone()) };
        let events = Recorder::new(client.clone(), reporter);
        let leases: Api<Lease> = Api::namespaced(client.clone(), &namespace);
        let election = Election::new(
            leases.clone(),
            ElectionConfig {
                name: format!("peerpod-csi-{}", VolumeId::of(&name, "")),
                identity,
                duration: Duration::from_secs(15),
                renew_deadline: Duration::from_secs(10),
                retry: Duration::from_secs(2),
            },
        );
        tokio::spawn(tell(election.standing()));
        loop {
            let leader = election.lead().await;
            info!(driver = name, token = leader.term().token(), "attaching and detaching for VMs");
            let context = Context {
                client: client.clone(),
                upstream: upstream.clone(),
                node_id: node_id.clone(),
                leases: leases.clone(),
                lookup: lookup.clone(),
                events: events.clone(),
                metrics: metrics.clone(),
                term: leader.term().clone(),
                failures: Mutex::default(),
            };
            let term = leader.term().clone();
            tokio::select! {
                () = follow(&name, context) => {}
                () = term.lost() => {}
            }
            warn!(driver = name, "another replica attaches and detaches now");
        }
    });
}

/// Logs each reason why the Lease cannot be held, once.
async fn tell(mut standing: watch::Receiver<Standing>) {
    while standing.changed().await.is_ok() {
        if let Standing::Unreachable { why } = &*standing.borrow_and_update() {
            warn!(why, "nothing is attached or detached: the Lease cannot be had; trying again");
        }
    }
}

async fn follow(driver: &str, context: Context) {
    let context = Arc::new(context);
    let objects: Api<PeerpodVolume> = Api::all(context.client.clone());
    let ours = watcher::Config::default().labels(&format!("{DRIVER}={driver},{ATTACH}=driver"));
    Runtime::new(objects, ours)
        .with_config(Config::default().concurrency(CONCURRENCY))
        .run(reconcile, again, context.clone())
        .for_each(|step| {
            match step {
                // A deleted object is not tried again.
                Err(controller::Error::ObjectNotFound(object)) => {
                    let object = *object;
                    context.failures.lock().remove(&(object.namespace.unwrap_or_default(), object.name));
                }
                // The runtime's backoff limits this to once per 30 s.
                Err(controller::Error::QueueError(error)) => {
                    warn!(error = explain(&error), "the PeerpodVolumes cannot be followed; trying again");
                }
                _ => {}
            }
            std::future::ready(())
        })
        .await;
}

async fn reconcile(object: Arc<PeerpodVolume>, context: Arc<Context>) -> Result<Action, Status> {
    context.term.check().map_err(|why| Code::Aborted.status(why.to_string()))?;
    let namespace = object.namespace().unwrap_or_default();
    let api = objects::api(&context.client, &namespace);
    let next = if object.meta().deletion_timestamp.is_some() || objects::holds(&object, RELEASED) {
        context.detach(&api, &object).await
    } else {
        context.attach(&api, &object).await
    };
    if let Err(Failure::Refused(reason, text)) = &next {
        context.refuse(&api, &object, reason, text).await;
    }
    let next = next?;
    context.failures.lock().remove(&key(&object));
    Ok(next)
}

#[expect(clippy::needless_pass_by_value, reason = "the runtime hands it over")]
fn again(object: Arc<PeerpodVolume>, why: &Status, context: Arc<Context>) -> Action {
    let name = object.name_any();
    context.metrics.retries.inc();
    let pause = context.failures.lock().entry(key(&object)).or_insert(RETRY).pause();
    warn!(object = name, error = %why, ?pause, "tried again");
    Action::requeue(pause)
}

fn key(object: &PeerpodVolume) -> (String, String) {
    (object.namespace().unwrap_or_default(), object.name_any())
}

impl Context {
    async fn attach(&self, api: &Api<PeerpodVolume>, object: &PeerpodVolume) -> Result<Action, Failure> {
        let Some(vm) = object.spec.vm_id.as_deref().filter(|vm| !vm.is_empty()) else {
            return Ok(Action::await_change());
        };
        let node_id = self.node_id(vm, object.spec.node_name.as_deref().unwrap_or_default());
        let earlier = object.spec.node_id.as_deref().filter(|before| *before != node_id);
        let answered = object.spec.wrapper_controller_publish_volume_res.is_some();
        if earlier.is_none() && objects::holds(object, ATTACHED) && answered {
            return Ok(Action::await_change());
        }
        let volume = match self.proven(object, vm).await {
            Err(Failure::Failed(why)) => return Err(not_attached(api, object, why).await),
            proven => proven?,
        };
        if let Some(before) = earlier {
            // The pod's sandbox was made again, in another VM.
            self.unpublish(object, before).await?;
            let cleared =
                json!({"nodeID": null, "devicePath": null, "wrapperControllerPublishVolumeRes": null});
            objects::set_spec(api, object, cleared).await?;
            return Ok(Action::requeue(Duration::ZERO));
        }
        let object = if object.spec.node_id.is_none() {
            objects::set_spec(api, object, json!({"nodeID": node_id})).await?
        } else {
            object.clone()
        };
        match self.publish(&object, &node_id, volume).await {
            Ok(answer) => self.record(api, &object, (vm, &node_id), answer).await?,
            Err(why) => return Err(not_attached(api, &object, why).await),
        }
        Ok(Action::await_change())
    }

    /// Records the driver's answer for the node.
    async fn record(
        &self,
        api: &Api<PeerpodVolume>,
        object: &PeerpodVolume,
        (vm, node_id): (&str, &str),
        answer: ControllerPublishVolumeResponse,
    ) -> Result<(), Status> {
        let device =
            ["devicePath", "device-path", "LUN"].iter().find_map(|key| answer.publish_context.get(*key));
        let name = self.upstream.driver().await?;
        let handle = object.spec.volume_id.as_deref().unwrap_or_default();
        if drivers::identity(name, handle, &answer.publish_context).is_none() {
            let keys: Vec<&str> = answer.publish_context.keys().map(String::as_str).collect();
            warn!(object = object.name_any(), ?keys, "the driver named no identity of its disk");
        }
        // Keeps only the fields that the node needs: others may be confidential, and an object is not.
        let publish_context = drivers::telling(name, &answer.publish_context);
        let published = Published { vm: vm.to_owned(), publish_context };
        let fields = json!({
            "devicePath": device,
            "wrapperControllerPublishVolumeRes": serde_json::to_string(&published).unwrap_or_default(),
        });
        let object = objects::set_spec(api, object, fields).await?;
        let text = format!("attached to {node_id}");
        let state = "controllerPublishVolumeApplied";
        objects::set_condition(api, &object, state, ATTACHED, true, ("Attached", &text)).await?;
        info!(object = object.name_any(), node_id, "attached by the driver");
        Ok(())
    }

    async fn detach(&self, api: &Api<PeerpodVolume>, object: &PeerpodVolume) -> Result<Action, Failure> {
        if !objects::holds(object, RELEASED) {
            // The pod is deleted, but its VM may still exist. The node sets the condition when the VM is gone.
            return Ok(Action::requeue(LOOK_AGAIN));
        }
        let mut object = object.clone();
        if let Some(node_id) = object.spec.node_id.clone() {
            self.unpublish(&object, &node_id).await?;
            let why = ("Detached", "the driver detached it");
            let state = "controllerUnpublishVolumeApplied";
            object = objects::set_condition(api, &object, state, ATTACHED, false, why).await?;
            object = objects::set_spec(api, &object, json!({"nodeID": null})).await?;
            info!(object = object.name_any(), node_id, "detached by the driver");
        }
        release_lease(&self.leases, &self.volume_id(&object).await?, &proof::owner(&object)).await?;
        objects::delete(api, &object).await?;
        if let Some(found) = objects::read(api, &object.name_any()).await? {
            objects::let_go(api, &found).await?;
        }
        Ok(Action::await_change())
    }

    /// Reports a refusal once, in the condition and in an Event. The attachment is as before.
    async fn refuse(&self, api: &Api<PeerpodVolume>, object: &PeerpodVolume, reason: &str, text: &str) {
        // The limit of an Event's note is 1 KiB.
        let text: String = text.chars().take(1000).collect();
        let status = object.status.clone().unwrap_or_default();
        let known = |one: &Condition| one.type_ == ATTACHED && one.reason == reason && one.message == text;
        if status.conditions.iter().any(known) {
            return;
        }
        let (state, holds) = (status.state.unwrap_or_default(), objects::holds(object, ATTACHED));
        let event = Event {
            type_: EventType::Warning,
            reason: reason.to_owned(),
            note: Some(text.clone()),
            action: "Attach".to_owned(),
            secondary: None,
        };
        let regarding = object.object_ref(&());
        if let Err(error) = within("publish an Event", self.events.publish(&event, &regarding)).await {
            // In a namespace that is being deleted no object can be created, not even an Event.
            warn!(%error, reason, "an Event is not published");
        }
        let noted = objects::set_condition(api, object, &state, ATTACHED, holds, (reason, &text)).await;
        if let Err(error) = noted {
            warn!(%error, "no condition set");
        }
    }

    async fn volume_id(&self, object: &PeerpodVolume) -> Result<VolumeId, Status> {
        let handle = object.spec.volume_id.as_deref().unwrap_or_default();
        Ok(VolumeId::of(self.upstream.driver().await?, handle))
    }

    async fn lease_owner(&self, object: &PeerpodVolume) -> Result<Option<LeaseOwner>, Status> {
        lease_owner(&self.leases, &self.volume_id(object).await?).await
    }

    async fn proven(&self, object: &PeerpodVolume, vm: &str) -> Result<PersistentVolume, Failure> {
        let (driver, owner) = (self.upstream.driver().await?, self.lease_owner(object).await?);
        proof::attach(&self.lookup, driver, object, vm, owner.as_ref()).await
    }

    async fn publish(
        &self,
        object: &PeerpodVolume,
        node_id: &str,
        volume: PersistentVolume,
    ) -> Result<ControllerPublishVolumeResponse, Status> {
        let asked = object.spec.wrapper_node_publish_volume_req.as_deref().unwrap_or("{}");
        let asked: Asked = serde_json::from_str(asked).map_err(|why| {
            Code::Internal.status(format!("{}: the request in it: {why}", object.name_any()))
        })?;
        let volume = self.with_secrets(volume).await?;
        let mut request = ControllerPublishVolumeRequest {
            volume_id: object.spec.volume_id.clone().unwrap_or_default(),
            node_id: node_id.to_owned(),
            readonly: asked.readonly,
            secrets: volume.secrets,
            volume_context: volume.context,
            ..Default::default()
        };
        request.volume_capability = Some(asked.capability.capability()).into();
        // A late call could take a disk away from the next pod.
        self.term.confirm().await.map_err(|why| Code::Aborted.status(why.to_string()))?;
        self.upstream.call("/csi.v1.Controller/ControllerPublishVolume", &request, ATTACH_WITHIN).await
    }

    async fn unpublish(&self, object: &PeerpodVolume, node_id: &str) -> Result<(), Failure> {
        proof::detach(object, self.lease_owner(object).await?.as_ref())?;
        let (driver, handle) = (self.upstream.driver().await?, object.spec.volume_id.as_deref());
        let name = object.spec.volume_name.as_deref().unwrap_or_default();
        let volume = match self.lookup.named(name, driver, handle.unwrap_or_default()).await? {
            Some(volume) => self.with_secrets(volume).await?,
            None => Volume::default(),
        };
        let request = ControllerUnpublishVolumeRequest {
            volume_id: object.spec.volume_id.clone().unwrap_or_default(),
            node_id: node_id.to_owned(),
            secrets: volume.secrets,
            ..Default::default()
        };
        self.term.confirm().await.map_err(|why| Code::Aborted.status(why.to_string()))?;
        let method = "/csi.v1.Controller/ControllerUnpublishVolume";
        let done: Result<Empty, Status> = self.upstream.call(method, &request, ATTACH_WITHIN).await;
        match done {
            // The volume or the VM is gone, and the attachment with it.
            Err(why) if why.code == Code::NotFound => Ok(()),
            done => Ok(done.map(drop)?),
        }
    }

    /// Reads the present secret of a PersistentVolume. Secrets are held only during the call.
    async fn with_secrets(&self, volume: PersistentVolume) -> Result<Volume, Status> {
        let Some(csi) = volume.spec.and_then(|spec| spec.csi) else { return Ok(Volume::default()) };
        let mut context: HashMap<String, String> =
            csi.volume_attributes.unwrap_or_default().into_iter().collect();
        context.remove(optin::KEY);
        let secret =
            csi.controller_publish_secret_ref.and_then(|secret| Some((secret.namespace?, secret.name?)));
        let Some((namespace, name)) = secret else { return Ok(Volume { context, secrets: HashMap::new() }) };
        let api: Api<Secret> = Api::namespaced(self.client.clone(), &namespace);
        let what = format!("read secret {namespace}/{name}, by csi.drivers[].secretNamespaces of the chart");
        let secret = within(what, api.get(&name)).await?;
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).ok();
        let data = secret.data.unwrap_or_default().into_iter();
        let secrets = data.filter_map(|(key, value)| Some((key, text(value.0)?))).collect();
        Ok(Volume { context, secrets })
    }

    /// Returns the VM's name as the driver names nodes.
    fn node_id(&self, vm: &str, node: &str) -> String {
        let name = vm.rsplit('/').next().unwrap_or(vm);
        self.node_id.replace("{vm}", vm).replace("{name}", name).replace("{node}", node)
    }
}

/// Sets the condition of a failed attach.
async fn not_attached(api: &Api<PeerpodVolume>, object: &PeerpodVolume, why: Status) -> Failure {
    let (state, text) = ("peerPodVSIIDReady", why.to_string());
    let reason = ("AttachFailed", text.as_str());
    // The condition is only for people.
    if let Err(error) = objects::set_condition(api, object, state, ATTACHED, false, reason).await {
        warn!(%error, "no condition set");
    }
    Failure::Failed(why)
}
