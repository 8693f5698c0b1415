//! Checks that the vCenter has the objects that the settings name, and that the account may see it. Returns all failures
//! in one error. May call the look-ups of facts and lists. Makes nothing.

use peerpod_provider_api::{Error, Preflight};
use peerpod_provider_cloud::refusal::together;
use peerpod_provider_cloud::until;

use crate::Vsphere;
use crate::facts::VsphereFacts;

pub(crate) async fn run(vsphere: &Vsphere) -> Result<Preflight, Error> {
    let connected = vsphere.connected()?;
    // Without a session all calls would fail for one reason.
    let product = connected.vcenter.services().await?.product.clone();
    let facts = vsphere.facts(true).await;
    let listed = connected.folder.all_of(&vsphere.owner, until()).await.map_err(Error::from);
    let errors = [facts.as_ref().err(), listed.as_ref().err()];
    let errors: Vec<Error> = errors.into_iter().flatten().cloned().collect();
    if !errors.is_empty() {
        return Err(together(errors));
    }
    let (facts, listed) = (facts?, listed?);
    let mut found = Preflight { facts: vec![product], ..Preflight::default() };
    found.facts.extend(said(vsphere, &facts));
    found.facts.push(format!("{} VMs of this node", listed.len()));
    found.warnings = warnings(vsphere, &facts);
    Ok(found)
}

fn said(vsphere: &Vsphere, facts: &VsphereFacts) -> [String; 3] {
    let places: Vec<&str> = facts.places.iter().map(|place| place.name.as_str()).collect();
    let clones = if facts.template.snapshot.is_some() { "linked" } else { "full" };
    [
        format!("folder {}", vsphere.config.folder_path()),
        format!("template {}, {clones} clones", facts.template.path),
        format!("VMs on {}", places.join(", ")),
    ]
}

fn warnings(vsphere: &Vsphere, facts: &VsphereFacts) -> Vec<String> {
    let template = &facts.template;
    let path = &template.path;
    let all = [
        (
            vsphere.config.url.as_ref().is_some_and(|url| url.scheme() == "http"),
            "provider.vsphere.url has no TLS: the network reads the password; use https".to_owned(),
        ),
        (
            template.snapshot.is_none(),
            format!("the template {path} has no snapshot, so each VM copies its whole disk; make a snapshot"),
        ),
        (
            !template.has_vmci,
            format!(
                "the template {path} has no VMCI device, so its VMs find no user-data; use hardware version 7 or later"
            ),
        ),
        (
            !template.is_efi,
            format!("the template {path} starts by BIOS, and the image needs UEFI; set its firmware to EFI"),
        ),
        (
            template.nic.is_none(),
            format!("the template {path} has no NIC, so its VMs reach no node; add one"),
        ),
    ];
    all.into_iter().filter(|(is_so, _)| *is_so).map(|(_, text)| text).collect()
}
