//! Output projection and cross entropy in one function, in chunks of rows: the logits of all rows never exist at once.

use pulp::Simd;
use rayon::prelude::*;

use crate::gemm::{Matrix, MatrixMut, Threads, matmul};
use crate::linear::{MAX_COLUMN_ROWS, Weight, linear};
use crate::simd::{exp_and_sum, on_arch};

/// Labels below 0 (Hugging Face's -100) are ignored: no loss, no gradient.
const FIRST_LABEL: i32 = 0;

/// Logits of a chunk, in elements (64 MiB). Every chunk reads the whole weight and updates its whole gradient, so
/// smaller chunks would be slow with a large vocabulary.
const MAX_LOGITS: usize = 1 << 24;

/// Fewest and most rows of a chunk; the last chunk may have fewer.
const MIN_CHUNK_ROWS: usize = 32;
const MAX_CHUNK_ROWS: usize = 1024;

/// The labelled rows are gathered first where at least one row in `MIN_UNLABELLED` has no label.
const MIN_UNLABELLED: usize = 8;

/// With fewer rows than this the `gemm` crate runs other code, which rounds differently.
const MIN_PRODUCT_ROWS: usize = 8;

/// Most rows of logits that exist at once for `n` rows of h: a chunk's, with those that [`linear`] copies.
pub fn logit_rows(vocab_size: usize, n: usize) -> usize {
    let rows = chunk_rows(vocab_size).min(n);
    if rows <= MAX_COLUMN_ROWS { 2 * rows } else { rows }
}

/// Maximum number of rows in a chunk.
fn chunk_rows(vocab_size: usize) -> usize {
    (MAX_LOGITS / vocab_size.max(1)).clamp(MIN_CHUNK_ROWS, MAX_CHUNK_ROWS)
}

/// Sums over the rows that have a label.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CrossEntropy {
    /// Sum of `lse - logit[label]`, in nats.
    pub loss_sum: f64,
    /// Number of rows with a label.
    pub num_labels: usize,
}

/// Loss of `logits = h weight^T` against the labels.
///
/// # Shapes
/// - h: `[n, d_model]`, weight: `[vocab_size, d_model]`, labels: `[n]` (negative: ignored)
///
/// # Panics
/// When lengths do not fit or a label is not below vocab_size.
pub fn linear_cross_entropy(h: &[f32], weight: Weight<'_>, labels: &[i32], d_model: usize) -> CrossEntropy {
    let (gradients, nll) = (None, None);
    run(h, weight, labels, d_model, gradients, nll)
}

/// As [`linear_cross_entropy`] with the loss of every row: `nll[n] = lse - logit[label]`, 0 where ignored.
///
/// # Shapes
/// - h: `[n, d_model]`, weight: `[vocab_size, d_model]`, labels, nll: `[n]`
///
/// # Panics
/// When lengths do not fit or a label is not below vocab_size.
pub fn token_losses(h: &[f32], weight: Weight<'_>, labels: &[i32], d_model: usize, nll: &mut [f32]) -> CrossEntropy {
    assert_eq!(nll.len(), labels.len(), "token_losses: nll is not [n]");
    let gradients = None;
    run(h, weight, labels, d_model, gradients, Some(nll))
}

/// `lse - logit[label]` of one row of logits, equal to the bit to what [`token_losses`] gives for this row.
///
/// # Panics
/// When the label is not below the number of logits.
pub fn token_loss(logits: &[f32], label: u32) -> f32 {
    let label = i32::try_from(label).expect("a label below the number of logits");
    let with_gradient = false;
    let loss = row_loss(&mut logits.to_vec(), label, with_gradient);
    loss.expect("the row has a label") as f32
}

/// Loss and gradients in one pass, which saves one of four GEMMs. They are the gradients of `loss_sum`; multiply them
/// by `1 / num_labels` for the gradients of the mean.
///
/// # Shapes
/// - h, dh: `[n, d_model]`, weight, dweight: `[vocab_size, d_model]`, labels: `[n]`; dh and dweight are written whole
///
/// # Panics
/// When lengths do not fit or a label is not below vocab_size.
pub fn linear_cross_entropy_with_gradients(
    h: &[f32],
    weight: &[f32],
    labels: &[i32],
    d_model: usize,
    dh: &mut [f32],
    dweight: &mut [f32],
) -> CrossEntropy {
    assert_eq!(dh.len(), h.len(), "linear_cross_entropy_with_gradients: dh is not as long as h");
    assert_eq!(dweight.len(), weight.len(), "linear_cross_entropy_with_gradients: dweight is not as long as weight");
    let gradients = Gradients { weight, dh, dweight };
    let nll = None;
    run(h, Weight::F32(weight), labels, d_model, Some(gradients), nll)
}

