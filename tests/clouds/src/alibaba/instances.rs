//! Instances: their creation, states and deletion.

use std::collections::BTreeMap;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use super::check::{self, Wanted};
use super::{Alibaba, Parameters, answer, get, list, missing, tags};
use crate::fake::{Answer, Refused, World, refused};

/// State of an instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// The cloud makes it.
    Pending,
    /// It boots.
    Starting,
    /// It runs.
    Running,
    /// It is stopping, or going.
    Stopping,
    /// It powered itself off.
    Stopped,
}

/// Instance.
#[derive(Debug, Clone)]
pub struct Instance {
    /// Parameters of its creation.
    pub parameters: BTreeMap<String, String>,
    /// Zone.
    pub zone: String,
    /// State.
    pub state: State,
    /// User-data, decoded.
    pub user_data: Vec<u8>,
    /// Whether the cloud is about to take it back.
    pub is_recalled: bool,
    /// Tags.
    pub tags: BTreeMap<String, String>,
    /// Time of its creation.
    pub made: Duration,
    /// Unique number, which is its address, too.
    pub(super) number: u32,
    /// Times at which it starts and runs.
    times: (Duration, Duration),
    /// Time of its end, once it is being deleted.
    ends: Option<Duration>,
}

impl Alibaba {
    /// Moves all instances to this time.
    pub(super) fn tick_instances(&mut self, now: Duration) {
        let mut gone = Vec::new();
        for (id, one) in self.instances.all_mut() {
            if one.ends.is_some_and(|end| end <= now) {
                gone.push(id.to_owned());
            }
            if one.state == State::Pending && one.times.0 <= now {
                one.state = State::Starting;
            }
            if one.state == State::Starting && one.times.1 <= now {
                one.state = State::Running;
            }
        }
        self.instances.remove_all(&gone, now);
        gone.iter().for_each(|id| self.release_disks(id));
    }

    pub(super) fn run(
        &mut self,
        parameters: &Parameters,
        world: &mut World<'_>,
    ) -> Result<Answer, Box<Refused>> {
        let token = get(parameters, "ClientToken");
        if let Some((first, ids)) = self.tokens.get(token).filter(|_| !token.is_empty()) {
            if first != parameters {
                return refused(
                    400,
                    "IdempotentParameterMismatch",
                    "The request uses the same client token as a previous, but non-identical request.",
                );
            }
            return answer(json!({"InstanceIdSets": {"InstanceIdSet": ids}}));
        }
        let wanted = check::run(parameters)?;
        self.decide(&wanted)?;
        let is_dry = get(parameters, "DryRun").eq_ignore_ascii_case("true");
        if is_dry {
            return refused(
                400,
                "DryRunOperation",
                "Request validation has been passed with DryRun flag set.",
            );
        }
        let market = if wanted.is_spot { "spot" } else { "on-demand" };
        let offering = [wanted.machine.name, wanted.zone, market];
        let granted = (0..wanted.amount).take_while(|_| world.take_stock(offering)).count() as u32;
        if granted < wanted.least {
            return refused(
                403,
                "OperationDenied.NoStock",
                "The requested resource is sold out in the specified zone; try other types of resources or other \
                 regions and zones.",
            );
        }
        let ids: Vec<String> = (0..granted).map(|_| self.make(parameters, &wanted, world)).collect();
        if !token.is_empty() {
            self.tokens.insert(token.to_owned(), (parameters.clone(), ids.clone()));
        }
        answer(json!({"InstanceIdSets": {"InstanceIdSet": ids}, "OrderId": "1", "TradePrice": 0.1}))
    }

    /// Refuses what the account or the zone cannot have.
    fn decide(&mut self, wanted: &Wanted) -> Result<(), Box<Refused>> {
        if !wanted.machine.is_in(wanted.zone) {
            return refused(
                403,
                "InvalidResourceType.NotSupported",
                "This resource type is not supported; please try other resource types.",
            );
        }
        if self.free < wanted.amount {
            return refused(
                403,
                "InvalidVSwitchId.IpNotEnough",
                "The specified VSwitch has not enough IpAddress.",
            );
        }
        let cores = wanted.machine.vcpus * wanted.amount;
        if self.quota.is_some_and(|left| left < cores) {
            return refused(
                403,
                "QuotaExceed.ElasticQuota",
                "No additional quota is available for the specified ECS instance type.",
            );
        }
        Ok(())
    }

