//! Counts the carrier losses of each device of a namespace since the device was made. The kernel drops routes and
//! addresses of a device that goes down; the count tells that from a removal by another program. Only reads.

use std::collections::BTreeMap;

use super::Error;
use super::link;
use super::netns::Netns;

const MAX_LINKS: usize = 256;

/// Returns the index of each device and its number of carrier losses.
pub fn losses(netns: &Netns) -> Result<BTreeMap<u32, u32>, Error> {
    // The socket is not kept: this request comes last and is rare.
    let links = link::all(&mut netns.netlink()?, MAX_LINKS)
        .map_err(Error::kernel("count the losses of carrier of the pod's links"))?;
    Ok(links.into_iter().map(|link| (link.index, link.losses)).collect())
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
