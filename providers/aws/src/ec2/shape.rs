//! Builds the parameters that VMs of a profile share, for any pod: the launch template, and the same for RunInstances.
//! Pure: makes no call.

use std::collections::BTreeMap;

use aws_sdk_ec2::types::{
    AmdSevSnpSpecification, BlockDeviceMapping, CpuOptionsRequest, EbsBlockDevice,
    FleetBlockDeviceMappingRequest, FleetEbsBlockDeviceRequest, HttpTokensState,
    IamInstanceProfileSpecification, InstanceMetadataEndpointState, InstanceMetadataOptionsRequest,
    InstanceMetadataTagsState, InstanceNetworkInterfaceSpecification,
    LaunchTemplateBlockDeviceMappingRequest, LaunchTemplateCpuOptionsRequest,
    LaunchTemplateEbsBlockDeviceRequest, LaunchTemplateHttpTokensState,
    LaunchTemplateIamInstanceProfileSpecificationRequest, LaunchTemplateInstanceMetadataEndpointState,
    LaunchTemplateInstanceMetadataOptionsRequest, LaunchTemplateInstanceMetadataTagsState,
    LaunchTemplateInstanceNetworkInterfaceSpecificationRequest, LaunchTemplatePlacementRequest, Placement,
    RequestLaunchTemplateData, ResourceType, ShutdownBehavior, Tag, TagSpecification, Tenancy,
};
use peerpod_provider_cloud::Marks;
use sha2::{Digest, Sha256};

use crate::config::{ALPHABET, AwsConfig, RootDisk};

/// Hop limit for answers of the metadata service. One hop reaches the VM itself, so answers are not routed to pods.
const HOPS: i32 = 1;

/// Facts about an AMI that a launch depends on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AwsImageFacts {
    pub id: String,
    pub name: String,
    /// Architecture: `x86_64` or `arm64`.
    pub arch: String,
    /// Whether its boot mode is `legacy-bios`.
    pub boots_by_bios: bool,
    /// Device name of the root disk, like `/dev/xvda`.
    pub root_device: Option<String>,
    /// Minimum size of the root disk, in GiB.
    pub root_gib: u32,
}

/// Sets the parameters of a root disk. EC2 has three types for it, with the same fields.
macro_rules! said {
    ($builder:expr, $root:ident) => {
        $builder
            .delete_on_termination(true)
            .set_volume_size($root.size)
            .set_encrypted($root.encrypted)
            .set_kms_key_id($root.kms)
    };
}

/// Parameters that VMs of one profile have in common.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AwsVmSpec {
    pub image: AwsImageFacts,
    pub security_groups: Vec<String>,
    pub key_name: Option<String>,
    pub instance_profile: Option<String>,
    pub public_ip: bool,
    pub sev_snp: bool,
    pub tenancy: Option<String>,
    pub root: RootDisk,
}

impl AwsVmSpec {
    pub(crate) fn new(
        config: &AwsConfig,
        image: AwsImageFacts,
        groups: &[String],
        public_ip: bool,
        sev_snp: bool,
    ) -> AwsVmSpec {
        AwsVmSpec {
            image,
            security_groups: groups.to_vec(),
            key_name: config.key_name.clone(),
            instance_profile: config.instance_profile.clone(),
            public_ip,
            sev_snp,
            tenancy: config.tenancy.clone(),
            root: config.root.clone(),
        }
    }

    /// Returns the template's name, which follows from its content. The same profile finds its template, another
    /// profile makes another one, and no template is ever changed. `cluster` separates the clusters of an account.
    pub(crate) fn template_name(&self, cluster: &str) -> String {
        let mut hash = Sha256::new();
        // `1` is the version of the content that `template` builds from a shape; increase it when that changes.
        hash.update(format!("1\n{cluster}\n{self:?}"));
        let hex: String = hex::encode(&hash.finalize()[..10]);
        format!("peerpod-{hex}")
    }

