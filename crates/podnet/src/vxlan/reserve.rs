//! Reserves all of a pod's tunnel devices, or none of them.

use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::RouteNetlinkMessage;
use nix::errno::Errno;
use rtnetlink::LinkUnspec;

use super::{Held, Shape, Vnis, creation, device, no_v6_address, remove};
use crate::Error;
use crate::link::{self, Link};
use crate::mark::{Mark, holder};
use crate::netlink::{Client, Refusal};
use crate::netns::Netns;
use crate::redirect::qdisc;

/// First of the devices' indexes, so that a new device need not be looked up. Namespaces count from 1 upwards.
const FIRST_INDEX: u32 = 0x10_0000;
/// Maximum number of rounds; a namespace without concurrent changes never needs so many.
const ROUNDS: u32 = 8192;

const PER_DEVICE: usize = 3;

/// Parameters of [`reserve`].
#[derive(Clone, Copy, Debug)]
pub struct Reservation<'a> {
    /// Owner and sandbox of the devices.
    pub mark: Mark<'a>,
    /// Settings that cannot be changed later.
    pub shape: Shape,
    /// Range of the UDP source ports over which flows are spread, ends included; `None` = the kernel's own, the range
    /// of all programs. Many ports let a NIC spread the load. Few ports keep a tracked tunnel to few conntrack entries.
    pub source_ports: Option<(u16, u16)>,
    /// The VNIs to choose from.
    pub vnis: Vnis,
    /// The devices.
    pub slots: &'a [Slot],
}

/// One device to reserve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// The number in its name.
    pub number: u32,
    /// VNI of an earlier reservation; taken if it is still free, regardless of the range.
    pub vni: Option<u32>,
}

/// Makes sure that the pod's namespace has this sandbox's devices; new ones are down and without a remote, and go again
/// after a failure. `host` is a socket of the namespace through which the tunnels' packets go.
///
/// # Errors
/// [`Error::Claimed`] when another sandbox's device is there, [`Error::NoVni`], [`Error::Kernel`], [`Error::Netns`].
pub fn reserve(host: &mut Client, netns: &Netns, wanted: Reservation<'_>) -> Result<Vec<Held>, Error> {
    let mut pod = netns.netlink()?;
    let state = |slot: &Slot| State {
        slot: *slot,
        trying: 0,
        index: FIRST_INDEX + slot.number,
        held: None,
        made: false,
    };
    let mut reserving = Reserving {
        netns,
        wanted,
        draw: Box::new(wanted.vnis.draw()?),
        slots: wanted.slots.iter().map(state).collect(),
    };
    let done = reserving.make_all(host, &mut pod).and_then(|()| reserving.name_all(&mut pod));
    match done {
        Ok(held) => {
            netns.keep(pod);
            Ok(held)
        }
        Err(e) => {
            for state in reserving.slots {
                if let State { made: true, held: Some(held), .. } = state {
                    // The first error is the one that counts. A device that stays has this sandbox's mark.
                    drop(remove(&mut pod, held.ifindex));
                }
            }
            Err(e)
        }
    }
}

struct State {
    slot: Slot,
    /// The VNI of the present attempt.
    trying: u32,
    index: u32,
    held: Option<Held>,
    made: bool,
}

struct Reserving<'a> {
    netns: &'a Netns,
    wanted: Reservation<'a>,
    draw: Box<dyn Iterator<Item = u32>>,
    slots: Vec<State>,
}

