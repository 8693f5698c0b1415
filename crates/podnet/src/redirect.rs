//! Redirects the packets of a pod's namespace: every frame that reaches a pod's interface leaves through its tunnel,
//! and the other way round, before the namespace's own network stack sees it.
//!
//! It uses tc: an `ingress` qdisc on each device, and one filter that matches every packet. An existing `ingress` or
//! `clsact` qdisc is used and stays, with its filters. Each filter of the module names its owner ([`super::mark`]); it
//! touches no other. Its filters come first where the kernel has a place there: it has none before a filter of another
//! kind or protocol in the first preference. The module then reports the obstacle.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::sleep;
use std::time::Duration;

use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::tc::{TcAttribute, TcHandle, TcMessage};
use nix::errno::Errno;

mod bpf;
mod filter;
pub mod tcx;
mod undo;

pub use filter::{Classifier, Classifiers};
pub(crate) use undo::{Taken, tagged, take_back};

use super::Error;
use super::link;
use super::mark::{Mark, Owner, Tag};
use super::netlink::{self, Ack, Client};
use super::netns::Netns;
use filter::{Direction, FIRST, Filter, INGRESS_SIDE, make};

const QDISC: TcHandle = TcHandle { major: 0xffff, minor: 0 };
const MAX_ENTRIES: usize = 1024;
/// Attempts while a qdisc, or a namespace under removal, is busy for a moment (another program's rtnetlink request
/// without the lock).
pub(crate) const BUSY_TRIES: u32 = 5;
pub(crate) const BUSY_PAUSE: Duration = Duration::from_millis(10);
const LOOPBACK: u32 = 1;

/// Determines the kernel's classifiers by trying them in a scratch namespace. The result is `wanted` for both
/// directions, or the best one available, with `bpf` into the tunnel where it is available.
///
/// # Errors
/// [`Error::NoRedirect`], with the kernel's error for each classifier.
pub fn choose(wanted: Option<Classifier>) -> Result<Classifiers, Error> {
    let scratch = Netns::scratch()?;
    let mut client = scratch.netlink()?;
    let tag = Mark { owner: Owner::of(&["trial"]), sandbox: "trial" }.tag();
    let new = NLM_F_CREATE | NLM_F_EXCL;
    if let Err(no) = client.tell(new, RouteNetlinkMessage::NewQueueDiscipline(qdisc(LOOPBACK))) {
        return Err(Error::NoRedirect(format!("ingress: {no}")));
    }
    let direction = Direction { from: LOOPBACK, to: LOOPBACK, into: true };
    let (mut there, mut refused) = (Vec::new(), Vec::new());
    for (by, preference) in Classifier::ALL.into_iter().zip(FIRST..) {
        if wanted.is_some_and(|wanted| wanted != by) {
            continue;
        }
        // The program must stay open until the message is sent.
        let made = make(by, tag, direction, preference, by.first_handle()).map_err(netlink::Error::from);
        match made.and_then(|(message, _program)| client.tell(new, message)) {
            Ok(()) => there.push(by),
            Err(no) => refused.push(format!("{}: {no}", by.name())),
        }
    }
    let Some(best) = there.first().copied() else { return Err(Error::NoRedirect(refused.join("; "))) };
    let into = if there.contains(&Classifier::Bpf) { Classifier::Bpf } else { best };
    Ok(Classifiers { into, back: best })
}

/// Classifiers and tag of new redirects.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Maker {
    pub(crate) by: Classifiers,
    pub(crate) tag: Tag,
}

/// Messages for one datagram. The programs to which they refer live as long as this value.
pub(crate) struct Prepared {
    pub(crate) messages: Vec<(u16, RouteNetlinkMessage)>,
    _programs: Vec<Arc<OwnedFd>>,
}

/// Returns both redirects of a pair: the pod's interface, and its tunnel.
fn directions((interface, tunnel): (u32, u32)) -> [Direction; 2] {
    [
        Direction { from: interface, to: tunnel, into: true },
        Direction { from: tunnel, to: interface, into: false },
    ]
}

