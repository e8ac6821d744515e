//! Checks and times the embedding lookup and its gradient.
use super::wrappers::{GAP, LaunchCheck, SEED, VOCAB};
use crate::device::Device;
use crate::extent::Extent;
use crate::report::{Outcome, Report};
use crate::timed::{Bench, Work};
use rayon::prelude::*;
use sieve_kernels::DType;
use sieve_kernels::step::{embedding_backward, embedding_forward};
use sieve_testing::Random;

/// Checks both kernels at sizes `[tokens, vocab, width]`.
pub(super) fn check_launches(report: &mut Report, device: &dyn Device, extent: &Extent) {
    let tables: &'static [[usize; 3]] = &[
        [61, 7, 64],
        [33, 257, 72],
        [1, 5, 8],
        [4097, 50280, 768],
        [5000, 300, 2056],
        [777, 100_000, 64],
        [31, 3000, 4096],
    ];
    for [tokens, vocab, width] in extent.shapes(tables) {
        let weight = drawn(extent.seed, [vocab, width]);
        for ids in [Ids::Any, Ids::Same, Ids::Outside] {
            let case = format!("{tokens} tokens of {vocab} x {width}, {ids:?}");
            let calls = LaunchCheck::new(device, extent.seed + 1);
            let outcome = embedding_launches(calls, &weight, [tokens, vocab, width], ids);
            report.add("embedding", "kernel", &case, outcome);
        }
    }
}

/// Random weights, drawn on all cores, each row from a seed of its own: the largest table has 39 million numbers.
fn drawn(seed: u64, [vocab, width]: [usize; 2]) -> Vec<f32> {
    let row = |at: usize| Random(seed + at as u64).bf16_normals(width);
    (0..vocab).into_par_iter().flat_map_iter(row).collect()
}

/// How the token ids of a case are drawn.
#[derive(Clone, Copy, Debug)]
enum Ids {
    /// Uniform over the vocabulary.
    Any,
    /// The same id for every token.
    Same,
    /// Uniform, but two of seven ids are -1 or `vocab`, which are outside the vocabulary.
    Outside,
}

/// Times the lookup and its gradient over token ids as in text, and the gradient where all ids are the same.
pub(super) fn bench(bench: &mut Bench<'_>, tokens: usize, width: usize) {
    let mut random = Random(SEED);
    // Zipf's law, as in text: the token of rank r has a probability of about 1 / r.
    let zipf = |random: &mut Random| ((VOCAB as f64).powf(random.unit()) - 1.0) as usize;
    let ids: Vec<i32> = (0..tokens).map(|_| zipf(&mut random).min(VOCAB - 1) as i32).collect();
    let mut unique = ids.clone();
    unique.sort_unstable();
    unique.dedup();
    let (weight, dy) = (bench.bf16([VOCAB, width]), bench.bf16([1, tokens, width]));
    let shape = format!("{tokens}x{width}, {} ids", unique.len());
    let (elements, unique_elements) = ((tokens * width) as f64, (unique.len() * width) as f64);
    let upload = |ids: &[i32]| bench.device.int(ids, &[1, tokens]);
    let (any, same) = (upload(&ids), upload(&vec![7; tokens]));
    // bf16 rows of the table are read once and written for each token.
    let work = Work::Bytes(2.0 * elements + 2.0 * unique_elements);
    bench.row("embedding forward", &shape, work, || embedding_forward(&weight, &any));
    let backward = |ids| embedding_backward(&dy, ids, VOCAB);
    // dy is read in bf16; f32 sums and the tokens' order, two i32 each, are read and written.
    let work = Work::Bytes(2.0 * elements + 8.0 * unique_elements + 16.0 * tokens as f64);
    bench.row("embedding backward", &shape, work, || backward(&any));
    let shape = format!("{tokens}x{width}, one id");
    let work = Work::Bytes(2.0 * elements);
    bench.row("embedding backward", &shape, work, || backward(&same));
}

/// Compares the lookup with the table's rows, and its gradient with sums in f64; two runs of the gradient must be
/// equal.
fn embedding_launches(
    mut calls: LaunchCheck<'_>,
    weight: &[f32],
    [tokens, vocab, width]: [usize; 3],
    kind: Ids,
) -> Outcome {
    let dy = calls.pitched([tokens, width])?;
    let ids: Vec<i32> = (0..tokens)
        .map(|at| match kind {
            Ids::Same => 3,
            Ids::Outside if at % 7 == 0 => -1,
            Ids::Outside if at % 7 == 1 => vocab as i32,
            _ => calls.random.below(vocab) as i32,
        })
        .collect();
    let ids_on_device = calls.device.int(&ids, &[1, tokens]);
    let pitch = width + GAP;
    let strides = [tokens * pitch, pitch, 1];
    let dy_on_device = dy.tensor.view("check", "dy", &[1, tokens, width], &strides)?;
    let mut expected = Vec::new();
    let mut sums = vec![0.0f64; vocab * width];
    for (at, &id) in ids.iter().enumerate() {
        if id < 0 || id as usize >= vocab {
            // Outside the vocabulary: a row of NaN, and no gradient.
            expected.extend(std::iter::repeat_n(f32::NAN, width));
            continue;
        }
        let row = id as usize * width;
        expected.extend(&weight[row..row + width]);
        for column in 0..width {
            sums[row + column] += f64::from(dy.values[at * width + column]);
        }
    }
    let table = [vocab, width];
    let weight = calls.device.float(weight, &table, DType::BF16);
    calls.holds("rows", &embedding_forward(&weight, &ids_on_device)?, &expected)?;
    let sums: Vec<f32> = sums.into_iter().map(|x| x as f32).collect();
    let backward = || embedding_backward(&dy_on_device, &ids_on_device, vocab);
    let dweight = backward()?;
    calls.close("dweight", &dweight, &sums)?;
    calls.equal("dweight of two runs", &backward()?, &dweight)?;
    Ok(calls.worst)
}
