//! csi-driver-smb: `source` = `//server/share`, `subDir` in the volume's attributes; `username`, `password` and
//! optionally `domain` in the secret.

use peerpod_volume::Source;

use super::{Family, Login, Sourced, VolumeInfo, below};

pub(super) const FAMILY: Family =
    Family { name: "smb.csi.k8s.io", source: Some(source), disk: None, login: Some(LOGIN) };

const LOGIN: Login = Login { username: &["username"], password: &["password"], domain: &["domain"] };

fn source(known: &VolumeInfo<'_>) -> Sourced {
    let source = known.need("source")?;
    let plain = source.replace('\\', "/");
    let (server, share) = plain
        .trim_start_matches('/')
        .split_once('/')
        .filter(|(server, share)| !server.is_empty() && !share.is_empty())
        .ok_or_else(|| format!("source {source:?} is not //server/share"))?;
    let share = below(share, known.get("subdir").unwrap_or_default());
    let secret = known.secret.clone();
    Ok((Source::Smb { server: server.to_owned(), share, secret }, known.options("")))
}
