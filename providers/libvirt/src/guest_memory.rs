//! Reads the memory that the guest of the configured image needs, from the `image.json` beside the image's files.

use std::collections::BTreeMap;
use std::path::Path;

use peerpod_common::files;
use serde::Deserialize;

use crate::config::{Boot, LibvirtConfig, LibvirtImage};

/// The largest `image.json` that is read, in bytes.
const LARGEST: u64 = 4 << 20;
/// The version of `image.json` that is understood.
const VERSION: u32 = 1;

/// The part of `image.json` that is read here.
#[derive(Deserialize)]
struct About {
    version: u32,
    /// The image's files, by name.
    sizes: BTreeMap<String, u64>,
    guest_memory: Option<GuestMemory>,
}

/// Memory that the image's guest needs, in MiB.
#[derive(Deserialize)]
struct GuestMemory {
    /// Kernel, programs and their working memory.
    base_mib: u64,
    /// Containers' images, if they are kept in memory.
    images_mib: u64,
}

/// Returns the guest's memory in MiB; 0 if `image.json` is missing or cannot be used.
pub(crate) fn of(config: &LibvirtConfig) -> u64 {
    let file = match &config.boot {
        Boot::Kernel { kernel, .. } => kernel,
        Boot::Disk { image: LibvirtImage::File(file), .. } => file,
        Boot::Disk { image: LibvirtImage::Volume(_), .. } | Boot::Nothing => return 0,
    };
    match read(&file.path) {
        Ok(Some(GuestMemory { base_mib, images_mib })) => {
            // A confidential VM keeps images in its memory, even if it has disks.
            let has_disk = config.root_disk_gib > 0 && config.confidential.is_none();
            if has_disk { base_mib } else { base_mib.saturating_add(images_mib) }
        }
        Ok(None) => 0,
        Err(why) => {
            let image = file.path.display();
            tracing::warn!(
                "the memory that the guest of {image} needs is not known, a default counts: {why}"
            );
            0
        }
    }
}

/// Returns `None` without an `image.json`, or if it contains no `guest_memory`.
fn read(image: &Path) -> Result<Option<GuestMemory>, String> {
    let path = image.with_file_name("image.json");
    let text = files::read(&path, LARGEST).map_err(|error| format!("read {}: {error}", path.display()))?;
    let Some(text) = text else { return Ok(None) };
    let about: About =
        serde_json::from_slice(&text).map_err(|error| format!("read {}: {error}", path.display()))?;
    if about.version != VERSION {
        return Err(format!("{} has version {}, not {VERSION}", path.display(), about.version));
    }
    let is_of_it =
        image.file_name().and_then(|name| name.to_str()).is_some_and(|name| about.sizes.contains_key(name));
    if !is_of_it {
        return Err(format!("{} does not list this file", path.display()));
    }
    Ok(about.guest_memory)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use peerpod_base::config::{Reader, Sources};
    use peerpod_provider_api::Confidential;

    use super::*;

    fn config(kernel: PathBuf) -> LibvirtConfig {
        let mut reader = Reader::load(Sources::default(), &["provider"], &[]).unwrap();
        let config = LibvirtConfig::read(&mut reader, false);
        let kernel = crate::config::File { path: kernel, sha256: None };
        LibvirtConfig { boot: Boot::Kernel { kernel, initrd: None, cmdline: String::new() }, ..config }
    }

    #[test]
    fn the_figure_of_an_image_has_a_share_for_containers_images_unless_they_have_a_disk() {
        let folder = std::env::temp_dir().join(format!("peerpod-guest-memory-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let config = config(folder.join("vmlinuz"));
        assert_eq!(of(&config), 0, "without image.json");
        let write = |text: &str| std::fs::write(folder.join("image.json"), text).unwrap();
        write(
            r#"{"version": 1, "sizes": {"vmlinuz": 1}, "guest_memory": {"base_mib": 100, "images_mib": 30}}"#,
        );
        assert_eq!(of(&config), 130);
        let with_disk = LibvirtConfig { root_disk_gib: 1, ..config.clone() };
        assert_eq!(of(&with_disk), 100);
        let confidential = LibvirtConfig { confidential: Some(Confidential::Tdx), ..with_disk };
        assert_eq!(of(&confidential), 130);
        for unusable in [
            "",
            r#"{"version": 1, "sizes": {"vmlinuz": 1}}"#,
            r#"{"version": 2, "sizes": {"vmlinuz": 1}, "guest_memory": {"base_mib": 100, "images_mib": 30}}"#,
            r#"{"version": 1, "sizes": {"other": 1}, "guest_memory": {"base_mib": 100, "images_mib": 30}}"#,
            r#"{"version": 1, "sizes": {"vmlinuz": 1}, "guest_memory": {"base_mib": -1, "images_mib": 30}}"#,
        ] {
            write(unusable);
            assert_eq!(of(&config), 0, "{unusable}");
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
