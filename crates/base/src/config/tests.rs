//! Tests of the configuration: files, variables, flags, and the reported mistakes.

use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use proptest::prelude::*;

use super::*;

/// A file that is removed on drop.
struct Temp(PathBuf);

impl Temp {
    fn new(text: &str) -> Temp {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let name =
            format!("peerpod-config-{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        fs::write(&path, text).unwrap();
        Temp(path)
    }
}

impl Drop for Temp {
    fn drop(&mut self) {
        let _gone = fs::remove_file(&self.0);
    }
}

fn reader(file: Option<&Temp>, env: &[(&str, &str)], flags: &[(&str, &str)]) -> Reader {
    let own = |(a, b): &(&str, &str)| ((*a).to_owned(), (*b).to_owned());
    let sources = Sources {
        file: file.map(|file| file.0.clone()),
        env: env.iter().map(own).collect(),
        flags: flags.iter().map(own).collect(),
    };
    Reader::load(sources, &["node", "tunnel", "provider"], &["relay"]).unwrap()
}

/// Requests settings as the node does.
fn ask(reader: &mut Reader) -> (Duration, u16, Vec<String>, Option<Secret>) {
    (
        reader.get("node.lease", "15m", "silence after which a VM powers off"),
        reader.get("tunnel.port", "4789", "UDP port"),
        reader.get("node.names", "", "some names"),
        reader.optional("provider.fake.token", "token of the fake cloud"),
    )
}

fn mistakes(mut reader: Reader) -> Vec<String> {
    ask(&mut reader);
    match reader.finish() {
        Ok(_) => Vec::new(),
        Err(mistakes) => mistakes.0.iter().map(|mistake| mistake.to_string()).collect(),
    }
}

#[test]
fn flags_override_the_environment_and_it_overrides_the_file() {
    let file = Temp::new("node:\n  lease: 1m\ntunnel: {port: 1}\n");
    let mut r = reader(
        Some(&file),
        &[("PEERPOD_TUNNEL_PORT", "2"), ("PEERPOD_NODE_LEASE", "2m")],
        &[("node.lease", "3m")],
    );
    let (lease, port, ..) = ask(&mut r);
    assert_eq!((lease, port), (Duration::from_secs(180), 2));
    let printed = r.finish().unwrap();
    let origin = |key: &str| printed.iter().find(|s| s.key == key).map(|s| s.origin.to_string()).unwrap();
    assert_eq!(origin("node.lease"), "--node.lease");
    assert_eq!(origin("tunnel.port"), "PEERPOD_TUNNEL_PORT");
    assert_eq!(origin("node.names"), "default");
}

#[test]
fn five_mistakes_in_all_layers_are_reported_together_with_their_place() {
    let file = Temp::new("# ours\nnode:\n  lease: 5\n  laese: 1m\ntunel:\n  port: 1\n");
    let path = file.0.display();
    let found = mistakes(reader(Some(&file), &[("PEERPOD_TUNNEL_PORT", "70000")], &[("tunnel.prot", "7")]));
    assert_eq!(
        found,
        [
            format!("{path}:3: node.lease = 5: a duration without a unit; write 5s, 5m or 5ms"),
            format!("{path}:4: node.laese: unknown key; did you mean node.lease?"),
            format!("{path}:5: tunel: unknown section; did you mean tunnel?"),
            "PEERPOD_TUNNEL_PORT = 70000: too large; write one from 0 to 65535".to_owned(),
            "--tunnel.prot: unknown key; did you mean tunnel.port?".to_owned(),
        ]
    );
}

#[test]
fn a_mistake_in_an_overridden_layer_is_reported() {
    let file = Temp::new("tunnel:\n  port: many\n");
    let found = mistakes(reader(Some(&file), &[("PEERPOD_TUNNEL_PORT", "5")], &[]));
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].contains(":2: tunnel.port = many: not a whole number"), "{found:?}");
}

