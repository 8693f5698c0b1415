//! Reads and writes XDR (RFC 4506), as much of it as libvirt's messages need. Pure. (The existing crates for it are
//! years old or generate code from `.x` files; this module is short.)
//!
//! The reader trusts no length: it checks each against a limit and against the rest of the message before it allocates.

/// Reason why a message cannot be parsed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Garbled {
    #[error("the message ends after {0} bytes, in the middle of a value")]
    Short(usize),
    #[error("a value of {length} elements is longer than the {limit} that the protocol allows")]
    Long { length: usize, limit: usize },
    #[error("a text is not UTF-8")]
    Text,
    #[error("a flag has the value {0}")]
    Flag(u32),
}

/// Longest text in any of libvirt's messages, in bytes.
const MAX_TEXT: usize = 4 << 20;

pub(crate) type Uuid = [u8; 16];

/// Value that a message can end with: the arguments of a call, or one of them.
pub(crate) trait Put {
    fn put(&self, message: &mut Vec<u8>);
}

/// Value that can be read from a message: an answer, or a part of one.
pub(crate) trait Take: Sized {
    fn take(from: &mut Reader<'_>) -> Result<Self, Garbled>;
}

/// Returns the bytes of a value.
pub(crate) fn write(value: &impl Put) -> Vec<u8> {
    let mut bytes = Vec::new();
    value.put(&mut bytes);
    bytes
}

/// Reads the value that these bytes begin with.
pub(crate) fn read<T: Take>(bytes: &[u8]) -> Result<T, Garbled> {
    T::take(&mut Reader { bytes, at: 0 })
}

/// Position in a message.
pub(crate) struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn bytes(&mut self, count: usize) -> Result<&'a [u8], Garbled> {
        let end = self.at.checked_add(count).ok_or(Garbled::Short(self.bytes.len()))?;
        let bytes = self.bytes.get(self.at..end).ok_or(Garbled::Short(self.bytes.len()))?;
        self.at = end;
        Ok(bytes)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Garbled> {
        let mut array = [0; N];
        array.copy_from_slice(self.bytes(N)?);
        Ok(array)
    }

    fn length(&mut self, limit: usize) -> Result<usize, Garbled> {
        let length = u32::take(self)? as usize;
        if length > limit { Err(Garbled::Long { length, limit }) } else { Ok(length) }
    }
}

/// Implements both directions for `int`, `unsigned int` and `unsigned hyper`.
macro_rules! numbers {
    ($($number:ty)*) => {$(
        impl Put for $number {
            fn put(&self, message: &mut Vec<u8>) {
                message.extend(self.to_be_bytes());
            }
        }
        impl Take for $number {
            fn take(from: &mut Reader<'_>) -> Result<$number, Garbled> {
                from.array().map(<$number>::from_be_bytes)
            }
        }
    )*};
}
numbers!(i32 u32 u64);

/// `opaque[16]`.
impl Put for Uuid {
    fn put(&self, message: &mut Vec<u8>) {
        message.extend(self);
    }
}

impl Take for Uuid {
    fn take(from: &mut Reader<'_>) -> Result<Uuid, Garbled> {
        from.array()
    }
}

/// `int[N]`.
impl<const N: usize> Take for [u32; N] {
    fn take(from: &mut Reader<'_>) -> Result<[u32; N], Garbled> {
        let mut array = [0; N];
        for word in &mut array {
            *word = u32::take(from)?;
        }
        Ok(array)
    }
}

/// `string<>`. A text that is too long for the length field is cut; libvirtd refuses far shorter ones.
impl Put for str {
    fn put(&self, message: &mut Vec<u8>) {
        let length = u32::try_from(self.len()).unwrap_or(u32::MAX);
        length.put(message);
        message.extend(self.bytes().take(length as usize));
        message.resize(message.len().next_multiple_of(4), 0);
    }
}

impl Take for String {
    fn take(from: &mut Reader<'_>) -> Result<String, Garbled> {
        let length = from.length(MAX_TEXT)?;
        let bytes = from.bytes(length)?;
        from.bytes(length.next_multiple_of(4) - length)?;
        std::str::from_utf8(bytes).map(str::to_owned).map_err(|_| Garbled::Text)
    }
}

/// `T *`.
impl<T: Put> Put for Option<T> {
    fn put(&self, message: &mut Vec<u8>) {
        u32::from(self.is_some()).put(message);
        if let Some(value) = self {
            value.put(message);
        }
    }
}

