//! Waits for tasks of the vCenter, with one call for the tasks of many callers. May call `RetrievePropertiesEx`.

use std::collections::HashMap;
use std::time::Duration;

use peerpod_provider_api::Error;
use peerpod_provider_cloud::batch::{self, what};
use peerpod_provider_cloud::{ApiCall, Lookup, Wait, Window};
use peerpod_provider_rest::{Decision, Failure, HttpAnswer, Said, decide, end_of_wait};
use serde_json::Value;
use tokio::time::Instant;

use crate::Vsphere;
use crate::client::Vcenter;
use crate::inventory::{Object, Objects};
use crate::refusal;
use crate::soap::{self, Method, Moref};

/// Window for looks at tasks, which callers wait for.
const WINDOW: Window =
    Window { idle: Duration::from_millis(20), longest: Duration::from_millis(200), most: 500 };

/// State of a task.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum TaskState {
    Open,
    Done,
    Failed(Said),
}

/// Batcher that looks up tasks by their ids. `None`: the vCenter has forgotten the task.
pub(crate) type TaskLookup = Lookup<TaskState>;

pub(crate) fn lookup(vcenter: Vcenter) -> TaskLookup {
    batch::lookup(WINDOW, move |ids, until| by_ids(vcenter.clone(), ids, until))
}

async fn by_ids(
    vcenter: Vcenter,
    ids: Vec<String>,
    until: Instant,
) -> Result<HashMap<String, TaskState>, Error> {
    let what = what("look at", "task", &ids);
    let tasks: Vec<Moref> = ids.into_iter().map(|id| Moref { kind: "Task".to_owned(), id }).collect();
    let call = ApiCall::new("RetrievePropertiesEx", "tasks", &what).until(until);
    let properties = ("Task", &["info.state", "info.error"][..]);
    Ok(vcenter.retrieve(call, properties, Objects::These(&tasks), read).await?.into_iter().collect())
}

fn read(object: Object<'_, '_>) -> Option<(String, TaskState)> {
    let state = match object.text("info.state")? {
        "success" => TaskState::Done,
        "error" => {
            let said = object.property("info.error").map(soap::localized);
            TaskState::Failed(said.unwrap_or_else(|| Said { code: "Fault".to_owned(), ..Said::default() }))
        }
        _ => TaskState::Open,
    };
    Some((object.moref()?.id, state))
}

impl Vsphere {
    /// Looks once at a task.
    pub(crate) async fn look_at(
        &self,
        task: &Moref,
        until: Instant,
        what: &str,
    ) -> Result<Decision<()>, Failure> {
        let state = self.connected()?.tasks.ask(task.id.clone(), until, what).await?;
        Ok(match state {
            Some(TaskState::Open) => Decision::Open,
            Some(TaskState::Failed(said)) => Decision::Refused(said),
            // A vCenter keeps tasks for minutes. A task that it has forgotten has ended; a look at the VM shows how.
            Some(TaskState::Done) | None => Decision::Made(()),
        })
    }

    /// Waits for the end of a task, or of the caller's time.
    pub(crate) async fn ended(
        &self,
        wait: &Wait,
        task: &Moref,
        until: Instant,
        what: &str,
    ) -> Result<Decision<()>, Failure> {
        decide(wait, end_of_wait(until), || self.look_at(task, until, what)).await
    }

    /// Makes a call that starts a task, and waits for its success.
    pub(crate) async fn run(&self, call: ApiCall<'_>, method: &Method) -> Result<(), Failure> {
        let vcenter = &self.connected()?.vcenter;
        let task = vcenter.scheduler.run(call, || vcenter.start(call.what, method)).await?;
        match self.ended(&self.changes, &task, call.deadline, call.what).await? {
            Decision::Made(()) => Ok(()),
            Decision::Refused(said) => Err(refused(call, said)),
            Decision::Open => {
                let what = call.what;
                let text = format!("{what}: {} has not ended yet; it is tried again", method.name);
                Err(Error::transient(text).into())
            }
        }
    }
}

/// Returns the failure of a call whose task has failed.
pub(crate) fn refused(call: ApiCall<'_>, said: Said) -> Failure {
    let error = refusal::error(call.action, &said, 200).during(call.what);
    let answer = HttpAnswer::of(200, &Value::Null);
    Failure::new(error, said, answer)
}
