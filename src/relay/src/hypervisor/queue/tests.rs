//! Tests of the queue's rules, one each, with a simulated clock.

use protobuf::Message;

use super::*;
use peerpod_proto::ttrpc_frame::Response;

struct World {
    queue: Queue,
    now: Instant,
    stream: u32,
}

fn id(text: &str) -> SandboxId {
    SandboxId::new(text).unwrap()
}

impl World {
    fn new() -> World {
        let now = Instant::now();
        World { queue: Queue::new(now), now, stream: 1 }
    }

    fn ready() -> World {
        let mut world = World::new();
        world.connect();
        world
    }

    /// Connects the node and answers its ReadInbox, which must be the only request until then.
    fn connect(&mut self) {
        self.queue.node_connected(self.now);
        let sent = self.sent();
        assert_eq!(methods(&sent), ["ReadInbox"]);
        self.queue.answer(sent[0].0, call::done(), self.now);
    }

    fn call(&mut self, conn: ConnId, kind: Kind) -> Caller {
        self.call_within(conn, kind, 0)
    }

    fn call_within(&mut self, conn: ConnId, kind: Kind, timeout_nano: i64) -> Caller {
        let method = match &kind {
            Kind::Create(_) => "CreateVM",
            Kind::Start(_) => "StartVM",
            Kind::Stop(_) => "StopVM",
            Kind::Other => "Version",
        };
        let request = Request { method: method.into(), timeout_nano, ..Default::default() };
        let caller = Caller::Shim { conn, stream: self.stream };
        self.stream += 2;
        self.queue.accept(caller, kind, request, self.now);
        caller
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
        self.queue.tick(self.now);
    }

    fn outputs(&mut self) -> Vec<Output> {
        std::iter::from_fn(|| self.queue.take()).collect()
    }

    /// Returns the requests to the node; any other output is a mistake of the test.
    fn sent(&mut self) -> Vec<(u32, Request)> {
        self.outputs()
            .into_iter()
            .map(|output| match output {
                Output::Send { stream, body } => (stream, Request::parse_from_bytes(&body).unwrap()),
                other => panic!("not a send: {other:?}"),
            })
            .collect()
    }

    fn answers(&mut self) -> Vec<(Caller, i32)> {
        self.outputs()
            .into_iter()
            .filter_map(|output| match output {
                Output::Answer { caller, body } => {
                    Some((caller, Response::parse_from_bytes(&body).unwrap().status.code))
                }
                _ => None,
            })
            .collect()
    }
}

fn methods(sent: &[(u32, Request)]) -> Vec<&str> {
    sent.iter().map(|(_, request)| request.method.as_str()).collect()
}

#[test]
fn calls_wait_for_the_node_and_leave_in_order() {
    let mut world = World::new();
    let create = world.call(1, Kind::Create(id("a")));
    let start = world.call(1, Kind::Start(id("a")));
    world.call(2, Kind::Create(id("b")));
    assert_eq!(world.outputs(), []);
    world.connect();
    let sent = world.sent();
    assert_eq!(methods(&sent), ["CreateVM", "CreateVM"], "the start waits for its create");
    world.queue.answer(sent[0].0, call::done(), world.now);
    let outputs = world.outputs();
    assert!(matches!(&outputs[0], Output::Answer { caller, .. } if *caller == create));
    assert!(matches!(&outputs[1], Output::Send { .. }));
    let Output::Send { stream, .. } = outputs[1] else { unreachable!() };
    world.queue.answer(stream, call::done(), world.now);
    assert_eq!(world.answers(), [(start, 0)]);
}

impl World {
    /// Hands the queue over to another process.
    fn pass_on(&mut self) {
        let text = serde_json::to_string(&self.queue.state(self.now)).unwrap();
        self.queue = Queue::new(self.now);
        self.queue.restore(serde_json::from_str(&text).unwrap(), self.now).unwrap();
    }
}

