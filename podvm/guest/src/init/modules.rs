//! Loads kernel modules: finds the file of a name or a device alias, and loads it after its dependencies. This is the
//! necessary part of `modprobe`, which the VM image does not have (the available crates bind to libkmod, which is C).
//!
//! Reads `/lib/modules/<release>`, made when the VM image is built, and calls the kernel. [`Index`] is pure.

use std::ffi::CString;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::kmod::{ModuleInitFlags, finit_module};

/// Size limit of an index; the largest one of a distribution has some 2 MiB.
const MAX_INDEX: u64 = 16 << 20;
/// Depth limit below `/sys/devices`; its directories are some ten deep.
const DEPTH: u32 = 24;
/// Limit of the aliases of one machine.
const MAX_ALIASES: usize = 4096;
/// Limit of one module's direct and indirect dependencies.
const MAX_NEEDS: usize = 256;
/// `MODULE_INIT_COMPRESSED_FILE`: the kernel unpacks the file.
const COMPRESSED: i32 = 4;
const MAX_LIST: u64 = 64 << 10;

/// Output of `depmod`, unparsed. A machine makes a dozen look-ups before it dials the node. A scan of the text for each
/// takes less time than making tables of all of it once.
#[derive(Debug, Default)]
pub(crate) struct Index {
    /// On each line a file and, after a `:`, its dependencies, the last to be loaded first.
    dep: String,
    /// Lines like `alias PATTERN MODULE`.
    alias: String,
    /// Lines like `softdep MODULE pre: MODULE… post: MODULE…`.
    soft: String,
}

pub(crate) struct Modules {
    folder: PathBuf,
    index: Index,
    command_line: String,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("the image has no kernel module for {0:?}; if it is needed, it goes into the image")]
    Missing(String),
    #[error("cannot load kernel module {path}: {source}")]
    Load { path: PathBuf, source: io::Error },
}

impl Index {
    /// Makes an index of `modules.dep`, `modules.alias` and `modules.softdep`. Unreadable parts are left out.
    pub(crate) fn new(dep: String, alias: String, soft: String) -> Index {
        Index { dep, alias, soft }
    }

    /// Returns the modules of a name or an alias; none if the VM image has none, or the kernel has it built in.
    pub(crate) fn find<'a>(&'a self, wanted: &'a str) -> Vec<&'a str> {
        if self.file(wanted).is_some() {
            return vec![wanted];
        }
        let mut found: Vec<(bool, &str)> = Vec::new();
        for line in self.alias.lines() {
            let Some((pattern, module)) = alias_of(line) else { continue };
            // In `acpi*:QEMU0002:*` the bus itself is a pattern. Such aliases come last.
            let any_bus = bus(pattern).contains(['*', '?', '[']);
            if (any_bus || bus(pattern) == bus(wanted))
                && !found.iter().any(|(_, known)| *known == module)
                && matches(pattern, wanted)
                && self.file(module).is_some()
            {
                found.push((any_bus, module));
            }
        }
        found.sort_by_key(|(any_bus, _)| *any_bus);
        found.into_iter().map(|(_, module)| module).collect()
    }

    /// Returns the files of a module and of all its dependencies, in load order.
    pub(crate) fn order(&self, module: &str) -> Vec<&str> {
        let mut order = Vec::new();
        self.add(module, &mut order, 0);
        order
    }

    /// Returns a module's file and its dependencies.
    fn file(&self, module: &str) -> Option<(&str, &str)> {
        self.dep
            .lines()
            .filter_map(|line| line.split_once(':'))
            .find(|(file, _)| is_same(name_of(file), module))
    }

    /// Returns the modules to be loaded before this one.
    fn soft(&self, module: &str) -> impl Iterator<Item = &str> {
        let lines = self.soft.lines().filter_map(|line| line.strip_prefix("softdep ")?.split_once(' '));
        let own = lines.filter(|(name, _)| is_same(name, module)).map(|(_, rest)| rest.split_whitespace());
        own.flat_map(|words| {
            words.skip_while(|word| *word != "pre:").skip(1).take_while(|word| *word != "post:")
        })
    }

