//! List of promises, in reading order. It is the only such list: tests, the command and its table are all made from it.

use std::fmt::Write;
use std::sync::Arc;

use futures_util::future::BoxFuture;

use super::{Checked, Stop, Trial, checks};

/// Passes the names of all promises to another macro.
#[doc(hidden)]
#[macro_export]
macro_rules! conformance_promises {
    ($then:ident, $($arguments:tt)*) => {
        $crate::$then! {
            [$($arguments)*]
            the_provider_says_what_it_can_do,
            preflight_finds_everything_and_makes_nothing,
            a_repeated_create_finds_the_same_vm,
            creates_with_one_key_at_once_make_one_vm,
            a_key_with_another_request_is_refused,
            a_create_dropped_at_any_time_and_repeated_makes_one_vm,
            a_create_dropped_and_forgotten_is_listed,
            another_process_finds_what_was_made,
            a_late_refusal_leaves_nothing_but_what_is_being_deleted,
            a_key_whose_vm_is_being_deleted_gives_no_dying_vm,
            a_second_delete_is_fine,
            a_delete_of_something_unknown_is_fine,
            a_delete_dropped_at_any_time_and_repeated_leaves_nothing,
            a_deleted_vm_has_no_addresses,
            only_our_vms_are_listed,
            a_vm_of_another_owner_survives_our_calls,
            a_list_with_an_unread_page_is_an_error,
            many_creates_at_once_all_succeed,
            a_batch_is_as_many_vms_as_it_says,
            a_recorded_place_is_kept,
            who_only_collects_lists_and_deletes,
            what_cannot_be_done_is_refused_not_dropped,
            errors_have_their_class_and_show_no_user_data,
            calls_end_at_their_deadline,
            user_data_arrives_byte_for_byte,
            user_data_of_the_stated_limit_arrives,
            user_data_over_the_limit_is_refused_before_any_call,
            an_attached_disk_keeps_its_identity,
            a_detach_of_nothing_is_fine,
            the_console_is_there_if_it_is_promised,
        }
    };
}

/// One promise of every provider.
pub struct Promise {
    /// Sentence with underscores.
    pub name: &'static str,
    pub(super) check: fn(Arc<Trial>) -> BoxFuture<'static, Checked>,
}

impl Promise {
    /// Returns the sentence with spaces.
    pub fn words(&self) -> String {
        self.name.replace('_', " ")
    }
}

#[doc(hidden)]
#[macro_export]
macro_rules! conformance_table {
    ([] $($name:ident,)*) => {
        /// All promises.
        pub const PROMISES: &[Promise] = &[
            $(Promise { name: stringify!($name), check: |trial| Box::pin(checks::$name(trial)) },)*
        ];
    };
}
crate::conformance_promises!(conformance_table,);

/// Returns the promise of this name.
///
/// # Panics
/// When no promise has this name.
pub fn promise(name: &str) -> &'static Promise {
    let found = PROMISES.iter().find(|promise| promise.name == name);
    found.unwrap_or_else(|| panic!("there is no promise `{name}`"))
}

/// Returns the result as one word.
pub fn word(result: &Checked) -> &'static str {
    match result {
        Ok(()) => "kept",
        Err(Stop::Broken(_)) => "BROKEN",
        Err(Stop::NotApplicable(_)) => "n/a",
    }
}

/// Formats a human-readable table: one line per promise, the reason why one is broken or could not be tried, and the
/// sums.
pub fn table(results: &[(&Promise, Checked)]) -> String {
    let mut table = String::new();
    for (promise, result) in results {
        let why = match result {
            Ok(()) => String::new(),
            Err(Stop::Broken(why) | Stop::NotApplicable(why)) => format!(": {why}"),
        };
        writeln!(table, "{:7} {}{why}", word(result), promise.words()).expect("a String takes everything");
    }
    let number = |wanted| results.iter().filter(|(_, result)| word(result) == wanted).count();
    let (kept, broken, not) = (number("kept"), number("BROKEN"), number("n/a"));
    writeln!(table, "{kept} kept, {broken} broken, {not} not applicable").expect("a String takes everything");
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_shows_each_result() {
        let results = [
            (promise("a_second_delete_is_fine"), Ok(())),
            (promise("only_our_vms_are_listed"), Err(Stop::Broken("two".into()))),
            (promise("a_detach_of_nothing_is_fine"), Err(Stop::NotApplicable("no disk".into()))),
        ];
        let table = table(&results);
        let lines: Vec<_> = table.lines().collect();
        assert_eq!(
            lines,
            [
                "kept    a second delete is fine",
                "BROKEN  only our vms are listed: two",
                "n/a     a detach of nothing is fine: no disk",
                "1 kept, 1 broken, 1 not applicable",
            ]
        );
    }
}
