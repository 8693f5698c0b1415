//! Tables of known decisions, and properties over random catalogues.

use proptest::prelude::*;

use super::*;

fn of(name: &str, vcpus: u32, memory_mib: u64, gpus: u32) -> InstanceType {
    InstanceType { name: name.into(), vcpus, memory_mib, gpus, gpu_model: None, price: None }
}

fn size(vcpus: u32, memory_mib: u64, gpus: u32) -> Size {
    Size { vcpus, memory_mib, gpus, gpu_model: None }
}

fn names(list: &[&str]) -> Vec<String> {
    list.iter().map(|name| (*name).to_owned()).collect()
}

/// Returns the first choice.
fn first(
    named: Option<&str>,
    size: &Size,
    catalogue: &[InstanceType],
    allowed: &[&str],
    default: &str,
) -> Result<String, String> {
    let allowed = names(allowed);
    choose(named, size, catalogue, &Policy { allowed: &allowed, default })
        .map(|names| names[0].clone())
        .map_err(|error| error.to_string())
}

fn best<'t>(types: &'t [InstanceType], size: &Size) -> Option<&'t str> {
    fitting(types, size).first().map(|one| one.name.as_str())
}

#[test]
fn a_named_type_is_verified() {
    let no_wish = Size::default();
    let check = |named, allowed: &[&str]| first(named, &no_wish, &[], allowed, "t2.medium");
    assert_eq!(check(Some("t2.small"), &["t2.small", "t2.medium"]).unwrap(), "t2.small");
    assert_eq!(
        check(Some("t2.small"), &["t2.medium"]).unwrap_err(),
        "failed to verify instance type: requested instance type (\"t2.small\") is not part of supported \
         instance types list"
    );
    assert_eq!(check(None, &["t2.medium"]).unwrap(), "t2.medium");
    assert_eq!(check(Some(""), &[]).unwrap(), "t2.medium");
    assert_eq!(
        check(Some("t2.small"), &[]).unwrap_err(),
        "failed to verify instance type: requested instance type (\"t2.small\") is not default \
         (\"t2.medium\") and supported instance types list is empty"
    );
}

#[test]
fn types_are_ordered_by_their_resources() {
    let sizes = [of("t2.small", 2, 6, 0), of("t2.medium", 4, 8, 0), of("t2.large", 8, 16, 0)];
    for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2]] {
        let list = order.map(|index| sizes[index].clone());
        let sorted: Vec<_> = fitting(&list, &Size::default()).iter().map(|one| &one.name).collect();
        assert_eq!(sorted, ["t2.small", "t2.medium", "t2.large"]);
    }
    let list = [of("p2.medium", 4, 8, 2), of("p2.small", 2, 6, 1), of("p2.large", 8, 16, 4)];
    let sorted: Vec<_> = fitting(&list, &size(0, 0, 1)).iter().map(|one| &one.name).collect();
    assert_eq!(sorted, ["p2.small", "p2.medium", "p2.large"]);
}

#[test]
fn the_best_fit_is_found() {
    let list = [of("t2.small", 2, 6, 0), of("t2.medium", 4, 8, 0), of("t2.large", 8, 16, 0)];
    assert_eq!(best(&list, &size(2, 6, 0)), Some("t2.small"));
    assert_eq!(best(&list, &size(4, 8, 0)), Some("t2.medium"));
    assert_eq!(best(&list, &size(4, 16, 0)), Some("t2.large"));
    assert_eq!(best(&list, &size(4, 32, 0)), None);
    let list = [of("t2.small", 2, 6, 0), of("p2.medium", 4, 8, 2), of("t2.large", 8, 16, 0)];
    assert_eq!(best(&list, &size(4, 8, 0)), Some("t2.large"), "a type with GPUs is skipped");
}

#[test]
fn the_best_fit_with_gpus_is_found() {
    let list = [of("small-gpu", 2, 4096, 1), of("medium-gpu", 4, 8192, 2)];
    assert_eq!(best(&list, &size(2, 4096, 1)), Some("small-gpu"));
    assert_eq!(best(&list, &size(3, 6144, 1)), Some("medium-gpu"));
    assert_eq!(best(&list, &size(8, 16384, 4)), None);
    assert_eq!(best(&[], &size(2, 4096, 1)), None);
}

