//! Checks that Google Cloud permits the calls of the provider, and that the settings fit each other. Returns all
//! failures in one error. May call `get` of regions, and the calls of facts and lists.
//!
//! No call shows whether an insert is allowed: Compute Engine has no dry run.

use peerpod_provider_api::{Error, Preflight};
use peerpod_provider_cloud::refusal::together;
use peerpod_provider_cloud::settings::UNSIGNED;
use peerpod_provider_cloud::{ApiCall, until};
use peerpod_provider_rest::read;
use serde_json::Value;

use crate::Gcp;
use crate::body::word;
use crate::facts::GcpFacts;
use crate::vms;

/// Quotas of a region that a VM needs.
const QUOTAS: [&str; 6] =
    ["CPUS", "N2D_CPUS", "C3_CPUS", "INSTANCES", "PREEMPTIBLE_CPUS", "IN_USE_ADDRESSES"];
/// Part of a quota that is in use when a warning names it, in percent.
const NEARLY: u64 = 90;

pub(crate) async fn run(gcp: &Gcp) -> Result<Preflight, Error> {
    let compute = &gcp.connected()?.compute;
    // Without a token all calls would fail for one reason.
    compute.rest.log_in().await.map_err(|error| error.during("log in to Google Cloud"))?;
    let facts = gcp.facts(true).await;
    let listed = vms::all_of(compute, &gcp.owner, gcp.config.region(), until()).await;
    let quotas = quotas(gcp).await;
    let errors = [facts.as_ref().err(), listed.as_ref().err(), quotas.as_ref().err()];
    let errors: Vec<Error> = errors.into_iter().flatten().cloned().collect();
    if !errors.is_empty() {
        return Err(together(errors));
    }
    let (facts, listed, quotas) = (facts?, listed?, quotas?);
    let mut found = Preflight { facts: said(gcp, &facts), ..Preflight::default() };
    found.facts.push(format!("{} VMs of this node", listed.len()));
    for (name, usage, limit) in quotas {
        found.facts.push(format!("quota {name}: {usage} of {limit} in use"));
        if usage.saturating_mul(100) >= limit.saturating_mul(NEARLY) && limit > 0 {
            found.warnings.push(format!(
                "the quota {name} is nearly used up ({usage} of {limit}); ask for a higher one"
            ));
        }
    }
    if gcp.config.secure_boot {
        found.warnings.push(UNSIGNED.to_owned());
    }
    let confidential = gcp.config.confidential;
    let fits = |one: &&peerpod_provider_cloud::MachineType| {
        confidential.is_none_or(|wanted| one.confidential.contains(&wanted))
    };
    if facts.catalogue.types.iter().filter(fits).count() == 0 {
        found.warnings.push(format!(
            "none of {} can be confidential by {}, so pods get no VM; add such a type, or set \
             provider.gcp.confidential to none",
            gcp.config.instance_types.join(", "),
            confidential.map_or("any technology", |one| one.word())
        ));
    }
    let feature = confidential.map(|one| format!("{}_CAPABLE", word(one)));
    if let Some(feature) = feature.filter(|feature| !facts.image.can(feature)) {
        found.warnings.push(format!(
            "the image {} lacks the feature {feature}, so Google refuses its VMs; make it again with \
             --guest-os-features={feature}",
            facts.image.path
        ));
    }
    Ok(found)
}

fn said(gcp: &Gcp, facts: &GcpFacts) -> Vec<String> {
    let config = &gcp.config;
    vec![
        format!("project {} in {}", config.project, config.zones.join(", ")),
        facts.networks.join(", "),
        format!("image {}", facts.image.path),
        format!("types {}", config.instance_types.join(", ")),
        match config.confidential {
            Some(technology) => format!("VMs are confidential by {technology}"),
            None => "VMs are not confidential".to_owned(),
        },
    ]
}

/// Returns name, usage and limit of the quotas that matter.
async fn quotas(gcp: &Gcp) -> Result<Vec<(String, u64, u64)>, Error> {
    let compute = &gcp.connected()?.compute;
    let Some(region) = gcp.config.region() else { return Ok(Vec::new()) };
    let what = format!("look at the region {region}");
    let path = compute.own(&format!("regions/{region}"));
    let body = compute.get(ApiCall::new("regions.get", "facts", &what), &path, &[]).await?;
    let whole = |value: &Value, pointer: &str| {
        let number = value.pointer(pointer).and_then(Value::as_f64).filter(|number| *number >= 0.0)?;
        // As a text without a fraction: quotas are floating-point numbers in this API.
        format!("{number:.0}").parse::<u64>().ok()
    };
    let quotas = read::list(&body, "/quotas").iter().filter_map(|quota| {
        let name = read::text(quota, "/metric").filter(|name| QUOTAS.contains(name))?;
        Some((name.to_owned(), whole(quota, "/usage")?, whole(quota, "/limit")?))
    });
    Ok(quotas.collect())
}
