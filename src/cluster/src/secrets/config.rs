//! Reads the service's settings: section `secrets`, shared with the nodes that ask.

use std::{net::SocketAddr, time::Duration};

use peerpod_base::config::Reader;

use crate::authority::Policy;

/// Longest validity of a replica's own certificate, whose key never leaves the replica. It is renewed after two thirds.
const CERTIFICATE_VALIDITY: Duration = Duration::from_secs(6 * 3600);

/// Settings of the service.
#[derive(Clone, Debug)]
pub struct SecretsConfig {
    /// `secrets.listen`: address that nodes connect to (TLS).
    pub listen: SocketAddr,
    /// `secrets.names`: names in the service's own certificate; empty: `peerpod-secrets.<namespace>.svc`.
    pub names: Vec<String>,
    /// `secrets.audience`: audience of the nodes' tokens.
    pub audience: String,
    /// `secrets.node-service-account`, as `namespace:name`; `None`: `peerpod-node` of the service's own namespace.
    pub node_account: Option<String>,
    /// `secrets.runtime-classes`: RuntimeClasses of peer pods.
    pub runtime_classes: Vec<String>,
    /// `secrets.ca-secret`: Secret that holds the CA.
    pub ca_secret: String,
    /// `secrets.ca-config-map`: ConfigMap in which nodes find the CA's certificate.
    pub ca_config_map: String,
    /// `secrets.ca-validity`, `secrets.ca-settle`.
    pub policy: Policy,
}

impl SecretsConfig {
    /// Reads the keys; `None` when `secrets.serve` is off.
    pub fn read(reader: &mut Reader) -> Option<SecretsConfig> {
        // Keys that only the nodes use.
        for key in ["address", "server-name", "ca-file", "token-file", "deadline", "refresh"] {
            reader.leave(&format!("secrets.{key}"));
        }
        let serve: bool =
            reader.get("secrets.serve", "true", "give nodes the pull secrets of their peer pods");
        let validity: Duration = reader.get(
            "secrets.ca-validity",
            "365d",
            "validity of a CA; the next one is made when a third is left",
        );
        let settle: Duration = reader.get(
            "secrets.ca-settle",
            "10m",
            "time from the publication of the next CA in the ConfigMap until it signs certificates; a \
             kubelet needs two minutes to show it",
        );
        let config = SecretsConfig {
            listen: reader.get("secrets.listen", "[::]:9444", "address and port that nodes ask for pull secrets (TLS)"),
            names: reader.get(
                "secrets.names",
                "",
                "names and addresses by which nodes reach the service; peerpod-secrets.<namespace>.svc when not set",
            ),
            audience: reader.get(
                "secrets.audience",
                "peerpod-secrets",
                "the audience of the nodes' tokens; no token for anything else is taken",
            ),
            node_account: reader.optional(
                "secrets.node-service-account",
                "the nodes' service account, as namespace:name; peerpod-node in our own namespace when not set",
            ),
            runtime_classes: reader.get(
                "secrets.runtime-classes",
                "kata-remote",
                "the RuntimeClasses whose pods are peer pods; no other pod's secrets are given",
            ),
            ca_secret: reader.get(
                "secrets.ca-secret",
                "peerpod-secrets-ca",
                "the Secret in which the CA is kept; made when it is not there",
            ),
            ca_config_map: reader.get(
                "secrets.ca-config-map",
                "peerpod-secrets-ca",
                "the ConfigMap that has the CA's certificate (ca.crt), for the nodes to mount",
            ),
            policy: Policy {
                name: "peerpod secrets CA".to_owned(),
                validity,
                leaf: CERTIFICATE_VALIDITY,
                settle,
            },
        };
        config.check(reader);
        serve.then_some(config)
    }

    fn check(&self, reader: &mut Reader) {
        if self.audience.is_empty() {
            reader.mistake(
                "secrets.audience",
                "empty: a token for the API server would do; name its own audience",
            );
        }
        if self.node_account.as_ref().is_some_and(|account| account.split(':').count() != 2) {
            reader.mistake(
                "secrets.node-service-account",
                "not namespace:name; write it like peerpod:peerpod-node",
            );
        }
        if self.runtime_classes.is_empty() {
            reader
                .mistake("secrets.runtime-classes", "none; name at least one, or set secrets.serve to false");
        }
        if self.policy.settle * 6 > self.policy.validity {
            reader.mistake("secrets.ca-settle", "more than a sixth of secrets.ca-validity; make it shorter");
        }
    }
}
