//! Renews a running guest's certificate when the node's CA rotates. The guest gets the CA set to trust, returns a CSR
//! for its key, and gets a new certificate once the relay has it. Each step may be repeated; after a crash the first
//! step runs again.

use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use peerpod_proto::guest::{Reply, Request, Rotate};
use tracing::{error, info};

use crate::sandbox::lifecycle::{Completion, Task, Unapplied, Which, clip};
use crate::sandbox::ports::Trusted;

/// Certificate on its way to the guest.
pub(crate) struct Renewal {
    trusted: Arc<Trusted>,
    chain: Vec<Vec<u8>>,
    /// First version of the relay's state that contains it.
    put: u64,
}

/// Certificates kept per guest: it may still be connected by a replaced one, and may have missed a newer one.
const KEEP: usize = 3;
/// Time limit of the guest's answer; the guest only writes a file.
const WITHIN: Duration = Duration::from_secs(10);

impl Task {
    pub(crate) fn renew(&mut self) {
        let trusted = self.guest.trusted.borrow_and_update().clone();
        let up_to_date = self.record.enrolment.trust.as_deref() == Some(&trusted.id);
        let is_assigned = {
            let guest = self.guest.state.borrow();
            guest.connected && self.record.assigned.session.as_deref() == Some(&guest.session)
        };
        if up_to_date || !is_assigned || !self.in_flight.guest.is_idle() {
            return;
        }
        let renewal = self.guest.renewal.as_ref().filter(|renewal| renewal.trusted == trusted);
        let certificates = match renewal {
            None => Vec::new(),
            Some(renewal) if renewal.put <= self.relay.put_done => renewal.chain.clone(),
            Some(_) => return, // the relay first, or it would reject the guest
        };
        let asks = certificates.is_empty();
        let mut request = Request::new();
        request.set_rotate(Rotate { trusted_cas: trusted.cas.clone(), certificates, ..Rotate::default() });
        let (ports, id) = (self.ports.clone(), self.record.id.clone());
        self.in_flight.guest.start(async move {
            let result = ports.relay.call(&id, request, WITHIN).await;
            let result = result.map(Box::new).map_err(|error| error.text);
            if asks { Completion::Csr { trusted, result } } else { Completion::Renewed { trusted, result } }
        });
    }

    /// Signs the CSR of a guest that trusts the new set.
    pub(crate) async fn csr_came(
        &mut self,
        trusted: Arc<Trusted>,
        result: Result<Box<Reply>, String>,
    ) -> Result<(), Unapplied> {
        let Some(reply) = self.guest_reply(result) else { return Ok(()) };
        let ours = self.ports.identity.csr_key(&reply.csr).ok().map(hex::encode);
        let bound = self.record.enrolment.binding.clone();
        let bound =
            bound.filter(|binding| reply.error.is_empty() && ours.as_ref() == Some(&binding.key_sha256));
        let Some(mut binding) = bound else {
            let why = match reply.error.as_str() {
                "" => "its certificate request is not for the key of its ticket".to_owned(),
                error => clip(error),
            };
            error!(why, "the guest cannot follow the node's CA; trying again");
            self.later(Which::Guest, why);
            return Ok(());
        };
        let Ok(signed) = self.ports.identity.sign(&self.record.id, &reply.csr) else {
            self.later(Which::Guest, "cannot sign the guest's certificate".into());
            return Ok(());
        };
        binding.certificates_sha256.push(hex::encode(signed.certificate_sha256));
        let drop = binding.certificates_sha256.len().saturating_sub(KEEP);
        binding.certificates_sha256.drain(..drop);
        binding.chain = signed.chain.iter().map(|der| BASE64.encode(der)).collect();
        self.change(|record| record.enrolment.binding = Some(binding)).await?;
        self.put_again();
        self.guest.renewal = Some(Renewal { trusted, chain: signed.chain, put: self.relay.put_wanted });
        Ok(())
    }

    /// Records that the guest has its new certificate.
    pub(crate) async fn renewed(
        &mut self,
        trusted: Arc<Trusted>,
        result: Result<Box<Reply>, String>,
    ) -> Result<(), Unapplied> {
        let Some(reply) = self.guest_reply(result) else { return Ok(()) };
        self.guest.renewal = None;
        if !reply.error.is_empty() {
            let why = clip(&reply.error);
            error!(why, "the guest refuses its new certificate; trying again");
            self.later(Which::Guest, why);
            return Ok(());
        }
        self.change(|record| record.enrolment.trust = Some(trusted.id.clone())).await?;
        info!(trust = trusted.id, "the guest follows the node's CA");
        Ok(())
    }

    /// Returns the guest's reply; `None`: there is none, and the call is repeated.
    pub(crate) fn guest_reply(&mut self, result: Result<Box<Reply>, String>) -> Option<Reply> {
        result.map(|reply| *reply).map_err(|error| self.later(Which::Guest, error)).ok()
    }
}
