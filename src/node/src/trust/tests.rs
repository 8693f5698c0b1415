//! Tests of certificates as a TLS peer sees them, and of the CA as a restarted node reads it.

use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use peerpod_link::tls;
use rcgen::{CertificateParams, KeyPair, PKCS_ECDSA_P256_SHA256, PKCS_ECDSA_P384_SHA384, PKCS_ED25519};
use rustls::{ClientConnection, Connection, ServerConnection};
use rustls_pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};

use super::*;

/// A directory that is removed with the value.
struct Temp(PathBuf);

impl Temp {
    fn new() -> Temp {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let name = format!("peerpod-trust-{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        Temp(std::env::temp_dir().join(name))
    }

    fn open(&self) -> Trust {
        Trust::open(&self.0, SystemTime::now(), Validity::default(), false).unwrap()
    }
}

impl Drop for Temp {
    fn drop(&mut self) {
        let _gone = std::fs::remove_dir_all(&self.0);
    }
}

/// A guest: a key and the request for it.
struct Guest {
    key: KeyPair,
    csr: Vec<u8>,
}

/// Certificate chain and key.
type Pair = (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>);

fn pair(identity: Identity) -> Pair {
    (identity.chain, identity.key)
}

impl Guest {
    fn new() -> Guest {
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).unwrap();
        let names = vec![tls::SERVER_NAME.to_owned()];
        let csr = CertificateParams::new(names).unwrap().serialize_request(&key).unwrap().der().to_vec();
        Guest { key, csr }
    }

    fn identity(&self, signed: &Signed) -> Pair {
        let chain = signed.chain.iter().map(|der| CertificateDer::from(der.clone())).collect();
        (chain, PrivateKeyDer::from(PrivatePkcs8KeyDer::from(self.key.serialize_der())))
    }
}

