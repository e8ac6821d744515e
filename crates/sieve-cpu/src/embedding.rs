//! Embedding lookup and its gradient.

use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

/// `y[n] = weight[ids[n]]`.
///
/// # Shapes
/// - ids: `[n]`, weight: `[vocab_size, d_model]`, y: `[n, d_model]` (written whole)
///
/// # Panics
/// On an id outside the vocabulary or slices of other lengths.
pub fn embedding_forward(ids: &[i32], weight: &[f32], d_model: usize, y: &mut [f32]) {
    assert_eq!(
        y.len(),
        ids.len() * d_model,
        "embedding_forward: y is not [n, d_model]"
    );
    assert_eq!(
        weight.len() % d_model,
        0,
        "embedding_forward: weight is not [vocab_size, d_model]"
    );
    y.par_chunks_mut(d_model)
        .zip(ids)
        .with_min_len(64)
        .for_each(|(row, &id)| {
            let start = id as usize * d_model;
            row.copy_from_slice(&weight[start..start + d_model]);
        });
}

/// `dweight[id] = sum of dy[n] over the n with ids[n] == id`, in ascending n; rows that no id names become zero.
///
/// # Shapes
/// - dy: `[n, d_model]`, ids: `[n]`, dweight: `[vocab_size, d_model]` (written whole)
///
/// # Panics
/// On an id outside the vocabulary or slices of other lengths.
pub fn embedding_backward(dy: &[f32], ids: &[i32], d_model: usize, dweight: &mut [f32]) {
    assert_eq!(
        dy.len(),
        ids.len() * d_model,
        "embedding_backward: dy is not [n, d_model]"
    );
    assert_eq!(
        dweight.len() % d_model,
        0,
        "embedding_backward: dweight is not [vocab_size, d_model]"
    );
    let vocab_size = dweight.len() / d_model;
    // Counting sort: the rows of dy that belong to one id, in order.
    let mut first = vec![0_usize; vocab_size + 1];
    for &id in ids {
        assert!(
            (0..vocab_size as i64).contains(&i64::from(id)),
            "embedding_backward: id {id} is not below {vocab_size}"
        );
        first[id as usize + 1] += 1;
    }
    for id in 0..vocab_size {
        first[id + 1] += first[id];
    }
    let mut next = first.clone();
    let mut order = vec![0_usize; ids.len()];
    for (n, &id) in ids.iter().enumerate() {
        order[next[id as usize]] = n;
        next[id as usize] += 1;
    }
    dweight
        .par_chunks_mut(d_model)
        .enumerate()
        .with_min_len(16)
        .for_each(|(id, row)| {
            row.fill(0.0);
            let rows = &order[first[id]..first[id + 1]];
            if !rows.is_empty() {
                Arch::new().dispatch(AddRows { dy, rows, sum: row });
            }
        });
}

struct AddRows<'a> {
    dy: &'a [f32],
    rows: &'a [usize],
    sum: &'a mut [f32],
}

impl WithSimd for AddRows<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _simd: S) {
        let d_model = self.sum.len();
        for &n in self.rows {
            for (sum, &g) in self
                .sum
                .iter_mut()
                .zip(&self.dy[n * d_model..(n + 1) * d_model])
            {
                *sum += g;
            }
        }
    }
}
