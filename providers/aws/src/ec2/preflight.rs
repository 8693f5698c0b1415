//! Checks that EC2 permits the calls of the provider, and deletes the NICs that an interrupted launch left. Returns all
//! failures in one error.

use aws_sdk_ec2::types::{
    FleetLaunchTemplateConfigRequest, FleetLaunchTemplateOverridesRequest, FleetType,
    TargetCapacitySpecificationRequest,
};
use peerpod_provider_api::{Error, Preflight};
use peerpod_provider_cloud::refusal::together;
use peerpod_provider_cloud::until;

use crate::config::{AwsConfig, AwsLaunchCall};
use crate::ec2::cache::DRY_RUN;
use crate::ec2::create::specification;
use crate::ec2::facts::AwsFacts;
use crate::ec2::provider::AwsConnection;
use crate::ec2::shape::AwsVmSpec;
use crate::ec2::{Aws, quota, remove, vms};

/// Subnets with fewer free addresses cause a warning.
const FEW: i32 = 16;

pub(crate) async fn run(aws: &Aws) -> Result<Preflight, Error> {
    let connected = aws.ec2().await?;
    let quotas = async { Ok(quota::facts(&connected.ec2, &aws.config).await) };
    // A failed check does not wait for the quotas.
    let (mut found, quotas) = tokio::try_join!(check(aws, connected), quotas)?;
    found.facts.extend(quotas);
    Ok(found)
}

async fn check(aws: &Aws, connected: &AwsConnection) -> Result<Preflight, Error> {
    let facts = aws.facts(true).await;
    let listed = vms::all_of(&connected.ec2, &aws.owner, until()).await;
    let launch = match &facts {
        Ok(facts) => may_launch(aws, connected, facts).await,
        Err(_) => Ok(()),
    };
    let strays = remove::clean(&connected.ec2, &aws.owner).await;
    let mut errors = Vec::new();
    errors.extend(facts.as_ref().err().cloned());
    errors.extend(listed.as_ref().err().cloned());
    errors.extend(launch.err());
    let (facts, listed) = match (facts, listed) {
        (Ok(facts), Ok(listed)) if errors.is_empty() => (facts, listed),
        _ => return Err(together(errors)),
    };
    // VMs of an earlier process are watched from now on, too.
    listed.iter().for_each(|vm| aws.spots.seen(vm));
    let mut found = Preflight { facts: said(aws, connected, &facts), ..Preflight::default() };
    found.facts.push(format!("{} VMs of this node", listed.len()));
    if leaves_fleet_out(&aws.config) {
        let text = "ec2:CreateFleet was not asked for: it needs a launch template, and a check makes none";
        found.facts.push(text.to_owned());
    }
    match strays {
        Ok(0) => {}
        Ok(count) => found.facts.push(format!("{count} NICs with our tags were unattached and were deleted")),
        // A failed cleanup is only a warning: no other function depends on it.
        Err(error) => found.warnings.push(format!("unattached NICs of failed launches stay: {error}")),
    }
    if let Some(error) = &facts.no_prices {
        found.warnings.push(format!("cannot find the cheapest spot offering: {error}"));
    }
    for subnet in facts.subnets.iter().filter(|subnet| subnet.free < FEW) {
        found.warnings.push(format!(
            "subnet {} in {} has {} free addresses; give larger or more provider.aws.subnet-ids",
            subnet.id, subnet.zone, subnet.free
        ));
    }
    if aws.planner.catalogue().types.iter().all(|one| one.confidential.is_empty()) && aws.config.confidential
    {
        found.warnings.push(format!(
            "none of {} can be confidential by SEV-SNP, so pods get no VM; add such a type, or set \
             provider.aws.disable-cvm to true",
            aws.config.instance_types.join(", ")
        ));
    }
    Ok(found)
}

fn said(aws: &Aws, connected: &AwsConnection, facts: &AwsFacts) -> Vec<String> {
    let zones: Vec<String> = facts.subnets.iter().map(|one| format!("{} ({})", one.id, one.zone)).collect();
    let image = facts.image.as_ref().map_or_else(
        || "the launch template's image".to_owned(),
        |image| format!("image {} {} for {}", image.id, image.name, image.arch),
    );
    vec![
        format!("account {} in {}", facts.account, connected.ec2.region),
        format!("subnets {}", zones.join(", ")),
        image,
        format!("types {}", aws.config.instance_types.join(", ")),
        if aws.config.confidential { "VMs are confidential by SEV-SNP" } else { "VMs are not confidential" }
            .to_owned(),
    ]
}

/// Whether no dry run of a fleet is possible: it needs a launch template, and a dry preflight makes none.
fn leaves_fleet_out(config: &AwsConfig) -> bool {
    config.dry && config.launch == AwsLaunchCall::Fleet && config.launch_template.is_none()
}

/// Makes a dry-run launch, which EC2 checks but does not execute.
async fn may_launch(aws: &Aws, connected: &AwsConnection, facts: &AwsFacts) -> Result<(), Error> {
    let ec2 = &connected.ec2;
    let config = &aws.config;
    let what = "check that VMs may be made";
    let shape = facts.image.clone().map(|image| {
        AwsVmSpec::new(config, image, &facts.security_groups, config.use_public_ip, config.confidential)
    });
    let subnet = facts.subnets.first().map(|subnet| subnet.id.clone());
    let template = match config.launch {
        AwsLaunchCall::Fleet => Some(aws.template(ec2, shape.as_ref(), until()).await?),
        AwsLaunchCall::Run => None,
    };
    let answer = if let Some(template) = template.filter(|_| !leaves_fleet_out(config)) {
        let specification = specification(&template, config.launch_template.is_none());
        let entry = FleetLaunchTemplateOverridesRequest::builder()
            .instance_type(config.instance_type.as_str().into())
            .set_subnet_id(subnet);
        let one = FleetLaunchTemplateConfigRequest::builder()
            .launch_template_specification(specification.build())
            .overrides(entry.build());
        let capacity = TargetCapacitySpecificationRequest::builder().total_target_capacity(1);
        let ask = ec2
            .client
            .create_fleet()
            .dry_run(true)
            .r#type(FleetType::Instant)
            .launch_template_configs(one.build())
            .target_capacity_specification(capacity.build());
        ec2.call("CreateFleet", "preflight", what, until(), || ask.clone().send()).await.map(drop)
    } else {
        let image = shape.as_ref().map(|shape| shape.image.id.clone());
        let ask = ec2
            .client
            .run_instances()
            .dry_run(true)
            .min_count(1)
            .max_count(1)
            .set_image_id(image)
            .instance_type(config.instance_type.as_str().into())
            .set_subnet_id(subnet);
        ec2.call("RunInstances", "preflight", what, until(), || ask.clone().send()).await.map(drop)
    };
    match answer {
        Err(failure) if failure.code() == DRY_RUN => Ok(()),
        Err(failure) => Err(failure.into()),
        // EC2 should not accept a dry run like this; if it does, the launch is permitted.
        Ok(()) => Ok(()),
    }
}
