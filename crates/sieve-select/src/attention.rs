//! Block-sparse attention on the CPU: computes only the pairs that a mask keeps.

use std::ops::Range;

use rayon::prelude::*;
use sieve_core::KeyMask;
use sieve_cpu::{ListedAttention, ListedTile};

use crate::call::Call;
use crate::error::SelectError;
use crate::mask::{Correction, CorrectionMode, Selected, kept_keys};

/// Output and log-sum-exp of an attention call: in f32, or in f64 as the definition gives them, for comparisons.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionOutput<T = f32> {
    /// Attention output, `[num_queries, num_heads, head_dim]`.
    pub o: Vec<T>,
    /// Log-sum-exp of the kept logits, `[num_heads, num_queries]`; a correction does not change it.
    pub lse: Vec<T>,
}

/// Most query vectors in a task of dense rows: rows of the call times query heads of a KV head.
const DENSE_TILE_ROWS: usize = 192;

/// Attention over the kept pairs of a selection. Dense rows see all keys (up to their own, if the mask is causal). Then
/// the correction, if there is one, adjusts rows by the dense outputs of its probe rows.
///
/// Work is proportional to the kept pairs. Keys no row of a tile may see are never read. Results do not depend on the
/// number of threads.
///
/// # Errors
/// A mask that breaks a rule of its form or belongs to another call.
pub fn block_sparse_attention(call: &Call<'_>, selected: &Selected) -> Result<AttentionOutput, SelectError> {
    selected.check(call)?;
    let mask = &selected.mask;
    let dense: Vec<usize> = mask.dense_rows.iter().cloned().flatten().collect();
    let mut tasks = dense_tasks(call, &dense);
    // Later tiles see more keys: they start first.
    for i in (0..mask.tiles.num_query_tiles()).rev() {
        tasks.extend((0..mask.num_lists()).map(|list| Task::Listed(list, i)));
    }
    let mut output = attend(call, mask, tasks);
    if let Some(correction) = &selected.correction {
        correct(mask, correction, &mut output.o);
    }
    Ok(output)
}

/// Dense causal attention of some rows of the call.
///
/// # Shapes
/// - rows: any rows of the call, `[rows]`
/// - returns o `[rows, num_heads, head_dim]`
pub fn dense_rows_attention(call: &Call<'_>, rows: &[usize]) -> Vec<f32> {
    let width = call.shape.num_heads * call.shape.head_dim;
    let all = attend(call, &KeyMask::dense(call.shape), dense_tasks(call, rows)).o;
    rows.iter().flat_map(|row| &all[row * width..][..width]).copied().collect()
}

/// A unit of work: query rows whose attention is computed together.
enum Task<'r> {
    /// A list and a query tile: the tile's rows except dense rows, over the keys that the list keeps.
    Listed(usize, usize),
    /// A KV head and rows of the call: these rows of all its query heads, over all keys (up to the row, if the mask is
    /// causal).
    Dense(usize, &'r [usize]),
}

/// Tasks of at most [`DENSE_TILE_ROWS`] query vectors each. The last rows, which see the most keys, come first.
fn dense_tasks<'r>(call: &Call<'_>, rows: &'r [usize]) -> Vec<Task<'r>> {
    let tile_tokens = (DENSE_TILE_ROWS / call.shape.group_size()).max(1);
    let tiles = rows.chunks(tile_tokens).rev();
    tiles.flat_map(|rows| (0..call.shape.num_kv_heads).map(move |kv_head| Task::Dense(kv_head, rows))).collect()
}

/// Attention of the rows of one task.
struct TaskResult {
    /// Query head and row of the call.
    rows: Vec<(usize, usize)>,
    /// Attention outputs, `[rows, head_dim]`.
    o: Vec<f32>,
    /// Log-sum-exp of the visible logits, `[rows]`.
    lse: Vec<f32>,
}

