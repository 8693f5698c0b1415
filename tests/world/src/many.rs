//! Pods' network namespaces by the hundred, as a routing CNI makes them: a veth pair, one address, a default route by
//! a gateway that only the link knows.

use std::path::{Path, PathBuf};

use crate::World;
use peerpod_podnet::netns;

/// The namespace of pod `number` (below 60,000); its name says that it is this world's, which takes it away.
///
/// # Errors
/// When a link cannot be made.
pub fn attach(world: &World, number: usize) -> anyhow::Result<PathBuf> {
    let name = format!("{}many{number}", world.prefix());
    let path = Path::new("/run/netns").join(&name);
    netns::create_named(&path)?;
    world.node().ip(&format!(
        "link add many{number} mtu 1450 type veth peer name eth0 mtu 1450 netns {name}\n\
         link set many{number} up\n"
    ))?;
    let host = number + 1;
    crate::ip(
        &name,
        &format!(
            "link set eth0 up\n\
             addr add 10.245.{}.{}/32 dev eth0\n\
             route add 169.254.1.1 dev eth0\n\
             route add default via 169.254.1.1 dev eth0\n",
            host / 250,
            host % 250 + 1
        ),
    )?;
    Ok(path)
}
