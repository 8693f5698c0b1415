//! The pod's network over netlink.
