//! Applies the results of finished operations. A change is recorded before it takes effect. A result that cannot be
//! recorded is delivered again later, so that a full disk loses no VM.

use std::net::IpAddr;
use std::time::Duration;

use peerpod_proto::guest::{NetworkPlan, Reply, Status};
use peerpod_provider_api::{Chosen, InstanceId, Placement};
use protobuf::Message;
use tracing::{error, info, warn};

use crate::ledger::{Network, Record};
use crate::one_line;
use crate::sandbox::lifecycle::clear::{Left, Pass};
use crate::sandbox::lifecycle::{Completion, Phase, PhaseEvent, Task, Unapplied, Which, dhcp, next};
use crate::sandbox::network::follow::PlannedNetwork;
use crate::sandbox::ports::{CloudError, NetworkError, Ports, Retry};
use crate::sandbox::vm::batch::{BatchMember, CreatePath};
use crate::sandbox::vm::console::Console;
use crate::volumes::PodVolumes;

/// Pause before the next address query, while a guest connects from an address that the cloud has not named.
const BETWEEN_LOOKS: Duration = Duration::from_secs(1);
/// Time limit for fetching a console, which is often the only evidence about a VM that did not start.
const CONSOLE: Duration = Duration::from_secs(10);
const TELL_AFTER: u32 = 5;
/// Remedy of a VM and a node that do not reach each other.
const OPEN: &str = "see the VM's console, and open the port in its security group and in the firewalls";

impl Task {
    pub(crate) async fn on_completion(&mut self, which: Which, completion: Completion) {
        let result = match completion.clone() {
            Completion::Rested => Ok(()),
            Completion::Batched(member) => self.batched(member).await,
            Completion::Announced(result) => self.was_announced(result).await,
            Completion::Placed(result) => self.placed(result).await,
            Completion::Created(result) => self.created(result).await,
            Completion::Found { result, after } => self.found(result, after).await,
            Completion::Located(result) => self.located(result).await,
            Completion::Attached(result) => self.attached(result).await,
            Completion::Reserved(result) => self.reserved(result).await,
            Completion::Connected(result) => self.connected(result).await,
            Completion::Followed { changes, result } => self.followed(changes, result).await,
            Completion::Traced { from, near, result } => self.traced(from, near, result).await,
            Completion::Put { version, result } => self.put_done(version, result),
            Completion::Carried { version, result } => self.localhost_carried(version, result),
            Completion::Assigned { session, digest, secret, result } => {
                self.assigned(session, digest, secret, result).await
            }
            Completion::PullSecret(answer) => self.pull_secret_came(answer),
            Completion::Csr { trusted, result } => self.csr_came(trusted, result).await,
            Completion::Renewed { trusted, result } => self.renewed(trusted, result).await,
            Completion::Cleared(pass) => self.passed(pass).await,
        };
        match result {
            Ok(()) => {}
            Err(Unapplied::Disk(error)) => {
                warn!(%error, "cannot record the result of an operation; trying again");
                self.in_flight.get(which).again(completion);
            }
            Err(Unapplied::Refused(refused)) => {
                error!(%refused, "result dropped: this is a bug of peerpod-node")
            }
        }
    }

    /// Applies the end of the window: the sandbox is a member of a batch, or goes on alone.
    async fn batched(&mut self, member: Option<BatchMember>) -> Result<(), Unapplied> {
        if let Some(member) = member {
            self.vm.path = CreatePath::Member(member);
            self.reached("batched");
            return Ok(());
        }
        if !self.record.phase.is_live() {
            return self.never_sent().await;
        }
        self.vm.path = CreatePath::Alone;
        Ok(())
    }

