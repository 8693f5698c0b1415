//! The room `metrics`.
