//! Builds the parameters of `RunInstances`. Pure.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use peerpod_provider_api::{CreateRequest, Error, IdempotencyKey, Market, Owner};
use peerpod_provider_cloud::Offering;

use crate::client::Parameters;
use crate::config::{ALPHABET, AlibabaCloudConfig};
use crate::facts::AlibabaCloudImageFacts;

/// Smallest system disk of the usual performance level, in GiB.
const LEAST_ROOT_GIB: u32 = 20;
/// Outgoing bandwidth of a public address, in Mbit/s; the API's highest. Traffic is paid, not bandwidth.
const BANDWIDTH: &str = "100";
/// Longest name of an instance.
const MAX_NAME: usize = 128;

/// VMs that are about to be made.
pub(crate) struct AlibabaCloudVmSpec<'s> {
    pub config: &'s AlibabaCloudConfig,
    pub owner: &'s Owner,
    pub request: &'s CreateRequest,
    pub key: &'s IdempotencyKey,
    pub offering: &'s Offering,
    pub image: &'s AlibabaCloudImageFacts,
    /// vSwitch of the second NIC.
    pub second: Option<&'s str>,
}

impl AlibabaCloudVmSpec<'_> {
    /// Returns the parameters for this many VMs. Fewer VMs are an answer, not a failure.
    pub(crate) fn parameters(&self, count: u32) -> Result<Parameters, Error> {
        let config = self.config;
        let tags = ALPHABET.marks(self.request, self.key, self.owner, &config.tags)?;
        let size = config.root.size_gib.max(self.image.size_gib).max(LEAST_ROOT_GIB);
        let mut all = Parameters::default()
            .with("ClientToken", self.key.as_str())
            .with("Amount", count.to_string())
            .with("MinAmount", "1")
            .with("InstanceChargeType", "PostPaid")
            .with("ImageId", &self.image.id)
            .with("InstanceType", &self.offering.machine)
            .with("InstanceName", name(&self.request.name))
            .with("UserData", STANDARD.encode(&self.request.user_data))
            .with("SystemDisk.Category", &config.root.category)
            .with("SystemDisk.Size", size.to_string())
            .with("HttpEndpoint", "enabled")
            .with("HttpTokens", "required")
            .tags(&tags);
        all = self.nics(all);
        if config.use_public_ip || self.request.public_ip {
            all = all.with("InternetChargeType", "PayByTraffic").with("InternetMaxBandwidthOut", BANDWIDTH);
        }
        if config.confidential || self.request.confidential.is_some() {
            all = all.with("SecurityOptions.ConfidentialComputingMode", "TDX");
        }
        if self.offering.market == Market::Spot {
            // The present price without a limit; the cloud deletes a VM that it takes back.
            all = all.with("SpotStrategy", "SpotAsPriceGo").with("SpotInterruptionBehavior", "Terminate");
        }
        Ok(match &config.key_name {
            Some(key) => all.with("KeyPairName", key),
            None => all,
        })
    }

    /// Adds the primary NIC, and the second one, which is deleted with its VM.
    fn nics(&self, all: Parameters) -> Parameters {
        let nic = |all: Parameters, number: u32, kind: &str, vswitch: &str| {
            let prefix = format!("NetworkInterface.{number}");
            all.with(format!("{prefix}.InstanceType"), kind)
                .with(format!("{prefix}.VSwitchId"), vswitch)
                .list(&format!("{prefix}.SecurityGroupIds"), &self.config.security_group_ids)
        };
        let all = nic(all, 1, "Primary", self.offering.subnet.as_deref().unwrap_or_default());
        match self.second {
            Some(second) => {
                nic(all, 2, "Secondary", second).with("NetworkInterface.2.DeleteOnRelease", "true")
            }
            None => all,
        }
    }
}

/// Returns a name as ECS accepts it. It begins with a letter, and brackets would be a pattern.
fn name(text: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '-' };
    let mut name: String = text.chars().map(plain).collect();
    if !name.starts_with(|c: char| c.is_ascii_alphabetic()) || name.len() < 2 {
        name.insert_str(0, "vm-");
    }
    name.truncate(MAX_NAME);
    name
}

#[cfg(test)]
mod tests {
    use peerpod_provider_api::Confidential;

