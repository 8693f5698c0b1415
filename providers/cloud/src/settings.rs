//! Reads the settings that providers of clouds have in common, with the same words in each: `instance-type(s)`, `prices`,
//! `market`, `tags`, `root-volume-size`, `disable-cvm`, `use-public-ip`, `endpoint`, `call-timeout`. Reads configuration,
//! touches nothing else.
//!
//! Each function is called with the reader of the provider's section. The reader collects the mistakes.

use std::collections::BTreeMap;
use std::time::Duration;

use peerpod_base::config::Reader;
use peerpod_provider_api::Market;

use crate::marks::Alphabet;

/// Most instance types; an EC2 fleet takes no more.
const MAX_TYPES: usize = 100;
/// Longest wait for one answer of the API.
const CALL_TIMEOUT: Duration = Duration::from_secs(30);

/// Instance types of a cloud: the form of their names.
#[derive(Debug, Clone, Copy)]
pub struct TypeForm {
    /// Type for pods that request none, if the administrator gives none; an example in texts.
    pub default: &'static str,
    /// Whether a text has the form of a type's name.
    pub is_type: fn(&str) -> bool,
}

/// Reads `instance-type` and `instance-types`. Returns the type for pods that request none, and the types that pods may
/// get, which always contain the first.
pub fn types(section: &mut Reader, form: TypeForm) -> (String, Vec<String>) {
    let TypeForm { default: example, is_type } = form;
    let default: String =
        section.get("instance-type", example, "type of a pod's VM when the pod asks for none");
    let mut all: Vec<String> =
        section.get("instance-types", "", "types that pods may get; default: instance-type only");
    if !is_type(&default) {
        section.mistake("instance-type", format!("not an instance type; write it like {example}"));
    }
    if let Some(bad) = all.iter().find(|name| !is_type(name)) {
        let why = format!("{bad} is not an instance type; write them like {example}");
        section.mistake("instance-types", why);
    }
    // The default type need not be in the list.
    if !all.contains(&default) {
        all.insert(0, default.clone());
    }
    if all.len() > MAX_TYPES {
        section.mistake("instance-types", format!("more than {MAX_TYPES}; remove some"));
    }
    (default, all)
}

/// Price of a type, the same in all zones.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Price {
    /// Instance type.
    pub machine: String,
    /// Purchase option.
    pub market: Market,
    /// Millionths of a currency unit per hour. The administrator chooses the currency.
    pub millionths: u64,
}

/// Reads `prices` of these types. `default` describes the order without a price; `form` gives the example.
pub fn prices(section: &mut Reader, types: &[String], form: TypeForm, default: &str) -> Vec<Price> {
    let help = format!(
        "hourly prices of the types, the cheapest is taken: type=price on demand, type/spot=price; default: {default}"
    );
    let lines: Vec<String> = section.get("prices", "", &help);
    let mut prices: Vec<Price> = Vec::new();
    let mut bad = Vec::new();
    for line in &lines {
        let (name, price) = line.split_once('=').unwrap_or((line, ""));
        let (machine, market) = match name.trim().split_once('/') {
            None => (name.trim(), Some(Market::OnDemand)),
            Some((machine, market)) => (machine, (market == "spot").then_some(Market::Spot)),
        };
        match (market, millionths(price.trim())) {
            (Some(market), Some(millionths)) if types.iter().any(|one| one == machine) => {
                if prices.iter().any(|one| one.machine == machine && one.market == market) {
                    bad.push(format!("{name} is listed twice; keep one of them"));
                }
                prices.push(Price { machine: machine.to_owned(), market, millionths });
            }
            (Some(_), Some(_)) => {
                bad.push(format!("{machine} is none of instance-types; add it there, or remove its price"));
            }
            _ => {
                let example = form.default;
                bad.push(format!(
                    "`{line}` is no price; write it like {example}=0.0864 or {example}/spot=0.031"
                ));
            }
        }
    }
    for why in bad {
        section.mistake("prices", why);
    }
    prices
}

/// Parses a price into millionths: `0.0864` is 86,400. `None`: not a price.
pub fn millionths(text: &str) -> Option<u64> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let digits = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
    if whole.is_empty() || !digits(whole) || !digits(fraction) || whole.len() > 9 {
        return None;
    }
    let fraction: String = fraction.chars().chain("000000".chars()).take(6).collect();
    Some(whole.parse::<u64>().ok()? * 1_000_000 + fraction.parse::<u64>().ok()?)
}

