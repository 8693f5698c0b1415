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
use peerpod_podnet::netlink::Client;
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

/// Quiet time that ends a burst: DHCP and router advertisements come in several messages.
const QUIET: Duration = Duration::from_millis(250);
const AT_MOST: Duration = Duration::from_secs(2);
/// Limit of corrections to the pod's network within [`RESTORATIONS_IN`]; beyond it another program has prevailed.
const RESTORATIONS: u32 = 20;
const RESTORATIONS_IN: Duration = Duration::from_secs(600);
const AGAIN: Duration = Duration::from_secs(5);
/// Number of retries of a silent path, each after twice as long: a relay or guest that did not get to run is silent,
/// too.
const TRIES: u32 = 4;

/// Properties of a link that matter to its path.
#[derive(Clone, Debug)]
pub(crate) struct Linked {
    peer: SocketAddr,
    token: Option<Token>,
}

impl Linked {
    /// Reads the properties of a connection, before the endpoint takes it. `port` is the port on which the relay
    /// answers probes: a node that dialled came from another port.
    pub(crate) fn of(stream: &TlsStream<TcpStream>, port: Option<u16>) -> Option<Linked> {
        let (tcp, tls) = stream.get_ref();
        let mut peer = tcp.peer_addr().ok()?;
        peer.set_port(port.unwrap_or(peer.port()));
        Some(Linked { peer, token: Token::of(tls) })
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

/// Watcher of the VM's own network and of the path to the node.
pub(crate) struct Watcher {
    control: Arc<Control>,
    handle: EndpointHandle,
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
    /// Number of corrections to the pod's network, and the start of their count.
    restorations: (u32, Instant),
    /// The last correction failed. It is repeated, whether or not anything changes again.
    pending: bool,
    /// Time of the next look without a change.
    next: Instant,
}

impl Watcher {
    /// Watches until the link's supervisor is gone.
    pub(crate) async fn run(
        control: Arc<Control>,
        handle: EndpointHandle,
        linked: watch::Receiver<Option<Linked>>,
    ) {
        let now = Instant::now();
        let network = &control.person.network;
        // Before the first wait, so that no change is missed.
        let (planned, ended) = (network.planned(), network.encrypted.ended());
        let underlay_events = listen();
        let seen = inspect().await.unwrap_or_default();
        control.status.lock().uplink_addresses = addresses(&seen);
        let mut watcher = Watcher {
            planned,
            ended,
            next: now + network.probe_interval(),
            control,
            handle,
            linked,
            tunnel: Retries::default(),
            underlay_events,
            pod_events: None,
            seen,
            mtus: None,
            tried: None,
            silence: Silence::default(),
            restorations: (0, now),
            pending: false,
        };
        while let Some(causes) = watcher.cause().await {
            watcher.look(causes).await;
        }
    }

    /// Waits for the next cause to look; `None`: the link's supervisor is gone.
    async fn cause(&mut self) -> Option<Causes> {
        loop {
            tokio::select! {
                changed = self.linked.changed() => {
                    changed.ok()?;
                    self.network().encrypted.linked();
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
                () = when(self.tunnel.due()) => self.mend().await,
                () = changed(&mut self.pod_events) => return Some(Causes { pod: true, ..Causes::default() }),
                () = changed(&mut self.underlay_events) => {
                    if self.underlay_events.is_none() {
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
        self.look_within(self.network().probe_interval());
        let mtus = self.planned.borrow_and_update().as_ref().map(|planned| planned.mtus.clone());
        // A new MTU from the node means that its side of the path changed. The ends of link and tunnel are mostly the
        // same, and the path was probed when the link was made.
        let other_end = self.target() != self.tried.map(|tried| tried.target);
        let other_mtu = self.mtus.is_some() && self.mtus != mtus;
        self.mtus = mtus;
        other_end || other_mtu
    }

    fn timer(&mut self) {
        self.next = Instant::now() + self.network().probe_interval();
        if self.restorations.1.elapsed() >= RESTORATIONS_IN {
            self.restorations = (0, Instant::now());
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
                self.pod_events = self.network().listen();
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
            again = self.network().leaves_otherwise().await;
        }
        let probe = causes.probe || moved;
        let (other_path, other_mtu) = self.look_at_path(Causes { probe, ..causes }).await;
        again |= other_path || other_mtu || self.pending;
        self.pending = again && !self.follow().await;
        if self.pending {
            self.look_within(AGAIN);
        }
        if again || probe || damaged {
            control::tell(&self.control.status, &self.handle);
        }
    }

    /// Compares the pod's network with its plan. Returns whether it is to be corrected, and whether it is damaged.
    async fn look_at_pod(&mut self) -> (bool, bool) {
        let network = self.network();
        let lacks = network.drift().await;
        let again = !lacks.is_empty() && !network.is_pods_own() && self.restorations.0 < RESTORATIONS;
        self.restorations.0 += u32::from(again);
        self.note_pod(&lacks, again);
        (again, !lacks.is_empty())
    }

    async fn look_at_underlay(&mut self) -> bool {
        let Some(now) = inspect().await.filter(|now| *now != self.seen) else { return false };
        tracing::info!(uplinks = ?now, "the VM's own network changed");
        self.control.status.lock().uplink_addresses = addresses(&now);
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
        let (changed, silent) = self.probe(&link, target, figures).await;
        if let Some(pause) = self.silence.after(silent) {
            self.look_within(pause);
        }
        (other, changed)
    }

    fn network(&self) -> &Network {
        &self.control.person.network
    }

    /// Returns the end of the path: the tunnel's end or, if that is inside another tunnel, the link's end.
    fn target(&self) -> Option<IpAddr> {
        let peer = self.linked.borrow().as_ref().map(|link| link.peer.ip().to_canonical());
        self.planned.borrow().as_ref().and_then(|planned| planned.node).or(peer)
    }

    /// Makes the encrypted tunnel again, and reports it.
    async fn mend(&mut self) {
        self.tunnel.begun();
        let note = match self.control.person.network_again().await {
            Ok(()) => "the encrypted tunnel ended by itself and was made anew".to_owned(),
            Err(error) => {
                self.tunnel.failed(Instant::now());
                format!("the encrypted tunnel ended by itself and cannot be made anew: {error}")
            }
        };
        self.control.status.note("tunnel", Some(note));
        control::tell(&self.control.status, &self.handle);
    }

    /// Notes the state of the pod's network, and why it is corrected or not.
    fn note_pod(&self, lacks: &[String], again: bool) {
        let lacks = lacks.join(", ");
        let note = match (lacks.is_empty(), again) {
            (true, _) => return,
            (false, true) => format!("the pod's network was repaired: {lacks}"),
            (false, false) if self.network().is_pods_own() => {
                format!("the pod may change its network, and it is not as planned: {lacks}")
            }
            (false, false) => format!("the pod's network is damaged again and again: {lacks}"),
        };
        self.control.status.note("pod", Some(note));
    }

    /// Makes the pod's network again; returns whether that worked.
    async fn follow(&self) -> bool {
        let made = self.control.person.network_again().await;
        let failed =
            made.inspect_err(|error| tracing::error!(%error, "cannot follow the VM's own network")).err();
        let note = failed.map(|error| format!("the VM's own network changed: {error}"));
        let worked = note.is_none();
        self.control.status.note("uplink", note);
        worked
    }

    /// Probes the path to `target`; returns whether the path MTU changed, and whether there was no answer.
    async fn probe(&self, link: &Linked, target: IpAddr, figures: Mtus) -> (bool, bool) {
        let device = figures.device;
        let (peer, kernel) = (target.to_string(), figures.learnt);
        let mut path = guest::Path { peer, device, kernel, ..guest::Path::default() };
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
        let before = self.control.status.lock().path.clone().unwrap_or_default();
        if path.probed == 0 && before.peer == path.peer && before.device == path.device {
            path.probed = before.probed;
        }
        path.mtu = if path.probed > 0 { path.probed } else { path.kernel };
        let took = began.elapsed();
        let guest::Path { peer, mtu, probed, kernel, why, .. } = &path;
        tracing::info!(peer, mtu, probed, kernel, device, why, ?took, "the path to the node");
        let counts = path.mtu;
        self.control.status.lock().path = Some(path).into();
        (self.network().set_path(counts), silent)
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
    let figures = tokio::task::spawn_blocking(move || underlay::mtus(target)).await.ok()?;
    figures.inspect_err(|error| tracing::warn!(%error, "cannot try the path to the node")).ok()
}

/// Waits for the next change. Drops a receiver that gets no further events.
async fn changed(events: &mut Option<Events>) {
    let Some(receiver) = events else { return std::future::pending().await };
    if let Err(error) = receiver.settled(QUIET, AT_MOST).await {
        tracing::error!(%error, "no longer receives changes of the VM's own network");
        *events = None;
    }
}

async fn inspect() -> Option<Vec<UnderlayDevice>> {
    let inspect = || {
        let mut client = Client::route().map_err(|error| format!("open a netlink socket: {error}"))?;
        underlay::inspect(&mut client).map_err(|error| error.to_string())
    };
    let seen = tokio::task::spawn_blocking(inspect).await.ok()?;
    seen.inspect_err(|error| tracing::error!(error, "cannot look at the VM's own network")).ok()
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
