//! How the guest recognises a disk that its CSI driver attached: derived from the driver's answer to
//! ControllerPublishVolume. May touch: nothing.

use std::collections::HashMap;

use peerpod_volume::Identity;

/// A virtio disk shows so many bytes of its serial.
const VIRTIO: usize = 20;

/// The disk's identity; none when the answer does not say, or says only a device's name, which is no identity.
pub fn identity(driver: &str, handle: &str, context: &HashMap<String, String>) -> Option<Identity> {
    let get = |key: &str| {
        let found = context.iter().find(|(name, _)| name.eq_ignore_ascii_case(key));
        found.map(|(_, value)| value.trim()).filter(|value| !value.is_empty())
    };
    match driver {
        // NVMe: the serial is the id without its dash.
        "ebs.csi.aws.com" => return Some(Identity::Serial(handle.replace('-', ""))),
        "pd.csi.storage.gke.io" => {
            return Some(Identity::ById(format!("google-{}", handle.rsplit('/').next().unwrap_or(handle))));
        }
        "cinder.csi.openstack.org" => {
            return Some(Identity::Serial(handle.chars().take(VIRTIO).collect()));
        }
        "csi.hetzner.cloud" => return Some(Identity::ById(format!("scsi-0HC_Volume_{handle}"))),
        "dobs.csi.digitalocean.com" => {
            let name = get("dobs.csi.digitalocean.com/volume-name")?;
            return Some(Identity::ById(format!("scsi-0DO_Volume_{name}")));
        }
        "csi.vsphere.vmware.com" => {
            return Some(Identity::Wwn(format!("0x{}", get("diskUUID")?.replace('-', "").to_lowercase())));
        }
        _ => {}
    }
    if let Some(lun) = get("lun").and_then(|lun| lun.parse().ok()) {
        return Some(Identity::Lun(lun));
    }
    if let Some(wwn) = get("wwn") {
        return Some(Identity::Wwn(wwn.to_owned()));
    }
    if let Some(serial) = get("serial") {
        return Some(Identity::Serial(serial.to_owned()));
    }
    ["devicePath", "device-path", "device"]
        .into_iter()
        .filter_map(get)
        .find_map(|path| path.strip_prefix("/dev/disk/by-id/"))
        .map(|name| Identity::ById(name.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_an_identity_or_nothing() {
        let of = |driver: &str, handle: &str, context: &[(&str, &str)]| {
            let context =
                context.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
            identity(driver, handle, &context)
        };
        let device = [("devicePath", "/dev/xvdba")];
        assert_eq!(of("ebs.csi.aws.com", "vol-0ab", &device), Some(Identity::Serial("vol0ab".into())));
        assert_eq!(of("disk.csi.azure.com", "/subscriptions/x", &[("LUN", "3")]), Some(Identity::Lun(3)));
        assert_eq!(
            of("pd.csi.storage.gke.io", "projects/p/zones/z/disks/d", &[]),
            Some(Identity::ById("google-d".into()))
        );
        assert_eq!(
            of("cinder.csi.openstack.org", "0123456789abcdef-0123456789", &[]),
            Some(Identity::Serial("0123456789abcdef-012".into()))
        );
        assert_eq!(
            of("x", "h", &[("devicePath", "/dev/disk/by-id/scsi-1")]),
            Some(Identity::ById("scsi-1".into()))
        );
        assert_eq!(of("x", "h", &[("serial", "s")]), Some(Identity::Serial("s".into())));
        assert_eq!(of("x", "h", &device), None);
    }
}
