//! Checks attention whose biases are far larger than `q . k`, as DMA's `exp(z)` can be: both kernel families and both
//! sum orders, against references that subtract a row's largest bias before they add it.
use crate::attention::{Prepared, check_wrapper};
use crate::case::{Case, Cuts, Keys};
use crate::decode;
use crate::device::Device;
use crate::error::Result;
use crate::extent::Extent;
use crate::on_device::OnDevice;
use crate::report::{Outcome, Report};
use crate::scores::Scores;
use crate::strided::Layout;
use rayon::prelude::*;
use sieve_kernels::{AttentionShape, KeyLists, Selection};
use sieve_testing::Random;

/// How the biases of a case are drawn.
#[derive(Clone, Copy, Debug)]
enum Biases {
    /// `exp(min(z, 60))`: ten keys with this z, the others 0.
    Ten(f32),
    /// `exp(min(z, 60))`: ten keys with z around this number, of standard deviation 0.5; the others 0.
    Apart(f32),
    /// `exp(min(z, 60))`: ten keys with z of 60 to 70, which are all clamped to 60; the others 0.
    Clamped,
    /// z itself, anywhere from -8192 to 8192.
    Anywhere,
    /// z itself, from -8192 in the first key to 8192 in the last.
    Rising,
    /// z is -8192 or 8192, and the bias is z.
    Ends,
    /// z itself, normal numbers around this one.
    Around(f32),
}

const BIASES: [Biases; 15] = [
    Biases::Ten(10.0),
    Biases::Ten(14.0),
    Biases::Ten(20.0),
    Biases::Ten(40.0),
    Biases::Ten(60.0),
    Biases::Apart(10.0),
    Biases::Apart(14.0),
    Biases::Apart(20.0),
    Biases::Apart(40.0),
    Biases::Clamped,
    Biases::Anywhere,
    Biases::Rising,
    Biases::Ends,
    Biases::Around(8192.0),
    Biases::Around(-8192.0),
];

impl Biases {
    /// Draws the scores and the biases of one row.
    fn draw(self, seq_len: usize, random: &mut Random) -> (Vec<f32>, Vec<f32>) {
        let mut z = vec![0.0; seq_len];
        let ten = |random: &mut Random, z: &mut Vec<f32>, draw: &dyn Fn(&mut Random) -> f32| {
            for _ in 0..10 {
                let at = random.below(seq_len);
                z[at] = draw(random);
            }
        };
        match self {
            Self::Ten(at) => ten(random, &mut z, &|_| at),
            Self::Apart(at) => ten(random, &mut z, &|random| at + 0.5 * random.normal_with_tails()),
            Self::Clamped => ten(random, &mut z, &|random| 60.0 + 10.0 * random.unit() as f32),
            Self::Anywhere => fill(&mut z, &mut |_| 16384.0 * random.unit() as f32 - 8192.0),
            Self::Rising => {
                let at = |i: usize| 16384.0 * (i as f32 + 0.5) / seq_len as f32 - 8192.0;
                fill(&mut z, &mut |i| at(i) + random.normal_with_tails());
            }
            Self::Around(middle) => fill(&mut z, &mut |_| middle + random.normal_with_tails()),
            Self::Ends => fill(&mut z, &mut |_| random.one_of(&[-8192.0, 8192.0])),
        }
        let delta = match self {
            Self::Ten(_) | Self::Apart(_) | Self::Clamped => z.iter().map(|z| z.min(60.0).exp()).collect(),
            Self::Anywhere | Self::Rising | Self::Ends | Self::Around(_) => z.clone(),
        };
        (z, delta)
    }
}

/// Sets each `z[i]` to `draw(i)`.
fn fill(z: &mut [f32], draw: &mut dyn FnMut(usize) -> f32) {
    z.iter_mut().enumerate().for_each(|(i, z)| *z = draw(i));
}

/// Head width and group size. The first two take Hopper kernels; group 3 has Hopper kernels, but sums dq in a fixed
/// order by the portable one; width 96 takes portable kernels.
const SHAPES: &[(usize, usize)] = &[(128, 2), (64, 4), (128, 3), (96, 2)];

/// Head width and group size on the emulator; one shape only, since each needs its own compiled programs.
const EMULATED_SHAPES: &[(usize, usize)] = &[(32, 2)];