#[test]
fn a_file_that_is_not_yaml_does_not_hide_the_other_mistakes() {
    let file = Temp::new("node:\n  lease: [1m\ntunnel: {}\n");
    let found = mistakes(reader(Some(&file), &[("PEERPOD_TUNNEL_PORT", "x")], &[]));
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(found[0].contains("not YAML"), "{found:?}");
    assert!(found[1].starts_with("PEERPOD_TUNNEL_PORT = x:"), "{found:?}");
}

#[test]
fn duplicate_keys_are_mistakes_with_both_lines() {
    let file = Temp::new("node:\n  lease: 1m\n  lease: 2m\nnode:\n  names: [a]\n");
    let path = file.0.display();
    assert_eq!(
        mistakes(reader(Some(&file), &[], &[])),
        [
            format!("{path}:3: node.lease: given twice (first in line 2); keep one of them"),
            format!("{path}:4: node: given twice (first in line 1); keep one of them"),
        ]
    );
}

#[test]
fn sections_of_other_binaries_are_not_looked_at() {
    let file = Temp::new("relay:\n  whatever: [1, {2: 3}]\n");
    let env = [("PEERPOD_RELAY_LISTEN", "nonsense")];
    assert_eq!(mistakes(reader(Some(&file), &env, &[("relay.listen", "nonsense")])), Vec::<String>::new());
}

#[test]
fn a_requested_key_of_another_section_is_checked() {
    let file = Temp::new("relay:\n  listen: nonsense\n  other: 1\n");
    let mut r = reader(Some(&file), &[], &[]);
    let listen: std::net::SocketAddr = r.get("relay.listen", "0.0.0.0:15151", "where guests dial");
    assert_eq!(listen.port(), 15151);
    let told = r.finish().unwrap_err().to_string();
    assert!(told.contains(":2: relay.listen = nonsense"), "{told}");
    assert!(!told.contains("other"), "{told}");
}

#[test]
fn a_secret_is_shown_nowhere() {
    let secret = "hunter2-hunter2";
    let file = Temp::new(&format!(
        "provider:\n  fake:\n    token: {secret}\n    tokne: {secret}\n    other: [{secret}]\n"
    ));
    let env = [("PEERPOD_PROVIDER_FAKE_TOKNE", secret), ("PEERPOD_PROVIDER_FAKE_TOKEN", secret)];
    let flags = [("provider.fake.token", secret), ("provider.fake.x", secret)];
    let mut r = reader(Some(&file), &env, &flags);
    let token: Secret = r.required("provider.fake.token", "the token").unwrap();
    assert_eq!(token.expose(), secret);
    assert_eq!(format!("{token} {token:?}"), "(set) (set)");
    r.mistake("provider.fake.token", "contradicts something; change it");
    assert!(!print(&r.asked()).contains(secret));
    assert!(!help(&r.asked()).contains(secret));
    assert!(!schema(&r.asked()).to_string().contains(secret));
    let told = r.finish().unwrap_err();
    assert_eq!(told.0.len(), 6, "{told}");
    assert!(!told.to_string().contains(secret), "{told}");
    assert!(told.to_string().contains("--provider.fake.token: a secret in a flag"), "{told}");

    let file = Temp::new(&format!("provider:\n  fake:\n    token: [{secret}]\n"));
    let told = mistakes(reader(Some(&file), &[], &[])).concat();
    assert!(told.contains("a list where one value is expected") && !told.contains(secret), "{told}");
}

#[test]
fn lists_are_replaced_and_may_be_written_with_commas() {
    let file = Temp::new("node:\n  names:\n    - a\n    - b\n");
    let mut r = reader(Some(&file), &[], &[]);
    assert_eq!(ask(&mut r).2, ["a", "b"]);
    let mut r = reader(Some(&file), &[("PEERPOD_NODE_NAMES", "c, d")], &[]);
    assert_eq!(ask(&mut r).2, ["c", "d"]);
    let mut r = reader(None, &[], &[]);
    assert_eq!(ask(&mut r).2, Vec::<String>::new());
    let file = Temp::new("node:\n  names: [a, 1.10]\n");
    let told = mistakes(reader(Some(&file), &[], &[])).concat();
    assert!(told.ends_with("item 2: a number where text is expected; put it in quotes"), "{told}");
}

