//! Parses the framing of netlink messages, and the kernel's answers.

use netlink_packet_core::{
    DecodeError, NLM_F_ACK_TLVS, NLM_F_CAPPED, NLMSG_DONE, NLMSG_ERROR, NetlinkBuffer, NetlinkHeader,
    NlasIterator, Parseable, ParseableParametrized,
};
use netlink_packet_route::RouteNetlinkMessage;
use nix::errno::Errno;

use super::{Ack, Error, HEADER, Refusal};

const NLMSGERR_ATTR_MSG: u16 = 1;

/// Returns whether these messages contain the end of the dump with this sequence number.
pub(super) fn has_end(mut messages: &[u8], dump: u32) -> Result<bool, Error> {
    while let Some((header, _)) = next_message(&mut messages)? {
        if header.sequence_number == dump && matches!(header.message_type, NLMSG_ERROR | NLMSG_DONE) {
            return Ok(true);
        }
    }
    Ok(false)
}

pub(super) fn next_message<'a>(rest: &mut &'a [u8]) -> Result<Option<(NetlinkHeader, &'a [u8])>, Error> {
    if rest.is_empty() {
        return Ok(None);
    }
    let garbled = |e: DecodeError| Error::Garbled(e.to_string());
    let message = NetlinkBuffer::new_checked(*rest).map_err(garbled)?;
    let header = NetlinkHeader::parse(&message).map_err(garbled)?;
    *rest = rest.get((header.length as usize).next_multiple_of(4)..).unwrap_or_default();
    Ok(Some((header, message.payload())))
}

pub(crate) fn parse_route(kind: u16, payload: &[u8]) -> Result<RouteNetlinkMessage, Error> {
    RouteNetlinkMessage::parse_with_param(payload, kind).map_err(|e| Error::Garbled(e.to_string()))
}

/// Reads an NLMSG_ERROR: a code (0 = success), the request's header (with its body unless capped), then attributes.
pub(super) fn parse_answer(flags: u16, payload: &[u8]) -> Result<Ack, Error> {
    let garbled = || Error::Garbled("a cut-off acknowledgement".to_owned());
    let (code, rest) = payload.split_first_chunk::<4>().ok_or_else(garbled)?;
    let code = i32::from_ne_bytes(*code);
    let mut text = None;
    if flags & NLM_F_ACK_TLVS != 0 {
        let request = if flags & NLM_F_CAPPED != 0 {
            HEADER
        } else {
            let (length, _) = rest.split_first_chunk::<4>().ok_or_else(garbled)?;
            (u32::from_ne_bytes(*length) as usize).next_multiple_of(4)
        };
        text = NlasIterator::new(rest.get(request..).unwrap_or_default())
            .map_while(Result::ok)
            .find(|attribute| attribute.kind() == NLMSGERR_ATTR_MSG)
            .map(|attribute| String::from_utf8_lossy(attribute.value()).trim_end_matches('\0').to_owned());
    }
    Ok(refusal(code, text))
}

pub(super) fn refusal(code: i32, text: Option<String>) -> Ack {
    match code {
        0 => Ok(()),
        code => Err(Refusal { errno: Errno::from_raw(code.wrapping_neg()), text }),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_refusal_contains_the_text_of_the_kernel() {
        // -EEXIST, the request's header alone (capped), then attributes: an offset (2) and the text (1).
        let mut payload = (-17_i32).to_ne_bytes().to_vec();
        payload.extend([0; HEADER]);
        payload.extend([8, 0, 2, 0, 1, 2, 3, 4]);
        payload.extend([9, 0, 1, 0]);
        payload.extend(b"taken\0\0\0");
        let answer = parse_answer(NLM_F_CAPPED | NLM_F_ACK_TLVS, &payload).unwrap();
        let refusal = answer.unwrap_err();
        assert_eq!((refusal.errno, refusal.text.as_deref()), (Errno::EEXIST, Some("taken")));
        assert_eq!(refusal.to_string(), "File exists (EEXIST): taken");
        assert_eq!(parse_answer(0, &[0; 20]).unwrap(), Ok(()));
        assert!(parse_answer(0, &[1, 2]).is_err());
    }

    proptest! {
        #[test]
        fn any_answer_is_handled(bytes: Vec<u8>, flags: u16) {
            drop(parse_answer(flags, &bytes));
            let mut rest = bytes.as_slice();
            while let Ok(Some((header, payload))) = next_message(&mut rest) {
                drop(parse_route(header.message_type, payload));
            }
        }
    }
}
