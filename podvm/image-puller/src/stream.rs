//! Decompresses, counts and hashes a layer's bytes, bounded by the caller's budget and not by any size that they claim.

use std::cell::Cell;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

use flate2::bufread::MultiGzDecoder;
use ruzstd::decoding::errors::FrameDecoderError::ReadFrameHeaderError;
use ruzstd::decoding::errors::ReadFrameHeaderError::SkipFrame;
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};
use sha2::{Digest, Sha256};

use crate::cause::{Cause, Error};

/// Compression of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Packing {
    None,
    Gzip,
    Zstd,
}

impl Packing {
    pub(crate) fn of(media_type: &str) -> Result<Packing, Error> {
        let unsupported = |why: &str| {
            Err(Error::new(Cause::Unsupported, format!("a layer of type {media_type:.100}: {why}")))
        };
        if media_type.contains("encrypted") {
            return unsupported("encrypted layers need the confidential data hub in the VM image");
        }
        match media_type {
            "application/vnd.oci.image.layer.v1.tar"
            | "application/vnd.oci.image.layer.nondistributable.v1.tar"
            | "application/vnd.docker.image.rootfs.diff.tar" => Ok(Packing::None),
            "application/vnd.oci.image.layer.v1.tar+gzip"
            | "application/vnd.oci.image.layer.nondistributable.v1.tar+gzip"
            | "application/vnd.docker.image.rootfs.diff.tar.gzip"
            | "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip" => Ok(Packing::Gzip),
            "application/vnd.oci.image.layer.v1.tar+zstd"
            | "application/vnd.oci.image.layer.nondistributable.v1.tar+zstd"
            | "application/vnd.docker.image.rootfs.diff.tar.zstd" => Ok(Packing::Zstd),
            _ => unsupported("tar, tar+gzip and tar+zstd are understood; is this a container image?"),
        }
    }
}

pub(crate) fn open(path: &Path, packing: Packing) -> io::Result<Box<dyn Read>> {
    let file = BufReader::with_capacity(128 << 10, std::fs::File::open(path)?);
    Ok(match packing {
        Packing::None => Box::new(file),
        Packing::Gzip => Box::new(MultiGzDecoder::new(file)),
        Packing::Zstd => Box::new(Zstd { source: file, frame: FrameDecoder::new() }),
    })
}

/// Decoder of consecutive zstd frames; skippable frames are skipped.
struct Zstd<R> {
    source: R,
    frame: FrameDecoder,
}

impl<R: BufRead> Read for Zstd<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        while self.frame.can_collect() == 0 {
            if !self.frame.is_finished() {
                let one = BlockDecodingStrategy::UptoBlocks(1);
                self.frame.decode_blocks(&mut self.source, one).map_err(io::Error::other)?;
            } else if self.source.fill_buf()?.is_empty() {
                return Ok(0);
            } else {
                self.begin()?;
            }
        }
        self.frame.read(into)
    }
}

impl<R: BufRead> Zstd<R> {
    /// Begins the next frame, or skips a skippable one.
    fn begin(&mut self) -> io::Result<()> {
        let length = match self.frame.reset(&mut self.source) {
            Ok(()) => return Ok(()),
            Err(ReadFrameHeaderError(SkipFrame { length, .. })) => u64::from(length),
            Err(error) => return Err(io::Error::new(io::ErrorKind::InvalidData, error.to_string())),
        };
        let skipped = io::copy(&mut self.source.by_ref().take(length), &mut io::sink())?;
        if skipped < length { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(()) }
    }
}

/// Reader that counts against a budget and hashes.
pub(crate) struct Counted<'a, R> {
    inner: R,
    hash: Sha256,
    budget: &'a Cell<u64>,
}

impl<'a, R: Read> Counted<'a, R> {
    pub(crate) fn new(inner: R, budget: &'a Cell<u64>) -> Counted<'a, R> {
        Counted { inner, hash: Sha256::new(), budget }
    }

    /// Reads the rest, and returns the digest of the whole.
    pub(crate) fn finish(mut self) -> io::Result<String> {
        io::copy(&mut self, &mut io::sink())?;
        Ok(format!("sha256:{}", hex::encode(self.hash.finalize())))
    }
}

impl<R: Read> Read for Counted<'_, R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(into)?;
        let left = self.budget.get().checked_sub(count as u64);
        self.budget.set(left.ok_or_else(|| io::Error::new(io::ErrorKind::FileTooLarge, TooMuch))?);
        self.hash.update(&into[..count]);
        Ok(count)
    }
}

/// Error of a used-up budget.
#[derive(Debug, thiserror::Error)]
#[error("unpacked, the image is larger than is permitted")]
pub(crate) struct TooMuch;

/// Returns whether the budget stopped a read.
pub(crate) fn is_too_much(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::FileTooLarge
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn through(packing: Packing, bytes: &[u8]) -> io::Result<Vec<u8>> {
        let path = std::env::temp_dir().join(format!(
            "pp-stream-{}-{:?}-{}",
            std::process::id(),
            std::thread::current().id(),
            bytes.len()
        ));
        std::fs::write(&path, bytes)?;
        let mut out = Vec::new();
        let read = open(&path, packing)?.read_to_end(&mut out);
        std::fs::remove_file(&path)?;
        read.map(|_| out)
    }

    #[test]
    fn every_compression_is_read_in_one_or_several_pieces() {
        let data: Vec<u8> = (0..300_000u32).flat_map(|n| (n / 7).to_le_bytes()).collect();
        let gzip = |part: &[u8]| {
            let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            encoder.write_all(part).unwrap();
            encoder.finish().unwrap()
        };
        let zstd = |part: &[u8]| {
            ruzstd::encoding::compress_to_vec(part, ruzstd::encoding::CompressionLevel::Fastest)
        };
        let (one, two) = data.split_at(data.len() / 3);
        assert_eq!(through(Packing::None, &data).unwrap(), data);
        assert_eq!(through(Packing::Gzip, &[gzip(one), gzip(two)].concat()).unwrap(), data);
        let skippable = [&0x184D2A50u32.to_le_bytes()[..], &300_000u32.to_le_bytes(), &[7; 300_000]].concat();
        let frames = [skippable.clone(), zstd(one), skippable, zstd(two)].concat();
        assert_eq!(through(Packing::Zstd, &frames).unwrap(), data);
        assert!(through(Packing::Zstd, &frames[..frames.len() - 9]).is_err());
        assert!(through(Packing::Zstd, b"not zstd").is_err());
        assert!(through(Packing::Gzip, b"not gzip").is_err());
    }

    #[test]
    fn a_budget_limits_a_decompression_bomb() {
        let budget = Cell::new(1000);
        let mut counted = Counted::new(io::repeat(0).take(1 << 30), &budget);
        let error = io::copy(&mut counted, &mut io::sink()).unwrap_err();
        assert!(is_too_much(&error), "{error}");
        let budget = Cell::new(3);
        let digest = Counted::new(&b"abc"[..], &budget).finish().unwrap();
        assert_eq!(digest, "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    }

    #[test]
    fn media_types_are_distinguished() {
        assert_eq!(Packing::of("application/vnd.oci.image.layer.v1.tar+zstd").unwrap(), Packing::Zstd);
        let error = Packing::of("application/vnd.oci.image.layer.v1.tar+gzip+encrypted").unwrap_err();
        assert!(error.text.contains("data hub"), "{error}");
        assert!(Packing::of("application/vnd.cncf.helm.chart").is_err());
    }
}
