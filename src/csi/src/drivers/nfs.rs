//! csi-driver-nfs: `server`, `share`, `subDir` in the volume's attributes.

use peerpod_volume::Source;

use super::{Family, Sourced, VolumeInfo, below};

pub(super) const FAMILY: Family =
    Family { name: "nfs.csi.k8s.io", source: Some(source), disk: None, login: None };

fn source(known: &VolumeInfo<'_>) -> Sourced {
    let (server, share) = (known.need("server")?, known.need("share")?);
    let export = below(share, known.get("subdir").unwrap_or_default());
    Ok((Source::Nfs { server: server.to_owned(), export }, known.options("")))
}
