//! Holds one cloud for one test: its listeners, and what the test changes and reads.

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::Value;
use tokio::task::JoinHandle;

use crate::core::{Call, Core, Delivery};
use crate::fake::{Answer, Fake, Request, World};
use crate::faults::{Fault, Faults};
use crate::rates::{Rate, Rates};
use crate::server::{Shared, serve};

/// A cloud that listens. It ends when dropped.
#[derive(Debug)]
pub struct Cloud<F> {
    address: SocketAddr,
    witness: SocketAddr,
    shared: Arc<Shared<F>>,
    tasks: Vec<JoinHandle<()>>,
}

impl<F: Fake> Cloud<F> {
    /// Starts a cloud without faults. Needs a runtime.
    ///
    /// # Errors
    /// When no port is free.
    pub async fn start(fake: F) -> anyhow::Result<Cloud<F>> {
        Cloud::start_on(std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?, fake).await
    }

    /// Starts it on this listener, which may have been bound in another network namespace.
    ///
    /// # Errors
    /// As [`Cloud::start`].
    #[allow(clippy::unused_async)] // it needs a runtime
    pub async fn start_on(listener: std::net::TcpListener, fake: F) -> anyhow::Result<Cloud<F>> {
        let shared = Arc::new(Shared { core: Mutex::new(Core::new(fake)), late: AtomicUsize::new(0) });
        let (address, faulty) = serve(listener, shared.clone(), true)?;
        let straight = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let (witness, straight) = serve(straight, shared.clone(), false)?;
        Ok(Cloud { address, witness, shared, tasks: vec![faulty, straight] })
    }

    /// Returns the provider's endpoint, without a final slash.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Returns a witness's endpoint of the same cloud: without faults, tokens and records.
    pub fn witness_endpoint(&self) -> String {
        format!("http://{}", self.witness)
    }

    /// Reads or changes the fake itself, at the cloud's present time.
    pub fn with<T>(&self, work: impl FnOnce(&mut F, &mut World<'_>) -> T) -> T {
        let mut core = self.shared.core.lock();
        let now = core.tick();
        let core = &mut *core;
        let mut world = World {
            now,
            endpoint: "",
            is_witness: true,
            lag: Duration::ZERO,
            late: None,
            left: Vec::new(),
            tokens: &mut core.tokens,
            faults: &mut core.faults,
        };
        work(&mut core.fake, &mut world)
    }

    /// Calls like a witness, without a socket: `ask("GET", "/path?query", None)`.
    pub fn ask(&self, method: &str, target: &str, body: Option<&Value>) -> Answer {
        let request = Request::new(method, target, &[], body);
        self.shared.core.lock().plain(&request, &self.witness_endpoint())
    }

    /// Calls like a provider with a valid token, without a socket. `None`: the connection would break. Late answers come
    /// at once.
    pub fn call(
        &self,
        method: &str,
        target: &str,
        headers: &[(&str, &str)],
        body: Option<&Value>,
    ) -> Option<Answer> {
        let token = format!("Bearer {}", self.token());
        let mut request = Request::new(method, target, headers, body);
        request.headers.entry("authorization".to_owned()).or_insert(token);
        match self.shared.core.lock().faulty(&request, &self.endpoint()) {
            (_, Delivery::Broken) => None,
            (answer, Delivery::After(_)) => Some(answer),
        }
    }

    /// Issues a token that is valid for an hour.
    pub fn token(&self) -> String {
        self.with(|_, world| world.tokens.issue(world.now, Duration::from_secs(3_600)))
    }

    /// Makes the next `times` calls of an action fail.
    pub fn fail(&self, action: &str, fault: Fault, times: u32) {
        self.shared.core.lock().faults.next.push((action.to_owned(), fault, times));
    }

    /// Denies an action or a right from now on.
    pub fn deny(&self, name: &str) {
        self.shared.core.lock().faults.denied.insert(name.to_owned());
    }

    /// Ends all tokens. New ones are still issued.
    pub fn expire_tokens(&self) {
        self.shared.core.lock().tokens.expire();
    }

    /// Returns the number of tokens issued so far.
    pub fn tokens(&self) -> u32 {
        self.shared.core.lock().tokens.issued()
    }

    /// Limits calls as the cloud does, with time that passes `speed` times as fast.
    pub fn set_rates(&self, speed: f64) {
        let mut core = self.shared.core.lock();
        core.rates = Rates::with_speed(speed);
    }

    /// Gives this account a limit of its own for a counter of [`Fake::rates`], after [`Cloud::set_rates`].
    pub fn set_limit(&self, counter: &str, rate: Rate) {
        self.shared.core.lock().rates.limit(counter, rate);
    }

    /// Sets the number of VMs left of a type in a zone on a market (`spot` or `on-demand`); `*` is any.
    pub fn set_stock(&self, machine: &str, zone: &str, market: &str, left: u64) {
        let names = [machine, zone, market].map(str::to_owned);
        self.shared.core.lock().faults.stock.insert(0, (names, left));
    }

    /// Makes all lists miss the changes of this last time.
    pub fn set_lag(&self, lag: Duration) {
        self.shared.core.lock().faults.lag = lag;
    }

    /// Sets the time before each call takes effect, and the time from then until its answer. A call takes effect also when
    /// its caller is gone by then.
    pub fn set_latency(&self, before: Duration, after: Duration) {
        self.shared.core.lock().faults.latency = (before, after);
    }

    /// Sets the time until the cloud decides on a create, and the time from then until the VM runs.
    pub fn set_times(&self, decision: Duration, boot: Duration) {
        let mut core = self.shared.core.lock();
        core.faults.decision = decision;
        core.faults.boot = boot;
    }

    /// Removes all faults, limits and delays.
    pub fn heal(&self) {
        let mut core = self.shared.core.lock();
        core.faults = Faults::default();
        core.rates = Rates::default();
    }

    /// Stops the cloud's time.
    pub fn stop_time(&self) {
        self.shared.core.lock().clock.stop();
    }

    /// Lets the cloud's time run again.
    pub fn run_time(&self) {
        self.shared.core.lock().clock.run();
    }

    /// Adds to the cloud's time.
    pub fn advance(&self, time: Duration) {
        let mut core = self.shared.core.lock();
        core.clock.advance(time);
        core.tick();
    }

    /// Returns the number of calls that took effect and are not answered yet ([`Fault::Late`]).
    pub fn late(&self) -> usize {
        self.shared.late.load(Ordering::Relaxed)
    }

    /// Returns every call so far, in order of arrival.
    pub fn calls(&self) -> Vec<Call> {
        self.shared.core.lock().calls.clone()
    }

    /// Returns the number of admitted calls of an action (throttled ones do not count); `None`: of all actions.
    pub fn count(&self, action: Option<&str>) -> usize {
        let core = self.shared.core.lock();
        let is_counted = |call: &&Call| !call.throttled && action.is_none_or(|action| call.action == action);
        core.calls.iter().filter(is_counted).count()
    }

    /// Forgets the calls so far.
    pub fn forget_calls(&self) {
        self.shared.core.lock().calls.clear();
    }

    /// Returns the actions of all calls so far.
    pub fn actions(&self) -> BTreeSet<String> {
        self.shared.core.lock().calls.iter().map(|call| call.action.clone()).collect()
    }

    /// Returns the rights that the cloud checked for all calls so far.
    pub fn rights(&self) -> BTreeSet<String> {
        self.shared.core.lock().calls.iter().flat_map(|call| call.rights.clone()).collect()
    }
}

impl<F> Drop for Cloud<F> {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}
