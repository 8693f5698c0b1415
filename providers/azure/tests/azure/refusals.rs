//! Checks that every refusal of Azure has its class, names cause and remedy, and leaves nothing.

use std::sync::Arc;
use std::time::Duration;

use peerpod_provider_api::{CreateRequest, Error, InstanceId, Market, OwnedState, Owner, Provider};
use peerpod_provider_azure::AzureProvider;
use peerpod_test_clouds::{Answer, Fault};
use serde_json::json;

use super::common::{Site, TYPE, key, owner, placed, request, stranger};

const CREATE: &str = "VirtualMachines_CreateOrUpdate";

fn says(error: &Error, class: &str, parts: &[&str]) {
    assert_eq!(error.class(), class, "{error}");
    let text = error.to_string();
    for part in parts {
        assert!(text.contains(part), "{part} in {text}");
    }
    assert!(!text.contains("userData") && !text.contains("not a secret"), "{text}");
}

/// Creates a VM as the node does, once.
async fn once(
    provider: &Arc<AzureProvider>,
    request: &CreateRequest,
    number: u32,
) -> Result<InstanceId, Error> {
    let request = placed(&**provider, request).await?;
    provider.create(&request, &key("refused", number)).await.map(|made| made.id)
}

#[tokio::test(flavor = "multi_thread")]
async fn each_code_has_its_class_and_remedy_and_leaves_nothing() {
    let site = Site::start().await;
    let quota = "Operation could not be completed as it results in exceeding approved standardDSv5Family Cores quota.";
    let codes = [
        ("OperationNotAllowed", quota, 409, "capacity", "higher quota"),
        ("QuotaExceeded", "Because.", 400, "quota", "higher quota"),
        ("AllocationFailed", "Because.", 409, "capacity", "more instance-types or zones"),
        (
            "OverconstrainedZonalAllocationRequest",
            "Because.",
            409,
            "capacity",
            "more instance-types or zones",
        ),
        ("AuthorizationFailed", "Because.", 403, "auth", "providers/azure/role.json"),
        ("LinkedAuthorizationFailed", "Because.", 403, "auth", "providers/azure/role.json"),
        ("ResourceGroupNotFound", "Because.", 404, "invalid", "resource-group"),
        ("InvalidResourceReference", "Because.", 400, "invalid", "subnet-id"),
        ("PlatformImageNotFound", "Because.", 404, "invalid", "image-id"),
        ("ResourceNotFound", "Because.", 404, "invalid", "correct the settings"),
        ("RequestDisallowedByPolicy", "Because.", 403, "invalid", "the policy"),
        ("InvalidParameter", "Because.", 400, "invalid", "correct the settings"),
        ("AnotherOperationInProgress", "Because.", 409, "transient", "tried again"),
        ("InternalServerError", "Because.", 500, "transient", "tried again"),
        ("ServerTimeout", "Because.", 503, "transient", "tried again"),
    ];
    for late in [false, true] {
        for (number, (code, message, status, class, remedy)) in (0..).zip(codes) {
            // After acceptance there is no status, and only a decision of Compute's.
            if late
                && !matches!(
                    code,
                    "OperationNotAllowed" | "AllocationFailed" | "OverconstrainedZonalAllocationRequest"
                )
            {
                continue;
            }
            let provider = site.provider(&[("market", "on-demand"), ("instance-types", "Standard_DC2as_v5")]);
            let fault = match late {
                true => Fault::refuse_late(code, message),
                false => Fault::refuse(status, code, message),
            };
            site.cloud.fail(CREATE, fault, 1);
            let error = once(&provider, &request("web-0"), number + 100 * u32::from(late)).await.unwrap_err();
            says(&error, class, &["create of web-0", code, message.trim_end_matches('.'), remedy]);
            assert_eq!(site.parts(), (0, 0, 0), "{code}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_exhausted_offering_leads_to_the_next_one_until_all_are() {
    let site = Site::start().await;
    site.cloud.set_stock("*", "*", "*", 0);
    let provider = site.provider(&[]);
    let mut tried = Vec::new();
    let error = loop {
        let placed = match placed(&*provider, &request("web-0")).await {
            Ok(placed) => placed,
            Err(error) => break error,
        };
        let error =
            provider.create(&placed, &key("tried", u32::try_from(tried.len()).unwrap())).await.unwrap_err();
        assert_eq!(error.class(), "capacity", "{error}");
        tried.push(placed.placement.unwrap());
    };
    let markets: Vec<bool> = tried.iter().map(|one| one.as_str().contains("spot")).collect();
    assert_eq!(markets, [true, true, true, false, false, false], "spot first, in all zones: {tried:?}");
    says(&error, "capacity", &["create of web-0", TYPE, "SkuNotAvailable", "ZonalAllocationFailed"]);
    assert_eq!(site.parts(), (0, 0, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_quota_of_the_region_is_one_refusal_for_all_offerings() {
    let site = Site::start().await;
    site.cloud.with(|azure, _| azure.quota = Some(0));
    let provider = site.provider(&[("market", "on-demand"), ("instance-types", "Standard_DC2as_v5")]);
    let error = once(&provider, &request("web-0"), 0).await.unwrap_err();
    says(&error, "quota", &["create of web-0", "Total Regional Cores quota", "ask for a higher quota"]);
    let error = once(&provider, &request("web-1"), 1).await.unwrap_err();
    says(&error, "capacity", &["create of web-1", "ask for a higher quota"]);
    assert_eq!(site.cloud.count(Some(CREATE)), 1, "the next pod costs no call");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_throttled_create_is_sent_again_later_and_makes_one_vm() {
    let site = Site::start().await;
    let provider = site.provider(&[]);
    let throttle =
        Answer::json(429, &json!({"error": {"code": "OperationNotAllowed", "message": "too many"}}));
    site.cloud.fail(CREATE, Fault::Answer(throttle.header("retry-after", "0")), 2);
    once(&provider, &request("web-0"), 0).await.unwrap();
    assert_eq!((site.machines().len(), site.cloud.count(Some(CREATE))), (1, 3));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_answer_is_transient_and_the_same_call_finds_the_vm() {
    let site = Site::start().await;
    let provider = site.provider(&[]);
    let wish = placed(&*provider, &request("web-0")).await.unwrap();
    for fault in [Fault::LostAnswer, Fault::Reset] {
        site.cloud.fail(CREATE, fault, 1);
        let error = provider.create(&wish, &key("lost", 0)).await.unwrap_err();
        says(&error, "transient", &["create of web-0", "its effect is unknown"]);
    }
    let made = provider.create(&wish, &key("lost", 0)).await.unwrap();
    assert_eq!((site.machines().len(), made.chosen.instance_type.as_deref()), (1, Some(TYPE)));
    let other = CreateRequest { name: "web-1".to_owned(), ..wish };
    let error = provider.create(&other, &key("lost", 0)).await.unwrap_err();
    says(&error, "key_reused", &["create of web-1", "another request"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_expired_token_is_renewed_without_an_error() {
    let site = Site::start().await;
    let provider = site.provider(&[]);
    provider.list_owned().await.unwrap();
    site.cloud.expire_tokens();
    provider.list_owned().await.unwrap();
    assert_eq!(site.cloud.tokens(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_at_another_host_is_not_read() {
    let (site, other) = (Site::start().await, Site::start().await);
    let provider = site.provider(&[]);
    let link = format!("{}/subscriptions/x?$skiptoken=1", other.cloud.endpoint());
    for list in ["VirtualMachines_List", "NetworkInterfaces_List"] {
        let page = Answer::json(200, &json!({"value": [], "nextLink": link}));
        site.cloud.fail(list, Fault::Answer(page), 1);
        let error = provider.list_owned().await.unwrap_err();
        says(&error, "invalid", &["list our VMs", "the token is not sent there"]);
    }
    assert!(other.cloud.calls().is_empty());
    let odd = Answer::json(200, &json!({"items": []}));
    site.cloud.fail("VirtualMachines_List", Fault::Answer(odd), 1);
    says(&provider.list_owned().await.unwrap_err(), "transient", &["the answer has no list"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn preflight_reports_all_that_is_missing_at_once() {
    let site = Site::start().await;
    let found = site.provider(&[]).preflight().await.unwrap();
    assert_eq!(found.warnings, Vec::<String>::new());
    for part in ["westeurope", "quota cores: 0 of 1000 cores in use"] {
        assert!(found.facts.iter().any(|fact| fact.contains(part)), "{part}: {:?}", found.facts);
    }
    for right in ["Microsoft.Compute/skus/read", "Microsoft.Compute/galleries/images/read"] {
        site.cloud.deny(right);
    }
    let error = site.provider(&[]).preflight().await.unwrap_err();
    says(&error, "auth", &["look at the VM sizes", "look at the image", "providers/azure/role.json"]);
    site.cloud.heal();
    let unknown = [("instance-type", "Standard_Zz_v9"), ("subnet-id", &site_subnet("none"))];
    let error = site.provider(&unknown).preflight().await.unwrap_err();
    says(&error, "invalid", &["does not have Standard_Zz_v9", "set provider.azure.subnet-id"]);
    let generalized = peerpod_test_clouds::Azure::image("generalized");
    let found =
        site.provider(&[("image-id", &generalized), ("secure-boot", "true")]).preflight().await.unwrap();
    let warnings = found.warnings.join("\n");
    assert!(warnings.contains("publish it as specialized") && warnings.contains("unsigned"), "{warnings}");
    let plain = peerpod_test_clouds::Azure::image("plain");
    let settings =
        [("image-id", plain.as_str()), ("disable-cvm", ""), ("instance-type", "Standard_DC2as_v5")];
    let error = site.provider(&settings).preflight().await.unwrap_err();
    says(&error, "invalid", &["ConfidentialVmSupported", "disable-cvm"]);
    let error = site.provider(&[("client-secret", "wrong")]).preflight().await.unwrap_err();
    says(&error, "auth", &["AADSTS7000215", "check tenant-id, client-id"]);
}

fn site_subnet(name: &str) -> String {
    peerpod_test_clouds::Azure::subnet(name)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_rest_of_a_vm_is_listed_and_goes_and_a_strangers_stays() {
    let site = Site::start().await;
    let provider = site.provider(&[]);
    let stranger = site.provider_of(stranger(), &[]);
    site.cloud.with(|azure, _| azure.keeps_nics = true);
    let ours = once(&provider, &request("web-0"), 0).await.unwrap();
    let theirs = once(&stranger, &request("web-1"), 1).await.unwrap();
    provider.delete(&ours).await.unwrap();
    stranger.delete(&theirs).await.unwrap();
    assert_eq!(site.parts(), (0, 2, 0));
    let listed = provider.list_owned().await.unwrap();
    let seen: Vec<_> = listed.iter().map(|vm| (vm.id.clone(), vm.state, vm.key.clone())).collect();
    assert_eq!(seen, [(ours.clone(), OwnedState::Deleting, None)], "the interface alone");
    provider.delete(&theirs).await.unwrap();
    assert_eq!(site.parts().1, 2, "a stranger's interface stays");
    provider.delete(&ours).await.unwrap();
    assert_eq!(site.parts().1, 1);
    assert!(provider.list_owned().await.unwrap().is_empty());
    site.cloud.with(|azure, _| azure.keeps_disks = true);
    let again = once(&provider, &request("web-2"), 2).await.unwrap();
    provider.delete(&again).await.unwrap();
    assert_eq!(site.parts(), (0, 2, 1));
    let found = site.provider(&[]).preflight().await.unwrap();
    assert!(found.facts.iter().any(|fact| fact.starts_with("2 parts")), "{:?}", found.facts);
    assert_eq!(site.parts(), (0, 1, 0), "the stranger's interface is left");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_that_ends_by_itself_has_no_addresses() {
    let site = Site::start().await;
    let provider = site.provider(&[]);
    let id = once(&provider, &request("web-0"), 0).await.unwrap();
    assert_eq!(provider.addresses(&id).await.unwrap().len(), 1);
    site.cloud.with(|azure, _| {
        azure.vms.all_mut().for_each(|(_, vm)| vm.state = peerpod_test_clouds::azure::State::Stopped);
    });
    says(&provider.addresses(&id).await.unwrap_err(), "not_found", &["it has ended"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_create_before_its_deadline_returns_the_id_of_an_undecided_vm() {
    let site = Site::start().await;
    site.cloud.set_times(Duration::from_secs(3600), Duration::ZERO);
    let provider = site.provider(&[]);
    let wish = placed(&*provider, &request("web-0")).await.unwrap();
    let deadline = tokio::time::Instant::now() + Duration::from_secs(4);
    let key = key("open", 0);
    let create = provider.create(&wish, &key);
    let made = peerpod_provider_api::with_deadline(deadline, create).await.unwrap();
    let listed = provider.list_owned().await.unwrap();
    assert_eq!((listed.len(), &listed[0].id, listed[0].state), (1, &made.id, OwnedState::Pending));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_type_that_is_not_sold_on_spot_is_bought_on_demand() {
    let site = Site::start().await;
    let provider = site.provider(&[("instance-type", "Standard_B2s"), ("zones", "1,2")]);
    let wish = placed(&*provider, &request("web-0")).await.unwrap();
    let placement = wish.placement.clone().unwrap();
    assert!(
        placement.as_str().contains("on_demand") && placement.as_str().contains("\"1\""),
        "{placement:?}"
    );
    provider.create(&wish, &key("b", 0)).await.unwrap();
    let spot = CreateRequest { market: Some(Market::Spot), ..request("web-1") };
    let error = placed(&*provider, &spot).await.unwrap_err();
    says(&error, "capacity", &["does not sell this type on the spot market"]);
    let zone = CreateRequest { zones: vec!["westeurope-2".to_owned()], ..request("web-2") };
    says(&placed(&*provider, &zone).await.unwrap_err(), "invalid", &["nothing on offer fits"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_interface_that_azure_reserves_is_no_error_and_goes_later() {
    let site = Site::start().await;
    site.cloud.stop_time();
    site.cloud.with(|azure, _| {
        azure.keeps_nics = true;
        azure.nic_reserve = Duration::from_secs(180);
    });
    let provider = site.provider(&[]);
    let id = once(&provider, &request("web-0"), 0).await.unwrap();
    provider.delete(&id).await.unwrap();
    provider.delete(&id).await.unwrap();
    assert_eq!(provider.list_owned().await.unwrap().len(), 1, "the interface is still there");
    let found = site.provider(&[]).preflight().await.unwrap();
    assert!(!found.facts.iter().any(|fact| fact.contains("parts")), "{:?}", found.facts);
    site.cloud.advance(Duration::from_secs(181));
    provider.delete(&id).await.unwrap();
    assert!(provider.list_owned().await.unwrap().is_empty());
    assert_eq!(site.parts(), (0, 0, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_that_make_no_sense_end_in_errors_or_are_left_out() {
    let site = Site::start().await;
    let provider = site.provider(&[]);
    let id = once(&provider, &request("web-0"), 0).await.unwrap();
    let odd = [
        json!(null),
        json!([]),
        json!({"value": 5}),
        json!({"value": [null, 5, [], {"id": 7}, {"id": "/subscriptions/x"}], "nextLink": 5}),
        json!({"value": [{"id": id.as_str(), "properties": {"provisioningState": 1, "instanceView": []}}]}),
        json!({"id": id.as_str(), "properties": {"provisioningState": "x".repeat(100_000)}}),
    ];
    for body in &odd {
        for action in ["VirtualMachines_List", "NetworkInterfaces_List"] {
            site.cloud.fail(action, Fault::Answer(Answer::json(200, body)), 1);
            match provider.list_owned().await {
                Ok(owned) => assert!(owned.len() <= 1, "{owned:?}"),
                Err(error) => assert_eq!(error.class(), "transient", "{error}"),
            }
        }
        site.cloud.fail("VirtualMachines_Get", Fault::Answer(Answer::json(200, body)), 1);
        let error = provider.delete(&id).await.unwrap_err();
        assert_eq!(error.class(), "transient", "{error}");
        site.cloud.fail("Token", Fault::Answer(Answer::json(200, body)), 1);
        let error = site.provider(&[]).list_owned().await.unwrap_err();
        assert_eq!(error.class(), "transient", "{error}");
    }
    assert_eq!(site.machines().len(), 1, "no such answer deletes a VM");
    site.cloud.heal();
    for body in &odd {
        site.cloud.fail("ResourceSkus_List", Fault::Answer(Answer::json(200, body)), 1);
        let error = site.provider(&[]).preflight().await.unwrap_err();
        assert!(matches!(error.class(), "transient" | "invalid"), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_public_address_of_one_pod_goes_although_the_settings_have_none() {
    let site = Site::start().await;
    let provider = site.provider(&[]);
    site.cloud.with(|azure, _| azure.keeps_nics = true);
    let id = once(&provider, &CreateRequest { public_ip: true, ..request("web-0") }, 0).await.unwrap();
    let publics = || site.cloud.with(|azure, _| azure.public_ips.all().count());
    assert_eq!(publics(), 1);
    provider.delete(&id).await.unwrap();
    provider.delete(&id).await.unwrap();
    assert_eq!((site.parts().1, publics()), (0, 1), "the interface is gone, its address is left");
    site.cloud.fail(
        "PublicIPAddresses_Delete",
        Fault::refuse(400, "PublicIPAddressCannotBeDeleted", "in use"),
        1,
    );
    provider.preflight().await.unwrap();
    assert_eq!(publics(), 1, "a refusal is no error of the preflight");
    provider.preflight().await.unwrap();
    assert_eq!(publics(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn one_part_that_cannot_be_deleted_does_not_keep_the_others() {
    let site = Site::start().await;
    let provider = site.provider(&[]);
    site.cloud.with(|azure, _| (azure.keeps_nics, azure.keeps_disks) = (true, true));
    for number in 0..3 {
        let id = once(&provider, &request(&format!("web-{number}")), number).await.unwrap();
        provider.delete(&id).await.unwrap();
    }
    site.cloud.fail("NetworkInterfaces_Delete", Fault::refuse(409, "ScopeLocked", "locked"), 1);
    let found = site.provider(&[]).preflight().await.unwrap();
    assert!(found.warnings.iter().any(|warning| warning.contains("ScopeLocked")), "{:?}", found.warnings);
    assert_eq!(site.parts(), (0, 1, 0), "one is left");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_whose_name_azure_reserves_for_tags_finds_its_vms() {
    let site = Site::start().await;
    let owner =
        Owner { cluster_id: "azure-prod".to_owned(), node_name: "Windows-1".to_owned(), ..owner("n") };
    let provider = site.provider_of(owner, &[]);
    let id = once(&provider, &request("web-0"), 0).await.unwrap();
    assert_eq!(provider.list_owned().await.unwrap()[0].id, id);
    provider.delete(&id).await.unwrap();
    assert!(site.machines().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_limit_that_is_no_quota_of_cores_closes_no_offering() {
    let site = Site::start().await;
    let provider = site.provider(&[]);
    let disks = "The maximum number of data disks allowed to be attached to a VM of this size is 4.";
    for (number, (code, message)) in (0..).zip([("SubnetIsFull", "full"), ("OperationNotAllowed", disks)]) {
        site.cloud.fail(CREATE, Fault::refuse(409, code, message), 1);
        let error = once(&provider, &request("web-0"), number).await.unwrap_err();
        says(&error, "quota", &["create of web-0", message.trim_end_matches('.')]);
    }
    once(&provider, &request("web-1"), 9).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_that_azure_started_and_could_not_keep_counts_as_refused() {
    let site = Site::start().await;
    let provider = site.provider(&[("market", "on-demand")]);
    let wish = placed(&*provider, &request("web-0")).await.unwrap();
    let id = "/subscriptions/s/resourceGroups/g/providers/Microsoft.Compute/virtualMachines/pp-a";
    for (number, power) in (0..).zip(["deallocated", "running"]) {
        let statuses = json!([
            {"code": "ProvisioningState/failed/AllocationFailed", "message": "none left"},
            {"code": format!("PowerState/{power}")},
        ]);
        let view = json!({"provisioningState": "Failed", "instanceView": {"statuses": statuses}});
        let shown = Answer::json(200, &json!({"id": id, "properties": view}));
        site.cloud.fail("VirtualMachines_Get", Fault::Answer(shown), 1);
        let error = provider.create(&wish, &key("started", number)).await.unwrap_err();
        says(&error, "capacity", &["create of web-0", "AllocationFailed", "none left"]);
        assert_eq!(site.parts(), (0, 0, 0), "{power}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_vm_goes_although_its_operation_cannot_be_read() {
    let site = Site::start().await;
    let provider = site.provider(&[("market", "on-demand")]);
    let wish = placed(&*provider, &request("web-0")).await.unwrap();
    site.cloud.fail(CREATE, Fault::refuse_late("", ""), 1);
    site.cloud.fail("Operations_Get", Fault::refuse(403, "AuthorizationFailed", "no"), 1);
    let error = provider.create(&wish, &key("unread", 0)).await.unwrap_err();
    says(&error, "transient", &["create of web-0", "Azure gives no reason"]);
    assert_eq!(site.parts(), (0, 0, 0));
}
