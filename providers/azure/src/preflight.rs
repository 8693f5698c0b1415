//! Checks that Azure permits the calls of the provider, and deletes the parts that an interrupted create left. Returns
//! all failures in one error.

use peerpod_provider_api::{Error, Preflight};
use peerpod_provider_cloud::ApiCall;
use peerpod_provider_cloud::refusal::together;
use peerpod_provider_cloud::settings::UNSIGNED;
use peerpod_provider_cloud::until;
use peerpod_provider_rest::read;
use serde_json::Value;

use crate::Azure;
use crate::client::{Arm, COMPUTE, NETWORK, RIGHTS};
use crate::facts::AzureFacts;
use crate::{remove, vms};

/// Owner of these calls, for the scheduler.
const OWNER: &str = "preflight";
/// Rights of a node (`role.json`), without those that linked resources need.
const RIGHTS_OF_A_NODE: &[&str] = &[
    "Microsoft.Compute/virtualMachines/read",
    "Microsoft.Compute/virtualMachines/write",
    "Microsoft.Compute/virtualMachines/delete",
    "Microsoft.Compute/virtualMachines/attachDetachDataDisks/action",
    "Microsoft.Compute/virtualMachines/retrieveBootDiagnosticsData/action",
    "Microsoft.Compute/disks/read",
    "Microsoft.Compute/disks/write",
    "Microsoft.Compute/disks/delete",
    "Microsoft.Network/networkInterfaces/read",
    "Microsoft.Network/networkInterfaces/write",
    "Microsoft.Network/networkInterfaces/delete",
    "Microsoft.Network/networkInterfaces/join/action",
];
/// Cores below which a quota causes a warning.
const FEW: u64 = 16;

pub(crate) async fn run(azure: &Azure) -> Result<Preflight, Error> {
    let arm = azure.arm()?;
    // Without a token every other check would fail by the same error.
    arm.rest().log_in().await?;
    let public = azure.config.use_public_ip;
    let (facts, listed, subnet, missing) = tokio::join!(
        azure.facts(true),
        vms::all_of(arm, &azure.owner, public, until()),
        subnet(arm, &azure.config.subnet),
        missing_rights(arm)
    );
    let strays = remove::clean(arm, &azure.owner).await;
    let errors = [facts.as_ref().err(), listed.as_ref().err(), subnet.as_ref().err()];
    let errors: Vec<Error> = errors.into_iter().flatten().cloned().collect();
    let (facts, listed) = match (facts, listed) {
        (Ok(facts), Ok(listed)) if errors.is_empty() => (facts, listed),
        _ => return Err(together(errors)),
    };
    let mut found = Preflight { facts: said(azure, &facts), ..Preflight::default() };
    found.facts.push(format!("{} VMs of this node", listed.len()));
    match missing {
        Ok(missing) if missing.is_empty() => {}
        Ok(missing) => found.warnings.push(format!(
            "the identity lacks {} in the resource group; give it the role of providers/azure/role.json",
            missing.join(", ")
        )),
        Err(error) => found.warnings.push(format!("cannot check the rights of the identity: {error}")),
    }
    match strays {
        Ok(0) => {}
        Ok(count) => found.facts.push(format!("{count} parts with our names had no VM and were deleted")),
        // A failed cleanup is only a warning: no other function depends on it.
        Err(error) => found.warnings.push(format!("parts of failed creates stay: {error}")),
    }
    match quotas(azure, arm, &facts).await {
        Ok(quotas) => note(&mut found, &quotas),
        Err(error) => found.warnings.push(format!("cannot look at the quotas: {error}")),
    }
    if azure.config.secure_boot {
        found.warnings.push(UNSIGNED.to_owned());
    }
    if !facts.image.is_specialized {
        found.warnings.push(format!(
            "the image {} is generalized: Azure waits for an agent that it may lack; publish it as specialized",
            facts.image.id.text()
        ));
    }
    Ok(found)
}

fn said(azure: &Azure, facts: &AzureFacts) -> Vec<String> {
    let config = &azure.config;
    let zones = match &config.zones[..] {
        [] => "no zones".to_owned(),
        zones => format!("zones {}", zones.join(", ")),
    };
    vec![
        format!("subscription {} in {}, {zones}", config.subscription, config.region),
        format!("resource group {}", config.group),
        format!("image {} for {}", facts.image.id.text(), facts.image.arch),
        format!("types {}", config.instance_types.join(", ")),
        if config.confidential { "VMs are confidential" } else { "VMs are not confidential" }.to_owned(),
    ]
}

async fn subnet(arm: &Arm, id: &str) -> Result<(), Error> {
    let what = "look at the subnet";
    match arm.call(ApiCall::new("Subnets_Get", OWNER, what), &arm.get(id, NETWORK)).await {
        Ok(_) => Ok(()),
        Err(failure) => Err(match failure.error {
            Error::NotFound { text } => Error::Invalid {
                text: format!("{text}; set provider.azure.subnet-id to a subnet that exists"),
            },
            other => other,
        }),
    }
}

