//! Tests over a real socket with real descriptors; the kind under test takes one TCP listener.

use std::net::TcpListener;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::Instant;

use peerpod_base::fd_handoff::{MAX_DESCRIPTORS, hand_off, listen};
use tokio::net::UnixListener;
use tokio::task::spawn_blocking;

use super::*;

const SHORT: Duration = Duration::from_millis(300);
const LONG: Duration = Duration::from_secs(10);

#[derive(Default)]
struct Listening(Mutex<Option<OwnedFd>>);

#[async_trait]
impl Kind for Listening {
    fn name(&self) -> &'static str {
        "listening"
    }

    async fn held(&self, _sandbox: Option<&SandboxId>) -> Option<Value> {
        self.0.lock().unwrap().as_ref().map(|_| Value::from("one"))
    }

    async fn take(&self, sandbox: Option<&SandboxId>, mut handed: Passed) -> Result<Value, String> {
        let listener = handed.listener("listener", AddressFamily::INET)?;
        handed.finish()?;
        *self.0.lock().unwrap() = Some(listener);
        Ok(Value::from(sandbox.map(ToString::to_string)))
    }
}

struct Place {
    path: PathBuf,
    kind: Arc<Listening>,
    _bound: socket::Bound,
    serving: tokio::task::JoinHandle<()>,
}

