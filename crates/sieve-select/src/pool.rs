//! Means of blocks of tokens, and attention logits and probabilities of some rows.

use std::ops::Range;

use sieve_core::Tiles;
use sieve_cpu::{Matrix, MatrixMut, Threads, matmul};

use crate::call::Call;
use crate::keep::softmax;

/// Mean and population variance per channel of each block, `[blocks, head_dim]`.
pub(crate) struct Pooled {
    pub(crate) mean: Vec<f32>,
    pub(crate) variance: Vec<f32>,
}

/// Means of blocks of tokens, `[blocks, head_dim]`; a block is the iterator over its vectors.
pub(crate) fn mean_pool<'x, B>(blocks: impl Iterator<Item = B>, head_dim: usize) -> Vec<f32>
where
    B: Iterator<Item = &'x [f32]>,
{
    let mut means = Vec::new();
    for block in blocks {
        let at = means.len();
        means.resize(at + head_dim, 0.0);
        let mean = &mut means[at..];
        let mut count = 0;
        for x in block {
            count += 1;
            mean.iter_mut().zip(x).for_each(|(mean, &x)| *mean += x);
        }
        let factor = 1.0 / count.max(1) as f32;
        mean.iter_mut().for_each(|mean| *mean *= factor);
    }
    means
}

/// Means and variances of blocks of tokens.
pub(crate) fn mean_and_variance<'x, B>(blocks: impl Iterator<Item = B> + Clone, head_dim: usize) -> Pooled
where
    B: Iterator<Item = &'x [f32]>,
{
    let mean = mean_pool(blocks.clone(), head_dim);
    let mut variance = vec![0.0; mean.len()];
    for ((block, mean), variance) in blocks.zip(mean.chunks_exact(head_dim)).zip(variance.chunks_exact_mut(head_dim)) {
        let mut count = 0;
        for x in block {
            count += 1;
            for ((variance, &mean), &x) in variance.iter_mut().zip(mean).zip(x) {
                *variance += (x - mean) * (x - mean);
            }
        }
        variance.iter_mut().for_each(|v| *v /= count.max(1) as f32);
    }
    Pooled { mean, variance }
}

/// Means of the keys of each key tile, `[key tiles, head_dim]`; slot `i` holds key `key_of(i)`.
pub(crate) fn key_means(call: &Call<'_>, kv_head: usize, tiles: Tiles, key_of: impl Fn(usize) -> usize) -> Vec<f32> {
    let key = |slot| call.key(kv_head, key_of(slot));
    let blocks = (0..tiles.num_key_tiles()).map(|j| tiles.keys(j).map(key));
    mean_pool(blocks, call.shape.head_dim)
}

/// Means of the queries of each query tile, `[query tiles, head_dim]`; slot `i` holds row `row_of(i)` of the call.
pub(crate) fn query_means(call: &Call<'_>, head: usize, tiles: Tiles, row_of: impl Fn(usize) -> usize) -> Vec<f32> {
    let query = |slot| call.query(head, row_of(slot));
    let blocks = (0..tiles.num_query_tiles()).map(|i| tiles.rows(i).map(query));
    mean_pool(blocks, call.shape.head_dim)
}

/// `scale * a b^T`.
///
/// # Shapes
/// - a: `[rows, d]`, b: `[cols, d]`, returns `[rows, cols]`
pub(crate) fn scores(a: &[f32], b: &[f32], d: usize, scale: f32) -> Vec<f32> {
    let (a, b) = (Matrix::new(a, a.len() / d, d), Matrix::new(b, b.len() / d, d));
    products(a, b, scale)
}

/// `scale * a b^T` on one thread, `[rows of a, rows of b]`.
fn products(a: Matrix<'_>, b: Matrix<'_>, scale: f32) -> Vec<f32> {
    let (rows, cols) = (a.num_rows(), b.num_rows());
    let mut out = vec![0.0; rows * cols];
    matmul(Threads::One, scale, a, b.t(), 0.0, MatrixMut::new(&mut out, rows, cols));
    out
}

/// Rows whose probabilities [`for_each_prompt_row`] computes at once.
const CHUNK_ROWS: usize = 64;

