//! Mounts shares that require credentials. The guest mounts them and not the kata-agent, which writes the options of
//! its mounts into its log. Each option goes to the kernel by a call of its own (fsconfig(2)). So no character of a
//! password has a meaning, and none of it is on a command line, in a file or in /proc/mounts. The kata-agent gets the
//! folder.

use std::fs::{self, File};
use std::io::Read;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;

use nix::mount::{MntFlags, MsFlags, umount2};
use peerpod_volume::credentials::MAX_FIELD;
use peerpod_volume::{Credentials, SecretRef};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, fsconfig_create, fsconfig_set_flag,
    fsconfig_set_string, fsmount, fsopen, move_mount,
};

use super::moment::{self, BIND};
use super::shares::ANY;
use super::{Fault, Known, LOOK, SHARES};
use crate::intercept::Ready;

/// Limit of the kernel's messages about a mount, in bytes.
const WORDS: usize = 400;

/// Mounts the share unless it is mounted; returns its description for the kata-agent.
pub(super) async fn mounted(
    known: &Known,
    unc: String,
    secret: Option<&SecretRef>,
    mut options: Vec<String>,
    credentials: Credentials,
) -> Result<Ready, Fault> {
    let place = Path::new(SHARES).join(known.volume.id.as_str());
    if known.volume.read_only {
        options.push("ro".into());
    }
    let share = Share { unc, secret: named(secret), options, credentials };
    let (at, again) = (place.clone(), known.signed_in.load(Relaxed));
    known.inspect(LOOK, move || share.mount(&at, again)).await?;
    known.signed_in.store(true, Relaxed);
    Ok(Ready {
        driver: ANY.into(),
        source: place.display().to_string(),
        fstype: BIND.into(),
        options: vec![BIND.into()],
        ..Ready::default()
    })
}

fn named(secret: Option<&SecretRef>) -> String {
    match secret {
        Some(SecretRef { namespace, name }) => format!("secret {namespace}/{name}"),
        None => "the secret of the volume".to_owned(),
    }
}

struct Share {
    unc: String,
    secret: String,
    options: Vec<String>,
    credentials: Credentials,
}

impl Share {
    /// Mounts the share at `place`. `same`: an existing mount there was made as this user. Blocks.
    fn mount(&self, place: &Path, same: bool) -> Result<(), Fault> {
        if moment::is_mounted(place) {
            // Containers that have the old mount keep it.
            if same || umount2(place, MntFlags::UMOUNT_NOFOLLOW).is_err() {
                return Ok(());
            }
        }
        moment::make_folder(place)?;
        let tree = self.tree()?;
        // The place is absolute, so the directory does not matter.
        move_mount(&tree, "", &tree, place, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH).map_err(|errno| {
            drop(fs::remove_dir(place)); // a folder that stays does no harm
            Fault::not_now(format!("mount at {}: {errno}", place.display()))
        })
    }