impl Place {
    fn new(name: &str) -> Place {
        let folder = std::env::temp_dir().join(format!("peerpod-fd-handoff-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("relay-fds.sock");
        let (listener, bound) = socket::bind_packets(&path).unwrap();
        let kind = Arc::new(Listening::default());
        let serving =
            tokio::spawn(serve(listener, vec![kind.clone() as Arc<dyn Kind>], Pause::default(), SHORT));
        Place { path, kind, _bound: bound, serving }
    }

    /// Passes the descriptors and returns the relay's answer.
    async fn give<F: AsFd>(&self, header: HandoffHeader, descriptors: &[F]) -> Result<HandoffAnswer, String> {
        let path = self.path.clone();
        let owned: Vec<OwnedFd> =
            descriptors.iter().map(|fd| fd.as_fd().try_clone_to_owned().unwrap()).collect();
        let work = move || {
            let borrowed: Vec<BorrowedFd<'_>> = owned.iter().map(AsFd::as_fd).collect();
            hand_off(&path, &header, &borrowed, LONG).map_err(|error| error.to_string())
        };
        spawn_blocking(work).await.unwrap()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.serving.abort();
        drop(std::fs::remove_dir_all(self.path.parent().unwrap()));
    }
}

fn header(names: &[&str]) -> HandoffHeader {
    let descriptors = names.iter().map(|name| (*name).to_owned()).collect();
    HandoffHeader { descriptors, ..HandoffHeader::new("listening", Some("a")) }
}

/// Counts the descriptors of this process that refer to the file with this inode.
fn copies_of(inode: &str) -> usize {
    let all = std::fs::read_dir("/proc/self/fd").unwrap();
    all.filter(|entry| {
        std::fs::read_link(entry.as_ref().unwrap().path()).is_ok_and(|to| to.to_str() == Some(inode))
    })
    .count()
}

fn inode(fd: &impl AsRawFd) -> String {
    let link = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).unwrap();
    link.to_str().unwrap().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_accepted_descriptor_is_named_and_reported() {
    let place = Place::new("taken");
    let ask = HandoffHeader { ask: true, ..header(&[]) };
    assert!(!place.give::<OwnedFd>(ask.clone(), &[]).await.unwrap().held);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let answer = place.give(header(&["listener"]), &[&listener]).await.unwrap();
    assert_eq!((answer.held, answer.detail), (true, Value::from("a")));
    assert_eq!(copies_of(&inode(&listener)), 2, "the giver's and the taker's");
    let answer = place.give::<OwnedFd>(ask, &[]).await.unwrap();
    assert_eq!((answer.held, answer.detail), (true, Value::from("one")));
    // A later listener replaces it.
    place.give(header(&["listener"]), &[&TcpListener::bind("127.0.0.1:0").unwrap()]).await.unwrap();
    assert_eq!(copies_of(&inode(&listener)), 1);
    assert!(place.path.metadata().is_ok_and(|it| {
        use std::os::unix::fs::PermissionsExt;
        it.permissions().mode() & 0o777 == 0o600
    }));
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_are_reported_and_no_descriptor_stays_open() {
    let place = Place::new("wrong");
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let udp = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let file = std::fs::File::open("/dev/null").unwrap();
    let cases: [(HandoffHeader, Vec<BorrowedFd<'_>>, &str); 8] = [
        (HandoffHeader { version: 2, ..header(&["listener"]) }, vec![listener.as_fd()], "version 2"),
        (HandoffHeader { kind: "x".into(), ..header(&["listener"]) }, vec![listener.as_fd()], "kind \"x\""),
        (
            HandoffHeader { sandbox: Some("../x".into()), ..header(&["listener"]) },
            vec![listener.as_fd()],
            "sandbox id",
        ),
        (header(&["listener"]), vec![], "has no descriptors"),
        (
            header(&["listener"]),
            vec![listener.as_fd(), listener.as_fd()],
            "2 descriptors arrived, 1 are named",
        ),
        (header(&["listener", "more"]), vec![listener.as_fd(), listener.as_fd()], "more is unknown"),
        (header(&["listener"]), vec![udp.as_fd()], "required is family 2"),
        (header(&["listener"]), vec![file.as_fd()], "not a socket"),
    ];
    for (header, descriptors, why) in cases {
        let said = place.give(header, &descriptors).await.unwrap_err();
        assert!(said.contains(why), "{said} lacks {why}");
    }
    assert_eq!(copies_of(&inode(&listener)), 1, "only the test's own");
    assert_eq!(copies_of(&inode(&udp)), 1, "only the test's own");
    assert!(place.kind.0.lock().unwrap().is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn descriptors_over_the_limit_are_all_closed() {
    use rustix::net::{
        SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, connect, sendmsg,
        socket_with,
    };
    let place = Place::new("many");
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let too_many = vec![listener.as_fd(); MAX_DESCRIPTORS + 8];
    let refused = place.give(header(&["listener"]), &too_many).await.unwrap_err();
    assert!(refused.contains("at most"), "{refused}");
    // A sender that ignores the limit.
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    connect(&socket, &SocketAddrUnix::new(&place.path).unwrap()).unwrap();
    let mut room = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS + 8))];
    let mut control = SendAncillaryBuffer::new(&mut room);
    assert!(control.push(SendAncillaryMessage::ScmRights(&too_many)));
    let text = serde_json::to_vec(&header(&["listener"])).unwrap();
    sendmsg(&socket, &[io::IoSlice::new(&text)], &mut control, SendFlags::empty()).unwrap();
    let answered = spawn_blocking(move || {
        let mut bytes = [0; 1024];
        let (n, _) = rustix::net::recv(&socket, &mut bytes, rustix::net::RecvFlags::empty()).unwrap();
        String::from_utf8_lossy(&bytes[..n]).into_owned()
    });
    let answered = answered.await.unwrap();
    assert!(answered.contains("more descriptors"), "{answered}");
    assert_eq!(copies_of(&inode(&listener)), 1, "only the test's own");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_peer_is_disconnected_and_delays_no_other() {
    use rustix::net::{SocketAddrUnix, SocketFlags, connect, socket_with};
    let place = Place::new("silent");
    let silent: Vec<OwnedFd> = (0..CONNECTIONS - 1)
        .map(|_| {
            let socket =
                socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
            connect(&socket, &SocketAddrUnix::new(&place.path).unwrap()).unwrap();
            socket
        })
        .collect();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    place.give(header(&["listener"]), &[&listener]).await.unwrap();
    for socket in silent {
        let (answer, _) = spawn_blocking(move || {
            let started = Instant::now();
            let mut bytes = [0; 1024];
            let (n, _) = rustix::net::recv(&socket, &mut bytes, rustix::net::RecvFlags::empty()).unwrap();
            (String::from_utf8_lossy(&bytes[..n]).into_owned(), started.elapsed())
        })
        .await
        .unwrap();
        assert!(answer.contains("no descriptors arrived"), "{answer}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_that_does_not_answer_is_given_up() {
    let folder = std::env::temp_dir().join(format!("peerpod-fd-handoff-{}-mute", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join("relay-fds.sock");
    let nobody = hand_off(&path, &header(&[]), &[], SHORT).unwrap_err().to_string();
    assert!(nobody.contains("relay-fds.sock"), "{nobody}");
    // A socket of another type under the name.
    let other = UnixListener::bind(&path).unwrap();
    assert!(hand_off(&path, &header(&[]), &[], SHORT).is_err());
    drop(other);
    std::fs::remove_file(&path).unwrap();
    let _mute = listen(&path).unwrap();
    let (ask, to) = (HandoffHeader { ask: true, ..header(&[]) }, path.clone());
    let (ends, ended) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let began = Instant::now();
        let outcome = hand_off(&to, &ask, &[], SHORT);
        ends.send((began.elapsed(), outcome.map(drop)))
    });
    let (took, outcome) = ended.recv_timeout(LONG).expect("it waits for its time limit alone");
    assert!(outcome.is_err() && took >= SHORT, "{took:?}");
    std::fs::remove_dir_all(folder).unwrap();
}
