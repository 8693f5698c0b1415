//! Watches the VM's own network and the path to the node: the path MTU and the VM's addresses. After a change the pod's
//! network is made again, and the node receives the new status. StartVM waits for none of it: the pod's network is made
//! with the values known so far, and corrected later.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use peerpod_link::endpoint::EndpointHandle;
use peerpod_link::path_mtu::Token;
use peerpod_link::path_mtu::ask::{self, PathMtu};
use peerpod_podnet::events::Events;
use peerpod_podnet::netlink;
use peerpod_podnet::netns::Netns;
use peerpod_podnet::underlay::{self, Mtus, UnderlayDevice};
use peerpod_proto::guest;
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};
use tokio_rustls::client::TlsStream;

use crate::control::{self, Control};
use crate::network::{Network, Planned};
use crate::retries::Retries;
use crate::status::Status;

/// Quiet time that ends a burst: DHCP and router advertisements come in several messages.
const QUIET: Duration = Duration::from_millis(250);
const AT_MOST: Duration = Duration::from_secs(2);
/// Limit of corrections to the pod's network within [`RESTORATIONS_IN`]; beyond it another program has prevailed.
const RESTORATIONS: u32 = 20;
const RESTORATIONS_IN: Duration = Duration::from_secs(600);
/// Pause after a failure.
const AGAIN: Duration = Duration::from_secs(5);
/// Number of retries of a silent path, each after twice as long. A relay or a guest that did not get to run for half a
/// second is silent, too.
const TRIES: u32 = 4;

/// Properties of a link that matter to its path.
#[derive(Clone, Debug)]
pub(crate) struct Linked {
    peer: SocketAddr,
    token: Option<Token>,
}

impl Linked {
    /// Reads the properties of a connection, before the endpoint takes it.
    pub(crate) fn of(stream: &TlsStream<TcpStream>) -> Option<Linked> {
        let (tcp, tls) = stream.get_ref();
        let peer = tcp.peer_addr().ok()?;
        Some(Linked { peer, token: Token::of(tls) })
    }
}

impl Linked {
    /// Sets the port on which the relay answers probes: a node that dialled came from another port.
    pub(crate) fn at_port(mut self, port: u16) -> Linked {
        self.peer.set_port(port);
        self
    }
}

/// The last link that was up.
pub(crate) type Link = watch::Sender<Option<Linked>>;

/// Basis of a probe: when it changes, the path is probed again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Tried {
    target: IpAddr,
    /// MTU of the VM's own device and of the route, in bytes.
    device: u32,
    route: u32,
}

/// Number of consecutive silent probes without a cause to probe anew.
#[derive(Debug, Default)]
struct Silence(u32);

impl Silence {
    /// Records a probe. Returns the time until the next one; `None`: not before the next cause.
    fn after(&mut self, silent: bool) -> Option<Duration> {
        let before = self.0;
        self.0 = if silent { before.saturating_add(1) } else { 0 };
        (silent && before < TRIES).then(|| AGAIN * 2u32.pow(before))
    }
}

/// Watcher of the VM's own network and of the path to the node.
pub(crate) struct Watcher {
    pub(crate) network: Arc<Network>,
    pub(crate) control: Arc<Control>,
    pub(crate) status: Arc<Status>,
    pub(crate) handle: EndpointHandle,
}

/// Reasons to look at the networks and at the path.
#[derive(Clone, Copy, Debug, Default)]
struct Causes {
    /// The path to the node is to be probed.
    probe: bool,
    /// The VM's own network may have changed.
    underlay: bool,
    /// The pod's network may have changed.
    pod: bool,
    /// The time for a look without a change has come.
    timer: bool,
}

/// State of a watch.
struct Watch {
    watcher: Watcher,
    linked: watch::Receiver<Option<Linked>>,
    planned: watch::Receiver<Option<Planned>>,
    ended: watch::Receiver<u64>,
    /// Attempts to make the encrypted tunnel again.
    tunnel: Retries,
    underlay_events: Option<Events>,
    pod_events: Option<Events>,
    seen: Vec<UnderlayDevice>,
    /// MTUs of the node's last plan.
    mtus: Option<Vec<u32>>,
    tried: Option<Tried>,
    silence: Silence,
    /// Number of corrections to the pod's network since `counted_from`.
    restorations: u32,
    counted_from: Instant,
    /// The last correction failed. It is repeated, whether or not anything changes again.
    pending: bool,
    /// Time of the next look without a change.
    next: Instant,
}

