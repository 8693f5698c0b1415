//! Reads the parameter by which a StorageClass, a PersistentVolume or an inline volume opts in to peer pods.

use std::collections::HashMap;

use crate::grpc::{Code, Status};

/// Key in a StorageClass's parameters and a volume's attributes.
pub(crate) const KEY: &str = "peerpod";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OptIn {
    Yes,
    No,
    Unset,
}

/// Returns the value. Any other is INVALID_ARGUMENT: if "False" counted as yes, a pod would lose its volume.
pub(crate) fn read(among: &HashMap<String, String>) -> Result<OptIn, Status> {
    match among.get(KEY).map(String::as_str) {
        None => Ok(OptIn::Unset),
        Some("true" | "1") => Ok(OptIn::Yes),
        Some("false" | "0") => Ok(OptIn::No),
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
        let of = |value: &str| read(&HashMap::from([(KEY.to_owned(), value.to_owned())]));
        for (value, meant) in
            [("true", OptIn::Yes), ("1", OptIn::Yes), ("false", OptIn::No), ("0", OptIn::No)]
        {
            assert_eq!(of(value).unwrap(), meant);
        }
        for value in ["", "True", "yes", " true", "2", "TRUE", "on"] {
            let status = of(value).unwrap_err();
            assert_eq!(status.code, Code::InvalidArgument, "{value:?}");
            assert!(status.message.contains(&format!("{value:?}")));
        }
        assert_eq!(read(&HashMap::new()).unwrap(), OptIn::Unset);
    }
}
