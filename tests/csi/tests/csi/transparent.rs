//! Tests that calls for other volumes pass the wrapper unchanged.

#![cfg(test)]

use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

use anyhow::Result;
use peerpod_test_csi::grpc::Client;
use peerpod_test_csi::{Driver, Folder, Wrapper, calls, eventually, long, report, sanity};

/// Name, flags of the driver, flags of csi-sanity.
type Row = (&'static str, Vec<&'static str>, Vec<String>);

/// Returns the sets of cases.
fn rows(folder: &Folder) -> Result<Vec<Row>> {
    let mutable = folder.path("mutable.yaml");
    std::fs::write(&mutable, "mutableKey: \"value\"\n")?;
    let mutable = format!("--csi.testvolumemutableparameters={}", mutable.display());
    let mut rows = vec![
        (
            "all",
            vec!["--attach-limit=3", "--topology"],
            vec![mutable, "--csi.testnodevolumeattachlimit".to_owned()],
        ),
        ("no-attach", vec!["--disable-attach"], Vec::new()),
    ];
    if long() {
        rows.push(("attach", Vec::new(), Vec::new()));
        rows.push(("block", Vec::new(), vec!["--csi.testvolumeaccesstype=block".to_owned()]));
        rows.push(("group", vec!["--mount-group"], Vec::new()));
    }
    Ok(rows)
}

#[test]
fn csi_sanity_gives_the_same_result_with_and_without_us() -> Result<()> {
    let (mut direct_passed, mut through_passed) = (0, 0);
    let folder = Folder::new("rows")?;
    for (row, driver_flags, flags) in rows(&folder)? {
        let folder = Folder::new(row)?;
        let driver = Driver::start(&folder, &driver_flags)?;
        let direct = sanity::run(&folder, "direct", &driver.socket, None, &flags)?;
        drop(driver);
        let _driver = Driver::start(&folder, &driver_flags)?;
        let controller = Wrapper::start("controller", &folder, &[])?;
        let node = Wrapper::start("node", &folder, &[])?;
        let through = sanity::run(&folder, "through", &node.socket, Some(&controller.socket), &flags)?;
        println!(
            "{row}: direct {} passed, {} failed, {} skipped; through us {}, {}, {}",
            direct.count("passed"),
            direct.count("failed"),
            direct.count("skipped"),
            through.count("passed"),
            through.count("failed"),
            through.count("skipped"),
        );
        assert!(direct.count("passed") > 60 && direct.count("failed") == 0, "{:?}", direct.which("failed"));
        assert_eq!(direct, through, "row {row}");
        direct_passed = direct_passed.max(direct.count("passed"));
        through_passed = through_passed.max(through.count("passed"));
    }
    report("csi_sanity_direct_passed", direct_passed as f64);
    report("csi_sanity_transparent_passed", through_passed as f64);
    Ok(())
}

/// Checks that unknown services, streams, metadata and a status with details have the same bytes as from the driver
/// itself.
#[tokio::test]
async fn unknown_messages_pass_byte_for_byte() -> Result<()> {
    let folder = Folder::new("bytes")?;
    let driver = Driver::start(&folder, &[])?;
    for role in ["controller", "node"] {
        let wrapper = Wrapper::start(role, &folder, &[])?;
        let (mut direct, mut through) =
            (Client::connect(&driver.socket).await?, Client::connect(&wrapper.socket).await?);
        let large = vec![7; 3 << 20];
        let metadata = [("x-one", "1 %"), ("x-two-bin", "AAEC"), ("grpc-accept-encoding", "identity")];
        for path in [
            "/csi.v1.SnapshotMetadata/GetMetadataAllocated",
            "/csi.v1.GroupController/CreateVolumeGroupSnapshot",
            "/csi.v99.Alpha/Fail",
            "/csi.v99.Alpha/Echo",
            "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        ] {
            for messages in [&[][..], &[b"".as_slice()], &[b"one", b"", b"three"], &[&large]] {
                let here = direct.call(path, messages, &metadata).await?;
                let there = through.call(path, messages, &metadata).await?;
                assert_eq!(here, there, "{path}");
                if path.ends_with("/Fail") {
                    assert_eq!(there.code(), 8);
                    assert!(
                        there.headers.contains_key("grpc-status-details-bin")
                            || there.trailers.contains_key("grpc-status-details-bin")
                    );
                }
            }
        }
        let late = through.call("/csi.v99.Alpha/Echo", &[b"x"], &[("grpc-timeout", "7S")]).await?;
        let left: u64 = late.headers["x-deadline-ms"].to_str()?.parse()?;
        assert!((1..=7000).contains(&left), "the deadline is passed on: {left} ms");
    }
    Ok(())
}

