//! The room `ledger`.
