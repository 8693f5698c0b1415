//! The checks of the suite, one rule each. They panic where a provider does not conform.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use prometheus_client::registry::Registry;

use super::{Harness, fresh_key, owned_with, until};
use crate::{CreateRequest, DecoratorConfig, Error, Provider, WISHES, decorate};

/// Moments at which a caller gives up, from at once to after most providers' answer.
const DROPS: [u64; 8] = [0, 1, 2, 5, 10, 20, 40, 80];

/// Capabilities agree with what is there.
pub async fn the_provider_says_what_it_can_do(harness: Arc<dyn Harness>) {
    let provider = harness.provider();
    let can = provider.capabilities();
    assert_eq!(can, provider.capabilities(), "capabilities are constant");
    assert!(can.max_user_data >= 2048, "birth data needs up to 2 KiB, {} is too little", can.max_user_data);
    assert_eq!(can.volumes, provider.volumes().is_some(), "volumes");
    assert_eq!(can.max_batch > 0, provider.batch().is_some(), "batch");
    assert_eq!(can.console, provider.console().is_some(), "console");
    assert_eq!(can.events, provider.events().is_some(), "events");
    let name = provider.name();
    assert!(!name.is_empty() && name.bytes().all(|b| b.is_ascii_lowercase() || b == b'-'), "name {name:?}");
}

/// Preflight passes, twice, and makes no VM.
pub async fn preflight_finds_everything_and_makes_nothing(harness: Arc<dyn Harness>) {
    let provider = harness.provider();
    for _ in 0..2 {
        provider.preflight().await.expect("preflight");
    }
    assert_eq!(provider.list_owned().await.expect("list_owned"), vec![]);
    assert_eq!(harness.machines().await, 0);
}

/// Same key, same request: same VM.
pub async fn a_repeated_create_finds_the_same_vm(harness: Arc<dyn Harness>) {
    let (provider, request, key) = (harness.provider(), harness.request(), fresh_key(0));
    let first = provider.create(&request, &key).await.expect("create");
    let second = provider.create(&request, &key).await.expect("create again");
    assert_eq!(first.id, second.id);
    let addresses = provider.addresses(&first.id).await.expect("addresses");
    assert!(!addresses.is_empty());
    let third = provider.create(&request, &key).await.expect("create when it runs");
    assert_eq!(first.id, third.id);
    assert_eq!(owned_with(&*provider, &key).await.len(), 1);
    assert_eq!(harness.machines().await, 1);
}

/// The same, at once.
pub async fn creates_with_one_key_at_once_make_one_vm(harness: Arc<dyn Harness>) {
    let key = fresh_key(0);
    let creates: Vec<_> = (0..8)
        .map(|_| {
            let (provider, request, key) = (harness.provider(), harness.request(), key.clone());
            tokio::spawn(async move { patiently(&*provider, &request, &key).await })
        })
        .collect();
    let mut ids = HashSet::new();
    for create in creates {
        ids.insert(create.await.expect("no panic").id);
    }
    assert_eq!(ids.len(), 1, "{ids:?}");
    assert_eq!(harness.machines().await, 1);
}

/// Same key, other request: refused, and the first VM is as it was.
pub async fn a_key_with_another_request_is_refused(harness: Arc<dyn Harness>) {
    let (provider, request, key) = (harness.provider(), harness.request(), fresh_key(0));
    let first = provider.create(&request, &key).await.expect("create");
    let mut other = request.clone();
    other.user_data.push(' ');
    match provider.create(&other, &key).await {
        Err(Error::KeyReused { text }) => {
            assert!(!text.contains(&request.user_data), "the text shows user-data: {text}");
        }
        answer => panic!("{answer:?}"),
    }
    assert_eq!(provider.create(&request, &key).await.expect("create again").id, first.id);
    assert_eq!(harness.machines().await, 1);
}

