//! Parts that the services of IBM Cloud share: the settings of IAM, its token endpoint, and user tags. Reads configuration,
//! touches nothing else.

use std::collections::BTreeMap;

use peerpod_base::config::Reader;
use peerpod_provider_api::Error;
use peerpod_provider_cloud::{Alphabet, settings};
use reqwest::Url;
use serde_json::Value;

use crate::hosts::Hosts;

/// URL of IAM.
pub const IAM: &str = "https://iam.cloud.ibm.com";

/// User tags that IBM Cloud accepts: `name:value` of at most 128 characters, in which capital letters become small ones.
pub const TAGS: Alphabet = Alphabet {
    cloud: "IBM Cloud",
    max_marks: 100,
    max_name: 32,
    max_value: 95,
    name: |c| c.is_ascii_lowercase() || c.is_ascii_digit() || "-.".contains(c),
    value: |c| c.is_ascii_lowercase() || c.is_ascii_digit() || "-.".contains(c),
    escapes: true,
    reserved: &[],
    reserves_values: false,
    shown: None,
};

/// Returns tags as IBM writes them.
pub fn tags(tags: &BTreeMap<String, String>) -> Vec<String> {
    tags.iter().map(|(name, value)| format!("{name}:{value}")).collect()
}

/// Reads tags as IBM writes them. Those of another form are left out.
pub fn read_tags(tags: &[Value]) -> BTreeMap<String, String> {
    let pairs = tags.iter().filter_map(|tag| tag.as_str()?.split_once(':'));
    pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

/// Reads `iam-endpoint`: the URL of IAM.
pub fn iam(section: &mut Reader) -> String {
    let url: String = section.get("iam-endpoint", IAM, "URL of IAM, for a private endpoint");
    if !settings::is_secret_safe(&url) {
        section.mistake("iam-endpoint", format!("not a URL; write it like {IAM}"));
    }
    url
}

/// Returns the token endpoint of IAM at this URL, which may have the endpoint's path, as in the settings of a
/// cloud-api-adaptor.
///
/// # Errors
/// [`Error::Invalid`] for a text that is no URL.
pub fn token_url(iam: &str) -> Result<Url, Error> {
    let iam = iam.trim_end_matches('/');
    let hosts = Hosts::parse(iam.strip_suffix("/identity/token").unwrap_or(iam), &[])?;
    Ok(hosts.path(["identity", "token"]))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_token_endpoint_is_that_of_any_form_of_the_setting() {
        for iam in [IAM, "https://iam.cloud.ibm.com/", "https://iam.cloud.ibm.com/identity/token"] {
            assert_eq!(token_url(iam).unwrap().as_str(), "https://iam.cloud.ibm.com/identity/token");
        }
        assert!(token_url("iam").is_err());
    }

    #[test]
    fn tags_are_pairs_and_others_are_left_out() {
        let pairs = BTreeMap::from([("a".to_owned(), "b:c".to_owned())]);
        assert_eq!(tags(&pairs), ["a:b:c"]);
        assert_eq!(read_tags(&[json!("a:b:c"), json!("odd"), json!(5)]), pairs);
    }
}
