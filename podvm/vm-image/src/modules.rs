//! Selects an image's kernel modules: those of `data/modules.txt` and their dependencies, with depmod's tables of them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::sync::Arc;

use anyhow::{Context, bail};
use elf::ElfBytes;
use elf::endian::LittleEndian;

use crate::inputs::Inputs;
use crate::lock::words;
use crate::run;
use crate::tree::{Node, Tree};

/// The images' modules, with reasons.
const LIST: &str = include_str!("../data/modules.txt");

/// Extensions of depmod's tables (`modules.*`) for programs without libkmod; the other tables are for libkmod.
pub(crate) const TEXT_TABLES: [&str; 5] = ["alias", "builtin", "dep", "order", "softdep"];

/// Returns the release of the one kernel of these packages.
pub(crate) fn release(packages: &Tree) -> anyhow::Result<String> {
    let found: Vec<&str> =
        packages.files().filter_map(|(path, ..)| path.strip_prefix("boot/vmlinuz-")).collect();
    match found[..] {
        [release] => Ok(release.to_owned()),
        _ => bail!("the packages have {} kernels, not one: {found:?}", found.len()),
    }
}

/// Takes the listed modules, their dependencies, and depmod's tables.
pub(crate) fn add(tree: &mut Tree, inputs: &Inputs, release: &str) -> anyhow::Result<()> {
    let (packages, work) = (&inputs.packages, inputs.work("modules")?);
    let all = Catalogue::read(packages, release)?;
    let mut chosen = Tree::default();
    for name in all.ordered(words(LIST, &[inputs.arch.name()]))? {
        chosen.take(packages, &all.modules[&name].path)?;
    }
    let folder = format!("usr/lib/modules/{release}");
    for name in ["modules.builtin", "modules.builtin.modinfo", "modules.order"] {
        chosen.take(packages, &format!("{folder}/{name}"))?;
    }
    let order: BTreeSet<&str> = chosen.files().map(|(path, ..)| path).collect();
    let lines = packages.text(&format!("{folder}/modules.order")).unwrap_or_default().lines();
    let listed = lines.filter(|line| order.contains(format!("{folder}/{line}").as_str()));
    let order: String = listed.map(|line| format!("{line}\n")).collect();
    chosen.file(&format!("{folder}/modules.order"), 0o644, order.into_bytes());

    // depmod looks in /lib, on machines with and without a merged /usr.
    fs::create_dir_all(work.join("usr"))?;
    std::os::unix::fs::symlink("usr/lib", work.join("lib"))?;
    chosen.write(&work)?;
    run::output(run::tool("depmod").arg("-b").args([work.as_os_str(), release.as_ref()]))?;
    chosen.add_folder(&folder, &work.join(&folder))?;
    for (path, node) in chosen.iter() {
        tree.insert(path, node.clone());
    }
    Ok(())
}

/// Takes these modules and their dependencies. Returns their paths, one per line, in load order.
pub(crate) fn in_order<'a>(
    tree: &mut Tree,
    packages: &Tree,
    release: &str,
    wanted: impl IntoIterator<Item = &'a str>,
) -> anyhow::Result<String> {
    let all = Catalogue::read(packages, release)?;
    let mut list = String::new();
    for name in all.ordered(wanted)? {
        let path = &all.modules[&name].path;
        tree.take(packages, path)?;
        list += &format!("/{path}\n");
    }
    Ok(list)
}

/// Cuts the signatures off all modules of a tree. A kernel that is not locked down loads an unsigned module without a
/// check; for a small module the check takes longer than the rest of the load.
pub(crate) fn unsign(tree: &mut Tree) -> anyhow::Result<()> {
    let cut = |(path, mode, content): (&str, u32, &Arc<[u8]>)| {
        let length = unsigned(content).with_context(|| path.to_owned())?;
        Ok((path.to_owned(), mode, content[..length].to_vec()))
    };
    let modules = tree.files().filter(|(path, ..)| name_of(path).is_some());
    for (path, mode, content) in modules.map(cut).collect::<anyhow::Result<Vec<_>>>()? {
        tree.file(&path, mode, content);
    }
    Ok(())
}

