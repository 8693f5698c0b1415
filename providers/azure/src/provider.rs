//! Implements the provider trait, and holds the state that its parts share.

use std::net::IpAddr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex;
use peerpod_common::keyed_locks::KeyedLocks;
use peerpod_provider_api::{
    Capabilities, Confidential, Console, CreateRequest, Created, DiskIdentity, DiskRequest, Error,
    Extensions, IdempotencyKey, InstanceId, Market, Owned, Owner, Placement, Preflight, Provider, Volumes,
};
use peerpod_provider_cloud::exhausted::{LONGEST, Scope};
use peerpod_provider_cloud::refusal::clip;
use peerpod_provider_cloud::{
    ApiCall, Kept, Look, Lookup, Offering, Planner, Policy, Recent, Scheduler, Strays, VmState, Wait, Window,
    check_creates, offering, until, wait_for,
};
use prometheus_client::registry::Registry;
use tokio::time::Instant;

use crate::client::{self, Arm};
use crate::config::AzureConfig;
use crate::create::AzureLaunch;
use crate::facts::{AzureFacts, FRESH};
use crate::ids::{ResourceId, VM};
use crate::image::{AzureImageFacts, ImageId};
use crate::vms::{self, AzureVm};
use crate::volumes::short;
use crate::{body, console, remove, volumes};

/// User-data limit before base64; Azure takes 64 KiB of base64.
const MAX_USER_DATA: usize = 48 << 10;
/// Pauses between two looks: the first one, then the others. Azure accepts few looks at one VM (`create.rs`).
pub(crate) static LOOKS: Wait = Wait::new(Duration::from_millis(500), Duration::from_secs(2));
/// Most images beside the configured one whose facts are kept.
const MOST_IMAGES: usize = 64;

/// Provider of VMs on Azure; see the crate's documentation.
pub struct AzureProvider(Arc<Azure>);

/// State that the parts of the provider share.
pub(crate) struct Azure {
    pub(crate) config: AzureConfig,
    pub(crate) owner: Owner,
    pub(crate) planner: Planner,
    pub(crate) recent: Recent,
    /// Changes of VMs in progress.
    pub(crate) changes: KeyedLocks<InstanceId>,
    /// SSH key of VMs from a generalized image.
    pub(crate) ssh_key: String,
    strays: Strays,
    scheduler: Scheduler,
    connection: OnceLock<AzureConnection>,
    facts: Kept<AzureFacts>,
    /// Facts about images that pods name.
    images: Mutex<Vec<Arc<AzureImageFacts>>>,
}

/// The client, and the batchers that collect calls for it.
struct AzureConnection {
    arm: Arm,
    inspect: Lookup<AzureVm>,
    look_in_a_burst: Lookup<AzureVm>,
    addresses: vms::AddressLookup,
    addresses_in_a_burst: vms::AddressLookup,
}

impl AzureProvider {
    /// Creates a provider from its settings; makes no call.
    ///
    /// # Errors
    /// [`Error::Transient`] when the system has no random numbers.
    pub fn new(config: AzureConfig, owner: Owner) -> Result<AzureProvider, Error> {
        let policy = Policy {
            allowed: config.instance_types.clone(),
            default: config.instance_type.clone(),
            markets: config.markets.clone(),
            arch: Some(config.arch),
            // The type decides; the catalogue holds confidential types only, if VMs are confidential.
            confidential: None,
        };
        Ok(AzureProvider(Arc::new(Azure {
            owner,
            planner: Planner::new(policy),
            recent: Recent::default(),
            changes: KeyedLocks::default(),
            ssh_key: body::unusable_key()?,
            strays: Strays::new(Instant::now()),
            scheduler: Scheduler::new(client::table()),
            connection: OnceLock::new(),
            facts: Kept::new("facts about the Azure subscription", FRESH),
            images: Mutex::default(),
            config,
        })))
    }
}

