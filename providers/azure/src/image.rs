//! Reads images: their ids, and the facts about them that a create needs. May call Azure.

use peerpod_provider_api::{Arch, Error};
use peerpod_provider_cloud::ApiCall;
use peerpod_provider_rest::{Request, read};
use serde_json::{Value, json};

use crate::client::{Arm, COMPUTE, GALLERY};
use crate::ids::{ResourceId, is_segment};

/// Id of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ImageId {
    /// Image of a gallery, or a version of it.
    Gallery {
        /// Id as the administrator wrote it.
        id: String,
    },
    /// Image outside of galleries.
    Managed {
        /// Id as the administrator wrote it.
        id: String,
    },
    /// Image of a community or shared gallery: the field of the VM's body, the collection of the API, and the id.
    Public {
        /// Whether the gallery is a community's; otherwise it is shared with the tenant.
        is_community: bool,
        /// Public name of the gallery.
        gallery: String,
        /// Name of the image.
        image: String,
        /// Version, if the id has one.
        version: Option<String>,
    },
}

impl ImageId {
    /// Returns the id, or the name of an image of a community or shared gallery.
    pub(crate) fn name(&self) -> &str {
        match self {
            ImageId::Gallery { id } | ImageId::Managed { id } => id,
            ImageId::Public { image, .. } => image,
        }
    }

    /// Parses an id in any case; `None`: the text is none.
    pub fn parse(text: &str) -> Option<ImageId> {
        let parts: Vec<&str> = text.split('/').collect();
        let lower: Vec<String> = parts.iter().map(|part| part.to_ascii_lowercase()).collect();
        let lower: Vec<&str> = lower.iter().map(String::as_str).collect();
        if let ["", kind @ ("communitygalleries" | "sharedgalleries"), _, "images", _, rest @ ..] = &lower[..]
        {
            let has_version = match rest {
                [] => false,
                ["versions", _] => true,
                _ => return None,
            };
            let part = |place: usize| {
                parts.get(place).map(|part| (*part).to_owned()).filter(|part| is_segment(part))
            };
            return Some(ImageId::Public {
                is_community: *kind == "communitygalleries",
                gallery: part(2)?,
                image: part(4)?,
                version: if has_version { Some(part(6)?) } else { None },
            });
        }
        let id = text.to_owned();
        match ResourceId::parse(text)?.kind.as_str() {
            "microsoft.compute/galleries/images" | "microsoft.compute/galleries/images/versions" => {
                Some(ImageId::Gallery { id })
            }
            "microsoft.compute/images" => Some(ImageId::Managed { id }),
            _ => None,
        }
    }

    /// Returns the image's text in settings and facts.
    pub fn text(&self) -> String {
        match self {
            ImageId::Gallery { id } | ImageId::Managed { id } => id.clone(),
            ImageId::Public { is_community, gallery, image, version } => {
                let kind = if *is_community { "CommunityGalleries" } else { "SharedGalleries" };
                let version = version.as_ref().map(|version| format!("/Versions/{version}"));
                format!("/{kind}/{gallery}/Images/{image}{}", version.unwrap_or_default())
            }
        }
    }

    /// Returns the reference to the image in a VM's body.
    pub(crate) fn reference(&self) -> Value {
        let field = match self {
            ImageId::Gallery { .. } | ImageId::Managed { .. } => "id",
            ImageId::Public { is_community: true, .. } => "communityGalleryImageId",
            ImageId::Public { .. } => "sharedGalleryImageId",
        };
        json!({field: self.text()})
    }

    /// Returns the request for the image's definition.
    fn definition(&self, arm: &Arm) -> Request {
        let (path, version) = match self {
            ImageId::Managed { id } => (id.clone(), COMPUTE),
            ImageId::Gallery { id } => {
                // The definition has the facts; a version is a part of it.
                let end = id.to_ascii_lowercase().find("/versions/").unwrap_or(id.len());
                (id.get(..end).unwrap_or(id).to_owned(), GALLERY)
            }
            ImageId::Public { is_community, gallery, image, .. } => {
                let kind = if *is_community { "communityGalleries" } else { "sharedGalleries" };
                (format!("{}/{kind}/{gallery}/images/{image}", arm.location()), GALLERY)
            }
        };
        arm.get(&path, version)
    }

    /// Returns the request for the image's version, where the id names one that can be read.
    fn version(&self, arm: &Arm) -> Option<Request> {
        match self {
            ImageId::Gallery { id } if id.to_ascii_lowercase().contains("/versions/") => {
                Some(arm.get(id, GALLERY))
            }
            ImageId::Public { is_community, gallery, image, version: Some(version) } => {
                let kind = if *is_community { "communityGalleries" } else { "sharedGalleries" };
                let path = format!("{}/{kind}/{gallery}/images/{image}/versions/{version}", arm.location());
                Some(arm.get(&path, GALLERY))
            }
            _ => None,
        }
    }
}

/// Facts about an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AzureImageFacts {
    pub id: ImageId,
    pub arch: Arch,
    /// Whether a VM starts without a first-boot setup. The others need an `osProfile`.
    pub is_specialized: bool,
    /// Whether confidential VMs can start from it.
    pub is_confidential: bool,
}

