//! Gives up what the process does not need, before its first thread and before anybody can speak to it: threads made
//! later inherit the rest. The relay opens its own files, binds its own sockets and needs no capability for it (one,
//! when it is told to listen on a port below 1024).
//!
//! System call filtering is left to the service manager or the container's profile (`RuntimeDefault` fits): a list of
//! our own would have to follow every allocator, runtime and C library it is built with.

use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities, set_no_new_privs};

/// Ports from here on need no capability.
const FIRST_FREE_PORT: u16 = 1024;

/// No new privileges, and no capabilities. What the kernel refuses is logged: it makes nothing unsafe that was safe.
pub fn harden(listen_port: u16) {
    if let Err(error) = set_no_new_privs(true) {
        tracing::warn!(%error, "no_new_privs is not set");
    }
    let keep = if (1..FIRST_FREE_PORT).contains(&listen_port) {
        CapabilitySet::NET_BIND_SERVICE
    } else {
        CapabilitySet::empty()
    };
    let sets = match rustix::thread::capabilities(None) {
        Ok(now) => CapabilitySets {
            effective: now.effective & keep,
            permitted: now.permitted & keep,
            inheritable: CapabilitySet::empty(),
        },
        Err(error) => {
            tracing::warn!(%error, "capabilities are not read, and stay");
            return;
        }
    };
    if let Err(error) = set_capabilities(None, sets) {
        tracing::warn!(%error, "capabilities are not given up");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_keeps_nothing_and_can_still_bind_a_socket() {
        // Capabilities are a thread's own: the other tests keep theirs.
        let hardened = std::thread::spawn(|| {
            harden(15151);
            let sets = rustix::thread::capabilities(None).unwrap();
            assert!(sets.effective.is_empty() && sets.permitted.is_empty());
            std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        });
        hardened.join().unwrap();
    }
}
