//! Reads the VM options beyond Kata's nine annotations: for all pods of a node from its configuration, for one pod from
//! Peerpod's own annotations. Kata's shims do not forward those (kata-wire, "The nine annotations"); from any other
//! caller they have the same meaning.

use std::collections::HashMap;

use peerpod_provider_api::{Arch, Confidential, CreateRequest, Market};

use super::{Error, given};

/// Processor architecture: `x86_64` (or `amd64`), `aarch64` (or `arm64`), `s390x`, `ppc64le`.
pub(crate) const ARCH: &str = "io.peerpod/arch";
/// Technology of a confidential VM: `sev`, `sev-snp`, `tdx`, `secure-execution`.
pub(crate) const CONFIDENTIAL: &str = "io.peerpod/confidential";
/// Payment model of the VM: `spot`, `on-demand`.
pub(crate) const MARKET: &str = "io.peerpod/market";
/// The cloud's zones that are allowed, separated by commas.
pub(crate) const ZONES: &str = "io.peerpod/zones";
/// Whether the VM gets a public IP address beside the private one: `true`, `false`.
pub(crate) const PUBLIC_IP: &str = "io.peerpod/public-ip";

/// More zones than any region has.
const MOST_ZONES: usize = 32;

/// The VM options; an option that was not set is `None` or empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct VmOptions {
    pub arch: Option<Arch>,
    pub confidential: Option<Confidential>,
    pub market: Option<Market>,
    pub zones: Vec<String>,
    pub public_ip: Option<bool>,
}

impl VmOptions {
    /// The name of each option in `node.vm-annotations`, and its annotation.
    pub(crate) const ALL: [(&str, &str); 5] = [
        ("arch", ARCH),
        ("confidential", CONFIDENTIAL),
        ("market", MARKET),
        ("zones", ZONES),
        ("public-ip", PUBLIC_IP),
    ];

    pub(super) fn read(annotations: &HashMap<String, String>) -> Result<VmOptions, Error> {
        fn one<T>(
            annotations: &HashMap<String, String>,
            key: &'static str,
            read: impl Fn(&str) -> Result<T, String>,
        ) -> Result<Option<T>, Error> {
            let value = Some(given(annotations, key)).filter(|value| !value.is_empty());
            value.map(|value| read(value).map_err(|why| Error::bad(key, value, why))).transpose()
        }
        Ok(VmOptions {
            arch: one(annotations, ARCH, arch)?,
            confidential: one(annotations, CONFIDENTIAL, confidential)?,
            market: one(annotations, MARKET, market)?,
            zones: one(annotations, ZONES, zones)?.unwrap_or_default(),
            public_ip: one(annotations, PUBLIC_IP, flag)?,
        })
    }

    /// Checks that a pod may set these options; `allowed` has names of [`VmOptions::ALL`].
    pub(crate) fn check(&self, allowed: &[String]) -> Result<(), String> {
        let said = [
            self.arch.is_some(),
            self.confidential.is_some(),
            self.market.is_some(),
            !self.zones.is_empty(),
            self.public_ip.is_some(),
        ];
        let is_refused = |name: &str, said| said && !allowed.iter().any(|one| one == name);
        match VmOptions::ALL.iter().zip(said).find(|((name, _), said)| is_refused(name, *said)) {
            None => Ok(()),
            Some(((name, key), _)) => Err(format!(
                "annotation {key}: this node does not let pods choose that; remove it from the pod, or add {name} to \
                 node.vm-annotations"
            )),
        }
    }

    pub(crate) fn ask(&self, request: &mut CreateRequest) {
        request.arch = self.arch;
        request.confidential = self.confidential;
        request.market = self.market;
        request.zones = self.zones.clone();
        request.public_ip = self.public_ip.unwrap_or(false);
    }
}

pub(crate) fn arch(text: &str) -> Result<Arch, String> {
    let word = match text {
        "amd64" => "x86_64",
        "arm64" => "aarch64",
        other => other,
    };
    Arch::from_word(word)
        .ok_or_else(|| "not an architecture; write x86_64, aarch64, s390x or ppc64le".to_owned())
}

pub(crate) fn confidential(text: &str) -> Result<Confidential, String> {
    Confidential::from_word(&text.replace('-', "_"))
        .ok_or_else(|| "not a technology; write sev, sev-snp, tdx or secure-execution".to_owned())
}

