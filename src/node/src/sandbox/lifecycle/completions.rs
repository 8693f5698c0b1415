//! Applies the results of finished operations. A change is recorded before it takes effect. A result that cannot be
//! recorded is delivered again later, so that a full disk loses no VM.

use std::{net::IpAddr, time::Duration};

use peerpod_proto::guest::{Reply, Status};
use peerpod_provider_api::{InstanceId, Placement};
use protobuf::Message;
use tracing::{error, info, warn};

use crate::sandbox::{
    error::Error,
    lifecycle::{
        clear::Pass,
        in_flight::{Completion, Which},
        phase::{Event, Phase, next},
        task::{Task, Unapplied},
    },
    network::follow::Told,
    ports::{CloudError, Ports, Retry},
    vm::{
        batch::{BatchMember, CreatePath},
        console::Console,
    },
};
use crate::{ledger::Record, volumes::PodVolumes};

/// Pause before the next address query, while a guest connects from an address that the cloud has not named.
const BETWEEN_LOOKS: Duration = Duration::from_secs(1);
/// Time limit for fetching a console, which is often the only evidence about a VM that did not start.
const CONSOLE: Duration = Duration::from_secs(10);
/// DHCP wait of a VM above which the node logs a warning. A DHCP server without a delay answers in a few ms.
const SLOW_DHCP: Duration = Duration::from_secs(1);
/// Number of consecutive failures after which the node posts an Event.
const TELL_AFTER: u32 = 5;

impl Task {
    pub(crate) async fn outcome(&mut self, which: Which, outcome: Completion) {
        let result = match outcome.clone() {
            Completion::Rested => Ok(()),
            Completion::Seated(member) => self.seated(member).await,
            Completion::Announced(uid) => self.was_announced(uid).await,
            Completion::Placed(Ok(placement)) => self.placed(placement).await,
            Completion::Placed(Err(error)) => self.not_placed(error).await,
            Completion::Created(Ok(vm)) | Completion::Found { result: Ok(Some(vm)), .. } => {
                self.made(vm).await
            }
            Completion::Created(Err(error)) => self.not_made(error).await,
            Completion::Found { result: Ok(None), after } => self.nothing_found(after).await,
            Completion::Found { result: Err(error), after } => self.not_looked(error, after).await,
            Completion::Located(Ok(addresses)) => self.located(addresses).await,
            Completion::Located(Err(error)) => self.not_located(error).await,
            Completion::Attached(Ok(volumes)) => self.attached(*volumes).await,
            Completion::Attached(Err(error)) => self.not_attached(error).await,
            Completion::Reserved(Ok(network)) => {
                let mut record = self.record.clone();
                record.network = Some(network);
                record.reached("network_reserved", self.fx.now_ms());
                // The relay may carry this tunnel, and then identifies the guest by its VNIs.
                self.relay.put_wanted += u64::from(record.binding.is_some());
                self.save(record).await.map_err(Unapplied::Disk)
            }
            Completion::Connected(Ok(plan)) => {
                self.guest.plan = Some(Told::new(*plan));
                self.reached("network_connected");
                Ok(())
            }
            Completion::Followed { heard, result: Ok(followed) } => self.followed(heard, *followed).await,
            Completion::Followed { heard, result: Err(error) } => {
                self.not_followed(heard, error);
                Ok(())
            }
            Completion::Traced { from, near, result } => self.traced(from, near, result).await,
            Completion::Reserved(Err(error)) | Completion::Connected(Err(error)) => {
                self.no_network(error.text, error.permanent).await
            }
            Completion::Put { version, result: Ok(()) } => {
                self.relay.put_done = version;
                self.reached("relay_ready");
                self.guest.claims.put_done(version);
                Ok(())
            }
            Completion::Put { result: Err(error), .. } => {
                self.later(Which::Relay, error.text);
                Ok(())
            }
            Completion::Carried { version, result } => {
                self.localhost_carried(version, result);
                Ok(())
            }
            Completion::Greeted { session, digest, secret, result: Ok(reply) } => {
                self.greeted(session, digest, secret, *reply).await
            }
            Completion::PullSecret(answer) => {
                self.pull_secret_came(answer);
                Ok(())
            }
            Completion::Greeted { result: Err(error), .. } => {
                self.later(Which::Guest, error.text);
                Ok(())
            }
            Completion::Told { trusted, result: Ok(reply) } => self.told(trusted, *reply).await,
            Completion::Renewed { trusted, result: Ok(reply) } => self.renewed(trusted, *reply).await,
            Completion::Told { result: Err(error), .. } | Completion::Renewed { result: Err(error), .. } => {
                self.later(Which::Guest, error.text);
                Ok(())
            }
            Completion::Cleared(pass) => self.passed(pass).await,
        };
        match result {
            Ok(()) => {}
            Err(Unapplied::Disk(error)) => {
                warn!(%error, "cannot record the result of an operation; trying again");
                self.in_flight.get(which).again(outcome);
            }
            Err(Unapplied::Refused(refused)) => {
                error!(%refused, "result dropped: this is a bug of peerpod-node")
            }
        }
    }

