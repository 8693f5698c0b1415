//! Builds and parses a tc filter that redirects everything, in three forms. Pure except for loading the program.

use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use netlink_packet_core::{NlasIterator, parse_string};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::tc::{
    TcAction, TcActionAttribute, TcActionMirrorOption, TcActionOption, TcActionType, TcAttribute, TcBpfFlags,
    TcFilterBpfOption, TcFilterMatchAllOption, TcFilterU32Option, TcHandle, TcMessage, TcMirror,
    TcMirrorActionType, TcOption, TcU32Key, TcU32Selector, TcU32SelectorFlags,
};

use super::bpf::{self, Also};
use crate::mark::Tag;
use crate::netlink;

/// `ffff:fff2`, the ingress side: the only parent that both `ingress` and `clsact` accept.
pub(super) const INGRESS_SIDE: TcHandle = TcHandle { major: 0xffff, minor: 0xfff2 };
/// Preference before every other filter.
pub(super) const FIRST: u32 = 1;
const ETH_P_ALL: u16 = 0x0003;
const TCA_KIND: u16 = 1;
const TC_HEADER: usize = 20;

/// The kernel classifier of a redirect. All have the same effect; kernels lack one or another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Classifier {
    /// `u32` with the action `mirred`: the fastest by a little, and available nearly everywhere.
    U32,
    /// `matchall` with the action `mirred`.
    Matchall,
    /// `bpf`, a program of four instructions; needs no action, but CAP_BPF or CAP_SYS_ADMIN.
    Bpf,
}

/// Classifiers of the two redirects of a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Classifiers {
    /// From the pod's interface into the tunnel. With `bpf`, frames of the pod that a bridge reflects reach the pod.
    pub into: Classifier,
    /// From the tunnel to the pod's interface.
    pub back: Classifier,
}

/// One redirect: its devices, and whether it leads into the tunnel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Direction {
    pub(super) from: u32,
    pub(super) to: u32,
    pub(super) into: bool,
}

impl Classifier {
    /// All classifiers, the best first.
    pub const ALL: [Classifier; 3] = [Classifier::U32, Classifier::Matchall, Classifier::Bpf];

    /// Returns the name as in `tc`.
    pub fn name(self) -> &'static str {
        match self {
            Classifier::U32 => "u32",
            Classifier::Matchall => "matchall",
            Classifier::Bpf => "bpf",
        }
    }

    /// Returns the handle of the first filter of a preference. With a full handle the kernel refuses a second filter.
    pub(super) fn first_handle(self) -> u32 {
        match self {
            Classifier::U32 => 0x8000_0800,
            Classifier::Matchall | Classifier::Bpf => 1,
        }
    }
}

/// Builds the filter that redirects everything received on `from` to `to`. Its program must stay open until the message
/// is sent.
pub(super) fn make(
    by: Classifier,
    tag: Tag,
    Direction { from, to, into }: Direction,
    preference: u32,
    handle: u32,
) -> io::Result<(RouteNetlinkMessage, Option<Arc<OwnedFd>>)> {
    let mut program = None;
    let options = match by {
        Classifier::U32 => {
            let mut selector = TcU32Selector::default();
            selector.flags = TcU32SelectorFlags::Terminal;
            selector.nkeys = 1;
            selector.keys = vec![TcU32Key::default()];
            vec![
                TcOption::U32(TcFilterU32Option::Selector(selector)),
                TcOption::U32(TcFilterU32Option::Action(vec![redirect_to(to, tag)])),
            ]
        }
        Classifier::Matchall => {
            vec![TcOption::MatchAll(TcFilterMatchAllOption::Action(vec![redirect_to(to, tag)]))]
        }
        Classifier::Bpf => {
            let also = if into { Also::TellsReflectedApart } else { Also::Nothing };
            let loaded = bpf::loaded(to, also)?;
            let descriptor = loaded.as_raw_fd().cast_unsigned();
            program = Some(loaded);
            vec![
                TcOption::Bpf(TcFilterBpfOption::ProgFd(descriptor)),
                TcOption::Bpf(TcFilterBpfOption::ProgName(tag.program(to))),
                TcOption::Bpf(TcFilterBpfOption::Flags(TcBpfFlags::DirectAction)),
            ]
        }
    };
    let mut message = TcMessage::with_index(from.cast_signed());
    message.header.parent = INGRESS_SIDE;
    message.header.handle = handle.into();
    // The protocol half is in network order. In host order the kernel accepts the filter, but it never matches.
    message.header.info = (preference << 16) | every_protocol();
    message.attributes = vec![TcAttribute::Kind(by.name().to_owned()), TcAttribute::Options(options)];
    Ok((RouteNetlinkMessage::NewTrafficFilter(message), program))
}

