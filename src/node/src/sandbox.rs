//! The room `sandbox`.
