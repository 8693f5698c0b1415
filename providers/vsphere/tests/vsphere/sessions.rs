//! Checks sessions and TLS: a session that has ended is renewed once, and no other server gets the password.

use std::net::{Ipv4Addr, TcpListener};

use peerpod_provider_api::Provider;
use peerpod_test_clouds::{Fault, Vcsim};
use serde_json::json;

use super::common::{Site, key, placed, request, says};

#[tokio::test(flavor = "multi_thread")]
async fn a_session_that_has_ended_is_renewed_once_for_all_callers() {
    let site = Site::start();
    let provider = site.provider(&[]);
    let wish = placed(&*provider, &request("web-0")).await.unwrap();
    provider.create(&wish, &key("session", 0)).await.unwrap();
    assert_eq!(site.vcsim.count("Login"), 1, "one login for all calls");
    site.vcsim.order(&json!({"op": "expire"}));
    let calls = (0..10).map(|number| {
        let (provider, wish) = (provider.clone(), wish.clone());
        async move { provider.create(&wish, &key("session", number)).await.map(drop) }
    });
    for done in futures_util::future::join_all(calls).await {
        done.unwrap();
    }
    assert_eq!((site.vcsim.count("Login"), site.vcsim.vms().len()), (2, 10));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_password_is_named_and_a_refused_session_is_not_renewed_for_ever() {
    let site = Site::start();
    let provider = site.provider(&[("password", "wrong")]);
    let error = provider.preflight().await.unwrap_err();
    says(&error, "auth", &["InvalidLogin", "provider.vsphere.username and password"]);
    assert!(!error.to_string().contains("wrong"), "{error}");
    let error = site.provider(&[("password", "")]).preflight().await.unwrap_err();
    says(&error, "auth", &["there is no password", "PEERPOD_PROVIDER_VSPHERE_PASSWORD"]);
    let provider = site.provider(&[]);
    provider.preflight().await.unwrap();
    site.vcsim.forget_calls();
    site.vcsim.fail("RetrievePropertiesEx", Fault::refuse(500, "NotAuthenticated", ""), 10);
    let wish = placed(&*provider, &request("web-0")).await.unwrap();
    let error = provider.create(&wish, &key("refused", 0)).await.unwrap_err();
    says(&error, "auth", &["NotAuthenticated"]);
    assert!(site.vcsim.count("Login") <= 1, "{:?}", site.vcsim.calls());
}

#[tokio::test(flavor = "multi_thread")]
async fn only_the_vcenter_with_the_fingerprint_gets_the_password() {
    let listener = || TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let site = Site { vcsim: Vcsim::start_on(listener(), true).unwrap() };
    let (url, fingerprint) = (site.vcsim.said("url").to_owned(), site.vcsim.said("fingerprint").to_owned());
    let found =
        site.provider(&[("url", &url), ("fingerprint-sha256", &fingerprint)]).preflight().await.unwrap();
    assert!(!found.warnings.iter().any(|text| text.contains("use https")), "{found:?}");
    let other = "ab".repeat(32);
    let error =
        site.provider(&[("url", &url), ("fingerprint-sha256", &other)]).preflight().await.unwrap_err();
    says(&error, "transient", &["was not sent", &fingerprint, "another one is configured"]);
    let error = site.provider(&[("url", &url)]).preflight().await.unwrap_err();
    says(&error, "transient", &["was not sent", "certificate"]);
}
