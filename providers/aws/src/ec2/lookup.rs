//! Makes one EC2 call for several objects, of which some may not exist.

use std::future::Future;

use peerpod_provider_api::Error;

use crate::ec2::refusal::AwsFailure;

/// Makes a call for several objects. EC2 refuses the whole call because of one unknown id and names it; the call is then
/// made for the others. Returns the answer, if EC2 knows any of the ids, and the unknown ids.
pub(crate) async fn of_known<A, F>(
    mut ids: Vec<String>,
    prefix: &str,
    is_unknown: impl Fn(&str) -> bool,
    call: impl Fn(Vec<String>) -> F,
) -> Result<(Option<A>, Vec<String>), Error>
where
    F: Future<Output = Result<A, AwsFailure>>,
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
