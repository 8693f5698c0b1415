//! Tests images in the VM, end to end: pulls from a real and from a hostile registry, a killed pull, a full disk, and a
//! container that runs from an image.

use super::images_common;
use std::fs;
use std::io::Write;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use images_common::hostile::{self, Hostile, answer, for_ever, head};
use images_common::{
    Folder, Image, Layer, LayerBuilder, PORT, Packing, Registry, Serving, begin, inspect, job, layers_in,
    ordinary, own_address, pull,
};
use peerpod_client::{AgentClient, Annotations};
use peerpod_proto::agent::CreateSandboxRequest;
use peerpod_tests::{PATIENCE, fresh_id, of_image, stop_in_time};
use peerpod_world::{Daemons, Settings, World, eventually_blocking};
use serde_json::json;

fn cause(result: Result<serde_json::Value, (String, String)>) -> (String, String) {
    result.expect_err("it must fail")
}

#[test]
fn an_image_in_the_vm_equals_the_built_image() {
    let store = Folder::new();
    let registry = Registry::start(&[("team/app:v1", &ordinary().indexed())], &Serving::default());
    let job = job(&store.0, &format!("{}/team/app:v1", registry.address));
    let seen = inspect(
        &job,
        "stat -c '%n %F %a' bin/busybox bin/sh lib tmp tmp/made usr/lib/library linked opaque opaque/above replaced; \
         ls old opaque replaced dev 2>&1; readlink lib bin/sh; cat old/three also/linked replaced/by; \
         test linked -ef also/linked && echo same; \
         python3 -c \"import os; print(os.getxattr('attributed','user.peerpod'), os.listxattr('attributed'))\"; \
         stat -c %Y tmp/made; cat ../config.json",
    );
    for line in [
        "bin/busybox regular file 755",
        "bin/sh symbolic link 777",
        "lib symbolic link 777",
        "tmp directory 1777",
        "tmp/made regular file 600",
        "usr/lib/library regular file 644",
        "linked regular file 4755",
        "opaque directory 750",
        "replaced directory 755",
        "old:\none\nthree\n",
        "opaque:\nabove\n",
        "replaced:\nby\n",
        "usr/lib\nbusybox\n",
        "onelinkedfoldersame\n",
        "b'kept' ['user.peerpod']",
        "1700000000",
        "\"cwd\":\"/\"",
    ] {
        assert!(seen.contains(line), "{line:?} in {seen}");
    }
    // Fetched once per VM: the second pull fetches nothing.
    let again = pull(&job).unwrap();
    assert_eq!((&again["layers"], &again["fetched"], &again["bytes"]), (&json!(3), &json!(0), &json!(0)));
    let (layers, half) = layers_in(&store.0);
    assert!(layers == 3 && half.is_empty(), "{half:?}");
}

#[test]
fn images_share_the_layers_they_have_in_common_and_their_registry_may_go_away() {
    let store = Folder::new();
    let below = LayerBuilder::new().file("below", 0o644, b"1").build(Packing::Gzip);
    let layer = |name: &str| LayerBuilder::new().file(name, 0o644, b"2").build(Packing::Gzip);
    let (one, two) = (Image::of(&[below.clone(), layer("one")]), Image::of(&[below, layer("two")]));
    let mut registry = Registry::start(&[("a:v1", &one), ("b:v1", &two)], &Serving::default());
    let address = registry.address;
    let of = |name: &str| job(&store.0, &format!("{address}/{name}:v1"));
    let jobs = [of("a"), of("b")];
    // At the same time: the later pull waits for the earlier one to make the shared layer.
    let both =
        jobs.clone().map(|job| std::thread::spawn(move || pull(&job).unwrap()["fetched"].as_u64().unwrap()));
    assert_eq!(both.map(|one| one.join().unwrap()).iter().sum::<u64>(), 3);
    registry.stop();
    // A container that restarts does not need the registry.
    assert_eq!(pull(&jobs[0]).unwrap()["fetched"], json!(0));
    let (cause, text) = cause(pull(&of("c")));
    assert_eq!(cause, "unreachable", "{text}");
    assert!(text.contains("onnection refused") && text.contains("network reaches it"), "{text}");
}

