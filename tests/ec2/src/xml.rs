//! Reads the subset of XML in moto's answers: values by tag, and the elements of lists, which can be removed or
//! changed. Pure.

/// Returns the text of every element of this name.
pub fn values<'x>(xml: &'x str, tag: &str) -> Vec<&'x str> {
    let (open, close) = (format!("<{tag}>"), format!("</{tag}>"));
    let mut found = Vec::new();
    let mut rest = xml;
    while let Some((_, after)) = rest.split_once(&open) {
        let Some((value, after)) = after.split_once(&close) else { break };
        found.push(value);
        rest = after;
    }
    found
}

/// Returns the text of the first element of this name.
pub fn value<'x>(xml: &'x str, tag: &str) -> Option<&'x str> {
    values(xml, tag).into_iter().next()
}

/// Returns the `<item>`s directly below every element of this name, as byte ranges with their tags.
pub fn items(xml: &str, list: &str) -> Vec<std::ops::Range<usize>> {
    let mut found = Vec::new();
    // The open elements and their start offsets.
    let mut stack: Vec<(&str, usize)> = Vec::new();
    let mut at = 0;
    while let Some(open) = xml[at..].find('<').map(|n| at + n) {
        let Some(end) = xml[open..].find('>').map(|n| open + n) else { break };
        let tag = &xml[open + 1..end];
        at = end + 1;
        if tag.starts_with(['?', '!']) || tag.ends_with('/') {
            continue;
        }
        if let Some(name) = tag.strip_prefix('/') {
            let Some((_, begin)) = stack.pop() else { break };
            if name == "item" && stack.last().is_some_and(|(parent, _)| *parent == list) {
                found.push(begin..at);
            }
        } else {
            stack.push((tag.split_whitespace().next().unwrap_or_default(), open));
        }
    }
    found
}

/// Returns the answer with each item of a list as `change` returns it; `None` removes the item.
pub fn map_items(xml: &str, list: &str, change: impl Fn(&str) -> Option<String>) -> String {
    let mut answer = String::with_capacity(xml.len());
    let mut done = 0;
    for place in items(xml, list) {
        answer.push_str(&xml[done..place.start]);
        if let Some(item) = change(&xml[place.clone()]) {
            answer.push_str(&item);
        }
        done = place.end;
    }
    answer.push_str(&xml[done..]);
    answer
}

/// Escapes text for use in an element.
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    const XML: &str = "<?xml version=\"1.0\"?><R xmlns=\"x\"><set><item><set2><item><id>1</id><tags><item>t</item></tags></item>\
        <item><id>2</id></item></set2></item></set><empty/></R>";

    #[test]
    fn items_are_found_in_their_own_list() {
        let texts: Vec<_> = items(XML, "set2").into_iter().map(|place| &XML[place]).collect();
        assert_eq!(texts, ["<item><id>1</id><tags><item>t</item></tags></item>", "<item><id>2</id></item>"]);
        assert_eq!(items(XML, "set").len(), 1);
        assert_eq!(values(XML, "id"), ["1", "2"]);
    }

    #[test]
    fn items_are_taken_out_and_changed() {
        let answer = map_items(XML, "set2", |item| match value(item, "id") {
            Some("1") => None,
            _ => Some(item.replace('2', "3")),
        });
        assert_eq!(values(&answer, "id"), ["3"]);
        assert!(answer.ends_with("</set2></item></set><empty/></R>"), "{answer}");
    }
}
