//! The command line for people: `peerpod config` checks the configuration that the node's programs share, and
//! `peerpod provider check` checks a provider against its promises.

mod config;
mod convert;
mod provider;

use std::process::ExitCode;

const USAGE: &str = "usage: peerpod COMMAND
  config  checks or prints the configuration: check, print, schema; converts that of a cloud-api-adaptor: convert-caa
  provider check CONFIG  tests a provider against every promise of the interface, with real VMs";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let outcome = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["config", ..] => config::run(&arguments[1..]),
        ["provider", ..] => provider::run(&arguments[1..]),
        ["help" | "--help" | "-h"] => {
            println!("{USAGE}");
            return ExitCode::SUCCESS;
        }
        ["--version" | "-V"] => {
            println!("peerpod {}", env!("CARGO_PKG_VERSION"));
            return ExitCode::SUCCESS;
        }
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    outcome.unwrap_or_else(|error| {
        eprintln!("peerpod: {}", peerpod_base::chain::chain(error.as_ref()));
        ExitCode::FAILURE
    })
}

#[cfg(test)]
mod tests {
    use peerpod_test_reference as reference;

    use super::*;

    #[test]
    fn documented_help_is_up_to_date() {
        let commands = [
            ("peerpod", USAGE),
            ("peerpod config", config::USAGE),
            ("peerpod config convert-caa", convert::USAGE),
            ("peerpod provider", provider::USAGE),
        ];
        let text = commands.map(|(command, usage)| reference::help(command, usage)).join("\n");
        reference::section("cli.md", "peerpod", &text).unwrap();
    }
}
