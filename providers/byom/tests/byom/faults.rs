//! Machines with faults: each error names the machine, the cause and the remedy, and no faulty machine gets a pod.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use peerpod_provider_api::{CreateRequest, Error, Provider, Size};
use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;

use super::common::{Site, TestCloud, key, placed, request};

/// Settings of a provider that waits for nothing.
const QUICK: [(&str, &str); 2] = [("connect-timeout", "2s"), ("call-timeout", "2s")];

fn contains(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part} in {text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_with_another_host_key_is_never_used() {
    let site = Site::start(2);
    {
        let mut machine = site.machine(0);
        machine.configure(&site.folder().join("other_key"));
        machine.reboot();
    }
    site.until("it runs", || site.machine(0).is_published());
    let provider = site.provider(&[]);
    let preflight = provider.preflight().await.unwrap();
    contains(
        &preflight.warnings.join(""),
        &[&site.address(0), "SHA256:", "is not pinned", "pin its new key"],
    );
    contains(&preflight.facts.join(""), &["1 distrusted", "1 free", "quota machines: 1 of 2 "]);
    let wish = placed(&*provider, &request("a")).await.unwrap();
    assert_eq!(wish.placement.as_ref().unwrap().as_str(), site.address(1));
    provider.create(&wish, &key("host", 0)).await.unwrap();
    let error = provider.place(&request("b")).await.unwrap_err();
    assert_eq!(error.class(), "capacity");
    contains(&error.to_string(), &["no machine of the pool is free", "is not pinned", "it has a pod"]);
    assert!(site.machine(0).files().names() == ["machine"], "nothing was sent to the strange machine");
    let mut registry = Registry::default();
    provider.register_metrics(&mut registry);
    let mut metrics = String::new();
    encode(&mut metrics, &registry).unwrap();
    contains(&metrics, &["{state=\"distrusted\"} 1", "{state=\"ours\"} 1", "{state=\"free\"} 0"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn host_keys_of_a_folder_are_for_every_machine() {
    let site = Site::start(1);
    let folder = site.folder().join("keys");
    fs::create_dir(&folder).unwrap();
    let dir = folder.display().to_string();
    let settings = [("known-hosts-file", ""), ("host-keys-dir", dir.as_str())];
    let error = site.provider(&settings).preflight().await.unwrap_err().to_string();
    contains(&error, &["it has 0 files *.pub", "ssh_host_ed25519_key.pub"]);
    fs::copy(site.folder().join("other_key.pub"), folder.join("1.pub")).unwrap();
    let error = site.provider(&settings).preflight().await.unwrap_err().to_string();
    contains(&error, &["is not pinned"]);
    fs::copy(site.folder().join("host_key.pub"), folder.join("2.pub")).unwrap();
    assert!(site.provider(&settings).preflight().await.unwrap().warnings.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_or_refused_key_is_named_with_its_remedy() {
    let site = Site::start(1);
    let file = |name: &str| site.folder().join(name).display().to_string();
    let (other, none, public, nonsense) =
        (file("other_key"), file("none"), file("key.pub"), file("nonsense"));
    fs::write(&nonsense, "nonsense").unwrap();
    fs::set_permissions(&nonsense, fs::Permissions::from_mode(0o600)).unwrap();
    for (setting, value, class, parts) in [
        ("private-key-file", &other, "auth", ["refuses the key", "authorized keys"]),
        ("private-key-file", &none, "auth", ["no such file", "ssh-keygen -t ed25519"]),
        ("private-key-file", &public, "auth", ["read the private key", "chmod 600"]),
        ("private-key-file", &nonsense, "auth", ["read the private key", "mount a key"]),
        ("known-hosts-file", &none, "transient", ["read its host keys", "ssh-keyscan"]),
        ("known-hosts-file", &public, "transient", ["it has none of", "ssh-keyscan"]),
    ] {
        let error = site.provider(&[(setting, value)]).preflight().await.unwrap_err();
        assert_eq!(error.class(), class, "{error}");
        contains(&error.to_string(), &parts);
        assert!(!error.to_string().contains("PRIVATE KEY"), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_with_a_full_disk_is_left_and_freed() {
    let site = Site::start(2);
    // One has room for nothing, the other one for the claim and not for user-data.
    let full = |number: usize, room: usize| {
        let files = site.machine(number).files();
        fs::write(files.0.join("filler"), vec![0; (256 << 10) - room]).ok();
        files.remove("filler");
        fs::write(files.0.join("filler"), vec![0; (256 << 10) - room]).ok();
    };
    let provider = site.provider(&[]);
    let wish = CreateRequest { user_data: "x".repeat(60 << 10), ..request("a") };
    let first = placed(&*provider, &wish).await.unwrap();
    let number = usize::from(first.placement.as_ref().unwrap().as_str() == site.address(1));
    full(number, 0);
    let error = provider.create(&first, &key("full", 0)).await.unwrap_err();
    assert_eq!(error.class(), "capacity", "{error}");
    contains(&error.to_string(), &[&site.address(number), "write claim", "may be full; reboot"]);
    let second = placed(&*provider, &wish).await.unwrap();
    assert_ne!(second.placement, first.placement);
    full(1 - number, 16 << 10);
    site.machine(1 - number).reboots = false;
    let error = provider.create(&second, &key("full", 1)).await.unwrap_err();
    assert_eq!(error.class(), "capacity", "{error}");
    contains(&error.to_string(), &["write user-data", "may be full"]);
    assert!(!site.machine(1 - number).files().has("user-data"));
    // The claim is given up: a list has the machine rebooted.
    let free = || async {
        provider.list_owned().await.unwrap();
        site.machine(1 - number).files().has("reboot")
    };
    let deadline = tokio::time::Instant::now() + super::common::PATIENCE;
    while !free().await {
        assert!(tokio::time::Instant::now() < deadline, "its claim is freed");
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    }
    site.machine(1 - number).reboots = true;
    site.until("it is free", || site.claimed().is_empty());
    assert!(site.delivered().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_that_is_not_ready_gets_no_pod() {
    let site = Site::start(1);
    let provider = || site.provider(&QUICK);
    let refused = |error: Error, part: &str| {
        assert_eq!(error.class(), "capacity", "{error}");
        contains(&error.to_string(), &[part]);
    };
    site.machine(0).publishes = false;
    site.machine(0).files().remove("machine");
    refused(provider().place(&request("a")).await.unwrap_err(), "guest program does not run yet");
    site.machine(0).publishes = true;
    site.until("it runs", || site.machine(0).is_published());
    site.machine(0).files().write("user-data", b"{}");
    refused(provider().place(&request("a")).await.unwrap_err(), "user-data and no claim");
    let stale = r#"{"version":1,"boot_id":"00-1","created":0,"marks":{}}"#;
    site.machine(0).files().write("claim", stale.as_bytes());
    refused(provider().place(&request("a")).await.unwrap_err(), "cidata must be a tmpfs");
    site.machine(0).files().write("claim", b"nonsense");
    refused(provider().place(&request("a")).await.unwrap_err(), "it has a pod");
    assert!(provider().list_owned().await.unwrap().is_empty(), "a foreign claim");
    site.machine(0).reboot();
    site.until("it runs", || site.machine(0).is_published());
    let large = CreateRequest { size: Size { vcpus: 5, ..Size::default() }, ..request("a") };
    let error = provider().place(&large).await.unwrap_err();
    assert_eq!(error.class(), "invalid", "{error}");
    contains(&error.to_string(), &["no machine of the pool is large enough", "less than 5 vCPUs"]);
    site.machine(0).kill();
    // The connection is refused, or reset if the kernel was slower.
    refused(provider().place(&request("a")).await.unwrap_err(), "Connection re");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_that_hangs_delays_no_other_one() {
    let site = Site::start(3);
    let provider = site.provider(&QUICK);
    site.machine(0).freeze(super::common::PATIENCE);
    for number in 0..2 {
        let wish = placed(&*provider, &request(&format!("pod-{number}"))).await.unwrap();
        provider.create(&wish, &key("hang", number)).await.unwrap();
    }
    let error = provider.place(&request("c")).await.unwrap_err();
    contains(&error.to_string(), &["no answer within 2s"]);
    site.heal();
    assert_eq!(site.claimed().len(), 2);
}
