//! Holds the sockets of the shims and the links of the guests; outlives every upgrade.
