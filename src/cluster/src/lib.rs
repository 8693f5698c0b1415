//! Runs one role of the cluster side: `peerpod-cluster ROLE`. `crds` prints the CustomResourceDefinitions, `webhook`
//! answers admission reviews, `controller` manages the cluster's VMs, `idle` fails while PeerPods exist.
//! `peerpod-cluster ROLE --help` shows a role's settings.
//!
//! Exit codes: 0 stopped on request; 1 it could not start, or a part of it ended; 2 the command or the configuration
//! has mistakes.
//!
//! The webhook uses Kubernetes and no provider. The controller uses providers only through their table; it also rolls
//! out the nodes' DaemonSets (`rollout`) and gives nodes the pull secrets of their pods (`secrets`). Both roles
//! share a CA (`authority`) and a TLS server (`serve`).

mod authority;
mod controller;
mod idle;
mod rollout;
mod secrets;
mod serve;
mod webhook;

use std::collections::BTreeMap;
use std::process::ExitCode;

use peerpod_base::config::{Mistakes, Reader, Setting, Sources};
use peerpod_base::program::{self, Program};
use peerpod_base::telemetry::LogConfig;
use peerpod_kube::crds;
use tokio::runtime::Runtime;

use crate::controller::ControllerSettings;
use crate::webhook::WebhookConfig;

const ABOUT: &str = "the cluster's side of peer pods; roles, as the first argument: crds (print the custom \
     resources' definitions), webhook (answer admission reviews), controller (manage the cluster's VMs), idle \
     (fail while PeerPods exist); ROLE --help shows a role's settings";

const PROGRAM: Program =
    Program { name: "peerpod-cluster", version: env!("CARGO_PKG_VERSION"), about: ABOUT };

/// Every section of the file that all programs share. A role reads its own sections; the rest belong to other programs
/// and roles.
pub const SECTIONS: [&str; 12] = [
    "cluster",
    "controller",
    "csi",
    "kubernetes",
    "log",
    "node",
    "paths",
    "provider",
    "relay",
    "secrets",
    "tunnel",
    "webhook",
];

/// Starts a role with a configuration without mistakes.
type Start = Box<dyn FnOnce() -> anyhow::Result<()>>;

/// A role that runs until it is stopped.
struct Role {
    name: &'static str,
    about: &'static str,
    /// Sections in which the role knows every key.
    mine: &'static [&'static str],
    read: fn(&mut Reader) -> Start,
}

impl Role {
    fn program(&self) -> Program {
        Program { name: self.name, about: self.about, ..PROGRAM }
    }
}

const ROLES: [Role; 3] = [
    Role {
        name: "webhook",
        about: "answers admission reviews with a patch for each pod that asks for a VM",
        mine: &["webhook", "kubernetes", "log"],
        read: |reader| {
            let (config, log) = (WebhookConfig::read(reader), LogConfig::read(reader));
            Box::new(move || {
                program::run(&log, Runtime::new, async |shutdown| {
                    webhook::build(config).await?.run(&shutdown).await
                })
            })
        },
    },
    Role {
        name: "controller",
        about: "manages the cluster's VMs: deletes the VMs of deleted PeerPods, and VMs that no PeerPod \
             names",
        mine: &["controller", "kubernetes", "provider", "secrets", "log"],
        read: |reader| {
            let (settings, log) = (ControllerSettings::read(reader), LogConfig::read(reader));
            Box::new(move || {
                program::run(&log, Runtime::new, async |shutdown| {
                    let bound = tokio::select! {
                        bound = controller::build(settings, &shutdown) => bound?,
                        () = shutdown.wait() => return Ok(()),
                    };
                    bound.run().await
                })
            })
        },
    },
    Role {
        name: "idle",
        about: "fails while PeerPods exist; the chart runs it before its removal",
        mine: &["kubernetes", "log"],
        read: |reader| {
            let (settings, log) = (idle::IdleSettings::read(reader), LogConfig::read(reader));
            Box::new(move || program::run(&log, Runtime::new, async |_| idle::check(settings).await))
        },
    },
];

/// Reads the settings of all roles, to check a configuration; starts nothing. Mistakes stay with the reader.
pub fn read_settings(reader: &mut Reader) {
    for role in &ROLES {
        drop((role.read)(reader));
    }
}

/// Runs the role that the first of these arguments names.
pub fn run(words: Vec<String>) -> ExitCode {
    let every = || {
        let all = ROLES.iter().flat_map(settings).map(|setting| (setting.key.clone(), setting));
        all.collect::<BTreeMap<_, _>>().into_values().collect()
    };
    if let Some(answer) = PROGRAM.answer(words.iter().cloned(), every) {
        print!("{answer}");
        return ExitCode::SUCCESS;
    }
    let word = words.first().map(String::as_str);
    if word == Some("crds") {
        return PROGRAM.run(Ok(()), |()| print_crds());
    }
    let Some(role) = ROLES.iter().find(|role| Some(role.name) == word) else {
        let said = word.map_or_else(|| "no role".to_owned(), |word| format!("{word:?} is no role"));
        eprintln!("peerpod-cluster: {said}; write crds, webhook, controller or idle, or --help");
        return ExitCode::from(2);
    };
    if let Some(answer) = role.program().answer(words.iter().skip(1).cloned(), || settings(role)) {
        print!("peerpod-cluster {answer}");
        return ExitCode::SUCCESS;
    }
    let sources = Sources::of_this_process(words.into_iter().skip(1));
    PROGRAM.run(load(role, sources), |(start, _)| start())
}

fn load(role: &Role, sources: Sources) -> Result<(Start, Vec<Setting>), Mistakes> {
    let mut reader = Reader::load(sources, role.mine, &others(role))?;
    let start = (role.read)(&mut reader);
    Ok((start, reader.finish()?))
}

/// Sections that other programs and roles read.
fn others(role: &Role) -> Vec<&'static str> {
    SECTIONS.into_iter().filter(|section| !role.mine.contains(section)).collect()
}

/// Returns the settings of a role with any provider, for `--help` alone.
fn settings(role: &Role) -> Vec<Setting> {
    let ask = |reader: &mut Reader| drop((role.read)(reader));
    peerpod_providers::every_setting(role.mine, &others(role), ask).unwrap_or_default()
}

fn print_crds() -> anyhow::Result<()> {
    for crd in crds::all() {
        print!("---\n{}", crds::yaml(&crd)?);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use peerpod_test_reference as reference;

    use super::*;

    #[test]
    fn documented_help_is_up_to_date() {
        // docs/configuration.md has the settings.
        let help = |program: Program| program.answer(std::iter::once("--help".to_owned()), Vec::new).unwrap();
        let mut text = reference::help(PROGRAM.name, &help(PROGRAM));
        for role in &ROLES {
            let command = format!("peerpod-cluster {}", role.name);
            let help = format!("peerpod-cluster {}", help(role.program()));
            text = format!("{text}\n{}", reference::help(&command, &help));
        }
        reference::section("cli.md", PROGRAM.name, &text).unwrap();
    }

    #[test]
    fn documented_settings_are_up_to_date() {
        // The settings of `idle` are those of all roles.
        for role in ROLES.iter().filter(|role| role.name != "idle") {
            let mut settings = settings(role);
            // The page has them in the tables of the node and of AWS.
            settings.retain(|setting| !setting.key.starts_with("provider."));
            let text = reference::settings(&settings);
            reference::section("configuration.md", role.name, &text).unwrap();
        }
    }
}
