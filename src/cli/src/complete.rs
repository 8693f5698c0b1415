//! Completes the words of `kubectl peerpod`. kubectl runs `kubectl_complete-peerpod WORD...` for it. Pure.

use clap::{Arg, Command};

/// Name of the program where kubectl asks it for completions.
pub(crate) const NAME: &str = "kubectl_complete-peerpod";

/// Last line of the completions: the shell completes names of files where there is nothing else.
const DIRECTIVE: &str = ":0\n";

/// Returns the completions of the last word: subcommands, or options if it begins with a dash. Each is a line with its
/// meaning behind a tab.
pub(crate) fn complete(mut command: Command, words: &[String]) -> String {
    command.build();
    let Some((last, before)) = words.split_last() else { return DIRECTIVE.to_owned() };
    // Options and values name no subcommand.
    let command =
        before.iter().fold(&command, |command, word| command.find_subcommand(word).unwrap_or(command));
    let option = |arg: &Arg| Some((format!("--{}", arg.get_long()?), arg.get_help().cloned()));
    let found: Vec<_> = match last.starts_with('-') {
        true => command.get_arguments().filter_map(option).collect(),
        false => command
            .get_subcommands()
            .map(|sub| (sub.get_name().to_owned(), sub.get_about().cloned()))
            .collect(),
    };
    let lines =
        found.into_iter().filter(|(name, _)| name.starts_with(last.as_str())).map(|(name, meaning)| {
            let meaning = meaning.map(|meaning| meaning.to_string()).unwrap_or_default();
            format!("{name}\t{}\n", meaning.lines().next().unwrap_or_default())
        });
    lines.chain([DIRECTIVE.to_owned()]).collect()
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::Cli;

    #[test]
    fn the_last_word_is_completed() {
        let completed = |words: &[&str]| {
            let words: Vec<String> = words.iter().map(ToString::to_string).collect();
            let text = complete(Cli::command(), &words);
            text.lines().map(|line| line.split('\t').next().unwrap().to_owned()).collect::<Vec<_>>()
        };
        assert_eq!(completed(&["st"]), ["status", ":0"]);
        assert_eq!(completed(&["config", "conv"]), ["convert-caa", ":0"]);
        assert_eq!(completed(&["list", "--out"]), ["--output", ":0"]);
        assert!(completed(&[""]).len() > 15);
        assert_eq!(completed(&[]), [":0"]);
        assert!(complete(Cli::command(), &["drain".to_owned()]).starts_with("drain\tCordons a node"));
    }
}