const PER_PAIR: usize = 3;

impl Maker {
    /// Returns the messages that redirect both ways between each pair of interface and tunnel. The caller sends them
    /// together with the pod's other messages. The tunnel has had its qdisc since it was made.
    pub(crate) fn messages(&self, pairs: &[(u32, u32)]) -> Result<Prepared, Error> {
        let new = NLM_F_CREATE | NLM_F_EXCL;
        let (mut messages, mut programs) = (Vec::with_capacity(pairs.len() * PER_PAIR), Vec::new());
        for &(one, other) in pairs {
            messages.push((new, RouteNetlinkMessage::NewQueueDiscipline(qdisc(one))));
            for direction in directions((one, other)) {
                let by = self.by(direction);
                let made = make(by, self.tag, direction, FIRST, by.first_handle());
                let (message, loaded) = made.map_err(program(direction))?;
                messages.push((new, message));
                programs.extend(loaded);
            }
        }
        Ok(Prepared { messages, _programs: programs })
    }

    /// Checks the answers to [`Maker::messages`] and repairs pairs on which a qdisc or filter already existed. Returns,
    /// as text, obstacles that may keep the pod's traffic from the tunnel and cannot be removed.
    pub(crate) fn complete(
        &self,
        client: &mut Client,
        pairs: &[(u32, u32)],
        answers: &[Ack],
    ) -> Result<Vec<String>, Error> {
        let mut obstacles = Vec::new();
        for (&pair, answers) in pairs.iter().zip(answers.chunks(PER_PAIR)) {
            let [qdisc, into, back] = answers else {
                let missing = netlink::Error::Garbled("answers are missing".to_owned());
                return Err(Error::kernel("redirect a pod's interface")(missing));
            };
            let directions = directions(pair);
            match (qdisc, into) {
                (Ok(()), Ok(())) => {}
                (Err(no), _) if !matches!(no.errno, Errno::EEXIST | Errno::EBUSY) => {
                    let attempt = format!("add the ingress qdisc of device {}", directions[0].from);
                    return Err(Error::kernel(attempt)(no.clone().into()));
                }
                (qdisc, _) => {
                    let none = matches!(qdisc, Err(no) if no.errno == Errno::EBUSY);
                    obstacles.extend(self.ensure(client, directions[0], none)?);
                }
            }
            if back.is_err() {
                obstacles.extend(self.ensure(client, directions[1], true)?);
            }
        }
        Ok(obstacles)
    }

    /// Removes new qdiscs that stayed empty because the filter on them was refused, according to the answers to
    /// [`Maker::messages`]. Later the owner of an empty qdisc cannot be determined.
    pub(crate) fn abandon(client: &mut Client, pairs: &[(u32, u32)], answers: &[Ack]) {
        for (&(one, _), answers) in pairs.iter().zip(answers.chunks(PER_PAIR)) {
            let [made, filled, _] = answers else { continue };
            if made.is_ok() && filled.is_err() {
                let message = RouteNetlinkMessage::DelQueueDiscipline(qdisc(one));
                // The error that counts is the one that led here.
                drop(patient(client, 0, &message, &[Errno::ENOENT, Errno::ENODEV, Errno::EINVAL]));
            }
        }
    }