/// Runs a whole handshake in memory; returns the fingerprint of the client's certificate as the server saw it.
fn shake(
    relay: Pair,
    trusted: &[CertificateDer<'static>],
    pins: &[[u8; 32]],
    guest: Option<Pair>,
) -> Result<Option<[u8; 32]>, String> {
    let server = tls::server_config(relay.0, relay.1, trusted).map_err(|e| e.to_string())?;
    let client = tls::client_config(pins, guest).map_err(|e| e.to_string())?;
    let mut ends = [
        Connection::from(ClientConnection::new(client, tls::server_name()).unwrap()),
        Connection::from(ServerConnection::new(server).unwrap()),
    ];
    for turn in 0..20 {
        let mut bytes = Vec::new();
        while ends[turn % 2].wants_write() {
            ends[turn % 2].write_tls(&mut bytes).unwrap();
        }
        let mut rest = bytes.as_slice();
        while !rest.is_empty() {
            ends[1 - turn % 2].read_tls(&mut rest).unwrap();
            ends[1 - turn % 2].process_new_packets().map_err(|e| e.to_string())?;
        }
    }
    assert!(ends.iter().all(|end| !end.is_handshaking()));
    Ok(ends[1].peer_certificates().map(|chain| tls::fingerprint(&chain[0])))
}

/// Runs the handshake with the present state of this trust.
fn shake_with(trust: &Trust, pins: &[[u8; 32]], guest: Option<Pair>) -> Result<Option<[u8; 32]>, String> {
    shake(pair(trust.relay_identity().unwrap()), &trust.trusted_cas(), pins, guest)
}

#[test]
fn guest_and_relay_authenticate_by_signed_certificates() {
    let dir = Temp::new();
    let trust = dir.open();
    let guest = Guest::new();
    let signed = trust.sign_guest("sandbox-1", &guest.csr, SystemTime::now()).unwrap();
    assert_eq!(shake_with(&trust, &trust.ca_sha256(), None), Ok(None));
    let seen = shake_with(&trust, &trust.ca_sha256(), Some(guest.identity(&signed)));
    assert_eq!(seen, Ok(Some(signed.certificate_sha256)));
    assert_eq!(signed.chain.len(), 2);
}

#[test]
fn the_same_key_is_signed_again_and_another_one_has_another_hash() {
    let dir = Temp::new();
    let trust = dir.open();
    let (guest, other) = (Guest::new(), Guest::new());
    let first = trust.sign_guest("a", &guest.csr, SystemTime::now()).unwrap();
    let second = trust.sign_guest("a", &guest.csr, SystemTime::now()).unwrap();
    let key = Trust::csr_key_sha256(&guest.csr).unwrap();
    assert_ne!(first.certificate_sha256, second.certificate_sha256);
    assert_ne!(key, Trust::csr_key_sha256(&other.csr).unwrap());
    // The same key in a request with other names is the same key.
    let again = CertificateParams::new(vec!["x".to_owned()]).unwrap().serialize_request(&guest.key).unwrap();
    assert_eq!(Trust::csr_key_sha256(again.der()).unwrap(), key);
}

#[test]
fn names_in_a_guests_request_are_ignored() {
    let dir = Temp::new();
    let trust = dir.open();
    let guest = Guest::new();
    let id = "s".repeat(128);
    let signed = trust.sign_guest(&id, &guest.csr, SystemTime::now()).unwrap();
    let leaf = String::from_utf8_lossy(&signed.chain[0]).into_owned();
    assert!(!leaf.contains(tls::SERVER_NAME));
    assert!(leaf.contains(&format!("peerpod:sandbox:{id}")));
    // It cannot serve as the relay's certificate either: wrong name, wrong usage.
    let refused = shake(guest.identity(&signed), &trust.trusted_cas(), &trust.ca_sha256(), None);
    assert!(refused.is_err(), "{refused:?}");
}

#[test]
fn the_relay_cannot_pass_for_a_guest_and_strangers_are_refused() {
    let (dir, elsewhere) = (Temp::new(), Temp::new());
    let (trust, stranger) = (dir.open(), elsewhere.open());
    let relay = trust.relay_identity().unwrap();
    assert!(shake_with(&trust, &trust.ca_sha256(), Some(pair(relay))).is_err());
    let guest = Guest::new();
    let signed = stranger.sign_guest("a", &guest.csr, SystemTime::now()).unwrap();
    assert!(shake_with(&trust, &trust.ca_sha256(), Some(guest.identity(&signed))).is_err());
    assert!(shake_with(&stranger, &trust.ca_sha256(), None).is_err());
}

#[test]
fn invalid_certificate_requests_are_refused() {
    let dir = Temp::new();
    let trust = dir.open();
    let refused = |csr: &[u8]| trust.sign_guest("a", csr, SystemTime::now()).unwrap_err().to_string();
    let guest = Guest::new();
    let mut forged = guest.csr.clone();
    *forged.last_mut().unwrap() ^= 1;
    assert!(refused(&forged).contains("not signed by its own key"));
    // Another key in the place of the signing key.
    let mut swapped = guest.csr.clone();
    let key = guest.key.public_key_raw();
    let at = swapped.windows(key.len()).position(|window| window == key).unwrap();
    swapped[at..at + key.len()].copy_from_slice(Guest::new().key.public_key_raw());
    assert!(refused(&swapped).contains("not signed by its own key"));
    for algorithm in [&PKCS_ECDSA_P384_SHA384, &PKCS_ED25519] {
        let key = KeyPair::generate_for(algorithm).unwrap();
        let csr = CertificateParams::default().serialize_request(&key).unwrap();
        assert!(refused(csr.der()).contains("its key is not P-256"));
    }
    assert!(refused(b"").contains("not a PKCS#10 request"));
    assert!(refused(&[0x30; 4000]).contains("not a PKCS#10 request"));
    assert!(refused(&[0x30; 5000]).contains("larger than"));
    for cut in 0..guest.csr.len() {
        assert!(trust.sign_guest("a", &guest.csr[..cut], SystemTime::now()).is_err(), "cut at {cut}");
    }
}

#[test]
fn a_restarted_node_has_the_same_ca_readable_by_its_owner_only() {
    let dir = Temp::new();
    let pins = dir.open().ca_sha256();
    let file = dir.0.join("ca.json");
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&dir.0), mode(&file)), (0o700, 0o600));
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o644)).unwrap();
    let again = dir.open();
    assert_eq!(again.ca_sha256(), pins);
    assert_eq!(mode(&file), 0o600);
    assert_eq!(shake_with(&again, &pins, None), Ok(None));
}

