//! Drops a create at random instants and repeats it from another provider, as after a restart. One VM must result.
//! (`node.rs` does the same with the real node.)

use super::common;
use std::time::Duration;

use common::{Cloud, key, placed, request};
use peerpod_provider_api::{IdempotencyKey, Provider};
use peerpod_tests::Dice;

#[tokio::test(flavor = "multi_thread")]
async fn a_create_dropped_at_a_hundred_random_instants_and_repeated_by_another_process_makes_one_vm() {
    let cloud = Cloud::start().await;
    cloud.proxy.set_lag(Duration::from_millis(300));
    let before = cloud.provider(&[]);
    before.preflight().await.unwrap();
    let after = cloud.provider(&[]);
    after.preflight().await.unwrap();
    let mut dice = Dice(0x5eed_1234_abcd_0001);
    let mut keys: Vec<IdempotencyKey> = Vec::new();
    for number in 0..100 {
        let wish = placed(&*before, &request(&format!("pod-{number}"))).await.unwrap();
        let key = key("crash", number);
        // A create takes some 60 ms here. The instants are before it is sent, while moto works, while the answer is on
        // its way, and after it.
        let instant = Duration::from_micros(dice.roll(120_000));
        let answer = tokio::time::timeout(instant, before.create(&wish, &key)).await;
        let again = after.create(&wish, &key).await.unwrap();
        if let Ok(Ok(made)) = answer {
            assert_eq!(made.id, again.id);
        }
        keys.push(key);
    }
    cloud.proxy.heal();
    let machines = cloud.machines().await;
    let owned = after.list_owned().await.unwrap();
    for key in &keys {
        assert_eq!(owned.iter().filter(|vm| vm.key.as_ref() == Some(key)).count(), 1, "{key}");
    }
    assert_eq!(machines.len(), keys.len());
}