impl Reserving<'_> {
    fn make_all(&mut self, host: &mut Client, pod: &mut Client) -> Result<(), Error> {
        let (mac, shape) = (self.wanted.mark.mac(), (self.wanted.shape, self.wanted.source_ports));
        let (netns, Reservation { vnis, shape: Shape { port, .. }, .. }) = (self.netns, self.wanted);
        let exhausted = || vnis.exhausted(port);
        let attempt = || format!("make the tunnel device in {}", netns.path().display());
        for _ in 0..ROUNDS {
            let mut messages = Vec::new();
            for state in self.slots.iter_mut().filter(|state| state.held.is_none()) {
                state.trying = match state.slot.vni {
                    Some(vni) => vni,
                    None => self.draw.next().ok_or_else(exhausted)?,
                };
                let name = (device(state.slot.number), state.index);
                messages.push((NLM_F_CREATE | NLM_F_EXCL, creation(netns, name, state.trying, mac, shape)));
            }
            if messages.is_empty() {
                return Ok(());
            }
            let answers = host.batch(&messages).map_err(Error::kernel(attempt()))?;
            let mut failed = None;
            for (state, answer) in self.slots.iter_mut().filter(|s| s.held.is_none()).zip(answers) {
                // All answers are processed, so that the devices that were made are known after a failure.
                let result = match answer {
                    Ok(()) => state.found(pod, netns),
                    Err(no) if no.errno == Errno::EEXIST => state.in_the_way(pod, netns, self.wanted, &no),
                    Err(no) => Err(Error::kernel(attempt())(no.into())),
                };
                failed = failed.or(result.err());
            }
            if let Some(e) = failed {
                return Err(e);
            }
        }
        Err(exhausted())
    }

    /// Sets the alias, prevents an automatic IPv6 address (the device's own packets would only disturb the VM), and
    /// adds the qdisc for the redirect. On a device that is up, a qdisc waits for all processors.
    fn name_all(&self, pod: &mut Client) -> Result<Vec<Held>, Error> {
        let held: Vec<Held> = self.slots.iter().filter_map(|state| state.held).collect();
        let mut messages = Vec::with_capacity(PER_DEVICE * held.len());
        for held in &held {
            let device = LinkUnspec::new_with_index(held.ifindex);
            messages.push((0, link::set(device.alias(self.wanted.mark.alias()))));
            messages.push((0, no_v6_address(held.ifindex)));
            let new = NLM_F_CREATE | NLM_F_EXCL;
            messages.push((new, RouteNetlinkMessage::NewQueueDiscipline(qdisc(held.ifindex))));
        }
        let attempt = || Error::kernel("name the tunnel's devices");
        let answers = pod.batch(&messages).map_err(attempt())?;
        // The second message is refused where the kernel has no IPv6, and so no address to prevent. The third is
        // refused where the qdisc already exists; `tunnel::connect` repairs that.
        match answers.into_iter().step_by(PER_DEVICE).find_map(Result::err) {
            Some(no) => Err(attempt()(no.into())),
            None => Ok(held),
        }
    }
}

impl State {
    fn found(&mut self, pod: &mut Client, netns: &Netns) -> Result<(), Error> {
        self.made = true;
        let ifindex = match self.index {
            0 => find(pod, netns, self.slot.number)?.map(|link| link.index),
            chosen => Some(chosen),
        };
        let ifindex = ifindex.ok_or_else(|| Error::Gone(netns.path().to_owned(), self.trying))?;
        self.held = Some(Held { vni: self.trying, ifindex });
        Ok(())
    }

    /// Handles EEXIST: the name, the index, or the VNI is taken.
    fn in_the_way(
        &mut self,
        pod: &mut Client,
        netns: &Netns,
        wanted: Reservation<'_>,
        no: &Refusal,
    ) -> Result<(), Error> {
        if let Some(there) = find(pod, netns, self.slot.number)? {
            return self.adopt(pod, netns, &there, wanted);
        }
        // No device has the name. With a text in the kernel's answer the VNI was taken, without one the index.
        if no.text.is_none() && self.index != 0 {
            self.index = 0;
        } else {
            self.slot.vni = None;
        }
        Ok(())
    }

    /// Adopts an existing device of the name if it is as wanted; removes it if it is this sandbox's and different.
    fn adopt(
        &mut self,
        pod: &mut Client,
        netns: &Netns,
        there: &Link,
        wanted: Reservation<'_>,
    ) -> Result<(), Error> {
        if !wanted.mark.is_on(there) {
            return Err(Error::Claimed { netns: netns.path().to_owned(), other: holder(there) });
        }
        match &there.vxlan {
            Some(vxlan) if wanted.shape.fits(vxlan) && self.slot.vni.is_none_or(|vni| vni == vxlan.vni) => {
                self.held = Some(Held { vni: vxlan.vni, ifindex: there.index });
                Ok(())
            }
            _ => remove(pod, there.index),
        }
    }
}

fn find(pod: &mut Client, netns: &Netns, number: u32) -> Result<Option<Link>, Error> {
    let name = device(number);
    let attempt = format!("look for {name} in {}", netns.path().display());
    link::by_name(pod, &name).map_err(Error::kernel(attempt))
}
