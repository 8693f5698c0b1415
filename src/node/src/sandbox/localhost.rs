//! When the pod's localhost is carried into its VM: after the tunnel is connected and the relay knows the sandbox, and
//! again with every other relay. It never holds a pod up: a pod without it runs.

use super::{
    effects::NetworkError,
    slots::{Outcome, Which},
    task::Task,
};

impl Task {
    /// Has it carried, if that is due.
    pub(super) fn carry_localhost(&mut self) {
        let ready = self.plan.is_some() && self.put_done >= self.put_wanted;
        if !ready || self.localhost_of == self.put_done || !self.slots.localhost.is_idle() {
            return;
        }
        let Some(netns) = self.record.netns.clone() else { return };
        let (fx, id, version) = (self.fx.clone(), self.record.id.clone(), self.put_done);
        self.slots.localhost.start(async move {
            let result = fx.carry_localhost(&netns, &id).await;
            Outcome::Carried { version, result }
        });
    }

    pub(super) fn localhost_carried(&mut self, version: u64, result: Result<(), NetworkError>) {
        match result {
            Ok(()) => {
                self.localhost_of = version;
                self.slots.localhost.worked();
            }
            Err(error) if error.permanent => {
                tracing::warn!(%error, "connections to the pod's localhost are not carried");
                self.localhost_of = version;
            }
            Err(error) => self.later(Which::Localhost, error.text),
        }
    }
}
