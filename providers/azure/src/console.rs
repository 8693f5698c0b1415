//! Reads the serial console: Azure keeps it in storage of its own and gives a signed URL. May call Azure and that
//! storage.

use peerpod_provider_api::{Error, InstanceId};
use peerpod_provider_cloud::ApiCall;
use peerpod_provider_cloud::refusal::clip;
use peerpod_provider_rest::{Hosts, Method, Request, Url, read};

use crate::Azure;
use crate::client::COMPUTE;
use crate::volumes::short;

/// Returns the last `limit` bytes of a VM's console.
pub(crate) async fn tail(azure: &Azure, id: &InstanceId, limit: usize) -> Result<Vec<u8>, Error> {
    let what = format!("console of {}", short(id.as_str()));
    let arm = azure.arm()?;
    let gone = || Error::not_found(format!("{what}: there is no such VM of this subscription"));
    let vm = azure.vm_id(id)?.ok_or_else(gone)?;
    let path = format!("{}/retrieveBootDiagnosticsData", vm.text());
    let request = arm.request(Method::POST, &path, COMPUTE);
    let call = ApiCall::new("VirtualMachines_RetrieveBootDiagnosticsData", vm.name(), &what);
    let answer = arm.call(call, &request).await?.json();
    let Some(url) = read::text(&answer, "/serialConsoleLogBlobUri") else { return Ok(Vec::new()) };
    let log = fetch(azure, url).await.map_err(|error| error.during(&what))?;
    Ok(log.get(log.len().saturating_sub(limit)..).unwrap_or_default().to_vec())
}

/// Reads the log. Its URL has the right to read it, so the request has no token; but it must lead to Azure's storage.
async fn fetch(azure: &Azure, url: &str) -> Result<Vec<u8>, Error> {
    let arm = azure.arm()?;
    let storage = Hosts::new(arm.rest().hosts().base().clone(), azure.config.cloud.storage());
    let url: Url = storage.follow(url)?;
    let answer = arm.rest().http().send(&Request::get(url), None).await;
    let answer = answer.map_err(|lost| Error::transient(format!("read the log: {}", clip(lost.why()))))?;
    match answer.status() {
        200..=299 => Ok(answer.body().to_vec()),
        // The VM has written nothing yet.
        404 => Ok(Vec::new()),
        status => {
            Err(Error::transient(format!("read the log: the storage answers {status}; it is tried again")))
        }
    }
}
