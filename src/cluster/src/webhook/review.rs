//! Reads AdmissionReviews, `admission.k8s.io/v1`, and writes the answers. The pod stays JSON, and is read only if it is
//! a peer pod's.

use std::borrow::Cow;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use json_patch::Patch;
use serde::Deserialize;
use serde_json::json;
use serde_json::value::RawValue;

use super::metrics::ReviewOutcome;
use super::mutate::{Profile, mutate};
use super::pod;
use super::warnings::warnings;

const API_VERSION: &str = "admission.k8s.io/v1";
/// Longest uid of a request in bytes. The API server's have 36.
const MOST_UID: usize = 256;

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Review<'b> {
    #[serde(borrow)]
    api_version: Cow<'b, str>,
    request: Request<'b>,
}

#[derive(Deserialize)]
struct Request<'b> {
    #[serde(borrow)]
    uid: Cow<'b, str>,
    #[serde(borrow, default)]
    operation: Cow<'b, str>,
    #[serde(borrow, default)]
    namespace: Cow<'b, str>,
    kind: Kind<'b>,
    #[serde(borrow, default)]
    object: Option<&'b RawValue>,
}

#[derive(Deserialize)]
struct Kind<'b> {
    #[serde(borrow, default)]
    group: Cow<'b, str>,
    #[serde(borrow)]
    kind: Cow<'b, str>,
}

/// Returns the answer to a request, and its result. An error means that the body is no valid request; its text is for the
/// caller.
pub(super) fn answer(
    body: &[u8],
    profile: &Profile,
    excluded: &[String],
) -> Result<(String, ReviewOutcome), String> {
    let review: Review<'_> =
        serde_json::from_slice(body).map_err(|why| format!("not an AdmissionReview: {why}"))?;
    if review.api_version != API_VERSION {
        return Err(format!(
            "AdmissionReview {} is not supported; register with admissionReviewVersions [v1]",
            review.api_version
        ));
    }
    let request = review.request;
    if request.uid.len() > MOST_UID {
        return Err(format!("request.uid has more than {MOST_UID} bytes"));
    }
    let ours = request.operation == "CREATE"
        && request.kind.group.is_empty()
        && request.kind.kind == "Pod"
        && !excluded.iter().any(|namespace| *namespace == request.namespace);
    let evaluated = evaluate(request.object.filter(|_| ours), profile);
    let (response, outcome) = match evaluated {
        Ok((patch, warnings)) => {
            let mut response = json!({"uid": request.uid, "allowed": true});
            if !warnings.is_empty() {
                response["warnings"] = json!(warnings);
            }
            if patch.0.is_empty() {
                (response, ReviewOutcome::Unchanged)
            } else {
                let bytes = serde_json::to_vec(&patch).map_err(|why| format!("write the patch: {why}"))?;
                response["patchType"] = json!("JSONPatch");
                response["patch"] = json!(BASE64_STANDARD.encode(bytes));
                (response, ReviewOutcome::Changed)
            }
        }
        Err(why) => {
            let status = json!({"code": 422, "reason": "Invalid", "message": format!("peer pod: {why}")});
            (json!({"uid": request.uid, "allowed": false, "status": status}), ReviewOutcome::Refused)
        }
    };
    let review = json!({"apiVersion": API_VERSION, "kind": "AdmissionReview", "response": response});
    Ok((review.to_string(), outcome))
}

