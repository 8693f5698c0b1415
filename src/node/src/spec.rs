//! The room `spec`.
