//! What a provider can do, and the check that keeps a request from asking for more. Pure.

use crate::{CreateRequest, Error};

/// What a provider can do beyond making a VM from the configured image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capabilities {
    /// Most bytes of raw user-data, before any encoding.
    pub max_user_data: usize,
    /// An image other than the configured one.
    pub images: bool,
    /// An instance type by name.
    pub instance_types: bool,
    /// VMs with GPUs.
    pub gpus: bool,
    /// Disks, in the request and through [`crate::Provider::volumes`].
    pub volumes: bool,
    /// [`crate::Provider::console`] is there.
    pub console: bool,
    /// [`crate::Provider::events`] is there.
    pub events: bool,
}

impl Capabilities {
    /// Nothing but user-data of at most this many bytes: where a new provider starts.
    pub const fn minimal(max_user_data: usize) -> Capabilities {
        Capabilities {
            max_user_data,
            images: false,
            instance_types: false,
            gpus: false,
            volumes: false,
            console: false,
            events: false,
        }
    }

    /// Refuses a request that asks for more than this. The decorator calls it before each create; a provider that
    /// may be used bare calls it first thing in `create`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] naming the field, or [`Error::Invalid`] for user-data that is too long.
    pub fn check(&self, request: &CreateRequest, provider: &str) -> Result<(), Error> {
        let name = &request.name;
        let asked = [
            (request.image.is_some() && !self.images, "image", "an image of its own"),
            (
                request.instance_type.is_some() && !self.instance_types,
                "instance_type",
                "an instance type by name",
            ),
            (request.size.gpus > 0 && !self.gpus, "size.gpus", "GPUs"),
            (request.size.gpu_model.is_some() && !self.gpus, "size.gpu_model", "a GPU model"),
            (!request.disks.is_empty() && !self.volumes, "disks", "disks"),
        ];
        for (refused, field, what) in asked {
            if refused {
                let text = format!(
                    "create of {name}: {what} cannot be had from provider {provider}; \
                     leave it out or use another provider"
                );
                return Err(Error::unsupported(field, text));
            }
        }
        if request.user_data.len() > self.max_user_data {
            return Err(Error::invalid(format!(
                "create of {name}: user-data of {} bytes is more than the {} that provider {provider} takes",
                request.user_data.len(),
                self.max_user_data
            )));
        }
        Ok(())
    }
}
