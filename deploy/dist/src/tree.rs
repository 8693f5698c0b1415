//! Makes the image's tree. It has programs in `/usr/bin`, the tools that they run in `/usr/sbin`, and the tools'
//! libraries (a static program needs none). It also has a user that is not root, CA certificates, and folders for
//! mounts.

use std::collections::BTreeSet;
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// Folders that are mounted over, or written to by roles with that right.
const FOLDERS: [&str; 6] = ["etc/peerpod", "proc", "run", "sys", "tmp", "var/lib/peerpod"];
/// Tools that the programs run, with their Debian packages. `peerpod-csi node` uses losetup for raw volumes, because
/// making loop devices itself would need unsafe code.
pub(crate) const TOOLS: [(&str, &str); 1] = [("losetup", "mount")];
/// User of the programs that need no root; Dockerfile and chart have the same number.
const PASSWD: &str = "root:x:0:0:root:/:/sbin/nologin\npeerpod:x:65532:65532:peerpod:/:/sbin/nologin\n";
const GROUP: &str = "root:x:0:\npeerpod:x:65532:\n";

/// Makes the tree anew, and returns its files with their sizes.
pub(crate) fn make(
    from: &Path,
    programs: &[&str],
    authorities: &Path,
    to: &Path,
) -> Result<Vec<(String, u64)>> {
    if to.exists() {
        fs::remove_dir_all(to).with_context(|| format!("remove {}", to.display()))?;
    }
    for folder in FOLDERS {
        fs::create_dir_all(to.join(folder))?;
    }
    fs::set_permissions(to.join("tmp"), Permissions::from_mode(0o1777))?;
    // Container runtimes name network namespaces /var/run/netns/….
    symlink("../run", to.join("var/run"))?;
    write(&to.join("etc/passwd"), PASSWD.as_bytes(), 0o644)?;
    write(&to.join("etc/group"), GROUP.as_bytes(), 0o644)?;
    let mut copies: Vec<(PathBuf, String, u32)> = Vec::new();
    let mut libraries = BTreeSet::new();
    for program in programs {
        let built = from.join(program);
        ensure!(built.is_file(), "no {}; `make dist` builds it", built.display());
        libraries.extend(needs(&built)?);
        copies.push((built, format!("usr/bin/{program}"), 0o755));
    }
    for (tool, package) in TOOLS {
        let here = ["/usr/sbin", "/sbin"].map(|folder| Path::new(folder).join(tool));
        let here = here.into_iter().find(|path| path.is_file());
        let here = here.with_context(|| format!("no {tool}; install package {package}"))?;
        libraries.extend(needs(&here)?);
        copies.push((here, format!("usr/sbin/{tool}"), 0o755));
    }
    for library in libraries {
        let inside = library.to_string_lossy().trim_start_matches('/').to_owned();
        copies.push((library, inside, 0o755));
    }
    copies.push((authorities.to_owned(), "etc/ssl/certs/ca-certificates.crt".to_owned(), 0o644));
    let mut sizes = Vec::new();
    for (source, inside, mode) in copies {
        let bytes = fs::read(&source).with_context(|| format!("read {}", source.display()))?;
        let path = to.join(&inside);
        fs::create_dir_all(path.parent().context("no folder")?)?;
        write(&path, &bytes, mode)?;
        sizes.push((format!("/{inside}"), bytes.len() as u64));
    }
    Ok(sizes)
}

/// Writes a file with exactly this mode, regardless of the umask.
pub(crate) fn write(path: &Path, bytes: &[u8], mode: u32) -> Result<()> {
    fs::write(path, bytes).with_context(|| format!("write {}", path.display()))?;
    fs::set_permissions(path, Permissions::from_mode(mode))?;
    Ok(())
}

/// Returns the paths of a program's libraries and of its loader; none for a static program.
fn needs(program: &Path) -> Result<Vec<PathBuf>> {
    let asked = Command::new("ldd").arg(program).output().context("ask ldd (package libc-bin)")?;
    let said = String::from_utf8_lossy(&asked.stdout).into_owned() + &String::from_utf8_lossy(&asked.stderr);
    if said.contains("not a dynamic executable") || said.contains("statically linked") {
        return Ok(Vec::new());
    }
    ensure!(asked.status.success(), "ldd {}: {}", program.display(), said.trim());
    ensure!(
        !said.contains("not found"),
        "{} needs a library that is not here: {}",
        program.display(),
        said.trim()
    );
    // `name => /path (0x…)`, or the loader's path alone.
    let paths = said.lines().filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/')));
    Ok(paths.map(PathBuf::from).collect())
}
