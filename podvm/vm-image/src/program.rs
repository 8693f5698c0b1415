//! Reads programs and shared libraries: their machine, their needs at run time, and whether a tree satisfies them.

use std::collections::BTreeSet;

use anyhow::{Context, bail, ensure};
use elf::endian::LittleEndian;
use elf::{ElfBytes, abi};

use crate::arch::Arch;
use crate::tree::{Node, Tree};

/// Interpreter and libraries from a program's headers.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Program {
    arch: Arch,
    /// Dynamic linker; `None` for a static program.
    pub(crate) interpreter: Option<String>,
    pub(crate) libraries: Vec<String>,
}

/// Returns whether these bytes begin like a program or library.
pub(crate) fn is_program(content: &[u8]) -> bool {
    content.starts_with(b"\x7fELF")
}

impl Program {
    /// Reads a program for `arch`, and refuses one for another architecture.
    pub(crate) fn read(content: &[u8], arch: Arch) -> anyhow::Result<Program> {
        ensure!(is_program(content), "not a program (no ELF header)");
        let file = ElfBytes::<LittleEndian>::minimal_parse(content)
            .with_context(|| format!("not a program for {}", arch.name()))?;
        let machine = file.ehdr.e_machine;
        if machine != arch.facts().machine {
            let found = Arch::ALL.into_iter().find(|other| other.facts().machine == machine);
            let found =
                found.map_or_else(|| format!("ELF machine {machine}"), |found| found.name().to_owned());
            bail!("the program is for {found}, and the image for {0}; supply a build for {0}", arch.name());
        }
        let mut program = Program { arch, interpreter: None, libraries: Vec::new() };
        for segment in file.segments().context("no program headers")? {
            if segment.p_type == abi::PT_INTERP {
                let path = file.segment_data(&segment)?;
                let path = path.split(|byte| *byte == 0).next().unwrap_or_default();
                program.interpreter = Some(String::from_utf8_lossy(path).into_owned());
            }
        }
        let common = file.find_common_data()?;
        if let (Some(dynamic), Some(names)) = (common.dynamic, common.dynsyms_strs) {
            for entry in dynamic {
                if entry.d_tag == abi::DT_NEEDED {
                    program.libraries.push(names.get(usize::try_from(entry.d_val())?)?.to_owned());
                }
            }
        } else if let Some(dynamic) = file.dynamic()? {
            // The program has no section headers, so its libraries have no readable names.
            ensure!(
                !dynamic.iter().any(|entry| entry.d_tag == abi::DT_NEEDED),
                "its list of libraries is unreadable"
            );
        }
        Ok(program)
    }

    /// Returns the interpreter and libraries that the program needs and `tree` does not have.
    pub(crate) fn missing(&self, tree: &Tree) -> Vec<String> {
        let interpreter = self.interpreter.iter().filter(|path| tree.resolve(path).is_none());
        let libraries = self.libraries.iter().filter(|name| library(tree, name, self.arch).is_none());
        interpreter.chain(libraries).cloned().collect()
    }
}

/// Returns the path of a library in the folders that Debian's dynamic linker searches.
fn library(tree: &Tree, name: &str, arch: Arch) -> Option<String> {
    let gnu = arch.gnu();
    let folders = [format!("usr/lib/{gnu}"), "usr/lib".to_owned(), format!("usr/lib/{gnu}/systemd")];
    folders.iter().map(|folder| format!("{folder}/{name}")).find(|path| tree.resolve(path).is_some())
}

/// Takes the libraries of all programs of `tree` from `packages`, recursively.
pub(crate) fn complete(tree: &mut Tree, packages: &Tree, arch: Arch) -> anyhow::Result<()> {
    loop {
        let mut wanted = BTreeSet::new();
        for (path, _, content) in
            tree.files().filter(|(path, _, content)| is_program(content) && !path.ends_with(".ko"))
        {
            let program = Program::read(content, arch).with_context(|| format!("{path} of the image"))?;
            wanted.extend(program.missing(tree).into_iter().map(|name| (name, path.to_owned())));
        }
        if wanted.is_empty() {
            return Ok(());
        }
        for (name, by) in wanted {
            let path =
                if name.starts_with('/') { Some(name.clone()) } else { library(packages, &name, arch) };
            let taken = path
                .with_context(|| format!("no package has {name}"))
                .and_then(|path| tree.take(packages, &path));
            taken.with_context(|| format!("{by} needs {name}; packages.txt lacks its package"))?;
        }
    }
}