#[test]
fn a_temporary_file_of_a_crash_is_no_obstacle() {
    let dir = Temp::new();
    std::fs::create_dir_all(&dir.0).unwrap();
    std::fs::write(dir.0.join(".ca.json.new"), "half").unwrap();
    let pins = dir.open().ca_sha256();
    assert_eq!(dir.open().ca_sha256(), pins);
    assert!(!dir.0.join(".ca.json.new").exists());
}

#[test]
fn a_damaged_or_newer_file_is_an_error_and_stays_as_it_is() {
    let dir = Temp::new();
    dir.open();
    let file = dir.0.join("ca.json");
    let whole = std::fs::read_to_string(&file).unwrap();
    let (other, key) = (Temp::new(), "\"key\": \"");
    other.open();
    let foreign = std::fs::read_to_string(other.0.join("ca.json")).unwrap();
    let key_of = |text: &str| text.split(key).nth(1).unwrap().split('"').next().unwrap().to_owned();
    let mixed = whole.replace(&key_of(&whole), &key_of(&foreign));
    let newer = whole.replace("\"version\": 1", "\"version\": 2");
    let huge = " ".repeat(100_000);
    for (text, told) in [
        (&whole[..whole.len() / 2], "not in the format"),
        ("", "not in the format"),
        (&mixed, "does not belong to its certificate"),
        (&newer, "it has version 2"),
        (&huge, "larger than"),
    ] {
        std::fs::write(&file, text).unwrap();
        let opened = Trust::open(&dir.0, SystemTime::now(), Validity::default(), false);
        let error = opened.unwrap_err().to_string();
        assert!(error.contains(told) && error.contains("ca.json"), "{error}");
        assert!(!error.contains(&key_of(&whole)), "{error}");
        assert_eq!(std::fs::read_to_string(&file).unwrap(), text);
    }
    std::fs::write(&file, whole).unwrap();
    dir.open();
}

#[test]
fn a_directory_that_cannot_be_written_is_an_error_that_names_it() {
    let dir = Temp::new();
    std::fs::write(&dir.0, "a file").unwrap();
    let error = Trust::open(&dir.0.join("trust"), SystemTime::now(), Validity::default(), false)
        .unwrap_err()
        .to_string();
    assert!(error.contains("/trust") && error.contains("state directory"), "{error}");
    std::fs::remove_file(&dir.0).unwrap();
}

#[test]
fn a_rotation_disconnects_no_guest_and_survives_restarts() {
    let dir = Temp::new();
    let mut trust = dir.open();
    let now = SystemTime::now();
    let step = |trust: &mut Trust| {
        let stage = trust.rotate(now).unwrap();
        *trust = dir.open();
        assert_eq!(trust.stage(), stage);
        stage
    };
    // A VM with user-data from before the rotation, and one that runs already.
    let born_before = trust.ca_sha256();
    let running = Guest::new();
    let old = running.identity(&trust.sign_guest("a", &running.csr, SystemTime::now()).unwrap());
    let copy = |identity: &Pair| (identity.0.clone(), identity.1.clone_key());
    let whole =
        |trust: &Trust, pins: &[[u8; 32]], identity: &Pair| shake_with(trust, pins, Some(copy(identity)));

    assert_eq!(step(&mut trust), RotationStage::Announced);
    assert_eq!(trust.ca_sha256().len(), 2);
    shake_with(&trust, &born_before, None).unwrap();
    whole(&trust, &born_before, &old).unwrap();
    let told = trust.ca_sha256();

    assert_eq!(step(&mut trust), RotationStage::Overlap);
    assert_eq!(trust.ca_sha256(), told);
    shake_with(&trust, &born_before, None).unwrap();
    whole(&trust, &told, &old).unwrap();
    let new = running.identity(&trust.sign_guest("a", &running.csr, SystemTime::now()).unwrap());
    whole(&trust, &told, &new).unwrap();
    whole(&trust, &born_before, &new).unwrap();

    assert_eq!(step(&mut trust), RotationStage::Stable);
    whole(&trust, &told, &new).unwrap();
    whole(&trust, &trust.ca_sha256(), &new).unwrap();
    assert!(whole(&trust, &told, &old).is_err(), "the old CA is forgotten");
    assert!(shake_with(&trust, &born_before, None).is_err());
}

