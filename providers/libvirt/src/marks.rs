//! Defines the marks of the provider's domains: name, UUID, and an element in the metadata. Pure.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use peerpod_provider_api::{CreateRequest, IdempotencyKey, InstanceId, Owner};
pub(crate) use peerpod_provider_cloud::names::uuid_text;
use peerpod_provider_cloud::names::{digest, version_8};
use sha2::{Digest, Sha256};

use crate::rpc::xdr::Uuid;
use crate::xml::escape;

/// Namespace of the element.
pub(crate) const URI: &str = "https://peerpod.io/xmlns/libvirt/1";
/// Prefix of the namespace.
pub(crate) const PREFIX: &str = "peerpod";
/// Prefix of all the provider's names in libvirt.
const NAMES: &str = "peerpod-";

/// Returns the prefix of the names of this owner's domains and volumes.
pub(crate) fn prefix(owner: &Owner) -> String {
    if owner.node_name.is_empty() {
        return NAMES.to_owned();
    }
    let hash = digest(&[&owner.cluster_id, &owner.node_name, &owner.installation]);
    format!("{NAMES}{}-", hex::encode(&hash[..4]))
}

/// Returns the name and UUID of the VM that is made with this key.
pub(crate) fn identity(owner: &Owner, key: &IdempotencyKey) -> VmNames {
    let hash = digest(&[&owner.cluster_id, &owner.node_name, &owner.installation, key.as_str()]);
    VmNames { name: format!("{}{}", prefix(owner), hex::encode(&hash[16..28])), uuid: version_8(&hash) }
}

/// Names of a VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct VmNames {
    /// Name of the domain, and prefix of its volumes' names.
    pub(crate) name: String,
    /// UUID of the domain, which is the instance id.
    pub(crate) uuid: Uuid,
}

impl VmNames {
    /// Returns the MAC address of the NIC with this number: locally administered, the same for the same VM.
    pub(crate) fn mac(&self, nic: u8) -> String {
        let hash = Sha256::digest([&self.uuid[..], &[nic]].concat());
        format!("52:{:02x}:{:02x}:{:02x}:{:02x}:{:02x}", hash[0], hash[1], hash[2], hash[3], hash[4])
    }
}

/// Parses an instance id into its UUID; `None`: not an id of this provider.
pub(crate) fn uuid_of(id: &InstanceId) -> Option<Uuid> {
    let mut uuid = [0; 16];
    hex::decode_to_slice(id.as_str().replace('-', ""), &mut uuid).ok()?;
    (uuid_text(&uuid) == id.as_str()).then_some(uuid)
}

/// Content of the element in a domain's metadata. Contains no secrets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Marks {
    pub(crate) cluster: String,
    pub(crate) node: String,
    pub(crate) installation: String,
    pub(crate) key: IdempotencyKey,
    /// Digest of the request, [`CreateRequest::digest`].
    pub(crate) digest: String,
    /// Name in the request, for display.
    pub(crate) name: String,
    /// Time of the create, in seconds since 1970.
    pub(crate) created: u64,
    /// Whether the VM has been started; if it then does not run, it has ended.
    pub(crate) started: bool,
    /// Labels of the request, for display and for cost reports.
    pub(crate) labels: BTreeMap<String, String>,
}

impl Marks {
    /// Creates the marks of a VM that is about to be made.
    pub(crate) fn new(owner: &Owner, request: &CreateRequest, key: &IdempotencyKey) -> Marks {
        let created = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        Marks {
            cluster: owner.cluster_id.clone(),
            node: owner.node_name.clone(),
            installation: owner.installation.clone(),
            key: key.clone(),
            digest: request.digest(),
            name: request.name.clone(),
            created,
            started: false,
            labels: request.labels.clone(),
        }
    }

    pub(crate) fn are_of(&self, owner: &Owner) -> bool {
        owner.owns(Some(&self.cluster), Some(&self.node), Some(&self.installation))
    }

    /// Returns the element for a domain's description.
    pub(crate) fn xml(&self) -> String {
        self.element(&format!("{PREFIX}:"), &format!(" xmlns:{PREFIX}='{URI}'"))
    }

