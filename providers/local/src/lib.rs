//! A VM out of namespaces that runs peerpod-guest.