    /// Handles the end of the announcement: the volumes are marked as taken, and the cluster shows the sandbox, or the
    /// bounded wait for it is over.
    async fn was_announced(&mut self, result: Result<Option<String>, CloudError>) -> Result<(), Unapplied> {
        let is_live = self.record.phase.is_live();
        let uid = match result {
            _ if !is_live && self.vm.unsent => return self.never_sent().await,
            Ok(uid) => uid,
            Err(error) if self.repeats(Which::Cloud, &error) => return Ok(()),
            Err(error) if self.vm.unsent => {
                return self.not_to_be_had(PhaseEvent::Refused, error.class(), error.to_string()).await;
            }
            // An earlier process may have requested the VM, which must be gone before its volumes are free.
            Err(error) if is_live => return self.fail("volumes", error.class(), error.to_string()).await,
            Err(_) => return Ok(()),
        };
        self.start.announced = true;
        self.reached("announced");
        let is_unknown = self.record.pod.as_ref().is_some_and(|pod| pod.uid.is_none());
        if uid.is_some() && is_unknown {
            // By its name alone, the pod could be another one after a restart.
            self.change(|record| {
                if let Some(pod) = &mut record.pod {
                    pod.uid = uid;
                }
            })
            .await?;
        }
        Ok(())
    }

    /// Records the placement before the create call, so that a repeated create names the same place.
    async fn placed(&mut self, result: Result<Option<Placement>, CloudError>) -> Result<(), Unapplied> {
        let (Phase::Booting { attempt } | Phase::Unwanted { attempt }) = self.record.phase else {
            return Ok(());
        };
        let placement = match result {
            Ok(placement) => placement,
            Err(error) if self.repeats(Which::Cloud, &error) => return Ok(()),
            Err(_) if !self.record.phase.is_live() => return self.never_sent().await,
            Err(error) => {
                return self.not_to_be_had(PhaseEvent::Refused, error.class(), error.to_string()).await;
            }
        };
        let Some(placement) = placement else {
            self.vm.placed = Some(attempt);
            return Ok(());
        };
        if !self.record.phase.is_live() {
            return self.never_sent().await;
        }
        self.reached("placed");
        self.change(|record| {
            if let Some(request) = &mut record.wanted.request {
                request.placement = Some(placement);
            }
        })
        .await?;
        Ok(())
    }

    /// Ends a stopped sandbox for which no create was ever sent: it still waited for its placement or its batch.
    async fn never_sent(&mut self) -> Result<(), Unapplied> {
        self.apply(PhaseEvent::Refused, |_| {}).await
    }

    async fn made(&mut self, vm: InstanceId) -> Result<(), Unapplied> {
        let member = match &self.vm.path {
            CreatePath::Member(member) => member.batch().map(|batch| (member.number, batch)),
            CreatePath::Open | CreatePath::Joining | CreatePath::Alone => None,
        };
        self.reached("vm_made");
        let (id, chosen) = (vm.clone(), self.ports.cloud.chosen(&vm));
        let text = format!("VM {id}{}", chosen.as_ref().map(offering).unwrap_or_default());
        let is_new = self.record.phase.vm().is_none();
        self.apply(PhaseEvent::Made(vm), |record| {
            record.wanted.chosen = chosen.or(record.wanted.chosen.take());
            if let Some((number, batch)) = member {
                record.enrolment.batch_member = Some(number);
                record.enrolment.ticket = Some(batch.ticket.clone());
                record.enrolment.trust = Some(batch.trust.clone());
            }
            if let Phase::Booting { attempt } | Phase::Unwanted { attempt } = record.phase {
                record.wanted.attempt = attempt;
            }
        })
        .await?;
        self.worked(Which::Cloud);
        info!(vm = %id, phase = %self.record.phase, "{text} made");
        if is_new {
            self.progress("VMCreated", text);
        }
        Ok(())
    }

    /// Handles the end of a create. After a final failure, an earlier try may have made the VM: the node looks for it.
    async fn created(&mut self, result: Result<InstanceId, CloudError>) -> Result<(), Unapplied> {
        let error = match result {
            Ok(vm) => return self.made(vm).await,
            Err(error) if self.repeats(Which::Cloud, &error) => return Ok(()),
            Err(error) => error,
        };
        self.trouble(Which::Cloud, error.to_string());
        if let CreatePath::Member(_) = self.vm.path {
            // The batch's task has looked already.
            return self.nothing_found(Some(error)).await;
        }
        self.find(Some(error));
        Ok(())
    }

