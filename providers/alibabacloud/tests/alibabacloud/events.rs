//! Checks the events of spot VMs that the cloud takes back, by its API alone.

use std::time::{Duration, SystemTime};

use futures_util::StreamExt;
use peerpod_provider_api::{EventKind, Provider};
use tokio::time::timeout;

use super::common::{Site, key, placed, request};

const PATIENCE: Duration = Duration::from_secs(20);

#[tokio::test(flavor = "multi_thread")]
async fn a_spot_vm_that_the_cloud_takes_back_is_announced_and_its_end_is_reported() {
    let site = Site::start().await;
    let provider = site.provider(&[("spot-watch", "50ms")]);
    let mut events = provider.events().unwrap();
    let wish = placed(&*provider, &request("web-0")).await.unwrap();
    let made = provider.create(&wish, &key("spot", 0)).await.unwrap();
    provider.addresses(&made.id).await.unwrap();
    site.cloud.with(|alibaba, _| alibaba.instances.get_mut(made.id.as_str()).unwrap().is_recalled = true);
    let event = timeout(PATIENCE, events.next()).await.unwrap().unwrap();
    assert_eq!(event.id, made.id);
    let EventKind::Interruption { at } = event.kind else { panic!("{event:?}") };
    let left = at.duration_since(SystemTime::now()).unwrap();
    assert!((200..=300).contains(&left.as_secs()), "{left:?}");
    assert_ne!(provider.place(&request("web-0")).await.unwrap(), wish.placement, "its offering is skipped");
    site.cloud.with(|alibaba, world| alibaba.instances.remove(made.id.as_str(), world.now));
    let event = timeout(PATIENCE, events.next()).await.unwrap().unwrap();
    assert!(matches!(event.kind, EventKind::Ended { .. }) && event.id == made.id, "{event:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_spot_vm_of_an_earlier_process_is_watched() {
    let site = Site::start().await;
    let first = site.provider(&[]);
    let wish = placed(&*first, &request("web-0")).await.unwrap();
    let made = first.create(&wish, &key("earlier", 0)).await.unwrap();
    let provider = site.provider(&[("spot-watch", "50ms")]);
    let mut events = provider.events().unwrap();
    provider.preflight().await.unwrap();
    site.cloud.with(|alibaba, _| alibaba.instances.get_mut(made.id.as_str()).unwrap().is_recalled = true);
    let event = timeout(PATIENCE, events.next()).await.unwrap().unwrap();
    assert!(matches!(event.kind, EventKind::Interruption { .. }) && event.id == made.id, "{event:?}");
}
