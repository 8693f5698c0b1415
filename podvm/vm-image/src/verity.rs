//! Computes the dm-verity hashes of a root with veritysetup.

use std::fs;
use std::path::Path;

use anyhow::{Context, ensure};

use crate::report::sha256;
use crate::{gpt, run};

/// Block size of dm-verity, for data and hashes.
pub(crate) const BLOCK: usize = 4096;

/// Content of the hash partition, and the root hash.
pub(crate) struct Hashes {
    pub(crate) tree: Vec<u8>,
    pub(crate) root_hash: String,
}

/// Hashes a file system. Salt and UUID derive from its content, so the same content has the same hashes.
pub(crate) fn hashes(data: &[u8], work: &Path) -> anyhow::Result<Hashes> {
    let (from, to) = (work.join("verity.data"), work.join("verity.hashes"));
    fs::write(&from, data)?;
    fs::write(&to, [])?;
    let salt = sha256(data);
    let (salt, uuid) = (format!("--salt={salt}"), format!("--uuid={}", gpt::uuid(&salt)));
    let mut command = run::tool("veritysetup");
    let said = run::output(command.args(["format", "--hash=sha256", &salt, &uuid]).args([&from, &to]))?;
    let said = String::from_utf8_lossy(&said);
    let hash = said.lines().find_map(|line| line.strip_prefix("Root hash:"));
    let root_hash = hash.context("veritysetup names no root hash")?.trim().to_owned();
    let tree = fs::read(&to)?;
    ensure!(tree.starts_with(b"verity\0\0"), "veritysetup wrote no header");
    Ok(Hashes { tree, root_hash })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn veritysetup_agrees_and_a_flipped_bit_is_seen() {
        let folder = std::env::temp_dir().join(format!("peerpod-verity-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let mut data = vec![3; BLOCK * 300];
        let hashes = hashes(&data, &folder).unwrap();
        let (at, tree) = (folder.join("data"), folder.join("tree"));
        fs::write(&tree, &hashes.tree).unwrap();
        let verify = |data: &[u8]| {
            fs::write(&at, data).unwrap();
            run::output(run::tool("veritysetup").arg("verify").args([&at, &tree]).arg(&hashes.root_hash))
        };
        verify(&data).unwrap();
        data[BLOCK * 299 + 17] ^= 1;
        verify(&data).unwrap_err();
        fs::remove_dir_all(&folder).unwrap();
    }
}
