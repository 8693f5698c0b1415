//! Makes VMs. One CreateFleet goes over all offerings of a placement; where a fleet does not fit, RunInstances is
//! called for one offering after the other.
//!
//! **Exactly once per key.** The key is the client token, so EC2 makes no other VM when a call is repeated. The
//! parameters follow from request and placement alone. If they differ nevertheless (newer settings after a restart),
//! EC2 refuses the token, and the VMs of the first call are found by their tag.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use aws_sdk_ec2::operation::create_fleet::CreateFleetOutput;
use aws_sdk_ec2::operation::create_fleet::builders::CreateFleetFluentBuilder;
use aws_sdk_ec2::types::builders::FleetLaunchTemplateSpecificationRequestBuilder;
use aws_sdk_ec2::types::{
    CreateFleetError, DefaultTargetCapacityType, FleetLaunchTemplateConfigRequest,
    FleetLaunchTemplateOverridesRequest, FleetLaunchTemplateSpecificationRequest,
    FleetOnDemandAllocationStrategy, FleetType, InstanceMarketOptionsRequest, MarketType,
    OnDemandOptionsRequest, ShutdownBehavior, SpotAllocationStrategy, SpotOptionsRequest,
    TargetCapacitySpecificationRequest,
};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use peerpod_provider_api::{
    Chosen, CreateRequest, Created, CreatedMany, Error, IdempotencyKey, InstanceId, Market,
};
use peerpod_provider_cloud::exhausted::Scope;
use peerpod_provider_cloud::{Meaning, Offering, VmState, Wait};
use tokio::time::Instant;

use crate::config::ALPHABET;
use crate::ec2::Aws;
use crate::ec2::client::Ec2;
use crate::ec2::facts::AwsFacts;
use crate::ec2::refusal::{AwsFailure, REFUSALS};
use crate::ec2::shape::{AwsImageFacts, AwsVmSpec, tag_specifications};
use crate::ec2::vms::{self, AwsVm};

/// Longest time that a new VM may stay invisible. EC2 is eventually consistent; in practice this takes seconds.
const UNSEEN: Duration = Duration::from_secs(12);
/// Pauses between two lookups of such a VM.
static LOOKS: Wait = Wait::new(Duration::from_millis(500), Duration::from_millis(500));

/// Create that is ready to be sent.
pub(crate) struct AwsLaunch<'l> {
    pub aws: &'l Aws,
    pub ec2: &'l Ec2,
    pub facts: &'l AwsFacts,
    pub request: &'l CreateRequest,
    pub key: &'l IdempotencyKey,
    pub offerings: &'l [Offering],
    /// Image other than the configured one.
    pub image: Option<AwsImageFacts>,
    pub until: Instant,
}

/// VMs that one call made, and offerings that it did not get.
#[derive(Default)]
struct Outcome {
    made: Vec<Created>,
    /// Refused offerings, with EC2's code.
    refused: Vec<(Offering, String)>,
    /// Full texts of those refusals that only a higher quota resolves.
    quotas: Vec<String>,
    /// Whether the VMs are those of an earlier call with this key, found by their tag. EC2 refused the token because of
    /// other parameters, or answered without VMs.
    is_earlier: bool,
}

