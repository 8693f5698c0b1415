//! Tests what a machine gets from its cloud, in one boot: the firmware has the strings of EC2 and of Azure, a service of
//! the test answers as the metadata service of both, and disks have the identities that clouds give them.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, UNIX_EPOCH};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use peerpod_proto::guest::request::Body;
use peerpod_proto::guest::{Volume, VolumeStats};
use peerpod_volume::{GuestVolume, Identity, Mode, Source, VolumeId};

use super::machine::{Folder, PATIENCE, Vm, Wanted};
use super::vm::{Home, plan, user_data, words};

/// Address of the node in the VM's network.
const NODE: &str = "169.254.169.100";
const TOKEN: &str = "bm90aGluZw==";
const EVENTS: &str = "GET /metadata/scheduledevents?api-version=2020-07-01 HTTP/1.1";
/// Time at which the cloud takes the VM back.
const END: &str = "Mon, 19 Sep 2050 18:29:47 GMT";

/// Metadata service of EC2 (version 2, which demands a token) and of Azure.
struct Service {
    user_data: String,
    /// Azure's scheduled events.
    events: Mutex<String>,
    /// Requests and the status of their answers.
    asked: Mutex<Vec<String>>,
}

impl Service {
    /// Starts the service. Returns its port on this machine, too. Each answer has a connection of its own.
    fn start(user_data: String) -> (u16, Arc<Service>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        // The cloud halts the VM for a moment, and does not take it back.
        let events = Mutex::new(event("Freeze", "Mon, 19 Sep 2050 18:00:00 GMT"));
        let service = Arc::new(Service { user_data, events, asked: Mutex::default() });
        let ours = service.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let Ok(mut stream) = stream else { return };
                let lines = BufReader::new(&stream).lines().map_while(Result::ok);
                let request: Vec<String> = lines.take_while(|line| !line.is_empty()).collect();
                let (status, body) = ours.answer(&request);
                let line = request.first().cloned().unwrap_or_default();
                ours.asked.lock().unwrap().push(format!("{line}: {status}"));
                let head = format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\n", body.len());
                // A client that does not wait for the answer will ask again.
                drop(write!(stream, "{head}Connection: close\r\n\r\n{body}"));
            }
        });
        (port, service)
    }

    fn answer(&self, request: &[String]) -> (&'static str, String) {
        let has = |header: &str| request.iter().any(|line| line.eq_ignore_ascii_case(header));
        let body = match request.first().map_or("", String::as_str) {
            "PUT /latest/api/token HTTP/1.1" if has("x-aws-ec2-metadata-token-ttl-seconds: 60") => {
                TOKEN.to_owned()
            }
            "GET /latest/user-data HTTP/1.1" if has(&format!("x-aws-ec2-metadata-token: {TOKEN}")) => {
                self.user_data.clone()
            }
            line if line.starts_with("GET /metadata/instance/compute/userData?") && has("metadata: true") => {
                BASE64_STANDARD.encode(&self.user_data)
            }
            EVENTS if has("metadata: true") => self.events.lock().unwrap().clone(),
            _ => return ("401 Unauthorized", String::new()),
        };
        ("200 OK", body)
    }

    /// Waits until the VM has had the answer to such a request.
    fn until_asked(&self, line: &str) {
        let deadline = Instant::now() + *PATIENCE;
        while !self.asked.lock().unwrap().iter().any(|asked| asked.starts_with(line)) {
            assert!(Instant::now() < deadline, "no {line} within {:?}", *PATIENCE);
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Returns Azure's list with one event.
fn event(kind: &str, at: &str) -> String {
    serde_json::json!({"DocumentIncarnation": 1, "Events": [{"EventType": kind, "NotBefore": at}]})
        .to_string()
}

/// Returns disks: the device for QEMU, and its identity in a cloud. QEMU has no vmbus, and no vendor's bytes of an NVMe
/// namespace: unit tests alone cover these two. Page 0x83 in Google's form and the model of Azure's NVMe controller
/// are files that the probe mounts over sysfs.
fn disks() -> Vec<(&'static str, Identity)> {
    vec![
        ("scsi-hd,bus=scsi.0,lun=0,serial=6000c29a-one", Identity::Serial("6000c29a-one".into())),
        ("scsi-hd,bus=scsi.0,lun=1,wwn=0x5000c50015ea71aa", Identity::Wwn("0x5000C50015EA71AA".into())),
        ("scsi-hd,bus=scsi.0,lun=2,device_id=pp-one", Identity::ById("google-pp-one".into())),
        ("scsi-hd,bus=scsi.0,lun=7", Identity::Lun(7)),
        ("nvme-ns,bus=ec2,nsid=1", Identity::Serial("vol0abc".into())),
        ("nvme-ns,bus=azure,nsid=5", Identity::Lun(3)),
        ("nvme-ns,bus=azure,nsid=6", Identity::Lun(4)),
    ]
}

/// Returns the size in bytes of a disk; no two have the same.
fn size(number: usize) -> u64 {
    (1 + number as u64) << 20
}

fn qemu(network: &str) -> Vec<String> {
    let mut qemu = words(&["-netdev", network, "-device", "virtio-net-pci,netdev=n"]);
    qemu.extend(words(&["-smbios", "type=1,manufacturer=Amazon EC2"]));
    qemu.extend(words(&["-smbios", "type=3,asset=7783-7084-3265-9085-8269-3286-77"]));
    for controller in ["virtio-scsi-pci,id=scsi", "nvme,id=ec2,serial=vol0abc", "nvme,id=azure,serial=azure"]
    {
        qemu.extend(words(&["-device", controller]));
    }
    for (number, (device, _)) in disks().into_iter().enumerate() {
        let size = size(number);
        let zeros = format!("driver=null-co,node-name=d{number},size={size},read-zeroes=on");
        qemu.extend(words(&["-blockdev", &zeros, "-device", &format!("{device},drive=d{number}")]));
    }
    qemu
}

fn id(number: usize) -> VolumeId {
    VolumeId::of("test", &number.to_string())
}

fn volumes() -> Vec<Volume> {
    let volume = |(number, (device, identity)): (usize, (&str, Identity))| {
        let descriptor = GuestVolume {
            version: 1,
            id: id(number),
            name: device.to_owned(),
            source: Source::AttachedBlock { volume: "v".into(), zone: None, attach: Default::default() },
            mode: Mode::Block,
            read_only: false,
        };
        let (descriptor, identity) = (serde_json::to_vec(&descriptor), serde_json::to_vec(&identity));
        Volume { descriptor: descriptor.unwrap(), identity: identity.unwrap(), ..Volume::default() }
    };
    disks().into_iter().enumerate().map(volume).collect()
}

/// Uses the providers' own descriptions: firmware strings, addresses, token, notice. Nothing else can be reached from
/// this network, least of all a metadata service of the machine that the test runs on.
#[test]
fn a_machine_of_clouds_has_its_user_data_its_disks_and_the_notice_of_its_end() {
    let folder = Folder::new("clouds");
    let mut home = Home::new();
    let mut user_data = user_data(&home.relay, home.port, 300);
    user_data.node.addresses = vec![format!("{NODE}:{}", home.port).parse().unwrap()];
    let (port, service) = Service::start(user_data.to_json());
    let forward = |to: &str, port: u16| format!(",guestfwd=tcp:{to}-cmd:/bin/busybox nc 127.0.0.1 {port}");
    let network = "user,id=n,restrict=on,net=169.254.169.0/24".to_owned()
        + &forward("169.254.169.254:80", port)
        + &forward(&format!("{NODE}:{}", home.port), home.port);
    let (line, qemu) = ("probe=cloud-disks".to_owned(), qemu(&network));
    let mut vm = Vm::boot(&folder, Wanted { line, qemu, ..Wanted::default() });
    let said = vm.says("the link is up");
    home.relay.up(&home.runtime);
    assert!(said.contains("found user-data"), "{said}");
    {
        let asked = service.asked.lock().unwrap();
        // A slow service is asked again; an abandoned connection had no request in it yet.
        let mut answered = asked.iter().filter(|line| !line.starts_with(':'));
        assert!(answered.all(|line| line.ends_with(": 200 OK")), "{asked:?}");
        let mut ec2 = asked.iter().filter(|line| line.contains(" /latest/"));
        assert!(ec2.next().is_some_and(|first| first.starts_with("PUT ")), "{asked:?}");
        assert!(ec2.any(|line| line.starts_with("GET ")), "{asked:?}");
    }

    vm.says("PROBE disguised disks");
    let mut plan = plan(300);
    plan.network.mut_or_insert_default().underlay.mut_or_insert_default().node_address = NODE.into();
    plan.volumes = volumes();
    let reply = home.relay.ask(&home.runtime, Body::Personalise(plan));
    assert_eq!(reply.error, "", "{}", vm.console());
    for (number, (device, identity)) in disks().into_iter().enumerate() {
        println!("asking for {device} by {identity:?}");
        let stats = VolumeStats { id: id(number).to_string(), ..VolumeStats::default() };
        let reply = home.relay.ask(&home.runtime, Body::VolumeStats(stats));
        assert_eq!(reply.error, "", "{device} by {identity:?}");
        assert_eq!(reply.volume.disk_bytes, size(number), "{device} by {identity:?}");
    }

    service.until_asked(EVENTS);
    *service.events.lock().unwrap() = event("Preempt", END);
    let status = home.relay.told(&home.runtime, |status| status.reclaimed_at_unix_ms != 0);
    let end = httpdate::parse_http_date(END).unwrap().duration_since(UNIX_EPOCH).unwrap();
    assert_eq!(u128::from(status.reclaimed_at_unix_ms), end.as_millis());
}
