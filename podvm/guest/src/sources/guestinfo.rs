//! Reads and overwrites variables that VMware shares with the VM (`guestinfo`), as its tools do: one request and one
//! answer over a socket to the hypervisor. The older way, an I/O port, would need unsafe code.
//!
//! A packet is the length of its entries and the entries; all numbers are big-endian. An entry is its type, its field and
//! a value: `1 | field | low u32 | high u32` for a number, `2 | field | length u32 | bytes` for a string. Every process of
//! the VM can read the variables.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use nix::libc::VMADDR_CID_HYPERVISOR;
use nix::sys::socket::sockopt::{ReceiveTimeout, SendTimeout};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, VsockAddr, connect, setsockopt, socket};
use nix::sys::time::{TimeVal, TimeValLike};

use super::{LIMIT, PATIENCE};

/// Port of the hypervisor's service.
const PORT: u32 = 976;
const NUMBER: u32 = 1;
const STRING: u32 = 2;
const FIELD_KIND: u32 = 1;
const FIELD_PAYLOAD: u32 = 2;
/// Kind of a packet with a request or an answer.
const DATA: u32 = 1;
/// Size limit of an answer: the largest value, and the entries around it.
const MAX_ANSWER: usize = LIMIT as usize + 1024;
/// Value of a variable that was overwritten.
const ERASED: &str = "---";

/// Returns a connection to the hypervisor. A read or write on it fails after the time limit of a place.
pub(super) fn dial() -> Result<File, String> {
    let named = |error: nix::Error| format!("connect to the hypervisor: {error}");
    let socket =
        socket(AddressFamily::Vsock, SockType::Stream, SockFlag::SOCK_CLOEXEC, None).map_err(named)?;
    let limit = TimeVal::seconds(i64::try_from(PATIENCE.as_secs()).unwrap_or(i64::MAX));
    setsockopt(&socket, ReceiveTimeout, &limit).map_err(named)?;
    setsockopt(&socket, SendTimeout, &limit).map_err(named)?;
    // The kernel gives up after two seconds.
    connect(socket.as_raw_fd(), &VsockAddr::new(VMADDR_CID_HYPERVISOR, PORT)).map_err(named)?;
    Ok(File::from(socket))
}

/// Returns the value of a variable, decoded as its `.encoding` demands; `None` if there is none.
pub(super) fn read(hypervisor: &mut (impl Read + Write), name: &str) -> Result<Option<Vec<u8>>, String> {
    let Some(value) = get(hypervisor, name)? else { return Ok(None) };
    let encoding = get(hypervisor, &format!("{name}.encoding"))?.unwrap_or_default();
    match encoding.trim_ascii() {
        b"" => Ok(Some(value)),
        b"base64" | b"b64" => {
            let value: Vec<u8> = value.into_iter().filter(|byte| !byte.is_ascii_whitespace()).collect();
            BASE64_STANDARD.decode(value).map(Some).map_err(|_| "it is not base64".to_owned())
        }
        _ => Err(format!("the encoding in {name}.encoding is not base64")),
    }
}

/// Overwrites a variable.
pub(super) fn erase(hypervisor: &mut (impl Read + Write), name: &str) -> Result<(), String> {
    set(hypervisor, name, ERASED)
}

/// Sets a variable to a text without spaces.
pub(super) fn set(hypervisor: &mut (impl Read + Write), name: &str, value: &str) -> Result<(), String> {
    ask(hypervisor, &format!("info-set {name} {value}"))?
        .map(drop)
        .map_err(|why| format!("set {name}: {why}"))
}

fn get(hypervisor: &mut (impl Read + Write), name: &str) -> Result<Option<Vec<u8>>, String> {
    match ask(hypervisor, &format!("info-get {name}"))? {
        Ok(value) if value == ERASED.as_bytes() => Ok(None),
        Ok(value) => Ok(Some(value)),
        Err(why) if why.eq_ignore_ascii_case("No value found") => Ok(None),
        Err(why) => Err(format!("read {name}: {why}")),
    }
}

