//! Tests of `peerpod config` with the real program: its exit codes, its output on both streams, and the examples of the
//! README. Also of an archive to a pipe.

#![allow(clippy::unwrap_used)] // test code outside of test functions

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Runs the program without the environment of this process.
fn peerpod(arguments: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_peerpod"));
    command.args(arguments).env_clear().envs(variables.iter().copied()).output().unwrap()
}

/// Returns standard output, standard error, and the exit code.
fn told(output: &Output) -> (String, String, Option<i32>) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (text(&output.stdout), text(&output.stderr), output.status.code())
}

/// A cluster's sysdump reads a node's archive from a pipe, also when that node's daemon is away.
#[test]
fn an_archive_to_a_pipe_is_whole_without_a_daemon() {
    let output = peerpod(&["sysdump", "--out", "-", "--socket", "/nonexistent/admin.sock"], &[]);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(output.stdout[..2], [0x1f, 0x8b], "gzip");
    let (_, failures, _) = told(&output);
    assert!(failures.contains("node/status: ask the node at /nonexistent/admin.sock"), "{failures}");
}

/// A file of this test, removed on drop.
struct File(PathBuf);

impl File {
    fn new(name: &str, text: &str) -> File {
        let path = std::env::temp_dir().join(format!("peerpod-config-{}-{name}.yaml", std::process::id()));
        fs::write(&path, text).unwrap();
        File(path)
    }

    fn path(&self) -> &str {
        self.0.to_str().unwrap()
    }
}

impl Drop for File {
    fn drop(&mut self) {
        fs::remove_file(&self.0).ok();
    }
}

/// Returns the YAML blocks of the README.
fn examples() -> Vec<String> {
    let readme = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../README.md");
    let text = fs::read_to_string(readme).unwrap();
    let blocks = text.split("```yaml\n").skip(1);
    blocks.map(|rest| rest.split("```").next().unwrap().to_owned()).collect()
}

#[test]
fn every_example_of_the_readme_is_a_configuration_without_mistakes() {
    let examples = examples();
    assert!(examples.len() >= 2, "{examples:?}");
    for (number, example) in examples.iter().enumerate() {
        let file = File::new(&format!("readme-{number}"), example);
        let (out, error, code) = told(&peerpod(&["config", "check", "--config", file.path()], &[]));
        assert_eq!((code, error.as_str()), (Some(0), ""), "{example}\n{error}");
        assert!(out.contains("no mistakes") && out.contains(file.path()), "{out}");
        assert!(!out.contains("; 0 of "), "it sets something: {out}");
    }
}

#[test]
fn a_flag_overrides_a_variable_and_that_the_file_and_print_names_the_source() {
    let file = File::new(
        "layers",
        "relay:\n  listen: \"[::]:1001\"\nnode:\n  cluster-id: of-the-file\n  lease: 20m\n",
    );
    let arguments = ["config", "print", "--config", file.path(), "--relay.listen", "[::]:1003"];
    let variables = [("PEERPOD_RELAY_LISTEN", "[::]:1002"), ("PEERPOD_NODE_CLUSTER_ID", "of-the-variable")];
    let (out, error, code) = told(&peerpod(&arguments, &variables));
    assert_eq!((code, error.as_str()), (Some(0), ""), "{error}");
    let line =
        |key: &str| out.lines().find(|line| line.trim().starts_with(key)).unwrap_or_else(|| panic!("{out}"));
    for (key, value, origin) in [
        ("listen:", "[::]:1003", "--relay.listen"),
        ("cluster-id:", "of-the-variable", "PEERPOD_NODE_CLUSTER_ID"),
        ("lease:", "20m", file.path()),
    ] {
        let (line, shown) = (line(key), format!("{key} \"{value}\""));
        assert!(line.contains(&shown) && line.contains(origin), "{shown} of {origin}, not {line}");
    }
    // The meaning is above the value.
    let (schema, _, _) = told(&peerpod(&["config", "schema"], &[]));
    let schema: serde_json::Value = serde_json::from_str(&schema).unwrap();
    let meaning = schema["properties"]["node"]["properties"]["lease"]["description"].as_str().unwrap();
    let above =
        out.lines().zip(out.lines().skip(1)).find(|(_, line)| line.trim().starts_with("lease:")).unwrap().0;
    assert_eq!(above.trim(), format!("# {meaning}"));
    // The printed text is a configuration with the same meaning.
    let again = File::new("again", &out);
    let (_, error, code) = told(&peerpod(&["config", "check", "--config", again.path()], &[]));
    assert_eq!((code, error.as_str()), (Some(0), ""), "{error}");
}

