use std::fs;
use std::path::PathBuf;

use peerpod_proto::intercept::{CreateContainerRequest, LinuxDevice, Mount};
use peerpod_proto::ttrpc_frame::Request;
use protobuf::Message;

use super::*;

struct Bundle(PathBuf);

impl Bundle {
    fn new(name: &str, config: &str) -> Bundle {
        let folder = std::env::temp_dir().join(format!("peerpod-bundle-{}-{name}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("config.json"), config).unwrap();
        Bundle(folder)
    }
}

impl Drop for Bundle {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).ok();
    }
}

fn volumes() -> Vec<Volume> {
    let volume = |id: &str, marker: &str| Volume {
        id: id.repeat(32),
        name: format!("pvc-{id}"),
        target_path: format!("/pods/u/volumes/{id}/mount"),
        marker: marker.repeat(64),
        ..Volume::default()
    };
    let raw = Volume { block: true, ..volume("c", "") };
    vec![volume("a", "1"), volume("b", "2"), raw]
}

fn folder(path: &str) -> CopyFileRequest {
    CopyFileRequest { path: format!("{COPIES}{path}"), file_mode: 0o40755, ..CopyFileRequest::default() }
}

fn file(path: &str, data: &str) -> CopyFileRequest {
    CopyFileRequest {
        path: format!("{COPIES}{path}"),
        file_mode: 0o100_444,
        file_size: data.len() as i64,
        data: data.into(),
        ..CopyFileRequest::default()
    }
}

fn bind(destination: &str, source: &str) -> Mount {
    Mount {
        destination: destination.into(),
        source: format!("{COPIES}{source}"),
        type_: "bind".into(),
        options: vec!["rbind".into(), "rw".into()],
        ..Mount::default()
    }
}

fn container(bundle: Option<&Bundle>, mounts: Vec<Mount>) -> CreateContainerRequest {
    let mut container = CreateContainerRequest::new();
    container.container_id = "c1".into();
    let spec = container.OCI.mut_or_insert_default();
    spec.Mounts = mounts;
    if let Some(Bundle(folder)) = bundle {
        let path = folder.display().to_string();
        spec.Annotations.insert("io.katacontainers.pkg.oci.bundle_path".into(), path);
    }
    container
}

fn made(
    container: &CreateContainerRequest,
    volumes: &[Volume],
    copies: &mut Copies,
) -> Result<CreateContainerRequest, String> {
    let mut request = Request::new();
    request.payload = container.write_to_bytes().unwrap();
    let bytes = create_container(&request.write_to_bytes().unwrap(), volumes, copies)?;
    let request = Request::parse_from_bytes(&bytes).unwrap();
    Ok(CreateContainerRequest::parse_from_bytes(&request.payload).unwrap())
}

#[test]
fn a_mount_is_a_volume_by_its_source_in_the_bundle_subpath_included() {
    let config = r#"{"mounts":[{"destination":"/x","source":"/pods/u/volumes/b/mount"},
        {"destination":"/y","source":"/pods/u/volumes/a/mount/some/dir"},{"destination":"/proc","source":"proc"},
        {"destination":"/z","source":"/etc"}]}"#;
    let bundle = Bundle::new("source", config);
    let mounts = vec![bind("/y", "c1-1-y"), bind("/x", "c1-2-x"), bind("/z", "c1-3-z")];
    let made = made(&container(Some(&bundle), mounts), &volumes(), &mut Copies::default()).unwrap();
    let sources: Vec<&str> = made.OCI.Mounts.iter().map(|mount| mount.source.as_str()).collect();
    let (a, b) = ("a".repeat(32), "b".repeat(32));
    assert_eq!(sources[0], format!("/run/peerpod/volumes/{a}/some/dir"));
    assert_eq!(sources[1], format!("/run/peerpod/volumes/{b}"));
    assert_eq!(sources[2], format!("{COPIES}c1-3-z"));
    let storages: Vec<_> = made.storages.iter().map(|s| (s.driver.as_str(), s.source.clone())).collect();
    assert_eq!(storages, [("peerpod-volume", a.clone()), ("peerpod-volume", b)]);
    assert_eq!(made.storages[0].mount_point, format!("/run/peerpod/volumes/{a}"));
}

#[test]
fn a_mount_is_a_volume_by_its_marker_where_there_is_no_bundle() {
    let (volumes, mut copies) = (volumes(), Copies::default());
    for copied in [
        folder("c1-1-x"),
        file("c1-1-x/.peerpod-volume", &"2".repeat(64)),
        folder("c1-2-etc"),
        file("c1-2-etc/f", "1"),
    ] {
        copies.note(&volumes, &copied);
    }
    let request = container(None, vec![bind("/etc", "c1-2-etc"), bind("/x", "c1-1-x")]);
    let made = made(&request, &volumes, &mut copies).unwrap();
    assert_eq!(made.OCI.Mounts[1].source, format!("/run/peerpod/volumes/{}", "b".repeat(32)));
    assert_eq!(made.OCI.Mounts[0], request.OCI.Mounts[0]);
    assert_eq!(made.storages.len(), 1);
    assert_eq!(copies, Copies::default(), "its copies are forgotten");
}

