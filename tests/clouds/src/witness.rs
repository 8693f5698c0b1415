//! Asks the vendors' models and clients, which [`crate`]'s `setup` makes once from PyPI and Go modules.
//!
//! * [`azure_models`], [`power_models`]: the Go models of Microsoft, and of IBM for PowerVS. They name each field of a
//!   request or an answer that they do not know.
//! * [`google_document`]: Google's discovery document. It checks paths, parameters, bodies and answers.
//! * [`alibaba_models`]: Alibaba Cloud's Python models and signer. They name each parameter and member that they do not
//!   know, and each signature that differs from theirs.
//! * [`ibm_models`]: the models of IBM's Python SDK. They name each field of a request or an answer that they do not know.
//! * [`vmware_models`]: the models of VMware's Python SDK. They name what they do not know of a SOAP request, and elements
//!   in another order.
//! * [`alibaba_client`], [`azure_client`], [`google_client`], [`ibm_client`], [`vmware_client`]: the vendors' Python
//!   clients, at a cloud's witness endpoint.
//!
//! These functions block; tests with a runtime of one thread need `spawn_blocking`.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use anyhow::{Context, ensure};
use serde_json::{Value, json};

use crate::azure::SUBSCRIPTION;
use crate::core::Call;
use crate::{Alibaba, Azure, Cloud, Gcp, IbmCloud, Vcsim};

/// Returns the types of Microsoft's models for the body and the answer of a call; empty: there is none.
fn azure_types(action: &str) -> (&'static str, &'static str) {
    match action {
        "VirtualMachines_CreateOrUpdate" => ("VirtualMachine", "VirtualMachine"),
        "VirtualMachines_Get" => ("", "VirtualMachine"),
        "VirtualMachines_Update" => ("VirtualMachineUpdate", "VirtualMachine"),
        "VirtualMachines_List" | "VirtualMachines_ListAll" => ("", "VirtualMachineListResult"),
        "VirtualMachines_InstanceView" => ("", "VirtualMachineInstanceView"),
        "VirtualMachines_AttachDetachDataDisks" => ("AttachDetachDataDisksRequest", "StorageProfile"),
        "VirtualMachines_RetrieveBootDiagnosticsData" => ("", "RetrieveBootDiagnosticsDataResult"),
        "NetworkInterfaces_CreateOrUpdate" => ("Interface", "Interface"),
        "NetworkInterfaces_UpdateTags" => ("TagsObject", "Interface"),
        "NetworkInterfaces_Get" => ("", "Interface"),
        "NetworkInterfaces_List" => ("", "InterfaceListResult"),
        "PublicIPAddresses_Get" => ("", "PublicIPAddress"),
        "PublicIPAddresses_List" => ("", "PublicIPAddressListResult"),
        "Disks_CreateOrUpdate" => ("Disk", "Disk"),
        "Disks_Get" => ("", "Disk"),
        "Disks_ListByResourceGroup" => ("", "DiskList"),
        "ResourceSkus_List" => ("", "ResourceSKUsResult"),
        "Usage_List" => ("", "ListUsagesResult"),
        "GalleryImages_Get" => ("", "GalleryImage"),
        "GalleryImageVersions_Get" => ("", "GalleryImageVersion"),
        "CommunityGalleryImages_Get" => ("", "CommunityGalleryImage"),
        "CommunityGalleryImageVersions_Get" => ("", "CommunityGalleryImageVersion"),
        "Subnets_Get" => ("", "Subnet"),
        "NetworkSecurityGroups_Get" => ("", "SecurityGroup"),
        _ => ("", ""),
    }
}

/// Returns what Microsoft's models do not know of these calls' bodies and successful answers.
///
/// # Errors
/// When the models cannot be built, or the program fails.
pub fn azure_models(calls: &[Call]) -> anyhow::Result<Vec<String>> {
    unknown(Command::new(models()?), calls, azure_types)
}

/// Returns what IBM's models for PowerVS do not know of these calls' bodies and successful answers, and what they refuse.
///
/// # Errors
/// When the models cannot be built, or the program fails.
pub fn power_models(calls: &[Call]) -> anyhow::Result<Vec<String>> {
    unknown(Command::new(models()?), calls, power_types)
}

/// Returns what IBM's models do not know of these calls' bodies and successful answers.
///
/// # Errors
/// When the models cannot be installed, or the program fails.
pub fn ibm_models(calls: &[Call]) -> anyhow::Result<Vec<String>> {
    let mut command = Command::new(python()?);
    command.arg(script("ibm_models.py"));
    unknown(command, calls, ibm_types)
}

/// Asks a program with models about the bodies and successful answers of these calls, which have these types.
fn unknown(
    program: Command,
    calls: &[Call],
    types: fn(&str) -> (&'static str, &'static str),
) -> anyhow::Result<Vec<String>> {
    let mut lines = Vec::new();
    let mut names = Vec::new();
    for call in calls {
        let (body, answer) = types(&call.action);
        let answered = if call.answer.status < 300 { call.answer.value() } else { Value::Null };
        for (kind, value) in [(body, call.body()), (answer, answered)] {
            if kind.is_empty() || value.is_null() {
                continue;
            }
            lines.push(json!({"type": kind, "body": value}));
            names.push(call.action.clone());
        }
    }
    Ok(named(&names, ask(program, &lines)?))
}

