//! Promises about refusals, error classes, deadlines and user-data.

use std::sync::Arc;
use std::time::{Duration, Instant};

use prometheus_client::registry::Registry;

use super::creates::marked;
use super::{hold, not_here};
use crate::capabilities::{Change, OPTIONAL};
use crate::conformance::trial::said;
use crate::conformance::{Checked, Stop, Trial};
use crate::{CreateRequest, DecoratorConfig, DiskRequest, Error, Retry, decorate};

pub(crate) async fn what_cannot_be_done_is_refused_not_dropped(trial: Arc<Trial>) -> Checked {
    let provider = trial.provider();
    for (wanted, ask) in OPTIONAL {
        let mut request = trial.harness.request();
        ask(&mut request);
        if provider.capabilities().check(&request, provider.name()).is_ok() {
            continue;
        }
        let key = trial.key();
        match trial.create_once(&request, &key).await {
            Err(Error::Unsupported { field, .. }) => {
                hold!(field == *wanted, "{wanted} was refused as {field}");
            }
            answer => hold!(false, "{wanted}: {answer:?}"),
        }
        hold!(trial.listed(&key).await?.is_empty(), "{wanted} was refused, and made a VM");
    }
    trial.machines_are(0).await
}

/// Checks that each failure the suite can cause has its class, has a text and shows no user-data.
pub(crate) async fn errors_have_their_class_and_show_no_user_data(trial: Arc<Trial>) -> Checked {
    let provider = trial.provider();
    let can = provider.capabilities();
    let (request, mark) = marked(&trial);
    let key = trial.key();
    trial.create(&request, &key).await?;
    let unknown = trial.unknown_id().await?;
    let mut failures: Vec<(&str, &str, Option<Error>)> = Vec::new();
    let other = CreateRequest { name: "another".to_owned(), ..request.clone() };
    failures.push(("a key reused", "key_reused", trial.create_once(&other, &key).await.err()));
    failures.push(("addresses of nothing", "not_found", provider.addresses(&unknown).await.err()));
    if let Some(console) = provider.extensions().console {
        failures.push(("the console of nothing", "not_found", console.tail(&unknown, 10).await.err()));
    }
    let filler = "x".repeat(can.max_user_data.min(64 << 20));
    let long = CreateRequest { user_data: format!("{mark}{filler}"), ..request.clone() };
    failures.push(("too much user-data", "invalid", trial.create_once(&long, &trial.key()).await.err()));
    for (what, class, error) in &failures {
        let Some(error) = error else { return Err(Stop::Broken(format!("{what} was no error"))) };
        hold!(error.class() == *class, "{what} is {}, not {class}: {error}", error.class());
    }
    let mut errors: Vec<Error> = failures.into_iter().filter_map(|(_, _, error)| error).collect();
    // Mistakes that only the cloud can detect. The error may have any class, but must not advise a retry.
    let wrong: [(bool, &str, Change); 3] = [
        (can.images, "an image that is none", |r| r.image = Some("no-such-image-0".to_owned())),
        (can.instance_types, "a type that is none", |r| r.instance_type = Some("no.such-type".to_owned())),
        (can.volumes, "a disk that is none", |r| {
            r.disks.push(DiskRequest { volume: "no-such-disk-0".to_owned(), ..DiskRequest::default() });
        }),
    ];
    for (_, what, change) in wrong.into_iter().filter(|(possible, ..)| *possible) {
        let mut asked = request.clone();
        change(&mut asked);
        match trial.create_once(&asked, &trial.key()).await {
            Err(error) => {
                hold!(error.retry() == Retry::Never, "{what} is {}: {error}", error.class());
                errors.push(error);
            }
            Ok(made) => hold!(false, "{what} made {}", made.id),
        }
    }
    for error in errors {
        let text = error.to_string();
        hold!(!text.trim().is_empty(), "an error of class {} has no text", error.class());
        hold!(!text.contains(mark), "an error of class {} shows user-data", error.class());
    }
    Ok(())
}