/// Checks every kind of biases over all keys and over key lists of one and of several super-blocks (1024 queries each),
/// with one and with two documents a row.
pub(super) fn check_wrappers(report: &mut Report, device: &dyn Device, extent: &Extent) -> Result<()> {
    let shapes = extent.pick(EMULATED_SHAPES, SHAPES);
    let mut draws = Vec::new();
    for (at, biases) in BIASES.into_iter().enumerate() {
        let key_sets = [Keys::chosen(64), Keys::chosen(100), Keys::Biased];
        for (set, keys) in key_sets.into_iter().enumerate() {
            // The emulator is slow: there each kind of biases gets one of the three key sets.
            if !extent.is_emulated || set == at % key_sets.len() {
                let shape = shapes[(at + set) % shapes.len()];
                draws.push((biases, keys, shape, at + set));
            }
        }
    }
    let prepared: Vec<Result<Prepared>> = draws
        .into_par_iter()
        .enumerate()
        .map(|(at, (biases, keys, shape, number))| prepare(biases, keys, shape, number, extent.seed + at as u64))
        .collect();
    for prepared in prepared {
        let name = "attention, large biases";
        let lists = |call: &OnDevice<'_>| call.lists(KeyLists::TILE_QUERIES);
        check_wrapper(report, name, &prepared?, device, lists);
    }
    check_decoding(report, device, shapes[0].0.min(64), extent.seed)?;
    check_empty_list(report, device, extent)
}

/// Checks DMA's decoding against its fixed-size cache, with large biases, against attention over whole rows.
fn check_decoding(report: &mut Report, device: &dyn Device, head_dim: usize, seed: u64) -> Result<()> {
    for biases in [Biases::Ten(14.0), Biases::Ten(20.0), Biases::Clamped] {
        let (keys, widths) = (Keys::chosen(40), (head_dim, 2));
        let case = draw(biases, keys, 150, widths, Cuts::Count(1), seed)?;
        let outcome = || -> Outcome { decode::judge(&case, &OnDevice::new(&case, device).dma_decode()?) };
        let label = format!("{biases:?} 150 tokens, 40 slots, seed {seed}");
        report.add("dma_decode, large biases", "kernel", &label, outcome());
    }
    Ok(())
}

/// Draws a case and computes its references; cases of an odd `number` have two documents a row.
fn prepare(biases: Biases, keys: Keys, widths: (usize, usize), number: usize, seed: u64) -> Result<Prepared> {
    let seq_len = match keys {
        // Key lists of two super-blocks; 333 tokens have one list.
        Keys::Chosen(window) if window.keep_window_size == 64 => 1100,
        Keys::Chosen(_) => 333,
        _ => 200,
    };
    let cuts = Cuts::Count(1 + number % 2);
    let case = draw(biases, keys, seq_len, widths, cuts, seed)?;
    let label = format!("{biases:?} {keys} {cuts:?} seq_len={seq_len} {widths:?} seed {seed}");
    Ok(Prepared::new(case, Layout::Contiguous, label))
}

/// Draws a case with these biases; `widths` are head width and group size.
fn draw(biases: Biases, keys: Keys, seq_len: usize, widths: (usize, usize), cuts: Cuts, seed: u64) -> Result<Case> {
    let mut case = Case::draw(shape(seq_len, widths), keys, cuts, &Scores::Tied, seed)?;
    let mut random = Random(seed + 1000);
    let rows = case.shape.batch * case.shape.num_kv_heads;
    let (z, delta): (Vec<_>, Vec<_>) = (0..rows).map(|_| biases.draw(seq_len, &mut random)).unzip();
    case.set_biases(z.concat(), delta.concat());
    Ok(case)
}

/// Checks a super-block whose queries see no key, so that its key list is empty. K, V and biases of its keys are NaN.
fn check_empty_list(report: &mut Report, device: &dyn Device, extent: &Extent) -> Result<()> {
    for &widths in extent.pick(EMULATED_SHAPES, &[(128, 2), (64, 1)]) {
        let (seq_len, kept) = (1100, 200);
        let (shape, keys) = (shape(seq_len, widths), Keys::chosen(kept));
        let mut case = Case::draw(shape, keys, Cuts::Count(1), &Scores::Tied, extent.seed)?;
        for (at, expire) in case.expire.iter_mut().enumerate() {
            let key = at % seq_len;
            // A key that expires at its own position is seen by no query.
            *expire = if key < 1024 { key } else { seq_len } as i32;
        }
        let expire = case.expire.clone();
        let label = format!("no query sees the first 1024 keys, {widths:?}");
        let prepared = Prepared::new(case, Layout::Contiguous, label);
        let lists = |call: &OnDevice<'_>| {
            let expire = device.int(&expire, &shape.per_key());
            let selection = Selection::of_expire(&expire, &call.inputs.doc_start, kept)?;
            call.inputs.lists_of(&selection, KeyLists::TILE_QUERIES).map(Some)
        };
        check_wrapper(report, "dma_attention, empty list", &prepared, device, lists);
    }
    Ok(())
}

fn shape(seq_len: usize, (head_dim, group): (usize, usize)) -> AttentionShape {
    AttentionShape::new(1, seq_len, [group * 2, 2], [head_dim, head_dim])
}
