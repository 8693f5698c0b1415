//! Tests that no thread stays in a foreign namespace. It is a test binary of its own, because threads of other tests
//! are in other namespaces meanwhile.

#[path = "podnet/world/mod.rs"]
mod world;

use world::{SHAPE4, World, threads};

#[test]
fn every_thread_is_in_its_first_namespace_afterwards() {
    let before = threads();
    assert_eq!(before.len(), 1, "{before:?}");
    let mut world = World::new();
    let (pod, _seen, held, _plan) = world.whole(SHAPE4);
    world.ping("other", "10.244.1.7", 56);
    let errors = world.undo(&pod, "sandbox", Some(held));
    assert!(errors.is_empty(), "{errors:?}");
    assert_eq!(threads(), before);
}
