//! Extracts a guest's credentials from the secrets that kubelet sends. Only the keys of the driver's login are kept,
//! and no value appears in any text. May touch: the file that the caller names.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::{fmt, io};

use peerpod_volume::credentials::{MAX_FIELD, VERSION, fits};
use peerpod_volume::files::{read_secret, secret_json};
use peerpod_volume::{Credentials, SecretRef};
use serde::{Deserialize, Serialize};
use zeroize::{Zeroize, Zeroizing};

use crate::drivers::Login;

/// Limit of a stored file in bytes. A value that is too long for the guest is refused earlier.
const MAX_FILE: usize = 16 << 10;

/// Secrets of one call that the driver's login can need, by key in lower case.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Given(BTreeMap<String, Zeroizing<String>>);

impl fmt::Debug for Given {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

impl Given {
    /// Takes a request's secrets out of it; `None` where there are none, or the driver's shares need none.
    pub(crate) fn take(secrets: &mut HashMap<String, String>, login: Option<&Login>) -> Option<Given> {
        let any = !secrets.is_empty();
        let mut given = Given::default();
        for (key, mut value) in secrets.drain() {
            let lower = key.to_ascii_lowercase();
            // Trimmed as the drivers do: many secrets end with the line break of a file.
            let plain = value.trim().to_owned();
            value.zeroize();
            value = plain;
            let wanted = login.is_some_and(|login| login.keys().any(|one| one == lower));
            // Of two keys that differ only in case the one in lower case counts, in any order.
            if wanted && (key == lower || !given.0.contains_key(&lower)) {
                given.0.insert(lower, Zeroizing::new(value));
            } else {
                value.zeroize();
            }
        }
        login.filter(|_| any).map(|_| given)
    }

    /// Refuses values that no guest could use. An error names the key, and contains no part of the value.
    pub(crate) fn check(&self, secret: Option<&SecretRef>) -> Result<(), String> {
        for (key, value) in self.0.iter().filter(|(_, value)| !value.is_empty()) {
            fits(value).map_err(|why| format!("{}: {key:?} {why}", named(secret)))?;
        }
        Ok(())
    }

    /// Returns the credentials for mounting the share.
    pub(crate) fn login(&self, login: &Login, secret: Option<&SecretRef>) -> Result<Credentials, String> {
        self.check(secret)?;
        let find = |keys: &[&str]| {
            keys.iter().find_map(|key| self.0.get(*key)).filter(|value| !value.is_empty()).cloned()
        };
        let need = |keys: &'static [&'static str]| {
            find(keys).ok_or_else(|| {
                format!(
                    "{}: kubelet gave no {:?} of it; put it there, and name the secret as \
                     nodeStageSecretRef or nodePublishSecretRef of the PersistentVolume",
                    named(secret),
                    keys.first().copied().unwrap_or_default()
                )
            })
        };
        let (mut username, password) = (need(login.username)?, need(login.password)?);
        let mut domain = find(login.domain);
        // mount.cifs(8) accepts this form; the kernel does not.
        if domain.is_none()
            && let Some((before, user)) = username.split_once('\\')
            && !before.is_empty()
            && !user.is_empty()
        {
            let user = Zeroizing::new(user.to_owned());
            domain = Some(Zeroizing::new(before.to_owned()));
            username = user;
        }
        Ok(Credentials { version: VERSION, username, password, domain })
    }

    pub(crate) fn to_bytes(&self) -> Zeroizing<Vec<u8>> {
        secret_json(self, MAX_FILE)
    }

    /// Reads a stored file; `None` when there is no such file. An error contains no part of it.
    pub(crate) fn read_file(path: &Path) -> io::Result<Option<Given>> {
        let Some(bytes) = read_secret(path, MAX_FILE)? else { return Ok(None) };
        let read = Some(&bytes).filter(|bytes| bytes.len() <= MAX_FILE);
        read.and_then(|bytes| serde_json::from_slice(bytes).ok()).map(Some).ok_or_else(|| {
            let path = path.display();
            let text =
                format!("{path}: it has another form than this program writes; stage the volume again");
            io::Error::new(io::ErrorKind::InvalidData, text)
        })
    }
}

