//! Makes the guest write its pod's volumes back before its VM is deleted.
//!
//! A pod without a writable volume gets one short try. With one, the node waits while the guest reports progress, and
//! while the link is lost. It asks again after a restart of the guest program or of the relay. It gives up on a guest
//! without progress, on one that needs too long, and on a VM that has ended.

use std::pin::pin;
use std::time::Duration;

use peerpod_proto::guest::{Flush, Reply, Request, Status};
use peerpod_provider_api::InstanceId;
use protobuf::Message;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::sandbox::ports::{CloudError, Guest, Ports};
use crate::spec::SandboxId;

/// Longest time for a guest to write a pod's volumes back, with the time without a link.
const LONGEST: Duration = Duration::from_secs(600);
/// Time without progress after which the node gives up on a guest with a link.
const STALLED: Duration = Duration::from_secs(30);
/// Interval of the checks whether a VM without a link still exists.
const CHECK: Duration = Duration::from_secs(5);
/// Time limit of such a check, which waits for the addresses of a VM that exists.
const CHECK_TAKES: Duration = Duration::from_secs(20);
/// Pause after a call that failed although the guest has a link.
const PAUSE: Duration = Duration::from_secs(1);

/// Flush that is due before the VM is deleted.
#[derive(Clone, Debug)]
pub(crate) enum FlushPlan {
    /// The pod has no writable volume: one try within this time.
    Brief(Duration),
    Volumes,
}

/// Reason for which a flush is not complete.
pub(crate) enum Incomplete {
    /// The guest has answered with this error, or cannot be asked any more.
    Failed(String),
    /// Data of the pod's volumes may be lost.
    GivenUp(String),
}

/// Result of one request.
enum Answer {
    Done(Result<(), Incomplete>),
    /// The guest program or the relay was replaced meanwhile.
    Again(String),
}

/// Tries once. The node bounds the wait itself, too: a relay that does not answer must not keep a VM alive.
pub(crate) async fn brief(ports: &Ports, id: &SandboxId, limit: Duration) -> Result<(), String> {
    match timeout(limit, ports.relay.call(id, request(), limit)).await {
        Ok(Ok(reply)) => answered(&reply),
        Ok(Err(error)) => Err(error.text),
        Err(_) => Err(format!("no answer within {limit:?}")),
    }
}

/// Waits until the guest has written its pod's volumes back.
pub(crate) async fn volumes(ports: &Ports, id: &SandboxId, vm: &InstanceId) -> Result<(), Incomplete> {
    let deadline = Instant::now() + LONGEST;
    let mut guest = ports.relay.guest(id);
    loop {
        // Asked even if the link seems down: the relay may not have reported yet that it is up.
        let last = match once(ports, id, vm, &mut guest, deadline).await {
            Answer::Done(result) => return result,
            Answer::Again(error) => error,
        };
        sleep(PAUSE).await;
        tokio::select! {
            () = linked(&mut guest) => {}
            () = ended(ports, vm) => return Err(has_ended(&last)),
            () = sleep_until(deadline) => {
                return Err(Incomplete::GivenUp(format!("no end within {LONGEST:?}: {last}")));
            }
        }
    }
}

/// Makes one request, and waits for its answer while the guest reports progress. The request outlives the link: the
/// relay fails it when the guest program is another one.
async fn once(
    ports: &Ports,
    id: &SandboxId,
    vm: &InstanceId,
    guest: &mut watch::Receiver<Guest>,
    deadline: Instant,
) -> Answer {
    let mut call = pin!(ports.relay.call(id, request(), LONGEST));
    let mut ended = pin!(ended(ports, vm));
    let (mut lowest, mut connected) = (u64::MAX, true);
    let mut stalled = Instant::now() + STALLED;
    loop {
        // A guest without a link reports no progress.
        let limit = if connected { stalled.min(deadline) } else { deadline };
        tokio::select! {
            reply = &mut call => return match reply {
                Ok(reply) => Answer::Done(answered(&reply).map_err(Incomplete::Failed)),
                // An earlier process of the node has removed the sandbox there, after its flush.
                Err(error) if error.not_served => Answer::Done(Err(Incomplete::Failed(error.text))),
                Err(error) => Answer::Again(error.text),
            },
            Ok(()) = guest.changed() => {}
            () = &mut ended, if !connected => return Answer::Done(Err(has_ended("the link was lost"))),
            () = sleep_until(limit) => {
                let left = match lowest {
                    u64::MAX => "the guest has not reported the bytes that are left".to_owned(),
                    bytes => format!("{bytes} bytes are left"),
                };
                let text = match limit < deadline {
                    true => format!("no progress within {STALLED:?}: {left}"),
                    false => format!("no end within {LONGEST:?}: {left}"),
                };
                return Answer::Done(Err(Incomplete::GivenUp(text)));
            }
        }
        let guest = guest.borrow_and_update();
        let status = Status::parse_from_bytes(&guest.status).unwrap_or_default();
        let progress = status.unwritten_bytes.filter(|left| *left < lowest);
        lowest = progress.unwrap_or(lowest);
        if progress.is_some() || guest.connected != connected {
            (connected, stalled) = (guest.connected, Instant::now() + STALLED);
        }
    }
}

fn has_ended(last: &str) -> Incomplete {
    Incomplete::GivenUp(format!("the VM has ended: {last}"))
}

async fn linked(guest: &mut watch::Receiver<Guest>) {
    // An error means that the node is closing, and this task with it.
    drop(guest.wait_for(|guest| guest.connected).await);
}

fn request() -> Request {
    let mut request = Request::new();
    request.set_flush(Flush::new());
    request
}

fn answered(reply: &Reply) -> Result<(), String> {
    if reply.error.is_empty() { Ok(()) } else { Err(format!("the guest failed: {}", reply.error)) }
}

/// Waits until the provider reports that the VM has ended.
async fn ended(ports: &Ports, vm: &InstanceId) {
    while !matches!(
        timeout(CHECK_TAKES, ports.cloud.addresses(vm)).await,
        Ok(Err(CloudError::NotFound { .. }))
    ) {
        sleep(CHECK).await;
    }
}
