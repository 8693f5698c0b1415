//! Records of the link.