impl Azure {
    /// Returns the client; sets it up at first use.
    pub(crate) fn arm(&self) -> Result<&Arm, Error> {
        self.connected().map(|connected| &connected.arm)
    }

    fn connected(&self) -> Result<&AzureConnection, Error> {
        if let Some(connected) = self.connection.get() {
            return Ok(connected);
        }
        let (arm, public) = (Arm::connect(&self.config, self.scheduler.clone())?, self.config.use_public_ip);
        let addresses = |window| vms::inspect_addresses(arm.clone(), public, window);
        let connected = AzureConnection {
            inspect: vms::inspect(arm.clone(), Window::LIST),
            look_in_a_burst: vms::inspect(arm.clone(), Window::BURST),
            addresses: addresses(Window::LIST),
            addresses_in_a_burst: addresses(Window::BURST),
            arm: arm.clone(),
        };
        // Another caller may have been faster; both clients are as good.
        Ok(self.connection.get_or_init(|| connected))
    }

    /// Returns the id of a VM of this subscription; `None`: no VM of ours can have this id.
    pub(crate) fn vm_id(&self, id: &InstanceId) -> Result<Option<ResourceId>, Error> {
        let arm = self.arm()?;
        Ok(ResourceId::of_kind(id.as_str(), VM).filter(|id| arm.has(id)))
    }

    /// Returns the facts; loads them if they are missing, old or not wanted from before.
    pub(crate) async fn facts(&self, anew: bool) -> Result<Arc<AzureFacts>, Error> {
        let arm = self.arm()?;
        let load = || async {
            let facts = AzureFacts::load(arm, &self.config).await?;
            self.planner.learn(facts.catalogue.clone());
            for (market, machine, zone) in facts.no_spot_places() {
                let why = "Azure does not sell this type on the spot market";
                self.planner.exhausted_for(Scope::Offering(market, machine, zone), why, LONGEST);
            }
            Ok(facts)
        };
        if anew { self.facts.renew(load).await } else { self.facts.get(load).await }
    }

    /// Returns the facts about the image of a request.
    async fn image(
        &self,
        request: &CreateRequest,
        facts: &AzureFacts,
    ) -> Result<Arc<AzureImageFacts>, Error> {
        let Some(text) = &request.image else { return Ok(Arc::clone(&facts.image)) };
        let what = format!("create of {}: look at the image {}", request.name, short(text));
        let id = ImageId::parse(text).ok_or_else(|| {
            Error::invalid(format!(
                "{what}: it is not the id of an image; write it as in provider.azure.image-id"
            ))
        })?;
        let kept = self.images.lock().iter().find(|image| image.id == id).cloned();
        if let Some(image) = kept {
            return Ok(image);
        }
        let image = Arc::new(
            AzureImageFacts::load(self.arm()?, &id, ApiCall::new("Images_Get", "image", &what)).await?,
        );
        let mut images = self.images.lock();
        if images.len() >= MOST_IMAGES {
            images.remove(0);
        }
        images.push(Arc::clone(&image));
        Ok(image)
    }