/// Runs all tasks and puts each row into the output. A row of no task has zeros and a log-sum-exp of -inf.
fn attend(call: &Call<'_>, mask: &KeyMask, tasks: Vec<Task<'_>>) -> AttentionOutput {
    let (shape, d) = (call.shape, call.shape.head_dim);
    let engine = ListedAttention::new(d, shape.softmax_scale());
    // Tasks differ in size, so each is scheduled alone.
    let tasks = tasks.into_par_iter().with_max_len(1);
    let results: Vec<TaskResult> = tasks.map(|task| run_task(call, mask, &engine, &task)).collect();
    let mut output = AttentionOutput {
        o: vec![0.0; call.q.len()],
        lse: vec![f32::NEG_INFINITY; shape.num_heads * shape.num_queries],
    };
    for result in &results {
        for ((&(head, row), o), lse) in result.rows.iter().zip(result.o.chunks_exact(d)).zip(&result.lse) {
            let at = call.query_at(head, row);
            output.o[at..at + d].copy_from_slice(o);
            output.lse[head * shape.num_queries + row] = *lse;
        }
    }
    output
}

/// Attention of the rows of a task. The query at position i sees the keys with `key_position <= i < key_expire`;
/// i32::MIN and i32::MAX set no bound.
fn run_task(call: &Call<'_>, mask: &KeyMask, engine: &ListedAttention, task: &Task<'_>) -> TaskResult {
    let context = call.shape.context();
    let rows: Vec<(usize, usize)> = match *task {
        Task::Listed(list, query_tile) => {
            let slots = mask.tiles.rows(query_tile).flat_map(|slot| mask.heads_of(list).map(move |head| (head, slot)));
            let rows = slots.map(|(head, slot)| (head, mask.query_row(head, slot)));
            rows.filter(|&(_, row)| !mask.is_dense_row(row)).collect()
        }
        Task::Dense(kv_head, rows) => {
            let heads = |&row: &usize| call.group(kv_head).map(move |head| (head, row));
            rows.iter().flat_map(heads).collect()
        }
    };
    let positions = || rows.iter().map(|&(_, row)| context + row);
    let (first, last) = (positions().min().unwrap_or(0), positions().max().unwrap_or(0));
    // Each key with the position from which queries no longer see it.
    let (kv_head, keys): (usize, Vec<(usize, i32)>) = match *task {
        Task::Listed(list, query_tile) => {
            let expire = |key| if mask.causal { mask.expire(list, key) } else { i32::MAX };
            let keys = kept_keys(mask, list, query_tile).map(|key| (key, expire(key)));
            // A key that no query sees is left out: it may hold NaN.
            let seen = |&(key, expire): &(usize, i32)| !mask.causal || (key <= last && expire as usize > first);
            (call.kv_head(mask.heads_of(list).start), keys.filter(seen).collect())
        }
        Task::Dense(kv_head, _) => {
            let end = if mask.causal { last + 1 } else { call.shape.num_keys };
            (kv_head, (0..end).map(|key| (key, i32::MAX)).collect())
        }
    };
    let (mut o, mut lse) = (vec![0.0; rows.len() * call.shape.head_dim], vec![0.0; rows.len()]);
    let position_bound = |key: usize| if mask.causal { key as i32 } else { i32::MIN };
    let tile = ListedTile {
        q: call.q,
        query_at: &rows.iter().map(|&(head, row)| call.query_at(head, row)).collect::<Vec<_>>(),
        query_position: &positions().map(|position| position as i32).collect::<Vec<_>>(),
        k: call.k,
        v: call.v,
        key_at: &keys.iter().map(|&(key, _)| call.key_at(kv_head, key)).collect::<Vec<_>>(),
        key_position: &keys.iter().map(|&(key, _)| position_bound(key)).collect::<Vec<_>>(),
        key_expire: &keys.iter().map(|&(_, expire)| expire).collect::<Vec<_>>(),
    };
    engine.run(tile, &mut o, &mut lse);
    TaskResult { rows, o, lse }
}

/// Rows that a probe corrects: from its own to the one before the next probe.
pub(crate) fn probe_window(correction: &Correction, index: usize, num_queries: usize) -> Range<usize> {
    let first = correction.probe_rows[index] as usize;
    let end = correction.probe_rows.get(index + 1).map_or(num_queries, |&next| next as usize);
    first..end
}

/// Adds each probe's difference of dense and sparse output to the rows after it (MOMO, eq. 3); the probe rows become
/// the dense output.
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
            // A probe among the dense rows has no sparse output to compare with: the rows after it are not corrected.
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
