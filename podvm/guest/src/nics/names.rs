//! Writes `/etc/resolv.conf` from the DNS settings of all NICs; does not touch it without any.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::{fs, io};

use parking_lot::Mutex;

/// Limit of the C library.
const MOST_SERVERS: usize = 3;
const MOST_SEARCH: usize = 6;

/// Name servers and search domains.
type Told = (Vec<IpAddr>, Vec<String>);

/// DNS settings by NIC and family; the first NIC comes first.
pub(crate) struct Names {
    file: PathBuf,
    told: Mutex<BTreeMap<(u32, bool), Told>>,
}

impl Names {
    pub(crate) fn new(file: &Path) -> Names {
        Names { file: file.to_owned(), told: Mutex::default() }
    }

    /// Records the current settings of a NIC. Empty ones do not remove earlier settings.
    pub(crate) fn tell(&self, rank: u32, v6: bool, servers: &[IpAddr], search: &[String]) {
        let mut told = self.told.lock();
        let now = (servers.to_vec(), search.to_vec());
        if servers.is_empty() || told.get(&(rank, v6)) == Some(&now) {
            return;
        }
        told.insert((rank, v6), now);
        if let Err(error) = write(&self.file, &text(&told)) {
            tracing::warn!(file = %self.file.display(), %error, "cannot write the name servers");
        }
    }
}

fn text(told: &BTreeMap<(u32, bool), Told>) -> String {
    let mut servers: Vec<IpAddr> = Vec::new();
    for server in told.values().flat_map(|(servers, _)| servers) {
        if !servers.contains(server) {
            servers.push(*server);
        }
    }
    let search = told.values().flat_map(|(_, search)| search).map(String::as_str);
    let mut search: Vec<&str> = search.filter(|name| is_name(name)).collect();
    search.dedup();
    search.truncate(MOST_SEARCH);
    let mut text: String =
        servers.iter().take(MOST_SERVERS).map(|server| format!("nameserver {server}\n")).collect();
    if !search.is_empty() {
        text += &format!("search {}\n", search.join(" "));
    }
    text
}

/// Returns whether a name is plain: a server must not write a line of its own into the file.
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
    fn servers_of_the_first_nic_come_first_and_extra_lines_cannot_be_injected() {
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