impl Watch {
    async fn new(watcher: Watcher, linked: watch::Receiver<Option<Linked>>) -> Watch {
        let now = Instant::now();
        // Before the first wait, so that no change is missed.
        let (planned, ended) = (watcher.network.planned(), watcher.network.ended());
        let underlay_events = listen();
        let seen = inspect().await.unwrap_or_default();
        watcher.status.uplinks(addresses(&seen));
        Watch {
            planned,
            ended,
            next: now + watcher.network.probe_interval(),
            watcher,
            linked,
            tunnel: Retries::default(),
            underlay_events,
            pod_events: None,
            seen,
            mtus: None,
            tried: None,
            silence: Silence::default(),
            restorations: 0,
            counted_from: now,
            pending: false,
        }
    }

    /// Waits for the next cause to look; `None`: the link's supervisor is gone.
    async fn cause(&mut self) -> Option<Causes> {
        loop {
            tokio::select! {
                changed = self.linked.changed() => {
                    changed.ok()?;
                    self.watcher.network.linked();
                    return Some(Causes { probe: true, ..Causes::default() });
                }
                changed = self.planned.changed() => {
                    changed.ok()?;
                    return Some(Causes { probe: self.is_path_other(), ..Causes::default() });
                }
                changed = self.ended.changed() => {
                    changed.ok()?;
                    self.ended.borrow_and_update();
                    let times = self.tunnel.failed(Instant::now());
                    tracing::warn!(times, "the encrypted tunnel ended by itself; it is made anew");
                }
                () = when(self.tunnel.due()) => self.watcher.mend(&mut self.tunnel).await,
                more = changed(&mut self.pod_events) => {
                    if !more {
                        self.pod_events = None;
                    }
                    return Some(Causes { pod: true, ..Causes::default() });
                }
                more = changed(&mut self.underlay_events) => {
                    if !more {
                        self.underlay_events = None;
                        self.look_within(AGAIN);
                    }
                    return Some(Causes { underlay: true, ..Causes::default() });
                }
                () = sleep_until(self.next) => {
                    self.timer();
                    return Some(Causes { probe: true, underlay: true, pod: true, timer: true });
                }
            }
        }
    }

    /// Takes the node's new plan. Returns whether the path may be another one.
    fn is_path_other(&mut self) -> bool {
        self.look_within(self.watcher.network.probe_interval());
        let mtus = self.planned.borrow_and_update().as_ref().map(|planned| planned.mtus.clone());
        // A new MTU from the node means that its side of the path changed. The ends of link and tunnel are mostly the
        // same, and the path was probed when the link was made.
        let other_end = self.target() != self.tried.map(|tried| tried.target);
        let other_mtu = self.mtus.is_some() && self.mtus != mtus;
        self.mtus = mtus;
        other_end || other_mtu
    }

    fn timer(&mut self) {
        self.next = Instant::now() + self.watcher.network.probe_interval();
        if self.counted_from.elapsed() >= RESTORATIONS_IN {
            (self.restorations, self.counted_from) = (0, Instant::now());
        }
        if self.underlay_events.is_none() {
            self.underlay_events = listen();
        }
    }

    fn look_within(&mut self, time: Duration) {
        self.next = self.next.min(Instant::now() + time);
    }

    /// Looks at the networks and the path, and corrects the pod's network where that is due.
    async fn look(&mut self, causes: Causes) {
        let pod = match self.pod_events {
            Some(_) => causes.pod,
            // A namespace that cannot be watched is not there yet.
            None => {
                self.pod_events = self.watcher.network.listen();
                self.pod_events.is_some()
            }
        };
        let (mut again, damaged) = match pod {
            true => self.look_at_pod().await,
            false => (false, false),
        };
        let moved = causes.underlay && self.look_at_underlay().await;
        again |= moved;
        // The node's plan may have been carried out between two inspections, with a NIC that was down for a moment.
        if causes.underlay && !again {
            again = self.watcher.network.leaves_otherwise().await;
        }
        let probe = causes.probe || moved;
        let (other_path, other_mtu) = self.look_at_path(Causes { probe, ..causes }).await;
        again |= other_path || other_mtu || self.pending;
        self.pending = again && !self.watcher.follow().await;
        if self.pending {
            self.look_within(AGAIN);
        }
        if again || probe || damaged {
            control::tell(&self.watcher.status, &self.watcher.handle);
        }
    }

