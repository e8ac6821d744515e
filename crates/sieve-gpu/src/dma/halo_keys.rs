//! Launches of `kernels/dma_last_kept.cu` and `kernels/dma_halo_keys_*.cu`: the halo keys of context parallelism,
//! that is, the keys of one GPU's part of a row that the queries of later GPUs' parts still see.
use crate::KernelError;
use crate::runtime::{CudaTensor, DType, SourceKernel, operands, params, require, require_non_empty};

const LAST: &str = "dma_last_kept";
const FORWARD: &str = "dma_halo_keys_forward";
const BACKWARD: &str = "dma_halo_keys_backward";

/// bf16 columns that a thread copies at once, 16 bytes.
const VECTOR: usize = 8;

/// Positions of the keys that the last query of a row still sees, ascending: i32 `[batch, num_kv_heads, slots]`. With
/// fewer such keys than slots the first slots are -1. `expire`, [`Selection::expire`](crate::Selection::expire), holds
/// for each key the first query that no longer sees it.
///
/// # Errors
/// Another type or number of dimensions, no tokens, no slots.
pub fn dma_last_kept(expire: &CudaTensor, slots: usize) -> Result<CudaTensor, KernelError> {
    let [batch, num_kv_heads, seq_len] = expire.dims(LAST, "expire")?;
    operands!(LAST, expire: I32[batch, num_kv_heads, seq_len]);
    require_non_empty(LAST, "slots", slots)?;
    require_non_empty(LAST, "the number of tokens", batch * num_kv_heads * seq_len)?;
    let kept = expire.empty_contiguous(&[batch, num_kv_heads, slots], DType::I32);
    let params = params!(DmaLastKeptParams { seq_len, num_kv_heads, slots });
    let grid = [num_kv_heads, batch, 1];
    // SAFETY: reads expire, writes every element of kept and nothing else.
    unsafe { DMA_LAST_KEPT.launch(grid, &[&expire, &kept], &params) }?;
    Ok(kept)
}

/// Copies the keys in `kept` of each KV head and their values, bf16 `[batch, slots, 2 * num_kv_heads, head_dim]`, and
/// their ranks (the numbers by which DMA orders keys), f32 `[batch, num_kv_heads, slots]`; zeros where `kept` is -1.
/// `packed` is bf16 `[batch, seq_len, heads, head_dim]` with keys and values as its last heads, `rank` f32
/// `[batch, num_kv_heads, seq_len]`, and `kept` the result of [`dma_last_kept`].
///
/// # Errors
/// Other types or shapes, a head width that is not a multiple of 8.
pub fn dma_halo_keys_forward(
    packed: &CudaTensor,
    rank: &CudaTensor,
    kept: &CudaTensor,
) -> Result<[CudaTensor; 2], KernelError> {
    let sizes = Sizes::of(FORWARD, [packed, rank, kept])?;
    let (packed, rank, kept) = (packed.contiguous(), rank.contiguous(), kept.contiguous());
    let keys = packed.empty_contiguous(&sizes.keys(), DType::BF16);
    let ranks = packed.empty_contiguous(&sizes.ranks(), DType::F32);
    let params = params!(DmaHaloKeysForwardParams {
        { seq_len, num_heads, num_kv_heads, head_dim, slots }: sizes,
    });
    let tensors = [&packed, &rank, &kept, &keys, &ranks];
    let [kernel, _] = dma_halo_keys_kernels();
    // SAFETY: sizes and types checked above; kept names tokens of the row; writes every element of keys and ranks.
    unsafe { kernel.launch([sizes.slots, sizes.batch, 1], &tensors, &params) }?;
    Ok([keys, ranks])
}

/// Adds the gradients of [`dma_halo_keys_forward`]'s results to `d_packed` and `d_rank` in place; both must be
/// contiguous and have no other owner.
///
/// # Errors
/// The errors of [`dma_halo_keys_forward`]; `d_packed` or `d_rank` that is not contiguous.
pub fn dma_halo_keys_backward(
    [d_packed, d_rank]: [&CudaTensor; 2],
    kept: &CudaTensor,
    [d_keys, d_ranks]: [&CudaTensor; 2],
) -> Result<(), KernelError> {
    let sizes = Sizes::of(BACKWARD, [d_packed, d_rank, kept])?;
    d_packed.require_contiguous(BACKWARD, "d_packed")?;
    d_rank.require_contiguous(BACKWARD, "d_rank")?;
    operands!(BACKWARD, d_keys: BF16(sizes.keys()), d_ranks: F32(sizes.ranks()));
    let kept = kept.contiguous();
    let params = params!(DmaHaloKeysBackwardParams {
        { seq_len, num_heads, num_kv_heads, head_dim, slots }: sizes,
    });
    let tensors = [d_packed, d_rank, &kept, &d_keys, &d_ranks];
    let [_, kernel] = dma_halo_keys_kernels();
    // SAFETY: sizes and types checked above; kept names each token of the row at most once, so no two threads add to
    // the same element of d_packed or d_rank.
    unsafe { kernel.launch([sizes.slots, sizes.batch, 1], &tensors, &params) }
}

/// Sizes of the packed tensor, and the number of halo keys (slots) of each KV head.
struct Sizes {
    batch: usize,
    seq_len: usize,
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
    slots: usize,
}

impl Sizes {
    /// Checks the three tensors against each other.
    fn of(kernel: &'static str, [packed, rank, kept]: [&CudaTensor; 3]) -> Result<Self, KernelError> {
        let [batch, seq_len, num_heads, head_dim] = packed.dims(kernel, "packed")?;
        let [_, num_kv_heads, slots] = kept.dims(kernel, "kept")?;
        operands!(only kernel,
            packed: BF16[batch, seq_len, num_heads, head_dim] strided,
            rank: F32[batch, num_kv_heads, seq_len] strided,
            kept: I32[batch, num_kv_heads, slots] strided,
        );
        require_non_empty(kernel, "slots", slots)?;
        require_non_empty(kernel, "the number of values", packed.num_elements())?;
        let fits = head_dim.is_multiple_of(VECTOR) && num_heads >= 2 * num_kv_heads;
        require!(fits, kernel, "heads": format!("{num_heads} of {head_dim} columns, {num_kv_heads} KV heads"),
            "two for each KV head, of multiples of {VECTOR} columns");
        Ok(Self { batch, seq_len, num_heads, num_kv_heads, head_dim, slots })
    }

    fn keys(&self) -> [usize; 4] {
        [self.batch, self.slots, 2 * self.num_kv_heads, self.head_dim]
    }

    fn ranks(&self) -> [usize; 3] {
        [self.batch, self.num_kv_heads, self.slots]
    }
}

/// The kernel of [`dma_last_kept`].
const DMA_LAST_KEPT: SourceKernel = SourceKernel::new(LAST).threads(1024);

/// The kernels that copy halo keys, and that add their gradients.
fn dma_halo_keys_kernels() -> [SourceKernel; 2] {
    [FORWARD, BACKWARD].map(|name| SourceKernel::new(name).define("IS_BF16", 1).define("VECTOR", VECTOR).threads(256))
}