    async fn nothing_found(&mut self, after: Option<CloudError>) -> Result<(), Unapplied> {
        let Some(error) = after else {
            if let Phase::Unwanted { .. } = self.record.phase {
                // The list may lag behind a create with a lost answer; a create with the same key finds its VM.
                self.ask_to_delete();
                return Ok(());
            }
            let text = "the record has no request for a retry".into();
            return self.not_to_be_had(PhaseEvent::Refused, "lost_request", text).await;
        };
        if error.retry() == Retry::NextOffering {
            let text = error.to_string();
            if let Ok(Phase::Booting { .. }) = next(&self.record.phase, PhaseEvent::NoCapacity) {
                // Another attempt gets another placement; recorded apart, a crash would mix the two attempts.
                self.apply(PhaseEvent::NoCapacity, |record| {
                    if let Some(request) = &mut record.wanted.request {
                        request.placement = None;
                    }
                })
                .await?;
                warn!(error = text, "no capacity; trying the next offering");
                self.tell("NoCapacity", format!("{text}; trying the next offering"));
                return Ok(());
            }
            return self.not_to_be_had(PhaseEvent::NoCapacity, error.class(), text).await;
        }
        self.not_to_be_had(PhaseEvent::Refused, error.class(), error.to_string()).await
    }

    async fn not_to_be_had(
        &mut self,
        event: PhaseEvent,
        class: &'static str,
        text: String,
    ) -> Result<(), Unapplied> {
        if self.apply_failure(event, ("create", class), &text).await? {
            error!(error = text, "the provider refused the VM");
            self.tell("VMRefused", format!("no VM for this pod: {text}"));
        }
        Ok(())
    }

    /// Handles the end of a look-up. After a failed one, it is unknown whether a VM exists: the caller gets the error at
    /// once, and the node repeats the look-up until it succeeds.
    async fn found(
        &mut self,
        result: Result<Option<InstanceId>, CloudError>,
        after: Option<CloudError>,
    ) -> Result<(), Unapplied> {
        let error = match result {
            Ok(Some(vm)) => return self.made(vm).await,
            Ok(None) => return self.nothing_found(after).await,
            Err(error) => error,
        };
        self.trouble(Which::Cloud, format!("find the VM: {error}"));
        let pause = match error.retry() {
            Retry::After(pause) => pause,
            Retry::NextOffering | Retry::Never => Duration::ZERO,
        };
        if let Some(after) = after
            && after.retry() == Retry::Never
            && self.record.phase.is_live()
        {
            self.fail("create", after.class(), after.to_string()).await?;
        }
        self.in_flight.cloud.rest(pause);
        Ok(())
    }

    async fn located(&mut self, result: Result<Vec<IpAddr>, CloudError>) -> Result<(), Unapplied> {
        let addresses = match result {
            Ok(addresses) => addresses,
            Err(error) => return self.not_located(error).await,
        };
        // Known addresses stay first: the tunnel uses them.
        let is_new = |address: &IpAddr| !self.record.addresses.contains(address);
        let new: Vec<IpAddr> = addresses.into_iter().filter(is_new).collect();
        if !new.is_empty() {
            self.reached("address_known");
            let saved = self.change(|record| record.addresses.extend(new)).await;
            self.put_again();
            saved?;
        }
        if self.is_not_told_apart() {
            self.in_flight.cloud.rest(BETWEEN_LOOKS);
        }
        Ok(())
    }

    async fn attached(&mut self, result: Result<Box<PodVolumes>, CloudError>) -> Result<(), Unapplied> {
        let is_live = self.record.phase.is_live();
        match result {
            Ok(volumes) if is_live => {
                self.worked(Which::Volumes);
                self.reached("volumes_attached");
                Ok(self.change(|record| record.volumes = Some(*volumes)).await?)
            }
            Err(error) if self.repeats(Which::Volumes, &error) => Ok(()),
            Err(error) if is_live => self.fail("volumes", error.class(), error.to_string()).await,
            Ok(_) | Err(_) => Ok(()),
        }
    }

