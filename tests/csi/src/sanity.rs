//! Runs csi-sanity and reads its result of each case.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

use crate::Folder;
use crate::process::tool;

/// Result of each case: `passed`, `failed`, `skipped`, `pending`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cases(pub BTreeMap<String, String>);

impl Cases {
    /// Returns the number of cases with this result.
    pub fn count(&self, status: &str) -> usize {
        self.0.values().filter(|is| *is == status).count()
    }

    /// Returns the cases with this result.
    pub fn which(&self, status: &str) -> Vec<&str> {
        self.0.iter().filter(|(_, is)| *is == status).map(|(name, _)| name.as_str()).collect()
    }
}

/// csi-sanity waits for a change of its connection's state. If the connection is ready before the wait begins,
/// csi-sanity waits a minute and fails with this text. That is independent of the tested program.
const NEVER_ASKED: &str = "Connection timed out";
const TRIES: u32 = 4;

/// Runs csi-sanity against these sockets (the second is the controller's, if that is separate). Its targets are in a
/// folder of this name, its output in `<name>.out`.
///
/// # Errors
/// When it does not run to its end.
pub fn run(
    folder: &Folder,
    name: &str,
    node: &Path,
    controller: Option<&Path>,
    flags: &[String],
) -> Result<Cases> {
    for _ in 1..TRIES {
        let cases = run_once(folder, name, node, controller, flags)?;
        let said = std::fs::read_to_string(folder.path(&format!("{name}.out")))?;
        if cases.count("failed") == 0 || !said.contains(NEVER_ASKED) {
            return Ok(cases);
        }
        println!("csi-sanity {name}: {:?} sent no call; once more", cases.which("failed"));
    }
    run_once(folder, name, node, controller, flags)
}

fn run_once(
    folder: &Folder,
    name: &str,
    node: &Path,
    controller: Option<&Path>,
    flags: &[String],
) -> Result<Cases> {
    let junit = folder.path(&format!("{name}.xml"));
    std::fs::create_dir_all(folder.path("kubelet"))?;
    let mut command = Command::new(tool("csi-sanity")?);
    command
        .arg(format!("--csi.endpoint=unix://{}", node.display()))
        .arg(format!("--csi.mountdir={}", folder.path(&format!("kubelet/{name}-target")).display()))
        .arg(format!("--csi.stagingdir={}", folder.path(&format!("kubelet/{name}-staging")).display()))
        .arg(format!("--ginkgo.junit-report={}", junit.display()))
        .args(["--ginkgo.no-color", "--ginkgo.seed=1"])
        .args(flags);
    if let Some(controller) = controller {
        command.arg(format!("--csi.controllerendpoint=unix://{}", controller.display()));
    }
    let out = File::create(folder.path(&format!("{name}.out")))?;
    // The exit status only shows whether all cases passed; the report has the results.
    command.stdout(out.try_clone()?).stderr(out).status()?;
    let text = std::fs::read_to_string(&junit)
        .with_context(|| format!("csi-sanity wrote no {}", junit.display()))?;
    let options = roxmltree::ParsingOptions { allow_dtd: false, ..Default::default() };
    let document = roxmltree::Document::parse_with_options(&text, options)?;
    let mut cases = BTreeMap::new();
    for case in document.descendants().filter(|node| node.has_tag_name("testcase")) {
        let name = case.attribute("name").context("a case without a name")?;
        cases.insert(name.to_owned(), case.attribute("status").unwrap_or_default().to_owned());
    }
    Ok(Cases(cases))
}
