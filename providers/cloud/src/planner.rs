//! Planner with its state: catalogue, policy and marks of exhausted offerings.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use peerpod_provider_api::{Chosen, CreateRequest, Error, Placement, Rejected};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::catalogue::{Catalogue, Offering};
use crate::exhausted::{Exhausted, STANDS, Scope};
use crate::plan::{Policy, plan};
use crate::text::clip;

/// Chooses offerings and remembers refused ones. One per account; shared by reference.
///
/// `Provider::place` calls [`Planner::place`], and the caller records the answer. `Provider::create` reads it with
/// [`offerings`] and makes the cloud call. It then calls [`Planner::exhausted`] for each refused offering, and
/// [`Planner::capacity_error`] if all were refused. The caller records another attempt and asks for another placement.
#[derive(Debug)]
pub struct Planner {
    policy: Policy,
    catalogue: RwLock<Arc<Catalogue>>,
    exhausted: Mutex<Exhausted>,
}

/// Content of a [`Placement`], version 1.
#[derive(Serialize, Deserialize)]
struct Placed {
    v: u32,
    offerings: Vec<Offering>,
}

const VERSION: u32 = 1;

impl Planner {
    /// Returns a planner with an empty catalogue.
    pub fn new(policy: Policy) -> Planner {
        Planner { policy, catalogue: RwLock::default(), exhausted: Mutex::default() }
    }

    /// Returns the current catalogue.
    pub fn catalogue(&self) -> Arc<Catalogue> {
        Arc::clone(&self.catalogue.read())
    }

    /// Adds the price to a VM's choices, if the catalogue has it.
    pub fn priced(&self, chosen: Chosen) -> Chosen {
        let zone = chosen.zone.as_deref().unwrap_or_default();
        let offering = chosen.instance_type.as_deref().zip(chosen.market);
        let price = offering.and_then(|(machine, market)| self.catalogue().prices.get(machine, zone, market));
        Chosen { price, ..chosen }
    }

    /// Replaces the catalogue. Plans in progress keep the old one.
    pub fn learn(&self, catalogue: Catalogue) {
        *self.catalogue.write() = Arc::new(catalogue);
    }

    /// Returns the best `at_most` offerings (at least one) that suit and are not known to be exhausted, for one call. A
    /// provider that asks its cloud for the zone of the disks sets it in the request first.
    ///
    /// # Errors
    /// [`Error::Capacity`] when all offerings that suit are exhausted, [`Error::Invalid`] when none suits. Both name
    /// the reason against every offering.
    pub fn place(&self, request: &CreateRequest, at_most: usize) -> Result<Placement, Error> {
        let catalogue = self.catalogue();
        let plan = plan(&catalogue, request, &self.policy, &self.exhausted.lock(), Instant::now())?;
        if plan.offerings.is_empty() {
            return Err(plan.nothing_left(request));
        }
        let mut offerings: Vec<Offering> =
            plan.offerings.iter().take(at_most.max(1)).map(|one| one.offering()).collect();
        loop {
            // The cloud chooses the names. If they are too long for a ledger, the list is cut.
            let placement = placement(&offerings);
            if placement.is_ok() || offerings.len() <= 1 {
                return placement;
            }
            offerings.truncate(offerings.len() / 2);
        }
    }

    /// Marks these offerings as exhausted for three minutes. `why` is the cloud's code or text, without secrets.
    pub fn exhausted(&self, scope: impl Into<Scope>, why: &str) {
        self.exhausted_for(scope, why, STANDS);
    }

    /// Marks these offerings as exhausted for this time, at most a day. Clouds differ: an allocation that failed may
    /// work in minutes, a type that is closed to the account stays closed for hours.
    pub fn exhausted_for(&self, scope: impl Into<Scope>, why: &str, time: Duration) {
        self.exhausted.lock().mark(scope, why, time, Instant::now());
    }

