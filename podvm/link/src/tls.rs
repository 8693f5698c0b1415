//! TLS 1.3 with a pinned CA.
