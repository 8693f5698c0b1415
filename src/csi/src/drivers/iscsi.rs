//! csi-driver-iscsi: `targetPortal`, `portals` (a JSON list), `iqn`, `lun` in the volume's attributes.

use peerpod_volume::Source;

use super::{Family, Sourced, VolumeInfo};

pub(super) const FAMILY: Family =
    Family { name: "iscsi.csi.k8s.io", source: Some(source), disk: None, login: None };

fn source(known: &VolumeInfo<'_>) -> Sourced {
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
    Ok((Source::Iscsi { portals, iqn, lun, secret: known.secret.clone() }, known.options("")))
}

/// Adds iSCSI's default port.
fn portal(address: &str) -> String {
    let bare_v6 = address.matches(':').count() > 1 && !address.starts_with('[');
    match address {
        _ if bare_v6 => format!("[{address}]:3260"),
        _ if address.ends_with(']') || !address.contains(':') => format!("{address}:3260"),
        _ => address.to_owned(),
    }
}
