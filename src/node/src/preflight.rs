//! Asks the provider whether the node may make all later calls. The node is not ready until it has answered: the
//! readiness shows since when the provider is asked, and its last error. The provider is asked again after a refusal that
//! may hold for each pod; while it objects, the node is not ready.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use parking_lot::Mutex;
use peerpod_base::admin::Ready;
use peerpod_common::backoff::Backoff;
use peerpod_provider_api::{Error, Preflight, Provider};
use tokio::sync::{Notify, oneshot};
use tokio::time::{sleep, timeout};
use tracing::{debug, error, info, warn};

use crate::app::{Tasks, spawn};
use crate::ports::GuestAddresses;

/// Time that a start waits for the provider's first answer. After it the node starts, but is not ready, and new VMs wait
/// longer.
const FIRST_ANSWER: Duration = Duration::from_secs(5);
/// Pauses between two tries.
const AGAIN: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(10));

/// Pause between a refusal and the next preflight, so that many refusals cost one.
const AFRESH: Duration = Duration::from_secs(30);
/// Name of the provider's answer in the readiness.
const PROVIDER: &str = "provider";

/// Facts of the last preflight without an objection, and doubts about it. Clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct PreflightFacts(Arc<(Mutex<Vec<String>>, Notify)>);

impl PreflightFacts {
    /// The facts so far.
    pub(crate) fn get(&self) -> Vec<String> {
        self.0.0.lock().clone()
    }

    /// Records that the provider refused a VM. A refusal of credentials, rights or settings may hold for each pod, so the
    /// preflight runs again. A quota does not count: it is free again when other VMs end.
    pub(crate) fn refused(&self, error: &Error) {
        if matches!(error, Error::Auth { .. } | Error::Invalid { .. }) {
            self.0.1.notify_one();
        }
    }
}

/// Starts the preflight, and returns at the provider's first answer, a refusal too, or after [`FIRST_ANSWER`].
pub(crate) async fn start(
    tasks: &mut Tasks,
    provider: Arc<dyn Provider>,
    addresses: GuestAddresses,
    ready: &Ready,
    facts: &PreflightFacts,
) {
    let (ready, facts) = (ready.clone(), facts.clone());
    let asking =
        format!("asking provider {} since {:.0}; it has not answered yet", provider.name(), Timestamp::now());
    ready.not_ready(PROVIDER, &asking);
    let (answered, first) = oneshot::channel();
    spawn(tasks, "preflight of the provider", async move {
        let mut answered = Some(answered);
        loop {
            let found = ask(provider.as_ref(), &addresses, &ready, answered.take()).await;
            match found.warnings.as_slice() {
                [] => ready.settled(PROVIDER),
                warnings => ready.warn(PROVIDER, &warnings.join("; ")),
            }
            *facts.0.0.lock() = found.facts;
            facts.0.1.notified().await;
            sleep(AFRESH).await;
        }
    });
    if timeout(FIRST_ANSWER, first).await.is_err() {
        warn!("the provider's preflight has not finished; starting without it");
    }
}

/// Asks until the provider has no objection. The drop of `answered` ends the wait of the start.
async fn ask(
    provider: &dyn Provider,
    addresses: &GuestAddresses,
    ready: &Ready,
    mut answered: Option<oneshot::Sender<()>>,
) -> Preflight {
    let (name, since) = (provider.name(), Timestamp::now());
    let (mut pauses, mut last) = (AGAIN, String::new());
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
                ready.not_ready(PROVIDER, &format!("{error} (asked since {since:.0}, and again every 10 s)"));
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
            ready.ready(PROVIDER);
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
    use crate::ports::ProviderCloud;
    use crate::sandbox::ports::Cloud;

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
        async fn create(&self, request: &CreateRequest, _: &IdempotencyKey) -> Result<Created, Error> {
            Err(match request.name.as_str() {
                "auth" => Error::Auth { text: "the key was revoked".to_owned() },
                "quota" => Error::Quota { text: "100 VMs".to_owned() },
                _ => Error::transient("no VMs"),
            })
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
        let facts = PreflightFacts::default();
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
    async fn a_provider_that_refuses_later_is_asked_again() {
        let (answer, answers) = watch::channel(Some(Ok(())));
        let (ready, mut tasks) = (Ready::default(), Tasks::new());
        let (provider, facts) = (Arc::new(Refusing(answers)), PreflightFacts::default());
        let addresses = GuestAddresses::new(vec![], "10.1.2.3:15151".parse().unwrap());
        start(&mut tasks, provider.clone(), addresses, &ready, &facts).await;
        let cloud = ProviderCloud::new(provider, ready.clone(), facts);
        let create = async |name: &str| {
            let request = CreateRequest { name: name.to_owned(), ..CreateRequest::default() };
            Cloud::create(&cloud, &request, &IdempotencyKey::derive("c", name, 1)).await.unwrap_err();
            sleep(AFRESH * 2).await;
            ready.waiting().remove(PROVIDER).unwrap_or_default()
        };
        assert_eq!(create("auth").await, "", "the preflight objects to nothing: one pod was refused");
        answer.send_replace(Some(Err(Error::Auth { text: "the key was revoked".to_owned() })));
        for name in ["transient", "quota"] {
            assert_eq!(create(name).await, "", "{name}");
        }
        let shown = create("auth").await;
        assert!(shown.starts_with("the key was revoked (asked since"), "{shown}");
        answer.send_replace(Some(Ok(())));
        while !ready.waiting().is_empty() {
            sleep(Duration::from_millis(10)).await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_start_does_not_wait_after_a_refusal() {
        let (_answer, answers) = watch::channel(Some(Err(Error::transient("no"))));
        let (ready, mut tasks, began) = (Ready::default(), Tasks::new(), Instant::now());
        let addresses = GuestAddresses::new(vec![], "10.1.2.3:15151".parse().unwrap());
        start(&mut tasks, Arc::new(Refusing(answers)), addresses, &ready, &PreflightFacts::default()).await;
        assert_eq!(began.elapsed(), Duration::ZERO);
        assert!(ready.waiting()["provider"].starts_with("no (asked since"), "{:?}", ready.waiting());
    }
}