/// Returns the types of IBM's models for the body and the answer of a call; empty: there is none.
fn ibm_types(action: &str) -> (&'static str, &'static str) {
    match action {
        "create_instance" => {
            ("InstancePrototypeInstanceByImageInstanceByImageInstanceByNetworkAttachment", "Instance")
        }
        "get_instance" => ("", "Instance"),
        "list_instances" => ("", "InstanceCollection"),
        "create_instance_volume_attachment" => ("VolumeAttachmentPrototype", "VolumeAttachment"),
        "list_volumes" => ("", "VolumeCollection"),
        "get_volume" => ("", "Volume"),
        "list_instance_profiles" => ("", "InstanceProfileCollection"),
        "get_image" => ("", "Image"),
        "get_subnet" => ("", "Subnet"),
        "get_security_group" => ("", "SecurityGroup"),
        "get_dedicated_host" => ("", "DedicatedHost"),
        "get_dedicated_host_group" => ("", "DedicatedHostGroup"),
        _ => ("", ""),
    }
}

/// Returns the types of IBM's models for the body and the answer of a call of PowerVS; empty: there is none.
fn power_types(action: &str) -> (&'static str, &'static str) {
    match action {
        "pvminstances.post" => ("PVMInstanceCreate", "PVMInstanceList"),
        "pvminstances.getall" => ("", "PVMInstances"),
        "pvminstances.get" => ("", "PVMInstance"),
        "images.get" => ("", "Image"),
        "networks.get" => ("", "Network"),
        "systempools.get" => ("", "SystemPools"),
        "dhcp.getall" => ("", "DHCPServers"),
        "dhcp.get" => ("", "DHCPServer"),
        _ => ("", ""),
    }
}

/// Returns where these calls, and their successful answers, differ from Google's discovery document. Calls of other
/// services, such as those that issue tokens, are left out.
///
/// # Errors
/// When the document cannot be installed, or the program fails.
pub fn google_document(calls: &[Call]) -> anyhow::Result<Vec<String>> {
    let compute: Vec<&Call> = calls.iter().filter(|call| call.action.starts_with("compute.")).collect();
    let line = |call: &&Call| {
        let mut line = json!({"id": call.action, "method": call.request.method, "path": call.request.path,
            "query": call.request.query});
        if !call.request.body.is_empty() {
            line["body"] = call.body();
        }
        if call.answer.status == 200 {
            line["answer"] = call.answer.value();
        }
        line
    };
    let lines: Vec<Value> = compute.iter().map(line).collect();
    let names: Vec<String> = compute.iter().map(|call| call.action.clone()).collect();
    let mut command = Command::new(python()?);
    command.arg(script("schema.py"));
    Ok(named(&names, ask(command, &lines)?))
}

/// Returns what Alibaba Cloud's models do not know of these calls' parameters and successful answers, and the calls whose
/// signature by this secret is not that of its signer. Calls of services that issue keys are left out.
///
/// # Errors
/// When the models cannot be installed, or the program fails.
pub fn alibaba_models(calls: &[Call], secret: &str) -> anyhow::Result<Vec<String>> {
    let signed: Vec<&Call> =
        calls.iter().filter(|call| !call.request.header("x-acs-action").is_empty()).collect();
    let line = |call: &&Call| {
        let request = &call.request;
        let authorization = request.header("authorization");
        let names = authorization.split("SignedHeaders=").nth(1).and_then(|rest| rest.split(',').next());
        let names = names.unwrap_or_default().split(';');
        let headers: std::collections::BTreeMap<&str, &str> =
            names.filter(|name| !name.is_empty()).map(|name| (name, request.header(name))).collect();
        let mut parameters = request.query.clone();
        parameters.extend(request.form());
        let mut line = json!({"action": call.action, "method": request.method, "path": request.path,
            "query": request.query, "parameters": parameters, "headers": headers, "authorization": authorization,
            "secret": secret});
        if call.answer.status == 200 {
            line["answer"] = call.answer.value();
        }
        line
    };
    let lines: Vec<Value> = signed.iter().map(line).collect();
    let names: Vec<String> = signed.iter().map(|call| call.action.clone()).collect();
    let mut command = Command::new(python()?);
    command.arg(script("alibaba_models.py"));
    Ok(named(&names, ask(command, &lines)?))
}

/// Returns the result of one call of Alibaba Cloud's client: `describe_instances`. The request is JSON in the API's form.
///
/// # Errors
/// When the client cannot be installed or fails.
pub fn alibaba_client(cloud: &Cloud<Alibaba>, operation: &str, request: &Value) -> anyhow::Result<Value> {
    let mut command = Command::new(python()?);
    command.arg(script("alibaba_client.py")).args([&cloud.witness_endpoint(), operation]);
    run(command.arg(request.to_string()), operation)
}

