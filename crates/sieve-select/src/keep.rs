//! Which of a row's scores are kept, by their sum or by number. Sorting is stable, sums are f32 in a fixed order.

use std::cmp::Ordering;

use sieve_cpu::{exp_row, max_of_row};

/// The fewest largest scores whose sum reaches `gamma` times the sum of all; ascending indices.
///
/// Equal scores keep their order, `gamma >= 1` keeps all, and at least one stays.
pub(crate) fn keep_mass(p: &[f32], gamma: f64) -> Vec<usize> {
    keep_mass_forced(p, &[], gamma)
}

/// As [`keep_mass`], but the `forced` indices are kept first and count towards the sum.
pub(crate) fn keep_mass_forced(p: &[f32], forced: &[usize], gamma: f64) -> Vec<usize> {
    if gamma >= 1.0 {
        return (0..p.len()).collect();
    }
    let total: f32 = p.iter().sum();
    let goal = gamma as f32 * total;
    let mut kept = forced.to_vec();
    kept.sort_unstable();
    kept.dedup();
    let mut sum: f32 = kept.iter().map(|&j| p[j]).sum();
    if kept.is_empty() || sum < goal {
        let is_forced = kept.clone();
        for j in falling(p) {
            if is_forced.binary_search(&j).is_ok() {
                continue;
            }
            kept.push(j);
            sum += p[j];
            if sum >= goal {
                break;
            }
        }
    }
    kept.sort_unstable();
    kept
}

/// The `k` largest, ties to the lower index; ascending indices.
pub(crate) fn top_k(scores: &[f32], k: usize) -> Vec<usize> {
    if k >= scores.len() {
        return (0..scores.len()).collect();
    }
    let mut kept = falling(scores);
    kept.truncate(k);
    kept.sort_unstable();
    kept
}

/// As [`top_k`], but forced indices are kept first and count towards `k`; if more than `k` are forced, the
/// lowest `k` of them are kept.
pub(crate) fn top_k_forced(scores: &[f32], k: usize, forced: impl Fn(usize) -> bool) -> Vec<usize> {
    let raised: Vec<f32> =
        scores.iter().enumerate().map(|(j, &score)| if forced(j) { f32::INFINITY } else { score }).collect();
    top_k(&raised, k)
}

/// Indices by falling score, equal ones ascending, NaN last.
pub(crate) fn falling(scores: &[f32]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|&a, &b| descending(scores[a], scores[b]));
    order
}

/// Orders larger numbers first and NaN last; 0 and -0 are equal.
pub(crate) fn descending(a: f32, b: f32) -> Ordering {
    let unordered = || a.is_nan().cmp(&b.is_nan());
    b.partial_cmp(&a).unwrap_or_else(unordered)
}

/// Softmax in place; a row of -inf becomes zeros. False when an element is NaN or +inf: the row then holds no
/// probabilities.
#[must_use]
pub(crate) fn softmax(row: &mut [f32]) -> bool {
    let max = max_of_row(row);
    if max == f32::NEG_INFINITY {
        row.fill(0.0);
        return true;
    }
    if !max.is_finite() {
        return false;
    }
    let sum = exp_row(row, max);
    let factor = 1.0 / sum;
    row.iter_mut().for_each(|x| *x *= factor);
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use sieve_testing::Random;

    #[test]
    fn keep_mass_is_the_shortest_prefix() {
        let mut random = Random(5);
        for _ in 0..2000 {
            let len = 1 + random.below(40);
            // Scores take only six values, so that ties are common.
            let p: Vec<f32> = (0..len).map(|_| random.below(6) as f32 / 4.0).collect();
            let total: f32 = p.iter().sum();
            let gamma = random.below(100) as f64 / 100.0;
            let kept = keep_mass(&p, gamma);
            let sum: f32 = kept.iter().map(|&j| p[j]).sum();
            assert!(!kept.is_empty() && sum >= gamma as f32 * total - 1e-5);
            if kept.len() > 1 {
                let smallest = kept.iter().map(|&j| p[j]).fold(f32::INFINITY, f32::min);
                assert!(sum - smallest < gamma as f32 * total + 1e-5);
                // Of equal scores the lower indices stay.
                for j in 0..len {
                    let dropped = !kept.contains(&j);
                    assert!(!dropped || kept.iter().all(|&i| p[i] > p[j] || (p[i] == p[j] && i < j)));
                }
            }
        }
        assert_eq!(keep_mass(&[0.5, 0.5, 0.0], 1.0), [0, 1, 2]);
        assert_eq!(keep_mass(&[0.0, 0.0], 0.0), [0]);
        assert_eq!(keep_mass(&[0.1, 0.6, 0.3], 0.7), [1, 2]);
    }

    #[test]
    fn forced_scores_are_kept_first_and_count_towards_the_goal() {
        // Unforced, key 3 alone reaches 0.5; here the forced key 0 is kept too, and the sum starts at 0.1.
        let p = [0.1, 0.2, 0.15, 0.55];
        assert_eq!(keep_mass_forced(&p, &[0], 0.5), [0, 3]);
        assert_eq!(keep_mass_forced(&p, &[0], 0.05), [0]);
        assert_eq!(keep_mass_forced(&p, &[3, 0, 0], 0.8), [0, 1, 3]);
        assert_eq!(top_k_forced(&p, 2, |j| j == 0), [0, 3]);
        assert_eq!(top_k_forced(&p, 1, |j| j < 2), [0]);
        assert_eq!(top_k(&[1.0, 2.0, 2.0, 2.0], 2), [1, 2]);
    }

    #[test]
    fn softmax_of_extremes() {
        let mut row = [f32::NEG_INFINITY, 3.0, f32::NEG_INFINITY];
        assert!(softmax(&mut row));
        assert_eq!(row, [0.0, 1.0, 0.0]);
        let mut row = [f32::NEG_INFINITY; 3];
        assert!(softmax(&mut row));
        assert_eq!(row, [0.0; 3]);
        assert!(!softmax(&mut [1.0, f32::NAN]));
        assert!(!softmax(&mut [1.0, f32::INFINITY]));
    }
}
