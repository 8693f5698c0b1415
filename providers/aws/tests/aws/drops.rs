//! Drops creates at random instants and repeats them from another provider, as after a restart. (`node.rs` does the same
//! with the real node.)

use std::time::Duration;

use peerpod_tests::cloud::drop_creates;

use super::common::Cloud;

#[tokio::test(flavor = "multi_thread")]
async fn a_create_dropped_at_a_hundred_random_instants_and_repeated_by_another_process_makes_one_vm() {
    let cloud = Cloud::start().await;
    cloud.proxy.set_lag(Duration::from_millis(300));
    // A create takes some 60 ms here. The instants are before it is sent, while moto works, while the answer is on its way,
    // and after it.
    let processes = [cloud.provider(&[]), cloud.provider(&[])];
    drop_creates(&cloud, processes, Duration::from_millis(120), |_| {}).await;
}