    /// Applies the end of the window: the sandbox is a member of a batch, or goes on alone.
    async fn seated(&mut self, member: Option<BatchMember>) -> Result<(), Unapplied> {
        if let Some(member) = member {
            self.vm.way = CreatePath::Seated(member);
            self.reached("batched");
            return Ok(());
        }
        if !self.record.phase.is_live() {
            return self.never_sent().await;
        }
        self.vm.way = CreatePath::Alone;
        Ok(())
    }

    /// Handles the end of the announcement: the cluster shows the sandbox, or the bounded wait for it is over.
    async fn was_announced(&mut self, uid: Option<String>) -> Result<(), Unapplied> {
        self.start.announced = true;
        if !self.record.phase.is_live() && self.vm.unsent {
            return self.never_sent().await;
        }
        let mut record = self.record.clone();
        if let (Some(uid), Some(pod)) = (uid, &mut record.pod)
            && pod.uid.is_none()
        {
            // By its name alone, the pod could be another one after a restart.
            pod.uid = Some(uid);
            record.reached("announced", self.fx.now_ms());
            return self.save(record).await.map_err(Unapplied::Disk);
        }
        self.reached("announced");
        Ok(())
    }

    /// Records the provider's placement before the create call, so that a repeated create names the same place.
    async fn placed(&mut self, placement: Option<Placement>) -> Result<(), Unapplied> {
        let (Phase::Booting { attempt } | Phase::Unwanted { attempt }) = self.record.phase else {
            return Ok(());
        };
        let Some(placement) = placement else {
            self.vm.placed = Some(attempt);
            return Ok(());
        };
        if !self.record.phase.is_live() {
            return self.never_sent().await;
        }
        let mut record = self.record.clone();
        if let Some(request) = &mut record.request {
            request.placement = Some(placement);
        }
        record.reached("placed", self.fx.now_ms());
        self.save(record).await.map_err(Unapplied::Disk)
    }

    /// Handles a failed placement: this attempt has requested nothing from the cloud.
    async fn not_placed(&mut self, error: CloudError) -> Result<(), Unapplied> {
        if let Retry::After(pause) = error.retry() {
            self.trouble(Which::Cloud, error.to_string());
            self.in_flight.cloud.rest(pause);
            return Ok(());
        }
        if !self.record.phase.is_live() {
            return self.never_sent().await;
        }
        self.not_to_be_had(Event::Refused, error.to_string()).await
    }

    /// Ends a stopped sandbox for which no create was ever sent: it still waited for its placement or its batch.
    async fn never_sent(&mut self) -> Result<(), Unapplied> {
        self.apply(Event::Refused, |_| {}).await.map(drop)
    }

