//! Makes foreign text safe to show: without control characters, and cut where a secret may begin. Pure.

/// Parts of names that mark the text after '=' or ':' as a secret; see [`plain_name`].
const SECRETS: [&str; 12] = [
    "passw",
    "secret",
    "token",
    "credential",
    "authorization",
    "apikey",
    "privatekey",
    "accesskey",
    "ticket",
    "bearer",
    "userdata",
    "signature",
];
/// Ends of words in such names. Elsewhere in a word they are common, as in `author` and `signal`.
const ENDS: [&str; 3] = ["auth", "auths", "sig"];

/// Removes control characters and the user of URLs from a line, and cuts it where a secret may begin.
pub fn line(text: &str) -> String {
    let plain: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    let plain = without_users(&plain);
    let cut = [after_sign(&plain), after_flag(&plain)].into_iter().flatten().min();
    match cut {
        Some(at) => format!("{}…", plain.get(..at).unwrap_or_default()),
        None => plain,
    }
}

/// Whether a key's value may be a secret, by the key's name.
pub fn is_secret_name(name: &str) -> bool {
    let plain = plain_name(name);
    let lower = name.to_ascii_lowercase();
    let mut words = lower.split(|c: char| !c.is_ascii_alphanumeric());
    SECRETS.iter().any(|secret| plain.contains(secret))
        || words.any(|word| ENDS.iter().any(|end| word.ends_with(end)))
}

/// Returns a name in lower case without '-', '_' and '.'.
pub fn plain_name(name: &str) -> String {
    name.to_ascii_lowercase().replace(['-', '_', '.'], "")
}

/// Replaces the user and password of each URL.
fn without_users(line: &str) -> String {
    let mut out = String::with_capacity(line.len());
    let mut rest = line;
    while let Some((before, after)) = rest.split_once("://") {
        out.push_str(before);
        out.push_str("://");
        let end = after.find(|c: char| c.is_whitespace() || "/\"'".contains(c)).unwrap_or(after.len());
        let user = after.get(..end).and_then(|host| host.rfind('@'));
        rest = user.and_then(|at| after.get(at..)).unwrap_or(after);
        if user.is_some() {
            out.push('…');
        }
    }
    out.push_str(rest);
    out
}

/// Returns the position where a secret may begin: after a secret's name and its '=' or ':'.
fn after_sign(line: &str) -> Option<usize> {
    line.match_indices(['=', ':']).find_map(|(at, _)| {
        let name = line.get(..at)?.trim_end().rsplit(char::is_whitespace).next()?;
        is_secret_name(name).then_some(at + 1)
    })
}

/// Returns the position where a secret may begin: after an option with a secret's name, or after `Bearer`.
fn after_flag(line: &str) -> Option<usize> {
    let is_between = |c: char| c.is_whitespace() || "\"'`,[](){}".contains(c);
    let mut from = 0;
    for word in line.split(is_between) {
        let end = from + word.len();
        let is_flag = word.starts_with('-') && is_secret_name(word) || word.eq_ignore_ascii_case("bearer");
        if is_flag && !word.contains('=') && end < line.len() {
            return Some(end);
        }
        from = end + line.get(end..)?.chars().next().map_or(0, char::len_utf8);
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
        assert_eq!(line("password = hunter2"), "password =…");
        assert_eq!(line("run --password hunter2"), "run --password…");
        assert_eq!(line(r#"["--token","hunter2"]"#), r#"["--token…"#);
        assert_eq!(line("got Bearer hunter2"), "got Bearer…");
        for name in
            ["ticket", "user-data", "user_data", "auth", "registryAuth", "sig", "x?a=b&sig", "api.key"]
        {
            assert_eq!(line(&format!("{name}=hunter2")), format!("{name}=…"));
        }
        assert_eq!(line("author: x, signal: 9"), "author: x, signal: 9");
        assert_eq!(line("get https://u:hunter2@h/p http://x/y"), "get https://…@h/p http://x/y");
        assert_eq!(line("a\u{1b}[0mb: c"), "a [0mb: c");
    }
}
