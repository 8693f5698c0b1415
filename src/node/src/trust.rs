//! The room `trust`.
