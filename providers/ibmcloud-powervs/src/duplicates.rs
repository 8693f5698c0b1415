//! Chooses one of several VMs of one name. PowerVS makes a second one when the answer to a POST is lost and its list is
//! late. All processes choose the same: the oldest. A younger one appears later, so the choice never changes.

use peerpod_provider_api::Error;
use peerpod_provider_cloud::{Marks, VmState, until};

use crate::client::Power;
use crate::vms::{self, PowerVsVm};

/// VM with its marks, which are those of this owner.
type Own = (PowerVsVm, Marks);

/// Returns the VM that counts, and the others; `None` without any.
pub(crate) fn choose(mut vms: Vec<Own>) -> Option<(Own, Vec<Own>)> {
    vms.sort_by(|(a, _), (b, _)| rank(a).cmp(&rank(b)));
    let mut all = vms.into_iter();
    let first = all.next()?;
    Some((first, all.collect()))
}

/// The oldest VM that is not being deleted; of VMs of one time that with the lowest id.
fn rank(vm: &PowerVsVm) -> (bool, Option<std::time::SystemTime>, &str) {
    (vm.state == VmState::Deleting, vm.made, &vm.id)
}

/// Deletes these VMs. PowerVS refuses that while it builds them; the next list tries again.
pub(crate) async fn remove(power: &Power, duplicates: &[Own]) -> Result<(), Error> {
    for (vm, _) in duplicates.iter().filter(|(vm, _)| vm.state != VmState::Deleting) {
        let what = format!("delete of a second VM {}", vm.name);
        match vms::delete(power, &vm.id, &what, until()).await {
            Ok(()) => tracing::info!(vm = vm.id, name = vm.name, "deleted a second VM of one name"),
            Err(error @ Error::Transient { .. }) => tracing::debug!("a second VM stays for now: {error}"),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use super::*;

    #[test]
    fn the_oldest_counts_also_if_a_younger_one_has_a_lower_id() {
        let vm = |id: &str, age: u64, state| {
            let vm = PowerVsVm {
                id: id.into(),
                name: "pp-a".into(),
                state,
                made: Some(SystemTime::UNIX_EPOCH + Duration::from_secs(age)),
                nics: Vec::new(),
                fault: None,
            };
            (vm, Marks::default())
        };
        let chosen = |vms| choose(vms).map(|((first, _), rest)| (first.id, rest.len()));
        let (old, young) = (vm("b", 1, VmState::Running), vm("a", 2, VmState::Pending));
        assert_eq!(chosen(vec![young.clone(), old.clone()]), Some(("b".to_owned(), 1)));
        assert_eq!(chosen(vec![vm("c", 1, VmState::Running), old]), Some(("b".to_owned(), 1)));
        assert_eq!(chosen(vec![vm("b", 1, VmState::Deleting), young]), Some(("a".to_owned(), 1)));
        assert_eq!(chosen(Vec::new()), None);
    }
}
