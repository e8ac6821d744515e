//! Fits the weights of generated operands, head by head: fixed masks shall keep as much attention mass of generated
//! operands as they keep of captured ones.
use super::generator::{PARTS, Weights};
use crate::error::Result;

/// One selector for each of [`PARTS`]: the attention mass that it keeps measures that part. The masks may overlap.
pub(super) const PROBES: [&str; PARTS.len()] = [
    "a_shape:n_init=64,n_local=64",
    "vertical_slash:vertical=64,slash=64",
    "a_shape:n_init=0,n_local=64",
    "vertical_slash:vertical=4,slash=1024",
    "oracle_topk:k=16",
];

/// For one head: the share of dense attention's mass that the mask of each of [`PROBES`] keeps.
pub(super) type Masses = [f64; PARTS.len()];

const ROUNDS: usize = 30;
/// Share of the difference in log odds that a round adds to a weight.
const RATE: f64 = 0.6;
/// Weights of every head before the first round.
const START: Weights = [4.0, 3.0, 4.0, 1.0, 1.0];
const LARGEST_WEIGHT: f64 = 16.0;

/// The weights of the round with the smallest error.
pub(super) struct Fit {
    /// Fitted weights of each head.
    pub(super) weights: Vec<Weights>,
    /// Kept mass of the operands that these weights generate, one entry a head.
    pub(super) masses: Vec<Masses>,
}

/// Moves each weight in every round by how much more or less mass its probe keeps of `target`; returns the round with
/// the smallest error. `measure` gives the masses of the operands that some weights generate.
pub(super) fn fit(target: &[Masses], measure: &mut dyn FnMut(&[Weights]) -> Result<Vec<Masses>>) -> Result<Fit> {
    let mut weights = vec![START; target.len()];
    let mut best: Option<(f64, Fit)> = None;
    for _ in 0..ROUNDS {
        let masses = measure(&weights)?;
        let error = mean_error(target, &masses);
        let next = weights.iter().zip(target).zip(&masses);
        let next: Vec<Weights> = next.map(|((weights, target), now)| moved(weights, target, now)).collect();
        if best.as_ref().is_none_or(|best| error < best.0) {
            let weights = weights.clone();
            best = Some((error, Fit { weights, masses }));
        }
        weights = next;
    }
    Ok(best.expect("a round at least").1)
}

/// The mean absolute difference of two sets of masses, over heads and probes.
pub(super) fn mean_error(target: &[Masses], now: &[Masses]) -> f64 {
    let of_head = |(a, b): (&Masses, &Masses)| -> f64 {
        let parts = a.iter().zip(b);
        parts.map(|(a, b)| (a - b).abs()).sum()
    };
    let sum: f64 = target.iter().zip(now).map(of_head).sum();
    sum / (target.len() * PARTS.len()) as f64
}

/// The weights of the next round: each moves by the difference in log odds of its probe's masses.
fn moved(weights: &Weights, target: &Masses, now: &Masses) -> Weights {
    std::array::from_fn(|part| {
        let odds = |mass: f64| {
            let mass = mass.clamp(1e-3, 1.0 - 1e-3);
            (mass / (1.0 - mass)).ln()
        };
        let step = RATE * (odds(target[part]) - odds(now[part])).clamp(-2.0, 2.0);
        (f64::from(weights[part]) + step).clamp(0.0, LARGEST_WEIGHT) as f32
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Masses of a head whose parts have `keys` keys, seen by probes that overlap as the real ones do.
    fn masses(weights: &Weights) -> Masses {
        let keys = [4.0, 64.0, 60.0, 300.0, 1000.0];
        let part: Vec<f64> = (0..PARTS.len()).map(|at| keys[at] * f64::from(weights[at]).exp()).collect();
        let all = part.iter().sum::<f64>() + 30_000.0; // the mass of all other keys
        let [sinks, lines, local, diagonals, regions] = part[..] else {
            unreachable!("five parts");
        };
        [sinks + local, sinks + lines + local, local, 0.5 * local + diagonals, 0.5 * (sinks + local) + regions]
            .map(|mass| mass / all)
    }

    #[test]
    fn weights_are_found_from_what_overlapping_masks_keep() {
        let wanted = [[7.0, 3.0, 5.0, 2.0, 1.0], [5.0, 4.5, 3.0, 1.0, 2.0]];
        let target: Vec<Masses> = wanted.iter().map(masses).collect();
        let start: Vec<Masses> = [START, START].iter().map(masses).collect();
        assert!(mean_error(&target, &start) > 0.05);
        let mut rounds = 0;
        let found = fit(&target, &mut |weights| {
            rounds += 1;
            Ok(weights.iter().map(masses).collect())
        });
        let found = found.expect("no error");
        assert_eq!(rounds, ROUNDS);
        assert!(mean_error(&target, &found.masses) < 0.005);
        for (found, wanted) in found.weights.iter().zip(&wanted) {
            let near = found.iter().zip(wanted).all(|(a, b)| (a - b).abs() < 0.3);
            assert!(near, "{found:?} {wanted:?}");
        }
    }
}
