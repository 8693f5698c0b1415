//! Configures the VM's own NICs if no other program does.
//!
//! A NIC is brought up and gets an address by DHCPv4, by DHCPv6 if the routers announce it, or from the kernel command
//! line. Routes, MTU and name servers come with the address, and all of it lasts as long as the lease. The kernel
//! itself handles router announcements (SLAAC, the IPv6 default route).
//!
//! Another program (the kernel, the maker of a "VM" of namespaces) configured a NIC that has an endless address. The
//! guest leaves such a NIC alone; leases always end. So the guest stores nothing across its restart, and when it is
//! dead for too long the kernel removes the address.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use mozim::{
    DhcpV4Client, DhcpV4Config, DhcpV4Lease, DhcpV4State, DhcpV6Client, DhcpV6Config, DhcpV6Mode, DhcpV6State,
};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::address::AddressFlags;
use netlink_packet_route::link::{
    AfSpecInet6, AfSpecUnspec, Inet6IfaceFlags, LinkAttribute, LinkFlags, LinkMessage,
};
use parking_lot::Mutex;
use peerpod_podnet::events::Events;
use peerpod_podnet::netlink::Client;
use peerpod_podnet::netns::Netns;
use peerpod_podnet::underlay;
use rtnetlink::LinkUnspec;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{sleep, timeout};

use crate::log;
use crate::status::{self, RunningStage, Status};

mod line;
mod names;
mod silence;
mod wanted;

use line::{Line, Static};
use names::Names;
use silence::Silence;
use wanted::{WantedNic, addresses, bring_up, has_flag, is_permanent, local};

const RESOLV_CONF: &str = "/etc/resolv.conf";
/// Quiet time that ends a burst of events.
const QUIET: Duration = Duration::from_millis(10);
/// Quiet time until one NIC has an address: until then the first event is the awaited one.
const FIRST_QUIET: Duration = Duration::from_millis(1);
const AT_MOST: Duration = Duration::from_millis(100);
/// Interval between inspections without an event, in case one is lost.
const LOOK: Duration = Duration::from_secs(10);
/// Time limits of the first clients for an offer. A bridge that is still learning drops the first request, and the
/// protocol's own wait is some 4 s. A slower server answers the third client, which repeats its request as the protocol
/// has it.
const FIRST_TRIES: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(2)];
/// Time limit of an answer to a request: the server that offered, or granted before, answers at once or not at all. The
/// client does not process a refusal then. A new client asks the server whether the lease still holds, and does process
/// a refusal.
const REQUEST: Duration = Duration::from_secs(4);
/// Limit of [`Patience::request`], which doubles after each offer without an acknowledgement. A slow server still has
/// earlier requests queued, and a client that restarts each time would never get further.
const LONGEST_REQUEST: Duration = Duration::from_secs(32);
const AGAIN: Duration = Duration::from_secs(1);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Nic {
    name: String,
    index: u32,
    mac: [u8; 6],
    up: bool,
    carrier: bool,
    /// Whether a router announces that addresses come from a server.
    managed: bool,
    /// Whether another program gave it an address of IPv4, of IPv6.
    given: (bool, bool),
    link_local: Option<Ipv6Addr>,
    /// Whether it has an address, of any source, that is not link-local.
    addressed: bool,
}

struct Shared {
    names: Names,
    status: Arc<Status>,
    /// Stage that ends when the first NIC has an address.
    stage: Mutex<Option<RunningStage>>,
    addressed: AtomicBool,
}

