//! Tests the planner's properties over varied catalogues, and the texts of its refusals.

use std::collections::{HashMap, HashSet};

use peerpod_provider_api::DiskRequest;
use proptest::prelude::*;

use super::*;
use crate::catalogue::Prices;
use crate::exhausted::STANDS;

const ZONES: [&str; 3] = ["eu-1a", "eu-1b", "eu-1c"];

fn machine(name: &str, vcpus: u32, gib: u64) -> MachineType {
    MachineType {
        name: name.into(),
        vcpus,
        memory_mib: gib * 1024,
        archs: vec![Arch::X86_64],
        ..MachineType::default()
    }
}

fn place(zone: &str) -> Location {
    Location { zone: zone.into(), subnet: None }
}

fn on_demand(types: &[MachineType]) -> Policy {
    Policy {
        allowed: types.iter().map(|one| one.name.clone()).collect(),
        default: types.first().map(|one| one.name.clone()).unwrap_or_default(),
        markets: vec![Market::OnDemand],
        ..Policy::default()
    }
}

fn size(vcpus: u32, gib: u64) -> CreateRequest {
    let size = Size { vcpus, memory_mib: gib * 1024, ..Size::default() };
    CreateRequest { name: "web-0".into(), size, ..CreateRequest::default() }
}

fn disks(count: u32, zone: Option<&str>) -> Vec<DiskRequest> {
    let disk = |number: u32| DiskRequest {
        volume: number.to_string(),
        zone: zone.map(str::to_owned),
        ..DiskRequest::default()
    };
    (0..count).map(disk).collect()
}

/// Returns whether the rejection is one of this offering.
fn covers(one: &Rejection<'_>, machine: &str, place: &Location, market: Market) -> bool {
    one.machine == machine
        && one.place.is_none_or(|own| own == place)
        && one.market.is_none_or(|own| own == market)
}

/// Lists the offerings in order, as `type zone market`.
fn order(plan: &Plan<'_>) -> Vec<String> {
    plan.offerings
        .iter()
        .map(|one| format!("{} {} {}", one.machine.name, one.place.zone, one.market))
        .collect()
}

fn small_catalogue() -> Catalogue {
    Catalogue {
        types: vec![
            machine("m6a.large", 2, 8),
            machine("c6a.4xlarge", 16, 32),
            machine("r6a.2xlarge", 8, 64),
        ],
        places: vec![place("eu-1a"), place("eu-1b")],
        ..Catalogue::default()
    }
}

#[test]
fn real_sizes_that_a_binary_search_does_not_find_are_found() {
    // Tables of the reference: (list, vCPU, GiB, right answer).
    let sizes = [
        ("c6a.xlarge", 4, 8),
        ("c6a.2xlarge", 8, 16),
        ("c6a.4xlarge", 16, 32),
        ("c6a.12xlarge", 48, 96),
        ("m6a.8xlarge", 32, 128),
        ("r6a.large", 2, 16),
        ("r6a.xlarge", 4, 32),
        ("r6a.2xlarge", 8, 64),
        ("r6a.4xlarge", 16, 128),
    ];
    let cases: [(&[&str], u32, u64, Option<&str>); 11] = [
        (&["c6a.4xlarge", "r6a.2xlarge"], 12, 16, Some("c6a.4xlarge")),
        (&["c6a.4xlarge", "r6a.2xlarge"], 12, 32, Some("c6a.4xlarge")),
        (&["c6a.4xlarge", "r6a.2xlarge"], 12, 33, None),
        (&["c6a.4xlarge", "r6a.2xlarge"], 8, 16, Some("c6a.4xlarge")),
        (&["c6a.12xlarge", "m6a.8xlarge"], 48, 64, Some("c6a.12xlarge")),
        (&["c6a.12xlarge", "r6a.4xlarge"], 32, 1, Some("c6a.12xlarge")),
        (&["c6a.2xlarge", "r6a.xlarge", "c6a.4xlarge"], 8, 1, Some("c6a.2xlarge")),
        (&["c6a.xlarge", "r6a.large", "c6a.2xlarge"], 4, 1, Some("c6a.xlarge")),
        (&["c6a.xlarge", "r6a.large", "c6a.12xlarge"], 4, 1, Some("c6a.xlarge")),
        (&["c6a.4xlarge", "r6a.2xlarge", "c6a.12xlarge"], 12, 1, Some("c6a.4xlarge")),
        (&["r6a.large", "c6a.4xlarge", "r6a.2xlarge"], 12, 16, Some("c6a.4xlarge")),
    ];
    for (names, vcpus, gib, expected) in cases {
        let types: Vec<MachineType> = sizes
            .iter()
            .filter(|(name, ..)| names.contains(name))
            .map(|(name, vcpus, gib)| machine(name, *vcpus, *gib))
            .collect();
        let policy = on_demand(&types);
        let catalogue = Catalogue { types, places: vec![place("z")], ..Catalogue::default() };
        let plan =
            plan(&catalogue, &size(vcpus, gib), &policy, &Exhausted::default(), Instant::now()).unwrap();
        let first = plan.offerings.first().map(|one| one.machine.name.as_str());
        assert_eq!(first, expected, "{names:?} {vcpus}/{gib}");
    }
}

