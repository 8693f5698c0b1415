//! Makes certificates without any other system: a CA in a Secret, its certificate in the registration's `caBundle`, and
//! each replica's own key in memory. May touch: that Secret and that registration.

use std::path::PathBuf;
use std::time::Duration;

use peerpod_base::config::Reader;
use peerpod_kube::client;

use crate::authority::Policy;
use crate::authority::maintainer::{CaMaintainer, Published};

/// Validity of a CA. The next one is made when a third is left.
const CA_VALIDITY: Duration = Duration::from_secs(365 * 86_400);
/// Validity of a replica's certificate, which is made again after two thirds.
const CERTIFICATE_VALIDITY: Duration = Duration::from_secs(7 * 86_400);
/// Time from the registration of the next CA until it signs certificates.
const CA_SETTLE: Duration = Duration::from_secs(60);

/// Settings of `webhook.certificates: self-managed`.
pub(super) struct Managed {
    kubeconfig: Option<PathBuf>,
    namespace: Option<String>,
    secret: String,
    registration: String,
    /// Names of the Service; empty: the registration's name.
    names: Vec<String>,
    policy: Policy,
}

impl Managed {
    pub(super) fn read(reader: &mut Reader) -> Managed {
        let validity = reader.constant("webhook.ca-validity", "CA_VALIDITY", CA_VALIDITY);
        let leaf =
            reader.constant("webhook.certificate-validity", "CERTIFICATE_VALIDITY", CERTIFICATE_VALIDITY);
        let settle = reader.constant("webhook.ca-settle", "CA_SETTLE", CA_SETTLE);
        Managed {
            kubeconfig: reader.optional(
                "kubernetes.kubeconfig",
                "how the API server is reached; the pod's service account when not set",
            ),
            namespace: reader.optional(
                "cluster.namespace",
                "the namespace of our Secrets; the service account's namespace when not set",
            ),
            secret: reader.get(
                "webhook.ca-secret",
                "peerpod-webhook-ca",
                "self-managed: the Secret in which the CA is kept; made when it is not there",
            ),
            registration: reader.get(
                "webhook.registration",
                "peerpod-webhook",
                "self-managed: the MutatingWebhookConfiguration whose caBundle is kept up to date",
            ),
            names: reader.derived("webhook.names", "webhook.registration", Vec::new()),
            policy: Policy { name: "peerpod webhook CA".to_owned(), validity, leaf, settle },
        }
    }

    /// Returns the maintainer of the CA, and the server's names.
    pub(super) async fn open(self) -> Result<(CaMaintainer, Vec<String>), client::Error> {
        let client = client::connect(self.kubeconfig.as_deref()).await?;
        let namespace = self.namespace.unwrap_or_else(|| client.default_namespace().to_owned());
        let mut names = self.names;
        if names.is_empty() {
            names = vec![format!("{}.{namespace}.svc", self.registration)];
        }
        let published = Published::Webhook(self.registration);
        Ok((CaMaintainer { client, namespace, secret: self.secret, published, policy: self.policy }, names))
    }
}