    fn add<'a>(&'a self, module: &str, order: &mut Vec<&'a str>, depth: usize) {
        let Some((file, needs)) = self.file(module) else { return };
        if depth > 8 || order.len() > MAX_NEEDS || order.contains(&file) {
            return;
        }
        for soft in self.soft(module) {
            self.add(soft, order, depth + 1);
        }
        let needs: Vec<&str> = needs.split_whitespace().take(MAX_NEEDS).collect();
        for need in needs.into_iter().rev().chain([file]) {
            if !order.contains(&need) {
                order.push(need);
            }
        }
    }
}

fn alias_of(line: &str) -> Option<(&str, &str)> {
    let (pattern, module) = line.strip_prefix("alias ")?.split_once(' ')?;
    Some((pattern, module.trim()))
}

impl Modules {
    /// Reads the index of the running kernel; empty if the VM image has none.
    pub(crate) fn open() -> Modules {
        let release = nix::sys::utsname::uname().ok();
        let release = release.as_ref().map(|names| names.release().to_string_lossy().into_owned());
        let folder = Path::new("/lib/modules").join(release.unwrap_or_default());
        let read = |name: &str| {
            let content = crate::files::read(&folder.join(name), MAX_INDEX).ok().flatten();
            String::from_utf8(content.unwrap_or_default()).unwrap_or_default()
        };
        let index = Index::new(read("modules.dep"), read("modules.alias"), read("modules.softdep"));
        let command_line = fs::read_to_string("/proc/cmdline").unwrap_or_default();
        Modules { folder, index, command_line }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.index.dep.is_empty()
    }

    /// Loads the modules of a name or an alias. A module that is loaded already, or finds no device, is no error.
    pub(crate) fn load(&self, wanted: &str) -> Result<(), Error> {
        let found = self.index.find(wanted);
        if found.is_empty() && !is_loaded(wanted) {
            return Err(Error::Missing(wanted.to_owned()));
        }
        let mut result = Ok(());
        for module in found {
            let inserted = self.index.order(module).into_iter().try_for_each(|file| self.insert(file));
            result = inserted.and(result);
        }
        result
    }

    /// Loads the modules for an announced device; most devices need none.
    pub(crate) fn load_for_device(&self, alias: &str) {
        if let Err(error @ Error::Load { .. }) = self.load(alias) {
            tracing::warn!(%error, alias, "kernel module");
        }
    }

    fn insert(&self, file: &str) -> Result<(), Error> {
        if is_loaded(name_of(file)) {
            return Ok(()); // its file need not be read again
        }
        let path = self.folder.join(file);
        let failed = |source| Error::Load { path: path.clone(), source };
        let options = options(&self.command_line, name_of(file));
        let options = CString::new(options).map_err(|_| failed(io::ErrorKind::InvalidInput.into()))?;
        let flags = if file.ends_with(".ko") { 0 } else { COMPRESSED };
        let opened = File::open(&path).map_err(failed)?;
        match finit_module(opened, &options, ModuleInitFlags::from_bits_retain(flags as _)) {
            // ENODEV and the like: the driver looked, and this machine has none of its devices.
            Ok(()) | Err(Errno::EEXIST | Errno::ENODEV | Errno::ENXIO | Errno::EBUSY) => Ok(()),
            Err(error) => Err(failed(error.into())),
        }
    }

