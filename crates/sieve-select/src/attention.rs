//! Block-sparse attention on the CPU: computes only what a mask names.

use std::ops::Range;

use rayon::prelude::*;
use sieve_core::KeyMask;
use sieve_cpu::{ListedAttention, ListedTile};

use crate::call::Call;
use crate::error::SelectError;
use crate::mask::{Correction, CorrectionMode, Selected};

/// Result of an attention call.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionOutput {
    /// `[num_queries, num_heads, head_dim]`.
    pub o: Vec<f32>,
    /// Log-sum-exp of the kept logits, `[num_heads, num_queries]`; a correction does not change it.
    pub lse: Vec<f32>,
}

/// Query rows handled together where the caller gives no tiles: rows of the call times heads of the group.
const DENSE_TILE_ROWS: usize = 192;

/// Attention over the kept pairs of a selection, with its dense rows and its correction.
///
/// Work is proportional to the kept pairs. Keys no row of a tile may see are never read. Results do not depend on the
/// number of threads.
///
/// # Errors
/// A mask that breaks a rule of its form or belongs to another call.
pub fn block_sparse_attention(call: &Call<'_>, selected: &Selected) -> Result<AttentionOutput, SelectError> {
    selected.check(call)?;
    let mask = &selected.mask;
    let shape = call.shape;
    let engine = ListedAttention::new(shape.head_dim, shape.softmax_scale());
    let mut tasks: Vec<(usize, usize)> = Vec::new();
    // Later tiles see more keys: they start first.
    for i in (0..mask.tiles.num_query_tiles()).rev() {
        tasks.extend((0..mask.num_lists()).map(|list| (list, i)));
    }
    let results: Vec<TileResult> = tasks
        .into_par_iter()
        .with_max_len(1)
        .map(|(list, i)| sparse_tile(call, mask, &engine, list, i))
        .collect();
    let mut output = AttentionOutput {
        o: vec![0.0; call.q.len()],
        lse: vec![f32::NEG_INFINITY; shape.num_heads * shape.num_queries],
    };
    scatter(call, &results, &mut output);
    if !mask.dense_rows.is_empty() {
        let rows: Vec<usize> = mask.dense_rows.iter().cloned().flatten().collect();
        scatter(call, &dense_tiles(call, &engine, &rows, mask.causal), &mut output);
    }
    if let Some(correction) = &selected.correction {
        correct(mask, correction, &mut output.o);
    }
    Ok(output)
}

/// Dense attention of some rows of the call.
///
/// # Shapes
/// - rows: any rows of the call, `[rows]`
/// - returns o `[rows, num_heads, head_dim]` and lse `[num_heads, rows]`
pub fn dense_rows_attention(call: &Call<'_>, rows: &[usize]) -> AttentionOutput {
    let shape = call.shape;
    let engine = ListedAttention::new(shape.head_dim, shape.softmax_scale());
    let results = dense_tiles(call, &engine, rows, true);
    let mut at = vec![usize::MAX; shape.num_queries];
    for (index, &row) in rows.iter().enumerate() {
        at[row] = index;
    }
    let mut output = AttentionOutput {
        o: vec![0.0; rows.len() * shape.num_heads * shape.head_dim],
        lse: vec![f32::NEG_INFINITY; shape.num_heads * rows.len()],
    };
    let d = shape.head_dim;
    for tile in &results {
        for (r, &(head, row)) in tile.rows.iter().enumerate() {
            let to = (at[row] * shape.num_heads + head) * d;
            output.o[to..to + d].copy_from_slice(&tile.o[r * d..(r + 1) * d]);
            output.lse[head * rows.len() + at[row]] = tile.lse[r];
        }
    }
    output
}

/// Rows of one tile, as (head, row of the call), with their results.
struct TileResult {
    rows: Vec<(usize, usize)>,
    o: Vec<f32>,
    lse: Vec<f32>,
}

/// Keys of one tile as the engine wants them.
#[derive(Default)]
struct KeyList {
    at: Vec<usize>,
    position: Vec<i32>,
    expire: Vec<i32>,
}

impl KeyList {
    fn push(&mut self, call: &Call<'_>, mask: &KeyMask, list: usize, key: usize) {
        let kv_head = call.kv_head(mask.heads_of(list).start);
        self.at.push(call.key_at(kv_head, key));
        self.position.push(if mask.causal { key as i32 } else { i32::MIN });
        self.expire
            .push(if mask.causal { mask.expire(list, key) } else { i32::MAX });
    }
}

