//! Collects the layers of a configuration before they are read.

use std::collections::BTreeMap;
use std::path::PathBuf;

/// Default file, read if it exists and no other file is named.
pub const DEFAULT_FILE: &str = "/etc/peerpod/peerpod.yaml";

/// Variable that names the file, like `--config`.
pub(super) const FILE_VARIABLE: &str = "PEERPOD_CONFIG";

/// Variable that lets Peerpod's own tests override constants by the keys that these once had, if it is `1`.
pub(super) const TESTING_VARIABLE: &str = "PEERPOD_TESTING";

pub(super) const PREFIX: &str = "PEERPOD_";

/// The layers, lowest first.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    /// The YAML file; `None` is an empty one.
    pub file: Option<PathBuf>,
    /// The environment. Only names that begin with `PEERPOD_` count; an empty value is no value.
    pub env: BTreeMap<String, String>,
    /// Flags as key and value, `("node.lease", "5m")`; the last of one name counts. A key with its dashes had no value.
    pub flags: Vec<(String, String)>,
}

impl Sources {
    /// Parses `--config PATH` and `--section.key VALUE`, each also with `=`. Other arguments are kept, and the reader
    /// reports them with all other mistakes. `args` excludes the program's name.
    pub fn from_process(
        args: impl IntoIterator<Item = String>,
        env: impl IntoIterator<Item = (String, String)>,
    ) -> Sources {
        let env: BTreeMap<String, String> =
            env.into_iter().filter(|(name, value)| name.starts_with(PREFIX) && !value.is_empty()).collect();
        let mut flags = split_flags(args);
        let named = flags.iter().rposition(|(key, _)| key == "config").map(|at| flags[at].1.clone());
        flags.retain(|(key, _)| key != "config");
        let file = named
            .or_else(|| env.get(FILE_VARIABLE).cloned())
            .map(PathBuf::from)
            .or_else(|| Some(PathBuf::from(DEFAULT_FILE)).filter(|path| path.exists()));
        Sources { file, env, flags }
    }

    /// Lets a test override constants by the keys that these once had.
    pub fn for_tests(mut self) -> Sources {
        self.env.insert(TESTING_VARIABLE.to_owned(), "1".to_owned());
        self
    }

    /// Parses arguments in the same way, with this process's own environment.
    pub fn of_this_process(args: impl IntoIterator<Item = String>) -> Sources {
        let env = std::env::vars_os()
            .map(|(name, value)| (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned()));
        Sources::from_process(args, env)
    }
}

/// Splits arguments into pairs of flag and value. An argument that is no flag becomes an unknown key of its own.
fn split_flags(args: impl IntoIterator<Item = String>) -> Vec<(String, String)> {
    let mut flags = Vec::new();
    let mut args = args.into_iter().peekable();
    while let Some(arg) = args.next() {
        let Some(name) = arg.strip_prefix("--") else {
            flags.push((arg, String::new()));
            continue;
        };
        if let Some((key, value)) = name.split_once('=') {
            flags.push((key.to_owned(), value.to_owned()));
        } else if args.peek().is_some_and(|next| !next.starts_with("--")) {
            flags.push((name.to_owned(), args.next().unwrap_or_default()));
        } else {
            flags.push((arg, String::new()));
        }
    }
    flags
}

/// Returns the variable of a key: `node.boot-timeout` is `PEERPOD_NODE_BOOT_TIMEOUT`.
pub fn env_name(key: &str) -> String {
    format!("{PREFIX}{}", key.to_ascii_uppercase().replace(['.', '-'], "_"))
}
