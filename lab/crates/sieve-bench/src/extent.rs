//! What a check covers: its kernels, its device, how many random calls it draws and from which sizes.
use sieve_kernels::{AttentionNeeds, AttentionShape, DeviceReport, KernelPolicy, NeededKernels, NeededKeys, SumOrder};

/// Head widths of keys and of values.
pub(crate) const WIDTHS: &[(usize, usize)] =
    &[(16, 16), (32, 32), (64, 64), (96, 96), (128, 128), (192, 128), (256, 256)];

/// Numbers of query heads for each KV head.
pub(crate) const GROUPS: &[usize] = &[1, 2, 3, 4, 7, 8, 16];

/// Factors on queries and keys of successive calls. With 8, logits are as large as a trained model's (50 to 100); with
/// 64 the softmax has one key; with 0.01 all keys have the same weight. Seven entries, since calls also cycle through
/// lists of 2, 3, 4 and 5 kinds: every kind then meets every factor.
const MAGNITUDES: [f32; 7] = [1.0, 8.0, 1.0, 0.01, 1.0, 64.0, 1.0];

/// Numbers of the largest operand in a short check of the kernels around attention. The host draws every number and
/// computes the reference, so that larger ones took most of such a check.
const MOST_NUMBERS_OF_A_SHORT_CHECK: usize = 4 << 20;

/// A group of kernels to check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckPart {
    /// All groups.
    All,
    /// Kernels of dense, windowed and dynamic mask attention.
    Attention,
    /// Kernels of a window, first keys and bands, and their model.
    Bands,
    /// Attention under selectors' masks, on a GPU.
    Sparse,
    /// Kernels of native sparse attention.
    Nsa,
    /// Kernels of multi-head latent attention.
    Mla,
    /// Kernels of sinks, decoding, and models with sinks.
    Sinks,
    /// The order of keys of dynamic mask attention, in whole rows and in steps.
    KeyOrder,
    /// The choice and the bits of kinds that choose blocks, in whole rows and in steps.
    BlockOrder,
}

/// The number of random calls of a check, and the sizes that they are drawn from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extent {
    /// Number of random attention calls.
    pub(crate) cases: usize,
    /// Tokens of the longest random row of attention.
    pub(crate) longest: usize,
    /// Seed of the random calls.
    pub(crate) seed: u64,
    /// Head widths of keys and of values.
    pub(crate) widths: &'static [(usize, usize)],
    /// Numbers of query heads for each KV head.
    pub(crate) groups: &'static [usize],
    /// Whether the CPU emulator runs the kernels, a million times slower than a GPU.
    pub(crate) is_emulated: bool,
    /// Factor on the queries and keys of all calls; when absent, each call takes the next of [`MAGNITUDES`].
    pub(crate) magnitude: Option<f32>,
    /// Whether the user checks one group of kernels alone; it then gets as many calls as attention.
    pub(crate) is_part: bool,
    /// Kernel family and order of sums that the ops use.
    pub(crate) policy: KernelPolicy,
}

impl Extent {
    /// An extent with every head width and group size.
    pub(crate) const fn all(cases: usize, longest: usize, seed: u64) -> Self {
        Self {
            cases,
            longest,
            seed,
            widths: WIDTHS,
            groups: GROUPS,
            is_emulated: false,
            magnitude: None,
            is_part: false,
            policy: KernelPolicy::DEFAULT,
        }
    }

    /// For the emulator: one width and one group size, since each needs its own compiled programs.
    pub(crate) const fn emulated(cases: usize, longest: usize, seed: u64) -> Self {
        Self { widths: &[(32, 32)], groups: &[2], is_emulated: true, ..Self::all(cases, longest, seed) }
    }

    /// Whether to check rows of thousands of tokens: not on the emulator, and not where the random rows are so short
    /// that the check is meant to be a fast one (under compute-sanitizer, a long pass takes minutes).
    pub(crate) fn has_long_rows(&self) -> bool {
        self.longest > 200 && !self.is_emulated
    }

    /// Returns `emulated` on the emulator, otherwise `all`.
    pub(crate) fn pick<T>(&self, emulated: T, all: T) -> T {
        if self.is_emulated { emulated } else { all }
    }

    /// The sizes to check: all, or on the emulator the first two.
    pub(crate) fn sizes<T>(&self, all: &'static [T]) -> &'static [T] {
        &all[..self.pick(2, all.len())]
    }

    /// The shapes to check, as [`sizes`](Self::sizes). A short check leaves out a shape whose sizes multiply to more
    /// than [`MOST_NUMBERS_OF_A_SHORT_CHECK`].
    pub(crate) fn shapes<const D: usize>(&self, all: &'static [[usize; D]]) -> impl Iterator<Item = [usize; D]> {
        self.sizes(all).iter().copied().filter(|shape| self.takes(shape.iter().product()))
    }

    /// Whether an operand of so many numbers is checked: in a short check not the large ones.
    pub(crate) fn takes(&self, numbers: usize) -> bool {
        self.has_long_rows() || numbers <= MOST_NUMBERS_OF_A_SHORT_CHECK
    }

    /// Factor on the queries and keys of call number `at` of an op.
    pub(crate) fn magnitude_of(&self, at: usize) -> f32 {
        self.magnitude.unwrap_or(MAGNITUDES[at % MAGNITUDES.len()])
    }

    /// Number of calls of slow checks (selections, decoding): `cases` where the user checks one group alone; otherwise
    /// a fifth of them, at least one of each of four kinds.
    pub(crate) fn few(&self) -> usize {
        if self.is_part { self.cases } else { self.cases.div_ceil(5).max(4) }
    }
}

/// Adds the specialisations of attention over these keys, in both orders of sums.
pub(crate) fn add_attention(list: &mut NeededKernels, gpu: &DeviceReport, shape: AttentionShape, keys: &[NeededKeys]) {
    for &keys in keys {
        for order in [SumOrder::Any, SumOrder::Fixed] {
            let needs = AttentionNeeds { shape, keys, order, has_sinks: keys == NeededKeys::Neighbours };
            list.extend(needs.kernels(&gpu.arch()));
            // No model decodes by heads whose values are narrower, but checks do.
            list.extend(needs.decoding(&gpu.arch()));
        }
    }
}
