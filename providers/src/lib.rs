//! The table of providers: one feature and one row each.
