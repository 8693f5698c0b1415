//! Shows an instance as the cloud's answers do.

use serde_json::{Value, json};

use super::instances::{Instance, State};
use super::{Alibaba, REGION, get};
use crate::clock::stamp;

impl State {
    fn word(self) -> &'static str {
        match self {
            State::Pending => "Pending",
            State::Starting => "Starting",
            State::Running => "Running",
            State::Stopping => "Stopping",
            State::Stopped => "Stopped",
        }
    }
}

impl Alibaba {
    pub(super) fn view(&self, id: &str, one: &Instance) -> Value {
        let get = |name: &str| get(&one.parameters, name).to_owned();
        let number = one.number;
        let address = |net: u32| format!("10.{net}.{}.{}", (number >> 8) & 255, number & 255);
        let has_public = !matches!(get("InternetMaxBandwidthOut").as_str(), "" | "0");
        let public: Vec<String> =
            has_public.then(|| format!("203.0.113.{}", number & 255)).into_iter().collect();
        let tags: Vec<Value> =
            one.tags.iter().map(|(key, value)| json!({"TagKey": key, "TagValue": value})).collect();
        let locks: Vec<Value> =
            one.is_recalled.then(|| json!({"LockReason": "Recycling", "LockMsg": ""})).into_iter().collect();
        let nics: Vec<Value> = [1, 2]
            .into_iter()
            .filter(|nic| one.parameters.contains_key(&format!("NetworkInterface.{nic}.VSwitchId")))
            .map(|nic: u32| {
                json!({"NetworkInterfaceId": format!("eni-{number}-{nic}"), "PrimaryIpAddress": address(nic - 1),
                    "Type": get(&format!("NetworkInterface.{nic}.InstanceType"))})
            })
            .collect();
        let spot = Some(get("SpotStrategy"))
            .filter(|strategy| !strategy.is_empty())
            .unwrap_or_else(|| "NoSpot".to_owned());
        json!({
            "InstanceId": id, "InstanceName": get("InstanceName"), "Status": one.state.word(), "RegionId": REGION,
            "ZoneId": one.zone, "InstanceType": get("InstanceType"), "ImageId": get("ImageId"),
            "CreationTime": format!("{}Z", stamp(one.made).get(..16).unwrap_or_default()),
            "InstanceChargeType": "PostPaid", "SpotStrategy": spot, "KeyPairName": get("KeyPairName"),
            "InstanceNetworkType": "vpc", "PublicIpAddress": {"IpAddress": public},
            "EipAddress": {"IpAddress": "", "AllocationId": "", "InternetChargeType": ""},
            "InnerIpAddress": {"IpAddress": []},
            "VpcAttributes": {"VpcId": "vpc-pods", "VSwitchId": get("NetworkInterface.1.VSwitchId"),
                "PrivateIpAddress": {"IpAddress": [address(0)]}, "NatIpAddress": ""},
            "NetworkInterfaces": {"NetworkInterface": nics}, "Tags": {"Tag": tags},
            "OperationLocks": {"LockReason": locks},
            "MetadataOptions": {"HttpEndpoint": get("HttpEndpoint"), "HttpTokens": get("HttpTokens"),
                "HttpPutResponseHopLimit": 0},
        })
    }
}
