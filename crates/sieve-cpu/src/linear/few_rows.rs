//! GEMM with up to [`FEW_ROWS`] rows of x. The lanes of a vector are different outputs, so squares of weights are
//! transposed in registers, where bf16 weights are also widened to f32. The scores of one query and its cached keys are
//! such a GEMM too.

use half::bf16;
use half::slice::HalfFloatSliceExt;
use pulp::x86::{V3, V4};
use pulp::{Simd, WithSimd};
use rayon::prelude::*;
use std::arch::x86_64::{__m256, __m256d, __m512, __m512d, _MM_HINT_T0, _mm_prefetch};

use super::weight::{TASK_OUTPUTS, Weight, depth_of};

/// Most rows of x for which this kernel is used.
pub(super) const FEW_ROWS: usize = 8;

/// Number of weights from which all threads are used.
const MIN_SHARED_WEIGHTS: usize = 1 << 17;

/// Lanes of the widest SIMD vectors.
const MAX_LANES: usize = 16;

/// A square matrix: one vector for each lane. Only the first `F32_LANES` of the [`MAX_LANES`] vectors are used.
type Square<S> = [<S as Simd>::f32s; MAX_LANES];

/// Instruction sets with a transpose in registers.
pub(crate) trait Transpose: Simd {
    /// Lane i of vector j becomes lane j of vector i.
    fn transpose(self, square: Square<Self>) -> Square<Self>;
}

// Loops, because a closure is compiled separately and not for this instruction set.
impl Transpose for V4 {
    #[inline(always)]
    fn transpose(self, square: Square<Self>) -> Square<Self> {
        let avx = self.avx512f;
        let a: [__m512; 16] = pulp::cast(square);
        let mut b = a;
        for i in (0..16).step_by(2) {
            b[i] = avx._mm512_unpacklo_ps(a[i], a[i + 1]);
            b[i + 1] = avx._mm512_unpackhi_ps(a[i], a[i + 1]);
        }
        let b: [__m512d; 16] = pulp::cast(b);
        // Vector `rows + j` then holds columns j, 4 + j, 8 + j and 12 + j of four rows, one column in each quarter.
        let mut c = b;
        for rows in (0..16).step_by(4) {
            for j in 0..2 {
                c[rows + 2 * j] = avx._mm512_unpacklo_pd(b[rows + j], b[rows + 2 + j]);
                c[rows + 2 * j + 1] = avx._mm512_unpackhi_pd(b[rows + j], b[rows + 2 + j]);
            }
        }
        let c: [__m512; 16] = pulp::cast(c);
        let mut d = c;
        for j in 0..4 {
            // `low` are rows 0 to 7 and `high` rows 8 to 15; `even` are quarters 0 and 2, `odd` quarters 1 and 3.
            let low_even = avx._mm512_shuffle_f32x4::<0x88>(c[j], c[4 + j]);
            let low_odd = avx._mm512_shuffle_f32x4::<0xdd>(c[j], c[4 + j]);
            let high_even = avx._mm512_shuffle_f32x4::<0x88>(c[8 + j], c[12 + j]);
            let high_odd = avx._mm512_shuffle_f32x4::<0xdd>(c[8 + j], c[12 + j]);
            d[j] = avx._mm512_shuffle_f32x4::<0x88>(low_even, high_even);
            d[4 + j] = avx._mm512_shuffle_f32x4::<0x88>(low_odd, high_odd);
            d[8 + j] = avx._mm512_shuffle_f32x4::<0xdd>(low_even, high_even);
            d[12 + j] = avx._mm512_shuffle_f32x4::<0xdd>(low_odd, high_odd);
        }
        pulp::cast(d)
    }
}

impl Transpose for V3 {
    #[inline(always)]
    fn transpose(self, square: Square<Self>) -> Square<Self> {
        let avx = self.avx;
        let a: [__m256; 16] = pulp::cast(square);
        let mut b = a;
        for i in (0..8).step_by(2) {
            b[i] = avx._mm256_unpacklo_ps(a[i], a[i + 1]);
            b[i + 1] = avx._mm256_unpackhi_ps(a[i], a[i + 1]);
        }
        let b: [__m256d; 16] = pulp::cast(b);
        // Vector `rows + j` then holds columns j and 4 + j of four rows, one column in each half.
        let mut c = b;
        for rows in [0, 4] {
            for j in 0..2 {
                c[rows + 2 * j] = avx._mm256_unpacklo_pd(b[rows + j], b[rows + 2 + j]);
                c[rows + 2 * j + 1] = avx._mm256_unpackhi_pd(b[rows + j], b[rows + 2 + j]);
            }
        }
        let c: [__m256; 16] = pulp::cast(c);
        let mut d = c;
        for j in 0..4 {
            d[j] = avx._mm256_permute2f128_ps::<0x20>(c[j], c[4 + j]);
            d[4 + j] = avx._mm256_permute2f128_ps::<0x31>(c[j], c[4 + j]);
        }
        pulp::cast(d)
    }
}

