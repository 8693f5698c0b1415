//! Tests pull secrets: fetched in the background, waited for only for a bounded time, kept up to date while the pod
//! runs, and held in memory only.

use std::sync::Mutex;
use std::sync::atomic::Ordering;
use std::time::Duration;

use zeroize::Zeroizing;

use super::node::*;
use super::world::*;
use crate::sandbox::ports::PullSecretError;

const EVERY: Duration = Duration::from_secs(600);
const DEADLINE: Duration = Duration::from_secs(5);

/// Fake service for the pods' pull secrets, with a log of the secrets that guests got.
#[derive(Default)]
pub(super) struct Service {
    /// Whether the service exists.
    pub(super) asked: std::sync::atomic::AtomicBool,
    pub(super) answer: Mutex<Option<String>>,
    pub(super) refuses: std::sync::atomic::AtomicBool,
    pub(super) questions: std::sync::atomic::AtomicUsize,
    /// Secret in each pod assignment, and whether the guest was to keep the one it had.
    pub(super) given: Mutex<Vec<(String, bool)>>,
}

impl Service {
    pub(super) fn every(&self) -> Option<Duration> {
        self.asked.load(Ordering::Relaxed).then_some(EVERY)
    }

    pub(super) async fn ask(&self) -> Result<Zeroizing<String>, PullSecretError> {
        self.questions.fetch_add(1, Ordering::Relaxed);
        let refused = self.refuses.load(Ordering::Relaxed);
        let answer = self.answer.lock().unwrap().clone();
        match answer {
            Some(answer) => Ok(Zeroizing::new(answer)),
            None if refused => Err(PullSecretError { text: "not yours".into(), refused }),
            None => {
                tokio::time::sleep(DEADLINE).await;
                Err(PullSecretError { text: "away".into(), refused })
            }
        }
    }

    fn is(&self, answer: Option<&str>) {
        self.asked.store(true, Ordering::Relaxed);
        *self.answer.lock().unwrap() = answer.map(str::to_owned);
    }

    fn last(&self) -> Option<(String, bool)> {
        self.given.lock().unwrap().last().cloned()
    }

    fn questions(&self) -> usize {
        self.questions.load(Ordering::Relaxed)
    }
}

fn given(text: &str, keeps: bool) -> Option<(String, bool)> {
    Some((text.to_owned(), keeps))
}

#[tokio::test(start_paused = true)]
async fn a_guest_gets_its_secrets_on_assignment_and_then_changed_ones() {
    let (world, dir) = (World::new(1), Dir::new());
    world.secrets.is(Some("one"));
    let node = Node::start(&world, &dir).await;
    node.run("a").await;
    assert_eq!((world.secrets.last(), world.greetings()), (given("one", false), 1));
    tokio::time::sleep(3 * EVERY).await;
    assert_eq!(world.greetings(), 1, "nothing was new");
    assert!((3..=5).contains(&world.secrets.questions()), "{}", world.secrets.questions());
    world.secrets.is(Some("two"));
    node.until("told", |_| world.greetings() == 2).await;
    assert_eq!(world.secrets.last(), given("two", false));
    // The next node process queries again, and sends nothing that the guest has already.
    let asked = world.secrets.questions();
    node.kill().await;
    let node = Node::start(&world, &dir).await;
    node.until("asked", |_| world.secrets.questions() > asked).await;
    tokio::time::sleep(EVERY / 2).await;
    assert_eq!(world.greetings(), 2);
    // The loss of all secrets is a change, too.
    world.secrets.is(Some(""));
    node.until("told", |_| world.greetings() == 3).await;
    assert_eq!(world.secrets.last(), given("", false));
    let kept = std::fs::read_to_string(dir.0.join("sandboxes/a.json")).unwrap();
    assert!(!kept.contains("\"one\"") && !kept.contains("\"two\""), "{kept}");
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn a_pod_goes_on_without_an_answer_after_one_deadline_and_gets_its_secrets_later() {
    let (world, dir) = (World::new(1), Dir::new());
    world.secrets.is(None);
    let node = Node::start(&world, &dir).await;
    let began = tokio::time::Instant::now();
    node.run("a").await;
    assert!(began.elapsed() < 2 * DEADLINE, "{:?}", began.elapsed());
    assert_eq!(world.secrets.last(), given("", true));
    assert_eq!(node.metrics.guests.pull_secrets_missed.get(), 1);
    tokio::time::sleep(EVERY).await;
    assert_eq!((world.greetings(), node.metrics.guests.pull_secrets_missed.get()), (1, 1));
    world.secrets.is(Some("one"));
    node.until("told", |_| world.greetings() == 2).await;
    assert_eq!(world.secrets.last(), given("one", false));
    // The service is away again, and the node process is a new one: a guest that gets a new plan keeps its secrets.
    world.secrets.is(None);
    node.kill().await;
    let node = Node::start(&world, &dir).await;
    *world.network.lock().unwrap() = "eth1".into();
    world.noise.send_modify(|heard| *heard += 1);
    node.until("told", |_| world.greetings() == 3).await;
    assert_eq!(world.secrets.last(), given("", true));
    // The same secrets come back: the guest has them already.
    world.secrets.is(Some("one"));
    tokio::time::sleep(2 * EVERY).await;
    assert_eq!(world.greetings(), 3);
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn a_refusal_delays_no_start_and_is_rarely_retried() {
    let (world, dir) = (World::new(1), Dir::new());
    world.secrets.is(None);
    world.secrets.refuses.store(true, Ordering::Relaxed);
    let node = Node::start(&world, &dir).await;
    node.run("a").await;
    assert_eq!(world.secrets.last(), given("", true));
    let asked = world.secrets.questions();
    tokio::time::sleep(Duration::from_secs(300)).await;
    assert!(world.secrets.questions() - asked <= 6, "{} more questions", world.secrets.questions() - asked);
    // A stopped sandbox queries no more.
    node.table.stop(&id("a"), crate::sandbox::Stop::Called).await.unwrap();
    node.until("gone", |node| node.phase("a") == "gone").await;
    let asked = world.secrets.questions();
    tokio::time::sleep(EVERY).await;
    assert_eq!(world.secrets.questions(), asked);
    node.kill().await;
}
