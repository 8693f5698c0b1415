//! Checks Kata's shim and its configuration. The Go and the Rust shim read keys of different names, and ignore those of
//! the other one. The files that the chart ships hold the right values.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde_json::Value;

use super::{Handler, linked_shim};
use crate::check::config::Config;
use crate::check::{below, read, read_toml};
use crate::item::{Area, Item, Outcome, failed, skipped, warning};

/// One of Kata's two shims.
#[derive(Debug)]
struct Shim {
    name: &'static str,
    /// Text that the program contains.
    mark: &'static str,
    /// Shipped configuration, and its name in the ConfigMap.
    shipped: (&'static str, &'static str),
    /// Key of the socket, and that of the other shim.
    sockets: [&'static str; 2],
    /// Key that lets the VM pull the images.
    guest_pull: &'static str,
    /// Further keys without which no pod starts.
    keys: &'static [&'static str],
}

const SHIMS: [Shim; 2] = [
    Shim {
        name: "Go",
        mark: "containerd shim (Golang)",
        shipped: (
            include_str!("../../../../../deploy/kata/configuration-remote-go.toml"),
            "configuration-remote-go.toml",
        ),
        sockets: ["hypervisor.remote.remote_hypervisor_socket", "hypervisor.remote.hypervisor_socket"],
        guest_pull: "runtime.experimental_force_guest_pull",
        keys: &[
            "runtime.internetworking_model",
            "runtime.disable_new_netns",
            "runtime.static_sandbox_resource_mgmt",
        ],
    },
    Shim {
        name: "Rust",
        mark: "containerd shim (Rust)",
        shipped: (
            include_str!("../../../../../deploy/kata/configuration-remote-rs.toml"),
            "configuration-remote-rs.toml",
        ),
        sockets: ["hypervisor.remote.hypervisor_socket", "hypervisor.remote.remote_hypervisor_socket"],
        guest_pull: "runtime.experimental",
        keys: &[
            "runtime.internetworking_model",
            "runtime.disable_new_netns",
            "runtime.static_sandbox_resource_mgmt",
            "runtime.hypervisor_name",
            "runtime.agent_name",
            "runtime.name",
        ],
    },
];

/// Snapshotters of containerd that leave the image to the VM.
const GUEST_SNAPSHOTTERS: [&str; 1] = ["nydus"];
/// Folder in which a release of Kata notes its version.
const VERSION: &str = "/opt/kata/VERSION";
/// First major version of Kata that is supported.
const LEAST: u32 = 4;
/// Size limit of a shim.
const MOST_SHIM: u64 = 512 << 20;

/// Checks the shim, and each key that must be right for it.
pub(super) fn check(root: &Path, config: &Config, handler: &Handler) -> Vec<Item> {
    let path = Some(handler.runtime_path.clone()).filter(|path| !path.is_empty());
    let path = path.or_else(|| linked_shim(root, handler)).unwrap_or_default();
    let shim = if path.is_empty() { Err("no runtime_path".to_owned()) } else { which(&below(root, &path)) };
    let least = format!("install Kata {LEAST}.0 or later");
    let (shim, outcome) = match shim {
        Ok(Some(shim)) => {
            (Some(shim), version(&format!("{path}: the {} shim", shim.name), read(root, VERSION)))
        }
        Ok(None) => (None, failed(format!("{path} is no shim of Kata"), least)),
        Err(why) => {
            let remedy = "install Kata (kata-deploy), or correct runtime_path of the handler";
            (None, failed(format!("{}: the shim {path}: {why}", handler.file), remedy))
        }
    };
    let mut items = vec![Area::Kata.item("shim", outcome)];
    let remedy = "write ConfigPath (CRI-O: runtime_config_path) of the handler, with a file of the ConfigMap peerpod-kata";
    if handler.kata.is_empty() {
        items.push(Area::Kata.item("configuration", failed(format!("{}: no path", handler.file), remedy)));
        return items;
    }
    match (read_toml(root, &handler.kata), shim) {
        (Err(why), _) => items.push(Area::Kata.item("configuration", failed(why, remedy))),
        (Ok(_), None) => items.push(Area::Kata.item("configuration", skipped("its keys depend on the shim"))),
        (Ok(table), Some(shim)) => {
            let socket = format!("{}/hypervisor.sock", config.text("paths.run-dir"));
            items.extend(keys(shim, &table, handler, &socket));
        }
    }
    items
}

/// Judges the version that a release of Kata notes in a file; packages of a distribution have none.
fn version(shim: &str, noted: Result<String, String>) -> Outcome {
    let Ok(noted) = noted else { return Ok(format!("{shim} of unknown version; Kata {LEAST}.0 is needed")) };
    let noted = noted.trim();
    match noted.split('.').next().and_then(|major| major.parse::<u32>().ok()) {
        Some(major) if major < LEAST => {
            warning(format!("{shim} of Kata {noted}"), format!("install Kata {LEAST}.0 or later"))
        }
        _ => Ok(format!("{shim} of Kata {noted}")),
    }
}

