//! Caches EC2's answers: facts about the account, images, and the names of existing launch templates. May call
//! Describe* and CreateLaunchTemplate.

use std::sync::Arc;

use aws_sdk_ec2::types::{ResourceType, TagSpecification};
use peerpod_provider_api::{Arch, CreateRequest, Error};
use peerpod_provider_cloud::marks::CLUSTER;
use tokio::time::Instant;

use crate::config::AwsImage;
use crate::ec2::Aws;
use crate::ec2::client::Ec2;
use crate::ec2::facts::{self, AwsFacts, Subnet};
use crate::ec2::provider::arch;
use crate::ec2::shape::{AwsImageFacts, AwsVmSpec, to_tags};

/// EC2's answer to a dry run of a permitted call.
pub(super) const DRY_RUN: &str = "DryRunOperation";

impl Aws {
    /// Returns the facts about the account. Loads them if they are missing or old, or if `afresh` is set.
    pub(crate) async fn facts(&self, afresh: bool) -> Result<Arc<AwsFacts>, Error> {
        let load = || async { self.learn(&self.ec2().await?.ec2).await };
        if afresh { self.facts.renew(load).await } else { self.facts.get(load).await }
    }

    async fn learn(&self, ec2: &Ec2) -> Result<AwsFacts, Error> {
        let facts = AwsFacts::load(ec2, &self.config).await?;
        if !self.config.second_subnet_ids.is_empty() {
            let second = facts::subnets(ec2, &self.config.second_subnet_ids).await?;
            *self.second.lock() = second.0;
        }
        self.planner.learn(facts.catalogue.clone());
        Ok(facts)
    }

    pub(crate) fn second_subnets(&self) -> Vec<Subnet> {
        self.second.lock().clone()
    }

    /// Returns the launch template of this shape, by name or id; makes it if it does not exist. With `dry`, EC2 is asked
    /// whether it could be made.
    pub(crate) async fn template(
        &self,
        ec2: &Ec2,
        shape: Option<&AwsVmSpec>,
        until: Instant,
    ) -> Result<String, Error> {
        if let Some(own) = &self.config.launch_template {
            return Ok(own.clone());
        }
        let no_image = "make a launch template: there is no image; set provider.aws.image-id";
        let shape = shape.ok_or_else(|| Error::invalid(no_image))?;
        let name = shape.template_name(&self.owner.cluster_id);
        // Held across the call, so that fifty first creates make one template.
        let mut known = self.templates.lock().await;
        if known.contains(&name) {
            return Ok(name);
        }
        let mut marks = self.config.tags.clone();
        marks.insert(CLUSTER.to_owned(), self.owner.cluster_id.clone());
        let marks = TagSpecification::builder()
            .resource_type(ResourceType::LaunchTemplate)
            .set_tags(Some(to_tags(&marks)))
            .build();
        let ask = ec2
            .client
            .create_launch_template()
            .dry_run(self.config.dry)
            // No client token: the name serves as one, and EC2 would answer a repeated token with a template that was
            // removed since.
            .launch_template_name(&name)
            .launch_template_data(shape.template())
            .tag_specifications(marks);
        let what = format!("make the launch template {name}");
        match ec2.call("CreateLaunchTemplate", "template", &what, until, || ask.clone().send()).await {
            Ok(_) => {}
            Err(failure) if self.config.dry && failure.code() == DRY_RUN => {}
            // The name follows from the content: another node has made the same template.
            Err(failure) if failure.code().starts_with("InvalidLaunchTemplateName.AlreadyExists") => {}
            Err(failure) => return Err(failure.into()),
        }
        known.insert(name.clone());
        Ok(name)
    }

    /// Returns an image other than the configured one: the image that the pod names, or the configured name for another
    /// architecture.
    pub(super) async fn own_image(
        &self,
        ec2: &Ec2,
        request: &CreateRequest,
        until: Instant,
    ) -> Result<Option<AwsImageFacts>, Error> {
        if let Some(id) = &request.image {
            return facts::by_id(ec2, id, "look at the pod's image", until).await.map(Some);
        }
        let Some(other) = request.arch.filter(|one| *one != arch(&self.config)) else { return Ok(None) };
        let AwsImage::Named { name, owners } = &self.config.image else {
            let text =
                format!("create of {}: the configured image is for {}", request.name, self.config.arch);
            return Err(Error::unsupported("arch", text));
        };
        let word = if other == Arch::Aarch64 { "arm64" } else { other.word() };
        let image = self.other_image.get(|| facts::newest(ec2, name, owners, word)).await?;
        Ok(Some(AwsImageFacts::clone(&image)))
    }
}