#[test]
fn an_unmatched_volume_fails_the_container() {
    let volumes = volumes();
    let refused = |noted: &[CopyFileRequest], bundle: Option<&Bundle>, mounts: Vec<Mount>| {
        let mut copies = Copies::default();
        noted.iter().for_each(|copied| copies.note(&volumes, copied));
        made(&container(bundle, mounts), &volumes, &mut copies).unwrap_err()
    };
    let strange = [folder("c1-1-x"), file("c1-1-x/.peerpod-volume", &"9".repeat(64))];
    assert!(refused(&strange, None, vec![bind("/x", "c1-1-x")]).contains("start the pod anew"));
    let known = [folder("c1-1-x"), file("c1-1-x/.peerpod-volume", &"1".repeat(64))];
    assert!(refused(&known, None, vec![bind("/x", "c1-9-x")]).contains("no mount"));
    let why = refused(&[folder("c1-1-x")], None, vec![bind("/x", "c1-1-x")]);
    assert!(why.contains("may be a subPath") && why.contains("bundle_path"), "{why}");
    let bundle =
        Bundle::new("clash", r#"{"mounts":[{"destination":"/x","source":"/pods/u/volumes/b/mount"}]}"#);
    let why = refused(&known, Some(&bundle), vec![bind("/x", "c1-1-x")]);
    assert!(why.contains("its source names volume pvc-b, its marker pvc-a"), "{why}");
}

#[test]
fn an_invalid_bundle_is_refused_without_waiting() {
    let volumes = volumes();
    let mut copies = Copies::default();
    copies.note(&volumes, &folder("c1-1-x"));
    let mut request = container(None, vec![bind("/x", "c1-1-x")]);
    for path in ["/nowhere", "../..", "/dev", "/proc/self/mem"] {
        let key = "io.katacontainers.pkg.oci.bundle_path".to_owned();
        request.OCI.mut_or_insert_default().Annotations.insert(key, path.into());
        assert!(made(&request, &volumes, &mut copies.clone()).is_err(), "{path}");
    }
}

#[test]
fn a_raw_device_is_recognised_by_the_name_of_its_placeholder() {
    let config = format!(
        r#"{{"linux":{{"devices":[{{"path":"/dev/xvda/{}","type":"c","major":1,"minor":7}},
        {{"path":"/dev/fuse","type":"c","major":10,"minor":229}}]}}}}"#,
        "c".repeat(32)
    );
    let bundle = Bundle::new("device", &config);
    let path = format!("/dev/xvda/{}", "c".repeat(32));
    let shims = peerpod_proto::intercept::Device {
        container_path: path.clone(),
        type_: "blk".into(),
        ..Default::default()
    };
    let device = LinuxDevice { Path: path, Type: "c".into(), ..LinuxDevice::default() };
    // The device is in the shim's specification, in the bundle alone, in both.
    for (bundle, sent) in [(None, true), (Some(&bundle), false), (Some(&bundle), true)] {
        let mut request = container(bundle, Vec::new());
        request.devices.push(shims.clone());
        let linux = request.OCI.mut_or_insert_default().Linux.mut_or_insert_default();
        linux.Devices.extend(sent.then(|| device.clone()));
        let made = made(&request, &volumes(), &mut Copies::default()).unwrap();
        let devices: Vec<_> = made
            .devices
            .iter()
            .map(|d| (d.type_.as_str(), d.vm_path.clone(), d.container_path.as_str()))
            .collect();
        assert_eq!(devices, [("peerpod-volume", "c".repeat(32), "/dev/xvda")]);
        let listed: Vec<_> = made.OCI.Linux.Devices.iter().map(|device| device.Path.as_str()).collect();
        assert_eq!(listed, if sent { vec!["/dev/xvda"] } else { Vec::new() });
        assert!(made.storages.is_empty());
    }
}

#[test]
fn a_raw_device_that_is_no_volume_of_the_pod_fails_the_container() {
    // A volume with a file system is not passed on as a raw device.
    for id in ["d".repeat(32), "a".repeat(32)] {
        let mut request = container(None, Vec::new());
        let linux = request.OCI.mut_or_insert_default().Linux.mut_or_insert_default();
        linux.Devices.push(LinuxDevice { Path: format!("/dev/xvda/{id}"), ..LinuxDevice::default() });
        let why = made(&request, &volumes(), &mut Copies::default()).unwrap_err();
        assert!(why.contains("/dev/xvda") && why.contains("start the pod anew"), "{why}");
    }
}

#[test]
fn a_request_with_the_relays_storage_type_is_refused() {
    let mut request = container(None, Vec::new());
    let storage = peerpod_proto::intercept::Storage { driver: "peerpod-volume".into(), ..Default::default() };
    request.storages.push(storage);
    assert!(made(&request, &volumes(), &mut Copies::default()).unwrap_err().contains("only the relay"));
}