#[test]
fn a_new_process_continues_calls_in_order_with_their_remaining_time() {
    let mut world = World::ready();
    let create = world.call_within(1, Kind::Create(id("a")), 10_000_000_000);
    let start = world.call(1, Kind::Start(id("a")));
    assert_eq!(methods(&world.sent()), ["CreateVM"], "the node has it");
    world.pass(Duration::from_secs(4));
    world.pass_on();
    assert_eq!(world.queue.len(), 2);
    world.connect();
    let sent = world.sent();
    assert_eq!(methods(&sent), ["CreateVM"], "the node gets it again, and the start waits");
    assert_eq!(sent[0].1.timeout_nano, 6_000_000_000);
    world.queue.answer(sent[0].0, call::done(), world.now);
    let outputs = world.outputs();
    assert!(matches!(&outputs[0], Output::Answer { caller, .. } if *caller == create));
    let Output::Send { stream, .. } = outputs[1] else { panic!("{outputs:?}") };
    world.queue.answer(stream, call::done(), world.now);
    assert_eq!(world.answers(), [(start, 0)]);

    world.queue.node_lost(world.now);
    world.call_within(1, Kind::Create(id("b")), 1_000_000_000);
    world.pass_on();
    world.pass(Duration::from_millis(1500));
    assert_eq!(world.answers().len(), 1, "its deadline passes there");
}

#[test]
fn a_stop_is_a_stop_in_the_next_process_too() {
    let mut world = World::new();
    let create = world.call(1, Kind::Create(id("a")));
    let stop = world.call(2, Kind::Stop(id("a")));
    let outputs = world.outputs();
    assert!(matches!(&outputs[0], Output::Answer { caller, .. } if *caller == create), "cancelled");
    assert_eq!(outputs[1], Output::WriteInbox(id("a")));
    // Handover before the inbox write is confirmed.
    world.pass_on();
    assert_eq!(world.outputs(), []);
    world.pass(Duration::from_millis(250));
    assert_eq!(world.outputs(), [Output::WriteInbox(id("a"))]);
    world.queue.inbox_written(&id("a"), Ok(()), world.now);
    assert_eq!(world.answers(), [(stop, 0)]);
    // Handover after it: a CreateVM waits until the node has read the inbox.
    world.pass_on();
    world.call(1, Kind::Create(id("a")));
    world.queue.node_connected(world.now);
    assert_eq!(methods(&world.sent()), ["ReadInbox"]);
    world.call(3, Kind::Create(id("c")));
    world.pass_on();
    world.queue.keep_connections(|conn| conn != 3, world.now);
    assert_eq!(world.queue.len(), 1, "a caller on a closed connection does not wait");
}

#[test]
fn unanswered_calls_are_sent_again_after_the_node_was_away() {
    let mut world = World::ready();
    let create = world.call(1, Kind::Create(id("a")));
    let before = world.sent();
    world.queue.node_lost(world.now);
    assert_eq!(world.outputs(), []);
    world.connect();
    let sent = world.sent();
    assert_eq!(methods(&sent), ["CreateVM"]);
    world.queue.answer(before[0].0 + 1000, call::done(), world.now);
    assert_eq!(world.answers(), [], "an answer to a stream without a caller is dropped");
    world.queue.answer(sent[0].0, call::done(), world.now);
    assert_eq!(world.answers(), [(create, 0)]);
    assert_eq!(world.queue.len(), 0);
}

#[test]
fn a_repeated_create_does_not_wait_for_a_running_start() {
    let mut world = World::ready();
    world.call(1, Kind::Start(id("a")));
    world.call(2, Kind::Create(id("a")));
    assert_eq!(methods(&world.sent()), ["StartVM", "CreateVM"]);
}

#[test]
fn a_stop_cancels_queued_calls() {
    let mut world = World::new();
    let create = world.call(1, Kind::Create(id("a")));
    let start = world.call(1, Kind::Start(id("a")));
    let other = world.call(2, Kind::Create(id("b")));
    let stop = world.call_within(1, Kind::Stop(id("a")), 1_000_000_000);
    let outputs = world.outputs();
    assert!(outputs.contains(&Output::WriteInbox(id("a"))));
    let cancelled: Vec<Caller> = outputs
        .iter()
        .filter_map(|output| match output {
            Output::Answer { caller, .. } => Some(*caller),
            _ => None,
        })
        .collect();
    assert_eq!(cancelled, [create, start]);
    world.queue.inbox_written(&id("a"), Ok(()), world.now);
    assert_eq!(world.answers(), [(stop, 0)]);
    world.connect();
    assert_eq!(methods(&world.sent()), ["CreateVM"], "only the other sandbox's {other:?} is left");
}

