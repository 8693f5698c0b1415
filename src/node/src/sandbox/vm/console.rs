//! Extracts the end of a VM's console for error messages: the kernel's reason for a panic or kill, and the last lines.
//! The text comes from the VM, so it is bounded, on one line, and cut at likely secrets. Pure.

use std::fmt;

use peerpod_base::redact::line as clean;
use peerpod_link::claim::CANNOT_JOIN;

const LINES: usize = 5;
/// Maximum number of characters of these lines together.
const MOST: usize = 600;
/// Maximum number of characters of the kernel's reason.
const MOST_REASON: usize = 200;
/// Maximum number of characters of the guest's reason.
const MOST_COMPLAINT: usize = 400;
/// Kernel messages for a panic, and for a program killed for lack of memory.
const REASONS: [&str; 2] = ["Kernel panic - not syncing: ", "Out of memory: Killed process "];
/// Kernel messages that indicate too little memory.
const NO_MEMORY: [&str; 2] = ["deadlocked on memory", "Out of memory"];
/// End of a console.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Console {
    /// Kernel's message about the panic or kill.
    pub(crate) reason: Option<String>,
    /// Last reason of the guest why it cannot join the node.
    complaint: Option<String>,
    /// Last lines before that message.
    lines: String,
}

impl Console {
    pub(crate) fn read(text: &str) -> Console {
        let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
        let found = REASONS.iter().find_map(|text| {
            let at = lines.iter().position(|line| line.contains(text))?;
            Some((at, &lines[at][lines[at].find(text)?..]))
        });
        // The lines after it are only the kernel's stack trace.
        let before = &lines[..found.map_or(lines.len(), |(at, _)| at)];
        // The agent's own log is JSON, and contains whole requests.
        let last: Vec<&&str> =
            before.iter().rev().filter(|line| !line.starts_with('{')).take(LINES).collect();
        let last: Vec<String> = last.into_iter().rev().map(|line| clean(line)).collect();
        let last = last.join(" | ");
        let skip = last.chars().count().saturating_sub(MOST);
        let complaint = lines.iter().rev().find_map(|line| line.split_once(CANNOT_JOIN)).map(|(_, why)| why);
        Console {
            complaint: complaint.map(|why| clean(why).chars().take(MOST_COMPLAINT).collect()),
            reason: found.map(|(_, text)| clean(text).chars().take(MOST_REASON).collect()),
            lines: last.chars().skip(skip).collect(),
        }
    }

    /// Returns the last lines, to append to a sentence that has the reason already.
    pub(crate) fn end(&self) -> String {
        match (self.lines.as_str(), &self.reason) {
            ("", Some(_)) => String::new(),
            ("", None) => "; its console is empty".to_owned(),
            (lines, _) => format!("; its console ends with: {lines}"),
        }
    }

    pub(crate) fn lacks_memory(&self) -> bool {
        self.reason.as_ref().is_some_and(|reason| NO_MEMORY.iter().any(|text| reason.contains(text)))
    }
}

/// Formats the reason and the last lines, to append to a sentence.
impl fmt::Display for Console {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(reason) = &self.reason {
            write!(f, "; its kernel reported: {reason}")?;
        }
        if let Some(complaint) = &self.complaint {
            write!(f, "; its guest reported: {complaint}")?;
        }
        f.write_str(&self.end())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// End of the console of a machine with 96 MiB.
    const PANIC: &str = "[    1.279] Mem-Info:\r\n\
        [    1.279721] Kernel panic - not syncing: System is deadlocked on memory\r\n\
        [    1.280384]  <TASK>\r\n\
        [    1.280940]  ret_from_fork+0x22/0x30\r\n\
        [    1.280940] Rebooting in 1 seconds..\r\n";

    #[test]
    fn the_kernels_reason_is_found_before_its_stack() {
        let console = Console::read(PANIC);
        let reason = "Kernel panic - not syncing: System is deadlocked on memory";
        assert_eq!(console.reason.as_deref(), Some(reason));
        assert!(console.lacks_memory());
        let text = console.to_string();
        assert_eq!(
            text,
            format!("; its kernel reported: {reason}; its console ends with: [    1.279] Mem-Info:")
        );

        let killed =
            Console::read("[ 9.1] Out of memory: Killed process 80 (peerpod-guest) total-vm:1kB\nbye\n");
        assert!(
            killed.lacks_memory() && killed.reason.unwrap().starts_with("Out of memory: Killed process 80")
        );
        let other = Console::read("Kernel panic - not syncing: VFS: Unable to mount root fs\n");
        assert!(!other.lacks_memory());
    }

    #[test]
    fn the_guests_last_reason_comes_first() {
        let text = "ERROR peerpod_guest::log: cannot join the node: no DHCP\n\
            ERROR peerpod_guest::log: cannot join the node: it refuses\nbye\n";
        let text = Console::read(text).to_string();
        assert!(text.starts_with("; its guest reported: it refuses; its console ends with: "), "{text}");
    }

    #[test]
    fn without_a_panic_there_are_the_last_lines() {
        let console = Console::read("one\n\ntwo\n three \nfour\nfive\x1b[0m\nsix\n");
        assert_eq!(console.reason, None);
        assert_eq!(console.to_string(), "; its console ends with: two | three | four | five [0m | six");
        assert_eq!(Console::read("\n \n").to_string(), "; its console is empty");
    }

    #[test]
    fn secrets_and_the_agents_requests_are_left_out() {
        let text = "login ok\n\
            {\"msg\":\"create container\",\"env\":\"KEY=hunter2\"}\n\
            DB_PASSWORD=hunter2 more\n\
            got Authorization: Bearer hunter2\n\
            a: b access_token:hunter2\n";
        let text = Console::read(text).to_string();
        assert!(!text.contains("hunter2"), "{text}");
        assert!(text.contains("login ok") && text.contains("DB_PASSWORD=…"), "{text}");
    }

    proptest! {
        #[test]
        fn any_console_gives_one_bounded_line(text in "(?s).{0,3000}") {
            let shown = Console::read(&text).to_string();
            prop_assert!(shown.chars().count() <= MOST + MOST_REASON + MOST_COMPLAINT + 100);
            prop_assert!(!shown.chars().any(char::is_control));
        }
    }
}
