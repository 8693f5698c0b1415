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
    let found: Vec<String> =
        [access_key(&get), web_identity(&get, unreadable), pod_identity(&get, unreadable), profile(&get)]
            .into_iter()
            .flatten()
            .collect();
    if found.is_empty() {
        return "there is no access key, profile, web identity (IRSA) or pod identity, and the node's metadata service \
                gave no role; give provider.aws.access-key-id and secret-key, or give the node or our service account a \
                role (a pod needs a hop limit of 2 on the node, or the host's network)"
            .to_owned();
    }
    found.join("; ")
}

/// Returns the value of a variable that is not empty.
type Get<'a> = dyn Fn(&str) -> Option<String> + 'a;
/// Returns the reason why a file cannot be read.
type Unreadable<'a> = dyn Fn(&str) -> Option<io::Error> + 'a;

fn access_key(get: &Get<'_>) -> Option<String> {
    let (id, secret) = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY");
    let (set, missing) = match (get(id), get(secret)) {
        (Some(_), None) => (id, secret),
        (None, Some(_)) => (secret, id),
        _ => return None,
    };
    Some(format!("{set} is set and {missing} is not; set both"))
}

fn web_identity(get: &Get<'_>, unreadable: &Unreadable<'_>) -> Option<String> {
    let (role, file) = (get("AWS_ROLE_ARN"), get("AWS_WEB_IDENTITY_TOKEN_FILE"));
    let Some(role) = role else {
        return file
            .map(|_| "AWS_WEB_IDENTITY_TOKEN_FILE is set and AWS_ROLE_ARN is not; set both".to_owned());
    };
    let Some(file) = file else {
        return Some(
            "AWS_ROLE_ARN is set and AWS_WEB_IDENTITY_TOKEN_FILE is not; annotate the service account with \
             eks.amazonaws.com/role-arn and restart the pod"
                .to_owned(),
        );
    };
    Some(match unreadable(&file) {
        Some(error) => format!(
            "the web identity token {file} cannot be read: {error}; mount the service account's token there"
        ),
        None => format!(
            "the role {role} could not be assumed with the service account's token; check the role's trust policy and that \
             STS can be reached"
        ),
    })
}

fn pod_identity(get: &Get<'_>, unreadable: &Unreadable<'_>) -> Option<String> {
    let uri = get("AWS_CONTAINER_CREDENTIALS_FULL_URI")?;
    let Some(file) = get("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE") else {
        let text = "AWS_CONTAINER_CREDENTIALS_FULL_URI is set without a token file; restart the pod";
        return Some(text.to_owned());
    };
    Some(match unreadable(&file) {
        Some(error) => format!("the pod identity token {file} cannot be read: {error}; restart the pod"),
        None => format!("the pod identity agent at {uri} gave nothing; check that it runs on the node"),
    })
}

fn profile(get: &Get<'_>) -> Option<String> {
    let profile = get("AWS_PROFILE")?;
    let file = get("AWS_SHARED_CREDENTIALS_FILE").unwrap_or_else(|| "~/.aws/credentials".to_owned());
    Some(format!("the profile {profile} is not in {file} or has no keys"))
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
