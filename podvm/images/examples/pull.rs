//! One job by hand, as `peerpod-guest pull` does it: `echo '{"image":…,"store":…,"bundle":null}' | pull`.

use std::process::ExitCode;

fn main() -> ExitCode {
    peerpod_images::run()
}
