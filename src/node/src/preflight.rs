//! Asks the provider whether the node may make all later calls. The node is not ready until it has answered: the
//! readiness shows since when the provider is asked, and its last error.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use peerpod_base::admin::{BlockReady, Ready};
use peerpod_common::backoff::Backoff;
use peerpod_provider_api::{Preflight, Provider};
use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};
use tracing::{debug, error, info, warn};

use crate::app::{Tasks, spawn};
use crate::ports::GuestAddresses;

/// Time that a start waits for the provider's first answer. After it the node starts, but is not ready, and new VMs wait
/// longer.
const FIRST_ANSWER: Duration = Duration::from_secs(5);
/// Pauses between two tries.
const AGAIN: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(10));

/// Facts of the preflight, once the provider has no objection. Clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Facts(Arc<OnceLock<Vec<String>>>);

impl Facts {
    /// The facts so far.
    pub(crate) fn get(&self) -> Vec<String> {
        self.0.get().cloned().unwrap_or_default()
    }
}

/// Starts the preflight, and returns at the provider's first answer, a refusal too, or after [`FIRST_ANSWER`].
pub(crate) async fn start(
    tasks: &mut Tasks,
    provider: Arc<dyn Provider>,
    addresses: GuestAddresses,
    ready: &Ready,
    facts: &Facts,
) {
    let (blocked, ready, facts) = (ready.block("provider"), ready.clone(), facts.clone());
    let (answered, first) = oneshot::channel();
    spawn(tasks, "preflight of the provider", async move {
        let found = ask(provider.as_ref(), &addresses, blocked, answered).await;
        if !found.warnings.is_empty() {
            ready.warn("provider", &found.warnings.join("; "));
        }
        // One preflight passes in the life of the process, so the facts are not there yet.
        facts.0.set(found.facts).ok();
        // The end of a task counts as a fault, and this one has completed.
        std::future::pending().await
    });
    if timeout(FIRST_ANSWER, first).await.is_err() {
        warn!("the provider's preflight has not finished; starting without it");
    }
}

/// Asks until the provider has no objection. The drop of `answered` ends the wait of the start.
async fn ask(
    provider: &dyn Provider,
    addresses: &GuestAddresses,
    blocked: BlockReady,
    answered: oneshot::Sender<()>,
) -> Preflight {
    let (name, since, mut answered) = (provider.name(), Timestamp::now(), Some(answered));
    let (mut pauses, mut last) = (AGAIN, String::new());
    blocked.because(&format!("asking provider {name} since {since:.0}; it has not answered yet"));
    loop {
        let result = provider.preflight().await;
        let found = match result {
            Ok(found) => Some(found),
            Err(error) => {
                let error = error.to_string();
                if error == last {
                    debug!(provider = name, error, "the provider's preflight still fails");
                } else {
                    error!(provider = name, error, "the provider's preflight failed; trying again");
                }
                addresses.provider_fails();
                blocked.because(&format!("{error} (asked since {since:.0}, and again every 10 s)"));
                last = error;
                None
            }
        };
        if let Some(found) = &found {
            for fact in &found.facts {
                info!(provider = name, fact, "provider");
            }
            for warning in &found.warnings {
                warn!(provider = name, warning, "provider");
            }
            addresses.provider_says(found.node_addresses.clone());
        }
        drop(answered.take());
        match found {
            Some(found) => return found,
            None => sleep(pauses.pause()).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use async_trait::async_trait;
    use peerpod_provider_api::{
        Capabilities, CreateRequest, Created, DecoratorConfig, Error, IdempotencyKey, InstanceId, Owned,
        decorate,
    };
    use prometheus_client::registry::Registry;
    use tokio::sync::watch;
    use tokio::time::Instant;

    use super::*;

    /// Provider with this answer to each preflight; `None`: no answer.
    struct Refusing(watch::Receiver<Option<Result<(), Error>>>);

    #[async_trait]
    impl Provider for Refusing {
        fn name(&self) -> &'static str {
            "refusing"
        }
        fn capabilities(&self) -> Capabilities {
            Capabilities::minimal(16)
        }
        async fn preflight(&self) -> Result<Preflight, Error> {
            let answer = self.0.clone().wait_for(Option::is_some).await.unwrap().clone().unwrap();
            let found = Preflight { facts: vec!["account 1".to_owned()], ..Preflight::default() };
            answer.map(|()| Preflight { warnings: vec!["low".to_owned()], ..found })
        }
        async fn create(&self, _: &CreateRequest, _: &IdempotencyKey) -> Result<Created, Error> {
            Err(Error::transient("no VMs"))
        }
        async fn addresses(&self, _: &InstanceId) -> Result<Vec<IpAddr>, Error> {
            Ok(vec![])
        }
        async fn delete(&self, _: &InstanceId) -> Result<(), Error> {
            Ok(())
        }
        async fn list_owned(&self) -> Result<Vec<Owned>, Error> {
            Ok(vec![])
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_refusal_is_shown_at_once_and_its_end_too() {
        let (answer, answers) = watch::channel(None);
        // With the node's own decorator, which repeats other calls for two minutes.
        let provider = Arc::new(Refusing(answers));
        let provider = decorate(provider, DecoratorConfig::default(), &mut Registry::default());
        let (ready, mut tasks, began) = (Ready::default(), Tasks::new(), Instant::now());
        let addresses = GuestAddresses::new(vec![], "10.1.2.3:15151".parse().unwrap());
        let facts = Facts::default();
        start(&mut tasks, provider, addresses, &ready, &facts).await;
        assert_eq!(began.elapsed(), FIRST_ANSWER);
        let shown = || ready.waiting().remove("provider").unwrap_or_default();
        assert!(shown().starts_with("asking provider refusing since 2"), "{}", shown());

        let refused = Instant::now();
        answer.send_replace(Some(Err(Error::transient("connection refused by the cloud"))));
        while !shown().contains("connection refused by the cloud (asked since 2") {
            sleep(Duration::from_millis(10)).await;
            assert!(refused.elapsed() < Duration::from_secs(1), "{}", shown());
        }
        answer.send_replace(Some(Ok(())));
        while !ready.waiting().is_empty() {
            sleep(Duration::from_millis(10)).await;
            assert!(refused.elapsed() < Duration::from_secs(15), "{}", shown());
        }
        assert_eq!((&*ready.warnings()["provider"], facts.get()), ("low", vec!["account 1".to_owned()]));
    }

    #[tokio::test(start_paused = true)]
    async fn a_start_does_not_wait_after_a_refusal() {
        let (_answer, answers) = watch::channel(Some(Err(Error::transient("no"))));
        let (ready, mut tasks, began) = (Ready::default(), Tasks::new(), Instant::now());
        let addresses = GuestAddresses::new(vec![], "10.1.2.3:15151".parse().unwrap());
        start(&mut tasks, Arc::new(Refusing(answers)), addresses, &ready, &Facts::default()).await;
        assert_eq!(began.elapsed(), Duration::ZERO);
        assert!(ready.waiting()["provider"].starts_with("no (asked since"), "{:?}", ready.waiting());
    }
}
