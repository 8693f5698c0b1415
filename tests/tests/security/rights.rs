//! Tests the rights of the relay: the files that open and the path sockets that answer inside its container of the chart.

use std::collections::BTreeSet;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::{env, fs};

use nix::libc;
use peerpod_base::config::Sources;
use peerpod_relay::config::RelayConfig;
use peerpod_relay::{app, harden};
use peerpod_tests::{PATIENCE, Sandbox};
use peerpod_world::{Container, Daemons, Settings, World, eventually};

/// Variable with the path of the relay's settings, in the process that looks round.
const CONFIG: &str = "PEERPOD_TEST_RELAY_CONFIG";

/// Returns all files of this process's root, in no order. Follows no symbolic link, and returns those of `/proc`, which
/// lead to files without a path of theirs. Leaves out threads, descriptors and namespaces of this process itself.
fn everything() -> Vec<PathBuf> {
    let own =
        ["task", "fd", "ns"].map(|name| Path::new("/proc").join(std::process::id().to_string()).join(name));
    let (mut folders, mut found) = (vec![PathBuf::from("/")], Vec::new());
    while let Some(folder) = folders.pop() {
        // Some folders of /proc are gone by now, and some are closed to this user.
        for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
            let path = entry.path();
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => folders.extend(Some(path).filter(|path| !own.contains(path))),
                Ok(kind) if !kind.is_symlink() || path.starts_with("/proc") => found.push(path),
                _ => {}
            }
        }
    }
    found
}

/// Runs with the relay's rights in its container; it is not a test of its own. A file of `/proc` counts if it leads to
/// another file system, as the links to a process's files do.
#[test]
#[ignore = "role: started by the test of the relay's files"]
fn looks_round_with_the_rights_of_the_relay() {
    let Ok(config) = env::var(CONFIG) else { return };
    // Before the rights are gone, because hardly any folder can be listed without them.
    let all = everything();
    let of_kernel = fs::metadata("/proc").unwrap().dev();
    let sources = Sources::from_process(["--config".to_owned(), config], []);
    let (config, ..) = RelayConfig::load(sources).unwrap();
    harden::harden(config.listen.port(), &app::files(&config).unwrap()).unwrap();
    println!(); // ends the harness's own line
    for path in &all {
        let mut open = fs::OpenOptions::new();
        open.read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY);
        if let Ok(file) = open.open(path)
            && !(path.starts_with("/proc") && file.metadata().unwrap().dev() == of_kernel)
        {
            println!("opens {}", path.display());
        }
        if fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket())
            && UnixStream::connect(path).is_ok()
        {
            println!("connects to {}", path.display());
        }
    }
    println!("looked at {} files", all.len());
}

fn write(path: PathBuf) {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(path.parent().unwrap()).unwrap();
    fs::OpenOptions::new().create_new(true).write(true).mode(0o600).open(path).unwrap();
}

/// The whole list. `docs/security-model.md` names the sockets and the containers' root file systems, which no Landlock
/// rule can leave out.
#[tokio::test]
async fn the_relay_opens_its_own_files_and_bundles_and_nothing_else_of_the_node() {
    let world = World::new().unwrap();
    let daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let sandbox = Sandbox::start(&world, &daemons, "files").await.unwrap();
    let node = world.folder();
    for file in [
        "kubelet/pki/kubelet-client-current.pem",
        "kubelet/pods/1/volumes/kubernetes.io~projected/kube-api-access/token",
        "kubelet/pods/1/volumes/kubernetes.io~secret/tls/tls.key",
        "bundles/k8s.io/one/config.json",
        "bundles/k8s.io/one/rootfs/etc/shadow",
    ] {
        write(node.join(file));
    }
    let _sockets = ["bundles/k8s.io/one/attach", "kubelet/pods/1/plugin.sock", "kubelet/other.sock"]
        .map(|name| UnixListener::bind(node.join(name)).unwrap());
    let container = Container {
        name: "relay",
        volumes: vec![
            ("config", daemons.config().to_owned()),
            ("run", daemons.run_dir()),
            ("state-relay", daemons.state_dir().join("relay")),
            ("state-inbox", daemons.state_dir().join("inbox")),
            ("kubelet", node.join("kubelet/pods")),
            ("bundles-0", node.join("bundles")),
        ],
        env: vec![format!("{CONFIG}={}", daemons.config().display())],
        ..Container::default()
    };
    let role = "rights::looks_round_with_the_rights_of_the_relay";
    let (starter, words) = container
        .command(&env::current_exe().unwrap(), &[role, "--exact", "--ignored", "--nocapture"])
        .unwrap();
    let words: Vec<_> = words.iter().map(AsRef::as_ref).collect();
    let log = node.join("files.log");
    let mut child = world.spawn_in_pid_namespace(&starter, &words, &log).unwrap();
    let ended = eventually("the end of the look round", PATIENCE, async || child.try_wait().unwrap()).await;
    let text = fs::read_to_string(&log).unwrap();
    assert!(ended.unwrap().success() && text.contains("looked at "), "{text}");

    let found = text.lines().filter(|line| line.starts_with("opens ") || line.starts_with("connects to "));
    let found =
        found.map(|line| line.replace(&format!("{}/", node.display()), "").replace(&sandbox.id, "ID"));
    let expected = [
        "connects to bundles/k8s.io/one/attach",
        "connects to kubelet/pods/1/plugin.sock",
        "connects to run/hypervisor.sock",
        "connects to run/node-admin.sock",
        "connects to run/node.sock",
        "connects to run/pods/ID/agent.ttrpc",
        "connects to run/relay.sock",
        "connects to run/volumes.sock",
        "opens bundles/k8s.io/one/config.json",
        "opens bundles/k8s.io/one/rootfs/etc/shadow",
        "opens run/relay.lock",
        "opens state/relay/sandboxes/ID.json",
        "opens state/relay/tls.json",
    ];
    assert_eq!(found.collect::<BTreeSet<_>>(), expected.map(str::to_owned).into());
    sandbox.lives().await.unwrap();
    sandbox.stop(&daemons).await.unwrap();
}