impl AzureImageFacts {
    /// Loads the facts about an image, and checks that its version exists.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an image that no VM of this provider can start from.
    pub(crate) async fn load(arm: &Arm, id: &ImageId, call: ApiCall<'_>) -> Result<AzureImageFacts, Error> {
        let call = ApiCall { action: "Images_Get", ..call };
        let invalid = |error: Error| match error {
            // Without the image no VM can be made: the settings are wrong, not the VM gone.
            Error::NotFound { text } => Error::Invalid {
                text: format!("{text}; set image-id to an image that this identity may read"),
            },
            other => other,
        };
        let definition =
            arm.call(call, &id.definition(arm)).await.map_err(|failure| invalid(failure.error))?;
        if let Some(version) = id.version(arm) {
            arm.call(call, &version).await.map_err(|failure| invalid(failure.error))?;
        }
        AzureImageFacts::of(id, &definition.json()).map_err(|error| error.during(call.what))
    }

    /// Reads an image's definition.
    fn of(id: &ImageId, definition: &Value) -> Result<AzureImageFacts, Error> {
        let text = |pointer: &str| read::text(definition, pointer).unwrap_or_default();
        let generation = text("/properties/hyperVGeneration");
        if generation.eq_ignore_ascii_case("V1") {
            return Err(Error::invalid(format!(
                "the image {} is of generation 1, which has no UEFI; publish it as generation 2",
                id.text()
            )));
        }
        let os_state = match id {
            ImageId::Managed { .. } => text("/properties/storageProfile/osDisk/osState"),
            _ => text("/properties/osState"),
        };
        let security = read::list(definition, "/properties/features").iter().find(|feature| {
            read::text(feature, "/name").is_some_and(|name| name.eq_ignore_ascii_case("SecurityType"))
        });
        // ConfidentialVM, ConfidentialVmSupported, TrustedLaunchAndConfidentialVmSupported.
        let security = security.and_then(|feature| read::text(feature, "/value")).unwrap_or_default();
        Ok(AzureImageFacts {
            id: id.clone(),
            arch: match text("/properties/architecture").eq_ignore_ascii_case("Arm64") {
                true => Arch::Aarch64,
                false => Arch::X86_64,
            },
            is_specialized: os_state.eq_ignore_ascii_case("Specialized"),
            is_confidential: security.to_ascii_lowercase().contains("confidentialvm"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GALLERY_ID: &str = "/subscriptions/s/resourceGroups/g/providers/Microsoft.Compute/galleries/Pods/images/peerpod/versions/1.0.0";

    #[test]
    fn ids_of_all_kinds_are_read() {
        let gallery = ImageId::parse(GALLERY_ID).unwrap();
        assert_eq!(gallery.reference(), json!({"id": GALLERY_ID}));
        let managed = "/subscriptions/s/resourceGroups/g/providers/Microsoft.Compute/images/peerpod";
        assert!(matches!(ImageId::parse(managed), Some(ImageId::Managed { .. })));
        let community = ImageId::parse("/communitygalleries/Pods-0/images/Peerpod/versions/latest").unwrap();
        let id = "/CommunityGalleries/Pods-0/Images/Peerpod/Versions/latest";
        assert_eq!(community.reference(), json!({"communityGalleryImageId": id}));
        let shared = ImageId::parse("/SharedGalleries/g/Images/i").unwrap();
        assert_eq!(shared.reference(), json!({"sharedGalleryImageId": "/SharedGalleries/g/Images/i"}));
        for bad in [
            "",
            "peerpod",
            "/CommunityGalleries/a b/Images/i",
            "/CommunityGalleries/../Images/i",
            "/CommunityGalleries/g/Images/i/Versions",
            "/CommunityGalleries/g/Images/i/Versions/1/x",
            "/subscriptions/s/resourceGroups/g/providers/Microsoft.Compute/disks/d",
        ] {
            assert_eq!(ImageId::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_definition_gives_the_facts() {
        let id = ImageId::parse(GALLERY_ID).unwrap();
        let of = |properties: Value| AzureImageFacts::of(&id, &json!({"properties": properties}));
        let facts = of(json!({"hyperVGeneration": "V2", "osState": "Specialized", "architecture": "Arm64",
            "features": [{"name": "DiskControllerTypes", "value": "SCSI, NVMe"},
                {"name": "SecurityType", "value": "TrustedLaunchAndConfidentialVmSupported"}]}))
        .unwrap();
        assert_eq!((facts.arch, facts.is_specialized, facts.is_confidential), (Arch::Aarch64, true, true));
        let facts = of(json!({"hyperVGeneration": "V2", "osState": "Generalized"})).unwrap();
        assert_eq!((facts.arch, facts.is_specialized, facts.is_confidential), (Arch::X86_64, false, false));
        let error = of(json!({"hyperVGeneration": "V1"})).unwrap_err();
        assert!(error.to_string().contains("publish it as generation 2"), "{error}");
    }
}
