//! Locks the kernel down if the VM image leaves that to this program (`peerpod.lockdown=` on the kernel command line,
//! with the values of `lockdown=`).
//!
//! From then on root cannot change the running kernel, and modules load with the distribution's signature alone. The
//! drivers needed to reach the node are loaded before and have no signature, because the check takes longer than the
//! load. Nothing else runs in the machine until then.

use std::fs;
use std::path::Path;

const FILE: &str = "/sys/kernel/security/lockdown";
const WORD: &str = "peerpod.lockdown=";
/// Levels of the kernel, each including those before it.
const LEVELS: [&str; 3] = ["none", "integrity", "confidentiality"];

/// Locks the kernel down, if its command line asks for it and it is not done. A failure is logged and survived: the pod
/// comes first, as with a kernel that does not know `lockdown=`.
pub(super) fn raise() {
    let line = fs::read_to_string("/proc/cmdline").unwrap_or_default();
    if let Err(error) = try_raise(&line, Path::new(FILE)) {
        tracing::error!(error, "the kernel is not locked down: root in this VM can change it");
    }
}

fn try_raise(kernel_line: &str, file: &Path) -> Result<(), String> {
    let Some(wanted) = kernel_line.split_ascii_whitespace().rev().find_map(|word| word.strip_prefix(WORD))
    else {
        return Ok(());
    };
    let level = |name: &str| LEVELS.iter().position(|level| *level == name);
    let unknown = || format!("{WORD}{wanted}: the kernel knows none, integrity, confidentiality");
    let rank = level(wanted).ok_or_else(unknown)?;
    let failed = |attempt| {
        move |error| format!("{attempt} {FILE}: {error} (a kernel without CONFIG_SECURITY_LOCKDOWN_LSM?)")
    };
    let now = fs::read_to_string(file).map_err(failed("read"))?;
    if level(current(&now)) >= Some(rank) {
        return Ok(()); // the kernel refuses a repeated write
    }
    fs::write(file, wanted).map_err(failed("write"))
}

/// Returns the level in brackets, as in `none [integrity] confidentiality`.
fn current(content: &str) -> &str {
    content.split_once('[').and_then(|(_, rest)| rest.split_once(']')).map_or("", |(level, _)| level)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::testing::TempDir;

    fn after(line: &str, before: &str) -> Result<String, String> {
        let folder = TempDir::new();
        let file = folder.path().join("lockdown");
        fs::write(&file, before).unwrap();
        try_raise(line, &file)?;
        Ok(fs::read_to_string(&file).unwrap())
    }

    #[test]
    fn lockdown_follows_the_kernel_line_and_is_never_lowered() {
        let (open, closed) = ("[none] integrity confidentiality\n", "none [integrity] confidentiality\n");
        assert_eq!(after("quiet peerpod.lockdown=integrity", open).unwrap(), "integrity");
        assert_eq!(after("peerpod.lockdown=integrity", closed).unwrap(), closed);
        assert_eq!(after("peerpod.lockdown=confidentiality", closed).unwrap(), "confidentiality");
        assert_eq!(
            after("peerpod.lockdown=integrity peerpod.lockdown=none", open).unwrap(),
            open,
            "the last"
        );
        assert_eq!(after("lockdown=integrity", open).unwrap(), open, "that is the kernel's own");
        assert!(after("peerpod.lockdown=high", open).unwrap_err().contains("peerpod.lockdown=high"));
        let missing = try_raise("peerpod.lockdown=integrity", Path::new("/nonexistent/lockdown"));
        assert!(missing.unwrap_err().contains("CONFIG_SECURITY_LOCKDOWN_LSM"));
    }
}