#[test]
fn an_empty_value_is_not_set_in_any_layer_for_any_kind_of_key() {
    let file = Temp::new(concat!(
        "node:\n  lease: ''\n  names: ''\n  volume: \"\"\n  file: ''\n  must: ''\n",
        "tunnel:\n  port: ''\nprovider:\n  fake:\n    token: ''\n  other: ''\n",
    ));
    let env = [("PEERPOD_TUNNEL_PORT", ""), ("PEERPOD_NODE_VOLUME", "")];
    let flags = [("node.lease", ""), ("node.volume", ""), ("node.file", ""), ("node.must", "")];
    let mut r = reader(Some(&file), &env, &flags);
    let (lease, port, names, token) = ask(&mut r);
    assert_eq!((lease, port, names), (Duration::from_secs(900), 4789, Vec::new()));
    assert!(token.is_none());
    assert_eq!(r.optional::<String>("node.volume", "a volume"), None);
    assert_eq!(r.optional::<PathBuf>("node.file", "a file"), None);
    assert_eq!(r.required::<String>("node.must", "a name"), None);
    assert_eq!(r.section("provider.other", |r| r.optional::<u32>("size", "a size")), None);
    for key in ["node.lease", "node.names", "node.volume", "node.file", "node.must", "provider.fake.token"] {
        assert!(!r.is_set(key), "{key}");
    }
    let told: Vec<String> = r.finish().unwrap_err().0.iter().map(ToString::to_string).collect();
    assert_eq!(told, ["node.must: missing; a name (or set PEERPOD_NODE_MUST)"]);
}

#[test]
fn an_empty_variable_and_a_key_without_value_are_not_set() {
    let file = Temp::new("node:\n  lease:\n  names: ~\ntunnel:\n");
    let mut r = reader(Some(&file), &[("PEERPOD_TUNNEL_PORT", ""), ("PEERPOD_NODE_WHAT", "")], &[]);
    let (lease, port, ..) = ask(&mut r);
    assert_eq!((lease, port), (Duration::from_secs(900), 4789));
    r.finish().unwrap();
}

#[test]
fn a_missing_value_names_the_ways_to_set_it() {
    let mut r = reader(None, &[], &[]);
    assert!(r.required::<String>("node.cluster-id", "name of the cluster").is_none());
    let told = r.finish().unwrap_err().0;
    assert_eq!(
        told.iter().map(ToString::to_string).collect::<Vec<_>>(),
        ["node.cluster-id: missing; name of the cluster (or set PEERPOD_NODE_CLUSTER_ID)"]
    );
}

#[test]
fn variables_that_kubernetes_makes_for_services_are_no_settings() {
    let env = [
        ("PEERPOD_NODE_SERVICE_HOST", "10.0.0.1"),
        ("PEERPOD_NODE_SERVICE_PORT", "80"),
        ("PEERPOD_NODE_SERVICE_PORT_METRICS", "80"),
        ("PEERPOD_NODE_PORT", "tcp://10.0.0.1:80"),
        ("PEERPOD_NODE_PORT_80_TCP", "tcp://10.0.0.1:80"),
        ("PEERPOD_NODE_PORT_80_TCP_ADDR", "10.0.0.1"),
        ("PEERPOD_TEST_LONG", "1"),
        ("PEERPOD_CONFIG", "/x"),
    ];
    assert_eq!(mistakes(reader(None, &env, &[])), Vec::<String>::new());
    let told = mistakes(reader(None, &[("PEERPOD_NODE_LAESE", "1m"), ("PEERPOD_NOED_X_Y_Z", "1")], &[]));
    assert_eq!(
        told,
        [
            "PEERPOD_NODE_LAESE: unknown variable; did you mean PEERPOD_NODE_LEASE?",
            "PEERPOD_NOED_X_Y_Z: unknown variable; unset it, or see `peerpod config schema`",
        ]
    );
}

