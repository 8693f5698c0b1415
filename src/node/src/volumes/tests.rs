use std::net::IpAddr;

use peerpod_provider_api::{Capabilities, CreateRequest, Created, IdempotencyKey, Owned, Preflight};
use peerpod_volume::records::Pod;

use super::*;

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        Folder(std::env::temp_dir().join(format!("peerpod-volumes-{}-{name}", std::process::id())))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).ok();
    }
}

pub(crate) fn record(uid: &str, handle: &str, attach: Attach) -> Record {
    Record {
        version: VERSION,
        volume: GuestVolume {
            version: VERSION,
            id: VolumeId::of("driver", handle),
            name: handle.into(),
            source: Source::AttachedBlock { volume: handle.into(), zone: None, attach },
            mode: Mode::Block,
            read_only: false,
        },
        pod: Pod { uid: uid.into(), namespace: "shop".into(), name: "web-0".into() },
        driver: "driver".into(),
        handle: handle.into(),
        target_path: "/t".into(),
        marker: "m".into(),
        fence: Some(7),
    }
}

fn pod(uid: Option<&str>) -> PodRef {
    PodRef { namespace: "shop".into(), name: "web-0".into(), uid: uid.map(str::to_owned) }
}

fn handles(volumes: &Volumes, pod: &PodRef) -> Vec<String> {
    let found = volumes.of_pod(pod).unwrap();
    found.map(|all| all.volumes.into_iter().map(|one| one.volume.name).collect()).unwrap_or_default()
}

#[test]
fn a_pod_gets_its_own_volumes_and_an_unknown_pod_none() {
    let folder = Folder::new("own");
    let volumes = Volumes::new(&folder.0, None, None);
    assert_eq!(handles(&volumes, &pod(None)), [""; 0]);
    volumes.records.put(&record("u-1", "a", Attach::Provider)).unwrap();
    assert_eq!(handles(&volumes, &pod(None)), ["a"], "one pod of that name");
    assert_eq!(handles(&volumes, &pod(Some("u-9"))), [""; 0], "another pod of that name");
    let other = PodRef { name: "web-1".into(), ..pod(None) };
    assert_eq!(handles(&volumes, &other), [""; 0]);
    // The UID alone would find another pod's volumes.
    assert!(volumes.of_pod(&PodRef { uid: Some("u-1".into()), ..other }).unwrap_err().contains("shop/web-0"));
}

#[test]
fn two_pods_of_one_name_are_distinguished_or_refused() {
    let folder = Folder::new("two");
    let volumes = Volumes::new(&folder.0, None, None);
    volumes.records.put(&record("u-1", "a", Attach::Provider)).unwrap();
    volumes.records.put(&record("u-2", "b", Attach::Provider)).unwrap();
    let error = volumes.of_pod(&pod(None)).unwrap_err();
    assert!(error.contains("u-1, u-2") && error.contains("shop/web-0"), "{error}");
    assert_eq!(handles(&volumes, &pod(Some("u-2"))), ["b"], "CRI-O sends the UID");
    let known = |uids: Vec<&'static str>| {
        let pods: Pods = Arc::new(move |_, _| uids.iter().map(|uid| (*uid).to_owned()).collect());
        Volumes::new(&folder.0, None, Some(pods))
    };
    assert!(known(vec!["u-1"]).of_pod(&pod(None)).is_err(), "the watch may not have shown the new one yet");
    volumes.note_vm("u-1", "s", None, false).unwrap();
    assert_eq!(
        handles(&known(vec!["u-2"]), &pod(None)),
        ["b"],
        "the API server reports the pod, and the other had its VM"
    );
    volumes.note_vm("u-2", "t", None, false).unwrap();
    assert_eq!(handles(&known(vec!["u-3"]), &pod(None)), [""; 0], "a new pod without volumes");
    assert!(known(vec![]).of_pod(&pod(None)).is_err());
    assert!(known(vec!["u-1", "u-2"]).of_pod(&pod(None)).is_err());
}

