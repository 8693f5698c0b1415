//! The redirects of a pod's namespace: every frame that reaches a pod's interface leaves through its tunnel, and the
//! other way round, before the namespace's own network stack sees it.
//!
//! tc: an `ingress` qdisc on each device and one filter that takes everything. An `ingress` or `clsact` qdisc that is
//! there already is used, with what others have on it, and stays when ours is taken back. Each filter of ours says
//! whose it is ([`super::mark`]); no other is changed or deleted.

use std::io;
use std::os::fd::OwnedFd;
use std::thread::sleep;
use std::time::Duration;

use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::tc::{TcAttribute, TcHandle, TcMessage};
use nix::errno::Errno;

mod bpf;
mod filter;
mod undo;

pub use filter::{Classifier, Classifiers};
pub(crate) use undo::{Taken, tagged, take_back};

use super::Error;
use super::link;
use super::mark::{Mark, Owner, Tag};
use super::netlink::{self, Answer, Client};
use super::netns::Netns;
use filter::{FIRST, Filter, INGRESS_SIDE, Way, make};

const QDISC: TcHandle = TcHandle { major: 0xffff, minor: 0 };
const MAX_ENTRIES: usize = 1024;
/// The qdisc may be busy for a moment (another program's rtnetlink without the lock).
const BUSY_TRIES: u32 = 5;
const BUSY_PAUSE: Duration = Duration::from_millis(10);
/// Every namespace's loopback device.
const LOOPBACK: u32 = 1;

/// Finds out which classifiers this kernel has, by trying in a throw-away namespace: `wanted` for both ways; or the best
/// there is, and into the tunnel `bpf` where that can be had.
///
/// # Errors
/// [`Error::NoRedirect`] with what the kernel said of each.
pub fn choose(wanted: Option<Classifier>) -> Result<Classifiers, Error> {
    let scratch = Netns::scratch()?;
    let mut client = scratch.netlink()?;
    let tag = Mark { owner: Owner::of(&["trial"]), sandbox: "trial" }.tag();
    let new = NLM_F_CREATE | NLM_F_EXCL;
    if let Err(no) = client.tell(new, RouteNetlinkMessage::NewQueueDiscipline(qdisc(LOOPBACK))) {
        return Err(Error::NoRedirect(format!("ingress: {no}")));
    }
    let way = Way { from: LOOPBACK, to: LOOPBACK, into: true };
    let (mut there, mut refused) = (Vec::new(), Vec::new());
    for (by, preference) in Classifier::ALL.into_iter().zip(FIRST..) {
        if wanted.is_some_and(|wanted| wanted != by) {
            continue;
        }
        let made = match make(by, tag, way, preference, by.first_handle()) {
            Ok(made) => made,
            Err(no) => {
                refused.push(format!("{}: {no}", by.name()));
                continue;
            }
        };
        match client.tell(new, RouteNetlinkMessage::NewTrafficFilter(made.message)) {
            Ok(()) => there.push(by),
            Err(no) => refused.push(format!("{}: {no}", by.name())),
        }
    }
    let Some(best) = there.first().copied() else { return Err(Error::NoRedirect(refused.join("; "))) };
    let into = if there.contains(&Classifier::Bpf) { Classifier::Bpf } else { best };
    Ok(Classifiers { into, back: best })
}

/// How redirects are made, and whose they are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Maker {
    pub(crate) by: Classifiers,
    pub(crate) tag: Tag,
}

/// Messages for one datagram. What they refer to lives as long as this.
pub(crate) struct Prepared {
    pub(crate) messages: Vec<(u16, RouteNetlinkMessage)>,
    _programs: Vec<OwnedFd>,
}

/// Both redirects of a pair: the pod's interface, and its tunnel.
fn ways((interface, tunnel): (u32, u32)) -> [Way; 2] {
    [Way { from: interface, to: tunnel, into: true }, Way { from: tunnel, to: interface, into: false }]
}

/// Messages of one pair of devices.
const PER_PAIR: usize = 4;