/// The tensors that receive the gradients.
struct Gradients<'a> {
    /// The weight in f32, which the gradients need.
    weight: &'a [f32],
    dh: &'a mut [f32],
    dweight: &'a mut [f32],
}

/// The loss, chunk by chunk. Also writes the gradients, and the loss of every row to `nll`, unless they are `None`.
fn run(
    h: &[f32],
    weight: Weight<'_>,
    labels: &[i32],
    d_model: usize,
    mut gradients: Option<Gradients<'_>>,
    mut nll: Option<&mut [f32]>,
) -> CrossEntropy {
    assert!(
        d_model > 0 && weight.len().is_multiple_of(d_model),
        "linear_cross_entropy: weight is not [vocab_size, {d_model}]"
    );
    assert_eq!(h.len(), labels.len() * d_model, "linear_cross_entropy: h is not [n, d_model]");
    let vocab_size = weight.len() / d_model;
    for &label in labels {
        assert!(i64::from(label) < vocab_size as i64, "linear_cross_entropy: label {label} is not below {vocab_size}");
    }
    let labelled = labels.iter().filter(|&&label| label >= FIRST_LABEL).count();
    // Rows without a label have no loss and no gradient. Where many rows have none, the labelled rows are copied out
    // and computed alone, unless they are so few that their GEMM would round differently.
    let is_worth_it = (labels.len() - labelled) * MIN_UNLABELLED >= labels.len();
    if is_worth_it && labelled < labels.len() && (labelled == 0 || labelled >= MIN_PRODUCT_ROWS) {
        return run_labelled(h, weight, labels, d_model, gradients, nll);
    }
    let chunk_rows = chunk_rows(vocab_size);
    let mut logits = vec![0.0; chunk_rows.min(labels.len()) * vocab_size];
    let mut total = CrossEntropy { loss_sum: 0.0, num_labels: 0 };
    // Without rows there is no chunk that would write the weight's gradient.
    if labels.is_empty()
        && let Some(gradients) = &mut gradients
    {
        gradients.dweight.fill(0.0);
    }
    for (chunk, labels) in labels.chunks(chunk_rows).enumerate() {
        let (first_row, rows) = (chunk * chunk_rows, labels.len());
        let h = &h[first_row * d_model..(first_row + rows) * d_model];
        let logits = &mut logits[..rows * vocab_size];
        linear(h, weight, [rows, d_model, vocab_size], logits);
        let with_gradient = gradients.is_some();
        let losses: Vec<Option<f64>> = logits
            .par_chunks_mut(vocab_size)
            .zip(labels)
            .map(|(row, &label)| row_loss(row, label, with_gradient))
            .collect();
        for (row, loss) in losses.iter().enumerate() {
            let loss_of_row = loss.unwrap_or(0.0);
            total.loss_sum += loss_of_row;
            total.num_labels += usize::from(loss.is_some());
            if let Some(nll) = &mut nll {
                nll[first_row + row] = loss_of_row as f32;
            }
        }
        if let Some(Gradients { weight, dh, dweight }) = &mut gradients {
            let (h, w) = (Matrix::new(h, rows, d_model), Matrix::new(weight, vocab_size, d_model));
            let d_logits = Matrix::new(logits, rows, vocab_size);
            let dh = MatrixMut::new(&mut dh[first_row * d_model..(first_row + rows) * d_model], rows, d_model);
            matmul(Threads::All, 1.0, d_logits, w, 0.0, dh);
            // The first chunk overwrites the weight's gradient, the later ones add to it.
            let beta = if chunk == 0 { 0.0 } else { 1.0 };
            matmul(Threads::All, 1.0, d_logits.t(), h, beta, MatrixMut::new(dweight, vocab_size, d_model));
        }
    }
    total
}

/// As [`run`], for the rows with a label alone: gathers them and scatters their results, so that rows without a label
/// cost no GEMM.
fn run_labelled(
    h: &[f32],
    weight: Weight<'_>,
    labels: &[i32],
    d_model: usize,
    gradients: Option<Gradients<'_>>,
    nll: Option<&mut [f32]>,
) -> CrossEntropy {
    let rows: Vec<usize> = (0..labels.len()).filter(|&row| labels[row] >= FIRST_LABEL).collect();
    let labels: Vec<i32> = rows.iter().map(|&row| labels[row]).collect();
    let mut gathered = Vec::with_capacity(rows.len() * d_model);
    for &row in &rows {
        gathered.extend_from_slice(&h[row * d_model..(row + 1) * d_model]);
    }
    let h = gathered.as_slice();
    let mut nll_of_rows = vec![0.0; rows.len()];
    let total = match gradients {
        None => run(h, weight, &labels, d_model, None, Some(&mut nll_of_rows)),
        Some(Gradients { weight: weight_f32, dh, dweight }) => {
            let mut dh_of_rows = vec![0.0; h.len()];
            let gradients = Gradients { weight: weight_f32, dh: &mut dh_of_rows, dweight };
            let nll = Some(nll_of_rows.as_mut_slice());
            let total = run(h, weight, &labels, d_model, Some(gradients), nll);
            dh.fill(0.0);
            for (&row, x) in rows.iter().zip(dh_of_rows.chunks_exact(d_model)) {
                dh[row * d_model..(row + 1) * d_model].copy_from_slice(x);
            }
            total
        }
    };
    if let Some(nll) = nll {
        nll.fill(0.0);
        for (&row, x) in rows.iter().zip(nll_of_rows) {
            nll[row] = x;
        }
    }
    total
}

