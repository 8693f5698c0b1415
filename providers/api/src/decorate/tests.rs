//! Tests the decorator around a scripted provider, with the clock stopped.

use std::collections::VecDeque;
use std::sync::Mutex;

use super::*;
use crate::Chosen;
use crate::capabilities::OPTIONAL;

/// Provider that answers creates from a script and records the keys of the calls.
#[derive(Default)]
struct Scripted {
    answers: Mutex<VecDeque<Result<(), Error>>>,
    keys: Mutex<Vec<IdempotencyKey>>,
    /// Duration of each call.
    takes: Duration,
}

#[async_trait]
impl Provider for Scripted {
    fn name(&self) -> &'static str {
        "scripted"
    }
    fn capabilities(&self) -> Capabilities {
        Capabilities::minimal(16)
    }
    async fn preflight(&self) -> Result<Preflight, Error> {
        Ok(Preflight::default())
    }
    async fn create(&self, _: &CreateRequest, key: &IdempotencyKey) -> Result<Created, Error> {
        self.keys.lock().unwrap().push(key.clone());
        tokio::time::sleep(self.takes).await;
        let answer = self.answers.lock().unwrap().pop_front().unwrap_or(Ok(()));
        answer.map(|()| Created {
            id: InstanceId::new("i-1").unwrap(),
            addresses: vec![],
            chosen: Chosen::default(),
            disks: vec![],
        })
    }
    async fn addresses(&self, _: &InstanceId) -> Result<Vec<IpAddr>, Error> {
        tokio::time::sleep(self.takes).await;
        Ok(vec![])
    }
    async fn delete(&self, _: &InstanceId) -> Result<(), Error> {
        Ok(())
    }
    async fn list_owned(&self) -> Result<Vec<Owned>, Error> {
        Ok(vec![])
    }
}

fn request() -> CreateRequest {
    CreateRequest { name: "pod".into(), user_data: "ticket".into(), ..CreateRequest::default() }
}

fn key() -> IdempotencyKey {
    IdempotencyKey::derive("c", "s", 0)
}

fn scripted(
    answers: Vec<Result<(), Error>>,
    takes: Duration,
) -> (Arc<Scripted>, Arc<dyn Provider>, Registry) {
    let inner = Arc::new(Scripted { answers: Mutex::new(answers.into()), takes, ..Scripted::default() });
    let mut registry = Registry::default();
    let config =
        DecoratorConfig { call_deadline: Duration::from_secs(5), retry_for: Duration::from_secs(30) };
    let provider = decorate(inner.clone(), config, &mut registry);
    (inner, provider, registry)
}

fn metrics(registry: &Registry) -> String {
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, registry).unwrap();
    text
}

fn throttled() -> Result<(), Error> {
    Err(Error::Throttled { after: None, text: "slow down".into() })
}

#[tokio::test(start_paused = true)]
async fn throttled_and_transient_calls_are_repeated_with_the_same_key() {
    let script = vec![throttled(), Err(Error::transient("reset")), throttled()];
    let (inner, provider, registry) = scripted(script, Duration::ZERO);
    provider.create(&request(), &key()).await.unwrap();
    assert_eq!(*inner.keys.lock().unwrap(), vec![key(); 4]);
    let text = metrics(&registry);
    for line in [
        r#"peerpod_provider_calls_total{provider="scripted",operation="create",outcome="ok"} 1"#,
        r#"peerpod_provider_retries_total{provider="scripted",operation="create",outcome="throttled"} 2"#,
        r#"peerpod_provider_retries_total{provider="scripted",operation="create",outcome="transient"} 1"#,
        r#"peerpod_provider_call_seconds_count{provider="scripted",operation="create"} 1"#,
    ] {
        assert!(text.contains(line), "{line} in\n{text}");
    }
}

