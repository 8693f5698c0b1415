//! What the CSI wrapper, the node and the guest agree on about one volume of one pod: its descriptor ([`GuestVolume`]), and
//! on the node the records in which wrapper and daemon hand it to each other ([`records`], in [`files`]); and who it is
//! mounted as, where a server asks that ([`Credentials`]).
//!
//! Depends on no part of ours. May touch: the folder of the records.

pub mod credentials;
pub mod descriptor;
pub mod files;
pub mod records;

pub use credentials::Credentials;
pub use descriptor::{FsGroup, FsGroupPolicy, GuestVolume, Identity, Mode, SecretRef, Source, VolumeId};
