//! Merges concurrent lookups of single EC2 objects into one call.

use std::collections::HashMap;

use peerpod_provider_api::Error;
use peerpod_provider_cloud::{Batcher, Window};
use tokio::time::Instant;

use crate::ec2::client::Ec2;

/// Batcher that looks up objects by their ids, with one call for all concurrent callers. `None`: EC2 does not know the
/// id.
pub(crate) type Look<T> = Batcher<(), String, Option<T>>;

/// Creates the batcher. `by_ids` gets each id once, and returns the objects that exist.
pub(crate) fn together<T, F>(
    ec2: Ec2,
    window: Window,
    by_ids: impl Fn(Ec2, Vec<String>, Instant) -> F + Send + Sync + 'static,
) -> Look<T>
where
    T: Clone + Send + 'static,
    F: Future<Output = Result<HashMap<String, T>, Error>> + Send + 'static,
{
    Batcher::new(window, move |(), ids: Vec<String>, until| {
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