    async fn made(&mut self, vm: InstanceId) -> Result<(), Unapplied> {
        let now = self.fx.now_ms();
        let member = match &self.vm.way {
            CreatePath::Seated(member) => member.batch().map(|batch| (member.number(), batch)),
            CreatePath::Open | CreatePath::Joining | CreatePath::Alone => None,
        };
        let attempt = match self.record.phase {
            Phase::Booting { attempt } | Phase::Unwanted { attempt } => attempt,
            _ => self.record.attempt,
        };
        self.apply(Event::Made(vm), |record| {
            if let Some((number, batch)) = member {
                record.seat = Some(number);
                record.ticket = Some(batch.ticket.clone());
                record.trust = Some(batch.trust.clone());
            }
            record.attempt = attempt;
            record.reached("vm_made", now);
        })
        .await?;
        self.worked(Which::Cloud);
        info!(vm = self.record.phase.vm().map(InstanceId::as_str), phase = %self.record.phase, "VM made");
        Ok(())
    }

    /// Handles a failed create. Unless the create may be repeated, the node looks for the VM all the same: an earlier
    /// try may have made it, with a lost answer.
    async fn not_made(&mut self, error: CloudError) -> Result<(), Unapplied> {
        match error.retry() {
            Retry::After(pause) => {
                self.trouble(Which::Cloud, error.to_string());
                self.in_flight.cloud.rest(pause);
            }
            Retry::NextOffering | Retry::Never => {
                self.trouble(Which::Cloud, error.to_string());
                if let CreatePath::Seated(_) = self.vm.way {
                    // The batch's task has looked already.
                    return self.nothing_found(Some(error)).await;
                }
                self.find(Some(error));
            }
        }
        Ok(())
    }

    async fn nothing_found(&mut self, after: Option<CloudError>) -> Result<(), Unapplied> {
        let Some(error) = after else {
            match self.record.phase {
                // The list may lag behind a create with a lost answer; a create with the same key finds its VM.
                Phase::Unwanted { .. } => self.ask_to_delete(),
                _ => {
                    self.not_to_be_had(Event::Refused, "the record has no request for a retry".into())
                        .await?;
                }
            }
            return Ok(());
        };
        if error.retry() == Retry::NextOffering {
            let text = error.to_string();
            let last = !matches!(next(&self.record.phase, Event::NoCapacity), Ok((Phase::Booting { .. }, _)));
            if !last {
                // Another attempt gets another placement. Both are recorded together, or a crash would mix the two
                // attempts.
                self.apply(Event::NoCapacity, |record| {
                    if let Some(request) = &mut record.request {
                        request.placement = None;
                    }
                })
                .await?;
                warn!(error = text, "no capacity; trying the next offering");
                self.tell("NoCapacity", format!("{text}; trying the next offering"));
                return Ok(());
            }
            return self.not_to_be_had(Event::NoCapacity, text).await;
        }
        self.not_to_be_had(Event::Refused, error.to_string()).await
    }

    /// Handles a final refusal: the cloud made nothing and will not.
    async fn not_to_be_had(&mut self, event: Event, text: String) -> Result<(), Unapplied> {
        let was_live = self.record.phase.is_live();
        self.apply(event, |record| {
            if was_live {
                record.failed = true;
                record.cause = Some(text.clone());
            }
        })
        .await?;
        if was_live {
            error!(error = text, "the provider refused the VM");
            self.tell("VMRefused", format!("no VM for this pod: {text}"));
            self.metrics.failed("create");
        }
        Ok(())
    }

    /// Handles a failed look-up: it is unknown whether a VM exists. The caller gets the error at once; the node repeats
    /// the look-up until it succeeds.
    async fn not_looked(&mut self, error: CloudError, after: Option<CloudError>) -> Result<(), Unapplied> {
        self.trouble(Which::Cloud, format!("find the VM: {error}"));
        let pause = match error.retry() {
            Retry::After(pause) => pause,
            Retry::NextOffering | Retry::Never => std::time::Duration::ZERO,
        };
        if let Some(after) = after
            && after.retry() == Retry::Never
            && self.record.phase.is_live()
        {
            self.fail("create", after.to_string()).await?;
        }
        self.in_flight.cloud.rest(pause);
        Ok(())
    }