pub(crate) async fn keep(status: Arc<Status>) {
    let (mut line, wrong) = if status::in_first_pid_namespace() {
        line::parse(&std::fs::read_to_string("/proc/cmdline").unwrap_or_default())
    } else {
        Default::default() // the command line belongs to the host
    };
    for why in wrong {
        tracing::error!(why, "the kernel's command line");
        status.note("kernel-line", Some(format!("the kernel's command line: {why}")));
    }
    if line.off {
        tracing::info!("the kernel's command line disables NIC configuration");
        status.asked.set();
        return;
    }
    let shared = Arc::new(Shared {
        names: Names::new(Path::new(RESOLV_CONF)),
        status,
        stage: Mutex::new(None),
        addressed: AtomicBool::new(false),
    });
    shared.names.tell(0, false, &line.dns, &[]);
    let events = Netns::current().and_then(|netns| Events::of_underlay(&netns));
    let mut events = events.inspect_err(|error| tracing::error!(%error, "cannot watch the NICs")).ok();
    let mut manager =
        NicManager { shared, tasks: JoinSet::new(), of: BTreeMap::new(), seen: BTreeMap::new() };
    let mut silence = Silence::new(Instant::now());
    loop {
        match blocking(inspect).await {
            Ok(nics) => {
                if let Some(why) = silence.inspect(&nics, Instant::now()) {
                    log::cannot_join(&why);
                }
                manager.follow(&nics, &mut line).await;
            }
            Err(error) => tracing::error!(error, "cannot look at the NICs"),
        }
        let quiet = if manager.shared.addressed.load(Relaxed) { QUIET } else { FIRST_QUIET };
        let received = async {
            match &mut events {
                Some(events) => events.settled(quiet, AT_MOST).await,
                None => std::future::pending().await,
            }
        };
        if let Ok(Err(error)) = timeout(LOOK, received).await {
            tracing::error!(%error, "no longer receives changes of the NICs");
            events = None;
        }
    }
}

struct NicManager {
    shared: Arc<Shared>,
    tasks: JoinSet<()>,
    /// Task by NIC and family (true: IPv6).
    of: BTreeMap<(u32, bool), AbortHandle>,
    /// Rank of each NIC, by index.
    seen: BTreeMap<u32, u32>,
}

impl NicManager {
    async fn follow(&mut self, nics: &[Nic], line: &mut Line) {
        self.of.retain(|(index, _), task| {
            let stays = nics.iter().any(|nic| nic.index == *index && nic.carrier);
            if !stays {
                task.abort();
            }
            stays && !task.is_finished()
        });
        while self.tasks.try_join_next().is_some() {}
        // No NIC needs a server. A new NIC without carrier counts as needing one: it may just be coming up.
        if nics.iter().all(|nic| nic.given.0 || (self.seen.contains_key(&nic.index) && !nic.carrier)) {
            self.shared.status.asked.set();
        }
        for nic in nics {
            let next = self.seen.len() as u32;
            let known = self.seen.get(&nic.index).copied();
            let rank = known.unwrap_or(next);
            if known.is_none() {
                self.seen.insert(nic.index, rank);
                self.first_sight(nic, rank, line).await;
            }
            if nic.carrier && !nic.given.0 {
                self.work(nic, rank, false);
            }
            if nic.carrier && nic.managed && !nic.given.1 && nic.link_local.is_some() {
                self.work(nic, rank, true);
            }
        }
    }

    /// Brings a new NIC up once (one that is taken down later stays down), and applies the kernel command line to it.
    async fn first_sight(&self, nic: &Nic, rank: u32, line: &mut Line) {
        if !nic.up {
            // Set before the NIC is up, or the first router announcement is lost. 2: also on a VM that forwards.
            for (setting, value) in [("accept_ra", "2"), ("router_solicitation_delay", "0")] {
                let path = format!("/proc/sys/net/ipv6/conf/{}/{setting}", nic.name);
                if let Err(error) = std::fs::write(&path, value) {
                    tracing::debug!(path, %error, "IPv6"); // a kernel without it
                }
            }
            let index = nic.index;
            match blocking(move |client| bring_up(client, index).map_err(|error| error.to_string())).await {
                Ok(()) => tracing::info!(nic = nic.name, "up"),
                Err(error) => tracing::error!(nic = nic.name, error, "cannot bring the NIC up"),
            }
        }
        let is_its = |fixed: &Static| fixed.device.as_ref().map_or(rank == 0, |name| *name == nic.name);
        let (fixed, rest) = std::mem::take(&mut line.fixed).into_iter().partition(is_its);
        line.fixed = rest;
        for fixed in fixed as Vec<Static> {
            self.shared.give(nic, rank, fixed.wanted).await;
        }
    }

    fn work(&mut self, nic: &Nic, rank: u32, v6: bool) {
        let key = (nic.index, v6);
        if self.of.contains_key(&key) {
            return;
        }
        let (shared, nic) = (self.shared.clone(), nic.clone());
        shared.begins();
        let task = if v6 {
            self.tasks.spawn(async move { shared.ask_v6(&nic, rank).await })
        } else {
            self.tasks.spawn(async move { shared.ask_v4(&nic, rank).await })
        };
        self.of.insert(key, task);
    }
}

/// Client that ran until its state changed.
type Run = Result<(DhcpV4Client, DhcpV4State), mozim::DhcpError>;

