//! Passes a volume's secret from kubelet to the pod's record. The secrets of NodePublishVolume count as a whole;
//! without any, those of the staging count. A change takes effect with the next publish. May touch: stored secrets.

use std::collections::HashMap;
use std::path::PathBuf;

use peerpod_proto::csi::{NodePublishVolumeRequest, NodeStageVolumeRequest};
use peerpod_volume::{Credentials, Source, VolumeId};
use zeroize::Zeroize;

use super::NodeRole;
use crate::capability::Capability;
use crate::drivers;
use crate::grpc::{Code, Status};
use crate::secrets::Given;

/// Mount option that mounts a share anonymously, regardless of a secret.
const GUEST: &str = "guest";

impl NodeRole {
    /// Returns the part of a staging's secrets to be stored.
    pub(super) async fn staged_with(
        &self,
        request: &mut NodeStageVolumeRequest,
    ) -> Result<Option<Given>, Status> {
        let login = drivers::login(self.0.upstream.driver().await?);
        let given = Given::take(&mut request.secrets, login);
        if let Some(Err(why)) = given.as_ref().map(|given| given.check(None)) {
            let text = format!("stage volume {}: {why}", request.volume_id);
            return Err(Code::InvalidArgument.status(text));
        }
        Ok(given)
    }

    /// Stores the secrets of a staging that the driver handles. The volume may turn out to be a peer pod's volume, by
    /// the pod's class, when it is published. kubelet sends the staging's secrets only once.
    pub(super) async fn keep_in_case(&self, request: &NodeStageVolumeRequest) -> Result<(), Status> {
        let named = !request.volume_id.is_empty() && !request.staging_target_path.is_empty();
        if self.0.cluster.is_none() || !named {
            return Ok(());
        }
        let driver = self.0.upstream.driver().await?;
        let Some(login) = drivers::login(driver) else { return Ok(()) };
        let given = Given::take(&mut request.secrets.clone(), Some(login));
        // Secrets that no guest could use may be right for the driver. Secrets of an earlier staging are deleted then.
        let given = given.filter(|given| given.check(None).is_ok());
        let volume = VolumeId::of(driver, &request.volume_id);
        let path = PathBuf::from(&request.staging_target_path);
        let what = "keep a volume's staged secret";
        self.on_disk(what, move |inner| inner.files.put_staged_secret(&volume, &path, given.as_ref())).await
    }

    /// Returns the secrets of this call, or else those of the volume's staging.
    pub(super) async fn given(&self, request: &NodePublishVolumeRequest) -> Result<Option<Given>, Status> {
        let driver = self.0.upstream.driver().await?;
        let login = drivers::login(driver);
        let mut secrets = request.secrets.clone();
        let given = Given::take(&mut secrets, login);
        if given.is_some() || login.is_none() || request.staging_target_path.is_empty() {
            return Ok(given);
        }
        let volume = VolumeId::of(driver, &request.volume_id);
        let path = PathBuf::from(&request.staging_target_path);
        let what = "read the volume's staged secret";
        self.on_disk(what, move |inner| inner.files.staged_secret(&volume, &path)).await
    }
}

/// Clears a request's secrets from memory.
pub(super) fn wipe(secrets: &mut HashMap<String, String>) {
    secrets.values_mut().for_each(Zeroize::zeroize);
    secrets.clear();
}

/// Returns the credentials for mounting a share; `None`: it is mounted anonymously, or is no share. An anonymous share
/// loses its secret reference. An error names the missing or unusable key of the secret.
pub(super) fn signs_in(
    source: &mut Source,
    driver: &str,
    given: Option<Given>,
    wanted: &Capability,
    more: &[String],
) -> Result<Option<Credentials>, String> {
    let (Source::Smb { secret, .. }, Some(login)) = (source, drivers::login(driver)) else {
        return Ok(None);
    };
    let options = wanted.mount_options.iter().chain(more);
    if options.flat_map(|option| option.split(',')).any(|option| option.trim() == GUEST) {
        *secret = None;
        return Ok(None);
    }
    match (given, secret.as_ref()) {
        (None, None) => Ok(None),
        (given, named) => given.unwrap_or_default().login(login, named).map(Some),
    }
}

#[cfg(test)]
mod tests {
    use peerpod_volume::SecretRef;

    use super::*;

    const DRIVER: &str = "smb.csi.k8s.io";

    fn share(secret: bool) -> Source {
        let secret = secret.then(|| SecretRef { namespace: "shop".into(), name: "files".into() });
        Source::Smb { server: "s".into(), share: "x".into(), secret }
    }

    fn given() -> Option<Given> {
        let pairs = [("username", "joe"), ("password", "p, q")];
        let mut secrets: HashMap<String, String> =
            pairs.into_iter().map(|(key, value)| (key.to_owned(), value.to_owned())).collect();
        Given::take(&mut secrets, drivers::login(DRIVER))
    }

    #[test]
    fn a_share_is_mounted_with_its_secrets_user_or_anonymously() {
        let wanted = Capability::default();
        for named in [true, false] {
            let found = signs_in(&mut share(named), DRIVER, given(), &wanted, &[]).unwrap().unwrap();
            assert_eq!(found.password.as_str(), "p, q");
        }
        assert!(signs_in(&mut share(false), DRIVER, None, &wanted, &[]).unwrap().is_none());
        let why = signs_in(&mut share(true), DRIVER, None, &wanted, &[]).unwrap_err();
        assert!(why.contains("secret shop/files") && why.contains("nodeStageSecretRef"), "{why}");
        let (mut source, options) = (share(true), ["vers=3.0, guest".to_owned()]);
        assert!(signs_in(&mut source, DRIVER, given(), &wanted, &options).unwrap().is_none());
        assert_eq!(source, share(false));
        let mut export = Source::Nfs { server: "s".into(), export: "/e".into() };
        assert!(signs_in(&mut export, DRIVER, given(), &wanted, &[]).unwrap().is_none());
    }
}