impl Maker {
    /// The messages that redirect both ways between each pair of interface and tunnel; to be sent together with what else the
    /// pod needs.
    pub(crate) fn messages(&self, pairs: &[(u32, u32)]) -> Result<Prepared, Error> {
        let new = NLM_F_CREATE | NLM_F_EXCL;
        let (mut messages, mut programs) = (Vec::with_capacity(pairs.len() * PER_PAIR), Vec::new());
        for &(one, other) in pairs {
            for device in [one, other] {
                messages.push((new, RouteNetlinkMessage::NewQueueDiscipline(qdisc(device))));
            }
            for way in ways((one, other)) {
                let by = self.by(way);
                let made = make(by, self.tag, way, FIRST, by.first_handle()).map_err(program(way))?;
                messages.push((new, RouteNetlinkMessage::NewTrafficFilter(made.message)));
                programs.extend(made.program);
            }
        }
        Ok(Prepared { messages, _programs: programs })
    }

    /// Looks at the answers to [`Maker::messages`] and mends what was not as new: something was there already.
    pub(crate) fn complete(
        &self,
        client: &mut Client,
        pairs: &[(u32, u32)],
        answers: &[Answer],
    ) -> Result<(), Error> {
        for (&(one, other), answers) in pairs.iter().zip(answers.chunks(PER_PAIR)) {
            let [qdisc_one, qdisc_other, filter_one, filter_other] = answers else {
                return Err(Error::kernel("redirect a pod's interface")(netlink::Error::Garbled(
                    "answers are missing".to_owned(),
                )));
            };
            let answered = [(qdisc_one, filter_one), (qdisc_other, filter_other)];
            for (way, (qdisc, filter)) in ways((one, other)).into_iter().zip(answered) {
                match (qdisc, filter) {
                    (Ok(()), Ok(())) => {}
                    (Err(no), _) if !matches!(no.errno, Errno::EEXIST | Errno::EBUSY) => {
                        return Err(Error::kernel(format!("add the ingress qdisc of device {}", way.from))(
                            no.clone().into(),
                        ));
                    }
                    (qdisc, _) => {
                        self.ensure(client, way, matches!(qdisc, Err(no) if no.errno == Errno::EBUSY))?
                    }
                }
            }
        }
        Ok(())
    }

    /// Takes back the qdiscs that the answers to [`Maker::messages`] say were made in vain, because the filter on it was
    /// refused. Later nobody could tell whose an empty one is.
    pub(crate) fn abandon(client: &mut Client, pairs: &[(u32, u32)], answers: &[Answer]) {
        for (&(one, other), answers) in pairs.iter().zip(answers.chunks(PER_PAIR)) {
            let [qdisc_one, qdisc_other, filter_one, filter_other] = answers else { continue };
            for (device, made, filled) in [(one, qdisc_one, filter_one), (other, qdisc_other, filter_other)] {
                if made.is_ok() && filled.is_err() {
                    let message = RouteNetlinkMessage::DelQueueDiscipline(qdisc(device));
                    // The error that counts is the one that brought us here.
                    drop(patient(client, 0, &message, &[Errno::ENOENT, Errno::ENODEV, Errno::EINVAL]));
                }
            }
        }
    }

