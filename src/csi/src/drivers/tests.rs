use super::*;

fn of(driver: &str, handle: &str, context: &[(&str, &str)]) -> Result<(Source, Vec<String>), String> {
    let context = context.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    let secret = Some(SecretRef { namespace: "n".into(), name: "s".into() });
    let known = VolumeInfo {
        driver,
        handle,
        context: &context,
        secret,
        zone: Some("z".into()),
        region: Some("eu-1".into()),
        attach: Attach::Driver,
    };
    source(&known)
}

fn nfs(server: &str, export: &str) -> Source {
    Source::Nfs { server: server.into(), export: export.into() }
}

#[test]
fn a_driver_that_is_not_known_has_disks() {
    let (source, options) = of("disk.example", "vol-1", &[("server", "x")]).unwrap();
    let wanted =
        Source::AttachedBlock { volume: "vol-1".into(), zone: Some("z".into()), attach: Attach::Driver };
    assert_eq!((source, options), (wanted, Vec::new()));
}

#[test]
fn nfs_exports_with_and_without_a_folder() {
    let driver = "nfs.csi.k8s.io";
    let base = [("server", "10.0.0.2"), ("share", "/e/")];
    assert_eq!(of(driver, "h", &base).unwrap().0, nfs("10.0.0.2", "/e/"));
    let more = [base[0], base[1], ("subDir", "pvc-1"), ("mountOptions", "nfsvers=4.1, hard,,ro")];
    assert_eq!(
        of(driver, "h", &more).unwrap(),
        (nfs("10.0.0.2", "/e/pvc-1"), ["nfsvers=4.1", "hard", "ro"].map(str::to_owned).to_vec())
    );
    assert!(of(driver, "h", &base[..1]).unwrap_err().contains("\"share\""));
}

#[test]
fn smb_shares() {
    let secret = Some(SecretRef { namespace: "n".into(), name: "s".into() });
    for source in ["//srv/share/x", r"\\srv\share\x"] {
        let wanted = Source::Smb { server: "srv".into(), share: "share/x/d".into(), secret: secret.clone() };
        assert_eq!(of("smb.csi.k8s.io", "h", &[("source", source), ("subdir", "d")]).unwrap().0, wanted);
    }
    for source in ["srv", "//srv", "//srv/", "///x"] {
        assert!(of("smb.csi.k8s.io", "h", &[("source", source)]).is_err(), "{source}");
    }
}

#[test]
fn azure_files_by_handle_or_attributes() {
    let driver = "file.csi.azure.com";
    let handle = "group#account#share##uuid#ns";
    let (source, options) = of(driver, handle, &[("protocol", "nfs")]).unwrap();
    assert_eq!(source, nfs("account.file.core.windows.net", "/account/share"));
    assert_eq!(options, ["vers=4", "minorversion=1", "sec=sys"]);
    let named = [("secretName", "k"), ("shareName", "other"), ("server", "private.example")];
    let secret = Some(SecretRef { namespace: "default".into(), name: "k".into() });
    let wanted = Source::Smb { server: "private.example".into(), share: "other".into(), secret };
    assert_eq!(of(driver, handle, &named).unwrap().0, wanted);
    assert!(of(driver, "x", &[]).unwrap_err().contains("storage account"));
}

#[test]
fn efs_by_region_or_address() {
    let driver = "efs.csi.aws.com";
    assert_eq!(of(driver, "fs-1", &[]).unwrap().0, nfs("fs-1.efs.eu-1.amazonaws.com", "/"));
    assert_eq!(of(driver, "fs-1:/a/b", &[("mounttargetip", "10.0.0.9")]).unwrap().0, nfs("10.0.0.9", "/a/b"));
    assert!(of(driver, "fs-1::fsap-2", &[]).unwrap_err().contains("fsap-2"));
}

#[test]
fn iscsi_portals_have_ports() {
    let context = [
        ("targetPortal", "10.0.0.1"),
        ("portals", r#"["10.0.0.1:3260","10.0.0.2:3261","fd00::1","[fd00::2]"]"#),
        ("iqn", "iqn.x"),
        ("lun", "3"),
    ];
    let Source::Iscsi { portals, iqn, lun, secret } = of("iscsi.csi.k8s.io", "h", &context).unwrap().0 else {
        panic!("no iscsi")
    };
    assert_eq!(portals, ["10.0.0.1:3260", "10.0.0.2:3261", "[fd00::1]:3260", "[fd00::2]:3260"]);
    assert_eq!((iqn.as_str(), lun, secret.is_some()), ("iqn.x", 3, true));
    assert!(of("iscsi.csi.k8s.io", "h", &[("targetPortal", "a"), ("iqn", "i"), ("lun", "x")]).is_err());
}

#[test]
fn an_answer_gives_an_identity_or_none() {
    let of = |driver: &str, handle: &str, context: &[(&str, &str)]| {
        let mut context: HashMap<String, String> =
            context.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        let all = identity(driver, handle, &context);
        context.insert("token".to_owned(), "secret".to_owned());
        let kept = telling(driver, &context);
        assert!(!kept.contains_key("token"), "{kept:?}");
        assert_eq!(identity(driver, handle, &kept), all, "the kept fields give the same");
        all
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
    let name = [("dobs.csi.digitalocean.com/volume-name", "pvc-1")];
    assert_eq!(
        of("dobs.csi.digitalocean.com", "h", &name),
        Some(Identity::ById("scsi-0DO_Volume_pvc-1".into()))
    );
    let uuid = [("diskUUID", "6000-C2AB")];
    assert_eq!(of("csi.vsphere.vmware.com", "h", &uuid), Some(Identity::Wwn("0x6000c2ab".into())));
    assert_eq!(
        of("x", "h", &[("devicePath", "/dev/disk/by-id/scsi-1")]),
        Some(Identity::ById("scsi-1".into()))
    );
    assert_eq!(of("x", "h", &[("serial", "s")]), Some(Identity::Serial("s".into())));
    assert_eq!(of("x", "h", &device), None);
}

#[test]
fn each_driver_is_known_once() {
    let mut names: Vec<&str> = FAMILIES.iter().copied().flatten().map(|one| one.name).collect();
    names.sort_unstable();
    let all = names.len();
    names.dedup();
    assert_eq!(names.len(), all);
}
