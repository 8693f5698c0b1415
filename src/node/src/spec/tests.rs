//! Tests of the annotations as both shims send them.

use proptest::prelude::*;

use super::*;

/// The nine keys as a shim sends them, some with other values.
fn sent(changed: &[(&'static str, &str)]) -> HashMap<String, String> {
    let mut all: HashMap<&str, &str> = [
        (SANDBOX_NAME, "web-0"),
        (SANDBOX_NAMESPACE, "default"),
        (MACHINE_TYPE, ""),
        (IMAGE, ""),
        (DEFAULT_VCPUS, "0"),
        (DEFAULT_MEMORY, "0"),
        (INIT_DATA, ""),
        (DEFAULT_GPUS, "0"),
        (DEFAULT_GPU_MODEL, ""),
    ]
    .into();
    all.extend(changed.iter().copied());
    all.into_iter().map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
}

fn vcpus(text: &str) -> Result<u32, String> {
    parse(&sent(&[(DEFAULT_VCPUS, text)])).map(|wanted| wanted.size.vcpus).map_err(|why| why.to_string())
}

#[test]
fn a_go_shim_without_annotations_requests_no_options() {
    let wanted = parse(&sent(&[])).unwrap();
    assert_eq!(wanted.pod.to_string(), "default/web-0");
    assert_eq!(wanted.pod.uid, None);
    assert_eq!(wanted.size, Size::default());
    assert_eq!((wanted.instance_type, wanted.image, wanted.initdata), (None, None, None));
}

#[test]
fn every_annotation_of_a_pod_is_parsed() {
    let initdata = "\nalgorithm = \"sha384\"\nversion = \"0.1.0\"\n";
    let wanted = parse(&sent(&[
        (MACHINE_TYPE, "m5.large"),
        (IMAGE, "ami-1"),
        (DEFAULT_VCPUS, "2.5"),
        (DEFAULT_MEMORY, "2048"),
        (INIT_DATA, initdata),
        (DEFAULT_GPUS, "2"),
        (DEFAULT_GPU_MODEL, "a100"),
    ]))
    .unwrap();
    assert_eq!(wanted.size, Size { vcpus: 3, memory_mib: 2048, gpus: 2, gpu_model: Some("a100".into()) });
    assert_eq!(wanted.instance_type.as_deref(), Some("m5.large"));
    assert_eq!(wanted.image.as_deref(), Some("ami-1"));
    assert_eq!(wanted.initdata.as_deref(), Some(initdata));
}

#[test]
fn vcpus_are_decimal_and_rounded_up() {
    for (text, expected) in [
        ("1.7", 2),
        ("0.5", 1),
        ("0", 0),
        ("0.0", 0),
        ("", 0),
        ("1", 1),
        ("1.0", 1),
        ("2.5", 3),
        ("0.001", 1),
        ("0.0001", 1),
        ("2.0000002", 2),
        ("2.0004", 2),
        ("2.0005", 3),
        ("2.001", 3),
        ("1.9999999", 2),
        ("4096", 4096),
    ] {
        assert_eq!(vcpus(text), Ok(expected), "{text}");
    }
}

#[test]
fn an_invalid_number_is_an_error_with_key_and_value() {
    for text in ["1e3", "NaN", "inf", "-1", "+1", "1.", ".5", "1,5", "two", "1.5.2", "0x10", "١"] {
        assert!(vcpus(text).is_err(), "{text}");
    }
    assert_eq!(
        vcpus("two").unwrap_err(),
        "read the annotations: io.katacontainers.config.hypervisor.default_vcpus = \"two\": not a number; \
         write it like 2 or 1.5"
    );
    for (key, value) in
        [(DEFAULT_MEMORY, "2048Mi"), (DEFAULT_MEMORY, "2048.5"), (DEFAULT_GPUS, "-1"), (DEFAULT_GPUS, "1.5")]
    {
        let why = parse(&sent(&[(key, value)])).unwrap_err().to_string();
        assert!(why.contains(key) && why.contains(value) && why.contains("not a whole number"), "{why}");
    }
}

#[test]
fn huge_numbers_are_refused() {
    for (key, value) in [
        (DEFAULT_VCPUS, "4097"),
        (DEFAULT_VCPUS, "4096.5"),
        (DEFAULT_VCPUS, "99999999999999999999999"),
        (DEFAULT_VCPUS, "18446744073709551615.9"),
        (DEFAULT_MEMORY, "67108865"),
        (DEFAULT_MEMORY, "18446744073709551616"),
        (DEFAULT_GPUS, "257"),
        (DEFAULT_GPUS, "4294967297"),
    ] {
        let why = parse(&sent(&[(key, value)])).unwrap_err().to_string();
        assert!(why.contains(key) && why.contains("write at most"), "{why}");
    }
}

#[test]
fn a_name_of_cri_o_is_split() {
    let name = "k8s_web-0.a_default_0b5b1d2e-1111-2222-3333-444455556666_3";
    for namespace in ["default", ""] {
        let pod = parse(&sent(&[(SANDBOX_NAME, name), (SANDBOX_NAMESPACE, namespace)])).unwrap().pod;
        assert_eq!(pod.to_string(), "default/web-0.a");
        assert_eq!(pod.uid.as_deref(), Some("0b5b1d2e-1111-2222-3333-444455556666"));
    }
    for bad in [
        "k8s_web",
        "k8s_web_default_uid",
        "k8s_a_b_c_d_0",
        "k8s_web_default_uid_x",
        "k8s_web_default__0",
        "k8s__default_u_0",
    ] {
        assert!(matches!(parse(&sent(&[(SANDBOX_NAME, bad)])), Err(Error::Bad { .. })), "{bad}");
    }
    let other = sent(&[(SANDBOX_NAME, name), (SANDBOX_NAMESPACE, "kube-system")]);
    assert!(parse(&other).unwrap_err().to_string().contains("they must agree"));
}

#[test]
fn a_missing_pod_name_is_an_error() {
    for value in ["", "  "] {
        let error = parse(&sent(&[(SANDBOX_NAME, value)])).unwrap_err();
        assert_eq!(error, Error::Missing(SANDBOX_NAME));
    }
    let mut none = sent(&[]);
    none.remove(SANDBOX_NAMESPACE);
    assert_eq!(parse(&none).unwrap_err(), Error::Missing(SANDBOX_NAMESPACE));
    assert_eq!(parse(&HashMap::new()).unwrap_err(), Error::Missing(SANDBOX_NAME));
}

#[test]
fn invalid_names_are_refused_and_cut_in_the_error() {
    let long = "x".repeat(300);
    for bad in ["a b", "a\nb", "../x", "a/b", "-a", "é", long.as_str()] {
        let why = parse(&sent(&[(SANDBOX_NAME, bad)])).unwrap_err().to_string();
        assert!(why.contains(SANDBOX_NAME) && !why.contains('\n') && why.len() < 400, "{why}");
        assert!(parse(&sent(&[(SANDBOX_NAMESPACE, bad)])).is_err(), "{bad}");
    }
}

#[test]
fn ids_are_safe_as_file_names() {
    let longest = "a".repeat(128);
    for good in ["a", "0f3c", "A_b.c-d", "a..b", &longest] {
        assert_eq!(SandboxId::new(good).unwrap().as_str(), good);
    }
    let too_long = "a".repeat(129);
    for bad in ["", ".", "..", "../x", "a/b", "/", "-a", "_a", "a b", "a\0", "a\n", "é", "a:b", &too_long] {
        let why = SandboxId::new(bad).unwrap_err().to_string();
        assert!(why.starts_with("sandbox id") && why.len() < 200, "{why}");
        assert!(serde_json::from_value::<SandboxId>(bad.into()).is_err(), "{bad}");
    }
    let id: SandboxId = serde_json::from_str("\"ab\"").unwrap();
    assert_eq!(serde_json::to_string(&id).unwrap(), "\"ab\"");
    let known: HashMap<SandboxId, u8> = [(id, 1)].into();
    assert_eq!(known.get("ab"), Some(&1));
}

proptest! {
    #[test]
    fn no_annotation_makes_the_parser_panic(name in ".{0,40}", ns in ".{0,20}", vcpus in ".{0,20}", memory in "[0-9.]{0,30}") {
        let keys = [
            (SANDBOX_NAME, name.as_str()),
            (SANDBOX_NAMESPACE, &ns),
            (DEFAULT_VCPUS, &vcpus),
            (DEFAULT_MEMORY, &memory),
        ];
        match parse(&sent(&keys)) {
            Ok(wanted) => prop_assert!(wanted.size.memory_mib <= MAX_MEMORY && !wanted.pod.name.is_empty()),
            Err(why) => prop_assert!(why.to_string().starts_with("read the annotations: ")),
        }
    }

    #[test]
    fn vcpus_of_a_rust_shim_are_never_rounded_down(cpus in 0.01f32..4000.0) {
        let asked = vcpus(&cpus.to_string()).unwrap();
        prop_assert!(f64::from(asked) >= f64::from(cpus) - 0.0005, "{cpus} became {asked}");
        prop_assert!(f64::from(asked) < f64::from(cpus) + 1.0);
    }

    #[test]
    fn an_accepted_id_is_one_path_component(text in "[a-zA-Z0-9_./-]{0,12}") {
        if let Ok(id) = SandboxId::new(&text) {
            let path = std::path::Path::new("/run").join(&id);
            prop_assert_eq!(path.parent(), Some(std::path::Path::new("/run")));
            prop_assert_eq!(path.file_name().and_then(|n| n.to_str()), Some(text.as_str()));
        }
    }
}

#[test]
fn unusable_initdata_is_refused_at_once() {
    for (text, named) in [
        ("H4sIAAAAAAAAA", "is not TOML"),
        ("version = \"0.1.0\"\nalgorithm = \"md5\"", "sha256, sha384 and sha512"),
        ("version = \"9\"\nalgorithm = \"sha256\"", "0.1.0 is understood"),
        ("version = \"0.1.0\"\nalgorithm = \"sha256\"\n[data]\n\"../x\" = \"\"", "../x"),
    ] {
        let error = parse(&sent(&[(INIT_DATA, text)])).unwrap_err().to_string();
        assert!(error.contains("cc_init_data") && error.contains(named), "{error}");
    }
}

#[test]
fn a_vm_has_memory_for_the_pod_the_guest_and_the_kernels_tables() {
    assert_eq!(vm_memory(0, 224), 0, "a pod that asks for none asks for none");
    for (pod, guest, vm) in [(32, 224, 264), (64, 224, 297), (256, 224, 495), (8192, 224, 8679)] {
        assert_eq!(vm_memory(pod, guest), vm, "{pod}");
    }
    assert_eq!(vm_memory(32, 0), 128, "the least that boots");
    assert_eq!(vm_memory(u64::MAX, u64::MAX), u64::MAX);
}

proptest! {
    #[test]
    fn a_vms_memory_is_never_below_the_sum(pod in 1..=MAX_MEMORY, guest in 0..=1u64 << 20) {
        let vm = vm_memory(pod, guest);
        prop_assert!(vm >= pod + guest && vm >= LEAST_MEMORY);
        prop_assert!(vm <= ((pod + guest) * 33).div_ceil(32).max(LEAST_MEMORY) + 1);
    }
}
