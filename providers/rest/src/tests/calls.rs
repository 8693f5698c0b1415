use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use peerpod_base::config::Secret;
use peerpod_provider_api::Error;
use peerpod_provider_cloud::calls::{BucketLimits, Table};
use peerpod_provider_cloud::refusal::{Meaning, Row};
use peerpod_provider_cloud::{ApiCall, Refusals, Scheduler, Wait};
use serde_json::{Value, json};
use tokio::time::Instant;

use super::{Reply, Seen, Server, reply};
use crate::{
    Decision, Dialect, Failure, Hosts, Http, HttpSettings, Next, Request, Rest, Said, Token, TokenSource,
    Tokens, decide, end_of_wait, read,
};

const DIALECT: Dialect = Dialect {
    refusals: Refusals {
        cloud: "Cloud",
        rows: &[
            Row::code("Slow", Meaning::Throttled),
            Row::code("None", Meaning::Capacity),
            Row::status(401..=403, Meaning::Auth),
            Row::status(404..=404, Meaning::NotFound),
            Row::status(500..=599, Meaning::Transient),
        ],
        usual: |_| "do the usual",
    },
    said: |answer| {
        let body = answer.json();
        let text = |pointer| read::text(&body, pointer).unwrap_or_default().to_owned();
        Said { code: text("/error/code"), message: text("/error/message") }
    },
    left: |answer| answer.header("x-left")?.parse().ok(),
};

/// Issues `token-1`, `token-2` and so on.
#[derive(Default)]
struct Numbered(AtomicUsize);

#[async_trait]
impl TokenSource for Numbered {
    async fn fetch(&self, _: &Http) -> Result<Token, Error> {
        let number = self.0.fetch_add(1, Ordering::Relaxed) + 1;
        Ok(Token { secret: Secret::new(format!("token-{number}")), life: Duration::from_secs(3600) })
    }
}

struct Refuses;

#[async_trait]
impl TokenSource for Refuses {
    async fn fetch(&self, _: &Http) -> Result<Token, Error> {
        Err(Error::Auth { text: "get an access token: the account is closed".into() })
    }
}

fn rest_of(server: &Server, source: impl TokenSource + 'static) -> Rest {
    let settings = HttpSettings { ca_file: None, call_timeout: Duration::from_secs(10) };
    let scheduler = Scheduler::new(Table::new(BucketLimits::new(100.0, 100)));
    let hosts = Hosts::new(server.url.clone(), &[".example"]);
    Rest::new(Http::new(&settings).unwrap(), hosts, Tokens::new(source), scheduler, &DIALECT)
}

fn call() -> ApiCall<'static> {
    let deadline = Instant::now() + Duration::from_secs(20);
    ApiCall { action: "GetVm", owner: "vm-1", what: "look at vm-1", deadline }
}

async fn get(answer: impl Fn(&Seen) -> Reply + Send + Sync + 'static) -> (Result<Value, Failure>, Server) {
    let server = Server::start(answer).await;
    let rest = rest_of(&server, Numbered::default());
    let answer = rest.call(call(), &Request::get(server.at("/vms/1"))).await;
    (answer.map(|answer| answer.json()), server)
}

#[tokio::test]
async fn an_answer_comes_back_and_the_token_went_along() {
    let (answer, server) = get(|_| reply(200, "x-left: 7\r\n", &json!({"id": 1}))).await;
    assert_eq!(answer.unwrap(), json!({"id": 1}));
    assert_eq!(server.seen.lock()[0].token(), Some("token-1"));
}

#[tokio::test]
async fn a_refusal_has_class_words_and_no_body() {
    let (answer, _) = get(|_| {
        let body = json!({"error": {"code": "None", "message": "none left in zone 1", "extra": "hush"}});
        reply(409, "", &body)
    })
    .await;
    let failure = answer.unwrap_err();
    assert_eq!((failure.code(), failure.status(), failure.error.class()), ("None", 409, "capacity"));
    assert_eq!(failure.message(), "none left in zone 1");
    assert_eq!(failure.body()["error"]["extra"], "hush");
    let text = failure.error.to_string();
    let wanted = "look at vm-1: Cloud refused GetVm: None: none left in zone 1; do the usual";
    assert!(text == wanted && !format!("{failure:?}").contains("hush"), "{text} {failure:?}");
}

#[tokio::test]
async fn a_refusal_without_a_body_is_named_by_its_status() {
    let (answer, _) = get(|_| reply(502, "", &Value::Null)).await;
    let failure = answer.unwrap_err();
    assert_eq!((failure.code(), failure.error.class()), ("HTTP 502", "transient"));
    assert!(failure.error.to_string().contains("HTTP 502: no message"), "{}", failure.error);
    let (answer, _) = get(|_| None).await;
    let failure = answer.unwrap_err();
    assert_eq!((failure.code(), failure.status(), failure.body()), ("", 0, Value::Null));
    let text = failure.error.to_string();
    assert!(text.contains("look at vm-1: no answer from Cloud to GetVm"), "{text}");
}

