//! The images: of the chart's containers, of a CSI driver's, and of the VMs.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::Context;
use peerpod_test_kube::{program, project};
use peerpod_world::{World, binary};
use serde_json::{Value, json};

use super::succeed;
use crate::images_common::{Image, Layer, LayerBuilder, Packing};

/// Programs of the container image.
const PROGRAMS: [&str; 5] = ["peerpod-node", "peerpod-relay", "peerpod-cluster", "peerpod-csi", "peerpod"];

/// Returns the container image as deploy/Dockerfile makes it, of the test's programs without their symbols.
pub(super) fn container(folder: &Path) -> anyhow::Result<Image> {
    let out = folder.join("dist");
    let built = binary("peerpod-dist")?;
    let from = built.parent().context("the programs' folder")?;
    let mut command = Command::new(&built);
    command.current_dir(project("")).arg("--from").arg(from).arg("--out").arg(&out);
    for program in PROGRAMS {
        command.arg("--program").arg(program);
    }
    succeed(&mut command)?;
    let root = out.join("rootfs");
    for program in PROGRAMS {
        succeed(Command::new("strip").arg(root.join("usr/bin").join(program)))?;
    }
    let mut tar = tar::Builder::new(Vec::new());
    tar.follow_symlinks(false);
    tar.append_dir_all("", &root)?;
    let layer = Layer::of(tar.into_inner()?, Packing::Plain);
    Ok(Image::configured(&[layer], |config| *config = json!({ "User": "65532:65532" })))
}

/// Builds the minimal image with Kata's agent, and returns its description.
pub(super) fn vm(world: &World, folder: &Path) -> anyhow::Result<Value> {
    let target = binary("peerpod-image")?;
    let target = target.ancestors().nth(2).context("the target folder")?;
    let built = target.join("x86_64-unknown-linux-musl/image");
    let kata = world.folder().join("kata/pause_bundle");
    let agent = folder.join("kata-agent");
    fs::copy(kata.join("kata-agent"), &agent)?;
    succeed(
        Command::new(binary("peerpod-image")?)
            .current_dir(project(""))
            .args(["minimal", "--newest-if-gone", "--cache"])
            .arg(target.join("image/cache"))
            .arg("--guest")
            .arg(built.join("peerpod-guest"))
            .arg("--pull")
            .arg(built.join("peerpod-pull"))
            .arg("--kata-agent")
            .arg(agent)
            .arg("--pause-bundle")
            .arg(kata)
            .arg("--out")
            .arg(folder.join("vm")),
    )?;
    Ok(serde_json::from_slice(&fs::read(folder.join("vm/image.json"))?)?)
}

/// Returns an image with one program of `tests/csi/build sidecars`, which is its entry point.
pub(super) fn of_csi(name: &str) -> anyhow::Result<Image> {
    let path = program(&format!("csi/{name}")).context("build it first (tests/csi/build sidecars)")?;
    let layer = LayerBuilder::new().file(name, 0o755, &fs::read(path)?).build(Packing::Plain);
    Ok(Image::configured(&[layer], |config| *config = json!({ "Entrypoint": [format!("/{name}")] })))
}