    /// Builds the launch template of a fleet.
    pub(crate) fn template(&self) -> RequestLaunchTemplateData {
        let metadata = LaunchTemplateInstanceMetadataOptionsRequest::builder()
            .http_endpoint(LaunchTemplateInstanceMetadataEndpointState::Enabled)
            .http_tokens(LaunchTemplateHttpTokensState::Required)
            .http_put_response_hop_limit(HOPS)
            .instance_metadata_tags(LaunchTemplateInstanceMetadataTagsState::Disabled);
        let mut data = RequestLaunchTemplateData::builder()
            .image_id(&self.image.id)
            .set_key_name(self.key_name.clone())
            // A guest powers off when its lease ends. This terminates the VM, so that it costs no more.
            .instance_initiated_shutdown_behavior(ShutdownBehavior::Terminate)
            .metadata_options(metadata.build());
        if self.public_ip {
            // A public address is requested on the NIC; the security groups then belong on the NIC, too.
            let nic = LaunchTemplateInstanceNetworkInterfaceSpecificationRequest::builder()
                .device_index(0)
                .associate_public_ip_address(true)
                .delete_on_termination(true)
                .set_groups(Some(self.security_groups.clone()));
            data = data.network_interfaces(nic.build());
        } else {
            data = data.set_security_group_ids(Some(self.security_groups.clone()));
        }
        if let Some(profile) = &self.instance_profile {
            let one = LaunchTemplateIamInstanceProfileSpecificationRequest::builder();
            let one = if is_arn(profile) { one.arn(profile) } else { one.name(profile) };
            data = data.iam_instance_profile(one.build());
        }
        if self.sev_snp {
            let cpu = LaunchTemplateCpuOptionsRequest::builder().amd_sev_snp(AmdSevSnpSpecification::Enabled);
            data = data.cpu_options(cpu.build());
        }
        if let Some(tenancy) = &self.tenancy {
            let placement =
                LaunchTemplatePlacementRequest::builder().tenancy(Tenancy::from(tenancy.as_str()));
            data = data.placement(placement.build());
        }
        if let Some(root) = self.root_of(&self.image) {
            let ebs = said!(LaunchTemplateEbsBlockDeviceRequest::builder(), root);
            let mapping =
                LaunchTemplateBlockDeviceMappingRequest::builder().device_name(root.device).ebs(ebs.build());
            data = data.block_device_mappings(mapping.build());
        }
        data.build()
    }

    /// Builds the root disk of another image, in place of the template's root disk.
    pub(crate) fn fleet_root(&self, image: &AwsImageFacts) -> Option<FleetBlockDeviceMappingRequest> {
        let root = self.root_of(image)?;
        let ebs = said!(FleetEbsBlockDeviceRequest::builder(), root);
        Some(FleetBlockDeviceMappingRequest::builder().device_name(root.device).ebs(ebs.build()).build())
    }

    /// Builds the root disk for RunInstances.
    pub(crate) fn run_root(&self, image: &AwsImageFacts) -> Option<BlockDeviceMapping> {
        let root = self.root_of(image)?;
        let ebs = said!(EbsBlockDevice::builder(), root);
        Some(BlockDeviceMapping::builder().device_name(root.device).ebs(ebs.build()).build())
    }

    /// Builds the metadata options for RunInstances.
    pub(crate) fn run_metadata() -> InstanceMetadataOptionsRequest {
        InstanceMetadataOptionsRequest::builder()
            .http_endpoint(InstanceMetadataEndpointState::Enabled)
            .http_tokens(HttpTokensState::Required)
            .http_put_response_hop_limit(HOPS)
            .instance_metadata_tags(InstanceMetadataTagsState::Disabled)
            .build()
    }

    /// Builds the NICs for RunInstances; `second` is the subnet of the second one.
    pub(crate) fn run_nics(
        &self,
        subnet: &str,
        second: Option<&str>,
    ) -> Vec<InstanceNetworkInterfaceSpecification> {
        let subnets = [Some(subnet), second];
        let nic = |(index, subnet): (i32, &str)| {
            InstanceNetworkInterfaceSpecification::builder()
                .device_index(index)
                .subnet_id(subnet)
                .delete_on_termination(true)
                .set_groups(Some(self.security_groups.clone()))
                .set_associate_public_ip_address((index == 0 && self.public_ip).then_some(true))
                .build()
        };
        (0..).zip(subnets.into_iter().flatten()).map(nic).collect()
    }

    pub(crate) fn run_profile(&self) -> Option<IamInstanceProfileSpecification> {
        let profile = self.instance_profile.as_ref()?;
        let one = IamInstanceProfileSpecification::builder();
        Some(if is_arn(profile) { one.arn(profile) } else { one.name(profile) }.build())
    }

    pub(crate) fn run_cpu(&self) -> Option<CpuOptionsRequest> {
        let cpu = CpuOptionsRequest::builder().amd_sev_snp(AmdSevSnpSpecification::Enabled);
        self.sev_snp.then(|| cpu.build())
    }

    pub(crate) fn run_placement(&self) -> Option<Placement> {
        let tenancy = self.tenancy.as_ref()?;
        Some(Placement::builder().tenancy(Tenancy::from(tenancy.as_str())).build())
    }

    /// Returns the parameters of the root disk; `None` if the image has no root device.
    fn root_of(&self, image: &AwsImageFacts) -> Option<Root> {
        let RootDisk { size_gib, encrypted, kms_key_id } = &self.root;
        let number = |value: u32| i32::try_from(value).unwrap_or(i32::MAX);
        Some(Root {
            device: image.root_device.clone()?,
            // A root disk must not be smaller than its image.
            size: (*size_gib > 0).then(|| number((*size_gib).max(image.root_gib))),
            // Set only if wanted: EC2 refuses `false` for an encrypted snapshot.
            encrypted: encrypted.then_some(true),
            kms: kms_key_id.clone(),
        })
    }
}

struct Root {
    device: String,
    size: Option<i32>,
    encrypted: Option<bool>,
    kms: Option<String>,
}