#[tokio::test]
async fn a_throttled_call_is_made_again() {
    let count = AtomicUsize::new(0);
    let (answer, server) = get(move |_| match count.fetch_add(1, Ordering::Relaxed) {
        0 => reply(429, "retry-after: 0\r\n", &json!({"error": {"code": "Slow"}})),
        _ => reply(200, "", &json!({})),
    })
    .await;
    assert_eq!((answer.unwrap(), server.lines().len()), (json!({}), 2));
}

#[tokio::test]
async fn a_refused_token_is_renewed_and_the_call_is_made_once_more() {
    let server = Server::start(|seen| match seen.token() {
        Some("token-1") => reply(401, "", &Value::Null),
        _ => reply(200, "", &json!({})),
    })
    .await;
    let rest = rest_of(&server, Numbered::default());
    let request = Request::get(server.at("/vms/1"));
    rest.call(call(), &request).await.unwrap();
    rest.call(call(), &request).await.unwrap();
    let tokens: Vec<_> = server.seen.lock().iter().map(|seen| seen.token().unwrap().to_owned()).collect();
    assert_eq!(tokens, ["token-1", "token-2", "token-2"]);
}

#[tokio::test]
async fn a_cloud_that_refuses_every_token_does_not_cause_endless_renewals() {
    let server = Server::start(|_| reply(401, "", &json!({"error": {"code": "Bad"}}))).await;
    let rest = rest_of(&server, Numbered::default());
    let request = Request::get(server.at("/vms/1"));
    for _ in 0..3 {
        assert_eq!(rest.call(call(), &request).await.unwrap_err().error.class(), "auth");
    }
    let tokens: Vec<_> = server.seen.lock().iter().map(|seen| seen.token().unwrap().to_owned()).collect();
    assert_eq!(tokens, ["token-1", "token-2", "token-2", "token-2"]);
}

#[tokio::test]
async fn without_a_token_nothing_is_sent() {
    let server = Server::start(|_| reply(200, "", &json!({}))).await;
    let rest = rest_of(&server, Refuses);
    let failure = rest.call(call(), &Request::get(server.at("/vms"))).await.unwrap_err();
    assert_eq!(failure.error.class(), "auth");
    let wanted = "look at vm-1: get an access token: the account is closed";
    assert!(failure.error.to_string() == wanted && server.lines().is_empty(), "{}", failure.error);
}

#[tokio::test]
async fn a_request_to_another_host_is_not_sent() {
    let (server, other) = (
        Server::start(|_| reply(200, "", &json!({}))).await,
        Server::start(|_| reply(200, "", &json!({}))).await,
    );
    let rest = rest_of(&server, Numbered::default());
    let failure = rest.call(call(), &Request::get(other.at("/vms"))).await.unwrap_err();
    assert_eq!(failure.error.class(), "invalid");
    assert!(failure.error.to_string().starts_with("look at vm-1: an answer leads to"), "{}", failure.error);
    assert!(other.lines().is_empty() && server.lines().is_empty());
}

async fn items(server: &Server, next: Next) -> Result<Vec<u64>, Failure> {
    let rest = rest_of(server, Numbered::default());
    let first = Request::get(server.at("/vms?filter=a"));
    let mut items = Vec::new();
    let page = |page: &Value| {
        items.extend(read::list(page, "/value").iter().filter_map(Value::as_u64));
        Ok(())
    };
    rest.pages(call(), &first, next, page).await?;
    Ok(items)
}

#[tokio::test]
async fn all_pages_are_read_by_link_and_by_token() {
    let server = Server::start(|seen| match seen.line.as_str() {
        "GET /vms?filter=a" => reply(200, "", &json!({"value": [1], "next": "/vms?skip=1", "token": "t/2"})),
        "GET /vms?skip=1" => reply(200, "", &json!({"value": [2], "next": ""})),
        "GET /vms?filter=a&page=t%2F2" => reply(200, "", &json!({"value": [3], "token": "t3"})),
        "GET /vms?filter=a&page=t3" => reply(200, "", &json!({"value": [4]})),
        _ => reply(404, "", &Value::Null),
    })
    .await;
    assert_eq!(items(&server, Next::Link("/next")).await.unwrap(), [1, 2]);
    assert_eq!(items(&server, Next::Token("/token", "page")).await.unwrap(), [1, 3, 4]);
}

