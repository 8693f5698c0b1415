//! Checks that PowerVS permits the calls of the provider, and that the settings fit each other. Returns all failures in
//! one error. May call `images.get`, `networks.get`, `systempools.get`, and the calls of lists.

use peerpod_provider_api::{Error, Preflight};
use peerpod_provider_cloud::ApiCall;
use peerpod_provider_cloud::refusal::together;
use peerpod_provider_rest::read;
use serde_json::Value;

use crate::PowerVs;

/// Owner of these calls, for the scheduler.
const OWNER: &str = "preflight";
/// Warning of each preflight: the project builds no image for this architecture.
const NO_IMAGE: &str = "Peerpod builds no image for ppc64le, and its tests end at a fake of PowerVS: this provider works with \
                        an image of your own at most";

pub(crate) async fn run(power_vs: &PowerVs) -> Result<Preflight, Error> {
    let power = power_vs.power()?;
    // Without a token every other check would fail by the same error.
    power.log_in().await?;
    let config = &power_vs.config;
    let image = config.image.clone().unwrap_or_default();
    let second = config.second_network.clone().unwrap_or_else(|| config.network.clone());
    let (image_found, network, second, pools, listed) = tokio::join!(
        object(power_vs, "images.get", ["images", &image], "image-id"),
        object(power_vs, "networks.get", ["networks", &config.network], "network-id"),
        object(power_vs, "networks.get", ["networks", &second], "second-network-id"),
        pools(power_vs),
        power_vs.list(),
    );
    let errors = [
        image_found.as_ref().err(),
        network.as_ref().err(),
        second.as_ref().err(),
        pools.as_ref().err(),
        listed.as_ref().err(),
    ];
    let errors: Vec<Error> = errors.into_iter().flatten().cloned().collect();
    let (network, pools, listed) = match (network, pools, listed) {
        (Ok(network), Ok(pools), Ok(listed)) if errors.is_empty() => (network, pools, listed),
        _ => return Err(together(errors)),
    };
    let mut found = Preflight {
        facts: vec![
            format!("workspace {} in {}", config.workspace, config.zone),
            format!("network {} ({})", config.network, read::text(&network, "/cidr").unwrap_or("no range")),
            format!("image {image}"),
            format!("VMs have {} by default, with {} processors", config.size, config.processor_type),
            format!("{} VMs of this node", listed.len()),
        ],
        warnings: vec![NO_IMAGE.to_owned()],
        ..Preflight::default()
    };
    if config.use_public_ip && read::text(&network, "/type") != Some("pub-vlan") {
        found.warnings.push(format!("use-public-ip is on, and {} has no public addresses", config.network));
    }
    found.warnings.extend(room(power_vs, &pools));
    Ok(found)
}

async fn object(
    power_vs: &PowerVs,
    action: &'static str,
    path: [&str; 2],
    setting: &str,
) -> Result<Value, Error> {
    let [kind, id] = path;
    let what = format!("look at {kind}/{id}");
    let found = power_vs.power()?.find(ApiCall::new(action, OWNER, &what), path).await?;
    found.ok_or_else(|| {
        Error::invalid(format!("{what}: the workspace has none; correct provider.ibmcloud-powervs.{setting}"))
    })
}

/// Returns the pools of systems of the workspace.
async fn pools(power_vs: &PowerVs) -> Result<Value, Error> {
    let what = "look at the system pools";
    let found =
        power_vs.power()?.find(ApiCall::new("systempools.get", OWNER, what), ["system-pools"]).await?;
    Ok(found.unwrap_or_default())
}

/// Returns a warning for a system type that the workspace lacks, or that has no room for a VM.
fn room(power_vs: &PowerVs, pools: &Value) -> Option<String> {
    let size = &power_vs.config.size;
    let pools = pools.as_object()?;
    let is_type = |pool: &&Value| read::text(pool, "/type").is_some_and(|one| one == size.system);
    let Some(pool) = pools.values().find(is_type).or_else(|| pools.get(&size.system)) else {
        let known: Vec<&str> = pools.values().filter_map(|pool| read::text(pool, "/type")).collect();
        return Some(format!(
            "the workspace has no system {}, but {}; correct system-type",
            size.system,
            known.join(", ")
        ));
    };
    let cores = pool.pointer("/maxCoresAvailable/cores").and_then(Value::as_f64)?;
    (cores < size.processors()).then(|| {
        format!(
            "the system {} has {cores} free cores, less than a VM needs; set system-type to another one",
            size.system
        )
    })
}
