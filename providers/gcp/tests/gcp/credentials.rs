//! Checks each source of access tokens against the fake's token endpoints.

use std::path::PathBuf;

use peerpod_provider_api::Provider;
use peerpod_test_clouds::gcp::{SUBJECT, external_account, service_account};

use super::common::{Site, key, placed, request};

/// Folder of a test, removed at its end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("peerpod-gcp-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    fn write(&self, name: &str, text: &str) -> String {
        let path = self.0.join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        drop(std::fs::remove_dir_all(&self.0));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_a_file_a_federated_identity_and_the_metadata_service_give_tokens() {
    let site = Site::start().await;
    let endpoint = site.cloud.endpoint();
    let folder = Folder::new("sources");
    let subject = folder.write("subject", SUBJECT);
    let key = service_account(&endpoint);
    let file = folder.write("key.json", &key);
    let federated = external_account(&endpoint, &subject, false);
    let acting = folder.write("acting.json", &external_account(&endpoint, &subject, true));
    for (setting, value) in [
        ("credentials", key.as_str()),
        ("credentials-file", &file),
        ("credentials", &federated),
        ("credentials-file", &acting),
        ("credentials", ""),
    ] {
        let before = site.cloud.tokens();
        site.provider(&[(setting, value)]).list_owned().await.unwrap();
        assert!(site.cloud.tokens() > before, "{setting}");
    }
    let actions = site.cloud.actions();
    for action in ["token.jwt", "token.exchange", "token.impersonate", "token.metadata"] {
        assert!(actions.contains(action), "{action} in {actions:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_identity_is_named_with_its_remedy_and_without_its_token() {
    let site = Site::start().await;
    let folder = Folder::new("refused");
    let subject = folder.write("subject", "not-the-token");
    let file = external_account(&site.cloud.endpoint(), &subject, false);
    let error = site.provider(&[("credentials", &file)]).preflight().await.unwrap_err();
    let text = error.to_string();
    assert_eq!(error.class(), "auth", "{text}");
    assert!(text.contains("attribute condition") && text.contains("workload identity federation"), "{text}");
    assert!(!text.contains("not-the-token"), "{text}");
    let missing = folder.0.join("none.json");
    let provider = site.provider(&[("credentials-file", missing.to_str().unwrap())]);
    let text = provider.list_owned().await.unwrap_err().to_string();
    assert!(text.contains("none.json") && text.contains("mount them there"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_ended_token_is_renewed_and_no_call_fails() {
    let site = Site::start().await;
    let provider = site.provider(&[]);
    let wish = placed(&*provider, &request("web-0")).await.unwrap();
    provider.create(&wish, &key("token", 0)).await.unwrap();
    let before = site.cloud.tokens();
    site.cloud.expire_tokens();
    provider.list_owned().await.unwrap();
    assert!(site.cloud.tokens() > before);
}
