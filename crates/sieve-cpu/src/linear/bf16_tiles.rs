//! GEMM with a bf16 weight by Intel's tile unit (AMX). `tdpbf16ps` adds the products of a tile of 16 outputs and 32
//! columns of the weight with a tile of as many elements of 16 rows of x to 16 x 16 sums. x is rounded to bf16 first.
//!
//! A tile of the weight is loaded from where it lies; tiles of x are made when x is rounded. Sums are transposed once,
//! when they are complete. A sum adds 32 products after the other in the order of the row, whatever the number of rows,
//! so that a token has the same bits alone and in a prompt.

use half::bf16;
use pulp::f32x16;
use pulp::x86::V4;
use std::arch::asm;
use std::cell::Cell;

use super::bf16_pairs::{STEP, Task, Vector, in_groups, prefetch, round};
use super::few_rows::Transpose;
use crate::simd::Bf16Tiles;

/// Rows of a tile, and its columns of 32 bits.
const SIDE: usize = 16;

/// Outputs of a panel, whose two tiles of the weight are multiplied with the same tiles of x.
const OUTPUTS: usize = 2 * SIDE;

/// Bytes between the rows of a tile that lies in one piece.
const ROW_BYTES: usize = SIDE * size_of::<f32>();

/// Sums of a tile, `[outputs, rows]`.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Sums([[f32; SIDE]; SIDE]);

/// What `ldtilecfg` reads: all eight tiles have 16 rows of 64 bytes.
#[repr(C, align(64))]
struct Shapes {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

thread_local! {
    /// Buffer of a panel of the weight whose tiles do not lie inside the weight.
    static PADDED: Cell<Vec<bf16>> = const { Cell::new(Vec::new()) };
}

/// As [`linear`](super::linear) for a bf16 weight, with x rounded to bf16. No size is 0.
pub(super) fn bf16_tiles(unit: Bf16Tiles, x: &[f32], weight: &[bf16], sizes: [usize; 3], y: &mut [f32]) {
    let d_in = sizes[1];
    // SAFETY: `unit` shows that the CPU has these instructions. A group of rows is a tile for each step.
    let round = |x: &[f32], tiles: &mut [Vector]| unsafe { round_to_tiles(unit, x, d_in, tiles) };
    // SAFETY: as for `round`.
    let run = |task: Task<'_>| unsafe { task_by_tiles(unit, task) };
    in_groups::<SIDE>(x, weight, sizes, y, round, run);
}

/// Rounds up to 16 rows of x and writes a tile for each step. Its row `p` has the elements `2p` and `2p + 1` of the
/// step, of one row of x after the other. Rows that are missing are 0.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn round_to_tiles(unit: Bf16Tiles, x: &[f32], d_in: usize, tiles: &mut [Vector]) {
    for (step, tile) in tiles.as_chunks_mut::<SIDE>().0.iter_mut().enumerate() {
        let mut square = [Vector::ZERO; SIDE];
        for (row, x) in x.chunks_exact(d_in).enumerate() {
            let x = &x[step * STEP..d_in.min((step + 1) * STEP)];
            square[row] = match x.first_chunk() {
                Some(whole) => round(whole),
                None => {
                    let mut last = [0.0; STEP];
                    last[..x.len()].copy_from_slice(x);
                    round(&last)
                }
            };
        }
        *tile = transposed(unit.simd, square);
    }
}

/// The square of 32-bit elements with rows and columns exchanged. `T` is a vector.
#[inline(always)]
fn transposed<T: Copy>(simd: V4, square: [T; SIDE]) -> [T; SIDE] {
    const { assert!(size_of::<T>() == size_of::<f32x16>()) };
    // SAFETY: both types are 16 vectors of 64 bytes, which are any bits.
    unsafe {
        let square = std::mem::transmute_copy::<[T; SIDE], [f32x16; SIDE]>(&square);
        std::mem::transmute_copy::<[f32x16; SIDE], [T; SIDE]>(&simd.transpose(square))
    }
}

