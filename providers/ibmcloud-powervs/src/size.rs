//! Sizes of VMs: system type, processors in quarters of a core, memory in GB. Pure.

use std::fmt;

use peerpod_provider_api::{CreateRequest, Error};

/// Most quarters of a core; no system has as many.
const MOST_QUARTERS: u32 = 4 * 1024;
/// Most GB of memory.
const MOST_GB: u32 = 64 << 10;
/// Least GB of memory that PowerVS gives a VM.
const LEAST_GB: u32 = 2;

/// Size of a VM. As a text it is like `s922-0.5x2`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VmSize {
    /// System type, like `s922`.
    pub system: String,
    /// Processors, in quarters of a core.
    pub quarters: u32,
    /// Memory in GB.
    pub memory: u32,
}

impl VmSize {
    /// Parses a text like `s922-0.5x2`; `None`: it is no size.
    pub fn parse(text: &str) -> Option<VmSize> {
        let (system, size) = text.rsplit_once('-')?;
        let (processors, memory) = size.split_once('x')?;
        Some(VmSize {
            system: system.to_owned(),
            quarters: quarters(processors)?,
            memory: memory.parse().ok().filter(|gb| (1..=MOST_GB).contains(gb))?,
        })
        .filter(|size| is_system(&size.system))
    }

    /// Returns the processors as a number of cores.
    pub fn processors(&self) -> f64 {
        f64::from(self.quarters) / 4.0
    }

    /// Returns the size for a request: the type that it names, or the least size with its CPUs and memory.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a type that is none, and for a size that no system has.
    pub(crate) fn of(&self, request: &CreateRequest) -> Result<VmSize, Error> {
        let what = format!("create of {}", request.name);
        if let Some(text) = &request.instance_type {
            let shown: String = text.chars().take(40).collect();
            return VmSize::parse(text).ok_or_else(|| {
                Error::invalid(format!("{what}: `{shown}` is no size; write it like {self}"))
            });
        }
        let size = &request.size;
        let memory = size.memory_mib.div_ceil(1024);
        if u64::from(size.vcpus) * 4 > u64::from(MOST_QUARTERS) || memory > u64::from(MOST_GB) {
            return Err(Error::invalid(format!(
                "{what}: no system has vcpus ({}) and memory ({}); ask for less",
                size.vcpus, size.memory_mib
            )));
        }
        let wanted = u32::try_from(memory).unwrap_or(MOST_GB).max(LEAST_GB);
        Ok(VmSize {
            system: self.system.clone(),
            quarters: if size.vcpus == 0 { self.quarters } else { size.vcpus * 4 },
            memory: if size.memory_mib == 0 { self.memory } else { wanted },
        })
    }
}

impl fmt::Display for VmSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}x{}", self.system, self.processors(), self.memory)
    }
}

/// Parses a number of cores, like `0.5`; `None`: it is not a multiple of a quarter.
pub(crate) fn quarters(text: &str) -> Option<u32> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let digits = |part: &str| part.len() <= 6 && part.bytes().all(|byte| byte.is_ascii_digit());
    if whole.is_empty() || !digits(whole) || !digits(fraction) {
        return None;
    }
    let rest = match fraction.trim_end_matches('0') {
        "" => 0,
        "25" => 1,
        "5" => 2,
        "75" => 3,
        _ => return None,
    };
    let quarters = whole.parse::<u32>().ok()?.checked_mul(4)?.checked_add(rest)?;
    (1..=MOST_QUARTERS).contains(&quarters).then_some(quarters)
}

/// Whether a text has the form of a system type, like `s922` and `e1080`.
pub(crate) fn is_system(text: &str) -> bool {
    (1..=32).contains(&text.len())
        && text.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-')
}

#[cfg(test)]
mod tests {
    use peerpod_provider_api::Size;

    use super::*;

    #[test]
    fn a_size_is_a_text_and_back() {
        for text in ["s922-0.25x2", "s922-1x4", "e1080-12.75x1024"] {
            assert_eq!(VmSize::parse(text).unwrap().to_string(), text);
        }
        for bad in [
            "",
            "s922",
            "s922-0x2",
            "s922-0.3x2",
            "s922-1x",
            "s922-1x0",
            "S922-1x2",
            "-1x2",
            "s922-1.5.5x2",
            "a-1x99999999",
        ] {
            assert_eq!(VmSize::parse(bad), None, "{bad}");
        }
        assert_eq!(
            (quarters("0.50"), quarters("2."), quarters("-1"), quarters("1e3")),
            (Some(2), Some(8), None, None)
        );
    }

    #[test]
    fn a_request_gives_whole_cores_and_gigabytes() {
        let default = VmSize::parse("s922-0.5x4").unwrap();
        let of = |vcpus, memory_mib, instance_type: Option<&str>| {
            let size = Size { vcpus, memory_mib, ..Size::default() };
            let instance_type = instance_type.map(str::to_owned);
            default.of(&CreateRequest { size, instance_type, ..CreateRequest::default() })
        };
        for (vcpus, memory, size) in
            [(0, 0, "s922-0.5x4"), (1, 0, "s922-1x4"), (0, 512, "s922-0.5x2"), (3, 8193, "s922-3x9")]
        {
            assert_eq!(of(vcpus, memory, None).unwrap().to_string(), size);
        }
        assert_eq!(of(1, 0, Some("e980-0.25x2")).unwrap().to_string(), "e980-0.25x2");
        assert!(of(0, 0, Some("large")).unwrap_err().to_string().contains("write it like s922-0.5x4"));
        assert!(of(1_000_000, 0, None).is_err() && of(0, u64::MAX, None).is_err());
    }
}