#[test]
fn refusals_of_the_registry_are_distinguished() {
    let store = Folder::new();
    let image = Image::of(&[LayerBuilder::new().file("x", 0o644, b"x").build(Packing::Gzip)]);
    let registry = Registry::start(
        &[("team/app:v1", &image)],
        &Serving { secret: Some(("pod", "geheim")), ..Serving::default() },
    );
    let of = |name: &str, secret: &str| {
        let mut job = job(&store.0, &format!("{}/{name}", registry.address));
        let key = format!("{}/team", registry.address);
        if !secret.is_empty() {
            job["credentials"] =
                json!(json!({ "auths": { key: { "username": "pod", "password": secret } } }).to_string());
        }
        job
    };
    let (kind, text) = cause(pull(&of("team/app:v1", "")));
    assert!(kind == "denied" && text.contains("no pull secret"), "{kind} {text}");
    let (kind, text) = cause(pull(&of("team/app:v1", "falsch")));
    assert!(kind == "denied" && text.contains("was tried") && !text.contains("falsch"), "{kind} {text}");
    let (kind, text) = cause(pull(&of("team/app:v2", "geheim")));
    assert!(kind == "not_found" && text.contains("team/app:v2"), "{kind} {text}");
    let (kind, text) = cause(pull(&of("team/none:v1", "geheim")));
    assert!(kind == "not_found", "{kind} {text}");
    assert_eq!(pull(&of("team/app:v1", "geheim")).unwrap()["fetched"], json!(1));
    // Also for an image in the store: a pod without access must not get it.
    assert_eq!(cause(pull(&of("team/app:v1", ""))).0, "denied");
}

#[test]
fn a_token_service_is_asked_and_its_token_goes_nowhere_else() {
    let store = Folder::new();
    let image = Image::of(&[LayerBuilder::new().file("x", 0o644, b"x").build(Packing::Gzip)]);
    let elsewhere = Hostile::start(image.clone(), |request, stream| {
        if request.authorization.is_empty() {
            return None;
        }
        answer(stream, "418 I'm a teapot", "text/plain", b"the token came here");
        Some(())
    });
    let address = Arc::new(OnceLock::new());
    let tokens = hostile::with_tokens(address.clone());
    let other = elsewhere.address;
    let registry = Hostile::start(image, move |request, stream| {
        tokens(request, stream).or_else(|| {
            // The layers are on another server, as in a cloud's object store.
            request.path.contains("/blobs/").then(|| {
                let to = format!(
                    "Location: http://localhost:{}{}\r\nContent-Length: 0\r\n",
                    other.port(),
                    request.path
                );
                head(stream, "307 Temporary Redirect", &to);
            })
        })
    });
    address.set(registry.address).unwrap();
    let mut job = job(&store.0, &registry.name());
    job["credentials"] = json!(
        json!({ "auths": { registry.address.to_string(): { "auth": "cG9kOnNlY3JldA==" } } }).to_string()
    );
    assert_eq!(pull(&job).unwrap()["fetched"], json!(1));
    assert!(elsewhere.blobs.load(Ordering::SeqCst) >= 2);
    job["credentials"] = json!("");
    fs::remove_dir_all(&store.0).unwrap();
    let (kind, text) = cause(pull(&job));
    assert!(kind == "denied" && text.contains("who are you?"), "{kind} {text}");
}

fn pem(label: &str, der: &[u8]) -> String {
    let text = BASE64_STANDARD.encode(der);
    let lines: Vec<&str> =
        text.as_bytes().chunks(64).map(|line| std::str::from_utf8(line).unwrap()).collect();
    format!("-----BEGIN {label}-----\n{}\n-----END {label}-----\n", lines.join("\n"))
}

