//! Makes VMs: one, or up to a hundred by one call. May call RunInstances, and DescribeInstances when an earlier call used
//! the key.
//!
//! **Exactly once per key.** The key is the client token, and a placement has one instance type in one vSwitch. A repeated
//! call gets the ids of the first one. If its parameters differ (newer settings after a restart), the cloud refuses the
//! token, and the VMs of the first call are found by their tag.
//!
//! **Decision.** The cloud decides on the stock before it answers.

use std::time::Duration;

use peerpod_provider_api::{CreateRequest, Created, CreatedMany, Error, IdempotencyKey, InstanceId, Market};
use peerpod_provider_cloud::exhausted::Scope;
use peerpod_provider_cloud::{ApiCall, Offering, Wait};
use peerpod_provider_rest::{Failure, read};
use serde_json::Value;
use tokio::time::Instant;

use crate::Alibaba;
use crate::client::Parameters;
use crate::config::is_id;
use crate::facts::AlibabaCloudImageFacts;
use crate::parameters::AlibabaCloudVmSpec;
use crate::provider::AlibabaCloudConnection;
use crate::refusal::{NO_ADDRESS, REFUSALS};
use crate::vms::{self, AlibabaCloudVm};

/// Time for which a type is skipped after a refusal by a quota.
const QUOTA_STANDS: Duration = Duration::from_secs(600);
/// Longest time that the VMs of an earlier call may stay invisible.
const UNSEEN: Duration = Duration::from_secs(12);
/// Pauses between two looks at them.
static LOOKS: Wait = Wait::new(Duration::from_millis(500), Duration::from_millis(500));

/// Create that is ready to be sent.
pub(crate) struct AlibabaCloudLaunch<'l> {
    pub alibaba: &'l Alibaba,
    pub connected: &'l AlibabaCloudConnection,
    pub request: &'l CreateRequest,
    pub key: &'l IdempotencyKey,
    pub offering: &'l Offering,
    pub image: &'l AlibabaCloudImageFacts,
    /// vSwitch of the second NIC.
    pub second: Option<&'l str>,
    pub until: Instant,
}

