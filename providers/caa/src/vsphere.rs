//! Table of the variables for vSphere. Names and defaults: cloud-api-adaptor at `91bfba95^`, the last with this provider.

use crate::{Converted, Form, Row, Value, Variables, get, is_true};

/// [`convert`] handles the variables that need more than that.
const TABLE: &[Row] = &[
    ("GOVC_URL", "url", Form::Text),
    ("GOVC_USERNAME", "username", Form::Text),
    ("GOVC_PASSWORD", "password", Form::Text),
    ("GOVC_TEMPLATE", "template", Form::Text),
    ("GOVC_DATACENTER", "datacenter", Form::Text),
    ("GOVC_FOLDER", "folder", Form::Text),
    ("GOVC_VCLUSTER", "cluster", Form::Text),
    ("GOVC_DRS", "drs", Form::Flag),
    ("GOVC_HOST", "hosts", Form::List),
    ("GOVC_DATASTORE", "datastores", Form::List),
];

/// Converts the variables of a cloud-api-adaptor for vSphere; ignores all other variables.
pub(crate) fn convert(variables: &Variables) -> Converted {
    let mut converted = Converted::by_table("provider.vsphere", TABLE, variables);
    for key in ["datacenter", "folder", "template"] {
        if let Some(Value::String(path)) = converted.settings.get_mut(key) {
            *path = path.trim_matches('/').to_owned();
        }
    }
    if get(variables, "GOVC_DRS").is_some_and(is_true) && converted.settings.remove("hosts").is_some() {
        converted
            .lose("GOVC_HOST", "DRS chooses the host, and this one was ignored; set drs to false to use it");
    }
    converted.lose_all(
        variables,
        &[(
            "GOVC_THUMBPRINT",
            "it is a SHA-1, which can be forged; set provider.vsphere.fingerprint-sha256 or ca-file",
        )],
    );
    converted
}
