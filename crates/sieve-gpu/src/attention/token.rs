//! Launch of `kernels/hopper_attention_token.cu`: attention of one new token with the bits of a whole row.
use crate::KernelError;
use crate::attention::decode::{DecodeForm, DecodeStep, SeenOperands, define_far};
use crate::attention::hopper_tiling::BLOCK_KV;
use crate::attention::{AttentionShape, KernelFamily, KeySource, token_params};
use crate::runtime::{CudaTensor, SourceKernel, SumOrder, params};

const NAME: &str = "hopper_attention_token";

/// Query heads of a thread block.
const ROWS: usize = 16;

/// Most keys of a row's head, in its window or its cache, for which the kernel is taken: 4,096 tokens and the room that
/// a cache of them has for more. Beyond, one text waits for its order of sums (kernels/notes/one-order-of-sums.md).
const MOST_KEYS: usize = 4096 + 512;

/// Whether a token that joins its cache, and sees up to `keys` keys, takes this kernel: where a whole row takes
/// `kernels/hopper_attention_forward.cu`, whose order of sums it has, and no first keys stand before a window.
pub(crate) fn takes(
    shape: &AttentionShape,
    q: &CudaTensor,
    form: DecodeForm,
    step: &DecodeStep<'_>,
    keys: usize,
) -> bool {
    let source = if step.far.is_some() { KeySource::Bands } else { KeySource::Dense };
    let is_hopper = KernelFamily::of(shape, source, q) == KernelFamily::Hopper;
    is_hopper && shape.head_dim == shape.head_dim_v && form.joins() && step.num_first == 0 && keys <= most_keys(q)
}

/// Keys up to which a query takes this kernel: all of them if sums have a fixed order.
fn most_keys(q: &CudaTensor) -> usize {
    match q.policy().sums {
        SumOrder::Any => MOST_KEYS,
        SumOrder::Fixed => usize::MAX,
    }
}

/// The operands of a launch, which [`decode`](crate::attention::decode) has checked.
pub(crate) struct TokenCall<'a> {
    pub(crate) shape: &'a AttentionShape,
    pub(crate) seen: &'a SeenOperands,
    pub(crate) step: &'a DecodeStep<'a>,
    /// Words of the queries ([`Heads::words`](crate::attention::Heads::words)).
    pub(crate) q_words: [usize; 3],
    /// Size of the window: the most neighbouring keys that a query sees.
    pub(crate) window: usize,
    /// Keys that a query sees at most.
    pub(crate) seen_keys: usize,
    /// Keys for which the cache has room.
    pub(crate) capacity: usize,
}

impl TokenCall<'_> {
    /// Launches the kernel on `tensors`, which are in the order of its buffers.
    ///
    /// # Safety
    /// Sizes, strides and types of the tensors must fit the call, which must be one that [`takes`] takes.
    pub(crate) unsafe fn launch(&self, tensors: &[&CudaTensor]) -> Result<(), KernelError> {
        let Self { shape, seen, step, q_words, window, seen_keys, capacity } = self;
        let [k_words, v_words] = seen.kv_words;
        let params = params!(AttentionTokenParams {
            base: token_params(shape, step.softmax_scale, [*q_words, k_words, v_words]),
            capacity: *capacity,
            window_size: *window,
            { num_dropped }: step,
            { max_positions, table_stride, epsilon }: seen.rotation,
            { sink_tokens, first_distance, last_distance, num_bands, first_band }: seen.far,
        });
        let blocks = shape.num_kv_heads * shape.group_size().div_ceil(ROWS);
        let tiling = TokenTiling::new(shape.head_dim, blocks * shape.batch, *seen_keys);
        let kernel = define_far(hopper_attention_token_kernel(tiling, seen.form, step.sinks.is_some()), step);
        // SAFETY: the caller's promise; the kernel writes every element of o, and row `length` of the caches if it is
        // one of them.
        unsafe { kernel.launch([tiling.cluster * blocks, 1, shape.batch], tensors, &params) }
    }
}

/// Tile sizes; no result depends on them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct TokenTiling {
    head_dim: usize,
    /// Thread blocks that share the keys of a row's head.
    cluster: usize,
    /// Steps of keys and values in shared memory.
    num_stages: usize,
}

impl TokenTiling {
    /// The tiling for `heads` rows' heads with up to `keys` keys each: where there are few, eight blocks read each,
    /// since a multiprocessor alone reads at a hundredth of the device's rate.
    fn new(head_dim: usize, heads: usize, keys: usize) -> Self {
        const MOST_SHARED: usize = 96;
        let is_shared = heads <= MOST_SHARED && keys > 4 * BLOCK_KV;
        let (cluster, num_stages) = match (is_shared, head_dim) {
            (true, 128) => (8, 2),
            (true, _) => (8, 3),
            (false, 128) => (1, 3),
            (false, _) => (1, 4),
        };
        Self { head_dim, cluster, num_stages }
    }

    /// Dynamic shared memory of a block, in bytes: queries; stages of keys, and of all blocks' values in the block's
    /// columns; all blocks' weights, and the block's own unrounded ones; maxima of warps and of stages, factors, sums,
    /// inverses and totals of rows.
    fn shared_bytes(self) -> usize {
        let Self { head_dim, cluster, num_stages } = self;
        // An odd number of chunks of 16 bytes.
        let pitch = |elements: usize| if elements.is_multiple_of(16) { 2 * elements + 16 } else { 2 * elements };
        let keys = num_stages * BLOCK_KV * (pitch(head_dim) + cluster * pitch(head_dim / cluster));
        let weights = ROWS * (pitch(cluster * BLOCK_KV) + 136 * 4);
        ROWS * pitch(head_dim) + keys + weights + ROWS * 4 * (8 + 6 * cluster + 2)
    }
}

/// The specialisation for a tiling and a form that joins the cache, with sinks or without.
fn hopper_attention_token_kernel(tiling: TokenTiling, form: DecodeForm, has_sinks: bool) -> SourceKernel {
    SourceKernel::new(NAME)
        .define("HEAD_DIM", tiling.head_dim)
        .define("ROTATE", form.rotation())
        .define("SINKS", has_sinks as u8)
        .define("CLUSTER", tiling.cluster)
        .define("NUM_STAGES", tiling.num_stages)
        .threads(256)
        .shared_bytes(tiling.shared_bytes())
        .starts_early()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_fits_a_hopper_device() {
        for head_dim in [64, 128] {
            let tilings =
                [(1, 4096), (1, 512), (97, 4096)].map(|(heads, keys)| TokenTiling::new(head_dim, heads, keys));
            assert_eq!(tilings.map(|tiling| tiling.cluster), [8, 1, 1]);
            assert!(tilings.iter().all(|tiling| tiling.shared_bytes() <= 227 << 10), "{tilings:?}");
        }
    }
}
