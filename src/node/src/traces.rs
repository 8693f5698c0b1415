//! Exports one trace for each start of a pod to an OTLP receiver, over HTTP, as JSON. A start's record has all its times, so
//! a trace is made at the end of the start: it costs nothing before, and a restart of the node loses none of its spans.
//!
//! Spans: `start` from CreateVM to the end; below it one for each stage on the node, of which those of the provider's calls
//! are client spans; below `guest` one for each stage in the VM. The guest reports its times relative to its own boot. Its
//! last stage ends when the node gets its answer, so no clock of the VM is compared with the node's.
//!
//! May touch: the receiver at `node.otlp-endpoint`.

use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use bytes::Bytes;
use http_body_util::Full;
use hyper::Request;
use hyper::header::{CONTENT_TYPE, HOST};
use hyper_util::rt::TokioIo;
use peerpod_base::metrics::Labelled;
use peerpod_proto::guest::StageTime;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tracing::{debug, warn};

use crate::ledger::Record;
use crate::one_line;

/// Traces that may wait for the receiver; more are dropped.
const MOST_WAITING: usize = 256;
/// Time limit of one export. A trace that is not taken then is dropped.
const WITHIN: Duration = Duration::from_secs(10);
/// Limit of the guest's stages in a trace.
const MOST_GUEST_STAGES: usize = 64;
/// Length limit of a text in a trace.
const MOST_TEXT: usize = 1024;
/// Stages that end with an answer of the provider.
const OF_PROVIDER: [&str; 4] = ["placed", "vm_made", "address_known", "volumes_attached"];
/// Kinds of spans: internal, server, client.
const INTERNAL: u8 = 1;
const SERVER: u8 = 2;
const CLIENT: u8 = 3;

/// Takes finished traces. Clones share one queue; the default takes none.
#[derive(Clone, Debug, Default)]
pub struct Tracer(Option<mpsc::Sender<Value>>);

/// Sends the traces of a [`Tracer`].
pub(crate) struct Exporter {
    /// Host and port.
    endpoint: String,
    node: String,
    traces: mpsc::Receiver<Value>,
    /// By result: sent, failed.
    counts: Labelled,
}

impl Tracer {
    /// Makes a queue and the exporter that empties it.
    pub(crate) fn open(endpoint: String, node: String, counts: Labelled) -> (Tracer, Exporter) {
        let (sender, traces) = mpsc::channel(MOST_WAITING);
        (Tracer(Some(sender)), Exporter { endpoint, node, traces, counts })
    }

    /// Exports the trace of a start that has ended: with the guest's stages, or with the cause of its failure. Never waits.
    pub(crate) fn ended(&self, record: &Record, now_ms: u64, guest: &[StageTime], failure: Option<&str>) {
        let Some(sender) = &self.0 else { return };
        let Some(spans) = spans(record, now_ms, guest, failure) else { return };
        if sender.try_send(spans).is_err() {
            debug!(sandbox = %record.id, "too many traces wait; this one is dropped");
        }
    }
}

impl Exporter {
    /// Sends traces for ever.
    pub(crate) async fn run(mut self) {
        while let Some(spans) = self.traces.recv().await {
            let sent = timeout(WITHIN, self.send(spans)).await;
            let sent = sent.unwrap_or_else(|_| Err(anyhow!("no answer within {WITHIN:?}")));
            let result = if sent.is_ok() { "sent" } else { "failed" };
            self.counts.get_or_create(&[("result", result)]).inc();
            if let Err(error) = sent {
                warn!(error = format!("{error:#}"), endpoint = self.endpoint, "trace not sent");
            }
        }
        // Without a tracer nothing is left to do; the end of a task counts as a fault.
        std::future::pending().await
    }