async fn run(client: impl Future<Output = Result<DhcpV4Client, mozim::DhcpError>>) -> Run {
    let mut client = client.await?;
    let state = client.run().await?;
    Ok((client, state))
}

/// Time limits of the next client.
struct Patience {
    /// Limits of the first clients for an offer.
    first: std::array::IntoIter<Duration, 2>,
    /// Limit of the answers after an offer.
    request: Duration,
}

impl Shared {
    fn begins(&self) {
        let mut stage = self.stage.lock();
        if stage.is_none() && !self.addressed.load(Relaxed) {
            *stage = Some(self.status.begin("uplink"));
        }
    }

    /// Applies settings to a NIC; returns whether that worked.
    async fn give(&self, nic: &Nic, rank: u32, wanted: WantedNic) -> bool {
        let (index, given) = (nic.index, wanted.clone());
        if let Err(error) = blocking(move |client| wanted.apply(client, index, rank)).await {
            tracing::error!(nic = nic.name, error, "uplink");
            self.status.note("uplink-address", Some(format!("{}: {error}", nic.name)));
            return false;
        }
        self.names.tell(rank, given.address.is_ipv6(), &given.dns, &given.search);
        if !self.addressed.swap(true, Relaxed) {
            let stage = self.stage.lock().take();
            self.status.done(stage.unwrap_or_else(|| self.status.begin("uplink")));
        }
        self.status.note("uplink-address", None);
        self.status.addressed.notify_one();
        self.status.asked.set();
        true
    }

    /// Requests an IPv4 address, and keeps it, for ever.
    async fn ask_v4(&self, nic: &Nic, rank: u32) {
        let mut config = DhcpV4Config::new(&nic.name);
        config.set_iface_index(nic.index);
        if let Err(error) = config.set_iface_mac_raw(&nic.mac) {
            tracing::error!(nic = nic.name, %error, "DHCP");
            return;
        }
        let mut lease = None;
        let mut patience = Patience { first: FIRST_TRIES.into_iter(), request: REQUEST };
        loop {
            if let Some(error) = self.lease_v4(nic, rank, &config, &mut lease, &mut patience).await {
                tracing::warn!(nic = nic.name, error, "DHCP");
                sleep(AGAIN).await;
            }
        }
    }

    /// Runs a client; deferred work goes on when it waits for an answer.
    async fn asking<T>(&self, run: impl Future<Output = T>) -> T {
        let mut run = std::pin::pin!(run);
        std::future::poll_fn(|cx| {
            let polled = run.as_mut().poll(cx);
            self.status.asked.set();
            polled
        })
        .await
    }

    /// Runs one client until it gets no answer in time (`None`) or fails.
    async fn lease_v4(
        &self,
        nic: &Nic,
        rank: u32,
        config: &DhcpV4Config,
        lease: &mut Option<DhcpV4Lease>,
        patience: &mut Patience,
    ) -> Option<String> {
        // A new client asks the server of its last lease, else any server.
        let mut running: Pin<Box<dyn Future<Output = Run> + Send>> =
            Box::pin(run(DhcpV4Client::init(config.clone(), lease.take())));
        let (mut limit, mut offered) = (patience.first.next(), false);
        loop {
            let asking = self.asking(running.as_mut());
            let ran = match limit {
                Some(limit) => timeout(limit, asking).await.ok(),
                None => Some(asking.await),
            };
            let Some(ran) = ran else {
                if offered {
                    patience.request = (patience.request * 2).min(LONGEST_REQUEST);
                }
                return None;
            };
            let (client, state) = match ran {
                Ok(ran) => ran,
                Err(error) => return Some(error.to_string()),
            };
            running = Box::pin(run(std::future::ready(Ok(client))));
            offered = matches!(state, DhcpV4State::Selecting);
            limit = match state {
                DhcpV4State::Done(granted) => {
                    let wanted = WantedNic::of_v4(&granted);
                    let (seconds, server) = (granted.lease_time_sec, granted.srv_id);
                    let WantedNic { address, prefix, .. } = wanted;
                    tracing::info!(nic = nic.name, %address, prefix, %server, seconds, "DHCP lease");
                    // The kernel may accept at the next renewal the settings that it refused now.
                    self.give(nic, rank, wanted).await;
                    *lease = Some(*granted);
                    patience.request = REQUEST;
                    None
                }
                DhcpV4State::InitReboot => None,
                DhcpV4State::Selecting => Some(patience.request),
                DhcpV4State::Renewing | DhcpV4State::Rebinding => Some(REQUEST),
            };
        }
    }