/// Element types of a weight. A SIMD lane of 32 bits holds `IN_LANE` elements.
trait Element: Copy {
    /// Elements per lane: 1 for f32, 2 for bf16.
    const IN_LANE: usize;

    /// A vector of `F32_LANES * IN_LANE` elements, padded with zeros if the slice is shorter.
    fn load<S: Simd>(simd: S, from: &[Self]) -> S::f32s;

    /// Element number `at` of each lane, as f32.
    fn part<S: Simd>(simd: S, lanes: S::f32s, at: usize) -> S::f32s;
}

impl Element for f32 {
    const IN_LANE: usize = 1;

    #[inline(always)]
    fn load<S: Simd>(simd: S, from: &[f32]) -> S::f32s {
        if from.len() == S::F32_LANES { S::as_simd_f32s(from).0[0] } else { simd.partial_load_f32s(from) }
    }

    #[inline(always)]
    fn part<S: Simd>(_simd: S, lanes: S::f32s, _at: usize) -> S::f32s {
        lanes
    }
}

impl Element for bf16 {
    const IN_LANE: usize = 2;

    #[inline(always)]
    fn load<S: Simd>(_simd: S, from: &[bf16]) -> S::f32s {
        let from: &[u16] = from.reinterpret_cast();
        let mut padded = [0; 2 * MAX_LANES];
        let whole = if from.len() == 2 * S::F32_LANES {
            from
        } else {
            padded[..from.len()].copy_from_slice(from);
            &padded[..2 * S::F32_LANES]
        };
        pulp::cast(S::as_simd_u16s(whole).0[0])
    }

    #[inline(always)]
    fn part<S: Simd>(simd: S, lanes: S::f32s, at: usize) -> S::f32s {
        // A bf16 is the upper half of an f32; a lane's element 0 is in its lower half.
        let bits = simd.transmute_u32s_f32s(lanes);
        simd.transmute_f32s_u32s(match at {
            0 => simd.wrapping_dyn_shl_u32s(bits, simd.splat_u32s(16)),
            _ => simd.and_u32s(bits, simd.splat_u32s(0xffff_0000)),
        })
    }
}

/// As [`linear`](super::linear) for up to [`FEW_ROWS`] rows; reads each weight once and packs none.
pub(super) fn few_rows<S: Transpose>(
    simd: S,
    x: &[f32],
    weight: Weight<'_>,
    [rows, d_in, d_out]: [usize; 3],
    y: &mut [f32],
) {
    let run = |(task, y): (usize, &mut [f32])| {
        let first = task * TASK_OUTPUTS;
        simd.vectorize(Task { simd, x, weight, d_in, depth: depth_of(d_in), first, y });
    };
    // Runs the tasks; a task writes its outputs of all rows, `[rows, outputs]`, to one chunk.
    let run_tasks = |y: &mut [f32]| match weight.len() {
        few if few < MIN_SHARED_WEIGHTS => y.chunks_mut(TASK_OUTPUTS * rows).enumerate().for_each(run),
        _ => y.par_chunks_mut(TASK_OUTPUTS * rows).enumerate().for_each(run),
    };
    if rows == 1 {
        return run_tasks(y);
    }
    let mut by_task = vec![0.0; y.len()];
    run_tasks(&mut by_task);
    for (task, outputs) in by_task.chunks(TASK_OUTPUTS * rows).enumerate() {
        let outputs = outputs.chunks_exact(outputs.len() / rows);
        for (y, outputs) in y.chunks_exact_mut(d_out).zip(outputs) {
            y[task * TASK_OUTPUTS..][..outputs.len()].copy_from_slice(outputs);
        }
    }
}

/// As [`few_rows`] for any number of rows and an f32 weight, on the calling thread, where each sum is one chain of
/// fused products over the whole inner length.
pub(crate) fn in_one_chain<S: Transpose>(
    simd: S,
    x: &[f32],
    weight: &[f32],
    [_rows, d_in, d_out]: [usize; 3],
    y: &mut [f32],
) {
    for (x, y) in x.chunks(FEW_ROWS * d_in).zip(y.chunks_mut(FEW_ROWS * d_out)) {
        simd.vectorize(Task { simd, x, weight: Weight::F32(weight), d_in, depth: d_in, first: 0, y });
    }
}