/// Reads `market`: the purchase options of the VMs, the preferred one first.
pub fn market(section: &mut Reader) -> Vec<Market> {
    let help = "purchase option of the VMs; spot-first falls back to on-demand";
    match section.choice("market", "on-demand", &["on-demand", "spot", "spot-first"], help).as_str() {
        "spot" => vec![Market::Spot],
        "spot-first" => vec![Market::Spot, Market::OnDemand],
        _ => vec![Market::OnDemand],
    }
}

/// Reads `tags`: marks of the administrator on every resource that the cloud's alphabet accepts.
pub fn tags(section: &mut Reader, help: &str, alphabet: &Alphabet) -> BTreeMap<String, String> {
    let pairs: Vec<String> = section.get("tags", "", help);
    let (mut tags, mut bad) = (BTreeMap::new(), Vec::new());
    for pair in &pairs {
        let Some((key, value)) = pair.split_once('=').map(|(key, value)| (key.trim(), value.trim())) else {
            bad.push(format!("`{pair}` is not key=value; correct it"));
            continue;
        };
        if let Some(why) = alphabet.refusal(key, value) {
            bad.push(why);
        } else if tags.insert(key.to_owned(), value.to_owned()).is_some() {
            bad.push(format!("{key} is listed twice; keep one of them"));
        }
    }
    let Alphabet { cloud, max_marks, .. } = alphabet;
    let most = alphabet.max_users();
    if tags.len() > most {
        bad.push(format!("{} tags; {cloud} takes {max_marks} with our own, give at most {most}", tags.len()));
    }
    for why in bad {
        section.mistake("tags", why);
    }
    tags
}

/// Reads `root-volume-size`: the least size of the root disk in GiB; 0: the size of the image.
pub fn root_volume_size(section: &mut Reader, default: &str, most: u32) -> u32 {
    let size: u32 =
        section.get("root-volume-size", default, "least size of the root disk in GiB; 0: the image's size");
    if size > most {
        let why = format!("larger than the cloud makes them; write at most {most} (GiB)");
        section.mistake("root-volume-size", why);
    }
    size
}

/// Reads `disable-cvm`; returns whether VMs are confidential. `confidential` names the technology.
pub fn confidential(section: &mut Reader, confidential: &str) -> bool {
    let help = format!("make plain VMs instead of {confidential} ones");
    let plain: bool = section.get("disable-cvm", "false", &help);
    !plain
}

/// Reads `use-public-ip`: whether VMs get a public address, which the node then uses.
pub fn use_public_ip(section: &mut Reader) -> bool {
    section.get(
        "use-public-ip",
        "false",
        "give VMs a public address and use it; only where the node cannot reach them otherwise",
    )
}

/// Warning of a preflight with `secure-boot`.
pub const UNSIGNED: &str = "secure-boot is on: an image of this project is unsigned and does not start";

/// Reads `secure-boot`: whether VMs start signed code only.
pub fn secure_boot(section: &mut Reader) -> bool {
    section.get("secure-boot", "false", "start signed code only; our image is unsigned")
}

/// Reads `endpoint`: the URL of an API in place of the default one.
pub fn endpoint(section: &mut Reader, help: &str, example: &str) -> Option<String> {
    let endpoint: Option<String> = section.optional("endpoint", help);
    if endpoint.as_ref().is_some_and(|url| !url.starts_with("https://") && !url.starts_with("http://")) {
        section.mistake("endpoint", format!("not a URL; write it like {example}"));
    }
    endpoint
}

/// Whether a credential may be sent to this URL: over TLS, or to this machine (in tests).
pub fn is_secret_safe(url: &str) -> bool {
    let local = ["http://127.0.0.1:", "http://localhost:", "http://[::1]:"];
    url.starts_with("https://") || local.iter().any(|start| url.starts_with(start))
}

/// Reads the constant `call-timeout`: the longest wait for one answer of the API.
pub fn call_timeout(section: &mut Reader) -> Duration {
    section.constant("call-timeout", "CALL_TIMEOUT", CALL_TIMEOUT)
}

#[cfg(test)]
mod tests {
    use peerpod_base::config::Sources;

    use super::*;

    const FORM: TypeForm = TypeForm { default: "m6a.large", is_type: |name| name.contains('.') };
    const ALPHABET: Alphabet = Alphabet {
        cloud: "Cloud",
        max_marks: 18,
        max_name: 10,
        max_value: 10,
        name: |_| true,
        value: |_| true,
        escapes: true,
        reserved: &["aws:"],
        reserves_values: false,
        shown: Some("Name"),
    };