#[tokio::test]
async fn a_list_is_never_shortened() {
    let lost = Server::start(|seen| match seen.line.contains("skip") {
        false => reply(200, "", &json!({"value": [1], "next": "/vms?skip=1"})),
        true => reply(500, "", &Value::Null),
    })
    .await;
    assert_eq!(items(&lost, Next::Link("/next")).await.unwrap_err().error.class(), "transient");
    let odd = Server::start(|_| reply(200, "", &json!([1]))).await;
    let error = items(&odd, Next::Link("/next")).await.unwrap_err().error;
    assert_eq!(error.to_string(), "look at vm-1: the answer is no JSON object");
    let circle = Server::start(|_| reply(200, "", &json!({"next": "/vms?skip=1"}))).await;
    let error = items(&circle, Next::Link("/next")).await.unwrap_err().error;
    assert!(error.to_string().contains("names an earlier one"), "{error}");
    let away = Server::start(|_| reply(200, "", &json!({"next": "http://evil.test/vms"}))).await;
    let error = items(&away, Next::Link("/next")).await.unwrap_err().error;
    assert!(error.class() == "invalid" && error.to_string().contains("evil.test"), "{error}");
}

static WAIT: Wait = Wait::new(Duration::from_secs(1), Duration::from_secs(1));

#[tokio::test(start_paused = true)]
async fn a_decision_is_awaited_until_the_reserve_begins() {
    let looks = AtomicUsize::new(0);
    let look = |decided_at: usize, decision: fn() -> Result<Decision<u32>, Failure>| {
        let looks = &looks;
        looks.store(0, Ordering::Relaxed);
        move || {
            let number = looks.fetch_add(1, Ordering::Relaxed);
            async move {
                match number {
                    0 => Err(Error::transient("reset").into()),
                    _ if number < decided_at => Ok(Decision::Open),
                    _ => decision(),
                }
            }
        }
    };
    let start = Instant::now();
    let end = end_of_wait(start + Duration::from_secs(60));
    assert_eq!(end, start + Duration::from_secs(55));
    let made = decide(&WAIT, end, look(4, || Ok(Decision::Made(7)))).await.unwrap();
    assert_eq!(made, Decision::Made(7));
    let said = || Said { code: "None".into(), message: String::new() };
    let refused = decide(
        &WAIT,
        end,
        look(1, || Ok(Decision::Refused(Said { code: "None".into(), message: String::new() }))),
    );
    assert_eq!(refused.await.unwrap(), Decision::Refused(said()));
    let failed = decide(&WAIT, end, look(1, || Err(Error::invalid("bad").into()))).await;
    assert_eq!(failed.unwrap_err().error.class(), "invalid");
    let open = decide(&WAIT, end, look(1, || Ok(Decision::Open))).await.unwrap();
    assert_eq!(open, Decision::Open);
    assert!(Instant::now() <= end, "{:?}", start.elapsed());
    let soon = Instant::now() + Duration::from_secs(8);
    assert_eq!(end_of_wait(soon), soon - Duration::from_secs(2));
}

#[test]
fn values_of_another_type_are_absent() {
    let value = json!({"a": {"b/c": "x", "n": "7", "m": 8, "neg": -1, "t": "True", "f": false, "l": [1, 2]}});
    assert_eq!(read::text(&value, "/a/b~1c"), Some("x"));
    assert_eq!(read::text(&value, "/a/m"), None);
    assert_eq!(read::text(&json!({"a": ""}), "/a"), None);
    assert_eq!(read::text(&json!({"a": "x".repeat(20_000)}), "/a"), None);
    assert_eq!((read::number(&value, "/a/n"), read::number(&value, "/a/m")), (Some(7), Some(8)));
    assert_eq!((read::number(&value, "/a/neg"), read::number(&value, "/a/l")), (None, None));
    assert_eq!((read::flag(&value, "/a/t"), read::flag(&value, "/a/f")), (Some(true), Some(false)));
    assert_eq!(read::flag(&value, "/a/n"), None);
    assert_eq!((read::list(&value, "/a/l").len(), read::list(&value, "/a").len()), (2, 0));
    assert_eq!(read::texts(&value, "/a").len(), 3);
    assert_eq!(read::address(&json!("10.0.0.1"), ""), Some("10.0.0.1".parse().unwrap()));
    assert_eq!((read::address(&json!("0.0.0.0"), ""), read::address(&json!("x"), "")), (None, None));
    let at = read::time(&json!("2026-11-06T01:02:03.5+01:00"), "").unwrap();
    let since = at.duration_since(std::time::UNIX_EPOCH).unwrap();
    assert_eq!(since, Duration::from_millis(1_793_923_323_500));
    assert_eq!((read::time(&json!("today"), ""), read::time(&json!(5), "")), (None, None));
}