    async fn send(&self, spans: Value) -> Result<()> {
        let resource = attributes(&[("service.name", "peerpod-node"), ("k8s.node.name", &self.node)]);
        let scope = json!({"name": "peerpod-node", "version": env!("CARGO_PKG_VERSION")});
        let scoped = json!([{"scope": scope, "spans": spans}]);
        let body = json!({"resourceSpans": [{"resource": {"attributes": resource}, "scopeSpans": scoped}]});
        let stream = TcpStream::connect(&self.endpoint).await.context("connect")?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
        // A dropped set aborts its task.
        let _connection = JoinSet::from_iter([async move { drop(connection.await) }]);
        let request = Request::post("/v1/traces")
            .header(HOST, &self.endpoint)
            .header(CONTENT_TYPE, "application/json")
            .body(Full::new(Bytes::from(body.to_string())))?;
        let status = sender.send_request(request).await?.status();
        ensure!(status.is_success(), "status {status}");
        Ok(())
    }
}

/// Reads the header `traceparent` of W3C Trace Context; `None`: it is malformed, or the caller records no trace.
pub(crate) fn traceparent(text: &str) -> Option<String> {
    let parts: Vec<&str> = text.split('-').collect();
    let [version, trace, span, flags, ..] = parts[..] else { return None };
    let is_hex = |text: &str, length| {
        text.len() == length && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
    };
    let is_valid =
        is_hex(version, 2) && version != "ff" && is_hex(trace, 32) && is_hex(span, 16) && is_hex(flags, 2);
    let is_null = trace.bytes().all(|b| b == b'0') || span.bytes().all(|b| b == b'0');
    let is_sampled = u8::from_str_radix(flags, 16).is_ok_and(|flags| flags & 1 == 1);
    (is_valid && !is_null && is_sampled).then(|| format!("00-{trace}-{span}-01"))
}

/// Builds the spans of a start; `None`: there are no random numbers for their ids.
fn spans(record: &Record, now_ms: u64, guest: &[StageTime], failure: Option<&str>) -> Option<Value> {
    let parent: Option<Vec<&str>> = record.trace.parent.as_ref().map(|text| text.split('-').collect());
    let (trace, parent) = match parent.as_deref() {
        Some([_, trace, span, _]) => ((*trace).to_owned(), (*span).to_owned()),
        _ => (id::<16>()?, String::new()),
    };
    let (begin, end) = (record.created_ms, now_ms.max(record.created_ms));
    let nanos = |ms: u64| ms.saturating_mul(1_000_000);
    let span = |parent: &str, name: &str, kind: u8, from: u64, to: u64| -> Option<(String, Value)> {
        let id = id::<8>()?;
        let span = json!({
            "traceId": trace, "spanId": id, "parentSpanId": parent, "name": name, "kind": kind,
            "startTimeUnixNano": from.to_string(), "endTimeUnixNano": to.max(from).to_string(),
        });
        Some((id, span))
    };
    let (root, mut start) = span(&parent, "start", SERVER, nanos(begin), nanos(end))?;
    start["attributes"] = start_attributes(record);
    if let Some(why) = failure {
        start["status"] = json!({"code": 2, "message": one_line(why, MOST_TEXT)});
    }
    let (mut all, mut before) = (vec![start], begin);
    for stage in &record.trace.stages {
        let at = begin.saturating_add(stage.at_ms).max(before);
        let kind = if OF_PROVIDER.contains(&stage.name.as_str()) { CLIENT } else { INTERNAL };
        all.push(span(&root, &stage.name, kind, nanos(before), nanos(at))?.1);
        before = at;
    }
    let micros = |stage: &StageTime| stage.at_us.saturating_add(stage.took_us);
    if let Some(last) = guest.iter().map(micros).max() {
        // The boot of the VM, on the node's clock.
        let zero = nanos(end).saturating_sub(last.saturating_mul(1000)).max(nanos(begin));
        let at = |us: u64| zero.saturating_add(us.saturating_mul(1000)).min(nanos(end));
        let (parent, whole) = span(&root, "guest", INTERNAL, zero, nanos(end))?;
        all.push(whole);
        for stage in guest.iter().take(MOST_GUEST_STAGES) {
            let name = one_line(&stage.name, 64);
            all.push(span(&parent, &name, INTERNAL, at(stage.at_us), at(micros(stage)))?.1);
        }
    }
    Some(Value::from(all))
}

