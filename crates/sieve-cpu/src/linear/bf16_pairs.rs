//! GEMM with a bf16 weight by `vdpbf16ps`, which adds the products of two pairs of bf16 to each f32 lane. x is rounded
//! to bf16 first.
//!
//! A vector holds consecutive elements of one row, of x or of the weight, so neither is transposed or unpacked. A lane
//! adds its products in the order of the row; the lanes are added at the end. That order depends on `d_in` alone.

use half::bf16;
use half::slice::HalfFloatSliceExt;
use rayon::prelude::*;
use std::arch::x86_64::*;
use std::cell::Cell;

use super::weight::TASK_OUTPUTS;
use crate::simd::Bf16Pairs;

/// Elements of a vector.
pub(super) const STEP: usize = 32;

/// Accumulators of a tile: as many as a vector has lanes, so that the sums of their lanes are one vector.
const SUMS: usize = 16;

/// Bytes of rounded x that a task multiplies with one group of outputs after the other. They stay in the L2 cache,
/// which has at least 1 MiB on CPUs with `vdpbf16ps`.
const BLOCK_BYTES: usize = 192 << 10;

/// Products from which all threads are used.
const MIN_SHARED_PRODUCTS: usize = 1 << 17;

/// Elements of the weight between one that is multiplied and one that is prefetched. With four rows, reading runs at 28
/// GB/s with this distance and at 13 without prefetching, on one core of a Zen 4.
const AHEAD: usize = 12288;

/// Fewest rows of x that a task rounds.
const MIN_ROUNDED_ROWS: usize = 64;

/// Elements of a row of x, with zeros after its end; aligned, so that no load touches two cache lines.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Vector(pub(super) [bf16; STEP]);

impl Vector {
    pub(super) const ZERO: Self = Self([bf16::ZERO; STEP]);
}

thread_local! {
    /// Buffer of rounded rows. It is reused: zeroing newly allocated pages takes as long as rounding.
    static ROUNDED: Cell<Vec<Vector>> = const { Cell::new(Vec::new()) };
}

/// As [`linear`](super::linear) for a bf16 weight, with x rounded to bf16. No size is 0.
pub(super) fn bf16_pairs(pairs: Bf16Pairs, x: &[f32], weight: &[bf16], sizes: [usize; 3], y: &mut [f32]) {
    match sizes[0] {
        1 => by_pairs::<1, 16>(pairs, x, weight, sizes, y),
        2 => by_pairs::<2, 8>(pairs, x, weight, sizes, y),
        _ => by_pairs::<4, 4>(pairs, x, weight, sizes, y),
    }
}

/// The GEMM in tiles of `ROWS` rows and `OUTPUTS` outputs.
fn by_pairs<const ROWS: usize, const OUTPUTS: usize>(
    pairs: Bf16Pairs,
    x: &[f32],
    weight: &[bf16],
    sizes @ [_, d_in, _]: [usize; 3],
    y: &mut [f32],
) {
    // SAFETY: `pairs` shows that the CPU has these instructions.
    let round = |x: &[f32], rounded: &mut [Vector]| unsafe { round_group::<ROWS>(pairs, x, d_in, rounded) };
    // SAFETY: as for `round`.
    let run = |task: Task<'_>| unsafe { task.run::<ROWS, OUTPUTS>(pairs) };
    in_groups::<ROWS>(x, weight, sizes, y, round, run);
}

/// Rounds x in groups of `ROWS` rows by `round(rows of x, their vectors)`, and runs the product's tasks, on all threads
/// where there is enough to do.
pub(super) fn in_groups<const ROWS: usize>(
    x: &[f32],
    weight: &[bf16],
    sizes @ [rows, d_in, _]: [usize; 3],
    y: &mut [f32],
    round: impl Fn(&[f32], &mut [Vector]) + Sync,
    run: impl Fn(Task<'_>) + Sync + Send,
) {
    let group_len = ROWS * d_in.div_ceil(STEP);
    let num_groups = rows.div_ceil(ROWS);
    let mut buffer = ROUNDED.take();
    buffer.resize(buffer.len().max(num_groups * group_len), Vector::ZERO);
    let rounded = &mut buffer[..num_groups * group_len];
    let groups = rounded.par_chunks_mut(group_len).zip(x.par_chunks(ROWS * d_in));
    groups.with_min_len(MIN_ROUNDED_ROWS / ROWS).for_each(|(rounded, x)| round(x, rounded));
    let tasks = tasks::<ROWS>(rounded, weight, sizes, y);
    match rows * weight.len() {
        few if few < MIN_SHARED_PRODUCTS => tasks.into_iter().for_each(run),
        _ => tasks.into_par_iter().with_max_len(1).for_each(run),
    }
    ROUNDED.set(buffer);
}

/// Divides the product among tasks: some outputs each of as many groups of `ROWS` rows as stay in a cache.
fn tasks<'a, const ROWS: usize>(
    rounded: &'a [Vector],
    weight: &'a [bf16],
    [_, d_in, d_out]: [usize; 3],
    y: &'a mut [f32],
) -> Vec<Task<'a>> {
    let group_len = ROWS * d_in.div_ceil(STEP);
    let block_groups = (BLOCK_BYTES / (group_len * size_of::<Vector>())).max(1);
    let mut tasks = Vec::new();
    let blocks = rounded.chunks(block_groups * group_len).zip(y.chunks_mut(block_groups * ROWS * d_out));
    for (x, y) in blocks {
        let mut rows: Vec<_> = y.chunks_exact_mut(d_out).map(|y| y.chunks_mut(TASK_OUTPUTS)).collect();
        for weight in weight.chunks(TASK_OUTPUTS * d_in) {
            let y = rows.iter_mut().filter_map(Iterator::next).collect();
            tasks.push(Task { x, weight, d_in, y });
        }
    }
    tasks
}

