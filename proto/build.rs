//! Generates messages and ttrpc services from `protos/`; pure Rust, no protoc needed.

use std::fmt::Write;
use std::{env, fs};

use ttrpc_codegen::{Codegen, Customize};

fn main() -> std::io::Result<()> {
    println!("cargo::rerun-if-changed=protos");
    let out = env::var("OUT_DIR").expect("cargo sets OUT_DIR for build scripts");
    let mut protos =
        fs::read_dir("protos")?.map(|one| Ok(one?.path())).collect::<std::io::Result<Vec<_>>>()?;
    protos.sort();
    Codegen::new()
        .out_dir(&out)
        .inputs(&protos)
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
    for proto in protos.iter().filter_map(|proto| proto.file_stem()?.to_str()) {
        for name in [proto.to_owned(), format!("{proto}_ttrpc")] {
            let path = format!("{out}/{name}.rs");
            if fs::exists(&path)? {
                writeln!(modules, "#[path = {path:?}]\npub mod {name};").expect("writing to a String");
            }
        }
    }
    fs::write(format!("{out}/modules.rs"), modules)
}
