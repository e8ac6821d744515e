//! Launch of `kernels/attention_token.cu`: attention of one new token with the bits of a whole row.
use crate::KernelError;
use crate::attention::decode::{DecodeForm, DecodeStep, SeenOperands};
use crate::attention::{AttentionShape, KernelFamily, KeySource, token_params};
use crate::runtime::{CudaTensor, SourceKernel, params};

const NAME: &str = "attention_token";

/// Query heads of a thread block.
const ROWS: usize = 16;

/// Keys of a stage, as of [`hopper_tiling`](crate::attention::hopper_tiling)'s.
const STAGE_KEYS: usize = 128;

/// Whether a token that joins its cache takes this kernel: where a whole row takes
/// `kernels/hopper_attention_forward.cu`, whose order of sums it has, and no first keys stand before a window.
pub(crate) fn takes(shape: &AttentionShape, q: &CudaTensor, form: DecodeForm, step: &DecodeStep<'_>) -> bool {
    let is_hopper = KernelFamily::of(shape, KeySource::Dense, q) == KernelFamily::Hopper;
    is_hopper && shape.head_dim == shape.head_dim_v && form.joins() && step.num_first == 0
}

/// The operands of a launch, which [`decode`](crate::attention::decode) has checked.
pub(crate) struct TokenCall<'a> {
    pub(crate) shape: &'a AttentionShape,
    pub(crate) seen: &'a SeenOperands,
    pub(crate) step: &'a DecodeStep<'a>,
    /// Words of the queries ([`Heads::words`](crate::attention::Heads::words)).
    pub(crate) q_words: [usize; 3],
    /// Keys that a query sees at most.
    pub(crate) window: usize,
    /// Keys for which the cache has room.
    pub(crate) capacity: usize,
}

impl TokenCall<'_> {
    /// Launches the kernel on its tensors, in their order, of which `o` is the last.
    ///
    /// # Safety
    /// Sizes, strides and types of the tensors must fit the call, which must be one that [`takes`] takes.
    pub(crate) unsafe fn launch(&self, tensors: &[&CudaTensor]) -> Result<(), KernelError> {
        let Self { shape, seen, step, q_words, window, capacity } = self;
        let [k_words, v_words] = seen.kv_words;
        let params = params!(AttentionTokenParams {
            base: token_params(shape, step.softmax_scale, [*q_words, k_words, v_words]),
            capacity: *capacity,
            window_size: *window,
            { num_dropped }: step,
            { max_positions, table_stride, epsilon }: seen.rotation,
        });
        let blocks = shape.num_kv_heads * shape.group_size().div_ceil(ROWS);
        let kernel = attention_token_kernel(shape.head_dim, seen.form, step.sinks.is_some());
        // SAFETY: the caller's promise; the kernel clamps lengths to the capacity, writes every element of o and row
        // `length` of the caches.
        unsafe { kernel.launch([blocks, 1, shape.batch], tensors, &params) }
    }
}

/// The specialisation for heads of `head_dim` columns, a form that joins the cache, with sinks or without.
fn attention_token_kernel(head_dim: usize, form: DecodeForm, has_sinks: bool) -> SourceKernel {
    SourceKernel::new(NAME)
        .define("HEAD_DIM", head_dim)
        .define("ROTATE", form.rotation())
        .define("SINKS", has_sinks as u8)
        .define("NUM_STAGES", num_stages(head_dim))
        .threads(256)
        .shared_bytes(shared_bytes(head_dim))
        .starts_early()
}

/// Stages of keys and values in shared memory.
fn num_stages(head_dim: usize) -> usize {
    if head_dim <= 64 { 4 } else { 3 }
}

/// Dynamic shared memory of a block, in bytes: queries, stages of keys and of values with 16 bytes of padding a row;
/// weights, rounded and not; each warp's maxima, a factor and an inverse of each row.
fn shared_bytes(head_dim: usize) -> usize {
    let row = 2 * head_dim + 16;
    let weights = ROWS * (2 * STAGE_KEYS + 16) + ROWS * 136 * 4;
    (ROWS + 2 * num_stages(head_dim) * STAGE_KEYS) * row + weights + ROWS * (8 + 1 + 1) * 4
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_fits_a_hopper_device() {
        for head_dim in [64, 128] {
            assert!(shared_bytes(head_dim) <= 227 << 10, "{head_dim}");
        }
    }
}
