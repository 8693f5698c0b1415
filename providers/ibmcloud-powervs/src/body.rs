//! Builds the body of the POST that makes a VM. Pure.

use std::collections::BTreeMap;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use peerpod_provider_api::CreateRequest;
use peerpod_provider_rest::ibm;
use serde_json::{Value, json};

use crate::config::PowerVsConfig;
use crate::size::VmSize;

/// Returns the whole body.
pub(crate) fn body(
    config: &PowerVsConfig,
    name: &str,
    request: &CreateRequest,
    image: &str,
    size: &VmSize,
    tags: &BTreeMap<String, String>,
) -> Value {
    let second = config.second_network.as_ref().filter(|_| request.second_nic);
    let networks = [Some(&config.network), second].into_iter().flatten();
    let mut body = json!({
        "serverName": name,
        "imageID": image,
        "sysType": size.system,
        "procType": config.processor_type,
        "processors": size.processors(),
        "memory": size.memory,
        "networks": networks.map(|id| json!({"networkID": id})).collect::<Vec<Value>>(),
        "userData": STANDARD.encode(&request.user_data),
        "userTags": ibm::tags(tags),
        // Without it no pod reads the VM's user-data over the network.
        "metadataService": {"enabled": false},
    });
    if let Some(key) = &config.key_name {
        body["keyPairName"] = json!(key);
    }
    body
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::read as config;

    #[test]
    fn each_wish_has_its_field() {
        let tags = BTreeMap::from([("team".to_owned(), "blue".to_owned())]);
        let made = |settings: &[(&str, &str)], second_nic| {
            let config = config(settings).unwrap();
            let request = CreateRequest { user_data: "hello".into(), second_nic, ..CreateRequest::default() };
            body(&config, "pp-a", &request, "image-1", &config.size, &tags)
        };
        let plain = made(&[], false);
        assert_eq!(plain["processors"], 0.5);
        assert_eq!((&plain["userData"], &plain["userTags"]), (&json!("aGVsbG8="), &json!(["team:blue"])));
        assert_eq!((&plain["networks"], plain.get("keyPairName")), (&json!([{"networkID": "net-1"}]), None));
        let settings = [
            ("second-network-id", "net-2"),
            ("key-name", "me"),
            ("processors", "1"),
            ("processor-type", "dedicated"),
        ];
        let full = made(&settings, true);
        assert_eq!(full["networks"][1]["networkID"], "net-2");
        assert_eq!((&full["keyPairName"], &full["procType"]), (&json!("me"), &json!("dedicated")));
    }
}
