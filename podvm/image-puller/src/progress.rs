//! Counts the bytes of an image while its layers are fetched.

use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

use crate::process::say;
use crate::{Event, Fetched};

/// Least time between two reports.
const EVERY: Duration = Duration::from_secs(1);

/// Fetched bytes of each missing layer.
pub(crate) struct Progress {
    layers: RefCell<Vec<u64>>,
    of: u64,
    said: Cell<Option<Instant>>,
}

impl Progress {
    /// Begins with no bytes of these layers, which have this size together.
    pub(crate) fn new(layers: usize, of: u64) -> Progress {
        Progress { layers: RefCell::new(vec![0; layers]), of, said: Cell::default() }
    }

    /// Sets the bytes of one layer, and reports the sum at most once a second.
    pub(crate) fn set(&self, layer: usize, bytes: u64) {
        let mut layers = self.layers.borrow_mut();
        if let Some(known) = layers.get_mut(layer) {
            *known = bytes;
        }
        if self.said.get().is_none_or(|said| said.elapsed() >= EVERY) {
            self.said.set(Some(Instant::now()));
            say(&Event::Fetched(Fetched { bytes: layers.iter().sum(), of: self.of }));
        }
    }
}
