//! The room `rpc`.
