//! Marks by which a VM is recognised: cluster, node, installation, key and digest. Clouds call them tags or labels and
//! accept different texts; an [`Alphabet`] describes one cloud. Pure.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::SystemTime;

use peerpod_provider_api::{CreateRequest, Error, IdempotencyKey, InstanceId, Owned, OwnedState, Owner};
use serde::{Deserialize, Serialize};

/// Prefix of the names of our marks.
pub const PREFIX: &str = "peerpod.";
/// Mark with the cluster's name.
pub const CLUSTER: &str = "peerpod.cluster";
/// Mark with the node's name.
pub const NODE: &str = "peerpod.node";
/// Mark with the id of the installation.
pub const INSTALLATION: &str = "peerpod.installation";
/// Mark with the idempotency key of the create.
pub const KEY: &str = "peerpod.key";
/// Mark with the digest of the request.
pub const DIGEST: &str = "peerpod.digest";
/// Mark with the name in the request, for people.
pub const NAME: &str = "peerpod.name";

/// Marks that the administrator may not use, because ours and a pod's labels need them.
const RESERVED: usize = 15;
/// Longest text of [`Marks::parse`], in bytes.
const MAX_TEXT: usize = 8 << 10;

/// Marks of a VM. All are optional, because another program may have made the VM.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Marks {
    /// Name of the cluster.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cluster: Option<String>,
    /// Name of the node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// Id of the installation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub installation: Option<String>,
    /// Idempotency key of the create.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<IdempotencyKey>,
    /// Digest of the request ([`CreateRequest::digest`]).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
    /// Name in the request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

impl Marks {
    /// Returns the marks of a VM that is about to be made.
    pub fn new(request: &CreateRequest, key: &IdempotencyKey, owner: &Owner) -> Marks {
        Marks {
            cluster: Some(owner.cluster_id.clone()),
            node: Some(owner.node_name.clone()),
            installation: Some(owner.installation.clone()),
            key: Some(key.clone()),
            digest: Some(request.digest()),
            name: Some(request.name.clone()),
        }
    }

    /// Whether a VM with these marks has this owner.
    pub fn are_of(&self, owner: &Owner) -> bool {
        owner.owns(self.cluster.as_deref(), self.node.as_deref(), self.installation.as_deref())
    }

    /// Returns the entry in a list of the VM with these marks.
    pub fn owned(
        &self,
        id: InstanceId,
        state: OwnedState,
        addresses: Vec<IpAddr>,
        created: Option<SystemTime>,
    ) -> Owned {
        let node = self.node.clone().filter(|node| !node.is_empty());
        Owned { id, key: self.key.clone(), name: self.name.clone(), state, addresses, created, node }
    }

    /// Returns the marks as JSON, for a cloud with a free text beside its labels.
    pub fn text(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }

    /// Reads the result of [`Marks::text`]; `None`: the text is none, or longer than 8 KiB.
    pub fn parse(text: &str) -> Option<Marks> {
        // serde would take a list of fields, too.
        if text.len() > MAX_TEXT || !text.starts_with('{') {
            return None;
        }
        serde_json::from_str(text).ok()
    }
}

/// Texts that a cloud accepts as marks.
#[derive(Debug, Clone, Copy)]
pub struct Alphabet {
    /// Name of the cloud, for errors.
    pub cloud: &'static str,
    /// Most marks of a VM.
    pub max_marks: usize,
    /// Most characters of a mark's name.
    pub max_name: usize,
    /// Most characters of a mark's value.
    pub max_value: usize,
    /// Whether a mark's name may contain the character.
    pub name: fn(char) -> bool,
    /// Whether a mark's value may contain the character.
    pub value: fn(char) -> bool,
    /// Whether other characters are escaped, like `_2e_` for `.`. Otherwise `_` replaces them.
    pub escapes: bool,
    /// Beginnings of names that the cloud reserves, in lower case.
    pub reserved: &'static [&'static str],
    /// Whether the cloud reserves them for values, too.
    pub reserves_values: bool,
    /// Mark that the cloud's console shows as the VM's name; it takes the place of [`NAME`].
    pub shown: Option<&'static str>,
}

