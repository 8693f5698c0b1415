//! Reports VMs that end without a delete, by one call that waits for changes in the folder. May call
//! `CreatePropertyCollector`, `CreateContainerView`, `CreateFilter` and `WaitForUpdatesEx`.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::{self, BoxStream};
use peerpod_common::backoff::Backoff;
use peerpod_provider_api::{Error, EventKind, InstanceId, ProviderEvent};
use peerpod_provider_cloud::{ApiCall, names};
use peerpod_provider_rest::Failure;
use roxmltree::Node;
use tokio::sync::broadcast;
use tokio::sync::broadcast::error::RecvError;
use tokio::time::{Instant, sleep};

use crate::Vsphere;
use crate::client::Vcenter;
use crate::inventory::Object;
use crate::soap::{self, Method, Moref, child, children, element, text, value};

/// Owner of these calls, for the scheduler.
const OWNER: &str = "events";
const WHAT: &str = "wait for events";
/// Longest time that the vCenter waits for a change, in seconds. Shorter than any proxy's patience.
const WAIT_SECONDS: u64 = 15;
/// Pauses before another connection.
const PAUSES: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// Pause before another look for a folder that is not there yet.
const NO_FOLDER: Duration = Duration::from_secs(10);

/// Events that wait for a listener.
pub(crate) fn channel() -> broadcast::Sender<ProviderEvent> {
    broadcast::channel(1024).0
}

/// Returns the events from now on; the stream ends with the provider.
pub(crate) fn stream(vsphere: &Arc<Vsphere>) -> BoxStream<'static, ProviderEvent> {
    let events = vsphere.ended.subscribe();
    // The first listener starts the one task that waits; later listeners share its events.
    if vsphere.ended.receiver_count() == 1 {
        tokio::spawn(listen(Arc::downgrade(vsphere)));
    }
    let next = |mut events: broadcast::Receiver<ProviderEvent>| async move {
        loop {
            match events.recv().await {
                Ok(event) => return Some((event, events)),
                Err(RecvError::Lagged(_)) => {}
                Err(RecvError::Closed) => return None,
            }
        }
    };
    stream::unfold(events, next).boxed()
}

/// A VM of this node, as the last event showed it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Last {
    name: String,
    is_on: bool,
}

/// Change of one VM.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Change {
    moref: Moref,
    is_gone: bool,
    name: Option<String>,
    is_on: Option<bool>,
}

impl Change {
    fn of(update: Node<'_, '_>) -> Option<Change> {
        let object = Object(update);
        Some(Change {
            moref: object.moref()?,
            is_gone: value(update, "kind")? == "leave",
            name: object.text("name").map(str::to_owned),
            is_on: object.text("runtime.powerState").map(|state| state == "poweredOn"),
        })
    }
}

/// Answer to a call that waits for changes.
#[derive(Debug, Default)]
struct Changes {
    /// Version to continue from; `None`: there was no change.
    version: Option<String>,
    all: Vec<Change>,
    /// Whether more of them follow in the next answer, because an answer has at most 100 objects.
    has_more: bool,
}

/// VMs of this node, and the state of a list that a new connection begins with.
#[derive(Debug, Default)]
struct Followed {
    vms: HashMap<Moref, Last>,
    /// VMs of the list so far; `None`: the list has ended.
    listed: Option<HashSet<Moref>>,
}

impl Followed {
    /// Records the changes of an answer. Returns name and reason of each VM that has ended.
    fn apply(&mut self, prefix: &str, changes: Changes) -> Vec<(String, &'static str)> {
        if let Some(listed) = &mut self.listed {
            listed.extend(changes.all.iter().map(|change| change.moref.clone()));
        }
        let mut ended: Vec<_> =
            changes.all.into_iter().filter_map(|change| follow(&mut self.vms, prefix, change)).collect();
        if !changes.has_more
            && let Some(listed) = self.listed.take()
        {
            // A VM that the list lacks has gone while no call waited.
            let gone: Vec<Moref> = self.vms.keys().filter(|moref| !listed.contains(moref)).cloned().collect();
            let gone = gone.into_iter().map(|moref| Change { moref, is_gone: true, name: None, is_on: None });
            ended.extend(gone.filter_map(|change| follow(&mut self.vms, prefix, change)));
        }
        ended
    }
}