#[test]
fn the_vm_accepts_only_registries_with_trusted_certificates() {
    let store = Folder::new();
    let image = Image::of(&[LayerBuilder::new().file("x", 0o644, b"x").build(Packing::Gzip)]);
    let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let ca_key = rcgen::KeyPair::generate().unwrap();
    let ca = params.self_signed(&ca_key).unwrap();
    let issuer = rcgen::Issuer::new(params, &ca_key);
    let key = rcgen::KeyPair::generate().unwrap();
    let address = own_address();
    let leaf = rcgen::CertificateParams::new(vec![address.ip().to_string()]).unwrap();
    let leaf = leaf.signed_by(&key, &issuer).unwrap();
    let tls = Some((pem("CERTIFICATE", leaf.der()), pem("PRIVATE KEY", &key.serialize_der())));
    let registry =
        Registry::start(&[("app:v1", &image)], &Serving { tls, at: Some(address), ..Serving::default() });
    let mut job = job(&store.0, &format!("{}/app:v1", registry.address));
    job["plain_http"] = json!([]);
    job["ca_files"] = json!(["/etc/ssl/certs/ca-certificates.crt", "/nonexistent"]);
    let (kind, text) = cause(pull(&job));
    assert!(kind == "untrusted" && text.contains("node.registry-ca"), "{kind} {text}");
    job["ca_pem"] = json!(pem("CERTIFICATE", ca.der()));
    assert_eq!(pull(&job).unwrap()["fetched"], json!(1));
    // Plain HTTP is permitted for the listed registries only.
    let plain = Registry::start(&[("app:v1", &image)], &Serving::default());
    job["image"] = json!(format!("{}/app:v1", plain.address));
    let (kind, text) = cause(pull(&job));
    assert!(kind == "unreachable" && text.contains("plain HTTP"), "{kind} {text}");
}

#[test]
fn a_killed_pull_leaves_nothing() {
    let store = Folder::new();
    let files = |n: u32| {
        (0..40).fold(LayerBuilder::new(), |layer, k| {
            layer.file(&format!("d{n}/f{k}"), 0o644, &[n as u8; 60_000])
        })
    };
    let layers: Vec<Layer> = (0..4).map(|n| files(n).build(Packing::Gzip)).collect();
    let registry = Registry::start(&[("app:v1", &Image::of(&layers))], &Serving::default());
    let job = job(&store.0, &format!("{}/app:v1", registry.address));
    // At any point: the later the kill, the more is done.
    let mut killed = 0;
    for step in 1..40u64 {
        let mut child = begin(&job);
        std::thread::sleep(Duration::from_millis(8 * step));
        let running = child.try_wait().unwrap().is_none();
        child.kill().unwrap();
        child.wait().unwrap();
        for whole in fs::read_dir(store.join("l")).into_iter().flatten().flatten() {
            let files = fs::read_dir(whole.path())
                .unwrap()
                .flatten()
                .flat_map(|dir| fs::read_dir(dir.path()).unwrap());
            assert_eq!(files.count(), 40, "a layer that has its name is whole");
        }
        killed += usize::from(running);
        if !running {
            break;
        }
    }
    assert!(killed > 0);
    pull(&job).unwrap();
    let (whole, half) = layers_in(&store.0);
    assert!(whole == 4 && half.is_empty(), "{half:?}");
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!mounts.contains(store.0.to_str().unwrap()), "no mount of it is left: {mounts}");
    let seen = inspect(&job, "cat d?/f? d?/f?? | wc -c");
    assert_eq!(seen.trim(), (4 * 40 * 60_000).to_string());
}

