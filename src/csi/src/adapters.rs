//! What a driver's volume is in the guest's terms: derived from the driver's name, the handle and the volume's context.
//! Drivers that mount a network file system are known by name; every other driver's volume is a disk. May touch: nothing.

use std::collections::HashMap;

use peerpod_volume::{SecretRef, Source, descriptor::Attach};

/// What is known of a volume.
#[derive(Clone, Debug)]
pub struct Known<'a> {
    /// The driver's name.
    pub driver: &'a str,
    /// The volume's handle.
    pub handle: &'a str,
    /// The volume's attributes.
    pub context: &'a HashMap<String, String>,
    /// Where the credentials for mounting it are, as the PersistentVolume says.
    pub secret: Option<SecretRef>,
    /// The zone of its topology.
    pub zone: Option<String>,
    /// The region of this node.
    pub region: Option<String>,
    /// Who attaches the driver's disks.
    pub attach: Attach,
}

/// Where the volume is, and mount options that its driver would add.
///
/// # Errors
/// What is missing, in words for the person who wrote the StorageClass.
pub fn source(known: &Known<'_>) -> Result<(Source, Vec<String>), String> {
    match known.driver {
        "nfs.csi.k8s.io" => nfs(known),
        "smb.csi.k8s.io" => smb(known),
        "file.csi.azure.com" => azure_file(known),
        "efs.csi.aws.com" => efs(known),
        "iscsi.csi.k8s.io" => iscsi(known),
        _ => {
            let volume = known.handle.to_owned();
            Ok((Source::AttachedBlock { volume, zone: known.zone.clone(), attach: known.attach }, Vec::new()))
        }
    }
}

/// `server`, `share`, `subDir`; drivers take the keys in any case.
fn nfs(known: &Known<'_>) -> Result<(Source, Vec<String>), String> {
    let (server, share) = (known.need("server")?, known.need("share")?);
    let export = below(share, known.get("subdir").unwrap_or_default());
    Ok((Source::Nfs { server: server.to_owned(), export }, known.options()))
}

/// `source` = `//server/share`, `subDir`.
fn smb(known: &Known<'_>) -> Result<(Source, Vec<String>), String> {
    let source = known.need("source")?;
    let plain = source.replace('\\', "/");
    let (server, share) = plain
        .trim_start_matches('/')
        .split_once('/')
        .filter(|(server, share)| !server.is_empty() && !share.is_empty())
        .ok_or_else(|| format!("source {source:?} is not //server/share"))?;
    let share = below(share, known.get("subdir").unwrap_or_default());
    let secret = known.secret.clone();
    Ok((Source::Smb { server: server.to_owned(), share, secret }, known.options()))
}

/// The handle is `group#account#share#disk#…`; attributes win. `protocol` nfs or smb.
fn azure_file(known: &Known<'_>) -> Result<(Source, Vec<String>), String> {
    let part = |index: usize| known.handle.split('#').nth(index).filter(|part| !part.is_empty());
    let account = known.get("storageaccount").or_else(|| part(1));
    let account = account.ok_or("neither its attributes nor its handle name the storage account")?;
    let share = known.get("sharename").or_else(|| part(2));
    let share = share.ok_or("neither its attributes nor its handle name the share")?;
    let suffix = known.get("storageendpointsuffix").unwrap_or("core.windows.net");
    let server = known.get("server").map_or_else(|| format!("{account}.file.{suffix}"), str::to_owned);
    let folder = known.get("foldername").unwrap_or_default();
    if known.get("protocol").is_some_and(|protocol| protocol.eq_ignore_ascii_case("nfs")) {
        let mut options = known.options();
        options.push("vers=4,minorversion=1,sec=sys".to_owned());
        return Ok((Source::Nfs { server, export: below(&format!("/{account}/{share}"), folder) }, options));
    }
    let named = known.get("secretname").map(|name| SecretRef {
        namespace: known.get("secretnamespace").unwrap_or("default").to_owned(),
        name: name.to_owned(),
    });
    let secret = named.or_else(|| known.secret.clone());
    Ok((Source::Smb { server, share: below(share, folder), secret }, known.options()))
}

/// The handle is `fs-…[:path[:access point]]`.
fn efs(known: &Known<'_>) -> Result<(Source, Vec<String>), String> {
    let mut parts = known.handle.split(':');
    let system = parts.next().unwrap_or_default();
    let path = parts.next().unwrap_or_default();
    if let Some(point) = parts.next().filter(|point| !point.is_empty()) {
        return Err(format!(
            "access point {point} needs the driver's own TLS mount; use a path of the file system"
        ));
    }
    let server = match (known.get("mounttargetip"), &known.region) {
        (Some(address), _) => address.to_owned(),
        (None, Some(region)) => format!("{system}.efs.{region}.amazonaws.com"),
        (None, None) => {
            return Err(
                "neither mounttargetip nor the node's region is known; set mounttargetip in the volume's \
                        attributes, or csi.region"
                    .to_owned(),
            );
        }
    };
    let mut options = known.options();
    options.push("nfsvers=4.1,rsize=1048576,wsize=1048576,hard,timeo=600,retrans=2,noresvport".to_owned());
    Ok((Source::Nfs { server, export: below("/", path) }, options))
}

/// `targetPortal`, `portals` (a JSON list), `iqn`, `lun`.
fn iscsi(known: &Known<'_>) -> Result<(Source, Vec<String>), String> {
    let mut portals = vec![portal(known.need("targetportal")?)];
    if let Some(more) = known.get("portals") {
        let more: Vec<String> = serde_json::from_str(more)
            .map_err(|why| format!("portals {more:?} is no JSON list of addresses: {why}"))?;
        portals
            .extend(more.iter().map(|one| portal(one)).filter(|one| *one != portals[0]).collect::<Vec<_>>());
    }
    let lun = known.need("lun")?;
    let lun = lun.parse().map_err(|_| format!("lun {lun:?} is no number"))?;
    let iqn = known.need("iqn")?.to_owned();
    Ok((Source::Iscsi { portals, iqn, lun, secret: known.secret.clone() }, known.options()))
}

/// With the port that iSCSI has.
fn portal(address: &str) -> String {
    let bare_v6 = address.matches(':').count() > 1 && !address.starts_with('[');
    match address {
        _ if bare_v6 => format!("[{address}]:3260"),
        _ if address.ends_with(']') || !address.contains(':') => format!("{address}:3260"),
        _ => address.to_owned(),
    }
}

/// A path below another; with one slash between.
fn below(base: &str, path: &str) -> String {
    let path = path.trim_matches('/');
    if path.is_empty() {
        return base.to_owned();
    }
    format!("{}/{path}", base.trim_end_matches('/'))
}

impl<'a> Known<'a> {
    fn get(&self, key: &str) -> Option<&'a str> {
        let found = self.context.iter().find(|(name, _)| name.eq_ignore_ascii_case(key));
        found.map(|(_, value)| value.as_str()).filter(|value| !value.is_empty())
    }

    fn need(&self, key: &str) -> Result<&'a str, String> {
        self.get(key).ok_or_else(|| format!("its attributes lack {key:?}"))
    }

    fn options(&self) -> Vec<String> {
        self.get("mountoptions").map(|options| vec![options.to_owned()]).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests;