impl AwsLaunch<'_> {
    /// Makes up to `count` VMs, or finds those of an earlier call.
    pub(crate) async fn go(&self, count: u32) -> Result<CreatedMany, Error> {
        let mut whole = Outcome::default();
        for (number, offerings) in self.groups().into_iter().enumerate() {
            let left = count.saturating_sub(u32::try_from(whole.made.len()).unwrap_or(u32::MAX));
            if left == 0 {
                break;
            }
            let token = token(self.key, number);
            let outcome = if self.in_fleet() {
                self.fleet(&offerings, left, &token).await?
            } else {
                self.run(&offerings, &token).await?
            };
            whole.made.extend(outcome.made);
            whole.refused.extend(outcome.refused);
            whole.quotas.extend(outcome.quotas);
            if outcome.is_earlier {
                break;
            }
        }
        self.conclude(whole, count)
    }

    fn conclude(&self, whole: Outcome, count: u32) -> Result<CreatedMany, Error> {
        let Outcome { mut made, refused, quotas, is_earlier: _ } = whole;
        made.sort_by(|a, b| a.id.cmp(&b.id));
        made.dedup_by(|a, b| a.id == b.id);
        let now = Instant::now();
        made.iter().for_each(|one| self.aws.recent.made(&one.id, self.key, &self.request.name, now));
        let complete = made.len() >= count as usize;
        let rest = || {
            if let Some(text) = quotas.first().filter(|_| quotas.len() == refused.len()) {
                return Error::Quota { text: format!("{}: {text}", self.what()) };
            }
            let code = refused.first().map_or("InsufficientInstanceCapacity", |(_, code)| code);
            let remedy = REFUSALS.remedy("CreateFleet", code, "", 400);
            match self.aws.planner.capacity_error(&self.request.name, &refused) {
                Error::Capacity { offering, rejected, text } => {
                    Error::Capacity { offering, rejected, text: format!("{text}; {remedy}") }
                }
                other => other,
            }
        };
        match made.is_empty() {
            true => Err(rest()),
            false => Ok(CreatedMany { rest: (!complete).then(rest), made }),
        }
    }

    /// Returns whether CreateFleet is used. A fleet supports one NIC per VM, and no dedicated hosts.
    fn in_fleet(&self) -> bool {
        self.aws.config.launch == crate::config::AwsLaunchCall::Fleet && !self.request.second_nic
    }

    /// Returns the offerings of each call. A fleet is on one market; spot comes first where both are allowed.
    fn groups(&self) -> Vec<Vec<Offering>> {
        if !self.in_fleet() {
            return self.offerings.iter().map(|one| vec![one.clone()]).collect();
        }
        let of =
            |market| self.offerings.iter().filter(|one| one.market == market).cloned().collect::<Vec<_>>();
        [of(Market::Spot), of(Market::OnDemand)].into_iter().filter(|group| !group.is_empty()).collect()
    }

    fn shape(&self) -> Option<AwsVmSpec> {
        let config = &self.aws.config;
        let image = self.facts.image.clone().or_else(|| self.image.clone())?;
        let public_ip = config.use_public_ip || self.request.public_ip;
        let sev_snp = config.confidential || self.request.confidential.is_some();
        Some(AwsVmSpec::new(config, image, &self.facts.security_groups, public_ip, sev_snp))
    }

    fn tags(&self) -> Result<BTreeMap<String, String>, Error> {
        ALPHABET.marks(self.request, self.key, &self.aws.owner, &self.aws.config.tags)
    }

    fn what(&self) -> String {
        format!("create of {}", self.request.name)
    }

    async fn fleet(&self, offerings: &[Offering], count: u32, token: &str) -> Result<Outcome, Error> {
        let mut is_new_template = false;
        let tags = tag_specifications(&self.tags()?);
        loop {
            let template = self.aws.template(self.ec2, self.shape().as_ref(), self.until).await?;
            let ask = self
                .fleet_request(&template, offerings, count, token)
                .set_tag_specifications(Some(tags.clone()));
            let answer = self
                .ec2
                .call("CreateFleet", self.key.as_str(), &self.what(), self.until, || ask.clone().send())
                .await;
            let lacks_template = match &answer {
                Err(failure) => is_no_template(failure.code()),
                Ok(answer) => {
                    let codes = answer.errors().iter().map(|error| error.error_code().unwrap_or_default());
                    codes.into_iter().any(is_no_template)
                }
            };
            if lacks_template && self.is_our_template() && !is_new_template {
                // The template was removed since: it is made again, once.
                self.aws.templates.lock().await.clear();
                is_new_template = true;
                continue;
            }
            return match answer {
                Err(failure) => self.not_done(failure, offerings).await,
                Ok(answer) => self.fleet_outcome(answer, offerings).await,
            };
        }
    }

    /// Builds the call for up to `count` VMs of these offerings, which are all on one market.
    fn fleet_request(
        &self,
        template: &str,
        offerings: &[Offering],
        count: u32,
        token: &str,
    ) -> CreateFleetFluentBuilder {
        let entries = (0..).zip(offerings).map(|(place, one)| self.entry(place, one)).collect();
        let config = FleetLaunchTemplateConfigRequest::builder()
            .launch_template_specification(self.specification(template))
            .set_overrides(Some(entries));
        let spot = is_spot(offerings);
        let market = if spot { DefaultTargetCapacityType::Spot } else { DefaultTargetCapacityType::OnDemand };
        let capacity = TargetCapacitySpecificationRequest::builder()
            .total_target_capacity(i32::try_from(count).unwrap_or(i32::MAX))
            .default_target_capacity_type(market);
        let ask = self
            .ec2
            .client
            .create_fleet()
            .r#type(FleetType::Instant)
            .client_token(token)
            .launch_template_configs(config.build())
            .target_capacity_specification(capacity.build());
        if spot {
            let strategy = SpotAllocationStrategy::PriceCapacityOptimized;
            return ask.spot_options(SpotOptionsRequest::builder().allocation_strategy(strategy).build());
        }
        // The planner's order follows the administrator's prices; EC2 knows only its list prices.
        let strategy = match self.aws.config.has_prices(Market::OnDemand) {
            true => FleetOnDemandAllocationStrategy::Prioritized,
            false => FleetOnDemandAllocationStrategy::LowestPrice,
        };
        ask.on_demand_options(OnDemandOptionsRequest::builder().allocation_strategy(strategy).build())
    }

    /// Reads the answer to a fleet call: the VMs that it made, and the offerings that it did not get.
    async fn fleet_outcome(
        &self,
        answer: CreateFleetOutput,
        offerings: &[Offering],
    ) -> Result<Outcome, Error> {
        let mut outcome = Outcome::default();
        for one in answer.instances.unwrap_or_default() {
            let machine = one.instance_type.map(|machine| machine.as_str().to_owned());
            let place = one.launch_template_and_overrides.and_then(|launched| launched.overrides);
            let subnet = place.as_ref().and_then(|place| place.subnet_id());
            let offering = offerings.iter().find(|one| one.subnet.as_deref() == subnet);
            let chosen = Chosen {
                instance_type: machine.clone(),
                zone: offering.map(|one| one.zone.clone()),
                market: offerings.first().map(|one| one.market),
                image: self.image_id(),
                price: None,
            };
            for id in one.instance_ids.unwrap_or_default() {
                if is_spot(offerings) {
                    self.aws.spots.made(&id, machine.as_deref());
                }
                outcome.made.push(self.named(id, Vec::new(), chosen.clone())?);
            }
        }
        for error in answer.errors.unwrap_or_default() {
            self.note(&error, offerings, &mut outcome)?;
        }
        if outcome.made.is_empty() && outcome.refused.is_empty() {
            // EC2 promises an answer to a repeated call, but not one that lists all VMs.
            return self.earlier().await;
        }
        Ok(outcome)
    }

    fn is_our_template(&self) -> bool {
        self.aws.config.launch_template.is_none()
    }

    fn specification(&self, template: &str) -> FleetLaunchTemplateSpecificationRequest {
        let user_data = STANDARD.encode(&self.request.user_data);
        specification(template, self.is_our_template())
            .launch_template_specification_user_data(user_data)
            .build()
    }

    /// Builds one offering of a fleet, with its deviations from the template.
    fn entry(&self, place: u32, offering: &Offering) -> FleetLaunchTemplateOverridesRequest {
        let has_order = offering.market == Market::OnDemand && self.aws.config.has_prices(Market::OnDemand);
        let mut one = FleetLaunchTemplateOverridesRequest::builder()
            .instance_type(offering.machine.as_str().into())
            .set_priority(has_order.then(|| f64::from(place)))
            .set_subnet_id(offering.subnet.clone());
        if let Some(image) = &self.image {
            one = one.image_id(&image.id);
            if let Some(root) = self.shape().and_then(|shape| shape.fleet_root(image)) {
                one = one.block_device_mappings(root);
            }
        }
        one.build()
    }

    /// Records one error of a fleet, which concerns one offering or all of them.
    fn note(
        &self,
        error: &CreateFleetError,
        offerings: &[Offering],
        outcome: &mut Outcome,
    ) -> Result<(), Error> {
        let code = error.error_code.as_deref().unwrap_or("UnknownError");
        let message = error.error_message.as_deref().unwrap_or_default();
        let text = REFUSALS.words("CreateFleet", code, message, 400);
        let planner = &self.aws.planner;
        if code == "AuthFailure.ServiceLinkedRoleCreationNotPermitted" {
            planner.exhausted(Scope::Market(Market::Spot), code);
            let spot = offerings.iter().filter(|one| one.market == Market::Spot);
            outcome.refused.extend(spot.map(|one| (one.clone(), code.to_owned())));
            return Ok(());
        }
        let meaning = REFUSALS.meaning(code, message, 400);
        if !matches!(meaning, Meaning::Capacity | Meaning::Quota) {
            if !outcome.made.is_empty() {
                tracing::warn!(code, "a fleet made VMs, but not all: {text}");
                return Ok(());
            }
            let text = format!("{}: EC2 refused CreateFleet: {text}", self.what());
            return Err(meaning.error("", None, text));
        }
        let named = error.launch_template_and_overrides.as_ref().and_then(|one| one.overrides.as_ref());
        let machine = named.and_then(|one| one.instance_type.as_ref()).map(|machine| machine.as_str());
        let subnet = named.and_then(|one| one.subnet_id.as_deref());
        for one in offerings {
            let is_meant = machine.is_none_or(|machine| machine == one.machine)
                && subnet.is_none_or(|subnet| Some(subnet) == one.subnet.as_deref());
            if is_meant {
                self.exhausted(one, code);
                if meaning == Meaning::Quota {
                    outcome.quotas.push(text.clone());
                }
                outcome.refused.push((one.clone(), code.to_owned()));
            }
        }
        Ok(())
    }

    fn exhausted(&self, offering: &Offering, code: &str) {
        match (&offering.subnet, code) {
            (Some(subnet), "InsufficientFreeAddressesInSubnet") => {
                self.aws.planner.exhausted(Scope::Subnet(subnet.clone()), code);
            }
            // The next pods get the remedy, too, although EC2 is not asked for them.
            _ if REFUSALS.meaning(code, "", 400) == Meaning::Quota => {
                let remedy = REFUSALS.remedy("CreateFleet", code, "", 400);
                self.aws.planner.exhausted(offering, &format!("{code}: {remedy}"));
            }
            _ => self.aws.planner.exhausted(offering, code),
        }
    }

    /// Handles a call that EC2 refused as a whole or did not answer.
    async fn not_done(&self, failure: AwsFailure, offerings: &[Offering]) -> Result<Outcome, Error> {
        let code = failure.code().to_owned();
        let own = format!("{}: ", self.what());
        let is_quota = matches!(failure.error, Error::Quota { .. });
        match failure.error {
            Error::KeyReused { .. } => self.earlier().await,
            Error::Capacity { text, .. } | Error::Quota { text } => {
                // The caller adds the name of the create once, before all texts.
                let text = text.strip_prefix(&own).unwrap_or(&text);
                let mut outcome = Outcome::default();
                for one in offerings {
                    self.exhausted(one, &code);
                    outcome.refused.push((one.clone(), code.clone()));
                    if is_quota {
                        outcome.quotas.push(text.to_owned());
                    }
                }
                Ok(outcome)
            }
            error => {
                if code.starts_with("InvalidAMIID") || code.starts_with("InvalidSubnet") {
                    // The cached facts may be out of date; the next create loads them again.
                    self.aws.facts.forget().await;
                }
                Err(error)
            }
        }
    }

    /// Returns the VMs that an earlier call with this key made.
    async fn earlier(&self) -> Result<Outcome, Error> {
        let what = self.what();
        let digest = self.request.digest();
        let end = (Instant::now() + UNSEEN).min(self.until);
        let earlier = LOOKS.until(Some(end), || async {
            let seen = vms::by_key(self.ec2, self.key, &what, self.until).await?;
            if let Some(other) = seen.iter().find(|seen| seen.marks.digest.as_ref() != Some(&digest)) {
                return Err(Error::key_reused(format!(
                    "{what}: its key was used before with another request, which made {}; this is a bug in \
                     Peerpod, report it",
                    other.id
                )));
            }
            let made = seen.iter().filter_map(|seen| self.created(seen)).collect();
            Ok((!seen.is_empty()).then(|| Outcome { made, is_earlier: true, ..Outcome::default() }))
        });
        earlier.await?.ok_or_else(|| {
            let text = format!(
                "{what}: an earlier call with its key named other offerings and made no VM that EC2 shows; \
                 another attempt is needed"
            );
            Error::capacity("an earlier placement", text)
        })
    }

    async fn run(&self, offerings: &[Offering], token: &str) -> Result<Outcome, Error> {
        let (Some(shape), Some(offering)) = (self.shape(), offerings.first()) else {
            return Err(Error::invalid(format!(
                "{}: there is no image; set provider.aws.image-id",
                self.what()
            )));
        };
        let subnet = offering.subnet.as_deref().unwrap_or_default();
        let second = if self.request.second_nic { Some(self.second_subnet(offering)?) } else { None };
        let image = self.image.as_ref().unwrap_or(&shape.image);
        let spot = InstanceMarketOptionsRequest::builder().market_type(MarketType::Spot).build();
        let ask = self
            .ec2
            .client
            .run_instances()
            .client_token(token)
            .min_count(1)
            .max_count(1)
            .image_id(&image.id)
            .instance_type(offering.machine.as_str().into())
            .user_data(STANDARD.encode(&self.request.user_data))
            .set_network_interfaces(Some(shape.run_nics(subnet, second.as_deref())))
            .set_key_name(shape.key_name.clone())
            .set_iam_instance_profile(shape.run_profile())
            .set_cpu_options(shape.run_cpu())
            .set_placement(shape.run_placement())
            .metadata_options(AwsVmSpec::run_metadata())
            .instance_initiated_shutdown_behavior(ShutdownBehavior::Terminate)
            .set_block_device_mappings(shape.run_root(image).map(|root| vec![root]))
            .set_instance_market_options((offering.market == Market::Spot).then_some(spot))
            .set_tag_specifications(Some(tag_specifications(&self.tags()?)));
        let answer = self
            .ec2
            .call("RunInstances", self.key.as_str(), &self.what(), self.until, || ask.clone().send())
            .await;
        let answer = match answer {
            Err(failure) => return self.not_done(failure, std::slice::from_ref(offering)).await,
            Ok(answer) => answer,
        };
        let mut outcome = Outcome::default();
        for vm in answer.instances.unwrap_or_default() {
            let Some(id) = vm.instance_id else { continue };
            if offering.market == Market::Spot {
                self.aws.spots.made(&id, Some(&offering.machine));
            }
            let private = vm.private_ip_address.and_then(|text| text.parse().ok());
            let addresses = private.filter(|_| !self.aws.config.use_public_ip).into_iter().collect();
            outcome.made.push(self.named(id, addresses, offering.chosen(self.image_id()))?);
        }
        if outcome.made.is_empty() {
            return self.earlier().await;
        }
        Ok(outcome)
    }

    fn second_subnet(&self, offering: &Offering) -> Result<String, Error> {
        let fits = self.aws.second_subnets().into_iter().find(|subnet| subnet.zone == offering.zone);
        fits.map(|subnet| subnet.id).ok_or_else(|| {
            Error::invalid(format!(
                "{}: there is no subnet for its second NIC in {}; add one to provider.aws.second-subnet-ids",
                self.what(),
                offering.zone
            ))
        })
    }

    fn created(&self, seen: &AwsVm) -> Option<Created> {
        if seen.state == VmState::Deleted {
            return None;
        }
        let chosen = Chosen {
            instance_type: seen.machine.clone(),
            zone: seen.zone.clone(),
            market: Some(if seen.is_spot { Market::Spot } else { Market::OnDemand }),
            image: self.image_id(),
            price: None,
        };
        self.named(seen.id.clone(), seen.addresses(self.aws.config.use_public_ip), chosen).ok()
    }

    fn named(&self, id: String, addresses: Vec<IpAddr>, chosen: Chosen) -> Result<Created, Error> {
        let id = InstanceId::new(id).map_err(|error| Error::transient(format!("EC2's answer: {error}")))?;
        Ok(Created { id, addresses, chosen: self.aws.planner.priced(chosen), disks: Vec::new() })
    }

    fn image_id(&self) -> Option<String> {
        self.image.as_ref().or(self.facts.image.as_ref()).map(|image| image.id.clone())
    }
}

