//! Checks the container runtime's handler for peer pods, and Kata's shim and configuration that it names. Reads files
//! only, below the root folder of the node.

mod kata;

use std::path::Path;

use serde_json::Value;

use super::config::Config;
use super::{below, read_toml};
use crate::item::{Area, Item, Outcome, failed, skipped, warning};

/// Configurations of container runtimes, of CRI-O its folder; the first one that is there counts.
const FILES: [(&str, Kind); 4] = [
    ("/etc/containerd/config.toml", Kind::Containerd),
    ("/var/lib/rancher/k3s/agent/etc/containerd/config.toml", Kind::Containerd),
    ("/var/lib/rancher/rke2/agent/etc/containerd/config.toml", Kind::Containerd),
    ("/etc/crio", Kind::Crio),
];
/// CRI-O's file, which may be missing, and the folder of its further files.
const CRIO_FILE: &str = "/etc/crio/crio.conf";
const CRIO_FOLDER: &str = "/etc/crio/crio.conf.d";
/// Folders in which containerd looks for a shim without `runtime_path`.
const PATH: [&str; 7] =
    ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin", "/opt/kata/bin"];
/// Most files of a folder that are read.
const MOST_FILES: usize = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Containerd,
    Crio,
}

/// Handler of a container runtime.
#[derive(Clone, Debug, Default, PartialEq)]
struct Handler {
    /// File that defines it.
    file: String,
    runtime_type: String,
    runtime_path: String,
    /// Path of Kata's configuration.
    kata: String,
    snapshotter: String,
    annotations: Vec<String>,
    without_devices: bool,
    /// Whether CRI-O leaves the images to the runtime.
    pulls: bool,
    /// Whether containerd reads this plugin's table in a file of this version.
    is_read: bool,
}

/// Checks the runtime, and what its handler names. `version` is that of the container runtime, as the Node shows it.
pub(super) fn check(root: &Path, config: &Config, name: &str, version: Option<&str>) -> Vec<Item> {
    let there = FILES.into_iter().find(|(path, _)| below(root, path).exists());
    let Some((file, kind)) = there else {
        let files = FILES.map(|(file, _)| file).join(", ");
        let remedy =
            "install containerd 1.7 or later, or CRI-O; a check in a pod needs --root and the node's folders";
        return vec![
            Area::Runtime.item("configuration", failed(format!("none of {files} is there"), remedy)),
        ];
    };
    let found = handlers(root, file, kind, name);
    let handler = match &found {
        Ok(found) => found.last(),
        Err(why) => {
            return vec![
                Area::Runtime.item("configuration", failed(why, "correct the file, and restart the runtime")),
            ];
        }
    };
    let mut items = vec![
        Area::Runtime.item("version", runtime_version(root, version, handler)),
        Area::Runtime.item("handler", self::handler(name, file, kind, handler)),
    ];
    if let Some(handler) = handler {
        items.push(Area::Runtime.item("annotations", annotations(handler)));
        items.push(Area::Runtime.item("devices", devices(handler)));
        if kind == Kind::Crio {
            items.push(Area::Runtime.item("images", images(handler)));
        }
        items.extend(kata::check(root, config, handler));
    }
    items
}

/// Returns the definitions of the handler, in the order in which the runtime reads them.
fn handlers(root: &Path, file: &str, kind: Kind, name: &str) -> Result<Vec<Handler>, String> {
    let mut files = match kind {
        Kind::Containerd => vec![file.to_owned()],
        Kind::Crio => {
            let first = Some(CRIO_FILE.to_owned()).filter(|file| below(root, file).exists());
            first.into_iter().chain(matching(root, &format!("{CRIO_FOLDER}/*"))).collect()
        }
    };
    let mut found = Vec::new();
    let mut at = 0;
    while let Some(file) = files.get(at).cloned().filter(|_| at < MOST_FILES) {
        let table = read_toml(root, &file)?;
        match kind {
            Kind::Containerd => {
                for import in strings(&table["imports"]) {
                    files.extend(matching(root, &import));
                }
                found.extend(of_containerd(&table, &file, name));
            }
            Kind::Crio => found.extend(of_crio(&table, &file, name)),
        }
        at += 1;
    }
    Ok(found)
}

/// Returns the files of an import: a path, or a folder and a pattern with one star at its beginning.
fn matching(root: &Path, import: &str) -> Vec<String> {
    let Some((folder, pattern)) = import.rsplit_once('/') else { return Vec::new() };
    let Some(end) = pattern.strip_prefix('*') else { return vec![import.to_owned()] };
    let entries = std::fs::read_dir(below(root, folder)).into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let mut files: Vec<String> =
        names.filter(|name| name.ends_with(end)).map(|name| format!("{folder}/{name}")).collect();
    files.sort();
    files
}