    async fn not_located(&mut self, error: CloudError) -> Result<(), Unapplied> {
        if self.repeats(Which::Cloud, &error) {
            return Ok(());
        }
        let mut cause = error.to_string();
        let vm = self.record.phase.vm().cloned();
        if let (CloudError::NotFound { .. }, Some(vm)) = (&error, vm) {
            cause = self.cause_of_end(&vm, &cause, cause.clone()).await;
        }
        self.fail("addresses", error.class(), cause).await
    }

    async fn reserved(&mut self, result: Result<Network, NetworkError>) -> Result<(), Unapplied> {
        let network = match result {
            Ok(network) => network,
            Err(error) => return self.no_network(error).await,
        };
        self.reached("network_reserved");
        self.change(|record| record.network = Some(network)).await?;
        if self.record.enrolment.binding.is_some() {
            // The relay may carry this tunnel, and then identifies the guest by its VNIs.
            self.put_again();
        }
        Ok(())
    }

    async fn connected(&mut self, result: Result<Box<NetworkPlan>, NetworkError>) -> Result<(), Unapplied> {
        match result {
            Ok(plan) => {
                self.guest.plan = Some(PlannedNetwork::new(*plan));
                self.reached("network_connected");
                Ok(())
            }
            Err(error) => self.no_network(error).await,
        }
    }

    async fn no_network(&mut self, error: NetworkError) -> Result<(), Unapplied> {
        let NetworkError { text, permanent } = error;
        if permanent && matches!(self.record.phase, Phase::Running { .. }) {
            error!(error = text, "the node can no longer maintain the pod's network");
            self.tell("NetworkLost", format!("the node can no longer maintain the pod's network: {text}"));
            self.network.given_up = true;
        } else if permanent && self.record.phase.is_live() {
            return self.fail("network", "network", text).await;
        } else if self.record.phase.is_live() {
            self.later(Which::Network, text);
        }
        Ok(())
    }

    fn put_done(&mut self, version: u64, result: Result<(), String>) -> Result<(), Unapplied> {
        match result {
            Ok(()) => {
                self.relay.put_done = version;
                self.reached("relay_ready");
                self.guest.claims.put_done(version);
            }
            Err(error) => self.later(Which::Relay, error),
        }
        Ok(())
    }

    async fn assigned(
        &mut self,
        session: String,
        digest: String,
        secret: Option<String>,
        result: Result<Box<Reply>, String>,
    ) -> Result<(), Unapplied> {
        let Some(reply) = self.guest_reply(result) else { return Ok(()) };
        let status = reply.status.unwrap_or_default();
        let joining = matches!(self.record.phase, Phase::Joining { .. });
        if !reply.error.is_empty() {
            let text = clip(&reply.error);
            if joining {
                return self.fail("personalise", "guest", format!("the guest failed: {text}")).await;
            }
            error!(error = text, "the guest cannot follow the pod's network");
            self.guest.refused = Some((session, digest, secret));
            return Ok(());
        }
        self.worked(Which::Guest);
        let assign = |record: &mut Record| {
            record.assigned.session = Some(session);
            record.assigned.plan = Some(digest);
            // While no pull secrets are known, the guest keeps those it had.
            if let Some(secret) = secret {
                record.assigned.secret = Some(secret).filter(|secret| !secret.is_empty());
            }
        };
        if joining {
            self.reached("running");
            self.apply(PhaseEvent::Joined, |record| {
                assign(record);
                // No create follows, and the request contains the ticket's secret.
                record.wanted.request = None;
            })
            .await?;
            self.joined(&status);
            return Ok(());
        }
        if !matches!(self.record.phase, Phase::Running { .. }) {
            return self.apply(PhaseEvent::Joined, |_| {}).await;
        }
        let (before, plan_before) = (self.record.assigned.session.clone(), self.record.assigned.plan.clone());
        self.change(assign).await?;
        if before != self.record.assigned.session {
            self.rejoined(&status);
        } else if plan_before != self.record.assigned.plan {
            info!("the guest follows the pod's network");
        } else {
            info!("the guest has the pod's current pull secrets");
        }
        Ok(())
    }

