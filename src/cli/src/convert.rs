//! `peerpod config convert-caa`: reads the ConfigMap (`peer-pods-cm`) and secret of a cloud-api-adaptor, prints a
//! configuration file, and lists the settings that it could not convert, with advice for each.
//!
//! This module has the settings common to all clouds; those of a provider are with the provider. Names and defaults:
//! cloud-api-adaptor at `fbdde756`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use peerpod_base::config::env_name;
use peerpod_provider_caa as caa;
use serde_json::{Value, json};

/// Arguments of `peerpod config convert-caa`.
#[derive(Debug, clap::Args)]
pub(crate) struct Convert {
    /// Writes the configuration to FILE, readable by its owner only
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Writes values of the Helm chart; what comes from a Secret is in provider.secret
    #[arg(long)]
    helm: bool,
    /// ConfigMaps and Secrets, as `kubectl get cm,secret -o yaml` prints them
    #[arg(value_name = "MANIFEST", required = true)]
    manifests: Vec<PathBuf>,
}

/// Largest accepted manifest, in bytes.
const MAX_MANIFEST: u64 = 4 << 20;

/// Settings by key.
type Settings = BTreeMap<String, Value>;

/// Variables of all manifests.
#[derive(Debug, Default)]
struct Variables {
    all: BTreeMap<String, String>,
    /// Names of those that a Secret has.
    secret: BTreeSet<String>,
}

/// Result of a conversion.
#[derive(Debug)]
struct Converted {
    provider: String,
    /// Settings of the provider.
    own: Settings,
    /// Keys of those that come from a Secret.
    secret: BTreeSet<String>,
    /// Settings of other sections.
    sections: BTreeMap<String, Settings>,
    lost: Vec<(String, String)>,
}

/// Runs the conversion.
pub(crate) fn run(Convert { out, helm, manifests }: Convert) -> anyhow::Result<()> {
    let mut variables = Variables::default();
    for path in &manifests {
        read(path, &mut variables).with_context(|| format!("read {}", path.display()))?;
    }
    let converted = convert(variables)?;
    let yaml = if helm { converted.values()? } else { converted.file()? };
    match &out {
        None => drop(std::io::stdout().write_all(yaml.as_bytes())),
        Some(path) => write(path, &yaml)?,
    }
    if !converted.lost.is_empty() {
        eprintln!("not converted, or changed:");
        converted.lost.iter().for_each(|(name, why)| eprintln!("  {name}: {why}"));
    }
    Ok(())
}

/// Writes the file. It contains credentials, so only its owner can read it from the first byte.
fn write(path: &Path, yaml: &str) -> anyhow::Result<()> {
    let file = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
    let mut file = file.with_context(|| format!("create {}; remove it or name another", path.display()))?;
    file.write_all(yaml.as_bytes())
        .and_then(|()| file.sync_all())
        .with_context(|| format!("write {}", path.display()))
}

/// Reads the variables of every ConfigMap and secret in a file.
fn read(path: &Path, found: &mut Variables) -> anyhow::Result<()> {
    let size = std::fs::metadata(path)?.len();
    ensure!(
        size <= MAX_MANIFEST,
        "larger than {MAX_MANIFEST} bytes; this is not a manifest of a cloud-api-adaptor"
    );
    let text = std::fs::read_to_string(path)?;
    let before = found.all.len();
    for document in serde_yaml::Deserializer::from_str(&text) {
        // The parser's own message may repeat a secret's value.
        let document: Value =
            serde::Deserialize::deserialize(document).map_err(|error| match error.location() {
                Some(place) => anyhow::anyhow!("not YAML in line {}; correct it", place.line()),
                None => anyhow::anyhow!("not YAML; correct it"),
            })?;
        take(&document, found)?;
    }
    ensure!(found.all.len() > before, "no ConfigMap and no Secret with data in it");
    Ok(())
}

fn take(document: &Value, found: &mut Variables) -> anyhow::Result<()> {
    if let Some(items) = document["items"].as_array() {
        return items.iter().try_for_each(|item| take(item, found));
    }
    let is_secret = match document["kind"].as_str() {
        Some("ConfigMap") => false,
        Some("Secret") => true,
        _ => return Ok(()),
    };
    let texts = |part: &'static str| {
        let entries = document[part].as_object().into_iter().flatten();
        entries.map(move |(name, value)| {
            let text = match value {
                Value::String(text) => Some(text.clone()),
                Value::Bool(_) | Value::Number(_) => Some(value.to_string()),
                Value::Null => Some(String::new()),
                _ => None,
            };
            text.map(|text| (name.clone(), text)).with_context(|| format!("{part}.{name} is not text"))
        })
    };
    for part in ["data", "stringData"] {
        for entry in texts(part) {
            let (name, mut text) = entry?;
            if is_secret {
                found.secret.insert(name.clone());
                if part == "data" {
                    let raw = STANDARD.decode(text.split_whitespace().collect::<String>()).ok();
                    let raw = raw.and_then(|raw| String::from_utf8(raw).ok());
                    text = raw.with_context(|| format!("data.{name} of a Secret is not base64 of a text"))?;
                }
            }
            found.all.insert(name, text);
        }
    }
    Ok(())
}

