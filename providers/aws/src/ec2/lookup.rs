//! Merges concurrent lookups of single EC2 objects into one call.

use std::collections::HashMap;

use peerpod_provider_api::Error;
use peerpod_provider_cloud::{Batcher, Window};
use tokio::time::Instant;

use crate::ec2::client::Ec2;
use crate::ec2::refusal::Failure;

/// Batcher that looks up objects by their ids, with one call for all concurrent callers. `None`: EC2 does not know the
/// id.
pub(crate) type Lookup<T> = Batcher<String, Option<T>>;

/// Creates the batcher. `by_ids` gets each id once, and returns the objects that exist.
pub(crate) fn together<T, F>(
    ec2: Ec2,
    window: Window,
    by_ids: impl Fn(Ec2, Vec<String>, Instant) -> F + Send + Sync + 'static,
) -> Lookup<T>
where
    T: Clone + Send + 'static,
    F: Future<Output = Result<HashMap<String, T>, Error>> + Send + 'static,
{
    Batcher::new(window, move |ids: Vec<String>, until| {
        let mut each = ids.clone();
        each.sort();
        each.dedup();
        let found = by_ids(ec2.clone(), each, until);
        async move {
            let found = found.await?;
            // Several callers may ask for one id.
            Ok(ids.iter().map(|id| Ok(found.get(id).cloned())).collect())
        }
    })
}

/// Makes a call for several objects. EC2 refuses the whole call because of one unknown id and names it; the call is then
/// made for the others. Returns the answer, if EC2 knows any of the ids, and the unknown ids.
pub(crate) async fn of_known<A, F>(
    mut ids: Vec<String>,
    prefix: &str,
    is_unknown: impl Fn(&str) -> bool,
    call: impl Fn(Vec<String>) -> F,
) -> Result<(Option<A>, Vec<String>), Error>
where
    F: Future<Output = Result<A, Failure>>,
{
    let mut unknown = Vec::new();
    while !ids.is_empty() {
        let failure = match call(ids.clone()).await {
            Ok(answer) => return Ok((Some(answer), unknown)),
            Err(failure) => failure,
        };
        let named = failure.ids(prefix);
        let (gone, rest): (Vec<_>, Vec<_>) = ids.into_iter().partition(|id| named.contains(id));
        let is_certain = !gone.is_empty() || rest.len() == 1;
        if !is_unknown(failure.code()) || !is_certain {
            // If the message names no id, the batcher repeats the call by halves.
            return Err(failure.into());
        }
        (unknown, ids) =
            if gone.is_empty() { ([unknown, rest].concat(), gone) } else { ([unknown, gone].concat(), rest) };
    }
    Ok((None, unknown))
}

/// Describes a call for these objects, like `look at VM i-1` or `look at 3 VMs`.
pub(crate) fn what(verb: &str, kind: &str, ids: &[String]) -> String {
    match ids {
        [one] => format!("{verb} {kind} {one}"),
        many => format!("{verb} {} {kind}s", many.len()),
    }
}
