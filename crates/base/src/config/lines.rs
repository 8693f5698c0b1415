//! Finds the line of a dotted key in YAML text, for messages. The parser in use keeps no positions.
//!
//! It knows block sections, which is how people write settings. A key in braces on one line gets the line of the
//! section around it. The result is a hint: only the number in a message depends on it.

#[derive(Debug, Default)]
pub(super) struct Lines {
    keys: Vec<(String, usize)>,
}

impl Lines {
    pub(super) fn scan(text: &str) -> Lines {
        let mut keys = Vec::new();
        // Sections around the current line: their indentation and path.
        let mut around: Vec<(usize, String)> = Vec::new();
        // Indentation of the key of a `|` or `>` text, until a line is indented no deeper.
        let mut skip_deeper: Option<usize> = None;
        for (number, line) in text.lines().enumerate() {
            let indent = line.len() - line.trim_start_matches(' ').len();
            let rest = line.trim();
            if rest.is_empty() {
                continue;
            }
            match skip_deeper {
                Some(limit) if indent > limit => continue,
                _ => skip_deeper = None,
            }
            if rest.starts_with(['#', '-', '%']) {
                continue;
            }
            let Some((key, value)) = split_key(rest) else { continue };
            while around.last().is_some_and(|(outer, _)| *outer >= indent) {
                around.pop();
            }
            let path = super::node::join(around.last().map_or("", |(_, path)| path.as_str()), key);
            keys.push((path.clone(), number + 1));
            if value.starts_with(['|', '>']) {
                skip_deeper = Some(indent);
            }
            around.push((indent, path));
        }
        Lines { keys }
    }

    /// Returns the line (from 1) of the key, else of the nearest section around it.
    pub(super) fn find(&self, path: &str) -> Option<usize> {
        let mut path = path;
        loop {
            if let Some((_, line)) = self.keys.iter().find(|(key, _)| key == path) {
                return Some(*line);
            }
            path = path.rsplit_once('.')?.0;
        }
    }

    /// Returns the lines of all occurrences of exactly this key.
    pub(super) fn all(&self, path: &str) -> Vec<usize> {
        self.keys.iter().filter(|(key, _)| key == path).map(|(_, line)| *line).collect()
    }
}

fn split_key(line: &str) -> Option<(&str, &str)> {
    if let Some(quote @ ('"' | '\'')) = line.chars().next() {
        let end = line[1..].find(quote)? + 1;
        let value = line[end + 1..].trim_start().strip_prefix(':')?;
        return Some((&line[1..end], value.trim_start()));
    }
    let at = line.find(": ").or_else(|| line.ends_with(':').then(|| line.len() - 1))?;
    Some((line[..at].trim_end(), line[at + 1..].trim_start()))
}
