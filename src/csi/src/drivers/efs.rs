//! aws-efs-csi-driver: the handle is `fs-…[:path[:access point]]`.

use peerpod_volume::Source;

use super::{Family, Sourced, VolumeInfo, below};

pub(super) const FAMILY: Family =
    Family { name: "efs.csi.aws.com", source: Some(source), disk: None, login: None };

/// Options that AWS recommends for the filesystem.
const OPTIONS: &str = "nfsvers=4.1,rsize=1048576,wsize=1048576,hard,timeo=600,retrans=2,noresvport";

fn source(known: &VolumeInfo<'_>) -> Sourced {
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
    Ok((Source::Nfs { server, export: below("/", path) }, known.options(OPTIONS)))
}
