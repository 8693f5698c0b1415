//! Explains missing credentials where the SDK returns only "no providers in chain provided credentials". Pure: the
//! caller passes in the environment and the files.

use std::io;

/// Returns one sentence for each incomplete or unusable source of credentials in the environment, with its remedy.
/// Names variables and paths, never their secrets.
pub(crate) fn missing(
    env: &dyn Fn(&str) -> Option<String>,
    unreadable: &dyn Fn(&str) -> Option<io::Error>,
) -> String {
    let get = |name: &str| env(name).filter(|value| !value.is_empty());
    let mut found = Vec::new();
    match (get("AWS_ACCESS_KEY_ID").is_some(), get("AWS_SECRET_ACCESS_KEY").is_some()) {
        (true, false) => {
            found.push("AWS_ACCESS_KEY_ID is set and AWS_SECRET_ACCESS_KEY is not; set both".to_owned())
        }
        (false, true) => {
            found.push("AWS_SECRET_ACCESS_KEY is set and AWS_ACCESS_KEY_ID is not; set both".to_owned())
        }
        _ => {}
    }
    let token_file = get("AWS_WEB_IDENTITY_TOKEN_FILE");
    match (get("AWS_ROLE_ARN"), &token_file) {
        (Some(_), None) => found.push(
            "AWS_ROLE_ARN is set and AWS_WEB_IDENTITY_TOKEN_FILE is not; annotate the service account with \
             eks.amazonaws.com/role-arn and restart the pod"
                .to_owned(),
        ),
        (None, Some(_)) => {
            found.push("AWS_WEB_IDENTITY_TOKEN_FILE is set and AWS_ROLE_ARN is not; set both".to_owned());
        }
        (Some(role), Some(file)) => match unreadable(file) {
            Some(error) => found.push(format!(
                "the web identity token {file} cannot be read: {error}; mount the service account's token there"
            )),
            None => found.push(format!(
                "the role {role} could not be assumed with the service account's token; check the role's trust policy \
                 and that STS can be reached"
            )),
        },
        (None, None) => {}
    }
    if let Some(uri) = get("AWS_CONTAINER_CREDENTIALS_FULL_URI") {
        match get("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE") {
            Some(file) => {
                if let Some(error) = unreadable(&file) {
                    found.push(format!(
                        "the pod identity token {file} cannot be read: {error}; restart the pod"
                    ));
                } else {
                    found.push(format!(
                        "the pod identity agent at {uri} gave nothing; check that it runs on the node"
                    ));
                }
            }
            None => found.push(
                "AWS_CONTAINER_CREDENTIALS_FULL_URI is set without a token file; restart the pod".to_owned(),
            ),
        }
    }
    if let Some(profile) = get("AWS_PROFILE") {
        let file = get("AWS_SHARED_CREDENTIALS_FILE").unwrap_or_else(|| "~/.aws/credentials".to_owned());
        found.push(format!("the profile {profile} is not in {file} or has no keys"));
    }
    if found.is_empty() {
        found.push(
            "there is no access key, profile, web identity (IRSA) or pod identity, and the node's metadata service gave \
             no role; give provider.aws.access-key-id and secret-key, or give the node or our service account a role (a \
             pod needs a hop limit of 2 on the node, or the host's network)"
                .to_owned(),
        );
    }
    found.join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(env: &[(&str, &str)]) -> String {
        let find =
            |name: &str| env.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
        missing(&find, &|path| path.contains("absent").then(|| io::ErrorKind::NotFound.into()))
    }

    #[test]
    fn half_a_pair_is_reported_with_the_missing_half() {
        let cases: [(&[(&str, &str)], &str); 9] = [
            (&[], "hop limit of 2"),
            (&[("AWS_ACCESS_KEY_ID", "AKIA")], "AWS_SECRET_ACCESS_KEY is not; set both"),
            (&[("AWS_SECRET_ACCESS_KEY", "s")], "AWS_ACCESS_KEY_ID is not; set both"),
            (&[("AWS_ROLE_ARN", "arn:r")], "eks.amazonaws.com/role-arn"),
            (&[("AWS_WEB_IDENTITY_TOKEN_FILE", "/t")], "AWS_ROLE_ARN is not"),
            (
                &[("AWS_ROLE_ARN", "arn:r"), ("AWS_WEB_IDENTITY_TOKEN_FILE", "/absent")],
                "/absent cannot be read",
            ),
            (&[("AWS_ROLE_ARN", "arn:r"), ("AWS_WEB_IDENTITY_TOKEN_FILE", "/t")], "trust policy"),
            (
                &[
                    ("AWS_CONTAINER_CREDENTIALS_FULL_URI", "http://169.254.170.23/v1"),
                    ("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", "/absent"),
                ],
                "pod identity token /absent",
            ),
            (&[("AWS_PROFILE", "blue")], "profile blue"),
        ];
        for (env, part) in cases {
            let told = told(env);
            assert!(told.contains(part), "{part} in {told}");
        }
    }

    #[test]
    fn no_secret_is_repeated() {
        let told = told(&[("AWS_SECRET_ACCESS_KEY", "hush"), ("AWS_SESSION_TOKEN", "hush")]);
        assert!(!told.contains("hush"), "{told}");
    }
}
