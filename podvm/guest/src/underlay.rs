//! Watches the VM's own network and the path to the node: the path MTU and the VM's addresses. After a change the pod's
//! network is made again, and the node receives the new status. StartVM waits for none of it: the pod's network is made
//! with the values known so far, and corrected later.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use peerpod_link::{
    endpoint::EndpointHandle,
    path_mtu::{
        Token,
        ask::{self, PathMtu},
    },
};
use peerpod_podnet::{
    events::Events,
    netlink,
    netns::Netns,
    underlay::{self, Mtus, UnderlayDevice},
};
use peerpod_proto::guest;
use tokio::{
    net::TcpStream,
    sync::watch,
    time::{Instant, sleep_until},
};
use tokio_rustls::client::TlsStream;

use crate::{
    control::{self, Control},
    network::Network,
    retries::Retries,
    status::Status,
};

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

impl Watcher {
    /// Watches until the link's supervisor is gone.
    pub(crate) async fn run(self, mut linked: watch::Receiver<Option<Linked>>) {
        let (mut told, mut ended) = (self.network.told(), self.network.ended());
        let mut room: Option<Vec<u32>> = None;
        let mut tunnel = Retries::default();
        let mut events = listen();
        let mut seen = inspect().await.unwrap_or_default();
        self.status.uplinks(addresses(&seen));
        let mut tried: Option<Tried> = None;
        let mut silence = Silence::default();
        let mut next = Instant::now() + self.network.probe_interval();
        let mut pod: Option<Events> = None;
        let (mut restorations, mut counted_from) = (0, Instant::now());
        // A failed correction is repeated, whether or not anything changes again.
        let mut pending = false;
        loop {
            let (mut probe, mut looked, mut pod_changed) = (false, false, false);
            let mut is_timer = false;
            tokio::select! {
                changed = linked.changed() => match changed {
                    Ok(()) => {
                        self.network.linked();
                        probe = true;
                    }
                    Err(_) => return,
                },
                changed = told.changed() => match changed {
                    Ok(()) => {
                        next = next.min(Instant::now() + self.network.probe_interval());
                        let now = told.borrow_and_update().as_ref().map(|told| told.room.clone());
                        // A new MTU from the node means that its side of the path changed. The ends of link and tunnel
                        // are mostly the same, and the path was probed when the link was made.
                        let other = self.target(&linked) != tried.map(|tried| tried.target);
                        probe = other || (room.is_some() && room != now);
                        room = now;
                    }
                    Err(_) => return,
                },
                changed = ended.changed() => match changed {
                    Ok(()) => {
                        ended.borrow_and_update();
                        let times = tunnel.failed(Instant::now());
                        tracing::warn!(times, "the encrypted tunnel ended by itself; it is made anew");
                        continue;
                    }
                    Err(_) => return,
                },
                () = when(tunnel.due()) => {
                    self.mend(&mut tunnel).await;
                    continue;
                }
                heard = heard(&mut pod) => {
                    pod_changed = true;
                    if !heard {
                        pod = None;
                    }
                }
                heard = heard(&mut events) => {
                    looked = true;
                    if !heard {
                        events = None;
                        next = next.min(Instant::now() + AGAIN);
                    }
                }
                () = sleep_until(next) => {
                    next = Instant::now() + self.network.probe_interval();
                    (probe, looked, pod_changed, is_timer) = (true, true, true, true);
                    if counted_from.elapsed() >= RESTORATIONS_IN {
                        (restorations, counted_from) = (0, Instant::now());
                    }
                    if events.is_none() {
                        events = listen();
                    }
                }
            }
            let (mut again, mut tell) = (false, false);
            if pod.is_none() {
                pod = self.network.listen();
                pod_changed = pod.is_some();
            }
            if pod_changed {
                let lacks = self.network.drift().await;
                again = !lacks.is_empty() && !self.network.is_pods_own() && restorations < RESTORATIONS;
                restorations += u32::from(again);
                tell = !lacks.is_empty();
                self.note_pod(&lacks, again);
            }
            if looked
                && let Some(now) = inspect().await
                && now != seen
            {
                tracing::info!(uplinks = ?now, "the VM's own network changed");
                seen = now;
                self.status.uplinks(addresses(&seen));
                (probe, again) = (true, true);
            }
            // The node's plan may have been carried out between two inspections, with a NIC that was down for a moment.
            if looked && !again && self.network.leaves_otherwise().await {
                again = true;
            }
            let (link, target) = (linked.borrow().clone(), self.target(&linked));
            if let (Some(link), Some(target)) = (link, target)
                && (probe || looked)
                && let Some(figures) = figures(target).await
            {
                let now = Tried { target, device: figures.device, route: figures.route };
                // A route has an MTU, too.
                let other = looked && tried.is_some_and(|tried| tried != now);
                (probe, again) = (probe || other, again || other);
                if probe {
                    let is_other = tried != Some(now);
                    tried = Some(now);
                    if !is_timer || is_other {
                        silence = Silence::default();
                    }
                    let (changed, silent) = self.probe(&link, target, figures).await;
                    again |= changed;
                    if let Some(pause) = silence.after(silent) {
                        next = next.min(Instant::now() + pause);
                    }
                }
            }
            again |= pending;
            pending = again && !self.follow().await;
            if pending {
                next = next.min(Instant::now() + AGAIN);
            }
            if again || probe || tell {
                control::tell(&self.status, &self.handle);
            }
        }
    }

    /// Returns the end of the path: the tunnel's end or, if that is inside another tunnel, the link's end.
    fn target(&self, linked: &watch::Receiver<Option<Linked>>) -> Option<IpAddr> {
        let peer = linked.borrow().as_ref().map(|link| link.peer.ip().to_canonical());
        self.network.told().borrow().as_ref().and_then(|told| told.node).or(peer)
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
async fn heard(events: &mut Option<Events>) -> bool {
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
