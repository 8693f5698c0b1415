//! Tests of the order on the shim's side: whole frames, the guest's bytes unchanged, and one answer per call, for every
//! cut of the stream and every refusal during it.

use std::collections::HashMap;

use super::*;

/// State of a filter of the first release, in the middle of the guest's answer to stream 1.
const OLD: &str = include_str!("../../../../tests/samples/filter-v1-answer-under-way.json");

/// Makes a filter for four calls in a pod with a volume, which refuses a CreateContainer that cannot be decoded.
fn filter() -> AgentFilter {
    let shared = Arc::new(Shared::default());
    shared.set("", &[Volume { id: "a".repeat(32), ..Volume::default() }]);
    AgentFilter::new(shared, Bounds { per_connection: 4, per_sandbox: 6 })
}

/// Hands the filter over to another process.
fn hand_over(filter: AgentFilter) -> AgentFilter {
    let text = serde_json::to_string(&filter.state().unwrap()).unwrap();
    let mut next = self::filter();
    assert!(next.restore(&serde_json::from_str(&text).unwrap()));
    next
}

/// Returns the whole frames of `bytes`, and the bytes behind them.
fn frames(mut bytes: &[u8]) -> (Vec<(Header, Vec<u8>)>, &[u8]) {
    let mut found = Vec::new();
    while let Some((head, rest)) = bytes.split_first_chunk() {
        let header = Header::decode(head);
        let Some((body, rest)) = rest.split_at_checked(header.length as usize) else { break };
        found.push((header, body.to_vec()));
        bytes = rest;
    }
    (found, bytes)
}

fn code_of(body: &[u8]) -> i32 {
    Response::parse_from_bytes(body).unwrap().status.code
}

#[test]
fn refusals_wait_for_the_end_of_an_answer_under_way() {
    let whole = answer(1, 20_000);
    for hands_over in [false, true] {
        let (mut filter, mut seen) = (filter(), Seen::default());
        seen.shim(&mut filter, &request(1, "ReadStdout", 0));
        seen.guest(&mut filter, &whole[..10_000]);
        seen.shim(&mut filter, &request(3, "CreateContainer", 10));
        for stream in [5, 7, 9, 11, 13] {
            seen.shim(&mut filter, &request(stream, "WaitProcess", 0));
        }
        let oversize = Header { length: u32::MAX, stream: 15, kind: frame::REQUEST, flags: 0 };
        seen.shim(&mut filter, &oversize.encode());
        assert!(seen.local[..] == whole[..10_000], "a refusal is written into the answer");
        if hands_over {
            filter = hand_over(filter);
        }
        let waiting = filter.answers_waiting();
        seen.guest(&mut filter, &whole[10_000..]);
        let (answer, refusals) = seen.local.split_at(whole.len());
        assert!(answer == whole, "the guest's bytes are changed");
        assert_eq!((waiting, filter.answers_waiting()), (refusals.len(), 0));
        let refused =
            [(3, code::FAILED_PRECONDITION), (13, code::RESOURCE_EXHAUSTED), (15, code::INVALID_ARGUMENT)];
        assert_eq!(codes(refusals), refused);
        seen.local.clear();
        filter.finish(&mut seen.local);
        assert_eq!(codes(&seen.local), [5, 7, 9, 11].map(|stream| (stream, code::UNAVAILABLE)));
    }
}

#[test]
fn nothing_follows_an_answer_that_the_loss_cut() {
    let (mut filter, mut seen) = (filter(), Seen::default());
    for stream in [1, 3] {
        seen.shim(&mut filter, &request(stream, "ReadStdout", 0));
    }
    let half = &answer(1, 100_000)[..50_000];
    seen.guest(&mut filter, half);
    seen.shim(&mut filter, &request(5, "CreateContainer", 10));
    assert!(!filter.stream_lost(None, &mut seen.local));
    let mut next = hand_over(filter);
    next.finish(&mut seen.local);
    assert!(seen.local[..] == *half, "a shim would read an error as bytes of the answer");
}

#[test]
fn a_call_that_the_guest_answers_before_it_is_whole_is_not_refused_as_well() {
    let (mut filter, mut seen) = (filter(), Seen::default());
    let container = request(1, "CreateContainer", 30);
    seen.shim(&mut filter, &container[..50]);
    seen.guest(&mut filter, &answer(1, 10));
    seen.shim(&mut filter, &container[50..]);
    assert_eq!(codes(&seen.local), [(1, 0)]);
    assert!(seen.peer.is_empty());
}

