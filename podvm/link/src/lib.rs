//! What both ends of the link share: secure channel, session, ttrpc frames, network over netlink.
