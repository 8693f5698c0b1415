//! Makes and changes the tunnel devices in the pod's namespace.

use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd};

use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{InfoVxlan, LinkAttribute, LinkFlags, LinkMessage};
use nix::errno::Errno;

use super::transaction::{Step, Transaction};
use crate::Error;
use crate::inspect::Picture;
use crate::link::{self, Link, endpoints, vxlan_info};
use crate::netlink::Client;
use crate::netns::Netns;
use crate::plan::{Interface, Underlay};
use crate::vxlan::{self, Shape, no_v6_address};

pub(super) struct Devices<'a> {
    netns: &'a Netns,
    underlay: &'a Underlay,
    source: IpAddr,
}

impl<'a> Devices<'a> {
    pub(super) fn new(netns: &'a Netns, underlay: &'a Underlay, source: IpAddr) -> Devices<'a> {
        Devices { netns, underlay, source }
    }

    /// Makes sure that the devices exist, in the order of the pod's indexes, with their names and settings. Sets none
    /// of them up. `picture` contains them afterwards.
    pub(super) fn make(
        &self,
        transaction: &mut Transaction<'_>,
        host: &mut Client,
        picture: &mut Picture,
        interfaces: &[Interface],
    ) -> Result<(), Error> {
        let mut ordered: Vec<&Interface> = interfaces.iter().collect();
        ordered.sort_by_key(|interface| interface.index);
        let mut steps = Vec::new();
        let mut loopback = picture.links.iter().filter(|link| link.loopback && !link.up);
        steps.extend(loopback.next().map(|lo| flags_step("set lo up", lo, LinkFlags::Up, LinkFlags::Up)));
        for wanted in ordered {
            let there = picture.links.iter().find(|link| link.name == wanted.name).cloned();
            let kept = match there {
                Some(link) if self.is_same_device(&link, wanted) => Some(link),
                Some(link) if link.vxlan.is_none() => {
                    return Err(Error::Plan(format!(
                        "the pod's namespace already has an interface {} that is no tunnel",
                        wanted.name
                    )));
                }
                _ => None,
            };
            let link = match kept {
                Some(link) => {
                    steps.extend(self.ends(&link, wanted));
                    link
                }
                None => {
                    self.clear(transaction, picture, wanted)?;
                    let made = self.create(transaction, host, wanted)?;
                    picture.links.push(made.clone());
                    made
                }
            };
            steps.extend(settled(&link, wanted));
        }
        transaction.run(steps, &[])?;
        for link in &mut picture.links {
            if let Some(wanted) = interfaces.iter().find(|i| link.name == temporary_name(i.vni)) {
                link.name.clone_from(&wanted.name);
            }
        }
        Ok(())
    }

    /// Sets devices up or down as planned.
    pub(super) fn take_up(
        &self,
        transaction: &mut Transaction<'_>,
        picture: &Picture,
        interfaces: &[Interface],
    ) -> Result<(), Error> {
        let mut steps = Vec::new();
        for wanted in interfaces {
            let link = picture.links.iter().find(|link| link.name == wanted.name && link.up == wanted.down);
            let (way, flags) = if wanted.down { ("down", LinkFlags::empty()) } else { ("up", LinkFlags::Up) };
            steps.extend(
                link.map(|link| {
                    flags_step(&format!("take {} {way}", wanted.name), link, flags, LinkFlags::Up)
                }),
            );
        }
        transaction.run(steps, &[])
    }

    /// Returns whether it is the wanted tunnel, regardless of its endpoints, which can be changed.
    fn is_same_device(&self, link: &Link, wanted: &Interface) -> bool {
        let underlay = self.underlay;
        link.mac == Some(wanted.mac)
            && link.vxlan.as_ref().is_some_and(|vxlan| {
                vxlan.vni == wanted.vni
                    && vxlan.port == underlay.port
                    && vxlan.is_v6() == underlay.node.is_ipv6()
                    && (underlay.node.is_ipv6() || vxlan.udp_checksum == underlay.udp_checksum)
            })
    }

    /// Returns the step that sets the tunnel's endpoints to the node's present address.
    fn ends(&self, link: &Link, wanted: &Interface) -> Option<Step> {
        let vxlan = link.vxlan.as_ref()?;
        let (remote, local) = (self.underlay.node, self.source);
        if vxlan.remote == Some(remote) && vxlan.local == Some(local) {
            return None;
        }
        let change = |remote, local| {
            let mut settings = vec![InfoVxlan::Id(wanted.vni)];
            settings.append(&mut endpoints(remote, local));
            let mut message = LinkMessage::default();
            message.header.index = link.index;
            message.attributes.push(vxlan_info(settings));
            RouteNetlinkMessage::NewLink(message)
        };
        Some(Step {
            flags: 0,
            back: vxlan.remote.map(|old| (0, change(old, vxlan.local))),
            message: change(remote, Some(local)),
            what: format!("set the ends of {} to {local} and {remote}", wanted.name),
            optional: false,
        })
    }

    /// Removes devices that conflict with a new one: those of an older plan, or half-made ones from before a crash.
    fn clear(
        &self,
        transaction: &mut Transaction<'_>,
        picture: &mut Picture,
        wanted: &Interface,
    ) -> Result<(), Error> {
        let in_the_way = |link: &Link| {
            link.name == wanted.name
                || link.vxlan.as_ref().is_some_and(|v| v.vni == wanted.vni && v.port == self.underlay.port)
        };
        for link in picture.links.iter().filter(|link| in_the_way(link)) {
            vxlan::remove(transaction.pod(), link.index)?;
            transaction.note(None);
        }
        picture.forget(|link| in_the_way(link));
        Ok(())
    }

    fn create(
        &self,
        transaction: &mut Transaction<'_>,
        host: &mut Client,
        wanted: &Interface,
    ) -> Result<Link, Error> {
        let underlay = self.underlay;
        let shape =
            Shape { port: underlay.port, v6: underlay.node.is_ipv6(), udp_checksum: underlay.udp_checksum };
        let name = temporary_name(wanted.vni);
        let mut settings = vxlan::settings(wanted.vni, shape);
        settings.append(&mut endpoints(underlay.node, Some(self.source)));
        let mut message = LinkMessage::default();
        message.header.index = wanted.index;
        message.attributes = vec![
            LinkAttribute::IfName(name.clone()),
            LinkAttribute::Address(wanted.mac.to_vec()),
            LinkAttribute::Mtu(wanted.mtu),
            LinkAttribute::NetNsFd(self.netns.as_fd().as_raw_fd()),
            vxlan_info(settings),
        ];
        let attempt = || format!("make the tunnel device for {} (VNI {})", wanted.name, wanted.vni);
        let mut tell = |message: &LinkMessage| {
            host.tell(NLM_F_CREATE | NLM_F_EXCL, RouteNetlinkMessage::NewLink(message.clone()))
        };
        let made = match tell(&message) {
            // Another device in the VM's copy of the namespace has the index: any other index will do.
            Err(e) if e.errno() == Some(Errno::EEXIST) && wanted.index != 0 => {
                message.header.index = 0;
                tell(&message)
            }
            made => made,
        };
        made.map_err(Error::kernel(attempt()))?;
        let link = link::by_name(transaction.pod(), &name).map_err(Error::kernel(attempt()))?;
        let vni = wanted.vni;
        let link = link.ok_or_else(|| Error::Gone { netns: self.netns.path().to_owned(), vni })?;
        transaction.note(Some((0, link::delete(link.index))));
        Ok(link)
    }
}