/// Gone is `Ok`.
pub async fn a_second_delete_is_fine(harness: Arc<dyn Harness>) {
    let (provider, key) = (harness.provider(), fresh_key(0));
    let made = provider.create(&harness.request(), &key).await.expect("create");
    provider.delete(&made.id).await.expect("delete");
    provider.delete(&made.id).await.expect("delete at once again");
    until("the VM is gone", || async { owned_with(&*provider, &key).await.is_empty() }).await;
    provider.delete(&made.id).await.expect("delete of a VM that is gone");
    assert_eq!(harness.machines().await, 0);
}

/// What never was is gone.
pub async fn a_delete_of_something_unknown_is_fine(harness: Arc<dyn Harness>) {
    let provider = harness.provider();
    provider.delete(&harness.unknown_id()).await.expect("delete");
}

/// Whoever waits for a VM that is gone is told so.
pub async fn a_deleted_vm_has_no_addresses(harness: Arc<dyn Harness>) {
    let (provider, key) = (harness.provider(), fresh_key(0));
    let unknown = provider.addresses(&harness.unknown_id()).await;
    assert!(matches!(unknown, Err(Error::NotFound { .. })), "{unknown:?}");
    let made = provider.create(&harness.request(), &key).await.expect("create");
    provider.addresses(&made.id).await.expect("addresses");
    provider.delete(&made.id).await.expect("delete");
    until("the VM is gone", || async { owned_with(&*provider, &key).await.is_empty() }).await;
    let gone = provider.addresses(&made.id).await;
    assert!(matches!(gone, Err(Error::NotFound { .. })), "{gone:?}");
}

/// Another cluster's VMs are not ours.
pub async fn only_our_vms_are_listed(harness: Arc<dyn Harness>) {
    let (provider, ours) = (harness.provider(), fresh_key(0));
    let made = provider.create(&harness.request(), &ours).await.expect("create");
    let mut others = None;
    if let Some(stranger) = harness.stranger() {
        let theirs = fresh_key(1);
        let other = stranger.create(&harness.request(), &theirs).await.expect("a stranger's create");
        assert_ne!(other.id, made.id);
        let seen = stranger.list_owned().await.expect("a stranger's list");
        assert_eq!(seen.iter().map(|one| &one.id).collect::<Vec<_>>(), [&other.id]);
        others = Some((stranger, other.id));
    }
    let listed = provider.list_owned().await.expect("list_owned");
    assert_eq!(listed.len(), 1, "{listed:?}");
    let one = listed.first().expect("there is one");
    assert_eq!((&one.id, one.key.as_ref()), (&made.id, Some(&ours)));
    if let Some((stranger, id)) = others {
        stranger.delete(&id).await.expect("a stranger's delete");
        until("the stranger's VM is gone", || async {
            stranger.list_owned().await.expect("a stranger's list").is_empty()
        })
        .await;
    }
}

/// A crowd: all get a VM and an address of their own.
pub async fn many_creates_at_once_all_succeed(harness: Arc<dyn Harness>) {
    let crowd = harness.crowd();
    let creates: Vec<_> = (0..crowd)
        .map(|number| {
            let (provider, request, key) = (harness.provider(), harness.request(), fresh_key(number));
            tokio::spawn(async move {
                let made = patiently(&*provider, &request, &key).await;
                (made.id.clone(), provider.addresses(&made.id).await.expect("addresses"), key)
            })
        })
        .collect();
    let (mut ids, mut addresses, mut keys) = (HashSet::new(), HashSet::new(), HashSet::new());
    for create in creates {
        let (id, its, key) = create.await.expect("no panic");
        assert!(ids.insert(id), "one id twice");
        for address in its {
            assert!(addresses.insert(address), "{address} twice");
        }
        keys.insert(key);
    }
    let listed = harness.provider().list_owned().await.expect("list_owned");
    assert_eq!(listed.iter().filter_map(|one| one.key.clone()).collect::<HashSet<_>>(), keys);
    assert_eq!(harness.machines().await, crowd as usize);
    let deletes: Vec<_> = ids
        .into_iter()
        .map(|id| {
            let provider = harness.provider();
            tokio::spawn(async move { provider.delete(&id).await })
        })
        .collect();
    for delete in deletes {
        delete.await.expect("no panic").expect("delete");
    }
}