/// Checks a program that the user supplied: it must run in an image with this tree, to which [`complete`] adds. The
/// error names missing libraries.
pub(crate) fn check_supplied(path: &str, tree: &Tree, packages: &Tree, arch: Arch) -> anyhow::Result<()> {
    let Some(Node::File { content, mode }) = tree.resolve(path).and_then(|path| tree.get(path)) else {
        bail!("{path} is not there");
    };
    let program = Program::read(content, arch).with_context(|| path.to_owned())?;
    ensure!(mode & 0o111 != 0, "{path}: not executable; `chmod +x` it");
    let lacking = program.missing(packages);
    let missing: Vec<String> =
        program.missing(tree).into_iter().filter(|name| lacking.contains(name)).collect();
    ensure!(
        missing.is_empty(),
        "{path}: is dynamically linked and the image does not have {}; supply a static build (as Kata releases have), \
         or the libraries with --guest-components",
        missing.join(", ")
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Architecture of this test's own program.
    fn own() -> Arch {
        Arch::ALL.into_iter().find(|arch| arch.name() == std::env::consts::ARCH).unwrap()
    }

    #[test]
    fn a_dynamic_program_lists_its_libraries() {
        let arch = own();
        let program = Program::read(&std::fs::read("/proc/self/exe").unwrap(), arch).unwrap();
        assert!(program.interpreter.as_ref().is_some_and(|path| path.contains("/ld-linux-")), "{program:?}");
        assert!(program.libraries.contains(&"libc.so.6".to_owned()), "{program:?}");
        let mut tree = Tree::merged();
        tree.file("usr/bin/agent", 0o755, std::fs::read("/proc/self/exe").unwrap());
        let error = check_supplied("usr/bin/agent", &tree, &Tree::merged(), arch).unwrap_err().to_string();
        assert!(error.contains("libc.so.6") && error.contains("static build"), "{error}");
        let error = complete(&mut tree, &Tree::merged(), arch).unwrap_err();
        assert!(format!("{error:#}").contains("usr/bin/agent needs"), "{error:#}");
    }

    #[test]
    fn a_file_that_is_no_program_is_refused() {
        let mut tree = Tree::merged();
        tree.file("agent", 0o755, *b"#!/bin/sh\n");
        let error = check_supplied("agent", &tree, &tree, own()).unwrap_err();
        assert!(format!("{error:#}").contains("agent: not a program"), "{error:#}");
        for length in 0..70 {
            let mut content = std::fs::read("/proc/self/exe").unwrap();
            content.truncate(length);
            Program::read(&content, own()).unwrap_err();
        }
    }

    #[test]
    fn a_program_for_another_architecture_is_refused_by_name() {
        let mut content = std::fs::read("/proc/self/exe").unwrap();
        for (arch, other) in [(Arch::X86_64, Arch::Aarch64), (Arch::Aarch64, Arch::X86_64)] {
            content[18..20].copy_from_slice(&other.facts().machine.to_le_bytes());
            let mut tree = Tree::merged();
            tree.file("usr/bin/agent", 0o755, content.clone());
            let error = format!("{:#}", check_supplied("usr/bin/agent", &tree, &tree, arch).unwrap_err());
            let parts =
                ["usr/bin/agent", &format!("is for {}", other.name()), &format!("build for {}", arch.name())];
            assert!(parts.iter().all(|part| error.contains(part)), "{error}");
        }
        content[18..20].copy_from_slice(&abi::EM_MIPS.to_le_bytes());
        assert!(Program::read(&content, own()).unwrap_err().to_string().contains("ELF machine 8"));
    }
}
