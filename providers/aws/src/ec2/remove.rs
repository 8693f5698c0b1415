//! Takes VMs away: many askers, one TerminateInstances. What a launch made (cards, root disk) goes with its VM; cards
//! that EC2 left behind are looked for and deleted at preflight. May call TerminateInstances, DescribeNetworkInterfaces,
//! DeleteNetworkInterface.

use aws_sdk_ec2::types::Filter;
use peerpod_provider_api::Error;
use peerpod_provider_cloud::{Batcher, Window};
use tokio::time::Instant;

use crate::ec2::client::{Ec2, until};
use crate::ec2::tags::{self, Owner};

/// Terminates single VMs, all that are asked for in a moment by one call. `false`: EC2 does not know it.
pub(crate) type Terminate = Batcher<(), String, bool>;

pub(crate) fn terminate(ec2: Ec2) -> Terminate {
    Batcher::new(Window::LIST, move |(), ids: Vec<String>, until| {
        let ec2 = ec2.clone();
        async move {
            let unknown = by_ids(&ec2, ids.clone(), until).await?;
            Ok(ids.iter().map(|id| Ok(!unknown.contains(id))).collect())
        }
    })
}

/// Has EC2 accept the end of all of these; those that it does not know are returned.
async fn by_ids(ec2: &Ec2, mut ids: Vec<String>, until: Instant) -> Result<Vec<String>, Error> {
    ids.sort();
    ids.dedup();
    let mut unknown = Vec::new();
    while !ids.is_empty() {
        let what = match &ids[..] {
            [one] => format!("delete of VM {one}"),
            many => format!("delete of {} VMs", many.len()),
        };
        let ask = ec2.client.terminate_instances().set_instance_ids(Some(ids.clone()));
        match ec2.call("TerminateInstances", "terminate", &what, until, || ask.clone().send()).await {
            Ok(_) => return Ok(unknown),
            // EC2 refuses the whole call for the sake of one; the message names it.
            Err(failure) if failure.code().starts_with("InvalidInstanceID") => {
                let named = failure.ids("i-");
                let (gone, rest): (Vec<_>, Vec<_>) = ids.into_iter().partition(|id| named.contains(id));
                ids = rest;
                if gone.is_empty() && ids.len() > 1 {
                    // It does not say which: the batcher asks again by halves.
                    return Err(failure.into());
                }
                unknown.extend(if gone.is_empty() { std::mem::take(&mut ids) } else { gone });
            }
            Err(failure) => return Err(failure.into()),
        }
    }
    Ok(unknown)
}

/// Deletes our cards that hang on no VM: EC2 leaves one when a launch breaks off half-way. Returns how many.
pub(crate) async fn stray_cards(ec2: &Ec2, owner: &Owner) -> Result<usize, Error> {
    let filter = |name: String, value: &str| Filter::builder().name(name).values(value).build();
    let filters = vec![
        filter(format!("tag:{}", tags::CLUSTER), &owner.cluster),
        filter(format!("tag:{}", tags::NODE), &owner.node),
        filter("status".to_owned(), "available"),
    ];
    let ask = ec2.client.describe_network_interfaces().set_filters(Some(filters)).max_results(100);
    let what = "look for network cards of ours that hang on nothing";
    let found = ec2.call("DescribeNetworkInterfaces", "stray", what, until(), || ask.clone().send()).await?;
    let mut deleted = 0;
    for id in
        found.network_interfaces.unwrap_or_default().into_iter().filter_map(|card| card.network_interface_id)
    {
        let what = format!("delete of the network card {id}, which hangs on nothing");
        let ask = ec2.client.delete_network_interface().network_interface_id(&id);
        match ec2.call("DeleteNetworkInterface", "stray", &what, until(), || ask.clone().send()).await {
            Ok(_) => deleted += 1,
            Err(failure) if failure.code().starts_with("InvalidNetworkInterfaceID.NotFound") => {}
            Err(failure) => return Err(failure.into()),
        }
    }
    Ok(deleted)
}