/// Returns the result of one operation of Microsoft's client: `virtual_machines.get`, `network.network_interfaces.list`.
///
/// # Errors
/// When the client cannot be installed or fails.
pub fn azure_client(cloud: &Cloud<Azure>, operation: &str, arguments: &Value) -> anyhow::Result<Value> {
    let mut command = Command::new(python()?);
    command.arg(script("azure_client.py")).args([&cloud.witness_endpoint(), SUBSCRIPTION, operation]);
    run(command.arg(arguments.to_string()), operation)
}

/// Returns the result of one call of Google's client: `InstancesClient.list`. The request is JSON in Google's form.
///
/// # Errors
/// When the client cannot be installed or fails.
pub fn google_client(cloud: &Cloud<Gcp>, operation: &str, request: &Value) -> anyhow::Result<Value> {
    let mut command = Command::new(python()?);
    command.arg(script("google_client.py")).args([&cloud.witness_endpoint(), operation]);
    run(command.arg(request.to_string()), operation)
}

/// Returns the result of one operation of IBM's client: `get_instance`.
///
/// # Errors
/// When the client cannot be installed or fails.
pub fn ibm_client(cloud: &Cloud<IbmCloud>, operation: &str, arguments: &Value) -> anyhow::Result<Value> {
    let mut command = Command::new(python()?);
    command.arg(script("ibm_client.py")).args([&cloud.witness_endpoint(), operation]);
    run(command.arg(arguments.to_string()), operation)
}

/// Returns what VMware's models do not know of these calls, which are names of methods and SOAP requests.
///
/// # Errors
/// When the models cannot be installed, or the program fails.
pub fn vmware_models(calls: &[(String, String)]) -> anyhow::Result<Vec<String>> {
    let lines: Vec<Value> = calls.iter().map(|(_, body)| json!({"body": body})).collect();
    let names: Vec<String> = calls.iter().map(|(method, _)| method.clone()).collect();
    let mut command = Command::new(python()?);
    command.arg(script("vmware_models.py"));
    Ok(named(&names, ask(command, &lines)?))
}

/// Returns a VM of this path, as VMware's client reads it.
///
/// # Errors
/// When the client cannot be installed or fails.
pub fn vmware_client(vcsim: &Vcsim, path: &str) -> anyhow::Result<Value> {
    let mut command = Command::new(python()?);
    command.arg(script("vmware_client.py")).args(["url", "user", "password"].map(|fact| vcsim.said(fact)));
    run(command.arg(path), path)
}

fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("witness").join(name)
}

fn python() -> anyhow::Result<PathBuf> {
    static CLIENTS: OnceLock<PathBuf> = OnceLock::new();
    Ok(made(&CLIENTS, "clients")?.join("bin/python"))
}

fn models() -> anyhow::Result<PathBuf> {
    static MODELS: OnceLock<PathBuf> = OnceLock::new();
    made(&MODELS, "models")
}

/// Runs `setup`, once per process.
pub(crate) fn made(cell: &OnceLock<PathBuf>, what: &str) -> anyhow::Result<PathBuf> {
    if let Some(path) = cell.get() {
        return Ok(path.clone());
    }
    let setup = Path::new(env!("CARGO_MANIFEST_DIR")).join("setup");
    let ran =
        Command::new(setup).arg(what).stderr(Stdio::inherit()).output().context("run tests/clouds/setup")?;
    ensure!(
        ran.status.success(),
        "tests/clouds/setup {what} failed; it needs python3 with venv, go, and registries once"
    );
    let path = PathBuf::from(String::from_utf8(ran.stdout)?.trim());
    Ok(cell.get_or_init(|| path).clone())
}

fn run(command: &mut Command, operation: &str) -> anyhow::Result<Value> {
    let ran = command.stdin(Stdio::null()).output()?;
    ensure!(ran.status.success(), "{operation}: {}", String::from_utf8_lossy(&ran.stderr));
    Ok(serde_json::from_slice(&ran.stdout)?)
}

/// Writes lines to a program, and reads one list of texts for each.
fn ask(mut command: Command, lines: &[Value]) -> anyhow::Result<Vec<Vec<String>>> {
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let mut stdin = child.stdin.take().context("its input")?;
    let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
    // A thread of its own: the program answers while it reads.
    let writer = std::thread::spawn(move || stdin.write_all(text.as_bytes()));
    let ran = child.wait_with_output()?;
    ensure!(ran.status.success(), "the witness failed: {}", String::from_utf8_lossy(&ran.stderr));
    writer.join().map_err(|_| anyhow::anyhow!("the writer panicked"))??;
    let answers: Result<Vec<Vec<String>>, _> =
        String::from_utf8(ran.stdout)?.lines().map(serde_json::from_str).collect();
    let answers = answers?;
    ensure!(answers.len() == lines.len(), "{} answers to {} questions", answers.len(), lines.len());
    Ok(answers)
}

fn named(names: &[String], found: Vec<Vec<String>>) -> Vec<String> {
    let mut all: Vec<String> = names
        .iter()
        .zip(found)
        .flat_map(|(name, found)| found.into_iter().map(move |one| format!("{name}: {one}")))
        .collect();
    all.sort_unstable();
    all.dedup();
    all
}