impl Alphabet {
    /// Returns the marks of a VM: the administrator's, the request's labels, and ours, which come last, so that no
    /// label replaces them. Surplus labels are left out, because the cloud would refuse the create.
    ///
    /// # Errors
    /// [`Error::Invalid`] when a mark of ours does not fit: the VM could not be recognised.
    pub fn marks(
        &self,
        request: &CreateRequest,
        key: &IdempotencyKey,
        owner: &Owner,
        users: &BTreeMap<String, String>,
    ) -> Result<BTreeMap<String, String>, Error> {
        let ours = self.ours(request, key, owner)?;
        let mut marks = BTreeMap::new();
        for (name, value) in users.iter().chain(&request.labels) {
            let name = self.name(name);
            // Later marks of the same name win.
            if marks.len() + ours.len() < self.max_marks || marks.contains_key(&name) {
                marks.insert(name, self.fit_value(value));
            }
        }
        marks.extend(ours);
        Ok(marks)
    }

    /// Reads our marks among these.
    pub fn read(&self, marks: &BTreeMap<String, String>) -> Marks {
        let get = |name: &str| marks.get(&self.name(name)).map(|value| self.unescape(value));
        Marks {
            cluster: get(CLUSTER),
            node: get(NODE),
            installation: get(INSTALLATION),
            key: get(KEY).and_then(|key| IdempotencyKey::parse(key).ok()),
            digest: get(DIGEST),
            name: get(self.shown.unwrap_or(NAME)),
        }
    }

    /// Returns a mark's name as the cloud accepts it.
    pub fn name(&self, name: &str) -> String {
        self.unreserved(self.fit(name, self.name, self.max_name))
    }

    /// Returns a value of our marks as the cloud accepts it, for a filter.
    pub fn value(&self, value: &str) -> String {
        self.unreserved_value(self.exact(value))
    }

    /// Returns why the administrator may not use a mark of this name and value, if so.
    pub fn refusal(&self, name: &str, value: &str) -> Option<String> {
        let is_reserved = self.reserved.iter().any(|prefix| name.to_ascii_lowercase().starts_with(prefix));
        // Names of tags have no case in some clouds.
        let is_ours = name.to_ascii_lowercase().starts_with(PREFIX);
        if is_reserved || is_ours || Some(name) == self.shown {
            return Some(format!("{name} is taken (by {} or by us); choose another name", self.cloud));
        }
        let Alphabet { max_name, max_value, .. } = self;
        let fits = !name.is_empty() && name.len() <= *max_name && value.len() <= *max_value;
        (!fits).then(|| {
            format!(
                "`{name}={value}` is not key=value with at most {max_name} and {max_value} characters; correct it"
            )
        })
    }

    /// Returns the most marks that the administrator may set.
    pub(crate) fn max_users(&self) -> usize {
        self.max_marks.saturating_sub(RESERVED)
    }

    fn ours(
        &self,
        request: &CreateRequest,
        key: &IdempotencyKey,
        owner: &Owner,
    ) -> Result<BTreeMap<String, String>, Error> {
        let digest = request.digest();
        let exact = [
            (CLUSTER, owner.cluster_id.as_str()),
            (NODE, &owner.node_name),
            (INSTALLATION, &owner.installation),
            (KEY, key.as_str()),
            (DIGEST, &digest),
        ];
        let mut ours = BTreeMap::new();
        for (name, text) in exact {
            let value = self.value(text);
            if self.unescape(&value) != text {
                return Err(Error::invalid(format!(
                    "create of {}: {name} `{text}` has characters or a beginning that {} does not accept; rename the \
                     cluster or the node",
                    request.name, self.cloud
                )));
            }
            if value.chars().count() > self.max_value {
                return Err(Error::invalid(format!(
                    "create of {}: {name} has more than the {} characters that {} accepts; shorten the name of \
                     the cluster or of the node",
                    request.name, self.max_value, self.cloud
                )));
            }
            ours.insert(self.name(name), value);
        }
        ours.insert(self.name(self.shown.unwrap_or(NAME)), self.fit_value(&request.name));
        Ok(ours)
    }

    /// Returns the text in the alphabet, of limited length; an escape is whole or left out.
    fn fit(&self, text: &str, allowed: fn(char) -> bool, most: usize) -> String {
        let (mut fit, mut length) = (String::new(), 0);
        for character in text.chars() {
            let piece = match allowed(character) {
                true => character.to_string(),
                false if self.escapes => escape(character),
                false => "_".to_owned(),
            };
            length += piece.chars().count();
            if length > most {
                break;
            }
            fit.push_str(&piece);
        }
        fit
    }

