//! What the controller's process consists of.

use std::{future::Future, pin::Pin};

use kube::{
    Client,
    runtime::events::{Recorder, Reporter},
};
use peerpod_base::{
    admin::Ready,
    lifecycle::{Drain, Shutdown},
};
use peerpod_kube::lease::{NotHeld, Term};

/// What a part is given when it runs. Clones are the same.
#[derive(Clone)]
pub struct Context {
    /// The API server; every call with `peerpod_kube::client::within`.
    pub client: Client,
    /// Our own namespace: Leases, our own Secrets.
    pub namespace: String,
    /// Who we are among the replicas: the pod's name.
    pub identity: String,
    /// Publishes Events in our name.
    pub events: Recorder,
    /// Says what is wrong, under the part's own name.
    pub ready: Ready,
    /// When the process is told to end. A part that is `leader_only` is dropped then, or when the Lease is lost; the
    /// others end themselves, soon.
    pub shutdown: Shutdown,
    /// What must not be cut off at the end holds one of these.
    pub drain: Drain,
    /// The term under which a part that is `leader_only` runs.
    pub term: Option<Term>,
}

impl Context {
    /// Before each effect of a part that is `leader_only`; of another it is always so.
    ///
    /// # Errors
    /// The Lease is not ours any more.
    pub fn may_act(&self) -> Result<(), NotHeld> {
        self.term.as_ref().map_or(Ok(()), Term::check)
    }

    /// In whose name Events are published.
    pub(super) fn reporter(identity: &str) -> Reporter {
        Reporter { controller: "peerpod-controller".to_owned(), instance: Some(identity.to_owned()) }
    }
}

type Run = Box<dyn Fn(Context) -> Pin<Box<dyn Future<Output = anyhow::Result<()>> + Send>> + Send + Sync>;

/// One thing that the process does.
pub struct Part {
    /// In logs, and in `/readyz` when it waits for something.
    pub name: &'static str,
    /// Whether one replica at a time runs it.
    pub leader_only: bool,
    run: Run,
}

impl Part {
    /// `run` is called once; if `leader_only`, again for each term. It ends when the process is told to end
    /// ([`Context::shutdown`]); if it ends before, the process ends with its error.
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
