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

#[test]
fn the_table_names_each_case_once_and_tests_that_exist() {
    let text = fs::read_to_string(path("README.md")).unwrap();
    let table = text.split_once("| Cases | File | Test |").unwrap().1;
    let mut named = Vec::new();
    for row in table.lines().skip(2).map_while(|line| line.strip_prefix("| ")?.strip_suffix(" |")) {
        let [cases, file, test] = row.split(" | ").collect::<Vec<_>>()[..] else { panic!("{row}") };
        named.extend(cases.split('`').skip(1).step_by(2).map(str::to_owned));
        if file != "none" {
            let source = fs::read_to_string(path(file.trim_matches('`'))).unwrap();
            assert!(source.contains(&format!("fn {}(", test.trim_matches('`'))), "{file} has no {test}");
        }
    }
    let mut all = [listed("CASES"), listed("LONG_CASES")].concat();
    assert!(all.len() > 100, "{all:?}");
    all.sort();
    named.sort();
    assert_eq!(named, all);
}
