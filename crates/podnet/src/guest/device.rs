//! Makes and changes the tunnel devices in the pod's namespace.

use std::net::IpAddr;

use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::LinkMessage;
use nix::errno::Errno;
use rtnetlink::{LinkMessageBuilder, LinkUnspec};

use super::transaction::{Step, Transaction};
use crate::Error;
use crate::inspect::Picture;
use crate::link::{self, Link, endpoints};
use crate::netlink::Client;
use crate::netns::Netns;
use crate::plan::{Interface, Underlay};
use crate::vxlan::{self, Held, Shape, no_v6_address};

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
        steps.extend(loopback.next().map(|lo| state_step("set lo up".to_owned(), lo, true)));
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
            let way = if wanted.down { "down" } else { "up" };
            steps.extend(
                link.map(|link| state_step(format!("take {} {way}", wanted.name), link, !wanted.down)),
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
        let held = Held { ifindex: link.index, vni: wanted.vni };
        let change =
            |remote, local| RouteNetlinkMessage::NewLink(vxlan::connection(held, remote, local).build());
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
        let tunnel = vxlan::tunnel(self.netns, &name, wanted.vni, wanted.mac, shape);
        let tunnel = endpoints(tunnel, underlay.node, Some(self.source));
        let mut message = tunnel.mtu(wanted.mtu).index(wanted.index).build();
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
    let device = || LinkUnspec::new_with_index(link.index);
    let (mut new, mut old) = (device(), device());
    let is_new = link.name != wanted.name;
    if is_new {
        new = new.name(&wanted.name);
    }
    let other_mtu = link.mtu != wanted.mtu;
    if other_mtu {
        (new, old) = (new.mtu(wanted.mtu), old.mtu(link.mtu));
    }
    let queue = wanted.tx_queue_len.filter(|length| Some(*length) != link.tx_queue_len);
    if let Some(length) = queue {
        new = new.txqueuelen(length);
        old = link.tx_queue_len.into_iter().fold(old, LinkMessageBuilder::txqueuelen);
    }
    if is_new || other_mtu || queue.is_some() {
        steps.push(Step {
            flags: 0,
            back: Some((0, link::set(old))).filter(|_| !is_new),
            message: link::set(new),
            what: format!("give the tunnel device the name {} and the MTU {}", wanted.name, wanted.mtu),
            optional: false,
        });
    }
    let flags = (wanted.no_arp, wanted.promiscuous, wanted.all_multicast);
    let has = (link.no_arp, link.promiscuous, link.all_multicast);
    if flags != has {
        let set = |(no_arp, promiscuous, all_multicast): (bool, bool, bool)| {
            link::set(device().arp(!no_arp).promiscuous(promiscuous).allmulticast(all_multicast))
        };
        steps.push(Step {
            flags: 0,
            back: Some((0, set(has))),
            message: set(flags),
            what: format!("set the flags of {}", wanted.name),
            optional: false,
        });
    }
    if is_new {
        steps.push(Step {
            flags: 0,
            back: None,
            message: no_v6_address(link.index),
            what: String::new(),
            optional: true, // a kernel without IPv6 has nothing to switch off
        });
    }
    steps
}

/// Returns the step that sets a device up or down.
fn state_step(what: String, link: &Link, up: bool) -> Step {
    let set = |up: bool| {
        let device = LinkUnspec::new_with_index(link.index);
        link::set(if up { device.up() } else { device.down() })
    };
    Step { flags: 0, back: Some((0, set(!up))), message: set(up), what, optional: false }
}
