//! Turns the refusals of a cloud into provider errors: class, cause, remedy. A cloud gives a table of its codes. Pure.
//!
//! The HTTP status alone does not determine the class: on EC2 a lack of capacity is a 500, a throttle a 503 and an
//! expired token a 400. One code may have several meanings, which only its text tells apart.

use std::ops::RangeInclusive;
use std::time::Duration;

use peerpod_provider_api::Error;

/// Longest message of the cloud in an error, in characters.
const MAX_MESSAGE: usize = 400;

/// Class of a refusal; see [`Error`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Meaning {
    /// The cloud asks for fewer calls.
    Throttled,
    /// The cloud has none left of this offering.
    Capacity,
    /// A limit of the account is reached.
    Quota,
    /// Credentials or rights are missing.
    Auth,
    /// The request can never work as it is.
    Invalid,
    /// The object does not exist.
    NotFound,
    /// The name or token was used before with another request.
    KeyReused,
    /// A repeated call may work.
    Transient,
}

impl Meaning {
    /// All meanings.
    pub const ALL: [Meaning; 8] = [
        Meaning::Throttled,
        Meaning::Capacity,
        Meaning::Quota,
        Meaning::Auth,
        Meaning::Invalid,
        Meaning::NotFound,
        Meaning::KeyReused,
        Meaning::Transient,
    ];

    /// Builds the error of this class. Only [`Error::Capacity`] uses `offering`, and only [`Error::Throttled`] `after`.
    pub fn error(self, offering: &str, after: Option<Duration>, text: String) -> Error {
        match self {
            Meaning::Throttled => Error::Throttled { after, text },
            Meaning::Capacity => Error::capacity(offering, text),
            Meaning::Quota => Error::Quota { text },
            Meaning::Auth => Error::Auth { text },
            Meaning::Invalid => Error::Invalid { text },
            Meaning::NotFound => Error::NotFound { text },
            Meaning::KeyReused => Error::KeyReused { text },
            Meaning::Transient => Error::Transient { text },
        }
    }
}

/// Row of a table: a refusal that fits all three patterns has this meaning.
#[derive(Debug, Clone)]
pub struct Row {
    /// Code of the cloud; a `*` stands for any text, an empty pattern for any code.
    pub code: &'static str,
    /// Part of the message; a `*` stands for any text, an empty pattern for any message.
    pub part: &'static str,
    /// Statuses of the answer; [`ANY`] for all.
    pub status: RangeInclusive<u16>,
    /// Class of the refusal.
    pub meaning: Meaning,
    /// Advice for people, without a full stop; `{action}` stands for the refused action. Empty: the usual remedy of the
    /// class.
    pub remedy: &'static str,
}

/// All statuses.
pub const ANY: RangeInclusive<u16> = 0..=u16::MAX;

impl Row {
    /// Returns a row for a code, with the usual remedy of its class.
    pub const fn code(code: &'static str, meaning: Meaning) -> Row {
        Row { code, part: "", status: ANY, meaning, remedy: "" }
    }

    /// Returns a row for all codes with these statuses, with the usual remedy of its class.
    pub const fn status(status: RangeInclusive<u16>, meaning: Meaning) -> Row {
        Row { code: "", part: "", status, meaning, remedy: "" }
    }

    /// Returns a row for all codes with this part in their message, with the usual remedy of its class.
    pub const fn part(part: &'static str, meaning: Meaning) -> Row {
        Row { code: "", part, status: ANY, meaning, remedy: "" }
    }

    /// Restricts the row to messages with this part.
    #[must_use]
    pub const fn with(self, part: &'static str) -> Row {
        Row { part, ..self }
    }

    /// Gives the row a remedy of its own.
    #[must_use]
    pub const fn remedy(self, remedy: &'static str) -> Row {
        Row { remedy, ..self }
    }

    fn fits(&self, code: &str, message: &str, status: u16) -> bool {
        is_like(code, self.code)
            && (self.part.is_empty() || is_like(message, &format!("*{}*", self.part)))
            && self.status.contains(&status)
    }
}

/// Refusals of a cloud. The first row that fits counts; [`Meaning::Invalid`] without one.
#[derive(Debug, Clone)]
pub struct Refusals {
    /// Name of the cloud, for errors.
    pub cloud: &'static str,
    /// Rows, the most specific first.
    pub rows: &'static [Row],
    /// Remedy of each class, where a row has none of its own.
    pub usual: fn(Meaning) -> &'static str,
}

