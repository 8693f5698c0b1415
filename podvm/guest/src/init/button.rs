//! Watches the power button, with which a hypervisor asks a machine to switch itself off (ACPI).

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::time::Duration;

use peerpod_common::reactor;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::task::JoinSet;
use tokio::time::sleep;

/// `struct input_event`: a time of 16 bytes, type, code, value.
const EVENT: usize = 24;
const EV_KEY: u16 = 1;
const KEY_POWER: u16 = 116;
const MOST: usize = 8;
/// Interval between searches: button drivers come late, and some machines have none.
const LOOK: Duration = Duration::from_secs(10);

/// Waits until a button is pressed, if another program is pid 1 and perhaps no program listens.
pub(crate) async fn pressed() {
    let (mut buttons, mut watched, mut presses) = (Buttons::default(), 0, JoinSet::new());
    loop {
        buttons.inspect();
        for file in buttons.0[watched..].iter().filter_map(|(_, file)| file.try_clone().ok()) {
            presses.spawn(press(file));
        }
        watched = buttons.0.len();
        tokio::select! {
            Some(pressed) = presses.join_next() => match pressed {
                Ok(Ok(())) => return,
                Ok(Err(error)) => tracing::debug!(%error, "a power button was removed"),
                Err(_) => {}
            },
            () = sleep(LOOK) => {}
        }
    }
}

async fn press(button: File) -> io::Result<()> {
    let button = reactor::register(button.into(), Interest::READABLE)?;
    loop {
        let mut events = [0; EVENT * 16];
        let read = |button: &AsyncFd<OwnedFd>| Ok(nix::unistd::read(button, &mut events)?);
        match button.readable().await?.try_io(read) {
            Ok(Ok(0)) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(Ok(length)) if is_press(&events[..length]) => return Ok(()),
            Ok(Ok(_)) | Err(_) => {}
            Ok(Err(error)) => return Err(error),
        }
    }
}

#[derive(Default)]
pub(crate) struct Buttons(Vec<(PathBuf, File)>);

impl Buttons {
    pub(crate) fn inspect(&mut self) {
        let Ok(entries) = fs::read_dir("/sys/class/input") else { return };
        for entry in entries.filter_map(Result::ok) {
            let name = fs::read_to_string(entry.path().join("device/name")).unwrap_or_default();
            let device = PathBuf::from("/dev/input").join(entry.file_name());
            let is_new = !self.0.iter().any(|(known, _)| *known == device);
            if name.trim() != "Power Button" || !is_new || self.0.len() == MOST {
                continue;
            }
            let how = File::options().read(true).custom_flags(nix::libc::O_NONBLOCK).open(&device);
            match how {
                // A press before this line is lost: the kernel discards events that no program listens for.
                Ok(file) => {
                    tracing::info!(device = %device.display(), "watching the power button");
                    self.0.push((device, file));
                }
                // An `inputN` beside its `eventN` has no device of that name.
                Err(error) => tracing::debug!(device = %device.display(), %error, "no button"),
            }
        }
    }

    pub(crate) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.0.iter().map(|(_, file)| file.as_fd())
    }

    /// Returns whether a button was pressed since the last call.
    pub(crate) fn pressed(&mut self) -> bool {
        let mut pressed = false;
        for (_, file) in &mut self.0 {
            let mut events = [0; EVENT * 16];
            while let Ok(length) = file.read(&mut events) {
                pressed |= is_press(&events[..length]);
                if length < events.len() {
                    break;
                }
            }
        }
        pressed
    }
}

fn is_press(events: &[u8]) -> bool {
    events.chunks_exact(EVENT).any(|event| {
        let word = |at: usize| u16::from_ne_bytes([event[at], event[at + 1]]);
        (word(16), word(18)) == (EV_KEY, KEY_POWER) && event[20..24] == 1_i32.to_ne_bytes()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(kind: u16, code: u16, value: i32) -> Vec<u8> {
        [&[0; 16][..], &kind.to_ne_bytes(), &code.to_ne_bytes(), &value.to_ne_bytes()].concat()
    }

    #[test]
    fn only_a_press_of_the_power_key_counts() {
        assert!(is_press(&[event(0, 0, 0), event(EV_KEY, KEY_POWER, 1)].concat()));
        assert!(!is_press(&event(EV_KEY, KEY_POWER, 0)), "let go");
        assert!(!is_press(&event(EV_KEY, 30, 1)));
        assert!(!is_press(&event(EV_KEY, KEY_POWER, 1)[..20]));
        assert!(!is_press(&[]));
    }
}