#[test]
fn prices_order_all_offerings_and_unpriced_ones_come_last() {
    let mut catalogue = small_catalogue();
    let mut prices = Prices::default();
    prices.set("m6a.large", None, Market::OnDemand, 100);
    prices.set("m6a.large", Some("eu-1a"), Market::Spot, 60);
    prices.set("m6a.large", Some("eu-1b"), Market::Spot, 40);
    prices.set("c6a.4xlarge", None, Market::Spot, 50);
    catalogue.prices = prices;
    let policy = Policy { markets: MARKETS.to_vec(), ..on_demand(&catalogue.types) };
    let need = size(2, 8);
    let plan = plan(&catalogue, &need, &policy, &Exhausted::default(), Instant::now()).unwrap();
    assert_eq!(
        order(&plan)[..7],
        [
            "m6a.large eu-1b spot",
            "c6a.4xlarge eu-1a spot",
            "c6a.4xlarge eu-1b spot",
            "m6a.large eu-1a spot",
            "m6a.large eu-1a on_demand",
            "m6a.large eu-1b on_demand",
            "c6a.4xlarge eu-1a on_demand",
        ]
    );
}

#[test]
fn disks_zones_and_the_catalogue_narrow_the_places() {
    let mut catalogue = small_catalogue();
    catalogue.places.push(place("eu-1c"));
    let sold = |zones: &[&str]| zones.iter().map(|zone| (*zone).to_owned()).collect::<HashSet<_>>();
    catalogue.sold = Some(HashMap::from([
        ("m6a.large".to_owned(), sold(&["eu-1a", "eu-1b"])),
        ("c6a.4xlarge".to_owned(), sold(&["eu-1b"])),
    ]));
    let policy = on_demand(&catalogue.types);
    let of = |need: &CreateRequest| {
        order(&plan(&catalogue, need, &policy, &Exhausted::default(), Instant::now()).unwrap())
    };
    let need = CreateRequest { disks: disks(1, Some("eu-1b")), ..size(2, 1) };
    assert_eq!(of(&need), ["m6a.large eu-1b on_demand", "c6a.4xlarge eu-1b on_demand"]);
    let need = CreateRequest { zones: vec!["eu-1a".into(), "eu-1c".into()], ..size(2, 1) };
    assert_eq!(of(&need), ["m6a.large eu-1a on_demand"]);
    assert_eq!(of(&size(8, 1)), ["c6a.4xlarge eu-1b on_demand"], "the third is sold nowhere");
}

