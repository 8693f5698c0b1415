//! Implements the role beside the driver's sidecars. It removes the `peerpod` parameter from the driver's requests and
//! writes it to the PersistentVolume. For a peer pod's volume it attaches nothing to the worker; where the driver
//! attaches disks, it later asks the driver with the VM as the node. May touch: the driver's socket, the API server.

mod lookup;
mod proof;
mod replay;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use peerpod_kube::client;
use peerpod_proto::csi::{
    ControllerPublishVolumeRequest, ControllerPublishVolumeResponse, ControllerUnpublishVolumeRequest,
    CreateVolumeRequest, CreateVolumeResponse, DeleteVolumeRequest, Empty, ValidateVolumeCapabilitiesRequest,
    ValidateVolumeCapabilitiesResponse,
};
use peerpod_volume::VolumeId;
use protobuf::Message;

use crate::config::CsiConfig;
use crate::grpc::{self, Code, Status};
use crate::metrics::CsiMetrics;
use crate::node::INTERCEPTED;
use crate::optin::{self, OptIn};
use crate::proxy::{Answered, Intercept, Intercepted};
use crate::upstream::Upstream;
use lookup::Lookup;

/// Deadline of this program's own requests to the driver, which may call its cloud.
const ASK: Duration = Duration::from_secs(30);

pub(crate) struct ControllerRole {
    upstream: Arc<Upstream>,
    lookup: Option<Arc<Lookup>>,
    classes: Vec<String>,
}

impl ControllerRole {
    /// Makes the role; with a cluster it also starts to watch the PeerpodVolumes.
    pub(crate) async fn start(
        config: &CsiConfig,
        upstream: &Arc<Upstream>,
        metrics: &CsiMetrics,
    ) -> anyhow::Result<ControllerRole> {
        let mut lookup = None;
        if let Some(kubeconfig) = &config.cluster {
            let client = client::connect(kubeconfig.as_deref()).await?;
            let found = Arc::new(Lookup::new(client.clone()));
            replay::start(config, client, upstream.clone(), found.clone(), metrics.clone());
            lookup = Some(found);
        }
        Ok(ControllerRole { upstream: upstream.clone(), lookup, classes: config.runtime_classes.clone() })
    }

    async fn create(&self, call: Intercepted, mut request: CreateVolumeRequest) -> Answered {
        let said = optin::read(&request.parameters)?;
        if said == OptIn::Unset {
            return call.pass(None).await;
        }
        request.parameters.remove(optin::KEY);
        let message = grpc::encode(&request)?;
        if said == OptIn::No {
            return call.pass(Some(message)).await;
        }
        let mut answer = call.exchange(message).await?;
        if answer.status().is_ok()
            && let Some(message) = &answer.message
        {
            let mut created = CreateVolumeResponse::parse_from_bytes(message).map_err(unreadable)?;
            if let Some(volume) = created.volume.as_mut() {
                // The provisioner copies it to the PersistentVolume, from where every later call carries it.
                volume.volume_context.insert(optin::KEY.to_owned(), "true".to_owned());
                answer.message = Some(grpc::encode(&created)?);
            }
        }
        Ok(answer.pass())
    }

    /// Refuses to delete a volume that is still attached to a VM.
    async fn delete(&self, call: Intercepted, request: DeleteVolumeRequest) -> Answered {
        if let Some(lookup) = &self.lookup
            && !request.volume_id.is_empty()
        {
            let volume = VolumeId::of(self.upstream.driver().await?, &request.volume_id);
            if let Some(user) = lookup.user(&volume).await? {
                let text = format!("volume {} is still attached to the VM of pod {user}", request.volume_id);
                return Err(Code::FailedPrecondition.status(text));
            }
        }
        call.pass(None).await
    }

    async fn validate(&self, call: Intercepted, mut request: ValidateVolumeCapabilitiesRequest) -> Answered {
        let (in_context, in_parameters) =
            (optin::read(&request.volume_context)?, optin::read(&request.parameters)?);
        if (in_context, in_parameters) == (OptIn::Unset, OptIn::Unset) {
            return call.pass(None).await;
        }
        let context = request.volume_context.remove(optin::KEY);
        let parameter = request.parameters.remove(optin::KEY);
        let mut answer = call.exchange(grpc::encode(&request)?).await?;
        if answer.status().is_ok()
            && let Some(message) = &answer.message
        {
            let parsed = ValidateVolumeCapabilitiesResponse::parse_from_bytes(message);
            let mut validated = parsed.map_err(unreadable)?;
            // The confirmed fields must equal the requested fields.
            if let Some(confirmed) = validated.confirmed.as_mut() {
                if let Some(word) = context.filter(|_| !confirmed.volume_context.is_empty()) {
                    confirmed.volume_context.insert(optin::KEY.to_owned(), word);
                }
                if let Some(word) = parameter.filter(|_| !confirmed.parameters.is_empty()) {
                    confirmed.parameters.insert(optin::KEY.to_owned(), word);
                }
                answer.message = Some(grpc::encode(&validated)?);
            }
        }
        Ok(answer.pass())
    }