#[test]
fn a_stop_repeated_while_it_lies_in_the_inbox_is_answered_at_once() {
    let mut world = World::new();
    world.call(1, Kind::Stop(id("a")));
    assert_eq!(world.outputs(), [Output::WriteInbox(id("a"))]);
    let second = world.call(2, Kind::Stop(id("a")));
    assert_eq!(world.outputs(), [], "one writing serves both");
    world.queue.inbox_written(&id("a"), Ok(()), world.now);
    assert_eq!(world.answers().len(), 2);
    let third = world.call(1, Kind::Stop(id("a")));
    assert_eq!(world.answers(), [(third, 0)]);
    assert_ne!(second, third);
}

#[test]
fn a_slow_node_loses_the_stop_to_the_inbox_after_the_grace() {
    let mut world = World::ready();
    let create = world.call(1, Kind::Create(id("a")));
    let stop = world.call_within(1, Kind::Stop(id("a")), 1_000_000_000);
    assert_eq!(methods(&world.sent()), ["CreateVM", "StopVM"]);
    world.pass(Duration::from_millis(399));
    assert_eq!(world.outputs(), []);
    world.pass(Duration::from_millis(1));
    let outputs = world.outputs();
    assert!(matches!(&outputs[0], Output::Answer { caller, .. } if *caller == create));
    assert_eq!(outputs[1], Output::WriteInbox(id("a")));
    world.queue.inbox_written(&id("a"), Ok(()), world.now);
    let outputs = world.outputs();
    assert!(matches!(&outputs[0], Output::Answer { caller, .. } if *caller == stop));
    assert!(matches!(&outputs[1], Output::Send { .. }), "the node gets the request to read its inbox");
}

#[test]
fn a_create_after_an_unread_stop_waits_until_the_node_has_read_it() {
    let mut world = World::ready();
    world.call(1, Kind::Stop(id("a")));
    world.sent();
    world.pass(Duration::from_millis(400));
    world.queue.inbox_written(&id("a"), Ok(()), world.now);
    let reading = world.outputs().into_iter().find_map(|output| match output {
        Output::Send { stream, .. } => Some(stream),
        _ => None,
    });
    world.call(1, Kind::Create(id("a")));
    assert_eq!(world.outputs(), []);
    world.queue.answer(reading.unwrap(), call::done(), world.now);
    assert_eq!(methods(&world.sent()), ["CreateVM"]);
}

#[test]
fn a_stop_that_cannot_be_written_fails() {
    let mut world = World::new();
    let stop = world.call(1, Kind::Stop(id("a")));
    world.outputs();
    world.queue.inbox_written(&id("a"), Err("no space left".into()), world.now);
    assert_eq!(world.answers(), [(stop, code::INTERNAL)]);
    world.call(1, Kind::Stop(id("a")));
    assert_eq!(world.outputs(), [Output::WriteInbox(id("a"))], "it is tried again");
}

#[test]
fn a_stop_that_the_disk_holds_up_is_kept_and_answered_and_recorded_later() {
    let mut world = World::ready();
    let stop = world.call(1, Kind::Stop(id("a")));
    world.sent();
    world.pass(Duration::from_millis(400));
    assert_eq!(world.outputs(), [Output::WriteInbox(id("a"))]);
    world.pass(Duration::from_millis(300));
    assert_eq!(world.outputs(), [Output::KeepStop(id("a"))]);
    world.queue.stop_kept(&id("a"));
    assert_eq!(world.answers(), [(stop, 0)]);
    assert_eq!(world.queue.len(), 1, "it stays");
    let create = world.call(1, Kind::Create(id("a")));
    assert_eq!(world.outputs(), [], "a later call waits");
    // A disk that fails after it has stalled: the stop is recorded again.
    world.queue.inbox_written(&id("a"), Err("input/output error".into()), world.now);
    assert_eq!(world.answers(), []);
    world.pass(Duration::from_secs(10));
    let outputs = world.outputs();
    assert!(outputs.contains(&Output::WriteInbox(id("a"))), "{outputs:?}");
    world.queue.inbox_written(&id("a"), Ok(()), world.now);
    let outputs = world.outputs();
    assert!(outputs.contains(&Output::ForgetStop(id("a"))), "{outputs:?}");
    assert_ne!(create, stop);
}

impl World {
    /// Returns the stream of a stop of "a" that the node has and the disk holds up, kept and answered.
    fn kept(&mut self) -> u32 {
        self.call(1, Kind::Stop(id("a")));
        let stream = self.sent()[0].0;
        self.pass(Duration::from_millis(400));
        self.pass(Duration::from_millis(300));
        self.queue.stop_kept(&id("a"));
        assert_eq!(self.answers().len(), 1);
        stream
    }
}

