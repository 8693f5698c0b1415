//! Checks the three kinds of credentials against the fake's issuers.

use std::path::PathBuf;

use peerpod_provider_api::Provider;
use peerpod_test_clouds::azure::ASSERTION;

use super::common::Site;

#[tokio::test(flavor = "multi_thread")]
async fn a_workload_identity_proves_itself_with_its_file() {
    let site = Site::start().await;
    let file = File::new(ASSERTION);
    let path = file.0.to_str().unwrap();
    let provider = site.provider(&[("client-secret", ""), ("federated-token-file", path)]);
    provider.list_owned().await.unwrap();
    std::fs::write(path, "another").unwrap();
    site.cloud.expire_tokens();
    let error = provider.list_owned().await.unwrap_err();
    assert!(error.class() == "auth" && error.to_string().contains("AADSTS700213"), "{error}");
    let missing = [("client-secret", ""), ("federated-token-file", "/nonexistent/token")];
    let error = site.provider(&missing).list_owned().await.unwrap_err();
    assert!(error.class() == "auth" && error.to_string().contains("/nonexistent/token"), "{error}");
    let half = [("client-secret", ""), ("client-id", ""), ("federated-token-file", path)];
    let error = site.provider(&half).list_owned().await.unwrap_err();
    assert!(error.class() == "auth" && error.to_string().contains("no tenant or no client"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_can_use_its_managed_identity() {
    let site = Site::start().await;
    for client in [true, false] {
        let mut settings = vec![("client-secret", ""), ("tenant-id", "")];
        if !client {
            settings.push(("client-id", ""));
        }
        site.provider(&settings).list_owned().await.unwrap();
    }
    assert_eq!(site.cloud.count(Some("ManagedIdentity")), 2);
    let unknown = [("client-secret", ""), ("client-id", "00000000-0000-0000-0000-000000000000")];
    let error = site.provider(&unknown).list_owned().await.unwrap_err();
    assert!(error.class() == "auth" && error.to_string().contains("Identity not found"), "{error}");
}

struct File(PathBuf);

impl File {
    fn new(text: &str) -> File {
        let path = std::env::temp_dir().join(format!("peerpod-azure-{}-token", std::process::id()));
        std::fs::write(&path, text).unwrap();
        File(path)
    }
}

impl Drop for File {
    fn drop(&mut self) {
        drop(std::fs::remove_file(&self.0));
    }
}
