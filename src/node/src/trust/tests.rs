//! Certificates as a TLS peer sees them, and the CA as a restarted node finds it.