#[tokio::test]
async fn a_drivers_attachment_counts_for_its_vm_alone() {
    let folder = Folder::new("driver");
    let volumes = Volumes::new(&folder.0, None, None);
    let record = record("u-1", "a", Attach::Driver);
    volumes.records.put(&record).unwrap();
    let found = volumes.of_pod(&pod(None)).unwrap().unwrap();
    assert!(found.disks().is_empty() && !found.is_ready());
    volumes.note_vm("u-1", "s", Some("i-2"), false).unwrap();
    let attached = |instance: &str| peerpod_volume::records::Attached {
        version: VERSION,
        instance: instance.into(),
        identity: Identity::Serial(instance.into()),
    };
    let id = &record.volume.id;
    volumes.records.put_attached("u-1", id, &attached("i-1")).unwrap();
    let late = volumes.attached("u-1", id, "i-2", Duration::from_millis(1)).await.unwrap_err();
    assert!(late.to_string().contains("i-2"), "{late}");
    let waiting = {
        let (volumes, id) = (volumes.clone(), id.clone());
        tokio::spawn(async move { volumes.attached("u-1", &id, "i-2", Duration::from_secs(20)).await })
    };
    volumes.records.put_attached("u-1", id, &attached("i-2")).unwrap();
    assert_eq!(waiting.await.unwrap().unwrap(), Identity::Serial("i-2".into()));

    volumes.records.remove(&record.pod, id).unwrap();
    volumes.note_vm("u-1", "s", Some("i-2"), true).unwrap();
    assert!(volumes.records.pods().unwrap().is_empty(), "nothing is left of a pod that is over");
}

#[test]
fn a_network_disk_is_named_by_its_uri_and_must_be_attached() {
    let disk = |source: Source| {
        let mut record = record("u", "v", Attach::Provider);
        record.volume.source = source;
        let volume = PodVolume::of(record);
        assert!(volume.is_missing());
        volume.disk().map(|disk| disk.volume)
    };
    let iscsi = |portals: &[&str]| Source::Iscsi {
        portals: portals.iter().map(|one| (*one).to_owned()).collect(),
        iqn: "iqn.2026-01.t:a".into(),
        lun: 3,
        secret: None,
    };
    assert_eq!(
        disk(iscsi(&["[fd00::1]:3260", "10.0.0.1:3260"])).as_deref(),
        Some("iscsi://[fd00::1]:3260/iqn.2026-01.t:a/3")
    );
    assert_eq!(disk(iscsi(&[])), None);
    let nbd = |host: &str| Source::Nbd { host: host.into(), port: 10809, export: "e".into() };
    assert_eq!(disk(nbd("h")).as_deref(), Some("nbd://h:10809/e"));
    assert_eq!(disk(nbd("fd00::1")).as_deref(), Some("nbd://[fd00::1]:10809/e"));
}

#[test]
fn a_pod_with_an_unattachable_volume_gets_no_vm() {
    let folder = Folder::new("chap");
    let mut chap = record("u", "v", Attach::Provider);
    let secret = peerpod_volume::SecretRef { namespace: "shop".into(), name: "chap".into() };
    chap.volume.source =
        Source::Iscsi { portals: vec!["p:1".into()], iqn: "iqn".into(), lun: 0, secret: Some(secret) };
    Records::new(&folder.0).put(&chap).unwrap();
    let why = Volumes::new(&folder.0, None, None).of_pod(&pod(None)).unwrap_err();
    assert!(why.contains("secret shop/chap") && why.contains("volume v"), "{why}");
}

#[test]
fn credentials_of_a_share_reach_the_guest_only() {
    let folder = Folder::new("share");
    let (records, volumes) = (Records::new(&folder.0), Volumes::new(&folder.0, None, None));
    let mut share = record("u", "v", Attach::Provider);
    let secret = Some(SecretRef { namespace: "shop".into(), name: "files".into() });
    share.volume.source = Source::Smb { server: "s".into(), share: "x".into(), secret };
    share.volume.mode = Mode::Filesystem { fs_type: None, mount_options: Vec::new(), fs_group: None };
    records.put(&share).unwrap();
    let why = volumes.of_pod(&pod(None)).unwrap_err();
    assert!(why.contains("secret shop/files") && why.contains("volume v"), "{why}");

    let credentials = peerpod_volume::Credentials {
        version: peerpod_volume::credentials::VERSION,
        username: Zeroizing::new("joe".into()),
        password: Zeroizing::new("hidden, word".into()),
        domain: None,
    };
    records.put_credentials("u", &share.volume.id, Some(&credentials)).unwrap();
    records.put(&record("u", "w", Attach::Provider)).unwrap();
    let found = volumes.of_pod(&pod(None)).unwrap().unwrap();
    // The texts that go into the ledger and to the relay.
    let kept = format!("{}{:?}{:?}", serde_json::to_string(&found).unwrap(), found, found.for_relay());
    assert!(!kept.contains("hidden") && !kept.contains("joe"), "{kept}");
    let told = volumes.credentials(&found).unwrap();
    for (one, told) in found.volumes.iter().zip(&told) {
        let read = told.as_ref().map(|told| peerpod_volume::Credentials::read(told).unwrap());
        assert!(read == (one.volume.id == share.volume.id).then(|| credentials.clone()));
    }
    // While it is being unpublished, the guest keeps its credentials.
    records.withdraw("u", &share.volume.id).unwrap();
    assert!(volumes.credentials(&found).unwrap().iter().all(Option::is_none));
}

