//! Serves GetServiceQuota of Service Quotas for EC2's quotas, which moto does not know, and shows the processors of VMs,
//! which moto leaves out.

use std::sync::Arc;

use bytes::Bytes;
use http_body_util::Full;
use hyper::Response;
use hyper::http::request::Parts;
use serde_json::{Value, json};

use crate::form::Params;
use crate::proxy::{Answer, Shared};
use crate::xml;

/// Limits of the account in vCPUs, by the quota's code.
const LIMITS: [(&str, u32); 2] = [("L-1216C47A", 64), ("L-34B43A08", 32)];

/// Whether the request is for Service Quotas.
pub(crate) fn is_for(head: &Parts) -> bool {
    let target = head.headers.get("x-amz-target").and_then(|target| target.to_str().ok());
    target == Some("ServiceQuotasV20190624.GetServiceQuota")
}

/// Answers a request, with the faults of EC2's actions.
pub(crate) async fn answer(shared: Arc<Shared>, body: Bytes) -> anyhow::Result<Response<Full<Bytes>>> {
    let params: Params = serde_json::from_slice(&body)?;
    let Answer { status, xml } = shared.faulty("GetServiceQuota", params).await?;
    let json = if status == 200 { xml } else { refusal(&xml).to_string() };
    let answer = Response::builder().status(status).header("content-type", "application/x-amz-json-1.1");
    Ok(answer.body(Full::new(json.into()))?)
}

/// Returns a refusal as Service Quotas writes it.
fn refusal(xml: &str) -> Value {
    let code = match xml::value(xml, "Code").unwrap_or_default() {
        "UnauthorizedOperation" => "AccessDeniedException",
        "RequestExpired" => "ExpiredTokenException",
        other => other,
    };
    json!({"__type": code, "Message": xml::value(xml, "Message")})
}

/// Returns a quota. The body is JSON.
pub(crate) fn quota(params: &Params) -> Answer {
    let get = |key: &str| params.get(key).map(String::as_str).unwrap_or_default();
    let limit = LIMITS.iter().find(|(code, _)| get("ServiceCode") == "ec2" && get("QuotaCode") == *code);
    let Some((code, limit)) = limit else {
        return Answer::refusal(
            400,
            "NoSuchResourceException",
            "The request failed because of no such quota.",
        );
    };
    let quota = json!({"ServiceCode": "ec2", "QuotaCode": code, "Value": f64::from(*limit), "Unit": "None"});
    Answer { status: 200, xml: json!({"Quota": quota}).to_string() }
}

/// Returns a VM with its processors, which follow from the size in the type's name.
pub(crate) fn with_cpus(vm: &str) -> String {
    let size = xml::value(vm, "instanceType").and_then(|machine| machine.split_once('.'));
    let cores = match size.map_or("", |(_, size)| size) {
        "xlarge" => 2,
        size => {
            size.strip_suffix("xlarge").and_then(|times| times.parse().ok()).map_or(1, |times: u32| 2 * times)
        }
    };
    let end = "</instanceType>";
    let cpus = format!(
        "{end}<cpuOptions><coreCount>{cores}</coreCount><threadsPerCore>2</threadsPerCore></cpuOptions>"
    );
    vm.replacen(end, &cpus, 1)
}
