//! Generates messages and ttrpc services from `protos/`; pure Rust, no protoc needed.

use std::fmt::Write;
use std::{env, fs};

use ttrpc_codegen::{Codegen, Customize};

const PROTOS: &[&str] = &[
    "agent",
    "csi",
    "guest",
    "hub",
    "hypervisor",
    "intercept",
    "node",
    "podvminfo",
    "provider",
    "relay",
    "ttrpc_frame",
    "volumes",
];

fn main() -> std::io::Result<()> {
    println!("cargo::rerun-if-changed=protos");
    let out = env::var("OUT_DIR").expect("cargo sets OUT_DIR for build scripts");
    let inputs: Vec<String> = PROTOS.iter().map(|name| format!("protos/{name}.proto")).collect();
    Codegen::new()
        .out_dir(&out)
        .inputs(&inputs)
        .include("protos")
        .rust_protobuf()
        .customize(Customize { async_all: true, ..Default::default() })
        .run()?;

    // The generator changes the service's capitals; the wire needs the .proto's name.
    let path = format!("{out}/podvminfo_ttrpc.rs");
    let generated = fs::read_to_string(&path)?;
    fs::write(path, generated.replace("podvminfo.PodVmInfo", "podvminfo.PodVMInfo"))?;

    // The generated files begin with inner attributes, so they must be modules of their own, not included.
    let mut modules = String::new();
    for name in PROTOS.iter().flat_map(|name| [name.to_string(), format!("{name}_ttrpc")]) {
        let path = format!("{out}/{name}.rs");
        if fs::exists(&path)? {
            writeln!(modules, "#[path = {path:?}]\npub mod {name};").expect("writing to a String");
        }
    }
    fs::write(format!("{out}/modules.rs"), modules)
}