    /// Makes sure that device `from` has exactly our redirect to `to`.
    fn ensure(&self, client: &mut Client, way: Way, no_qdisc: bool) -> Result<(), Error> {
        let (Way { from, to, .. }, by) = (way, self.by(way));
        let attempt = || Error::kernel(format!("redirect device {from} to device {to}"));
        if no_qdisc {
            let new = RouteNetlinkMessage::NewQueueDiscipline(qdisc(from));
            patient(client, NLM_F_CREATE | NLM_F_EXCL, &new, &[Errno::EEXIST]).map_err(attempt())?;
        }
        let all = filters(client, from)?;
        let (mut ours, others): (Vec<Filter>, Vec<Filter>) =
            all.into_iter().partition(|filter| self.is_ours(filter, to));
        // Another's that takes everything first would leave us nothing; where its device is gone it only drops.
        for other in &others {
            let Some(target) = other.target else { continue };
            let before = ours.iter().map(Filter::preference).min().unwrap_or(FIRST);
            if other.preference() <= before
                && (target == 0 || link::by_index(client, target).map_err(attempt())?.is_some())
            {
                return Err(Error::CannotCarry(format!(
                    "device {from} already redirects all its traffic to device {target}"
                )));
            }
        }
        // One that is right stays, whatever it is made of; without one, one that can be made right.
        let keep = ours
            .iter()
            .position(|filter| filter.target == Some(to))
            .or_else(|| ours.iter().position(|filter| filter.classifier() == Some(by)));
        let kept = keep.map(|at| ours.swap_remove(at));
        for more in &ours {
            let message = RouteNetlinkMessage::DelTrafficFilter(more.deletion(from));
            patient(client, 0, &message, &[Errno::ENOENT]).map_err(attempt())?;
        }
        match kept {
            Some(right) if right.target == Some(to) => Ok(()),
            Some(wrong) => {
                let place = (wrong.preference(), wrong.handle);
                self.put(client, way, place, NLM_F_CREATE | NLM_F_REPLACE)
            }
            None => {
                let preference = free(&others, by);
                if preference != FIRST {
                    tracing::warn!(
                        device = from,
                        preference,
                        "other filters come before the redirect of a pod's traffic"
                    );
                }
                // Handle 0: another u32 table may have come first, and then ours has another number.
                self.put(client, way, (preference, 0), NLM_F_CREATE | NLM_F_EXCL)
            }
        }
    }

    fn put(
        &self,
        client: &mut Client,
        way: Way,
        (preference, handle): (u32, u32),
        flags: u16,
    ) -> Result<(), Error> {
        let made = make(self.by(way), self.tag, way, preference, handle).map_err(program(way))?;
        let message = RouteNetlinkMessage::NewTrafficFilter(made.message);
        patient(client, flags, &message, &[])
            .map_err(Error::kernel(format!("redirect device {} to device {}", way.from, way.to)))
    }

    fn by(&self, way: Way) -> Classifier {
        if way.into { self.by.into } else { self.by.back }
    }

    /// Ours by its mark; or by what it does, from a version that left no mark: then its target is `to`, or gone.
    fn is_ours(&self, filter: &Filter, to: u32) -> bool {
        match filter.tag {
            Some(tag) => tag == self.tag,
            None => filter.is_unmarked_ours(|target| target == 0 || target == to),
        }
    }
}

impl Filter {
    /// Whether an earlier version, which left no mark, made it, with such a target.
    fn is_unmarked_ours(&self, fits: impl FnOnce(u32) -> bool) -> bool {
        self.tag.is_none()
            && self.kind == "u32"
            && self.preference() == FIRST
            && self.target.is_some_and(fits)
    }
}

/// The first preference that our filter can have beside these.
fn free(others: &[Filter], by: Classifier) -> u32 {
    (FIRST..)
        .find(|at| others.iter().all(|other| other.preference() != *at || other.goes_with(by)))
        .unwrap_or(FIRST)
}

fn program(way: Way) -> impl Fn(io::Error) -> Error {
    move |e| {
        let attempt = format!("load the program that redirects device {} to device {}", way.from, way.to);
        Error::kernel(attempt)(netlink::Error::Socket(e))
    }
}

/// Sends one message, again while the kernel is busy; the errors in `fine` count as done.
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

fn qdisc(device: u32) -> TcMessage {
    let mut message = TcMessage::with_index(device.cast_signed());
    message.header.parent = TcHandle::INGRESS;
    message.header.handle = QDISC;
    message.attributes.push(TcAttribute::Kind("ingress".to_owned()));
    message
}

/// The filters on a device's ingress side, without u32's own tables.
fn filters(client: &mut Client, device: u32) -> Result<Vec<Filter>, Error> {
    let mut question = TcMessage::with_index(device.cast_signed());
    question.header.parent = INGRESS_SIDE;
    let question = RouteNetlinkMessage::GetTrafficFilter(question);
    match client.dump_raw(&question, MAX_ENTRIES, |kind, payload| Ok(Filter::read(kind, payload))) {
        Err(e) if e.is_gone() || e.errno() == Some(Errno::EINVAL) => Ok(Vec::new()), // no qdisc, no device
        found => found.map_err(Error::kernel(format!("look at the filters of device {device}"))),
    }
}

/// The ingress-side qdiscs of the namespace: device and kind.
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
