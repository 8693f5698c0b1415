//! Publishes a sandbox's state to readers outside its task.

use std::sync::Arc;

use peerpod_provider_api::InstanceId;

use crate::ledger::Record;
use crate::sandbox::error::Error;
use crate::sandbox::lifecycle::phase::Phase;
use crate::spec::SandboxId;

/// State of a sandbox, as published by its task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View {
    /// Id of the sandbox.
    pub id: SandboxId,
    /// Pod as namespace/name, for log lines; `-` if it was never known.
    pub pod: Arc<str>,
    /// Current phase.
    pub phase: Phase,
    /// Whether StartVM was called.
    pub started: bool,
    /// Time of creation, ms since 1970.
    pub created_ms: u64,
    /// Cause of the stop or failure.
    pub cause: Option<Arc<str>>,
    /// Whether the cause is a failure.
    pub failed: bool,
    /// Id of the CA set that the guest trusts.
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
            phase: record.phase.clone(),
            started: record.started,
            created_ms: record.created_ms,
            cause: record.end.cause.as_deref().map(Arc::from),
            failed: record.end.failed,
            trust: record.enrolment.trust.as_deref().map(Arc::from),
            network_gone,
            rejected: None,
        }
    }

    /// Returns the VM, if it is known.
    pub fn vm(&self) -> Option<&InstanceId> {
        self.phase.vm()
    }

    /// Whether the sandbox was accepted: its record is durable, or it is being removed.
    pub fn is_accepted(&self) -> bool {
        self.phase != Phase::Created
    }

    /// Returns the result of StartVM; `None` while the call must wait.
    pub fn outcome(&self) -> Option<Result<(), Error>> {
        match &self.phase {
            Phase::Running { .. } => Some(Ok(())),
            Phase::Created | Phase::Booting { .. } | Phase::Joining { .. } => None,
            Phase::Unwanted { .. } | Phase::Leaving { .. } | Phase::Gone => Some(Err(self.ended())),
        }
    }

    /// Returns the cause of the stop or failure as an error.
    pub fn ended(&self) -> Error {
        let cause = self.cause.as_deref().unwrap_or("no cause was recorded").to_owned();
        let id = self.id.clone();
        if self.failed { Error::Failed { id, cause } } else { Error::Stopped { id, cause } }
    }
}
