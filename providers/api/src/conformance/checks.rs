//! The checks of the suite, one promise each. They end early where a provider does not keep it.

mod creates;
mod deletes;
mod extras;
mod limits;
mod places;

pub use creates::*;
pub use deletes::*;
pub use extras::*;
pub use limits::*;
pub use places::*;

/// Ends the check when something does not hold.
macro_rules! hold {
    ($condition:expr, $($words:tt)+) => {
        if !$condition {
            return Err(crate::conformance::Stop::Broken(format!($($words)+)));
        }
    };
}
use hold;

/// Ends the check because the promise cannot be tried.
fn not_here<T>(why: impl Into<String>) -> Result<T, super::Stop> {
    Err(super::Stop::NotApplicable(why.into()))
}
