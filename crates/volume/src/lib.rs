//! Defines the data about a volume of a pod that the CSI wrapper, the node and the guest share: its descriptor
//! ([`GuestVolume`]), and the records through which wrapper and node exchange it ([`records`], in [`files`]).
//! [`Credentials`] are those for mounting it, if the server requires them.
//!
//! Depends on no other crate of this project. May touch: the folder of the records.

pub mod credentials;
pub mod descriptor;
pub mod files;
pub mod records;

pub use credentials::Credentials;
pub use descriptor::{FsGroup, FsGroupPolicy, GuestVolume, Identity, Mode, SecretRef, Source, VolumeId};
