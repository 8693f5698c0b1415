//! Names and links of resources: the forms that people write, and the one form that calls use. Pure.

use peerpod_provider_api::InstanceId;

/// Whether the text is the name of a resource: RFC 1035, at most 63 characters.
pub(crate) fn is_name(text: &str) -> bool {
    let is_of_a_name = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    text.len() <= 63
        && text.starts_with(|first: char| first.is_ascii_lowercase())
        && !text.ends_with('-')
        && text.bytes().all(is_of_a_name)
}

/// Whether the text is the id of a project, which may have its domain before it (`example.com:project`).
pub(crate) fn is_project(text: &str) -> bool {
    let id = text.split_once(':').map_or(text, |(domain, id)| {
        let is_of_a_domain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'.';
        if domain.bytes().all(is_of_a_domain) { id } else { "" }
    });
    is_name(id)
}

/// Whether the text has the form of a zone, like `us-central1-a`.
pub(crate) fn is_zone(text: &str) -> bool {
    is_name(text) && text.split('-').count() >= 3 && !text.contains("--")
}

/// Returns the region of a zone: `us-central1` for `us-central1-a`.
pub(crate) fn region_of(zone: &str) -> &str {
    zone.rsplit_once('-').map_or(zone, |(region, _)| region)
}

/// Returns the family of a machine type: `n2d` for `n2d-standard-2`.
pub(crate) fn family(machine: &str) -> &str {
    machine.split('-').next().unwrap_or_default()
}

/// Returns the last part of a link: the name of its resource.
pub(crate) fn last(link: &str) -> &str {
    link.rsplit('/').next().unwrap_or_default()
}

/// Returns the part of a link that begins with `projects/`, `global/`, `zones/` or `regions/`. Another text stays.
fn path(text: &str) -> &str {
    let rest = text.strip_prefix("https://").and_then(|rest| rest.split_once('/')).map(|(_, path)| path);
    let path = rest.unwrap_or(text).trim_start_matches('/');
    path.strip_prefix("compute/v1/").unwrap_or(path)
}

/// Returns the project of a link and the part after it; the default project if the link names none.
fn of_project<'t>(text: &'t str, default: &'t str) -> Option<(&'t str, &'t str)> {
    let path = path(text);
    let Some(rest) = path.strip_prefix("projects/") else { return Some((default, path)) };
    rest.split_once('/').filter(|(project, _)| is_project(project))
}

/// Image, or family of images of which the newest counts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GcpImage {
    /// Project of the image.
    pub project: String,
    /// Whether the name is that of a family.
    pub is_family: bool,
    /// Name of the image or the family.
    pub name: String,
}

impl GcpImage {
    /// Reads a name, `family/…`, `projects/…/global/images/…`, `…/images/family/…` or a URL. A name without a project is
    /// an image of the given one.
    pub(crate) fn parse(text: &str, project: &str) -> Option<GcpImage> {
        let (project, rest) = of_project(text, project)?;
        let rest = rest.strip_prefix("global/").unwrap_or(rest);
        let rest = rest.strip_prefix("images/").unwrap_or(rest);
        let (is_family, name) = match rest.strip_prefix("family/") {
            Some(family) => (true, family),
            None => (false, rest),
        };
        let image = || GcpImage { project: project.to_owned(), is_family, name: name.to_owned() };
        is_name(name).then(image)
    }

    /// Returns the path of the image, below the API's version.
    pub(crate) fn path(&self) -> String {
        let GcpImage { project, is_family, name } = self;
        let family = if *is_family { "family/" } else { "" };
        format!("projects/{project}/global/images/{family}{name}")
    }
}

impl std::fmt::Display for GcpImage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.path())
    }
}

/// Returns the path of a network; `None`: the text is no network.
pub(crate) fn network(text: &str, project: &str) -> Option<String> {
    let (project, rest) = of_project(text, project)?;
    let rest = rest.strip_prefix("global/").unwrap_or(rest);
    let name = rest.strip_prefix("networks/").unwrap_or(rest);
    is_name(name).then(|| format!("projects/{project}/global/networks/{name}"))
}

/// Returns the path of a subnetwork, in this region if the text names none; `None`: the text is no subnetwork.
pub(crate) fn subnetwork(text: &str, project: &str, region: &str) -> Option<String> {
    let (project, rest) = of_project(text, project)?;
    let (region, rest) = match rest.strip_prefix("regions/") {
        Some(rest) => rest.split_once('/')?,
        None => (region, rest),
    };
    let name = rest.strip_prefix("subnetworks/").unwrap_or(rest);
    (is_name(name) && is_name(region))
        .then(|| format!("projects/{project}/regions/{region}/subnetworks/{name}"))
}

/// Persistent disk.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct PersistentDisk {
    pub project: String,
    /// Zone, or region of a disk that two zones have.
    pub place: String,
    pub is_regional: bool,
    pub name: String,
}

impl PersistentDisk {
    /// Reads a volume handle of the CSI driver (`projects/…/zones/…/disks/…`), or the same without its project.
    pub(crate) fn parse(text: &str, project: &str) -> Option<PersistentDisk> {
        let (project, rest) = of_project(text, project)?;
        let mut parts = rest.split('/');
        let (kind, place, disks, name) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
        let is_regional = match kind {
            "zones" => false,
            "regions" => true,
            _ => return None,
        };
        let is_one = disks == "disks" && parts.next().is_none() && is_name(place) && is_name(name);
        let disk = || PersistentDisk {
            project: project.to_owned(),
            place: place.to_owned(),
            is_regional,
            name: name.to_owned(),
        };
        is_one.then(disk)
    }