    /// Returns a value of ours in the alphabet, of any length. With escapes, [`Alphabet::unescape`] restores it.
    fn exact(&self, text: &str) -> String {
        let plain = |c: char| (self.value)(c) && !(self.escapes && c == '_');
        let piece = |c: char| match plain(c) {
            true => c.to_string(),
            false if self.escapes => escape(c),
            false => "_".to_owned(),
        };
        text.chars().map(piece).collect()
    }

    fn unescape(&self, text: &str) -> String {
        if !self.escapes {
            return text.to_owned();
        }
        let (mut whole, mut rest) = (String::new(), text);
        while let Some((before, after)) = rest.split_once('_') {
            whole.push_str(before);
            let escaped = after.split_once('_').and_then(|(hex, after)| {
                Some((u32::from_str_radix(hex, 16).ok().and_then(char::from_u32)?, after))
            });
            match escaped {
                Some((character, after)) => {
                    whole.push(character);
                    rest = after;
                }
                None => {
                    whole.push('_');
                    rest = after;
                }
            }
        }
        whole.push_str(rest);
        whole
    }

    fn fit_value(&self, value: &str) -> String {
        self.unreserved_value(self.fit(value, self.value, self.max_value))
    }

    fn unreserved_value(&self, value: String) -> String {
        if self.reserves_values { self.unreserved(value) } else { value }
    }

    /// Changes the beginning of a text that the cloud reserves: `aws:x` becomes `aws_x`.
    fn unreserved(&self, mut text: String) -> String {
        for prefix in self.reserved {
            let last = prefix.len().saturating_sub(1);
            if text.get(..prefix.len()).is_some_and(|start| start.eq_ignore_ascii_case(prefix)) {
                text.replace_range(last..prefix.len(), "_");
            }
        }
        text
    }
}

