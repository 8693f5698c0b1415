//! Checks each source of access keys against the fake, which checks every signature.

use std::path::PathBuf;

use peerpod_provider_api::Provider;
use peerpod_test_clouds::alibaba::{OIDC_PROVIDER, ROLE, SUBJECT};

use super::common::{Site, key, placed, request};

/// File with a token, removed at the end of its test.
struct File(PathBuf);

impl File {
    fn new(name: &str, text: &str) -> File {
        let path = std::env::temp_dir().join(format!("peerpod-alibaba-{name}-{}", std::process::id()));
        std::fs::write(&path, text).unwrap();
        File(path)
    }

    fn settings(&self) -> Vec<(&str, &str)> {
        let path = self.0.to_str().unwrap();
        vec![
            ("access-key-id", ""),
            ("secret-key", ""),
            ("role-arn", ROLE),
            ("oidc-provider-arn", OIDC_PROVIDER),
            ("oidc-token-file", path),
        ]
    }
}

impl Drop for File {
    fn drop(&mut self) {
        drop(std::fs::remove_file(&self.0));
    }
}

/// Settings of a node with a RAM role.
const NODE: [(&str, &str); 2] = [("access-key-id", ""), ("secret-key", "")];

#[tokio::test(flavor = "multi_thread")]
async fn a_key_a_service_account_and_the_nodes_role_sign_calls() {
    let site = Site::start().await;
    site.provider(&[]).list_owned().await.unwrap();
    assert_eq!(site.cloud.tokens(), 0, "a key of the settings needs no other");
    let file = File::new("sources", SUBJECT);
    site.provider(&file.settings()).list_owned().await.unwrap();
    site.provider(&NODE).list_owned().await.unwrap();
    assert_eq!(site.cloud.tokens(), 2);
    let actions = site.cloud.actions();
    for action in ["AssumeRoleWithOIDC", "metadata.token", "metadata.roles", "metadata.role"] {
        assert!(actions.contains(action), "{action} in {actions:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_ended_key_is_renewed_and_no_call_fails() {
    let site = Site::start().await;
    let file = File::new("renewed", SUBJECT);
    let provider = site.provider(&file.settings());
    let wish = placed(&*provider, &request("web-0")).await.unwrap();
    site.cloud.expire_tokens();
    provider.create(&wish, &key("key", 0)).await.unwrap();
    assert_eq!(site.cloud.tokens(), 2);
    // The file is read again.
    std::fs::write(&file.0, "another").unwrap();
    let other = site.provider(&file.settings());
    let error = other.list_owned().await.unwrap_err();
    let text = error.to_string();
    assert!(error.class() == "auth" && text.contains("AuthenticationFail.OIDCToken.Invalid"), "{text}");
    assert!(text.contains("trust in the OIDC provider") && !text.contains("another"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_key_is_named_with_its_remedy_and_without_its_secret() {
    let site = Site::start().await;
    for (setting, value, parts) in [
        ("secret-key", "not-the-secret", ["SignatureDoesNotMatch", "correct the secret key"]),
        ("access-key-id", "LTAInone", ["InvalidAccessKeyId.NotFound", "exists and is active"]),
    ] {
        let error = site.provider(&[(setting, value)]).preflight().await.unwrap_err();
        let text = error.to_string();
        assert_eq!(error.class(), "auth", "{text}");
        for part in parts {
            assert!(text.contains(part), "{part} in {text}");
        }
        assert!(!text.contains("not-the-secret"), "{text}");
    }
    let half = [&NODE[..], &[("role-arn", ROLE)]].concat();
    let error = site.provider(&half).list_owned().await.unwrap_err();
    assert!(error.class() == "auth" && error.to_string().contains("some are missing"), "{error}");
    let file = File::new("missing", SUBJECT);
    let mut settings = file.settings();
    settings.push(("oidc-token-file", "/nonexistent/token"));
    let error = site.provider(&settings).list_owned().await.unwrap_err();
    assert!(error.class() == "auth" && error.to_string().contains("/nonexistent/token"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn each_attempt_has_a_time_and_a_number_of_its_own() {
    let site = Site::start().await;
    let provider = site.provider(&[]);
    for _ in 0..3 {
        provider.list_owned().await.unwrap();
    }
    let calls = site.cloud.calls();
    let numbers: std::collections::BTreeSet<&str> =
        calls.iter().map(|call| call.request.header("x-acs-signature-nonce")).collect();
    assert_eq!(numbers.len(), calls.len());
    assert!(calls.iter().all(|call| call.request.header("x-acs-date").ends_with('Z')));
}