on_arch! {
    fn row_loss<'r>(row: &'r mut [f32], label: i32, with_gradient: bool) -> Option<f64> = row_loss_simd;
}

/// Cross entropy of one row, `None` without a label. With `with_gradient` the logits become their gradient.
#[inline(always)]
fn row_loss_simd<S: Simd>(simd: S, row: &mut [f32], label: i32, with_gradient: bool) -> Option<f64> {
    if label < FIRST_LABEL {
        if with_gradient {
            row.fill(0.0);
        }
        return None;
    }
    let logit = row[label as usize];
    let max = max_of(simd, row);
    let sum = exp_and_sum(simd, row, max);
    let lse = max + sum.ln();
    if with_gradient {
        let scale = 1.0 / sum;
        for p in row.iter_mut() {
            *p *= scale;
        }
        row[label as usize] -= 1.0;
    }
    Some(f64::from(lse) - f64::from(logit))
}

/// The largest element of a row.
#[inline(always)]
fn max_of<S: Simd>(simd: S, row: &[f32]) -> f32 {
    let (row, tail) = S::as_simd_f32s(row);
    let mut max = [simd.splat_f32s(f32::NEG_INFINITY); 4];
    let (row4, row1) = row.as_chunks::<4>();
    for x in row4 {
        for v in 0..4 {
            max[v] = simd.max_f32s(max[v], x[v]);
        }
    }
    for &x in row1 {
        max[0] = simd.max_f32s(max[0], x);
    }
    let max = simd.max_f32s(simd.max_f32s(max[0], max[1]), simd.max_f32s(max[2], max[3]));
    tail.iter().copied().fold(simd.reduce_max_f32s(max), f32::max)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::tests::on_every_arch;
    use sieve_testing::{Random, assert_close_relative, finite_differences, threads, wide};

    struct Case {
        h: Vec<f32>,
        weight: Vec<f32>,
        labels: Vec<i32>,
        d_model: usize,
    }

    impl Case {
        fn new(n: usize, d_model: usize, vocab_size: usize, seed: u64) -> Self {
            let mut random = Random(seed);
            let mut label = |i: usize| {
                if i % 5 == 3 { -100 } else { random.below(vocab_size) as i32 }
            };
            let labels = (0..n).map(&mut label).collect();
            Self { h: random.vector(n * d_model), weight: random.vector(vocab_size * d_model), labels, d_model }
        }

        /// Loss of each row.
        fn reference(&self, h: &[f64], weight: &[f64]) -> Vec<f64> {
            let row = |(h, &label): (&[f64], &i32)| {
                if label < 0 {
                    return 0.0;
                }
                let logits: Vec<f64> =
                    weight.chunks(self.d_model).map(|w| w.iter().zip(h).map(|(w, h)| w * h).sum()).collect();
                let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let lse = max + logits.iter().map(|x| (x - max).exp()).sum::<f64>().ln();
                lse - logits[label as usize]
            };
            h.chunks(self.d_model).zip(&self.labels).map(row).collect()
        }

        fn total(&self, h: &[f64], weight: &[f64]) -> f64 {
            self.reference(h, weight).iter().sum()
        }

        fn with_grad(&self) -> (CrossEntropy, Vec<f32>, Vec<f32>) {
            let (mut dh, mut dweight) = (vec![f32::NAN; self.h.len()], vec![f32::NAN; self.weight.len()]);
            let Self { h, weight, labels, d_model } = self;
            let loss = linear_cross_entropy_with_gradients(h, weight, labels, *d_model, &mut dh, &mut dweight);
            (loss, dh, dweight)
        }
    }

    #[track_caller]
    fn assert_sums(got: CrossEntropy, rows: &[f64], labels: &[i32]) {
        let loss: f64 = rows.iter().sum();
        assert!((got.loss_sum - loss).abs() <= 1e-6 * (1.0 + loss), "{} instead of {loss}", got.loss_sum);
        assert_eq!(got.num_labels, labels.iter().filter(|&&label| label >= 0).count());
    }

    #[test]
    fn losses_equal_the_definition_and_gradients_its_finite_differences() {
        on_every_arch(|| {
            for (n, d_model, vocab_size) in [(1, 1, 1), (7, 3, 5), (4, 6, 37), (9, 2, 19), (3, 5, 101)] {
                let case = Case::new(n, d_model, vocab_size, n as u64);
                let (h, weight) = (wide(&case.h), wide(&case.weight));
                let rows = case.reference(&h, &weight);
                let alone = linear_cross_entropy(&case.h, Weight::F32(&case.weight), &case.labels, d_model);
                let (loss, dh, dweight) = case.with_grad();
                for sums in [alone, loss] {
                    assert_sums(sums, &rows, &case.labels);
                }
                let of_h = finite_differences(&h, |h| case.total(h, &weight));
                assert_close_relative("dh", &dh, &of_h, 2e-5);
                let of_weight = finite_differences(&weight, |weight| case.total(&h, weight));
                assert_close_relative("dweight", &dweight, &of_weight, 2e-5);
            }
        });
    }

    #[test]
    fn gradients_of_several_chunks_add_up() {
        // Three chunks of rows; gradients by the formula (softmax - onehot).
        let case = Case::new(2 * MAX_CHUNK_ROWS + 17, 4, 11, 3);
        let (loss, dh, dweight) = case.with_grad();
        let (h, weight) = (wide(&case.h), wide(&case.weight));
        assert_sums(loss, &case.reference(&h, &weight), &case.labels);
        let (mut expected_dh, mut expected_dweight) = (vec![0.0; dh.len()], vec![0.0; dweight.len()]);
        for (row, &label) in case.labels.iter().enumerate().filter(|(_, label)| **label >= 0) {
            let h = &h[row * 4..row * 4 + 4];
            let logits: Vec<f64> = weight.chunks(4).map(|w| w.iter().zip(h).map(|(w, h)| w * h).sum()).collect();
            let sum: f64 = logits.iter().map(|x| x.exp()).sum();
            for (id, x) in logits.iter().enumerate() {
                let gradient = x.exp() / sum - f64::from(u8::from(id == label as usize));
                for c in 0..4 {
                    expected_dh[row * 4 + c] += gradient * weight[id * 4 + c];
                    expected_dweight[id * 4 + c] += gradient * h[c];
                }
            }
        }
        assert_close_relative("dh", &dh, &expected_dh, 1e-5);
        assert_close_relative("dweight", &dweight, &expected_dweight, 1e-5);
    }

    #[test]
    fn token_losses_are_the_loss_of_each_row() {
        let case = Case::new(23, 5, 31, 4);
        let mut nll = vec![f32::NAN; 23];
        token_losses(&case.h, Weight::F32(&case.weight), &case.labels, 5, &mut nll);
        let rows = case.reference(&wide(&case.h), &wide(&case.weight));
        assert_close_relative("nll", &nll, &rows, 1e-6);
    }

    #[test]
    fn large_logits_stay_finite_and_nan_shows() {
        let mut case = Case::new(4, 3, 8, 5);
        case.h.iter_mut().for_each(|x| *x *= 1e4);
        let (loss, dh, dweight) = case.with_grad();
        assert!(loss.loss_sum.is_finite() && dh.iter().chain(&dweight).all(|x| x.is_finite()));
        case.h[0] = f32::NAN;
        assert!(case.with_grad().0.loss_sum.is_nan());
    }

    #[test]
    fn without_rows_or_labels_the_gradients_are_0() {
        let mut case = Case::new(3, 2, 4, 6);
        case.labels.fill(-100);
        let (loss, dh, dweight) = case.with_grad();
        assert_eq!((loss.loss_sum, loss.num_labels), (0.0, 0));
        assert!(dh.iter().chain(&dweight).all(|&x| x == 0.0));
        let (_, _, dweight) = Case::new(0, 2, 4, 7).with_grad();
        assert!(dweight.iter().all(|&x| x == 0.0));
    }

    #[test]
    fn threads_do_not_change_a_bit() {
        let case = Case::new(130, 24, 301, 8);
        let one = threads(1).install(|| case.with_grad());
        assert_eq!(threads(3).install(|| case.with_grad()), one);
    }

    #[test]
    #[should_panic(expected = "label 4 is not below 4")]
    fn a_label_outside_the_vocabulary_is_refused() {
        linear_cross_entropy(&[0.0; 2], Weight::F32(&[0.0; 8]), &[4], 2);
    }
}