/// Records a change. Returns name and reason of a VM that has ended by it.
fn follow(vms: &mut HashMap<Moref, Last>, prefix: &str, change: Change) -> Option<(String, &'static str)> {
    if change.is_gone {
        let last = vms.remove(&change.moref)?;
        return last.is_on.then_some((last.name, "the vCenter does not have it any more"));
    }
    let last = vms.entry(change.moref.clone()).or_default();
    if let Some(name) = change.name {
        last.name = name;
    }
    if !last.name.starts_with(prefix) {
        vms.remove(&change.moref);
        return None;
    }
    let was_on = last.is_on;
    last.is_on = change.is_on.unwrap_or(was_on);
    (was_on && !last.is_on).then(|| (last.name.clone(), "it was switched off, from inside or outside"))
}

async fn listen(vsphere: Weak<Vsphere>) {
    let mut followed = Followed::default();
    let mut pauses = Backoff::new(PAUSES.0, PAUSES.1);
    loop {
        let since = Instant::now();
        match watch(&vsphere, &mut followed).await {
            Ok(()) => return,
            Err(error) => tracing::debug!("the vCenter sends no events: {error}"),
        }
        if since.elapsed() > PAUSES.1 {
            pauses = Backoff::new(PAUSES.0, PAUSES.1);
        }
        sleep(pauses.pause()).await;
    }
}

/// Reports changes until the provider or its listeners are gone, or the connection fails.
async fn watch(vsphere: &Weak<Vsphere>, followed: &mut Followed) -> Result<(), Error> {
    let Some(here) = listened(vsphere) else { return Ok(()) };
    let (vcenter, prefix) = (here.connected()?.vcenter.clone(), names::prefix(&here.owner));
    let Some(folder) = here.connected()?.folder.find(WHAT).await? else {
        drop(here);
        sleep(NO_FOLDER).await;
        return Err(Error::transient("there is no folder yet"));
    };
    drop(here);
    let collector = collector(&vcenter, &folder).await?;
    let mut version = String::new();
    followed.listed = Some(HashSet::new());
    loop {
        let mut changes = wait(&vcenter, &collector, &version).await?;
        let Some(here) = listened(vsphere) else { return Ok(()) };
        version = changes.version.take().unwrap_or(version);
        followed.apply(&prefix, changes).into_iter().for_each(|(name, why)| here.report(name, why));
    }
}

fn listened(vsphere: &Weak<Vsphere>) -> Option<Arc<Vsphere>> {
    vsphere.upgrade().filter(|vsphere| vsphere.ended.receiver_count() > 0)
}

/// Makes a collector of its own for the wait: one collector answers one call at a time.
async fn collector(vcenter: &Vcenter, folder: &Moref) -> Result<Moref, Failure> {
    let services = vcenter.services().await?;
    let make = async |name: &'static str, this: &Moref, arguments: String| {
        let method = Method { name, this: this.clone(), arguments };
        let made = vcenter.call(ApiCall::new(name, OWNER, WHAT), &method, soap::returned).await?;
        made.ok_or_else(|| Failure::from(Error::transient(format!("{name} returned nothing"))))
    };
    let collector = make("CreatePropertyCollector", &services.property_collector, String::new()).await?;
    let container = folder.xml("container") + &text("type", "VirtualMachine") + &text("recursive", "false");
    let view = make("CreateContainerView", &services.view_manager, container).await?;
    let properties: String = ["name", "runtime.powerState"].map(|path| text("pathSet", path)).concat();
    let properties = element("propSet", &(text("type", "VirtualMachine") + &properties));
    let step = text("type", "ContainerView") + &text("path", "view") + &text("skip", "false");
    let step = soap::typed("selectSet", "TraversalSpec", &step);
    let objects = element("objectSet", &(view.xml("obj") + &text("skip", "true") + &step));
    let filter = element("spec", &(properties + &objects)) + &text("partialUpdates", "false");
    make("CreateFilter", &collector, filter).await?;
    Ok(collector)
}