/// Converts a value; `None` if that is impossible.
type Carry = fn(&str) -> Option<Value>;

/// Variable, key, and conversion of its value.
const COMMON: &[(&str, &str, Carry)] = &[
    ("VXLAN_PORT", "tunnel.port", number),
    ("PEERPODS_LIMIT_PER_NODE", "cluster.capacity", number),
    ("PROXY_TIMEOUT", "node.boot-timeout", duration),
    ("EXTERNAL_NETWORK_VIA_PODVM", "tunnel.external", way),
    ("POD_SUBNET_CIDRS", "tunnel.cluster-cidrs", list),
    ("REMOTE_HYPERVISOR_ENDPOINT", "paths.run-dir", folder),
];

/// Variables without an equivalent, and the reason or advice.
const ELSEWHERE: &[(&str, &str)] = &[
    ("FORWARDER_PORT", "the guest dials the node: open node port `relay.listen` to pod VMs instead"),
    ("TUNNEL_TYPE", "the tunnel is a VXLAN, or encrypted with tunnel.kind: wireguard"),
    ("CACERT_FILE", "each VM makes a key of its own; there are no certificates to distribute"),
    ("CERT_FILE", "each VM makes a key of its own; there are no certificates to distribute"),
    ("CERT_KEY", "each VM makes a key of its own; there are no certificates to distribute"),
    ("TLS_SKIP_VERIFY", "the check cannot be switched off"),
    ("TLS_MIN_VERSION", "the version is always TLS 1.3"),
    ("TLS_CIPHER_SUITES", "the cipher suites are always those of TLS 1.3"),
    ("INITDATA", "give it to each pod as the annotation io.katacontainers.config.hypervisor.cc_init_data"),
    ("CLOUD_CONFIG_VERIFY", "the configuration is always checked"),
    ("ENABLE_SCRATCH_SPACE", "make the root disk larger instead"),
    ("PAUSE_IMAGE", "no program used it"),
    ("PODS_DIR", "the folder is always `pods` in paths.run-dir"),
];

fn number(text: &str) -> Option<Value> {
    text.parse::<u64>().ok().map(Value::from)
}

fn duration(text: &str) -> Option<Value> {
    peerpod_base::config::parse_duration(text).ok()?;
    Some(text.into())
}

fn way(text: &str) -> Option<Value> {
    let through_vm = text == "1" || text.eq_ignore_ascii_case("true");
    Some(if through_vm { "vm" } else { "tunnel" }.into())
}

fn list(text: &str) -> Option<Value> {
    let parts = text.split([',', ' ']).map(str::trim).filter(|part| !part.is_empty());
    Some(parts.collect())
}

fn folder(text: &str) -> Option<Value> {
    text.strip_suffix("/hypervisor.sock").map(Value::from)
}

fn convert(variables: Variables) -> anyhow::Result<Converted> {
    let Variables { all: mut variables, secret } = variables;
    variables.values_mut().for_each(|value| *value = value.trim().to_owned());
    let provider = variables.remove("CLOUD_PROVIDER").filter(|name| !name.is_empty());
    let provider =
        provider.context("no CLOUD_PROVIDER among the variables; add the ConfigMap that has it")?;
    let own = caa::convert(&provider, &variables).with_context(|| {
        format!(
            "the settings of provider {provider} cannot be converted; supported are those of {}",
            caa::known().join(", ")
        )
    })?;
    let mut public = variables.clone();
    public.retain(|name, _| !secret.contains(name));
    let public = caa::convert(&provider, &public).map(|public| public.settings).unwrap_or_default();
    let mut lost = own.lost;
    let mut sections: BTreeMap<String, Settings> = BTreeMap::new();
    for (name, key, carry) in COMMON {
        let Some(text) = variables.get(*name).filter(|text| !text.is_empty()) else { continue };
        match carry(text) {
            Some(value) => {
                let (section, key) = key.split_once('.').unwrap_or(("node", key));
                sections.entry(section.to_owned()).or_default().insert(key.to_owned(), value);
            }
            None => {
                lost.push(((*name).to_owned(), format!("`{text}` cannot be converted; set {key} yourself")))
            }
        }
    }
    for (name, text) in &variables {
        let is_known = own.known.contains(name) || COMMON.iter().any(|(known, ..)| known == name);
        if text.is_empty() || is_known {
            continue;
        }
        let why = ELSEWHERE.iter().find(|(known, _)| known == name).map(|(_, why)| *why);
        lost.push((name.clone(), why.unwrap_or("unknown variable; check whether it is needed").to_owned()));
    }
    lost.sort();
    // A setting with another value without the Secrets comes from them.
    let secret =
        own.settings.keys().filter(|key| own.settings.get(*key) != public.get(*key)).cloned().collect();
    Ok(Converted { provider, own: own.settings, secret, sections, lost })
}