    async fn located(&mut self, addresses: Vec<IpAddr>) -> Result<(), Unapplied> {
        let mut record = self.record.clone();
        if record.addresses.is_empty() {
            record.reached("address_known", self.fx.now_ms());
        }
        // Known addresses stay first: the tunnel uses them.
        record.addresses.extend(addresses.into_iter().filter(|new| !self.record.addresses.contains(new)));
        if record.addresses.len() > self.record.addresses.len() {
            let saved = self.save(record).await.map_err(Unapplied::Disk);
            self.redial();
            saved?;
        }
        if self.is_not_told_apart() {
            self.in_flight.cloud.rest(BETWEEN_LOOKS);
        }
        Ok(())
    }

    async fn attached(&mut self, volumes: PodVolumes) -> Result<(), Unapplied> {
        if !self.record.phase.is_live() {
            return Ok(());
        }
        let mut record = self.record.clone();
        record.volumes = Some(volumes);
        record.reached("volumes_attached", self.fx.now_ms());
        self.worked(Which::Volumes);
        self.save(record).await.map_err(Unapplied::Disk)
    }

    async fn not_attached(&mut self, error: CloudError) -> Result<(), Unapplied> {
        match error.retry() {
            Retry::After(pause) => {
                self.trouble(Which::Volumes, error.to_string());
                self.in_flight.volumes.rest(pause);
                Ok(())
            }
            Retry::NextOffering | Retry::Never if self.record.phase.is_live() => {
                self.fail("volumes", error.to_string()).await
            }
            Retry::NextOffering | Retry::Never => Ok(()),
        }
    }

    async fn not_located(&mut self, error: CloudError) -> Result<(), Unapplied> {
        match error.retry() {
            Retry::After(pause) => {
                self.trouble(Which::Cloud, error.to_string());
                self.in_flight.cloud.rest(pause);
                Ok(())
            }
            Retry::NextOffering | Retry::Never => {
                let mut cause = error.to_string();
                let vm = self.record.phase.vm().cloned();
                if let (CloudError::NotFound { .. }, Some(vm)) = (&error, vm) {
                    cause = self.cause_of_end(&vm, &cause, cause.clone()).await;
                }
                self.fail("addresses", cause).await
            }
        }
    }

    async fn no_network(&mut self, text: String, permanent: bool) -> Result<(), Unapplied> {
        let running = matches!(self.record.phase, Phase::Running { .. });
        if permanent && running {
            error!(error = text, "the node can no longer maintain the pod's network");
            self.tell("NetworkLost", format!("the node can no longer maintain the pod's network: {text}"));
            self.network.given_up = true;
            return Ok(());
        }
        if permanent && self.record.phase.is_live() {
            return self.fail("network", text).await;
        }
        if self.record.phase.is_live() {
            self.later(Which::Network, text);
        }
        Ok(())
    }

    async fn greeted(
        &mut self,
        session: String,
        digest: String,
        secret: Option<String>,
        reply: Reply,
    ) -> Result<(), Unapplied> {
        let status = reply.status.unwrap_or_default();
        let joining = matches!(self.record.phase, Phase::Joining { .. });
        if !reply.error.is_empty() {
            let text = clip(&reply.error);
            if joining {
                return self.fail("personalise", format!("the guest failed: {text}")).await;
            }
            self.refused_plan(session, digest, secret, &text);
            return Ok(());
        }
        self.worked(Which::Guest);
        let now = self.fx.now_ms();
        self.apply(Event::Joined, |record| {
            record.session = Some(session.clone());
            record.told = Some(digest.clone());
            hand_over(record, &secret);
            record.reached("running", now);
            // No create follows, and the request contains the ticket's secret.
            record.request = None;
        })
        .await?;
        if joining {
            self.say_joined(&status);
        } else {
            let mut record = self.record.clone();
            let before = record.session.replace(session);
            let plan_is_new = record.told.as_ref() != Some(&digest);
            record.told = Some(digest);
            hand_over(&mut record, &secret);
            self.save(record).await.map_err(Unapplied::Disk)?;
            if before == self.record.session {
                if plan_is_new {
                    info!("the guest follows the pod's network");
                } else {
                    info!("the guest has the pod's current pull secrets");
                }
                return Ok(());
            }
            let lost: Vec<String> = status.lost.iter().map(|what| clip(what)).collect();
            let lost = lost.join("; ");
            warn!(lost, guest_version = clip(&status.version), "the guest rejoined");
            self.tell("GuestRestarted", format!("the guest program in the pod's VM restarted; lost: {lost}"));
        }
        Ok(())
    }

