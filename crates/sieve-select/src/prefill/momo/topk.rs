//! Chooses roughly the k best of a stream of block scores in one pass: MOMO's variants with a gate. The variants
//! without a gate keep exactly the k best (`keep::top_k`).

use crate::keep::descending;

/// Accepts a score that is likely to be among the best `slots` of the remaining stream, if scores are Gaussian with the
/// mean and variance so far.
struct Gate {
    slots: usize,
    count: f64,
    mean: f64,
    /// Sum of squared differences from the mean (Welford).
    m2: f64,
}

impl Gate {
    fn new(slots: usize) -> Self {
        Self { slots, count: 0.0, mean: 0.0, m2: 0.0 }
    }

    /// Whether a score is accepted; `remaining` counts the scores from this one to the end of the stream.
    fn accepts(&mut self, score: f32, remaining: usize) -> bool {
        let score = f64::from(score);
        self.count += 1.0;
        let delta = score - self.mean;
        self.mean += delta / self.count;
        self.m2 += delta * (score - self.mean);
        if self.slots == 0 {
            return false;
        }
        // The share of the remaining scores that the gate must reject.
        let p = 1.0 - self.slots as f64 / remaining as f64;
        let accepted = p <= 0.0 || score > self.mean + (self.m2 / self.count).sqrt() * normal_quantile(p);
        self.slots -= usize::from(accepted);
        accepted
    }
}

/// Roughly the k best, ascending. A buffer holds the `k_exact` best so far (eq. 5); a block that the buffer rejects or
/// evicts goes to a gate, which fills the other `k - k_exact` slots.
pub(crate) fn hybrid(scores: &[f32], k: usize, k_exact: usize) -> Vec<usize> {
    let k_exact = k_exact.min(k);
    let (mut gate, mut best, mut kept) = (Gate::new(k - k_exact), Vec::new(), Vec::new());
    for j in 0..scores.len() {
        best.push(j);
        if best.len() > k_exact {
            // The buffer gives up its smallest score, of equal ones the later.
            best.sort_by(|&a, &b| descending(scores[a], scores[b]).then(a.cmp(&b)));
            kept.extend(best.pop().filter(|&out| gate.accepts(scores[out], scores.len() - j)));
        }
    }
    kept.extend(best);
    kept.sort_unstable();
    kept
}

/// The x below which a standard normal variable stays with probability p (Acklam's rational approximation, 1.2e-9).
fn normal_quantile(p: f64) -> f64 {
    const A: [f64; 6] = [
        -3.969683028665376e1,
        2.209460984245205e2,
        -2.759285104469687e2,
        1.383_577_518_672_69e2,
        -3.066479806614716e1,
        2.506628277459239,
    ];
    const B: [f64; 5] =
        [-5.447609879822406e1, 1.615858368580409e2, -1.556989798598866e2, 6.680131188771972e1, -1.328068155288572e1];
    const C: [f64; 6] = [
        -7.784894002430293e-3,
        -3.223964580411365e-1,
        -2.400758277161838,
        -2.549732539343734,
        4.374664141464968,
        2.938163982698783,
    ];
    const D: [f64; 4] = [7.784695709041462e-3, 3.224671290700398e-1, 2.445134137142996, 3.754408661907416];
    const LOW: f64 = 0.02425;
    let polynomial = |c: &[f64], x: f64| c.iter().fold(0.0, |sum, c| sum * x + c);
    let tail = |p: f64| {
        let x = (-2.0 * p.ln()).sqrt();
        polynomial(&C, x) / (polynomial(&D, x) * x + 1.0)
    };
    if p < LOW {
        tail(p)
    } else if p > 1.0 - LOW {
        -tail(1.0 - p)
    } else {
        let x = p - 0.5;
        let r = x * x;
        polynomial(&A, r) * x / (polynomial(&B, r) * r + 1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keep::top_k;
    use sieve_testing::Random;

    #[test]
    fn momo_hybrid_without_a_gate_keeps_the_best_ties_to_the_lower_index() {
        let mut random = Random(11);
        for _ in 0..2000 {
            let n = 1 + random.below(60);
            let k = 1 + random.below(20);
            let scores: Vec<f32> = (0..n).map(|_| random.below(8) as f32).collect();
            let best = top_k(&scores, k);
            assert_eq!(hybrid(&scores, k, k), best);
        }
        let low = [f32::NEG_INFINITY; 3];
        assert_eq!(hybrid(&low, 2, 2), [0, 1]);
    }

    #[test]
    fn momo_gates_fill_all_slots() {
        let mut random = Random(12);
        for _ in 0..500 {
            let n = 1 + random.below(200);
            let k = 1 + random.below(n);
            let scores = random.vector(n);
            for kept in [hybrid(&scores, k, 0), hybrid(&scores, k, random.below(k + 1))] {
                assert_eq!(kept.len(), k.min(n));
                assert!(kept.windows(2).all(|w| w[0] < w[1]));
            }
        }
        assert!(hybrid(&[1.0, 2.0], 0, 0).is_empty());
    }

    /// The gate finds 0.83 of the best blocks if scores are stationary, and 0.42 if they rise by two deviations along
    /// the row.
    #[test]
    fn momo_hybrid_recall_stationary_and_drifting() {
        let mut random = Random(13);
        let (n, k, trials) = (512, 128, 40);
        let mut recall = |drift: f32| {
            let mut hits = 0;
            for _ in 0..trials {
                let scores: Vec<f32> = (0..n).map(|j| random.normal() + drift * j as f32 / n as f32).collect();
                let best = top_k(&scores, k);
                hits += hybrid(&scores, k, 8).iter().filter(|j| best.contains(j)).count();
            }
            hits as f64 / (trials * k) as f64
        };
        let (stationary, drifting) = (recall(0.0), recall(2.0));
        assert!((0.78..0.9).contains(&stationary), "{stationary}");
        assert!((0.35..0.55).contains(&drifting), "{stationary} {drifting}");
    }

    #[test]
    fn momo_normal_quantile_inverts_the_distribution() {
        for (p, x) in [
            (0.5, 0.0),
            (0.841344746068543, 1.0),
            (0.9772498680518208, 2.0),
            (0.0013498980316301, -3.0),
            (0.99999, 4.264890793922602),
        ] {
            assert!((normal_quantile(p) - x).abs() < 1e-6, "{p}");
        }
    }
}
