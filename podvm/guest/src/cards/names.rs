//! `/etc/resolv.conf`, from what all cards were told. Written only when somebody told us something.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    fs, io,
    net::IpAddr,
    path::{Path, PathBuf},
};

use parking_lot::Mutex;

/// The C library takes no more.
const MOST_SERVERS: usize = 3;
const MOST_SEARCH: usize = 6;

/// Servers, and domains to search.
type Told = (Vec<IpAddr>, Vec<String>);

/// Who said what: by card and family, the first card counts first.
pub(crate) struct Names {
    file: PathBuf,
    told: Mutex<BTreeMap<(u32, bool), Told>>,
}

impl Names {
    pub(crate) fn new(file: &Path) -> Names {
        Names { file: file.to_owned(), told: Mutex::default() }
    }

    /// What a card was told now; nothing is no reason to forget what others were.
    pub(crate) fn tell(&self, rank: u32, v6: bool, servers: &[IpAddr], search: &[String]) {
        let mut told = self.told.lock();
        let now = (servers.to_vec(), search.to_vec());
        if servers.is_empty() || told.get(&(rank, v6)) == Some(&now) {
            return;
        }
        told.insert((rank, v6), now);
        if let Err(error) = write(&self.file, &text(&told)) {
            tracing::warn!(file = %self.file.display(), %error, "cannot write the name servers down");
        }
    }
}

fn text(told: &BTreeMap<(u32, bool), Told>) -> String {
    let mut text = String::new();
    let (mut servers, mut search): (Vec<&IpAddr>, Vec<&str>) = (Vec::new(), Vec::new());
    for (own_servers, own_search) in told.values() {
        servers.extend(own_servers.iter().filter(|server| !servers.contains(server)).collect::<Vec<_>>());
        search.extend(own_search.iter().map(String::as_str).filter(|name| is_name(name)));
    }
    for server in servers.iter().take(MOST_SERVERS) {
        // To a String, which cannot fail.
        let _never = writeln!(text, "nameserver {server}");
    }
    search.dedup();
    search.truncate(MOST_SEARCH);
    if !search.is_empty() {
        let _never = writeln!(text, "search {}", search.join(" "));
    }
    text
}

/// A server must not write a line of its own into the file.
fn is_name(name: &str) -> bool {
    let is_fit = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_');
    !name.is_empty() && name.len() <= 253 && name.bytes().all(is_fit)
}

fn write(file: &Path, text: &str) -> io::Result<()> {
    let new = file.with_extension("new");
    fs::write(&new, text)?;
    fs::rename(new, file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::testing::TempDir;

    #[test]
    fn the_first_cards_servers_come_first_and_nobody_writes_lines_of_his_own() {
        let dir = TempDir::new();
        let file = dir.path().join("resolv.conf");
        let names = Names::new(&file);
        let servers = |all: &[&str]| all.iter().map(|one| one.parse().unwrap()).collect::<Vec<IpAddr>>();
        names.tell(1, false, &servers(&["10.1.0.2", "10.1.0.3"]), &["b.example".into()]);
        names.tell(0, true, &servers(&["fd00::2"]), &["evil\nnameserver 6.6.6.6".into(), "a.example".into()]);
        names.tell(0, false, &[], &[]);
        let text = fs::read_to_string(&file).unwrap();
        assert_eq!(
            text,
            "nameserver fd00::2\nnameserver 10.1.0.2\nnameserver 10.1.0.3\nsearch a.example b.example\n"
        );
    }
}
