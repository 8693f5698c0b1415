//! Rights of the chart's running containers: what holds on this kernel, beside what the chart asks for.

use std::fs;

use anyhow::{Context, ensure};
use rustix::thread::CapabilitySet;
use serde_json::Value;

use super::{Installed, NAMESPACE};

/// Capabilities of a container that asks for no change (containerd's default).
const DEFAULT: [&str; 14] = [
    "CHOWN",
    "DAC_OVERRIDE",
    "FSETID",
    "FOWNER",
    "MKNOD",
    "NET_RAW",
    "SETGID",
    "SETUID",
    "SETFCAP",
    "SETPCAP",
    "NET_BIND_SERVICE",
    "SYS_CHROOT",
    "KILL",
    "AUDIT_WRITE",
];

/// Prints the rights of each container of the release. Fails where capabilities or system calls are wider than asked.
pub(super) fn check(on: &Installed<'_>) -> anyhow::Result<()> {
    // A pod of the check may have ended.
    let daemons = "app.kubernetes.io/component!=check";
    let pods = on.node.kubectl(&["-n", NAMESPACE, "get", "pods", "-l", daemons, "-o", "json"])?;
    let pods: Value = serde_json::from_str(&pods)?;
    let mut wider = Vec::new();
    let mut seen = 0;
    for pod in pods["items"].as_array().context("pods")? {
        for container in pod["spec"]["containers"].as_array().context("containers")? {
            let name = container["name"].as_str().unwrap_or_default();
            let statuses = pod["status"]["containerStatuses"].as_array().context("containerStatuses")?;
            let status =
                statuses.iter().find(|status| status["name"] == name).context("a container's status")?;
            let id = status["containerID"].as_str().and_then(|id| id.strip_prefix("containerd://"));
            let pid = process(id.context("a container's id")?)?;
            let asked = Asked::of(pod, container)?;
            let held = Held::of(pid)?;
            println!("         {name}: {}", held.described(&asked));
            wider.extend(held.wider_than(&asked).into_iter().map(|what| format!("{name}: {what}")));
            seen += 1;
        }
    }
    ensure!(seen >= 4, "the release has {seen} containers");
    ensure!(wider.is_empty(), "{}", wider.join("\n"));
    Ok(())
}

/// Returns the first process of a container, by its cgroup.
fn process(id: &str) -> anyhow::Result<u32> {
    let all = fs::read_dir("/proc")?.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let is_of =
        |pid: &u32| fs::read_to_string(format!("/proc/{pid}/cgroup")).is_ok_and(|text| text.contains(id));
    all.filter(is_of).min().with_context(|| format!("no process of container {id}"))
}

/// Rights that the pod's specification asks for.
struct Asked {
    /// `None`: all.
    capabilities: Option<CapabilitySet>,
    has_filter: bool,
    no_new_privileges: bool,
}

impl Asked {
    fn of(pod: &Value, container: &Value) -> anyhow::Result<Asked> {
        let own = &container["securityContext"];
        if own["privileged"] == true {
            return Ok(Asked { capabilities: None, has_filter: false, no_new_privileges: false });
        }
        let names =
            |list: &str| own["capabilities"][list].as_array().into_iter().flatten().filter_map(Value::as_str);
        let mut capabilities = match names("drop").any(|name| name == "ALL") {
            true => CapabilitySet::empty(),
            false => set(DEFAULT.into_iter())? - set(names("drop"))?,
        };
        capabilities |= set(names("add"))?;
        let profile = [own, &pod["spec"]["securityContext"]]
            .into_iter()
            .find_map(|context| context["seccompProfile"]["type"].as_str());
        Ok(Asked {
            capabilities: Some(capabilities),
            has_filter: profile.is_some_and(|profile| profile != "Unconfined"),
            no_new_privileges: own["allowPrivilegeEscalation"] == false,
        })
    }
}

fn set<'a>(names: impl Iterator<Item = &'a str>) -> anyhow::Result<CapabilitySet> {
    let one = |name: &str| CapabilitySet::from_name(name).with_context(|| format!("no capability {name}"));
    names.map(one).collect()
}

/// Rights of a process (proc_pid_status(5)).
struct Held {
    effective: CapabilitySet,
    bounding: CapabilitySet,
    has_filter: bool,
    no_new_privileges: bool,
    /// `None`: this kernel has no AppArmor.
    profile: Option<String>,
}

impl Held {
    fn of(pid: u32) -> anyhow::Result<Held> {
        let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(":\t"));
            line.with_context(|| format!("no {name} of process {pid}"))
        };
        let set = |name| -> anyhow::Result<CapabilitySet> {
            Ok(CapabilitySet::from_bits_retain(u64::from_str_radix(field(name)?, 16)?))
        };
        // The file cannot be read without AppArmor.
        let profile = fs::read_to_string(format!("/proc/{pid}/attr/current")).ok();
        Ok(Held {
            effective: set("CapEff")?,
            bounding: set("CapBnd")?,
            has_filter: field("Seccomp")? == "2",
            no_new_privileges: field("NoNewPrivs")? == "1",
            profile: profile.map(|profile| profile.trim_matches(['\0', '\n']).to_owned()),
        })
    }

    fn described(&self, asked: &Asked) -> String {
        format!(
            "effective {}; bounding {}; asked {}; seccomp {}; privileges {}; AppArmor {}",
            names(self.effective),
            names(self.bounding),
            asked.capabilities.map_or_else(|| "all".to_owned(), names),
            if self.has_filter { "filters" } else { "does not filter" },
            if self.no_new_privileges { "cannot grow" } else { "can grow" },
            self.profile.as_deref().unwrap_or("is not in this kernel"),
        )
    }

    /// Returns the rights beyond those asked for.
    fn wider_than(&self, asked: &Asked) -> Vec<String> {
        let mut wider = Vec::new();
        if let Some(capabilities) = asked.capabilities {
            for (set, held) in [("effective", self.effective), ("bounding", self.bounding)] {
                let more = held - capabilities;
                if !more.is_empty() {
                    wider.push(format!("the {set} capabilities contain {}", names(more)));
                }
            }
        }
        if asked.has_filter && !self.has_filter {
            wider.push("no seccomp filter".to_owned());
        }
        if asked.no_new_privileges && !self.no_new_privileges {
            wider.push("privileges can grow".to_owned());
        }
        wider
    }
}

fn names(set: CapabilitySet) -> String {
    let names: Vec<&str> = set.iter_names().map(|(name, _)| name).collect();
    if names.is_empty() { "none".to_owned() } else { names.join("+") }
}
