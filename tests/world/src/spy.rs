//! Counts the packets of an interface by UDP port, to show that traffic took the intended path and no other.

use anyhow::Context;

use crate::Namespace;

/// Counters in a namespace for UDP packets that enter or leave by one interface, by the port at either end. Removed
/// when dropped. The interface may appear later.
#[derive(Debug)]
pub struct Spy {
    namespace: Namespace,
}

const TABLE: &str = "inet spy";

impl Spy {
    /// Starts counting. A namespace can have one spy.
    pub fn start(namespace: &Namespace, interface: &str, ports: &[u16]) -> anyhow::Result<Spy> {
        let (mut counters, mut coming, mut going) = (String::new(), String::new(), String::new());
        let any = ports.iter().map(u16::to_string).collect::<Vec<_>>().join(", ");
        for port in ports {
            counters.push_str(&format!("counter port{port} {{ }}\n"));
            for (rules, direction) in [(&mut coming, "iifname"), (&mut going, "oifname")] {
                // Counts each packet once, by its destination port first: VXLAN picks its source port from all ports.
                rules.push_str(&format!(
                    "{direction} {interface} udp dport {port} counter name port{port}\n\
                     {direction} {interface} udp sport {port} udp dport != {{ {any} }} counter name port{port}\n"
                ));
            }
        }
        // Before every other NOTRACK and NAT rule, and after them.
        let table = format!(
            "table {TABLE} {{\n{counters}\
             chain coming {{\n type filter hook prerouting priority -310\n{coming}}}\n\
             chain going {{\n type filter hook postrouting priority 310\n{going}}}\n}}\n"
        );
        namespace.shell(&format!("nft -f - <<EOF\n{table}EOF\n"), &[])?;
        Ok(Spy { namespace: namespace.clone() })
    }

    /// Returns the number of packets with this port so far, in both directions.
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