/// Returns the temporary name of a device that is not complete yet. Under the pod's name it would collide with the VM's
/// own `eth0` on kernels that look for the name in the sender's namespace.
pub(super) fn temporary_name(vni: u32) -> String {
    format!("pp-{vni:06x}")
}

/// Removes the device of this name if it is the tunnel of this VNI; returns whether it did.
pub(super) fn remove(pod: &mut Client, name: &str, vni: u32) -> Result<bool, Error> {
    let there = link::by_name(pod, name).map_err(Error::kernel(format!("look for {name}")))?;
    match there {
        Some(link) if link.vxlan.as_ref().is_some_and(|v| v.vni == vni) => {
            vxlan::remove(pod, link.index)?;
            Ok(true)
        }
        _ => Ok(false),
    }
}

/// Returns the steps for name, MTU, queue and flags, and against an automatic IPv6 address.
fn settled(link: &Link, wanted: &Interface) -> Vec<Step> {
    let mut steps = Vec::new();
    let (mut new, mut old) = (Vec::new(), Vec::new());
    let is_new = link.name != wanted.name;
    if is_new {
        new.push(LinkAttribute::IfName(wanted.name.clone()));
    }
    if link.mtu != wanted.mtu {
        new.push(LinkAttribute::Mtu(wanted.mtu));
        old.push(LinkAttribute::Mtu(link.mtu));
    }
    if let Some(length) = wanted.tx_queue_len.filter(|length| Some(*length) != link.tx_queue_len) {
        new.push(LinkAttribute::TxQueueLen(length));
        old.extend(link.tx_queue_len.map(LinkAttribute::TxQueueLen));
    }
    let set = |attributes| {
        let mut message = LinkMessage::default();
        message.header.index = link.index;
        message.attributes = attributes;
        RouteNetlinkMessage::SetLink(message)
    };
    if !new.is_empty() {
        steps.push(Step {
            flags: 0,
            back: Some((0, set(old))).filter(|_| !is_new),
            message: set(new),
            what: format!("give the tunnel device the name {} and the MTU {}", wanted.name, wanted.mtu),
            optional: false,
        });
    }
    let mut flags = LinkFlags::empty();
    flags.set(LinkFlags::Noarp, wanted.no_arp);
    flags.set(LinkFlags::Promisc, wanted.promiscuous);
    flags.set(LinkFlags::Allmulti, wanted.all_multicast);
    let mut has = LinkFlags::empty();
    has.set(LinkFlags::Noarp, link.no_arp);
    has.set(LinkFlags::Promisc, link.promiscuous);
    has.set(LinkFlags::Allmulti, link.all_multicast);
    if flags != has {
        let what = format!("set the flags of {}", wanted.name);
        steps.push(flags_step(&what, link, flags, flags.symmetric_difference(has)));
    }
    if is_new {
        steps.push(Step {
            flags: 0,
            back: None,
            message: RouteNetlinkMessage::SetLink(no_v6_address(link.index)),
            what: String::new(),
            optional: true, // a kernel without IPv6 has nothing to switch off
        });
    }
    steps
}

fn flags_step(what: &str, link: &Link, flags: LinkFlags, mask: LinkFlags) -> Step {
    let set = |flags| {
        let mut message = LinkMessage::default();
        message.header.index = link.index;
        message.header.flags = flags;
        message.header.change_mask = mask;
        RouteNetlinkMessage::SetLink(message)
    };
    Step {
        flags: 0,
        back: Some((0, set(mask.difference(flags)))),
        message: set(flags),
        what: what.to_owned(),
        optional: false,
    }
}
