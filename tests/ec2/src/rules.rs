//! Adds EC2's rules that moto lacks: sizes, names, zones, states, capacity.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use peerpod_test_clouds::Rate;

use crate::form::{self, Params};
use crate::proxy::{Answer, Shared, lock};
use crate::xml;

/// Largest raw user-data in bytes, before base64.
const MAX_USER_DATA: usize = 16 << 10;

/// Returns an action's bucket, as EC2 publishes it per account and region.
pub fn rate(action: &str) -> Rate {
    let (per_second, burst) = match action {
        "RunInstances" => (2.0, 5.0),
        "TerminateInstances" => (5.0, 100.0),
        "CreateTags" => (10.0, 100.0),
        _ if action.starts_with("Describe") || action.starts_with("Get") => (20.0, 100.0),
        _ => (5.0, 50.0),
    };
    Rate::Bucket { per_minute: 60.0 * per_second, burst }
}

/// Returns EC2's refusal of a call that moto would accept.
pub(crate) async fn refused(
    shared: &Arc<Shared>,
    action: &str,
    params: &Params,
    lag: Duration,
    boot: Duration,
) -> anyhow::Result<Option<Answer>> {
    let refuse = |code: &str, message: &str| Ok(Some(Answer::refusal(400, code, message)));
    for (key, value) in params {
        if key.ends_with("UserData") {
            match STANDARD.decode(value) {
                Err(_) => return refuse("InvalidUserData.Malformed", "Invalid BASE64 encoding of user data"),
                Ok(raw) if raw.len() > MAX_USER_DATA => {
                    return refuse("InvalidUserData.Malformed", "User data is limited to 16384 bytes");
                }
                Ok(_) => {}
            }
        }
        if key == "ClientToken" && (value.len() > 64 || !value.is_ascii()) {
            return refuse("InvalidParameterValue", "ClientToken must have at most 64 ASCII characters");
        }
        if key.ends_with(".InstanceType") || (key == "InstanceType" && action == "RunInstances") {
            let ask = ("DescribeInstanceTypes", "InstanceType.1", value.as_str());
            if !exists(shared, ask).await? {
                return refuse(
                    "InvalidParameterValue",
                    &format!("Invalid value '{value}' for InstanceType."),
                );
            }
        }
        if key.ends_with("ImageId")
            && !key.starts_with("ImageId.")
            && !exists(shared, ("DescribeImages", "ImageId.1", value)).await?
        {
            return refuse("InvalidAMIID.NotFound", &format!("The image id '[{value}]' does not exist"));
        }
    }
    match action {
        "DescribeInstances" | "TerminateInstances" => {
            let young: Vec<String> = form::list(params, "InstanceId")
                .into_iter()
                .filter(|id| shared.is_younger(id, lag))
                .collect();
            match &young[..] {
                [] => Ok(None),
                [one] => {
                    refuse("InvalidInstanceID.NotFound", &format!("The instance ID '{one}' does not exist"))
                }
                many => {
                    let message = format!("The instance IDs '{}' do not exist", many.join(", "));
                    refuse("InvalidInstanceID.NotFound", &message)
                }
            }
        }
        "AttachVolume" => attach(shared, params, boot).await,
        "RegisterImage" => register(shared, params).await,
        _ => Ok(None),
    }
}

/// Refuses an AMI with the name of another one, or of a snapshot that is not complete.
async fn register(shared: &Arc<Shared>, params: &Params) -> anyhow::Result<Option<Answer>> {
    let get = |key: &str| params.get(key).map(String::as_str).unwrap_or_default();
    let refuse = |code: &str, message: String| Ok(Some(Answer::refusal(400, code, &message)));
    let (name, snapshot) = (get("Name"), get("BlockDeviceMapping.1.Ebs.SnapshotId"));
    let own = [("Owner.1", "self"), ("Filter.1.Name", "name"), ("Filter.1.Value.1", name)];
    let own = own.map(|(key, value)| (key.to_owned(), value.to_owned()));
    let found = shared.upstream("DescribeImages", own.into()).await?;
    if xml::value(&found.xml, "imageId").is_some() {
        return refuse("InvalidAMIName.Duplicate", format!("AMI name {name} is already in use"));
    }
    if lock(&shared.snapshots).is_pending(snapshot) {
        return refuse(
            "InvalidParameterValue",
            format!("The snapshot {snapshot} is not in the completed state"),
        );
    }
    Ok(None)
}