#[test]
fn a_filter_of_the_first_release_goes_on() {
    let whole = answer(1, 20_000);
    let mut filter = filter();
    assert!(filter.restore(&serde_json::from_str(OLD).unwrap()));
    // The bytes that the old release had written before its replacement.
    let mut seen = Seen { local: BytesMut::from(&whole[..10_000]), ..Seen::default() };
    let half = request(7, "StatsContainer", 100);
    seen.shim(&mut filter, &half[20..]);
    assert_eq!(&seen.peer[..], &half[..]);
    for stream in [9, 11] {
        seen.shim(&mut filter, &request(stream, "ReadStderr", 0));
    }
    seen.guest(&mut filter, &whole[10_000..]);
    seen.guest(&mut filter, &answer(3, 10));
    filter.finish(&mut seen.local);
    assert!(seen.local.starts_with(&whole));
    let refused = [(11, code::RESOURCE_EXHAUSTED), (3, 0)];
    let over = [5, 7, 9].map(|stream| (stream, code::UNAVAILABLE));
    assert_eq!(codes(&seen.local[whole.len()..]), [&refused[..], &over].concat());
}

/// End of a conversation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    Answered,
    GuestLost,
    SandboxOver,
}

proptest! {
    #[test]
    fn a_shim_reads_whole_frames_and_one_answer_for_each_call(
        calls in prop::collection::vec(
            prop_oneof![Just(None), (0usize..60_000).prop_map(Some), (0usize..50).prop_map(Some)], 1..12),
        cuts in prop::collection::vec((any::<bool>(), 1usize..20_000, any::<bool>()), 0..60),
        ending in prop_oneof![Just(Ending::Answered), Just(Ending::GuestLost), Just(Ending::SandboxOver)],
    ) {
        // A call without an answer size is a container that is refused because of its volume.
        let of = |call: usize| 2 * call as u32 + 1;
        let sizes: HashMap<u32, usize> = (0..).zip(&calls).map(|(n, size)| (of(n), size.unwrap_or(0))).collect();
        let requests = (0..).zip(&calls).flat_map(|(n, size)| {
            let method = if size.is_some() { "ReadStdout" } else { "CreateContainer" };
            request(of(n), method, 30)
        });
        let requests: Vec<u8> = requests.collect();
        let (mut filter, mut seen) = (filter(), Seen::default());
        // The guest answers each whole request, in order.
        let (mut answers, mut heard, mut asked, mut answered) = (Vec::new(), 0, 0usize, 0usize);
        let all = [(true, requests.len(), false), (false, usize::MAX, false)];
        let all = all.iter().filter(|_| ending == Ending::Answered);
        for (from_shim, bytes, hands_over) in cuts.iter().chain(all) {
            if *from_shim {
                let part = &requests[asked..(asked + bytes).min(requests.len())];
                seen.shim(&mut filter, part);
                asked += part.len();
                let (whole, rest) = frames(&seen.peer[heard..]);
                answers.extend(whole.iter().flat_map(|(head, _)| answer(head.stream, sizes[&head.stream])));
                heard = seen.peer.len() - rest.len();
            } else {
                let part = &answers[answered..answered.saturating_add(*bytes).min(answers.len())];
                seen.guest(&mut filter, part);
                answered += part.len();
            }
            if *hands_over {
                filter = hand_over(filter);
            }
        }
        let mut goes_on = true;
        if ending == Ending::GuestLost {
            goes_on = filter.stream_lost(Some(&mut seen.peer), &mut seen.local);
        }
        if ending != Ending::Answered {
            let before = seen.local.clone();
            filter.finish(&mut seen.local);
            prop_assert!(goes_on || seen.local == before);
        }

        let (found, cut) = frames(&seen.local);
        let mut from_guest = Vec::new();
        let mut streams: Vec<u32> = Vec::new();
        for (head, body) in found {
            streams.push(head.stream);
            if code_of(&body) == 0 {
                from_guest.extend(frame(head.kind, head.stream, &body));
            }
        }
        from_guest.extend_from_slice(cut);
        prop_assert!(answers.starts_with(&from_guest), "the guest's bytes are changed");
        let many = streams.len();
        streams.sort_unstable();
        streams.dedup();
        prop_assert_eq!(many, streams.len(), "a call is answered twice");
        if ending == Ending::Answered {
            prop_assert!(cut.is_empty());
            prop_assert_eq!(many, calls.len(), "a call is not answered");
        } else if cut.is_empty() {
            // A request that did not arrive has no answer, and half a request has none before its method is known.
            let whole = frames(&requests[..asked]).0.len();
            prop_assert!(many == whole || many == whole + 1, "{} answers to {} calls", many, whole);
        }
        prop_assert_eq!(filter.shared.pending.load(Relaxed), if cut.is_empty() { 0 } else { filter.pending.len() });
    }
}
