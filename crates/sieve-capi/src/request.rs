//! A caller's request for a plan, as JSON.
use serde::{Deserialize, Serialize};
use sieve_core::{ChoiceRule, NsaBlocks};
use sieve_gpu::{DType, Hardware, KernelError};

/// Elements of the largest tensor: keeps every product of sizes far below 64 bits.
const MOST_ELEMENTS: usize = 1 << 40;

/// Why a request has no plan, or why a plan cannot run.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// The request is not valid JSON.
    #[error("request: {0}")]
    Json(#[from] serde_json::Error),
    /// A tensor is missing, named twice, or of impossible sizes.
    #[error("{op}: {tensor} {problem}")]
    Tensor {
        /// Name of the op.
        op: &'static str,
        /// Name of the tensor.
        tensor: String,
        /// What is wrong with the tensor.
        problem: String,
    },
    /// A launch wrapper refuses the call.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// A call in the wrong order, or with the wrong arguments.
    #[error("{0}")]
    Call(String),
}

/// One op for given shapes on a kind of GPU. As JSON, for windowed attention on an H200:
///
/// ```json
/// {"call": {"attention_forward": {"scale": 0.088388, "window": 1024}},
///  "gpu": {"capability": [9, 0], "multiprocessors": 132, "shared_bytes": 232448},
///  "tensors": [{"name": "q", "shape": [1, 4096, 16, 128], "dtype": "bf16"},
///              {"name": "k", "shape": [1, 4096, 8, 128], "dtype": "bf16"},
///              {"name": "v", "shape": [1, 4096, 8, 128], "dtype": "bf16"},
///              {"name": "doc_start", "shape": [1, 4096], "dtype": "i32"}]}
/// ```
#[derive(Debug, Clone, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// The op and its settings.
    pub call: Call,
    /// The GPU to plan for.
    pub gpu: Gpu,
    /// Inputs of the op, in the order in which `run` gets their pointers.
    pub tensors: Vec<TensorSpec>,
}

/// A GPU, as PyTorch describes it.
#[derive(Debug, Clone, Copy, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Gpu {
    /// Compute capability, major and minor.
    pub capability: (u32, u32),
    /// Number of multiprocessors.
    pub multiprocessors: usize,
    /// Most shared memory that a thread block may use, in bytes.
    pub shared_bytes: usize,
}

/// An input tensor of an op.
#[derive(Debug, Clone, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct TensorSpec {
    /// Name of the tensor in the op's documentation.
    pub name: String,
    /// Sizes, outermost first.
    pub shape: Vec<usize>,
    /// Strides in elements; `None` for a contiguous tensor.
    #[serde(default)]
    pub strides: Option<Vec<usize>>,
    /// `f32`, `bf16`, `i32`.
    pub dtype: String,
}