    /// Makes sure that device `from` has exactly one redirect of this module to `to`, before all other filters where
    /// possible. Returns, as text, the filters that still come before it.
    fn ensure(
        &self,
        client: &mut Client,
        direction: Direction,
        no_qdisc: bool,
    ) -> Result<Option<String>, Error> {
        let (Direction { from, to, .. }, by) = (direction, self.by(direction));
        let attempt = || Error::kernel(format!("redirect device {from} to device {to}"));
        if no_qdisc {
            let new = RouteNetlinkMessage::NewQueueDiscipline(qdisc(from));
            patient(client, NLM_F_CREATE | NLM_F_EXCL, &new, &[Errno::EEXIST]).map_err(attempt())?;
        }
        let all = filters(client, from)?;
        let (mut ours, others): (Vec<Filter>, Vec<Filter>) =
            all.iter().cloned().partition(|filter| self.is_ours(filter));
        // Another owner's redirect of everything must not come first: it leaves no packet. Target 0 drops all.
        for other in &others {
            let before = ours.iter().map(Filter::preference).min().unwrap_or(FIRST);
            let Some(target) = other.target.filter(|_| other.preference() <= before) else { continue };
            if target == 0 || link::by_index(client, target).map_err(attempt())?.is_some() {
                return Err(Error::CannotCarry(format!(
                    "device {from} already redirects all its traffic to device {target}"
                )));
            }
        }
        // A correct redirect stays, regardless of its classifier. Without one, a filter that can be corrected stays.
        let keep = ours
            .iter()
            .position(|filter| filter.target == Some(to))
            .or_else(|| ours.iter().position(|filter| filter.classifier() == Some(by)));
        let kept = keep.map(|at| ours.swap_remove(at));
        let new = NLM_F_CREATE | NLM_F_EXCL;
        match kept {
            Some(right) if right.target == Some(to) => {
                // The kernel evaluates filters in the order in which it lists them.
                let first = all.iter().position(|filter| self.is_ours(filter)).unwrap_or_default();
                let place = place(&others, by);
                if first > 0 && place.is_first && self.put(client, direction, place, new).is_ok() {
                    // For a moment there are two redirects, rather than none.
                    ours.push(right);
                }
            }
            Some(wrong) => {
                let place =
                    Place { by, preference: wrong.preference(), handle: wrong.handle, is_first: false };
                self.put(client, direction, place, NLM_F_CREATE | NLM_F_REPLACE)?;
            }
            None => self.put(client, direction, place(&others, by), new)?,
        }
        for more in &ours {
            let message = RouteNetlinkMessage::DelTrafficFilter(more.deletion(from));
            patient(client, 0, &message, &[Errno::ENOENT]).map_err(attempt())?;
        }
        if others.is_empty() { Ok(None) } else { self.obstacle(client, from) }
    }

    /// Returns the filters that come before the redirect, as text.
    fn obstacle(&self, client: &mut Client, from: u32) -> Result<Option<String>, Error> {
        let now = filters(client, from)?;
        let before: Vec<String> =
            now.iter().take_while(|filter| !self.is_ours(filter)).take(4).map(ToString::to_string).collect();
        if before.is_empty() {
            return Ok(None);
        }
        let link = link::by_index(client, from)
            .map_err(Error::kernel(format!("look at device {from}")))?
            .map_or_else(|| from.to_string(), |link| link.name);
        Ok(Some(format!(
            "foreign filters come before the redirect of {link} ({}), and packets that they pass on do not \
             reach the VM; give them a preference above 1, or have them continue",
            before.join("; ")
        )))
    }

    fn put(&self, client: &mut Client, direction: Direction, place: Place, flags: u16) -> Result<(), Error> {
        let made = make(place.by, self.tag, direction, place.preference, place.handle);
        let (message, _program) = made.map_err(program(direction))?;
        patient(client, flags, &message, &[])
            .map_err(Error::kernel(format!("redirect device {} to device {}", direction.from, direction.to)))
    }

    fn by(&self, direction: Direction) -> Classifier {
        if direction.into { self.by.into } else { self.by.back }
    }

