//! Lists the processor architectures of images, and the words and numbers that differ between them.

use elf::abi;

/// Processor architecture of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Arch {
    #[value(name = "x86_64")]
    X86_64,
    #[value(name = "aarch64")]
    Aarch64,
}

/// Words and numbers of an architecture.
pub(crate) struct ArchFacts {
    /// Name of Rust, Linux and `image.json`.
    pub(crate) name: &'static str,
    /// Name of Debian and of Kata's releases.
    pub(crate) debian: &'static str,
    /// Name of UEFI, in the names of its programs.
    pub(crate) uefi: &'static str,
    /// `e_machine` of ELF programs.
    pub(crate) machine: u16,
    /// Types of the root's partition and of its hashes, in the Discoverable Partitions Specification.
    pub(crate) root: &'static str,
    pub(crate) verity: &'static str,
}

impl Arch {
    pub(crate) const ALL: [Arch; 2] = [Arch::X86_64, Arch::Aarch64];

    pub(crate) fn facts(self) -> &'static ArchFacts {
        match self {
            Arch::X86_64 => &ArchFacts {
                name: "x86_64",
                debian: "amd64",
                uefi: "x64",
                machine: abi::EM_X86_64,
                root: "4f68bce3-e8cd-4db1-96e7-fbcaf984b709",
                verity: "2c7357ed-ebd2-46d9-aec1-23d437ec2bf5",
            },
            Arch::Aarch64 => &ArchFacts {
                name: "aarch64",
                debian: "arm64",
                uefi: "aa64",
                machine: abi::EM_AARCH64,
                root: "b921b045-1df0-41c3-af44-4c6f280d3fae",
                verity: "df3300ce-d69f-4c92-978c-9bfb0f38d820",
            },
        }
    }

    pub(crate) fn name(self) -> &'static str {
        self.facts().name
    }

    /// Returns the folder of Debian's libraries below `/usr/lib`, and the prefix of the names of GNU's tools.
    pub(crate) fn gnu(self) -> String {
        format!("{}-linux-gnu", self.name())
    }
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum;

    use super::*;

    #[test]
    fn an_unknown_architecture_is_refused_with_the_known_ones() {
        assert!(Arch::value_variants() == Arch::ALL);
        for arch in Arch::ALL {
            assert_eq!(Arch::from_str(arch.name(), false), Ok(arch));
        }
        let words = ["peerpod-image", "lock", "--arch", "mips"];
        let error = <crate::Cli as clap::Parser>::try_parse_from(words).err().unwrap().to_string();
        assert!(error.contains("mips") && error.contains("x86_64, aarch64"), "{error}");
    }
}