fn of_containerd(table: &Value, file: &str, name: &str) -> Option<Handler> {
    let version = table["version"].as_u64().unwrap_or(1);
    let mut defined = table["plugins"].as_object()?.iter().filter_map(|(plugin, value)| {
        let found = &value["containerd"]["runtimes"][name];
        found.is_object().then_some((plugin.as_str(), found))
    });
    let (plugin, found) = defined.next_back()?;
    let is_read =
        plugin == if version >= 3 { "io.containerd.cri.v1.runtime" } else { "io.containerd.grpc.v1.cri" };
    let kata = string(&found["options"]["ConfigPath"]);
    Some(Handler { kata, is_read, annotations: strings(&found["pod_annotations"]), ..common(found, file) })
}

fn of_crio(table: &Value, file: &str, name: &str) -> Option<Handler> {
    let found = &table["crio"]["runtime"]["runtimes"][name];
    let kata = string(&found["runtime_config_path"]);
    let handler = Handler {
        kata,
        is_read: true,
        annotations: strings(&found["allowed_annotations"]),
        pulls: found["runtime_pull_image"] == true,
        ..common(found, file)
    };
    found.is_object().then_some(handler)
}

/// Reads the keys that both runtimes have.
fn common(found: &Value, file: &str) -> Handler {
    Handler {
        file: file.to_owned(),
        runtime_type: string(&found["runtime_type"]),
        runtime_path: string(&found["runtime_path"]),
        snapshotter: string(&found["snapshotter"]),
        without_devices: found["privileged_without_host_devices"] == true,
        ..Handler::default()
    }
}

