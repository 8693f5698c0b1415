//! Reads and writes XDR (RFC 4506), as much of it as libvirt's messages need. Pure. (The existing crates for it are
//! years old or generate code from `.x` files; this module is short.)
//!
//! The reader trusts no length: it checks each against a limit and against the rest of the message before it allocates.

/// Reason why a message cannot be parsed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Garbled {
    /// The message ends too early.
    #[error("the message ends after {0} bytes, in the middle of a value")]
    Short(usize),
    /// A text, list or blob is longer than the protocol allows.
    #[error("a value of {length} elements is longer than the {limit} that the protocol allows")]
    Long {
        /// Announced length.
        length: usize,
        /// Allowed length.
        limit: usize,
    },
    /// A text that is not UTF-8.
    #[error("a text is not UTF-8")]
    Text,
    /// A flag that is neither 0 nor 1.
    #[error("a flag has the value {0}")]
    Flag(u32),
    /// The message is longer than its values.
    #[error("{0} bytes are left over")]
    Rest(usize),
}

/// Longest text in any of libvirt's messages, in bytes.
pub const MAX_TEXT: usize = 4 << 20;

/// Bytes of a UUID.
pub type Uuid = [u8; 16];

/// Builds the payload of a call.
#[derive(Debug, Default)]
pub struct Writer(Vec<u8>);

impl Writer {
    /// Starts an empty payload.
    pub fn new() -> Writer {
        Writer::default()
    }

    /// Appends an `unsigned int`.
    #[must_use]
    pub fn u32(mut self, value: u32) -> Writer {
        self.0.extend(value.to_be_bytes());
        self
    }

    /// Appends an `int`.
    #[must_use]
    pub fn i32(mut self, value: i32) -> Writer {
        self.0.extend(value.to_be_bytes());
        self
    }

    /// Appends an `unsigned hyper`.
    #[must_use]
    pub fn u64(mut self, value: u64) -> Writer {
        self.0.extend(value.to_be_bytes());
        self
    }

    /// Appends an `opaque[16]`.
    #[must_use]
    pub fn uuid(mut self, value: &Uuid) -> Writer {
        self.0.extend(value);
        self
    }

    /// Appends a `string<>`. Cuts a text that is too long for the length field; libvirtd refuses far shorter ones.
    #[must_use]
    pub fn text(self, value: &str) -> Writer {
        let bytes = value.as_bytes();
        let length = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        let mut writer = self.u32(length);
        writer.0.extend(bytes.iter().take(length as usize));
        writer.0.resize(writer.0.len().next_multiple_of(4), 0);
        writer
    }

    /// Appends a `string *`.
    #[must_use]
    pub fn optional_text(self, value: Option<&str>) -> Writer {
        match value {
            Some(text) => self.u32(1).text(text),
            None => self.u32(0),
        }
    }

    /// Returns the payload.
    pub fn done(self) -> Vec<u8> {
        self.0
    }
}