    fn check(&self, request: &CreateRequest) -> Result<(), Error> {
        check_creates(self.config.creates, request)?;
        self.capabilities().check(request, "azure")
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            images: true,
            instance_types: true,
            gpus: true,
            archs: vec![self.config.arch],
            confidential: vec![Confidential::SevSnp, Confidential::Tdx],
            spot: self.config.markets.contains(&Market::Spot),
            zones: true,
            public_ip: true,
            second_nic: self.config.second_subnet.is_some(),
            volumes: true,
            console: true,
            ..Capabilities::minimal(MAX_USER_DATA)
        }
    }

    /// Returns a zone in the planner's words. Azure's CSI driver and node labels write `westeurope-1` for zone `1`.
    fn zone(&self, zone: &str) -> String {
        let plain = zone.strip_prefix(self.config.region.as_str()).and_then(|rest| rest.strip_prefix('-'));
        plain.unwrap_or(zone).to_owned()
    }

    /// Chooses an offering among those that are not exhausted. One per attempt: the name of the VM follows from the key.
    pub(crate) fn planned(&self, wanted: &CreateRequest) -> Result<Placement, Error> {
        let wanted = CreateRequest {
            user_data: String::new(),
            zones: wanted.zones.iter().map(|zone| self.zone(zone)).collect(),
            ..wanted.clone()
        };
        self.planner.place(&wanted, 1)
    }

    async fn place(&self, request: &CreateRequest) -> Result<Placement, Error> {
        self.facts(false).await?;
        let what = format!("create of {}", request.name);
        let mut wanted = CreateRequest { user_data: String::new(), ..request.clone() };
        let zones = volumes::zones(self, &request.disks, &what).await?;
        for (disk, zone) in wanted.disks.iter_mut().zip(zones) {
            disk.zone = zone;
        }
        wanted.zones = wanted.zones.iter().map(|zone| self.zone(zone)).collect();
        self.check(&wanted)?;
        self.planned(&wanted)
    }

    async fn make(&self, request: &CreateRequest, key: &IdempotencyKey) -> Result<Created, Error> {
        self.check(request)?;
        let until = until();
        let facts = self.facts(false).await?;
        let offering = &offering(request, self.place(request)).await?;
        let image = self.image(request, &facts).await?;
        self.suits(request, offering, &image)?;
        let launch = AzureLaunch {
            azure: self,
            arm: self.arm()?,
            request,
            key,
            offering,
            facts: &facts,
            image: &image,
            until,
        };
        launch.go().await
    }

    /// Checks that the VM can start from the image.
    fn suits(
        &self,
        request: &CreateRequest,
        offering: &Offering,
        image: &AzureImageFacts,
    ) -> Result<(), Error> {
        let what = format!("create of {}", request.name);
        if image.arch != self.config.arch {
            return Err(Error::invalid(format!(
                "{what}: the image {} is for {}, the pods are for {}; name one for these",
                image.id.text(),
                image.arch,
                self.config.arch
            )));
        }
        if (self.config.confidential || request.confidential.is_some()) && !image.is_confidential {
            return Err(Error::invalid(format!(
                "{what}: {} is confidential, and no confidential VM can start from the image {}; publish it with the \
                 feature SecurityType = ConfidentialVmSupported",
                offering.machine,
                image.id.text()
            )));
        }
        Ok(())
    }

    /// Waits until a VM has addresses. The caller sets the deadline by dropping the future.
    async fn addresses(&self, id: &InstanceId, what: &str) -> Result<Vec<IpAddr>, Error> {
        let connected = self.connected()?;
        let look = || async {
            let (inspect, addresses) = match self.recent.is_burst(Instant::now()) {
                true => (&connected.look_in_a_burst, &connected.addresses_in_a_burst),
                false => (&connected.inspect, &connected.addresses),
            };
            let (vm, found) = tokio::join!(
                inspect.ask(id.as_str().to_owned(), until(), what),
                addresses.ask(id.as_str().to_owned(), until(), what)
            );
            let Some(vm) = vm? else { return Ok(Look::Unknown) };
            if !vm.marks.are_of(&self.owner) {
                return Ok(if vm.marks.cluster.is_some() { Look::Foreign } else { Look::Unmarked });
            }
            if matches!(vm.state, VmState::Ended | VmState::Failed | VmState::Deleting) {
                let why = vm
                    .refusal
                    .map(|said| format!(": {}: {}", said.code, clip(&said.message)))
                    .unwrap_or_default();
                return Err(Error::not_found(format!("{what}: it has ended{why}")));
            }
            Ok(found?.map_or(Look::Open, Look::Done))
        };
        wait_for(&LOOKS, &self.recent, id, (what, "Azure"), look).await
    }
}