#[test]
fn arguments_are_split_into_the_file_and_flags() {
    let args =
        ["--config=/a", "--node.lease", "1m", "--tunnel.port=5", "stray", "--node.names", "--config", "/b"];
    let env = [("PEERPOD_NODE_LEASE", "2m"), ("PEERPOD_EMPTY", ""), ("HOME", "/root")];
    let own = |(a, b): (&str, &str)| (a.to_owned(), b.to_owned());
    let sources = Sources::from_process(args.map(str::to_owned), env.map(own));
    assert_eq!(sources.file, Some(PathBuf::from("/b")));
    assert_eq!(sources.env.keys().collect::<Vec<_>>(), ["PEERPOD_NODE_LEASE"]);
    let sources = Sources { file: None, ..sources };
    let mut r = Reader::load(sources, &["node", "tunnel"], &[]).unwrap();
    let (lease, port, ..) = ask(&mut r);
    assert_eq!((lease, port), (Duration::from_secs(60), 5));
    let told: Vec<String> = r.finish().unwrap_err().0.iter().map(ToString::to_string).collect();
    assert_eq!(
        told,
        [
            "stray: not a flag; write --section.key value",
            "--node.names: has no value; write the value after the flag"
        ]
    );
}

#[test]
fn invalid_files_are_refused_at_once() {
    let load = |path: PathBuf| {
        let sources = Sources { file: Some(path), ..Sources::default() };
        Reader::load(sources, &[], &[]).map(|_| ()).unwrap_err().to_string()
    };
    assert!(load("/nowhere/peerpod.yaml".into()).contains("cannot be read"));
    assert!(load("/".into()).contains("not a file"));
    assert!(load("/dev/zero".into()).contains("not a file"));
    let large = Temp::new(&"#\n".repeat(200_000));
    assert!(load(large.0.clone()).contains("larger than"));
    let binary = Temp::new("");
    fs::write(&binary.0, [0xff, 0xfe, 0]).unwrap();
    assert!(load(binary.0.clone()).contains("not UTF-8"));
}

#[test]
fn a_section_and_a_value_are_not_taken_for_each_other() {
    let file = Temp::new("node: 5\ntunnel:\n  port:\n    number: 1\n");
    let found = mistakes(reader(Some(&file), &[], &[]));
    assert!(found[0].contains(":1: node: one value where a section is expected"), "{found:?}");
    assert!(found[1].contains(":3: tunnel.port = {…}: a section where one value is expected"), "{found:?}");
    let file = Temp::new("- a\n- b\n");
    assert!(mistakes(reader(Some(&file), &[], &[]))[0].contains("no settings at its top"));
}

#[test]
fn the_right_key_in_the_wrong_section_is_recognised() {
    let file = Temp::new("tunnel:\n  lease: 1m\n");
    assert!(mistakes(reader(Some(&file), &[], &[]))[0].ends_with("unknown key; did you mean node.lease?"));
}

#[test]
fn mistakes_of_the_caller_name_the_place_of_the_value() {
    let file = Temp::new("node:\n  lease: 1s\n");
    let mut r = reader(Some(&file), &[], &[("tunnel.port", "0")]);
    ask(&mut r);
    r.mistake("node.lease", "shorter than node.start-timeout; make it longer");
    r.mistake("tunnel.port", "not a port; choose one from 1 on");
    r.mistake("node.names", "empty; name one");
    let told: Vec<String> = r.finish().unwrap_err().0.iter().map(ToString::to_string).collect();
    assert_eq!(
        told,
        [
            format!(
                "{}:2: node.lease = 1s: shorter than node.start-timeout; make it longer",
                file.0.display()
            ),
            "node.names (default) = \"\": empty; name one".to_owned(),
            "--tunnel.port = 0: not a port; choose one from 1 on".to_owned(),
        ]
    );
}

