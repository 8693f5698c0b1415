//! Reads the end of a VM's console: a file beside its disk. May get files of datastores, and call the looks.

use peerpod_provider_api::{Error, InstanceId};
use peerpod_provider_cloud::ApiCall;

use crate::Vsphere;
use crate::volumes;

/// Returns at most the last `limit` bytes of the console.
pub(crate) async fn tail(vsphere: &Vsphere, id: &InstanceId, limit: usize) -> Result<Vec<u8>, Error> {
    let what = format!("console of VM {id}");
    let vm = vsphere.wait_for(id, &what, |_| true).await?;
    let gone = || Error::not_found(format!("{what}: the VM is gone"));
    let devices = volumes::devices(vsphere, &vm, &what).await?.ok_or_else(gone)?;
    let file = devices.console.as_deref().and_then(|file| file.strip_prefix('[')?.split_once("] "));
    // It was made while the setting was off.
    let Some((datastore, path)) = file else { return Ok(Vec::new()) };
    let call = ApiCall::new("GET /folder", id.as_str(), &what);
    let place = (vsphere.config.datacenter.as_str(), datastore, path);
    let text = vsphere.connected()?.vcenter.file(call, place, limit).await?.unwrap_or_default();
    Ok(text.get(text.len().saturating_sub(limit)..).unwrap_or_default().to_vec())
}