/// Sends a command. The inner result is the hypervisor's answer to it.
fn ask(hypervisor: &mut (impl Read + Write), command: &str) -> Result<Result<Vec<u8>, String>, String> {
    let failed = |error: std::io::Error| format!("ask the hypervisor: {error}");
    hypervisor.write_all(&packet(command)).map_err(failed)?;
    let mut length = [0; 4];
    hypervisor.read_exact(&mut length).map_err(failed)?;
    let length = usize::try_from(u32::from_be_bytes(length)).ok().filter(|length| *length <= MAX_ANSWER);
    let mut entries = vec![0; length.ok_or("the hypervisor's answer is too large")?];
    hypervisor.read_exact(&mut entries).map_err(failed)?;
    let answer = payload(&entries).ok_or("the hypervisor's answer is malformed")?;
    match answer {
        [b'1', b' ', value @ ..] => Ok(Ok(value.to_vec())),
        [b'0', b' ', why @ ..] => {
            Ok(Err(String::from_utf8_lossy(&why[..why.len().min(200)]).trim().to_owned()))
        }
        _ => Err("the hypervisor's answer is malformed".to_owned()),
    }
}

fn packet(command: &str) -> Vec<u8> {
    let length = command.len() as u32; // a name of a description, which is bounded
    let numbers = [NUMBER, FIELD_KIND, DATA, 0, STRING, FIELD_PAYLOAD, length];
    let entries = [&numbers.map(u32::to_be_bytes).concat()[..], command.as_bytes()].concat();
    [&(entries.len() as u32).to_be_bytes()[..], &entries].concat()
}

