//! Describes mounts of NFS and SMB shares for the kernel's own clients, in the VM's own network (the kata-agent is not
//! in the pod's network). No mount program runs, so names are resolved here.

use std::net::IpAddr;
use std::time::Duration;

use peerpod_volume::SecretRef;
use tokio::net::lookup_host;
use tokio::time::timeout;

use super::Fault;
use crate::intercept::Ready;

/// Time limit of a name server's answer.
const RESOLVE: Duration = Duration::from_secs(10);

/// The kata-agent's handler that mounts any file system by its name.
pub(super) const ANY: &str = "virtio-fs";

async fn address(server: &str) -> Result<IpAddr, Fault> {
    let bare = server.trim_start_matches('[').trim_end_matches(']');
    if let Ok(address) = bare.parse() {
        return Ok(address);
    }
    let why = match timeout(RESOLVE, lookup_host((bare, 0))).await {
        Ok(Ok(mut found)) => match found.next() {
            Some(address) => return Ok(address.ip()),
            None => "it has no address".to_owned(),
        },
        Ok(Err(error)) => error.to_string(),
        Err(_) => format!("no answer within {RESOLVE:?}"),
    };
    let text = format!("the VM's name servers do not find the server {server}: {why}; give its address");
    Err(Fault::not_now(text))
}

fn value<'o>(options: &'o [String], names: &[&str]) -> Option<&'o str> {
    let pairs = options.iter().filter_map(|option| option.split_once('='));
    pairs.filter(|(name, _)| names.contains(name)).map(|(_, value)| value).next_back()
}

fn supported(kind: &str) -> Result<(), Fault> {
    // The mount itself loads a module. Without a module or a file system the kernel would only report "no such device".
    let known = std::fs::read_to_string("/proc/filesystems").unwrap_or_default();
    let listed = known.lines().any(|line| line.split_whitespace().next_back() == Some(kind));
    let release = nix::sys::utsname::uname().map(|name| name.release().to_owned()).unwrap_or_default();
    let module = std::path::Path::new("/lib/modules").join(release).join("modules.dep");
    if listed || module.exists() {
        return Ok(());
    }
    Err(Fault::never(format!("the VM's kernel has no {kind}; use an image that has it in its kernel")))
}

/// Describes an export of an NFS server. Version 4.2 unless the options ask for another.
pub(super) async fn nfs(server: &str, export: &str, options: &[String]) -> Result<Ready, Fault> {
    let mut told: Vec<String> =
        options.iter().flat_map(|option| option.split(',')).map(str::to_owned).collect();
    let version = value(&told, &["vers", "nfsvers"]).unwrap_or("4.2").to_owned();
    let fstype = if version.starts_with('4') { "nfs4" } else { "nfs" };
    supported(fstype)?;
    let address = address(server).await?;
    told.retain(|option| !option.starts_with("nfsvers=") && !option.starts_with("vers="));
    told.extend([format!("vers={version}"), format!("addr={address}")]);
    if fstype == "nfs" {
        if !told.iter().any(|option| option == "nolock") {
            let text = "NFS version 3 needs a lock daemon, which the VM lacks: use version 4, or set nolock in the \
                        volume's mount options, if no two pods lock its files";
            return Err(Fault::never(text.into()));
        }
        told.push(format!("mountaddr={address}"));
    }
    let host = if address.is_ipv6() { format!("[{address}]") } else { address.to_string() };
    let source = format!("{host}:{export}");
    Ok(Ready { driver: ANY.into(), source, fstype: fstype.into(), options: told, ..Ready::default() })
}

/// Describes a share of an SMB server that requires no authentication.
pub(super) async fn smb(
    server: &str,
    share: &str,
    secret: Option<&SecretRef>,
    options: &[String],
) -> Result<Ready, Fault> {
    if let Some(SecretRef { namespace, name }) = secret {
        return Err(Fault::never(format!(
            "the user and password of secret {namespace}/{name} are missing: the node did not get them from \
             kubelet"
        )));
    }
    let mut told = smb_options(server, options).await?;
    let unc = unc(server, share);
    told.push(format!("unc={}", unc.replace('/', "\\")));
    if value(&told, &["user", "username"]).is_none() {
        told.push("sec=none".into());
    }
    Ok(Ready { driver: ANY.into(), source: unc, fstype: "cifs".into(), options: told, ..Ready::default() })
}

/// Returns the volume's options one by one, and the server's address.
pub(super) async fn smb_options(server: &str, options: &[String]) -> Result<Vec<String>, Fault> {
    supported("cifs")?;
    let address = address(server).await?;
    let options = options.iter().flat_map(|option| option.split(',')).map(str::trim);
    let mut told: Vec<String> = options.filter(|option| !option.is_empty()).map(str::to_owned).collect();
    told.push(format!("ip={address}"));
    Ok(told)
}

/// Returns the share's name for the kernel.
pub(super) fn unc(server: &str, share: &str) -> String {
    format!("//{server}/{}", share.trim_matches('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_of_an_option_counts() {
        let options = ["vers=3", "hard", "nfsvers=4.1"].map(String::from);
        assert_eq!(value(&options, &["vers", "nfsvers"]), Some("4.1"));
        assert_eq!(value(&options, &["addr"]), None);
    }

    #[tokio::test]
    async fn an_unknown_server_name_is_reported() {
        let error = address("no-such-host.invalid").await.unwrap_err().to_string();
        assert!(error.contains("no-such-host.invalid"), "{error}");
        assert_eq!(address("[fd00::1]").await.unwrap(), "fd00::1".parse::<IpAddr>().unwrap());
    }
}