    /// Returns the error for a create that made nothing because all tried offerings are exhausted, with the cloud's
    /// reason for each.
    pub fn capacity_error(&self, what: &str, tried: &[(Offering, String)]) -> Error {
        let mut rejected: Vec<Rejected> = Vec::new();
        for (offering, why) in tried {
            let reason = clip(why, 160);
            let has_room = rejected.len() < Error::MAX_REJECTED;
            match rejected.iter_mut().find(|one| one.reason == reason) {
                Some(one) if one.offerings.len() < 200 => {
                    one.offerings.push_str(", ");
                    one.offerings.push_str(&clip(&offering.to_string(), 80));
                }
                Some(one) if one.offerings.ends_with(" …") => {}
                Some(one) => one.offerings.push_str(" …"),
                None if has_room => {
                    rejected.push(Rejected { offerings: clip(&offering.to_string(), 80), reason });
                }
                None => {}
            }
        }
        let each: Vec<String> =
            rejected.iter().take(4).map(|one| format!("{}: {}", one.offerings, one.reason)).collect();
        let text =
            format!("create of {what}: the cloud has none of the tried offerings: {}", each.join("; "));
        let offering = tried.first().map_or_else(String::new, |(offering, _)| offering.to_string());
        Error::Capacity { offering, rejected, text }
    }
}

fn placement(offerings: &[Offering]) -> Result<Placement, Error> {
    let placed = Placed { v: VERSION, offerings: offerings.to_vec() };
    let text = serde_json::to_string(&placed)
        .map_err(|error| Error::invalid(format!("a placement cannot be written: {error}")))?;
    Placement::new(text)
}

/// Returns the offerings of the request's placement, best first and at least one. `place` chooses a placement for a request
/// without one.
///
/// # Errors
/// [`Error::Invalid`] when the placement has another format or is empty, and those of `place`.
pub async fn offerings(
    request: &CreateRequest,
    place: impl Future<Output = Result<Placement, Error>>,
) -> Result<Vec<Offering>, Error> {
    match &request.placement {
        Some(placement) => read(&request.name, placement),
        None => read(&request.name, &place.await?),
    }
}

/// Returns the first of [`offerings`], for a cloud whose key or name of a create belongs to one offering.
///
/// # Errors
/// Those of [`offerings`].
pub async fn offering(
    request: &CreateRequest,
    place: impl Future<Output = Result<Placement, Error>>,
) -> Result<Offering, Error> {
    offerings(request, place).await?.into_iter().next().ok_or_else(|| unreadable(&request.name, EMPTY))
}

/// Refuses a create in a program that only lists and deletes VMs.
///
/// # Errors
/// [`Error::Invalid`] unless the program `creates`.
pub fn check_creates(creates: bool, request: &CreateRequest) -> Result<(), Error> {
    if creates {
        return Ok(());
    }
    let text = format!("create of {}: this program only lists and deletes VMs", request.name);
    Err(Error::invalid(text))
}

const EMPTY: &str = "it names nothing";

fn unreadable(name: &str, why: &str) -> Error {
    Error::invalid(format!("create of {name}: its placement cannot be read: {why}"))
}

fn read(name: &str, placement: &Placement) -> Result<Vec<Offering>, Error> {
    let placed: Placed =
        serde_json::from_str(placement.as_str()).map_err(|error| unreadable(name, &error.to_string()))?;
    if placed.v != VERSION {
        return Err(unreadable(name, "another version wrote it"));
    }
    if placed.offerings.is_empty() {
        return Err(unreadable(name, EMPTY));
    }
    Ok(placed.offerings)
}

#[cfg(test)]
mod tests {
    use peerpod_provider_api::{Arch, Market, Retry, Size};

    use super::*;
    use crate::catalogue::{Location, MachineType};

    fn planner(names: &[&str]) -> Planner {
        let policy = Policy {
            allowed: names.iter().map(|name| (*name).to_owned()).collect(),
            default: names[0].to_owned(),
            markets: vec![Market::OnDemand],
            arch: Some(Arch::X86_64),
            ..Policy::default()
        };
        let planner = Planner::new(policy);
        let types = names.iter().zip(1..).map(|(name, size)| MachineType {
            name: (*name).to_owned(),
            vcpus: 2 * size,
            memory_mib: 4096 * u64::from(size),
            archs: vec![Arch::X86_64],
            ..MachineType::default()
        });
        let place = |zone: &str| Location { zone: zone.into(), subnet: Some(format!("subnet-{zone}")) };
        planner.learn(Catalogue {
            types: types.collect(),
            places: vec![place("z1"), place("z2")],
            ..Catalogue::default()
        });
        planner
    }

