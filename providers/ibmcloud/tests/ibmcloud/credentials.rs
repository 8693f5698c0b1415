//! Checks both kinds of credentials against the fake's IAM.

use std::path::PathBuf;

use peerpod_provider_api::Provider;
use peerpod_test_clouds::iam::{CR_TOKEN, PROFILE};

use super::common::Site;

#[tokio::test(flavor = "multi_thread")]
async fn a_trusted_profile_accepts_the_projected_token() {
    let site = Site::start().await;
    let file = File::new(CR_TOKEN);
    let path = file.0.to_str().unwrap();
    let profile = [("api-key", ""), ("iam-profile-id", PROFILE), ("compute-resource-token-file", path)];
    let provider = site.provider(&profile);
    provider.list_owned().await.unwrap();
    // The token rotates: the file is read again at each renewal.
    std::fs::write(path, "another").unwrap();
    site.cloud.expire_tokens();
    let error = provider.list_owned().await.unwrap_err();
    assert!(error.class() == "auth" && error.to_string().contains("BXNIM0436E"), "{error}");
    let missing = [profile[0], profile[1], ("compute-resource-token-file", "/nonexistent/token")];
    let error = site.provider(&missing).list_owned().await.unwrap_err();
    assert!(error.class() == "auth" && error.to_string().contains("/nonexistent/token"), "{error}");
    let unknown = [profile[0], ("iam-profile-id", "Profile-0"), profile[2]];
    std::fs::write(path, CR_TOKEN).unwrap();
    let error = site.provider(&unknown).list_owned().await.unwrap_err();
    assert!(error.to_string().contains("BXNIM0513E"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_key_is_named_with_a_remedy_and_not_shown() {
    let site = Site::start().await;
    let error = site.provider(&[("api-key", "hush")]).list_owned().await.unwrap_err();
    let text = error.to_string();
    assert!(error.class() == "auth" && !text.contains("hush"), "{text}");
    for part in ["BXNIM0415E", "Provided API key could not be found", "check that the API key"] {
        assert!(text.contains(part), "{part} in {text}");
    }
    let error = site.provider(&[("api-key", "")]).list_owned().await.unwrap_err();
    assert!(error.class() == "auth" && error.to_string().contains("iam-profile-id"), "{error}");
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

struct File(PathBuf);

impl File {
    fn new(text: &str) -> File {
        let path = std::env::temp_dir().join(format!("peerpod-ibmcloud-{}-token", std::process::id()));
        std::fs::write(&path, text).unwrap();
        File(path)
    }
}

impl Drop for File {
    fn drop(&mut self) {
        drop(std::fs::remove_file(&self.0));
    }
}
