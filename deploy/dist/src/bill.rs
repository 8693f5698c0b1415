//! Writes the bill of materials (CycloneDX 1.6). It lists every crate that is linked into the programs, with version,
//! licence, checksum and dependencies. Build and test dependencies are left out. It also lists the programs with the
//! checksums of their files.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::Words;
use crate::tree::TOOLS;

/// Returns the bill of materials of the programs in `tree`. Fails if `cargo metadata` fails, or a package is not in the
/// workspace.
pub(crate) fn bill(words: &Words, tree: &Path) -> Result<Value> {
    let metadata = metadata(words)?;
    let packages = by_id(&metadata)?;
    let edges = linked(&metadata)?;
    let lock = std::fs::read_to_string(words.workspace.join("Cargo.lock")).context("read Cargo.lock")?;
    let checksums = checksums(&lock)?;
    let (mut roots, mut programs, mut depends) = (BTreeSet::new(), Vec::new(), Vec::new());
    for (program, package) in &words.programs {
        let (id, about) = packages
            .iter()
            .find(|(_, about)| about["name"] == json!(package) && about["source"].is_null())
            .with_context(|| format!("package {package} is not in the workspace"))?;
        roots.insert(id.clone());
        let one = file(tree, &format!("usr/bin/{program}"), &text(&about["version"]))?;
        depends.push(json!({"ref": one["bom-ref"], "dependsOn": [name(about)]}));
        programs.push(one);
    }
    for (tool, package) in TOOLS {
        let mut one = file(tree, &format!("usr/sbin/{tool}"), &version_of(package)?)?;
        one["group"] = json!(package);
        programs.push(one);
    }
    let used = reach(roots, &edges);
    let mut components: Vec<Value> =
        used.iter().filter_map(|id| packages.get(id)).map(|about| component(about, &checksums)).collect();
    components.sort_by_key(|one| one["bom-ref"].to_string());
    components.extend(programs);
    depends.extend(used.iter().filter_map(|id| {
        let on: BTreeSet<String> =
            edges.get(id)?.iter().filter_map(|to| packages.get(to).map(name)).collect();
        Some(json!({"ref": name(packages.get(id)?), "dependsOn": on}))
    }));
    depends.sort_by_key(|one| one["ref"].to_string());
    Ok(json!({
        "bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1,
        "metadata": {"component": {"type": "container", "name": "peerpod", "bom-ref": "peerpod",
            "version": env!("CARGO_PKG_VERSION")}},
        "components": components, "dependencies": depends,
    }))
}

/// Returns the component of a program's file in the tree.
fn file(tree: &Path, path: &str, version: &str) -> Result<Value> {
    let bytes = std::fs::read(tree.join(path)).with_context(|| format!("read {path}"))?;
    Ok(json!({
        "type": "application", "bom-ref": format!("file:/{path}"), "name": path.rsplit('/').next(),
        "version": version, "hashes": [{"alg": "SHA-256", "content": hex::encode(Sha256::digest(bytes))}],
    }))
}

/// Returns the installed version of a distribution's package.
fn version_of(package: &str) -> Result<String> {
    let mut command = Command::new("dpkg-query");
    let done = output(command.args(["--show", "--showformat=${Version}", package]))?;
    Ok(String::from_utf8_lossy(&done).into_owned())
}

fn metadata(words: &Words) -> Result<Value> {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(["metadata", "--locked", "--format-version", "1"]).current_dir(&words.workspace);
    command.args(["--filter-platform", &words.target]);
    if !words.features.is_empty() {
        command.args(["--features", &words.features]);
    }
    Ok(serde_json::from_slice(&output(&mut command)?)?)
}

fn output(command: &mut Command) -> Result<Vec<u8>> {
    let done = command.output().with_context(|| format!("run {command:?}"))?;
    ensure!(done.status.success(), "{command:?}: {}", String::from_utf8_lossy(&done.stderr).trim());
    Ok(done.stdout)
}

fn list<'a>(value: &'a Value, what: &str) -> Result<&'a Vec<Value>> {
    value.as_array().with_context(|| format!("cargo metadata has no {what}"))
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn by_id(metadata: &Value) -> Result<BTreeMap<String, Value>> {
    Ok(list(&metadata["packages"], "packages")?.iter().map(|one| (text(&one["id"]), one.clone())).collect())
}