    fn say_joined(&self, status: &Status) {
        for stage in &status.stages {
            self.metrics.guest_stage(&stage.name, stage.took_us);
        }
        let stages: Vec<String> =
            self.record.stages.iter().map(|stage| format!("{}={}ms", stage.name, stage.at_ms)).collect();
        let uplink = status.stages.iter().find(|stage| stage.name == "uplink");
        let waited = uplink.map(|stage| Duration::from_micros(stage.took_us)).unwrap_or_default();
        if waited > SLOW_DHCP {
            // A property of the network: one line covers all VMs.
            static ONCE: std::sync::Once = std::sync::Once::new();
            ONCE.call_once(|| {
                warn!(
                    ?waited,
                    "the VM waited for its address from DHCP, as every VM of this network may: let the DHCP \
                     server offer addresses without a ping before (dnsmasq: no-ping), or find the cause of \
                     its late answers"
                );
            });
        }
        let guest: Vec<String> = status
            .stages
            .iter()
            .take(16)
            .map(|stage| format!("{}={}us", clip(&stage.name), stage.took_us))
            .collect();
        info!(
            vm = self.record.phase.vm().map(InstanceId::as_str),
            stages = stages.join(" "),
            guest_stages = guest.join(" "),
            guest_version = clip(&status.version),
            "running"
        );
    }

    async fn passed(&mut self, pass: Pass) -> Result<(), Unapplied> {
        for (stage, at) in &pass.reached {
            if self.record.stage(stage).is_none() {
                self.metrics.stage(&format!("stop_{stage}"), at.saturating_sub(self.end.left_ms));
            }
            self.record.reached(stage, *at);
        }
        let failed = pass.errors.join("; ");
        self.end.leaving = Some(pass.left.clone());
        self.publish();
        if !pass.left.is_nothing() {
            warn!(error = failed, "cannot remove all resources yet; trying again");
            if self.in_flight.clear.failures() == TELL_AFTER {
                self.tell(
                    "CleanUpFails",
                    format!("cannot remove all resources of this pod yet; trying again: {failed}"),
                );
            }
            self.in_flight.clear.rest(std::time::Duration::ZERO);
            return Ok(());
        }
        if !failed.is_empty() {
            warn!(error = failed, "sandbox removed, with errors");
        }
        let now = self.fx.now_ms();
        self.apply(Event::Cleared, |record| {
            record.reached("gone", now);
            record.write_tombstone(now);
        })
        .await?;
        Ok(())
    }

    /// Schedules a retry after a failure.
    pub(crate) fn later(&mut self, which: Which, text: String) {
        let slot = self.in_flight.get(which);
        if slot.failures() == 3 {
            warn!(error = text, step = ?which, "step still fails");
        }
        slot.rest(std::time::Duration::ZERO);
        self.trouble(which, text);
    }

    pub(crate) fn trouble(&mut self, which: Which, text: String) {
        tracing::debug!(error = text, step = ?which, "step failed; trying again");
        self.start.trouble.retain(|(other, _)| *other != which);
        self.start.trouble.push((which, text));
    }

    pub(crate) fn worked(&mut self, which: Which) {
        self.in_flight.get(which).worked();
        self.start.trouble.retain(|(other, _)| *other != which);
    }

    /// Returns the stage in which the boot hangs, its usual cause and the end of the console.
    pub(crate) async fn why_late(&mut self) -> (&'static str, String) {
        let (stage, mut text) = self.where_it_hangs(self.settings.boot_timeout);
        if let Some(vm) = self.record.phase.vm() {
            let console = console_of(&*self.fx, vm).await;
            text.push_str(&console.map(|console| console.to_string()).unwrap_or_default());
        }
        (stage, text)
    }

