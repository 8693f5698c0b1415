//! Reads AdmissionReviews, `admission.k8s.io/v1`, and writes the answers. The pod stays JSON.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use json_patch::Patch;
use serde::Deserialize;
use serde_json::{Value, json};

use super::metrics::Outcome;
use super::mutate::{Profile, mutate};

const API_VERSION: &str = "admission.k8s.io/v1";

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Review {
    api_version: String,
    request: Request,
}

#[derive(Deserialize)]
struct Request {
    uid: String,
    #[serde(default)]
    operation: String,
    #[serde(default)]
    namespace: String,
    kind: Kind,
    #[serde(default)]
    object: Value,
}

#[derive(Deserialize)]
struct Kind {
    #[serde(default)]
    group: String,
    kind: String,
}

/// Returns the answer to a request, and its result. An error means that the body is no valid request; its text is for the
/// caller.
pub(super) fn answer(
    body: &[u8],
    profile: &Profile,
    excluded: &[String],
) -> Result<(String, Outcome), String> {
    let review: Review =
        serde_json::from_slice(body).map_err(|why| format!("not an AdmissionReview: {why}"))?;
    if review.api_version != API_VERSION {
        return Err(format!(
            "AdmissionReview {} is not supported; register with admissionReviewVersions [v1]",
            review.api_version
        ));
    }
    let request = review.request;
    let ours = request.operation == "CREATE"
        && request.kind.group.is_empty()
        && request.kind.kind == "Pod"
        && !excluded.contains(&request.namespace);
    let patch = if ours { mutate(&request.object, profile) } else { Ok(Patch(Vec::new())) };
    let (response, outcome) = match patch {
        Ok(patch) if patch.0.is_empty() => (json!({"uid": request.uid, "allowed": true}), Outcome::Unchanged),
        Ok(patch) => {
            let bytes = serde_json::to_vec(&patch).map_err(|why| format!("write the patch: {why}"))?;
            let patch = BASE64_STANDARD.encode(bytes);
            let response =
                json!({"uid": request.uid, "allowed": true, "patchType": "JSONPatch", "patch": patch});
            (response, Outcome::Changed)
        }
        Err(why) => {
            let status = json!({"code": 422, "reason": "Invalid", "message": format!("peer pod: {why}")});
            (json!({"uid": request.uid, "allowed": false, "status": status}), Outcome::Refused)
        }
    };
    let review = json!({"apiVersion": API_VERSION, "kind": "AdmissionReview", "response": response});
    Ok((review.to_string(), outcome))
}

#[cfg(test)]
mod tests {
    use super::super::mutate::Totals;
    use super::*;

    fn ask(review: &Value) -> Result<(Value, Outcome), String> {
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
        assert_eq!(outcome, Outcome::Changed);
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
            assert_eq!(outcome, Outcome::Unchanged);
        }
    }

    #[test]
    fn a_wrong_pod_is_refused_with_the_reason() {
        let (answer, outcome) = ask(&review("-2")).unwrap();
        assert_eq!(outcome, Outcome::Refused);
        assert_eq!(answer["response"]["allowed"], json!(false));
        assert!(
            answer["response"]["status"]["message"]
                .as_str()
                .unwrap()
                .starts_with("peer pod: container c, cpu:")
        );
    }

    #[test]
    fn an_invalid_review_is_refused() {
        assert!(ask(&json!({})).unwrap_err().starts_with("not an AdmissionReview"));
        let mut old = review("1");
        old["apiVersion"] = json!("admission.k8s.io/v1beta1");
        assert!(ask(&old).unwrap_err().contains("admissionReviewVersions"));
    }
}
