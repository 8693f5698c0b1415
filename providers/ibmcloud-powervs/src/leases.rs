//! Finds addresses that a DHCP server of PowerVS gives: VMs on such a network have none in their own answers. May call
//! `dhcp.getall` and `dhcp.get`.

use std::collections::HashMap;
use std::net::IpAddr;

use peerpod_provider_api::Error;
use peerpod_provider_cloud::{ApiCall, Lookup, Window, batch};
use peerpod_provider_rest::{Method, read};
use serde_json::Value;
use tokio::time::Instant;

use crate::client::Power;
use crate::config::is_name;

/// Batcher that looks up leases, by the MAC addresses in small letters. `None`: there is none yet.
pub(crate) type LeaseLookup = Lookup<IpAddr>;

pub(crate) fn inspect(power: Power) -> LeaseLookup {
    batch::lookup(Window::LIST, move |_, until| all(power.clone(), until))
}

/// Returns all leases of the workspace, by MAC address.
async fn all(power: Power, until: Instant) -> Result<HashMap<String, IpAddr>, Error> {
    let what = "look at the DHCP servers";
    let servers = power.request(Method::GET, ["services", "dhcp"]);
    let servers = power.call(ApiCall::new("dhcp.getall", "list", what).until(until), &servers).await?.json();
    let mut leases = HashMap::new();
    for id in servers.as_array().into_iter().flatten().filter_map(|server| read::text(server, "/id")) {
        if !is_name(id) {
            continue;
        }
        let found =
            power.find(ApiCall::new("dhcp.get", "list", what).until(until), ["services", "dhcp", id]).await?;
        leases.extend(found.iter().flat_map(|server| read::list(server, "/leases")).filter_map(lease));
    }
    Ok(leases)
}

fn lease(value: &Value) -> Option<(String, IpAddr)> {
    let mac = read::text(value, "/instanceMacAddress")?.to_ascii_lowercase();
    Some((mac, read::address(value, "/instanceIP")?))
}
