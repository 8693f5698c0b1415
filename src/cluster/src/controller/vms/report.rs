//! Reports the end of a PeerPod to its users: the condition `Deleted`, and Events. A failure is logged and delays
//! nothing.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams};
use kube::runtime::events::{Event, EventType};
use kube::{Api, Resource, ResourceExt};
use peerpod_kube::client::within;
use peerpod_kube::crds::PeerPod;
use serde_json::json;
use tracing::debug;

use crate::controller::Context;

const DELETED: &str = "Deleted";
/// Field manager of the controller's status fields.
const MANAGER: &str = "peerpod-controller";
/// Limit of an Event's note and of a condition's message, in bytes.
const MOST_TEXT: usize = 1000;

/// Reason why a PeerPod or its VM still exists.
pub(super) struct Stays {
    /// Reason as in conditions: one word.
    pub(super) reason: &'static str,
    /// Text for people, with a remedy.
    pub(super) message: String,
}

/// Reports why it stays, if that has changed: in the condition `Deleted` (`False`) and in an Event.
pub(super) async fn stays(context: &Context, peerpod: &PeerPod, why: &Stays) {
    let message = clipped(&why.message);
    if condition(peerpod).is_some_and(|before| before.reason == why.reason && before.message == message) {
        return;
    }
    event(context, peerpod, EventType::Warning, why.reason, &message).await;
    put(context, peerpod, false, why.reason, message).await;
}

/// Reports that the VM is gone, while other finalizers keep the object.
pub(super) async fn deleted(context: &Context, peerpod: &PeerPod) {
    put(context, peerpod, true, DELETED, "the provider reports that the VM is gone".to_owned()).await;
}

fn condition(peerpod: &PeerPod) -> Option<&Condition> {
    peerpod.status.as_ref()?.conditions.iter().find(|condition| condition.type_ == DELETED)
}

/// Writes by server-side apply: the node's own conditions must not change. A condition that stays keeps its time.
async fn put(context: &Context, peerpod: &PeerPod, gone: bool, reason: &str, message: String) {
    let (name, namespace) = (peerpod.name_any(), peerpod.namespace().unwrap_or_default());
    let status = if gone { "True" } else { "False" };
    let before = condition(peerpod).filter(|before| before.status == status);
    let condition = Condition {
        type_: DELETED.to_owned(),
        status: status.to_owned(),
        reason: reason.to_owned(),
        message,
        last_transition_time: before
            .map_or_else(|| Time(Timestamp::now()), |before| before.last_transition_time.clone()),
        observed_generation: peerpod.metadata.generation,
    };
    let mut patch = json!({
        "apiVersion": PeerPod::api_version(&()), "kind": PeerPod::kind(&()),
        "metadata": {"name": name, "uid": peerpod.uid()},
        "status": {"conditions": [condition]},
    });
    if gone {
        patch["status"]["cleand"] = json!(true);
    }
    let peerpods: Api<PeerPod> = Api::namespaced(context.client.clone(), &namespace);
    let params = PatchParams::apply(MANAGER).force();
    let patch = Patch::Apply(&patch);
    let patched = peerpods.patch_status(&name, &params, &patch);
    match within(format!("set the conditions of PeerPod {namespace}/{name}"), patched).await {
        Err(error) if !error.is_not_found() => debug!(%error, "a condition is not set"),
        _ => {}
    }
}

/// Publishes an Event on an object, about the deletion of a VM.
pub(super) async fn event<K: Resource<DynamicType = ()>>(
    context: &Context,
    regarding: &K,
    type_: EventType,
    reason: &str,
    note: &str,
) {
    let event = Event {
        type_,
        reason: reason.to_owned(),
        note: Some(clipped(note)),
        action: "Delete".to_owned(),
        secondary: None,
    };
    let regarding = regarding.object_ref(&());
    if let Err(error) = within("publish an Event", context.events.publish(&event, &regarding)).await {
        // In a namespace that is being deleted no object can be created, not even an Event.
        debug!(%error, reason, "an Event is not published");
    }
}

fn clipped(text: &str) -> String {
    let mut end = text.len().min(MOST_TEXT);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_cut_between_characters() {
        assert_eq!(clipped("ä"), "ä");
        let long = format!("x{}", "ä".repeat(MOST_TEXT));
        assert_eq!(clipped(&long).len(), MOST_TEXT - 1);
    }
}