#[test]
fn mistakes_of_all_layers_go_to_standard_error_with_exit_code_1() {
    let file = File::new("mistakes", "log:\n  level: loud\nrelay:\n  lisen: \"[::]:1\"\n");
    let arguments = ["config", "check", "--config", file.path(), "--tunnel.port", "70000"];
    let variables = [("PEERPOD_NODE_LEASE", "5"), ("PEERPOD_NODE_LEESE", "5m")];
    let (out, error, code) = told(&peerpod(&arguments, &variables));
    assert_eq!((code, out.as_str()), (Some(1), ""), "{error}");
    assert!(error.contains("5 mistakes"), "{error}");
    for place in [
        &format!("{}:2: log.level", file.path()),
        &format!("{}:4: relay.lisen", file.path()),
        "PEERPOD_NODE_LEASE",
        "PEERPOD_NODE_LEESE",
        "--tunnel.port",
    ] {
        assert!(error.contains(place), "{place} is named: {error}");
    }
    // `print` does not print a configuration that is not in force.
    let (out, error, code) = told(&peerpod(&["config", "print", "--config", file.path()], &[]));
    assert_eq!((code, out.as_str()), (Some(1), ""), "{error}");
    let (_, error, code) = told(&peerpod(&["config", "check", "--config", "/nonexistent.yaml"], &[]));
    assert!(code == Some(1) && error.contains("/nonexistent.yaml"), "{code:?} {error}");
}

#[test]
fn the_schema_is_json_with_the_readmes_keys() {
    let (out, error, code) = told(&peerpod(&["config", "schema"], &[]));
    assert_eq!((code, error.as_str()), (Some(0), ""), "{error}");
    let schema: serde_json::Value = serde_json::from_str(&out).unwrap();
    for (section, key) in [("relay", "listen"), ("tunnel", "external"), ("node", "cluster-id")] {
        let setting = &schema["properties"][section]["properties"][key];
        assert!(
            setting["description"].as_str().is_some_and(|text| !text.is_empty()),
            "{section}.{key}: {setting}"
        );
    }
}

#[test]
fn wrong_arguments_get_the_usage_and_exit_code_2() {
    for arguments in
        [&["config"][..], &["config", "chekc"], &["confg"], &[], &["describe"], &["list", "-o", "xml"]]
    {
        let (out, error, code) = told(&peerpod(arguments, &[]));
        assert!(code == Some(2) && out.is_empty(), "{arguments:?}: {code:?} {out}");
        assert!(
            error.contains("Usage: peerpod") || error.contains("possible values"),
            "{arguments:?}: {error}"
        );
    }
    let (out, error, code) = told(&peerpod(&["help", "config", "check"], &[]));
    assert!(
        code == Some(0) && error.is_empty() && out.contains("Usage: peerpod config check"),
        "{out} {error}"
    );
}

#[test]
fn kubectl_finds_the_program_under_the_name_of_its_plugin() {
    let folder = std::env::temp_dir().join(format!("peerpod-plugin-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let plugin = folder.join("kubectl-peerpod");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_peerpod"), &plugin).unwrap();
    let output = Command::new(&plugin).arg("--help").output().unwrap();
    fs::remove_dir_all(&folder).unwrap();
    let (out, error, code) = told(&output);
    assert!(code == Some(0) && out.contains("Usage: kubectl peerpod "), "{out} {error}");
}

#[test]
fn completions_and_man_pages_have_the_subcommands() {
    for shell in ["bash", "fish", "zsh"] {
        let (out, error, code) = told(&peerpod(&["completions", shell], &[]));
        assert!(code == Some(0) && out.contains("convert-caa"), "{shell}: {error}");
    }
    let folder = std::env::temp_dir().join(format!("peerpod-man-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let (_, error, code) = told(&peerpod(&["man", folder.to_str().unwrap()], &[]));
    assert_eq!((code, error.as_str()), (Some(0), ""));
    assert!(fs::read_to_string(folder.join("peerpod-config-check.1")).unwrap().contains("mistake"));
    fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn provider_check_ends_at_a_failed_preflight_with_its_cause() {
    let file = File::new(
        "no-libvirtd",
        "provider:\n  kind: libvirt\n  libvirt:\n    uri: qemu:///system?socket=/nonexistent/libvirt-sock\n    volume: v.qcow2\n",
    );
    let (out, error, code) = told(&peerpod(&["provider", "check", file.path(), "--yes"], &[]));
    assert_eq!(code, Some(1), "{out}\n{error}");
    assert!(error.contains("the preflight of provider libvirt failed, so no VM was made: "), "{error}");
    assert!(error.contains("/nonexistent/libvirt-sock"), "{error}");
    assert!(!out.contains("1/"), "no promise was tried: {out}");
}
