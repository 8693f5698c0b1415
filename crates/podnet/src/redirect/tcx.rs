//! Counts other owners' programs at a device's "tcx" hook, which runs before all tc filters (Linux 6.6 and later; newer
//! Cilium attaches there). This program attaches none there, and no notification reports their coming and going.

use std::io;

use nix::errno::Errno;
use nix::libc;

use crate::inspect::Interface;
use crate::netns::Netns;

const BPF_PROG_QUERY: libc::c_long = 16;
const BPF_TCX_INGRESS: u32 = 46;

/// `union bpf_attr` for BPF_PROG_QUERY, in the shortest form that kernels with this hook accept.
#[repr(C)]
#[derive(Default)]
struct Query {
    device: u32,
    hook: u32,
    query_flags: u32,
    attach_flags: u32,
    ids: u64,
    count: u32,
    padding: u32,
    attach_flags_of: u64,
    link_ids: u64,
    attach_flags_of_links: u64,
    revision: u64,
}

/// Returns, as text, the programs before the redirects of these interfaces of a pod. Empty without the hook.
pub fn obstacles(netns: &Netns, interfaces: &[Interface]) -> io::Result<Vec<String>> {
    netns.run(|| interfaces.iter().filter_map(obstacle).collect())
}

fn obstacle(interface: &Interface) -> Option<String> {
    match count(interface.index) {
        Ok(0) => None,
        Ok(programs) => Some(format!(
            "{programs} foreign programs (tcx) come before the redirect of {}, and packets that they end do \
             not reach the VM; have them return TCX_NEXT",
            interface.name
        )),
        Err(error) => {
            // EINVAL: a kernel without the hook.
            if error.raw_os_error() != Some(Errno::EINVAL as i32) {
                tracing::debug!(%error, interface = interface.name, "cannot ask for tcx programs");
            }
            None
        }
    }
}

/// Returns the number of programs at the hook of a device in the calling thread's namespace.
#[allow(unsafe_code)] // no dependency has bpf(2), and a crate for one call would bring a loader
fn count(device: u32) -> io::Result<u32> {
    let mut query = Query { device, hook: BPF_TCX_INGRESS, ..Query::default() };
    // SAFETY: the kernel reads and writes at most `size_of::<Query>()` bytes at `query`, which outlives the call. The
    // query has no room for identifiers, so the kernel writes the count alone.
    let answer = unsafe {
        libc::syscall(libc::SYS_bpf, BPF_PROG_QUERY, std::ptr::from_mut(&mut query), size_of::<Query>())
    };
    if answer == 0 { Ok(query.count) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::process::Command;

    use super::*;
    use crate::redirect::bpf::{Also, loaded};

    const BPF_PROG_ATTACH: libc::c_long = 8;

    /// The beginning of `union bpf_attr` for BPF_PROG_ATTACH.
    #[repr(C)]
    struct Attach {
        device: u32,
        program: i32,
        hook: u32,
        flags: u32,
        replaced: u32,
        relative: u32,
        revision: u64,
    }

    #[allow(unsafe_code)] // as above
    fn attach(device: u32, program: i32) -> io::Result<()> {
        let attach = Attach {
            device,
            program,
            hook: BPF_TCX_INGRESS,
            flags: 0,
            replaced: 0,
            relative: 0,
            revision: 0,
        };
        // SAFETY: the kernel reads `size_of::<Attach>()` bytes at `attach`, which outlives the call.
        let answer = unsafe {
            libc::syscall(libc::SYS_bpf, BPF_PROG_ATTACH, std::ptr::from_ref(&attach), size_of::<Attach>())
        };
        if answer == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    #[test]
    fn a_program_at_tcx_is_named_with_its_interface_and_others_are_not() {
        let netns = Netns::scratch().unwrap();
        let add =
            || Command::new("ip").args(["link", "add", "a0", "type", "veth", "peer", "name", "a1"]).status();
        assert!(netns.run(add).unwrap().unwrap().success());
        let index = |name: &str| netns.run(|| nix::net::if_::if_nametoindex(name)).unwrap().unwrap();
        let interfaces: Vec<Interface> = ["a0", "a1"]
            .map(|name| Interface { name: name.to_owned(), index: index(name), ..Interface::default() })
            .into();
        assert_eq!(obstacles(&netns, &interfaces).unwrap(), [""; 0]);
        let program = loaded(1, Also::Nothing).unwrap();
        netns.run(|| attach(index("a1"), program.as_raw_fd())).unwrap().unwrap();
        let found = obstacles(&netns, &interfaces).unwrap();
        assert!(found.len() == 1 && found[0].contains("redirect of a1,"), "{found:?}");
    }
}