    /// Loads the modules for devices that may be needed to reach the node: those on buses of NICs and disks. Returns
    /// whether all of these modules are here. Loading announces further devices, which come as events.
    pub(crate) fn plug_first(&self) -> bool {
        let mut all_here = true;
        for bus in FIRST_BUSES {
            let devices = fs::read_dir(Path::new("/sys/bus").join(bus).join("devices"));
            for device in devices.into_iter().flatten().filter_map(Result::ok) {
                if bus == "acpi" && !is_first_of_acpi(&device.file_name().to_string_lossy()) {
                    continue;
                }
                if let Ok(alias) = fs::read_to_string(device.path().join("modalias")) {
                    all_here &= self.load_first(alias.trim());
                }
            }
        }
        all_here
    }

    /// Loads the modules for an announced device that may be needed to reach the node; returns whether they are here.
    pub(crate) fn load_first(&self, alias: &str) -> bool {
        if can_wait(alias) {
            return true;
        }
        match self.load(alias) {
            Err(Error::Load { source, .. }) if is_in_usr(&source) => return false,
            Err(error @ Error::Load { .. }) => tracing::warn!(%error, alias, "kernel module"),
            _ => {}
        }
        true
    }

    /// Loads the modules for all present devices.
    pub(crate) fn cold_plug(&self) {
        let mut aliases = Vec::new();
        collect_aliases(Path::new("/sys/devices"), 0, &mut aliases);
        aliases.sort_unstable();
        aliases.dedup();
        // Processor features concern ciphers alone. A user of one of these requests it from the kernel by name, and
        // their self-tests take longer than all drivers.
        for alias in aliases.iter().filter(|alias| !alias.starts_with("cpu:")) {
            self.load_for_device(alias);
        }
    }

    /// Loads modules that no device announces, by a list in the VM image: a name per line, `#` begins a comment.
    pub(crate) fn load_list(&self, list: &Path) {
        let text = crate::files::read(list, MAX_LIST);
        let text = text.ok().flatten().and_then(|bytes| String::from_utf8(bytes).ok()).unwrap_or_default();
        let names = text.lines().map(|line| line.split('#').next().unwrap_or_default().trim());
        for name in names.filter(|name| !name.is_empty()) {
            if let Err(error) = self.load(name) {
                tracing::warn!(%error, list = %list.display(), "kernel module");
            }
        }
    }
}

/// Handles the kernel's own request (`kernel.modprobe`), made as `-q -- NAME`. A failure is not logged: the requester
/// notices the lack of the module, and there is no log to write to.
pub(crate) fn requested(name: &str) -> bool {
    Modules::open().load(name).is_ok()
}

/// Returns whether the module may still be loaded from the image's /usr. Either it is not here, or it has no signature
/// here and this kernel is locked down already (`lockdown=`, secure boot).
fn is_in_usr(error: &io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw);
    matches!(errno, Some(Errno::ENOENT | Errno::EPERM | Errno::EKEYREJECTED))
}

/// Buses of NICs, disks and user-data.
const FIRST_BUSES: [&str; 5] = ["pci", "virtio", "vmbus", "xen", "acpi"];

/// Returns whether an ACPI device is needed early: user-data (fw_cfg), and virtio without PCI.
fn is_first_of_acpi(device: &str) -> bool {
    device.starts_with("QEMU0002") || device.starts_with("LNRO0005")
}

/// Returns whether a device is not needed to reach the node: buttons, clocks, and virtio devices other than NIC and
/// disk (console, entropy, balloon). Loading a module takes some ten milliseconds on an emulated processor.
fn can_wait(alias: &str) -> bool {
    const LATER: &str = "acpi:LNX acpi:PNP cpu: dmi: input: platform: serio: virtio:d00000003 virtio:d00000004 \
                         virtio:d00000005";
    LATER.split(' ').any(|begin| alias.starts_with(begin))
}

fn is_loaded(name: &str) -> bool {
    Path::new("/sys/module").join(name.replace('-', "_")).exists()
}

