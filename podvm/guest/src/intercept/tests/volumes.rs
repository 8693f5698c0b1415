//! Tests of containers that wait for their volumes.

use std::collections::VecDeque;
use std::task::Waker;

use peerpod_proto::intercept::{
    CreateContainerRequest, Device, LinuxDevice, LinuxDeviceCgroup, Mount, Storage,
};

use super::*;

/// Passes the senders of the answers to the test.
#[derive(Default)]
struct Slow(Mutex<VecDeque<Asked>>);

/// Wanted volumes, and the sender of the answer.
type Asked = (Vec<Use>, oneshot::Sender<Result<Vec<Ready>, String>>);

impl Notice for Slow {
    fn container(&self) {}
    fn bind_source(&self, source: &str) {
        assert!(!source.contains("/0a"), "{source} is on a volume, and made there");
    }
    fn prepare(&self, wanted: Vec<Use>) -> Preparing {
        let (answer, preparing) = oneshot::channel();
        self.0.lock().unwrap().push_back((wanted, answer));
        preparing
    }
    fn sandbox_ends(&self) {}
}

impl Slow {
    fn next(&self) -> (Vec<Use>, oneshot::Sender<Result<Vec<Ready>, String>>) {
        self.0.lock().unwrap().pop_front().unwrap()
    }
}

fn container(id: &str) -> CreateContainerRequest {
    let mut container = CreateContainerRequest::new();
    container.storages.push(Storage {
        driver: "peerpod-volume".into(),
        source: id.into(),
        mount_point: format!("{VOLUMES}/{id}"),
        ..Storage::default()
    });
    for path in ["", "/link"] {
        container.OCI.mut_or_insert_default().Mounts.push(Mount {
            destination: format!("/x{path}"),
            source: format!("{VOLUMES}/{id}{path}"),
            type_: "bind".into(),
            options: vec!["rbind".into(), "rw".into()],
            ..Mount::default()
        });
    }
    container
}

fn sent(stream: u32, container: &CreateContainerRequest) -> Vec<u8> {
    frame(stream, REQUEST, &super::request("CreateContainer", container.write_to_bytes().unwrap()))
}

fn poll(filter: &mut Intercept, to_peer: &mut BytesMut, to_agent: &mut BytesMut) -> bool {
    filter.poll(&mut Context::from_waker(Waker::noop()), to_peer, to_agent)
}

fn of_agent(bytes: &[u8]) -> Vec<(u32, CreateContainerRequest)> {
    let all = frames(bytes).into_iter();
    all.filter_map(|(head, payload)| {
        let request = ttrpc_frame::Request::parse_from_bytes(&payload).ok()?;
        let container = CreateContainerRequest::parse_from_bytes(&request.payload).ok()?;
        (request.method == "CreateContainer").then_some((head.stream, container))
    })
    .collect()
}

#[test]
fn a_container_waits_for_its_volumes_and_others_do_not() {
    let notice = Arc::new(Slow::default());
    let mut filter = Intercept::new(notice.clone(), PODNS.into());
    let (mut to_peer, mut to_agent) = (BytesMut::new(), BytesMut::new());
    let id = "0a".repeat(16);
    filter.from_peer(&sent(1, &container(&id)), &mut to_peer, &mut to_agent);
    assert!(to_agent.is_empty() && !poll(&mut filter, &mut to_peer, &mut to_agent));
    let plain = sent(3, &CreateContainerRequest::new());
    filter.from_peer(&plain, &mut to_peer, &mut to_agent);
    assert_eq!(of_agent(&to_agent).len(), 1, "another one passes");

    let (wanted, answer) = notice.next();
    assert_eq!(wanted, [Use { id: id.clone(), paths: vec![PathBuf::new(), "link".into()] }]);
    let ready = Ready {
        driver: "blk".into(),
        source: "/dev/vdc".into(),
        fstype: "ext4".into(),
        options: vec!["noatime".into()],
        fs_group: Some((7, true)),
        paths: vec![PathBuf::new(), "real/place".into()],
        ..Ready::default()
    };
    answer.send(Ok(vec![ready])).unwrap();
    // The answer does not go into the middle of another request.
    let whole = super::request("StartContainer", vec![1; 600]);
    let other = frame(5, REQUEST, &whole);
    filter.from_peer(&other[..HEADER_LEN + 560], &mut to_peer, &mut to_agent);
    assert!(!poll(&mut filter, &mut to_peer, &mut to_agent));
    filter.from_peer(&other[HEADER_LEN + 560..], &mut to_peer, &mut to_agent);
    assert!(poll(&mut filter, &mut to_peer, &mut to_agent));
    assert!(to_peer.is_empty());
    let passed = of_agent(&to_agent);
    let (stream, made) = passed.last().unwrap();
    assert_eq!(*stream, 1);
    let storage = &made.storages[0];
    assert_eq!((storage.driver.as_str(), storage.source.as_str()), ("blk", "/dev/vdc"));
    assert_eq!((storage.fstype.as_str(), storage.options.as_slice()), ("ext4", &["noatime".to_owned()][..]));
    assert_eq!((storage.fs_group.group_id, storage.fs_group.group_change_policy), (7, 1));
    let sources: Vec<_> = made.OCI.Mounts.iter().map(|mount| mount.source.clone()).collect();
    assert_eq!(sources, [format!("{VOLUMES}/{id}"), format!("{VOLUMES}/{id}/real/place")]);
    assert!(made.OCI.Linux.Namespaces.iter().any(|namespace| namespace.Path == PODNS));
}