    fn make(&mut self, parameters: &Parameters, wanted: &Wanted, world: &World<'_>) -> String {
        let number = self.number();
        let id = format!("i-2ze{number:017}");
        let (decision, boot) = world.times();
        let starts = world.now + decision;
        let instance = Instance {
            parameters: parameters.clone(),
            zone: wanted.zone.to_owned(),
            state: State::Pending,
            user_data: wanted.user_data.clone(),
            is_recalled: false,
            tags: tags(parameters),
            made: world.now,
            number,
            times: (starts, starts + boot),
            ends: None,
        };
        self.instances.add(&id, instance, world.now);
        id
    }

    /// Returns the instances that a call selects.
    fn selected(
        &self,
        parameters: &Parameters,
        world: &World<'_>,
    ) -> Result<Vec<(&str, &Instance)>, Box<Refused>> {
        let is_shown = |one: &Instance| world.is_witness || one.made + self.hidden <= world.now;
        let ids = match get(parameters, "InstanceIds") {
            "" => None,
            text => match serde_json::from_str::<Vec<String>>(text) {
                Ok(ids) if ids.len() <= 100 => Some(ids),
                _ => return check::invalid("InstanceIds", "list"),
            },
        };
        let tags = tags(parameters);
        Ok(match ids {
            Some(ids) => {
                let all = self.instances.all();
                all.filter(|(id, one)| is_shown(one) && ids.iter().any(|wanted| wanted == id)).collect()
            }
            None => {
                let most = if tags.is_empty() { usize::MAX } else { self.most_by_tags };
                let has = |one: &Instance| tags.iter().all(|(key, value)| one.tags.get(key) == Some(value));
                let listed = self.instances.listed(world.now, world.lag);
                listed.filter(|(_, one)| is_shown(one) && has(one)).take(most).collect()
            }
        })
    }

    pub(super) fn describe_instances(
        &self,
        parameters: &Parameters,
        world: &World<'_>,
    ) -> Result<Answer, Box<Refused>> {
        let (page, next) = self.cut(parameters, self.selected(parameters, world)?, 10)?;
        let page: Vec<Value> = page.into_iter().map(|(id, one)| self.view(id, one)).collect();
        answer(
            json!({"Instances": {"Instance": page}, "NextToken": next, "TotalCount": 0, "PageNumber": 0, "PageSize": 0}),
        )
    }

    pub(super) fn list_tags(
        &self,
        parameters: &Parameters,
        world: &World<'_>,
    ) -> Result<Answer, Box<Refused>> {
        if get(parameters, "ResourceType") != "instance" {
            return check::invalid("ResourceType", get(parameters, "ResourceType"));
        }
        let tags = tags(parameters);
        let has = |one: &Instance| tags.iter().all(|(key, value)| one.tags.get(key) == Some(value));
        let found = self.instances.listed(world.now, world.lag).filter(|(_, one)| has(one));
        let entries = found.flat_map(|(id, one)| one.tags.iter().map(move |(key, value)| (id, key, value)));
        let (page, next) = self.cut(parameters, entries.collect(), 50)?;
        let entry = |(id, key, value): (&str, &String, &String)| json!({"ResourceId": id, "ResourceType": "instance", "TagKey": key, "TagValue": value});
        let page: Vec<Value> = page.into_iter().map(entry).collect();
        answer(json!({"TagResources": {"TagResource": page}, "NextToken": next}))
    }

    /// Deletes all or none.
    pub(super) fn delete(
        &mut self,
        parameters: &Parameters,
        world: &World<'_>,
    ) -> Result<Answer, Box<Refused>> {
        let ids = list(parameters, "InstanceId");
        if ids.is_empty() || ids.len() > 100 {
            return check::invalid("InstanceId", "list");
        }
        let is_forced = get(parameters, "Force").eq_ignore_ascii_case("true");
        for id in &ids {
            let Some(one) = self.instances.get(id) else {
                return missing("InvalidInstanceId.NotFound", "InstanceId");
            };
            if one.state == State::Pending || (!is_forced && one.state != State::Stopped) {
                return refused(
                    403,
                    "IncorrectInstanceStatus",
                    "The current status of the resource does not support this operation.",
                );
            }
        }
        let ends = world.now + self.delete_time;
        for id in ids {
            if let Some(one) = self.instances.get_mut(id) {
                one.state = State::Stopping;
                one.ends.get_or_insert(ends);
            }
        }
        self.tick_instances(world.now);
        answer(json!({}))
    }

    pub(super) fn console(&self, parameters: &Parameters) -> Result<Answer, Box<Refused>> {
        let id = get(parameters, "InstanceId");
        if self.instances.get(id).is_none() {
            return missing("InvalidInstanceId.NotFound", "InstanceId");
        }
        let output = STANDARD.encode(format!("{id} boots\n"));
        answer(json!({"InstanceId": id, "ConsoleOutput": output, "LastUpdateTime": "2026-01-01T00:00:00Z"}))
    }
}
