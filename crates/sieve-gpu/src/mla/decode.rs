//! Launches of `kernels/mla_decode.cu` and the kernels around it: attention of new tokens over the cache of latents.
use crate::KernelError;
use crate::attention::require_scale;
use crate::runtime::layout::RowLayout;
use crate::runtime::{CudaTensor, DType, SourceKernel, operands, params, require, require_non_empty, row_layout};
use crate::step::{WORD_ELEMENTS, require_alignment};

const NAME: &str = "mla_decode";

/// Query heads of a thread block, which share its keys.
const ROWS: usize = 16;

/// The fewest keys of a split: joining shorter ones takes longer than they save.
const MIN_SPLIT_KEYS: usize = 64;
/// Most splits that the joining kernel takes.
const MAX_SPLITS: usize = 4096;

/// Columns of a thread block of the kernels that join splits and tokens.
const JOINED_COLUMNS: usize = 128;

/// Widest key the kernel takes: a latent of 512 with a rotated key of 64.
const MAX_KEY_DIM: usize = 576;

/// The latent cache of a layer. All heads share its rows as keys, and their first columns as values.
#[derive(Debug, Clone, Copy)]
pub struct LatentKeys<'a> {
    /// bf16 `[batch, len, width]`: of each token the latent, `rank` columns, then the rotated key.
    pub latents: &'a CudaTensor,
    /// Columns of the latent, which are also the values.
    pub rank: usize,
    /// The factor on `q·k` of each key and head, f32 `[batch, len, num_heads]`; `None` if keys are not normed.
    pub key_scale: Option<&'a CudaTensor>,
    /// Number of tokens of each row before the new ones, i32 `[batch]`, where `len` is the capacity of the cache.
    /// `None` where all `len` tokens are seen.
    pub length: Option<&'a CudaTensor>,
}

/// Causal attention of the last `num_queries` tokens of a row over its latents. `q`, bf16 `[batch, num_queries,
/// num_heads, width]`, is the query times `W_UK`, and times the weight of the keys' norm. Returns bf16 `[batch,
/// num_queries, num_heads, rank]`, the output before `W_UV`.
///
/// # Errors
/// Other types or shapes, more new tokens than latents, widths that are not multiples of 16 or above 576.
pub fn mla_decode(q: &CudaTensor, keys: LatentKeys<'_>, softmax_scale: f32) -> Result<CudaTensor, KernelError> {
    let LatentKeys { latents, rank, key_scale, length } = keys;
    let [batch, num_queries, num_heads, width] = q.dims(NAME, "q")?;
    let [_, num_keys, _] = latents.dims(NAME, "latents")?;
    operands!(NAME,
        q: BF16[batch, num_queries, num_heads, width] aligned,
        latents: BF16[batch, num_keys, width] strided,
    );
    for (what, size) in [("batch", batch), ("the number of heads", num_heads), ("new tokens", num_queries)] {
        require_non_empty(NAME, what, size)?;
    }
    require_scale(NAME, softmax_scale)?;
    require_sizes([num_queries, num_keys], [width, rank])?;
    let (latents, layout) = on_words(latents)?;
    // Without factors `q` stands in for them, and the kernel does not read it as factors.
    let (key_scale, scale_strides) = match key_scale {
        None => (q.clone(), [0; 3]),
        Some(key_scale) => with_unit_stride(key_scale, [batch, num_keys, num_heads])?,
    };

    let (rows, row_blocks) = (batch * num_queries, num_heads.div_ceil(ROWS));
    let hardware = q.hardware();
    let num_splits = num_splits(rows * row_blocks, num_keys, hardware.num_multiprocessors);
    let o = q.empty_contiguous(&[batch, num_queries, num_heads, rank], DType::BF16);
    // A partial result is an output with its largest logit and its sum of exponentials; a single split writes o itself.
    let partials = match num_splits {
        1 => [1, 1, 1],
        _ => [rows * num_heads, num_splits, rank + 2],
    };
    let partials = q.empty_contiguous(&partials, DType::F32);
    let params = params!(MlaDecodeParams {
        num_heads,
        num_queries,
        num_keys,
        key_stride: layout.token_stride,
        batch_stride: layout.batch_stride,
        [scale_batch_stride, scale_stride]: scale_strides,
        num_splits,
        softmax_scale,
    });
    let mut kernel = mla_decode_kernel(width, rank, keys.key_scale.is_some(), hardware.max_shared_bytes);
    let mut tensors = vec![&q, &latents, &key_scale];
    if let Some(length) = length {
        operands!(only NAME, length: I32[batch] contiguous);
        kernel = kernel.define("LENGTHS", 1);
        tensors.push(length);
    }
    tensors.extend([&o, &partials]);
    let grid = [rows, row_blocks, num_splits];
    // SAFETY: sizes, strides and types checked above; the kernel clamps lengths to `num_keys`; reads at most `num_keys`
    // latents a row and their factors, writes every element of o, or of the partial results where there are several
    // splits.
    unsafe { kernel.launch(grid, &tensors, &params) }?;
    if num_splits > 1 {
        let grid = [rows * num_heads, rank.div_ceil(JOINED_COLUMNS), 1];
        let params = params!(MlaDecodeJoinParams { num_splits });
        // SAFETY: reads the partial results of the launch before, writes every element of o.
        unsafe { mla_decode_join_kernel(rank).launch(grid, &[&partials, &o], &params) }?;
    }
    Ok(o)
}

