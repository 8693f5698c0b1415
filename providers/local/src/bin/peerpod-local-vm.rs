//! `peerpod-local-vm`: the local provider starts it once per VM, with the VM's description on its standard input. Not
//! for interactive use; see `peerpod_provider_local::vm`.

use std::process::ExitCode;

fn main() -> ExitCode {
    peerpod_provider_local::vm::main()
}