/// Finds the kind of a shim by the text of its version.
fn which(path: &Path) -> Result<Option<&'static Shim>, String> {
    let (mut file, mut kept) = (File::open(path).map_err(|why| why.to_string())?.take(MOST_SHIM), Vec::new());
    let mut part = vec![0; 1 << 20];
    loop {
        let count = file.read(&mut part).map_err(|why| why.to_string())?;
        let Some(new) = part.get(..count).filter(|new| !new.is_empty()) else { return Ok(None) };
        kept.extend_from_slice(new);
        let has = |mark: &str| kept.windows(mark.len()).any(|window| window == mark.as_bytes());
        if let Some(shim) = SHIMS.iter().find(|shim| has(shim.mark)) {
            return Ok(Some(shim));
        }
        // A mark may be in two parts.
        kept.drain(..kept.len().saturating_sub(64));
    }
}

/// Value of a dotted key; null where there is none.
fn at<'t>(table: &'t Value, key: &str) -> &'t Value {
    key.split('.').fold(table, |value, step| &value[step])
}

/// Compares each key with the shipped file. Returns one item per wrong key, or one for all.
fn keys(shim: &Shim, table: &Value, handler: &Handler, socket: &str) -> Vec<Item> {
    let (shipped, name) = shim.shipped;
    let right: Value = toml::from_str(shipped).unwrap_or_default();
    let [ours, theirs] = shim.sockets;
    let mut items = Vec::new();
    let mut wrong = |key: &str, expected: &Value| {
        let mut cause = match at(table, key) {
            Value::Null => format!("{}: {key} is missing", handler.kata),
            value => format!("{}: {key} is {value}", handler.kata),
        };
        if key == ours && !at(table, theirs).is_null() {
            cause += &format!("; the {} shim does not read {theirs}", shim.name);
        }
        let remedy = format!("write {key} = {expected}; {name} of the ConfigMap peerpod-kata has all keys");
        items.push(Area::Kata.item(&format!("key {key}"), failed(cause, remedy)));
    };
    if at(table, ours) != socket {
        wrong(ours, &Value::from(socket));
    }
    for key in shim.keys.iter().filter(|key| at(table, key) != at(&right, key)) {
        wrong(key, at(&right, key));
    }
    let pulls = match at(table, shim.guest_pull) {
        Value::Array(list) => list.contains(&Value::from("force_guest_pull")),
        found => *found == true,
    };
    if !pulls && !GUEST_SNAPSHOTTERS.contains(&handler.snapshotter.as_str()) {
        wrong(shim.guest_pull, at(&right, shim.guest_pull));
    }
    if items.is_empty() {
        let by = if pulls { "by the VM" } else { "by the snapshotter" };
        let found = format!("{}: right for the {} shim; images are pulled {by}", handler.kata, shim.name);
        items.push(Area::Kata.item("configuration", Ok(found)));
    }
    items
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::item::Verdict;

    const SOCKET: &str = "/run/peerpod/hypervisor.sock";

    fn check_keys(shim: &Shim, text: &str) -> Vec<(Verdict, String)> {
        let handler = Handler { kata: "k.toml".to_owned(), ..Handler::default() };
        let items = keys(shim, &toml::from_str(text).unwrap(), &handler, SOCKET);
        items.into_iter().map(|item| (item.verdict, format!("{}: {}", item.cause, item.remedy))).collect()
    }

    #[test]
    fn each_shipped_file_is_right_for_its_own_shim_alone() {
        let [go, rust] = &SHIMS;
        for (shim, other) in [(go, rust), (rust, go)] {
            assert_eq!(check_keys(shim, shim.shipped.0)[0].0, Verdict::Ok, "{}", shim.name);
            let wrong = check_keys(shim, other.shipped.0);
            assert!(wrong.iter().all(|(verdict, _)| *verdict == Verdict::Failed), "{wrong:?}");
            assert!(wrong[0].1.contains(&format!("the {} shim does not read", shim.name)), "{wrong:?}");
        }
        let pull = rust.shipped.0.replace("[\"force_guest_pull\"]", "[]");
        let wrong = check_keys(rust, &pull);
        assert!(wrong[0].1.contains("write runtime.experimental = [\"force_guest_pull\"]"), "{wrong:?}");
    }

    #[test]
    fn an_old_kata_is_named() {
        let verdict = |noted: Result<&str, &str>| {
            let noted = noted.map(str::to_owned).map_err(str::to_owned);
            Area::Kata.item("shim", version("/shim", noted)).verdict
        };
        assert_eq!(verdict(Ok("3.31.0\n")), Verdict::Warning);
        assert_eq!([Ok("4.1.0\n"), Ok("main"), Err("no file")].map(verdict), [Verdict::Ok; 3]);
    }

    #[test]
    fn a_shim_is_known_by_its_text_wherever_that_is() {
        let path = std::env::temp_dir().join(format!("peerpod-check-shim-{}", std::process::id()));
        for (before, shim) in [(0, &SHIMS[0]), ((1 << 20) - 9, &SHIMS[1])] {
            let content = [&vec![0; before][..], shim.mark.as_bytes(), b"more"].concat();
            std::fs::write(&path, content).unwrap();
            assert_eq!(which(&path).unwrap().unwrap().name, shim.name);
        }
        std::fs::write(&path, "#!/bin/sh").unwrap();
        assert!(which(&path).unwrap().is_none());
        std::fs::remove_file(&path).unwrap();
        which(&path).unwrap_err();
    }
}
