//! Maps a ticket to its sandbox. The ticket of a single VM names its sandbox. The ticket of a batch names a sandbox
//! only together with the source address of the VM, which the cloud has reported. The index never guesses: an address
//! of no member, or of two, gives no answer (yet).

use std::collections::HashMap;
use std::net::IpAddr;

use parking_lot::Mutex;

use crate::ledger::Record;
use crate::spec::SandboxId;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    Unknown,
    /// The ticket belongs to a batch, and no single member's VM is known to have the address.
    NotYet,
    Sandbox(SandboxId),
}

/// Index of tickets; updated by the tasks, and by the table when tasks start and end.
#[derive(Default)]
pub(crate) struct Tickets(Mutex<Inner>);

#[derive(Default)]
struct Inner {
    /// Tickets of a single VM each.
    own: HashMap<String, SandboxId>,
    shared: HashMap<String, Shared>,
    /// Ticket and addresses under which each sandbox is indexed.
    entered: HashMap<SandboxId, (String, Vec<IpAddr>)>,
}

#[derive(Default)]
struct Shared {
    /// Whether the batch file exists: members may still be added.
    open: bool,
    members: usize,
    by_address: HashMap<IpAddr, Vec<SandboxId>>,
    /// Last source address that identified no single member.
    stranger: Option<IpAddr>,
}

impl Tickets {
    /// Indexes a sandbox by its present record, in place of its former entry.
    pub(crate) fn enter(&self, record: &Record) {
        let Some(ticket) = &record.enrolment.ticket else { return };
        let addresses =
            if record.enrolment.batch_member.is_some() { record.addresses.as_slice() } else { &[] };
        let mut inner = self.0.lock();
        let before = inner.entered.get(&record.id);
        if before.is_some_and(|(known, at)| *known == ticket.id && at.as_slice() == addresses) {
            return;
        }
        inner.leave(&record.id);
        let (id, name) = (record.id.clone(), ticket.id.clone());
        if record.enrolment.batch_member.is_some() {
            let shared = inner.shared.entry(name.clone()).or_default();
            shared.members += 1;
            for address in addresses {
                shared.by_address.entry(*address).or_default().push(id.clone());
            }
        } else {
            inner.own.insert(name.clone(), id.clone());
        }
        inner.entered.insert(id, (name, addresses.to_vec()));
    }

    pub(crate) fn leave(&self, id: &SandboxId) {
        self.0.lock().leave(id);
    }

    /// Registers a batch that is requested, or may have been: its VMs may connect before their owners are known.
    pub(crate) fn open(&self, ticket: &str) {
        self.0.lock().shared.entry(ticket.to_owned()).or_default().open = true;
    }

    pub(crate) fn close(&self, ticket: &str) {
        let mut inner = self.0.lock();
        if let Some(shared) = inner.shared.get_mut(ticket) {
            shared.open = false;
        }
        inner.drop_if_unused(ticket);
    }

    /// Returns the owner of a claim with this ticket and source address.
    pub(crate) fn owner(&self, ticket: &str, from: Option<IpAddr>) -> Owner {
        let mut inner = self.0.lock();
        let Some(shared) = inner.shared.get_mut(ticket) else {
            return inner.own.get(ticket).map_or(Owner::Unknown, |id| Owner::Sandbox(id.clone()));
        };
        let there = from.and_then(|from| shared.by_address.get(&from));
        if let Some([id]) = there.map(Vec::as_slice) {
            return Owner::Sandbox(id.clone());
        }
        shared.stranger = from.or(shared.stranger);
        Owner::NotYet
    }

    /// Returns the last source address with this batch ticket that identified no single member.
    pub(crate) fn stranger(&self, ticket: &str) -> Option<IpAddr> {
        self.0.lock().shared.get(ticket)?.stranger
    }

    /// Whether that address is still unidentified: another query of the VMs' addresses may identify it.
    pub(crate) fn is_awaited(&self, ticket: &str) -> bool {
        let inner = self.0.lock();
        let Some(Shared { stranger: Some(from), by_address, .. }) = inner.shared.get(ticket) else {
            return false;
        };
        by_address.get(from).is_none_or(|there| there.len() != 1)
    }
}