fn escape(character: char) -> String {
    format!("_{:x}_", u32::from(character))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Alphabet like AWS's: wide, and other characters are replaced.
    const WIDE: Alphabet = Alphabet {
        cloud: "Wide",
        max_marks: 50,
        max_name: 128,
        max_value: 256,
        name: |c| c.is_alphanumeric() || " +-=._:/@".contains(c),
        value: |c| c.is_alphanumeric() || " +-=._:/@".contains(c),
        escapes: false,
        reserved: &["aws:"],
        reserves_values: true,
        shown: Some("Name"),
    };
    /// Alphabet like that of Google's labels.
    const NARROW: Alphabet = Alphabet {
        cloud: "Narrow",
        max_marks: 64,
        max_name: 63,
        max_value: 63,
        name: |c| c.is_ascii_lowercase() || c.is_ascii_digit() || "_-".contains(c),
        value: |c| c.is_ascii_lowercase() || c.is_ascii_digit() || "_-".contains(c),
        escapes: true,
        reserved: &["goog", "peerpod-"],
        reserves_values: false,
        shown: None,
    };

    fn owner(node: &str) -> Owner {
        Owner { cluster_id: "c".into(), node_name: node.into(), installation: "i".into() }
    }

    fn short_key() -> IdempotencyKey {
        IdempotencyKey::parse("k-1").unwrap()
    }

    #[test]
    fn users_cannot_override_our_marks_and_all_marks_fit() {
        let mut labels: BTreeMap<String, String> =
            (0..60).map(|n| (format!("l{n}"), "v".to_owned())).collect();
        labels.insert(CLUSTER.to_owned(), "another cluster".to_owned());
        labels.insert("aws:odd".to_owned(), "a\nb<".repeat(200));
        let request = CreateRequest { name: "web-0".into(), labels, ..CreateRequest::default() };
        let (owner, key) = (owner("n"), IdempotencyKey::derive("c", "s", 0));
        let users = BTreeMap::from([("team".to_owned(), "blue".to_owned())]);
        let tags = WIDE.marks(&request, &key, &owner, &users).unwrap();
        assert!(tags.len() <= WIDE.max_marks, "{}", tags.len());
        assert_eq!((tags[CLUSTER].as_str(), tags["team"].as_str()), ("c", "blue"));
        assert_eq!((tags[KEY].as_str(), tags["Name"].as_str()), (key.as_str(), "web-0"));
        let marks = WIDE.read(&tags);
        assert_eq!(marks, Marks::new(&request, &key, &owner));
        assert!(marks.are_of(&owner));
        assert!(!marks.are_of(&Owner { installation: "another".into(), ..owner }));
        let odd = &tags["aws_odd"];
        assert!(odd.chars().count() == 256 && odd.starts_with("a_b_"), "{odd}");
    }

    #[test]
    fn our_marks_are_read_back_from_a_narrow_alphabet() {
        for node in ["Node-1.example", "_", "_2e_", "a__b", "ä.B_2e", "aws:n", ""] {
            let request = CreateRequest { name: "web-0".into(), ..CreateRequest::default() };
            let short = CreateRequest { name: "web-0".into(), ..CreateRequest::default() };
            let narrow = Alphabet { max_value: 100, ..NARROW };
            let marks = narrow.marks(&short, &short_key(), &owner(node), &BTreeMap::new()).unwrap();
            for (name, value) in &marks {
                assert!(name.chars().all(NARROW.name) && value.chars().all(NARROW.value), "{name}={value}");
            }
            assert_eq!(narrow.read(&marks), Marks::new(&request, &short_key(), &owner(node)), "{node}");
        }
    }

    #[test]
    fn a_mark_of_ours_that_does_not_fit_is_an_error_and_a_label_is_cut() {
        let labels = BTreeMap::from([("a.b".to_owned(), "x.".repeat(60))]);
        let request = CreateRequest { name: "web-0".into(), labels, ..CreateRequest::default() };
        let error = NARROW.marks(&request, &short_key(), &owner("n"), &BTreeMap::new()).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("peerpod.digest has more than the 63 characters"), "{text}");
        let wider = Alphabet { max_value: 64, ..NARROW };
        let marks = wider.marks(&request, &short_key(), &owner("n"), &BTreeMap::new()).unwrap();
        let cut = &marks["a_2e_b"];
        assert!(cut.len() <= 64 && cut.ends_with("x_2e_x"), "{cut}");
        let long = wider.marks(&request, &short_key(), &owner(&"n".repeat(65)), &BTreeMap::new());
        assert!(long.unwrap_err().to_string().contains("peerpod.node"));
    }

    #[test]
    fn an_owner_is_recognised_whatever_its_name_begins_with_or_refused() {
        // Azure's: reserved names, and other characters are replaced.
        let replacing =
            Alphabet { reserved: &["azure", "microsoft"], reserves_values: false, shown: None, ..WIDE };
        let escaping = Alphabet { max_value: 200, ..NARROW };
        let request = CreateRequest { name: "web-0".into(), ..CreateRequest::default() };
        for alphabet in [WIDE, replacing, escaping] {
            for name in
                ["aws", "azure-prod", "Microsoft", "windows", "google", "goog", "peerpod-1", "peerpod.x"]
            {
                let owner =
                    Owner { cluster_id: name.into(), node_name: name.into(), installation: name.into() };
                let marks = alphabet.marks(&request, &short_key(), &owner, &BTreeMap::new()).unwrap();
                assert!(alphabet.read(&marks).are_of(&owner), "{name}: {marks:?}");
            }
        }
        for bad in ["aws:n", "a|b"] {
            let error = WIDE.marks(&request, &short_key(), &owner(bad), &BTreeMap::new()).unwrap_err();
            assert!(error.to_string().contains("rename the cluster or the node"), "{error}");
        }
    }

    #[test]
    fn names_of_ours_are_taken_in_any_case() {
        assert!(WIDE.refusal("PeerPod.Node", "x").is_some() && WIDE.refusal("peer", "x").is_none());
    }

    #[test]
    fn marks_survive_as_text() {
        let request = CreateRequest { name: "a\"b".into(), ..CreateRequest::default() };
        let marks = Marks::new(&request, &short_key(), &owner("Node-1.example"));
        assert_eq!(Marks::parse(&marks.text()), Some(marks));
        let foreign = Marks::parse(r#"{"owner":"someone"}"#).unwrap();
        assert!(!foreign.are_of(&owner("n")));
        for bad in ["", "made by hand", "[]", &"x".repeat(MAX_TEXT + 1)] {
            assert_eq!(Marks::parse(bad), None, "{bad}");
        }
    }
}