/// An op with its settings; `fixed_order` makes two runs bit-equal. Each op's doc names its inputs → its outputs, with
/// `?` after an optional tensor.
#[derive(Debug, Clone, Deserialize, Serialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Call {
    /// q, k, v, doc_start, bias? → o, lse, o_low?, base?
    AttentionForward {
        /// Factor on `q . k`.
        scale: f32,
        /// The most keys that a query sees, its own included; absent: all earlier ones.
        #[serde(default)]
        window: Option<usize>,
        /// Whether `o` is the only output.
        #[serde(default)]
        only_o: bool,
    },
    /// The forward's inputs, doc_end, o, lse, o_low?, base?, d_o → dq, dk, dv, d_bias?
    AttentionBackward {
        /// Factor on `q . k`.
        scale: f32,
        /// The most keys that a query sees, its own included; absent: all earlier ones.
        #[serde(default)]
        window: Option<usize>,
        /// Whether sums are added in a fixed order.
        #[serde(default)]
        fixed_order: bool,
    },
    /// v, w_dt `[KV heads, KV heads * width]`, a, doc_start? → x, z
    DmaScores {
        /// What recency adds to a rank per token of the position, one number per KV head; empty: no recency.
        #[serde(default)]
        slopes: Vec<f32>,
    },
    /// v, w_dt, a, x, dz → dv, dw_dt, da
    DmaScoresBackward {},
    /// rank, doc_start, doc_end → expire, and lists where `keep` is below the tokens of a row
    DmaSelect {
        /// Number of keys that a query keeps.
        keep: usize,
        /// How many of these are the last keys, which are kept whatever their rank.
        #[serde(default)]
        local: usize,
    },
    /// q, k, v, bias, lists (of `dma_select`) → o, lse, o_low?, base
    DmaAttentionForward {
        /// Factor on `q . k`.
        scale: f32,
        /// Whether `o` is the only output.
        #[serde(default)]
        only_o: bool,
    },
    /// The forward's inputs, o, lse, o_low?, base, d_o → dq, dk, dv, d_bias
    DmaAttentionBackward {
        /// Factor on `q . k`.
        scale: f32,
        /// Whether sums are added in a fixed order.
        #[serde(default)]
        fixed_order: bool,
    },
    /// k, v, doc_start, doc_end → compressed
    NsaMeanPool {
        /// Block sizes.
        blocks: Blocks,
    },
    /// k, doc_start, doc_end, d_compressed → dkv
    NsaMeanPoolBackward {
        /// Block sizes.
        blocks: Blocks,
    },
    /// q, compressed, doc_start, doc_end → o, lse, block_indices
    NsaCompressedForward {
        /// Factor on `q . k`.
        scale: f32,
        /// Block sizes.
        blocks: Blocks,
    },
    /// The forward's inputs, o, lse, d_o → dqkv (zero but for q), d_compressed
    NsaCompressedBackward {
        /// Factor on `q . k`.
        scale: f32,
        /// Block sizes.
        blocks: Blocks,
        /// Whether sums are added in a fixed order.
        #[serde(default)]
        fixed_order: bool,
    },
    /// q, k, v, block_indices, doc_start, doc_end → o, lse
    NsaSelectedForward {
        /// Factor on `q . k`.
        scale: f32,
        /// Block sizes.
        blocks: Blocks,
    },
    /// The forward's inputs, o, lse, d_o → dq, dk, dv
    NsaSelectedBackward {
        /// Factor on `q . k`.
        scale: f32,
        /// Block sizes.
        blocks: Blocks,
        /// Whether sums are added in a fixed order.
        #[serde(default)]
        fixed_order: bool,
    },
    /// compressed, selected, window (outputs of the branches), logits `[batch, tokens, heads, 3]`, gate_bias
    /// `[heads, 3]`, d_o → d_compressed, d_selected, d_window, d_logits, d_bias
    NsaGatesBackward {},
    /// All of NSA: q, k, v, compressed, logits, gate_bias, doc_start, doc_end → o, and unless `only_o`
    /// compressed_o, compressed_lse, block_indices, selected_o, selected_lse, window_o, window_lse
    NsaForward {
        /// Factor on `q . k`.
        scale: f32,
        /// Block sizes.
        blocks: Blocks,
        /// Keys that the window's branch sees.
        window: usize,
        /// Whether `o` is the only output.
        #[serde(default)]
        only_o: bool,
    },
    /// Scores, selection and attention: q, k, v, w_dt `[KV heads, KV heads * width]`, a, doc_start, doc_end → o, and
    /// unless `only_o` lse, o_low?, base, x, z, bias unless `linear`, and lists where `keep` is below the tokens of a
    /// row
    DmaForward {
        /// Factor on `q . k`.
        scale: f32,
        /// Number of keys that a query keeps.
        keep: usize,
        /// How many of these are the last keys, which are kept whatever their rank.
        local: usize,
        /// What recency adds to a rank per token of the position, one number per KV head; empty: no recency.
        slopes: Vec<f32>,
        /// Whether the bias is z itself.
        linear: bool,
        /// Whether `o` is the only output.
        #[serde(default)]
        only_o: bool,
    },
    /// q, k, doc_start, doc_end → block_indices
    ChooseBlocks(Choice),
    /// Choice, of each KV head, and attention: q, k, v, index_q?, index_k?, doc_start, doc_end → o, and unless
    /// `only_o` lse, block_indices. Blocks are chosen by index_q and index_k, else by q and k
    ChosenForward(Choice),
    /// Attention over given blocks: q, k, v, indices `[batch, tokens, KV heads, blocks]` in any order, counts? `[batch,
    /// tokens, KV heads]`, doc_start, doc_end → o, unless `only_o` lse, and block_indices for `nsa_selected_backward`,
    /// and with `block_sums` the attention on each index's block, summed over the heads of the group
    SelectedForward {
        /// Factor on `q . k`.
        scale: f32,
        /// Tokens of a block: 16, 32, 64 or 128.
        block: usize,
        /// Whether `o` is the only output, but for `block_sums`.
        #[serde(default)]
        only_o: bool,
        /// Whether the attention on each block is an output.
        #[serde(default)]
        block_sums: bool,
    },
    /// q, k, v of one row, words (0, then row_ptr `[heads * query tiles + 1]`, then tile_idx) → o, lse
    BlockSparse {
        /// Factor on `q . k`.
        scale: f32,
        /// Queries, and keys, of a block.
        block: [usize; 2],
    },
    /// q, k, v of one token a row, k_cache, v_cache (written in place), length → o
    AttentionDecode {
        /// Factor on `q . k`.
        scale: f32,
        /// The most keys that a query sees, its own included; absent: all earlier ones.
        #[serde(default)]
        window: Option<usize>,
    },
    /// q of one token a row whose key is in the cache, k_cache, v_cache, length, chosen? → o. `length` counts the keys
    /// that the query sees; with `chosen`, i32 `[batch, choosers, blocks]`, the tokens before it. Keys of a cache: see
    /// [`Plan::capacity`](crate::Plan::capacity)
    CachedDecode {
        /// Factor on `q . k`.
        scale: f32,
        /// The most keys that a query sees, its own included; absent: all earlier ones.
        #[serde(default)]
        window: Option<usize>,
        /// Keys of a chosen block: of the blocks in `chosen`, in ascending order and then -1, a query sees all tokens.
        #[serde(default)]
        block: Option<usize>,
    },
    /// q, k, v of one token a row, z, k_cache, v_cache, z_cache, positions (all written in place), length → o
    DmaDecode {
        /// Factor on `q . k`.
        scale: f32,
        /// The last keys, which never lose their place.
        local: usize,
        /// Whether the bias is z itself, not `exp(min(z, 60))`.
        linear: bool,
    },
    /// q, latents, key_scale?, length? → o. `length`: tokens of each row before the new ones, where latents have room
    MlaDecode {
        /// Factor on `q . k`.
        scale: f32,
        /// Columns of the latents that are values, the first ones.
        rank: usize,
    },
}