#[tokio::test]
async fn a_cancelled_call_is_cancelled_at_the_driver() -> Result<()> {
    let folder = Folder::new("cancel")?;
    let _driver = Driver::start(&folder, &[])?;
    let wrapper = Wrapper::start("node", &folder, &[])?;
    let mut client = Client::connect(&wrapper.socket).await?;
    let mut caller = client.clone();
    let hanging =
        tokio::spawn(async move { caller.call("/csi.v99.Alpha/Hang", &[b"x"], &[]).await.map(drop) });
    let noted = |what: &str| calls::of(&folder, what).is_ok_and(|calls| !calls.is_empty());
    let began = Instant::now();
    while !noted("Hang#began") {
        assert!(began.elapsed() < Duration::from_secs(30), "the call did not arrive");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    hanging.abort();
    while !noted("Hang#cancelled") {
        assert!(began.elapsed() < Duration::from_secs(30), "the driver did not notice");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    // The wrapper enforces the caller's deadline when the driver does not.
    let late = client.call("/csi.v99.Alpha/Hang", &[b"x"], &[("grpc-timeout", "300m")]).await?;
    assert_eq!(late.code(), 4, "{}", late.message());
    Ok(())
}

#[tokio::test]
async fn a_driver_that_is_away_is_unavailable_and_comes_back() -> Result<()> {
    let folder = Folder::new("away")?;
    let wrapper = Wrapper::start("controller", &folder, &[])?;
    let mut client = Client::connect(&wrapper.socket).await?;
    const PROBE: &str = "/csi.v1.Identity/Probe";
    let answer = client.call(PROBE, &[b""], &[]).await?;
    assert_eq!(answer.code(), 14);
    assert!(answer.message().contains("driver.sock"), "{}", answer.message());
    for _ in 0..3 {
        let driver = Driver::start(&folder, &[])?;
        assert_eq!(client.call(PROBE, &[b""], &[]).await?.code(), 0);
        let mut caller = client.clone();
        let hanging = tokio::spawn(async move { caller.call("/csi.v99.Alpha/Hang", &[b"x"], &[]).await });
        while calls::of(&folder, "Hang#began")?.is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        std::fs::remove_file(folder.path("calls.json"))?;
        drop(driver);
        assert_eq!(hanging.await??.code(), 14, "a call under way when the driver ends");
        assert_eq!(client.call(PROBE, &[b""], &[]).await?.code(), 14);
    }
    Ok(())
}

#[test]
fn a_wrapper_that_ends_removes_its_own_socket_alone() -> Result<()> {
    let folder = Folder::new("socket")?;
    for role in ["controller", "node"] {
        for replaced in [false, true] {
            let wrapper = Wrapper::start(role, &folder, &[])?;
            let _successor = replaced.then(|| {
                std::fs::remove_file(&wrapper.socket)?;
                UnixListener::bind(&wrapper.socket)
            });
            wrapper.process.signal("TERM")?;
            let (mut process, socket) = (wrapper.process, wrapper.socket);
            eventually("the wrapper's end", || process.check().is_err())?;
            assert_eq!(socket.exists(), replaced, "{role}");
        }
    }
    Ok(())
}

/// Makes the same calls directly and through the wrapper in turn, so that both see the same load.
#[tokio::test]
async fn a_passing_call_takes_little_longer() -> Result<()> {
    let folder = Folder::new("latency")?;
    let driver = Driver::start(&folder, &[])?;
    let wrapper = Wrapper::start("node", &folder, &[])?;
    let (mut direct, mut through) =
        (Client::connect(&driver.socket).await?, Client::connect(&wrapper.socket).await?);
    let (mut one, mut other) = (Vec::new(), Vec::new());
    for round in 0..2200 {
        for (client, times) in [(&mut direct, &mut one), (&mut through, &mut other)] {
            let began = Instant::now();
            let answer = client.call("/csi.v1.Identity/GetPluginInfo", &[b""], &[]).await?;
            assert_eq!(answer.code(), 0);
            if round >= 200 {
                times.push(began.elapsed());
            }
        }
    }
    let middle = |times: &mut Vec<Duration>| {
        times.sort_unstable();
        times[times.len() / 2].as_secs_f64() * 1e6
    };
    let (direct, through) = (middle(&mut one), middle(&mut other));
    println!("GetPluginInfo, p50: direct {direct:.0} µs, through us {through:.0} µs");
    report("csi_proxy_added_p50_us", through - direct);
    Ok(())
}
