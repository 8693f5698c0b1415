//! Marks devices and redirects in a pod's namespace with their owner: the daemon and its sandbox. Pure.
//!
//! Several daemons may run on one machine, each with its own ledger; none may remove an object of another one. So every
//! device, every redirect and the node's table carry the owner's tag. Devices and redirects also carry the sandbox's:
//!
//! | thing | carries | since |
//! |---|---|---|
//! | device | MAC address: 3 bytes of the owner, 3 of the sandbox | the message that makes it |
//! | device | alias `peerpod:<sandbox>@<owner>` | the message after that |
//! | redirect | cookie of the action, or the program's name | the message that makes it |
//! | nftables table | its name | it is made |

use std::fmt;

use sha2::{Digest, Sha256};

use super::link::Link;

const ALIAS: &str = "peerpod:";
const COOKIE: [u8; 4] = *b"ppod";
const PROGRAM: &str = "peerpod:";

/// Identity of a daemon, distinct from every other daemon on the machine and the same after a restart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Owner([u8; 6]);

impl Owner {
    /// Returns the owner for these words: cluster, node, state directory.
    pub fn of(words: &[&str]) -> Owner {
        let mut digest = Sha256::new();
        digest.update("peerpod owner");
        for word in words {
            // Separated by a byte that occurs in no word.
            digest.update([0]);
            digest.update(word);
        }
        Owner(first(&digest.finalize()))
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(self.0))
    }
}

fn first(digest: &[u8]) -> [u8; 6] {
    digest.first_chunk().copied().unwrap_or_default()
}

/// One sandbox of one owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark<'a> {
    /// The daemon.
    pub owner: Owner,
    /// The sandbox's id.
    pub sandbox: &'a str,
}

impl Mark<'_> {
    fn sandbox_hash(&self) -> [u8; 6] {
        first(&Sha256::digest(format!("peerpod tunnel of {}", self.sandbox)))
    }

    /// Returns the MAC address of the sandbox's tunnel devices: locally administered, unicast.
    pub fn mac(&self) -> [u8; 6] {
        let ([a, b, c], [d, e, f, ..]) = (owner_part(self.owner), self.sandbox_hash());
        [a, b, c, d, e, f]
    }

    /// Returns the alias of the sandbox's devices, for people.
    pub(crate) fn alias(&self) -> String {
        format!("{ALIAS}{}@{}", self.sandbox, self.owner)
    }

    pub(crate) fn is_on(&self, link: &Link) -> bool {
        link.mac == Some(self.mac())
    }

    pub(crate) fn tag(&self) -> Tag {
        Tag { owner: self.owner, sandbox: self.sandbox_hash() }
    }
}

/// Returns the three bytes of a MAC address that identify the owner.
fn owner_part(owner: Owner) -> [u8; 3] {
    let Owner([a, b, c, ..]) = owner;
    [(a & 0xfc) | 0x02, b, c]
}

/// Returns the sandbox of a device of this owner; `Some(None)` for a device without an alias yet.
pub(crate) fn sandbox_on(owner: Owner, link: &Link) -> Option<Option<String>> {
    let mac = link.mac?;
    if mac.first_chunk() != Some(&owner_part(owner)) {
        return None;
    }
    let Some(named) = link.alias.as_deref().and_then(|alias| alias.strip_prefix(ALIAS)) else {
        return Some(None);
    };
    // The MAC holds only 22 bits of the owner; the alias holds all of them.
    let (sandbox, of) = named.rsplit_once('@')?;
    (of == owner.to_string()).then(|| Some(sandbox.to_owned()))
}

/// Returns the holder of a device, for messages.
pub(crate) fn holder(link: &Link) -> String {
    match &link.alias {
        Some(alias) => {
            let named = alias.strip_prefix(ALIAS).unwrap_or(alias);
            named.rsplit_once('@').map_or(named, |(sandbox, _)| sandbox).to_owned()
        }
        None => format!("an unnamed device {}", link.name),
    }
}

/// Tag of a redirect: its owner, and a hash of its sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Tag {
    pub(crate) owner: Owner,
    sandbox: [u8; 6],
}

impl Tag {
    /// Returns the tag as the cookie of an action, which holds 16 bytes.
    pub(crate) fn cookie(&self) -> Vec<u8> {
        [COOKIE.as_slice(), &self.owner.0, &self.sandbox].concat()
    }

    pub(crate) fn of_cookie(cookie: &[u8]) -> Option<Tag> {
        let (mark, rest) = cookie.split_first_chunk::<4>()?;
        let (owner, rest) = rest.split_first_chunk::<6>()?;
        (*mark == COOKIE).then_some(Tag { owner: Owner(*owner), sandbox: *rest.first_chunk()? })
    }

    /// Returns the tag as the name of a program that redirects to device `target`.
    pub(crate) fn program(&self, target: u32) -> String {
        format!("{PROGRAM}{}:{}:{target}", self.owner, Owner(self.sandbox))
    }

    pub(crate) fn of_program(name: &str) -> Option<(Tag, u32)> {
        let mut words = name.strip_prefix(PROGRAM)?.split(':');
        let (owner, sandbox) = (bytes(words.next()?)?, bytes(words.next()?)?);
        Some((Tag { owner: Owner(owner), sandbox }, words.next()?.parse().ok()?))
    }
}

fn bytes(digits: &str) -> Option<[u8; 6]> {
    let mut bytes = [0; 6];
    hex::decode_to_slice(digits, &mut bytes).ok().map(|()| bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(mark: Mark<'_>) -> Link {
        Link {
            index: 7,
            name: "pp-vx0".to_owned(),
            mac: Some(mark.mac()),
            alias: Some(mark.alias()),
            ..Link::default()
        }
    }

    #[test]
    fn a_mark_names_one_sandbox_and_no_other() {
        let (owner, other) = (Owner::of(&["a", "b"]), Owner::of(&["ab", ""]));
        assert_ne!(owner, other);
        let mark = Mark { owner, sandbox: "web-1" };
        assert_eq!(mark.mac()[0] & 0x03, 0x02, "locally administered, unicast");
        assert_ne!(mark.mac(), Mark { owner, sandbox: "web-2" }.mac());
        let mut device = link(mark);
        assert!(mark.is_on(&device) && !Mark { owner: other, ..mark }.is_on(&device));
        assert_eq!(sandbox_on(owner, &device), Some(Some("web-1".to_owned())));
        assert_eq!(sandbox_on(other, &device), None);
        assert_eq!(holder(&device), "web-1");
        // The owner in the alias decides where the MAC's few bits are equal by chance.
        device.alias = Some(format!("peerpod:web-1@{other}"));
        assert_eq!(sandbox_on(owner, &device), None);
        device.alias = None;
        assert_eq!(sandbox_on(owner, &device), Some(None));
    }

    #[test]
    fn the_tag_of_a_redirect_is_parsed_as_it_is_formatted() {
        let tag = Mark { owner: Owner::of(&["a"]), sandbox: "web-1" }.tag();
        assert_eq!(tag.cookie().len(), 16);
        assert_eq!(Tag::of_cookie(&tag.cookie()), Some(tag));
        assert_eq!(Tag::of_program(&tag.program(1 << 20)), Some((tag, 1 << 20)));
        for wrong in ["", "peerpod:", "peerpod:00:00:7", "cil_from_container", "peerpod:+00000000000:x:1"] {
            assert_eq!(Tag::of_program(wrong), None, "{wrong}");
        }
        assert_eq!(Tag::of_cookie(b"ppod"), None);
    }
}
