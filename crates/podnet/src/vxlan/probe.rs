//! Tests whether tunnels on a port work on this node, by trial.

use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use nix::errno::Errno;
use rtnetlink::LinkUnspec;

use super::{Shape, Vnis, creation, device, remove};
use crate::Error;
use crate::link::{self, Link};
use crate::mark::{Mark, Owner};
use crate::netlink::{self, Client};
use crate::netns::Netns;

/// Maximum number of VNIs to try: a VNI that is taken shows nothing about the port.
const TRIES: usize = 16;
/// Number in the device's name. The kernel checks the name only in the device's own namespace, so any will do.
const SLOT: u32 = 0;

/// Verifies that tunnels on this port work: makes a device of each family in a scratch namespace, sets it up, and
/// deletes it again (some 40 ms). `host` is a socket of the node's namespace.
///
/// # Errors
/// [`Error::Port`], which names the conflicting device, where it is a device; [`Error::Kernel`].
pub fn probe(host: &mut Client, shape: Shape, source_ports: Option<(u16, u16)>) -> Result<(), Error> {
    let scratch = Netns::scratch()?;
    let mut inside = scratch.netlink()?;
    for v6 in [false, true] {
        let shape = Shape { v6, ..shape };
        match make(host, &scratch, shape, source_ports, Vnis::default().draw()?) {
            Err(e) if v6 && e.errno() == Some(Errno::EAFNOSUPPORT) => continue, // a kernel without IPv6
            Err(e) if e.errno() == Some(Errno::EOPNOTSUPP) => {
                let why = "the kernel has no VXLAN; load the module `vxlan`".to_owned();
                return Err(Error::Port(shape.port, why));
            }
            made => made.map_err(Error::kernel("make a tunnel device to try the port"))?,
        }
        let link =
            link::by_name(&mut inside, &device(SLOT)).map_err(Error::kernel("look at a tunnel device"))?;
        let Some(link) = link else { continue };
        let answer = inside.tell(0, link::set(LinkUnspec::new_with_index(link.index).up()));
        remove(&mut inside, link.index)?;
        match answer {
            Err(e) if e.errno() == Some(Errno::EADDRINUSE) => {
                return Err(Error::Port(shape.port, culprit(host, shape.port)));
            }
            Err(e) if v6 && e.errno() == Some(Errno::EAFNOSUPPORT) => {}
            answer => answer.map_err(Error::kernel(format!("open UDP port {} for tunnels", shape.port)))?,
        }
    }
    Ok(())
}

fn make(
    host: &mut Client,
    scratch: &Netns,
    shape: Shape,
    source_ports: Option<(u16, u16)>,
    vnis: impl Iterator<Item = u32>,
) -> Result<(), netlink::Error> {
    let mac = Mark { owner: Owner::of(&["probe"]), sandbox: "probe" }.mac();
    let mut result = Ok(());
    for vni in vnis.take(TRIES) {
        let message = creation(scratch, (device(SLOT), 0), vni, mac, (shape, source_ports));
        result = host.tell(NLM_F_CREATE | NLM_F_EXCL, message);
        if !matches!(&result, Err(e) if e.errno() == Some(Errno::EEXIST)) {
            break;
        }
    }
    result
}

/// Returns the holder of the port, as text.
fn culprit(host: &mut Client, port: u16) -> String {
    let holds = |link: &Link| link.flags.up && link.vxlan.as_ref().is_some_and(|v| v.port == port);
    let there = link::all_that(host, 64, holds).unwrap_or_default();
    let greedy = |link: &&Link| link.vxlan.as_ref().is_some_and(|v| v.collect_metadata);
    match (there.iter().find(greedy), there.first()) {
        (Some(link), _) => format!(
            "the device {} has it for all VNIs (collect-metadata, as Open vSwitch and Cilium do)",
            link.name
        ),
        (None, Some(link)) => format!("the device {} has it with other settings", link.name),
        (None, None) => "another program or a device of another namespace has it".to_owned(),
    }
}
