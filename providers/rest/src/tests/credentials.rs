use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use parking_lot::Mutex;
use peerpod_base::config::Secret;
use peerpod_provider_api::Error;
use reqwest::Url;
use ring::signature::{KeyPair, RSA_PKCS1_2048_8192_SHA256, RsaKeyPair, UnparsedPublicKey};
use rustls::pki_types::PrivatePkcs8KeyDer;
use rustls::pki_types::pem::PemObject;
use serde_json::{Value, json};
use tokio::time::{advance, timeout};

use super::{File, Server, reply};
use crate::sources::{ClientSecret, Exchange, Federated, Impersonation, JwtBearer, Metadata, Subject};
use crate::{Http, HttpSettings, Token, TokenSource, Tokens};

const KEY: &str = include_str!("../../testdata/service-account.pem");

fn http() -> Http {
    Http::new(&HttpSettings { ca_file: None, call_timeout: Duration::from_secs(10) }).unwrap()
}

/// Source that counts its fetches and fails on command.
#[derive(Clone, Default)]
struct Counting {
    fetches: Arc<AtomicUsize>,
    fails: Arc<Mutex<bool>>,
}

#[async_trait]
impl TokenSource for Counting {
    async fn fetch(&self, _: &Http) -> Result<Token, Error> {
        let number = self.fetches.fetch_add(1, Ordering::Relaxed) + 1;
        tokio::time::sleep(Duration::from_millis(50)).await;
        if *self.fails.lock() {
            return Err(Error::transient("the source is down"));
        }
        Ok(Token { secret: Secret::new(format!("token-{number}")), life: Duration::from_secs(1000) })
    }
}

#[tokio::test(start_paused = true)]
async fn all_callers_share_one_fetch() {
    let (source, http) = (Counting::default(), http());
    let tokens = Tokens::new(source.clone());
    let (a, b, c) = tokio::join!(tokens.get(&http), tokens.get(&http), tokens.get(&http));
    for token in [a, b, c] {
        assert_eq!(token.unwrap().expose(), "token-1");
    }
    assert_eq!(source.fetches.load(Ordering::Relaxed), 1);
}

#[tokio::test(start_paused = true)]
async fn all_callers_share_one_failure_and_the_next_one_tries_again() {
    let (source, http) = (Counting::default(), http());
    let tokens = Tokens::new(source.clone());
    *source.fails.lock() = true;
    let (a, b, c) = tokio::join!(tokens.get(&http), tokens.get(&http), tokens.get(&http));
    for failed in [a, b, c] {
        assert_eq!(failed.unwrap_err().class(), "transient");
    }
    assert_eq!(source.fetches.load(Ordering::Relaxed), 1);
    *source.fails.lock() = false;
    assert_eq!(tokens.get(&http).await.unwrap().expose(), "token-2");
}

#[tokio::test(start_paused = true)]
async fn a_token_is_renewed_before_its_end_and_the_old_one_serves_meanwhile() {
    let (source, http) = (Counting::default(), http());
    let tokens = Tokens::new(source.clone());
    tokens.get(&http).await.unwrap();
    advance(Duration::from_secs(740)).await;
    assert_eq!(tokens.get(&http).await.unwrap().expose(), "token-1");
    advance(Duration::from_secs(61)).await;
    *source.fails.lock() = true;
    assert_eq!(tokens.get(&http).await.unwrap().expose(), "token-1", "a failed renewal is no error");
    assert_eq!(tokens.get(&http).await.unwrap().expose(), "token-1");
    assert_eq!(source.fetches.load(Ordering::Relaxed), 2, "the next renewal waits ten seconds");
    advance(Duration::from_secs(11)).await;
    *source.fails.lock() = false;
    let (renewed, meanwhile) = tokio::join!(tokens.get(&http), tokens.get(&http));
    assert_eq!((renewed.unwrap().expose(), meanwhile.unwrap().expose()), ("token-3", "token-1"));
}

#[tokio::test(start_paused = true)]
async fn an_ended_token_is_not_used() {
    let (source, http) = (Counting::default(), http());
    let tokens = Tokens::new(source.clone());
    tokens.get(&http).await.unwrap();
    advance(Duration::from_secs(971)).await;
    *source.fails.lock() = true;
    assert_eq!(tokens.get(&http).await.unwrap_err().class(), "transient");
    *source.fails.lock() = false;
    assert_eq!(tokens.get(&http).await.unwrap().expose(), "token-3");
}

#[tokio::test(start_paused = true)]
async fn a_refused_token_is_renewed_once_for_all_callers() {
    let (source, http) = (Counting::default(), http());
    let tokens = Tokens::new(source.clone());
    let first = tokens.get(&http).await.unwrap();
    let (a, b) = tokio::join!(tokens.renew(&http, &first), tokens.renew(&http, &first));
    for newer in [a, b] {
        assert_eq!(newer.unwrap().unwrap().expose(), "token-2");
    }
    let second = tokens.get(&http).await.unwrap();
    assert!(tokens.renew(&http, &second).await.unwrap().is_none(), "a newer one would not help");
    assert_eq!(source.fetches.load(Ordering::Relaxed), 2);
    advance(Duration::from_secs(11)).await;
    assert_eq!(tokens.renew(&http, &second).await.unwrap().unwrap().expose(), "token-3");
}