fn string(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn strings(value: &Value) -> Vec<String> {
    value.as_array().into_iter().flatten().filter_map(Value::as_str).map(str::to_owned).collect()
}

/// Name of the shim that containerd looks for: `io.containerd.kata-remote.v2` is `containerd-shim-kata-remote-v2`.
fn shim_of(handler: &Handler) -> String {
    let parts: Vec<&str> = handler.runtime_type.rsplit('.').take(2).collect();
    parts.iter().rev().fold("containerd-shim".to_owned(), |name, part| format!("{name}-{part}"))
}

fn linked_shim(root: &Path, handler: &Handler) -> Option<String> {
    let name = shim_of(handler);
    PATH.iter().map(|folder| format!("{folder}/{name}")).find(|path| below(root, path).exists())
}

fn runtime_version(root: &Path, version: Option<&str>, handler: Option<&Handler>) -> Outcome {
    let Some(version) = version else {
        return skipped(
            "the version of the container runtime is unknown here; containerd needs 1.7 or later",
        );
    };
    let Some(number) = version.strip_prefix("containerd://") else {
        return skipped(format!("{version}: it must know runtime_pull_image; no first version is known"));
    };
    let mut parts =
        number.trim_start_matches('v').split('.').map(|part| part.parse::<u32>().unwrap_or_default());
    let known = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
    let link = handler.and_then(|handler| linked_shim(root, handler));
    match (known, handler, link) {
        ((1, 6), _, Some(link)) => Ok(format!("containerd {number}, which finds the shim as {link}")),
        ((1, 6), Some(handler), None) => failed(
            format!("containerd {number} does not follow runtime_path, and has no {}", shim_of(handler)),
            format!(
                "upgrade containerd to 1.7 or later, or link /usr/local/bin/{} to the shim",
                shim_of(handler)
            ),
        ),
        (known, ..) if known < (1, 6) => {
            failed(format!("containerd {number} is too old"), "upgrade containerd to 1.7 or later")
        }
        _ => Ok(format!("containerd {number}")),
    }
}

fn handler(name: &str, file: &str, kind: Kind, found: Option<&Handler>) -> Outcome {
    let (ours, place) = match kind {
        Kind::Containerd => ("containerd-1.toml or containerd-2.toml", "a file that config.toml imports"),
        Kind::Crio => ("crio.conf", CRIO_FOLDER),
    };
    let Some(found) = found else {
        let remedy =
            format!("put {ours} of the ConfigMap peerpod-kata into {place}, and restart the runtime");
        return failed(format!("{file} and its imports define no handler {name}"), remedy);
    };
    if !found.is_read {
        let cause = format!(
            "{}: the handler {name} is in a table that a file of this version does not have",
            found.file
        );
        return failed(
            cause,
            "use containerd-1.toml with version = 2, and containerd-2.toml with version = 3",
        );
    }
    Ok(format!("{name} in {}", found.file))
}

fn annotations(handler: &Handler) -> Outcome {
    let passes = |pattern: &String| pattern == "*" || pattern.starts_with("io.katacontainers.");
    if handler.annotations.iter().any(passes) {
        return Ok("Kata's annotations reach the shim".to_owned());
    }
    let remedy = "write pod_annotations = [\"io.katacontainers.*\"] (CRI-O: allowed_annotations), and restart the runtime";
    failed(
        format!("{}: the handler passes no annotations of Kata, so a VM gets no size", handler.file),
        remedy,
    )
}

fn devices(handler: &Handler) -> Outcome {
    if handler.without_devices {
        return Ok("privileged pods get none of the node's devices".to_owned());
    }
    let cause =
        format!("{}: privileged pods get the node's devices, which their VM does not have", handler.file);
    warning(cause, "write privileged_without_host_devices = true, and restart the runtime")
}

fn images(handler: &Handler) -> Outcome {
    if handler.pulls {
        return Ok("CRI-O leaves the images to the VM".to_owned());
    }
    let cause = format!("{}: CRI-O pulls the images itself, and the VM has none of them", handler.file);
    failed(cause, "write runtime_pull_image = true, and restart CRI-O")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::item::Verdict;

    fn handler_of(text: &str) -> Option<Handler> {
        of_containerd(&toml::from_str(text).unwrap(), "f.toml", "kata-remote")
    }

    const SECOND: &str = include_str!("../../../../deploy/kata/containerd-2.toml");
    const FIRST: &str = include_str!("../../../../deploy/kata/containerd-1.toml");
    const CRIO: &str = include_str!("../../../../deploy/kata/crio.conf");

    fn verdict(outcome: Outcome) -> (Verdict, String) {
        let item = Area::Runtime.item("x", outcome);
        (item.verdict, format!("{}: {}", item.cause, item.remedy))
    }

    #[test]
    fn the_shipped_handlers_are_right_and_changed_ones_are_not() {
        let crio = of_crio(&toml::from_str(CRIO).unwrap(), "f", "kata-remote").unwrap();
        for found in [handler_of(FIRST).unwrap(), handler_of(SECOND).unwrap(), crio] {
            assert!(found.is_read && found.kata.ends_with("configuration-remote.toml"), "{found:?}");
            assert_eq!(verdict(annotations(&found)).0, Verdict::Ok);
            assert_eq!(verdict(devices(&found)).0, Verdict::Ok);
        }
        assert_eq!(handler_of("version = 3"), None);
        let (seen, why) = verdict(handler("kata-remote", "f", Kind::Containerd, None));
        assert!(seen == Verdict::Failed && why.contains("ConfigMap peerpod-kata"), "{why}");
        let mixed = handler_of(&SECOND.replace("version = 3", "version = 2")).unwrap();
        let (seen, why) = verdict(handler("kata-remote", "f", Kind::Containerd, Some(&mixed)));
        assert!(seen == Verdict::Failed && why.contains("version = 3"), "{why}");
        let bare =
            handler_of(&SECOND.replace("pod_annotations", "other").replace("privileged_", "x_")).unwrap();
        assert_eq!(verdict(annotations(&bare)).0, Verdict::Failed);
        assert_eq!(verdict(devices(&bare)).0, Verdict::Warning);
    }

    #[test]
    fn files_in_the_folder_of_crio_are_enough() {
        let root = std::env::temp_dir().join(format!("peerpod-check-crio-{}", std::process::id()));
        let folder = below(&root, CRIO_FOLDER);
        std::fs::create_dir_all(&folder).unwrap();
        for (text, verdict) in
            [(CRIO.to_owned(), Verdict::Ok), (CRIO.replace("runtime_pull_image", "x"), Verdict::Failed)]
        {
            std::fs::write(folder.join("20-kata.conf"), text).unwrap();
            let found = handlers(&root, "/etc/crio", Kind::Crio, "kata-remote").unwrap();
            let [handler] = &found[..] else { panic!("{found:?}") };
            assert_eq!(self::verdict(images(handler)).0, verdict);
        }
        std::fs::write(below(&root, CRIO_FILE), CRIO).unwrap();
        let found = handlers(&root, "/etc/crio", Kind::Crio, "kata-remote").unwrap();
        assert_eq!(
            found.iter().map(|one| one.pulls).collect::<Vec<_>>(),
            [true, false],
            "the last one counts"
        );
        std::fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn an_old_containerd_needs_the_link() {
        let root = std::env::temp_dir().join(format!("peerpod-check-runtime-{}", std::process::id()));
        std::fs::create_dir_all(root.join("usr/bin")).unwrap();
        let handler = handler_of(SECOND).unwrap();
        let version = |text| verdict(runtime_version(&root, Some(text), Some(&handler)));
        assert_eq!(version("containerd://1.7.2").0, Verdict::Ok);
        assert_eq!(version("containerd://2.1.0").0, Verdict::Ok);
        assert_eq!(version("cri-o://1.33.0").0, Verdict::Skipped);
        assert_eq!(version("containerd://1.5.9").0, Verdict::Failed);
        let (seen, why) = version("containerd://1.6.20~ds1");
        assert!(seen == Verdict::Failed && why.contains("containerd-shim-kata-remote-v2"), "{why}");
        std::fs::write(root.join("usr/bin/containerd-shim-kata-remote-v2"), "").unwrap();
        assert_eq!(version("containerd://1.6.20~ds1").0, Verdict::Ok);
        assert_eq!(verdict(runtime_version(&root, None, None)).0, Verdict::Skipped);
        std::fs::remove_dir_all(root).unwrap();
    }
}