/// Returns the protocol half of a filter's `info` that matches all protocols.
fn every_protocol() -> u32 {
    u32::from(ETH_P_ALL.to_be())
}

fn redirect_to(target: u32, tag: Tag) -> TcAction {
    let mut mirror = TcMirror::default();
    mirror.generic.action = TcActionType::Stolen;
    mirror.eaction = TcMirrorActionType::EgressRedir;
    mirror.ifindex = target;
    let mut action = TcAction::default();
    action.tab = 1;
    action.attributes = vec![
        TcActionAttribute::Kind("mirred".to_owned()),
        TcActionAttribute::Options(vec![TcActionOption::Mirror(TcActionMirrorOption::Parms(mirror))]),
        TcActionAttribute::Cookie(tag.cookie()),
    ];
    action
}

impl fmt::Display for Filter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let protocol = u16::from_be(self.info as u16); // the lower half
        write!(f, "{} of preference {}, handle {:#x}", self.kind, self.preference(), self.handle)?;
        if protocol == ETH_P_ALL { Ok(()) } else { write!(f, ", protocol {protocol:#06x}") }
    }
}

/// Filter on a device's ingress side.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Filter {
    pub(super) info: u32,
    pub(super) handle: u32,
    pub(super) kind: String,
    /// Device to which it redirects everything, if it does nothing else; 0 once that device was deleted.
    pub(super) target: Option<u32>,
    /// Its tag, where it is a marked filter of this program.
    pub(super) tag: Option<Tag>,
}

impl Filter {
    pub(super) fn preference(&self) -> u32 {
        self.info >> 16
    }

    pub(super) fn classifier(&self) -> Option<Classifier> {
        Classifier::ALL.into_iter().find(|by| by.name() == self.kind)
    }

    /// Returns whether a redirect by `by` could be another filter of the same preference (one kind and protocol).
    pub(super) fn goes_with(&self, by: Classifier) -> bool {
        self.kind == by.name() && self.info & 0xffff == every_protocol() && by != Classifier::Matchall
    }

    /// The part of a u32 filter's handle that is its position in the table; the rest identifies the table.
    const NODE: u32 = 0xfff;

    /// Returns a handle with which a redirect comes before this filter in the same preference, if it has a place.
    pub(super) fn handle_before(&self) -> Option<u32> {
        let node = self.handle & Filter::NODE;
        (self.goes_with(Classifier::U32) && node > 1).then(|| self.handle - 1)
    }

    /// Returns whether both are in one u32 table.
    pub(super) fn is_beside(&self, other: &Filter) -> bool {
        let table = |filter: &Filter| (filter.info, filter.handle & !Filter::NODE);
        self.kind == "u32" && other.kind == "u32" && table(self) == table(other)
    }

    pub(super) fn deletion(&self, device: u32) -> TcMessage {
        let mut message = TcMessage::with_index(device.cast_signed());
        message.header.parent = INGRESS_SIDE;
        message.header.handle = self.handle.into();
        message.header.info = self.info;
        message.attributes.push(TcAttribute::Kind(self.kind.clone()));
        message
    }

    /// Parses one message of a dump; `None` for u32's own tables, and for heads without a filter.
    pub(super) fn read(kind: u16, payload: &[u8]) -> Option<Filter> {
        let filter = match netlink::parse_route(kind, payload) {
            Ok(RouteNetlinkMessage::NewTrafficFilter(message)) => Filter::of(message),
            Ok(_) => return None,
            // A filter of another program, of an unknown kind; only its existence matters.
            Err(_) => Filter::of_unknown(payload)?,
        };
        let part = if filter.kind == "u32" { filter.handle & Filter::NODE } else { filter.handle };
        (part != 0).then_some(filter)
    }