/// Gives a new AMI the tags of its request, which moto leaves out.
pub(crate) async fn tag_image(shared: &Arc<Shared>, id: &str, params: &Params) -> anyhow::Result<()> {
    let mut tags: Params = [("ResourceId.1".to_owned(), id.to_owned())].into();
    let given =
        params.iter().filter_map(|(key, value)| Some((key.strip_prefix("TagSpecification.1.")?, value)));
    tags.extend(
        given.filter(|(key, _)| key.starts_with("Tag.")).map(|(key, value)| (key.to_owned(), value.clone())),
    );
    let tagged = tags.len() == 1 || shared.upstream("CreateTags", tags).await?.status == 200;
    anyhow::ensure!(tagged, "moto does not tag {id}");
    Ok(())
}

/// Returns whether moto knows this type or image. The answers are cached.
async fn exists(shared: &Arc<Shared>, (action, key, value): (&str, &str, &str)) -> anyhow::Result<bool> {
    let known = lock(&shared.known).get(value).cloned();
    let found = match known {
        Some(found) => found,
        None => {
            let asked = shared.upstream(action, [(key.to_owned(), value.to_owned())].into()).await?;
            let tag = if action == "DescribeImages" { "imageId" } else { "instanceType" };
            let found = asked.status == 200 && xml::values(&asked.xml, tag).contains(&value);
            lock(&shared.known).insert(value.to_owned(), found.to_string());
            found.to_string()
        }
    };
    Ok(found == "true")
}

async fn attach(shared: &Arc<Shared>, params: &Params, boot: Duration) -> anyhow::Result<Option<Answer>> {
    let refuse = |code: &str, message: String| Ok(Some(Answer::refusal(400, code, &message)));
    let get = |key: &str| params.get(key).cloned().unwrap_or_default();
    let (vm, volume, device) = (get("InstanceId"), get("VolumeId"), get("Device"));
    let vms = shared.upstream("DescribeInstances", [("InstanceId.1".to_owned(), vm.clone())].into()).await?;
    let volumes =
        shared.upstream("DescribeVolumes", [("VolumeId.1".to_owned(), volume.clone())].into()).await?;
    if vms.status != 200 {
        return Ok(Some(vms));
    }
    if volumes.status != 200 {
        return Ok(Some(volumes));
    }
    if shared.is_younger(&vm, boot) {
        return refuse("IncorrectState", format!("Instance '{vm}' is not 'running'."));
    }
    let zone = |xml: &str| xml::value(xml, "availabilityZone").unwrap_or_default().to_owned();
    if zone(&vms.xml) != zone(&volumes.xml) {
        let message =
            format!("The volume '{volume}' is not in the same availability zone as instance '{vm}'");
        return refuse("InvalidVolume.ZoneMismatch", message);
    }
    if xml::value(&volumes.xml, "instanceId").is_some() {
        return refuse("VolumeInUse", format!("{volume} is already attached to an instance"));
    }
    if xml::values(&vms.xml, "deviceName").contains(&device.as_str()) {
        let message =
            format!("Invalid value '{device}' for unixDevice. Attachment point {device} is already in use");
        return refuse("InvalidParameterValue", message);
    }
    Ok(None)
}