/// Rounds up to `ROWS` rows of x to `[steps, ROWS]`. Rows that are missing keep their old values: they change results
/// that are not stored.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn round_group<const ROWS: usize>(_pairs: Bf16Pairs, x: &[f32], d_in: usize, rounded: &mut [Vector]) {
    for (row, x) in x.chunks_exact(d_in).enumerate() {
        let (whole, tail) = x.as_chunks::<STEP>();
        for (x, to) in whole.iter().zip(rounded[row..].iter_mut().step_by(ROWS)) {
            *to = round(x);
        }
        if !tail.is_empty() {
            let mut last = [0.0; STEP];
            last[..tail.len()].copy_from_slice(tail);
            rounded[whole.len() * ROWS + row] = round(&last);
        }
    }
}

/// Rounds to nearest even. NaN stays NaN; numbers below 2^-126 become 0, as `vdpbf16ps` reads them.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub(super) fn round(x: &[f32; STEP]) -> Vector {
    // SAFETY: both loads are inside x, and 64 bytes are any `Vector`.
    unsafe {
        let (low, high) = (_mm512_loadu_ps(x.as_ptr()), _mm512_loadu_ps(x.as_ptr().add(STEP / 2)));
        std::mem::transmute(_mm512_cvtne2ps_pbh(high, low))
    }
}

/// Some outputs of some rows.
pub(super) struct Task<'a> {
    /// Rounded rows in groups, `[groups, steps, ROWS]`.
    pub(super) x: &'a [Vector],
    /// Rows of the weight, one for each output of the task.
    pub(super) weight: &'a [bf16],
    pub(super) d_in: usize,
    /// The task's outputs of each row.
    pub(super) y: Vec<&'a mut [f32]>,
}

impl Task<'_> {
    /// Computes the outputs of the task, `OUTPUTS` of `ROWS` rows at a time.
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    fn run<const ROWS: usize, const OUTPUTS: usize>(self, _pairs: Bf16Pairs) {
        let Self { x, weight, d_in, mut y } = self;
        let (groups, steps) = (x.as_chunks::<ROWS>().0, d_in.div_ceil(STEP));
        let outputs = weight.len() / d_in;
        for first in (0..outputs).step_by(OUTPUTS) {
            // Past the last output, the last one is computed again; that result is not stored.
            let mut weights = [weight; OUTPUTS];
            for output in 0..OUTPUTS {
                weights[output] = &weight[(first + output).min(outputs - 1) * d_in..][..d_in];
            }
            let last = outputs.min(first + OUTPUTS);
            // With one group of rows each weight is loaded once, so reading the weight takes the time.
            let is_memory_bound = groups.len() == steps;
            if !is_memory_bound {
                let next_group = OUTPUTS * d_in;
                prefetch(weight, first * d_in + next_group.max(2 * AHEAD), next_group);
            }
            for (x, y) in groups.chunks_exact(steps).zip(y.chunks_mut(ROWS)) {
                let sums = if is_memory_bound {
                    by_output::<ROWS, OUTPUTS>(x, &weights)
                } else {
                    by_step::<ROWS, OUTPUTS>(x, &weights)
                };
                let sums = add_lanes(sums);
                for (y, sums) in y.iter_mut().zip(sums.as_chunks::<OUTPUTS>().0) {
                    y[first..last].copy_from_slice(&sums[..last - first]);
                }
            }
        }
    }
}

/// A tile's accumulators, `[ROWS, OUTPUTS]`, one output after the other.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn by_output<const ROWS: usize, const OUTPUTS: usize>(
    x: &[[Vector; ROWS]],
    weights: &[&[bf16]; OUTPUTS],
) -> [__m512; SUMS] {
    let mut sums = [_mm512_setzero_ps(); SUMS];
    for output in 0..OUTPUTS {
        let (whole, tail) = weights[output].as_chunks::<STEP>();
        let mut of_output = [_mm512_setzero_ps(); ROWS];
        for (x, weight) in x.iter().zip(whole) {
            prefetch(weight, AHEAD, STEP);
            add_products(&mut of_output, x, [load(weight)]);
        }
        if !tail.is_empty() {
            add_products(&mut of_output, &x[whole.len()], [load_part(tail)]);
        }
        for row in 0..ROWS {
            sums[row * OUTPUTS + output] = of_output[row];
        }
    }
    sums
}