/// Returns the length of a module without its signature. The signature is at the module's end: PKCS#7, then
/// `struct module_signature` (12 bytes, the last four the signature's length, big-endian), then a marker
/// (Documentation/admin-guide/module-signing.rst).
fn unsigned(content: &[u8]) -> anyhow::Result<usize> {
    const MARKER: &[u8] = b"~Module signature appended~\n";
    let signed = content.strip_suffix(MARKER).context("the module is not signed")?;
    let (rest, length) = signed.split_last_chunk::<4>().context("the module's signature is cut off")?;
    let length = usize::try_from(u32::from_be_bytes(*length))?;
    rest.len().checked_sub(8 + length).context("the module's signature is longer than the module")
}

/// All modules of a kernel, with their aliases and dependencies.
#[derive(Default)]
struct Catalogue {
    modules: BTreeMap<String, Module>,
    aliases: BTreeMap<String, Vec<String>>,
    builtin: BTreeSet<String>,
}

#[derive(Default)]
struct Module {
    path: String,
    depends: Vec<String>,
    /// Soft dependencies: names or aliases, which need not exist.
    softly: Vec<String>,
}

impl Catalogue {
    fn read(packages: &Tree, release: &str) -> anyhow::Result<Catalogue> {
        let folder = format!("usr/lib/modules/{release}");
        let builtin = packages.text(&format!("{folder}/modules.builtin")).context("no modules.builtin")?;
        let builtin = builtin.lines().filter_map(name_of).collect();
        let mut catalogue = Catalogue { builtin, ..Catalogue::default() };
        for (path, node) in packages.iter() {
            let (true, Some(name), Node::File { content, .. }) =
                (path.starts_with(&folder), name_of(path), node)
            else {
                continue;
            };
            let mut module = Module { path: path.to_owned(), ..Module::default() };
            for (key, value) in said(content).with_context(|| path.to_owned())? {
                match key.as_str() {
                    "depends" => {
                        module.depends = value.split(',').filter(|one| !one.is_empty()).map(plain).collect();
                    }
                    "softdep" => module.softly.extend(
                        value.split_whitespace().filter(|word| !word.ends_with(':')).map(str::to_owned),
                    ),
                    "alias" => catalogue.aliases.entry(value).or_default().push(name.clone()),
                    _ => {}
                }
            }
            catalogue.modules.insert(name, module);
        }
        Ok(catalogue)
    }

    /// Returns dependencies before the modules that need them. Modules have no circular dependencies; if some do, the
    /// circle is cut where it was entered.
    fn ordered<'a>(&self, wanted: impl IntoIterator<Item = &'a str>) -> anyhow::Result<Vec<String>> {
        let (mut order, mut seen) = (Vec::new(), BTreeSet::new());
        for name in wanted.into_iter().map(plain) {
            if self.modules.contains_key(&name) {
                self.visit(&name, &mut seen, &mut order)?;
            } else if !self.builtin.contains(&name) {
                bail!(
                    "podvm/vm-image/data: this kernel has no module {name}, and does not have it built in either"
                );
            }
        }
        Ok(order)
    }

    fn visit(&self, name: &str, seen: &mut BTreeSet<String>, order: &mut Vec<String>) -> anyhow::Result<()> {
        let Some(module) = self.modules.get(name) else {
            if self.builtin.contains(name) {
                return Ok(());
            }
            bail!("the kernel's package lacks the module {name}, which another module needs");
        };
        if !seen.insert(name.to_owned()) {
            return Ok(());
        }
        let softly = module.softly.iter().flat_map(|soft| {
            let named = Some(plain(soft)).filter(|soft| self.modules.contains_key(soft));
            self.aliases.get(soft).into_iter().flatten().cloned().chain(named)
        });
        for needed in softly.chain(module.depends.iter().cloned()) {
            self.visit(&needed, seen, order)?;
        }
        order.push(name.to_owned());
        Ok(())
    }
}