#[test]
fn a_broken_pull_continues_with_the_bytes_that_are_here() {
    let numbers: Vec<u8> = (0..4_000_000_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let layer = LayerBuilder::new().file("large", 0o644, &numbers).build(Packing::Plain);
    let (blob, path) = (layer.blob.clone(), format!("/blobs/{}", images_common::digest(&layer.blob)));
    // Each answer ends after a million bytes.
    let sent = Arc::new(Mutex::new(Vec::new()));
    let (offsets, good) = (sent.clone(), Arc::new(AtomicBool::new(true)));
    let is_good = good.clone();
    let registry = Hostile::start(Image::of(&[layer]), move |request, stream| {
        if !request.path.ends_with(&path) {
            return None;
        }
        let offset = request.offset.unwrap_or(0);
        offsets.lock().unwrap().push(offset);
        let rest = &blob[offset..];
        let status = if offset == 0 { "200 OK" } else { "206 Partial Content" };
        head(stream, status, &format!("Content-Length: {}\r\n", rest.len()));
        let part = &rest[..rest.len().min(1_000_000)];
        let part = if is_good.load(Ordering::Relaxed) { part.to_vec() } else { vec![0; part.len()] };
        stream.write_all(&part).ok()
    });
    let store = Folder::new();
    let job = job(&store.0, &registry.name());
    // A pull makes four attempts, and the image needs five.
    let (kind, text) = cause(pull(&job));
    assert_eq!(kind, "unreachable", "{text}");
    assert_eq!(pull(&job).unwrap()["fetched"], 1);
    let requests = sent.lock().unwrap().clone();
    assert!(requests.len() >= 5 && requests.is_sorted() && requests[1] > 0, "{requests:?}");
    assert_eq!(layers_in(&store.0), (1, Vec::new()));
    assert_eq!(inspect(&job, "wc -c <large").trim(), "4000000");

    // Wrong bytes of an earlier answer are found, and do not stay.
    let store = Folder::new();
    let job = images_common::job(&store.0, &registry.name());
    good.store(false, Ordering::Relaxed);
    assert_eq!(cause(pull(&job)).0, "unreachable");
    good.store(true, Ordering::Relaxed);
    let (kind, text) = cause(pull(&job));
    assert!(kind == "digest" && text.contains("other bytes"), "{kind} {text}");
    assert_eq!(layers_in(&store.0), (0, Vec::new()));
}

#[test]
fn a_full_disk_is_reported_and_freed() {
    let store = Folder::new();
    let mount =
        |arguments: &[&str]| assert!(Command::new("mount").args(arguments).status().unwrap().success());
    let path = store.join("small");
    fs::create_dir(&path).unwrap();
    mount(&["-t", "tmpfs", "-o", "size=4m", "none", path.to_str().unwrap()]);
    let large = LayerBuilder::new().file("large", 0o644, &vec![7; 16 << 20]).build(Packing::Gzip);
    let registry = Registry::start(&[("app:v1", &Image::of(&[large]))], &Serving::default());
    let (kind, text) = cause(pull(&job(&path, &format!("{}/app:v1", registry.address))));
    let (whole, half) = layers_in(&path);
    assert!(Command::new("umount").arg(&path).status().unwrap().success());
    assert!(kind == "no_space" && text.contains("larger disk for images"), "{kind} {text}");
    assert!(whole == 0 && half.is_empty(), "{half:?}");
}

/// Pulls an image from a hostile registry, checks that no incomplete layer is left, and returns the error. The pull has
/// more time than a busy machine needs.
fn lies(
    image: Image,
    lie: impl Fn(&hostile::Request, &mut std::net::TcpStream) -> Option<()> + Send + Sync + 'static,
) -> (String, String, Folder) {
    lies_within(240, image, lie)
}

/// Does the same as [`lies`], with a limit of the pull in seconds.
fn lies_within(
    seconds: u64,
    image: Image,
    lie: impl Fn(&hostile::Request, &mut std::net::TcpStream) -> Option<()> + Send + Sync + 'static,
) -> (String, String, Folder) {
    let store = Folder::new();
    let registry = Hostile::start(image, lie);
    let mut job = job(&store.0, &registry.name());
    job["limits"] = json!({ "unpacked_bytes": 64 << 20, "entries": 1000, "seconds": seconds, "silence_seconds": 2, "memory_mib": 256 });
    let (kind, text) = cause(pull(&job));
    let (whole, half) = layers_in(&store.0);
    assert!(half.is_empty(), "{kind} {text}: {half:?}");
    assert!(whole == 0 || kind == "internal", "{kind} {text}");
    (kind, text, store)
}

fn small() -> Image {
    Image::of(&[LayerBuilder::new().file("x", 0o644, b"x").build(Packing::Gzip)])
}

#[test]
fn a_lying_registry_stores_nothing_in_the_vm() {
    let blob = |request: &hostile::Request| request.path.contains("/blobs/");
    let manifest = |request: &hostile::Request| request.path.contains("/manifests/");

    let (kind, text, _) = lies(small(), move |request, stream| {
        blob(request).then(|| answer(stream, "200 OK", "application/octet-stream", b"something else"))
    });
    assert_eq!(kind, "digest", "{text}");
    let wrong = Image::with(&[LayerBuilder::new().file("x", 0o644, b"x").build(Packing::Gzip)], |manifest| {
        manifest["layers"][0]["digest"] = json!(images_common::digest(b"another"));
    });
    assert_eq!(lies(wrong, |_, _| None).0, "not_found");
    let mut layer = LayerBuilder::new().file("x", 0o644, b"x").build(Packing::Gzip);
    layer.diff_id = images_common::digest(b"another");
    let (kind, text, _) = lies(Image::of(&[layer]), |_, _| None);
    assert!(kind == "digest" && text.contains("unpacked it is"), "{kind} {text}");

    // Endless data: a layer, and a manifest.
    let (kind, text, _) = lies(small(), move |request, stream| {
        blob(request).then(|| {
            head(stream, "200 OK", "");
            for_ever(stream, &[7; 65536], Duration::ZERO);
        })
    });
    assert!(kind == "digest" && text.contains("more bytes"), "{kind} {text}");
    let (kind, text, _) = lies(small(), move |request, stream| {
        manifest(request).then(|| {
            head(stream, "200 OK", "Content-Type: application/vnd.oci.image.manifest.v1+json\r\n");
            for_ever(stream, &[b' '; 1 << 20], Duration::ZERO);
        })
    });
    assert!(kind.contains("signal: 6") || kind == "unreachable", "bounded by its memory: {kind} {text}");

    // Slow data, and none at all.
    let (kind, text, _) = lies(small(), move |request, stream| {
        blob(request).then(|| {
            head(stream, "200 OK", "");
            std::thread::sleep(Duration::from_secs(60));
        })
    });
    assert!(kind == "unreachable" && text.contains("silent"), "{kind} {text}");
    let large = Image::of(&[LayerBuilder::new().file("x", 0o644, &[1; 4096]).build(Packing::Plain)]);
    let (kind, text, _) = lies_within(5, large, move |request, stream| {
        blob(request).then(|| {
            head(stream, "200 OK", "");
            for_ever(stream, b"x", Duration::from_millis(700));
        })
    });
    assert!(kind == "late" && text.contains("within 5 s"), "{kind} {text}");

    let (kind, text, _) = lies(small(), move |request, stream| {
        blob(request).then(|| {
            let to = format!("Location: http://{}{}\r\nContent-Length: 0\r\n", request.host, request.path);
            head(stream, "302 Found", &to);
        })
    });
    assert!(kind == "malformed" && text.contains("redirects in a circle"), "{kind} {text}");
}

#[test]
fn a_hostile_layer_stays_within_the_image() {
    let outside = Folder::new();
    let out = outside.0.to_str().unwrap().trim_start_matches('/').to_owned();
    let layer = || LayerBuilder::new();
    let bomb = {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
        let mut header = tar::Header::new_gnu();
        header.set_path("bomb").unwrap();
        header.set_size(1 << 30);
        header.set_mode(0o644);
        header.set_cksum();
        encoder.write_all(header.as_bytes()).unwrap();
        for _ in 0..1024 {
            encoder.write_all(&[0; 1 << 20]).unwrap();
        }
        let blob = encoder.finish().unwrap();
        let media_type = "application/vnd.oci.image.layer.v1.tar+gzip";
        Layer { blob, diff_id: images_common::digest(b""), media_type }
    };
    let many = (0..1100).fold(layer(), |layer, n| layer.file(&format!("f{n}"), 0o644, b""));
    let cases: Vec<(&str, Layer, &str)> = vec![
        ("upwards", layer().file("../out", 0o644, b"x").build(Packing::Plain), "malformed"),
        ("upwards within", layer().file("a/../../out", 0o644, b"x").build(Packing::Plain), "malformed"),
        ("link upwards", layer().hard_link("x", "../../etc/passwd").build(Packing::Plain), "malformed"),
        (
            "link to what is not there",
            layer().hard_link("x", "etc/passwd").build(Packing::Plain),
            "malformed",
        ),
        ("removal upwards", layer().file(".wh...", 0o644, b"").build(Packing::Plain), "malformed"),
        (
            "links in a circle",
            layer().symlink("a", "b").symlink("b", "a").file("a/x", 0o644, b"x").build(Packing::Plain),
            "malformed",
        ),
        (
            "below a file",
            layer().file("a", 0o644, b"").file("a/x", 0o644, b"x").build(Packing::Plain),
            "malformed",
        ),
        (
            "an unknown kind",
            layer().raw(tar::EntryType::new(b'Z'), b"z", 0o644, b"", b"").build(Packing::Plain),
            "malformed",
        ),
        ("not an archive", Layer::of(vec![b'x'; 2048], Packing::Gzip), "malformed"),
        ("a bomb", bomb, "too_large"),
        ("too many files", many.build(Packing::Gzip), "too_large"),
    ];
    for (name, layer, expected) in cases {
        let (kind, text, _) = lies(Image::of(&[layer]), |_, _| None);
        assert_eq!(kind, expected, "{name}: {text}");
    }
    // Links that lead out of the image are made unchanged, and files behind them land in the image.
    let store = Folder::new();
    let way_out = format!("/{out}");
    let layer = LayerBuilder::new()
        .symlink("abs", &way_out)
        .symlink("rel", "../../../../../../../../../../../../../../../../tmp")
        .dir(&format!("{out}/"), 0o755)
        .dir("tmp/", 0o755)
        .file("abs/through", 0o644, b"in")
        .file("rel/through", 0o644, b"in")
        .file("/absolute", 0o644, b"in")
        .file("rel/.wh.nothing", 0o644, b"")
        .build(Packing::Plain);
    let image = Image::of(&[layer]);
    let registry = Hostile::start(image, |_, _| None);
    let seen =
        inspect(&job(&store.0, &registry.name()), &format!("cat absolute tmp/through {out}/through; ls"));
    assert!(seen.starts_with("ininin"), "{seen}");
    assert_eq!(fs::read_dir(&outside.0).unwrap().count(), 0);
    assert!(!Path::new("/tmp/through").exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_container_runs_from_an_image_that_its_vm_pulled_with_a_secret() {
    let world = World::new().unwrap();
    let secret = world.folder().join("secret.json");
    // The node's own address in the VMs' network.
    let address = SocketAddr::from(([10, 99, 0, 1], PORT));
    let auths = json!({ "auths": { address.to_string(): { "username": "pod", "password": "geheim" } } });
    fs::write(&secret, auths.to_string()).unwrap();
    let name = format!("{address}/team/app:v1");
    let settings = Settings::none()
        .set("node.pull-secret", secret.to_str().unwrap())
        .set("node.plain-http-registries", address.to_string())
        .set("node.prefetch-images", name.as_str());
    let daemons = Daemons::start(&world, settings).await.unwrap();
    let pod = world.pod().unwrap();
    let shim = daemons.shim().await.unwrap();
    let id = fresh_id("image");
    // The VM's network appears with the first VM; the address must exist before.
    world.node().ip("address add 10.99.0.1/32 dev lo\n").unwrap();
    let netns = Some(world.node().name());
    let serving = Serving { secret: Some(("pod", "geheim")), at: Some(address), netns, ..Serving::default() };
    let image = ordinary();
    let registry = tokio::task::block_in_place(|| Registry::start(&[("team/app:v1", &image)], &serving));
    let socket =
        shim.create_vm(&id, Annotations::new("default", &id), &pod.namespace().path()).await.unwrap();
    tokio::time::timeout(PATIENCE, shim.start_vm(&id)).await.unwrap().unwrap();
    let agent = AgentClient::connect(&socket).await.unwrap();
    let mut sandbox = CreateSandboxRequest::new();
    sandbox.sandbox_id = id.clone();
    agent.create_sandbox(&sandbox).await.unwrap();

    // By its own name: without /proc, busybox does not find itself.
    let script = "busybox cat /old/one /tmp/made; ls /old; test -e /etc/passwd || echo alone; pwd";
    let mut container = of_image(&name, "main", &["/bin/sh", "-c", script]);
    container.OCI.as_mut().unwrap().Process.as_mut().unwrap().Cwd = "/work/dir".into();
    agent.create_container(&container).await.unwrap();
    agent.start_container("main").await.unwrap();
    let output = agent.output("main", "").await.unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(said, "onemadeone\nthree\nalone\n/work/dir\n", "{}", String::from_utf8_lossy(&output.stderr));

    // The response to the user names the fault of an image.
    let wrong = format!("{address}/team/app:v2");
    let error =
        agent.create_container(&of_image(&wrong, "second", &["/bin/sh"])).await.unwrap_err().to_string();
    assert!(error.contains("not found") && error.contains("team/app:v2"), "{error}");
    drop(registry);
    let error =
        agent.create_container(&of_image(&wrong, "third", &["/bin/sh"])).await.unwrap_err().to_string();
    assert!(error.contains("no route") && error.contains(&wrong), "{error}");

    // The image was fetched before the agent's request, and the log records that; no log contains the secret.
    let fetched = eventually_blocking("the relay's log tells of the image", PATIENCE, || {
        let log = fs::read_to_string(daemons.log("relay")).ok()?;
        log.lines()
            .find(|line| line.contains("image is here") && line.contains("early=true"))
            .map(str::to_owned)
    })
    .unwrap();
    assert!(fetched.contains("fetched=3"), "{fetched}");
    for daemon in ["node", "relay"] {
        let log = fs::read_to_string(daemons.log(daemon)).unwrap();
        assert!(!log.contains("geheim"), "{daemon}");
    }
    assert!(!peerpod_tests::vm::consoles(&daemons).contains("geheim"));
    agent.remove_container("main").await.unwrap();
    stop_in_time(&shim, &id).await.unwrap();
    daemons.gone(&id, PATIENCE).await.unwrap();
}

#[tokio::test]
async fn initdata_becomes_files_and_its_digest_is_kept() {
    let world = World::new().unwrap();
    let daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let (pod, shim, id) = (world.pod().unwrap(), daemons.shim().await.unwrap(), fresh_id("initdata"));
    let refused = |text: &str| Annotations::new("default", &id).hypervisor("cc_init_data", text);
    let netns = pod.namespace().path();
    let error =
        shim.create_vm(&id, refused("algorithm = \"crc\"\nversion = \"0.1.0\""), &netns).await.unwrap_err();
    assert!(error.to_string().contains("sha256, sha384 and sha512"), "{error}");
    let text = "algorithm = \"sha384\"\nversion = \"0.1.0\"\n[data]\n\"aa.toml\" = \"kbs\"\n\"policy.rego\" = \"package agent_policy\"\n";
    shim.create_vm(&id, refused(text), &netns).await.unwrap();
    tokio::time::timeout(PATIENCE, shim.start_vm(&id)).await.unwrap().unwrap();
    let sight = peerpod_world::Sight::of(&world, &[], &daemons).unwrap();
    let pid = sight.pids("peerpod-guest")[0];
    let run = Path::new("/proc").join(pid.to_string()).join("root/run/peerpod");
    assert_eq!(fs::read_to_string(run.join("aa.toml")).unwrap(), "kbs");
    assert_eq!(fs::read_to_string(run.join("policy.rego")).unwrap(), "package agent_policy");
    let expected = Command::new("sh")
        .args(["-c", &format!("printf %s '{text}' | sha384sum | cut -d' ' -f1")])
        .output()
        .unwrap();
    let digest = fs::read_to_string(run.join("initdata.digest")).unwrap();
    assert_eq!(digest, String::from_utf8_lossy(&expected.stdout).trim());
    stop_in_time(&shim, &id).await.unwrap();
    daemons.gone(&id, PATIENCE).await.unwrap();
}
