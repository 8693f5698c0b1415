//! The room `config`.
