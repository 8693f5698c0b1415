//! Detects by CPUID whether this VM's memory is hidden from its host.
//!
//! With TDX the processor answers, with SEV-SNP a table that its firmware checked, on Hyper-V the paravisor. With SEV
//! before SNP the host answers, and a lying host is believed. Pure but for that instruction.

/// AMD: encrypted memory. Bit 1 of EAX stands for SEV of any kind; hypervisors show it to such guests alone.
const AMD_ENCRYPTION: u32 = 0x8000_001f;
const AMD_SEV: u32 = 1 << 1;
const AMD_LAST: u32 = 0x8000_0000;
/// Intel: EBX, EDX and ECX contain `IntelTDX    `.
const TDX: u32 = 0x21;
const TDX_NAME: &[u8; 12] = b"IntelTDX    ";
/// Hyper-V: behind a paravisor, the low bits of EBX contain the kind of isolation: 2 is SNP, 3 is TDX.
const HYPERVISOR: u32 = 0x4000_0000;
const HYPERV_NAME: &[u8; 12] = b"Microsoft Hv";
const HYPERV_ISOLATION: u32 = 0x4000_000c;

/// EAX, EBX, ECX, EDX.
type Registers = [u32; 4];

/// Returns whether this VM's memory is hidden from its host. On other processors than x86 it returns false, because the
/// detection is not implemented.
pub(crate) fn is_vm() -> bool {
    is_confidential(cpuid)
}

#[cfg(target_arch = "x86_64")]
fn cpuid(leaf: u32) -> Registers {
    let found = std::arch::x86_64::__cpuid_count(leaf, 0);
    [found.eax, found.ebx, found.ecx, found.edx]
}

/// Returns the answer of a processor without such leaves.
#[cfg(not(target_arch = "x86_64"))]
fn cpuid(_: u32) -> Registers {
    [0; 4]
}

fn is_confidential(cpuid: impl Fn(u32) -> Registers) -> bool {
    let [last, ..] = cpuid(0);
    let [last_of_amd, ..] = cpuid(AMD_LAST);
    let [last_of_hypervisor, ebx, ecx, edx] = cpuid(HYPERVISOR);
    let hyperv = name([ebx, ecx, edx]) == *HYPERV_NAME && last_of_hypervisor >= HYPERV_ISOLATION;
    let [_, tdx_ebx, tdx_ecx, tdx_edx] = if last >= TDX { cpuid(TDX) } else { [0; 4] };
    name([tdx_ebx, tdx_edx, tdx_ecx]) == *TDX_NAME
        || (last_of_amd >= AMD_ENCRYPTION && cpuid(AMD_ENCRYPTION)[0] & AMD_SEV != 0)
        || (hyperv && matches!(cpuid(HYPERV_ISOLATION)[1] & 0xf, 2 | 3))
}

fn name(registers: [u32; 3]) -> [u8; 12] {
    let mut name = [0; 12];
    for (part, register) in name.chunks_mut(4).zip(registers) {
        part.copy_from_slice(&register.to_le_bytes());
    }
    name
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(name: &[u8; 12]) -> [u32; 3] {
        [0, 4, 8].map(|at| u32::from_le_bytes([name[at], name[at + 1], name[at + 2], name[at + 3]]))
    }

    /// Evaluates a processor with these leaves and zeros elsewhere.
    fn says(leaves: &[(u32, Registers)]) -> bool {
        is_confidential(|leaf| leaves.iter().find(|(of, _)| *of == leaf).map_or([0; 4], |(_, found)| *found))
    }

    #[test]
    fn the_cpuid_text_of_each_vendor_is_recognised() {
        let (kvm, hyperv) = (words(b"KVMKVMKVM\0\0\0"), words(HYPERV_NAME));
        let under = |name: [u32; 3], last| (HYPERVISOR, [last, name[0], name[1], name[2]]);
        let amd = |eax| [(AMD_LAST, [AMD_ENCRYPTION, 0, 0, 0]), (AMD_ENCRYPTION, [eax, 0, 0, 0])];
        assert!(!says(&[]));
        assert!(says(&amd(0x1f)), "SNP");
        assert!(!says(&amd(1)), "memory that the host alone encrypts");
        assert!(!says(&amd(0x1f)[1..]), "beyond the last leaf");
        let [ebx, edx, ecx] = words(TDX_NAME);
        assert!(says(&[(0, [TDX, 0, 0, 0]), (TDX, [0, ebx, ecx, edx])]));
        assert!(!says(&[(0, [TDX - 1, 0, 0, 0]), (TDX, [0, ebx, ecx, edx])]));
        for (kind, is) in [(0, false), (1, false), (2, true), (3, true)] {
            let isolation = (HYPERV_ISOLATION, [0, kind, 0, 0]);
            assert_eq!(says(&[under(hyperv, HYPERV_ISOLATION), isolation]), is, "{kind}");
            assert!(!says(&[under(kvm, HYPERV_ISOLATION), isolation]));
        }
    }
}
