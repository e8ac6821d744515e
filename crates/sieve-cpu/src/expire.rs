//! DMA's selection as one integer per key (arXiv:2508.02124, eq. 3): when the key expires.
//!
//! Query i keeps the `keep_window_size` keys j <= i of its document with the largest (z_j, j). z_j depends on the key
//! alone, so a key that is no longer among the best never returns, and `active(i, j) <=> j <= i < expire[j]` is the
//! whole mask. A key that was never among the best has `expire[j] == j`: no query sees it.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use rayon::prelude::*;

use crate::attention::Documents;

/// An integer that orders keys by (z, position), with -0 equal to +0. Its lower 32 bits are the position.
pub fn rank_key(z: f32, position: usize) -> u64 {
    // Adding 0 turns -0 into +0. `ordered` orders as z: the bits of a negative f32 fall as it rises.
    let bits = (z + 0.0).to_bits();
    let ordered = if bits >> 31 == 1 { !bits } else { bits | 0x8000_0000 };
    (u64::from(ordered) << 32) | position as u64
}

/// When each key expires, by one heap pass per document.
///
/// # Shapes
/// - z: `[batch, num_kv_heads, seq_len]`; expire: the same, positions within the row, written whole
///
/// With a `keep_window_size` of 0 every key expires at its own position.
///
/// # Panics
/// When lengths do not fit, or the documents are not consecutive ranges.
pub fn dma_select(
    z: &[f32],
    documents: Documents<'_>,
    batch: usize,
    num_kv_heads: usize,
    seq_len: usize,
    keep_window_size: usize,
    expire: &mut [i32],
) {
    assert_eq!(z.len(), batch * num_kv_heads * seq_len, "dma_select: z is not [batch, num_kv_heads, seq_len]");
    assert_eq!(expire.len(), z.len(), "dma_select: expire is not as long as z");
    documents.check(batch, seq_len);
    let mut tasks = Vec::new();
    let heads = z.chunks_exact(seq_len.max(1)).zip(expire.chunks_exact_mut(seq_len.max(1)));
    for (row_and_head, (z, mut expire)) in heads.enumerate() {
        for document in documents.of_row(row_and_head / num_kv_heads, seq_len) {
            let (of_document, rest) = expire.split_at_mut(document.len());
            tasks.push((&z[document.clone()], document.start, of_document));
            expire = rest;
        }
    }
    tasks.into_par_iter().for_each(|(z, start, expire)| expire_by_heap(z, start, keep_window_size, expire));
}

/// Adds a local window: every key expires `local_window_size` = r queries later, at most at its document's end.
///
/// `expire` holds the selection of the best w - r keys. Afterwards query i sees the last r keys and, of the keys before
/// them, the w - r that were the best at query i - r: w keys in all.
///
/// # Shapes
/// - expire: `[batch, num_kv_heads, seq_len]`
///
/// # Panics
/// When lengths do not fit.
pub fn extend_expire(
    expire: &mut [i32],
    documents: Documents<'_>,
    num_kv_heads: usize,
    seq_len: usize,
    local_window_size: usize,
) {
    let local_window_size = i32::try_from(local_window_size).unwrap_or(i32::MAX);
    let heads = expire.chunks_exact_mut(seq_len.max(1));
    for (row_and_head, expire) in heads.enumerate() {
        let end = &documents.end[row_and_head / num_kv_heads * seq_len..][..seq_len];
        for (expire, &end) in expire.iter_mut().zip(end) {
            *expire = expire.saturating_add(local_window_size).min(end);
        }
    }
}