fn is_arn(profile: &str) -> bool {
    profile.starts_with("arn:")
}

/// Returns the tags for every resource that a launch makes.
pub(crate) fn tag_specifications(tags: &BTreeMap<String, String>) -> Vec<TagSpecification> {
    let tags = to_tags(tags);
    let kinds = [ResourceType::Instance, ResourceType::Volume, ResourceType::NetworkInterface];
    let on = |kind| TagSpecification::builder().resource_type(kind).set_tags(Some(tags.clone())).build();
    kinds.into_iter().map(on).collect()
}

pub(crate) fn to_tags(tags: &BTreeMap<String, String>) -> Vec<Tag> {
    tags.iter().map(|(key, value)| Tag::builder().key(key).value(value).build()).collect()
}

/// Returns the marks among the tags of a resource.
pub(crate) fn marks(tags: Option<Vec<Tag>>) -> Marks {
    let tags = tags.unwrap_or_default().into_iter().filter_map(|tag| Some((tag.key?, tag.value?)));
    ALPHABET.read(&tags.collect())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn shape() -> AwsVmSpec {
        AwsVmSpec {
            image: AwsImageFacts {
                id: "ami-1".into(),
                name: "podvm".into(),
                arch: "x86_64".into(),
                boots_by_bios: false,
                root_device: Some("/dev/xvda".into()),
                root_gib: 15,
            },
            security_groups: vec!["sg-1".into()],
            key_name: None,
            instance_profile: None,
            public_ip: false,
            sev_snp: true,
            tenancy: None,
            root: RootDisk { size_gib: 30, encrypted: false, kms_key_id: None },
        }
    }

    #[test]
    fn a_template_keeps_pods_from_the_metadata_and_ends_with_its_guest() {
        let data = shape().template();
        let metadata = data.metadata_options.unwrap();
        assert_eq!(metadata.http_tokens, Some(LaunchTemplateHttpTokensState::Required));
        assert_eq!(metadata.http_put_response_hop_limit, Some(1));
        assert_eq!(metadata.instance_metadata_tags, Some(LaunchTemplateInstanceMetadataTagsState::Disabled));
        assert_eq!(data.instance_initiated_shutdown_behavior, Some(ShutdownBehavior::Terminate));
        assert_eq!(data.cpu_options.unwrap().amd_sev_snp, Some(AmdSevSnpSpecification::Enabled));
        assert_eq!(data.security_group_ids.unwrap(), ["sg-1"]);
        let disk = data.block_device_mappings.unwrap().remove(0);
        let ebs = disk.ebs.unwrap();
        assert_eq!((ebs.volume_size, ebs.delete_on_termination, ebs.encrypted), (Some(30), Some(true), None));
    }

    #[test]
    fn another_profile_has_another_template_and_the_same_one_the_same() {
        let (one, same) = (shape(), shape());
        assert_eq!(one.template_name("c"), same.template_name("c"));
        assert_ne!(one.template_name("c"), one.template_name("d"));
        let changes: [fn(&mut AwsVmSpec); 8] = [
            |s| s.image.id = "ami-2".into(),
            |s| s.security_groups.push("sg-2".into()),
            |s| s.key_name = Some("k".into()),
            |s| s.instance_profile = Some("p".into()),
            |s| s.public_ip = true,
            |s| s.sev_snp = false,
            |s| s.tenancy = Some("dedicated".into()),
            |s| s.root.encrypted = true,
        ];
        for (number, change) in changes.iter().enumerate() {
            let mut other = shape();
            change(&mut other);
            assert_ne!(other.template_name("c"), one.template_name("c"), "change {number}");
        }
    }

    #[test]
    fn a_root_disk_is_never_smaller_than_its_image() {
        let shape = shape();
        let large =
            AwsImageFacts { root_gib: 64, root_device: Some("/dev/sda1".into()), ..shape.image.clone() };
        let mapping = shape.fleet_root(&large).unwrap();
        assert_eq!(mapping.device_name.as_deref(), Some("/dev/sda1"));
        assert_eq!(mapping.ebs.unwrap().volume_size, Some(64));
        let odd = AwsImageFacts { root_device: None, ..shape.image.clone() };
        assert_eq!(shape.run_root(&odd), None, "without a root device it gets no settings");
    }

    #[test]
    fn a_public_address_and_its_groups_are_on_the_nic() {
        let data = AwsVmSpec { public_ip: true, ..shape() }.template();
        assert_eq!(data.security_group_ids, None);
        let nic = data.network_interfaces.unwrap().remove(0);
        assert_eq!(nic.associate_public_ip_address, Some(true));
        assert_eq!(nic.groups.unwrap(), ["sg-1"]);
        let nics = shape().run_nics("subnet-a", Some("subnet-b"));
        let subnets: Vec<_> = nics.iter().filter_map(|nic| nic.subnet_id.as_deref()).collect();
        assert_eq!(subnets, ["subnet-a", "subnet-b"]);
    }
}
