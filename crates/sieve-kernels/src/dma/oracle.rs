//! DMA's selection by its definition, on the host: what the kernels are checked against.
//!
//! All positions are inside one row of `seq_len` tokens; `doc_start[i]` and `doc_end[i]` are the first position of token
//! i's document and one past its last.
use sieve_core::DmaWindow;
use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

/// Queries that share one key list; the `SUPER_BLOCK` of the kernels.
pub const SUPER_BLOCK: usize = 1024;

/// A key in the order of the selection: by score, ties to the more recent key, -0 equal to +0.
#[derive(Debug, Clone, Copy)]
struct Ranked {
    score: f32,
    position: usize,
}

impl PartialEq for Ranked {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Ranked {}

impl PartialOrd for Ranked {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Ranked {
    fn cmp(&self, other: &Self) -> Ordering {
        // Adding +0 turns -0 into +0 and leaves every other number alone.
        let scores = (self.score + 0.0).total_cmp(&(other.score + 0.0));
        scores.then(self.position.cmp(&other.position))
    }
}

/// `expire` of one row and KV head: `active(i, j)` holds exactly when `j <= i < expire[j]`. One heap of at most w - r keys
/// (w = keep_window_size, r = local_window_size), emptied at each document. The key that the arrival of key t pops, which
/// may be t itself, is seen for r queries more, within its document: `expire = min(t + r, doc_end)`.
pub fn expire(scores: &[f32], doc_start: &[i32], doc_end: &[i32], window: DmaWindow) -> Vec<i32> {
    let mut expire = doc_end.to_vec();
    let mut kept = BinaryHeap::new();
    for (position, &score) in scores.iter().enumerate() {
        if doc_start[position] as usize == position {
            kept.clear();
        }
        kept.push(Reverse(Ranked { score, position }));
        if kept.len() > window.num_ranked()
            && let Some(Reverse(popped)) = kept.pop()
        {
            let end = position + window.local_window_size;
            expire[popped.position] = doc_end[position].min(end as i32);
        }
    }
    expire
}

/// The keys of one super-block: `{position, expire}`, those entering in the block latest first, then the older ones
/// longest-lived first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyList {
    /// The entries.
    pub entries: Vec<[i32; 2]>,
    /// How many of them enter in the block.
    pub num_entering: usize,
}

/// The list of super-block `block` for one row and KV head.
pub fn key_list(expire: &[i32], block: usize) -> KeyList {
    let first = block * SUPER_BLOCK;
    let end = (first + SUPER_BLOCK).min(expire.len());
    let entry = |position: usize| [position as i32, expire[position]];
    let entering = (first..end)
        .rev()
        .filter(|&j| expire[j] > j as i32)
        .map(entry);
    let mut entries: Vec<[i32; 2]> = entering.collect();
    let num_entering = entries.len();
    let mut old: Vec<[i32; 2]> = (0..first)
        .filter(|&j| expire[j] > first as i32)
        .map(entry)
        .collect();
    old.sort_by_key(|&[position, expire]| Reverse((expire, position)));
    entries.extend(old);
    KeyList {
        entries,
        num_entering,
    }
}

/// The window `[begin, end)` of a list that holds every key queries `first_query..=last_query` may see.
pub fn tile_window(list: &KeyList, first_query: usize, last_query: usize) -> [i32; 2] {
    let (entering, old) = list.entries.split_at(list.num_entering);
    let begin = entering
        .iter()
        .filter(|[position, _]| *position > last_query as i32)
        .count();
    let alive = old
        .iter()
        .filter(|[_, expire]| *expire > first_query as i32)
        .count();
    [begin as i32, (list.num_entering + alive) as i32]
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Rows of a few documents with many ties, and windows with a local part of any size.
    fn rows() -> impl Strategy<Value = (Vec<f32>, Vec<i32>, Vec<i32>, DmaWindow)> {
        let documents = prop::collection::vec(1usize..40, 1..6);
        let score = prop::sample::select(vec![-1.0f32, -0.0, 0.0, 0.5, 1.0, 2.0]);
        let windows = (1usize..30).prop_flat_map(|kept| {
            (0..=kept).prop_map(move |local| DmaWindow {
                keep_window_size: kept,
                local_window_size: local,
            })
        });
        (documents, windows).prop_flat_map(move |(lengths, window)| {
            let total: usize = lengths.iter().sum();
            prop::collection::vec(score.clone(), total).prop_map(move |scores| {
                let (mut starts, mut ends, mut at) = (vec![], vec![], 0);
                for &length in &lengths {
                    starts.extend(vec![at as i32; length]);
                    at += length;
                    ends.extend(vec![at as i32; length]);
                }
                (scores, starts, ends, window)
            })
        })
    }

    proptest! {
        #[test]
        fn expire_is_the_local_window_and_the_best_of_the_older_keys((scores, starts, ends, window) in rows()) {
            let expire = expire(&scores, &starts, &ends, window);
            for (i, &start) in starts.iter().enumerate() {
                let local = (i + 1).saturating_sub(window.local_window_size).max(start as usize);
                let mut keys: Vec<usize> = (start as usize..local).collect();
                // -0 and +0 compare equal here; the later key of equals comes first.
                keys.sort_by(|&a, &b| scores[b].partial_cmp(&scores[a]).expect("no NaN").then(b.cmp(&a)));
                keys.truncate(window.num_ranked());
                keys.extend(local..=i);
                for (j, &expire) in expire.iter().enumerate() {
                    let active = j <= i && (i as i32) < expire;
                    prop_assert_eq!(active, keys.contains(&j), "query {} key {} expire {}", i, j, expire);
                }
            }
        }
    }

    #[test]
    fn equal_scores_are_a_sliding_window() {
        let expire = expire(&[0.0; 10], &[0; 10], &[10; 10], 4.into());
        assert_eq!(expire, [4, 5, 6, 7, 8, 9, 10, 10, 10, 10]);
    }

    #[test]
    fn a_tile_window_holds_every_active_key_of_its_queries() {
        let seq_len = 2500;
        // A fixed scrambled sequence: independent enough, the same everywhere.
        let scores: Vec<f32> = (0..seq_len).map(|i| ((i * 7919) % 1009) as f32).collect();
        let (starts, ends) = (vec![0; seq_len], vec![seq_len as i32; seq_len]);
        let expire = expire(&scores, &starts, &ends, 300.into());
        for block in 0..seq_len.div_ceil(SUPER_BLOCK) {
            let list = key_list(&expire, block);
            let last_block_query = ((block + 1) * SUPER_BLOCK).min(seq_len) - 1;
            for first in (block * SUPER_BLOCK..=last_block_query).step_by(64) {
                let last = (first + 63).min(last_block_query);
                let [begin, end] = tile_window(&list, first, last).map(|x| x as usize);
                let window: Vec<i32> = list.entries[begin..end].iter().map(|e| e[0]).collect();
                let active = |j: usize| j <= last && expire[j] > first.max(j) as i32;
                let needed: Vec<usize> = (0..=last).filter(|&j| active(j)).collect();
                assert!(
                    needed.iter().all(|&j| window.contains(&(j as i32))),
                    "block {block} tile {first}"
                );
            }
        }
    }
}
