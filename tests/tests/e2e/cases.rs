//! The cases of `tests/kube` that need Kata's programs, and the tests that carry their parts without these.

use std::fs;
use std::path::{Path, PathBuf};

/// Returns the path of a file in the folder of the tests.
fn path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

/// Returns the first strings of the lines of a list in the cases' source.
pub(crate) fn listed(list: &str) -> Vec<String> {
    let text = fs::read_to_string(path("kube/tests/kubernetes/cases.rs")).unwrap();
    let list = text.split_once(&format!("const {list}: ")).unwrap().1.split_once(" = ").unwrap().1;
    let list = list.split_once("];").unwrap().0;
    list.lines().filter_map(|line| Some(line.split_once('"')?.1.split_once('"')?.0.to_owned())).collect()
}

/// Returns the rows of the table with this header.
fn rows(header: &str) -> Vec<[String; 3]> {
    let text = fs::read_to_string(path("README.md")).unwrap();
    let table = text.split_once(header).unwrap().1;
    let rows = table.lines().skip(2).map_while(|line| line.strip_prefix("| ")?.strip_suffix(" |"));
    let cells = |row: &str| row.split(" | ").map(str::to_owned).collect::<Vec<_>>().try_into().unwrap();
    rows.map(cells).collect()
}

/// Returns the words of a cell that are in backquotes.
fn quoted(cell: &str) -> Vec<String> {
    cell.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

fn assert_has(file: PathBuf, tests: &str) {
    let source = fs::read_to_string(&file).unwrap();
    for test in quoted(tests) {
        assert!(source.contains(&format!("fn {test}(")), "{} has no {test}", file.display());
    }
}

#[test]
fn the_table_names_each_case_once_and_tests_that_exist() {
    let mut named = Vec::new();
    for [cases, file, test] in rows("| Cases | File | Test |") {
        named.extend(quoted(&cases));
        if file != "none" {
            assert_has(path(file.trim_matches('`')), &test);
        }
    }
    let mut all = [listed("CASES"), listed("LONG_CASES")].concat();
    assert!(all.len() > 100, "{all:?}");
    all.sort();
    named.sort();
    assert_eq!(named, all);
}

#[test]
fn the_hostile_set_names_tests_that_exist() {
    let rows = rows("| Theme | File | Tests |");
    assert!(rows.len() > 20, "{rows:?}");
    for [_, file, tests] in rows {
        assert_has(path("..").join(file.trim_matches('`')), &tests);
    }
}