/// Latents `[batch, len, width]` whose rows lie on 16-byte words, and the strides of their tokens and rows of the
/// batch: a copy where they lie elsewhere.
fn on_words(latents: &CudaTensor) -> Result<(CudaTensor, RowLayout), KernelError> {
    let [batch, len, width] = latents.dims(NAME, "latents")?;
    let layout_of = |latents: &CudaTensor| {
        let strides: [usize; 3] = latents.strides().try_into().ok()?;
        let one_head = [strides[0], strides[1], width, strides[2]];
        row_layout([batch, len, 1, width], one_head, WORD_ELEMENTS)
    };
    let (latents, layout) = match layout_of(latents) {
        Some(layout) => (latents.clone(), layout),
        None => {
            let copy = latents.contiguous();
            let expected = "rows must begin at multiples of 16 bytes";
            let layout = layout_of(&copy).ok_or_else(|| copy.layout_error(NAME, "latents", expected))?;
            (copy, layout)
        }
    };
    require_alignment(NAME, "latents", &latents)?;
    Ok((latents, layout))
}

/// Factors of keys, f32 of `shape`, whose last stride is 1, and their strides: a copy where it is another.
fn with_unit_stride(key_scale: &CudaTensor, shape: [usize; 3]) -> Result<(CudaTensor, [usize; 3]), KernelError> {
    operands!(NAME, key_scale: F32 shape strided);
    let key_scale = match key_scale.strides().last() {
        Some(1) => key_scale.clone(),
        _ => key_scale.contiguous(),
    };
    let strides = key_scale.strides().try_into();
    let strides = strides.map_err(|_| key_scale.layout_error(NAME, "key_scale", "three dimensions"))?;
    Ok((key_scale, strides))
}

/// One new token a row of latent attention, packed but not yet in the cache.
#[derive(Debug, Clone, Copy)]
pub struct LatentToken<'a> {
    /// The packed tensor of [`MlaPack::mla_pack_forward`](crate::MlaPack::mla_pack_forward), bf16 `[batch, 1, width]`:
    /// it begins with the queries, `head_dim + rope_dim` columns for each head.
    pub packed: &'a CudaTensor,
    /// bf16 `[num_heads * 2 * head_dim, rank]`: for each head `W_UK`, then `W_UV`.
    pub up: &'a CudaTensor,
    /// The normalised latent, bf16 `[batch, 1, rank]`.
    pub latent: &'a CudaTensor,
    /// The weight of the key norm, bf16 `[head_dim + rope_dim]`, and from the packing the rotated key, bf16 `[batch, 1,
    /// rope_dim]`, and the factors 1 / rms, f32 `[batch, 1, num_heads]`. `None` if keys are not normed.
    pub norm: Option<[&'a CudaTensor; 3]>,
    /// Number of tokens before this one, i32 `[batch]`.
    pub length: &'a CudaTensor,
    /// `[num_heads, head_dim, rope_dim]` of the query heads.
    pub heads: [usize; 3],
}