impl Refusals {
    /// Returns the class of a refusal.
    pub fn meaning(&self, code: &str, message: &str, status: u16) -> Meaning {
        self.find(code, message, status).map_or(Meaning::Invalid, |row| row.meaning)
    }

    /// Returns the remedy of a refused action.
    pub fn remedy(&self, action: &str, code: &str, message: &str, status: u16) -> String {
        let row = self.find(code, message, status);
        match row.map(|row| row.remedy).filter(|remedy| !remedy.is_empty()) {
            Some(remedy) => remedy.replace("{action}", action),
            None => (self.usual)(row.map_or(Meaning::Invalid, |row| row.meaning)).to_owned(),
        }
    }

    /// Formats a refusal: code, message and remedy.
    pub fn words(&self, action: &str, code: &str, message: &str, status: u16) -> String {
        format!("{code}: {}; {}", clip(message), self.remedy(action, code, message, status))
    }

    /// Returns the error for a refused action. `after` is the pause that the cloud asks for.
    pub fn refused(
        &self,
        action: &str,
        code: &str,
        message: &str,
        status: u16,
        after: Option<Duration>,
    ) -> Error {
        let words = self.words(action, code, message, status);
        let text = format!("{} refused {action}: {words}", self.cloud);
        self.meaning(code, message, status).error("", after, text)
    }

    /// Returns the error for an action without an answer; it may have had its effect.
    pub fn unanswered(&self, action: &str, why: &str) -> Error {
        let cloud = self.cloud;
        Error::transient(format!(
            "no answer from {cloud} to {action}: {}; its effect is unknown, so the same call is repeated; check the \
             route from the node to the {cloud} endpoint",
            clip(why)
        ))
    }

    /// Returns the row of a refusal.
    pub fn find(&self, code: &str, message: &str, status: u16) -> Option<&'static Row> {
        self.rows.iter().find(|row| row.fits(code, message, status))
    }

    /// Checks the table itself, for a test of each cloud.
    ///
    /// # Errors
    /// The rows that an earlier row hides, and the classes without a remedy.
    pub fn check(&self) -> Result<(), String> {
        let mut faults = Vec::new();
        for (number, row) in self.rows.iter().enumerate() {
            let (code, message) = (row.code.replace('*', "x"), row.part.replace('*', "x"));
            let first = self.rows.iter().position(|other| other.fits(&code, &message, *row.status.start()));
            if first != Some(number) {
                faults.push(format!("row {number} ({row:?}) is never used"));
            }
        }
        for meaning in Meaning::ALL.into_iter().filter(|meaning| (self.usual)(*meaning).is_empty()) {
            faults.push(format!("{meaning:?} has no usual remedy"));
        }
        if faults.is_empty() { Ok(()) } else { Err(faults.join("\n")) }
    }
}

/// Whether the text is like the pattern, in which each `*` stands for any text. An empty pattern fits all texts.
fn is_like(text: &str, pattern: &str) -> bool {
    let mut parts = pattern.split('*');
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = text.strip_prefix(first) else { return false };
    let mut last = None;
    for part in parts {
        if let Some(before) = last.replace(part) {
            let Some((_, after)) = rest.split_once(before) else { return false };
            rest = after;
        }
    }
    match last {
        Some(last) => rest.ends_with(last),
        None => pattern.is_empty() || rest.is_empty(),
    }
}

/// Reduces a message to one line of at most 400 characters, without control characters.
pub fn clip(message: &str) -> String {
    let clean: String =
        message.chars().map(|c| if c.is_control() { ' ' } else { c }).take(MAX_MESSAGE).collect();
    clean.trim().trim_end_matches('.').to_owned()
}