/// Deletes left-over parts in a task of its own, so that no list waits for it.
fn clean(azure: Arc<Azure>) {
    tokio::spawn(async move {
        let cleaned = async { remove::clean_again(&azure.strays, azure.arm()?, &azure.owner).await };
        match cleaned.await {
            Ok(0) => {}
            Ok(count) => tracing::info!(count, "deleted our parts without a VM"),
            Err(error) => tracing::warn!("parts of failed creates stay: {error}"),
        }
    });
}

#[async_trait]
impl Provider for AzureProvider {
    fn name(&self) -> &'static str {
        "azure"
    }

    fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
    }

    async fn preflight(&self) -> Result<Preflight, Error> {
        crate::preflight::run(&self.0).await
    }

    async fn place(&self, request: &CreateRequest) -> Result<Option<Placement>, Error> {
        self.0.check(request)?;
        self.0.place(request).await.map(Some)
    }

    async fn create(&self, request: &CreateRequest, key: &IdempotencyKey) -> Result<Created, Error> {
        self.0.make(request, key).await
    }

    async fn addresses(&self, id: &InstanceId) -> Result<Vec<IpAddr>, Error> {
        let what = format!("addresses of VM {}", short(id.as_str()));
        match self.0.vm_id(id)? {
            Some(vm) if vm.text() == id.as_str() => self.0.addresses(id, &what).await,
            _ => Err(Error::not_found(format!("{what}: this is no id of a VM of this subscription"))),
        }
    }

    async fn delete(&self, id: &InstanceId) -> Result<(), Error> {
        let azure = &self.0;
        let Some(vm_id) = azure.vm_id(id)? else { return Ok(()) };
        let (what, until) = (format!("delete of VM {}", vm_id.name()), until());
        let connected = azure.connected()?;
        let Some(vm) = connected.inspect.ask(vm_id.text(), until, &what).await? else {
            if azure.recent.may_be_denied(id, Instant::now()) {
                return Err(Error::transient(format!(
                    "{what}: Azure does not know it yet, it was made a moment ago; it is tried again"
                )));
            }
            return remove::nics_of(&connected.arm, &azure.owner, &vm_id, &what, until).await;
        };
        azure.recent.seen(id);
        if !vm.marks.are_of(&azure.owner) {
            tracing::warn!(
                vm = vm_id.name(),
                "the VM has no tags of this cluster, node and installation: it is left alone"
            );
            return Ok(());
        }
        if vm.state == VmState::Deleting {
            return Ok(());
        }
        remove::vm(&connected.arm, &vm_id, &what, until).await
    }

    async fn list_owned(&self) -> Result<Vec<Owned>, Error> {
        let azure = &self.0;
        let mut owned = vms::all_of(azure.arm()?, &azure.owner, azure.config.use_public_ip, until()).await?;
        // A late list has the interface of a new VM, and not the VM.
        let is_new = |one: &Owned| one.key.is_none() && azure.recent.may_be_denied(&one.id, Instant::now());
        owned.retain(|one| !is_new(one));
        if azure.strays.is_due(Instant::now()) {
            clean(Arc::clone(azure));
        }
        owned.extend(azure.recent.missing_from(&owned, Instant::now()));
        Ok(owned)
    }

    fn extensions(&self) -> Extensions<'_> {
        Extensions { batch: None, volumes: Some(self), console: Some(self) }
    }

    fn register_metrics(&self, registry: &mut Registry) {
        self.0.scheduler.register(registry);
    }
}

#[async_trait]
impl Volumes for AzureProvider {
    async fn attach(&self, id: &InstanceId, disk: &DiskRequest) -> Result<DiskIdentity, Error> {
        volumes::attach(&self.0, id, disk).await
    }

    async fn detach(&self, id: &InstanceId, volume: &str) -> Result<(), Error> {
        volumes::detach(&self.0, id, volume).await
    }
}

#[async_trait]
impl Console for AzureProvider {
    async fn tail(&self, id: &InstanceId, limit: usize) -> Result<Vec<u8>, Error> {
        console::tail(&self.0, id, limit).await
    }
}
