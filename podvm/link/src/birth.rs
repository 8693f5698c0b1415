//! What user-data says: format and reader.
