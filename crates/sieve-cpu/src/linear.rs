//! `y = x Wᵀ` with a weight in f32 or bf16; sums are f32.
//!
//! With few rows the GEMM is bound by memory bandwidth, so a separate kernel reads each weight once, without packing
//! it. Many rows go to the `gemm` crate, block by block of the inner length. Both add in the same order, so that a
//! row's result does not depend on the number of rows: otherwise equal tokens would get unequal scores in a prompt and
//! when decoded.
//!
//! Where the CPU has `vdpbf16ps`, a bf16 weight has one kernel for all numbers of rows, which rounds x to bf16. It
//! computes twice as many products in a cycle, and Intel's tile unit (AMX), where it is there, eight times as many as
//! that. Elsewhere the weight is widened to f32 and x stays f32.

#[cfg(target_arch = "x86_64")]
mod bf16_pairs;
#[cfg(target_arch = "x86_64")]
mod bf16_tiles;
#[cfg(target_arch = "x86_64")]
pub(crate) mod few_rows;
mod weight;

use half::bf16;
#[cfg(target_arch = "x86_64")]
use pulp::Arch;
use pulp::Simd;
use rayon::prelude::*;
use std::cell::Cell;

use crate::gemm::{Matrix, MatrixMut, Threads, matmul};
#[cfg(target_arch = "x86_64")]
use crate::simd::{Bf16Pairs, Bf16Tiles};
use crate::simd::{arch, dot, on_arch};
#[cfg(target_arch = "x86_64")]
use bf16_pairs::bf16_pairs;
#[cfg(target_arch = "x86_64")]
use bf16_tiles::bf16_tiles;
#[cfg(target_arch = "x86_64")]
use few_rows::{FEW_ROWS, few_rows};
pub use weight::Weight;
use weight::{TASK_OUTPUTS, depth_of};

/// The `gemm` crate adds each sum in the same order from `MIN_GEMM_ROWS` rows of x on, if x has `MIN_GEMM_SIDE` rows or
/// the weight as many outputs.
const MIN_GEMM_ROWS: usize = 8;
const MIN_GEMM_SIDE: usize = 65;

/// Up to this many outputs, and up to this many inputs, the `gemm` crate runs other code for some numbers of rows,
/// which adds in another order. Such weights have a kernel of their own.
const NARROW_OUTPUTS: usize = 3;
const NARROW_INPUTS: usize = 2;

/// Rows of x that a task multiplies with a narrow weight.
const NARROW_ROWS: usize = 256;

/// Up to this many rows the `gemm` crate computes `yᵀ = W xᵀ`, for which it does not pack the weight. With 252M
/// weights and 16 rows on two cores of a Zen 5 this takes 54 ms, and `x Wᵀ` 297 ms; at 256 rows both take as long.
pub(crate) const MAX_COLUMN_ROWS: usize = 256;

/// Weights that are widened from bf16 at once (16 MiB of f32). The GEMM of each such panel packs x again, so panels are
/// large.
const PANEL_WEIGHTS: usize = 1 << 22;

/// Fewest output columns of a panel.
const MIN_PANEL_OUTPUTS: usize = 128;

