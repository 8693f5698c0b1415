//! Common start of a daemon: prints its version or its settings on request, and sets its umask and limits.

use nix::errno::Errno;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::stat::{Mode, umask};

use crate::config::{self, Setting};

/// Description of a program, for its own output.
#[derive(Clone, Copy, Debug)]
pub struct Program {
    /// Name of the binary.
    pub name: &'static str,
    /// Version of the package.
    pub version: &'static str,
    /// Purpose of the program, in one line.
    pub about: &'static str,
}

impl Program {
    /// Returns the text to print instead of running, if the first argument requests it. Only help calls `settings`.
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

/// Makes new files and sockets accessible to the owner alone, also before their permissions are set, and raises the
/// limit of open files to its maximum. Returns the error of raising the limit.
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
    fn version_and_help_count_only_as_the_first_argument() {
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