#[test]
fn a_kept_stop_that_the_node_refuses_is_tried_again() {
    // The disk that has stalled fails now, for the node as well: in either order.
    for node_first in [true, false] {
        let mut world = World::ready();
        let stream = world.kept();
        let refused = call::status(code::INTERNAL, "input/output error");
        if node_first {
            world.queue.answer(stream, refused.clone(), world.now);
            assert_eq!(world.outputs(), [], "the write under way decides");
        }
        world.queue.inbox_written(&id("a"), Err("input/output error".into()), world.now);
        if node_first {
            let sent = world.sent();
            assert_eq!(methods(&sent), ["StopVM"]);
            world.queue.answer(sent[0].0, refused, world.now);
        } else {
            world.queue.answer(stream, refused, world.now);
        }
        assert_eq!(world.outputs(), [], "no try without a pause, and nothing is forgotten");
        world.pass(Duration::from_secs(10));
        let outputs = world.outputs();
        assert!(outputs.contains(&Output::WriteInbox(id("a"))), "{outputs:?}");
        world.queue.inbox_written(&id("a"), Ok(()), world.now);
        let outputs = world.outputs();
        assert!(outputs.contains(&Output::ForgetStop(id("a"))), "{outputs:?}");
        assert_eq!(world.queue.len(), 0);
    }
}

#[test]
fn a_kept_stop_that_the_node_executes_is_forgotten_once_no_write_is_under_way() {
    let mut world = World::ready();
    let stream = world.kept();
    world.queue.answer(stream, call::done(), world.now);
    assert_eq!((world.outputs(), world.queue.len()), (Vec::new(), 0));
    world.queue.inbox_written(&id("a"), Err("input/output error".into()), world.now);
    assert_eq!(world.outputs(), [Output::ForgetStop(id("a"))]);

    let stream = world.kept();
    world.queue.inbox_written(&id("a"), Err("input/output error".into()), world.now);
    world.queue.answer(stream, call::done(), world.now);
    assert_eq!(world.outputs(), [Output::ForgetStop(id("a"))]);
}

#[test]
fn kept_stops_of_an_earlier_process_go_to_the_inbox() {
    let mut world = World::new();
    world.queue.continue_kept(vec![id("a")], world.now);
    assert_eq!(world.outputs(), [Output::WriteInbox(id("a"))]);
    world.queue.inbox_written(&id("a"), Ok(()), world.now);
    assert_eq!(world.outputs(), [Output::ForgetStop(id("a"))]);
    // Kept only after it was recorded.
    world.queue.stop_kept(&id("a"));
    assert_eq!(world.outputs(), [Output::ForgetStop(id("a"))]);
}

#[test]
fn a_closed_connection_takes_its_calls_along_but_not_its_stops() {
    let mut world = World::ready();
    world.call(1, Kind::Create(id("a")));
    world.call(1, Kind::Stop(id("b")));
    world.sent();
    world.queue.connection_closed(1, world.now);
    assert_eq!(world.queue.len(), 1);
    world.queue.node_lost(world.now);
    assert_eq!(world.outputs(), [Output::WriteInbox(id("b"))]);
    world.queue.inbox_written(&id("b"), Ok(()), world.now);
    assert_eq!(world.answers(), [], "no caller is left for the answer");
    assert_eq!(world.queue.len(), 0);
}

#[test]
fn a_deadline_counts_the_time_in_the_queue() {
    let mut world = World::new();
    let late = world.call_within(1, Kind::Create(id("a")), 2_000_000_000);
    world.call_within(1, Kind::Create(id("b")), 5_000_000_000);
    world.pass(Duration::from_secs(2));
    assert_eq!(world.answers(), [(late, code::DEADLINE_EXCEEDED)]);
    world.connect();
    let sent = world.sent();
    assert_eq!(sent[0].1.timeout_nano, 3_000_000_000);
}

