//! How much a check draws, and from what.
use sieve_kernels::KernelPolicy;

/// Widths of keys and of values.
const WIDTHS: &[(usize, usize)] = &[
    (16, 16),
    (32, 32),
    (64, 64),
    (96, 96),
    (128, 128),
    (192, 128),
    (256, 256),
];

/// Query heads a KV head.
const GROUPS: &[usize] = &[1, 2, 3, 4, 7, 8, 16];

/// Tokens of a selection: one block, several super-blocks, several blocks of survivors, more leaving times than one
/// window of bits.
const LENGTHS: &[usize] = &[1, 2, 63, 1024, 1025, 3000, 8193, 20001, 131_073, 300_001];

/// Tokens, kept keys and local window of selections in rows so long (more than 16,384 tokens) that their lists start
/// from survivors, which a selection with a local window finds in a pass of its own; and of one short row.
const LOCAL_WINDOWS: &[[usize; 3]] = &[
    [1500, 400, 300],
    [16_385, 301, 300],
    [20_001, 2048, 300],
    [40_000, 300, 300],
];

/// Factors on queries and keys of successive calls. Logits of trained models reach 50 to 100, as of 8 here; 64 leaves
/// one key a query, and 0.01 all keys alike. As many as no other list of kinds that calls go through in turn.
const MAGNITUDES: [f32; 7] = [1.0, 8.0, 1.0, 0.01, 1.0, 64.0, 1.0];

/// What random calls are drawn from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extent {
    /// Random calls of attention.
    pub(crate) cases: usize,
    /// Longest usual sequence of attention.
    pub(crate) longest: usize,
    /// Seed of the random calls.
    pub(crate) seed: u64,
    /// Widths of keys and of values.
    pub(crate) widths: &'static [(usize, usize)],
    /// Query heads a KV head.
    pub(crate) groups: &'static [usize],
    /// Tokens of a selection.
    pub(crate) lengths: &'static [usize],
    /// Tokens, kept keys and local window of further selections.
    pub(crate) local_windows: &'static [[usize; 3]],
    /// Whether all is interpreted, a million times slower than on a GPU.
    pub(crate) is_emulated: bool,
    /// Factor on the queries and keys of all calls; one of a list in turn where absent.
    pub(crate) magnitude: Option<f32>,
    /// Whether a part is checked alone, in as many cases as attention.
    pub(crate) is_part: bool,
    /// Which kernels the ops take.
    pub(crate) policy: KernelPolicy,
}

impl Extent {
    /// Every width, group and length.
    pub(crate) const fn all(cases: usize, longest: usize, seed: u64) -> Self {
        Self {
            cases,
            longest,
            seed,
            widths: WIDTHS,
            groups: GROUPS,
            lengths: LENGTHS,
            local_windows: LOCAL_WINDOWS,
            is_emulated: false,
            magnitude: None,
            is_part: false,
            policy: KernelPolicy::DEFAULT,
        }
    }

    /// One width and group, and short selections: each more is another set of programs to compile.
    pub(crate) const fn emulated(cases: usize, longest: usize, seed: u64) -> Self {
        Self {
            widths: &[(32, 32)],
            groups: &[2],
            lengths: &[1, 63, 1025, 2100],
            local_windows: &[[1500, 400, 300], [16_385, 301, 300]],
            is_emulated: true,
            ..Self::all(cases, longest, seed)
        }
    }

    /// The first where all is interpreted: time goes with sizes there, and each width is another set of programs.
    pub(crate) fn pick<T>(&self, emulated: T, all: T) -> T {
        if self.is_emulated { emulated } else { all }
    }

    /// The sizes to check: the first two where all is interpreted.
    pub(crate) fn sizes<T>(&self, all: &'static [T]) -> &'static [T] {
        &all[..self.pick(2, all.len())]
    }

    /// Factor on the queries and keys of call number `at` of an op.
    pub(crate) fn magnitude_of(&self, at: usize) -> f32 {
        self.magnitude.unwrap_or(MAGNITUDES[at % MAGNITUDES.len()])
    }

    /// Cases of what is checked token by token or entry by entry: one of each kind at least.
    pub(crate) fn few(&self) -> usize {
        match self.is_part {
            true => self.cases,
            false => self.cases.div_ceil(5).max(4),
        }
    }
}
