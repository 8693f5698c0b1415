//! Lists and events while machines do not answer or reboot by themselves.

use std::time::Duration;

use futures_util::StreamExt;
use peerpod_provider_api::{EventKind, OwnedState, Provider};
use tokio::time::timeout;

use super::common::{PATIENCE, Site, key, placed, request};

/// Settings of a provider that waits for nothing.
const QUICK: [(&str, &str); 2] = [("connect-timeout", "2s"), ("call-timeout", "2s")];

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_on_a_machine_that_does_not_answer_is_listed_as_it_was() {
    let site = Site::start(2);
    let provider = site.provider(&QUICK);
    let wish = placed(&*provider, &request("a")).await.unwrap();
    let made = provider.create(&wish, &key("a", 0)).await.unwrap();
    let number = usize::from(wish.placement.unwrap().as_str() == site.address(1));
    let before = provider.list_owned().await.unwrap();
    assert_eq!((before.len(), before[0].state), (1, OwnedState::Running));
    assert_eq!(before[0].node.as_deref(), Some("n"));
    for machine in 0..2 {
        site.machine(machine).kill();
    }
    assert_eq!(provider.list_owned().await.unwrap(), before, "and the other machine had no VM");
    let gone = provider.addresses(&made.id).await.unwrap_err();
    assert_eq!(gone.class(), "transient", "{gone}");
    assert_eq!(provider.delete(&made.id).await.unwrap_err().class(), "transient");
    site.machine(number).start();
    site.until("it runs again", || site.machine(number).is_published());
    let gone = provider.addresses(&made.id).await.unwrap_err();
    assert_eq!(gone.class(), "not_found", "{gone}");
    assert!(provider.list_owned().await.unwrap().is_empty());
    provider.delete(&made.id).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_list_without_a_machine_that_may_have_a_vm_fails_at_first() {
    let site = Site::start(2);
    let before = site.provider(&QUICK);
    let wish = placed(&*before, &request("a")).await.unwrap();
    before.create(&wish, &key("a", 0)).await.unwrap();
    let number = usize::from(wish.placement.unwrap().as_str() == site.address(1));
    // The controller has seen the other machine without a VM, but nodes may have claimed it since.
    let patient = site.collector(&[&QUICK[..], &[("list-patience", "1h")]].concat());
    let hasty = site.collector(&[&QUICK[..], &[("list-patience", "1ms")]].concat());
    for collector in [&patient, &hasty] {
        assert_eq!(collector.list_owned().await.unwrap().len(), 1);
    }
    site.machine(1 - number).kill();
    let error = patient.list_owned().await.unwrap_err();
    assert_eq!(error.class(), "transient");
    assert!(error.to_string().contains("may have a VM, and cannot be asked: connect"), "{error}");
    // The patience counts from the first list that misses the machine.
    drop(hasty.list_owned().await);
    tokio::time::sleep(Duration::from_millis(2)).await;
    assert_eq!(hasty.list_owned().await.unwrap().len(), 1, "it is left out later");
    // The next process of the node knows nothing.
    let after = site.provider(&QUICK);
    let error = after.list_owned().await.unwrap_err().to_string();
    assert!(error.contains("remove it from provider.byom.machines if it is gone for good"), "{error}");
    let others = site.address(number);
    let after = site.provider(&[&QUICK[..], &[("machines", others.as_str())]].concat());
    assert_eq!(after.list_owned().await.unwrap().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_that_somebody_else_has_by_now_is_not_rebooted() {
    let site = Site::start(1);
    let provider = site.provider(&[]);
    let wish = placed(&*provider, &request("a")).await.unwrap();
    let made = provider.create(&wish, &key("a", 0)).await.unwrap();
    assert_eq!(provider.list_owned().await.unwrap().len(), 1);
    // A person freed it by hand without a reboot, and another installation claimed it.
    let files = site.machine(0).files();
    let claim = files.text("claim").unwrap();
    files.write("claim", claim.replace("\"installation\":\"i\"", "\"installation\":\"another\"").as_bytes());
    assert_ne!(files.text("claim").unwrap(), claim);
    provider.delete(&made.id).await.unwrap();
    assert!(!files.has("reboot"), "its boot is the same, its pod is another one");
    assert!(provider.list_owned().await.unwrap().is_empty());
    assert_eq!(provider.addresses(&made.id).await.unwrap_err().class(), "not_found");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_that_reboots_by_itself_ends_its_vm_with_an_event() {
    let site = Site::start(1);
    let provider = site.provider(&[]);
    let mut events = provider.events().unwrap();
    let wish = placed(&*provider, &request("a")).await.unwrap();
    let made = provider.create(&wish, &key("a", 0)).await.unwrap();
    site.machine(0).reboot();
    site.until("it runs again", || site.machine(0).is_published());
    assert!(provider.list_owned().await.unwrap().is_empty());
    let event = timeout(PATIENCE, events.next()).await.unwrap().unwrap();
    assert_eq!(event.id, made.id);
    assert!(matches!(event.kind, EventKind::Ended { reason } if reason.contains("has rebooted")));
    // A late delete does not reach the next pod of the machine.
    let wish = placed(&*provider, &request("b")).await.unwrap();
    let next = provider.create(&wish, &key("b", 0)).await.unwrap();
    provider.delete(&made.id).await.unwrap();
    assert_eq!(provider.addresses(&next.id).await.unwrap(), next.addresses);
    provider.delete(&next.id).await.unwrap();
    let listed = provider.list_owned().await.unwrap();
    assert!(listed.iter().all(|vm| vm.state == OwnedState::Deleting), "{listed:?}");
    site.until("it is free", || site.claimed().is_empty());
}
