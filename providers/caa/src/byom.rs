//! Table of the variables for machines that exist.

use crate::{Converted, Form, Row, Variables, get};

/// [`convert`] handles the variables that need more than that.
const TABLE: &[Row] = &[
    ("VM_POOL_IPS", "machines", Form::List),
    ("SSH_USERNAME", "username", Form::Text),
    ("SSH_PRIV_KEY_PATH", "private-key-file", Form::Text),
    ("SSH_HOST_KEY_ALLOWLIST_DIR", "host-keys-dir", Form::Text),
];

/// Variables without a counterpart, each with the reason and the remedy.
const LOST: &[(&str, &str)] = &[
    ("SSH_PUB_KEY_PATH", "the public key follows from the private key; remove it"),
    ("MAX_RANGE_IPS", "a pool may have 1024 machines, and a longer range is an error; remove it"),
    ("POOL_NAMESPACE", "machines keep their own claims; remove it"),
    ("POOL_CONFIGMAP_NAME", "machines keep their own claims; delete the ConfigMap"),
];

/// Converts the variables of a cloud-api-adaptor for machines that exist; ignores all other variables.
pub(crate) fn convert(variables: &Variables) -> Converted {
    let mut converted = Converted::by_table("provider.byom", TABLE, variables);
    let entry = converted.settings.entry("private-key-file".to_owned());
    let key = entry.or_insert_with(|| "/root/.ssh/id_rsa".into()).as_str().unwrap_or_default().to_owned();
    if key.ends_with("id_rsa") {
        let why = format!("`{key}`: RSA keys are not supported; make one by ssh-keygen -t ed25519");
        converted.lose("SSH_PRIV_KEY_PATH", why);
    }
    converted.recognise(variables, "SSH_TIMEOUT");
    let seconds = get(variables, "SSH_TIMEOUT")
        .map(|text| converted.number(text, "SSH_TIMEOUT", "provider.byom.connect-timeout"));
    // The default of the cloud-api-adaptor is 30 seconds.
    let seconds = seconds.flatten().unwrap_or_else(|| 30.into());
    converted.settings.insert("connect-timeout".to_owned(), format!("{seconds}s").into());
    if !converted.settings.contains_key("host-keys-dir") {
        converted.recognise(variables, "SSH_HOST_KEY_ALLOWLIST_DIR");
        let why = "every host key was accepted; give the host keys by provider.byom.known-hosts-file";
        converted.lose("SSH_HOST_KEY_ALLOWLIST_DIR", why);
    }
    converted.lose_all(variables, LOST);
    converted
}