impl<T: Take> Take for Option<T> {
    fn take(from: &mut Reader<'_>) -> Result<Option<T>, Garbled> {
        match u32::take(from)? {
            0 => Ok(None),
            1 => T::take(from).map(Some),
            other => Err(Garbled::Flag(other)),
        }
    }
}

/// `T<MOST>`.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct List<T, const MOST: usize>(pub(crate) Vec<T>);

impl<T: Take, const MOST: usize> Take for List<T, MOST> {
    fn take(from: &mut Reader<'_>) -> Result<List<T, MOST>, Garbled> {
        let length = from.length(MOST)?;
        // Memory is reserved only for elements that can be present: each takes at least four bytes.
        let mut list = Vec::with_capacity(length.min((from.bytes.len() - from.at) / 4));
        for _ in 0..length {
            list.push(T::take(from)?);
        }
        Ok(List(list))
    }
}

impl<T: Put + ?Sized> Put for &T {
    fn put(&self, message: &mut Vec<u8>) {
        (*self).put(message);
    }
}

impl Put for () {
    fn put(&self, _: &mut Vec<u8>) {}
}

impl Take for () {
    fn take(_: &mut Reader<'_>) -> Result<(), Garbled> {
        Ok(())
    }
}

/// Implements both directions for values that follow one another.
macro_rules! tuples {
    ($(($($kind:ident $index:tt),*))*) => {$(
        impl<$($kind: Put),*> Put for ($($kind,)*) {
            fn put(&self, message: &mut Vec<u8>) {
                $(self.$index.put(message);)*
            }
        }
        impl<$($kind: Take),*> Take for ($($kind,)*) {
            fn take(from: &mut Reader<'_>) -> Result<($($kind,)*), Garbled> {
                Ok(($($kind::take(from)?,)*))
            }
        }
    )*};
}
tuples! {
    (A 0, B 1)
    (A 0, B 1, C 2)
    (A 0, B 1, C 2, D 3)
    (A 0, B 1, C 2, D 3, E 4)
    (A 0, B 1, C 2, D 3, E 4, F 5)
    (A 0, B 1, C 2, D 3, E 4, F 5, G 6)
    (A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7, I 8)
}

/// Defines a structure of the protocol, with its fields in their order.
macro_rules! structure {
    ($(#[$about:meta])* $name:ident { $($(#[$what:meta])* $field:ident: $kind:ty),* $(,)? }) => {
        $(#[$about])*
        #[derive(Debug, Clone, PartialEq, Eq)]
        pub(crate) struct $name {
            $($(#[$what])* pub(crate) $field: $kind),*
        }
        impl Put for $name {
            fn put(&self, message: &mut Vec<u8>) {
                $(self.$field.put(message);)*
            }
        }
        impl Take for $name {
            fn take(from: &mut Reader<'_>) -> Result<$name, Garbled> {
                Ok($name { $($field: Take::take(from)?),* })
            }
        }
    };
}
pub(crate) use structure;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_values_are_read_back() {
        let none: Option<&str> = None;
        let bytes = write(&(7u32, -7i32, 1u64 << 40, [9; 16], "abcde", none, Some("x")));
        assert_eq!(bytes.len() % 4, 0);
        type Values = (u32, i32, u64, Uuid, String, Option<String>, Option<String>);
        let mut reader = Reader { bytes: &bytes, at: 0 };
        let read: Values = Take::take(&mut reader).unwrap();
        assert_eq!(read, (7, -7, 1 << 40, [9; 16], "abcde".to_owned(), None, Some("x".to_owned())));
        assert_eq!(reader.at, bytes.len());
    }

    #[test]
    fn no_length_is_trusted() {
        let huge = write(&u32::MAX);
        assert!(matches!(read::<String>(&huge), Err(Garbled::Long { .. })));
        let longer_than_there_is = write(&1000);
        assert!(matches!(read::<String>(&longer_than_there_is), Err(Garbled::Short(4))));
        assert!(matches!(read::<List<u32, 2000>>(&longer_than_there_is), Err(Garbled::Short(4))));
        assert!(matches!(read::<List<u32, 999>>(&longer_than_there_is), Err(Garbled::Long { .. })));
        assert_eq!(read::<Option<String>>(&[0, 0, 0, 2]), Err(Garbled::Flag(2)));
        assert_eq!(read::<String>(&[0, 0, 0, 1, 255, 0, 0, 0]), Err(Garbled::Text));
    }
}