    use super::*;
    use crate::config::tests::read;

    fn shaped(
        settings: &[(&str, &str)],
        second: Option<&str>,
        change: impl FnOnce(&mut CreateRequest),
    ) -> Parameters {
        let config = read(settings).unwrap();
        let owner = Owner { cluster_id: "c".into(), node_name: "n".into(), installation: "i".into() };
        let mut request = CreateRequest {
            name: "web-0".into(),
            user_data: "{\"ticket\":\"t\"}\n".into(),
            ..CreateRequest::default()
        };
        change(&mut request);
        let offering = Offering {
            machine: "ecs.g8i.xlarge".into(),
            zone: "cn-beijing-i".into(),
            subnet: Some("vsw-first".into()),
            market: request.market.unwrap_or(Market::OnDemand),
        };
        let image = AlibabaCloudImageFacts { id: "m-1".into(), size_gib: 40, arch: None, is_uefi: true };
        let shape = AlibabaCloudVmSpec {
            config: &config,
            owner: &owner,
            request: &request,
            key: &IdempotencyKey::derive("c", "s", 0),
            offering: &offering,
            image: &image,
            second,
        };
        shape.parameters(3).unwrap()
    }

    #[test]
    fn a_vm_has_the_request_and_nothing_that_a_pod_could_take() {
        let all = shaped(&[], None, |_| {});
        for (name, value) in [
            ("ClientToken", IdempotencyKey::derive("c", "s", 0).as_str()),
            ("Amount", "3"),
            ("MinAmount", "1"),
            ("UserData", "eyJ0aWNrZXQiOiJ0In0K"),
            ("SystemDisk.Size", "40"),
            ("HttpTokens", "required"),
            ("SecurityOptions.ConfidentialComputingMode", "TDX"),
            ("NetworkInterface.1.InstanceType", "Primary"),
            ("NetworkInterface.1.VSwitchId", "vsw-first"),
            ("NetworkInterface.1.SecurityGroupIds.1", "sg-2ze0123456789abcdefg"),
            ("Tag.1.Key", "peerpod.cluster"),
        ] {
            assert_eq!(all.get(name), Some(value), "{name}");
        }
        for name in [
            "VSwitchId",
            "SpotStrategy",
            "RamRoleName",
            "NetworkInterface.2.VSwitchId",
            "KeyPairName",
            "Password",
        ] {
            assert_eq!(all.get(name), None, "{name}");
        }
        assert_eq!(all.get("InternetMaxBandwidthOut"), None);
    }

    #[test]
    fn options_are_in_the_parameters() {
        let settings = [
            ("disable-cvm", "true"),
            ("root-volume-size", "60"),
            ("root-volume-type", "cloud_auto"),
            ("key-name", "me"),
        ];
        let all = shaped(&settings, Some("vsw-second"), |request| {
            request.market = Some(Market::Spot);
            request.public_ip = true;
        });
        for (name, value) in [
            ("SystemDisk.Size", "60"),
            ("SystemDisk.Category", "cloud_auto"),
            ("SpotStrategy", "SpotAsPriceGo"),
            ("InternetMaxBandwidthOut", "100"),
            ("InternetChargeType", "PayByTraffic"),
            ("NetworkInterface.2.InstanceType", "Secondary"),
            ("NetworkInterface.2.VSwitchId", "vsw-second"),
            ("NetworkInterface.2.DeleteOnRelease", "true"),
            ("KeyPairName", "me"),
        ] {
            assert_eq!(all.get(name), Some(value), "{name}");
        }
        assert_eq!(all.get("SecurityOptions.ConfidentialComputingMode"), None);
        let tdx = shaped(&settings, None, |request| request.confidential = Some(Confidential::Tdx));
        assert_eq!(tdx.get("SecurityOptions.ConfidentialComputingMode"), Some("TDX"));
    }

    #[test]
    fn a_name_is_no_pattern() {
        assert_eq!(name("web-0"), "web-0");
        assert_eq!(name("0[1,3]ä"), "vm-0-1-3--");
        assert_eq!(name(""), "vm-");
        assert_eq!(name(&"x".repeat(300)).len(), MAX_NAME);
    }
}
