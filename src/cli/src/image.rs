//! `peerpod image`: builds the VM images from a checkout of the repository, and uploads the disk image to a provider. It
//! may touch: the checkout's target folder by `make`, the image's folder, and the images of ours at the provider.

use std::env::consts::ARCH as OWN_ARCH;
use std::io::Write as _;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::{self, ExitCode, Stdio};
use std::sync::Arc;

use anyhow::{Context as _, bail, ensure};
use peerpod_base::config::{Reader, Sources};
use peerpod_cluster::SECTIONS;
use peerpod_providers::{ImageSettings, Upload, guide, kinds, read_upload};

use crate::SETTINGS;
use crate::output::{safe, say};

/// File of the repository by which its root is found.
const BUILDER: &str = "podvm/vm-image/Cargo.toml";

/// Architectures for which the builder makes images.
const ARCHS: [&str; 2] = ["x86_64", "aarch64"];
/// Architecture of the VMs of the provider libvirt, which boots the minimal image.
const LIBVIRT_ARCH: &str = "x86_64";

/// Subcommands of `peerpod image`.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum ImageCommand {
    /// Builds both VM images in the checkout of the repository that contains the current folder
    Build {
        /// The Kata release with agent and pause bundle: a version, or the path of an archive, image or folder
        #[arg(long, value_name = "PATH|VERSION")]
        kata: String,
        /// The processor architecture of the VMs; default: that of this machine
        #[arg(long, value_parser = ARCHS)]
        arch: Option<String>,
    },
    /// Uploads the disk image to a provider, unless it is there, and prints the chart's values for it
    #[command(after_help = SETTINGS)]
    Upload(UploadArgs),
}

/// Arguments of `peerpod image upload`.
#[derive(Debug, clap::Args)]
pub(crate) struct UploadArgs {
    /// The provider's kind, like libvirt
    #[arg(value_name = "KIND")]
    kind: String,
    /// The folder of the disk image
    #[arg(long, value_name = "DIR", default_value = "target/image/disk")]
    image: PathBuf,
    /// Deletes old images that `image upload` made and no VM uses, and keeps N with the uploaded one
    #[arg(long, value_name = "N")]
    prune: Option<NonZeroUsize>,
    /// Gives the VMs of the image a TPM 2.0, where the provider has one
    #[arg(long)]
    tpm: bool,
}

impl ImageCommand {
    /// Whether the subcommand reads the configuration.
    pub(crate) fn takes_settings(&self) -> bool {
        matches!(self, ImageCommand::Upload(_))
    }
}

/// Runs a subcommand of `peerpod image` with these settings.
pub(crate) async fn run(command: ImageCommand, settings: Vec<String>) -> anyhow::Result<ExitCode> {
    match command {
        ImageCommand::Build { kata, arch } => {
            let here = std::env::current_dir().context("find the current folder")?;
            build(&here, &kata, arch.as_deref().unwrap_or(OWN_ARCH))
        }
        ImageCommand::Upload(args) => upload(args, settings).await,
    }
}

/// Builds the images for `arch` in the checkout that contains the folder `here`.
fn build(here: &Path, kata: &str, arch: &str) -> anyhow::Result<ExitCode> {
    let root = checkout(here)?;
    let kata = kata_word(kata)?;
    // Standard output has the values alone.
    let status = process::Command::new("make")
        .arg("-C")
        .arg(root)
        .args(["--no-print-directory", "image", &format!("KATA={kata}"), &format!("ARCH={arch}")])
        .stdout(Stdio::from(std::io::stderr()))
        .status()
        .context("start make; install it (apt-get install make)")?;
    ensure!(status.success(), "make image in {}: {status}; its last lines have the cause", root.display());
    let target = std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into());
    // Images for another machine have a folder of their own.
    let images = root.join(target).join("image").join(if arch == OWN_ARCH { "" } else { arch });
    say!(stderr, "minimal image: {}", images.join("minimal").display());
    say!(stderr, "disk image: {0}; peerpod image upload KIND --image {0}", images.join("disk").display());
    // The values below are for libvirt.
    if arch != LIBVIRT_ARCH {
        return Ok(ExitCode::SUCCESS);
    }
    let file = |name: &str| images.join("minimal").join(name).display().to_string();
    // The chart's values name a volume, and only one of kernel, image and volume may be set.
    let chosen =
        [("kernel", file("vmlinuz")), ("initrd", file("initrd.img")), ("volume", String::new())].into();
    print_values("libvirt", &chosen)
}

/// Returns the root of the checkout that contains this folder.
fn checkout(here: &Path) -> anyhow::Result<&Path> {
    here.ancestors().find(|folder| folder.join(BUILDER).is_file()).with_context(|| {
        format!(
            "find the builder of the images: {} is not in a checkout of Peerpod; clone the repository ({}) and \
             run the command in it",
            here.display(),
            concat!("git clone ", env!("CARGO_PKG_REPOSITORY"))
        )
    })
}

