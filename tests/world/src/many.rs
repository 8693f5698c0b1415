//! Makes pod network namespaces by the hundred, as a routing CNI does: a veth pair, one address, and a default route by
//! an on-link gateway.

use std::path::{Path, PathBuf};

use crate::World;
use peerpod_podnet::netns;

/// Makes the namespace of pod `number` (below 60,000). Its name has the world's prefix, so the world removes it.
///
/// # Errors
/// Fails if a device cannot be made.
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