/// Merges several errors into one, so that the administrator can fix everything at once. Its class is that of an error
/// that needs the administrator, if there is one.
pub fn together(mut errors: Vec<Error>) -> Error {
    // Errors that resolve by waiting come last, so that they hide no error that needs the administrator.
    errors.sort_by_key(|error| match error.class() {
        "auth" => 0,
        "throttled" | "transient" => 2,
        _ => 1,
    });
    let mut texts: Vec<String> = Vec::new();
    for error in &errors {
        let text = error.to_string();
        if !texts.contains(&text) {
            texts.push(text);
        }
    }
    let text = texts.join("; and ");
    match errors.into_iter().next() {
        Some(Error::Auth { .. }) => Error::Auth { text },
        Some(Error::Quota { .. }) => Error::Quota { text },
        Some(Error::Transient { .. }) => Error::Transient { text },
        Some(Error::Throttled { after, .. }) => Error::Throttled { after, text },
        _ => Error::Invalid { text },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLOUD: Refusals = Refusals {
        cloud: "Cloud",
        rows: &[
            Row::code("NotAllowed", Meaning::Quota).with("Cores quota").remedy("raise the quota"),
            Row::code("NotAllowed", Meaning::Transient).with("is being deleted"),
            Row::code("Denied", Meaning::Auth).remedy("allow cloud:{action}"),
            Row::code("*LimitExceeded", Meaning::Quota),
            Row::part("disk '*' is full", Meaning::Capacity),
            Row::status(500..=599, Meaning::Transient),
        ],
        usual: |meaning| match meaning {
            Meaning::Invalid => "correct the settings",
            _ => "the usual",
        },
    };

    #[test]
    fn the_first_row_that_fits_gives_class_and_remedy() {
        let cases = [
            ("NotAllowed", "exceeds Family Cores quota of 4", 409, "quota", "raise the quota"),
            ("NotAllowed", "the VM is being deleted", 409, "transient", "the usual"),
            ("NotAllowed", "another reason", 409, "invalid", "correct the settings"),
            ("Denied", "no", 403, "auth", "allow cloud:Create"),
            ("VcpuLimitExceeded", "", 500, "quota", "the usual"),
            ("Odd", "the disk 'a' is full now", 400, "capacity", "the usual"),
            ("Odd", "disk is full", 400, "invalid", "correct the settings"),
            ("Odd", "", 503, "transient", "the usual"),
            ("Odd", "", 404, "invalid", "correct the settings"),
        ];
        for (code, message, status, class, remedy) in cases {
            let error = CLOUD.refused("Create", code, message, status, None);
            assert_eq!(error.class(), class, "{code} {message}");
            let text = error.to_string();
            let start = format!("Cloud refused Create: {code}: {message}; ");
            assert!(text.starts_with(&start) && text.ends_with(remedy), "{text}");
        }
        let after = Some(Duration::from_secs(3));
        assert_eq!(
            Meaning::Throttled.error("", after, String::new()),
            Error::Throttled { after, text: String::new() }
        );
    }

    #[test]
    fn a_row_that_is_never_used_is_found() {
        CLOUD.check().unwrap();
        const HIDDEN: &[Row] = &[Row::code("A*", Meaning::Auth), Row::code("AB", Meaning::Quota)];
        let hidden = Refusals { rows: HIDDEN, usual: |_| "", ..CLOUD };
        let faults = hidden.check().unwrap_err();
        assert!(faults.contains("row 1 (") && faults.contains("KeyReused has no usual remedy"), "{faults}");
    }

    #[test]
    fn a_star_stands_for_any_text() {
        for (text, pattern, is) in [
            ("AuthFailure.X", "AuthFailure*", true),
            ("AuthFailure", "AuthFailure*", true),
            ("XAuthFailure", "AuthFailure*", false),
            ("VcpuLimitExceeded", "*LimitExceeded", true),
            ("LimitExceededX", "*LimitExceeded", false),
            ("a-b-c", "a*b*c", true),
            ("a-c-b", "a*b*c", false),
            ("ab", "ab", true),
            ("abc", "ab", false),
            ("any", "", true),
        ] {
            assert_eq!(is_like(text, pattern), is, "{text} like {pattern}");
        }
    }

    #[test]
    fn endless_messages_stay_out() {
        let error = CLOUD.refused("Create", "Odd", &"y\n".repeat(5000), 400, None);
        assert!(error.to_string().len() < 700);
        let error = CLOUD.unanswered("Create", "connection reset.");
        assert_eq!(error.class(), "transient");
        assert!(error.to_string().contains("connection reset; its effect is unknown"), "{error}");
    }

    #[test]
    fn all_missing_facts_are_named_and_user_faults_set_the_class() {
        let errors = vec![
            Error::transient("slow"),
            Error::Auth { text: "may not describe images".into() },
            Error::Auth { text: "may not describe types".into() },
            Error::invalid("bad subnet"),
            Error::invalid("bad subnet"),
        ];
        let one = together(errors);
        assert_eq!(one.class(), "auth");
        let text = "may not describe images; and may not describe types; and bad subnet; and slow";
        assert_eq!(one.to_string(), text);
    }
}