impl Converted {
    /// Returns the configuration file.
    fn file(&self) -> anyhow::Result<String> {
        let Converted { provider, own, sections, .. } = self;
        let mut yaml = String::from(
            "# Made by `peerpod config convert-caa`; `peerpod config check` lists its mistakes.\n",
        );
        let mut provider_section = String::new();
        lines(&mut provider_section, 4, own)?;
        writeln!(yaml, "provider:\n  kind: {provider}\n  {provider}:\n{provider_section}")?;
        for (section, settings) in sections {
            writeln!(yaml, "{section}:")?;
            lines(&mut yaml, 2, settings)?;
        }
        Ok(yaml)
    }

    /// Returns values of the chart: the Secret's settings as its variables, and the folder of the sockets where the
    /// chart has it.
    fn values(&self) -> anyhow::Result<String> {
        let Converted { provider, own, secret, sections, .. } = self;
        let (mut public, mut variables) = (own.clone(), Settings::new());
        public.retain(|key, _| !secret.contains(key));
        for (key, value) in own.iter().filter(|(key, _)| secret.contains(*key)) {
            let text = match value {
                Value::String(text) => text.clone(),
                Value::Array(list) => list.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(","),
                other => other.to_string(),
            };
            variables.insert(env_name(&format!("provider.{provider}.{key}")), text.into());
        }
        let mut config = json!(sections);
        let run = config.as_object_mut().and_then(|config| config.remove("paths"));
        config["provider"] = json!({"kind": provider, provider.as_str(): public});
        let mut values = json!({"config": config});
        if let Some(run) = run {
            values["paths"] = json!({"run": run["run-dir"]});
        }
        if !variables.is_empty() {
            values["provider"] = json!({"secret": variables});
        }
        let yaml = serde_yaml::to_string(&values).context("write the values")?;
        Ok(format!("# Made by `peerpod config convert-caa --helm`: helm install … -f FILE\n{yaml}"))
    }
}

