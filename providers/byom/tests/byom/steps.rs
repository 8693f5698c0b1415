//! A machine dies, or the way to it breaks, at each packet of a create. The node goes on with another machine where no
//! guest can run the pod, and otherwise repeats the call until it knows.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use peerpod_provider_api::{CreateRequest, Error, OwnedState, Placement, Provider};
use peerpod_provider_byom::ByomProvider;

use super::common::proxy::Proxy;
use super::common::{Site, key, request};

/// Most calls that are cut; the test fails if there are more.
const MOST: usize = 60;
/// Number of calls without a cut after which no further packet is expected.
const UNCUT: usize = 2;
/// Packets by which a call may be longer than the next one.
const JOINED: usize = 4;
/// Settings of a provider that waits for nothing.
const QUICK: [(&str, &str); 3] = [("connect-timeout", "2s"), ("call-timeout", "2s"), ("quarantine", "0s")];

/// Fault at the packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cut {
    /// The machine loses its power.
    Power,
    /// The machine lives, and cannot be reached for a while.
    Way,
}

/// Call whose packets are counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Call {
    Place,
    Create,
}

/// Places the request on the machine behind the proxy, by a provider that has dialled nothing yet.
async fn placed_at(provider: &ByomProvider, proxy: &Proxy, wish: &CreateRequest) -> CreateRequest {
    let expected = Placement::new(proxy.address.to_string()).unwrap();
    let placement = provider.place(wish).await.unwrap();
    assert_eq!(placement.as_ref(), Some(&expected));
    CreateRequest { placement, ..wish.clone() }
}

/// Cuts one call; returns the class of the answer. `None`: the call had no packet of this number.
async fn cut_at(
    site: &Arc<Site>,
    (cut, delivers): (Cut, bool),
    call: Call,
    packet: usize,
) -> Option<&'static str> {
    let (dying, other) = (0, 1);
    let at_cut = {
        let site = site.clone();
        move || {
            if cut == Cut::Power {
                site.machine(dying).kill();
            }
        }
    };
    let machine = site.machine(dying).address;
    let proxy = Proxy::start(machine, delivers, at_cut).await;
    let pin = format!("[{}]:{} ", proxy.address.ip(), proxy.address.port());
    let known = std::fs::read_to_string(site.folder().join("known_hosts")).unwrap();
    let key_of = known.lines().next().unwrap().split_once(' ').unwrap().1.to_owned();
    let hosts = site.folder().join(format!("known_hosts.{call:?}.{packet}"));
    std::fs::write(&hosts, format!("{known}{pin}{key_of}\n")).unwrap();
    let hosts = hosts.display().to_string();
    let of = |machines: String| {
        let settings = [&QUICK[..], &[("known-hosts-file", hosts.as_str()), ("machines", machines.as_str())]];
        site.provider(&settings.concat())
    };
    let both = of(format!("{},{}", proxy.address, site.address(other)));
    // A packet may be cut again.
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let wish = request(&format!("pod-{number}"));
    let key = key("cut", number);
    if call == Call::Place {
        proxy.arm(packet);
    }
    let outcome = match both.place(&wish).await {
        Err(error) => Err(error),
        Ok(_) if proxy.is_cut().await => Err(Error::transient("the machine was chosen and lost")),
        Ok(_) => {
            let placed = placed_at(&both, &proxy, &wish).await;
            if call == Call::Create {
                proxy.arm(packet);
            }
            Ok((both.create(&placed, &key).await, placed))
        }
    };
    let class = match &outcome {
        _ if !proxy.is_cut().await => None,
        Err(_) => Some("place"),
        Ok((Ok(_), _)) => Some("made"),
        Ok((Err(error), _)) => Some(error.class()),
    };
    check(site, cut, &proxy, &both, &key, outcome).await;
    // It is free again for the next packet.
    site.machine(dying).kill();
    site.machine(dying).start();
    site.until("it is free", || site.machine(dying).is_published());
    class
}

type Outcome = Result<(Result<peerpod_provider_api::Created, Error>, CreateRequest), Error>;

