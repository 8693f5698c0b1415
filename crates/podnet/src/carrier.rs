//! Counts the carrier losses of each device of a namespace since the device was made. The kernel drops routes and
//! addresses of a device that goes down; the count distinguishes that case from a removal by another program. Only
//! reads.

use std::collections::BTreeMap;

use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::LinkAttribute;
use rtnetlink::LinkMessageBuilder;

use super::Error;
use super::link;
use super::netns::Netns;

/// Maximum number of devices in a pod.
const MAX_LINKS: usize = 256;

/// Returns the index of each device and its number of carrier losses.
///
/// # Errors
/// [`Error::Kernel`], [`Error::Netns`].
pub fn losses(netns: &Netns) -> Result<BTreeMap<u32, u32>, Error> {
    let mut client = netns.netlink()?;
    let count = |answer| match answer {
        RouteNetlinkMessage::NewLink(link) => {
            let downs = link.attributes.iter().find_map(|attribute| match attribute {
                LinkAttribute::CarrierDownCount(count) => Some(*count),
                _ => None,
            });
            Some((link.header.index, downs.unwrap_or(0)))
        }
        _ => None,
    };
    let counted = client
        .dump(&link::request(LinkMessageBuilder::default()), MAX_LINKS, count)
        .map_err(Error::kernel("count the losses of carrier of the pod's links"))?;
    // The socket is not kept: this request comes last and is rare.
    Ok(counted.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn the_counter_counts_a_link_set_down_but_not_a_removed_route() {
        let netns = Netns::scratch().unwrap();
        let ip = |arguments: &str| {
            let run = || Command::new("ip").args(arguments.split(' ')).status();
            assert!(netns.run(run).unwrap().unwrap().success(), "ip {arguments}");
        };
        ip("link add a0 index 7 type veth peer name a1");
        ip("link set a0 up");
        ip("link set a1 up");
        ip("addr add 10.1.0.1/24 dev a0");
        ip("route add 10.2.0.0/16 via 10.1.0.9");
        let before = losses(&netns).unwrap()[&7];
        ip("route del 10.2.0.0/16");
        assert_eq!(losses(&netns).unwrap()[&7], before);
        ip("link set a0 down");
        ip("link set a0 up");
        assert!(losses(&netns).unwrap()[&7] > before);
    }
}
