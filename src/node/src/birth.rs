//! The room `birth`.