#[test]
fn settings_of_unchosen_sections_are_ignored() {
    let file = Temp::new("provider:\n  kind: local\n  cloudy: {region: x}\n  local: {bridge: b0}\n");
    let env = [("PEERPOD_PROVIDER_CLOUDY_REGION", "x")];
    let mut r = reader(Some(&file), &env, &[("provider.cloudy.region", "x")]);
    assert_eq!(r.choice("provider.kind", "cloudy", &["cloudy", "local"], "which cloud"), "local");
    let bridge: String = r.section("provider.local", |r| r.get("bridge", "pplocal0", "name of the bridge"));
    assert_eq!(bridge, "b0");
    r.leave("provider.cloudy");
    r.finish().unwrap();
}

#[test]
fn an_unknown_choice_lists_the_choices() {
    let mut r = reader(None, &[("PEERPOD_PROVIDER_KIND", "clodu")], &[]);
    assert_eq!(r.choice("provider.kind", "cloudy", &["cloudy", "local"], "which cloud"), "cloudy");
    let told = r.finish().unwrap_err().to_string();
    assert!(told.contains("PEERPOD_PROVIDER_KIND = clodu: not known; write one of cloudy, local"), "{told}");
}

#[test]
fn printed_settings_read_back_as_the_same_configuration() {
    let mut r =
        reader(None, &[("PEERPOD_NODE_NAMES", "a: b,# c"), ("PEERPOD_PROVIDER_FAKE_TOKEN", "s3")], &[]);
    let asked = ask(&mut r);
    let text = print(&r.finish().unwrap());
    assert!(text.contains("  # token: (set)  # PEERPOD_PROVIDER_FAKE_TOKEN"), "{text}");
    let lines: Vec<&str> = text.lines().collect();
    let lease = lines.iter().position(|line| line.trim_start().starts_with("lease:")).unwrap();
    assert_eq!(lines[lease - 1], "  # silence after which a VM powers off", "{text}");
    let file = Temp::new(&text);
    let mut again = reader(Some(&file), &[], &[]);
    let (lease, port, names, token) = ask(&mut again);
    assert_eq!((lease, port, names), (asked.0, asked.1, asked.2));
    assert!(token.is_none());
    again.finish().unwrap();
}

#[test]
fn the_schema_has_every_requested_key_and_no_other() {
    let mut r = reader(None, &[], &[]);
    ask(&mut r);
    r.required::<u32>("node.max", "how many");
    let schema = schema(&r.asked());
    let node = &schema["properties"]["node"];
    assert_eq!(node["additionalProperties"], false);
    assert_eq!(node["required"], serde_json::json!(["max"]));
    assert_eq!(node["properties"]["lease"]["default"], "15m");
    assert_eq!(schema["properties"]["tunnel"]["properties"]["port"]["maximum"], 65535);
    assert_eq!(schema["properties"]["tunnel"]["properties"]["port"]["default"], 4789);
    assert_eq!(
        schema["properties"]["provider"]["properties"]["fake"]["properties"]["token"]["writeOnly"],
        true
    );
    assert!(schema["properties"]["relay"].is_null());
}

#[test]
fn help_names_flag_variable_and_default_of_every_setting() {
    let mut r = reader(None, &[], &[]);
    ask(&mut r);
    r.choice("node.kind", "a", &["a", "b"], "which one");
    let text = help(&r.asked());
    assert!(text.contains("which one [one of: a, b] [default: a]"), "{text}");
    assert!(text.contains("--node.lease <value>"), "{text}");
    assert!(text.contains("[default: 15m] [env: PEERPOD_NODE_LEASE]"), "{text}");
}

