//! Reports the end of a PeerPod to its users: the condition `Deleted`, and Events. A failure is logged and delays
//! nothing.

use k8s_openapi::api::core::v1::ObjectReference;
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

/// Condition about the VM's end.
const DELETED: &str = "Deleted";
/// Field manager of the controller's status fields.
const MANAGER: &str = "peerpod-controller";
/// Limit of an Event's note and of a condition's message, in bytes.
const MOST_TEXT: usize = 1000;

/// Reason why a PeerPod still exists.
pub(super) struct Stays {
    /// Reason as in conditions: one word.
    pub(super) reason: &'static str,
    /// Text for people, with a remedy.
    pub(super) message: String,
}

/// Reports why it stays, if that has changed: in the condition `Deleted` (`False`) and in an Event.
pub(super) async fn stays(context: &Context, peerpod: &PeerPod, why: &Stays) {
    let message = clipped(&why.message);
    let before = condition(peerpod);
    if before.is_some_and(|before| before.reason == why.reason && before.message == message) {
        return;
    }
    event(context, peerpod, EventType::Warning, why.reason, &message).await;
    let since =
        before.filter(|before| before.status == "False").map(|before| before.last_transition_time.clone());
    put(
        context,
        peerpod,
        Condition {
            type_: DELETED.to_owned(),
            status: "False".to_owned(),
            reason: why.reason.to_owned(),
            message,
            last_transition_time: since.unwrap_or_else(|| Time(Timestamp::now())),
            observed_generation: peerpod.metadata.generation,
        },
    )
    .await;
}

/// Reports that the VM is gone, while other finalizers keep the object.
pub(super) async fn deleted(context: &Context, peerpod: &PeerPod) {
    put(
        context,
        peerpod,
        Condition {
            type_: DELETED.to_owned(),
            status: "True".to_owned(),
            reason: "Deleted".to_owned(),
            message: "the provider reports that the VM is gone".to_owned(),
            last_transition_time: Time(Timestamp::now()),
            observed_generation: peerpod.metadata.generation,
        },
    )
    .await;
}

fn condition(peerpod: &PeerPod) -> Option<&Condition> {
    peerpod.status.as_ref()?.conditions.iter().find(|condition| condition.type_ == DELETED)
}

/// Writes by server-side apply: the node's own conditions must not change.
async fn put(context: &Context, peerpod: &PeerPod, condition: Condition) {
    let (name, namespace) = (peerpod.name_any(), peerpod.namespace().unwrap_or_default());
    let gone = condition.status == "True";
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

/// Publishes an Event on a PeerPod.
pub(super) async fn event(context: &Context, peerpod: &PeerPod, type_: EventType, reason: &str, note: &str) {
    publish(context, &peerpod.object_ref(&()), None, type_, (reason, "Delete"), note).await;
}

/// Publishes an Event on any object. The pair holds its reason and the action.
pub(super) async fn publish(
    context: &Context,
    regarding: &ObjectReference,
    related: Option<ObjectReference>,
    type_: EventType,
    what: (&str, &str),
    note: &str,
) {
    let event = Event {
        type_,
        reason: what.0.to_owned(),
        note: Some(clipped(note)),
        action: what.1.to_owned(),
        secondary: related,
    };
    if let Err(error) = within("publish an Event", context.events.publish(&event, regarding)).await {
        // In a namespace that is being deleted no object can be created, not even an Event.
        debug!(%error, reason = what.0, "an Event is not published");
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