#[test]
fn a_pod_without_requirements_gets_the_default_and_a_named_type_wins() {
    let catalogue = small_catalogue();
    let policy = on_demand(&catalogue.types);
    let of = |need: &CreateRequest| plan(&catalogue, need, &policy, &Exhausted::default(), Instant::now());
    assert_eq!(of(&CreateRequest::default()).unwrap().offerings.len(), 2);
    let named = CreateRequest { instance_type: Some("r6a.2xlarge".into()), ..size(64, 1) };
    assert_eq!(of(&named).unwrap().offerings[0].machine.name, "r6a.2xlarge");
    let named = CreateRequest { instance_type: Some("p5.48xlarge".into()), ..CreateRequest::default() };
    let text = of(&named).unwrap_err().to_string();
    assert!(text.contains(r#"("p5.48xlarge") is not part of supported instance types list"#), "{text}");
    let missing = Policy { default: "m7a.large".into(), ..policy.clone() };
    let answer = plan(&catalogue, &CreateRequest::default(), &missing, &Exhausted::default(), Instant::now());
    assert!(answer.unwrap_err().to_string().contains("m7a.large is not offered here"));
}

#[test]
fn a_named_type_is_verified_with_the_known_texts() {
    let of = |name, allowed: &[&str]| {
        let allowed = allowed.iter().map(|name| (*name).to_owned()).collect();
        let policy = Policy { allowed, default: "t2.medium".into(), ..Policy::default() };
        verify(name, &policy).map_err(|error| error.to_string())
    };
    assert_eq!(of("t2.small", &["t2.small", "t2.medium"]), Ok(()));
    assert_eq!(of("t2.medium", &["t2.small"]), Ok(()));
    assert_eq!(of("t2.medium", &[]), Ok(()));
    assert_eq!(
        of("t2.small", &["t2.medium"]).unwrap_err(),
        "failed to verify instance type: requested instance type (\"t2.small\") is not part of supported \
         instance types list"
    );
    assert_eq!(
        of("t2.small", &[]).unwrap_err(),
        "failed to verify instance type: requested instance type (\"t2.small\") is not default \
         (\"t2.medium\") and supported instance types list is empty"
    );
}

#[test]
fn a_size_that_no_type_has_is_refused_with_the_known_texts() {
    let size = Size { vcpus: 2, memory_mib: 18432, ..Size::default() };
    assert_eq!(
        text::nothing_fits(&size),
        "failed to get instance type based on vCPU and memory annotations: no instance type found for the \
         given vcpus (2) and memory (18432), the guest's own included"
    );
    assert_eq!(
        text::nothing_fits(&Size { gpus: 9, ..size }),
        "failed to get instance type based on GPU, vCPU, and memory annotations: no instance type found for \
         the given GPUs (9), vCPUs (2), and memory (18432), the guest's own included"
    );
}

#[test]
fn a_gpu_model_counts_without_case_and_without_a_number() {
    let gpu = |name: &str, model: &str| MachineType {
        gpus: 1,
        gpu_model: Some(model.into()),
        ..machine(name, 4, 16)
    };
    let types = vec![gpu("g4dn.xlarge", "T4"), gpu("g5.xlarge", "A10G"), machine("m6a.large", 2, 8)];
    let policy = on_demand(&types);
    let catalogue = Catalogue { types, places: vec![place("eu-1a")], ..Catalogue::default() };
    let of = |model: &str| {
        let size = Size { gpu_model: Some(model.into()), ..Size::default() };
        let need = CreateRequest { size, ..CreateRequest::default() };
        order(&plan(&catalogue, &need, &policy, &Exhausted::default(), Instant::now()).unwrap())
    };
    assert_eq!(of("a10g"), ["g5.xlarge eu-1a on_demand"]);
    assert_eq!(of("T4"), ["g4dn.xlarge eu-1a on_demand"]);
    assert_eq!(of("H100"), [""; 0]);
}

#[test]
fn a_refusal_names_nearly_fitting_offerings_first_then_the_rest_by_reason() {
    let mut catalogue = small_catalogue();
    catalogue.types.extend((0..310).map(|number| machine(&format!("t{number}.nano"), 1, 1)));
    let policy = on_demand(&catalogue.types);
    let (mut marks, start) = (Exhausted::default(), Instant::now());
    for name in ["m6a.large", "c6a.4xlarge", "r6a.2xlarge"] {
        for zone in ["eu-1a", "eu-1b"] {
            let machine = name.to_owned();
            let offering = Offering { machine, zone: zone.into(), subnet: None, market: Market::OnDemand };
            marks.mark(&offering, "no capacity", STANDS, start);
        }
    }
    let need = size(8, 2);
    let plan = plan(&catalogue, &need, &policy, &marks, start + Duration::from_secs(125)).unwrap();
    assert_eq!(plan.offerings, []);
    let error = plan.nothing_left(&need);
    let text = error.to_string();
    for part in [
        "create of web-0",
        "c6a.4xlarge in eu-1a, eu-1b (on demand), r6a.2xlarge in eu-1a, eu-1b (on demand): no capacity (2 min ago)",
        "311 types: less than 8 vCPUs",
        "allow more instance types",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
    assert!(text.find("no capacity").unwrap() < text.find("311 types").unwrap(), "{text}");
    assert!(matches!(error, Error::Capacity { .. }));
}

#[test]
fn without_a_large_enough_type_the_text_is_the_known_one() {
    let catalogue = small_catalogue();
    let policy = on_demand(&catalogue.types);
    let need = size(64, 1024);
    let plan = plan(&catalogue, &need, &policy, &Exhausted::default(), Instant::now()).unwrap();
    let error = plan.nothing_left(&need);
    assert!(matches!(error, Error::Invalid { .. }));
    let text = error.to_string();
    assert!(text.contains("no instance type found for the given vcpus (64) and memory (1048576)"), "{text}");
    assert!(text.contains("less than 64 vCPUs"), "{text}");
}

#[test]
fn obstacles_besides_the_size_are_named() {
    let catalogue = small_catalogue();
    let policy = on_demand(&catalogue.types);
    for (need, part) in [
        (CreateRequest { arch: Some(Arch::Aarch64), ..size(1, 1) }, "does not boot aarch64 images"),
        (CreateRequest { confidential: Some(Confidential::SevSnp), ..size(1, 1) }, "has no sev_snp"),
        (CreateRequest { zones: vec!["us-1a".into()], ..size(1, 1) }, "not in a zone that is asked for"),
        (CreateRequest { disks: disks(1, Some("us-1a")), ..size(1, 1) }, "the pod's disks are in us-1a"),
        (CreateRequest { market: Some(Market::Spot), ..size(1, 1) }, ""),
    ] {
        let plan = plan(&catalogue, &need, &policy, &Exhausted::default(), Instant::now()).unwrap();
        if part.is_empty() {
            assert!(order(&plan).iter().all(|one| one.ends_with("spot")), "a pod may ask for an exception");
            continue;
        }
        assert_eq!(plan.offerings, []);
        let error = plan.nothing_left(&need);
        assert!(matches!(error, Error::Invalid { .. }) && error.to_string().contains(part), "{error}");
    }
}

/// Generates catalogues in which attributes repeat, so that a request matches some types and not others.
fn catalogues() -> impl Strategy<Value = Catalogue> {
    let types = prop::collection::vec(
        (0usize..5, 0usize..5, 0u32..3, any::<bool>(), 0usize..4, prop::option::of(0u32..4)),
        1..12,
    );
    let prices =
        prop::collection::vec((0usize..12, prop::option::of(0usize..3), any::<bool>(), 1u64..50), 0..20);
    let sold = prop::option::of(prop::collection::vec((0usize..12, 0usize..3), 0..40));
    (types, 1usize..=3, prices, sold).prop_map(|(types, zones, prices, sold)| {
        let types: Vec<MachineType> = types
            .into_iter()
            .enumerate()
            .map(|(number, (vcpus, memory, gpus, arm, tee, disks))| MachineType {
                name: format!("t{number}"),
                vcpus: 1 << vcpus,
                memory_mib: 1024 << memory,
                gpus,
                gpu_model: (gpus > 0).then(|| if arm { "a100".into() } else { "T4".into() }),
                archs: vec![if arm { Arch::Aarch64 } else { Arch::X86_64 }],
                confidential: Confidential::ALL.iter().copied().take(tee).collect(),
                max_disks: disks,
                max_nics: disks.map(|disks| disks + 1),
            })
            .collect();
        let name = |number: usize| format!("t{number}");
        let zone = |number: usize| ZONES[number].to_owned();
        let mut known = Prices::default();
        for (machine, at, spot, price) in prices {
            let market = if spot { Market::Spot } else { Market::OnDemand };
            known.set(&name(machine), at.map(zone).as_deref(), market, price);
        }
        let sold = sold.map(|sold| {
            let mut by_type: HashMap<String, HashSet<String>> = HashMap::new();
            for (machine, at) in sold {
                by_type.entry(name(machine)).or_default().insert(zone(at));
            }
            by_type
        });
        let places = ZONES.iter().take(zones).map(|zone| place(zone)).collect();
        Catalogue { types, places, sold, prices: known }
    })
}

fn needs() -> impl Strategy<Value = CreateRequest> {
    let size = (0u32..20, 0u64..20_000, 0u32..3, prop::option::of(any::<bool>()));
    let machine = prop::option::weighted(0.1, 0usize..12);
    let tee = prop::option::of(prop::sample::select(Confidential::ALL));
    let zone = || prop::option::of(0usize..3);
    let market = prop::option::of(prop::sample::select(MARKETS.to_vec()));
    (size, machine, any::<Option<bool>>(), tee, 0u32..3, zone(), zone(), market).prop_map(
        |(size, machine, arm, confidential, disks, disk_zone, zone, market)| {
            let (vcpus, memory_mib, gpus, model) = size;
            let gpu_model = model.map(|small| if small { "t4".into() } else { "A100".into() });
            CreateRequest {
                size: Size { vcpus, memory_mib, gpus, gpu_model },
                instance_type: machine.map(|number| format!("t{number}")),
                arch: arm.map(|arm| if arm { Arch::Aarch64 } else { Arch::X86_64 }),
                confidential,
                disks: self::disks(disks, disk_zone.map(|zone| ZONES[zone])),
                second_nic: disks % 2 == 1,
                zones: zone.map(|zone| ZONES[zone].to_owned()).into_iter().collect(),
                market,
                ..CreateRequest::default()
            }
        },
    )
}

fn marked() -> impl Strategy<Value = Vec<(usize, usize, bool, u64)>> {
    prop::collection::vec((0usize..12, 0usize..3, any::<bool>(), 0u64..400), 0..30)
}

fn marks(marked: &[(usize, usize, bool, u64)], start: Instant) -> Exhausted {
    let mut marks = Exhausted::default();
    for (machine, zone, spot, at) in marked {
        let market = if *spot { Market::Spot } else { Market::OnDemand };
        let (machine, zone) = (format!("t{machine}"), ZONES[*zone].to_owned());
        let offering = Offering { machine, zone, subnet: None, market };
        marks.mark(&offering, "none left", STANDS, start + Duration::from_secs(*at));
    }
    marks
}

/// Independent definition of an offering that suits.
fn suits(
    machine: &MachineType,
    zone: &str,
    market: Market,
    need: &CreateRequest,
    policy: &Policy,
    all: &Catalogue,
) -> bool {
    let sized = match &need.instance_type {
        Some(name) => machine.name == *name,
        None if need.size == Size::default() => machine.name == policy.default,
        None => {
            let Size { vcpus, memory_mib, gpus, gpu_model } = &need.size;
            let model = |wanted: &String| {
                machine.gpu_model.clone().unwrap_or_default().to_lowercase() == wanted.to_lowercase()
            };
            let wants_gpu = *gpus > 0 || gpu_model.is_some();
            policy.allowed.contains(&machine.name)
                && machine.vcpus >= *vcpus
                && machine.memory_mib >= *memory_mib
                && machine.gpus >= *gpus
                && (machine.gpus > 0) == wants_gpu
                && gpu_model.as_ref().is_none_or(model)
        }
    };
    sized
        && need.arch.is_none_or(|arch| machine.archs.contains(&arch))
        && need.confidential.is_none_or(|tee| machine.confidential.contains(&tee))
        && machine.max_disks.is_none_or(|most| need.disks.len() <= most as usize)
        && machine.max_nics.is_none_or(|most| u32::from(need.second_nic) < most)
        && (need.zones.is_empty() || need.zones.iter().any(|one| one == zone))
        && need.disks.iter().all(|disk| disk.zone.as_deref().is_none_or(|one| one == zone))
        && all.is_sold(&machine.name, zone)
        && need.market.map_or(policy.markets.contains(&market), |wanted| wanted == market)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn each_offering_is_planned_and_fits_or_has_a_reason(
        catalogue in catalogues(), need in needs(), marked in marked(), both in any::<bool>(),
    ) {
        let start = Instant::now();
        let now = start + Duration::from_secs(400);
        let marks = marks(&marked, start);
        let mut policy = on_demand(&catalogue.types);
        if both { policy.markets = MARKETS.to_vec(); }
        let Ok(plan) = plan(&catalogue, &need, &policy, &marks, now) else {
            prop_assert!(need.instance_type.is_some(), "only a named type is refused as such");
            return Ok(());
        };
        for machine in &catalogue.types {
            for place in &catalogue.places {
                for market in MARKETS {
                    let planned = plan.offerings.iter().filter(|one| {
                        one.machine == machine && one.place == place && one.market == market
                    }).count();
                    let reasons: Vec<_> = plan.rejections.iter()
                        .filter(|one| covers(one, &machine.name, place, market)).collect();
                    prop_assert_eq!(planned + reasons.len(), 1, "{} {:?} {}: {:?}", machine.name, place, market, reasons);
                    let is_free = marks.find(&machine.name, &place.zone, None, market, now).is_none();
                    let fits = suits(machine, &place.zone, market, &need, &policy, &catalogue);
                    prop_assert_eq!(planned == 1, fits && is_free);
                    // An offering that suits but for its mark has the reason `Exhausted`.
                    let exhausted = reasons.first().is_some_and(|one| matches!(one.reason, RejectReason::Exhausted { .. }));
                    prop_assert_eq!(exhausted, fits && !is_free);
                }
            }
        }
        let rejected = plan.rejected();
        prop_assert!(rejected.len() <= Error::MAX_REJECTED);
        prop_assert!(plan.nothing_left(&need).to_string().len() < 2048);
    }

    #[test]
    fn no_cheaper_or_smaller_fit_comes_later(
        catalogue in catalogues(), need in needs(),
    ) {
        let policy = Policy { markets: MARKETS.to_vec(), ..on_demand(&catalogue.types) };
        let Ok(plan) = plan(&catalogue, &need, &policy, &Exhausted::default(), Instant::now()) else { return Ok(()) };
        for pair in plan.offerings.windows(2) {
            let [first, second] = pair else { unreachable!("windows of two") };
            match (first.price, second.price) {
                (Some(first), Some(second)) => prop_assert!(first <= second),
                (None, second) => prop_assert!(second.is_none(), "offerings without a price come last"),
                (Some(_), None) => {}
            }
            if first.price == second.price {
                prop_assert!(
                    (first.machine.gpus, first.machine.memory_mib) <= (second.machine.gpus, second.machine.memory_mib)
                );
            }
        }
    }

    #[test]
    fn the_order_of_the_input_does_not_matter(
        (catalogue, shuffled) in catalogues().prop_flat_map(|catalogue| {
            let types = Just(catalogue.types.clone()).prop_shuffle();
            let places = Just(catalogue.places.clone()).prop_shuffle();
            (Just(catalogue), types, places).prop_map(|(catalogue, types, places)| {
                let shuffled = Catalogue { types, places, ..catalogue.clone() };
                (catalogue, shuffled)
            })
        }),
        need in needs(),
    ) {
        let policy = Policy { markets: MARKETS.to_vec(), ..on_demand(&catalogue.types) };
        let now = Instant::now();
        let one = plan(&catalogue, &need, &policy, &Exhausted::default(), now);
        let other = plan(&shuffled, &need, &policy, &Exhausted::default(), now);
        prop_assert_eq!(one, other);
    }

    #[test]
    fn a_larger_request_gets_no_extra_and_no_cheaper_offering(
        catalogue in catalogues(), need in needs(), cpus in 0u32..8, memory in 0u64..8000, disks in 0u32..2,
    ) {
        // Without a size the plan is the default type, and with a name the named type. More GPUs select another kind of
        // machine, so only the other sizes grow.
        prop_assume!(need.instance_type.is_none() && need.size != Size::default());
        let policy = Policy { markets: MARKETS.to_vec(), ..on_demand(&catalogue.types) };
        let mut more = need.clone();
        more.size.vcpus += cpus;
        more.size.memory_mib += memory;
        more.disks.extend(self::disks(disks, None));
        let now = Instant::now();
        let less = plan(&catalogue, &need, &policy, &Exhausted::default(), now).unwrap();
        let more = plan(&catalogue, &more, &policy, &Exhausted::default(), now).unwrap();
        // The remaining offerings keep their order.
        let mut rest = less.offerings.iter();
        for one in &more.offerings {
            prop_assert!(rest.any(|other| other == one), "{:?}", one);
        }
    }
}
