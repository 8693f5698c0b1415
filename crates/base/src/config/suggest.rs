//! "Did you mean": finds the known name nearest to an unknown one.

use strsim::osa_distance;

/// Longest compared name in bytes: the work is quadratic.
const LONGEST: usize = 96;

/// Returns the candidate with the smallest distance from `name`, if it is near enough for a likely typo.
pub(super) fn nearest<'a>(name: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    if name.len() > LONGEST {
        return None;
    }
    let allowed = (name.len() / 3).clamp(1, 4);
    candidates
        .into_iter()
        .filter(|candidate| candidate.len() <= LONGEST)
        .map(|candidate| (osa_distance(name, candidate), candidate))
        .filter(|(distance, _)| *distance <= allowed)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}