/// Returns the patch of a peer pod and the warnings about it; of another pod both are empty.
fn evaluate(pod: Option<&RawValue>, profile: &Profile) -> anyhow::Result<(Patch, Vec<&'static str>)> {
    let peer_pod = |pod: &&RawValue| pod::runtime_class(pod).is_some_and(|class| profile.has(&class));
    let Some(pod) = pod.filter(peer_pod) else { return Ok((Patch(Vec::new()), Vec::new())) };
    let pod = pod::read(pod)?;
    Ok((mutate(&pod, profile)?, warnings(&pod)))
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::super::mutate::Totals;
    use super::*;

    fn ask(review: &Value) -> Result<(Value, ReviewOutcome), String> {
        let profile = Profile {
            runtime_classes: vec!["kata-remote".to_owned()],
            resource: "kata.peerpods.io/vm".to_owned(),
            totals: Totals::Effective,
            gpus: Vec::new(),
        };
        let (body, outcome) = answer(review.to_string().as_bytes(), &profile, &["kube-system".to_owned()])?;
        Ok((serde_json::from_str(&body).unwrap(), outcome))
    }

    fn review(cpu: &str) -> Value {
        let container = json!({"name": "c", "resources": {"requests": {"cpu": cpu}}});
        json!({"apiVersion": API_VERSION, "kind": "AdmissionReview", "request": {
            "uid": "u-1", "operation": "CREATE", "namespace": "shop",
            "kind": {"group": "", "version": "v1", "kind": "Pod"},
            "object": {"metadata": {"name": "p"}, "spec": {"runtimeClassName": "kata-remote", "containers": [container]}},
        }})
    }

    #[test]
    fn a_peer_pod_gets_a_patch_and_others_none() {
        let (answer, outcome) = ask(&review("2")).unwrap();
        assert_eq!(outcome, ReviewOutcome::Changed);
        let response = &answer["response"];
        assert_eq!(
            (&response["uid"], &response["allowed"], &response["patchType"]),
            (&json!("u-1"), &json!(true), &json!("JSONPatch"))
        );
        let patch = BASE64_STANDARD.decode(response["patch"].as_str().unwrap()).unwrap();
        assert!(String::from_utf8(patch).unwrap().contains("default_vcpus"));

        for (place, other) in [
            ("/request/operation", "UPDATE"),
            ("/request/namespace", "kube-system"),
            ("/request/kind/kind", "Deployment"),
            ("/request/object/spec/runtimeClassName", "runc"),
        ] {
            let mut review = review("2");
            *review.pointer_mut(place).unwrap() = json!(other);
            let (answer, outcome) = ask(&review).unwrap();
            assert_eq!(answer["response"], json!({"uid": "u-1", "allowed": true}), "{place}");
            assert_eq!(outcome, ReviewOutcome::Unchanged);
        }
    }

    #[test]
    fn a_peer_pod_with_a_path_of_the_node_gets_a_warning_and_another_pod_none() {
        let mut review = review("2");
        assert_eq!(ask(&review).unwrap().0["response"]["warnings"], Value::Null);
        review["request"]["object"]["spec"]["volumes"] = json!([{"name": "v", "hostPath": {"path": "/etc"}}]);
        let (answer, outcome) = ask(&review).unwrap();
        assert_eq!(outcome, ReviewOutcome::Changed);
        let warnings = answer["response"]["warnings"].as_array().unwrap();
        assert!(
            warnings.len() == 1 && warnings[0].as_str().unwrap().starts_with("hostPath: "),
            "{warnings:?}"
        );
        review["request"]["object"]["spec"]["runtimeClassName"] = json!("runc");
        assert_eq!(ask(&review).unwrap().0["response"], json!({"uid": "u-1", "allowed": true}));
    }

    #[test]
    fn a_wrong_pod_is_refused_with_the_reason() {
        let (answer, outcome) = ask(&review("-2")).unwrap();
        assert_eq!(outcome, ReviewOutcome::Refused);
        assert_eq!(answer["response"]["allowed"], json!(false));
        assert!(
            answer["response"]["status"]["message"]
                .as_str()
                .unwrap()
                .starts_with("peer pod: container c, cpu:")
        );
    }

    #[test]
    fn a_pod_beyond_the_limits_is_refused_and_another_class_is_not_read() {
        let mut large = review("2");
        let containers = vec![json!({"name": "c"}); 10_000];
        large["request"]["object"]["spec"]["containers"] = json!(containers);
        let (answer, outcome) = ask(&large).unwrap();
        assert_eq!(outcome, ReviewOutcome::Refused);
        let message = answer["response"]["status"]["message"].as_str().unwrap();
        assert!(
            message.starts_with("peer pod: remove containers or volumes: they have more than 8192"),
            "{message}"
        );
        large["request"]["object"]["spec"]["runtimeClassName"] = json!("runc");
        assert_eq!(ask(&large).unwrap().1, ReviewOutcome::Unchanged);
        large["request"]["object"] = Value::Null;
        assert_eq!(ask(&large).unwrap().1, ReviewOutcome::Unchanged);
    }

    #[test]
    fn an_invalid_review_is_refused() {
        let mut long = review("1");
        long["request"]["uid"] = json!("u".repeat(257));
        assert!(ask(&long).unwrap_err().starts_with("request.uid"));
        assert!(ask(&json!({})).unwrap_err().starts_with("not an AdmissionReview"));
        let mut old = review("1");
        old["apiVersion"] = json!("admission.k8s.io/v1beta1");
        assert!(ask(&old).unwrap_err().contains("admissionReviewVersions"));
    }
}
