//! Folder with a Python provider that serves in it, and the settings to open it.

#![allow(unreachable_pub, missing_docs)] // a module of tests
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use peerpod_provider_api::{CreateRequest, IdempotencyKey};
use peerpod_provider_external::{Endpoint, ExternalConfig, Owner};

/// Folder that is removed with the test.
pub struct Folder(pub PathBuf);

impl Folder {
    pub fn new() -> Folder {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("peerpod-ext-{}-{number}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    pub fn socket(&self) -> PathBuf {
        self.0.join("run/provider.sock")
    }

    /// Settings for the correct Python provider.
    pub fn shelf(&self) -> ExternalConfig {
        self.started(&["provider.py", &self.0.display().to_string()])
    }

    /// Settings for the Python provider with one fault.
    pub fn faulty(&self, fault: &str) -> ExternalConfig {
        self.started(&["faulty.py", &self.0.display().to_string(), fault])
    }

    fn started(&self, words: &[&str]) -> ExternalConfig {
        let script =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/providers/python").join(words[0]);
        let mut command = vec!["/usr/bin/env".to_owned(), "python3".to_owned(), script.display().to_string()];
        command.extend(words[1..].iter().map(ToString::to_string));
        config(Endpoint::Unix { socket: self.socket(), peer_uid: None, command: Some(command) })
    }

    /// Settings for a provider that is started elsewhere.
    pub fn dialled(&self) -> ExternalConfig {
        config(Endpoint::Unix { socket: self.socket(), peer_uid: None, command: None })
    }

    /// Returns the number of VM records.
    pub fn machines(&self) -> usize {
        let files = fs::read_dir(self.0.join("vms")).map(|files| files.flatten().collect()).unwrap_or(vec![]);
        files.iter().filter(|file| file.file_name().to_string_lossy().ends_with(".json")).count()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        drop(fs::remove_dir_all(&self.0));
    }
}

pub fn owner(node: &str) -> Owner {
    Owner { cluster_id: "test".into(), node_name: node.into(), installation: "i".into() }
}

/// Longest wait of a test for a condition.
pub const LIMIT: Duration = Duration::from_secs(60);

/// Returns settings with timeouts for a busy machine. Tests that cause a hang set shorter ones.
pub fn config(endpoint: Endpoint) -> ExternalConfig {
    ExternalConfig {
        endpoint,
        owner: owner("node"),
        handshake_timeout: Duration::from_secs(60),
        call_timeout: Duration::from_secs(60),
        health_every: Duration::from_secs(10),
        health_timeout: Duration::from_secs(60),
    }
}

pub fn request() -> CreateRequest {
    CreateRequest { name: "pod".into(), user_data: "the secret ticket".into(), ..CreateRequest::default() }
}

pub fn key(number: u32) -> IdempotencyKey {
    IdempotencyKey::derive("test", "sandbox", number)
}

/// Repeats a call until it has a result, as the node does.
pub async fn until<T, F>(what: &str, ask: impl Fn() -> F) -> T
where
    F: Future<Output = Option<T>>,
{
    let deadline = Instant::now() + LIMIT;
    loop {
        if let Some(answer) = ask().await {
            return answer;
        }
        assert!(Instant::now() < deadline, "waited in vain until {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
