//! Measures settings of a VXLAN device that the tunnel chooses or leaves at their defaults. It compares the throughput
//! of one TCP stream with other GSO and GRO sizes, and with UDP checksums. The devices are plain ones beside each
//! other, so that nothing else differs.

use std::net::Ipv4Addr;

use super::cloud::{self, Cloud};
use super::traffic::{self, Path};
use crate::report::{Goal, Report};

/// The tunnel's own settings are first: the kernel's sizes (64 KiB), no checksum over IPv4. Each row has a key, options
/// of the device, sizes for both ends (up to 64 KiB they apply to IPv4, too), and a description.
const CHOICES: [(&str, &str, &str, &str); 5] = [
    ("", "noudpcsum", "", ""),
    ("gso_32k", "noudpcsum", "gso_max_size 32768", "GSO of 32 KiB, not 64"),
    ("gro_32k", "noudpcsum", "gro_max_size 32768", "GRO of 32 KiB, not 64"),
    ("gro_none", "noudpcsum", "gro_max_size 1500", "GRO that joins nothing"),
    ("udp_checksum", "udpcsum", "", "UDP checksums over IPv4"),
];

/// Runs the comparison.
pub(crate) fn run(report: &mut Report) -> anyhow::Result<()> {
    let cloud = Cloud::new(cloud::MTU)?;
    let paths = (1..)
        .zip(CHOICES)
        .map(|(number, choice)| path(&cloud, number, choice))
        .collect::<Result<Vec<_>, _>>()?;
    let rates = traffic::measure_one_stream(&paths)?;
    for ((key, _, _, about), rate) in CHOICES.iter().zip(&rates).skip(1) {
        report.figure(&format!("choice_{key}_tcp1_vs_ours"), rate / rates[0], Goal::None, about);
    }
    Ok(())
}

fn path(cloud: &Cloud, number: u8, (_, options, sizes, _): (&str, &str, &str, &str)) -> anyhow::Result<Path> {
    for (namespace, local, remote) in
        [(cloud.world.node(), cloud::NODE, cloud::VM), (&cloud.vm, cloud::VM, cloud::NODE)]
    {
        let host = local.octets()[3];
        namespace.ip(&format!(
            "link add choice{number} type vxlan id {number} local {local} remote {remote} dstport 4789 {options} nolearning\n\
             addr add 10.78.{number}.{host}/24 dev choice{number}\n\
             link set choice{number} mtu 1450 {sizes}\n\
             link set choice{number} up\n"
        ))?;
    }
    Ok(cloud.path(&cloud.vm, Ipv4Addr::new(10, 78, number, cloud::VM.octets()[3]).into()))
}
