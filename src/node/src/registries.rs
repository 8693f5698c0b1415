//! Reads the node's registry settings for guests that pull images themselves: a pull secret for all pods, CA
//! certificates, plain-HTTP registries, images to prefetch. The files are read for each guest, so that a rotated secret
//! applies to the next pod without a restart. Secrets of single pods come from the cluster, if there is one
//! ([`crate::secrets`]).

use std::io;
use std::path::{Path, PathBuf};

use peerpod_base::config::Reader;
use peerpod_common::files;
use peerpod_kube::docker_config::{Form, Merged};
use peerpod_proto::guest::Images;

const VERSION: u32 = 1;
/// Size limit of each file, in bytes.
const MAX_FILE: u64 = 1 << 20;
const MOST: usize = 64;

/// Settings `node.pull-secret`, `node.registry-ca`, `node.plain-http-registries` and `node.prefetch-images`.
#[derive(Clone, Debug, Default)]
pub(crate) struct Registries {
    pull_secret: Option<PathBuf>,
    ca: Option<PathBuf>,
    plain_http: Vec<String>,
    prefetch: Vec<String>,
}

impl Registries {
    pub(crate) fn read(reader: &mut Reader) -> Registries {
        let registries = Registries {
            pull_secret: reader.optional(
                "node.pull-secret",
                "file with the credentials of registries (a .dockerconfigjson) that guests pull every pod's images with; \
                 only where the VM image has no confidential data hub of its own",
            ),
            ca: reader.optional(
                "node.registry-ca",
                "file with CA certificates (PEM) of registries that guests trust, besides those of the VM \
                 image",
            ),
            plain_http: reader
                .optional(
                    "node.plain-http-registries",
                    "registries (host or host:port) that guests reach over plain HTTP",
                )
                .unwrap_or_default(),
            prefetch: reader
                .optional(
                    "node.prefetch-images",
                    "images that every VM fetches as soon as it is assigned to a pod",
                )
                .unwrap_or_default(),
        };
        if registries.plain_http.len() > MOST || registries.prefetch.len() > MOST {
            let why = "more than 64, or more than 64 plain HTTP registries; list fewer";
            reader.mistake("node.prefetch-images", why);
        }
        registries
    }

    /// Returns the settings for a guest. `of_pod` holds the pod's own pull secrets (a `.dockerconfigjson`; empty:
    /// none), which take precedence. An unreadable file is logged and left out: other pods must run.
    pub(crate) fn images(&self, of_pod: &str) -> Images {
        let of_node = text("node.pull-secret", self.pull_secret.as_deref());
        Images {
            version: VERSION,
            pull_secret: if of_pod.is_empty() { of_node } else { both(of_pod, &of_node) },
            ca_pem: text("node.registry-ca", self.ca.as_deref()),
            plain_http: self.plain_http.clone(),
            prefetch: self.prefetch.clone(),
            ..Images::default()
        }
    }
}

/// Merges two pull secrets; the first one's entry for a registry wins.
fn both(of_pod: &str, of_node: &str) -> String {
    let mut merged = Merged::default();
    for (whose, text) in [("the pod's", of_pod), ("node.pull-secret", of_node)] {
        if !text.trim().is_empty()
            && let Err(error) = merged.add(Form::DockerConfigJson, text.as_bytes())
        {
            tracing::error!(whose, %error, "a pull secret is not valid; guests do not get it");
        }
    }
    match merged.write() {
        Ok(text) => text.to_string(),
        Err(error) => {
            tracing::error!(%error, "cannot merge the node's pull secret; guests do not get it");
            of_pod.to_owned()
        }
    }
}

fn text(key: &str, path: Option<&Path>) -> String {
    let Some(path) = path else { return String::new() };
    let read = || {
        let bytes = files::read(path, MAX_FILE)?.ok_or(io::ErrorKind::NotFound)?;
        String::from_utf8(bytes).map_err(io::Error::other)
    };
    read().unwrap_or_else(|error| {
        tracing::error!(key, path = %path.display(), %error, "cannot read the file; guests do not get it");
        String::new()
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn files_are_read_when_they_are_needed() {
        let path = std::env::temp_dir().join(format!("pp-registries-{}", std::process::id()));
        let registries = Registries { pull_secret: Some(path.clone()), ..Registries::default() };
        assert_eq!(registries.images("").pull_secret, "");
        fs::write(&path, "{\"auths\":{}}").unwrap();
        assert_eq!(registries.images("").pull_secret, "{\"auths\":{}}");
        let mine = r#"{"auths":{"a":{"auth":"eDp5"}}}"#;
        assert_eq!(registries.images(mine).pull_secret, mine);
        fs::write(&path, r#"{"auths":{"a":{"auth":"bm9kZTp5"},"b":{"auth":"bm9kZTp5"}}}"#).unwrap();
        let merged = r#"{"auths":{"a":{"auth":"eDp5"},"b":{"auth":"bm9kZTp5"}}}"#;
        assert_eq!(registries.images(mine).pull_secret, merged);
        fs::write(&path, vec![b' '; (1 << 20) + 1]).unwrap();
        assert_eq!(registries.images("").pull_secret, "");
        fs::remove_file(&path).unwrap();
        assert_eq!(registries.images("").version, 1);
    }
}
