//! Refuses what the cloud refuses.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use super::facts::{Image, Machine};
use super::{GROUP, KEY_PAIR, Parameters, REGION, VSWITCHES, facts, get, list, missing, tags};
use crate::fake::{Refused, refused};

/// Largest user-data before base64.
const MAX_USER_DATA: usize = 32 << 10;

/// Refuses a value.
pub(super) fn invalid<T>(name: &str, value: &str) -> Result<T, Box<Refused>> {
    refused(400, &format!("Invalid{name}.Malformed"), format!("The specified {name} {value} is not valid."))
}

/// Returns the parameters that a call has, without the numbers of lists.
fn names(action: &str) -> &'static [&'static str] {
    match action {
        "RunInstances" => &[
            "Amount",
            "MinAmount",
            "ClientToken",
            "DryRun",
            "ImageId",
            "InstanceType",
            "InstanceName",
            "UserData",
            "InstanceChargeType",
            "SystemDisk.Category",
            "SystemDisk.Size",
            "SystemDisk.PerformanceLevel",
            "HttpEndpoint",
            "HttpTokens",
            "Tag.N.Key",
            "Tag.N.Value",
            "NetworkInterface.N.InstanceType",
            "NetworkInterface.N.VSwitchId",
            "NetworkInterface.N.SecurityGroupIds.N",
            "NetworkInterface.N.DeleteOnRelease",
            "InternetChargeType",
            "InternetMaxBandwidthOut",
            "SecurityOptions.ConfidentialComputingMode",
            "SpotStrategy",
            "SpotInterruptionBehavior",
            "KeyPairName",
            "VSwitchId",
            "SecurityGroupId",
            "SecurityGroupIds.N",
            "ZoneId",
        ],
        "DescribeInstances" => {
            &["InstanceIds", "MaxResults", "NextToken", "Tag.N.Key", "Tag.N.Value", "Status"]
        }
        "DeleteInstances" => &["InstanceId.N", "Force", "ForceStop", "ClientToken"],
        "ListTagResources" => &["ResourceType", "ResourceId.N", "Tag.N.Key", "Tag.N.Value", "NextToken"],
        "GetInstanceConsoleOutput" => &["InstanceId"],
        "DescribeDisks" => &["DiskIds", "MaxResults", "NextToken"],
        "AttachDisk" => &["InstanceId", "DiskId", "DeleteWithInstance"],
        "DetachDisk" => &["InstanceId", "DiskId"],
        "DescribeImages" => &["ImageId", "Status", "PageNumber", "PageSize"],
        "DescribeInstanceTypes" => &["InstanceTypes.N", "MaxResults", "NextToken"],
        "DescribeAvailableResource" => {
            &["DestinationResource", "InstanceChargeType", "IoOptimized", "InstanceType", "ZoneId"]
        }
        "DescribeVSwitches" => &["VSwitchId", "VpcId", "ZoneId", "PageNumber", "PageSize"],
        _ => &[],
    }
}

/// Refuses an unknown call, another region, and parameters that the call does not have.
pub(super) fn known(action: &str, parameters: &Parameters) -> Result<(), Box<Refused>> {
    let names = names(action);
    if names.is_empty() {
        return refused(404, "InvalidAction.NotFound", format!("Specified api {action} is not found."));
    }
    let plain = |name: &str| {
        let parts = name.split('.').map(|part| if part.parse::<u32>().is_ok() { "N" } else { part });
        parts.collect::<Vec<_>>().join(".")
    };
    let is_unknown = |name: &&String| {
        !matches!(name.as_str(), "Action" | "RegionId") && !names.contains(&plain(name).as_str())
    };
    if let Some(unknown) = parameters.keys().find(is_unknown) {
        return refused(400, "InvalidParameter", format!("{action} has no parameter {unknown}."));
    }
    match get(parameters, "RegionId") {
        REGION => Ok(()),
        // These calls have no region in the vendor's client.
        "" if matches!(action, "AttachDisk" | "DetachDisk" | "DescribeInstanceTypes") => Ok(()),
        other => refused(
            404,
            "InvalidRegionId.NotFound",
            format!("The specified RegionId {other} does not exist."),
        ),
    }
}

/// Instances that a call asks for.
pub(super) struct Wanted {
    pub(super) amount: u32,
    pub(super) least: u32,
    pub(super) machine: Machine,
    pub(super) zone: &'static str,
    pub(super) is_spot: bool,
    pub(super) user_data: Vec<u8>,
}