#[test]
fn a_rotation_that_cannot_be_written_is_not_applied() {
    let dir = Temp::new();
    let mut trust = dir.open();
    let pins = trust.ca_sha256();
    // A folder with an entry in the place of the file: the write fails for root too.
    std::fs::remove_file(dir.0.join("ca.json")).unwrap();
    std::fs::create_dir_all(dir.0.join("ca.json/x")).unwrap();
    assert!(trust.rotate(SystemTime::now()).is_err());
    assert_eq!((trust.ca_sha256(), trust.stage()), (pins, RotationStage::Stable));
}

#[test]
fn a_rotation_is_due_in_the_last_third_and_an_expired_ca_is_replaced() {
    let dir = Temp::new();
    let validity = Validity { ca: DAY * 300, guest: DAY };
    let now = SystemTime::now();
    let open = |at: SystemTime, has_guests| Trust::open(&dir.0, at, validity, has_guests).unwrap();
    let trust = open(now, false);
    assert!(!trust.is_rotation_due(now + DAY * 199, Duration::MAX));
    assert!(trust.is_rotation_due(now + DAY * 201, Duration::MAX));
    assert!(trust.is_rotation_due(now + DAY * 199, DAY * 100), "the interval of rotations is over");
    assert_eq!(open(now + DAY * 299, false).ca_sha256(), trust.ca_sha256());
    let late = open(now + DAY * 301, true);
    assert_eq!(late.ca_sha256(), trust.ca_sha256(), "guests trust no other CA, and the clock may be wrong");
    assert!(!late.is_rotation_due(now + DAY * 301, Duration::ZERO));
    assert_ne!(open(now + DAY * 301, false).ca_sha256(), trust.ca_sha256());
}

#[test]
fn certificates_tolerate_clocks_a_day_behind_and_end_as_requested() {
    let dir = Temp::new();
    let validity = Validity { ca: DAY * 300, guest: DAY };
    let trust = Trust::open(&dir.0, SystemTime::now(), validity, false).unwrap();
    let guest = Guest::new();
    let at = |when: SystemTime| {
        let signed = trust.sign_guest("a", &guest.csr, when).unwrap();
        shake_with(&trust, &trust.ca_sha256(), Some(guest.identity(&signed))).is_ok()
    };
    let (now, hour) = (SystemTime::now(), DAY / 24);
    assert!(at(now));
    assert!(at(now + hour * 23), "a day ahead of the peer's clock");
    assert!(!at(now + hour * 25));
    assert!(at(now - hour * 23));
    assert!(!at(now - hour * 25), "its day is over");
}

#[test]
fn a_ticket_verifies_its_secret_and_never_prints_it() {
    let ticket = Ticket::new(1_000, Duration::from_secs(60)).unwrap();
    let other = Ticket::new(1_000, Duration::from_secs(60)).unwrap();
    assert_ne!(ticket.id, other.id);
    assert_eq!(ticket.id.len(), 32);
    assert!(ticket.matches(ticket.secret().expose()));
    for wrong in [&other.secret().expose()[..], &[], &ticket.secret().expose()[..31], &[0; 64]] {
        assert!(!ticket.matches(wrong));
    }
    assert!(!ticket.is_expired(1_000) && !ticket.is_expired(60_999) && ticket.is_expired(61_000));
    let json = serde_json::to_string(&ticket).unwrap();
    let secret = hex::encode(ticket.secret().expose());
    assert!(json.contains(&secret) && json.contains("expires_ms"), "the ledger needs it");
    assert!(!format!("{ticket:?}").contains(&secret));
    let back: Ticket = serde_json::from_str(&json).unwrap();
    assert!(back.matches(ticket.secret().expose()) && back.id == ticket.id);
    assert_eq!(back.expires_ms, ticket.expires_ms);
}

#[test]
fn debug_of_trust_shows_no_key() {
    let dir = Temp::new();
    let shown = format!("{:?}", Arc::new(dir.open()));
    assert!(shown.contains("not_after") && !shown.to_lowercase().contains("key"), "{shown}");
}
