//! The cluster's resolver: answers for Services from the API server.

use std::net::{Ipv4Addr, UdpSocket};
use std::thread;

use anyhow::Context;
use kube::Client;
use serde_json::Value;
use tokio::runtime::Handle;

use crate::node::read;

/// Type of a query for IPv4 addresses (RFC 1035).
const A: [u8; 2] = [0, 1];
/// Flags of an answer: it is one, with authority, recursion is there. The last nibble is the result.
const ANSWER: u16 = 0x8580;
const ABSENT: u16 = 3;
const HEADER: usize = 12;

/// Answers at this address until the process ends.
pub(crate) fn serve(address: Ipv4Addr, client: Client) -> anyhow::Result<()> {
    let socket = UdpSocket::bind((address, 53)).context("bind the resolver's socket")?;
    let runtime = Handle::current();
    thread::spawn(move || {
        let mut query = [0; 512];
        while let Ok((length, from)) = socket.recv_from(&mut query) {
            let Some(answer) = answer(&query[..length], |name| find(&runtime, &client, name)) else {
                continue;
            };
            let _sent = socket.send_to(&answer, from);
        }
    });
    Ok(())
}

/// Returns the addresses of `<service>.<namespace>.svc.cluster.local`: the Service's, or of a headless one its
/// endpoints'.
fn find(runtime: &Handle, client: &Client, name: &str) -> Option<Vec<Ipv4Addr>> {
    let (service, namespace) = name.strip_suffix(".svc.cluster.local")?.split_once('.')?;
    let path = |kind: &str| format!("/api/v1/namespaces/{namespace}/{kind}/{service}");
    let addresses: Vec<Value> = match &read(runtime, client, &path("services")).ok()?["spec"]["clusterIP"] {
        Value::String(headless) if headless == "None" => {
            let endpoints = read(runtime, client, &path("endpoints")).ok()?;
            let subsets = endpoints["subsets"].as_array()?.iter();
            subsets.flat_map(|subset| subset["addresses"].as_array().cloned().unwrap_or_default()).collect()
        }
        address => vec![serde_json::json!({ "ip": address })],
    };
    Some(addresses.iter().filter_map(|address| address["ip"].as_str()?.parse().ok()).collect())
}

/// Answers a query with one question. Returns nothing for one that cannot be read.
fn answer(query: &[u8], find: impl FnOnce(&str) -> Option<Vec<Ipv4Addr>>) -> Option<Vec<u8>> {
    let mut labels = Vec::new();
    let mut at = HEADER;
    while let length @ 1.. = usize::from(*query.get(at)?) {
        labels.push(String::from_utf8_lossy(query.get(at + 1..at + 1 + length)?).into_owned());
        at += 1 + length;
    }
    let end = at + 5;
    let found = find(&labels.join("."));
    let addresses = match &found {
        Some(addresses) if query.get(at + 1..at + 3)? == A => addresses.as_slice(),
        _ => &[],
    };
    let flags = if found.is_some() { ANSWER } else { ANSWER | ABSENT };
    let mut answer = query.get(..2)?.to_vec();
    for number in [flags, 1, u16::try_from(addresses.len()).ok()?, 0, 0] {
        answer.extend(number.to_be_bytes());
    }
    answer.extend(query.get(HEADER..end)?);
    for address in addresses {
        // The question's name, an address of the Internet for five seconds, of four bytes.
        answer.extend([0xc0, HEADER as u8, 0, 1, 0, 1, 0, 0, 0, 5, 0, 4]);
        answer.extend(address.octets());
    }
    Some(answer)
}
