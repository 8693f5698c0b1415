//! Grants certificates to guests that present a ticket. The first use binds the ticket durably to the guest's key,
//! before the node answers. The same key gets the same certificate again; another key is refused and logged.

use std::net::IpAddr;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use peerpod_common::limit::RateLimit;
use peerpod_link::user_data::from_hex;
use tokio::sync::oneshot;
use tokio::time::Instant;
use tracing::{info, warn};

use crate::ledger::{Binding, Record};
use crate::sandbox::error::{ClaimRefused, Error, Granted};
use crate::sandbox::lifecycle::Task;

/// Data that a guest presents in order to get a certificate. Without Debug, so that no log shows the secret.
#[derive(Clone)]
pub(crate) struct Claim {
    /// The ticket's secret, raw.
    pub secret: Vec<u8>,
    /// CSR: PKCS#10, DER.
    pub csr: Vec<u8>,
    pub peer: String,
    pub guest_version: String,
    /// Public half of the guest's tunnel key; empty if it has none.
    pub tunnel_key: Vec<u8>,
    /// Sandbox of the VM that was dialled; empty if the guest dialled.
    pub dialled: String,
}

impl Claim {
    fn tunnel_key(&self) -> Option<String> {
        // Only the length is checked here; the relay interprets the key.
        (self.tunnel_key.len() == TUNNEL_KEY).then(|| hex::encode(&self.tunnel_key))
    }

    pub(crate) fn from(&self) -> Option<IpAddr> {
        self.peer.parse().ok()
    }
}

const TUNNEL_KEY: usize = 32;

/// Granted claims that wait until the relay has the certificate, and limits: a guest may repeat its claim at will.
pub(crate) struct Claims {
    waiting: Vec<Waiting>,
    /// Log lines.
    lines: RateLimit,
    /// Changes of the bound tunnel key or address, each of which is recorded.
    changes: RateLimit,
    /// Reason of the last refusal.
    pub(crate) refused: Option<ClaimRefused>,
}

/// Version of the relay's state with the certificate, the grant, and the channel for the answer.
type Waiting = (u64, Granted, oneshot::Sender<Result<Granted, Error>>);

/// Maximum number of waiting claims. A sandbox never has more guests at once; more claims are abuse.
const MAX_WAITING: usize = 16;

impl Claims {
    pub(crate) fn new() -> Claims {
        let now = Instant::now().into_std();
        Claims {
            waiting: Vec::new(),
            lines: RateLimit::new(10.0, 1.0 / 60.0, now),
            changes: RateLimit::new(10.0, 1.0, now),
            refused: None,
        }
    }

    /// Answers the claims for which the relay has the certificate by now.
    pub(crate) fn put_done(&mut self, version: u64) {
        for (_, granted, answer) in self.waiting.extract_if(.., |(needs, ..)| *needs <= version) {
            drop(answer.send(Ok(granted))); // a guest that went away asks again
        }
    }

    pub(crate) fn refuse_all(&mut self, record: &Record) {
        for (_, _, answer) in self.waiting.drain(..) {
            let cause = record.end.cause.clone().unwrap_or_default();
            drop(answer.send(Err(Error::Stopped { id: record.id.clone(), cause })));
        }
    }
}

impl Task {
    pub(crate) async fn claim(&mut self, claim: Claim, answer: oneshot::Sender<Result<Granted, Error>>) {
        let logged = self.guest.claims.lines.take(Instant::now().into_std());
        match self.granted(&claim).await {
            Ok(granted) => {
                if logged {
                    info!(peer = claim.peer, guest_version = claim.guest_version, "ticket claimed");
                }
                self.metrics.guests.claims_granted.inc();
                self.guest.claims.waiting.retain(|(.., waiting)| !waiting.is_closed());
                if self.guest.claims.waiting.len() < MAX_WAITING {
                    self.guest.claims.waiting.push((self.relay.put_wanted, granted, answer));
                    self.guest.claims.put_done(self.relay.put_done);
                }
            }
            Err(error) => {
                if let Error::Claim(refused) = &error {
                    self.guest.claims.refused = Some(*refused);
                    if logged {
                        warn!(
                            peer = claim.peer,
                            guest_version = claim.guest_version,
                            reason = refused.reason(),
                            "claim refused: {refused}"
                        );
                    }
                    self.metrics.guests.claims_refused.count(refused.reason());
                }
                drop(answer.send(Err(error)));
            }
        }
    }

    async fn granted(&mut self, claim: &Claim) -> Result<Granted, Error> {
        let refused = |why| Err(Error::Claim(why));
        let Some(ticket) = self.record.enrolment.ticket.as_ref().filter(|_| self.record.phase.is_live())
        else {
            return refused(ClaimRefused::NotWanted);
        };
        if !ticket.matches(&claim.secret) {
            return refused(ClaimRefused::WrongSecret);
        }
        if !claim.dialled.is_empty() && claim.dialled != self.record.id.as_str() {
            return refused(ClaimRefused::OtherVm);
        }
        let Ok(key) = self.ports.identity.csr_key(&claim.csr) else {
            return refused(ClaimRefused::BadRequest);
        };
        let key = hex::encode(key);
        if let Some(bound) = &self.record.enrolment.binding {
            if bound.key_sha256 != key {
                return refused(ClaimRefused::OtherKey);
            }
            let chain = bound.chain.iter().map(|der| BASE64.decode(der)).collect::<Result<_, _>>();
            let chain =
                chain.map_err(|_| Error::Unavailable("the recorded certificate cannot be read".into()))?;
            let now = (claim.tunnel_key(), claim.from());
            if now != (bound.tunnel_key.clone(), bound.from) {
                if !self.guest.claims.changes.take(Instant::now().into_std()) {
                    let why =
                        "the guest changes its tunnel key or its address too often; it must ask again later";
                    return Err(Error::Unavailable(why.into()));
                }
                // The guest proved its identity by its key and its ticket. It may have lost its tunnel key, or moved.
                self.change(|record| {
                    if let Some(bound) = &mut record.enrolment.binding {
                        (bound.tunnel_key, bound.from) = now;
                    }
                })
                .await?;
                self.put_again();
            }
            return Ok(Granted { id: self.record.id.clone(), chain });
        }
        if ticket.is_expired(self.ports.clock.now_ms()) {
            return refused(ClaimRefused::Expired);
        }
        let Ok(signed) = self.ports.identity.sign(&self.record.id, &claim.csr) else {
            return refused(ClaimRefused::BadRequest);
        };
        let binding = Binding {
            key_sha256: key,
            certificates_sha256: vec![hex::encode(signed.certificate_sha256)],
            chain: signed.chain.iter().map(|der| BASE64.encode(der)).collect(),
            tunnel_key: claim.tunnel_key(),
            from: claim.from(),
        };
        self.reached("claimed");
        self.change(|record| record.enrolment.binding = Some(binding)).await?;
        self.put_again();
        Ok(Granted { id: self.record.id.clone(), chain: signed.chain })
    }
}

/// Returns the fingerprints of the certificates by which the relay recognises the sandbox's guest.
pub(crate) fn fingerprints(record: &Record) -> Vec<Vec<u8>> {
    let Some(binding) = &record.enrolment.binding else { return Vec::new() };
    let digests = binding.certificates_sha256.iter();
    digests.filter_map(|digest| Some(from_hex(digest)?.to_vec())).collect()
}