/// Parses a payload.
#[derive(Debug)]
pub struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    /// Starts at the beginning of a payload.
    pub fn new(bytes: &'a [u8]) -> Reader<'a> {
        Reader { bytes, at: 0 }
    }

    fn take(&mut self, count: usize) -> Result<&'a [u8], Garbled> {
        let end = self.at.checked_add(count).ok_or(Garbled::Short(self.bytes.len()))?;
        let taken = self.bytes.get(self.at..end).ok_or(Garbled::Short(self.bytes.len()))?;
        self.at = end;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Garbled> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    /// Reads an `unsigned int`.
    ///
    /// # Errors
    /// [`Garbled`], as for all methods here.
    pub fn u32(&mut self) -> Result<u32, Garbled> {
        self.array().map(u32::from_be_bytes)
    }

    /// Reads an `int`.
    pub fn i32(&mut self) -> Result<i32, Garbled> {
        self.array().map(i32::from_be_bytes)
    }

    /// Reads an `unsigned hyper`.
    pub fn u64(&mut self) -> Result<u64, Garbled> {
        self.array().map(u64::from_be_bytes)
    }

    /// Reads an `opaque[16]`.
    pub fn uuid(&mut self) -> Result<Uuid, Garbled> {
        self.array()
    }

    /// Reads a `string<>`.
    pub fn text(&mut self) -> Result<String, Garbled> {
        let length = self.length(MAX_TEXT)?;
        let bytes = self.take(length)?;
        self.take(length.next_multiple_of(4) - length)?;
        std::str::from_utf8(bytes).map(str::to_owned).map_err(|_| Garbled::Text)
    }

    /// Reads a `string *`.
    pub fn optional_text(&mut self) -> Result<Option<String>, Garbled> {
        self.optional(Reader::text)
    }

    /// Reads a `T *`.
    pub fn optional<T>(
        &mut self,
        read: impl FnOnce(&mut Self) -> Result<T, Garbled>,
    ) -> Result<Option<T>, Garbled> {
        match self.u32()? {
            0 => Ok(None),
            1 => read(self).map(Some),
            other => Err(Garbled::Flag(other)),
        }
    }

    /// Reads a `T<limit>`.
    pub fn list<T>(
        &mut self,
        limit: usize,
        mut read: impl FnMut(&mut Self) -> Result<T, Garbled>,
    ) -> Result<Vec<T>, Garbled> {
        let length = self.length(limit)?;
        // Memory is reserved only for elements that can be present: each takes at least four bytes.
        let mut list = Vec::with_capacity(length.min((self.bytes.len() - self.at) / 4));
        for _ in 0..length {
            list.push(read(self)?);
        }
        Ok(list)
    }

    fn length(&mut self, limit: usize) -> Result<usize, Garbled> {
        let length = self.u32()? as usize;
        if length > limit { Err(Garbled::Long { length, limit }) } else { Ok(length) }
    }

    /// Checks that no bytes are left.
    ///
    /// # Errors
    /// [`Garbled::Rest`].
    pub fn end(self) -> Result<(), Garbled> {
        match self.bytes.len() - self.at {
            0 => Ok(()),
            rest => Err(Garbled::Rest(rest)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_values_are_read_back() {
        let bytes = Writer::new()
            .u32(7)
            .i32(-7)
            .u64(1 << 40)
            .uuid(&[9; 16])
            .text("abcde")
            .optional_text(None)
            .optional_text(Some("x"))
            .done();
        assert_eq!(bytes.len() % 4, 0);
        let mut reader = Reader::new(&bytes);
        assert_eq!(reader.u32(), Ok(7));
        assert_eq!(reader.i32(), Ok(-7));
        assert_eq!(reader.u64(), Ok(1 << 40));
        assert_eq!(reader.uuid(), Ok([9; 16]));
        assert_eq!(reader.text().as_deref(), Ok("abcde"));
        assert_eq!(reader.optional_text(), Ok(None));
        assert_eq!(reader.optional_text(), Ok(Some("x".to_owned())));
        assert_eq!(reader.end(), Ok(()));
    }

    #[test]
    fn no_length_is_trusted() {
        let huge = Writer::new().u32(u32::MAX).done();
        assert!(matches!(Reader::new(&huge).text(), Err(Garbled::Long { .. })));
        let longer_than_there_is = Writer::new().u32(1000).done();
        assert!(matches!(Reader::new(&longer_than_there_is).text(), Err(Garbled::Short(4))));
        assert!(matches!(Reader::new(&longer_than_there_is).list(2000, Reader::u32), Err(Garbled::Short(4))));
        assert!(matches!(
            Reader::new(&longer_than_there_is).list(999, Reader::u32),
            Err(Garbled::Long { .. })
        ));
        assert_eq!(Reader::new(&[0, 0, 0, 2]).optional_text(), Err(Garbled::Flag(2)));
        assert_eq!(Reader::new(&[0, 0, 0, 1, 255, 0, 0, 0]).text(), Err(Garbled::Text));
        assert_eq!(Reader::new(&[0]).end(), Err(Garbled::Rest(1)));
    }
}