/// A tile's accumulators, `[ROWS, OUTPUTS]`, all outputs at once: each vector of x is loaded once.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn by_step<const ROWS: usize, const OUTPUTS: usize>(
    x: &[[Vector; ROWS]],
    weights: &[&[bf16]; OUTPUTS],
) -> [__m512; SUMS] {
    let mut sums = [_mm512_setzero_ps(); SUMS];
    let steps = weights[0].len() / STEP;
    let mut whole: [&[[bf16; STEP]]; OUTPUTS] = [&[]; OUTPUTS];
    for output in 0..OUTPUTS {
        whole[output] = &weights[output].as_chunks::<STEP>().0[..steps];
    }
    for (step, x) in x[..steps].iter().enumerate() {
        let mut vectors = [load(&x[0].0); OUTPUTS];
        for output in 0..OUTPUTS {
            vectors[output] = load(&whole[output][step]);
        }
        add_products(&mut sums, x, vectors);
    }
    if let Some(x) = x.get(steps) {
        let mut vectors = [load(&x[0].0); OUTPUTS];
        for output in 0..OUTPUTS {
            vectors[output] = load_part(&weights[output][steps * STEP..]);
        }
        add_products(&mut sums, x, vectors);
    }
    sums
}

/// Adds the products of one step to the accumulators, `[ROWS, OUTPUTS]`.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn add_products<const ROWS: usize, const OUTPUTS: usize, const LEN: usize>(
    sums: &mut [__m512; LEN],
    x: &[Vector; ROWS],
    weights: [__m512bh; OUTPUTS],
) {
    for row in 0..ROWS {
        let x = load(&x[row].0);
        for output in 0..OUTPUTS {
            let sum = &mut sums[row * OUTPUTS + output];
            *sum = _mm512_dpbf16_ps(*sum, x, weights[output]);
        }
    }
}

/// A vector of [`STEP`] elements.
#[inline]
#[target_feature(enable = "avx512f")]
fn load(from: &[bf16; STEP]) -> __m512bh {
    // SAFETY: the load is as long as `from`, and 64 bytes are any vector.
    unsafe { std::mem::transmute(_mm512_loadu_si512(from.as_ptr().cast())) }
}

/// The vector of a row's end: fewer than [`STEP`] elements, then zeros.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn load_part(from: &[bf16]) -> __m512bh {
    let from: &[u16] = from.reinterpret_cast();
    let mask = (1 << from.len()) - 1;
    // SAFETY: the mask has a bit for each element of `from`; a masked load touches no other memory.
    unsafe { std::mem::transmute(_mm512_maskz_loadu_epi16(mask, from.as_ptr().cast())) }
}

/// The sum of each accumulator's lanes, in the accumulators' order. Lanes 8 apart are added first, then 4, 2 and 1; the
/// sums of two accumulators share a vector from then on.
#[inline]
#[target_feature(enable = "avx512f")]
fn add_lanes(sums: [__m512; SUMS]) -> [f32; SUMS] {
    let mut eights = [_mm512_setzero_ps(); 8];
    for (i, to) in eights.iter_mut().enumerate() {
        let at = i / 4 * 8 + i % 4;
        let (a, b) = (sums[at], sums[at + 4]);
        *to = _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xee>(a, b));
    }
    let mut fours = [_mm512_setzero_ps(); 4];
    for (i, to) in fours.iter_mut().enumerate() {
        let (a, b) = (eights[i], eights[i + 4]);
        *to = _mm512_add_ps(_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xdd>(a, b));
    }
    let mut twos = [_mm512_setzero_ps(); 2];
    for (i, to) in twos.iter_mut().enumerate() {
        let (a, b) = (_mm512_castps_pd(fours[2 * i]), _mm512_castps_pd(fours[2 * i + 1]));
        let (low, high) = (_mm512_unpacklo_pd(a, b), _mm512_unpackhi_pd(a, b));
        *to = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
    }
    let (a, b) = (twos[0], twos[1]);
    let ones = _mm512_add_ps(_mm512_shuffle_ps::<0x88>(a, b), _mm512_shuffle_ps::<0xdd>(a, b));
    // SAFETY: 64 bytes are any 16 floats.
    unsafe { std::mem::transmute(ones) }
}

/// Prefetches `len` elements of the slice from `at` on; they may be out of bounds.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn prefetch(slice: &[bf16], at: usize, len: usize) {
    for line in (at..at + len).step_by(STEP) {
        _mm_prefetch::<_MM_HINT_T1>(slice.as_ptr().wrapping_add(line).cast());
    }
}
