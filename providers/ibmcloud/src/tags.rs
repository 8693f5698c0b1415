//! Gives the administrator's tags to VMs. IBM does that by a call of its own, after the create. May call `attach_tag`.

use peerpod_provider_cloud::ApiCall;
use peerpod_provider_rest::{ibm, read};
use serde_json::{Value, json};

use crate::IbmCloud;

/// Requests the tags of a VM, behind its create. They are for people and cost reports, so a failure is a warning.
pub(crate) async fn attach(cloud: &IbmCloud, crn: &str, name: &str) {
    let what = format!("tag {name}");
    let tags = ibm::tags(&cloud.config.tags);
    let wanted = json!({"resources": [{"resource_id": crn}], "tag_names": tags});
    let Ok(vpc) = cloud.vpc() else { return };
    let answer = vpc.call(ApiCall::new("attach_tag", name, &what), &vpc.tagging().json(&wanted)).await;
    let why = match answer {
        Ok(answer) if is_refused(&answer.json()) => "IBM Cloud refused them".to_owned(),
        Ok(_) => return,
        Err(failure) => failure.error.to_string(),
    };
    tracing::warn!(vm = name, "the VM has no tags of provider.ibmcloud.tags: {why}");
}

fn is_refused(answer: &Value) -> bool {
    read::list(answer, "/results").iter().any(|one| read::flag(one, "/is_error") == Some(true))
}