    fn joined(&self, status: &Status) {
        self.log_joined(status);
        self.settings.tracer.ended(&self.record, self.ports.clock.now_ms(), &status.stages, None);
        let after = Duration::from_millis(self.record.stage("running").unwrap_or_default());
        let vm = self.record.phase.vm().map_or("the VM", InstanceId::as_str);
        self.progress("VMReady", format!("VM {vm} is ready after {:.1} s", after.as_secs_f64()));
    }

    fn rejoined(&self, status: &Status) {
        let lost: Vec<String> = status.lost.iter().map(|what| clip(what)).collect();
        let lost = lost.join("; ");
        warn!(lost, guest_version = clip(&status.version), "the guest rejoined");
        self.tell("GuestRestarted", format!("the guest program in the pod's VM restarted; lost: {lost}"));
    }

    fn log_joined(&self, status: &Status) {
        for stage in &status.stages {
            self.metrics.guests.stage(&stage.name, stage.took_us);
        }
        dhcp::judge(&self.settings.ready, &status.stages);
        let guest: Vec<String> = status
            .stages
            .iter()
            .take(16)
            .map(|stage| format!("{}={}us", clip(&stage.name), stage.took_us))
            .collect();
        info!(
            vm = self.record.phase.vm().map(InstanceId::as_str),
            stages = self.record.stages_text(),
            guest_stages = guest.join(" "),
            guest_version = clip(&status.version),
            "running"
        );
    }