/// Returns the rights that the identity lacks in the resource group.
async fn missing_rights(arm: &Arm) -> Result<Vec<&'static str>, Error> {
    let path = format!("{}/providers/Microsoft.Authorization/permissions", arm.group());
    let call = ApiCall::new("Permissions_ListForResourceGroup", OWNER, "look at the rights");
    let roles = arm.list(call, &arm.get(&path, RIGHTS), |role| Some(role.clone())).await?;
    Ok(RIGHTS_OF_A_NODE
        .iter()
        .filter(|right| !roles.iter().any(|role| allows(role, right)))
        .copied()
        .collect())
}

/// Whether a role allows an action.
fn allows(role: &Value, action: &str) -> bool {
    let has = |list: &str| {
        let mut patterns = read::list(role, list).iter().filter_map(Value::as_str);
        patterns.any(|pattern| is_like(action, pattern))
    };
    has("/actions") && !has("/notActions")
}

/// Whether an action fits a pattern of a role, in which `*` stands for any text.
fn is_like(action: &str, pattern: &str) -> bool {
    let (action, pattern) = (action.to_ascii_lowercase(), pattern.to_ascii_lowercase());
    let mut parts = pattern.split('*');
    let Some(mut rest) = parts.next().and_then(|first| action.strip_prefix(first)) else { return false };
    if !pattern.contains('*') {
        return rest.is_empty();
    }
    for part in parts {
        match rest.find(part) {
            Some(at) => rest = rest.get(at + part.len()..).unwrap_or_default(),
            None => return false,
        }
    }
    pattern.ends_with('*') || rest.is_empty()
}

/// A quota of the location, in cores.
#[derive(Debug)]
struct Quota {
    name: String,
    used: u64,
    limit: u64,
}

/// Returns the quotas that matter: of all cores, and of the family of the configured type.
async fn quotas(azure: &Azure, arm: &Arm, facts: &AzureFacts) -> Result<Vec<Quota>, Error> {
    let call = ApiCall::new("Usage_List", OWNER, "look at the quotas");
    let request = arm.get(&format!("{}/usages", arm.location()), COMPUTE);
    let family = facts.families.get(&azure.config.instance_type);
    let quota = |usage: &Value| {
        let name = read::text(usage, "/name/value")?;
        let is_ours = name.eq_ignore_ascii_case("cores")
            || family.is_some_and(|family| name.eq_ignore_ascii_case(family));
        let (used, limit) = (read::number(usage, "/currentValue")?, read::number(usage, "/limit")?);
        is_ours.then(|| Quota { name: name.to_owned(), used, limit })
    };
    arm.list(call, &request, quota).await.map_err(|failure| failure.error)
}

/// Adds a fact of each quota, and a warning of those that are nearly used up.
fn note(found: &mut Preflight, quotas: &[Quota]) {
    for Quota { name, used, limit } in quotas {
        found.facts.push(format!("quota {name}: {used} of {limit} cores in use"));
        let left = limit.saturating_sub(*used);
        if left < FEW {
            found.warnings.push(format!(
                "{left} cores are left of the quota {name}; ask for more (Azure portal, Quotas)"
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn each_quota_is_a_fact_and_a_small_rest_a_warning() {
        let quota = |name: &str, used| Quota { name: name.to_owned(), used, limit: 100 };
        let mut found = Preflight::default();
        note(&mut found, &[quota("cores", 12), quota("standardDCASv5Family", 90)]);
        assert_eq!(
            found.facts,
            ["quota cores: 12 of 100 cores in use", "quota standardDCASv5Family: 90 of 100 cores in use"]
        );
        assert_eq!(found.warnings.len(), 1, "{:?}", found.warnings);
        assert!(found.warnings[0].starts_with("10 cores are left of the quota standardDCASv5Family"));
    }

    #[test]
    fn a_role_allows_what_its_patterns_contain() {
        let role = json!({"actions": ["Microsoft.Compute/virtualMachines/*", "*/read"],
            "notActions": ["Microsoft.Compute/virtualMachines/delete"]});
        for (action, is) in [
            ("Microsoft.Compute/virtualMachines/write", true),
            ("microsoft.network/networkinterfaces/READ", true),
            ("Microsoft.Compute/virtualMachines/delete", false),
            ("Microsoft.Network/networkInterfaces/write", false),
        ] {
            assert_eq!(allows(&role, action), is, "{action}");
        }
        assert!(is_like("a/b", "*") && is_like("a/b/c", "a/*/c") && is_like("a", "a"));
        assert!(!is_like("a/b", "a") && !is_like("a", "a/*") && !is_like("a/b/c", "a/*/d"));
        assert!(!allows(&json!({}), "a"));
    }
}