/// Computes the outputs of the task, 32 of 32 rows at a time.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn task_by_tiles(unit: Bf16Tiles, Task { x, weight, d_in, mut y }: Task<'_>) {
    let steps = d_in.div_ceil(STEP);
    let groups: Vec<&[Vector]> = x.chunks_exact(steps * SIDE).collect();
    let outputs = weight.len() / d_in;
    let mut padded = PADDED.take();
    unit.begin();
    for first in (0..outputs).step_by(OUTPUTS) {
        let last = outputs.min(first + OUTPUTS);
        let panel = &weight[first * d_in..last * d_in];
        let (panel, stride) = if last - first == OUTPUTS && d_in.is_multiple_of(STEP) {
            (panel, d_in)
        } else {
            let stride = steps * STEP;
            padded.clear();
            padded.resize(OUTPUTS * stride, bf16::ZERO);
            for (to, from) in padded.chunks_exact_mut(stride).zip(panel.chunks_exact(d_in)) {
                to[..d_in].copy_from_slice(from);
            }
            (&padded[..], stride)
        };
        // With one or two groups of rows each weight is loaded once, so reading the weight takes the time: the next
        // panel is prefetched while this one is multiplied. With more of them it is prefetched at once.
        let next = weight.as_ptr().wrapping_add(last * d_in);
        if groups.len() > 2 {
            prefetch(weight, last * d_in, OUTPUTS * d_in);
        }
        let mut sums = [[Sums([[0.0; SIDE]; SIDE]); 2]; 2];
        for (x, y) in groups.chunks(2).zip(y.chunks_mut(OUTPUTS)) {
            let block = Block { panel, stride, x: [x[0], x[x.len() - 1]], next };
            if x.len() == 2 && groups.len() > 2 {
                unit.multiply_two(&block, &mut sums);
            } else {
                for (x, sums) in x.iter().zip(&mut sums) {
                    unit.multiply_one(&Block { x: [x, x], ..block }, sums);
                }
            }
            for (y, of_group) in y.chunks_mut(SIDE).zip(&sums) {
                for (half, of_half) in of_group.iter().enumerate() {
                    let first = first + half * SIDE;
                    let by_row = transposed(unit.simd, of_half.0);
                    for (y, sums) in y.iter_mut().zip(&by_row) {
                        let y = &mut y[first.min(last)..last.min(first + SIDE)];
                        match y.first_chunk_mut() {
                            Some(whole) => *whole = *sums,
                            None => y.copy_from_slice(&sums[..y.len()]),
                        }
                    }
                }
            }
        }
    }
    unit.end();
    PADDED.set(padded);
}

/// The operands of 32 outputs of one or two groups of rows.
#[derive(Clone, Copy)]
struct Block<'a> {
    /// 32 rows of the weight.
    panel: &'a [bf16],
    /// Elements from a row of the panel to the next one, a multiple of [`STEP`].
    stride: usize,
    /// Tiles of x, of two groups of rows, `[steps, SIDE]` each.
    x: [&'a [Vector]; 2],
    /// What is prefetched beside the product with one group: as many elements as the panel has. It may lie outside the
    /// weight.
    next: *const bf16,
}

impl Block<'_> {
    /// Whether all steps' tiles lie inside the slices.
    fn fits(&self) -> bool {
        let steps = self.stride / STEP;
        let panel_fits = self.stride.is_multiple_of(STEP) && steps > 0 && self.panel.len() == OUTPUTS * self.stride;
        panel_fits && self.x.iter().all(|x| x.len() == steps * SIDE)
    }

    /// What the unit computes, for tests on other CPUs.
    #[cfg(test)]
    fn emulate(&self, group: usize, sums: &mut [Sums; 2]) {
        *sums = [Sums([[0.0; SIDE]; SIDE]); 2];
        for (step, x) in self.x[group].as_chunks::<SIDE>().0.iter().enumerate() {
            for output in 0..OUTPUTS {
                let weight = &self.panel[output * self.stride + step * STEP..][..STEP];
                for row in 0..SIDE {
                    let mut halves = [0.0_f32; 2];
                    for pair in 0..SIDE {
                        for (element, sum) in halves.iter_mut().enumerate() {
                            let x = x[pair].0[2 * row + element].to_f32();
                            *sum = x.mul_add(weight[2 * pair + element].to_f32(), *sum);
                        }
                    }
                    sums[output / SIDE].0[output % SIDE][row] += halves[0] + halves[1];
                }
            }
        }
    }
}

impl Bf16Tiles {
    /// Gives this thread's tiles their shapes.
    fn begin(self) {
        let shapes = Shapes {
            palette: 1,
            start_row: 0,
            reserved: [0; 14],
            row_bytes: std::array::from_fn(|tile| if tile < 8 { ROW_BYTES as u16 } else { 0 }),
            rows: std::array::from_fn(|tile| if tile < 8 { SIDE as u8 } else { 0 }),
        };
        #[cfg(test)]
        if self.is_emulated {
            return;
        }
        // SAFETY: `self` shows that the CPU has this instruction and that the system lets this process use tiles. They
        // belong to nothing else: neither Rust nor a library keeps values in them across calls.
        unsafe { asm!("ldtilecfg [{shapes}]", shapes = in(reg) &shapes, options(nostack, readonly)) };
    }

