//! Checks of the suite, one promise each. A check ends early when the provider breaks its promise.

mod creates;
mod deletes;
mod extras;
mod limits;
mod places;

pub(crate) use creates::*;
pub(crate) use deletes::*;
pub(crate) use extras::*;
pub(crate) use limits::*;
pub(crate) use places::*;

/// Ends the check when a condition does not hold.
macro_rules! hold {
    ($condition:expr, $($words:tt)+) => {
        if !$condition {
            return Err(crate::conformance::Stop::Broken(format!($($words)+)));
        }
    };
}
use hold;

/// Ends the check because this harness cannot try the promise.
fn not_here<T>(why: impl Into<String>) -> Result<T, super::Stop> {
    Err(super::Stop::NotApplicable(why.into()))
}
