//! Drops creates at random instants and repeats them from another provider, as after a restart. (`node.rs` does the same
//! with the real node.)

use std::time::Instant;

use peerpod_provider_api::Provider;
use peerpod_tests::cloud::drop_creates;

use super::common::{Site, TestCloud, key, placed, request, stranger};

/// Creates that measure the time of one.
const MEASURED: u32 = 10;

#[tokio::test(flavor = "multi_thread")]
async fn a_create_dropped_at_a_hundred_random_instants_and_repeated_by_another_process_makes_one_vm() {
    let site = Site::start_together(120);
    let others = site.provider_of(stranger(), &[]);
    others.preflight().await.unwrap();
    let began = Instant::now();
    for number in 0..MEASURED {
        let wish = placed(&*others, &request(&format!("other-{number}"))).await.unwrap();
        others.create(&wish, &key("measured", number)).await.unwrap();
    }
    let longest = began.elapsed() / MEASURED;
    // The instants are before the machine is asked, before and after its claim, and after the user-data.
    let processes = [site.provider(&[]), site.provider(&[])];
    let ours = Pool(&site);
    drop_creates(&ours, processes, longest, |_| {}).await;
    assert_eq!(site.doubles(), 0);
}

/// The machines without those of the measurement.
struct Pool<'s>(&'s Site);

impl TestCloud for Pool<'_> {
    const KIND: &'static str = Site::KIND;

    fn settings(&self) -> Vec<(String, String)> {
        self.0.settings()
    }

    async fn ids(&self) -> Vec<String> {
        self.0.claimed_by("i")
    }

    fn creates(&self) -> usize {
        self.0.creates()
    }

    fn delay_answer(&self) {}

    fn late(&self) -> usize {
        0
    }

    fn heal(&self) {}
}