fn collect_aliases(folder: &Path, depth: u32, into: &mut Vec<String>) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.filter_map(Result::ok) {
        let Ok(kind) = entry.file_type() else { continue };
        if kind.is_dir() && depth < DEPTH {
            collect_aliases(&entry.path(), depth + 1, into);
        } else if kind.is_file() && entry.file_name() == "modalias" && into.len() < MAX_ALIASES {
            let alias = fs::read_to_string(entry.path()).unwrap_or_default();
            into.extend(Some(alias.trim().to_owned()).filter(|alias| !alias.is_empty()));
        }
    }
}

/// Returns a module's options: `a.b=c` of the kernel command line is the option `b=c` of module `a`.
fn options(command_line: &str, module: &str) -> String {
    let words = command_line.split_whitespace().filter_map(|word| word.split_once('.'));
    let own: Vec<&str> = words.filter(|(name, _)| is_same(name, module)).map(|(_, option)| option).collect();
    own.join(" ")
}

/// Returns a file's module name: `kernel/net/foo-bar.ko.xz` is `foo-bar`.
fn name_of(file: &str) -> &str {
    let name = file.rsplit('/').next().unwrap_or(file);
    name.split(".ko").next().unwrap_or(name)
}

/// Compares module names, in which `-` and `_` are the same.
fn is_same(name: &str, other: &str) -> bool {
    let plain = |byte: u8| if byte == b'-' { b'_' } else { byte };
    name.len() == other.len() && name.bytes().map(plain).eq(other.bytes().map(plain))
}

fn bus(alias: &str) -> &str {
    alias.split_once(':').map_or("", |(bus, _)| bus)
}

/// Returns whether a pattern of `*`, `?` and `[a-z]` matches the whole text.
fn matches(pattern: &str, text: &str) -> bool {
    let (pattern, text) = (pattern.as_bytes(), text.as_bytes());
    let (mut p, mut t) = (0, 0);
    // Position to continue at after a mismatch: behind the last `*`, one byte later in the text.
    let mut again = None;
    while t < text.len() {
        let fits = match pattern.get(p) {
            Some(b'*') => {
                again = Some((p + 1, t));
                p += 1;
                continue;
            }
            Some(b'?') => Some(1),
            Some(b'[') => class(&pattern[p..], text[t]),
            Some(byte) if *byte == text[t] => Some(1),
            _ => None,
        };
        match (fits, again) {
            (Some(length), _) => (p, t) = (p + length, t + 1),
            (None, Some((from, at))) => {
                again = Some((from, at + 1));
                (p, t) = (from, at + 1);
            }
            (None, None) => return false,
        }
    }
    pattern[p..].iter().all(|byte| *byte == b'*')
}

