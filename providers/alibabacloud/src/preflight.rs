//! Checks that Alibaba Cloud permits the calls of the provider, and that the settings fit each other. Returns all failures
//! in one error. May call RunInstances as a dry run, and the calls of facts and lists.

use peerpod_provider_api::{CreateRequest, Error, IdempotencyKey, Market, Preflight};
use peerpod_provider_cloud::refusal::together;
use peerpod_provider_cloud::{ApiCall, Offering, until};

use crate::Alibaba;
use crate::facts::AlibabaCloudFacts;
use crate::parameters::AlibabaCloudVmSpec;
use crate::refusal::DRY_RUN;
use crate::vms;

/// vSwitches with fewer free addresses cause a warning.
const FEW: u64 = 16;

pub(crate) async fn run(alibaba: &Alibaba) -> Result<Preflight, Error> {
    let ecs = &alibaba.connected()?.ecs;
    // Without a key all calls would fail for one reason.
    ecs.rest.log_in().await.map_err(|error| error.during("log in to Alibaba Cloud"))?;
    let facts = alibaba.facts(true).await;
    let listed = vms::all_of(ecs, &alibaba.owner, until()).await;
    let launch = match &facts {
        Ok(facts) => may_launch(alibaba, facts).await,
        Err(_) => Ok(Vec::new()),
    };
    let errors = [facts.as_ref().err(), listed.as_ref().err(), launch.as_ref().err()];
    let errors: Vec<Error> = errors.into_iter().flatten().cloned().collect();
    if !errors.is_empty() {
        return Err(together(errors));
    }
    let (facts, listed, warnings) = (facts?, listed?, launch?);
    // VMs of an earlier process are watched from now on, too.
    listed.iter().for_each(|vm| alibaba.spots.seen(vm));
    let mut found = Preflight { facts: said(alibaba, &facts), warnings, ..Preflight::default() };
    found.facts.push(format!("{} VMs of this node", listed.len()));
    for one in facts.vswitches.iter().filter(|one| one.free < FEW) {
        found.warnings.push(format!(
            "vSwitch {} in {} has {} free addresses; give larger or more provider.alibabacloud.vswitch-ids",
            one.id, one.zone, one.free
        ));
    }
    if !facts.image.is_uefi {
        found.warnings.push(format!(
            "the image {} does not start by UEFI, as an image of this project does; import it again with \
             BootMode=UEFI",
            facts.image.id
        ));
    }
    if alibaba.config.confidential && facts.catalogue.types.iter().all(|one| one.confidential.is_empty()) {
        found.warnings.push(format!(
            "none of {} can be confidential by TDX, so pods get no VM; add such a type, or set \
             provider.alibabacloud.disable-cvm to true",
            alibaba.config.instance_types.join(", ")
        ));
    }
    Ok(found)
}

fn said(alibaba: &Alibaba, facts: &AlibabaCloudFacts) -> Vec<String> {
    let config = &alibaba.config;
    let vswitches: Vec<String> =
        facts.vswitches.iter().map(|one| format!("{} ({})", one.id, one.zone)).collect();
    vec![
        format!("region {}", config.region),
        format!("vSwitches {}", vswitches.join(", ")),
        format!("image {}", facts.image.id),
        format!("types {}", config.instance_types.join(", ")),
        if config.confidential { "VMs are confidential by TDX" } else { "VMs are not confidential" }
            .to_owned(),
    ]
}

/// Makes a dry run of a launch, which the cloud checks but does not execute. A lack of stock is a warning.
async fn may_launch(alibaba: &Alibaba, facts: &AlibabaCloudFacts) -> Result<Vec<String>, Error> {
    let what = "check that VMs may be made";
    let Some(place) = facts.vswitches.first() else { return Ok(Vec::new()) };
    let offering = Offering {
        machine: alibaba.config.instance_type.clone(),
        zone: place.zone.clone(),
        subnet: Some(place.id.clone()),
        market: alibaba.config.markets.first().copied().unwrap_or(Market::OnDemand),
    };
    let request = CreateRequest { name: "preflight".to_owned(), ..CreateRequest::default() };
    let key = IdempotencyKey::derive(&alibaba.owner.cluster_id, "preflight", 0);
    let shape = AlibabaCloudVmSpec {
        config: &alibaba.config,
        owner: &alibaba.owner,
        request: &request,
        key: &key,
        offering: &offering,
        image: &facts.image,
        second: None,
    };
    // The token of an earlier preflight would be refused with other settings.
    let parameters = shape.parameters(1)?.without("ClientToken").with("DryRun", "true");
    let call = ApiCall::new("RunInstances", "preflight", what);
    match alibaba.connected()?.ecs.post(call, parameters).await {
        Err(failure) if failure.code() == DRY_RUN => Ok(Vec::new()),
        Err(failure) if matches!(failure.error, Error::Capacity { .. } | Error::Quota { .. }) => {
            Ok(vec![failure.error.to_string()])
        }
        Err(failure) => Err(failure.into()),
        // The cloud should not accept a dry run like this; if it does, the launch is permitted.
        Ok(_) => Ok(Vec::new()),
    }
}
