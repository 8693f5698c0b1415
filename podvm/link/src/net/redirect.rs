//! The two redirects of a pod's namespace: every frame that reaches the pod's interface leaves through the tunnel,
//! and the other way round, before the namespace's own network stack sees it.
//!
//! tc: an `ingress` qdisc on each device and a u32 filter that matches everything, with the action mirred. An
//! `ingress` or `clsact` qdisc that is there already is used, and stays when ours is taken back.

use std::thread::sleep;
use std::time::Duration;

use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::tc::{
    TcAction, TcActionAttribute, TcActionMirrorOption, TcActionOption, TcActionType, TcAttribute,
    TcFilterU32Option, TcHandle, TcMessage, TcMirror, TcMirrorActionType, TcOption, TcU32Key, TcU32Selector,
    TcU32SelectorFlags,
};
use nix::errno::Errno;

use super::Error;
use super::link;
use super::netlink::{self, Answer, Client};

/// `ffff:fff2`, the ingress side: the only parent that both `ingress` and `clsact` accept.
const INGRESS_SIDE: TcHandle = TcHandle { major: 0xffff, minor: 0xfff2 };
const QDISC: TcHandle = TcHandle { major: 0xffff, minor: 0 };
/// Before every other filter.
const PRIORITY: u32 = 1;
/// The kernel's handle for the first filter of the first u32 table. Given in full, a second one is refused instead
/// of added.
const HANDLE: u32 = 0x8000_0800;
const ETH_P_ALL: u16 = 0x0003;
const MAX_ENTRIES: usize = 1024;
/// The qdisc may be busy for a moment (another program's rtnetlink without the lock).
const BUSY_TRIES: u32 = 5;
const BUSY_PAUSE: Duration = Duration::from_millis(10);

/// The messages that redirect both ways between two devices; to be sent together with what else the pod needs.
pub(crate) fn messages(one: u32, other: u32) -> [(u16, RouteNetlinkMessage); 4] {
    let new = NLM_F_CREATE | NLM_F_EXCL;
    [
        (new, RouteNetlinkMessage::NewQueueDiscipline(qdisc(one))),
        (new, RouteNetlinkMessage::NewQueueDiscipline(qdisc(other))),
        (new, RouteNetlinkMessage::NewTrafficFilter(filter(one, other, HANDLE))),
        (new, RouteNetlinkMessage::NewTrafficFilter(filter(other, one, HANDLE))),
    ]
}

/// Looks at the answers to [`messages`] and mends what was not as new: something was there already.
pub(crate) fn complete(client: &mut Client, one: u32, other: u32, answers: Vec<Answer>) -> Result<(), Error> {
    let mut answers = answers.into_iter();
    let mut next = || answers.next().unwrap_or(Ok(()));
    let (qdiscs, filters) = ([next(), next()], [next(), next()]);
    for ((from, to), (qdisc_answer, filter_answer)) in
        [(one, other), (other, one)].into_iter().zip(qdiscs.into_iter().zip(filters))
    {
        match (qdisc_answer, filter_answer) {
            (Ok(()), Ok(())) => {}
            (Err(no), _) if !matches!(no.errno, Errno::EEXIST | Errno::EBUSY) => {
                return Err(Error::kernel(format!("add the ingress qdisc of device {from}"))(no.into()));
            }
            _ => ensure(client, from, to)?,
        }
    }
    Ok(())
}

/// Makes sure that device `from` has exactly our redirect to `to`.
fn ensure(client: &mut Client, from: u32, to: u32) -> Result<(), Error> {
    let attempt = || format!("redirect device {from} to device {to}");
    patient(
        client,
        NLM_F_CREATE | NLM_F_EXCL,
        &RouteNetlinkMessage::NewQueueDiscipline(qdisc(from)),
        &[Errno::EEXIST],
    )
    .map_err(Error::kernel(attempt()))?;
    let ours: Vec<Filter> = filters(client, from)?.into_iter().filter(|f| f.redirects_everything).collect();
    match ours.as_slice() {
        [] => {
            // Handle 0: another u32 table may have come first, and then ours has another number.
            let new = RouteNetlinkMessage::NewTrafficFilter(filter(from, to, 0));
            patient(client, NLM_F_CREATE | NLM_F_EXCL, &new, &[]).map_err(Error::kernel(attempt()))
        }
        [first, rest @ ..] => {
            for more in rest {
                patient(
                    client,
                    0,
                    &RouteNetlinkMessage::DelTrafficFilter(more.deletion(from)),
                    &[Errno::ENOENT],
                )
                .map_err(Error::kernel(attempt()))?;
            }
            if first.target == Some(to) {
                return Ok(());
            }
            if let Some(target) = first.target.filter(|t| *t != 0)
                && link::by_index(client, target).map_err(Error::kernel(attempt()))?.is_some()
            {
                return Err(Error::CannotCarry(format!(
                    "device {from} already redirects all its traffic to device {target}"
                )));
            }
            // Its target was deleted; what it has now only drops.
            let again = RouteNetlinkMessage::NewTrafficFilter(filter(from, to, first.handle));
            patient(client, NLM_F_CREATE | NLM_F_REPLACE, &again, &[]).map_err(Error::kernel(attempt()))
        }
    }
}

/// Takes back every redirect in the namespace whose target is one of `targets` or is gone. What somebody else put
/// there stays. Everything is tried.
pub(crate) fn undo(client: &mut Client, targets: &[u32], errors: &mut Vec<Error>) {
    let all = match qdiscs(client) {
        Ok(all) => all,
        Err(e) => return errors.push(e),
    };
    for (device, kind) in all {
        if let Err(e) = undo_on(client, device, &kind, targets) {
            errors.push(e);
        }
    }
}