#[tokio::test(start_paused = true)]
async fn a_dropped_fetch_does_not_block_the_next_one() {
    let (source, http) = (Counting::default(), http());
    let tokens = Tokens::new(source);
    assert!(timeout(Duration::from_millis(10), tokens.get(&http)).await.is_err());
    assert_eq!(tokens.get(&http).await.unwrap().expose(), "token-2");
}

fn issue() -> Value {
    json!({"token_type": "Bearer", "access_token": "t0k3n", "expires_in": "3599"})
}

async fn issuer() -> Server {
    Server::start(|seen| match seen.line.as_str() {
        "POST /impersonate" => {
            reply(200, "", &json!({"accessToken": "other", "expireTime": "2026-01-01T00:00:00Z"}))
        }
        _ => reply(200, "", &issue()),
    })
    .await
}

fn fields(body: &str) -> Vec<(String, String)> {
    let url = Url::parse(&format!("http://x/?{body}")).unwrap();
    url.query_pairs().map(|(name, value)| (name.into_owned(), value.into_owned())).collect()
}

fn has(body: &str, wanted: &[(&str, &str)]) {
    let all = fields(body);
    for (name, value) in wanted {
        assert!(all.iter().any(|(n, v)| n == name && v == value), "{name}={value} in {all:?}");
    }
}

#[tokio::test]
async fn a_client_proves_itself_by_secret_or_by_the_token_of_a_file() {
    let server = issuer().await;
    let (url, remedy) = (server.at("/tenant/token"), "check the client");
    let (client_id, scope) = ("client".to_owned(), "https://management.azure.com/.default".to_owned());
    let secret = ClientSecret {
        url: url.clone(),
        client_id: client_id.clone(),
        secret: Secret::new("hu&sh".into()),
        scope: scope.clone(),
        remedy,
    };
    let token = secret.fetch(&http()).await.unwrap();
    assert_eq!((token.secret.expose(), token.life), ("t0k3n", Duration::from_secs(3599)));
    assert!(!format!("{secret:?} {token:?}").contains("hu&sh"));
    let file = File::new("assertion", "first\n");
    let federated = Federated { url, client_id, file: file.0.clone(), scope: scope.clone(), remedy };
    federated.fetch(&http()).await.unwrap();
    std::fs::write(&file.0, "second").unwrap();
    federated.fetch(&http()).await.unwrap();
    let bodies: Vec<String> = server.seen.lock().iter().map(|seen| seen.body.clone()).collect();
    let grant = ("grant_type", "client_credentials");
    has(&bodies[0], &[grant, ("client_id", "client"), ("client_secret", "hu&sh"), ("scope", &scope)]);
    let kind = ("client_assertion_type", "urn:ietf:params:oauth:client-assertion-type:jwt-bearer");
    has(&bodies[1], &[grant, kind, ("client_assertion", "first"), ("scope", &scope)]);
    has(&bodies[2], &[("client_assertion", "second")]);
}

#[tokio::test]
async fn a_missing_or_endless_file_is_named() {
    let (empty, long) = (File::new("empty", " \n"), File::new("long", &"x".repeat((64 << 10) + 1)));
    for (path, why) in [
        (&empty.0, "it is empty"),
        (&long.0, "longer than 64 KiB"),
        (&PathBuf::from("/nonexistent/t"), "(os error 2)"),
    ] {
        let error = crate::sources::file(path).await.unwrap_err();
        let text = error.to_string();
        assert!(error.class() == "auth" && text.contains(why), "{text}");
        assert!(text.contains(path.to_str().unwrap()), "{text}");
    }
}

#[tokio::test]
async fn the_metadata_service_is_asked_with_its_header() {
    let server = issuer().await;
    let url = server.at("/metadata/token?resource=r");
    let source = Metadata { url, header: ("metadata", "true"), remedy: "give the node an identity" };
    assert_eq!(source.fetch(&http()).await.unwrap().secret.expose(), "t0k3n");
    let seen = server.seen.lock()[0].clone();
    assert_eq!(seen.line, "GET /metadata/token?resource=r");
    assert!(seen.headers.contains("metadata: true"), "{}", seen.headers);
}

