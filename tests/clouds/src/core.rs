//! Answers one request: records it, applies tokens, rates, rights and faults, and asks the fake.

use std::time::Duration;

use serde_json::Value;

use crate::clock::Clock;
use crate::fake::{Answer, Fake, Request, World};
use crate::faults::{Fault, Faults};
use crate::rates::Rates;
use crate::tokens::Tokens;

/// A recorded call and the status of its answer.
#[derive(Clone, Debug)]
pub struct Call {
    /// Time of its arrival, since the cloud's start.
    pub at: Duration,
    /// Name of the call ([`Fake::action`]).
    pub action: String,
    /// Rights that the cloud checks for it.
    pub rights: Vec<String>,
    /// The request itself, with all that it carries.
    pub request: Request,
    /// The answer, also one that was lost.
    pub answer: Answer,
    /// Status of the answer; 0 without an answer.
    pub status: u16,
    /// Whether the cloud refused it because of its rate.
    pub throttled: bool,
}

impl Call {
    /// Returns the body as JSON; `Null` when it is none.
    pub fn body(&self) -> Value {
        self.request.json()
    }
}

/// State of a cloud.
#[derive(Debug)]
pub(crate) struct Core<F> {
    pub(crate) fake: F,
    pub(crate) faults: Faults,
    pub(crate) rates: Rates,
    pub(crate) tokens: Tokens,
    pub(crate) calls: Vec<Call>,
    pub(crate) clock: Clock,
}

/// Fate of an answer.
pub(crate) enum Delivery {
    /// It is sent after this time.
    After(Duration),
    /// The connection breaks.
    Broken,
}

impl<F: Fake> Core<F> {
    pub(crate) fn new(fake: F) -> Core<F> {
        Core {
            fake,
            faults: Faults::default(),
            rates: Rates::default(),
            tokens: Tokens::default(),
            calls: Vec::new(),
            clock: Clock::start(),
        }
    }

    /// Moves the fake to the present.
    pub(crate) fn tick(&mut self) -> Duration {
        let now = self.clock.now();
        self.fake.tick(now);
        now
    }

    /// Answers a witness: without faults, tokens and records.
    pub(crate) fn plain(&mut self, request: &Request, endpoint: &str) -> Answer {
        let now = self.tick();
        let action = self.fake.action(request);
        let mut world = World {
            now,
            endpoint,
            is_witness: true,
            lag: Duration::ZERO,
            late: None,
            left: Vec::new(),
            tokens: &mut self.tokens,
            faults: &mut self.faults,
        };
        self.fake.answer(request, &action, &mut world)
    }

    /// Answers a provider.
    pub(crate) fn faulty(&mut self, request: &Request, endpoint: &str) -> (Answer, Delivery) {
        let now = self.tick();
        let action = self.fake.action(request);
        let rights = self.fake.rights(request, &action);
        let later =
            self.fake.is_later_page(request).then(|| self.faults.next(&format!("{action} second page")));
        let fault = later.flatten().or_else(|| self.faults.next(&action));
        let (answer, throttled) = match &fault {
            Some(Fault::Reset) => (Answer::default(), false),
            Some(Fault::Answer(answer)) => (answer.clone(), false),
            Some(Fault::Refuse { status, code, message }) => {
                (self.fake.refusal(*status, code, message), false)
            }
            _ => self.checked(request, endpoint, &action, &rights, fault.as_ref(), now),
        };
        let delivery = match fault {
            Some(Fault::Reset | Fault::LostAnswer) => Delivery::Broken,
            Some(Fault::Late(time)) => Delivery::After(time),
            _ => Delivery::After(Duration::ZERO),
        };
        let status = if matches!(delivery, Delivery::Broken) { 0 } else { answer.status };
        let (request, recorded) = (request.clone(), answer.clone());
        self.calls.push(Call { at: now, action, rights, request, answer: recorded, status, throttled });
        (answer, delivery)
    }

    /// Answers a call that no fault refuses; returns whether its rate was too high.
    fn checked(
        &mut self,
        request: &Request,
        endpoint: &str,
        action: &str,
        rights: &[String],
        fault: Option<&Fault>,
        now: Duration,
    ) -> (Answer, bool) {
        let is_open = self.fake.is_open(action);
        if !is_open && !self.tokens.admits(request.header("authorization"), now) {
            return (self.fake.unauthorized(), false);
        }
        let mut left = Vec::new();
        for (counter, rate) in self.fake.rates(request, action) {
            match self.rates.take(&counter, rate, now) {
                Ok(rest) => left.extend(rest.map(|rest| (counter, rest))),
                Err(wait) => return (self.fake.throttled(&counter, wait), true),
            }
        }
        let denied = |name: &&String| self.faults.denied.contains(name.as_str());
        let action_name = action.to_owned();
        if let Some(right) = rights.iter().chain([&action_name]).find(denied) {
            return (self.fake.denied(right), false);
        }
        let late = match fault {
            Some(Fault::LateRefusal { code, message }) => Some((code.clone(), message.clone())),
            _ => None,
        };
        let lag = match fault {
            Some(Fault::StaleList(lag)) => *lag,
            _ => self.faults.lag,
        };
        let mut world = World {
            now,
            endpoint,
            is_witness: false,
            lag,
            late,
            left,
            tokens: &mut self.tokens,
            faults: &mut self.faults,
        };
        (self.fake.answer(request, action, &mut world), false)
    }
}
