//! The parts of each node in the archive of a cluster: its own sysdump, by its pod of `peerpod-node`. It may touch:
//! kubectl.

use std::io::Read;
use std::path::{Component, Path};
use std::pin::pin;
use std::time::Duration;

use anyhow::{Context, ensure};
use flate2::read::GzDecoder;
use futures_util::{StreamExt as _, stream};
use k8s_openapi::api::core::v1::Pod;
use peerpod_base::chain::chain;
use tar::Archive;
use tokio::time::{Instant, timeout_at};

use super::{Dump, FOLDER};
use crate::source::Cluster;

/// Most nodes that are asked.
const NODES: usize = 100;
/// Nodes that are asked at the same time, each by a process of kubectl.
const AT_ONCE: usize = 4;
/// Time limit of one node. A node limits the time for its sandboxes to three minutes.
const ANSWER: Duration = Duration::from_secs(300);
/// Time limit of all nodes together.
const ALL: Duration = Duration::from_secs(600);
/// Size limits of one node's archive, in bytes: packed, and unpacked.
const PACKED: u64 = 16 << 20;
const UNPACKED: u64 = 64 << 20;
/// Most parts of one node.
const PARTS: usize = 2000;

/// Adds the parts of each node below `nodes/NAME/`. A node without an answer has one part, with the reason.
pub(super) async fn collect(dump: &mut Dump, cluster: &Cluster) -> anyhow::Result<()> {
    let daemons = match cluster.daemons_of_vms().await {
        Ok(daemons) => daemons,
        Err(error) => return dump.failed("nodes", &error),
    };
    let until = Instant::now() + ALL;
    let mut pods = 0;
    let numbered = daemons.into_iter().map(|(node, pod)| {
        let number = pods;
        pods += usize::from(pod.is_ok());
        (number, node, pod)
    });
    let asked = stream::iter(numbered).map(async |(number, node, pod)| {
        let answer = ask(cluster, number, pod, until).await;
        (node, answer)
    });
    let mut answers = pin!(asked.buffered(AT_ONCE));
    while let Some((node, answer)) = answers.next().await {
        add(dump, &node, answer)?;
    }
    Ok(())
}

async fn ask(
    cluster: &Cluster,
    number: usize,
    pod: Result<Pod, String>,
    until: Instant,
) -> anyhow::Result<Vec<u8>> {
    ensure!(number < NODES, "left out: only {NODES} nodes are asked");
    let pod = pod.map_err(anyhow::Error::msg)?;
    let answer = timeout_at(until, cluster.sysdump(&pod, ANSWER, PACKED)).await;
    answer.with_context(|| format!("all nodes together took longer than {ALL:?}"))?
}

fn add(dump: &mut Dump, node: &str, answer: anyhow::Result<Vec<u8>>) -> anyhow::Result<()> {
    let folder = format!("nodes/{node}");
    match answer {
        Ok(archive) => match unpack(dump, &folder, &archive) {
            Ok(()) => Ok(()),
            Err(error) => dump.failed(&folder, &error.context("the rest of its archive is left out")),
        },
        Err(error) => {
            dump.failed(&folder, &error)?;
            dump.text(&format!("{folder}/no-answer.txt"), &chain(error.as_ref()))
        }
    }
}

/// Adds the parts of a node's archive. The node removed secrets; a node of another version may know fewer of them.
fn unpack(dump: &mut Dump, folder: &str, archive: &[u8]) -> anyhow::Result<()> {
    let mut archive = Archive::new(GzDecoder::new(archive).take(UNPACKED));
    for (number, entry) in archive.entries().context("read the node's archive")?.enumerate() {
        ensure!(number < PARTS, "it has more than {PARTS} parts");
        ensure!(!dump.is_full, "the archive is full");
        let mut entry = entry.context("read the node's archive")?;
        let name = name_of(&entry.path().context("read the node's archive")?)?;
        ensure!(entry.header().entry_type().is_file(), "{name} is no file");
        let (mut bytes, size) = (Vec::new(), entry.size());
        entry.read_to_end(&mut bytes).with_context(|| format!("read {name} in the node's archive"))?;
        let is_whole = u64::try_from(bytes.len()).is_ok_and(|length| length == size);
        ensure!(
            is_whole,
            "{name} is cut: an archive of more than {UNPACKED} bytes is made by peerpod sysdump on the node"
        );
        dump.text(&format!("{folder}/{name}"), &String::from_utf8_lossy(&bytes))?;
    }
    Ok(())
}

/// Name of a part, without the folder of all parts. A path that leads elsewhere is refused.
fn name_of(path: &Path) -> anyhow::Result<String> {
    let inner = path.strip_prefix(FOLDER).ok();
    let inner = inner.filter(|inner| inner.components().all(|part| matches!(part, Component::Normal(_))));
    let name = inner.and_then(Path::to_str).filter(|name| !name.is_empty());
    Ok(name.with_context(|| format!("{} is no path of a part", path.display()))?.to_owned())
}

#[cfg(test)]
mod tests {
    use flate2::Compression;
    use flate2::write::GzEncoder;
    use tar::{Builder, Header};

    use super::*;
    use crate::sysdump::tests::small;

    /// Packs parts with these paths, which may be those of an attacker.
    fn pack(parts: &[(&str, &str)]) -> Vec<u8> {
        let mut archive = Builder::new(GzEncoder::new(Vec::new(), Compression::fast()));
        for (path, text) in parts {
            let mut header = Header::new_gnu();
            header.as_gnu_mut().unwrap().name[..path.len()].copy_from_slice(path.as_bytes());
            header.set_size(text.len() as u64);
            header.set_cksum();
            archive.append(&header, text.as_bytes()).unwrap();
        }
        archive.into_inner().unwrap().finish().unwrap()
    }

    #[test]
    fn a_bad_node_loses_no_part_of_another_and_leaves_its_folder_never() {
        let mut dump = small("nodes", 1 << 20);
        let good = pack(&[("peerpod-sysdump/node/readyz.txt", "ready\npassword: hunter2\n")]);
        add(&mut dump, "away", Err(anyhow::anyhow!("connect: refused"))).unwrap();
        for path in ["peerpod-sysdump/../x", "/etc/passwd", "peerpod-sysdump/", "other/x"] {
            let bad = pack(&[("peerpod-sysdump/a.txt", "a"), (path, "x")]);
            add(&mut dump, "bad", Ok(bad)).unwrap();
        }
        add(&mut dump, "cut", Ok(good[..good.len() / 2].to_vec())).unwrap();
        add(&mut dump, "good", Ok(good)).unwrap();
        let names: Vec<&str> = dump.parts.iter().map(|(name, _)| name.as_str()).collect();
        let bad = ["nodes/bad/a.txt"; 4];
        let expected = [&["nodes/away/no-answer.txt"][..], &bad, &["nodes/good/node/readyz.txt"]].concat();
        assert_eq!(names, expected);
        assert_eq!(dump.failures.len(), 6, "{:?}", dump.failures);
        assert_eq!(dump.failures[0], "nodes/away: connect: refused");
        assert_eq!(dump.parts.last().unwrap().1, hidden("ready\npassword: hunter2\n"));
    }

    /// Size of a text without its secrets.
    fn hidden(text: &str) -> usize {
        let text = crate::sysdump::hide::text(text);
        assert!(!text.contains("hunter2"), "{text}");
        text.len()
    }
}