    /// Returns the element without a namespace, for libvirt's metadata call. libvirt adds the namespace, and refuses an
    /// element that already has one.
    pub(crate) fn plain_xml(&self) -> String {
        self.element("", "")
    }

    fn element(&self, prefix: &str, namespace: &str) -> String {
        let mut xml = format!(
            "<{prefix}vm{namespace} version='1' cluster='{}' node='{}' installation='{}' key='{}' digest='{}' name='{}' \
             created='{}' started='{}'>",
            escape(&self.cluster),
            escape(&self.node),
            escape(&self.installation),
            self.key,
            escape(&self.digest),
            escape(&self.name),
            self.created,
            u8::from(self.started)
        );
        for (name, value) in &self.labels {
            write!(xml, "<{prefix}label name='{}'>{}</{prefix}label>", escape(name), escape(value))
                .expect("a String takes everything");
        }
        write!(xml, "</{prefix}vm>").expect("a String takes everything");
        xml
    }

    /// Parses the element as libvirt returns it, possibly without its prefix; `None`: not an element of this provider.
    pub(crate) fn read(xml: &str) -> Option<Marks> {
        let document = roxmltree::Document::parse(xml).ok()?;
        let element = document.root_element();
        let get = |name: &str| element.attribute(name).map(str::to_owned);
        let label = |node: roxmltree::Node<'_, '_>| {
            Some((node.attribute("name")?.to_owned(), node.text().unwrap_or_default().to_owned()))
        };
        Some(Marks {
            cluster: get("cluster")?,
            node: get("node")?,
            installation: get("installation")?,
            key: IdempotencyKey::parse(get("key")?).ok()?,
            digest: get("digest")?,
            name: get("name")?,
            created: get("created")?.parse().ok()?,
            started: get("started")? == "1",
            labels: element.children().filter(|node| node.is_element()).filter_map(label).collect(),
        })
    }

    pub(crate) fn created(&self) -> SystemTime {
        UNIX_EPOCH.checked_add(Duration::from_secs(self.created)).unwrap_or(UNIX_EPOCH)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owner(node: &str) -> Owner {
        Owner { cluster_id: "c".into(), node_name: node.into(), installation: "i".into() }
    }

    #[test]
    fn names_come_from_owner_and_key_alone() {
        let key = IdempotencyKey::derive("c", "s", 0);
        let one = identity(&owner("n"), &key);
        assert_eq!(one, identity(&owner("n"), &key));
        let another = Owner { installation: "j".into(), ..owner("n") };
        for other in [owner("m"), another] {
            assert_ne!(prefix(&other), prefix(&owner("n")), "{other:?}");
            assert_ne!(identity(&other, &key).uuid, one.uuid, "{other:?}");
        }
        assert!(one.name.starts_with(&prefix(&owner("n"))) && one.name.starts_with(&prefix(&owner(""))));
        let id = InstanceId::new(uuid_text(&one.uuid)).unwrap();
        assert_eq!(uuid_of(&id), Some(one.uuid));
        assert_ne!(one.mac(0), one.mac(1));
        for foreign in
            ["x", "ABCDEF00-0000-0000-0000-000000000000", "../../../../../../../../../../etc/passwd"]
        {
            assert_eq!(uuid_of(&InstanceId::new(foreign).unwrap()), None, "{foreign}");
        }
    }

    #[test]
    fn marks_survive_any_text() {
        let request = CreateRequest {
            name: "a<b>'\"&amp;".into(),
            labels: [("k'".to_owned(), "</peerpod:vm>".to_owned())].into(),
            ..CreateRequest::default()
        };
        let marks = Marks::new(&owner("n"), &request, &IdempotencyKey::derive("c", "s", 0));
        assert_eq!(Marks::read(&marks.xml()).as_ref(), Some(&marks));
        assert!(marks.are_of(&owner("n")) && !marks.are_of(&owner("m")));
        let unmarked = marks.xml().replace(" installation='i'", "");
        assert_eq!(Marks::read(&unmarked), None);
        assert_eq!(Marks::read(&marks.plain_xml()), Some(marks));
        for bad in ["", "<x/>", "<!DOCTYPE x [<!ENTITY a 'b'>]><x cluster='&a;'/>"] {
            assert_eq!(Marks::read(bad), None, "{bad}");
        }
    }
}