/// `y = x Wᵀ`. A row of y depends, to the bit, only on its row of x, on the weight and on the CPU's instruction set.
/// On CPUs without `vdpbf16ps` an f32 weight of the same values gives the same y as a bf16 weight.
///
/// # Shapes
/// - x: `[rows, d_in]`, weight: `[d_out, d_in]`, y: `[rows, d_out]`, written whole
///
/// # Panics
/// When the lengths do not fit.
pub fn linear(x: &[f32], weight: Weight<'_>, [rows, d_in, d_out]: [usize; 3], y: &mut [f32]) {
    assert_eq!(x.len(), rows * d_in, "linear: x is not [{rows}, {d_in}]");
    assert_eq!(weight.len(), d_out * d_in, "linear: weight is not [{d_out}, {d_in}]");
    assert_eq!(y.len(), rows * d_out, "linear: y is not [{rows}, {d_out}]");
    if y.is_empty() {
        return;
    }
    if d_in == 0 {
        y.fill(0.0);
        return;
    }
    let sizes = [rows, d_in, d_out];
    #[cfg(target_arch = "x86_64")]
    if let (Weight::Bf16(weight), Some(pairs)) = (weight, Bf16Pairs::of_this_cpu()) {
        return match Bf16Tiles::of_this_cpu() {
            Some(unit) => bf16_tiles(unit, x, weight, sizes, y),
            None => bf16_pairs(pairs, x, weight, sizes, y),
        };
    }
    if d_out <= NARROW_OUTPUTS || d_in <= NARROW_INPUTS {
        return narrow(x, weight, sizes, y);
    }
    match arch() {
        #[cfg(target_arch = "x86_64")]
        Arch::V4(simd) if rows <= FEW_ROWS => few_rows(simd, x, weight, sizes, y),
        #[cfg(target_arch = "x86_64")]
        Arch::V3(simd) if rows <= FEW_ROWS => few_rows(simd, x, weight, sizes, y),
        _ if rows <= MAX_COLUMN_ROWS => by_columns(x, weight, sizes, y),
        _ => panels(weight, d_in, |first, panel| {
            let outputs = panel.num_rows();
            let y = MatrixMut::strided(&mut y[first..], rows, outputs, d_out);
            gemm_into(Matrix::new(x, rows, d_in), panel.t(), y);
        }),
    }
}

/// The GEMM with a weight of few outputs or few inputs: a dot product for each number of y.
fn narrow(x: &[f32], weight: Weight<'_>, [_rows, d_in, d_out]: [usize; 3], y: &mut [f32]) {
    panels(weight, d_in, |first, panel| {
        let outputs = panel.num_rows();
        let rows = y.par_chunks_mut(NARROW_ROWS * d_out).zip(x.par_chunks(NARROW_ROWS * d_in));
        rows.for_each(|(y, x)| {
            for (y, x) in y.chunks_exact_mut(d_out).zip(x.chunks_exact(d_in)) {
                dots(x, panel.rows_in_order(), &mut y[first..first + outputs]);
            }
        });
    });
}

on_arch! {
    fn dots<'a>(x: &'a [f32], weight: &'a [f32], y: &'a mut [f32]) -> () = dots_simd;
}

/// `y = W x` for one row.
#[inline(always)]
fn dots_simd<S: Simd>(simd: S, x: &[f32], weight: &[f32], y: &mut [f32]) {
    for (y, weight) in y.iter_mut().zip(weight.chunks_exact(x.len())) {
        *y = dot(simd, x, weight);
    }
}

/// Computes `yᵀ = W xᵀ`; x is padded with rows of zeros where it is too short for a fixed order of sums.
fn by_columns(x: &[f32], weight: Weight<'_>, [rows, d_in, d_out]: [usize; 3], y: &mut [f32]) {
    let rows = rows.max(if d_out < MIN_GEMM_SIDE { MIN_GEMM_SIDE } else { MIN_GEMM_ROWS });
    let mut padded = x.to_vec();
    padded.resize(rows * d_in, 0.0);
    let x = Matrix::new(&padded, rows, d_in).t();
    // The `gemm` crate packs one operand and reads the other in place. For a column-major result it packs x, so no
    // weight is copied; the order of each sum is the same.
    let mut columns = vec![0.0; d_out * rows];
    panels(weight, d_in, |first, panel| {
        let outputs = panel.num_rows();
        let columns = &mut columns[first * rows..][..outputs * rows];
        gemm_into(panel, x, MatrixMut::new(columns, outputs, rows));
    });
    for (row, y) in y.chunks_exact_mut(d_out).enumerate() {
        for (y, column) in y.iter_mut().zip(columns.chunks_exact(rows)) {
            *y = column[row];
        }
    }
}

/// Computes the GEMM `c = a b`, block by block of the inner length.
fn gemm_into(a: Matrix<'_>, b: Matrix<'_>, mut c: MatrixMut<'_>) {
    let (threads, d_in, depth) = (Threads::of_gemm(a, b), a.num_columns(), depth_of(a.num_columns()));
    for first in (0..d_in).step_by(depth) {
        let block = first..d_in.min(first + depth);
        let (alpha, beta) = (1.0, if first == 0 { 0.0 } else { 1.0 });
        matmul(threads, alpha, a.columns(block.clone()), b.t().columns(block).t(), beta, c.reborrow());
    }
}

