//! What others may see of a sandbox, without asking its task.

use std::sync::Arc;

use peerpod_provider_api::InstanceId;

use super::error::Error;
use crate::{ledger::Record, sandbox::phase::Phase, spec::SandboxId};

/// A sandbox as the others see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View {
    /// Which.
    pub id: SandboxId,
    /// Whose it is, namespace/name, for log lines; `-` when that was never known.
    pub pod: Arc<str>,
    /// Where it stands.
    pub phase: Phase,
    /// Whether StartVM ever came.
    pub started: bool,
    /// When it was created, ms since 1970.
    pub created_ms: u64,
    /// Why it is not wanted any more.
    pub cause: Option<Arc<str>>,
    /// Whether that is a failure.
    pub failed: bool,
    /// Whom its guest trusts, by the id of the set.
    pub trust: Option<Arc<str>>,
    /// Nothing of it is left in the pod's network namespace.
    pub network_gone: bool,
    /// It could not even be recorded; there is no such sandbox.
    pub unborn: Option<Error>,
}

impl View {
    pub(super) fn of(record: &Record, network_gone: bool) -> View {
        View {
            id: record.id.clone(),
            pod: record.pod_name().into(),
            phase: record.phase.clone(),
            started: record.started,
            created_ms: record.created_ms,
            cause: record.cause.as_deref().map(Arc::from),
            failed: record.failed,
            trust: record.trust.as_deref().map(Arc::from),
            network_gone,
            unborn: None,
        }
    }

    /// Its VM, if it is known.
    pub fn vm(&self) -> Option<&InstanceId> {
        self.phase.vm()
    }

    /// Whether it is accepted: durable, or on its way out.
    pub fn is_born(&self) -> bool {
        self.phase != Phase::Created
    }

    /// What StartVM is told: `None` as long as it must wait.
    pub fn outcome(&self) -> Option<Result<(), Error>> {
        match &self.phase {
            Phase::Running { .. } => Some(Ok(())),
            Phase::Created | Phase::Booting { .. } | Phase::Joining { .. } => None,
            Phase::Unwanted { .. } | Phase::Leaving { .. } | Phase::Gone => Some(Err(self.ended())),
        }
    }

    /// Why it is not wanted any more, as an error.
    pub fn ended(&self) -> Error {
        let cause = self.cause.as_deref().unwrap_or("nobody said why").to_owned();
        let id = self.id.clone();
        if self.failed { Error::Failed { id, cause } } else { Error::Stopped { id, cause } }
    }
}