    /// Returns the stage that is missing after `limit`, and its usual cause.
    pub(crate) fn where_it_hangs(&self, limit: Duration) -> (&'static str, String) {
        let after = |which: Which| {
            let last = self.start.trouble.iter().find(|(other, _)| *other == which);
            last.map(|(_, text)| format!("; the last error was: {text}")).unwrap_or_default()
        };
        let vm = self.record.phase.vm();
        let name = vm.map_or("the VM", InstanceId::as_str);
        match &self.record.phase {
            Phase::Booting { .. } => {
                ("create", format!("the cloud did not make a VM within {limit:?}{}", after(Which::Cloud)))
            }
            _ if self.record.addresses.is_empty() => {
                ("addresses", format!("{name} got no address within {limit:?}{}", after(Which::Cloud)))
            }
            _ if self.record.volumes.as_ref().is_some_and(|volumes| !volumes.is_ready()) => (
                "volumes",
                format!(
                    "the pod's volumes were not attached to {name} within {limit:?}{}",
                    after(Which::Volumes)
                ),
            ),
            _ if self.guest.plan.is_none() => (
                "network",
                format!(
                    "the pod's network could not be connected to {name} within {limit:?}{}",
                    after(Which::Network)
                ),
            ),
            _ if self.record.binding.is_none() && self.settings.dial.is_some() => (
                "boot",
                format!(
                    "this node did not reach {name} within {limit:?}, so it did not join: it did not boot, \
                     its image has no peerpod-guest that listens, or a firewall between them is closed (TCP \
                     to {}){}",
                    self.dial().join(", "),
                    after(Which::Relay)
                ),
            ),
            _ if self.record.binding.is_none() => (
                "boot",
                format!(
                    "{name} did not dial this node within {limit:?}, so it did not join: it did not boot, \
                     its image has no peerpod-guest, or a firewall between them is closed (TCP to {}){}{}",
                    self.settings.guest_addresses,
                    self.stranger(),
                    after(Which::Relay)
                ),
            ),
            _ if !self.guest.state.borrow().connected => (
                "link",
                format!(
                    "the guest of {name} got its certificate but did not join by the link within {limit:?}{}",
                    after(Which::Relay)
                ),
            ),
            _ => {
                let stage = Status::parse_from_bytes(&self.guest.state.borrow().status)
                    .map(|status| clip(&status.stage))
                    .unwrap_or_default();
                (
                    "personalise",
                    format!(
                        "the guest of {name} did not get ready within {limit:?} (it is at {stage:?}){}",
                        after(Which::Guest)
                    ),
                )
            }
        }
    }
}

impl Task {
    /// Explains a guest of the same batch that came from an unknown address; empty if there is none.
    fn stranger(&self) -> String {
        let ticket = self.record.ticket.as_ref().filter(|_| self.record.seat.is_some());
        let Some(from) = ticket.and_then(|ticket| self.vm.tickets.stranger(&ticket.id)) else {
            return String::new();
        };
        format!(
            "; a VM of the same batch came from {from}, which is not the address of any member: VMs of a \
             batch must reach the node from their own addresses (set node.batch to off where NAT translates \
             them)"
        )
    }
}

impl From<Error> for Unapplied {
    fn from(error: Error) -> Unapplied {
        Unapplied::Disk(error)
    }
}

/// Returns the end of the VM's console, if the provider offers it.
pub(crate) async fn console_of(fx: &dyn Ports, vm: &InstanceId) -> Option<Console> {
    let text = tokio::time::timeout(CONSOLE, fx.console(vm)).await.ok().flatten();
    text.map(|text| Console::read(&text))
}

/// Shortens a guest's text to one log line: 400 characters, without control characters.
pub(crate) fn clip(text: &str) -> String {
    text.chars().take(400).map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// Records the digest of the guest's pull secrets; while none are known, the guest keeps those it had.
fn hand_over(record: &mut Record, secret: &Option<String>) {
    if let Some(secret) = secret {
        record.told_secret = Some(secret.clone()).filter(|secret| !secret.is_empty());
    }
}