#[test]
fn the_whole_decision() {
    let gpu = [of("p3.xlarge", 4, 16, 1), of("p3.2xlarge", 8, 32, 2), of("m5.large", 2, 8, 0)];
    let gpu_names = ["p3.xlarge", "p3.2xlarge", "m5.large"];
    let t3 = [of("t3.micro", 1, 1, 0), of("t3.large", 2, 8, 0), of("t3.xlarge", 4, 16, 0)];
    let t3_names = ["t3.micro", "t3.large", "t3.xlarge"];
    let big = [of("t3.large", 2, 8, 0), of("t3.xlarge", 4, 16, 0), of("t3.2xlarge", 8, 32, 0)];
    let big_names = ["t3.large", "t3.xlarge", "t3.2xlarge"];
    let medium = "t3.medium";
    assert_eq!(first(Some("m5.large"), &size(4, 8, 2), &gpu, &gpu_names, medium).unwrap(), "m5.large");
    assert_eq!(first(Some("t3.micro"), &size(4, 16, 0), &t3, &t3_names, medium).unwrap(), "t3.micro");
    assert_eq!(first(None, &size(4, 16, 1), &gpu, &gpu_names, medium).unwrap(), "p3.xlarge");
    assert_eq!(first(None, &size(4, 16, 0), &big, &big_names, medium).unwrap(), "t3.xlarge");
    let small = [of("t3.small", 2, 2, 0)];
    assert!(first(Some("invalid.type"), &size(2, 4, 0), &small, &["t3.small"], "t3.small").is_err());
    assert_eq!(first(None, &Size::default(), &[], &[], medium).unwrap(), medium);
}

#[test]
fn ibm_sizes_as_its_users_know_them() {
    let list = [of("bx2-2x8", 2, 8192, 0), of("cx2-2x4", 2, 4096, 0), of("mx2-2x16", 2, 16384, 0)];
    let allowed = ["bx2-2x8", "cx2-2x4", "mx2-2x16"];
    let check = |named, vcpus, memory| first(named, &size(vcpus, memory, 0), &list, &allowed, "bx2-2x8");
    assert_eq!(check(None, 0, 0).unwrap(), "bx2-2x8");
    assert_eq!(check(Some("cx2-2x4"), 0, 0).unwrap(), "cx2-2x4");
    assert_eq!(check(None, 2, 12288).unwrap(), "mx2-2x16");
    assert!(check(Some("bx2-2x4"), 0, 0).unwrap_err().contains("not part of"));
    assert_eq!(
        check(None, 2, 18432).unwrap_err(),
        "failed to get instance type based on vCPU and memory annotations: no instance type found for the \
         given vcpus (2) and memory (18432), the guest's own included"
    );
    assert!(check(None, 3, 12288).is_err());
    let error = first(None, &size(3, 5, 9), &list, &allowed, "bx2-2x8").unwrap_err();
    assert_eq!(
        error,
        "failed to get instance type based on GPU, vCPU, and memory annotations: no instance type found for \
         the given GPUs (9), vCPUs (3), and memory (5), the guest's own included"
    );
}

#[test]
fn lists_where_memory_and_cpus_do_not_grow_together() {
    let c4 = || of("c6a.4xlarge", 16, 32, 0);
    let c12 = || of("c6a.12xlarge", 48, 96, 0);
    let r2 = || of("r6a.2xlarge", 8, 64, 0);
    let table: [(Vec<InstanceType>, u32, u64, Option<&str>); 12] = [
        (vec![c4(), r2()], 12, 16, Some("c6a.4xlarge")),
        (vec![c4(), r2()], 12, 32, Some("c6a.4xlarge")),
        (vec![c4(), r2()], 12, 33, None),
        (vec![c4(), r2()], 8, 16, Some("c6a.4xlarge")),
        (vec![c12(), of("m6a.8xlarge", 32, 128, 0)], 48, 1, Some("c6a.12xlarge")),
        (vec![c12(), of("m6a.8xlarge", 32, 128, 0)], 48, 64, Some("c6a.12xlarge")),
        (vec![c12(), of("r6a.4xlarge", 16, 128, 0)], 32, 1, Some("c6a.12xlarge")),
        (vec![of("c6a.2xlarge", 8, 16, 0), of("r6a.xlarge", 4, 32, 0), c4()], 8, 1, Some("c6a.2xlarge")),
        (
            vec![of("c6a.xlarge", 4, 8, 0), of("r6a.large", 2, 16, 0), of("c6a.2xlarge", 8, 16, 0)],
            4,
            1,
            Some("c6a.xlarge"),
        ),
        (vec![of("c6a.xlarge", 4, 8, 0), of("r6a.large", 2, 16, 0), c12()], 4, 1, Some("c6a.xlarge")),
        (vec![c4(), r2(), c12()], 12, 1, Some("c6a.4xlarge")),
        (vec![of("r6a.large", 2, 16, 0), c4(), r2()], 12, 16, Some("c6a.4xlarge")),
    ];
    for (list, vcpus, memory, expected) in table {
        assert_eq!(best(&list, &size(vcpus, memory, 0)), expected, "{vcpus}/{memory} of {list:?}");
    }
}

#[test]
fn a_single_requirement_counts() {
    let list = [of("small", 2, 4, 0), of("fat", 2, 64, 0), of("quick", 16, 8, 0)];
    assert_eq!(best(&list, &size(0, 32, 0)), Some("fat"));
    assert_eq!(best(&list, &size(8, 0, 0)), Some("quick"));
}