async fn zone_of(shared: &Arc<Shared>, subnet: &str) -> anyhow::Result<String> {
    let known = lock(&shared.known).get(subnet).cloned();
    if let Some(zone) = known {
        return Ok(zone);
    }
    let asked =
        shared.upstream("DescribeSubnets", [("SubnetId.1".to_owned(), subnet.to_owned())].into()).await?;
    let zone =
        xml::value(&asked.xml, "availabilityZone").with_context(|| format!("no subnet {subnet}"))?.to_owned();
    lock(&shared.known).insert(subnet.to_owned(), zone.clone());
    Ok(zone)
}

/// One offering of a fleet.
struct Override {
    place: (String, usize),
    machine: String,
    subnet: String,
    zone: String,
}

/// CreateFleet: tries the offerings in their order; exhausted ones are errors in the answer.
pub(crate) async fn fleet(shared: &Arc<Shared>, mut params: Params) -> anyhow::Result<Answer> {
    let market_key = "TargetCapacitySpecification.DefaultTargetCapacityType";
    let market = params.get(market_key).cloned().unwrap_or_else(|| "on-demand".to_owned());
    let count_key = "TargetCapacitySpecification.TotalTargetCapacity";
    let wanted: u64 = params.get(count_key).and_then(|count| count.parse().ok()).unwrap_or(1);
    let dry = params.get("DryRun").is_some_and(|dry| dry == "true");
    let mut overrides = Vec::new();
    for config in 1.. {
        let prefix = format!("LaunchTemplateConfigs.{config}.");
        if !params.keys().any(|key| key.starts_with(&prefix)) {
            break;
        }
        for number in 1.. {
            let get = |field: &str| params.get(&format!("{prefix}Overrides.{number}.{field}")).cloned();
            let (Some(machine), Some(subnet)) = (get("InstanceType"), get("SubnetId")) else { break };
            let zone = zone_of(shared, &subnet).await?;
            overrides.push(Override { place: (prefix.clone(), number), machine, subnet, zone });
        }
    }
    if dry || overrides.is_empty() {
        return shared.upstream("CreateFleet", params).await;
    }
    let mut refused = Vec::new();
    let mut chosen = None;
    let mut granted = wanted;
    for one in &overrides {
        granted = shared.take_stock([&one.machine, &one.zone, &market], wanted);
        if granted > 0 {
            chosen = Some(one);
            break;
        }
        refused.push(one);
    }
    let errors: String = refused.iter().map(|one| fleet_error(one, &market)).collect();
    let Some(chosen) = chosen else {
        let xml = format!(
            "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<CreateFleetResponse xmlns=\"http://ec2.amazonaws.com/doc/2016-11-15/\">\
             <requestId>0</requestId><fleetId>fleet-00000000-0000-0000-0000-000000000000</fleetId>\
             <errorSet>{errors}</errorSet><fleetInstanceSet/></CreateFleetResponse>"
        );
        return Ok(Answer { status: 200, xml });
    };
    // moto takes the first offering, so only the chosen one is passed on.
    let (prefix, number) = &chosen.place;
    let keep = format!("{prefix}Overrides.{number}.");
    let fields: Vec<(String, String)> = params
        .iter()
        .filter_map(|(key, value)| key.strip_prefix(&keep).map(|field| (field.to_owned(), value.clone())))
        .collect();
    params.retain(|key, _| !key.contains(".Overrides."));
    params.extend(fields.into_iter().map(|(field, value)| (format!("{prefix}Overrides.1.{field}"), value)));
    params.insert(count_key.to_owned(), granted.to_string());
    let mut answer = shared.upstream("CreateFleet", params).await?;
    let short = if granted < wanted { fleet_error(chosen, &market) } else { String::new() };
    let errors = format!("<errorSet>{errors}{short}</errorSet>");
    if answer.status == 200 {
        answer.xml =
            answer.xml.replacen("</CreateFleetResponse>", &format!("{errors}</CreateFleetResponse>"), 1);
    }
    Ok(answer)
}