/// Waits for changes.
async fn wait(vcenter: &Vcenter, collector: &Moref, version: &str) -> Result<Changes, Failure> {
    let name = "WaitForUpdatesEx";
    let options = element("options", &text("maxWaitSeconds", &WAIT_SECONDS.to_string()));
    let method = Method { name, this: collector.clone(), arguments: text("version", version) + &options };
    let until = Instant::now() + Duration::from_secs(2 * WAIT_SECONDS);
    let read = |node: Node<'_, '_>| {
        let Some(set) = child(node, "returnval") else { return Some(Changes::default()) };
        let updates = children(set, "filterSet").flat_map(|filter| children(filter, "objectSet"));
        Some(Changes {
            version: value(set, "version").map(str::to_owned),
            all: updates.filter_map(Change::of).collect(),
            has_more: value(set, "truncated") == Some("true"),
        })
    };
    vcenter.call(ApiCall::new(name, OWNER, WHAT).until(until), &method, read).await
}

impl Vsphere {
    /// Reports the end of a VM.
    fn report(&self, name: String, why: &str) {
        let Ok(id) = InstanceId::new(name) else { return };
        tracing::info!(vm = %id, "VM has ended: {why}");
        // Without a listener the event is not needed.
        self.ended.send(ProviderEvent { id, kind: EventKind::Ended { reason: why.to_owned() } }).ok();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vm_is_gone_when_the_whole_list_lacks_it() {
        let listed = |numbers: &[u32], has_more| {
            let of = |number: &u32| Change {
                moref: Moref { kind: "VirtualMachine".into(), id: number.to_string() },
                is_gone: false,
                name: Some(format!("pp-n-{number}")),
                is_on: Some(true),
            };
            Changes { version: None, all: numbers.iter().map(of).collect(), has_more }
        };
        let mut followed = Followed { listed: Some(HashSet::new()), ..Followed::default() };
        let mut apply = |is_new: bool, changes| {
            if is_new {
                followed.listed = Some(HashSet::new());
            }
            followed.apply("pp-n-", changes).into_iter().map(|(name, _)| name).collect::<Vec<_>>()
        };
        let none = Vec::<String>::new();
        assert_eq!(apply(true, listed(&[1, 2], true)), none);
        assert_eq!(apply(false, listed(&[3], false)), none);
        assert_eq!(apply(true, listed(&[1], true)), none, "the other two may be in the next answer");
        assert_eq!(apply(false, listed(&[3], false)), ["pp-n-2"]);
        assert_eq!(apply(false, Changes::default()), none, "an answer without a change is no list");
    }

    #[test]
    fn a_vm_ends_when_it_was_on_and_is_off_or_gone() {
        let mut vms = HashMap::new();
        let moref = |id: &str| Moref { kind: "VirtualMachine".into(), id: id.into() };
        let change = |id: &str, name: Option<&str>, is_on| Change {
            moref: moref(id),
            is_gone: false,
            name: name.map(str::to_owned),
            is_on,
        };
        let mut ended = |change| follow(&mut vms, "pp-n-", change).map(|(name, _)| name);
        assert_eq!(ended(change("1", Some("pp-n-1"), Some(false))), None, "it was not on yet");
        assert_eq!(ended(change("1", None, Some(true))), None);
        assert_eq!(ended(change("1", None, Some(false))).as_deref(), Some("pp-n-1"));
        assert_eq!(ended(change("2", Some("pp-m-1"), Some(true))), None, "another node's");
        assert_eq!(ended(change("2", None, Some(false))), None);
        assert_eq!(ended(change("3", Some("pp-n-3"), Some(true))), None);
        let gone = |id: &str| Change { is_gone: true, ..change(id, None, None) };
        assert_eq!(ended(gone("3")).as_deref(), Some("pp-n-3"));
        assert_eq!(ended(gone("3")), None, "once");
        assert_eq!(ended(gone("1")), None, "it had ended before");
    }
}