impl Login {
    fn keys(&self) -> impl Iterator<Item = &'static str> {
        let all: [&'static [&'static str]; 3] = [self.username, self.password, self.domain];
        all.into_iter().flatten().copied()
    }
}

/// Returns the secret's name for people.
fn named(secret: Option<&SecretRef>) -> String {
    match secret {
        Some(SecretRef { namespace, name }) => format!("secret {namespace}/{name}"),
        None => "the secret that kubelet gave".to_owned(),
    }
}

// The file fits: a driver has at most five keys, each value escaped.
const _: () = assert!(MAX_FILE > 5 * 6 * (MAX_FIELD + 64));

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drivers;

    const DRIVER: &str = "smb.csi.k8s.io";

    fn given(pairs: &[(&str, &str)]) -> Option<Given> {
        let pairs = pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        let mut secrets: HashMap<String, String> = pairs.collect();
        let given = Given::take(&mut secrets, drivers::login(DRIVER));
        assert!(secrets.is_empty());
        given
    }

    fn login(pairs: &[(&str, &str)]) -> Result<Credentials, String> {
        let secret = SecretRef { namespace: "shop".into(), name: "files".into() };
        given(pairs).unwrap().login(drivers::login(DRIVER).unwrap(), Some(&secret))
    }

    #[test]
    fn only_the_needed_attributes_of_a_share_are_taken() {
        assert!(given(&[]).is_none());
        let mut secrets = HashMap::from([("password".to_owned(), "p".to_owned())]);
        assert!(Given::take(&mut secrets, drivers::login("disk.example")).is_none() && secrets.is_empty());
        let one = given(&[("Username", "joe"), ("password", "a, b"), ("token", "hidden")]).unwrap();
        assert_eq!(format!("{one:?}"), r#"{"password", "username"}"#);
        assert!(!String::from_utf8_lossy(&one.to_bytes()).contains("hidden"));
        let found = login(&[("Username", "joe"), ("password", "a, b"), ("DOMAIN", "D")]).unwrap();
        assert_eq!((found.username.as_str(), found.password.as_str()), ("joe", "a, b"));
        assert_eq!(found.domain.as_ref().map(|domain| domain.as_str()), Some("D"));
        let found = login(&[("username", "joe\n"), ("password", " p \r\n")]).unwrap();
        assert_eq!((found.username.as_str(), found.password.as_str()), ("joe", "p"));
        let found = login(&[("username", "CORP\\joe"), ("password", "p"), ("Password", "other")]).unwrap();
        assert_eq!((found.username.as_str(), found.password.as_str()), ("joe", "p"));
        assert_eq!(found.domain.as_ref().map(|domain| domain.as_str()), Some("CORP"));
        let azure = drivers::login("file.csi.azure.com");
        let mut secrets = HashMap::from([
            ("azurestorageaccountname".to_owned(), "account".to_owned()),
            ("azurestorageaccountkey".to_owned(), "key==".to_owned()),
        ]);
        let found = Given::take(&mut secrets, azure).unwrap().login(azure.unwrap(), None).unwrap();
        assert_eq!((found.username.as_str(), found.password.as_str()), ("account", "key=="));
    }

    #[test]
    fn missing_and_unusable_keys_are_named_without_values() {
        let long = "hidden".repeat(50);
        for (pairs, key) in [
            (&[("username", "joe")][..], "\"password\""),
            (&[("password", "hidden")][..], "\"username\""),
            (&[("password", "hidden"), ("username", "")][..], "\"username\""),
            (&[("password", "hid\nden"), ("username", "joe")][..], "\"password\" has a line break"),
            (&[("password", "hid\0den"), ("username", "joe")][..], "\"password\" has a line break or NUL"),
            (&[("password", long.as_str()), ("username", "joe")][..], "\"password\" has more than 255 bytes"),
            (&[("user", "joe")][..], "\"username\""),
        ] {
            let why = login(pairs).unwrap_err();
            assert!(why.contains(key) && why.contains("secret shop/files"), "{why}");
            assert!(!why.contains("hidden"), "{why}");
        }
    }
}
