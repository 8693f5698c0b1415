//! Holds operations: what an accepted call comes to.

use std::time::Duration;

use serde_json::{Value, json};

use super::route::Route;
use super::{Azure, REGION, SUBSCRIPTION};
use crate::clock::stamp;
use crate::fake::{Answer, Refused, Request, World};

/// Operation of a VM, or of another resource.
#[derive(Debug, Clone)]
pub struct Operation {
    began: Duration,
    /// Time of its end.
    pub ends: Duration,
    /// Code and text of its failure.
    pub error: Option<(String, String)>,
    /// Answer at its `Location` after success.
    result: Option<Value>,
}

impl Azure {
    /// Starts an operation, and names it in an answer.
    pub(super) fn begin(
        &mut self,
        answer: Answer,
        ends: Duration,
        error: Option<(String, String)>,
        result: Option<Value>,
        world: &World<'_>,
    ) -> Answer {
        let id = format!("00000000-0000-4000-8000-{:012}", self.number());
        let operation = Operation { began: world.now, ends, error, result };
        let has_result = operation.result.is_some();
        self.operations.insert(id.clone(), operation);
        let url = format!(
            "{}/subscriptions/{SUBSCRIPTION}/providers/Microsoft.Compute/locations/{REGION}/operations/{id}",
            world.endpoint
        );
        let answer = answer
            .header("azure-asyncoperation", format!("{url}?p=1&api-version=2024-07-01"))
            .header("azure-asyncnotification", "Enabled")
            .header("retry-after", patience(world));
        if has_result || answer.status == 202 {
            return answer.header("location", format!("{url}?p=1&monitor=true&api-version=2024-07-01"));
        }
        answer
    }

    /// `GET …/operations/<id>`; with `monitor=true` it is the resource's own answer.
    pub(super) fn operation(
        &self,
        request: &Request,
        route: &Route,
        world: &World<'_>,
    ) -> Result<Answer, Box<Refused>> {
        let Some(one) = self.operations.get(route.name()) else { return route.not_found() };
        let is_over = one.ends <= world.now;
        let is_monitor = request.query("monitor") == "true";
        if is_monitor && !is_over {
            return Ok(Answer::empty(202).header("retry-after", patience(world)));
        }
        if is_monitor {
            return Ok(match (&one.error, &one.result) {
                (Some((code, message)), _) => {
                    Answer::json(409, &json!({"error": {"code": code, "message": message}}))
                }
                (None, Some(result)) => Answer::json(200, result),
                (None, None) => Answer::empty(204),
            });
        }
        let mut body = json!({"startTime": stamp(one.began), "name": route.name(), "status": "InProgress"});
        if !is_over {
            return Ok(Answer::json(200, &body).header("retry-after", patience(world)));
        }
        body["endTime"] = json!(stamp(one.ends));
        body["status"] = json!(if one.error.is_some() { "Failed" } else { "Succeeded" });
        if let Some((code, message)) = &one.error {
            body["error"] = json!({"code": code, "message": message});
        }
        Ok(Answer::json(200, &body))
    }

    /// Returns one page of a list.
    pub(super) fn page(&self, request: &Request, items: &[Value], world: &World<'_>) -> Answer {
        let from: usize = request.query("$skiptoken").parse().unwrap_or(0);
        let page: Vec<&Value> = items.iter().skip(from).take(self.page).collect();
        let next = from + page.len();
        let mut body = json!({"value": page});
        if next < items.len() {
            let version = request.query("api-version");
            let status = if request.query("statusOnly") == "true" { "&statusOnly=true" } else { "" };
            let path = &request.path;
            body["nextLink"] =
                json!(format!("{}{path}?api-version={version}{status}&$skiptoken={next}", world.endpoint));
        }
        Answer::json(200, &body)
    }
}

/// Returns the seconds that a caller is asked to wait. A witness does not wait.
fn patience(world: &World<'_>) -> &'static str {
    if world.is_witness { "0" } else { "10" }
}
