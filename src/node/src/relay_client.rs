//! The room `relay_client`.
