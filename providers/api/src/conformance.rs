//! The suite every provider passes.
