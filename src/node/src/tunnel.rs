//! The room `tunnel`.
