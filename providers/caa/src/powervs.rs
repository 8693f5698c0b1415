//! Table of the variables for IBM Power Virtual Server.

use crate::{Converted, Form, Row, Variables, get};

/// [`convert`] handles the variables that need more than that.
const TABLE: &[Row] = &[
    ("IBMCLOUD_API_KEY", "api-key", Form::Text),
    ("POWERVS_ZONE", "zone", Form::Text),
    ("POWERVS_SERVICE_INSTANCE_ID", "workspace-id", Form::Text),
    ("POWERVS_NETWORK_ID", "network-id", Form::Text),
    ("POWERVS_IMAGE_ID", "image-id", Form::Text),
    ("POWERVS_SSH_KEY_NAME", "key-name", Form::Text),
    ("POWERVS_PROCESSOR_TYPE", "processor-type", Form::Text),
    ("POWERVS_SYSTEM_TYPE", "system-type", Form::Text),
    ("POWERVS_PROCESSORS", "processors", Form::Text),
    ("USE_PUBLIC_IP", "use-public-ip", Form::Flag),
];

/// Variables without a setting, each with the reason.
const LOST: &[(&str, &str)] =
    &[("POWERVS_BUILD_TIMEOUT", "node.boot-timeout is the limit of a whole start; set it to 20m")];

/// Converts the variables of a cloud-api-adaptor for PowerVS; ignores all other variables.
pub(crate) fn convert(variables: &Variables) -> Converted {
    let mut converted = Converted::by_table("provider.ibmcloud-powervs", TABLE, variables);
    converted.lose_all(variables, LOST);
    memory(&mut converted, variables);
    converted
}

/// Converts the memory, which is a decimal fraction in the cloud-api-adaptor.
fn memory(converted: &mut Converted, variables: &Variables) {
    const NAME: &str = "POWERVS_MEMORY";
    converted.recognise(variables, NAME);
    let Some(text) = get(variables, NAME) else { return };
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let is_number = fraction.bytes().all(|byte| byte.is_ascii_digit());
    let Some(whole) = whole.parse::<u32>().ok().filter(|_| is_number) else {
        return converted
            .lose(NAME, format!("`{text}` is no number; set provider.ibmcloud-powervs.memory-gib"));
    };
    let has_more = fraction.bytes().any(|byte| byte != b'0');
    let memory = whole.saturating_add(u32::from(has_more));
    if has_more {
        converted.lose(NAME, format!("`{text}` is written as {memory}: memory-gib is a whole number"));
    }
    converted.settings.insert("memory-gib".to_owned(), memory.into());
}