/// Checks that every call ends under a deadline of one millisecond, and that its effects can be removed.
pub(crate) async fn calls_end_at_their_deadline(trial: Arc<Trial>) -> Checked {
    let config =
        DecoratorConfig { call_deadline: Duration::from_millis(1), retry_for: Duration::from_millis(0) };
    let provider = decorate(trial.provider(), config, &mut Registry::default());
    let (request, key) = (trial.harness.request(), trial.key());
    let ended = |what: &str, start: Instant, error: Option<Error>| {
        hold!(start.elapsed() < Duration::from_secs(2), "{what} took {:?}", start.elapsed());
        let late = error.as_ref().is_none_or(|error| matches!(error, Error::Transient { .. }));
        hold!(late, "{what} ended with {error:?}");
        Ok(())
    };
    let start = Instant::now();
    // Counts as cut off: the VM may still appear later.
    let created = trial.cut_create(&request, &key, Duration::ZERO).await.and_then(Result::err);
    ended("create", start, created)?;
    let start = Instant::now();
    ended("create", start, provider.create(&request, &key).await.err())?;
    let start = Instant::now();
    ended("list_owned", start, provider.list_owned().await.err())?;
    let made = trial.create(&request, &key).await?;
    let start = Instant::now();
    ended("delete", start, provider.delete(&made.id).await.err())?;
    // The list must be right and the VM deletable, independently of the effects of the abandoned calls.
    said("delete", trial.provider().delete(&made.id).await)?;
    trial.gone(&key).await
}

pub(crate) async fn user_data_arrives_byte_for_byte(trial: Arc<Trial>) -> Checked {
    let awkward = [
        "#cloud-config\n\nkey: \"ä ö ü €\"\r\n\t$HOME `id` %s \\n ${x} </user-data> \u{1F980}\n",
        "{\"no\":\"newline at the end\"}",
        "\n\n  leading and trailing white space \n\n",
        "--==BOUNDARY==\r\nContent-Type: text/plain\r\n\r\nx\u{7f}\u{1}\r\n",
    ];
    for text in awkward {
        user_data_arrives(&trial, text).await?;
    }
    Ok(())
}

pub(crate) async fn user_data_of_the_stated_limit_arrives(trial: Arc<Trial>) -> Checked {
    let limit = trial.provider().capabilities().max_user_data;
    // No cloud accepts more than 256 KiB, so a provider without a limit is tried up to that size.
    let text: String = ('a'..='z').cycle().take(limit.min(256 * 1024)).collect();
    user_data_arrives(&trial, &text).await
}

async fn user_data_arrives(trial: &Trial, text: &str) -> Checked {
    let request = CreateRequest { user_data: text.to_owned(), ..trial.harness.request() };
    let made = trial.create(&request, &trial.key()).await?;
    let Some(seen) = trial.harness.user_data(&made.id).await else {
        return not_here("there is no way to look into a VM here");
    };
    let same = seen.iter().zip(text.as_bytes()).take_while(|(a, b)| a == b).count();
    let (sent, arrived) = (text.len(), seen.len());
    hold!(
        seen == text.as_bytes(),
        "{sent} bytes went in, {arrived} arrived, the first {same} of them the same"
    );
    said("delete", trial.provider().delete(&made.id).await)
}

pub(crate) async fn user_data_over_the_limit_is_refused_before_any_call(trial: Arc<Trial>) -> Checked {
    let limit = trial.provider().capabilities().max_user_data;
    if limit > 64 << 20 {
        return not_here(format!("a limit of {limit} bytes is as good as none"));
    }
    let request = CreateRequest { user_data: "x".repeat(limit + 1), ..trial.harness.request() };
    let key = trial.key();
    match trial.create_once(&request, &key).await {
        Err(Error::Invalid { .. }) => {}
        Err(error) => hold!(false, "{} bytes are {}: {error}", limit + 1, error.class()),
        Ok(made) => hold!(false, "{} bytes made {}", limit + 1, made.id),
    }
    hold!(trial.listed(&key).await?.is_empty(), "it was refused, and made a VM");
    trial.machines_are(0).await
}
