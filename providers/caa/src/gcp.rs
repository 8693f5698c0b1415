//! Table of the variables for Google Cloud.

use peerpod_provider_api::Confidential;

use crate::{Converted, Form, Row, STAYS, Variables, get, is_true};

/// [`convert`] handles the variables that need more than that.
const TABLE: &[Row] = &[
    ("GCP_CREDENTIALS", "credentials", Form::Text),
    ("GCP_PROJECT_ID", "project-id", Form::Text),
    ("GCP_ZONE", "zones", Form::List),
    ("PODVM_IMAGE_NAME", "image", Form::Text),
    ("GCP_MACHINE_TYPE", "instance-type", Form::Text),
    ("GCP_INSTANCE_TYPES", "instance-types", Form::List),
    ("GCP_NETWORK", "network", Form::Text),
    ("GCP_SUBNETWORK", "subnetwork", Form::Text),
    ("GCP_DISK_TYPE", "root-volume-type", Form::Text),
    ("ROOT_VOLUME_SIZE", "root-volume-size", Form::Number),
    ("USE_PUBLIC_IP", "use-public-ip", Form::Flag),
    ("TAGS", "resource-manager-tags", Form::List),
];

/// Defaults of the cloud-api-adaptor that are not those of this provider.
const DEFAULTS: &[(&str, &str)] = &[("instance-type", "e2-medium"), ("root-volume-type", "pd-standard")];

/// Converts the variables of a cloud-api-adaptor for Google Cloud; ignores all other variables.
pub(crate) fn convert(variables: &Variables) -> Converted {
    let mut converted = Converted::by_table("provider.gcp", TABLE, variables);
    for (key, default) in DEFAULTS {
        converted.settings.entry((*key).to_owned()).or_insert_with(|| (*default).into());
    }
    converted.keep_tags("resource-manager-tags", |_, value| {
        value.is_empty().then(|| "is not key=value; correct it".to_owned())
    });
    confidential(&mut converted, variables);
    // A path.
    converted.lose_all(variables, &[("GOOGLE_APPLICATION_CREDENTIALS", STAYS)]);
    converted
}

/// Converts the technology, which the cloud-api-adaptor ignores for plain VMs and demands for others.
fn confidential(converted: &mut Converted, variables: &Variables) {
    for name in ["DISABLECVM", "GCP_CONFIDENTIAL_TYPE"] {
        converted.recognise(variables, name);
    }
    if get(variables, "DISABLECVM").is_some_and(is_true) {
        converted.settings.insert("confidential".to_owned(), "none".into());
        return;
    }
    let wanted = get(variables, "GCP_CONFIDENTIAL_TYPE").map(str::to_ascii_lowercase);
    let technology = wanted.as_deref().and_then(Confidential::from_word);
    let technology = technology.filter(|one| *one != Confidential::SecureExecution);
    match (technology, wanted) {
        (Some(technology), _) => {
            converted.settings.insert("confidential".to_owned(), technology.word().into());
        }
        (None, Some(wanted)) => {
            converted.lose(
                "GCP_CONFIDENTIAL_TYPE",
                format!("`{wanted}` is none of SEV, SEV_SNP and TDX; choose one"),
            );
        }
        (None, None) => converted.lose(
            "GCP_CONFIDENTIAL_TYPE",
            "without it no VM was made; set provider.gcp.confidential to none, or to sev, sev_snp or tdx and \
             instance-type to one that has it",
        ),
    }
}