/// How queries choose blocks.
#[derive(Debug, Clone, Copy, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Choice {
    /// Factor on `q . k`, where scores become probabilities.
    pub scale: f32,
    /// Block sizes; the first two are the size and the stride of the mean keys that queries are scored against.
    pub blocks: Blocks,
    /// What makes a block important.
    pub rule: Rule,
    /// Whether the document's first block is chosen in any case.
    #[serde(default)]
    pub first: bool,
    /// Blocks up to the query's own one that are chosen in any case, at least 1.
    pub local: usize,
    /// Whether `o` is the only output.
    #[serde(default)]
    pub only_o: bool,
}

/// What makes a block important to a query.
#[derive(Debug, Clone, Copy, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Rule {
    /// InfLLM-V2's ([`ChoiceRule::LargestProbability`]): each group of heads chooses.
    LargestProbability,
    /// [`ChoiceRule::MeanKey`] (arXiv:2502.13189): each query head chooses.
    MeanKey,
    /// MSA's ([`ChoiceRule::LargestScore`]): each head of an indexer chooses, by means of one token.
    LargestScore,
}

impl From<Rule> for ChoiceRule {
    fn from(rule: Rule) -> Self {
        match rule {
            Rule::LargestProbability => Self::LargestProbability,
            Rule::MeanKey => Self::MeanKey,
            Rule::LargestScore => Self::LargestScore,
        }
    }
}

