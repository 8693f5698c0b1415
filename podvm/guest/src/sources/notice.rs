//! Asks the cloud's metadata service whether the cloud takes the VM back, where only the VM gets this notice.
//!
//! The description of the cloud has the address, and the part of the answer that means it. The service is asked every few
//! seconds, each time with a limit in time and size. The first notice goes to the node with the guest's status, and ends
//! the questions: a cloud that has announced the end keeps to it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::Deserialize;
use serde_json::Value;
use tokio::time::{sleep, timeout};

use super::{CloudSource, PATIENCE, http};
use crate::status::Status;

/// Pause between two questions. The clouds announce the end 30 seconds before.
const PAUSE: Duration = Duration::from_secs(5);

/// Place of a notice in a metadata service, and its form.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "Written")]
pub(crate) struct SpotNotice {
    request: http::Request,
    form: Form,
    /// Time that is left to the VM if the answer has none.
    left: Duration,
}

/// Form of an answer that contains a notice.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Form {
    /// The whole answer, without white space around it.
    Text(String),
    /// An entry of a list in JSON.
    Entry {
        /// Pointer to the list (RFC 6901).
        list: String,
        /// Members that the entry has.
        members: BTreeMap<String, String>,
        /// Member with the time of the end, in the form of HTTP dates.
        at: Option<String>,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Written {
    http: String,
    #[serde(default)]
    headers: BTreeMap<String, String>,
    token: Option<http::WrittenToken>,
    text: Option<String>,
    list: Option<String>,
    #[serde(default, rename = "where")]
    members: BTreeMap<String, String>,
    at: Option<String>,
    #[serde(default)]
    seconds: u16,
}

impl TryFrom<Written> for SpotNotice {
    type Error = String;

    fn try_from(written: Written) -> Result<SpotNotice, String> {
        let Written { http, headers, token, text, list, members, at, seconds } = written;
        let form = match (text, list) {
            (Some(text), None) if members.is_empty() && at.is_none() => Form::Text(text),
            (None, Some(list)) if list.starts_with('/') && !members.is_empty() => {
                Form::Entry { list, members, at }
            }
            _ => {
                let text =
                    "a notice is `text`, or an entry of a `list` like /Events with the members of `where`";
                return Err(text.to_owned());
            }
        };
        let left = Duration::from_secs(u64::from(seconds));
        Ok(SpotNotice { request: http::Request::new(&http, headers, token)?, form, left })
    }
}

impl SpotNotice {
    /// Asks once. Returns the time at which the cloud takes the VM back; `None` without a notice.
    async fn ask(&self) -> Result<Option<SystemTime>, String> {
        let request = &self.request;
        let answer = timeout(PATIENCE, request.send()).await;
        let answer = answer.unwrap_or_else(|_| Err(format!("no answer within {PATIENCE:?}")));
        let answer = answer.map_err(|why| format!("{request}: {why}"))?;
        self.read(&answer, SystemTime::now()).map_err(|why| format!("{request}: {why}"))
    }

    /// Returns the time in an answer. A notice without a usable time counts from `now`.
    fn read(&self, answer: &[u8], now: SystemTime) -> Result<Option<SystemTime>, String> {
        let (list, members, at) = match &self.form {
            Form::Text(text) => {
                return Ok((answer.trim_ascii() == text.as_bytes()).then(|| now + self.left));
            }
            Form::Entry { list, members, at } => (list, members, at),
        };
        let answer: Value = serde_json::from_slice(answer).map_err(|_| "the answer is no JSON")?;
        let entries = answer.pointer(list).and_then(Value::as_array);
        let entries = entries.ok_or_else(|| format!("the answer has no list {list}"))?;
        let member = |entry: &Value, name: &str| entry.get(name).and_then(Value::as_str).map(str::to_owned);
        let meant = entries
            .iter()
            .filter(|entry| members.iter().all(|(name, value)| member(entry, name).as_ref() == Some(value)));
        let times = meant.map(|entry| {
            let text = at.as_ref().and_then(|at| member(entry, at));
            text.and_then(|text| httpdate::parse_http_date(&text).ok()).unwrap_or(now + self.left)
        });
        Ok(times.min())
    }
}

/// Asks the notices until one answers.
async fn ask(notices: &[SpotNotice]) -> Result<Option<SystemTime>, String> {
    let mut reasons = Vec::new();
    for notice in notices {
        match notice.ask().await {
            Ok(found) => return Ok(found),
            Err(why) => reasons.push(why),
        }
    }
    Err(reasons.join("; "))
}

/// Waits for the cloud's notice, and reports it to the node. Ends at once in a cloud that has none.
pub(crate) async fn watch(sources: Vec<CloudSource>, status: Arc<Status>) {
    let here = sources.into_iter().filter(|source| !source.notice.is_empty() && source.is_here());
    let notices: Vec<SpotNotice> = here.flat_map(|source| source.notice).collect();
    if !notices.is_empty() {
        status.reclaimed(first(&notices, PAUSE).await);
    }
}

/// Asks until there is a notice; returns its time since 1970. Logs a fault once, not with every question.
async fn first(notices: &[SpotNotice], pause: Duration) -> Duration {
    let mut said = String::new();
    loop {
        sleep(pause).await;
        match ask(notices).await {
            Ok(Some(at)) => {
                let left = at.duration_since(SystemTime::now()).unwrap_or_default();
                tracing::warn!(?left, "the cloud takes this VM back");
                return at.duration_since(UNIX_EPOCH).unwrap_or_default();
            }
            Ok(None) => {}
            Err(reason) if reason != said => {
                tracing::warn!(reason, "cannot ask whether the cloud takes this VM back; asking again");
                said = reason;
            }
            Err(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use serde_json::json;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);
    const AT: u64 = 1_474_309_787; // of the text below
    const NOT_BEFORE: &str = "Mon, 19 Sep 2016 18:29:47 GMT";

    fn notice(description: &Value) -> Result<SpotNotice, String> {
        serde_json::from_value(description.clone()).map_err(|error| error.to_string())
    }

    /// Reads the notices of a provider's description, at another address.
    fn of_provider(name: &str, address: SocketAddr) -> Vec<SpotNotice> {
        let file = format!("{}/../../providers/{name}/guest.toml", env!("CARGO_MANIFEST_DIR"));
        let text = std::fs::read_to_string(file).unwrap().replace("169.254.169.254", &address.to_string());
        let description: Value = basic_toml::from_str(&text).unwrap();
        let all = description["notice"].as_array().unwrap();
        all.iter().map(|one| notice(one).unwrap()).collect()
    }

    fn seconds(notice: &SpotNotice, answer: &str) -> Result<Option<u64>, String> {
        let found = notice.read(answer.as_bytes(), UNIX_EPOCH + MINUTE)?;
        Ok(found.map(|at| at.duration_since(UNIX_EPOCH).unwrap().as_secs()))
    }

    #[test]
    fn an_answer_of_each_form_is_read() {
        let text = json!({"http": "http://1.2.3.4/x", "text": "TRUE", "seconds": 30});
        let text = notice(&text).unwrap();
        assert_eq!(seconds(&text, "TRUE\n"), Ok(Some(90)));
        assert_eq!(seconds(&text, "FALSE"), Ok(None));
        assert_eq!(seconds(&text, ""), Ok(None));

        let list = json!({
            "http": "http://1.2.3.4/x", "list": "/Events", "where": {"EventType": "Preempt"}, "at": "NotBefore",
        });
        let list = notice(&list).unwrap();
        let event = |kind: &str, at: &str| json!({"EventId": "1", "EventType": kind, "NotBefore": at});
        let answer = |events: &[Value]| json!({"DocumentIncarnation": 1, "Events": events}).to_string();
        let (reboot, preempt) = (event("Reboot", ""), event("Preempt", NOT_BEFORE));
        assert_eq!(seconds(&list, &answer(&[])), Ok(None));
        assert_eq!(seconds(&list, &answer(std::slice::from_ref(&reboot))), Ok(None));
        assert_eq!(seconds(&list, &answer(&[reboot, preempt.clone()])), Ok(Some(AT)));
        let earlier = event("Preempt", "Mon, 19 Sep 2016 18:29:46 GMT");
        assert_eq!(seconds(&list, &answer(&[preempt, earlier])), Ok(Some(AT - 1)), "the first of two");
        for begun in ["", "soon"] {
            assert_eq!(seconds(&list, &answer(&[event("Preempt", begun)])), Ok(Some(60)), "now");
        }
        for (wrong, named) in [("", "no JSON"), ("{}", "no list /Events"), ("{\"Events\": 1}", "no list")] {
            assert!(seconds(&list, wrong).unwrap_err().contains(named), "{wrong}");
        }
    }

    #[test]
    fn mistakes_of_a_description_are_named() {
        for (wrong, named) in [
            (json!({"text": "x"}), "http"),
            (json!({"http": "http://1.2.3.4/x"}), "`text`, or an entry"),
            (json!({"http": "http://1.2.3.4/x", "text": "x", "list": "/y"}), "`text`, or an entry"),
            (json!({"http": "http://1.2.3.4/x", "text": "x", "at": "y"}), "`text`, or an entry"),
            (json!({"http": "http://1.2.3.4/x", "list": "/y"}), "`text`, or an entry"),
            (json!({"http": "http://1.2.3.4/x", "list": "y", "where": {"a": "b"}}), "`text`, or an entry"),
            (json!({"http": "http://example/x", "text": "x"}), "by its address"),
            (json!({"http": "http://1.2.3.4/x", "text": "x", "minutes": 1}), "minutes"),
        ] {
            let error = notice(&wrong).unwrap_err();
            assert!(error.contains(named), "{named}: {error}");
        }
    }

    /// Serves these answers in turn, the last one for ever; each is a status line's rest and a body. Returns the requests.
    async fn serve(
        listener: TcpListener,
        answers: Vec<(&'static str, String)>,
        requests: usize,
    ) -> Vec<String> {
        let mut received = Vec::new();
        let last = answers.len() - 1;
        while received.len() < requests {
            let (status, body) = &answers[received.len().min(last)];
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = Vec::new();
            while !request.ends_with(b"\r\n\r\n") {
                assert!(stream.read_buf(&mut request).await.unwrap() > 0);
            }
            received.push(String::from_utf8(request).unwrap());
            let head = format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\n", body.len());
            stream.write_all(format!("{head}\r\n{body}").as_bytes()).await.unwrap();
        }
        received
    }

    #[tokio::test]
    async fn a_metadata_service_is_asked_until_it_has_a_notice() {
        let events = json!({"Events": [{"EventType": "Preempt", "NotBefore": NOT_BEFORE}]}).to_string();
        for (cloud, header, path, no, yes) in [
            ("azure", "Metadata: true", "/metadata/scheduledevents?", "{\"Events\": []}", events.as_str()),
            ("gcp", "Metadata-Flavor: Google", "/computeMetadata/v1/instance/preempted ", "FALSE", "TRUE"),
        ] {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap();
            let mut notices = of_provider(cloud, address);
            notices.truncate(1); // the tests' network has no other address of a cloud
            let answers = vec![
                ("200 OK", no.to_owned()),
                ("503 Service Unavailable", String::new()),
                ("302 Found\r\nLocation: http://127.0.0.1:1/", yes.to_owned()),
                ("200 OK", yes.to_owned()),
            ];
            let began = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
            let serving = tokio::spawn(serve(listener, answers, 4));
            let at = timeout(MINUTE, first(&notices, Duration::from_millis(1))).await.unwrap();
            match cloud {
                "azure" => assert_eq!(at.as_secs(), AT),
                _ => assert!(at >= began + Duration::from_secs(30), "{at:?}"),
            }
            for request in serving.await.unwrap() {
                assert!(request.starts_with(&format!("GET {path}")), "{request}");
                assert!(request.contains(&format!("\r\n{header}\r\n")), "{request}");
            }
        }
    }

    #[tokio::test]
    async fn the_next_address_is_asked_where_one_does_not_answer() {
        let closed = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = |address| notice(&json!({"http": format!("http://{address}/x"), "text": "TRUE"})).unwrap();
        let notices = [at(closed), at(listener.local_addr().unwrap())];
        let serving = tokio::spawn(serve(listener, vec![("200 OK", "FALSE".to_owned())], 1));
        assert_eq!(ask(&notices).await, Ok(None));
        serving.await.unwrap();
        let error = ask(&notices).await.unwrap_err();
        assert_eq!(error.matches("connect").count(), 2, "{error}");
    }
}
