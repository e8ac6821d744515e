//! Embedding lookup and its gradient.

use pulp::Simd;
use rayon::prelude::*;

use crate::simd::on_arch;

/// `y[n] = weight[ids[n]]`.
///
/// # Shapes
/// - ids: `[n]`, weight: `[vocab_size, d_model]`, y: `[n, d_model]` (written whole)
///
/// # Panics
/// On an id outside the vocabulary or slices of other lengths.
pub fn embedding_forward<T: Copy + Send + Sync>(ids: &[i32], weight: &[T], d_model: usize, y: &mut [T]) {
    assert_eq!(y.len(), ids.len() * d_model, "embedding_forward: y is not [n, d_model]");
    assert_eq!(weight.len() % d_model, 0, "embedding_forward: weight is not [vocab_size, d_model]");
    let vocab_size = weight.len() / d_model;
    y.par_chunks_mut(d_model)
        .zip(ids)
        .with_min_len(64)
        .for_each(|(row, &id)| row.copy_from_slice(&weight[row_of(id, vocab_size) * d_model..][..d_model]));
}

/// A token id as a row of the table.
fn row_of(id: i32, vocab_size: usize) -> usize {
    let row = usize::try_from(id).ok().filter(|&row| row < vocab_size);
    row.unwrap_or_else(|| panic!("embedding: id {id} is not below {vocab_size}"))
}

/// `dweight[id] = sum of dy[n] over the n with ids[n] == id`, added in ascending n; 0 for ids that do not occur.
///
/// # Shapes
/// - dy: `[n, d_model]`, ids: `[n]`, dweight: `[vocab_size, d_model]` (written whole)
///
/// # Panics
/// On an id outside the vocabulary or slices of other lengths.
pub fn embedding_backward(dy: &[f32], ids: &[i32], d_model: usize, dweight: &mut [f32]) {
    assert_eq!(dy.len(), ids.len() * d_model, "embedding_backward: dy is not [n, d_model]");
    assert_eq!(dweight.len() % d_model, 0, "embedding_backward: dweight is not [vocab_size, d_model]");
    let vocab_size = dweight.len() / d_model;
    let (order, first) = tokens_by_id(ids, vocab_size);
    dweight.par_chunks_mut(d_model).enumerate().with_min_len(16).for_each(|(id, row)| {
        row.fill(0.0);
        let rows = &order[first[id]..first[id + 1]];
        if !rows.is_empty() {
            add_rows(dy, rows, row);
        }
    });
}

/// Sorts the tokens' indices by id, ascending within an id (counting sort). Returns them, and where each id's indices
/// begin among them, `[vocab_size + 1]`.
fn tokens_by_id(ids: &[i32], vocab_size: usize) -> (Vec<usize>, Vec<usize>) {
    let mut first = vec![0_usize; vocab_size + 1];
    for &id in ids {
        first[row_of(id, vocab_size) + 1] += 1;
    }
    for id in 0..vocab_size {
        first[id + 1] += first[id];
    }
    let mut next = first.clone();
    let mut order = vec![0_usize; ids.len()];
    for (token, &id) in ids.iter().enumerate() {
        order[next[id as usize]] = token;
        next[id as usize] += 1;
    }
    (order, first)
}

on_arch! {
    fn add_rows<'a>(dy: &'a [f32], rows: &'a [usize], sum: &'a mut [f32]) -> () = add_rows_simd;
}

/// Adds to `sum` the rows of `dy` with these indices, in their order; a row is as wide as `sum`.
#[inline(always)]
fn add_rows_simd<S: Simd>(_simd: S, dy: &[f32], rows: &[usize], sum: &mut [f32]) {
    let d_model = sum.len();
    for &n in rows {
        for (sum, &g) in sum.iter_mut().zip(&dy[n * d_model..(n + 1) * d_model]) {
            *sum += g;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::tests::on_every_arch;
    use sieve_testing::{Random, assert_close_relative, threads};

    #[test]
    fn rows_are_looked_up_and_their_gradients_added() {
        on_every_arch(|| {
            let mut random = Random(1);
            for (n, d_model, vocab_size) in [(1, 3, 1), (40, 5, 7), (301, 16, 50), (0, 4, 3)] {
                let ids: Vec<i32> = (0..n).map(|_| random.below(vocab_size) as i32).collect();
                let (weight, dy) = (random.vector(vocab_size * d_model), random.vector(n * d_model));
                let mut y = vec![f32::NAN; n * d_model];
                embedding_forward(&ids, &weight, d_model, &mut y);
                let mut dweight = vec![f32::NAN; vocab_size * d_model];
                embedding_backward(&dy, &ids, d_model, &mut dweight);
                let mut expected = vec![0.0; dweight.len()];
                for (row, &id) in ids.iter().enumerate() {
                    for c in 0..d_model {
                        assert_eq!(y[row * d_model + c], weight[id as usize * d_model + c]);
                        expected[id as usize * d_model + c] += f64::from(dy[row * d_model + c]);
                    }
                }
                assert_close_relative("dweight", &dweight, &expected, 1e-5);
            }
        });
    }

    #[test]
    fn threads_do_not_change_a_bit() {
        let mut random = Random(2);
        let ids: Vec<i32> = (0..5000).map(|_| random.below(9) as i32).collect();
        let dy = random.vector(5000 * 8);
        let run = |count| {
            let mut dweight = vec![f32::NAN; 9 * 8];
            threads(count).install(|| embedding_backward(&dy, &ids, 8, &mut dweight));
            dweight
        };
        assert_eq!(run(1), run(3));
    }

    #[test]
    fn an_id_outside_the_vocabulary_is_refused() {
        let backward = || embedding_backward(&[0.0, 0.0], &[1, -1], 1, &mut [0.0; 3]);
        sieve_testing::panics("id -1 is not below 3", backward);
        let forward = || embedding_forward(&[3], &[0.0; 3], 1, &mut [0.0]);
        sieve_testing::panics("id 3 is not below 3", forward);
    }
}
