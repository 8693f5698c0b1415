//! Compares every call and every signature of this provider with Alibaba Cloud's models and signer, and reads the VMs that
//! it made by Alibaba Cloud's client. Needs PyPI once (feature `witness`).

use peerpod_provider_api::{Confidential, CreateRequest, DiskRequest, Market, Provider};
use peerpod_test_clouds::alibaba::{KEY_PAIR, KEY_SECRET, REGION, ZONES};
use peerpod_test_clouds::witness;
use serde_json::{Value, json};

use super::common::{Site, key, placed, request};

#[tokio::test(flavor = "multi_thread")]
async fn alibabas_models_know_every_call_and_answer_and_its_signer_signs_as_we_do() {
    let site = Site::start().await;
    let settings = [
        ("instance-types", "ecs.g8i.xlarge,ecs.g7.large"),
        ("use-public-ip", "true"),
        ("key-name", KEY_PAIR),
        ("tags", "team=blue, a b=c*d~e/ä"),
    ];
    let provider = site.provider(&settings);
    provider.preflight().await.unwrap();
    let disk = DiskRequest { volume: site.disk(ZONES[0]), ..DiskRequest::default() };
    let wishes = [
        CreateRequest { disks: vec![disk.clone()], second_nic: true, public_ip: true, ..request("full") },
        CreateRequest {
            confidential: Some(Confidential::Tdx),
            market: Some(Market::OnDemand),
            ..request("secret")
        },
    ];
    for (number, wish) in (0..).zip(&wishes) {
        let wish = placed(&*provider, wish).await.unwrap();
        let made = provider.create(&wish, &key("bodies", number)).await.unwrap();
        provider.addresses(&made.id).await.unwrap();
    }
    let wish = placed(&*provider, &request("batch")).await.unwrap();
    let batch = provider.extensions().batch.unwrap();
    batch.create_many(&wish, 3.try_into().unwrap(), &key("bodies", 9)).await.unwrap();
    site.cloud.with(|alibaba, _| alibaba.page = 2);
    let owned = provider.list_owned().await.unwrap();
    let first = owned.iter().find(|vm| vm.name.as_deref() == Some("full")).unwrap();
    let volumes = provider.extensions().volumes.unwrap();
    volumes.attach(&first.id, &disk).await.unwrap();
    volumes.detach(&first.id, &disk.volume).await.unwrap();
    provider.extensions().console.unwrap().tail(&first.id, 10).await.unwrap();
    for vm in &owned {
        provider.delete(&vm.id).await.unwrap();
    }
    let calls = site.cloud.calls();
    assert!(calls.iter().any(|call| !call.request.query("NextToken").is_empty()), "a second page");
    let found = tokio::task::spawn_blocking(move || witness::alibaba_models(&calls, KEY_SECRET));
    assert_eq!(found.await.unwrap().unwrap(), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn alibabas_client_reads_what_the_provider_made() {
    let site = Site::start().await;
    let provider = site.provider(&[("market", "spot"), ("tags", "team=blue")]);
    let wish = CreateRequest { second_nic: true, ..request("web-0") };
    let wish = placed(&*provider, &wish).await.unwrap();
    let made = provider.create(&wish, &key("client", 0)).await.unwrap();
    let ask = json!({"RegionId": REGION, "InstanceIds": json!([made.id.as_str()]).to_string()});
    let seen = witness::alibaba_client(&site.cloud, "describe_instances", &ask).unwrap();
    let vm = &seen["Instances"]["Instance"][0];
    let text = |pointer: &str| vm.pointer(pointer).and_then(Value::as_str).unwrap_or_default().to_owned();
    assert_eq!(text("/InstanceId"), made.id.as_str());
    assert_eq!(text("/SpotStrategy"), "SpotAsPriceGo");
    assert_eq!(text("/MetadataOptions/HttpTokens"), "required");
    assert_eq!(vm["NetworkInterfaces"]["NetworkInterface"][1]["Type"], "Secondary");
    let tags = vm["Tags"]["Tag"].to_string();
    for part in ["peerpod.digest", &wish.digest(), "\"team\"", "blue"] {
        assert!(tags.contains(part), "{part} in {tags}");
    }
}
