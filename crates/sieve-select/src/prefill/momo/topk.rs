//! Choosing the k best of a stream of block scores while it passes: the four variants of MOMO.
//!
//! All give the kept indices, ascending. A score is worse when it is smaller, of equal ones the later.

use std::cmp::Ordering;

use crate::keep::descending;

/// A score and its place in the stream.
type Item = (f32, usize);

/// Worst first: `Less` when `a` is worse than `b`.
fn worse(a: Item, b: Item) -> Ordering {
    descending(b.0, a.0).then(b.1.cmp(&a.1))
}

/// A buffer of the k best with its worst at hand (eq. 5): a new score enters when it is larger than the worst.
struct Buffer {
    items: Vec<Item>,
    capacity: usize,
    worst: usize,
}

impl Buffer {
    fn new(capacity: usize) -> Self {
        Self {
            items: Vec::with_capacity(capacity),
            capacity,
            worst: 0,
        }
    }

    /// What falls out: an earlier item, or the new one; `None` while there is room.
    fn offer(&mut self, item: Item) -> Option<Item> {
        if self.items.len() < self.capacity {
            self.items.push(item);
            self.find_worst();
            return None;
        }
        match self.items.get_mut(self.worst) {
            Some(worst) if item.0 > worst.0 => {
                let out = std::mem::replace(worst, item);
                self.find_worst();
                Some(out)
            }
            _ => Some(item),
        }
    }

    fn find_worst(&mut self) {
        let items = self.items.iter().enumerate();
        self.worst = items.min_by(|a, b| worse(*a.1, *b.1)).map_or(0, |(at, _)| at);
    }
}

/// A running Gaussian that lets a score through when it is likely among the best that are left.
struct Gate {
    slots: usize,
    count: f64,
    mean: f64,
    m2: f64,
}

impl Gate {
    fn new(slots: usize) -> Self {
        Self {
            slots,
            count: 0.0,
            mean: 0.0,
            m2: 0.0,
        }
    }

    /// Whether a score stays; `remaining` scores are left to come, this one included.
    fn accepts(&mut self, score: f32, remaining: usize) -> bool {
        let score = f64::from(score);
        self.count += 1.0;
        let delta = score - self.mean;
        self.mean += delta / self.count;
        self.m2 += delta * (score - self.mean);
        if self.slots == 0 {
            return false;
        }
        let p = 1.0 - self.slots as f64 / remaining as f64;
        let accepted = p <= 0.0 || score > self.mean + (self.m2 / self.count).sqrt() * normal_quantile(p);
        self.slots -= usize::from(accepted);
        accepted
    }
}

/// The k best, by a buffer.
pub(crate) fn exact(scores: &[f32], k: usize) -> Vec<usize> {
    let mut buffer = Buffer::new(k);
    for (j, &score) in scores.iter().enumerate() {
        buffer.offer((score, j));
    }
    ascending(buffer.items.into_iter().map(|item| item.1))
}

/// The k best, by a tournament: node n holds the worse of its two children, and with it the leaf to replace.
pub(crate) fn tree(scores: &[f32], k: usize) -> Vec<usize> {
    if k == 0 {
        return Vec::new();
    }
    let leaves = k.next_power_of_two();
    // Leaves not filled yet are the worst of all, padding leaves the best.
    let empty: Item = (f32::NEG_INFINITY, usize::MAX);
    let mut nodes = vec![(empty, 0); 2 * leaves];
    for (leaf, node) in nodes[leaves..].iter_mut().enumerate() {
        let item = if leaf < k { empty } else { (f32::INFINITY, 0) };
        *node = (item, leaf);
    }
    let play = |nodes: &[(Item, usize)], n: usize| match worse(nodes[2 * n].0, nodes[2 * n + 1].0) {
        Ordering::Greater => nodes[2 * n + 1],
        Ordering::Less | Ordering::Equal => nodes[2 * n],
    };
    for n in (1..leaves).rev() {
        nodes[n] = play(&nodes, n);
    }
    for (j, &score) in scores.iter().enumerate() {
        let root = nodes[1];
        if worse((score, j), root.0) != Ordering::Greater {
            continue;
        }
        let mut n = leaves + root.1;
        nodes[n] = ((score, j), root.1);
        while n > 1 {
            n /= 2;
            nodes[n] = play(&nodes, n);
        }
    }
    let filled = nodes[leaves..leaves + k].iter().map(|node| node.0.1);
    ascending(filled.filter(|&j| j != usize::MAX))
}

/// About the k best, by the Gaussian gate; exactly k of them.
pub(crate) fn gauss(scores: &[f32], k: usize) -> Vec<usize> {
    let mut gate = Gate::new(k);
    let n = scores.len();
    (0..n).filter(|&j| gate.accepts(scores[j], n - j)).collect()
}

/// The `k_exact` best by a buffer; what it refuses or pushes out is offered to a gate with the other slots.
pub(crate) fn hybrid(scores: &[f32], k: usize, k_exact: usize) -> Vec<usize> {
    let mut buffer = Buffer::new(k_exact.min(k));
    let mut gate = Gate::new(k - k_exact.min(k));
    let mut kept = Vec::new();
    for (j, &score) in scores.iter().enumerate() {
        if let Some(out) = buffer.offer((score, j))
            && gate.accepts(out.0, scores.len() - j)
        {
            kept.push(out.1);
        }
    }
    ascending(kept.into_iter().chain(buffer.items.into_iter().map(|item| item.1)))
}

fn ascending(indices: impl Iterator<Item = usize>) -> Vec<usize> {
    let mut indices: Vec<usize> = indices.collect();
    indices.sort_unstable();
    indices
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
    const B: [f64; 5] = [
        -5.447609879822406e1,
        1.615858368580409e2,
        -1.556989798598866e2,
        6.680131188771972e1,
        -1.328068155288572e1,
    ];
    const C: [f64; 6] = [
        -7.784894002430293e-3,
        -3.223964580411365e-1,
        -2.400758277161838,
        -2.549732539343734,
        4.374664141464968,
        2.938163982698783,
    ];
    const D: [f64; 4] = [
        7.784695709041462e-3,
        3.224671290700398e-1,
        2.445134137142996,
        3.754408661907416,
    ];
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
    fn momo_exact_and_tree_keep_the_best_ties_to_the_lower_index() {
        let mut random = Random(11);
        for _ in 0..2000 {
            let n = 1 + random.below(60);
            let k = 1 + random.below(20);
            let scores: Vec<f32> = (0..n).map(|_| random.below(8) as f32).collect();
            let best = top_k(&scores, k);
            assert_eq!(exact(&scores, k), best);
            assert_eq!(tree(&scores, k), best);
            assert_eq!(hybrid(&scores, k, k), best);
        }
        let low = [f32::NEG_INFINITY; 3];
        assert_eq!(exact(&low, 2), [0, 1]);
        assert_eq!(tree(&low, 2), [0, 1]);
    }

    #[test]
    fn momo_gates_fill_all_slots() {
        let mut random = Random(12);
        for _ in 0..500 {
            let n = 1 + random.below(200);
            let k = 1 + random.below(n);
            let scores = random.vector(n);
            for kept in [gauss(&scores, k), hybrid(&scores, k, random.below(k + 1))] {
                assert_eq!(kept.len(), k.min(n));
                assert!(kept.windows(2).all(|w| w[0] < w[1]));
            }
        }
        assert!(gauss(&[1.0, 2.0], 0).is_empty());
    }

    /// What to expect of the gate: 0.83 of the best on stationary scores, 0.42 when they rise by two deviations along
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