fn is_spot(offerings: &[Offering]) -> bool {
    offerings.first().is_some_and(|one| one.market == Market::Spot)
}

/// Names a launch template, by id or name, and its version. The provider's own templates have one version.
pub(crate) fn specification(template: &str, is_ours: bool) -> FleetLaunchTemplateSpecificationRequestBuilder {
    let one = FleetLaunchTemplateSpecificationRequest::builder();
    let one = match template.starts_with("lt-") {
        true => one.launch_template_id(template),
        false => one.launch_template_name(template),
    };
    one.version(if is_ours { "1" } else { "$Default" })
}

fn is_no_template(code: &str) -> bool {
    code.starts_with("InvalidLaunchTemplateName.NotFound")
        || code.starts_with("InvalidLaunchTemplateId.NotFound")
}

/// Returns the client token of a call: the key, or the key with a number for the calls that follow a lack of capacity.
/// EC2 accepts 64 characters.
fn token(key: &IdempotencyKey, number: usize) -> String {
    match number {
        0 => key.as_str().to_owned(),
        // The first 60 of a key's 64 hex digits hold 240 bits.
        _ => format!("{}-{number}", key.as_str().get(..60).unwrap_or(key.as_str())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_call_of_a_key_has_its_own_valid_token() {
        let keys = [IdempotencyKey::derive("c", "s", 0), IdempotencyKey::parse("k").unwrap()];
        let mut tokens = std::collections::HashSet::new();
        for key in &keys {
            for number in [0, 1, 2, 119] {
                let token = token(key, number);
                assert!(token.len() <= 64 && token.is_ascii(), "{token}");
                assert!(tokens.insert(token));
            }
        }
        assert_eq!(token(&keys[0], 0), keys[0].as_str());
    }
}
