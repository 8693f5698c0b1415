use std::fs;
use std::net::IpAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use proptest::prelude::*;

use super::*;
use crate::sandbox::phase::Phase;
use crate::spec::SandboxId;

struct Dir(PathBuf);

impl Dir {
    fn new() -> Dir {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let name = format!("peerpod-ledger-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let dir = std::env::temp_dir().join(name);
        fs::create_dir_all(&dir).unwrap();
        Dir(dir)
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        drop(fs::remove_dir_all(&self.0));
    }
}

fn id(text: &str) -> SandboxId {
    text.parse().unwrap()
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o777
}

const SAMPLES: [(&str, &str); 4] = [
    ("3f0c8f8e0a4a4b7e9d1c2b3a4f5e6d7c", include_str!("../../tests/samples/ledger-v1-booting.json")),
    ("web_1.a-b", include_str!("../../tests/samples/ledger-v1-running.json")),
    ("web-2", include_str!("../../tests/samples/ledger-v1-leaving.json")),
    ("web-3", include_str!("../../tests/samples/ledger-v1-gone.json")),
];

#[test]
fn a_record_on_disk_has_all_fields_at_the_top() {
    for (name, text) in SAMPLES {
        let record: Record = serde_json::from_str(text).unwrap();
        let written: serde_json::Value =
            serde_json::from_str(&serde_json::to_string(&record).unwrap()).unwrap();
        let sample: serde_json::Value = serde_json::from_str(text).unwrap();
        for (key, value) in sample.as_object().unwrap() {
            assert_eq!(&written[key], value, "{name}: {key}");
        }
    }
}

#[test]
fn version_1_records_survive_a_round_trip() {
    let dir = Dir::new();
    let ledger = Ledger::open(&dir.0).unwrap();
    for (name, text) in SAMPLES {
        fs::write(dir.0.join(format!("sandboxes/{name}.json")), text).unwrap();
    }
    let loaded = ledger.load().unwrap();
    assert_eq!(loaded.quarantined, []);
    assert_eq!(loaded.records.len(), SAMPLES.len());
    let get = |name: &str| loaded.records.iter().find(|record| record.id.as_str() == name).unwrap();
    let booting = get(SAMPLES[0].0);
    assert_eq!(booting.phase, Phase::Booting { attempt: 1 });
    assert_eq!(booting.wanted.request.as_ref().unwrap().size.memory_mib, 2048);
    assert_eq!(
        booting.network.as_ref().unwrap().tunnel.get(),
        r#"{"seen":{"anything":1},"reserved":{"vni":4711}}"#
    );
    let running = get("web_1.a-b");
    assert_eq!(running.phase.vm().unwrap().as_str(), "i-0abc");
    assert_eq!(running.addresses, ["10.99.0.7".parse::<IpAddr>().unwrap(), "fd99::7".parse().unwrap()]);
    assert_eq!(running.enrolment.binding.as_ref().unwrap().certificates_sha256, ["bb", "cc"]);
    // Fields that were added later have their defaults.
    assert!(get("web-2").end.failed && get("web-2").trace.stages.is_empty());
    assert_eq!(get("web-3").end.gone_ms, Some(1_763_630_000_000));
    for record in &loaded.records {
        ledger.save(record).unwrap();
    }
    for (name, text) in SAMPLES.iter().take(2) {
        let written = fs::read_to_string(dir.0.join(format!("sandboxes/{name}.json"))).unwrap();
        let (was, is): (serde_json::Value, serde_json::Value) =
            (serde_json::from_str(text).unwrap(), serde_json::from_str(&written).unwrap());
        assert_eq!(was, is, "{name}");
    }
}

#[test]
fn records_are_for_root_alone_and_survive_a_crash_in_mid_write() {
    let dir = Dir::new();
    let state = dir.0.join("state");
    let ledger = Ledger::open(&state).unwrap();
    ledger.save(&Record::tombstone(id("a"), 1)).unwrap();
    let file = state.join("sandboxes/a.json");
    assert_eq!((mode(&state), mode(&state.join("sandboxes")), mode(&file)), (0o700, 0o700, 0o600));
    // The start removes the rest of an interrupted write, and the old record stands.
    fs::write(state.join("sandboxes/.a.tmp"), "{\"version\":1,\"id\":\"a\",\"pha").unwrap();
    let loaded = ledger.load().unwrap();
    assert_eq!((loaded.records.len(), loaded.quarantined.len()), (1, 0));
    assert!(!state.join("sandboxes/.a.tmp").exists());
    ledger.remove(&id("a")).unwrap();
    ledger.remove(&id("a")).unwrap();
    assert!(!file.exists());
}

#[test]
fn a_folder_readable_by_others_is_restricted() {
    let dir = Dir::new();
    fs::create_dir(dir.0.join("sandboxes")).unwrap();
    fs::set_permissions(dir.0.join("sandboxes"), fs::Permissions::from_mode(0o755)).unwrap();
    Ledger::open(&dir.0).unwrap();
    assert_eq!(mode(&dir.0.join("sandboxes")), 0o700);
}

#[test]
fn invalid_files_are_quarantined_and_named() {
    let dir = Dir::new();
    let ledger = Ledger::open(&dir.0).unwrap();
    ledger.save(&Record::tombstone(id("good"), 1)).unwrap();
    let whole = fs::read_to_string(dir.0.join("sandboxes/good.json")).unwrap();
    let cases = [
        ("torn.json", whole[..whole.len() / 2].to_owned(), "not a versioned record"),
        ("empty.json", String::new(), "not a versioned record"),
        ("newer.json", whole.replace("\"version\":1", "\"version\":2"), "version 2 is unknown"),
        ("zero.json", whole.replace("\"version\":1", "\"version\":0"), "version 0 is unknown"),
        ("other.json", whole.clone(), "it contains the record of good"),
        ("phase.json", whole.replace("\"gone\"", "\"limbo\""), "not a record"),
        ("not a name.json", whole.clone(), "not a sandbox id"),
        ("noise.txt", whole.clone(), "not a sandbox id"),
    ];
    for (name, text, _) in &cases {
        fs::write(dir.0.join("sandboxes").join(name), text).unwrap();
    }
    fs::create_dir(dir.0.join("sandboxes/folder.json")).unwrap();
    let loaded = ledger.load().unwrap();
    assert_eq!(loaded.records.len(), 1);
    assert_eq!(loaded.quarantined.len(), cases.len() + 1);
    for (name, text, why) in &cases {
        let bad = loaded.quarantined.iter().find(|bad| bad.file.ends_with(name)).unwrap();
        assert!(bad.why.contains(why), "{name}: {}", bad.why);
        assert_eq!(fs::read_to_string(&bad.moved_to).unwrap(), *text, "nothing of it is lost");
        assert_eq!(bad.id.is_some(), name.ends_with(".json") && !name.contains(' '));
    }
    // The next start does not read them again.
    assert_eq!(ledger.load().unwrap().quarantined, []);
}

#[test]
fn a_file_too_long_is_not_read_into_memory() {
    let dir = Dir::new();
    let ledger = Ledger::open(&dir.0).unwrap();
    let file = fs::File::create(dir.0.join("sandboxes/long.json")).unwrap();
    file.set_len(1 << 40).unwrap();
    let loaded = ledger.load().unwrap();
    assert!(loaded.quarantined[0].why.contains("more than"), "{:?}", loaded.quarantined);
}

#[test]
fn a_failed_write_names_the_path_and_a_remedy() {
    // Root writes to read-only folders; a file in place of a folder fails for every user.
    let dir = Dir::new();
    fs::write(dir.0.join("state"), "a file").unwrap();
    let error = Ledger::open(&dir.0.join("state")).unwrap_err().to_string();
    assert!(error.contains("state") && error.contains("writable"), "{error}");
    let ledger = Ledger::open(&dir.0.join("other")).unwrap();
    fs::remove_dir_all(dir.0.join("other/sandboxes")).unwrap();
    let error = ledger.save(&Record::tombstone(id("a"), 1)).unwrap_err().to_string();
    assert!(error.contains("sandboxes/a.json") && error.contains("No such file"), "{error}");
}

fn note(dir: &Path, name: &str, text: &str) {
    fs::write(dir.join("inbox").join(name), text).unwrap();
}

#[test]
fn notes_are_read_oldest_first_and_removed_when_done() {
    let dir = Dir::new();
    let inbox = Inbox::open(&dir.0).unwrap();
    assert_eq!(mode(&dir.0.join("inbox")), 0o700);
    note(&dir.0, "b.json", r#"{"version":1,"op":"stop","id":"b","at_ms":20}"#);
    note(&dir.0, "a.json", r#"{"version":1,"op":"stop","id":"a","at_ms":10,"more":"later"}"#);
    note(&dir.0, ".c.json.tmp", "{");
    note(&dir.0, "newer.json", r#"{"version":2,"op":"stop","id":"n","at_ms":10}"#);
    note(&dir.0, "what.json", r#"{"version":1,"op":"explode","id":"w","at_ms":10}"#);
    note(&dir.0, "bad.json", r#"{"version":1,"op":"stop","id":"../x","at_ms":10}"#);
    let (notes, bad) = inbox.read().unwrap();
    assert_eq!(notes.iter().map(|note| note.id.as_str()).collect::<Vec<_>>(), ["a", "b"]);
    assert_eq!(bad.len(), 3);
    for note in &notes {
        inbox.done(note).unwrap();
        inbox.done(note).unwrap();
    }
    let (notes, bad) = inbox.read().unwrap();
    assert_eq!((notes.len(), bad.len()), (0, 0));
    assert!(dir.0.join("inbox/.c.json.tmp").exists(), "a note that is being written is left alone");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn no_bytes_in_a_record_make_the_reader_panic(bytes in prop::collection::vec(any::<u8>(), 0..400), at in 0usize..900) {
        let dir = Dir::new();
        let ledger = Ledger::open(&dir.0).unwrap();
        let mut text = SAMPLES[0].1.as_bytes().to_vec();
        let at = at.min(text.len());
        text.splice(at..(at + bytes.len()).min(text.len()), bytes);
        fs::write(dir.0.join(format!("sandboxes/{}.json", SAMPLES[0].0)), &text).unwrap();
        let loaded = ledger.load().unwrap();
        prop_assert_eq!(loaded.records.len() + loaded.quarantined.len(), 1);
    }
}

const BATCHES: [(&str, &str); 2] = [
    ("0102030405060708090a0b0c0d0e0f10", include_str!("../../tests/samples/batch-v1-asked.json")),
    ("1102030405060708090a0b0c0d0e0f10", include_str!("../../tests/samples/batch-v1-answered.json")),
];

#[test]
fn version_1_batches_survive_a_round_trip() {
    let dir = Dir::new();
    let ledger = Ledger::open(&dir.0).unwrap();
    let file = |id: &str| dir.0.join(format!("batches/{id}.json"));
    for (id, text) in BATCHES {
        fs::write(file(id), text).unwrap();
    }
    let mut loaded = ledger.load().unwrap();
    assert_eq!((loaded.quarantined, loaded.unread_batches), (vec![], Vec::<String>::new()));
    loaded.batches.sort_by(|one, other| one.ticket.id.cmp(&other.ticket.id));
    let [asked, answered] = loaded.batches.as_slice() else { panic!("{:?}", loaded.batches) };
    assert_eq!(asked.members[1], Member { sandbox: id("web_1.a-b"), attempt: 0 });
    assert!(asked.made.is_none() && asked.request.placement.is_some());
    assert_eq!(answered.made.as_ref().unwrap()[0].as_str(), "i-0a1b2c");
    assert!(answered.rest.as_ref().unwrap().again);
    for (batch, (id, text)) in loaded.batches.iter().zip(BATCHES) {
        ledger.save_batch(batch).unwrap();
        assert_eq!(fs::read_to_string(file(id)).unwrap(), text);
        assert_eq!(mode(&file(id)), 0o600, "it holds a ticket");
        ledger.remove_batch(id).unwrap();
        ledger.remove_batch(id).unwrap();
        assert!(!file(id).exists());
    }
}

#[test]
fn an_invalid_batch_is_quarantined_and_its_id_stays_known() {
    let dir = Dir::new();
    let ledger = Ledger::open(&dir.0).unwrap();
    let (torn, text) = BATCHES[0];
    let (newer, other) = BATCHES[1];
    fs::write(dir.0.join(format!("batches/{torn}.json")), &text[..text.len() / 2]).unwrap();
    let later = other.replacen(r#""version":1"#, r#""version":9"#, 1);
    fs::write(dir.0.join(format!("batches/{newer}.json")), later).unwrap();
    fs::write(dir.0.join("batches/.half.tmp"), "x").unwrap();
    for quarantined in [2, 0] {
        // Also at the next start, until a person takes the files away.
        let loaded = ledger.load().unwrap();
        assert_eq!((loaded.batches.len(), loaded.quarantined.len()), (0, quarantined));
        assert_eq!(loaded.unread_batches, [torn, newer]);
    }
    assert_eq!(ledger.in_quarantine().unwrap(), [], "no sandbox is called so");
    assert_eq!(fs::read_dir(dir.0.join("batches")).unwrap().count(), 0);
}