/// Writes the settings of one section. JSON is YAML, and quotes every value that needs it.
fn lines(yaml: &mut String, indent: usize, settings: &Settings) -> anyhow::Result<()> {
    for (key, value) in settings {
        writeln!(yaml, "{:indent$}{key}: {value}", "")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MANIFEST: &str = r##"
apiVersion: v1
kind: List
items:
- apiVersion: v1
  kind: ConfigMap
  metadata: {name: peer-pods-cm}
  data:
    CLOUD_PROVIDER: THIS_ONE
    VXLAN_PORT: "9000"
    PEERPODS_LIMIT_PER_NODE: "7"
    PROXY_TIMEOUT: 5m
    EXTERNAL_NETWORK_VIA_PODVM: "true"
    POD_SUBNET_CIDRS: "10.244.0.0/16 10.96.0.0/12"
    FORWARDER_PORT: "15150"
    MY_OWN: x
---
kind: Secret
data:
  SOME_KEY_ID: QUtJQQ==
stringData:
  SOME_SECRET: "hush: \"#"
"##;

    /// Returns a manifest of a known provider; the tests of the provider cover its own variables.
    fn manifest() -> String {
        MANIFEST.replace("THIS_ONE", caa::known()[0])
    }

    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("peerpod-convert-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        folder
    }

    #[test]
    fn a_config_map_and_a_secret_become_a_file_that_has_no_mistakes() {
        let folder = folder("file");
        let (manifest, out) = (folder.join("peer-pods.yaml"), folder.join("peerpod.yaml"));
        std::fs::write(&manifest, self::manifest()).unwrap();
        let args = || Convert { out: Some(out.clone()), helm: false, manifests: vec![manifest.clone()] };
        run(args()).unwrap();
        let text = std::fs::read_to_string(&out).unwrap();
        let yaml: Value = serde_yaml::from_str(&text).unwrap();
        assert_eq!(yaml["provider"]["kind"], caa::known()[0]);
        assert_eq!((&yaml["tunnel"]["port"], &yaml["cluster"]["capacity"]), (&9000.into(), &7.into()));
        assert_eq!(yaml["tunnel"]["cluster-cidrs"], serde_json::json!(["10.244.0.0/16", "10.96.0.0/12"]));
        assert_eq!(
            (&yaml["tunnel"]["external"], &yaml["node"]["boot-timeout"]),
            (&"vm".into(), &"5m".into())
        );
        use std::os::unix::fs::PermissionsExt as _;
        assert_eq!(std::fs::metadata(&out).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(run(args()).unwrap_err().to_string().contains("remove it or name another"));
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn the_charts_values_have_the_secrets_settings_apart() {
        let text = |pairs: &[(&str, &str)]| {
            pairs.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())).collect()
        };
        let all = text(&[
            ("CLOUD_PROVIDER", "aws"),
            ("AWS_SECRET_ACCESS_KEY", "hush"),
            ("AWS_SG_IDS", "sg-1,sg-2"),
            ("VXLAN_PORT", "9000"),
            ("REMOTE_HYPERVISOR_ENDPOINT", "/run/x/hypervisor.sock"),
        ]);
        let secret = BTreeSet::from(["AWS_SECRET_ACCESS_KEY".to_owned()]);
        let values = convert(Variables { all, secret }).unwrap().values().unwrap();
        let values: Value = serde_yaml::from_str(&values).unwrap();
        assert_eq!(values["provider"]["secret"], json!({"PEERPOD_PROVIDER_AWS_SECRET_KEY": "hush"}));
        assert_eq!(values["config"]["provider"]["aws"]["security-group-ids"], json!(["sg-1", "sg-2"]));
        assert_eq!(values["config"]["tunnel"]["port"], 9000);
        assert_eq!((&values["paths"]["run"], &values["config"]["paths"]), (&json!("/run/x"), &Value::Null));
        assert!(!values["config"].to_string().contains("hush"));
    }

    #[test]
    fn unconverted_variables_are_listed_with_advice() {
        let folder = folder("lost");
        let manifest = folder.join("m.yaml");
        std::fs::write(&manifest, self::manifest()).unwrap();
        let mut variables = Variables::default();
        read(&manifest, &mut variables).unwrap();
        assert_eq!((&*variables.all["SOME_KEY_ID"], &*variables.all["SOME_SECRET"]), ("AKIA", "hush: \"#"));
        assert_eq!(Vec::from_iter(&variables.secret), ["SOME_KEY_ID", "SOME_SECRET"]);
        let Converted { lost, .. } = convert(variables).unwrap();
        let why = |name: &str| lost.iter().find(|(lost, _)| lost == name).map(|(_, why)| why.as_str());
        assert!(why("FORWARDER_PORT").unwrap().contains("relay.listen"), "{lost:?}");
        assert!(why("MY_OWN").is_some() && why("VXLAN_PORT").is_none(), "{lost:?}");
        assert!(!format!("{lost:?}").contains("hush"), "{lost:?}");
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn values_are_quoted_where_necessary() {
        let mut yaml = String::new();
        let odd = "hush: \"#";
        lines(&mut yaml, 2, &BTreeMap::from([("key".to_owned(), Value::from(odd))])).unwrap();
        assert_eq!(serde_yaml::from_str::<Value>(&yaml).unwrap()["key"], odd);
    }

    #[test]
    fn other_manifests_are_refused_without_showing_a_secret() {
        let folder = folder("bad");
        let manifest = folder.join("m.yaml");
        let told = |text: &str| {
            std::fs::write(&manifest, text).unwrap();
            let mut variables = Variables::default();
            let error = read(&manifest, &mut variables).and_then(|()| convert(variables)).unwrap_err();
            format!("{error:#}")
        };
        assert!(told("kind: Pod\n").contains("no ConfigMap"));
        assert!(told("kind: ConfigMap\ndata: {A: b}\n").contains("CLOUD_PROVIDER"));
        assert!(told("kind: ConfigMap\ndata: {CLOUD_PROVIDER: clowd}\n").contains("clowd"));
        let bad = told("kind: Secret\ndata: {K: 'hush!'}\n");
        assert!(bad.contains("data.K") && !bad.contains("hush"), "{bad}");
        let broken = told("kind: Secret\nstringData:\n  K: hush: hush\n");
        assert!(broken.contains("not YAML") && !broken.contains("hush"), "{broken}");
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
