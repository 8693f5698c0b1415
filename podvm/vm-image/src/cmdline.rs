//! Reads the kernel's command line from `data/cmdline.txt`.

const LINES: &str = include_str!("../data/cmdline.txt");

/// Returns the words that every image has, and those for `which` kinds of boot (`disk`, `minimal`, `emulated`).
pub(crate) fn line(which: &[&str]) -> String {
    let mut words = Vec::new();
    for line in LINES.lines() {
        let line = line.split_once(" #").map_or(line, |(line, _)| line).trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        match line.split_once(": ") {
            None => words.push(line),
            Some((kind, word)) if which.contains(&kind) => words.push(word),
            Some(_) => {}
        }
    }
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use super::line;

    #[test]
    fn each_kind_of_boot_has_its_command_line() {
        let plain = line(&[]);
        assert!(plain.starts_with("console=ttyS0 ") && plain.contains(" panic=1 "), "{plain}");
        assert!(!plain.contains('#') && !plain.contains(':'), "{plain}");
        assert!(!plain.contains("no_timer_check") && line(&["emulated"]).ends_with(" no_timer_check"));
        assert!(line(&["disk"]).contains("net.ifnames=0"));
        assert!(line(&["disk"]).contains(" lockdown=integrity"));
        assert!(line(&["minimal"]).contains(" peerpod.lockdown=integrity"));
    }
}