fn start_attributes(record: &Record) -> Value {
    let mut known = vec![("peerpod.sandbox", record.id.as_str())];
    if let Some(pod) = &record.pod {
        known.extend([("k8s.namespace.name", pod.namespace.as_str()), ("k8s.pod.name", pod.name.as_str())]);
        known.extend(pod.uid.as_deref().map(|uid| ("k8s.pod.uid", uid)));
    }
    known.extend(record.phase.vm().map(|vm| ("host.id", vm.as_str())));
    if let Some(chosen) = &record.wanted.chosen {
        let named = [("host.type", &chosen.instance_type), ("cloud.availability_zone", &chosen.zone)];
        known.extend(named.into_iter().filter_map(|(key, value)| Some((key, value.as_deref()?))));
        known.extend(chosen.market.map(|market| ("peerpod.market", market.word())));
    }
    attributes(&known)
}

fn attributes(known: &[(&str, &str)]) -> Value {
    known.iter().map(|(key, value)| json!({"key": key, "value": {"stringValue": value}})).collect()
}

/// Draws an id, as hex.
fn id<const N: usize>() -> Option<String> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).ok()?;
    Some(hex::encode(bytes))
}

#[cfg(test)]
mod tests {
    use peerpod_provider_api::InstanceId;

    use super::*;
    use crate::sandbox::phase::Phase;

    const PARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    fn record() -> Record {
        let mut record = Record::tombstone("a".parse().unwrap(), 10_000);
        record.phase = Phase::Running { vm: InstanceId::new("i-1").unwrap() };
        record.trace.parent = traceparent(PARENT);
        for (stage, at) in [("recorded", 10_000), ("vm_made", 12_000), ("running", 18_000)] {
            record.reached(stage, at);
        }
        record
    }

    fn stage(name: &str, at_us: u64, took_us: u64) -> StageTime {
        StageTime { name: name.into(), at_us, took_us, ..StageTime::default() }
    }

    fn times(span: &Value) -> (u64, u64) {
        let time = |key: &str| span[key].as_str().unwrap().parse::<u64>().unwrap() / 1_000_000;
        (time("startTimeUnixNano"), time("endTimeUnixNano"))
    }

    #[test]
    fn a_trace_has_the_stages_of_node_and_guest_on_the_nodes_clock() {
        let guest = [stage("boot", 0, 1_500_000), stage("agent", 4_000_000, 1_000_000)];
        let spans = spans(&record(), 18_000, &guest, None).unwrap();
        let find = |name: &str| spans.as_array().unwrap().iter().find(|span| span["name"] == name).unwrap();
        let (start, made, boot) = (find("start"), find("vm_made"), find("boot"));
        assert_eq!(
            (start["parentSpanId"].as_str(), start["kind"].as_u64()),
            (Some("b7ad6b7169203331"), Some(2))
        );
        assert!(spans.as_array().unwrap().iter().all(|span| span["traceId"] == PARENT[3..35]));
        assert_eq!((times(start), times(made)), ((10_000, 18_000), (10_000, 12_000)));
        assert_eq!((made["kind"].as_u64(), &made["parentSpanId"]), (Some(3), &start["spanId"]));
        // The guest's last stage ends with the start, so it booted 5 s before.
        assert_eq!((times(boot), times(find("agent"))), ((13_000, 14_500), (17_000, 18_000)));
        assert_eq!(boot["parentSpanId"], find("guest")["spanId"]);
    }

    #[test]
    fn a_lying_guest_stays_inside_the_start_and_a_failure_has_its_cause() {
        let lies = [stage("boot", 0, u64::MAX), stage("\n", u64::MAX, 1)];
        let spans = spans(&record(), 18_000, &lies, Some("quota")).unwrap();
        for span in spans.as_array().unwrap() {
            let (from, to) = times(span);
            assert!((10_000..=18_000).contains(&from) && (from..=18_000).contains(&to), "{span}");
        }
        assert_eq!(spans[0]["status"]["message"], "quota");
    }

    #[test]
    fn only_valid_and_sampled_parents_count() {
        assert_eq!(traceparent(PARENT).as_deref(), Some(PARENT));
        for bad in [
            "",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00",
            "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-00000000000000000000000000000000-b7ad6b7169203331-01",
            "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
            "00-0af7-b7ad6b7169203331-01",
        ] {
            assert_eq!(traceparent(bad), None, "{bad}");
        }
    }
}
