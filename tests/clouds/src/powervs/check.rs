//! Refuses requests and bodies that PowerVS refuses.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;

use super::{WORKSPACE, ZONE, facts};
use crate::body::{at, list, text};
use crate::fake::{Refused, Request, refused};
use crate::iam::ACCOUNT;

type Checked = Result<(), Box<Refused>>;

fn bad(why: impl Into<String>) -> Checked {
    refused(400, "bad request", why)
}

/// Refuses a call without the header that names the workspace.
pub(super) fn workspace(request: &Request) -> Checked {
    let crn = format!("crn:v1:bluemix:public:power-iaas:{ZONE}:a/{ACCOUNT}:{WORKSPACE}::");
    if request.header("crn") != crn {
        return refused(
            403,
            "forbidden",
            format!("The CRN {} is not that of a workspace", request.header("crn")),
        );
    }
    match request.parts().get(3).is_some_and(|id| id == WORKSPACE) {
        true => Ok(()),
        false => refused(404, "not found", "The cloud instance does not exist"),
    }
}

/// Checks a VM's body.
pub(super) fn instance(body: &Value) -> Checked {
    let name = text(body, "/serverName");
    let fits = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if name.is_empty() || name.len() > 47 || !name.chars().all(fits) {
        return bad(format!("serverName {name} is not valid"));
    }
    if !facts::is_image(text(body, "/imageID")) {
        return refused(404, "not found", format!("image {} does not exist", text(body, "/imageID")));
    }
    let networks = list(body, "/networks");
    if networks.is_empty() {
        return bad("networks is required");
    }
    if let Some(unknown) = networks.iter().find(|one| facts::network(text(one, "/networkID")).is_none()) {
        return refused(404, "not found", format!("network {} does not exist", text(unknown, "/networkID")));
    }
    let kind = text(body, "/procType");
    let processors = at(body, "/processors").as_f64().unwrap_or(0.0);
    let step = if kind == "dedicated" { 1.0 } else { 0.25 };
    if !["shared", "capped", "dedicated"].contains(&kind) || processors < step || processors % step != 0.0 {
        return bad(format!("{processors} processors of the type {kind} are not valid"));
    }
    if at(body, "/memory").as_f64().is_none_or(|memory| memory < 2.0) {
        return bad("memory must be at least 2");
    }
    if !["s922", "e980", "s1022"].contains(&text(body, "/sysType")) {
        return bad(format!("sysType {} is not valid", text(body, "/sysType")));
    }
    match STANDARD.decode(text(body, "/userData")) {
        Ok(data) if data.len() <= 63 << 10 => {}
        _ => return bad("userData must be base64 of at most 63K"),
    }
    tags(list(body, "/userTags"))
}

fn tags(tags: &[Value]) -> Checked {
    let fits = |c: char| c.is_ascii_alphanumeric() || " :_.-".contains(c);
    let is_tag =
        |tag: &Value| tag.as_str().is_some_and(|tag| (1..=128).contains(&tag.len()) && tag.chars().all(fits));
    match tags.len() <= 100 && tags.iter().all(is_tag) {
        true => Ok(()),
        false => bad("userTags are not valid"),
    }
}
