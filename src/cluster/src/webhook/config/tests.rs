use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use peerpod_base::config::Sources;

use super::*;

fn read(words: &[&str]) -> Result<WebhookConfig, String> {
    let sources = Sources::from_process(words.iter().map(ToString::to_string), []);
    let mut reader =
        Reader::load(sources, &["webhook", "cluster"], &[]).map_err(|mistakes| mistakes.to_string())?;
    let config = WebhookConfig::read(&mut reader);
    reader.finish().map_err(|mistakes| mistakes.to_string())?;
    Ok(config)
}

#[test]
fn the_defaults_serve_one_class() {
    let config = read(&[]).unwrap();
    assert_eq!(config.profile.runtime_classes, ["kata-remote"]);
    assert_eq!(config.profile.resource, "kata.peerpods.io/vm");
    assert_eq!(config.profile.totals, Totals::Effective);
    assert_eq!(config.profile.gpus, ["nvidia.com/gpu"]);
    assert_eq!(config.excluded, ["kube-system"]);
    assert_eq!(config.versions.len(), 2);
}

#[test]
fn all_classes_have_the_same_settings() {
    let config = read(&[
        "--webhook.runtime-classes",
        "kata-remote,kata-gpu",
        "--webhook.totals",
        "sum",
        "--cluster.extended-resource",
        "example.org/vm",
    ])
    .unwrap();
    let profile = config.profile;
    assert_eq!(profile.runtime_classes, ["kata-remote", "kata-gpu"]);
    assert_eq!((profile.totals, profile.resource.as_str()), (Totals::Sum, "example.org/vm"));
}

#[test]
fn a_client_ca_is_read_or_named_as_a_mistake() {
    assert!(read(&[]).unwrap().callers.is_none());
    let ca = rcgen::generate_simple_self_signed(["ca".to_owned()]).unwrap();
    let pem = |der: &[u8]| {
        format!("-----BEGIN CERTIFICATE-----\n{}\n-----END CERTIFICATE-----\n", BASE64_STANDARD.encode(der))
    };
    let read = |pem: &str| read(&[&format!("--webhook.client-ca={pem}")]);
    assert!(read(&pem(ca.cert.der())).unwrap().callers.is_some());
    for wrong in ["x".to_owned(), pem(b"x")] {
        let said = read(&wrong).err().unwrap();
        assert!(said.contains("webhook.client-ca") && said.contains("write the CA's certificate"), "{said}");
    }
}

/// Test table of the replaced webhook.
#[test]
fn tls_is_set_as_before() {
    const TWO: &str = "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256, TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384";
    assert_eq!(read(&["--webhook.tls-min-version", "VersionTLS13"]).unwrap().versions.len(), 1);
    assert_eq!(read(&["--webhook.tls-min-version", "VersionTLS12"]).unwrap().versions.len(), 2);
    for wrong in ["VersionTLS10", "VersionTLS11", "VersionTLS99"] {
        assert!(
            read(&["--webhook.tls-min-version", wrong]).err().unwrap().contains("VersionTLS12, VersionTLS13")
        );
    }
    let two = read(&["--webhook.tls-cipher-suites", TWO]).unwrap();
    assert_eq!(two.crypto.cipher_suites.iter().filter(|suite| suite.tls13().is_none()).count(), 2);
    assert_eq!(two.versions.len(), 2);
    assert!(read(&["--webhook.tls-cipher-suites", "TLS_BAD"]).err().unwrap().contains("not all are known"));
    let both = read(&["--webhook.tls-cipher-suites", TWO, "--webhook.tls-min-version", "VersionTLS13"]);
    assert!(both.err().unwrap().contains("no choice of suites"));
}