/// Returns the value of make's variable `KATA`. A path is made absolute, because make works in another folder.
fn kata_word(kata: &str) -> anyhow::Result<String> {
    let word = match Path::new(kata).canonicalize() {
        Ok(path) => path.display().to_string(),
        Err(error) if kata.contains('/') => bail!("find --kata {kata}: {error}; correct the path"),
        Err(_) => kata.to_owned(),
    };
    // make and its shell would expand other characters.
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "._-+/".contains(c);
    ensure!(
        !word.is_empty() && word.chars().all(is_plain),
        "--kata {word}: make cannot take it; use letters, digits and ._-+/ alone"
    );
    Ok(word)
}

async fn upload(args: UploadArgs, settings: Vec<String>) -> anyhow::Result<ExitCode> {
    let UploadArgs { kind, image, prune, tpm } = args;
    let mut sources = Sources::of_this_process(settings);
    sources.flags.push(("provider.kind".to_owned(), kind.clone()));
    let others: Vec<&str> = SECTIONS.into_iter().filter(|section| *section != "provider").collect();
    let read = Reader::load(sources, &["provider"], &others).and_then(|mut reader| {
        let (known, uploader) = read_upload(&mut reader);
        // Without an upload the settings of the provider stay unread.
        if uploader.is_none() && known == kind && kinds().contains(&&*kind) {
            return Ok(None);
        }
        reader.finish().map(|_| uploader)
    });
    let uploader = match read {
        Ok(read) => read,
        Err(mistakes) => {
            eprintln!("{mistakes}");
            return Ok(ExitCode::FAILURE);
        }
    };
    let Some(uploader) = uploader else {
        bail!(
            "upload an image to {kind}: this provider has no upload; {} has the steps by hand",
            guide(&kind)
        )
    };
    let say: Arc<dyn Fn(&str) + Send + Sync> = Arc::new(|line| {
        say!(stderr, "peerpod: {}", safe(line));
    });
    let chosen = uploader(Upload { folder: image, keep: prune, tpm, say }).await?;
    print_values(&kind, &chosen)
}

/// Prints the values of the chart that select an image.
fn print_values(kind: &str, chosen: &ImageSettings) -> anyhow::Result<ExitCode> {
    let values = serde_json::json!({"config": {"provider": {kind: chosen}}});
    let mut out = std::io::stdout().lock();
    out.write_all(serde_yaml::to_string(&values)?.as_bytes()).context("print the values")?;
    out.flush().context("print the values")?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checkout_is_found_from_any_folder_in_it() {
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let source = here.join("src");
        let root = checkout(&source).unwrap();
        assert_eq!(root, here.parent().and_then(Path::parent).unwrap());
        let why = checkout(Path::new("/")).unwrap_err().to_string();
        assert!(why.contains("git clone http"), "{why}");
    }

    #[test]
    fn kata_is_a_version_or_a_path_that_make_does_not_expand() {
        assert_eq!(kata_word("4.1.0").unwrap(), "4.1.0");
        assert_eq!(kata_word("/usr/../usr").unwrap(), "/usr");
        for (bad, part) in
            [("$(id)", "make cannot take it"), ("", "make cannot take it"), ("./none", "No such file")]
        {
            let why = kata_word(bad).unwrap_err().to_string();
            assert!(why.contains(part), "{bad}: {why}");
        }
    }

    #[test]
    fn make_builds_the_images_in_the_checkout() {
        let root = std::env::temp_dir().join(format!("peerpod-image-build-{}", std::process::id()));
        let inside = root.join("podvm/vm-image");
        std::fs::create_dir_all(&inside).unwrap();
        std::fs::write(root.join(BUILDER), "").unwrap();
        std::fs::write(root.join("Makefile"), "image:\n\techo $(KATA) $(ARCH) >built\n").unwrap();
        for arch in ARCHS {
            assert_eq!(build(&inside, "4.1.0", arch).unwrap(), ExitCode::SUCCESS);
            assert_eq!(std::fs::read_to_string(root.join("built")).unwrap(), format!("4.1.0 {arch}\n"));
        }
        std::fs::write(root.join("Makefile"), "image:\n\tfalse\n").unwrap();
        let why = build(&inside, "4.1.0", OWN_ARCH).unwrap_err().to_string();
        assert!(why.contains("make image in") && why.contains("exit status: 2"), "{why}");
        std::fs::remove_dir_all(&root).unwrap();
    }

    #[tokio::test]
    async fn a_provider_without_upload_names_its_guide() {
        let args =
            |kind: &str| UploadArgs { kind: kind.to_owned(), image: PathBuf::new(), prune: None, tpm: false };
        let settings = vec!["--provider.gcp.project=p".to_owned()];
        let why = upload(args("gcp"), settings).await.unwrap_err().to_string();
        assert!(why.contains("docs/install-gcp.md"), "{why}");
        // A kind that does not exist is a mistake of the configuration.
        assert_eq!(upload(args("clowd"), Vec::new()).await.unwrap(), ExitCode::FAILURE);
    }
}