    /// Compares the pod's network with its plan. Returns whether it is to be corrected, and whether it is damaged.
    async fn look_at_pod(&mut self) -> (bool, bool) {
        let network = &self.watcher.network;
        let lacks = network.drift().await;
        let again = !lacks.is_empty() && !network.is_pods_own() && self.restorations < RESTORATIONS;
        self.restorations += u32::from(again);
        self.watcher.note_pod(&lacks, again);
        (again, !lacks.is_empty())
    }

    /// Returns whether the VM's own network changed.
    async fn look_at_underlay(&mut self) -> bool {
        let Some(now) = inspect().await.filter(|now| *now != self.seen) else { return false };
        tracing::info!(uplinks = ?now, "the VM's own network changed");
        self.watcher.status.uplinks(addresses(&now));
        self.seen = now;
        true
    }

    /// Probes the path where that is due. Returns whether the path is another one, and whether its MTU changed.
    async fn look_at_path(&mut self, causes: Causes) -> (bool, bool) {
        let link = self.linked.borrow().clone();
        let (Some(link), Some(target)) = (link, self.target()) else { return (false, false) };
        if !causes.probe && !causes.underlay {
            return (false, false);
        }
        let Some(figures) = figures(target).await else { return (false, false) };
        let now = Tried { target, device: figures.device, route: figures.route };
        // A route has an MTU, too.
        let other = causes.underlay && self.tried.is_some_and(|tried| tried != now);
        if !causes.probe && !other {
            return (false, false);
        }
        if !causes.timer || self.tried != Some(now) {
            self.silence = Silence::default();
        }
        self.tried = Some(now);
        let (changed, silent) = self.watcher.probe(&link, target, figures).await;
        if let Some(pause) = self.silence.after(silent) {
            self.look_within(pause);
        }
        (other, changed)
    }

    /// Returns the end of the path: the tunnel's end or, if that is inside another tunnel, the link's end.
    fn target(&self) -> Option<IpAddr> {
        let peer = self.linked.borrow().as_ref().map(|link| link.peer.ip().to_canonical());
        self.planned.borrow().as_ref().and_then(|planned| planned.node).or(peer)
    }
}

impl Watcher {
    /// Watches until the link's supervisor is gone.
    pub(crate) async fn run(self, linked: watch::Receiver<Option<Linked>>) {
        let mut watch = Watch::new(self, linked).await;
        while let Some(causes) = watch.cause().await {
            watch.look(causes).await;
        }
    }

    /// Makes the encrypted tunnel again, and reports it.
    async fn mend(&self, tunnel: &mut Retries) {
        tunnel.begun();
        let note = match self.control.person.network_again().await {
            Ok(()) => "the encrypted tunnel ended by itself and was made anew".to_owned(),
            Err(error) => {
                tunnel.failed(Instant::now());
                format!("the encrypted tunnel ended by itself and cannot be made anew: {error}")
            }
        };
        self.status.note("tunnel", Some(note));
        control::tell(&self.status, &self.handle);
    }

    /// Notes the state of the pod's network, and why it is corrected or not.
    fn note_pod(&self, lacks: &[String], again: bool) {
        let lacks = lacks.join(", ");
        let note = match (lacks.is_empty(), again) {
            (true, _) => return,
            (false, true) => format!("the pod's network was repaired: {lacks}"),
            (false, false) if self.network.is_pods_own() => {
                format!("the pod may change its network, and it is not as planned: {lacks}")
            }
            (false, false) => format!("the pod's network is damaged again and again: {lacks}"),
        };
        self.status.note("pod", Some(note));
    }

    /// Makes the pod's network again; returns whether that worked.
    async fn follow(&self) -> bool {
        let made = self.control.person.network_again().await;
        let failed = made.err().map(|error| error.to_string());
        if let Some(error) = &failed {
            tracing::error!(error, "cannot follow the VM's own network");
        }
        let worked = failed.is_none();
        self.status.note("uplink", failed.map(|error| format!("the VM's own network changed: {error}")));
        worked
    }

