//! Calls of launch wrappers on tensors of a [`Recorder`]. The kernels that they launch are the kernels to compile.
//!
//! Batch sizes and lengths are small numbers: they decide grids. Where they decide the code too, each form is called.
//! A new wrapper gets a call in the file of its family here, or in `step.rs`; a kernel that no call launches does not
//! ship.
pub(super) mod blocks;
pub(super) mod dense;
pub(super) mod dma;
pub(super) mod latent;
pub(super) mod masked;

use super::NeededKernels;
use crate::KernelError;
use crate::attention::{AttentionGradients, AttentionResult, AttentionShape, DecodeScratch, KvCache, Qkv};
use crate::runtime::{CudaTensor, DType, Hardware, KernelFamilies, KernelPolicy, SumOrder};
use crate::{Recorder, Step};

/// Tokens of a row in most calls.
pub(crate) const ROW: usize = 2048;
/// Any softmax scale.
const SCALE: f32 = 0.125;
/// Any epsilon of a norm.
pub(crate) const EPSILON: f32 = 1e-6;

/// A recording GPU, and the kernels that calls on its tensors have launched.
pub(crate) struct Calls {
    gpu: Recorder,
    policy: KernelPolicy,
    needed: NeededKernels,
}

impl Calls {
    /// No calls yet, on a GPU of an architecture, where calls may use these families. An unknown architecture gets the
    /// smallest tilings.
    pub(super) fn on(arch: &str, families: KernelFamilies) -> Self {
        let policy = KernelPolicy { families, ..KernelPolicy::DEFAULT };
        let hardware = Hardware::of_arch(arch).unwrap_or(Hardware::SMALLEST);
        Self { gpu: Recorder::new(hardware), policy, needed: NeededKernels::default() }
    }

    /// The kernels that the calls of `record` launch on an architecture: by the portable kernels, and where there are
    /// others by all.
    pub(super) fn of_each_family(arch: &str, record: impl Fn(&mut Self)) -> NeededKernels {
        let families: &[_] = match arch {
            "sm_90a" => &[KernelFamilies::Portable, KernelFamilies::All],
            _ => &[KernelFamilies::Portable],
        };
        let mut needed = NeededKernels::default();
        for &families in families {
            let mut calls = Self::on(arch, families);
            record(&mut calls);
            needed.extend(calls.into_needed());
        }
        needed
    }

    /// The kernels of all calls.
    pub(super) fn into_needed(self) -> NeededKernels {
        self.needed
    }

    /// Properties of the GPU that is recorded.
    pub(crate) fn hardware(&self) -> Hardware {
        self.gpu.hardware()
    }

    /// Notes the kernels that a call launched, and the reason if it was refused. Returns its result.
    pub(crate) fn note<T>(&mut self, outcome: Result<T, KernelError>) -> Option<T> {
        let steps = self.gpu.take_steps().into_iter();
        self.needed.extend_kernels(steps.filter_map(|step| match step {
            Step::Launch(launch) => Some(launch.kernel),
            Step::Fill { .. } | Step::Gather { .. } => None,
        }));
        outcome.map_err(|error| self.needed.refuse(error)).ok()
    }

    fn tensor(&self, shape: &[usize], dtype: DType) -> CudaTensor {
        self.gpu.tensor(shape, dtype).under(self.policy)
    }

    pub(crate) fn bf16(&self, shape: &[usize]) -> CudaTensor {
        self.tensor(shape, DType::BF16)
    }

    pub(crate) fn f32(&self, shape: &[usize]) -> CudaTensor {
        self.tensor(shape, DType::F32)
    }

    pub(crate) fn i32(&self, shape: &[usize]) -> CudaTensor {
        self.tensor(shape, DType::I32)
    }

    /// The operands of an attention call of one row of `seq_len` tokens.
    fn row(&self, shape: &AttentionShape, seq_len: usize) -> Row {
        let shape = AttentionShape { batch: 1, seq_len, ..*shape };
        let heads = || {
            let of = |heads, width| self.bf16(&[1, seq_len, heads, width]);
            let [q, k] = [shape.num_heads, shape.num_kv_heads].map(|heads| of(heads, shape.head_dim));
            Qkv::separate(&q, &k, &of(shape.num_kv_heads, shape.head_dim_v))
        };
        let bound = || self.i32(&[1, seq_len]);
        let (documents, d_o) = ([bound(), bound()], self.bf16(&shape.output()));
        Row { shape, qkv: heads(), documents, d_o, grads: heads() }
    }

    /// The operands of a call of one new token, whose cache holds up to `capacity` tokens.
    fn token(&mut self, shape: &AttentionShape, capacity: usize) -> Option<Token> {
        let Row { shape, qkv, .. } = self.row(shape, 1);
        let like = qkv.q.tensor();
        let scratch = self.note(DecodeScratch::new(like, shape, capacity))?;
        let (cache, length) = (KvCache::new(like, &shape, capacity), self.i32(&[1]));
        Some(Token { shape, qkv, cache, length, scratch })
    }

    /// Makes the calls of a backward pass in an order of sums twice, as its code differs: with one thread block for
    /// each tile of keys, and with two.
    fn with_shares(&mut self, sums: SumOrder, calls: impl Fn(&mut Self)) {
        let before = self.policy;
        for blocks in [1, 2] {
            self.policy = KernelPolicy { sums, blocks_per_tile: Some(blocks), ..before };
            calls(self);
        }
        self.policy = before;
    }
}

/// Operands of an attention call and of its gradients.
struct Row {
    shape: AttentionShape,
    qkv: Qkv,
    documents: [CudaTensor; 2],
    d_o: CudaTensor,
    grads: Qkv,
}

impl Row {
    fn gradients<'a>(&'a self, result: &'a AttentionResult) -> AttentionGradients<'a> {
        let Self { qkv, d_o, grads, .. } = self;
        AttentionGradients { qkv, result, d_o, grads, softmax_scale: SCALE }
    }
}

/// Operands of a decoding call.
struct Token {
    shape: AttentionShape,
    qkv: Qkv,
    cache: KvCache,
    length: CudaTensor,
    scratch: DecodeScratch,
}
