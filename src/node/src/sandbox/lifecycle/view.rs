//! Publishes a sandbox's state to readers outside its task.

use std::sync::Arc;

use peerpod_provider_api::InstanceId;

use crate::ledger::Record;
use crate::sandbox::error::Error;
use crate::sandbox::lifecycle::Phase;
use crate::spec::SandboxId;

/// State of a sandbox, as published by its task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct View {
    pub id: SandboxId,
    /// Pod as namespace/name, for log lines; `-` if it was never known.
    pub pod: Arc<str>,
    pub pod_uid: Option<Arc<str>>,
    pub phase: Phase,
    pub started: bool,
    /// Time of creation, ms since 1970.
    pub created_ms: u64,
    pub cause: Option<Arc<str>>,
    pub failed: bool,
    /// Present faults that have not failed the sandbox, as text. They are in memory only.
    pub faults: Arc<[String]>,
    pub trust: Option<Arc<str>>,
    /// Whether nothing of the sandbox is left in the pod's network namespace.
    pub network_gone: bool,
    /// Set if even the first record failed; the sandbox does not exist then.
    pub rejected: Option<Error>,
}

impl View {
    pub(crate) fn of(record: &Record, network_gone: bool) -> View {
        View {
            id: record.id.clone(),
            pod: record.pod_name().into(),
            pod_uid: record.pod.as_ref().and_then(|pod| pod.uid.as_deref()).map(Arc::from),
            phase: record.phase.clone(),
            started: record.started,
            created_ms: record.created_ms,
            cause: record.end.cause.as_deref().map(Arc::from),
            failed: record.end.failed,
            faults: Arc::default(),
            trust: record.enrolment.trust.as_deref().map(Arc::from),
            network_gone,
            rejected: None,
        }
    }

    pub(crate) fn vm(&self) -> Option<&InstanceId> {
        self.phase.vm()
    }

    /// Whether the sandbox was accepted: its record is durable, or it is being removed.
    pub(crate) fn is_accepted(&self) -> bool {
        self.phase != Phase::Created
    }

    /// Returns the result of StartVM; `None` while the call must wait.
    pub(crate) fn outcome(&self) -> Option<Result<(), Error>> {
        match &self.phase {
            Phase::Running { .. } => Some(Ok(())),
            Phase::Created | Phase::Booting { .. } | Phase::Joining { .. } => None,
            Phase::Unwanted { .. } | Phase::Leaving { .. } | Phase::Gone => Some(Err(self.ended())),
        }
    }

    /// Returns the cause of the stop or failure as an error.
    pub(crate) fn ended(&self) -> Error {
        let cause = self.cause.as_deref().unwrap_or("no cause was recorded").to_owned();
        let id = self.id.clone();
        if self.failed { Error::Failed { id, cause } } else { Error::Stopped { id, cause } }
    }
}