/// Provider with these VMs, all of them running.
pub(crate) struct Vms(pub(crate) Mutex<Vec<&'static str>>);

#[async_trait]
impl Provider for Vms {
    fn name(&self) -> &'static str {
        "vms"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::minimal(0)
    }

    async fn preflight(&self) -> Result<Preflight, CloudError> {
        Ok(Preflight::default())
    }

    async fn create(&self, _: &CreateRequest, _: &IdempotencyKey) -> Result<Created, CloudError> {
        Err(CloudError::invalid("no VM is made here"))
    }

    async fn addresses(&self, _: &InstanceId) -> Result<Vec<IpAddr>, CloudError> {
        Ok(Vec::new())
    }

    async fn delete(&self, _: &InstanceId) -> Result<(), CloudError> {
        Ok(())
    }

    async fn list_owned(&self) -> Result<Vec<Owned>, CloudError> {
        let owned = |id: &&'static str| Owned {
            id: InstanceId::new(*id).unwrap(),
            key: None,
            name: None,
            state: OwnedState::Running,
            addresses: Vec::new(),
            created: None,
            node: None,
        };
        Ok(self.0.lock().iter().map(owned).collect())
    }
}

#[tokio::test]
async fn volumes_of_an_earlier_sandbox_are_taken_until_its_vm_is_gone() {
    let folder = Folder::new("earlier");
    let records = Records::new(&folder.0);
    records.put(&record("u", "v", Attach::Driver)).unwrap();
    let provider = Arc::new(Vms(Mutex::new(vec!["vm-0", "vm-1"])));
    let storage = PodStorage { volumes: Volumes::new(&folder.0, None, None), provider: provider.clone() };
    let found = storage.volumes(&pod(None)).await.unwrap().unwrap();
    let (first, second): (SandboxId, SandboxId) = ("first".parse().unwrap(), "second".parse().unwrap());
    for _ in 0..2 {
        storage.expect_vm(&first, &found).await.unwrap();
    }
    // The record of the first sandbox is lost from here on: nothing else knows that it has a VM.
    let error = storage.expect_vm(&second, &found).await.unwrap_err();
    assert!(error.to_string().contains("sandbox first"), "{error}");
    storage.note("u", &first, Some(&InstanceId::new("vm-1").unwrap()), false).await.unwrap();
    for sandbox in [&first, &second] {
        let error = storage.expect_vm(sandbox, &found).await.unwrap_err();
        assert!(matches!(error.retry(), Retry::After(_)), "{error}");
        assert!(error.to_string().contains("VM vm-1 still exists"), "{error}");
    }
    assert_eq!(records.vm("u").unwrap().unwrap().sandbox, "first", "the note is unchanged");
    provider.0.lock().pop();
    storage.expect_vm(&second, &found).await.unwrap();
    assert_eq!(records.vm("u").unwrap().unwrap().sandbox, "second");
}

#[test]
fn the_end_of_an_earlier_vm_does_not_free_volumes_of_a_later_one() {
    let folder = Folder::new("later");
    let records = Records::new(&folder.0);
    records.put(&record("u", "v", Attach::Driver)).unwrap();
    let volumes = Volumes::new(&folder.0, None, None);
    volumes.note_vm("u", "first", Some("vm-1"), false).unwrap();
    volumes.note_vm("u", "second", None, false).unwrap();
    volumes.note_vm("u", "first", Some("vm-1"), true).unwrap();
    let noted = records.vm("u").unwrap().unwrap();
    assert!(noted.sandbox == "second" && !noted.gone, "{noted:?}");
    volumes.note_vm("u", "second", None, true).unwrap();
    assert!(records.vm("u").unwrap().unwrap().gone);
}
