//! Checks the kernel that brings a caller's blocks into the form that attention reads, number by number.
use crate::case::{Case, Cuts, Keys};
use crate::device::Device;
use crate::error::Result;
use crate::extent::Extent;
use crate::report::{Outcome, Report, wrong};
use crate::scores::Scores;
use sieve_core::SELECTED_SIZES;
use sieve_kernels::{AttentionShape, SelectedBlocks};
use sieve_testing::Random;

/// Tokens of a row on a GPU. The last one has so many blocks of 16 tokens that a warp, which keeps a bit for each
/// block, reads their bits in several passes.
const LENGTHS: &[usize] = &[1, 63, 64, 1025, 3000, 20_001];
const EMULATED_LENGTHS: &[usize] = &[1, 65, 600];

/// Indices that are no block of any row.
const NONE: [i32; 4] = [-1, -2, i32::MIN, i32::MAX];

/// The blocks of one call, in the order in which a caller has them.
struct Given {
    case: Case,
    block: usize,
    num_indices: usize,
    indices: Vec<i32>,
    counts: Option<Vec<i32>>,
}

impl Given {
    /// Draws a call, with its label; a tenth of the indices and of the counts are out of range.
    fn draw(random: &mut Random, extent: &Extent) -> Result<(Self, String)> {
        let block = random.one_of(&SELECTED_SIZES);
        let seq_len = random.one_of(extent.pick(EMULATED_LENGTHS, LENGTHS));
        let (batch, choosers) = (random.between(1, 3), random.between(1, 5));
        let few = random.between(1, 20);
        let num_indices = random.one_of(&[1, 16, few, seq_len.div_ceil(block).min(700)]);
        let shape = AttentionShape::new(batch, seq_len, [choosers; 2], [16, 16]);
        let cuts = random.one_of(&[Cuts::Count(1), Cuts::Few, Cuts::Mixed, Cuts::Tokens]);
        let seed = random.between(0, 1 << 30) as u64;
        let case = Case::draw(shape, Keys::Dense, cuts, &Scores::RANDOM[0], seed)?;
        let lists = batch * seq_len * choosers;
        let mut index = || {
            if random.chance(0.1) {
                random.one_of(&NONE)
            } else {
                // Some indices are after the query's own block, some occur twice.
                random.below(seq_len.div_ceil(block) + 1) as i32
            }
        };
        let indices = (0..lists * num_indices).map(|_| index()).collect();
        let count = |random: &mut Random| {
            if random.chance(0.1) { random.one_of(&NONE) } else { random.below(num_indices + 1) as i32 }
        };
        let counts = random.chance(0.5).then(|| (0..lists).map(|_| count(random)).collect::<Vec<i32>>());
        let label = format!(
            "batch={batch},seq_len={seq_len} {choosers} choosers, {num_indices} blocks of {block} {cuts:?} counts {} \
             seed {seed}",
            counts.is_some()
        );
        Ok((Self { case, block, num_indices, indices, counts }, label))
    }

    fn expected(&self) -> Vec<i32> {
        let Self { indices, counts, num_indices, block, case } = self;
        let (num_indices, block) = (*num_indices, *block);
        let given = sieve_cpu::nsa::SelectedBlocks { indices, counts: counts.as_deref(), num_indices, block };
        given.attended(&case.doc_start, case.shape.seq_len)
    }

    /// Compares every list of blocks that the kernel writes with the definition.
    fn on_device(&self, device: &dyn Device) -> Outcome {
        let shape = self.case.shape;
        let [batch, seq_len, choosers] = [shape.batch, shape.seq_len, shape.num_kv_heads];
        let indices = device.int(&self.indices, &[batch, seq_len, choosers, self.num_indices]);
        let counts = self.counts.as_ref().map(|counts| device.int(counts, &[batch, seq_len, choosers]));
        let start = device.int(&self.case.doc_start, &[batch, seq_len]);
        device.poison(shape);
        let selected = SelectedBlocks { indices: &indices, counts: counts.as_ref(), block: self.block };
        let (attended, _) = selected.attended(&start)?;
        let (found, expected) = (device.ints(&attended)?, self.expected());
        let count = attended.shape()[3];
        let lists = found.chunks_exact(count).zip(expected.chunks_exact(count));
        match lists.enumerate().find(|(_, (found, expected))| found != expected) {
            None if found.len() == expected.len() => Ok(0.0),
            None => wrong("another number of blocks"),
            Some((list, (found, expected))) => wrong(format!("list {list} is {found:?}, expected {expected:?}")),
        }
    }
}

/// Random calls of the kernel.
pub(super) fn check(report: &mut Report, device: &dyn Device, extent: &Extent) -> Result<()> {
    let mut random = Random(extent.seed ^ 0x0073_656c); // "sel" in ASCII: other numbers than the other checks draw
    for _ in 0..2 * extent.few() {
        let (given, label) = Given::draw(&mut random, extent)?;
        report.add("selected_blocks", "kernel", &label, given.on_device(device));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::emulator::tests::{AMPERE, emulated};

    #[test]
    fn the_kernel_and_the_definition_agree() {
        let extent = Extent { is_part: true, ..Extent::emulated(12, 130, 3) };
        emulated("selected blocks", AMPERE, 1, |emulator, report| check(report, emulator, &extent));
    }
}