#[tokio::test(start_paused = true)]
async fn permanent_errors_are_not_repeated() {
    let never = [
        Error::Quota { text: "quota".into() },
        Error::Auth { text: "auth".into() },
        Error::invalid("invalid"),
        Error::key_reused("other request"),
        Error::capacity("m", "none left"),
    ];
    for error in never {
        let (inner, provider, _registry) = scripted(vec![Err(error.clone())], Duration::ZERO);
        assert_eq!(provider.create(&request(), &key()).await.unwrap_err(), error);
        assert_eq!(inner.keys.lock().unwrap().len(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn repetitions_end() {
    let script = (0..1000).map(|_| Err(Error::transient("down"))).collect();
    let (inner, provider, _registry) = scripted(script, Duration::ZERO);
    let start = Instant::now();
    assert_eq!(provider.create(&request(), &key()).await.unwrap_err(), Error::transient("down"));
    assert!(start.elapsed() <= Duration::from_secs(30), "{:?}", start.elapsed());
    let tries = inner.keys.lock().unwrap().len();
    assert!((4..40).contains(&tries), "{tries}");
}

#[tokio::test(start_paused = true)]
async fn a_silent_cloud_ends_at_the_deadline_and_is_asked_again() {
    let (inner, provider, registry) = scripted(vec![], Duration::from_secs(3600));
    let start = Instant::now();
    let error = provider.create(&request(), &key()).await.unwrap_err();
    assert_eq!(error.class(), "transient");
    assert!(
        error.to_string().contains("create of pod: provider scripted gave no answer within 5s"),
        "{error}"
    );
    assert!(start.elapsed() < Duration::from_secs(40), "{:?}", start.elapsed());
    assert!(inner.keys.lock().unwrap().len() > 1);
    assert!(metrics(&registry).contains(r#"outcome="transient"} 1"#));
}

#[tokio::test(start_paused = true)]
async fn addresses_wait_as_long_as_their_caller() {
    let (_inner, provider, registry) = scripted(vec![], Duration::from_secs(3600));
    let id = InstanceId::new("i-1").unwrap();
    provider.addresses(&id).await.unwrap();
    let dropped = tokio::time::timeout(Duration::from_secs(100), provider.addresses(&id)).await;
    assert!(dropped.is_err());
    let text = metrics(&registry);
    assert!(text.contains(r#"operation="addresses",outcome="dropped"} 1"#), "{text}");
}

#[tokio::test(start_paused = true)]
async fn an_unsupported_request_is_refused_before_the_call() {
    let (inner, provider, _registry) = scripted(vec![], Duration::ZERO);
    for (wanted, ask) in OPTIONAL {
        let mut request = request();
        ask(&mut request);
        for answer in
            [provider.create(&request, &key()).await.map(drop), provider.place(&request).await.map(drop)]
        {
            match answer.unwrap_err() {
                Error::Unsupported { field, .. } => assert_eq!(field, *wanted),
                other => panic!("{wanted}: {other:?}"),
            }
        }
    }
    let request = CreateRequest { user_data: "x".repeat(17), ..request() };
    let text = provider.create(&request, &key()).await.unwrap_err().to_string();
    assert!(text.contains("17 bytes"), "{text}");
    assert!(inner.keys.lock().unwrap().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_throttled_cloud_gets_its_calls_in_single_file_and_all_of_them_succeed() {
    // Bucket of two creates per second with a burst of five, like that of EC2; 50 creates at once.
    struct Bucket(Mutex<(f64, Instant)>, Mutex<u32>);
    #[async_trait]
    impl Provider for Bucket {
        fn name(&self) -> &'static str {
            "bucket"
        }
        fn capabilities(&self) -> Capabilities {
            Capabilities::minimal(16)
        }
        async fn preflight(&self) -> Result<Preflight, Error> {
            Ok(Preflight::default())
        }
        async fn create(&self, _: &CreateRequest, _: &IdempotencyKey) -> Result<Created, Error> {
            *self.1.lock().unwrap() += 1;
            let mut bucket = self.0.lock().unwrap();
            let now = Instant::now();
            bucket.0 = (bucket.0 + 2.0 * (now - bucket.1).as_secs_f64()).min(5.0);
            bucket.1 = now;
            if bucket.0 < 1.0 {
                return Err(Error::Throttled { after: None, text: "RequestLimitExceeded".into() });
            }
            bucket.0 -= 1.0;
            let id = InstanceId::new("i-1").unwrap();
            Ok(Created { id, addresses: vec![], chosen: Chosen::default(), disks: vec![] })
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
    let bucket = Arc::new(Bucket(Mutex::new((5.0, Instant::now())), Mutex::new(0)));
    let provider = decorate(bucket.clone(), DecoratorConfig::default(), &mut Registry::default());
    let start = Instant::now();
    let creates: Vec<_> = (0..50)
        .map(|n| {
            let provider = Arc::clone(&provider);
            tokio::spawn(
                async move { provider.create(&request(), &IdempotencyKey::derive("c", "s", n)).await },
            )
        })
        .collect();
    for create in creates {
        create.await.unwrap().unwrap();
    }
    let tries = *bucket.1.lock().unwrap();
    println!("50 creates at 2 a second, burst 5: {tries} tries in {:?}", start.elapsed());
    // 45 creates beyond the burst take 22.5 s at two per second; without pacing it was 249 tries and 29 s.
    assert!(start.elapsed() < Duration::from_secs(60), "{:?}, {tries} tries", start.elapsed());
    assert!(tries < 249, "{tries} tries in {:?}", start.elapsed());
}