    fn of(message: TcMessage) -> Filter {
        let TcMessage { header, attributes, .. } = message;
        let mut filter = Filter { info: header.info, handle: header.handle.into(), ..Filter::default() };
        let mut selective = false;
        for attribute in attributes {
            match attribute {
                TcAttribute::Kind(kind) => filter.kind = kind,
                TcAttribute::Options(options) => {
                    options.iter().for_each(|option| selective |= filter.take(option));
                }
                _ => {}
            }
        }
        filter.target = filter.target.filter(|_| !selective);
        filter
    }

    /// Records an option; returns whether the option makes the filter match a part only.
    fn take(&mut self, option: &TcOption) -> bool {
        match option {
            TcOption::U32(TcFilterU32Option::Selector(selector)) => {
                return selector.keys.iter().any(|key| key.mask != 0);
            }
            TcOption::U32(TcFilterU32Option::Action(actions))
            | TcOption::MatchAll(TcFilterMatchAllOption::Action(actions)) => {
                self.target = actions.iter().find_map(target);
                self.tag = actions.iter().find_map(tag);
            }
            TcOption::Bpf(TcFilterBpfOption::ProgName(name)) => {
                if let Some((tag, target)) = Tag::of_program(name) {
                    (self.tag, self.target) = (Some(tag), Some(target));
                }
            }
            _ => {}
        }
        false
    }

    fn of_unknown(payload: &[u8]) -> Option<Filter> {
        let number = |at: usize| Some(u32::from_ne_bytes(*payload.get(at..)?.first_chunk()?));
        let attributes = payload.get(TC_HEADER..)?;
        let kind = NlasIterator::new(attributes)
            .map_while(Result::ok)
            .find(|nla| nla.kind() == TCA_KIND)
            .and_then(|nla| parse_string(nla.value()).ok());
        let (info, handle, kind) = (number(16)?, number(8)?, kind.unwrap_or_default());
        Some(Filter { info, handle, kind, ..Filter::default() })
    }
}

fn target(action: &TcAction) -> Option<u32> {
    action.attributes.iter().find_map(|attribute| match attribute {
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

fn tag(action: &TcAction) -> Option<Tag> {
    action.attributes.iter().find_map(|attribute| match attribute {
        TcActionAttribute::Cookie(cookie) => Tag::of_cookie(cookie),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use netlink_packet_core::Emitable;

    use super::*;
    use crate::mark::{Mark, Owner};

    const NEW_FILTER: u16 = 44;

    #[test]
    fn a_filter_is_parsed_as_it_is_made() {
        let tag = Mark { owner: Owner::of(&["a"]), sandbox: "web-1" }.tag();
        for by in [Classifier::U32, Classifier::Matchall] {
            let direction = Direction { from: 2, to: 1 << 20, into: true };
            let (message, _) = make(by, tag, direction, 1, by.first_handle()).unwrap();
            let mut bytes = vec![0; message.buffer_len()];
            message.emit(&mut bytes);
            let read = Filter::read(NEW_FILTER, &bytes).unwrap();
            assert_eq!((read.target, read.tag, read.preference()), (Some(1 << 20), Some(tag), 1), "{by:?}");
            assert_eq!((read.classifier(), read.goes_with(by)), (Some(by), by == Classifier::U32));
        }
    }

    #[test]
    fn a_filter_of_an_unknown_form_is_listed() {
        // A header, the kind "flower", and options that are cut off.
        let mut bytes = vec![0; 8];
        bytes.extend(7_u32.to_ne_bytes());
        bytes.extend(0_u32.to_ne_bytes());
        bytes.extend(((9_u32 << 16) | 8).to_ne_bytes());
        bytes.extend([11, 0, 1, 0]);
        bytes.extend(b"flower\0\0");
        bytes.extend([5, 0, 2, 0, 9, 0, 0, 0]);
        let read = Filter::read(NEW_FILTER, &bytes).unwrap();
        assert_eq!((read.kind.as_str(), read.handle, read.preference(), read.target), ("flower", 7, 9, None));
        assert_eq!(Filter::read(NEW_FILTER, b"short"), None);
    }
}
