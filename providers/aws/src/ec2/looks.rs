//! Many who look at single things of EC2's, by one call.

use std::collections::HashMap;

use peerpod_provider_api::Error;
use peerpod_provider_cloud::{Batcher, Window};
use tokio::time::Instant;

use crate::ec2::client::Ec2;

/// Looks for single things by their ids, for all who look at that moment together. `None`: EC2 does not know it.
pub(crate) type Look<T> = Batcher<(), String, Option<T>>;

/// `by_ids` gets each id once, and answers with those that there are.
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
            // Several may look at one.
            Ok(ids.iter().map(|id| Ok(found.get(id).cloned())).collect())
        }
    })
}
