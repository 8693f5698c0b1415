//! Counts what passes an interface, by UDP port: what went the right way, and that nothing went beside it.

use anyhow::Context;

use crate::Namespace;

/// Counters in a namespace, of UDP packets that come in or go out by one interface with a port at either end. Gone
/// when dropped. The interface may appear later.
#[derive(Debug)]
pub struct Spy {
    namespace: Namespace,
}

const TABLE: &str = "inet spy";

impl Spy {
    /// Starts to count; one spy per namespace.
    pub fn start(namespace: &Namespace, interface: &str, ports: &[u16]) -> anyhow::Result<Spy> {
        let (mut counters, mut coming, mut going) = (String::new(), String::new(), String::new());
        let any = ports.iter().map(u16::to_string).collect::<Vec<_>>().join(", ");
        for port in ports {
            counters.push_str(&format!("counter port{port} {{ }}\n"));
            for (rules, direction) in [(&mut coming, "iifname"), (&mut going, "oifname")] {
                // Each packet once, and by where it goes: VXLAN draws the port that it comes from, of all there are.
                rules.push_str(&format!(
                    "{direction} {interface} udp dport {port} counter name port{port}\n\
                     {direction} {interface} udp sport {port} udp dport != {{ {any} }} counter name port{port}\n"
                ));
            }
        }
        // Before anybody's NOTRACK and NAT, and after it.
        let table = format!(
            "table {TABLE} {{\n{counters}\
             chain coming {{\n type filter hook prerouting priority -310\n{coming}}}\n\
             chain going {{\n type filter hook postrouting priority 310\n{going}}}\n}}\n"
        );
        namespace.shell(&format!("nft -f - <<EOF\n{table}EOF\n"), &[])?;
        Ok(Spy { namespace: namespace.clone() })
    }

    /// Packets with this port so far, in both directions.
    pub fn packets(&self, port: u16) -> anyhow::Result<u64> {
        let text = self.namespace.shell(&format!("nft list counter {TABLE} port{port}"), &[])?;
        let count = text.split_whitespace().skip_while(|word| *word != "packets").nth(1);
        count.and_then(|count| count.parse().ok()).with_context(|| format!("no count in {text}"))
    }
}

impl Drop for Spy {
    fn drop(&mut self) {
        // The world may be gone already.
        self.namespace.shell(&format!("nft delete table {TABLE}"), &[]).ok();
    }
}