/// The expiry of the keys of one document, which begins at position `start`. The heap holds the kept keys, the smallest
/// on top.
fn expire_by_heap(z: &[f32], start: usize, keep_window_size: usize, expire: &mut [i32]) {
    let end = start + z.len();
    expire.fill(end as i32);
    let mut kept = BinaryHeap::with_capacity(keep_window_size.min(z.len()));
    for (j, &score) in z.iter().enumerate() {
        let key = rank_key(score, j);
        if kept.len() < keep_window_size {
            kept.push(Reverse(key));
            continue;
        }
        let evicted = match kept.peek_mut() {
            Some(mut smallest) if smallest.0 < key => {
                let position = smallest.0 as u32 as usize;
                // Dropping `smallest` restores the heap's order.
                *smallest = Reverse(key);
                position
            }
            // The new key is not among the best.
            _ => j,
        };
        expire[evicted] = (start + j) as i32;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use sieve_testing::{Random, threads};

    /// Per query, the keys kept, by sorting all of its candidates.
    fn kept_by_definition(z: &[f32], start: &[i32], i: usize, keep_window_size: usize) -> Vec<usize> {
        let mut keys: Vec<usize> = (start[i] as usize..=i).collect();
        // `partial_cmp` holds -0 equal to +0; of equal scores the later key comes first.
        keys.sort_by(|&a, &b| z[b].partial_cmp(&z[a]).expect("scores are numbers").then(b.cmp(&a)));
        keys.truncate(keep_window_size);
        keys.sort_unstable();
        keys
    }

    fn kept_by_expire(expire: &[i32], start: &[i32], i: usize) -> Vec<usize> {
        (start[i] as usize..=i).filter(|&j| (i as i32) < expire[j]).collect()
    }

    /// Scores from a few values, both zeros among them, so that most rows have ties.
    fn score(random: &mut Random) -> f32 {
        match random.below(6) {
            0 => -0.0,
            1 => 0.0,
            2 => random.normal(),
            _ => random.below(4) as f32 - 2.0,
        }
    }

    /// Random sizes and documents; half of them with a local window, which is a part of the window or all of it.
    fn check(seed: u64) {
        let mut random = Random(seed);
        let (batch, num_kv_heads, seq_len) = (1 + random.below(3), 1 + random.below(3), 1 + random.below(70));
        let window = 1 + random.below(seq_len + 3);
        let local = random.below(2) * random.below(window + 1);
        let z: Vec<f32> = (0..batch * num_kv_heads * seq_len).map(|_| score(&mut random)).collect();
        let (start, end) = random.documents(batch, seq_len);
        let documents = Documents::new(&start, &end);
        let mut all = vec![-7; z.len()];
        dma_select(&z, documents, batch, num_kv_heads, seq_len, window - local, &mut all);
        if local > 0 {
            extend_expire(&mut all, documents, num_kv_heads, seq_len, local);
        }
        for (at, (z, expire)) in z.chunks(seq_len).zip(all.chunks(seq_len)).enumerate() {
            let row = at / num_kv_heads * seq_len..(at / num_kv_heads + 1) * seq_len;
            let (start, end) = (&start[row.clone()], &end[row]);
            for (j, (&expire, &end)) in expire.iter().zip(end).enumerate() {
                assert!(j as i32 <= expire && expire <= end, "seed {seed}, key {j}");
            }
            for i in 0..seq_len {
                // The last keys, and the best of those before.
                let recent = (i + 1).saturating_sub(local).max(start[i] as usize);
                let mut kept = match recent.checked_sub(1) {
                    Some(last) if last as i32 >= start[i] => kept_by_definition(z, start, last, window - local),
                    _ => Vec::new(),
                };
                kept.extend(recent..=i);
                let found = kept_by_expire(expire, start, i);
                assert_eq!(found, kept, "seed {seed}, local {local}, list {at}, query {i}");
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 3000, failure_persistence: None, ..ProptestConfig::default() })]
        #[test]
        fn every_query_keeps_the_keys_of_the_definition(seed in any::<u64>()) {
            check(seed);
        }
    }

    /// The expiry of the keys of one document.
    fn select(z: &[f32], keep_window_size: usize) -> Vec<i32> {
        let (start, end) = (vec![0; z.len()], vec![z.len() as i32; z.len()]);
        let documents = Documents::new(&start, &end);
        let mut expire = vec![-1; z.len()];
        dma_select(z, documents, 1, 1, z.len(), keep_window_size, &mut expire);
        expire
    }

    #[test]
    fn ties_falling_scores_and_infinities_by_hand() {
        // With equal scores the kept keys are a sliding window.
        let equal: Vec<f32> = (0..40).map(|j| if j % 3 == 0 { -0.0 } else { 0.0 }).collect();
        let window: Vec<i32> = (0..40).map(|j| (j + 7).min(40)).collect();
        assert_eq!(select(&equal, 7), window);
        // With falling scores the first four keys stay, and each later key expires at its own position.
        let falling: Vec<f32> = (0..20).map(|j| -(j as f32)).collect();
        let first: Vec<i32> = (0..20).map(|j| if j < 4 { 20 } else { j }).collect();
        assert_eq!(select(&falling, 4), first);
        let extremes = [f32::NEG_INFINITY, 1.0, f32::INFINITY, -1.0e38, f32::MAX];
        assert_eq!(select(&extremes, 2), [2, 4, 5, 3, 5]);
    }

    #[test]
    fn a_local_window_beyond_32_bits_keeps_every_key_to_its_documents_end() {
        let (start, end) = ([0, 0, 0, 3, 3], [3, 3, 3, 5, 5]);
        let mut expire = [1, 3, 2, 4, 5];
        extend_expire(&mut expire, Documents::new(&start, &end), 1, 5, 1 << 40);
        assert_eq!(expire, end);
    }

    #[test]
    fn threads_do_not_change_the_result() {
        let mut random = Random(3);
        let z = random.vector(2 * 3 * 500);
        let (start, end) = random.documents(2, 500);
        let run = |count| {
            let mut expire = vec![0; z.len()];
            let documents = Documents::new(&start, &end);
            threads(count).install(|| dma_select(&z, documents, 2, 3, 500, 40, &mut expire));
            expire
        };
        assert_eq!(run(1), run(4));
    }

    #[test]
    #[should_panic(expected = "disagree about it")]
    fn documents_that_overlap_are_refused() {
        let documents = Documents::new(&[0, 0, 1], &[2, 2, 3]);
        dma_select(&[0.0; 3], documents, 1, 1, 3, 1, &mut [0; 3]);
    }
}