#[test]
fn a_failed_volume_is_an_error_of_its_container() {
    let notice = Arc::new(Slow::default());
    let mut filter = Intercept::new(notice.clone(), PODNS.into());
    let (mut to_peer, mut to_agent) = (BytesMut::new(), BytesMut::new());
    for stream in [1, 3] {
        filter.from_peer(&sent(stream, &container(&"0a".repeat(16))), &mut to_peer, &mut to_agent);
    }
    notice.next().1.send(Err("volume pvc-1: no disk came".into())).unwrap();
    drop(notice.next());
    assert!(poll(&mut filter, &mut to_peer, &mut to_agent));
    assert!(to_agent.is_empty());
    let answers = frames(&to_peer);
    assert_eq!(answers.iter().map(|(head, _)| head.stream).collect::<Vec<_>>(), [1, 3]);
    let words = ttrpc_frame::Response::parse_from_bytes(&answers[0].1).unwrap().status.message.clone();
    assert!(words.contains("pvc-1"), "{words}");
}

#[test]
fn a_raw_device_has_the_vms_numbers_and_none_of_the_nodes() {
    let notice = Arc::new(Slow::default());
    let mut filter = Intercept::new(notice.clone(), PODNS.into());
    let (mut to_peer, mut to_agent) = (BytesMut::new(), BytesMut::new());
    let id = "0a".repeat(16);
    let mut container = CreateContainerRequest::new();
    container.devices.push(Device {
        type_: "peerpod-volume".into(),
        vm_path: id.clone(),
        container_path: "/dev/xvda".into(),
        ..Device::default()
    });
    let linux = container.OCI.mut_or_insert_default().Linux.mut_or_insert_default();
    let (path, numbers) = ("/dev/xvda".to_owned(), (7, 3));
    linux.Devices.push(LinuxDevice {
        Path: path,
        Type: "b".into(),
        Major: numbers.0,
        Minor: numbers.1,
        ..LinuxDevice::default()
    });
    linux.Resources.mut_or_insert_default().Devices.push(LinuxDeviceCgroup {
        Allow: true,
        Type: "b".into(),
        Major: numbers.0,
        Minor: numbers.1,
        Access: "rwm".into(),
        ..LinuxDeviceCgroup::default()
    });
    filter.from_peer(&sent(1, &container), &mut to_peer, &mut to_agent);
    let ready = Ready {
        driver: "mmioblk".into(),
        source: "/dev/vdb".into(),
        device: Some((254, 16)),
        read_only: true,
        ..Ready::default()
    };
    notice.next().1.send(Ok(vec![ready])).unwrap();
    assert!(poll(&mut filter, &mut to_peer, &mut to_agent));
    let made = of_agent(&to_agent).remove(0).1;
    let device = &made.devices[0];
    assert_eq!((device.type_.as_str(), device.vm_path.as_str()), ("mmioblk", "/dev/vdb"));
    assert_eq!((made.OCI.Linux.Devices[0].Major, made.OCI.Linux.Devices[0].Minor), (254, 16));
    let rules = &made.OCI.Linux.Resources.Devices;
    assert_eq!(rules.len(), 1);
    assert_eq!((rules[0].Major, rules[0].Minor, rules[0].Access.as_str()), (254, 16, "rm"));

    // The placeholder of a raw volume has the numbers of /dev/full, and the container keeps that.
    let linux = container.OCI.mut_or_insert_default().Linux.mut_or_insert_default();
    let rules = &mut linux.Resources.mut_or_insert_default().Devices;
    let device = &mut linux.Devices[0];
    (device.Type, device.Major, device.Minor) = ("c".into(), 1, 7);
    (rules[0].Type, rules[0].Major, rules[0].Minor) = ("c".into(), 1, 7);
    filter.from_peer(&sent(3, &container), &mut to_peer, &mut to_agent);
    let ready = Ready { driver: "mmioblk".into(), device: Some((254, 16)), ..Ready::default() };
    notice.next().1.send(Ok(vec![ready])).unwrap();
    to_agent.clear();
    assert!(poll(&mut filter, &mut to_peer, &mut to_agent));
    let made = of_agent(&to_agent).remove(0).1;
    let device = &made.OCI.Linux.Devices[0];
    assert_eq!((device.Type.as_str(), device.Major, device.Minor), ("b", 254, 16));
    let rules: Vec<_> =
        made.OCI.Linux.Resources.Devices.iter().map(|rule| (rule.Type.as_str(), rule.Major)).collect();
    assert_eq!(rules, [("c", 1), ("b", 254)]);
}
