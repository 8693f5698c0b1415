//! Waits until the kernel has random numbers, with a log line and a time limit: keys are made of them.

use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};

const STEP: Duration = Duration::from_millis(20);
/// Time limit, after which this program ends, and pid 1 checks the lease.
const LIMIT: Duration = Duration::from_secs(120);
const SAID_EVERY: Duration = Duration::from_secs(10);

/// Returns whether a read of random numbers would not block.
pub(crate) fn is_there() -> bool {
    getrandom(&mut [0_u8], GetRandomFlags::NONBLOCK).is_ok()
}

/// Returns as soon as a read of random numbers cannot block.
pub(crate) fn wait() -> anyhow::Result<()> {
    let began = Instant::now();
    let mut said: Option<Instant> = None;
    loop {
        match getrandom(&mut [0_u8], GetRandomFlags::NONBLOCK) {
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) if began.elapsed() < LIMIT => {
                if said.is_none_or(|said| said.elapsed() > SAID_EVERY) {
                    tracing::warn!("waiting for the kernel's random numbers");
                    said = Some(Instant::now());
                }
                std::thread::sleep(STEP);
            }
            Err(Errno::AGAIN) => bail!(
                "the kernel has no random numbers after {LIMIT:?}: give the VM a virtio-rng device (and the image the \
                 module), or a processor with RDRAND"
            ),
            Err(error) => return Err(error).context("asking the kernel for random numbers"),
        }
    }
}