    /// Probes the path to `target`; returns whether the path MTU changed, and whether there was no answer.
    async fn probe(&self, link: &Linked, target: IpAddr, figures: Mtus) -> (bool, bool) {
        let device = figures.device;
        let mut path = guest::Path::new();
        path.peer = target.to_string();
        path.device = device;
        path.kernel = figures.learnt;
        let (began, mut silent) = (Instant::now(), false);
        match link.token {
            None => path.why = "the link's TLS has no exporter".to_owned(),
            Some(token) => match ask::ask(SocketAddr::new(target, link.peer.port()), token, device).await {
                Ok(PathMtu::Passes(bytes)) => path.probed = bytes,
                Ok(PathMtu::Silence) => {
                    silent = true;
                    path.why = "no probe came back: UDP to the relay's port is blocked on the way".to_owned();
                }
                Ok(PathMtu::Refused) => path.why = "the node's relay does not answer probes".to_owned(),
                Err(error) => path.why = format!("cannot send probes: {error}"),
            },
        }
        // Silence after an answer reveals nothing about the path: the link may be down, the relay busy.
        let before = self.status.path_before();
        if path.probed == 0 && before.peer == path.peer && before.device == path.device {
            path.probed = before.probed;
        }
        path.mtu = if path.probed > 0 { path.probed } else { path.kernel };
        let (counts, took) = (path.mtu, began.elapsed());
        tracing::info!(
            peer = path.peer,
            mtu = counts,
            probed = path.probed,
            kernel = path.kernel,
            device,
            why = path.why,
            ?took,
            "the path to the node"
        );
        self.status.path(path);
        (self.network.set_path(counts), silent)
    }
}

fn listen() -> Option<Events> {
    let events = Netns::current().and_then(|netns| Events::of_underlay(&netns));
    events.inspect_err(|error| tracing::error!(%error, "cannot watch the VM's own network")).ok()
}

/// Waits until a time; for ever without one.
async fn when(due: Option<Instant>) {
    match due {
        Some(due) => sleep_until(due).await,
        None => std::future::pending().await,
    }
}

async fn figures(target: IpAddr) -> Option<Mtus> {
    match tokio::task::spawn_blocking(move || underlay::mtus(target)).await {
        Ok(Ok(figures)) => Some(figures),
        Ok(Err(error)) => {
            tracing::warn!(%error, "cannot try the path to the node");
            None
        }
        Err(_) => None,
    }
}

/// Waits for the next change; returns false when no further events come.
async fn changed(events: &mut Option<Events>) -> bool {
    match events {
        Some(events) => match events.settled(QUIET, AT_MOST).await {
            Ok(_) => true,
            Err(error) => {
                tracing::error!(%error, "no longer receives changes of the VM's own network");
                false
            }
        },
        None => std::future::pending().await,
    }
}

async fn inspect() -> Option<Vec<UnderlayDevice>> {
    let inspect = || {
        let failed = |e| peerpod_podnet::Error::Kernel {
            attempt: "open a netlink socket".to_owned(),
            source: netlink::Error::Socket(e),
        };
        underlay::inspect(&mut netlink::Client::route().map_err(failed)?)
    };
    match tokio::task::spawn_blocking(inspect).await {
        Ok(Ok(seen)) => Some(seen),
        Ok(Err(error)) => {
            tracing::error!(%error, "cannot look at the VM's own network");
            None
        }
        Err(_) => None,
    }
}

/// Returns the addresses of the devices with a default route.
fn addresses(seen: &[UnderlayDevice]) -> Vec<String> {
    let out = seen.iter().filter(|uplink| uplink.is_default);
    out.flat_map(|uplink| &uplink.addresses).map(|(address, _)| address.to_string()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_silent_path_is_tried_again_with_growing_pauses_and_an_end() {
        let mut silence = Silence::default();
        let pauses = [5, 10, 20, 40].map(|seconds| Some(Duration::from_secs(seconds)));
        assert_eq!([(); 4].map(|()| silence.after(true)), pauses);
        for _ in 0..3 {
            assert_eq!(silence.after(true), None, "UDP is blocked");
        }
        assert_eq!(silence.after(false), None, "it passes");
        assert_eq!(silence.after(true), pauses[0]);
    }
}