/// Returns the length of a class `[...]` at the start of the pattern, if it includes the byte.
fn class(pattern: &[u8], byte: u8) -> Option<usize> {
    let end = pattern.iter().position(|b| *b == b']')?;
    let mut inside = pattern.get(1..end)?;
    while let Some((first, rest)) = inside.split_first() {
        match rest {
            [b'-', last, after @ ..] => {
                if (*first..=*last).contains(&byte) {
                    return Some(end + 1);
                }
                inside = after;
            }
            _ if *first == byte => return Some(end + 1),
            _ => inside = rest,
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const DEP: &str = "\
kernel/drivers/virtio/virtio.ko:
kernel/drivers/virtio/virtio_ring.ko:
kernel/drivers/net/net-failover.ko: kernel/net/core/failover.ko
kernel/net/core/failover.ko.xz:
kernel/drivers/net/virtio_net.ko: kernel/drivers/net/net-failover.ko kernel/net/core/failover.ko.xz kernel/drivers/virtio/virtio_ring.ko kernel/drivers/virtio/virtio.ko
kernel/fs/btrfs/btrfs.ko:
kernel/crypto/crc32c.ko:
";
    const ALIAS: &str = "\
# Aliases extracted from modules themselves.
alias virtio:d00000001v* virtio_net
alias pci:v00001AF4d*sv*sd*bc*sc*i* virtio-pci
alias input:b*v*p*e*-e*1,*k*r*a*m*l*s*f*w* evdev
alias fs-btrfs btrfs
alias acpi*:QEMU000[0-2]:* btrfs
";

    fn index() -> Index {
        Index::new(DEP.into(), ALIAS.into(), "softdep btrfs pre: crc32c post: virtio_net\n".into())
    }

    #[test]
    fn modules_of_a_device_are_found_and_loaded_in_order() {
        let index = index();
        assert_eq!(index.find("virtio:d00000001v00001AF4"), ["virtio_net"]);
        assert_eq!(
            index.order("virtio_net"),
            [
                "kernel/drivers/virtio/virtio.ko",
                "kernel/drivers/virtio/virtio_ring.ko",
                "kernel/net/core/failover.ko.xz",
                "kernel/drivers/net/net-failover.ko",
                "kernel/drivers/net/virtio_net.ko",
            ]
        );
        assert_eq!(index.find("net_failover"), ["net_failover"], "by name, however it is written");
        assert_eq!(index.find("net-failover"), ["net-failover"]);
        assert_eq!(index.find("acpi:QEMU0002:"), ["btrfs"], "a bus that is a pattern");
        assert_eq!(index.find("fs-btrfs"), ["btrfs"], "modules that the kernel requests");
        assert_eq!(index.order("btrfs"), ["kernel/crypto/crc32c.ko", "kernel/fs/btrfs/btrfs.ko"]);
        assert!(
            index.find("pci:v00001AF4d00001000sv1sd2bc02sc00i00").is_empty(),
            "the image has no virtio-pci"
        );
        assert!(index.find("virtio:d00000002v00001AF4").is_empty());
    }

    #[test]
    fn patterns_are_those_of_modprobe() {
        for (pattern, text, fits) in [
            ("pci:v*d*", "pci:v1d2", true),
            ("a*b*c", "aXbYbZc", true),
            ("a*b*c", "aXbYbZ", false),
            ("a?c", "abc", true),
            ("a?c", "ac", false),
            ("a[0-3x]c", "a2c", true),
            ("a[0-3x]c", "axc", true),
            ("a[0-3x]c", "a4c", false),
            ("a[", "a[", false),
            ("*", "", true),
            ("", "", true),
            ("", "a", false),
        ] {
            assert_eq!(matches(pattern, text), fits, "{pattern} {text}");
        }
    }

    #[test]
    fn options_come_from_the_kernel_line() {
        let line = "quiet virtio-net.napi_tx=1 x.y=2 virtio_net.csum=0 console=ttyS0";
        assert_eq!(options(line, "virtio_net"), "napi_tx=1 csum=0");
        assert_eq!(options(line, "ext4"), "");
    }

    proptest! {
        #[test]
        fn any_text_is_handled(dep in ".{0,200}", alias in ".{0,200}", soft in ".{0,200}", wanted in ".{0,40}") {
            let index = Index::new(dep, format!("alias {alias}"), format!("softdep {soft}"));
            for found in index.find(&wanted) {
                prop_assert!(!index.order(found).is_empty());
            }
        }

        #[test]
        fn a_text_fits_itself_with_stars_anywhere(text in "[a-z:]{0,12}", at in 0usize..12) {
            let mut pattern = text.clone();
            pattern.insert(at.min(text.len()), '*');
            prop_assert!(matches(&pattern, &text));
            let longer = format!("{}x", text);
            prop_assert!(!matches(&text, &longer));
        }

        #[test]
        fn cyclic_dependencies_end(a in "[a-c]", b in "[a-c]", c in "[a-c]") {
            let dep = format!("a.ko: {a}.ko\nb.ko: {b}.ko\nc.ko: {c}.ko");
            let soft = format!("softdep a pre: {b}\nsoftdep b pre: {c}\nsoftdep c pre: {a}");
            let index = Index::new(dep, String::new(), soft);
            prop_assert!(index.order("a").len() <= 3);
        }
    }
}