/// Calls `with(first output, panel)` for consecutive panels of the weight's rows in f32; an f32 weight is one panel.
fn panels(weight: Weight<'_>, d_in: usize, mut with: impl FnMut(usize, Matrix<'_>)) {
    let weight = match weight {
        Weight::F32(weight) => return with(0, Matrix::new(weight, weight.len() / d_in, d_in)),
        Weight::Bf16(weight) => weight,
    };
    let d_out = weight.len() / d_in;
    let max_outputs = (PANEL_WEIGHTS / d_in).max(MIN_PANEL_OUTPUTS);
    // Panels of equal size, so that the last one is not shorter than `MIN_GEMM_SIDE`.
    let outputs = d_out.div_ceil(d_out.div_ceil(max_outputs));
    let mut buffer = PANEL.take();
    buffer.resize(buffer.len().max(outputs * d_in), 0.0);
    for (at, weight) in weight.chunks(outputs * d_in).enumerate() {
        let panel = &mut buffer[..weight.len()];
        let parts = panel.par_chunks_mut(TASK_OUTPUTS * d_in);
        let parts = parts.zip(weight.par_chunks(TASK_OUTPUTS * d_in));
        parts.for_each(|(to, from)| widen(from, to));
        with(at * outputs, Matrix::new(panel, weight.len() / d_in, d_in));
    }
    PANEL.set(buffer);
}

thread_local! {
    /// Buffer of one widened panel. It is reused: zeroing newly allocated pages takes a tenth of a prompt's GEMM.
    static PANEL: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
}

on_arch! {
    fn widen<'a>(from: &'a [bf16], to: &'a mut [f32]) -> () = widen_simd;
}

