//! Shared parts of the tests of a cloud's provider: its settings, its requests, and creates that lose their callers.

#![allow(clippy::unwrap_used)] // test code outside of test functions

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use peerpod_base::config::{Reader, Sources};
use peerpod_provider_api::{CreateRequest, Error, IdempotencyKey, Owner, Provider, Size, with_deadline};
use tokio::time::{Instant, timeout};

pub use crate::PATIENCE;
use crate::{Dice, report};

/// Cloud of one test, which is a fake or a simulator.
pub trait TestCloud {
    /// Kind of the provider.
    const KIND: &'static str;

    /// Returns settings below `provider.<kind>` for this cloud.
    fn settings(&self) -> Vec<(String, String)>;

    /// Returns the ids of all VMs in the cloud, from the cloud itself.
    fn ids(&self) -> impl Future<Output = Vec<String>>;

    /// Returns the number of creates that the cloud got.
    fn creates(&self) -> usize;

    /// Makes the cloud execute the next create at once and answer it after five seconds.
    fn delay_answer(&self);

    /// Returns the number of calls that took effect and are not answered yet.
    fn late(&self) -> usize;

    /// Removes all faults, limits and delays.
    fn heal(&self);

    /// Reads the settings, with `other` in place of some. An empty value leaves a setting out.
    fn read<C>(&self, other: &[(&str, &str)], read: impl FnOnce(&mut Reader) -> C) -> C {
        let mut all: BTreeMap<String, String> = self.settings().into_iter().collect();
        all.extend(other.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())));
        all.retain(|_, value| !value.is_empty());
        let prefix = format!("PEERPOD_PROVIDER_{}", Self::KIND);
        let name = |key: &str| format!("{prefix}_{key}").to_ascii_uppercase().replace('-', "_");
        let env = all.into_iter().map(|(key, value)| (name(&key), value)).collect();
        let mut reader =
            Reader::load(Sources { env, ..Sources::default() }.for_tests(), &["provider"], &[]).unwrap();
        let config = read(&mut reader);
        reader.finish().map_err(|mistakes| mistakes.to_string()).unwrap();
        config
    }
}

/// Owner of a node's VMs.
pub fn owner(node: &str) -> Owner {
    Owner { cluster_id: "c".to_owned(), node_name: node.to_owned(), installation: "i".to_owned() }
}

/// Owner of VMs in another cluster whose names are equal.
pub fn stranger() -> Owner {
    Owner { installation: "another".to_owned(), ..owner("n") }
}

/// Request that any of the types meets.
pub fn request(name: &str) -> CreateRequest {
    CreateRequest {
        name: name.to_owned(),
        user_data: format!("{{\"peerpod\":1,\"for\":\"{name}\"}}"),
        size: Size { vcpus: 1, memory_mib: 512, ..Size::default() },
        labels: [("peerpod.pod".to_owned(), name.to_owned())].into(),
        ..CreateRequest::default()
    }
}

/// Idempotency key of this test.
pub fn key(test: &str, number: u32) -> IdempotencyKey {
    IdempotencyKey::derive("c", test, number)
}

/// Places a request as the node does: the node records the placement, and then creates.
///
/// # Errors
/// The provider's.
pub async fn placed(provider: &dyn Provider, request: &CreateRequest) -> Result<CreateRequest, Error> {
    let placement = provider.place(request).await?;
    Ok(CreateRequest { placement, ..request.clone() })
}

/// Runs a call with this time as its deadline.
pub async fn within<F: Future>(time: Duration, call: F) -> F::Output {
    with_deadline(Instant::now() + time, call).await
}

/// Drops a hundred creates of the first process after random times up to `longest`, and repeats each from the second one,
/// as after a restart. `longest` follows the machine's speed. Each key has one VM afterwards, and the cloud has no others.
/// `disturb` gets the number of each create before it.
pub async fn drop_creates<P: Provider>(
    site: &impl TestCloud,
    [before, after]: [Arc<P>; 2],
    mut longest: Duration,
    disturb: impl Fn(u32),
) {
    before.preflight().await.unwrap();
    after.preflight().await.unwrap();
    let mut dice = Dice(0x5eed_1234_abcd_0001);
    let mut on_the_way = 0;
    for number in 0..100 {
        let wish = placed(&*before, &request(&format!("pod-{number}"))).await.unwrap();
        let key = key("crash", number);
        disturb(number);
        let sent = site.creates();
        let instant = longest.mul_f64(dice.roll(1_000_000) as f64 / 1e6);
        let answer = timeout(instant, before.create(&wish, &key)).await;
        let is_sent = site.creates() > sent;
        on_the_way += u32::from(answer.is_err() && is_sent);
        longest = match (&answer, is_sent) {
            (Ok(_), _) => longest.mul_f64(0.9),
            (Err(_), true) => longest,
            (Err(_), false) => longest.mul_f64(1.1),
        };
        let repeated = async {
            loop {
                match after.create(&wish, &key).await {
                    Err(error) if error.class() == "transient" => {}
                    answer => break answer.unwrap(),
                }
            }
        };
        let again = timeout(PATIENCE, repeated).await.unwrap();
        if let Ok(Ok(made)) = answer {
            assert_eq!(made.id, again.id);
        }
    }
    assert!(on_the_way > 10, "{on_the_way} of 100 creates were dropped between the call and its answer");
    site.heal();
    let owned = after.list_owned().await.unwrap();
    for key in (0..100).map(|number| key("crash", number)) {
        assert_eq!(owned.iter().filter(|vm| vm.key.as_ref() == Some(&key)).count(), 1, "{key}");
    }
    assert_eq!(site.ids().await.len(), 100);
}

/// Reports the number of promises that a provider of this kind has broken in this process, after each promise.
pub fn report_promise(kind: &str, is_kept: bool) {
    static BROKEN: AtomicU32 = AtomicU32::new(0);
    let more = u32::from(!is_kept);
    report(
        &format!("{kind}_conformance_failed"),
        f64::from(BROKEN.fetch_add(more, Ordering::Relaxed) + more),
    );
}