    /// Requests an IPv6 address, and keeps it, for ever.
    async fn ask_v6(&self, nic: &Nic, rank: u32) {
        let Some(link_local) = nic.link_local else { return };
        let mut config = DhcpV6Config::new(&nic.name, DhcpV6Mode::NonTemporaryAddresses);
        config.set_iface_index(nic.index).set_link_local_ip(link_local).set_duid_by_iface_mac(&nic.mac);
        loop {
            if let Err(error) = self.lease_v6(nic, rank, &config).await {
                tracing::warn!(nic = nic.name, error, "DHCPv6");
            }
            sleep(AGAIN).await;
        }
    }

    async fn lease_v6(&self, nic: &Nic, rank: u32, config: &DhcpV6Config) -> Result<(), String> {
        let failed = |error: mozim::DhcpError| error.to_string();
        let mut client = DhcpV6Client::init(config.clone(), None).await.map_err(failed)?;
        let mut held: Option<IpAddr> = None;
        loop {
            let state = client.run().await.map_err(failed)?;
            let DhcpV6State::Done(granted) = state else { continue };
            let wanted = WantedNic::of_v6(&granted);
            let address = wanted.address;
            if address.is_unspecified() {
                return Err("the server has no address for us".to_owned());
            }
            tracing::info!(nic = nic.name, %address, seconds = granted.valid_time_sec, "DHCPv6 lease");
            self.give(nic, rank, wanted).await;
            let index = nic.index;
            if let Some(gone) = held.replace(address).filter(|before| *before != address) {
                blocking(move |client| wanted::remove(client, index, gone)).await?;
            }
        }
    }
}

/// Runs synchronous netlink calls on a blocking thread.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce(&mut Client) -> Result<T, String> + Send + 'static,
) -> Result<T, String> {
    let run = move || {
        let mut client = Client::route().map_err(|error| format!("open a netlink socket: {error}"))?;
        work(&mut client)
    };
    tokio::task::spawn_blocking(run).await.map_err(|error| error.to_string())?
}

fn inspect(client: &mut Client) -> Result<Vec<Nic>, String> {
    let mut nics = Vec::new();
    for known in underlay::nics(client).map_err(|error| error.to_string())? {
        let ask = RouteNetlinkMessage::GetLink(LinkUnspec::new_with_index(known.index).build());
        let Ok(RouteNetlinkMessage::NewLink(link)) = client.ask(ask) else {
            continue; // gone meanwhile
        };
        let mut nic = Nic {
            name: known.name,
            index: known.index,
            mac: known.mac,
            up: known.up,
            carrier: link.header.flags.contains(LinkFlags::Up | LinkFlags::LowerUp),
            managed: ra_flags(&link).contains(Inet6IfaceFlags::RaManaged),
            given: (false, false),
            link_local: None,
            addressed: false,
        };
        for address in addresses(client, nic.index)? {
            let Some(own) = local(&address) else { continue };
            let (tentative, permanent) =
                (has_flag(&address, AddressFlags::Tentative), is_permanent(&address));
            nic.addressed |= !tentative && underlay::reaches_far(own);
            match own {
                IpAddr::V6(own) if own.is_unicast_link_local() => {
                    nic.link_local = Some(own).filter(|_| !tentative).or(nic.link_local);
                }
                IpAddr::V4(own) if own.is_link_local() => {}
                IpAddr::V4(_) => nic.given.0 |= permanent,
                IpAddr::V6(_) => nic.given.1 |= permanent,
            }
        }
        // A program that configured one family has configured the NIC: no DHCPv4 server is needed then.
        nic.given = (nic.given.0 || nic.given.1, nic.given.1);
        nics.push(nic);
    }
    Ok(nics)
}

fn ra_flags(link: &LinkMessage) -> Inet6IfaceFlags {
    let families = link.attributes.iter().find_map(|attribute| match attribute {
        LinkAttribute::AfSpecUnspec(families) => Some(families),
        _ => None,
    });
    let of_v6 = families.into_iter().flatten().find_map(|family| match family {
        AfSpecUnspec::Inet6(settings) => Some(settings),
        _ => None,
    });
    let flags = of_v6.into_iter().flatten().find_map(|setting| match setting {
        AfSpecInet6::Flags(flags) => Some(*flags),
        _ => None,
    });
    flags.unwrap_or(Inet6IfaceFlags::empty())
}