    #[derive(Debug)]
    struct Config {
        types: (String, Vec<String>),
        prices: Vec<Price>,
        markets: Vec<Market>,
        tags: BTreeMap<String, String>,
        root: u32,
        confidential: bool,
        endpoint: Option<String>,
    }

    fn read(flags: &[(&str, &str)]) -> Result<Config, String> {
        let flags = flags.iter().map(|(key, value)| (format!("provider.cloud.{key}"), (*value).to_owned()));
        let sources = Sources { flags: flags.collect(), ..Sources::default() };
        let mut reader = Reader::load(sources, &["provider"], &[]).unwrap();
        let config = reader.section("provider.cloud", |section| {
            let types = types(section, FORM);
            Config {
                prices: prices(section, &types.1, FORM, "none"),
                markets: market(section),
                tags: tags(section, "tags", &ALPHABET),
                root: root_volume_size(section, "30", 1024),
                confidential: confidential(section, "SEV-SNP"),
                endpoint: endpoint(section, "URL", "https://example.com"),
                types,
            }
        });
        reader.finish().map(|_| config).map_err(|mistakes| mistakes.to_string())
    }

    #[test]
    fn without_a_setting_there_is_one_type_on_demand() {
        let config = read(&[]).unwrap();
        assert_eq!(config.types, ("m6a.large".to_owned(), vec!["m6a.large".to_owned()]));
        assert_eq!((config.markets, config.root), (vec![Market::OnDemand], 30));
        assert!(config.confidential, "plain VMs are a decision");
        assert!(config.prices.is_empty() && config.tags.is_empty() && config.endpoint.is_none());
    }

    #[test]
    fn all_mistakes_are_reported_at_once_with_a_remedy() {
        let told = read(&[
            ("instance-type", "large"),
            ("instance-types", "small"),
            ("market", "free"),
            ("endpoint", "ec2"),
            ("root-volume-size", "2000"),
            ("tags", "a,Name=x,peerpod.node=y,AWS:z=1,=v,k=12345678901,b=1,b=2"),
        ])
        .unwrap_err();
        for part in [
            "not an instance type; write it like m6a.large",
            "small is not an instance type",
            "write one of on-demand, spot, spot-first",
            "not a URL; write it like https://example.com",
            "write at most 1024 (GiB)",
            "`a` is not key=value",
            "Name is taken",
            "peerpod.node is taken",
            "AWS:z is taken",
            "`=v` is not key=value",
            "`k=12345678901` is not key=value",
            "b is listed twice",
        ] {
            assert!(told.contains(part), "{part} in {told}");
        }
        let many: Vec<String> = (0..4).map(|n| format!("t{n}=v")).collect();
        let told = read(&[("tags", &many.join(","))]).unwrap_err();
        assert!(told.contains("Cloud takes 18 with our own, give at most 3"), "{told}");
        let many: Vec<String> = (0..101).map(|n| format!("t.{n}")).collect();
        assert!(read(&[("instance-types", &many.join(","))]).unwrap_err().contains("more than 100"));
    }

    #[test]
    fn a_price_is_a_decimal_number() {
        for (text, price) in [
            ("0.0864", Some(86_400)),
            ("2", Some(2_000_000)),
            ("0.00000099", Some(0)),
            ("12.3456789", Some(12_345_678)),
            ("", None),
            (".5", None),
            ("-1", None),
            ("1e3", None),
            ("9999999999", None),
        ] {
            assert_eq!(millionths(text), price, "{text}");
        }
    }

    #[test]
    fn prices_name_only_allowed_types() {
        let config = read(&[("prices", "m6a.large=0.0864, m6a.large/spot = 0.031")]).unwrap();
        assert_eq!(config.prices.iter().map(|one| one.millionths).collect::<Vec<_>>(), [86_400, 31_000]);
        let told = read(&[("prices", "m6a.large=1,m6a.large=2,c6a.large=1,m6a.large/free=1,m6a.large")]);
        let told = told.unwrap_err();
        for part in [
            "is listed twice",
            "c6a.large is none of instance-types",
            "`m6a.large/free=1` is no price",
            "`m6a.large` is no price",
        ] {
            assert!(told.contains(part), "{part} in {told}");
        }
    }

    #[test]
    fn tags_are_trimmed_pairs() {
        let config = read(&[("tags", "team=blue, cost = 7 ,x=a b=c")]).unwrap();
        let expected = [("cost", "7"), ("team", "blue"), ("x", "a b=c")];
        assert!(config.tags.iter().map(|(k, v)| (k.as_str(), v.as_str())).eq(expected), "{:?}", config.tags);
    }
}
