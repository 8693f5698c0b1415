//! Evaluates the filters of lists: equalities, joined by `AND` within alternatives of `OR`.

use serde_json::Value;

use super::check;
use crate::fake::Refused;

/// Returns the items that the filter keeps.
pub(super) fn kept(filter: &str, items: Vec<Value>) -> Result<Vec<Value>, Box<Refused>> {
    if filter.trim().is_empty() {
        return Ok(items);
    }
    let mut alternatives = Vec::new();
    for alternative in filter.split(" OR ") {
        let mut terms = Vec::new();
        for term in alternative.split(" AND ") {
            let Some(term) = equality(term) else { return check::invalid("filter", filter) };
            terms.push(term);
        }
        alternatives.push(terms);
    }
    let fits = |item: &Value| {
        alternatives.iter().any(|terms| terms.iter().all(|(path, value)| field(item, path) == *value))
    };
    Ok(items.into_iter().filter(|item| fits(item)).collect())
}

/// Reads `(labels.a = "b")`.
fn equality(term: &str) -> Option<(Vec<String>, String)> {
    let term = term.trim().trim_start_matches('(').trim_end_matches(')').trim();
    let (path, value) = term.split_once('=')?;
    let (path, value) = (path.trim(), value.trim());
    let is_path = |one: char| one.is_ascii_alphanumeric() || matches!(one, '.' | '_' | '-');
    if path.is_empty() || !path.chars().all(is_path) {
        return None;
    }
    let quoted = value.strip_prefix('"').and_then(|rest| rest.strip_suffix('"'));
    let value = quoted.unwrap_or(value);
    if value.contains(['"', ' ', '(', '!', '<', '>']) {
        return None;
    }
    Some((path.split('.').map(str::to_owned).collect(), value.to_owned()))
}

/// Returns an item's field as text.
fn field(item: &Value, path: &[String]) -> String {
    let found = path.iter().try_fold(item, |value, part| value.get(part));
    match found {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Null) | None => String::new(),
        Some(other) => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_filter_keeps_what_is_equal() {
        let items =
            || vec![json!({"name": "a", "labels": {"x": "1"}}), json!({"name": "b", "labels": {"x": "2"}})];
        let names = |filter: &str| {
            let kept = kept(filter, items()).unwrap();
            kept.iter().map(|item| item["name"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
        };
        assert_eq!(names("(labels.x = \"1\") AND (name = \"a\")"), ["a"]);
        assert_eq!(names("(labels.x = \"1\") AND (name = \"b\")"), Vec::<String>::new());
        assert_eq!(names("(name = \"a\") OR (name = \"b\")"), ["a", "b"]);
        assert_eq!(names("labels.x=2"), ["b"]);
        assert_eq!(names(""), ["a", "b"]);
        assert!(kept("labels.x > 1", items()).is_err() && kept("(name ne a)", items()).is_err());
    }
}
