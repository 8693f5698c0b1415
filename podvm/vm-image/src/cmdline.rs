//! Reads the kernel's command line from `data/cmdline.txt`.

use crate::arch::Arch;
use crate::lock::words;

const LINES: &str = include_str!("../data/cmdline.txt");

/// Returns the words that every image of an architecture has, and those for `kinds` of boot (`disk`, `minimal`,
/// `emulated`).
pub(crate) fn line(arch: Arch, kinds: &[&str]) -> String {
    words(LINES, &[&[arch.name()], kinds].concat()).join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_of_boot_has_its_command_line() {
        let line = |kinds: &[&str]| line(Arch::X86_64, kinds);
        let plain = line(&[]);
        assert!(plain.starts_with("console=ttyS0 quiet ") && plain.contains(" panic=1 "), "{plain}");
        assert!(!plain.contains('#') && !plain.contains(':'), "{plain}");
        assert!(!plain.contains("no_timer_check") && line(&["emulated"]).ends_with(" no_timer_check"));
        assert!(line(&["disk"]).contains("net.ifnames=0"));
        assert!(line(&["disk"]).contains(" lockdown=integrity"));
        assert!(line(&["minimal"]).contains(" peerpod.lockdown=integrity"));
    }

    #[test]
    fn arm_has_its_own_console_and_no_words_of_x86() {
        let line = line(Arch::Aarch64, &["disk", "emulated"]);
        assert!(line.starts_with("console=ttyS0 console=ttyAMA0 quiet "), "{line}");
        assert!(!line.contains("no_timer_check") && !line.contains("vsyscall"), "{line}");
    }
}
