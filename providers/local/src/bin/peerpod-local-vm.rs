//! `peerpod-local-vm`: started by the local provider, once per VM, with the VM's description on its standard
//! input. Not for people; see `peerpod_provider_local::vm`.

use std::process::ExitCode;

fn main() -> ExitCode {
    peerpod_provider_local::vm::main()
}
