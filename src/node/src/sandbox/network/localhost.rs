//! Redirects the pod's localhost into its VM, after each update of the relay. No pod waits for it.

use crate::sandbox::lifecycle::{Completion, Task, Unapplied, Which};
use crate::sandbox::ports::NetworkError;

impl Task {
    pub(crate) fn carry_localhost(&mut self) {
        let ready = self.guest.plan.is_some() && self.relay.put_done >= self.relay.put_wanted;
        if !ready || self.relay.localhost_of == self.relay.put_done || !self.in_flight.localhost.is_idle() {
            return;
        }
        let Some(netns) = self.record.netns.clone() else { return };
        let (ports, id, version) = (self.ports.clone(), self.record.id.clone(), self.relay.put_done);
        self.in_flight.localhost.start(async move {
            let result = ports.network.carry_localhost(&netns, &id).await;
            Completion::Carried { version, result }
        });
    }

    pub(crate) fn localhost_carried(
        &mut self,
        version: u64,
        result: Result<(), NetworkError>,
    ) -> Result<(), Unapplied> {
        match result {
            Ok(()) => {
                self.relay.localhost_of = version;
                self.in_flight.localhost.worked();
            }
            Err(error) if error.permanent => {
                tracing::warn!(%error, "connections to the pod's localhost do not reach its VM");
                self.relay.localhost_of = version;
            }
            Err(error) => self.later(Which::Localhost, error.text),
        }
        Ok(())
    }
}
