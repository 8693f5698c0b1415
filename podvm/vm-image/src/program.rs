//! Reads programs and shared libraries: their machine, their needs at run time, and whether a tree satisfies them.

use std::collections::BTreeSet;

use anyhow::{Context, bail, ensure};
use elf::endian::LittleEndian;
use elf::{ElfBytes, abi};

use crate::tree::{Node, Tree};

/// Folders that the dynamic linker of Debian's amd64 searches.
const FOLDERS: [&str; 3] = ["usr/lib/x86_64-linux-gnu", "usr/lib", "usr/lib/x86_64-linux-gnu/systemd"];

/// Interpreter and libraries from a program's headers.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Program {
    /// Dynamic linker; `None` for a static program.
    pub(crate) interpreter: Option<String>,
    pub(crate) libraries: Vec<String>,
}

/// Returns whether these bytes begin like a program or library.
pub(crate) fn is_program(content: &[u8]) -> bool {
    content.starts_with(b"\x7fELF")
}

impl Program {
    pub(crate) fn read(content: &[u8]) -> anyhow::Result<Program> {
        ensure!(is_program(content), "not a program (no ELF header)");
        let file = ElfBytes::<LittleEndian>::minimal_parse(content)
            .context("not a program for a 64-bit x86 machine")?;
        let machine = file.ehdr.e_machine;
        ensure!(
            machine == abi::EM_X86_64,
            "for another machine (ELF machine {machine}; the image's is x86-64)"
        );
        let mut program = Program { interpreter: None, libraries: Vec::new() };
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
        let libraries = self.libraries.iter().filter(|name| library(tree, name).is_none());
        interpreter.chain(libraries).cloned().collect()
    }
}

fn library(tree: &Tree, name: &str) -> Option<String> {
    FOLDERS.iter().map(|folder| format!("{folder}/{name}")).find(|path| tree.resolve(path).is_some())
}

/// Takes the libraries of all programs of `tree` from `packages`, recursively.
pub(crate) fn complete(tree: &mut Tree, packages: &Tree) -> anyhow::Result<()> {
    loop {
        let mut wanted = BTreeSet::new();
        for (path, _, content) in
            tree.files().filter(|(path, _, content)| is_program(content) && !path.ends_with(".ko"))
        {
            let program = Program::read(content).with_context(|| format!("{path} of the image"))?;
            wanted.extend(program.missing(tree).into_iter().map(|name| (name, path.to_owned())));
        }
        if wanted.is_empty() {
            return Ok(());
        }
        for (name, by) in wanted {
            let path = if name.starts_with('/') { Some(name.clone()) } else { library(packages, &name) };
            let taken = path
                .with_context(|| format!("no package has {name}"))
                .and_then(|path| tree.take(packages, &path));
            taken.with_context(|| format!("{by} needs {name}; packages.txt lacks its package"))?;
        }
    }
}

/// Checks a program that the user supplied: it must run in an image with this tree, to which [`complete`] adds. The
/// error names missing libraries.
pub(crate) fn check_supplied(path: &str, tree: &Tree, packages: &Tree) -> anyhow::Result<()> {
    let Some(Node::File { content, mode }) = tree.resolve(path).and_then(|path| tree.get(path)) else {
        bail!("{path} is not there");
    };
    let program = Program::read(content).with_context(|| path.to_owned())?;
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

    #[test]
    fn a_dynamic_program_lists_its_libraries() {
        let program = Program::read(&std::fs::read("/proc/self/exe").unwrap()).unwrap();
        assert_eq!(program.interpreter.as_deref(), Some("/lib64/ld-linux-x86-64.so.2"));
        assert!(program.libraries.contains(&"libc.so.6".to_owned()), "{program:?}");
        let mut tree = Tree::merged();
        tree.file("usr/bin/agent", 0o755, std::fs::read("/proc/self/exe").unwrap());
        let error = check_supplied("usr/bin/agent", &tree, &Tree::merged()).unwrap_err().to_string();
        assert!(error.contains("libc.so.6") && error.contains("static build"), "{error}");
        assert!(
            format!("{:#}", complete(&mut tree, &Tree::merged()).unwrap_err())
                .contains("usr/bin/agent needs")
        );
    }

    #[test]
    fn a_file_that_is_no_program_is_refused() {
        let mut tree = Tree::merged();
        tree.file("agent", 0o755, *b"#!/bin/sh\n");
        assert!(
            format!("{:#}", check_supplied("agent", &tree, &tree).unwrap_err())
                .contains("agent: not a program")
        );
        for length in 0..70 {
            let mut content = std::fs::read("/proc/self/exe").unwrap();
            content.truncate(length);
            Program::read(&content).unwrap_err();
        }
        // The same header for an ARM machine.
        let mut content = std::fs::read("/proc/self/exe").unwrap();
        content[18..20].copy_from_slice(&abi::EM_AARCH64.to_le_bytes());
        assert!(Program::read(&content).unwrap_err().to_string().contains("another machine"));
    }
}
