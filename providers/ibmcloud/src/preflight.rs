//! Checks that IBM Cloud permits the calls of the provider, and that the settings fit each other. Returns all failures in
//! one error. May call `get_security_group`, and the calls of facts and lists.
//!
//! No call shows whether a create is allowed: the VPC API has no dry run.

use peerpod_provider_api::{Error, Preflight};
use peerpod_provider_cloud::ApiCall;
use peerpod_provider_cloud::refusal::together;
use peerpod_provider_cloud::settings::UNSIGNED;
use peerpod_provider_cloud::until;

use crate::IbmCloud;
use crate::client::Vpc;
use crate::facts::IbmCloudFacts;
use crate::{remove, vms};

/// Owner of these calls, for the scheduler.
const OWNER: &str = "preflight";

pub(crate) async fn run(ibm: &IbmCloud) -> Result<Preflight, Error> {
    let vpc = ibm.vpc()?;
    // Without a token every other check would fail by the same error.
    vpc.log_in().await?;
    let (facts, listed, groups) = tokio::join!(
        ibm.facts(true),
        vms::all_of(vpc, &ibm.config.vpc, &ibm.owner, until()),
        security_groups(vpc, &ibm.config.security_groups),
    );
    let errors = [facts.as_ref().err(), listed.as_ref().err(), groups.as_ref().err()];
    let errors: Vec<Error> = errors.into_iter().flatten().cloned().collect();
    let (facts, listed) = match (facts, listed) {
        (Ok(facts), Ok(listed)) if errors.is_empty() => (facts, listed),
        _ => return Err(together(errors)),
    };
    let mut found = Preflight { facts: said(ibm, &facts), ..Preflight::default() };
    found.facts.push(format!("{} VMs of this node", listed.len()));
    match remove::clean(&ibm.strays, vpc, &ibm.owner).await {
        Ok(0) => {}
        Ok(count) => {
            found.facts.push(format!("{count} boot volumes with our tags had no VM and were deleted"))
        }
        // A failed cleanup is only a warning: no other function depends on it.
        Err(error) => found.warnings.push(format!("boot volumes of failed creates stay: {error}")),
    }
    if ibm.config.secure_boot {
        found.warnings.push(UNSIGNED.to_owned());
    }
    found.warnings.extend(confidential(ibm, &facts));
    Ok(found)
}

fn said(ibm: &IbmCloud, facts: &IbmCloudFacts) -> Vec<String> {
    let config = &ibm.config;
    let images: Vec<String> = facts.images.iter().map(|(arch, id)| format!("{id} for {arch}")).collect();
    vec![
        format!("VPC {} in {}", config.vpc, config.zones.join(", ")),
        format!("image {}", images.join(", ")),
        format!("types {}", config.instance_types.join(", ")),
        match config.confidential {
            Some(technology) => format!("VMs are confidential by {technology}"),
            None => "VMs are not confidential".to_owned(),
        },
    ]
}

/// Returns a warning if no type can be confidential.
fn confidential(ibm: &IbmCloud, facts: &IbmCloudFacts) -> Option<String> {
    let wanted = ibm.config.confidential?;
    let fits = facts.catalogue.types.iter().any(|one| one.confidential.contains(&wanted));
    (!fits).then(|| {
        format!(
            "none of {} can be confidential by {wanted}, so pods get no VM; add such a type, like bx3dc-2x10, or set \
             provider.ibmcloud.confidential to none",
            ibm.config.instance_types.join(", ")
        )
    })
}

async fn security_groups(vpc: &Vpc, wanted: &[String]) -> Result<(), Error> {
    let mut errors = Vec::new();
    for id in wanted {
        let what = format!("look at the security group {id}");
        let call = ApiCall::new("get_security_group", OWNER, &what);
        match vpc.find(call, &vpc.get(["security_groups", id])).await {
            Ok(Some(_)) => {}
            Ok(None) => errors.push(Error::invalid(format!(
                "{what}: there is none in the region; correct provider.ibmcloud.security-group-ids"
            ))),
            Err(failure) => errors.push(failure.error),
        }
    }
    if errors.is_empty() { Ok(()) } else { Err(together(errors)) }
}