/// Computes some columns of the output for all rows.
struct Task<'a, S> {
    simd: S,
    x: &'a [f32],
    weight: Weight<'a>,
    d_in: usize,
    /// Elements of a row that are added before their sum is added to the output.
    depth: usize,
    /// The task's first output column.
    first: usize,
    /// Output of the task, `[rows, outputs]`.
    y: &'a mut [f32],
}

impl<T: Transpose> WithSimd for Task<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _same_as_self_simd: S) {
        match self.weight {
            Weight::F32(weight) => self.of_rows(weight),
            Weight::Bf16(weight) => self.of_rows(weight),
        }
    }
}

impl<S: Transpose> Task<'_, S> {
    /// Computes the task by code for a constant number of rows: the next larger of 1, 2, 4 and [`FEW_ROWS`].
    #[inline(always)]
    fn of_rows<W: Element>(self, weight: &[W]) {
        match self.x.len() / self.d_in {
            1 => self.run::<W, 1>(weight),
            2 => self.run::<W, 2>(weight),
            3..=4 => self.run::<W, 4>(weight),
            _ => self.run::<W, FEW_ROWS>(weight),
        }
    }

    /// Computes the task for at most `ROWS` rows.
    #[inline(always)]
    fn run<W: Element, const ROWS: usize>(self, weight: &[W]) {
        let Self { simd, x, d_in, depth, first, y, .. } = self;
        let (lanes, step) = (S::F32_LANES, S::F32_LANES * W::IN_LANE);
        let (rows, last_output) = (x.len() / d_in, weight.len() / d_in - 1);
        let outputs = y.len() / rows;
        // Past the last row or output, the last one is computed again; that result is not stored.
        let x: [&[f32]; ROWS] = std::array::from_fn(|row| &x[row.min(rows - 1) * d_in..][..d_in]);
        for tile in (0..outputs).step_by(lanes) {
            let row = |lane: usize| (first + tile + lane).min(last_output) * d_in;
            let weights: [&[W]; MAX_LANES] = std::array::from_fn(|lane| &weight[row(lane)..][..d_in]);
            let mut next_tile_at = row(lanes);
            let mut sums = [simd.splat_f32s(0.0); ROWS];
            for from in (0..d_in).step_by(depth) {
                let end = d_in.min(from + depth);
                let mut block_sums = [simd.splat_f32s(0.0); ROWS];
                let mut at = from;
                while at < end {
                    let mut square = [simd.splat_f32s(0.0); MAX_LANES];
                    if at + step <= d_in {
                        for lane in 0..S::F32_LANES {
                            square[lane] = W::load(simd, &weights[lane][at..at + step]);
                        }
                    } else {
                        for lane in 0..S::F32_LANES {
                            square[lane] = W::load(simd, &weights[lane][at..]);
                        }
                    }
                    for line in 0..S::F32_LANES {
                        // Cache lines of the next tile's weights: hardware prefetching does not follow this many rows.
                        prefetch(weight, next_tile_at + line * step);
                    }
                    next_tile_at += lanes * step;
                    let square = simd.transpose(square);
                    // Two loops, so that the compiler knows the length of the first and unrolls it.
                    if at + step <= end {
                        for k in 0..S::F32_LANES * W::IN_LANE {
                            add_product::<S, W, ROWS>(simd, &square, k, &x, at + k, &mut block_sums);
                        }
                    } else {
                        for k in 0..end - at {
                            add_product::<S, W, ROWS>(simd, &square, k, &x, at + k, &mut block_sums);
                        }
                    }
                    at += step;
                }
                for row in 0..ROWS {
                    sums[row] = simd.add_f32s(sums[row], block_sums[row]);
                }
            }
            for (y, sums) in y.chunks_exact_mut(outputs).zip(sums) {
                simd.partial_store_f32s(&mut y[tile..outputs.min(tile + lanes)], sums);
            }
        }
    }
}

/// Adds to each row's sums the row's element `at` times the k-th weights of the outputs.
#[inline(always)]
fn add_product<S: Simd, W: Element, const ROWS: usize>(
    simd: S,
    square: &Square<S>,
    k: usize,
    x: &[&[f32]; ROWS],
    at: usize,
    sums: &mut [S::f32s; ROWS],
) {
    let weights = W::part(simd, square[k / W::IN_LANE], k % W::IN_LANE);
    for row in 0..ROWS {
        sums[row] = simd.mul_add_e_f32s(simd.splat_f32s(x[row][at]), weights, sums[row]);
    }
}

/// Prefetches the cache line of `slice[at]`; `at` may be out of bounds.
#[inline(always)]
fn prefetch<T>(slice: &[T], at: usize) {
    // SAFETY: a prefetch reads nothing that the program can see, and no address makes it fault.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(slice.as_ptr().wrapping_add(at).cast()) };
}