    /// Sums of the panel's halves with the first group of x.
    fn multiply_one(self, block: &Block<'_>, sums: &mut [Sums; 2]) {
        assert!(block.fits(), "tiles of other sizes than a step's");
        #[cfg(test)]
        if self.is_emulated {
            return block.emulate(0, sums);
        }
        let steps = block.stride / STEP;
        // SAFETY: `self` shows that the CPU has these instructions and that the system saves its tiles; `begin` gave
        // them their shapes. `fits` says that each step's tiles lie inside the panel and inside x: 16 rows of 64 bytes
        // in each half of the panel, `stride` elements apart, and 1024 bytes of x. A prefetch makes no address fault.
        unsafe {
            asm!(
                "tilezero tmm0",
                "tilezero tmm1",
                "2:",
                "tileloadd tmm6, [{x} + {row}*1]",
                "tileloadd tmm4, [{low} + {stride}*1]",
                "tileloadd tmm5, [{high} + {stride}*1]",
                "prefetcht1 [{next}]", "prefetcht1 [{next} + 64]",
                "prefetcht1 [{next} + 128]", "prefetcht1 [{next} + 192]",
                "prefetcht1 [{next} + 256]", "prefetcht1 [{next} + 320]",
                "prefetcht1 [{next} + 384]", "prefetcht1 [{next} + 448]",
                "prefetcht1 [{next} + 512]", "prefetcht1 [{next} + 576]",
                "prefetcht1 [{next} + 640]", "prefetcht1 [{next} + 704]",
                "prefetcht1 [{next} + 768]", "prefetcht1 [{next} + 832]",
                "prefetcht1 [{next} + 896]", "prefetcht1 [{next} + 960]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "prefetcht1 [{next} + 1024]", "prefetcht1 [{next} + 1088]",
                "prefetcht1 [{next} + 1152]", "prefetcht1 [{next} + 1216]",
                "prefetcht1 [{next} + 1280]", "prefetcht1 [{next} + 1344]",
                "prefetcht1 [{next} + 1408]", "prefetcht1 [{next} + 1472]",
                "prefetcht1 [{next} + 1536]", "prefetcht1 [{next} + 1600]",
                "prefetcht1 [{next} + 1664]", "prefetcht1 [{next} + 1728]",
                "prefetcht1 [{next} + 1792]", "prefetcht1 [{next} + 1856]",
                "prefetcht1 [{next} + 1920]", "prefetcht1 [{next} + 1984]",
                "tdpbf16ps tmm1, tmm5, tmm6",
                "add {low}, 64",
                "add {high}, 64",
                "add {x}, 1024",
                "add {next}, 2048",
                "dec {steps}",
                "jnz 2b",
                "tilestored [{sums} + {row}*1], tmm0",
                "tilestored [{sums} + {row}*1 + 1024], tmm1",
                low = inout(reg) block.panel.as_ptr() => _,
                high = inout(reg) block.panel[SIDE * block.stride..].as_ptr() => _,
                stride = in(reg) block.stride * size_of::<bf16>(),
                x = inout(reg) block.x[0].as_ptr() => _,
                next = inout(reg) block.next => _,
                steps = inout(reg) steps => _,
                sums = in(reg) sums.as_mut_ptr(),
                row = in(reg) ROW_BYTES,
                out("tmm0") _, out("tmm1") _, out("tmm4") _, out("tmm5") _, out("tmm6") _,
                options(nostack),
            );
        }
    }

    /// Sums of the panel's halves with both groups of x, `[groups, halves]`.
    fn multiply_two(self, block: &Block<'_>, sums: &mut [[Sums; 2]; 2]) {
        assert!(block.fits(), "tiles of other sizes than a step's");
        #[cfg(test)]
        if self.is_emulated {
            return sums.iter_mut().enumerate().for_each(|(group, sums)| block.emulate(group, sums));
        }
        let steps = block.stride / STEP;
        // SAFETY: as in `multiply_one`, with both groups of x.
        unsafe {
            asm!(
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                "2:",
                "tileloadd tmm6, [{x} + {row}*1]",
                "tileloadd tmm4, [{low} + {stride}*1]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm5, [{high} + {stride}*1]",
                "tdpbf16ps tmm1, tmm5, tmm6",
                "tileloadd tmm7, [{x2} + {row}*1]",
                "tdpbf16ps tmm2, tmm4, tmm7",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "add {low}, 64",
                "add {high}, 64",
                "add {x}, 1024",
                "add {x2}, 1024",
                "dec {steps}",
                "jnz 2b",
                "tilestored [{sums} + {row}*1], tmm0",
                "tilestored [{sums} + {row}*1 + 1024], tmm1",
                "tilestored [{sums} + {row}*1 + 2048], tmm2",
                "tilestored [{sums} + {row}*1 + 3072], tmm3",
                low = inout(reg) block.panel.as_ptr() => _,
                high = inout(reg) block.panel[SIDE * block.stride..].as_ptr() => _,
                stride = in(reg) block.stride * size_of::<bf16>(),
                x = inout(reg) block.x[0].as_ptr() => _,
                x2 = inout(reg) block.x[1].as_ptr() => _,
                steps = inout(reg) steps => _,
                sums = in(reg) sums.as_mut_ptr(),
                row = in(reg) ROW_BYTES,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            );
        }
    }

    /// Makes this thread's tiles empty, so that the system has nothing to save.
    fn end(self) {
        #[cfg(test)]
        if self.is_emulated {
            return;
        }
        // SAFETY: as in `begin`.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}