#[test]
fn bounds_are_kept_and_never_refuse_a_stop() {
    let mut world = World::new();
    for _ in 0..CALLS_PER_SANDBOX {
        world.call(1, Kind::Create(id("a")));
    }
    let over = world.call(1, Kind::Create(id("a")));
    assert_eq!(world.answers(), [(over, code::RESOURCE_EXHAUSTED)]);
    for n in 0..CALLS_PER_CONNECTION {
        world.call(1, Kind::Create(id(&format!("n{n}"))));
    }
    assert_eq!(world.answers().len(), CALLS_PER_SANDBOX, "bounded per connection");
    for connection in [1, 2] {
        let sandbox = id(&format!("a{connection}"));
        world.call(connection, Kind::Stop(sandbox.clone()));
        assert!(world.outputs().contains(&Output::WriteInbox(sandbox)));
    }
    world.queue.connection_closed(1, world.now);
    assert_eq!(world.queue.len(), 2, "the stops stay");
    for n in 0..3 * CALLS_PER_CONNECTION {
        world.call(3, Kind::Stop(id(&format!("n{n}"))));
    }
    assert_eq!(world.queue.len(), 2 + 2 * CALLS_PER_CONNECTION, "stops are bounded, too");
}

#[test]
fn bytes_are_bounded() {
    let mut world = World::new();
    let mut refused = 0;
    for n in 0..40 {
        let request = Request { payload: vec![0; 4 << 20], ..Default::default() };
        let kind = Kind::Create(id(&format!("n{n}")));
        world.queue.accept(Caller::Shim { conn: n, stream: 1 }, kind, request, world.now);
        refused += world.answers().len();
    }
    assert_eq!(refused, 40 - 16);
}

#[test]
fn a_hung_node_with_pending_calls_is_dialled_again() {
    let mut world = World::ready();
    world.call(1, Kind::Start(id("a")));
    world.sent();
    world.pass(Duration::from_secs(5));
    assert_eq!(methods(&world.sent()), ["ReadInbox"], "the relay sent a probe");
    world.pass(Duration::from_secs(10));
    assert!(world.outputs().contains(&Output::Reconnect("the node does not answer")));
}

#[test]
fn a_long_start_is_no_hang_while_the_node_answers_probes() {
    let mut world = World::ready();
    let start = world.call(1, Kind::Start(id("a")));
    let stream = world.sent()[0].0;
    for _ in 0..600 {
        world.pass(Duration::from_secs(1));
        for (probe, request) in world.sent() {
            assert_eq!(request.method, "ReadInbox");
            world.queue.answer(probe, call::done(), world.now);
        }
    }
    world.queue.answer(stream, call::done(), world.now);
    assert_eq!(world.answers(), [(start, 0)]);
}

#[test]
fn an_idle_node_is_left_alone() {
    let mut world = World::ready();
    world.call(1, Kind::Other);
    let stream = world.sent()[0].0;
    world.queue.answer(stream, call::done(), world.now);
    world.outputs();
    for _ in 0..100 {
        world.pass(Duration::from_secs(1));
        assert_eq!(world.outputs(), []);
    }
    assert_eq!(world.queue.next_timer(), None);
}

#[test]
fn an_internal_call_does_not_wait_for_the_node() {
    let mut world = World::new();
    world.queue.accept(Caller::Internal(7), Kind::Other, Request::new(), world.now);
    assert_eq!(world.answers(), [(Caller::Internal(7), code::UNAVAILABLE)]);
    world.connect();
    world.queue.accept(Caller::Internal(8), Kind::Other, Request::new(), world.now);
    world.sent();
    world.queue.node_lost(world.now);
    assert_eq!(world.answers(), [(Caller::Internal(8), code::UNAVAILABLE)]);
}

#[test]
fn a_refused_read_of_the_inbox_means_dialling_again() {
    let mut world = World::new();
    world.queue.node_connected(world.now);
    let sent = world.sent();
    world.queue.answer(sent[0].0, call::status(code::INTERNAL, "disk"), world.now);
    assert!(matches!(world.outputs()[..], [Output::Reconnect(_)]));
    assert!(!world.queue.node_is_ready());
}

#[test]
fn a_closed_connection_drops_its_own_waiting_start() {
    // A hash decides the order of the two calls, so many connections are tried.
    for conn in 0..64 {
        let mut world = World::ready();
        world.call(conn, Kind::Create(id("a")));
        world.call(conn, Kind::Start(id("a")));
        assert_eq!(methods(&world.sent()), ["CreateVM"]);
        world.queue.connection_closed(conn, world.now);
        assert_eq!(world.outputs(), [], "a dead shim starts nothing");
        assert_eq!(world.queue.len(), 0);
    }
}
