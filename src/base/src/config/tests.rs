//! The configuration as a person meets it: files, variables, flags, and what is said about them.