    /// Returns the mounted share, not yet attached to a path.
    fn tree(&self) -> Result<OwnedFd, Fault> {
        let (flags, own) = moment::split(&self.options);
        let context = fsopen("cifs", FsOpenFlags::FSOPEN_CLOEXEC)
            .map_err(|errno| Fault::never(format!("the VM's kernel mounts no SMB shares: {errno}")))?;
        self.configure(&context, flags, &own)?;
        fsconfig_create(&context).map_err(|errno| self.refused(&context, errno))?;
        fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes(flags))
            .map_err(|errno| Fault::not_now(format!("mount {}: {errno}", self.unc)))
    }

    fn configure(&self, context: &OwnedFd, flags: MsFlags, own: &[&str]) -> Result<(), Fault> {
        self.set(context, "source", Some(&self.unc))?;
        for (flag, name) in
            [(MsFlags::MS_RDONLY, "ro"), (MsFlags::MS_SYNCHRONOUS, "sync"), (MsFlags::MS_DIRSYNC, "dirsync")]
        {
            if flags.contains(flag) {
                self.set(context, name, None)?;
            }
        }
        for option in own {
            match option.split_once('=') {
                Some((name, value)) => self.set(context, name, Some(value))?,
                None => self.set(context, option, None)?,
            }
        }
        // Last: the values of the secret prevail.
        let Credentials { version: _, username, password, domain } = &self.credentials;
        self.set(context, "username", Some(username))?;
        if let Some(domain) = domain {
            self.set(context, "domain", Some(domain))?;
        }
        self.set(context, "password", Some(password))
    }

    fn set(&self, context: &OwnedFd, name: &str, value: Option<&str>) -> Result<(), Fault> {
        if value.is_some_and(|value| value.len() > MAX_FIELD) {
            return Err(Fault::never(format!(
                "mount {}: its option {name} has more than {MAX_FIELD} bytes, which is the kernel's limit",
                self.unc
            )));
        }
        let set = match value {
            Some(value) => fsconfig_set_string(context, name, value),
            None => fsconfig_set_flag(context, name),
        };
        set.map_err(|errno| {
            let said = self.said(context);
            Fault::never(format!("mount {}: the kernel does not take option {name}: {errno}{said}", self.unc))
        })
    }

    /// Returns the reason for which the server or the kernel did not mount it.
    fn refused(&self, context: &OwnedFd, errno: Errno) -> Fault {
        let said = self.said(context);
        let (unc, secret) = (&self.unc, &self.secret);
        match errno {
            Errno::ACCESS | Errno::PERM | Errno::NOKEY | Errno::KEYREJECTED | Errno::KEYEXPIRED => {
                Fault::never(format!(
                    "mount {unc}: the server denies access to the user of {secret} ({errno}): correct its \
                     username, password and domain, or the user's rights to the share, and make the pod \
                     again{said}"
                ))
            }
            Errno::NOENT | Errno::NXIO | Errno::NODEV => {
                Fault::never(format!("mount {unc}: the server has no such share or folder ({errno}){said}"))
            }
            Errno::INVAL | Errno::OPNOTSUPP => Fault::never(format!(
                "mount {unc}: the kernel or the server does not support this mount ({errno}); check the \
                 volume's mount options{said}"
            )),
            _ => Fault::not_now(format!("mount {unc} as the user of {secret}: {errno}{said}")),
        }
    }

    /// Returns the kernel's messages about this mount, without anything of the secret.
    fn said(&self, context: &OwnedFd) -> String {
        let Ok(copy) = context.try_clone() else { return String::new() };
        let (mut log, mut piece, mut said) = (File::from(copy), [0; 256], String::new());
        // One message per read; an error when there are no more.
        while let Ok(count @ 1..) = log.read(&mut piece) {
            let line = String::from_utf8_lossy(&piece[..count]);
            // `e ` is an error, `w ` a warning.
            let line = line.trim().trim_start_matches("e ").trim_start_matches("w ");
            if said.len() + line.len() > WORDS {
                break;
            }
            said += &format!("; {line}");
        }
        if [&self.credentials.password, &self.credentials.username]
            .iter()
            .any(|word| said.contains(word.as_str()))
        {
            return String::new();
        }
        said.replace(char::is_control, " ")
    }
}

fn attributes(flags: MsFlags) -> MountAttrFlags {
    let mut attributes = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
    for (flag, attribute) in [
        (MsFlags::MS_RDONLY, MountAttrFlags::MOUNT_ATTR_RDONLY),
        (MsFlags::MS_NOEXEC, MountAttrFlags::MOUNT_ATTR_NOEXEC),
        (MsFlags::MS_NOATIME, MountAttrFlags::MOUNT_ATTR_NOATIME),
        (MsFlags::MS_NODIRATIME, MountAttrFlags::MOUNT_ATTR_NODIRATIME),
    ] {
        if flags.contains(flag) {
            attributes |= attribute;
        }
    }
    attributes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share() -> Share {
        let credentials = Credentials {
            version: 1,
            username: "joe".to_owned().into(),
            password: "hidden, word".to_owned().into(),
            domain: None,
        };
        let secret = SecretRef { namespace: "shop".into(), name: "files".into() };
        Share { unc: "//s/x".into(), secret: named(Some(&secret)), options: Vec::new(), credentials }
    }

    #[test]
    fn a_refused_login_names_the_secret_without_its_content() {
        let context = OwnedFd::from(File::open("/dev/null").unwrap());
        for errno in [Errno::ACCESS, Errno::NOKEY, Errno::PERM, Errno::HOSTDOWN, Errno::TIMEDOUT] {
            let fault = share().refused(&context, errno).to_string();
            assert!(fault.contains("//s/x") && fault.contains("secret shop/files"), "{fault}");
            assert!(!fault.contains("hidden") && !fault.contains("joe"), "{fault}");
        }
        let long = "x".repeat(MAX_FIELD + 1);
        let fault = share().set(&context, "prefixpath", Some(&long)).unwrap_err().to_string();
        assert!(fault.contains("prefixpath") && fault.contains("255"), "{fault}");
        // Not the context of a file system: refused by the kernel.
        let fault = share().set(&context, "password", Some("hidden")).unwrap_err().to_string();
        assert!(fault.contains("option password") && !fault.contains("hidden"), "{fault}");
    }

    #[test]
    fn mount_options_are_distinguished_from_other_options() {
        let (flags, own) = (["ro", "noexec", "vers=3.0", "nobrl"].map(String::from), ["vers=3.0", "nobrl"]);
        let (flags, rest) = moment::split(&flags);
        assert_eq!(rest, own);
        let attributes = attributes(flags);
        assert!(attributes.contains(MountAttrFlags::MOUNT_ATTR_RDONLY | MountAttrFlags::MOUNT_ATTR_NOEXEC));
        assert!(attributes.contains(MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV));
        assert!(!attributes.contains(MountAttrFlags::MOUNT_ATTR_NOATIME));
    }
}
