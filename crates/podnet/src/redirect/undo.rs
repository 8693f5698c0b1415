//! Removes this program's redirects, and nothing else.

use netlink_packet_route::RouteNetlinkMessage;
use nix::errno::Errno;

use super::filter::Filter;
use super::{filters, patient, qdisc, qdiscs};
use crate::Error;
use crate::mark::{Owner, Tag};
use crate::netlink::Client;

pub(crate) struct Taken<'a> {
    pub(crate) tag: Tag,
    /// If given, restricts them to redirects to these devices.
    pub(crate) only: Option<&'a [u32]>,
    /// Devices that will be deleted, with everything on them.
    pub(crate) doomed: &'a [u32],
    /// Devices with an ingress qdisc from before the redirect; the qdisc stays, even if it is empty.
    pub(crate) shared: &'a [u32],
}

impl Taken<'_> {
    fn is(&self, filter: &Filter) -> bool {
        let leads_to = |devices: &[u32]| filter.target.is_some_and(|target| devices.contains(&target));
        // A redirect to a device that will be deleted is of no use, regardless of its owner.
        leads_to(self.doomed) || (filter.tag == Some(self.tag) && self.only.is_none_or(leads_to))
    }
}

/// Removes the redirects of the namespace. Other programs' filters stay. Every device is tried.
pub(crate) fn take_back(client: &mut Client, taken: &Taken<'_>, errors: &mut Vec<Error>) {
    let all = match qdiscs(client) {
        Ok(all) => all,
        Err(e) => return errors.push(e),
    };
    for (device, kind) in all {
        if !taken.doomed.contains(&device)
            && let Err(e) = from_device(client, device, &kind, taken)
        {
            errors.push(e);
        }
    }
}

fn from_device(client: &mut Client, device: u32, kind: &str, taken: &Taken<'_>) -> Result<(), Error> {
    let attempt = || format!("take back the redirect of device {device}");
    let (ours, others): (Vec<Filter>, Vec<Filter>) =
        filters(client, device)?.into_iter().partition(|filter| taken.is(filter));
    if ours.is_empty() {
        return Ok(());
    }
    let gone = &[Errno::ENOENT, Errno::ENODEV, Errno::EINVAL];
    if others.is_empty() && kind == "ingress" && !taken.shared.contains(&device) {
        // The qdisc's filters go with it.
        return patient(client, 0, &RouteNetlinkMessage::DelQueueDiscipline(qdisc(device)), gone)
            .map_err(Error::kernel(attempt()));
    }
    for mut filter in ours {
        if others.iter().all(|other| other.info != filter.info) {
            filter.handle = 0; // deletes the empty u32 table as well
        }
        patient(client, 0, &RouteNetlinkMessage::DelTrafficFilter(filter.deletion(device)), gone)
            .map_err(Error::kernel(attempt()))?;
    }
    Ok(())
}

/// Returns the tags of an owner's redirects in the namespace, each with its device.
pub(crate) fn tagged(client: &mut Client, owner: Owner) -> Result<Vec<(u32, Tag)>, Error> {
    let mut found = Vec::new();
    for (device, _) in qdiscs(client)? {
        let tags = filters(client, device)?.into_iter().filter_map(|filter| filter.tag);
        found.extend(tags.filter(|tag| tag.owner == owner).map(|tag| (device, tag)));
    }
    Ok(found)
}