    /// Returns the path of the disk, below the API's version.
    pub(crate) fn path(&self) -> String {
        let PersistentDisk { project, place, is_regional, name } = self;
        let kind = if *is_regional { "regions" } else { "zones" };
        format!("projects/{project}/{kind}/{place}/disks/{name}")
    }
}

/// VM: its zone and its name in it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct VmId {
    pub zone: String,
    pub name: String,
}

impl VmId {
    /// Reads an id that [`VmId::id`] returned; `None`: the id is of another provider.
    pub(crate) fn parse(id: &str) -> Option<VmId> {
        let (zone, name) = id.split_once('/')?;
        (is_name(zone) && is_name(name)).then(|| VmId { zone: zone.to_owned(), name: name.to_owned() })
    }

    /// Returns the id for the caller: `us-central1-a/pp-…`. `None`: the cloud's answer has impossible names.
    pub(crate) fn id(&self) -> Option<InstanceId> {
        InstanceId::new(self.to_string()).ok()
    }

    /// Returns the path of the VM in its project.
    pub(crate) fn path(&self) -> String {
        format!("zones/{}/instances/{}", self.zone, self.name)
    }
}

impl std::fmt::Display for VmId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.zone, self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_has_many_forms() {
        let image = |project: &str, is_family, name: &str| {
            Some(GcpImage { project: project.into(), is_family, name: name.into() })
        };
        for (text, expected) in [
            ("podvm-1", image("p-1", false, "podvm-1")),
            ("family/podvm", image("p-1", true, "podvm")),
            ("global/images/podvm-1", image("p-1", false, "podvm-1")),
            ("projects/other/global/images/podvm-1", image("other", false, "podvm-1")),
            ("/projects/other/global/images/podvm-1", image("other", false, "podvm-1")),
            ("projects/other/global/images/family/podvm", image("other", true, "podvm")),
            (
                "https://www.googleapis.com/compute/v1/projects/other/global/images/podvm-1",
                image("other", false, "podvm-1"),
            ),
            ("projects/Other/global/images/podvm-1", None),
            ("Podvm", None),
            ("a/b/c", None),
            ("", None),
            ("../x", None),
        ] {
            assert_eq!(GcpImage::parse(text, "p-1"), expected, "{text}");
        }
        let family = GcpImage::parse("family/podvm", "p-1").unwrap();
        assert_eq!(family.path(), "projects/p-1/global/images/family/podvm");
        assert_eq!(GcpImage::parse(&family.path(), "x"), Some(family));
    }

    #[test]
    fn networks_and_subnetworks_get_their_project_and_region() {
        assert_eq!(network("default", "p-1").unwrap(), "projects/p-1/global/networks/default");
        let host = "projects/host/global/networks/shared";
        assert_eq!(network(host, "p-1").unwrap(), host);
        assert_eq!(subnetwork("s", "p-1", "r-1").unwrap(), "projects/p-1/regions/r-1/subnetworks/s");
        let shared = "projects/host/regions/r-2/subnetworks/s";
        for text in [shared, &format!("https://compute.googleapis.com/compute/v1/{shared}")] {
            assert_eq!(subnetwork(text, "p-1", "r-1").unwrap(), shared);
        }
        for bad in ["", "A", "regions/r-1", "global/networks/x/y", "projects/p"] {
            assert_eq!((network(bad, "p-1"), subnetwork(bad, "p-1", "r-1")), (None, None), "{bad}");
        }
    }

    #[test]
    fn a_disk_is_zonal_or_regional() {
        let text = "projects/p-1/zones/us-central1-a/disks/pvc-1";
        let disk = PersistentDisk::parse(text, "other").unwrap();
        assert_eq!(
            (disk.path().as_str(), disk.is_regional, disk.place.as_str()),
            (text, false, "us-central1-a")
        );
        assert_eq!(PersistentDisk::parse("zones/us-central1-a/disks/pvc-1", "p-1"), Some(disk));
        assert!(
            PersistentDisk::parse("projects/p-1/regions/us-central1/disks/pvc-1", "p-1").unwrap().is_regional
        );
        for bad in
            ["pvc-1", "zones/a/disks", "zones/a/instances/b", "zones/a/disks/b/c", "zones/../disks/b", ""]
        {
            assert_eq!(PersistentDisk::parse(bad, "p-1"), None, "{bad}");
        }
    }

    #[test]
    fn an_id_is_zone_and_name() {
        let id = VmId::parse("us-central1-a/pp-1").unwrap();
        assert_eq!(
            (id.to_string().as_str(), id.path().as_str()),
            ("us-central1-a/pp-1", "zones/us-central1-a/instances/pp-1")
        );
        for bad in ["i-0123", "", "a/", "/a", "a/b/c", "../b", "a/B", "zone/na?me"] {
            assert_eq!(VmId::parse(bad), None, "{bad}");
        }
        assert!(
            is_zone("us-central1-a")
                && !is_zone("us-central1")
                && region_of("us-central1-a") == "us-central1"
        );
        assert!(is_project("example.com:project-1") && is_project("project-1") && !is_project("a b:c"));
    }
}
