//! Compares every body of this provider, and every answer of the fake to it, with the models of IBM's Go client. Needs Go
//! modules once (feature `witness`).

use peerpod_provider_api::{CreateRequest, Provider};
use peerpod_test_clouds::Fault;
use peerpod_test_clouds::powervs::{DHCP, PUBLIC};
use peerpod_test_clouds::witness::power_models;
use serde_json::json;

use super::common::{CREATE, Site, key, request};

#[tokio::test(flavor = "multi_thread")]
async fn ibms_models_know_every_body_and_answer() {
    let site = Site::start().await;
    for (number, network) in (0..).zip(["", DHCP, PUBLIC]) {
        let mut settings = vec![("tags", "team=blue"), ("key-name", "me")];
        if !network.is_empty() {
            settings.push(("network-id", network));
        }
        let provider = site.provider(&settings);
        provider.preflight().await.unwrap();
        let wish = CreateRequest { second_nic: true, ..request("web-0") };
        let made = provider.create(&wish, &key("models", number)).await.unwrap();
        provider.addresses(&made.id).await.unwrap();
        provider.list_owned().await.unwrap();
        provider.delete(&made.id).await.unwrap();
    }
    let provider = site.provider(&[]);
    site.cloud.fail(CREATE, Fault::refuse_late("ERROR", "No valid host was found."), 1);
    provider.create(&request("late"), &key("models", 9)).await.unwrap_err();
    assert_eq!(power_models(&site.cloud.calls()).unwrap(), Vec::<String>::new());
    // The models find a mistake.
    let mut calls = site.cloud.calls();
    calls.retain(|call| call.action == CREATE);
    let mut wrong = calls[0].body();
    wrong["procType"] = json!("fast");
    calls[0].request.body = wrong.to_string().into();
    let mut misspelt = calls[1].body();
    misspelt["userTag"] = json!(["a"]);
    calls[1].request.body = misspelt.to_string().into();
    let found = power_models(&calls[..2]).unwrap().join("\n");
    assert!(found.contains("procType") && found.contains("userTag: the model does not know it"), "{found}");
}