impl LatentToken<'_> {
    /// Appends the token to the cache and attends over all cached tokens. The cache has room for `capacity` tokens:
    /// `latents`, bf16 `[batch, capacity, rank + rope_dim]`, and where keys are normed `scales`, f32 `[batch, capacity,
    /// num_heads]`. Returns the output after `W_UV`, bf16 `[batch, 1, num_heads * head_dim]`.
    ///
    /// # Errors
    /// Types or sizes that do not fit or have no kernel.
    pub fn decode(
        &self,
        latents: &CudaTensor,
        scales: Option<&CudaTensor>,
        softmax_scale: f32,
    ) -> Result<CudaTensor, KernelError> {
        let [num_heads, head_dim, rope_dim] = self.heads;
        let [batch, _, q_stride] = self.packed.dims(JOIN, "packed")?;
        let [_, capacity, width] = latents.dims(JOIN, "latents")?;
        let rank = width.saturating_sub(rope_dim);
        let first_key = num_heads * (head_dim + rope_dim);
        require_sizes([1, capacity], [width, rank])?;
        operands!(only JOIN,
            packed: BF16[batch, 1, q_stride] contiguous = self.packed,
            up: BF16[num_heads * 2 * head_dim, rank] contiguous = self.up,
            latent: BF16[batch, 1, rank] contiguous = self.latent,
            latents: BF16[batch, capacity, width] contiguous,
            length: I32[batch] contiguous = self.length,
        );
        let fits = q_stride >= 2 * first_key && head_dim.is_multiple_of(8);
        require!(fits && scales.is_some() == self.norm.is_some(), JOIN, "token": format!("{self:?}"),
            "a packed token of these heads, factors where keys are normed");
        // Without norms the kernel reads the rotated key from the packed tensor, where it ends the first head's key,
        // and does not read the weight and the factors: `packed` stands in for them.
        let [norm, rotated, key_scale] = self.norm.unwrap_or([self.packed; 3]);
        let (rotated_offset, rotated_stride) = match self.norm {
            None => (first_key + head_dim, q_stride),
            Some(_) => {
                operands!(only JOIN,
                    norm: BF16[head_dim + rope_dim] contiguous,
                    rotated: BF16[batch, 1, rope_dim] contiguous,
                    key_scale: F32[batch, 1, num_heads] contiguous,
                );
                (0, rope_dim)
            }
        };
        if let Some(scales) = scales {
            operands!(only JOIN, scales: F32[batch, capacity, num_heads] contiguous);
        }
        // The token's queries times `W_UK`, which attend to latents.
        let folded = latents.empty_contiguous(&[batch, 1, num_heads, width], DType::BF16);
        let params =
            params!(MlaJoinTokenParams { num_heads, rank, capacity, q_stride, rotated_offset, rotated_stride });
        let kernel = mla_join_token_kernel(head_dim, rope_dim, self.norm.is_some());
        // Without norms the kernel writes no factors: `latents` stands in for their cache.
        let of_scales = scales.unwrap_or(latents);
        let tensors = [self.packed, norm, self.up, self.latent, rotated, key_scale];
        let tensors = [&tensors[..], &[self.length, latents, of_scales, &folded]].concat();
        // SAFETY: sizes and types checked above; the kernel clamps lengths to the capacity, writes one row of the cache
        // and every folded query.
        unsafe { kernel.launch([num_heads, rank.div_ceil(JOINED_COLUMNS), batch], &tensors, &params) }?;
        let keys = LatentKeys { latents, rank, key_scale: scales, length: Some(self.length) };
        let attended = mla_decode(&folded, keys, softmax_scale)?;
        let o = latents.empty_contiguous(&[batch, 1, num_heads * head_dim], DType::BF16);
        let params = params!(MlaValuesParams { num_heads, head_dim, rank });
        let grid = [num_heads, head_dim.div_ceil(VALUE_ROWS), batch];
        // SAFETY: sizes as checked above; writes every element of o.
        unsafe { MLA_VALUES.launch(grid, &[&attended, self.up, &o], &params) }?;
        Ok(o)
    }
}