fn sparse_tile(call: &Call<'_>, mask: &KeyMask, engine: &ListedAttention, list: usize, i: usize) -> TileResult {
    let context = call.shape.context();
    let rows: Vec<(usize, usize)> = mask
        .tiles
        .rows(i)
        .flat_map(|slot| mask.heads_of(list).map(move |head| (head, slot)))
        .map(|(head, slot)| (head, mask.query_row(head, slot)))
        .filter(|&(_, row)| !mask.is_dense_row(row))
        .collect();
    let first = rows.iter().map(|r| context + r.1).min().unwrap_or(0);
    let last = rows.iter().map(|r| context + r.1).max().unwrap_or(0);
    // A key that no query sees is left out: it may hold NaN.
    let seen = |key: usize| !mask.causal || (key <= last && mask.expire(list, key) as usize > first);
    let mut keys = KeyList::default();
    let order = mask.key_order_of(list);
    for &j in mask.row(list, i) {
        for slot in mask.tiles.keys(j as usize) {
            let key = order.map_or(slot, |order| order[slot] as usize);
            if seen(key) {
                keys.push(call, mask, list, key);
            }
        }
    }
    for &slot in mask.columns(list, i) {
        let key = order.map_or(slot as usize, |order| order[slot as usize] as usize);
        if seen(key) {
            keys.push(call, mask, list, key);
        }
    }
    run(call, engine, rows, &keys)
}

/// Tiles of dense attention over some rows of all heads.
fn dense_tiles(call: &Call<'_>, engine: &ListedAttention, rows: &[usize], causal: bool) -> Vec<TileResult> {
    let tile_tokens = (DENSE_TILE_ROWS / call.shape.group_size()).max(1);
    let tasks: Vec<(usize, &[usize])> = rows
        .chunks(tile_tokens)
        .rev()
        .flat_map(|rows| (0..call.shape.num_kv_heads).map(move |kv_head| (kv_head, rows)))
        .collect();
    tasks
        .into_par_iter()
        .with_max_len(1)
        .map(|(kv_head, rows)| {
            let last = rows.iter().max().map_or(0, |row| call.shape.context() + row);
            let end = if causal { last + 1 } else { call.shape.num_keys };
            let keys = KeyList {
                at: (0..end).map(|key| call.key_at(kv_head, key)).collect(),
                position: (0..end).map(|key| if causal { key as i32 } else { i32::MIN }).collect(),
                expire: vec![i32::MAX; end],
            };
            let rows = rows
                .iter()
                .flat_map(|&row| call.group(kv_head).map(move |head| (head, row)))
                .collect();
            run(call, engine, rows, &keys)
        })
        .collect()
}

fn run(call: &Call<'_>, engine: &ListedAttention, rows: Vec<(usize, usize)>, keys: &KeyList) -> TileResult {
    let context = call.shape.context();
    let query_at: Vec<usize> = rows.iter().map(|r| call.query_at(r.0, r.1)).collect();
    let query_position: Vec<i32> = rows.iter().map(|r| (context + r.1) as i32).collect();
    let mut o = vec![0.0; rows.len() * call.shape.head_dim];
    let mut lse = vec![0.0; rows.len()];
    let tile = ListedTile {
        q: call.q,
        query_at: &query_at,
        query_position: &query_position,
        k: call.k,
        v: call.v,
        key_at: &keys.at,
        key_position: &keys.position,
        key_expire: &keys.expire,
    };
    engine.run(tile, &mut o, &mut lse);
    TileResult { rows, o, lse }
}

fn scatter(call: &Call<'_>, results: &[TileResult], output: &mut AttentionOutput) {
    let d = call.shape.head_dim;
    for tile in results {
        for (r, &(head, row)) in tile.rows.iter().enumerate() {
            let at = call.query_at(head, row);
            output.o[at..at + d].copy_from_slice(&tile.o[r * d..(r + 1) * d]);
            output.lse[head * call.shape.num_queries + row] = tile.lse[r];
        }
    }
}

/// Rows a probe serves: from itself to the next one.
pub(crate) fn probe_window(correction: &Correction, index: usize, num_queries: usize) -> Range<usize> {
    let first = correction.probe_rows[index] as usize;
    let end = correction
        .probe_rows
        .get(index + 1)
        .map_or(num_queries, |&next| next as usize);
    first..end
}

/// Adds what the probes know (MOMO, eq. 3); probe rows become the dense output itself.
fn correct(mask: &KeyMask, correction: &Correction, o: &mut [f32]) {
    if correction.mode == CorrectionMode::SparseOnly {
        return;
    }
    let width = mask.shape.num_heads * mask.shape.head_dim;
    for (index, dense) in correction.probe_o.chunks_exact(width).enumerate() {
        let window = probe_window(correction, index, mask.shape.num_queries);
        let probe = window.start;
        if correction.mode == CorrectionMode::Correct {
            let sparse = o[probe * width..(probe + 1) * width].to_vec();
            // A probe inside the dense rows has no sparse output to compare with; the rows after it keep theirs.
            if !mask.is_dense_row(probe) {
                for row in window.skip(1).filter(|&row| !mask.is_dense_row(row)) {
                    let o = &mut o[row * width..(row + 1) * width];
                    for ((o, &dense), &sparse) in o.iter_mut().zip(dense).zip(&sparse) {
                        *o += dense - sparse;
                    }
                }
            }
        }
        o[probe * width..(probe + 1) * width].copy_from_slice(dense);
    }
}