impl Inner {
    fn leave(&mut self, id: &SandboxId) {
        let Some((ticket, addresses)) = self.entered.remove(id) else { return };
        let Some(shared) = self.shared.get_mut(&ticket) else {
            self.own.remove(&ticket);
            return;
        };
        shared.members = shared.members.saturating_sub(1);
        for address in addresses {
            if let Some(there) = shared.by_address.get_mut(&address) {
                there.retain(|other| other != id);
                if there.is_empty() {
                    shared.by_address.remove(&address);
                }
            }
        }
        self.drop_if_unused(&ticket);
    }

    fn drop_if_unused(&mut self, ticket: &str) {
        if self.shared.get(ticket).is_some_and(|shared| !shared.open && shared.members == 0) {
            self.shared.remove(ticket);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::trust::Ticket;

    fn record(name: &str, ticket: &Ticket, member: Option<u32>, addresses: &[&str]) -> Record {
        let mut record = Record::tombstone(name.parse().unwrap(), 0);
        record.enrolment.ticket = Some(ticket.clone());
        record.enrolment.batch_member = member;
        record.addresses = addresses.iter().map(|address| address.parse().unwrap()).collect();
        record
    }

    fn at(address: &str) -> Option<IpAddr> {
        Some(address.parse().unwrap())
    }

    #[test]
    fn a_shared_ticket_names_a_member_only_by_its_unambiguous_address() {
        let tickets = Tickets::default();
        let ticket = Ticket::new(0, Duration::from_secs(60)).unwrap();
        let name = ticket.id.as_str();
        assert_eq!(tickets.owner(name, at("10.0.0.1")), Owner::Unknown);
        tickets.open(name);
        assert_eq!(tickets.owner(name, at("10.0.0.1")), Owner::NotYet);
        tickets.enter(&record("a", &ticket, Some(0), &["10.0.0.1", "fd00::1"]));
        tickets.enter(&record("b", &ticket, Some(1), &[]));
        let a = Owner::Sandbox("a".parse().unwrap());
        assert_eq!((tickets.owner(name, at("10.0.0.1")), tickets.owner(name, at("fd00::1"))), (a.clone(), a));
        for nobody in [at("10.0.0.2"), None] {
            assert_eq!(tickets.owner(name, nobody), Owner::NotYet);
        }
        assert_eq!(tickets.stranger(name), at("10.0.0.2"));
        tickets.enter(&record("b", &ticket, Some(1), &["10.0.0.1"]));
        assert_eq!(tickets.owner(name, at("10.0.0.1")), Owner::NotYet, "two members are there");
        tickets.enter(&record("b", &ticket, Some(1), &["10.0.0.2"]));
        assert_eq!(tickets.owner(name, at("10.0.0.2")), Owner::Sandbox("b".parse().unwrap()));
        tickets.leave(&"a".parse().unwrap());
        assert_eq!(tickets.owner(name, at("10.0.0.1")), Owner::NotYet);
        tickets.close(name);
        tickets.leave(&"b".parse().unwrap());
        assert_eq!(tickets.owner(name, at("10.0.0.2")), Owner::Unknown);
    }

    #[test]
    fn a_batch_ticket_replaces_the_sandboxs_own_ticket() {
        let tickets = Tickets::default();
        let own = Ticket::new(0, Duration::from_secs(60)).unwrap();
        let shared = Ticket::new(0, Duration::from_secs(60)).unwrap();
        tickets.enter(&record("a", &own, None, &["10.0.0.1"]));
        assert_eq!(tickets.owner(&own.id, None), Owner::Sandbox("a".parse().unwrap()));
        tickets.enter(&record("a", &shared, Some(0), &["10.0.0.1"]));
        assert_eq!(tickets.owner(&own.id, None), Owner::Unknown);
        assert_eq!(tickets.owner(&shared.id, None), Owner::NotYet);
        tickets.leave(&"a".parse().unwrap());
        assert_eq!(tickets.owner(&shared.id, at("10.0.0.1")), Owner::Unknown);
    }
}
