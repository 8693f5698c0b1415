//! A guest shows its ticket. The first use binds the ticket to the guest's key, durably, before anybody hears of it;
//! the same key asked again gets the same certificate; another key gets nothing and is reported.

use std::net::IpAddr;

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use tokio::sync::oneshot;
use tracing::{info, warn};

use super::{
    error::{ClaimRefused, Error, Granted},
    task::Task,
};
use crate::ledger::{Binding, Record};

/// What a guest shows.
#[derive(Clone, Debug)]
pub struct Claim {
    /// The ticket's secret, raw.
    pub secret: Secret,
    /// PKCS#10, DER.
    pub csr: Vec<u8>,
    /// Where the guest's connection came from.
    pub peer: String,
    /// The guest program's version.
    pub guest_version: String,
    /// The public half of its tunnel key; empty: it has none.
    pub tunnel_key: Vec<u8>,
    /// The sandbox whose VM was dialled; empty: the guest dialled.
    pub dialled: String,
}

impl Claim {
    fn tunnel_key(&self) -> Option<String> {
        // What the relay makes of it is its matter; here it only has a bound.
        (self.tunnel_key.len() == TUNNEL_KEY).then(|| hex::encode(&self.tunnel_key))
    }

    pub(super) fn from(&self) -> Option<IpAddr> {
        self.peer.parse().ok()
    }
}

/// Bytes of a tunnel key.
const TUNNEL_KEY: usize = 32;

/// Bytes that no log shows.
#[derive(Clone)]
pub struct Secret(pub Vec<u8>);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret")
    }
}

/// Granted claims that wait until the relay knows the certificate.
#[derive(Default)]
pub(super) struct Claims(Vec<Waiting>);

/// The relay's version that knows the certificate, what is granted, and who waits.
type Waiting = (u64, Granted, oneshot::Sender<Result<Granted, Error>>);

/// More guests than one sandbox has never wait at once; beyond it somebody is playing.
const MAX_WAITING: usize = 16;

impl Claims {
    /// Answers those whose certificate the relay knows by now.
    pub(super) fn put_done(&mut self, version: u64) {
        let (done, waiting) =
            std::mem::take(&mut self.0).into_iter().partition(|(needs, ..)| *needs <= version);
        self.0 = waiting;
        let done: Vec<_> = done;
        for (_, granted, answer) in done {
            drop(answer.send(Ok(granted))); // a guest that went away asks again
        }
    }

    pub(super) fn refuse_all(&mut self, record: &Record) {
        for (_, _, answer) in self.0.drain(..) {
            let cause = record.cause.clone().unwrap_or_default();
            drop(answer.send(Err(Error::Stopped { id: record.id.clone(), cause })));
        }
    }
}

impl Task {
    pub(super) async fn claim(&mut self, claim: Claim, answer: oneshot::Sender<Result<Granted, Error>>) {
        match self.granted(&claim).await {
            Ok(granted) => {
                info!(peer = claim.peer, guest_version = claim.guest_version, "ticket claimed");
                self.metrics.claims_granted.inc();
                self.claims.0.retain(|(.., waiting)| !waiting.is_closed());
                if self.claims.0.len() < MAX_WAITING {
                    self.claims.0.push((self.put_wanted, granted, answer));
                    self.claims.put_done(self.put_done);
                }
            }
            Err(error) => {
                if let Error::Claim(refused) = &error {
                    warn!(
                        peer = claim.peer,
                        guest_version = claim.guest_version,
                        reason = refused.reason(),
                        "a claim was refused: {refused}"
                    );
                    self.metrics.claim_refused(refused.reason());
                }
                drop(answer.send(Err(error)));
            }
        }
    }

    async fn granted(&mut self, claim: &Claim) -> Result<Granted, Error> {
        let refused = |why| Err(Error::Claim(why));
        let Some(ticket) = self.record.ticket.as_ref().filter(|_| self.record.phase.is_live()) else {
            return refused(ClaimRefused::NotWanted);
        };
        if !ticket.matches(&claim.secret.0) {
            return refused(ClaimRefused::WrongSecret);
        }
        if !claim.dialled.is_empty() && claim.dialled != self.record.id.as_str() {
            return refused(ClaimRefused::OtherVm);
        }
        let Ok(key) = self.fx.csr_key(&claim.csr) else { return refused(ClaimRefused::BadRequest) };
        let key = hex::encode(&key);
        if let Some(bound) = &self.record.binding {
            if bound.key_sha256 != key {
                return refused(ClaimRefused::OtherKey);
            }
            let chain = decode(&bound.chain)
                .ok_or_else(|| Error::Unavailable("the recorded certificate cannot be read".into()))?;
            let now = (claim.tunnel_key(), claim.from());
            if now != (bound.tunnel_key.clone(), bound.from) {
                // The same guest: it proved that by its key and its ticket. It may have lost the tunnel's, or moved.
                let mut record = self.record.clone();
                if let Some(bound) = &mut record.binding {
                    (bound.tunnel_key, bound.from) = now;
                }
                self.save(record).await?;
                self.put_wanted += 1;
                self.slots.relay.wake();
            }
            return Ok(Granted { id: self.record.id.clone(), chain });
        }
        if ticket.is_expired(std::time::UNIX_EPOCH + std::time::Duration::from_millis(self.fx.now_ms())) {
            return refused(ClaimRefused::Expired);
        }
        let Ok(signed) = self.fx.sign(&self.record.id, &claim.csr) else {
            return refused(ClaimRefused::BadRequest);
        };
        let mut record = self.record.clone();
        record.binding = Some(Binding {
            key_sha256: key,
            certificates_sha256: vec![hex::encode(&signed.certificate_sha256)],
            chain: signed.chain.iter().map(|der| BASE64.encode(der)).collect(),
            tunnel_key: claim.tunnel_key(),
            from: claim.from(),
        });
        record.reached("claimed", self.fx.now_ms());
        self.save(record).await?;
        self.put_wanted += 1;
        self.slots.relay.wake();
        Ok(Granted { id: self.record.id.clone(), chain: signed.chain })
    }
}

fn decode(chain: &[String]) -> Option<Vec<Vec<u8>>> {
    chain.iter().map(|der| BASE64.decode(der).ok()).collect()
}

/// The certificates by which the relay knows the sandbox's guest.
pub(super) fn fingerprints(record: &Record) -> Vec<Vec<u8>> {
    let Some(binding) = &record.binding else { return Vec::new() };
    binding
        .certificates_sha256
        .iter()
        .filter_map(|hex| peerpod_link::birth::from_hex(hex))
        .map(|digest| digest.to_vec())
        .collect()
}