#[test]
fn a_key_of_two_components_is_listed_once() {
    let mut r = reader(None, &[("PEERPOD_NODE_LEASE", "5"), ("PEERPOD_TUNNEL_PORT", "x")], &[]);
    ask(&mut r);
    ask(&mut r);
    assert_eq!(r.finish().unwrap_err().0.len(), 2);
}

#[test]
fn a_long_or_multi_line_value_is_cut_in_mistakes() {
    let value = format!("a\n{}", "b".repeat(5000));
    let told = mistakes(reader(None, &[("PEERPOD_TUNNEL_PORT", &value)], &[])).concat();
    assert!(told.len() < 400 && !told.contains('\n') && told.contains("a\\nbbb"), "{told}");
}

#[test]
fn an_alias_bomb_is_refused_instead_of_unfolded() {
    let mut text = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n".to_owned();
    for n in 1..12 {
        let items = vec![format!("*a{}", n - 1); 9].join(",");
        text.push_str(&format!("a{n}: &a{n} [{items}]\n"));
    }
    let file = Temp::new(&text);
    let told = mistakes(reader(Some(&file), &[], &[])).concat();
    assert!(told.contains("not YAML"), "{told}");
}

proptest! {
    #[test]
    fn no_file_makes_the_reader_panic(text in "([a-z]{1,3}: ?|  |\n|- |[\\[\\]{}\"'|>&*#!]|node:\n|.){0,60}") {
        let file = Temp::new(&text);
        prop_assert!(mistakes(reader(Some(&file), &[], &[])).iter().all(|told| !told.contains('\n')));
    }

    #[test]
    fn no_variable_or_flag_makes_the_reader_panic(name in "PEERPOD_[A-Z_.0-9é]{0,30}", value in ".{0,30}", flag in ".{0,20}") {
        prop_assert!(mistakes(reader(None, &[(&name, &value)], &[(&flag, &value)])).iter().all(|told| !told.contains('\n')));
    }
}

fn settle(reader: &mut Reader) -> (Duration, String) {
    reader.removed("node.old", "use node.lease");
    let grace = reader.constant("node.grace", "GRACE", Duration::from_secs(30));
    // Of a section that another program owns.
    (grace, reader.derived("relay.folder", "paths.run-dir", "/run".to_owned()))
}

#[test]
fn removed_keys_are_mistakes_in_every_source_and_section() {
    let file = Temp::new("node:\n  old:\n    a: 1\nrelay:\n  folder: /x\n  listen: y\n");
    let mut reader = reader(Some(&file), &[("PEERPOD_NODE_GRACE", "5s")], &[]);
    assert_eq!(settle(&mut reader), (Duration::from_secs(30), "/run".to_owned()));
    let path = file.0.display();
    assert_eq!(
        mistakes(reader),
        [
            format!("{path}:2: node.old: no longer a setting; use node.lease"),
            format!(
                "{path}:5: relay.folder: no longer a setting; it comes from paths.run-dir; remove the key"
            ),
            "PEERPOD_NODE_GRACE: no longer a setting; the constant GRACE is 30s; remove the key".to_owned(),
        ]
    );
}

#[test]
fn tests_override_constants_by_the_old_keys() {
    let env = [("PEERPOD_TESTING", "1"), ("PEERPOD_RELAY_FOLDER", "/x")];
    let mut reader = reader(None, &env, &[("node.grace", "5s")]);
    assert_eq!(settle(&mut reader), (Duration::from_secs(5), "/x".to_owned()));
    assert_eq!(reader.overridden(), ["node.grace", "relay.folder"]);
    assert_eq!(mistakes(reader), Vec::<String>::new());
}

#[test]
fn variables_of_keys_that_another_part_reads_are_left_alone() {
    let mut reader = reader(None, &[("PEERPOD_NODE_OTHERS", "1")], &[]);
    reader.leave("node.others");
    assert_eq!(mistakes(reader), Vec::<String>::new());
}
