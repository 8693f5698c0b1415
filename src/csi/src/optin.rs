//! Reads the parameter by which a StorageClass, a PersistentVolume or an inline volume opts in to peer pods. May touch:
//! nothing.

use std::collections::HashMap;

use crate::grpc::{Code, Status};

/// Key in a StorageClass's parameters and a volume's attributes.
pub const KEY: &str = "peerpod";

/// Value of the parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Said {
    /// For peer pods.
    Yes,
    /// Not for peer pods.
    No,
    /// The parameter is missing.
    Nothing,
}

/// Returns the value in these parameters or attributes.
///
/// # Errors
/// INVALID_ARGUMENT for any other value: if "False" counted as yes, a pod would lose its volume.
pub fn said(among: &HashMap<String, String>) -> Result<Said, Status> {
    match among.get(KEY).map(String::as_str) {
        None => Ok(Said::Nothing),
        Some("true" | "1") => Ok(Said::Yes),
        Some("false" | "0") => Ok(Said::No),
        Some(other) => Err(Code::InvalidArgument.status(format!(
            "{KEY}: {other:?} is neither \"true\" nor \"false\"; correct the StorageClass or PersistentVolume"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_true_and_false_are_accepted() {
        let of = |value: &str| said(&HashMap::from([(KEY.to_owned(), value.to_owned())]));
        for (value, meant) in [("true", Said::Yes), ("1", Said::Yes), ("false", Said::No), ("0", Said::No)] {
            assert_eq!(of(value).unwrap(), meant);
        }
        for value in ["", "True", "yes", " true", "2", "TRUE", "on"] {
            let status = of(value).unwrap_err();
            assert_eq!(status.code, Code::InvalidArgument, "{value:?}");
            assert!(status.message.contains(&format!("{value:?}")));
        }
        assert_eq!(said(&HashMap::new()).unwrap(), Said::Nothing);
    }
}