/// A field that capabilities do not cover makes the create fail.
pub async fn what_cannot_be_done_is_refused_not_dropped(harness: Arc<dyn Harness>) {
    let provider = harness.provider();
    let can = provider.capabilities();
    for (number, wish) in (0..).zip(WISHES) {
        if (wish.is_met)(&can) {
            continue;
        }
        let mut request = harness.request();
        (wish.ask)(&mut request);
        match provider.create(&request, &fresh_key(number)).await {
            Err(Error::Unsupported { field, .. }) => assert_eq!(field, wish.field),
            answer => panic!("{}: {answer:?}", wish.field),
        }
    }
    assert_eq!(harness.machines().await, 0);
}

/// What goes in comes out, whatever is in it.
pub async fn user_data_arrives_byte_for_byte(harness: Arc<dyn Harness>) {
    let awkward = [
        "#cloud-config\n\nkey: \"ä ö ü €\"\r\n\t$HOME `id` %s \\n ${x} </user-data> \u{1F980}\n",
        "{\"no\":\"newline at the end\"}",
        "\n\n  leading and trailing white space \n\n",
        "--==BOUNDARY==\r\nContent-Type: text/plain\r\n\r\nx\u{7f}\u{1}\r\n",
    ];
    for (number, text) in (0..).zip(awkward) {
        user_data_arrives(&*harness, text, number).await;
    }
}

/// The limit is a promise, too.
pub async fn user_data_of_the_stated_limit_arrives(harness: Arc<dyn Harness>) {
    let limit = harness.provider().capabilities().max_user_data;
    // No cloud has more than 256 KiB; a provider without a limit is tried so far.
    let text: String = ('a'..='z').cycle().take(limit.min(256 * 1024)).collect();
    user_data_arrives(&*harness, &text, 0).await;
}

async fn user_data_arrives(harness: &dyn Harness, text: &str, number: u32) {
    let provider = harness.provider();
    let request = CreateRequest { user_data: text.to_owned(), ..harness.request() };
    let made = provider.create(&request, &fresh_key(number)).await.expect("create");
    let seen = harness.user_data(&made.id).await;
    assert!(seen == text.as_bytes(), "{} bytes went in, the VM sees {}", text.len(), seen.len());
    provider.delete(&made.id).await.expect("delete");
}

/// One byte more is refused, and nothing is made.
pub async fn user_data_over_the_limit_is_refused_before_any_call(harness: Arc<dyn Harness>) {
    let provider = harness.provider();
    let limit = provider.capabilities().max_user_data;
    if limit > 64 << 20 {
        return; // as good as none
    }
    let request = CreateRequest { user_data: "x".repeat(limit + 1), ..harness.request() };
    let answer = provider.create(&request, &fresh_key(0)).await;
    assert!(matches!(answer, Err(Error::Invalid { .. })), "{answer:?}");
    assert_eq!(provider.list_owned().await.expect("list_owned"), vec![]);
    assert_eq!(harness.machines().await, 0);
}

/// With a deadline of a millisecond around it every call ends, and what it began can be cleaned up.
pub async fn calls_end_at_their_deadline(harness: Arc<dyn Harness>) {
    let config =
        DecoratorConfig { call_deadline: Duration::from_millis(1), retry_for: Duration::from_millis(0) };
    let provider = decorate(harness.provider(), config, &mut Registry::default());
    let (request, key) = (harness.request(), fresh_key(0));
    let ends = |what: &'static str, start: Instant| {
        assert!(start.elapsed() < Duration::from_secs(2), "{what} took {:?}", start.elapsed());
    };
    let start = Instant::now();
    let created = provider.create(&request, &key).await;
    ends("create", start);
    assert!(matches!(created, Ok(_) | Err(Error::Transient { .. })), "{created:?}");
    let start = Instant::now();
    let listed = provider.list_owned().await;
    ends("list_owned", start);
    assert!(matches!(listed, Ok(_) | Err(Error::Transient { .. })), "{listed:?}");
    let made = patiently(&*harness.provider(), &request, &key).await;
    let start = Instant::now();
    let deleted = provider.delete(&made.id).await;
    ends("delete", start);
    assert!(matches!(deleted, Ok(()) | Err(Error::Transient { .. })), "{deleted:?}");
}

