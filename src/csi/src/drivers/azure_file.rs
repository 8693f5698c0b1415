//! azurefile-csi: the handle is `group#account#share#disk#…`; attributes take precedence. `protocol` is nfs or smb; for
//! smb the secret holds the account's name and key. (The driver itself can also read that secret, or ask the cloud.
//! This program uses only the secrets from kubelet.)

use peerpod_volume::{SecretRef, Source};

use super::{Family, Login, Sourced, VolumeInfo, below};

pub(super) const FAMILY: Family =
    Family { name: "file.csi.azure.com", source: Some(source), disk: None, login: Some(LOGIN) };

const LOGIN: Login = Login {
    username: &["azurestorageaccountname", "accountname"],
    password: &["azurestorageaccountkey", "accountkey"],
    domain: &[],
};

fn source(known: &VolumeInfo<'_>) -> Sourced {
    let part = |index: usize| known.handle.split('#').nth(index).filter(|part| !part.is_empty());
    let account = known.get("storageaccount").or_else(|| part(1));
    let account = account.ok_or("neither its attributes nor its handle name the storage account")?;
    let share = known.get("sharename").or_else(|| part(2));
    let share = share.ok_or("neither its attributes nor its handle name the share")?;
    let suffix = known.get("storageendpointsuffix").unwrap_or("core.windows.net");
    let server = known.get("server").map_or_else(|| format!("{account}.file.{suffix}"), str::to_owned);
    let folder = known.get("foldername").unwrap_or_default();
    if known.get("protocol").is_some_and(|protocol| protocol.eq_ignore_ascii_case("nfs")) {
        let export = below(&format!("/{account}/{share}"), folder);
        return Ok((Source::Nfs { server, export }, known.options("vers=4,minorversion=1,sec=sys")));
    }
    let named = known.get("secretname").map(|name| SecretRef {
        namespace: known.get("secretnamespace").unwrap_or("default").to_owned(),
        name: name.to_owned(),
    });
    let secret = named.or_else(|| known.secret.clone());
    Ok((Source::Smb { server, share: below(share, folder), secret }, known.options("")))
}