/// Block sizes of NSA: compressed, stride, selected, and how many are selected.
#[derive(Debug, Clone, Copy, Deserialize, Serialize)]
pub struct Blocks(pub usize, pub usize, pub usize, pub usize);

impl Blocks {
    /// The block sizes, if they are consistent.
    pub(crate) fn checked(self) -> Result<NsaBlocks, PlanError> {
        let Self(compressed, stride, selected, count) = self;
        let sizes = [compressed, stride, selected, count];
        let fits = |size: usize| stride > 0 && size.is_multiple_of(stride);
        let in_range = sizes.iter().all(|size| (1..=1 << 20).contains(size));
        if !in_range || !fits(compressed) || !fits(selected) {
            return Err(PlanError::Call(format!(
                "nsa: blocks (compressed, stride, selected, number) of {sizes:?}: all must be positive, and the stride \
                 divide both sizes"
            )));
        }
        Ok(NsaBlocks::of(sizes))
    }
}

impl Gpu {
    /// The GPU's properties as launch wrappers take them.
    pub(crate) fn hardware(self) -> Result<Hardware, PlanError> {
        let (major, minor) = self.capability;
        if (major, minor) < (8, 0) || major > 99 || minor > 9 {
            return Err(PlanError::Call(format!(
                "this GPU has compute capability {major}.{minor}; the kernels need 8.0 (Ampere) or newer"
            )));
        }
        if !(1..=4096).contains(&self.multiprocessors) || !(48 << 10..=1 << 20).contains(&self.shared_bytes) {
            return Err(PlanError::Call(format!("no GPU is like this: {self:?}")));
        }
        Ok(Hardware {
            compute_capability: self.capability,
            num_multiprocessors: self.multiprocessors,
            max_shared_bytes: self.shared_bytes,
            ..Hardware::AMPERE
        })
    }
}

impl TensorSpec {
    /// Type and strides, where the sizes are possible.
    pub(crate) fn checked(&self, op: &'static str) -> Result<(DType, Vec<usize>), PlanError> {
        let wrong = |problem: String| PlanError::Tensor { op, tensor: self.name.clone(), problem };
        let dtype = match self.dtype.as_str() {
            "f32" => DType::F32,
            "bf16" => DType::BF16,
            "i32" => DType::I32,
            other => return Err(wrong(format!("is {other}; the kernels take bf16, f32 and i32"))),
        };
        let too_large = || wrong(format!("of shape {:?} has more than 2^40 elements", self.shape));
        // An axis of 0 counts as 1, so that the other axes are checked too.
        let sizes = self.shape.iter().map(|&size| size.max(1));
        let elements = sizes.clone().try_fold(1usize, |all, size| all.checked_mul(size));
        if elements.is_none_or(|elements| elements > MOST_ELEMENTS) {
            return Err(too_large());
        }
        let strides = self.strides.clone();
        let strides = strides.unwrap_or_else(|| sieve_gpu::contiguous_strides(&self.shape));
        if strides.len() != self.shape.len() {
            return Err(wrong(format!("has shape {:?} and strides {strides:?}", self.shape)));
        }
        let extent = sizes
            .zip(&strides)
            .try_fold(1usize, |all, (size, &stride)| all.checked_add((size - 1).checked_mul(stride)?));
        match extent {
            Some(extent) if extent <= MOST_ELEMENTS => Ok((dtype, strides)),
            _ => Err(too_large()),
        }
    }
}
