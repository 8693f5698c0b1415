//! The relay's settings: sections `paths`, `relay` and `log` of the file that all binaries of a node share.

use std::net::SocketAddr;
use std::path::PathBuf;

use peerpod_base::config::{Mistakes, Reader, Setting, Sources};
use peerpod_base::telemetry::LogConfig;

/// Sections of the shared file that other binaries read.
const OTHERS: [&str; 9] =
    ["cluster", "controller", "csi", "kubernetes", "node", "provider", "secrets", "tunnel", "webhook"];

/// Threads that serve the links; 0: a quarter of the processors, at least one.
const THREADS: u32 = 0;
/// Limit of unauthenticated connections of VMs at once.
const MAX_HANDSHAKES: u32 = 512;
/// Limit of unauthenticated connections from one IPv4 address, or one /64 of IPv6, at once.
const MAX_HANDSHAKES_PER_ADDRESS: u32 = 32;

/// Settings of the relay.
#[derive(Clone, Debug)]
pub struct RelayConfig {
    /// `paths.run-dir`: folder of the sockets.
    pub run_dir: PathBuf,
    /// `paths.state-dir`: folder of the files that survive a restart.
    pub state_dir: PathBuf,
    /// `relay.listen`: address that guests dial.
    pub listen: SocketAddr,
    /// `relay.admin-listen`: address of metrics and health.
    pub admin_listen: SocketAddr,
    /// Threads that serve the links.
    pub threads: usize,
    /// Limit of guest connections that are not assigned to a sandbox yet.
    pub max_handshakes: u32,
    /// The same limit for one address.
    pub max_handshakes_per_address: u32,
    /// `relay.replaced`: whether to run the supervisor, [`crate::supervisor`].
    pub waits_when_replaced: bool,
    /// `relay.bundles`: folders of containers' bundles.
    pub bundles: Vec<PathBuf>,
    /// `relay.hardening`: whether a right that cannot be dropped stops the start.
    pub must_be_hardened: bool,
    /// `relay.pod`: namespace, name and uid of this relay's own pod, if it runs in one.
    pub pod: Option<[String; 3]>,
}

impl RelayConfig {
    /// Reads the relay's keys.
    pub fn read(reader: &mut Reader) -> RelayConfig {
        let config = RelayConfig {
            run_dir: reader.get("paths.run-dir", "/run/peerpod", "folder of the sockets"),
            state_dir: reader.get(
                "paths.state-dir",
                "/var/lib/peerpod",
                "folder of the state that survives a restart",
            ),
            listen: reader.get(
                "relay.listen",
                "[::]:15151",
                "address and port that pod VMs dial (TLS); [::] means both families",
            ),
            admin_listen: reader.get(
                "relay.admin-listen",
                "127.0.0.1:15152",
                "address and port of /metrics, /healthz and /readyz",
            ),
            threads: threads(reader.constant("relay.threads", "THREADS", THREADS)),
            max_handshakes: reader.constant("relay.max-handshakes", "MAX_HANDSHAKES", MAX_HANDSHAKES),
            max_handshakes_per_address: reader.constant(
                "relay.max-handshakes-per-address",
                "MAX_HANDSHAKES_PER_ADDRESS",
                MAX_HANDSHAKES_PER_ADDRESS,
            ),
            waits_when_replaced: reader.choice(
                "relay.replaced",
                "end",
                &["end", "wait"],
                "action of this process after a handover to another relay: end, or wait for a signal (in a \
                 pod, where it would be started again)",
            ) == "wait",
            bundles: bundles(reader),
            must_be_hardened: reader.choice(
                "relay.hardening",
                "required",
                &["required", "best-effort"],
                "action when the kernel does not take all rights that the relay does not need (capabilities, files, \
                 system calls) from it: stop the start, or go on with a warning",
            ) == "required",
            pod: pod(reader),
        };
        let own = [("paths.run-dir", &config.run_dir), ("paths.state-dir", &config.state_dir)];
        for (key, path) in own.into_iter().chain(config.bundles.iter().map(|path| ("relay.bundles", path))) {
            if !path.is_absolute() {
                reader.mistake(key, "not an absolute path; begin it with '/'");
            }
        }
        config
    }

    /// Loads all settings of this binary. Fails with every mistake of all sources at once.
    pub fn load(sources: Sources) -> Result<(RelayConfig, LogConfig, Vec<Setting>), Mistakes> {
        let mut reader = Reader::load(sources, &["paths", "relay", "log"], &OTHERS)?;
        let config = RelayConfig::read(&mut reader);
        let log = LogConfig::read(&mut reader);
        let printed = reader.finish()?;
        Ok((config, log, printed))
    }
}

fn bundles(reader: &mut Reader) -> Vec<PathBuf> {
    let folders: Vec<String> = reader.get(
        "relay.bundles",
        "/run/containerd/io.containerd.runtime.v2.task",
        "folders in which the container runtime keeps containers' bundles, to find a container's volumes; the relay \
         opens no other files than these and its own",
    );
    folders.into_iter().map(PathBuf::from).collect()
}

fn pod(reader: &mut Reader) -> Option<[String; 3]> {
    let pod: Option<String> = reader.optional(
        "relay.pod",
        "namespace/name/uid of the relay's own pod; an Event on it gives the reason of a failed handover from a running \
         relay",
    );
    let parts: Vec<String> = pod?.split('/').filter(|part| !part.is_empty()).map(str::to_owned).collect();
    let parts = parts.try_into().ok();
    if parts.is_none() {
        reader.mistake("relay.pod", "not of the form namespace/name/uid");
    }
    parts
}

/// Returns the number of threads; 0 means a quarter of the processors. Few threads are faster than many: a link's
/// wake-ups then find a running thread. One thread serves several hundred megabytes a second.
fn threads(wanted: u32) -> usize {
    match wanted {
        0 => std::thread::available_parallelism().map_or(1, |all| all.get() / 4).max(1),
        wanted => wanted.min(256) as usize,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(args: &[&str]) -> Result<RelayConfig, Mistakes> {
        let args = args.iter().map(|arg| (*arg).to_owned());
        RelayConfig::load(Sources::from_process(args, [])).map(|(config, ..)| config)
    }

    #[test]
    fn defaults_are_applied_and_all_mistakes_are_reported() {
        let config = load(&[]).unwrap();
        assert_eq!(config.listen.port(), 15151);
        let mistakes = load(&["--paths.run-dir", "here", "--relay.max-handshakes=512", "--relay.listn", "x"]);
        let text = mistakes.unwrap_err().to_string();
        for part in ["paths.run-dir", "relay.max-handshakes", "relay.listn"] {
            assert!(text.contains(part), "{part} in {text}");
        }
    }
}