    fn is_ours(&self, filter: &Filter) -> bool {
        filter.tag == Some(self.tag)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    by: Classifier,
    preference: u32,
    /// 0 = the kernel chooses.
    handle: u32,
    /// Whether no filter comes before it.
    is_first: bool,
}

/// Returns the best place beside these filters. The kernel keeps one kind and one protocol per preference. A new `bpf`
/// filter comes before existing ones, a `u32` filter before those with a higher handle.
fn place(others: &[Filter], by: Classifier) -> Place {
    let at = |preference| others.iter().filter(move |other| other.preference() == preference);
    // Handle 0: another u32 table may already exist, and the new table then gets another number.
    let first = Place { by, preference: FIRST, handle: 0, is_first: true };
    if at(FIRST).next().is_none() || (by == Classifier::Bpf && at(FIRST).all(|other| other.goes_with(by))) {
        return first;
    }
    // The filter with the lowest handle comes first. The order of several tables is not known.
    let lowest = at(FIRST).min_by_key(|other| other.handle);
    let one_table = at(FIRST).all(|other| lowest.is_some_and(|lowest| other.is_beside(lowest)));
    if let Some(handle) = lowest.filter(|_| one_table).and_then(Filter::handle_before) {
        return Place { by: Classifier::U32, handle, ..first };
    }
    let preference = (FIRST..).find(|preference| at(*preference).all(|other| other.goes_with(by)));
    Place { preference: preference.unwrap_or(FIRST), is_first: false, ..first }
}

fn program(direction: Direction) -> impl Fn(io::Error) -> Error {
    move |e| {
        let attempt =
            format!("load the program that redirects device {} to device {}", direction.from, direction.to);
        Error::kernel(attempt)(netlink::Error::Socket(e))
    }
}

/// Sends one message, again while the kernel is busy; the errors in `fine` count as success.
fn patient(
    client: &mut Client,
    flags: u16,
    message: &RouteNetlinkMessage,
    fine: &[Errno],
) -> Result<(), netlink::Error> {
    for left in (0..BUSY_TRIES).rev() {
        match client.tell(flags, message.clone()) {
            Err(e) if e.errno() == Some(Errno::EBUSY) && left > 0 => sleep(BUSY_PAUSE),
            Err(e) if e.errno().is_some_and(|errno| fine.contains(&errno)) => return Ok(()),
            other => return other,
        }
    }
    Ok(())
}

pub(crate) fn qdisc(device: u32) -> TcMessage {
    let mut message = TcMessage::with_index(device.cast_signed());
    message.header.parent = TcHandle::INGRESS;
    message.header.handle = QDISC;
    message.attributes.push(TcAttribute::Kind("ingress".to_owned()));
    message
}

/// Returns the filters on a device's ingress side, without u32's own tables.
fn filters(client: &mut Client, device: u32) -> Result<Vec<Filter>, Error> {
    let mut question = TcMessage::with_index(device.cast_signed());
    question.header.parent = INGRESS_SIDE;
    // Packets begin in chain 0. Filters in other chains never come before the redirect.
    question.attributes.push(TcAttribute::Chain(0));
    let question = RouteNetlinkMessage::GetTrafficFilter(question);
    match client.dump_raw(&question, MAX_ENTRIES, |kind, payload| Ok(Filter::read(kind, payload))) {
        Err(e) if e.is_gone() || e.errno() == Some(Errno::EINVAL) => Ok(Vec::new()), // no qdisc, no device
        found => found.map_err(Error::kernel(format!("look at the filters of device {device}"))),
    }
}

/// Returns the ingress-side qdiscs of the namespace: device and kind.
pub(crate) fn qdiscs(client: &mut Client) -> Result<Vec<(u32, String)>, Error> {
    client
        .dump(&RouteNetlinkMessage::GetQueueDiscipline(TcMessage::default()), MAX_ENTRIES, |answer| {
            match answer {
                RouteNetlinkMessage::NewQueueDiscipline(q) if q.header.parent == TcHandle::INGRESS => {
                    let kind = q.attributes.into_iter().find_map(|a| match a {
                        TcAttribute::Kind(kind) => Some(kind),
                        _ => None,
                    });
                    Some((q.header.index.cast_unsigned(), kind.unwrap_or_default()))
                }
                _ => None,
            }
        })
        .map_err(Error::kernel("look at the pod's qdiscs"))
}