    async fn passed(&mut self, pass: Pass) -> Result<(), Unapplied> {
        for (stage, at) in &pass.reached {
            if self.record.stage(stage).is_none() {
                self.metrics.sandboxes.stage(&format!("stop_{stage}"), at.saturating_sub(self.end.left_ms));
            }
            self.record.reached(stage, *at);
        }
        let failed = pass.errors.join("; ");
        if pass.flush_over {
            self.flushed(pass.left, pass.unwritten, failed).await;
            return Ok(());
        }
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
            self.in_flight.clear.rest(Duration::ZERO);
            return Ok(());
        }
        if !failed.is_empty() {
            warn!(error = failed, "sandbox removed, with errors");
        }
        let now = self.ports.clock.now_ms();
        self.reached("gone");
        let vm = self.record.phase.vm().cloned();
        self.apply(PhaseEvent::Cleared, |record| record.write_tombstone(now)).await?;
        if let Some(vm) = vm {
            self.progress("VMDeleted", format!("VM {vm} is deleted"));
        }
        Ok(())
    }

    /// Records that the flush of the pod's volumes is over. The other steps follow, also if the disk is full: only a crash
    /// before the next record repeats the flush.
    async fn flushed(&mut self, left: Left, unwritten: Option<String>, failed: String) {
        if let Err(error) = self.change(|record| record.end.flush_over = true).await {
            warn!(%error, "cannot record the end of the flush; the stop goes on");
            self.record.end.flush_over = true;
        }
        self.end.leaving = Some(left);
        if !failed.is_empty() {
            warn!(error = failed, "the flush of the pod's volumes is not complete");
        }
        if let Some(why) = unwritten {
            let text = format!(
                "data of the pod's volumes may be lost: the node deletes the VM before it has written everything \
                 back: {why}"
            );
            self.tell("VolumesNotFlushed", text);
        }
    }

    /// Notes the error of an operation that may be repeated, and pauses before the next try; `false` for a final error.
    fn repeats(&mut self, which: Which, error: &CloudError) -> bool {
        let Retry::After(pause) = error.retry() else { return false };
        self.trouble(which, error.to_string());
        self.in_flight.get(which).rest(pause);
        true
    }

    pub(crate) fn later(&mut self, which: Which, text: String) {
        let slot = self.in_flight.get(which);
        if slot.failures() == 3 {
            warn!(error = text, step = ?which, "step still fails");
        }
        slot.rest(Duration::ZERO);
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
            let console = console_of(&self.ports, vm).await;
            text.push_str(&console.map(|console| console.to_string()).unwrap_or_default());
        }
        (stage, text)
    }

    /// Returns the stage that is missing after `limit`, and its usual cause.
    pub(crate) fn where_it_hangs(&self, limit: Duration) -> (&'static str, String) {
        let name = self.record.phase.vm().map_or("the VM", InstanceId::as_str);
        let (stage, which, text) = match &self.record.phase {
            Phase::Booting { .. } => {
                ("create", Which::Cloud, format!("the cloud did not make a VM within {limit:?}"))
            }
            _ if self.record.addresses.is_empty() => {
                ("addresses", Which::Cloud, format!("{name} got no address within {limit:?}"))
            }
            _ if self.record.volumes.as_ref().is_some_and(|volumes| !volumes.is_ready()) => {
                let text = format!("the pod's volumes were not attached to {name} within {limit:?}");
                ("volumes", Which::Volumes, text)
            }
            _ if self.guest.plan.is_none() => {
                let text = format!("the pod's network could not be connected to {name} within {limit:?}");
                ("network", Which::Network, text)
            }
            _ if self.record.enrolment.binding.is_none() => {
                ("boot", Which::Relay, self.why_not_joined(name, limit))
            }
            _ if !self.guest.state.borrow().connected => {
                let text = format!(
                    "the guest of {name} got its certificate but did not join by the link within {limit:?}"
                );
                ("link", Which::Relay, text)
            }
            _ => {
                let status = Status::parse_from_bytes(&self.guest.state.borrow().status).unwrap_or_default();
                let at = clip(&status.stage);
                let text =
                    format!("the guest of {name} did not get ready within {limit:?} (it is at {at:?})");
                ("personalise", Which::Guest, text)
            }
        };
        let last = self.start.trouble.iter().find(|(other, _)| *other == which);
        let last = last.map(|(_, text)| format!("; the last error was: {text}")).unwrap_or_default();
        let obstacle =
            Some(which).filter(|which| *which == Which::Cloud).and_then(|_| self.ports.cloud.obstacle());
        let obstacle = obstacle.map(|why| format!("; {why}")).unwrap_or_default();
        (stage, text + &last + &obstacle)
    }

    fn why_not_joined(&self, name: &str, limit: Duration) -> String {
        if self.settings.dial.is_some() {
            return format!(
                "this node did not reach {name} within {limit:?}, so it did not join: it did not boot, its image has \
                 no peerpod-guest that listens, or a firewall between them is closed (TCP to {}); {OPEN}",
                self.dial().join(", ")
            );
        }
        format!(
            "{name} did not dial this node within {limit:?}, so it did not join: it did not boot, its image has no \
             peerpod-guest, or a firewall between them is closed (TCP to {}); {OPEN}{}{}",
            self.settings.guest_addresses,
            self.refusal(),
            self.stranger()
        )
    }

    /// Returns the reason of the last refused claim; empty if none was refused.
    fn refusal(&self) -> String {
        self.guest
            .claims
            .refused
            .map(|why| format!("; the node refused its claim: {why}"))
            .unwrap_or_default()
    }

    /// Explains a guest of the same batch that came from an unknown address; empty if there is none.
    fn stranger(&self) -> String {
        let ticket = self.record.enrolment.shared_ticket();
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

/// Returns the end of the VM's console, if the provider offers it.
pub(crate) async fn console_of(ports: &Ports, vm: &InstanceId) -> Option<Console> {
    let text = tokio::time::timeout(CONSOLE, ports.cloud.console(vm)).await.ok().flatten();
    text.map(|text| Console::read(&text))
}

/// Returns the VM's type, zone and market for a text; empty if none is known.
fn offering(chosen: &Chosen) -> String {
    let market = chosen.market.map(|market| market.word().to_owned());
    let known: Vec<String> =
        [chosen.instance_type.clone(), chosen.zone.clone(), market].into_iter().flatten().collect();
    if known.is_empty() { String::new() } else { format!(" {}", known.join(" ")) }
}

/// Shortens a guest's text to one log line.
pub(crate) fn clip(text: &str) -> String {
    one_line(text, 400)
}