/// Converts bf16 to f32, which is exact.
#[inline(always)]
fn widen_simd<S: Simd>(_simd: S, from: &[bf16], to: &mut [f32]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = f32::from_bits(u32::from(from.to_bits()) << 16);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::simd::tests::{Tiles, on_every_arch, with_tiles, without_bf16_pairs};
    use sieve_testing::{Random, assert_close_relative, round_bf16, threads};

    /// x, the weight in bf16 and the same values in f32.
    fn operands([rows, d_in, d_out]: [usize; 3], seed: u64) -> (Vec<f32>, Vec<bf16>, Vec<f32>) {
        let mut random = Random(seed);
        let x = random.vector(rows * d_in);
        let rounded = random.vector(d_out * d_in).into_iter().map(bf16::from_f32);
        let rounded = rounded.collect::<Vec<_>>();
        let wide = rounded.iter().map(|weight| weight.to_f32()).collect();
        (x, rounded, wide)
    }

    fn run(x: &[f32], weight: Weight<'_>, sizes: [usize; 3]) -> Vec<f32> {
        let mut y = vec![f32::NAN; sizes[0] * sizes[2]];
        linear(x, weight, sizes, &mut y);
        y
    }

    /// Whether a bf16 weight is multiplied by x rounded to bf16.
    fn x_is_rounded() -> bool {
        #[cfg(target_arch = "x86_64")]
        return Bf16Pairs::of_this_cpu().is_some();
        #[cfg(not(target_arch = "x86_64"))]
        false
    }

    /// 1.2e-5 was measured in sums of 531.
    const TOLERANCE: f64 = 3e-5;

    #[test]
    fn both_types_equal_the_definition() {
        on_every_arch(|| {
            for sizes in [
                [1, 1, 1],
                [1, 40, 13],
                [2, 17, 5],
                [3, 31, 1],
                [4, 64, 17],
                [8, 33, 16],
                [6, 1, 9],
                [7, 531, TASK_OUTPUTS + 1],
                [9, 65, 31],
                [1, 1100, 200],
                [40, 12, 2 * TASK_OUTPUTS + 5],
                // More than one block of rows.
                [90, 1500, 6],
                [3, 0, 4],
                [0, 3, 4],
            ] {
                let [rows, d_in, d_out] = sizes;
                let (x, rounded, wide) = operands(sizes, 1);
                let expected = |x: &[f32]| -> Vec<f64> {
                    let at = |r: usize, o: usize| -> f64 {
                        let (x, weight) = (&x[r * d_in..][..d_in], &wide[o * d_in..][..d_in]);
                        x.iter().zip(weight).map(|(&x, &w)| f64::from(x) * f64::from(w)).sum()
                    };
                    (0..rows).flat_map(|r| (0..d_out).map(move |o| (r, o))).map(|(r, o)| at(r, o)).collect()
                };
                let y = run(&x, Weight::F32(&wide), sizes);
                assert_close_relative(&format!("{sizes:?} f32"), &y, &expected(&x), TOLERANCE);
                let y = run(&x, Weight::Bf16(&rounded), sizes);
                let x = if x_is_rounded() { x.iter().map(|&x| round_bf16(x)).collect() } else { x };
                assert_close_relative(&format!("{sizes:?} bf16"), &y, &expected(&x), TOLERANCE);
            }
        });
    }

    /// Inner lengths and outputs of weights. The emulated tile unit takes the first four in seconds.
    const WEIGHTS: [[usize; 2]; 8] =
        // [2048, 2100] is more than one panel.
        [[64, 128], [48, 40], [700, 40], [96, 20], [192, 1024], [3000, 200], [768, 2304], [2048, 2100]];

    /// Calls `check(rows of x, sizes, weight, their part of the result of all rows)` for parts of 300 rows, with
    /// weights of both types.
    fn parts_of_rows(weights: &[[usize; 2]], check: impl Fn(&[f32], [usize; 3], Weight<'_>, &[f32])) {
        for &[d_in, d_out] in weights {
            let rows = 300;
            let (x, rounded, wide) = operands([rows, d_in, d_out], 2);
            for weight in [Weight::F32(&wide), Weight::Bf16(&rounded)] {
                let all = run(&x, weight, [rows, d_in, d_out]);
                for (first, count) in [
                    (0, 70),
                    (3, 1),
                    (5, 2),
                    (7, 3),
                    (2, 4),
                    (1, 7),
                    (0, 8),
                    (2, 9),
                    (0, 16),
                    (9, 17),
                    (4, 33),
                    (0, 64),
                    (2, 65),
                    (0, 257),
                ] {
                    let x = &x[first * d_in..][..count * d_in];
                    check(x, [count, d_in, d_out], weight, &all[first * d_out..][..count * d_out]);
                }
            }
        }
    }

    #[test]
    fn the_number_of_rows_does_not_change_a_bit() {
        for (tiles, weights) in
            [(Tiles::OfTheCpu, &WEIGHTS[..]), (Tiles::Emulated, &WEIGHTS[..4]), (Tiles::None, &WEIGHTS)]
        {
            with_tiles(tiles, 2, || {
                parts_of_rows(weights, |x, sizes, weight, expected| {
                    let is_bf16 = matches!(weight, Weight::Bf16(_));
                    assert_eq!(run(x, weight, sizes), expected, "{sizes:?}, bf16: {is_bf16}, {tiles:?}");
                });
            });
        }
    }

    /// On CPUs that have the unit this compares it with its emulation, whose sums have the unit's order.
    #[test]
    fn the_tile_unit_adds_as_its_emulation_does_and_in_an_order_of_its_own() {
        for sizes in [[1, 768, 130], [16, 64, 32], [33, 700, 96], [70, 1100, 257]] {
            let (x, rounded, _) = operands(sizes, 5);
            let with = |tiles| with_tiles(tiles, 1, || run(&x, Weight::Bf16(&rounded), sizes));
            let (emulated, without) = (with(Tiles::Emulated), with(Tiles::None));
            assert_eq!(emulated != without, x_is_rounded(), "{sizes:?}: both paths ran");
            let is_there = with_tiles(Tiles::OfTheCpu, 1, || Bf16Tiles::of_this_cpu().is_some());
            let expected = if is_there { &emulated } else { &without };
            assert!(with(Tiles::OfTheCpu) == *expected, "{sizes:?}: the unit, which is there: {is_there}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]
        #[test]
        fn rows_have_the_same_bits_alone_in_groups_and_all_together(seed in any::<u64>()) {
            in_groups_of_any_size(seed);
        }
    }

    /// Rows alone, in groups of random size and all together, with weights of random shape and both types.
    fn in_groups_of_any_size(seed: u64) {
        let mut random = Random(seed);
        let d_in = random.one_of(&[1, 7, 16, 63, 64, 96, 513, 700, 1100]) + random.below(3);
        let d_out = random.one_of(&[1, 5, 31, 64, 65, 130, 300]) + random.below(3);
        let rows = random.one_of(&[2, 9, 17, 70, 300]);
        let (x, rounded, wide) = operands([rows, d_in, d_out], seed);
        for weight in [Weight::F32(&wide), Weight::Bf16(&rounded)] {
            let all = run(&x, weight, [rows, d_in, d_out]);
            let mut first = 0;
            while first < rows {
                let count = random.one_of(&[1, 1, 4, 40, 300]).min(rows - first);
                let y = run(&x[first * d_in..][..count * d_in], weight, [count, d_in, d_out]);
                let what = format!("seed {seed}, [{rows}, {d_in}, {d_out}], rows {first} to {}", first + count);
                assert_eq!(y, all[first * d_out..][..count * d_out], "{what}");
                first += count;
            }
        }
    }

    #[test]
    fn rows_have_the_same_bits_in_any_group_on_every_instruction_set() {
        on_every_arch(|| (0..6).for_each(in_groups_of_any_size));
    }

    #[test]
    fn where_bf16_is_widened_the_type_does_not_change_a_bit() {
        let parts = || {
            parts_of_rows(&WEIGHTS, |x, sizes, weight, expected| {
                let Weight::Bf16(rounded) = weight else { return };
                let wide: Vec<f32> = rounded.iter().map(|weight| weight.to_f32()).collect();
                assert_eq!(run(x, Weight::F32(&wide), sizes), expected, "{sizes:?}");
            });
        };
        without_bf16_pairs(2, parts);
    }

    #[test]
    fn threads_do_not_change_a_bit() {
        for sizes in [[1, 300, 1000], [4, 500, 300], [9, 700, 500], [50, 300, 700], [300, 1200, 130]] {
            let (x, rounded, _) = operands(sizes, 3);
            let with = || run(&x, Weight::Bf16(&rounded), sizes);
            let (one, widened) = (threads(1).install(with), without_bf16_pairs(1, with));
            for count in [2, 3] {
                assert_eq!(threads(count).install(with), one, "{sizes:?}, {count} threads");
                assert_eq!(without_bf16_pairs(count, with), widened, "{sizes:?}, {count} threads, widened");
            }
            assert_eq!(one != widened, x_is_rounded(), "{sizes:?}: both paths ran");
        }
    }

    #[test]
    fn nan_and_infinity_reach_their_rows_and_outputs_alone() {
        on_every_arch(|| {
            for rows in [4, 11] {
                let sizes @ [_, d_in, d_out] = [rows, 70, 21];
                let (mut x, mut rounded, _) = operands(sizes, 4);
                // In the last, short vector of a row.
                (x[d_in + 69], x[2 * d_in + 64]) = (f32::NAN, f32::INFINITY);
                rounded[17 * d_in + 69] = bf16::NAN;
                // Not beside the infinity of x: their product would be NaN.
                rounded[18 * d_in + 1] = bf16::NEG_INFINITY;
                rounded.iter_mut().filter(|weight| **weight == bf16::ZERO).for_each(|weight| *weight = bf16::ONE);
                let y = run(&x, Weight::Bf16(&rounded), sizes);
                for (row, y) in y.chunks_exact(d_out).enumerate() {
                    for (output, y) in y.iter().enumerate() {
                        let (nan, infinite) = (row == 1 || output == 17, row == 2 || output == 18);
                        match (nan, infinite) {
                            (true, _) => assert!(y.is_nan(), "{row}, {output}: {y}"),
                            // Two infinities may cancel to NaN.
                            (_, true) => assert!(!y.is_finite(), "{row}, {output}: {y}"),
                            _ => assert!(y.is_finite(), "{row}, {output}: {y}"),
                        }
                    }
                }
            }
        });
    }

    #[test]
    #[should_panic(expected = "weight is not [3, 2]")]
    fn a_weight_of_another_size_is_refused() {
        linear(&[0.0; 2], Weight::F32(&[0.0; 5]), [1, 2, 3], &mut [0.0; 3]);
    }
}