/// For each query head of the group, calls `add` with every row of a prompt and the row's causal probabilities. Rows
/// that share a chunk of 64 rows with a NaN are left out.
pub(crate) fn for_each_prompt_row(call: &Call<'_>, kv_head: usize, mut add: impl FnMut(usize, &[f32])) {
    let n = call.shape.num_keys;
    for head in call.group(kv_head) {
        for first in (0..n).step_by(CHUNK_ROWS) {
            let rows = first..(first + CHUNK_ROWS).min(n);
            let cols = rows.end;
            let Some(p) = causal_probabilities(call, head, rows) else {
                continue;
            };
            for (r, row) in p.chunks_exact(cols).enumerate() {
                add(first + r, row);
            }
        }
    }
}

/// Logits of the queries `rows` of a head with the first `keys` keys, `[rows, keys]`.
pub(crate) fn logits(call: &Call<'_>, head: usize, rows: Matrix<'_>, keys: usize) -> Vec<f32> {
    let keys = call.keys(call.kv_head(head), 0..keys);
    products(rows, keys, call.shape.softmax_scale())
}

/// Causal softmax of consecutive rows of a head over keys `0..=last position`, `[rows, last + 1]`; `None` on NaN.
pub(crate) fn causal_probabilities(call: &Call<'_>, head: usize, rows: Range<usize>) -> Option<Vec<f32>> {
    let (context, first) = (call.shape.context(), rows.start);
    let cols = context + rows.end;
    let mut p = logits(call, head, call.queries(head, rows), cols);
    for (r, row) in p.chunks_exact_mut(cols).enumerate() {
        let (seen, future) = row.split_at_mut(context + first + r + 1);
        future.fill(0.0);
        if !softmax(seen) {
            return None;
        }
    }
    Some(p)
}

/// The last `count` rows of a call, or all when there are fewer: the probe of most methods.
pub(crate) fn last_rows(call: &Call<'_>, count: usize) -> Range<usize> {
    call.shape.num_queries.saturating_sub(count)..call.shape.num_queries
}

/// Sums of the attention probabilities of probe rows, per key and per distance from the diagonal.
pub(crate) struct ProbeSums {
    /// Sum of the probabilities of each key, `[num_keys]`.
    pub(crate) column: Vec<f32>,
    /// Sum of the probabilities at each distance (the query's position minus the key's), `[num_keys]`.
    pub(crate) diagonal: Vec<f32>,
}

/// Column and diagonal sums of the causal softmax of some rows, averaged over heads; `None` on NaN.
pub(crate) fn probe_sums(call: &Call<'_>, heads: &[usize], rows: Range<usize>) -> Option<ProbeSums> {
    let n = call.shape.num_keys;
    let mut sums = ProbeSums { column: vec![0.0; n], diagonal: vec![0.0; n] };
    for &head in heads {
        let p = causal_probabilities(call, head, rows.clone())?;
        let cols = call.shape.context() + rows.end;
        for (r, p) in p.chunks_exact(cols).enumerate() {
            let position = call.shape.context() + rows.start + r;
            let seen = &p[..=position];
            for (sum, &p) in sums.column.iter_mut().zip(seen) {
                *sum += p;
            }
            for (sum, &p) in sums.diagonal.iter_mut().zip(seen.iter().rev()) {
                *sum += p;
            }
        }
    }
    if heads.len() > 1 {
        let factor = 1.0 / heads.len() as f32;
        let all = sums.column.iter_mut().chain(&mut sums.diagonal);
        all.for_each(|x| *x *= factor);
    }
    Some(sums)
}

/// Sums of consecutive runs of `block` elements.
pub(crate) fn block_sums(x: &[f32], block: usize) -> Vec<f32> {
    x.chunks(block).map(|x| x.iter().sum()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_data::TestCall;
    use sieve_testing::Random;

    #[test]
    fn a_short_block_is_divided_by_its_own_length() {
        let data = [[2.0, 4.0], [4.0, 8.0], [7.0, 1.0]];
        let blocks = [0..2, 2..3];
        let pooled = mean_and_variance(blocks.iter().map(|b| data[b.clone()].iter().map(|x| &x[..])), 2);
        assert_eq!(pooled.mean, [3.0, 6.0, 7.0, 1.0]);
        assert_eq!(pooled.variance, [1.0, 4.0, 0.0, 0.0]);
    }

    #[test]
    fn probe_sums_add_up_to_the_rows() {
        let data = TestCall::random(&mut Random(3), 50, 90, [2, 1], 8);
        let sums = probe_sums(&data.call(), &[0, 1], 43..50).expect("finite");
        for sums in [sums.column, sums.diagonal] {
            assert!((sums.iter().sum::<f32>() - 7.0).abs() < 1e-4);
        }
    }
}
