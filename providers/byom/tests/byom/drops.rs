//! Drops creates at random instants and repeats them from another provider, as after a restart. (`node.rs` does the same
//! with the real node.)

use std::time::Duration;

use peerpod_tests::cloud::drop_creates;

use super::common::Site;

#[tokio::test(flavor = "multi_thread")]
async fn a_create_dropped_at_a_hundred_random_instants_and_repeated_by_another_process_makes_one_vm() {
    let site = Site::start_together(110);
    // The instants are before the machine is asked, before and after its claim, and after the user-data.
    let processes = [site.provider(&[]), site.provider(&[])];
    drop_creates(&site, processes, Duration::from_millis(200), |_| {}).await;
    assert_eq!(site.doubles(), 0);
}