/// Returns the payload in the entries of a packet.
fn payload(mut entries: &[u8]) -> Option<&[u8]> {
    let number = |entries: &mut &[u8]| -> Option<u32> {
        let (number, rest) = entries.split_first_chunk()?;
        *entries = rest;
        Some(u32::from_be_bytes(*number))
    };
    while !entries.is_empty() {
        let (kind, field) = (number(&mut entries)?, number(&mut entries)?);
        let length = match kind {
            NUMBER => 8,
            STRING => usize::try_from(number(&mut entries)?).ok()?,
            _ => return None,
        };
        let (value, rest) = entries.split_at_checked(length)?;
        entries = rest;
        if (kind, field) == (STRING, FIELD_PAYLOAD) {
            return Some(value);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::os::unix::net::UnixStream;
    use std::thread;

    use proptest::prelude::*;

    use super::*;

    /// Returns the next command of a guest; `None` at the end. Reads the packet as the hypervisor's tools write it: the
    /// kind first, then the command.
    fn command(guest: &mut UnixStream) -> Option<String> {
        let mut head = [0; 32];
        guest.read_exact(&mut head).ok()?;
        let words: Vec<u32> =
            head.chunks(4).map(|word| u32::from_be_bytes(word.try_into().unwrap())).collect();
        let length = words[7] as usize;
        assert_eq!(words[..7], [28 + words[7], 1, 1, 1, 0, 2, 2], "{words:?}");
        let mut text = vec![0; length];
        guest.read_exact(&mut text).unwrap();
        Some(String::from_utf8(text).unwrap())
    }

    /// Answers like the hypervisor of a VM with these variables, until the guest ends. Returns the variables.
    fn serve(mut guest: UnixStream, mut variables: BTreeMap<String, String>) -> BTreeMap<String, String> {
        while let Some(command) = command(&mut guest) {
            let answer = match command.split(' ').collect::<Vec<_>>()[..] {
                ["info-get", name] => match variables.get(name) {
                    Some(value) => format!("1 {value}"),
                    None => "0 No value found".to_owned(),
                },
                ["info-set", name, value] if name != "guestinfo.locked" => {
                    variables.insert(name.to_owned(), value.to_owned());
                    "1 ".to_owned()
                }
                _ => "0 Permission denied".to_owned(),
            };
            guest.write_all(&answered(answer.as_bytes())).unwrap();
        }
        variables
    }

    /// Makes an answer: payload first and then a number, because their order is free.
    fn answered(payload: &[u8]) -> Vec<u8> {
        let words = |words: &[u32]| words.iter().flat_map(|word| word.to_be_bytes()).collect::<Vec<u8>>();
        let length = payload.len() as u32;
        [words(&[28 + length, 2, 2, length]), payload.to_vec(), words(&[1, 1, 1, 0])].concat()
    }

    fn with(variables: &[(&str, &str)], ask: impl FnOnce(&mut UnixStream)) -> BTreeMap<String, String> {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        let variables = variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        let variables = variables.collect();
        let serving = thread::spawn(move || serve(theirs, variables));
        ask(&mut ours);
        drop(ours);
        serving.join().unwrap()
    }

    #[test]
    fn a_variable_is_decoded_as_its_encoding_demands() {
        let name = "guestinfo.userdata";
        for (encoding, value, read_as) in [
            (Some("base64"), "e30=", Ok(Some(b"{}".to_vec()))),
            (Some("b64"), "e30=", Ok(Some(b"{}".to_vec()))),
            (None, "{}", Ok(Some(b"{}".to_vec()))),
            (Some(""), "{}", Ok(Some(b"{}".to_vec()))),
            (Some("base64"), "{}", Err("it is not base64")),
            (Some("gzip+base64"), "e30=", Err("the encoding in guestinfo.userdata.encoding is not base64")),
        ] {
            let mut variables = vec![(name, value)];
            variables.extend(encoding.map(|encoding| ("guestinfo.userdata.encoding", encoding)));
            with(&variables, |hypervisor| {
                assert_eq!(read(hypervisor, name), read_as.map_err(str::to_owned), "{encoding:?}");
            });
        }
        with(&[], |hypervisor| assert_eq!(read(hypervisor, name), Ok(None)));
    }

    #[test]
    fn an_address_is_set() {
        let left = with(&[], |hypervisor| set(hypervisor, "guestinfo.local-ipv4", "10.0.0.2").unwrap());
        assert_eq!(left["guestinfo.local-ipv4"], "10.0.0.2");
    }

    #[test]
    fn an_overwritten_variable_is_gone() {
        let name = "guestinfo.userdata";
        let left = with(&[(name, "{}")], |hypervisor| {
            erase(hypervisor, name).unwrap();
            assert_eq!(read(hypervisor, name), Ok(None));
            let error = erase(hypervisor, "guestinfo.locked").unwrap_err();
            assert_eq!(error, "set guestinfo.locked: Permission denied");
        });
        assert_eq!(left[name], ERASED);
    }

    #[test]
    fn a_hypervisor_that_answers_wrongly_is_an_error() {
        for (answer, named) in [
            (answered(b"2 x"), "malformed"),
            (answered(b""), "malformed"),
            (vec![0xff; 4], "too large"),
            (vec![0, 0, 0, 4, 0, 0, 0, 9], "malformed"),
            (vec![0, 0], "ask the hypervisor"),
        ] {
            let (mut ours, mut theirs) = UnixStream::pair().unwrap();
            theirs.write_all(&answer).unwrap();
            theirs.shutdown(std::net::Shutdown::Write).unwrap();
            let error = read(&mut ours, "guestinfo.userdata").unwrap_err();
            assert!(error.contains(named), "{named}: {error}");
        }
    }

    proptest! {
        #[test]
        fn any_answer_is_handled(entries in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _maybe = payload(&entries);
        }

        #[test]
        fn a_packet_has_the_command(command in "[ -~]{0,100}") {
            let packet = packet(&command);
            prop_assert_eq!(payload(&packet[4..]), Some(command.as_bytes()));
        }
    }
}