async fn check(
    site: &Arc<Site>,
    cut: Cut,
    proxy: &Proxy,
    provider: &ByomProvider,
    key: &peerpod_provider_api::IdempotencyKey,
    outcome: Outcome,
) {
    let heal = || {
        if cut == Cut::Power && !site.machine(0).files().has(".mounted") {
            site.machine(0).kill();
            site.machine(0).start();
            site.until("it runs again", || site.machine(0).is_published());
        }
        proxy.heal();
    };
    match outcome {
        // The cut was while the machine was chosen: nothing was made.
        Err(error) => {
            assert!(matches!(error, Error::Capacity { .. } | Error::Transient { .. }), "{error}");
            heal();
            assert!(provider.list_owned().await.unwrap().is_empty());
        }
        Ok((Ok(made), _)) => {
            heal();
            let listed = provider.list_owned().await.unwrap();
            let expected = usize::from(cut == Cut::Way || !proxy.is_cut().await);
            assert!(listed.iter().filter(|vm| vm.id == made.id).count() >= expected, "{listed:?}");
        }
        // The node goes on with another machine: no guest may run the pod here, now or later.
        Ok((Err(Error::Capacity { .. }), _)) => {
            let listed = provider.list_owned().await.unwrap();
            assert!(listed.iter().all(|vm| vm.state == OwnedState::Deleting), "{listed:?}");
            assert!(!site.machine(0).files().has("user-data"));
            heal();
            let free = async || provider.list_owned().await.is_ok_and(|listed| listed.is_empty());
            while !free().await {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            assert!(site.delivered().iter().all(|(_, of, _)| of != key.as_str()), "an abandoned VM ran");
        }
        // The node repeats the call.
        Ok((Err(Error::Transient { .. }), placed)) => {
            heal();
            let again = async {
                loop {
                    match provider.create(&placed, key).await {
                        Err(Error::Transient { .. }) => tokio::time::sleep(Duration::from_millis(20)).await,
                        answer => break answer.unwrap(),
                    }
                }
            };
            let made = tokio::time::timeout(super::common::PATIENCE, again).await.unwrap();
            let listed = provider.list_owned().await.unwrap();
            assert_eq!(listed.iter().map(|vm| vm.id.clone()).collect::<Vec<_>>(), [made.id]);
        }
        Ok((Err(error), _)) => panic!("{error}"),
    }
    assert_eq!(site.doubles(), 0);
}

/// Cuts a call at each of its packets, and until the answers had all wanted classes.
async fn cut_everywhere(site: &Arc<Site>, cut: (Cut, bool), call: Call, wanted: &[&str]) {
    let (mut classes, mut uncut, mut packet) = (Vec::new(), 0, 0);
    for _ in 0..MOST {
        packet += 1;
        match cut_at(site, cut, call, packet).await {
            Some(class) if call == Call::Create || class == "place" => classes.push(class),
            _ => uncut += 1,
        }
        if uncut < UNCUT {
            continue;
        }
        if wanted.iter().all(|class| classes.contains(class)) {
            println!("{cut:?}, {call:?}: {}", classes.join(" "));
            return;
        }
        // The same call may be some packets longer or shorter, because packets may be joined. The last one was missed.
        (packet, uncut) = (packet.saturating_sub(UNCUT + JOINED), 0);
    }
    panic!("{call:?} has more packets, or no answer of {wanted:?}: {classes:?}");
}

async fn cut_all(cut: (Cut, bool)) {
    let site = Arc::new(Site::start(2));
    // There is one choice.
    site.machine(1).files().write("claim", b"of somebody else");
    cut_everywhere(&site, cut, Call::Create, &["capacity", "transient"]).await;
    cut_everywhere(&site, cut, Call::Place, &["place"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_that_loses_its_power_at_any_packet_runs_no_pod_twice() {
    cut_all((Cut::Power, false)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_whose_last_answer_is_lost_runs_no_pod_twice() {
    cut_all((Cut::Way, true)).await;
}
