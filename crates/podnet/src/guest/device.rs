//! Makes and changes the tunnel devices in the pod's namespace.

use std::net::IpAddr;

use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::LinkMessage;
use nix::errno::Errno;
use rtnetlink::{LinkMessageBuilder, LinkUnspec};

use super::transaction::{Step, Transaction};
use crate::Error;
use crate::inspect::{Interface, Picture};
use crate::link::{self, Link, endpoints, mac_of};
use crate::netlink::Client;
use crate::netns::Netns;
use crate::plan::{Planned, Tunnelled, Underlay};
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

    /// Makes or corrects the devices, in the order of the pod's indexes, not up. `picture` has them then.
    pub(super) fn make(
        &self,
        transaction: &mut Transaction<'_>,
        host: &mut Client,
        picture: &mut Picture,
        planned: &Planned,
    ) -> Result<(), Error> {
        let mut ordered: Vec<Tunnelled<'_>> = planned.tunnels().collect();
        ordered.sort_by_key(|(_, interface)| interface.index);
        let mut steps = Vec::new();
        let mut loopback = picture.links.iter().filter(|link| link.flags.loopback && !link.flags.up);
        steps.extend(loopback.next().map(|lo| state_step("set lo up".to_owned(), lo, true)));
        for wanted in ordered {
            let name = &wanted.1.name;
            let there = picture.links.iter().find(|link| link.name == *name).cloned();
            let link = match there {
                Some(link) if self.is_same_device(&link, wanted) => {
                    steps.extend(self.ends(&link, wanted));
                    link
                }
                Some(link) if link.vxlan.is_none() => {
                    return Err(Error::Plan(format!(
                        "the pod's namespace already has an interface {name} that is no tunnel"
                    )));
                }
                _ => {
                    self.clear(transaction, picture, wanted)?;
                    let made = self.create(transaction, host, wanted)?;
                    picture.links.push(made.clone());
                    made
                }
            };
            steps.extend(settled(&link, wanted.1));
        }
        transaction.run(steps, &[])?;
        for link in &mut picture.links {
            if let Some((_, wanted)) = planned.tunnels().find(|(vni, _)| link.name == temporary_name(*vni)) {
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
            let link =
                picture.links.iter().find(|link| link.name == wanted.name && link.flags.up == wanted.down);
            let way = if wanted.down { "down" } else { "up" };
            steps.extend(
                link.map(|link| state_step(format!("take {} {way}", wanted.name), link, !wanted.down)),
            );
        }
        transaction.run(steps, &[])
    }

    /// Returns whether it is the wanted tunnel, regardless of its endpoints, which can be changed.
    fn is_same_device(&self, link: &Link, (vni, wanted): Tunnelled<'_>) -> bool {
        let fits = |vxlan: &link::Vxlan| vxlan.vni == vni && self.shape().fits(vxlan);
        link.mac.is_some() && link.mac == mac_of(&wanted.mac) && link.vxlan.as_ref().is_some_and(fits)
    }

    fn shape(&self) -> Shape {
        let Underlay { node, port, udp_checksum, .. } = *self.underlay;
        Shape { port, v6: node.is_ipv6(), udp_checksum }
    }

    /// Returns the step that sets the tunnel's endpoints to the node's present address.
    fn ends(&self, link: &Link, (vni, wanted): Tunnelled<'_>) -> Option<Step> {
        let vxlan = link.vxlan.as_ref()?;
        let (remote, local) = (self.underlay.node, self.source);
        if vxlan.remote == Some(remote) && vxlan.local == Some(local) {
            return None;
        }
        let held = Held { ifindex: link.index, vni };
        let change =
            |remote, local| RouteNetlinkMessage::NewLink(vxlan::connection(held, remote, local).build());
        let back = vxlan.remote.map(|old| change(old, vxlan.local));
        let what = format!("set the ends of {} to {local} and {remote}", wanted.name);
        Some(Step::change(change(remote, Some(local)), back, what))
    }

    /// Removes devices that conflict with a new one: those of an older plan, or half-made ones from before a crash.
    fn clear(
        &self,
        transaction: &mut Transaction<'_>,
        picture: &mut Picture,
        (vni, wanted): Tunnelled<'_>,
    ) -> Result<(), Error> {
        let in_the_way = |link: &Link| {
            link.name == wanted.name
                || link.vxlan.as_ref().is_some_and(|v| v.vni == vni && v.port == self.underlay.port)
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
        (vni, wanted): Tunnelled<'_>,
    ) -> Result<Link, Error> {
        let name = temporary_name(vni);
        // The plan's reader accepts only a MAC.
        let mac = mac_of(&wanted.mac).unwrap_or_default();
        let tunnel = vxlan::tunnel(self.netns, &name, vni, mac, self.shape());
        let tunnel = endpoints(tunnel, self.underlay.node, Some(self.source));
        let mut message = tunnel.mtu(wanted.mtu).index(wanted.index).build();
        let attempt = || format!("make the tunnel device for {} (VNI {vni})", wanted.name);
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
        let link = link.ok_or_else(|| Error::Gone(self.netns.path().to_owned(), vni))?;
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
        let what = format!("give the tunnel device the name {} and the MTU {}", wanted.name, wanted.mtu);
        steps.push(Step::change(link::set(new), (!is_new).then(|| link::set(old)), what));
    }
    let flags = (wanted.no_arp, wanted.promiscuous, wanted.all_multicast);
    let has = (link.flags.no_arp, link.flags.promiscuous, link.flags.all_multicast);
    if flags != has {
        let set = |(no_arp, promiscuous, all_multicast): (bool, bool, bool)| {
            link::set(device().arp(!no_arp).promiscuous(promiscuous).allmulticast(all_multicast))
        };
        let what = format!("set the flags of {}", wanted.name);
        steps.push(Step::change(set(flags), Some(set(has)), what));
    }
    if is_new {
        // A kernel without IPv6 has nothing to switch off.
        let mut step = Step::change(no_v6_address(link.index), None, String::new());
        step.optional = true;
        steps.push(step);
    }
    steps
}

fn state_step(what: String, link: &Link, up: bool) -> Step {
    let set = |up: bool| {
        let device = LinkUnspec::new_with_index(link.index);
        link::set(if up { device.up() } else { device.down() })
    };
    Step::change(set(up), Some(set(!up)), what)
}
