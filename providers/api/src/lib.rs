//! The provider trait, its types and errors, the decorator, the conformance suite.
