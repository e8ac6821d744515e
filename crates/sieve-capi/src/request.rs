//! A caller's request for a plan, as JSON.
use crate::ops::Call;
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
