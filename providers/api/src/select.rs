//! Picks an instance type.
