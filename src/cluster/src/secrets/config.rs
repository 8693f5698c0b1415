//! Reads the service's settings: section `secrets`, shared with the nodes that ask.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use peerpod_base::config::Reader;

use crate::authority::Policy;

/// Longest validity of a replica's own certificate, whose key never leaves the replica. It is renewed after two thirds.
const CERTIFICATE_VALIDITY: Duration = Duration::from_secs(6 * 3600);

/// Audience of the nodes' tokens, as the chart projects them. A token for the API server is refused.
const AUDIENCE: &str = "peerpod-secrets";
/// Validity of a CA. The next one is made when a third is left.
const CA_VALIDITY: Duration = Duration::from_secs(365 * 86_400);
/// Time from the publication of the next CA in the ConfigMap until it signs. A kubelet needs two minutes to show it.
const CA_SETTLE: Duration = Duration::from_secs(600);

/// Address that nodes ask for pull secrets (TLS).
const LISTEN: SocketAddr = SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), 9444);

#[derive(Clone)]
pub(crate) struct SecretsConfig {
    pub(super) listen: SocketAddr,
    /// Host of `secrets.address`: name in the service's own certificate; empty: `peerpod-secrets.<namespace>.svc`.
    pub(super) names: Vec<String>,
    pub(super) audience: String,
    /// As `namespace:name`; `None`: `peerpod-node` of the service's own namespace.
    pub(super) node_account: Option<String>,
    /// `webhook.runtime-classes`: RuntimeClasses of peer pods.
    pub(super) runtime_classes: Vec<String>,
    pub(super) ca_secret: String,
    /// ConfigMap of the same name in which nodes find the CA's certificate.
    pub(super) ca_config_map: String,
    pub(super) policy: Policy,
}

impl SecretsConfig {
    /// Reads the keys; `None` when `secrets.serve` is off.
    pub(crate) fn read(reader: &mut Reader) -> Option<SecretsConfig> {
        // Keys that only the nodes use.
        for key in ["server-name", "ca-file", "token-file", "deadline", "refresh"] {
            reader.leave(&format!("secrets.{key}"));
        }
        let serve: bool =
            reader.get("secrets.serve", "true", "give nodes the pull secrets of their peer pods");
        let address: Option<String> = reader.optional(
            "secrets.address",
            "address of the cluster's service for pods' pull secrets (host:port); its host is in the certificate",
        );
        let host = address
            .as_deref()
            .and_then(|address| address.rsplit_once(':'))
            .map(|(host, _)| host.trim_matches(['[', ']']).to_owned());
        let ca_secret: String = reader.get(
                "secrets.ca-secret",
                "peerpod-secrets-ca",
                "the Secret in which the CA is kept, and the ConfigMap with its certificate (ca.crt); made when they are not there",
            );
        let validity = reader.constant("secrets.ca-validity", "CA_VALIDITY", CA_VALIDITY);
        let settle = reader.constant("secrets.ca-settle", "CA_SETTLE", CA_SETTLE);
        let config = SecretsConfig {
            listen: reader.constant("secrets.listen", "LISTEN", LISTEN),
            names: reader.derived("secrets.names", "secrets.address", host.into_iter().collect()),
            audience: reader.constant("secrets.audience", "AUDIENCE", AUDIENCE.to_owned()),
            node_account: reader.optional(
                "secrets.node-service-account",
                "the nodes' service account, as namespace:name; peerpod-node in our own namespace when not set",
            ),
            runtime_classes: reader.get(
                "webhook.runtime-classes",
                "kata-remote",
                "the RuntimeClasses whose pods are peer pods; no other pod's secrets are given",
            ),
            ca_config_map: reader.derived("secrets.ca-config-map", "secrets.ca-secret", ca_secret.clone()),
            ca_secret,
            policy: Policy {
                name: "peerpod secrets CA".to_owned(),
                validity,
                leaf: CERTIFICATE_VALIDITY,
                settle,
            },
        };
        reader.removed("secrets.certificate-validity", "nodes identify themselves by their token");
        reader.removed("secrets.runtime-classes", "use webhook.runtime-classes");
        if config.node_account.as_ref().is_some_and(|account| account.split(':').count() != 2) {
            reader.mistake(
                "secrets.node-service-account",
                "not namespace:name; write it like peerpod:peerpod-node",
            );
        }
        if config.runtime_classes.is_empty() {
            reader
                .mistake("webhook.runtime-classes", "none; name at least one, or set secrets.serve to false");
        }
        serve.then_some(config)
    }
}
