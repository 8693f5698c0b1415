//! Makes foreign text safe to show: without control characters, and cut where a secret may begin. Pure.

/// Parts of names that mark the text after '=' or ':' as a secret.
const SECRETS: [&str; 9] = [
    "passw",
    "secret",
    "token",
    "credential",
    "authorization",
    "api-key",
    "apikey",
    "private-key",
    "access-key",
];

/// Removes control characters from a line, and cuts it where a secret may begin.
pub fn line(text: &str) -> String {
    let plain: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    match secret(&plain) {
        Some(at) => format!("{}…", plain.get(..at).unwrap_or_default()),
        None => plain,
    }
}

/// Whether a key's value may be a secret, by the key's name.
pub fn is_secret_name(name: &str) -> bool {
    let name = name.to_ascii_lowercase().replace('_', "-");
    SECRETS.iter().any(|secret| name.contains(secret))
}

/// Returns the position where a secret may begin: after a name from [`SECRETS`] and its '=' or ':'.
fn secret(line: &str) -> Option<usize> {
    let mut from = 0;
    while let Some(at) = line.get(from..)?.find(['=', ':']) {
        let end = from + at;
        let name = line.get(..end)?.rsplit(char::is_whitespace).next().unwrap_or_default();
        if is_secret_name(name) {
            return Some(end + 1);
        }
        from = end + 1;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_cut_after_the_name_of_a_secret() {
        assert_eq!(line("DB_PASSWORD=hunter2 more"), "DB_PASSWORD=…");
        assert_eq!(line("a: b AWS_SECRET_ACCESS_KEY: hunter2"), "a: b AWS_SECRET_ACCESS_KEY:…");
        assert_eq!(line("a\u{1b}[0mb: c"), "a [0mb: c");
    }
}