const JOIN: &str = "mla_join_token";

/// Rows of `W_UV` of a thread block of mla_values.
const VALUE_ROWS: usize = 16;

/// The kernel that appends a token to the cache and multiplies its queries by `W_UK`.
fn mla_join_token_kernel(head_dim: usize, rope_dim: usize, normed: bool) -> SourceKernel {
    SourceKernel::new(JOIN)
        .define("HEAD_DIM", head_dim)
        .define("ROPE_DIM", rope_dim)
        .define("NORM", u8::from(normed))
        .threads(256)
        .starts_early()
}

/// The kernel that multiplies the attended latents by `W_UV`.
const MLA_VALUES: SourceKernel = SourceKernel::new("mla_values").threads(256).starts_early();

/// The specialisation for widths of keys and values, with factors of keys or without, on a device with
/// `max_shared_bytes` of shared memory a block.
fn mla_decode_kernel(width: usize, rank: usize, has_key_scale: bool, max_shared_bytes: usize) -> SourceKernel {
    let fits = |num_warps: &usize| shared_bytes(width, *num_warps) <= max_shared_bytes;
    let num_warps = [4, 2].into_iter().find(fits).unwrap_or(2);
    SourceKernel::new(NAME)
        .define("KEY_DIM", width)
        .define("VALUE_DIM", rank)
        .define("NUM_WARPS", num_warps)
        .threads(num_warps * 32)
        .shared_bytes(shared_bytes(width, num_warps))
        .starts_early()
        .define("KEY_SCALE", u8::from(has_key_scale))
}

/// The kernel that joins the splits' partial results.
fn mla_decode_join_kernel(rank: usize) -> SourceKernel {
    SourceKernel::new("mla_decode_join").define("VALUE_DIM", rank).threads(256).starts_early()
}

/// KV splits of each row: as many as fill the device with one thread block for each multiprocessor, as a block takes
/// all of its shared memory. `blocks` is the number of thread blocks without splits.
fn num_splits(blocks: usize, len: usize, multiprocessors: usize) -> usize {
    let most = len.div_ceil(MIN_SPLIT_KEYS).min(MAX_SPLITS);
    (multiprocessors / blocks).clamp(1, most)
}

/// Shared memory in bytes: the queries of 16 heads, two tiles of 16 keys for each warp, the probabilities of a tile,
/// and each warp's maxima and sums.
fn shared_bytes(width: usize, num_warps: usize) -> usize {
    let (pitch, tile) = (2 * width + 16, 16 * num_warps);
    (16 + 2 * tile) * pitch + 16 * (2 * tile + 16) + num_warps * 128
}

/// Refuses more new tokens than latents, and widths that the kernel does not take.
fn require_sizes([new, len]: [usize; 2], [width, rank]: [usize; 2]) -> Result<(), KernelError> {
    let fits = |size: usize, most| size.is_multiple_of(16) && (16..=most).contains(&size);
    require!(new <= len, NAME, "new tokens": new, "as many as the {len} latents at most");
    require!(len <= i32::MAX as usize / 2, NAME, "latents": len, "below 2^30");
    require!(fits(width, MAX_KEY_DIM), NAME, "width of a latent": width, "multiples of 16 up to {MAX_KEY_DIM}");
    require!(fits(rank, width.min(512)), NAME, "rank": rank, "multiples of 16 up to the width and 512");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_checked_and_widths_fit_small_devices() {
        assert!(require_sizes([1, 1], [576, 512]).is_ok());
        assert!(require_sizes([3, 2], [64, 48]).is_err(), "new tokens are among the latents");
        for (width, rank) in [(8, 8), (592, 512), (64, 80), (64, 0), (576, 528), (72, 48)] {
            assert!(require_sizes([1, 5], [width, rank]).is_err(), "{width} {rank}");
        }
        for width in (16..=MAX_KEY_DIM).step_by(16) {
            let small = mla_decode_kernel(width, 16, false, 99 * 1024);
            assert!(small.dynamic_shared_bytes() <= 99 * 1024, "{width}");
        }
        assert_eq!(mla_decode_kernel(576, 512, false, 227 * 1024).dynamic_shared_bytes(), 171_008);
    }
}