/// Returns the name of the module in a file: `kernel/a/nf-x.ko` is `nf_x`.
fn name_of(path: &str) -> Option<String> {
    path.rsplit('/').next()?.strip_suffix(".ko").map(plain)
}

fn plain(name: &str) -> String {
    name.replace('-', "_")
}

/// Returns the key=value strings of a module's `.modinfo` section.
fn said(content: &[u8]) -> anyhow::Result<Vec<(String, String)>> {
    let file = ElfBytes::<LittleEndian>::minimal_parse(content)?;
    let section = file.section_header_by_name(".modinfo")?.context("no .modinfo: not a kernel module")?;
    let (data, _) = file.section_data(&section)?;
    let strings = data.split(|byte| *byte == 0).map(String::from_utf8_lossy);
    let pairs = strings.filter_map(|one| one.split_once('=').map(|(key, value)| (key.into(), value.into())));
    Ok(pairs.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn catalogue() -> Catalogue {
        let module = |depends: &[&str], softly: &[&str]| Module {
            path: String::new(),
            depends: depends.iter().map(|one| (*one).to_owned()).collect(),
            softly: softly.iter().map(|one| (*one).to_owned()).collect(),
        };
        Catalogue {
            modules: [
                ("vxlan", module(&["udp_tunnel"], &[])),
                ("udp_tunnel", module(&["ipv6"], &["crypto-crc32c", "nothing"])),
                ("crc32c_intel", module(&[], &[])),
                ("sound", module(&[], &[])),
            ]
            .map(|(name, module)| (name.to_owned(), module))
            .into(),
            aliases: [("crypto-crc32c".to_owned(), vec!["crc32c_intel".to_owned()])].into(),
            builtin: ["ipv6", "ext4"].map(str::to_owned).into(),
        }
    }

    #[test]
    fn a_module_brings_its_dependencies_and_no_others() {
        let chosen = catalogue().ordered(["vxlan", "ext4"]).unwrap();
        assert_eq!(chosen, ["crc32c_intel", "udp_tunnel", "vxlan"]);
    }

    #[test]
    fn a_missing_module_is_named() {
        let error = catalogue().ordered(["wlan"]).unwrap_err().to_string();
        assert!(error.contains("no module wlan"), "{error}");
    }

    #[test]
    fn a_signature_is_cut_off() {
        let signed = |length: u32| {
            let mut content = b"\x7fELFmodulePKCS#7".to_vec();
            content.extend([0, 0, 2, 0, 0, 0, 0, 0]);
            content.extend(length.to_be_bytes());
            content.extend(b"~Module signature appended~\n");
            content
        };
        assert_eq!(unsigned(&signed(6)).unwrap(), b"\x7fELFmodule".len());
        for wrong in [&signed(17)[..], b"\x7fELFmodule", b"~Module signature appended~\n", b""] {
            assert!(unsigned(wrong).is_err());
        }
        let mut tree = Tree::default();
        tree.file("usr/lib/modules/1/a.ko", 0o644, signed(6));
        tree.file("usr/lib/modules/1/modules.dep", 0o644, *b"a.ko:");
        unsign(&mut tree).unwrap();
        let lengths: Vec<usize> = tree.files().map(|(.., content)| content.len()).collect();
        assert_eq!(lengths, [10, 5]);
        assert!(unsign(&mut tree).unwrap_err().to_string().contains("a.ko"));
    }

    #[test]
    fn names_are_plain() {
        assert_eq!(name_of("kernel/net/sch-ingress.ko").as_deref(), Some("sch_ingress"));
        assert_eq!(name_of("modules.dep"), None);
        assert!(said(b"\x7fELF").is_err());
    }
}
