//! The definition of DMA's key lists, on the host, with which the kernels' lists are compared. All positions are inside
//! one row of `seq_len` tokens.
use std::cmp::Reverse;

/// Queries that share one key list; the `SUPER_BLOCK` of the kernels.
pub const SUPER_BLOCK: usize = 1024;

/// The keys of one super-block: first the keys of the super-block itself (the entering keys), from the last to the
/// first, then older keys by descending `expire`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyList {
    /// `[position, expire]` of each key.
    pub entries: Vec<[i32; 2]>,
    /// How many of the entries are entering keys.
    pub num_entering: usize,
}

/// The list of super-block `block` for one row and KV head; `expire[j]` is the first query that no longer sees key j.
pub fn key_list(expire: &[i32], block: usize) -> KeyList {
    let first = block * SUPER_BLOCK;
    let end = (first + SUPER_BLOCK).min(expire.len());
    let entry = |position: usize| [position as i32, expire[position]];
    let entering = (first..end).rev().filter(|&j| expire[j] > j as i32).map(entry);
    let mut entries: Vec<[i32; 2]> = entering.collect();
    let num_entering = entries.len();
    let mut old: Vec<[i32; 2]> = (0..first).filter(|&j| expire[j] > first as i32).map(entry).collect();
    old.sort_by_key(|&[position, expire]| Reverse((expire, position)));
    entries.extend(old);
    KeyList { entries, num_entering }
}

/// The list entries, `[begin, end)`, that queries `first_query..=last_query` may see.
pub fn tile_window(list: &KeyList, first_query: usize, last_query: usize) -> [i32; 2] {
    let (entering, old) = list.entries.split_at(list.num_entering);
    let begin = entering.iter().filter(|[position, _]| *position > last_query as i32).count();
    let alive = old.iter().filter(|[_, expire]| *expire > first_query as i32).count();
    [begin as i32, (list.num_entering + alive) as i32]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dma::lists::tests::expire_of_one_document;

    #[test]
    fn a_tile_window_holds_every_key_that_its_queries_see() {
        let seq_len = 2500_usize;
        // Pseudorandom scores.
        let scores: Vec<f32> = (0..seq_len).map(|i| ((i * 7919) % 1009) as f32).collect();
        let expire = expire_of_one_document(&scores, 300);
        for block in 0..seq_len.div_ceil(SUPER_BLOCK) {
            let list = key_list(&expire, block);
            let last_block_query = ((block + 1) * SUPER_BLOCK).min(seq_len) - 1;
            for first in (block * SUPER_BLOCK..=last_block_query).step_by(64) {
                let last = (first + 63).min(last_block_query);
                let [begin, end] = tile_window(&list, first, last).map(|x| x as usize);
                let window: Vec<i32> = list.entries[begin..end].iter().map(|e| e[0]).collect();
                let active = |j: usize| j <= last && expire[j] > first.max(j) as i32;
                let needed: Vec<usize> = (0..=last).filter(|&j| active(j)).collect();
                assert!(needed.iter().all(|&j| window.contains(&(j as i32))), "block {block} tile {first}");
            }
        }
    }
}
