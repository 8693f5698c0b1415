//! Contains the code of the trial VM that shows whether KVM runs code: a disk's first sector, which counts in 64-bit
//! mode, as a kernel does, and resets the machine. Firmware alone is no proof: on some hosts KVM emulates the
//! firmware's code, one instruction after the other. There firmware comes to its end, and no kernel ever does.

/// Number of rounds that the code counts. QEMU's emulation needs half a second for them. A processor does about one
/// round per cycle, and should need a tenth of a second.
const ROUNDS: u32 = 1 << 28;
/// Size of a sector, in bytes.
pub(crate) const BYTES: usize = 512;
/// Size of a disk that firmware accepts, in bytes.
pub(crate) const DISK: u64 = 1 << 20;

/// Returns the sector, which a PC's firmware loads to 0x7c00 and jumps to, in 16-bit mode.
pub(crate) fn sector() -> [u8; BYTES] {
    let [r0, r1, r2, r3] = ROUNDS.to_le_bytes();
    #[rustfmt::skip]
    let code: [&[u8]; 22] = [
        &[0xfa],                                        // cli
        &[0x31, 0xc0, 0x8e, 0xd8, 0x8e, 0xc0, 0xfc],    // xor ax, ax; mov ds, ax; mov es, ax; cld
        &[0xbf, 0x00, 0x10, 0xb9, 0x00, 0x18, 0xf3, 0xab], // three empty page tables at 0x1000
        &[0xc7, 0x06, 0x00, 0x10, 0x03, 0x20],          // mov word [0x1000], 0x2003
        &[0xc7, 0x06, 0x00, 0x20, 0x03, 0x30],          // mov word [0x2000], 0x3003
        &[0xc7, 0x06, 0x00, 0x30, 0x83, 0x00],          // mov word [0x3000], 0x83: the first 2 MiB
        &[0x66, 0x0f, 0x01, 0x16, 0x80, 0x7c],          // lgdt [0x7c80]
        &[0x66, 0xb8, 0x20, 0x00, 0x00, 0x00],          // mov eax, PAE
        &[0x0f, 0x22, 0xe0],                            // mov cr4, eax
        &[0x66, 0xb8, 0x00, 0x10, 0x00, 0x00],          // mov eax, 0x1000
        &[0x0f, 0x22, 0xd8],                            // mov cr3, eax
        &[0x66, 0xb9, 0x80, 0x00, 0x00, 0xc0, 0x0f, 0x32], // mov ecx, EFER; rdmsr
        &[0x0d, 0x00, 0x01, 0x0f, 0x30],                // or ax, LME; wrmsr
        &[0x66, 0xb8, 0x01, 0x00, 0x00, 0x80],          // mov eax, PG | PE
        &[0x0f, 0x22, 0xc0],                            // mov cr0, eax
        &[0xea, 0x55, 0x7c, 0x08, 0x00],                // jmp 8:0x7c55, which is the next one
        &[0xb9, r0, r1, r2, r3],                        // mov ecx, ROUNDS
        &[0x48, 0x01, 0xc8],                            // again: add rax, rcx
        &[0x48, 0x89, 0x04, 0x25, 0x00, 0x40, 0x00, 0x00], // mov [0x4000], rax
        &[0xff, 0xc9, 0x75, 0xf1],                      // dec ecx; jnz again
        &[0xb0, 0xfe, 0xe6, 0x64],                      // out 0x64, 0xfe: reset
        &[0xf4, 0xeb, 0xfd],                            // hlt, for ever
    ];
    let mut sector = [0; BYTES];
    let code = code.concat();
    sector[..code.len()].copy_from_slice(&code);
    // Segment table (none, 64-bit code), and its size and address for lgdt.
    sector[0x78..0x80].copy_from_slice(&0x0020_9a00_0000_0000_u64.to_le_bytes());
    sector[0x80..0x86].copy_from_slice(&[0x0f, 0x00, 0x70, 0x7c, 0x00, 0x00]);
    sector[510..].copy_from_slice(&[0x55, 0xaa]);
    sector
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_jump_and_the_tables_are_where_the_code_says() {
        let sector = sector();
        assert_eq!(sector[0x50..0x56], [0xea, 0x55, 0x7c, 0x08, 0x00, 0xb9], "the jump's target follows it");
        assert_eq!(sector[0x6b..0x78], [0xe6, 0x64, 0xf4, 0xeb, 0xfd, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(sector[510..], [0x55, 0xaa]);
    }
}
