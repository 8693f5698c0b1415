//! Runs the conformance suite of all providers with a real libvirtd and QEMU. Needs root.
//!
//! A halted machine releases no disk, so there is no disk here: `faults.rs` attaches disks.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::common::{Place, request};
use async_trait::async_trait;
use peerpod_provider_api::conformance::{Harness, ProviderRole, SuiteLimits};
use peerpod_provider_api::{CreateRequest, InstanceId, Provider};
use peerpod_provider_libvirt::LibvirtProvider;
use peerpod_world::libvirtd::POOL;

struct Libvirt {
    provider: Arc<LibvirtProvider>,
    place: Arc<Place>,
    /// Simulates the DHCP clients of the VMs, which are halted.
    leases: Option<JoinHandle<()>>,
    ends: Arc<AtomicBool>,
}

fn make() -> Libvirt {
    let place = Place::new();
    let (place, ends) = (Arc::new(place), Arc::new(AtomicBool::new(false)));
    let leases = thread::spawn({
        let (place, ends) = (place.clone(), ends.clone());
        move || {
            while !ends.load(Ordering::Relaxed) {
                place.libvirtd.lease_to_all().unwrap();
                thread::sleep(Duration::from_millis(100));
            }
        }
    });
    Libvirt { provider: place.provider(), place, leases: Some(leases), ends }
}

#[async_trait]
impl Harness for Libvirt {
    fn provider(&self) -> Arc<dyn Provider> {
        self.provider.clone()
    }

    async fn user_data(&self, id: &InstanceId) -> Option<Vec<u8>> {
        // The file that QEMU shows to the guest unchanged. The end-to-end test checks that the guest sees the same.
        let xml = self.place.libvirtd.virsh(&["dumpxml", id.as_str()]).ok()?;
        let path = xml.split("opt/io.peerpod/user-data' file='").nth(1)?.split('\'').next()?;
        fs::read(path).ok()
    }

    async fn machines(&self) -> Option<usize> {
        Some(self.place.machines().len())
    }

    fn unknown_id(&self) -> Option<InstanceId> {
        InstanceId::new("0b5a3c7e-0000-8000-8000-0123456789ab").ok()
    }

    fn other(&self, role: ProviderRole) -> Option<Arc<dyn Provider>> {
        Some(match role {
            ProviderRole::Stranger => self.place.stranger(&[]),
            ProviderRole::Successor | ProviderRole::Collector => self.place.provider(),
        })
    }

    fn request(&self) -> CreateRequest {
        CreateRequest {
            labels: [("peerpod-test".to_owned(), "conformance".to_owned())].into(),
            ..request("conformance")
        }
    }

    fn limits(&self) -> SuiteLimits {
        SuiteLimits { crowd: 8, drops: 6, patience: Duration::from_secs(600) }
    }
}

impl Drop for Libvirt {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        let ended = self.leases.take().map(JoinHandle::join);
        if !std::thread::panicking() {
            ended.unwrap().unwrap();
            let left = self.place.libvirtd.domains().unwrap();
            assert!(left.is_empty(), "{left:?}");
            assert_eq!(self.place.libvirtd.files(POOL).unwrap(), Vec::<String>::new());
        }
    }
}

peerpod_provider_api::conformance_suite!(make);