#[test]
fn the_gpu_model_and_the_price_count() {
    let mut a10 = of("a10", 8, 32, 1);
    a10.gpu_model = Some("A10G".into());
    let mut t4 = of("t4", 4, 16, 1);
    t4.gpu_model = Some("T4".into());
    let list = [t4.clone(), a10.clone()];
    let wish = |model: &str| Size { gpu_model: Some(model.into()), ..Size::default() };
    assert_eq!(best(&list, &wish("a10g")), Some("a10"));
    assert_eq!(best(&list, &wish("T4")), Some("t4"));
    assert_eq!(best(&list, &wish("H100")), None);
    a10.price = Some(10);
    assert_eq!(best(&[t4, a10], &size(0, 0, 1)), Some("a10"), "known and cheap comes before unknown");
}

#[test]
fn an_empty_list_allows_only_the_default_also_by_size() {
    let list = [of("small", 2, 4, 0), of("big", 8, 16, 0)];
    assert_eq!(first(None, &size(1, 1, 0), &list, &[], "big").unwrap(), "big");
    assert!(first(None, &size(9, 1, 0), &list, &[], "big").is_err());
}

fn any_type() -> impl Strategy<Value = InstanceType> {
    let cpus = prop::sample::select(vec![1u32, 2, 4, 8, 16, 32, 48]);
    let memory = prop::sample::select(vec![1u64, 2, 4, 8, 16, 32, 64, 128, 256]);
    let price = prop::option::weighted(0.7, 1u64..50);
    let model = prop::option::of(prop::sample::select(vec!["t4", "a10", "T4"]));
    (0u32..40, cpus, memory, prop::sample::select(vec![0u32, 0, 0, 1, 2, 4]), model, price).prop_map(
        |(number, vcpus, memory_mib, gpus, model, price)| InstanceType {
            name: format!("type-{number}"),
            vcpus,
            memory_mib,
            gpus,
            gpu_model: model.filter(|_| gpus > 0).map(str::to_owned),
            price,
        },
    )
}

fn any_size() -> impl Strategy<Value = Size> {
    let model = prop::option::weighted(0.2, prop::sample::select(vec!["t4", "a10"]));
    (0u32..50, 0u64..300, prop::sample::select(vec![0u32, 0, 1, 2, 5]), model).prop_map(
        |(vcpus, memory_mib, gpus, model)| Size {
            vcpus,
            memory_mib,
            gpus,
            gpu_model: model.map(str::to_owned),
        },
    )
}

/// Independent definition of a type that fits.
fn good(one: &InstanceType, wish: &Size) -> bool {
    let wants_gpu = wish.gpus > 0 || wish.gpu_model.is_some();
    let model = match (&wish.gpu_model, &one.gpu_model) {
        (None, _) => true,
        (Some(wanted), Some(has)) => wanted.to_lowercase() == has.to_lowercase(),
        (Some(_), None) => false,
    };
    one.vcpus >= wish.vcpus
        && one.memory_mib >= wish.memory_mib
        && model
        && ((wants_gpu && one.gpus >= wish.gpus && one.gpus > 0) || (!wants_gpu && one.gpus == 0))
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(512) })]

    #[test]
    fn the_answer_fits_and_nothing_that_fits_comes_before_it(
        list in prop::collection::vec(any_type(), 0..20), wish in any_size(),
    ) {
        let found = fitting(&list, &wish);
        prop_assert_eq!(found.len(), list.iter().filter(|one| good(one, &wish)).count());
        for one in &found {
            prop_assert!(good(one, &wish));
            prop_assert!(rank(found[0]) <= rank(one));
        }
    }

    #[test]
    fn a_larger_request_never_gets_an_earlier_type(
        list in prop::collection::vec(any_type(), 0..20),
        wish in any_size(), cpus in 0u32..9, memory in 0u64..40,
    ) {
        let bigger = Size { vcpus: wish.vcpus + cpus, memory_mib: wish.memory_mib + memory, ..wish.clone() };
        match (fitting(&list, &wish).first(), fitting(&list, &bigger).first()) {
            (None, Some(_)) => prop_assert!(false, "the bigger wish is met, the smaller is not"),
            (Some(small), Some(big)) => prop_assert!(rank(small) <= rank(big)),
            (_, None) => {}
        }
    }

    #[test]
    fn the_order_of_the_list_does_not_matter(
        list in prop::collection::vec(any_type(), 0..20).prop_shuffle(), wish in any_size(),
    ) {
        let mut other = list.clone();
        other.reverse();
        prop_assert_eq!(fitting(&list, &wish), fitting(&other, &wish));
    }

    #[test]
    fn one_more_type_never_removes_an_answer(
        list in prop::collection::vec(any_type(), 0..20), more in any_type(), wish in any_size(),
    ) {
        let before = fitting(&list, &wish).first().map(|one| rank(one));
        let mut longer = list.clone();
        longer.push(more);
        let after = fitting(&longer, &wish);
        if let Some(before) = before {
            prop_assert!(after.first().is_some_and(|one| rank(one) <= before));
        }
    }
}