/// Checks the parameters of `RunInstances`.
pub(super) fn run(parameters: &Parameters) -> Result<Wanted, Box<Refused>> {
    let get = |name: &str| get(parameters, name);
    let number = |name: &str, default: u32| match get(name) {
        "" => Ok(default),
        text => match text.parse::<u32>() {
            Ok(number @ 1..=100) => Ok(number),
            _ => invalid(name, text),
        },
    };
    let amount = number("Amount", 1)?;
    let least = number("MinAmount", amount)?;
    if least > amount {
        return invalid("MinAmount", get("MinAmount"));
    }
    let token = get("ClientToken");
    if token.len() > 64 || !token.is_ascii() {
        return invalid("ClientToken", token);
    }
    let Some(image) = facts::image(get("ImageId")) else {
        return missing("InvalidImageId.NotFound", "ImageId");
    };
    let Some(machine) = facts::machine(get("InstanceType")) else {
        return missing("InvalidInstanceType.ValueNotSupported", "InstanceType");
    };
    if (image.arch == "arm64") != (machine.arch == "ARM") {
        return refused(403, "ImageNotSupportInstanceType", "The specified image does not support the type.");
    }
    let zone = network(parameters)?;
    system_disk(parameters, image)?;
    tag_rules(parameters)?;
    confidential(get("SecurityOptions.ConfidentialComputingMode"), &machine, image)?;
    let is_spot = match get("SpotStrategy") {
        "" | "NoSpot" => false,
        "SpotAsPriceGo" | "SpotWithPriceLimit" => true,
        other => return invalid("SpotStrategy", other),
    };
    if !matches!(get("KeyPairName"), "" | KEY_PAIR) {
        return missing("InvalidKeyPairName.NotFound", "KeyPairName");
    }
    if !matches!(get("HttpTokens"), "" | "optional" | "required") {
        return invalid("HttpTokens", get("HttpTokens"));
    }
    let name = get("InstanceName");
    if !name.is_empty() && (!(2..=128).contains(&name.len()) || name.contains(['[', ']', ','])) {
        return invalid("InstanceName", name);
    }
    let user_data = STANDARD.decode(get("UserData")).ok().filter(|data| data.len() <= MAX_USER_DATA);
    let Some(user_data) = user_data else {
        return refused(
            400,
            "InvalidUserData.SizeExceeded",
            "The size of the specified user data exceeds the limit.",
        );
    };
    Ok(Wanted { amount, least, machine, zone, is_spot, user_data })
}

/// Checks the NICs; returns the zone.
fn network(parameters: &Parameters) -> Result<&'static str, Box<Refused>> {
    let nic = |number: u32, name: &str| get(parameters, &format!("NetworkInterface.{number}.{name}"));
    if !get(parameters, "VSwitchId").is_empty() || !get(parameters, "SecurityGroupId").is_empty() {
        return refused(400, "InvalidParameter.Conflict", "The VSwitch is given twice.");
    }
    if nic(1, "InstanceType") != "Primary" {
        return refused(400, "MissingParameter.VSwitchId", "The primary network interface is missing.");
    }
    let mut zones = Vec::new();
    for number in (1..=8).take_while(|number| !nic(*number, "VSwitchId").is_empty()) {
        let is_second = number > 1;
        if is_second && nic(number, "InstanceType") != "Secondary" {
            return invalid("NetworkInterface.InstanceType", nic(number, "InstanceType"));
        }
        if !is_second && !nic(number, "DeleteOnRelease").is_empty() {
            return invalid("NetworkInterface.DeleteOnRelease", "of the primary one");
        }
        let Some(zone) = facts::zone_of(nic(number, "VSwitchId")) else {
            return missing("InvalidVSwitchId.NotFound", "VSwitchId");
        };
        let is_other = !VSWITCHES.contains(&nic(number, "VSwitchId"));
        let groups = list(parameters, &format!("NetworkInterface.{number}.SecurityGroupIds"));
        if groups.is_empty() && !is_second {
            return refused(400, "MissingParameter.SecurityGroupIds", "A security group is required.");
        }
        if is_other || groups.iter().any(|group| *group != GROUP) {
            return missing("InvalidSecurityGroupId.NotFound", "SecurityGroupId in this VPC");
        }
        zones.push(zone);
    }
    match &zones[..] {
        [first, rest @ ..] if rest.iter().all(|zone| zone == first) => Ok(first),
        _ => refused(400, "InvalidVSwitchId.ZoneMismatch", "The vSwitches are in different zones."),
    }
}

fn system_disk(parameters: &Parameters, image: &Image) -> Result<(), Box<Refused>> {
    let category = get(parameters, "SystemDisk.Category");
    if !matches!(category, "cloud_essd" | "cloud_auto" | "cloud_efficiency" | "cloud_ssd") {
        return refused(400, "InvalidSystemDiskCategory.ValueNotSupported", "The category is not supported.");
    }
    let size = get(parameters, "SystemDisk.Size");
    match size.parse::<u32>() {
        Ok(gib) if (image.size.max(20)..=2048).contains(&gib) => Ok(()),
        _ => {
            refused(400, "InvalidSystemDiskSize.LessThanImageSize", format!("The size {size} is not valid."))
        }
    }
}

fn tag_rules(parameters: &Parameters) -> Result<(), Box<Refused>> {
    let tags = tags(parameters);
    if tags.len() > 20 {
        return refused(400, "NumberExceed.Tags", "The maximum number of tags is exceeded.");
    }
    for (key, value) in &tags {
        let is_reserved = key.starts_with("aliyun") || key.starts_with("acs:");
        let has_url = [key, value].iter().any(|text| text.contains("http://") || text.contains("https://"));
        let is_long = key.is_empty() || key.chars().count() > 128 || value.chars().count() > 128;
        if is_reserved || has_url || is_long {
            return refused(400, "InvalidTagKey.Malformed", format!("The tag {key} is not valid."));
        }
    }
    Ok(())
}

fn confidential(mode: &str, machine: &Machine, image: &Image) -> Result<(), Box<Refused>> {
    match mode {
        "" => Ok(()),
        "TDX" if machine.has_tdx && image.boot == "UEFI" => Ok(()),
        _ => refused(
            400,
            "InvalidParameter.NotSupportConfidential",
            "The ConfidentialComputingMode is not supported by the instance type or the image.",
        ),
    }
}