impl AlibabaCloudLaunch<'_> {
    /// Makes up to `count` VMs, or finds those of an earlier call.
    pub(crate) async fn go(&self, count: u32) -> Result<CreatedMany, Error> {
        let what = self.what();
        let call = ApiCall::new("RunInstances", self.key.as_str(), &what).until(self.until);
        let mut made = match self.connected.ecs.post(call, self.parameters(count)?).await {
            Ok(answer) => ids(&answer).map(|id| self.created(id, None)).collect::<Result<Vec<_>, _>>()?,
            // The cloud promises an answer to a repeated call, but not one with these parameters.
            Err(failure) if matches!(failure.error, Error::KeyReused { .. }) => self.earlier().await?,
            Err(failure) => return Err(self.refused(failure).await),
        };
        if made.is_empty() {
            made = self.earlier().await?;
        }
        made.sort_by(|a, b| a.id.cmp(&b.id));
        let now = Instant::now();
        for one in &made {
            self.alibaba.recent.made(&one.id, self.key, &self.request.name, now);
            if one.chosen.market == Some(Market::Spot) {
                self.alibaba.spots.made(one.id.as_str(), self.offering);
            }
        }
        let rest = (made.len() < count as usize).then(|| self.rest(made.len(), count));
        Ok(CreatedMany { made, rest })
    }

    fn parameters(&self, count: u32) -> Result<Parameters, Error> {
        let AlibabaCloudLaunch { alibaba, request, key, offering, image, second, .. } = *self;
        let shape = AlibabaCloudVmSpec {
            config: &alibaba.config,
            owner: &alibaba.owner,
            request,
            key,
            offering,
            image,
            second,
        };
        shape.parameters(count)
    }

    fn what(&self) -> String {
        format!("create of {}", self.request.name)
    }

    /// Returns the VMs that an earlier call with this key made.
    async fn earlier(&self) -> Result<Vec<Created>, Error> {
        let (ecs, what, digest) = (&self.connected.ecs, self.what(), self.request.digest());
        let end = (Instant::now() + UNSEEN).min(self.until);
        let earlier = LOOKS.until(Some(end), || async {
            let seen = vms::by_key(ecs, &self.alibaba.owner, self.key, &what, self.until).await?;
            if let Some(other) = seen.iter().find(|seen| seen.marks.digest.as_ref() != Some(&digest)) {
                return Err(Error::key_reused(format!(
                    "{what}: its key was used before with another request, which made {}; this is a bug in \
                     Peerpod, report it",
                    other.id
                )));
            }
            let lives = seen.iter().filter(|seen| seen.state.lives());
            let made: Vec<Created> =
                lives.map(|seen| self.created(&seen.id, Some(seen))).collect::<Result<_, _>>()?;
            Ok((!made.is_empty()).then_some(made))
        });
        earlier.await?.ok_or_else(|| {
            let text = format!(
                "{what}: an earlier call with its key had other parameters and made no VM that Alibaba Cloud \
                 shows; another attempt is needed"
            );
            Error::capacity(self.offering.to_string(), text)
        })
    }

    /// Returns the reason why there are fewer VMs than asked for.
    fn rest(&self, made: usize, count: u32) -> Error {
        let why = format!("{made} of {count} VMs");
        let remedy = REFUSALS.remedy("RunInstances", "OperationDenied.NoStock", "", 403);
        let text = format!("{}: Alibaba Cloud had capacity for {why} only; {remedy}", self.what());
        self.exhausted(&why, Error::capacity("", text))
    }

    /// Returns the error of a call that the cloud refused.
    async fn refused(&self, failure: Failure) -> Error {
        let code = failure.code().to_owned();
        match &failure.error {
            Error::Capacity { .. } | Error::Quota { .. } => return self.exhausted(&code, failure.error),
            // The cached facts may be out of date; the next create loads them again.
            Error::Invalid { .. } if code.ends_with(".NotFound") => self.alibaba.facts.forget().await,
            _ => {}
        }
        failure.error
    }

    /// Marks the offerings without capacity or quota. Returns the error with the cloud's words and the remedy: a lack of
    /// capacity while another offering is left, because a quota limits one type or market alone.
    fn exhausted(&self, code: &str, error: Error) -> Error {
        let planner = &self.alibaba.planner;
        let (text, is_quota) = match error {
            Error::Capacity { text, .. } => (text, false),
            // All offerings have this account.
            Error::Quota { text } if !code.starts_with("QuotaExceed") => return Error::Quota { text },
            Error::Quota { text } => (text, true),
            error => return error,
        };
        if is_quota {
            for place in &planner.catalogue().places {
                let (market, machine) = (self.offering.market, self.offering.machine.clone());
                planner.exhausted_for(
                    Scope::Offering(market, machine, place.zone.clone()),
                    code,
                    QUOTA_STANDS,
                );
            }
        } else if let Some(subnet) = self.offering.subnet.clone().filter(|_| code == NO_ADDRESS) {
            planner.exhausted(Scope::Subnet(subnet), code);
        } else {
            planner.exhausted(self.offering, code);
        }
        let wanted = CreateRequest { user_data: String::new(), ..self.request.clone() };
        if is_quota && planner.place(&wanted, 1).is_err() {
            return Error::Quota { text };
        }
        match planner.capacity_error(&self.request.name, &[(self.offering.clone(), code.to_owned())]) {
            Error::Capacity { offering, rejected, .. } => Error::Capacity { offering, rejected, text },
            other => other,
        }
    }

    /// Returns the answer for a VM. `seen`: as the cloud shows it, where it was looked up.
    fn created(&self, id: &str, seen: Option<&AlibabaCloudVm>) -> Result<Created, Error> {
        let broken = || {
            Error::transient(format!(
                "{}: the answer names a VM without an id; it is tried again",
                self.what()
            ))
        };
        let id = InstanceId::new(id).ok().filter(|id| is_id(id.as_str(), "i-")).ok_or_else(broken)?;
        let mut chosen = self.offering.chosen(Some(self.image.id.clone()));
        if let Some(seen) = seen {
            chosen.instance_type = seen.machine.clone();
            chosen.zone = seen.zone.clone();
            chosen.market = Some(if seen.is_spot { Market::Spot } else { Market::OnDemand });
        }
        let addresses = seen.map(|seen| seen.addresses(self.alibaba.config.use_public_ip));
        let chosen = self.alibaba.planner.priced(chosen);
        Ok(Created { id, addresses: addresses.unwrap_or_default(), chosen, disks: Vec::new() })
    }
}

/// Returns the ids in an answer.
fn ids(answer: &Value) -> impl Iterator<Item = &str> {
    read::list(answer, "/InstanceIdSets/InstanceIdSet").iter().map(|id| id.as_str().unwrap_or_default())
}