    async fn publish(&self, call: Intercepted, mut request: ControllerPublishVolumeRequest) -> Answered {
        match optin::read(&request.volume_context)? {
            OptIn::Yes => {}
            OptIn::No => {
                request.volume_context.remove(optin::KEY);
                return call.pass(Some(grpc::encode(&request)?)).await;
            }
            OptIn::Unset if self.by_class(&request).await? => {}
            OptIn::Unset => return call.pass(None).await,
        }
        if request.volume_id.is_empty() || request.node_id.is_empty() || request.volume_capability.is_none() {
            let text = "the request needs volume_id, node_id and volume_capability";
            return Err(Code::InvalidArgument.status(text));
        }
        request.volume_context.remove(optin::KEY);
        self.must_exist(&request).await?;
        let mut answer = ControllerPublishVolumeResponse::new();
        answer.publish_context.insert(INTERCEPTED.to_owned(), "true".to_owned());
        grpc::success(&answer)
    }

    /// Whether every pod of that node that uses the volume is a peer pod.
    async fn by_class(&self, request: &ControllerPublishVolumeRequest) -> Result<bool, Status> {
        match &self.lookup {
            Some(lookup) if !request.volume_id.is_empty() => {
                let driver = self.upstream.driver().await?;
                lookup.all_of_class(driver, &request.volume_id, &request.node_id, &self.classes).await
            }
            _ => Ok(false),
        }
    }

    /// Checks that volume and node exist, because the driver is not asked to attach. Without a cluster the driver
    /// checks the node, too: it is asked to detach a volume that was never attached.
    async fn must_exist(&self, request: &ControllerPublishVolumeRequest) -> Result<(), Status> {
        let volume = ValidateVolumeCapabilitiesRequest {
            volume_id: request.volume_id.clone(),
            volume_context: request.volume_context.clone(),
            volume_capabilities: request.volume_capability.iter().cloned().collect(),
            secrets: request.secrets.clone(),
            ..Default::default()
        };
        let _: ValidateVolumeCapabilitiesResponse =
            self.upstream.call("/csi.v1.Controller/ValidateVolumeCapabilities", &volume, ASK).await?;
        if let Some(lookup) = &self.lookup {
            let driver = self.upstream.driver().await?;
            if lookup.node_of(driver, &request.node_id).await?.is_none() {
                let text = format!("no node has the id {:?} for {driver}", request.node_id);
                return Err(Code::NotFound.status(text));
            }
            return Ok(());
        }
        let node = ControllerUnpublishVolumeRequest {
            volume_id: request.volume_id.clone(),
            node_id: request.node_id.clone(),
            secrets: request.secrets.clone(),
            ..Default::default()
        };
        let _: Empty = self.upstream.call("/csi.v1.Controller/ControllerUnpublishVolume", &node, ASK).await?;
        Ok(())
    }
}

#[async_trait]
impl Intercept for ControllerRole {
    fn methods(&self) -> &'static [&'static str] {
        // ControllerUnpublishVolume for a worker without the volume goes to the driver, where it is idempotent.
        &[
            "/csi.v1.Controller/CreateVolume",
            "/csi.v1.Controller/DeleteVolume",
            "/csi.v1.Controller/ControllerPublishVolume",
            "/csi.v1.Controller/ValidateVolumeCapabilities",
        ]
    }

    async fn handle(&self, call: Intercepted) -> Answered {
        match call.method {
            "CreateVolume" => call.parsed(|call, request| self.create(call, request)).await,
            "DeleteVolume" => call.parsed(|call, request| self.delete(call, request)).await,
            "ControllerPublishVolume" => call.parsed(|call, request| self.publish(call, request)).await,
            "ValidateVolumeCapabilities" => call.parsed(|call, request| self.validate(call, request)).await,
            _ => call.pass(None).await,
        }
    }
}

fn unreadable(why: protobuf::Error) -> Status {
    Code::Internal.status(format!("the CSI driver's answer: {why}"))
}