fn undo_on(client: &mut Client, device: u32, kind: &str, targets: &[u32]) -> Result<(), Error> {
    let attempt = || format!("take back the redirect of device {device}");
    let (ours, others): (Vec<Filter>, Vec<Filter>) = filters(client, device)?.into_iter().partition(|f| {
        f.redirects_everything && f.target.is_some_and(|target| target == 0 || targets.contains(&target))
    });
    if ours.is_empty() {
        return Ok(());
    }
    let gone = &[Errno::ENOENT, Errno::ENODEV, Errno::EINVAL];
    if others.is_empty() && kind == "ingress" {
        // Its filters go with it.
        return patient(client, 0, &RouteNetlinkMessage::DelQueueDiscipline(qdisc(device)), gone)
            .map_err(Error::kernel(attempt()));
    }
    for mut filter in ours {
        if others.iter().all(|other| other.info != filter.info) {
            filter.handle = 0; // with the empty table that u32 would leave
        }
        patient(client, 0, &RouteNetlinkMessage::DelTrafficFilter(filter.deletion(device)), gone)
            .map_err(Error::kernel(attempt()))?;
    }
    Ok(())
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

fn filter(from: u32, to: u32, handle: u32) -> TcMessage {
    let mut mirror = TcMirror::default();
    mirror.generic.action = TcActionType::Stolen;
    mirror.eaction = TcMirrorActionType::EgressRedir;
    mirror.ifindex = to;
    let mut action = TcAction::default();
    action.tab = 1;
    action.attributes = vec![
        TcActionAttribute::Kind("mirred".to_owned()),
        TcActionAttribute::Options(vec![TcActionOption::Mirror(TcActionMirrorOption::Parms(mirror))]),
    ];
    let mut selector = TcU32Selector::default();
    selector.flags = TcU32SelectorFlags::Terminal;
    selector.nkeys = 1;
    selector.keys = vec![TcU32Key::default()];
    let mut message = TcMessage::with_index(from.cast_signed());
    message.header.parent = INGRESS_SIDE;
    message.header.handle = handle.into();
    // The protocol half is in network order; in host order the filter is accepted and never matches.
    message.header.info = (PRIORITY << 16) | u32::from(ETH_P_ALL.to_be());
    message.attributes = vec![
        TcAttribute::Kind("u32".to_owned()),
        TcAttribute::Options(vec![
            TcOption::U32(TcFilterU32Option::Selector(selector)),
            TcOption::U32(TcFilterU32Option::Action(vec![action])),
        ]),
    ];
    message
}

/// A filter of a device's ingress side.
struct Filter {
    info: u32,
    handle: u32,
    kind: String,
    /// Where mirred sends its packets; 0 when that device was deleted.
    target: Option<u32>,
    /// Whether it is a u32 filter as this file makes them.
    redirects_everything: bool,
}

impl Filter {
    fn deletion(&self, device: u32) -> TcMessage {
        let mut message = TcMessage::with_index(device.cast_signed());
        message.header.parent = INGRESS_SIDE;
        message.header.handle = self.handle.into();
        message.header.info = self.info;
        message.attributes.push(TcAttribute::Kind(self.kind.clone()));
        message
    }
}

/// The filters on a device's ingress side, without u32's own tables.
fn filters(client: &mut Client, device: u32) -> Result<Vec<Filter>, Error> {
    let mut question = TcMessage::with_index(device.cast_signed());
    question.header.parent = INGRESS_SIDE;
    let found =
        client.dump(&RouteNetlinkMessage::GetTrafficFilter(question), MAX_ENTRIES, |answer| match answer {
            RouteNetlinkMessage::NewTrafficFilter(message) => read_filter(message),
            _ => None,
        });
    match found {
        Err(e) if e.is_gone() || e.errno() == Some(Errno::EINVAL) => Ok(Vec::new()), // no qdisc, no device
        found => found.map_err(Error::kernel(format!("look at the filters of device {device}"))),
    }
}

fn read_filter(message: TcMessage) -> Option<Filter> {
    let handle = u32::from(message.header.handle);
    let mut filter = Filter {
        info: message.header.info,
        handle,
        kind: String::new(),
        target: None,
        redirects_everything: false,
    };
    let mut everything = false;
    for attribute in message.attributes {
        match attribute {
            TcAttribute::Kind(kind) => filter.kind = kind,
            TcAttribute::Options(options) => {
                for option in options {
                    match option {
                        TcOption::U32(TcFilterU32Option::Selector(selector)) => {
                            everything = selector.keys.iter().all(|key| key.mask == 0);
                        }
                        TcOption::U32(TcFilterU32Option::Action(actions)) => filter.target = target(&actions),
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    filter.redirects_everything = everything && filter.target.is_some() && filter.info >> 16 == PRIORITY;
    // u32 also lists its hash tables, whose handles have no filter part, and a head with handle 0.
    (handle & 0xfff != 0 || (filter.kind != "u32" && handle != 0)).then_some(filter)
}

fn target(actions: &[TcAction]) -> Option<u32> {
    actions.iter().flat_map(|action| &action.attributes).find_map(|attribute| match attribute {
        TcActionAttribute::Options(options) => options.iter().find_map(|option| match option {
            TcActionOption::Mirror(TcActionMirrorOption::Parms(mirror))
                if mirror.eaction == TcMirrorActionType::EgressRedir =>
            {
                Some(mirror.ifindex)
            }
            _ => None,
        }),
        _ => None,
    })
}

/// The ingress-side qdiscs of the namespace: device and kind.
fn qdiscs(client: &mut Client) -> Result<Vec<(u32, String)>, Error> {
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
