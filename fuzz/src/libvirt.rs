//! Fuzzes input from libvirtd: messages, events, errors, and the XML in them.

pub(crate) fn run(input: &[u8]) {
    peerpod_provider_libvirt::read_anything(input);
}