fn fleet_error(one: &Override, market: &str) -> String {
    let Override { machine, subnet, zone, .. } = one;
    format!(
        "<item><launchTemplateAndOverrides><overrides><instanceType>{machine}</instanceType><subnetId>{subnet}</subnetId>\
         </overrides></launchTemplateAndOverrides><lifecycle>{market}</lifecycle>\
         <errorCode>InsufficientInstanceCapacity</errorCode><errorMessage>We currently do not have sufficient {machine} \
         capacity in the Availability Zone you requested ({zone}).</errorMessage></item>"
    )
}

/// DescribeSpotInstanceRequests by the VMs' ids. moto makes requests only for explicit RequestSpotInstances calls.
pub(crate) fn spot_requests(shared: &Arc<Shared>, params: &Params) -> Answer {
    let asked: Vec<&String> =
        params.iter().filter(|(key, _)| key.starts_with("Filter.1.Value.")).map(|(_, value)| value).collect();
    let interrupted = lock(&shared.interrupted);
    let items: String = asked
        .into_iter()
        .map(|vm| {
            let code = interrupted.get(vm).map_or("fulfilled", String::as_str);
            format!(
                "<item><spotInstanceRequestId>sir-0</spotInstanceRequestId><state>active</state><status><code>{code}</code>\
                 <updateTime>2026-01-01T00:00:00.000Z</updateTime><message>{code}.</message></status>\
                 <instanceId>{vm}</instanceId></item>"
            )
        })
        .collect();
    let xml = format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<DescribeSpotInstanceRequestsResponse \
         xmlns=\"http://ec2.amazonaws.com/doc/2016-11-15/\"><requestId>0</requestId>\
         <spotInstanceRequestSet>{items}</spotInstanceRequestSet></DescribeSpotInstanceRequestsResponse>"
    );
    Answer { status: 200, xml }
}

/// DescribeSpotPriceHistory with the test's prices; moto's are all the same.
pub(crate) fn spot_prices(shared: &Arc<Shared>) -> Answer {
    let prices = lock(&shared.prices);
    let items: String = prices
        .iter()
        .map(|[machine, zone, price]| {
            format!(
                "<item><instanceType>{machine}</instanceType><availabilityZone>{zone}</availabilityZone>\
                 <spotPrice>{price}</spotPrice><productDescription>Linux/UNIX</productDescription>\
                 <timestamp>2026-01-01T00:00:00.000Z</timestamp></item>"
            )
        })
        .collect();
    let xml = format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<DescribeSpotPriceHistoryResponse \
         xmlns=\"http://ec2.amazonaws.com/doc/2016-11-15/\"><requestId>0</requestId>\
         <spotPriceHistorySet>{items}</spotPriceHistorySet><nextToken></nextToken></DescribeSpotPriceHistoryResponse>"
    );
    Answer { status: 200, xml }
}

/// RunInstances: one offering, and a 500 when it is exhausted.
pub(crate) async fn run(shared: &Arc<Shared>, params: Params) -> anyhow::Result<Answer> {
    let machine = params.get("InstanceType").cloned().unwrap_or_default();
    let subnet = params
        .get("SubnetId")
        .or_else(|| params.get("NetworkInterface.1.SubnetId"))
        .cloned()
        .unwrap_or_default();
    let market = match params.get("InstanceMarketOptions.MarketType").map(String::as_str) {
        Some("spot") => "spot",
        _ => "on-demand",
    };
    let dry = params.get("DryRun").is_some_and(|dry| dry == "true");
    if !subnet.is_empty() && !dry {
        let zone = zone_of(shared, &subnet).await?;
        if shared.take_stock([&machine, &zone, market], 1) == 0 {
            let message = format!(
                "We currently do not have sufficient {machine} capacity in the Availability Zone you requested ({zone})."
            );
            return Ok(Answer::refusal(500, "InsufficientInstanceCapacity", &message));
        }
    }
    shared.upstream("RunInstances", params).await
}