/// Returns the link dependencies of each package, without those of builds and tests.
fn linked(metadata: &Value) -> Result<BTreeMap<String, BTreeSet<String>>> {
    let normal = |edge: &&Value| {
        edge["dep_kinds"].as_array().is_none_or(|kinds| kinds.iter().any(|kind| kind["kind"].is_null()))
    };
    let nodes = list(&metadata["resolve"]["nodes"], "resolve")?;
    let of = |node: &Value| -> BTreeSet<String> {
        let edges = node["deps"].as_array().into_iter().flatten();
        edges.filter(normal).map(|edge| text(&edge["pkg"])).collect()
    };
    Ok(nodes.iter().map(|node| (text(&node["id"]), of(node))).collect())
}

fn reach(roots: BTreeSet<String>, edges: &BTreeMap<String, BTreeSet<String>>) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut todo: Vec<String> = roots.into_iter().collect();
    while let Some(id) = todo.pop() {
        if found.insert(id.clone()) {
            todo.extend(edges.get(&id).into_iter().flatten().cloned());
        }
    }
    found
}

/// Returns checksums by `name version`, from Cargo.lock.
fn checksums(lock: &str) -> Result<BTreeMap<String, String>> {
    let lock: toml::Table = lock.parse().context("Cargo.lock is no TOML")?;
    let packages =
        lock.get("package").and_then(|all| all.as_array()).context("Cargo.lock names no package")?;
    let of = |package: &toml::Value| {
        let part = |key: &str| package.get(key).and_then(|value| value.as_str()).map(str::to_owned);
        Some((format!("{} {}", part("name")?, part("version")?), part("checksum")?))
    };
    Ok(packages.iter().filter_map(of).collect())
}

fn name(about: &Value) -> String {
    format!("pkg:cargo/{}@{}", text(&about["name"]), text(&about["version"]))
}

fn component(about: &Value, checksums: &BTreeMap<String, String>) -> Value {
    let mut one = json!({
        "type": "library", "bom-ref": name(about), "purl": name(about), "name": about["name"], "version": about["version"],
    });
    if let Some(license) = about["license"].as_str() {
        // The slash is the older form of OR.
        one["licenses"] = json!([{"expression": license.replace('/', " OR ")}]);
    }
    if let Some(checksum) = checksums.get(&format!("{} {}", text(&about["name"]), text(&about["version"]))) {
        one["hashes"] = json!([{"alg": "SHA-256", "content": checksum}]);
    }
    one
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_linked_counts() {
        let dep = |to: &str, kind: Value| json!({"pkg": to, "dep_kinds": [{"kind": kind}]});
        let nodes = json!([
            {"id": "a", "deps": [dep("b", Value::Null), dep("test", json!("dev")), dep("gen", json!("build"))]},
            {"id": "b", "deps": [dep("c", Value::Null)]}, {"id": "c", "deps": [dep("b", Value::Null)]},
            {"id": "test", "deps": []}, {"id": "gen", "deps": []},
        ]);
        let edges = linked(&json!({"resolve": {"nodes": nodes}})).unwrap();
        let found = reach(BTreeSet::from(["a".to_owned()]), &edges);
        assert_eq!(found.into_iter().collect::<Vec<_>>(), ["a", "b", "c"]);
        assert!(linked(&json!({})).is_err());
    }

    #[test]
    fn checksums_are_the_lock_files() {
        let lock = "version = 4\n[[package]]\nname = \"x\"\nversion = \"1.0\"\nchecksum = \"ab\"\n[[package]]\nname = \"ours\"\nversion = \"0.1\"\n";
        let found = checksums(lock).unwrap();
        let about = json!({"name": "x", "version": "1.0", "license": "MIT/Apache-2.0"});
        let one = component(&about, &found);
        assert_eq!(one["hashes"][0]["content"], "ab");
        assert_eq!(one["licenses"][0]["expression"], "MIT OR Apache-2.0");
        assert_eq!(one["purl"], "pkg:cargo/x@1.0");
        assert!(component(&json!({"name": "ours", "version": "0.1"}), &found)["hashes"].is_null());
    }
}