#[tokio::test]
async fn an_assertion_is_signed_by_the_key() {
    let server = issuer().await;
    let url = server.at("/token");
    let key = Secret::new(KEY.to_owned());
    let source = JwtBearer::new(url.clone(), ("sa@p.example", Some("id-1")), &key, "s", "renew it").unwrap();
    source.fetch(&http()).await.unwrap();
    let body = server.seen.lock()[0].body.clone();
    has(&body, &[("grant_type", "urn:ietf:params:oauth:grant-type:jwt-bearer")]);
    let assertion = fields(&body).into_iter().find(|(name, _)| name == "assertion").unwrap().1;
    let (signed, signature) = assertion.rsplit_once('.').unwrap();
    let decode = |text: &str| URL_SAFE_NO_PAD.decode(text).unwrap();
    let der = PrivatePkcs8KeyDer::from_pem_slice(KEY.as_bytes()).unwrap();
    let pair = RsaKeyPair::from_pkcs8(der.secret_pkcs8_der()).unwrap();
    let public = UnparsedPublicKey::new(&RSA_PKCS1_2048_8192_SHA256, pair.public_key().as_ref());
    public.verify(signed.as_bytes(), &decode(signature)).unwrap();
    let (header, claims) = signed.split_once('.').unwrap();
    let read = |text| serde_json::from_slice::<Value>(&decode(text)).unwrap();
    assert_eq!(read(header), json!({"alg": "RS256", "typ": "JWT", "kid": "id-1"}));
    let claims = read(claims);
    assert_eq!((claims["iss"].as_str(), claims["aud"].as_str()), (Some("sa@p.example"), Some(url.as_str())));
    assert_eq!(claims["exp"].as_u64().unwrap() - claims["iat"].as_u64().unwrap(), 3600);
    assert_eq!(claims["scope"], "s");
}

#[test]
fn a_text_that_is_no_key_is_refused_and_not_shown() {
    let url = Url::parse("https://oauth2.googleapis.com/token").unwrap();
    let bad = KEY.replace("MII", "hush").replace('\n', "\\n");
    for key in ["hush".to_owned(), bad] {
        let made = JwtBearer::new(url.clone(), ("sa", None), &Secret::new(key), "s", "");
        let error = made.err().unwrap();
        assert_eq!(error.class(), "invalid");
        assert!(
            error.to_string().contains("private key of sa") && !error.to_string().contains("hush"),
            "{error}"
        );
    }
}

#[tokio::test]
async fn the_token_of_another_issuer_is_exchanged_and_then_impersonates() {
    let server = issuer().await;
    let file = File::new("subject", r#"{"id_token": "subject"}"#);
    let exchange = |field: &str| Exchange {
        url: server.at("/sts"),
        audience: "//iam/pool".into(),
        subject: Subject {
            file: file.0.clone(),
            field: Some(field.into()),
            kind: "urn:ietf:params:oauth:token-type:jwt".into(),
        },
        scope: "s".into(),
        remedy: "check the pool",
    };
    let source = Impersonation {
        source: Box::new(exchange("id_token")),
        url: server.at("/impersonate"),
        scope: "s".into(),
        remedy: "allow it",
    };
    assert_eq!(source.fetch(&http()).await.unwrap().secret.expose(), "other");
    let seen = server.seen.lock().clone();
    has(
        &seen[0].body,
        &[
            ("grant_type", "urn:ietf:params:oauth:grant-type:token-exchange"),
            ("audience", "//iam/pool"),
            ("subject_token", "subject"),
            ("subject_token_type", "urn:ietf:params:oauth:token-type:jwt"),
            ("requested_token_type", "urn:ietf:params:oauth:token-type:access_token"),
            ("scope", "s"),
        ],
    );
    assert_eq!(
        (seen[1].token(), seen[1].body.as_str()),
        (Some("t0k3n"), r#"{"lifetime":"3600s","scope":["s"]}"#)
    );
    let error = exchange("other").fetch(&http()).await.unwrap_err();
    assert!(error.class() == "auth" && error.to_string().contains("the field other"), "{error}");
    assert!(!error.to_string().contains("subject\""), "{error}");
}

#[tokio::test]
async fn a_refused_token_has_the_issuers_words_and_the_remedy() {
    let server = Server::start(|seen| match seen.line.as_str() {
        "POST /bad" => {
            let body = json!({"error": "invalid_client", "error_description": "AADSTS7000215: Invalid client secret."});
            reply(401, "", &body)
        }
        "POST /google" => reply(403, "", &json!({"error": {"status": "PERMISSION_DENIED", "message": "no"}})),
        "POST /down" => reply(503, "", &Value::Null),
        "POST /updated" => reply(410, "", &Value::Null),
        "POST /odd" => reply(200, "", &json!({"id_token": "hush"})),
        _ => None,
    })
    .await;
    for (path, class, words) in [
        ("/bad", "auth", "(401 invalid_client): AADSTS7000215: Invalid client secret; check the client"),
        ("/google", "auth", "(403 PERMISSION_DENIED): no; check the client"),
        ("/down", "transient", "(503 no code): no message; it is tried again"),
        ("/updated", "transient", "(410 no code): no message; it is tried again"),
        ("/odd", "transient", "the answer of 127.0.0.1 has none"),
        ("/lost", "transient", "no answer from 127.0.0.1"),
    ] {
        let source = ClientSecret {
            url: server.at(path),
            client_id: "c".into(),
            secret: Secret::new("hush".into()),
            scope: "s".into(),
            remedy: "check the client",
        };
        let error = source.fetch(&http()).await.unwrap_err();
        assert_eq!(error.class(), class, "{error}");
        let text = error.to_string();
        assert!(text.starts_with("get an access token: ") && text.contains(words), "{text}");
        assert!(!text.contains("hush"), "{text}");
    }
}
