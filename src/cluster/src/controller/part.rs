//! Defines the parts of the controller process and their context.

use std::future::Future;
use std::pin::Pin;

use kube::Client;
use kube::runtime::events::{Recorder, Reporter};
use peerpod_base::admin::Ready;
use peerpod_base::lifecycle::{Drain, Shutdown};
use peerpod_kube::lease::{NotHeld, Term};

/// Context of a running part. Clones share everything.
#[derive(Clone)]
pub struct Context {
    /// Client of the API server. Every call uses `peerpod_kube::client::within`.
    pub client: Client,
    /// Namespace of the controller, for Leases and its own Secrets.
    pub namespace: String,
    /// Name of this replica: the pod's name.
    pub identity: String,
    /// Publishes Events of the controller.
    pub events: Recorder,
    /// Reports the state of a part, under the part's name.
    pub ready: Ready,
    /// Signals the end of the process. A `leader_only` part is dropped then, or when the Lease is lost. The others end
    /// themselves soon after.
    pub shutdown: Shutdown,
    /// Guards of operations that must not be cut off at the end.
    pub drain: Drain,
    /// Term under which a `leader_only` part runs.
    pub term: Option<Term>,
}

impl Context {
    /// Checks the Lease. A `leader_only` part calls it before each effect; for any other part it always succeeds.
    ///
    /// # Errors
    /// The Lease is no longer held.
    pub fn may_act(&self) -> Result<(), NotHeld> {
        self.term.as_ref().map_or(Ok(()), Term::check)
    }

    /// Returns the reporter of Events.
    pub(super) fn reporter(identity: &str) -> Reporter {
        Reporter { controller: "peerpod-controller".to_owned(), instance: Some(identity.to_owned()) }
    }
}

type Run = Box<dyn Fn(Context) -> Pin<Box<dyn Future<Output = anyhow::Result<()>> + Send>> + Send + Sync>;

/// One task of the process.
pub struct Part {
    /// Name in logs, and in `/readyz` while the part waits for something.
    pub name: &'static str,
    /// Whether only one replica at a time runs it.
    pub leader_only: bool,
    run: Run,
}

impl Part {
    /// Makes a part. `run` is called once, or for each term if `leader_only`. It ends after a shutdown
    /// ([`Context::shutdown`]); if it ends earlier, the process ends with its error.
    pub fn new<F>(
        name: &'static str,
        leader_only: bool,
        run: impl Fn(Context) -> F + Send + Sync + 'static,
    ) -> Part
    where
        F: Future<Output = anyhow::Result<()>> + Send + 'static,
    {
        Part { name, leader_only, run: Box::new(move |context| Box::pin(run(context))) }
    }

    pub(super) fn run(&self, context: Context) -> Pin<Box<dyn Future<Output = anyhow::Result<()>> + Send>> {
        (self.run)(context)
    }
}