pub(crate) fn market(text: &str) -> Result<Market, String> {
    Market::from_word(&text.replace('-', "_"))
        .ok_or_else(|| "not a market; write spot or on-demand".to_owned())
}

pub(crate) fn zones(text: &str) -> Result<Vec<String>, String> {
    let mut zones: Vec<String> = Vec::new();
    for zone in text.split(',').map(str::trim).filter(|zone| !zone.is_empty()) {
        let fits = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
        if zone.len() > 64 || !zone.bytes().all(fits) {
            return Err("not names of zones; write them as the cloud does, separated by commas".to_owned());
        }
        if !zones.iter().any(|one| one == zone) {
            zones.push(zone.to_owned());
        }
    }
    if zones.len() > MOST_ZONES {
        return Err(format!("more than {MOST_ZONES} zones; leave it out to allow all"));
    }
    Ok(zones)
}

fn flag(text: &str) -> Result<bool, String> {
    text.parse().map_err(|_| "neither true nor false; write one of them".to_owned())
}

#[cfg(test)]
mod tests {
    use peerpod_provider_api::Capabilities;

    use super::*;

    fn read(given: &[(&str, &str)]) -> Result<VmOptions, Error> {
        VmOptions::read(&given.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect())
    }

    fn all() -> VmOptions {
        let given = [
            (ARCH, "arm64"),
            (CONFIDENTIAL, "sev-snp"),
            (MARKET, " on-demand "),
            (ZONES, "north-1a, north-1b,north-1a"),
            (PUBLIC_IP, "true"),
        ];
        read(&given).unwrap()
    }

    #[test]
    fn every_option_reaches_the_request() {
        let mut request = CreateRequest::default();
        all().ask(&mut request);
        assert_eq!(request.arch, Some(Arch::Aarch64));
        assert_eq!(request.confidential, Some(Confidential::SevSnp));
        assert_eq!(request.market, Some(Market::OnDemand));
        assert_eq!(request.zones, ["north-1a", "north-1b"]);
        assert!(request.public_ip);
        assert_eq!(read(&[(MARKET, ""), ("io.peerpod/other", "x")]).unwrap(), VmOptions::default());
    }

    #[test]
    fn an_invalid_option_is_an_error_with_accepted_values() {
        for (key, value, would_do) in [
            (ARCH, "riscv", "write x86_64"),
            (CONFIDENTIAL, "yes", "sev-snp"),
            (MARKET, "cheap", "write spot or on-demand"),
            (ZONES, "a b", "separated by commas"),
            (PUBLIC_IP, "1", "neither true nor false"),
        ] {
            let why = read(&[(key, value)]).unwrap_err().to_string();
            assert!(why.contains(key) && why.contains(value) && why.contains(would_do), "{why}");
        }
        let many: Vec<String> = (0..33).map(|n| format!("z{n}")).collect();
        assert!(read(&[(ZONES, &many.join(","))]).is_err());
    }

    #[test]
    fn a_pod_sets_only_options_that_the_node_allows() {
        let names: Vec<String> = VmOptions::ALL.iter().map(|(name, _)| (*name).to_owned()).collect();
        all().check(&names).unwrap();
        VmOptions::default().check(&[]).unwrap();
        for (name, key) in VmOptions::ALL {
            let allowed: Vec<String> = names.iter().filter(|one| *one != name).cloned().collect();
            let why = all().check(&allowed).unwrap_err();
            assert!(
                why.contains(key) && why.contains(&format!("add {name} to node.vm-annotations")),
                "{why}"
            );
        }
    }

    #[test]
    fn an_option_that_the_provider_lacks_is_named() {
        for (given, field) in [
            ((ARCH, "s390x"), "arch"),
            ((CONFIDENTIAL, "tdx"), "confidential"),
            ((MARKET, "spot"), "market"),
            ((ZONES, "a"), "zones"),
            ((PUBLIC_IP, "true"), "public_ip"),
        ] {
            let mut request = CreateRequest { name: "web-0".into(), ..CreateRequest::default() };
            read(&[given]).unwrap().ask(&mut request);
            let error = Capabilities::minimal(1).check(&request, "shelf").unwrap_err();
            assert!(
                matches!(&error, peerpod_provider_api::Error::Unsupported { field: named, .. } if named == field)
                    && error.to_string().contains("cannot be had from provider shelf"),
                "{error}"
            );
        }
    }
}