/// A caller that dies before the answer asks again with its key: one VM, whenever it died.
pub async fn a_create_dropped_at_any_time_and_repeated_makes_one_vm(harness: Arc<dyn Harness>) {
    let (provider, request) = (harness.provider(), harness.request());
    for (number, after) in (0..).zip(DROPS) {
        let key = fresh_key(number);
        let first = tokio::time::timeout(Duration::from_millis(after), provider.create(&request, &key)).await;
        let second = patiently(&*provider, &request, &key).await;
        if let Ok(Ok(first)) = first {
            assert_eq!(first.id, second.id);
        }
        provider.addresses(&second.id).await.expect("addresses");
        assert_eq!(owned_with(&*provider, &key).await.len(), 1, "dropped after {after} ms");
        assert_eq!(harness.machines().await, number as usize + 1, "dropped after {after} ms");
    }
}

/// A caller that dies while deleting asks again: nothing is left. Also when the VM was not finished yet.
pub async fn a_delete_dropped_at_any_time_and_repeated_leaves_nothing(harness: Arc<dyn Harness>) {
    let (provider, request) = (harness.provider(), harness.request());
    for (number, after) in (0..).zip(DROPS) {
        let key = fresh_key(number);
        let made = patiently(&*provider, &request, &key).await;
        let dropped = tokio::time::timeout(Duration::from_millis(after), provider.delete(&made.id)).await;
        if let Ok(answer) = dropped {
            answer.expect("delete");
        }
        provider.delete(&made.id).await.expect("delete again");
        until("the VM is gone", || async { owned_with(&*provider, &key).await.is_empty() }).await;
    }
    for (number, after) in (100..).zip(DROPS) {
        let key = fresh_key(number);
        let wait = Duration::from_millis(after);
        drop(tokio::time::timeout(wait, provider.create(&request, &key)).await);
        // What a core does after a crash: delete whatever the list shows. A create may still be under way
        // behind it, so it looks again until there is nothing for a while.
        let quiet = Duration::from_millis(300);
        let mut last = Instant::now();
        while last.elapsed() < quiet {
            for one in owned_with(&*provider, &key).await {
                provider.delete(&one.id).await.expect("delete");
                last = Instant::now();
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
    until("no VM exists", || async { harness.machines().await == 0 }).await;
}

/// The console of a VM that runs can be read, within the limit; one that never was has none.
pub async fn the_console_is_there_if_it_is_promised(harness: Arc<dyn Harness>) {
    let provider = harness.provider();
    let Some(console) = provider.console() else { return };
    let nothing = console.tail(&harness.unknown_id(), 100).await;
    assert!(matches!(nothing, Err(Error::NotFound { .. })), "{nothing:?}");
    let made = provider.create(&harness.request(), &fresh_key(0)).await.expect("create");
    let tail = console.tail(&made.id, 100).await.expect("console");
    assert!(tail.len() <= 100);
}

/// Creates as a core does: what is only delayed is repeated with the same key.
async fn patiently(
    provider: &dyn Provider,
    request: &CreateRequest,
    key: &crate::IdempotencyKey,
) -> crate::Created {
    loop {
        match provider.create(request, key).await {
            Ok(made) => return made,
            Err(error) => match error.retry() {
                crate::Retry::After(pause) => tokio::time::sleep(pause).await,
                _ => panic!("create: {error}"),
            },
        }
    }
}
