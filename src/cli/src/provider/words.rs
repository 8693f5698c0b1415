//! Parses the arguments of `peerpod provider check`. Pure.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, bail};
use peerpod_base::config::parse_duration;
use peerpod_provider_api::conformance::Promise;

/// Usage of `peerpod provider`.
pub(crate) const USAGE: &str =
    "usage: peerpod provider check CONFIG [--yes] [--crowd N] [--only WORDS] [--volume ID] [--probe PROGRAM]
                              [--patience TIME] [--section.key VALUE]...
  Tests the provider of this configuration against every promise, with real VMs that are deleted again; exit code 1
  if a promise is broken.
  --yes        makes VMs also where they may cost money
  --crowd N    VMs at once (50)
  --only WORDS only the promises with these words in their sentence
  --volume ID  an unattached disk, to test volumes with
  --probe PROGRAM
               an independent check: `PROGRAM user-data ID` prints the user-data that this VM received,
               `PROGRAM machines` the number of VMs of this check; it fails where it cannot
  --patience TIME
               longest time for one promise (2m)";

/// The parsed arguments.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Words {
    pub(crate) config: PathBuf,
    pub(crate) yes: bool,
    pub(crate) crowd: u32,
    pub(crate) only: Option<String>,
    pub(crate) volume: Option<String>,
    pub(crate) probe: Option<PathBuf>,
    pub(crate) patience: Duration,
    /// `--section.key VALUE`, unchanged.
    pub(crate) settings: Vec<String>,
}

impl Words {
    /// Parses the arguments; `None` means that help was requested.
    pub(crate) fn read(args: &[String]) -> anyhow::Result<Option<Words>> {
        let Some((action, rest)) = args.split_first() else { bail!("{USAGE}") };
        match action.as_str() {
            "check" => {}
            "help" | "--help" | "-h" => return Ok(None),
            other => bail!("`{other}` is not a subcommand of `peerpod provider`\n{USAGE}"),
        }
        let mut words = Words { crowd: 50, patience: Duration::from_secs(120), ..Words::default() };
        let mut rest = rest.iter();
        while let Some(word) = rest.next() {
            let (name, given) = match word.split_once('=') {
                Some((name, value)) if name.starts_with("--") => (name, Some(value.to_owned())),
                _ => (word.as_str(), None),
            };
            let mut value = || {
                given
                    .clone()
                    .or_else(|| rest.next().cloned())
                    .with_context(|| format!("{name} needs a value\n{USAGE}"))
            };
            match name {
                "--yes" => words.yes = true,
                "--crowd" => {
                    let number = value()?.parse().ok().filter(|number| (1..=1000).contains(number));
                    words.crowd =
                        number.with_context(|| format!("--crowd needs a number from 1 to 1000\n{USAGE}"))?;
                }
                "--only" => words.only = Some(value()?.replace('_', " ")),
                "--volume" => words.volume = Some(value()?),
                "--probe" => words.probe = Some(PathBuf::from(value()?)),
                "--patience" => {
                    words.patience =
                        parse_duration(&value()?).map_err(|bad| anyhow::anyhow!("--patience: {bad}"))?
                }
                "--help" | "-h" => return Ok(None),
                name if name.starts_with("--") && name.contains('.') => {
                    let value = value()?;
                    words.settings.extend([name.to_owned(), value]);
                }
                name if name.starts_with('-') => bail!("unknown flag `{name}`\n{USAGE}"),
                _ if words.config.as_os_str().is_empty() => words.config = PathBuf::from(word),
                _ => bail!("unexpected argument `{word}`\n{USAGE}"),
            }
        }
        if words.config.as_os_str().is_empty() {
            bail!("CONFIG is missing\n{USAGE}");
        }
        Ok(Some(words))
    }

    /// Whether this promise is to be tested.
    pub(crate) fn wants(&self, promise: &Promise) -> bool {
        self.only.as_ref().is_none_or(|only| promise.words().contains(only))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(words: &[&str]) -> anyhow::Result<Option<Words>> {
        Words::read(&words.iter().map(ToString::to_string).collect::<Vec<_>>())
    }

    #[test]
    fn arguments_are_read_in_any_order_and_settings_reach_the_configuration() {
        let words =
            read(&["check", "--crowd=5", "f.yaml", "--yes", "--provider.kind", "fake", "--only", "a_second"]);
        let words = words.unwrap().unwrap();
        assert_eq!((words.config.to_str(), words.yes, words.crowd), (Some("f.yaml"), true, 5));
        assert_eq!(words.settings, ["--provider.kind", "fake"]);
        let wanted = |name| words.wants(peerpod_provider_api::conformance::promise(name));
        assert!(wanted("a_second_delete_is_fine") && !wanted("only_our_vms_are_listed"));
    }

    #[test]
    fn invalid_arguments_get_the_usage() {
        for wrong in [
            &[][..],
            &["chekc"],
            &["check"],
            &["check", "a", "b"],
            &["check", "a", "--crowd"],
            &["check", "a", "--crowd", "0"],
            &["check", "a", "--loud"],
            &["check", "a", "--provider.kind"],
        ] {
            let text = read(wrong).unwrap_err().to_string();
            assert!(text.contains("usage: peerpod provider check"), "{wrong:?}: {text}");
        }
        assert_eq!(read(&["check", "--help"]).unwrap(), None);
    }
}
