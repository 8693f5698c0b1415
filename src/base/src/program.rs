//! How a daemon begins: it says its version or its settings when asked for, and takes the limits and rights that all of
//! them want. May touch: the process's own umask and limits.

use nix::{
    errno::Errno,
    sys::{
        resource::{Resource, getrlimit, setrlimit},
        stat::{Mode, umask},
    },
};

use crate::config::{self, Setting};

/// A program, as it speaks of itself.
#[derive(Clone, Copy, Debug)]
pub struct Program {
    /// The binary's name.
    pub name: &'static str,
    /// The package's version.
    pub version: &'static str,
    /// What it is for, one line.
    pub about: &'static str,
}

impl Program {
    /// What is printed instead of running, when the first argument asks for the version or for help. `settings` is called
    /// for help alone.
    pub fn answer(
        &self,
        mut arguments: impl Iterator<Item = String>,
        settings: impl FnOnce() -> Vec<Setting>,
    ) -> Option<String> {
        let Program { name, version, about } = self;
        match arguments.next().as_deref() {
            Some("--version" | "-V") => Some(format!("{name} {version}\n")),
            Some("--help" | "-h" | "help") => Some(format!(
                "{name}: {about}\n\n\
                 settings, as flags (--key value), environment (PEERPOD_KEY) or YAML (--config FILE):\n{}",
                config::help(&settings())
            )),
            _ => None,
        }
    }
}

/// Files and sockets we make are for nobody else, also in the moment before their rights are set; and as many may be
/// open as we are allowed. Returns why the limit of open files could not be raised; the caller's log is up by then.
pub fn own_rights_and_limits() -> Result<(), Errno> {
    umask(Mode::S_IRWXG | Mode::S_IRWXO);
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, most, most)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROGRAM: Program = Program { name: "peerpod-x", version: "1.2.3", about: "does x" };

    fn answer(words: &[&str]) -> Option<String> {
        PROGRAM.answer(words.iter().map(ToString::to_string), Vec::new)
    }

    #[test]
    fn version_and_help_are_said_only_as_the_first_word() {
        for word in ["--version", "-V"] {
            assert_eq!(answer(&[word]).as_deref(), Some("peerpod-x 1.2.3\n"));
        }
        for word in ["--help", "-h", "help"] {
            assert!(answer(&[word, "--x"]).unwrap().starts_with("peerpod-x: does x\n\nsettings"), "{word}");
        }
        for words in [&[][..], &["--config", "--help"], &["version"]] {
            assert_eq!(answer(words), None, "{words:?}");
        }
    }
}