    fn request() -> CreateRequest {
        let size = Size { vcpus: 1, ..Size::default() };
        CreateRequest { name: "pod-a".into(), size, ..CreateRequest::default() }
    }

    fn named(planner: &Planner, at_most: usize) -> Vec<String> {
        let placement = planner.place(&request(), at_most).unwrap();
        read("pod-a", &placement).unwrap().iter().map(Offering::to_string).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn a_refused_offering_is_skipped_for_three_minutes() {
        let planner = planner(&["small", "large"]);
        assert_eq!(named(&planner, 2), ["small in z1", "small in z2"]);
        let small = |zone: &str| Offering {
            machine: "small".into(),
            zone: zone.into(),
            subnet: None,
            market: Market::OnDemand,
        };
        planner.exhausted(&small("z1"), "InsufficientInstanceCapacity");
        assert_eq!(named(&planner, 2), ["small in z2", "large in z1"]);
        planner.exhausted(Scope::Subnet("subnet-z2".to_owned()), "InsufficientFreeAddressesInSubnet");
        assert_eq!(named(&planner, 2), ["large in z1"]);
        tokio::time::advance(Duration::from_secs(180)).await;
        assert_eq!(named(&planner, 1), ["small in z1"]);
    }

    #[tokio::test(start_paused = true)]
    async fn without_any_capacity_the_error_names_each_offering_and_a_remedy() {
        let planner = planner(&["small", "large"]);
        planner.exhausted(Scope::Market(Market::OnDemand), "VcpuLimitExceeded");
        tokio::time::advance(Duration::from_secs(125)).await;
        let error = planner.place(&request(), 5).unwrap_err();
        assert_eq!(error.retry(), Retry::NextOffering);
        let text = error.to_string();
        for part in ["pod-a", "large in z1, z2", "VcpuLimitExceeded (2 min ago)", "allow more"] {
            assert!(text.contains(part), "{part} in {text}");
        }
    }

    #[test]
    fn a_refused_call_names_what_was_tried_within_bounds() {
        let planner = planner(&["small"]);
        let tried: Vec<(Offering, String)> = (0..500)
            .map(|number| {
                let machine = format!("type-{number}-{}", "x".repeat(500));
                let offering = Offering { machine, zone: "z".into(), subnet: None, market: Market::Spot };
                (offering, format!("code {} {}", number % 100, "y".repeat(500)))
            })
            .collect();
        let Error::Capacity { rejected, text, .. } = planner.capacity_error("pod", &tried) else {
            panic!("another class");
        };
        assert_eq!(rejected.len(), Error::MAX_REJECTED);
        assert!(text.len() < 4096, "{}", text.len());
        assert!(text.contains("type-0-") && text.contains("code 0"), "{text}");
    }

    #[tokio::test]
    async fn a_foreign_placement_is_refused() {
        for text in ["", "{}", r#"{"v":2,"offerings":[]}"#, r#"{"v":1,"offerings":[]}"#] {
            let placement = Some(Placement::new(text).unwrap());
            let request = CreateRequest { placement, ..request() };
            let read = offering(&request, async { panic!("the request has a placement") }).await;
            assert!(matches!(read, Err(Error::Invalid { .. })), "{text}");
        }
    }

    #[tokio::test]
    async fn a_request_without_a_placement_gets_one() {
        let planner = planner(&["small", "large"]);
        let place = async || planner.place(&request(), 2);
        let names = |all: &[Offering]| all.iter().map(Offering::to_string).collect::<Vec<_>>();
        assert_eq!(names(&offerings(&request(), place()).await.unwrap()), ["small in z1", "small in z2"]);
        assert_eq!(offering(&request(), place()).await.unwrap().to_string(), "small in z1");
        let refused = async { Err(Error::transient("no answer")) };
        assert!(matches!(offering(&request(), refused).await, Err(Error::Transient { .. })));
    }

    #[test]
    fn a_program_that_only_deletes_makes_nothing() {
        assert!(check_creates(true, &request()).is_ok());
        let error = check_creates(false, &request()).unwrap_err().to_string();
        assert!(error.contains("create of pod-a: this program only lists and deletes VMs"), "{error}");
    }
}
