//! Tests the effects of faults in a plugin: crash, hang, garbage, false answers. The plugin is the Python provider with
//! one fault.

use super::common;
use std::fs;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Command, Stdio};
use std::time::Duration;

use common::{Folder, LIMIT, config, key, request, until};
use peerpod_provider_api::{Error, IdempotencyKey, Provider, Retry};
use peerpod_provider_external::{Endpoint, External, ExternalConfig, SOCKET_VARIABLE};
use tokio::time::timeout;

async fn refused(config: ExternalConfig) -> Error {
    match External::open(config).await {
        Ok(_) => panic!("it was opened"),
        Err(error) => error,
    }
}

/// Returns the process that listens on the provider's socket.
fn listener(folder: &Folder) -> Option<i32> {
    let stream = UnixStream::connect(folder.socket()).ok()?;
    let peer = nix::sys::socket::getsockopt(&stream, nix::sys::socket::sockopt::PeerCredentials);
    peer.ok().map(|peer| peer.pid())
}

/// Repeats a create as the decorator does.
async fn patiently(provider: &External, key: &IdempotencyKey) -> peerpod_provider_api::Created {
    until("a create is answered", || async {
        match provider.create(&request(), key).await {
            Ok(made) => Some(made),
            Err(error) if matches!(error.retry(), Retry::After(_)) => None,
            Err(error) => panic!("{error}"),
        }
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plugin_that_dies_after_the_effect_is_started_again_and_finds_what_it_made() {
    let folder = Folder::new();
    let provider = External::open(folder.faulty("dies-after-create")).await.unwrap();
    let lost = provider.create(&request(), &key(0)).await.unwrap_err();
    assert!(matches!(lost, Error::Transient { .. }), "{lost:?}");
    assert!(lost.to_string().contains("only the same call may be repeated"), "{lost}");
    assert_eq!(folder.machines(), 1);
    let made = patiently(&provider, &key(0)).await;
    assert_eq!(folder.machines(), 1);
    let listed = provider.list_owned().await.unwrap();
    assert_eq!(listed.iter().map(|one| &one.id).collect::<Vec<_>>(), [&made.id]);
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_without_the_plugin_report_its_exit_and_last_output() {
    let folder = Folder::new();
    let config = folder.faulty("becomes-another");
    let provider = External::open(config).await.unwrap();
    drop(provider.create(&request(), &key(0)).await);
    // Its successor is another provider, so it is refused, and every call fails at once.
    let error = until("the successor is refused", || async {
        match provider.list_owned().await {
            Err(error @ Error::Invalid { .. }) => Some(error),
            _ => None,
        }
    })
    .await;
    let text = error.to_string();
    assert!(text.contains("describes itself differently") && text.contains("restart this program"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_ends_instead_of_an_answer_is_made_anew() {
    let folder = Folder::new();
    let provider = External::open(folder.faulty("closes-after-create")).await.unwrap();
    let lost = provider.create(&request(), &key(0)).await.unwrap_err();
    assert!(matches!(lost, Error::Transient { .. }), "{lost:?}");
    patiently(&provider, &key(0)).await;
    assert_eq!(folder.machines(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unresponsive_plugin_is_killed_and_started_again() {
    let folder = Folder::new();
    let mut config = folder.faulty("hangs");
    (config.health_every, config.health_timeout) = (Duration::from_millis(100), Duration::from_millis(300));
    let provider = External::open(config).await.unwrap();
    until("it stopped answering", || async { folder.0.join("struck").exists().then_some(()) }).await;
    let hung = until("it listens", || async { listener(&folder) }).await;
    until("another process listens", || async { listener(&folder).filter(|pid| *pid != hung) }).await;
    patiently(&provider, &key(0)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_without_an_answer_ends_at_its_deadline_and_harms_no_other() {
    let folder = Folder::new();
    let mut config = folder.faulty("slow");
    config.call_timeout = Duration::from_secs(5);
    let provider = External::open(config).await.unwrap();
    let error = timeout(LIMIT, provider.create(&request(), &key(0))).await.unwrap().unwrap_err();
    assert!(matches!(error, Error::Transient { .. }), "{error:?}");
    assert_eq!(provider.list_owned().await.unwrap().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_start_of_a_plugin_names_the_cause() {
    let folder = Folder::new();
    let error = refused(folder.faulty("exits")).await.to_string();
    assert!(error.contains("exit status: 7") && error.contains("there is no region set"), "{error}");

    let nothing = Endpoint::Unix {
        socket: folder.socket(),
        peer_uid: None,
        command: Some(vec!["/no/such/program".into()]),
    };
    let error = refused(config(nothing)).await;
    assert!(
        matches!(error, Error::Invalid { .. }) && error.to_string().contains("/no/such/program"),
        "{error}"
    );

    let mut silent = folder.faulty("silent");
    // Until then Python has started, also on a busy machine.
    silent.handshake_timeout = Duration::from_secs(10);
    let error = refused(silent).await.to_string();
    assert!(error.contains("handshake"), "{error}");

    let mut nobody = folder.dialled();
    fs::remove_file(folder.socket()).unwrap();
    nobody.handshake_timeout = Duration::from_millis(200);
    let error = refused(nobody).await.to_string();
    assert!(error.contains("No such file") && error.contains("start it, or correct its address"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plugin_that_does_not_fit_is_refused_with_the_reason() {
    for (fault, words) in [
        ("another-version", "speaks version 9 of the provider service, this program version 1"),
        ("no-name", "its name \"Not A Name\""),
        ("turns-away", "cluster test is not served here"),
        ("tiny-user-data", "max_user_data of 1"),
    ] {
        let folder = Folder::new();
        let error = refused(folder.faulty(fault)).await.to_string();
        assert!(error.contains(words), "{fault}: {error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn garbage_instead_of_frames_is_an_error_in_time() {
    for fault in ["garbage", "wrong-stream", "endless-frame", "no-frames"] {
        let folder = Folder::new();
        let mut config = folder.faulty(fault);
        config.handshake_timeout = Duration::from_secs(4);
        let error = timeout(LIMIT, refused(config)).await.expect(fault);
        assert!(!error.to_string().is_empty(), "{fault}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn impossible_answers_are_refused() {
    for (fault, words) in [("wrong-id", "instance id"), ("wrong-address", "is no address of a VM")] {
        let folder = Folder::new();
        let provider = External::open(folder.faulty(fault)).await.unwrap();
        let error = provider.create(&request(), &key(0)).await.unwrap_err();
        assert!(matches!(error, Error::Invalid { .. }), "{fault}: {error:?}");
        assert!(error.to_string().contains(words), "{fault}: {error}");
    }
    for (fault, words) in [("lists-twice", "twice in one list"), ("endless-list", "does not come to an end")]
    {
        let folder = Folder::new();
        let provider = External::open(folder.faulty(fault)).await.unwrap();
        provider.create(&request(), &key(0)).await.unwrap();
        let error = provider.list_owned().await.unwrap_err();
        assert!(error.to_string().contains(words), "{fault}: {error}");
    }
    // More than a frame may hold: an error of this call and of no other.
    let folder = Folder::new();
    let provider = External::open(folder.faulty("huge-list")).await.unwrap();
    provider.list_owned().await.unwrap_err();
    provider.create(&request(), &key(0)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_keep_their_class_and_show_no_user_data() {
    let folder = Folder::new();
    let provider = External::open(folder.faulty("strange-class")).await.unwrap();
    let error = provider.create(&request(), &key(0)).await.unwrap_err();
    assert_eq!(error.retry(), Retry::Never);
    assert!(error.to_string().contains("external provider shelf: try it at new moon"), "{error}");
    assert!(error.to_string().contains("moonstruck"), "{error}");

    let folder = Folder::new();
    let provider = External::open(folder.faulty("shows-user-data")).await.unwrap();
    let error = provider.create(&request(), &key(0)).await.unwrap_err().to_string();
    assert!(error.contains("I do not like (user-data)"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plugin_with_much_output_still_works() {
    let folder = Folder::new();
    let provider = External::open(folder.faulty("chatters")).await.unwrap();
    provider.create(&request(), &key(0)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plugin_of_an_earlier_process_is_ended_and_a_foreign_one_is_not() {
    let folder = Folder::new();
    drop(External::open(folder.shelf()).await.unwrap());
    let Endpoint::Unix { command: Some(words), .. } = folder.shelf().endpoint else { panic!() };
    // As a killed node leaves it: the standard input of the program stays open here.
    let mut left = Command::new(&words[0])
        .args(&words[1..])
        .env(SOCKET_VARIABLE, folder.socket())
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    until("it serves", || async { External::open(quick(folder.dialled())).await.ok() }).await;
    let provider = External::open(folder.shelf()).await.unwrap();
    provider.list_owned().await.unwrap();
    let status = left.try_wait().unwrap().expect("it was ended");
    assert!(!status.success());
    drop(provider);

    let folder = Folder::new();
    fs::create_dir_all(folder.socket().parent().unwrap()).unwrap();
    let _stranger = UnixListener::bind(folder.socket()).unwrap();
    let error = refused(folder.shelf()).await.to_string();
    assert!(error.contains("was not started by us"), "{error}");
    assert!(folder.socket().exists(), "the other program's socket is left alone");
}

/// The other program was started by this process too, and has the same mark.
#[tokio::test(flavor = "multi_thread")]
async fn a_program_with_a_living_starter_is_not_ended() {
    let folder = Folder::new();
    let first = External::open(folder.shelf()).await.unwrap();
    let serves = listener(&folder).expect("it listens");
    let error = refused(folder.shelf()).await;
    assert!(matches!(error, Error::Transient { .. }), "{error:?}");
    let text = error.to_string();
    assert!(text.contains("another process keeps its own program there"), "{text}");
    assert!(text.contains("set provider.external.socket"), "{text}");
    assert_eq!(listener(&folder), Some(serves), "the first program goes on");
    first.list_owned().await.unwrap();
    // The opener is gone, so the socket is free.
    drop(first);
    External::open(folder.shelf()).await.unwrap().list_owned().await.unwrap();
}

fn quick(config: ExternalConfig) -> ExternalConfig {
    ExternalConfig { handshake_timeout: Duration::from_millis(300), ..config }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plugin_ends_with_the_provider_object() {
    let folder = Folder::new();
    let provider = External::open(folder.shelf()).await.unwrap();
    let connect = || UnixStream::connect(folder.socket());
    connect().unwrap();
    drop(provider);
    until("no process listens", || async { connect().is_err().then_some(()) }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn our_settings_are_not_in_the_plugins_environment() {
    // All tests share the environment of this process, so the test runs in a process of its own.
    const OURS: &str = "PEERPOD_NODE_NAME";
    if std::env::var_os(OURS).is_none() {
        let mut again = std::process::Command::new(std::env::current_exe().unwrap());
        again.args(["--exact", "faults::our_settings_are_not_in_the_plugins_environment", "--nocapture"]);
        let output = again.env(OURS, "a").output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success() && text.contains("1 passed"), "{text}");
        return;
    }
    let folder = Folder::new();
    let script = "tr '\\0' '\\n' < /proc/self/environ > \"$1\"; echo checked; exit 1";
    let seen = folder.0.join("environment");
    let command = ["/bin/sh", "-c", script, "sh", &seen.display().to_string()].map(str::to_owned).to_vec();
    let endpoint = Endpoint::Unix { socket: folder.socket(), peer_uid: None, command: Some(command) };
    let error = refused(config(endpoint)).await.to_string();
    assert!(error.contains("its last output: checked"), "{error}");
    let seen = fs::read_to_string(seen).unwrap();
    let ours: Vec<_> = seen.lines().filter(|line| line.starts_with("PEERPOD_")).collect();
    assert_eq!(ours, [format!("{SOCKET_VARIABLE}={}", folder.socket().display())]);
}
