use peerpod_pki::Identity;

use super::*;

const DAY: Duration = Duration::from_secs(86_400);

fn policy() -> Policy {
    Policy { name: "test CA".to_owned(), validity: 90 * DAY, leaf: 2 * DAY, settle: Duration::from_secs(60) }
}

fn at(days: u64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000) + DAY * u32::try_from(days).unwrap()
}

fn count(bundle: &str) -> usize {
    bundle.matches("BEGIN CERTIFICATE").count()
}

/// Whether a client that trusts the bundle accepts the server's certificate.
fn trusts(bundle: &str, leaf: &Identity, now: SystemTime) -> bool {
    let mut roots = rustls::RootCertStore::empty();
    for root in CertificateDer::pem_slice_iter(bundle.as_bytes()) {
        roots.add(root.unwrap()).unwrap();
    }
    let end = webpki::EndEntityCert::try_from(&leaf.chain[0]).unwrap();
    let now =
        rustls_pki_types::UnixTime::since_unix_epoch(now.duration_since(SystemTime::UNIX_EPOCH).unwrap());
    let algorithms = rustls::crypto::ring::default_provider().signature_verification_algorithms;
    end.verify_for_usage(
        algorithms.all,
        &roots.roots,
        &leaf.chain[1..],
        now,
        webpki::KeyUsage::server_auth(),
        None,
        None,
    )
    .is_ok()
}

/// Through ten years of days: a client with the bundle of today or of yesterday trusts every certificate in use.
#[test]
fn no_client_ever_gets_an_untrusted_certificate() {
    let policy = policy();
    let mut state = StoredCas::default();
    let names = ["x.example".to_owned()];
    let mut yesterday: Option<(String, Identity)> = None;
    let (mut signers, mut most) = (std::collections::BTreeSet::new(), 0);
    for day in 0..1000 {
        let now = at(day);
        while state.advance(&policy, now).unwrap() {}
        let bundle = state.bundle(&policy, now);
        let signer = state.signer(&policy, now).unwrap();
        let leaf = signer.server("x", &names, now, now + policy.leaf).unwrap();
        signers.insert(signer.certificate.to_vec());
        most = most.max(count(&bundle));
        assert!(trusts(&bundle, &leaf, now), "day {day}");
        if let Some((old_bundle, old_leaf)) = &yesterday {
            assert!(trusts(old_bundle, &leaf, now), "day {day}: a client with the bundle of yesterday");
            assert!(trusts(&bundle, old_leaf, now), "day {day}: a server that did not follow yet");
        }
        state.published(now);
        let kept = state.write().unwrap();
        state = StoredCas::read(&kept).unwrap();
        yesterday = Some((bundle, leaf));
    }
    assert!(signers.len() > 12 && most == 2, "{} signed, {most} trusted at once", signers.len());
}

#[test]
fn an_unpublished_ca_signs_only_as_the_last_resort() {
    let policy = policy();
    let mut state = StoredCas::default();
    assert!(state.signer(&policy, at(0)).is_err());
    assert!(state.advance(&policy, at(0)).unwrap());
    let first = state.signer(&policy, at(0)).unwrap().certificate.clone();
    assert!(state.published(at(0)) && !state.published(at(0)));
    assert!(!state.advance(&policy, at(59)).unwrap());
    assert!(state.advance(&policy, at(60)).unwrap());
    assert_eq!(count(&state.bundle(&policy, at(60))), 2);
    assert_eq!(state.signer(&policy, at(89)).unwrap().certificate, first, "the next one was never published");
    // After a year without a run everything has ended, and the new CA signs at once.
    state.advance(&policy, at(400)).unwrap();
    assert_ne!(state.signer(&policy, at(400)).unwrap().certificate, first);
    assert_eq!(count(&state.bundle(&policy, at(400))), 1);
}

#[test]
fn stored_state_is_checked() {
    let mut state = StoredCas::default();
    state.advance(&policy(), at(0)).unwrap();
    let kept = String::from_utf8(state.write().unwrap().to_vec()).unwrap();
    let mut other = StoredCas::default();
    other.advance(&policy(), at(0)).unwrap();
    let mixed =
        StoredCas { version: 1, cas: vec![Ca { key: other.cas[0].key.clone(), ..state.cas[0].clone() }] };
    let mixed = String::from_utf8(mixed.write().unwrap().to_vec()).unwrap();
    for (text, why) in [
        ("{", "no JSON"),
        (&kept.replace("\"version\":1", "\"version\":2"), "version 2"),
        ("{\"version\":1,\"cas\":[]}", "no CA"),
        (&mixed, "does not belong"),
    ] {
        let error = StoredCas::read(text.as_bytes()).unwrap_err().to_string();
        assert!(error.contains(why) && error.contains("remove the Secret's data"), "{error}");
    }
    assert!(!format!("{state:?}").contains("PRIVATE"));
}
