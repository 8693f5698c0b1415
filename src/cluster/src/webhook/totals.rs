//! Computes a pod's total of one resource. Pure.
//!
//! Kubernetes' rule (effective requests) adds the containers that run together, including sidecars (init containers
//! that restart). An init container counts together with the sidecars started before it. The pod needs the larger of
//! both totals. The replaced webhook used the plain sum.

use super::quantity::Quantity;

/// Lifetime of a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Life {
    /// As long as the pod.
    App,
    /// Starts before the others, and then runs as long as the pod.
    Sidecar,
    /// Runs before the others, beside only the sidecars before it.
    Init,
}

pub(super) fn sum(needs: impl Iterator<Item = Quantity>) -> Quantity {
    needs.fold(Quantity::ZERO, Quantity::plus)
}

/// Returns the largest need at any time. Init containers and sidecars must be in their order.
pub(super) fn effective(needs: impl Iterator<Item = (Life, Quantity)>) -> Quantity {
    let mut together = Quantity::ZERO;
    let mut sidecars = Quantity::ZERO;
    let mut worst = Quantity::ZERO;
    for (life, need) in needs {
        match life {
            Life::App => together = together.plus(need),
            Life::Sidecar => {
                together = together.plus(need);
                sidecars = sidecars.plus(need);
            }
            Life::Init => worst = worst.max(sidecars.plus(need)),
        }
    }
    worst.max(together)
}

#[cfg(test)]
mod tests {
    use super::Life::*;
    use super::*;

    fn q(whole: u32) -> Quantity {
        whole.to_string().parse().unwrap()
    }

    #[test]
    fn follows_kubernetes_rule() {
        for (needs, expected) in [
            (vec![], 0),
            (vec![(App, 2), (App, 3)], 5),
            (vec![(Init, 7), (App, 2), (App, 3)], 7),
            (vec![(Init, 4), (Init, 4), (App, 5)], 5),
            (vec![(Sidecar, 1), (App, 5)], 6),
            // A sidecar counts beside the init containers after it, not beside those before it.
            (vec![(Init, 6), (Sidecar, 2), (App, 3)], 6),
            (vec![(Sidecar, 2), (Init, 6), (App, 3)], 8),
            (vec![(Sidecar, 2), (Init, 6), (Sidecar, 4), (App, 3)], 9),
        ] {
            let each = needs.iter().map(|(life, need)| (*life, q(*need)));
            assert_eq!(effective(each), q(expected), "{needs:?}");
        }
    }

    #[test]
    fn the_plain_sum_knows_no_order() {
        assert_eq!(sum([q(1), q(2), q(3)].into_iter()), q(6));
    }
}
