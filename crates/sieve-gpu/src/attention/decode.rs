//! Launch of `kernels/attention_decode.cu`: attention of one new token for each row of the batch over its KV cache. A
//! token that joins its cache takes `kernels/hopper_attention_token.cu` where that has the bits of a whole row
//! (`token.rs`).
use crate::KernelError;
use crate::attention::far::FarWords;
use crate::attention::token::{self, TokenCall};
use crate::attention::{AttentionShape, DecodeScratch, DecodeTiling, Heads, Qkv, require_scale, token_params};
use crate::runtime::{CudaTensor, DType, SourceKernel, operands, params, require, require_non_empty};
use crate::step::qk_norm_rope_forward::RotaryTables;
use sieve_core::FarKeys;

const NAME: &str = "attention_decode";

/// One layer's KV cache on the GPU.
#[derive(Debug, Clone)]
pub struct KvCache {
    /// bf16 `[batch, num_kv_heads, capacity, head_dim]`, written in place.
    pub k: CudaTensor,
    /// bf16 `[batch, num_kv_heads, capacity, head_dim_v]`, written in place.
    pub v: CudaTensor,
}

/// Which keys of the cache a decode step sees.
#[derive(Debug, Clone, Copy)]
pub struct DecodeStep<'a> {
    /// Size of the sliding window in keys, the new key included; `None` is all keys.
    pub window: Option<usize>,
    /// Factor on the dot products `q.k`.
    pub softmax_scale: f32,
    /// Number of first keys of a row that a query with a window sees beside it; 0 for chosen blocks.
    pub num_first: usize,
    /// The keys that a query of a token that joins its cache sees beyond its window; `None`: none. Distances count rows
    /// of the cache, which never drops the row's first keys.
    pub far: Option<FarKeys>,
    /// Largest number of keys that any row has cached before this token.
    pub max_length: usize,
    /// Tokens that the cache of a sliding window no longer holds: row 0 of the cache is token `num_dropped` of the
    /// sequence. `length` counts all tokens of the sequence, the dropped ones too. With `far`, they are dropped behind
    /// the first keys, in multiples of 128.
    pub num_dropped: usize,
    /// One more logit of each query head, whose value is zero, bf16 `[num_heads]`; `None`: no sinks. Chosen blocks take
    /// none.
    pub sinks: Option<&'a CudaTensor>,
}

impl DecodeStep<'_> {
    /// A query sees all keys; the cache holds them all, at most `max_length` before this token.
    pub const fn new(max_length: usize, softmax_scale: f32) -> Self {
        Self { window: None, softmax_scale, num_first: 0, far: None, max_length, num_dropped: 0, sinks: None }
    }

    /// The most keys that a query sees in a cache with room for `capacity`, its own included.
    pub fn most_keys(&self, capacity: usize) -> usize {
        let seen = match (self.window, self.far) {
            (Some(window), Some(far)) => far.most_keys(window),
            (window, _) => window.unwrap_or(capacity),
        };
        seen.min(capacity)
    }
}

/// Norm and rotary position embedding of a token's queries and key, as
/// [`QkNormRope`](crate::step::QkNormRope) has them for whole rows. The token's position is its `length`.
#[derive(Debug, Clone, Copy)]
pub struct TokenRotation<'a> {
    /// Weights of the queries' and of the keys' norm, bf16 `[head_dim]`, and the norms' epsilon.
    pub norm: Option<([&'a CudaTensor; 2], f32)>,
    /// Rotary cosines and sines, f32 `[max_positions, head_dim / 2]`; positions past their end take the last row.
    pub tables: [&'a CudaTensor; 2],
}

impl KvCache {
    /// An empty cache of `capacity` keys a row; `like` is any tensor on the device.
    pub fn new(like: &CudaTensor, shape: &AttentionShape, capacity: usize) -> Self {
        let new = |width| like.empty_contiguous(&[shape.batch, shape.num_kv_heads, capacity, width], DType::BF16);
        Self { k: new(shape.head_dim), v: new(shape.head_dim_v) }
    }

    /// Sizes of a call in which one query a row, `[batch, 1, num_heads, head_dim]`, reads this cache.
    ///
    /// # Errors
    /// Sizes that do not fit or have no kernel, more than one token a row.
    pub fn query_shape(&self, kernel: &'static str, q: &Heads) -> Result<AttentionShape, KernelError> {
        let [_, num_kv_heads, _, head_dim_v] = self.v.dims(kernel, "v_cache")?;
        require_one_token(kernel, q.as_queries(kernel, num_kv_heads, head_dim_v)?)
    }

    /// Checks a cache against a call and returns its capacity.
    pub(crate) fn capacity(&self, kernel: &'static str, shape: &AttentionShape) -> Result<usize, KernelError> {
        let [_, _, capacity, _] = self.k.dims::<4>(kernel, "k_cache")?;
        operands!(only kernel,
            k_cache: BF16[shape.batch, shape.num_kv_heads, capacity, shape.head_dim] contiguous = &self.k,
            v_cache: BF16[shape.batch, shape.num_kv_heads, capacity, shape.head_dim_v] contiguous = &self.v,
        );
        Ok(capacity)
    }

    /// Attends one new token a row over its cache and itself, and appends its key and value to the cache. `token` holds
    /// `[batch, 1, heads, head_dim]` tensors, `length` (i32 `[batch]`) the tokens before it. Returns
    /// `[batch, 1, num_heads, head_dim_v]`.
    ///
    /// # Errors
    /// Types or sizes that do not fit, a full cache.
    pub fn attention_decode(
        &self,
        token: &Qkv,
        length: &CudaTensor,
        step: DecodeStep<'_>,
        scratch: &DecodeScratch,
    ) -> Result<CudaTensor, KernelError> {
        launch(&token.q, self, length, step, scratch, Seen::Appended(token))
    }

    /// [`attention_decode`](Self::attention_decode) of a token whose queries and key are not rotated yet. The cache
    /// gets the rotated key.
    ///
    /// # Errors
    /// Types or sizes that do not fit, a full cache.
    pub fn attention_decode_rotated(
        &self,
        token: &Qkv,
        rotation: TokenRotation<'_>,
        length: &CudaTensor,
        step: DecodeStep<'_>,
        scratch: &DecodeScratch,
    ) -> Result<CudaTensor, KernelError> {
        launch(&token.q, self, length, step, scratch, Seen::Rotated(token, rotation))
    }

    /// Attends one query a row, `q` of `[batch, 1, num_heads, head_dim]`, over the last `window` of the first `length`
    /// keys of its cache, which is not written.
    ///
    /// # Errors
    /// Types or sizes that do not fit.
    pub fn attention_decode_cached(
        &self,
        q: &Heads,
        length: &CudaTensor,
        step: DecodeStep<'_>,
        scratch: &DecodeScratch,
    ) -> Result<CudaTensor, KernelError> {
        launch(q, self, length, step, scratch, Seen::Cached)
    }

    /// [`attention_decode_cached`](Self::attention_decode_cached) over the keys up to number `length` that lie in the
    /// blocks of `chosen`, i32 `[batch, choosers, num_chosen]`: ascending indices of blocks of `block_size` keys, then
    /// -1. Each list has as many blocks as there are up to key `length`, whose own block is the last, as choices have;
    /// others need [`attention_decode_listed`](Self::attention_decode_listed). The query heads are divided evenly among
    /// the choosers. `scratch` must be made with one KV head for each chooser. Blocks of a multiple of 16 keys are read
    /// tile by tile, others key by key.
    ///
    /// # Errors
    /// Types or sizes that do not fit.
    pub fn attention_decode_chosen(
        &self,
        q: &Heads,
        length: &CudaTensor,
        step: DecodeStep<'_>,
        scratch: &DecodeScratch,
        chosen: &CudaTensor,
        block_size: usize,
    ) -> Result<CudaTensor, KernelError> {
        launch(q, self, length, step, scratch, Seen::Chosen { form: DecodeForm::Chosen, chosen, block_size })
    }

    /// [`attention_decode_chosen`](Self::attention_decode_chosen) over lists of any blocks. A list ends before its
    /// first -1, and before the first block that lies behind the block of key `length`. A query with an empty list gets
    /// an output of zeros.
    ///
    /// # Errors
    /// Types or sizes that do not fit.
    pub fn attention_decode_listed(
        &self,
        q: &Heads,
        length: &CudaTensor,
        step: DecodeStep<'_>,
        scratch: &DecodeScratch,
        chosen: &CudaTensor,
        block_size: usize,
    ) -> Result<CudaTensor, KernelError> {
        launch(q, self, length, step, scratch, Seen::Chosen { form: DecodeForm::Listed, chosen, block_size })
    }
}

/// The keys that a decoded query sees.
enum Seen<'a> {
    /// All keys of the cache, and the key of this token, which is appended to the cache.
    Appended(&'a Qkv),
    /// As `Appended`; the token's queries and key are rotated first.
    Rotated(&'a Qkv, TokenRotation<'a>),
    /// All keys in the KV cache.
    Cached,
    /// The keys of the chosen blocks of the cache, in lists of either form.
    Chosen { form: DecodeForm, chosen: &'a CudaTensor, block_size: usize },
}

/// What a launch takes for the keys that its queries see.
pub(crate) struct SeenOperands {
    pub(crate) form: DecodeForm,
    /// The kernel's tensors between the queries and the sinks.
    tensors: Vec<CudaTensor>,
    /// Words of the token's key and value ([`Heads::words`]); 0 where the token does not join the cache.
    pub(crate) kv_words: [[usize; 3]; 2],
    /// The call's sizes; for chosen blocks with a KV head for each chooser.
    heads: AttentionShape,
    /// Blocks of a chooser, and keys of a block; 0 where no blocks are chosen.
    num_chosen: usize,
    select_size: usize,
    pub(crate) rotation: RotationWords,
    pub(crate) far: FarWords,
}

/// The numbers of a rotation and of the norms before it; 0 where the token is not rotated.
#[derive(Default)]
pub(crate) struct RotationWords {
    pub(crate) max_positions: usize,
    pub(crate) table_stride: usize,
    pub(crate) epsilon: f32,
}

impl Seen<'_> {
    /// The token whose key and value join the cache; `None` for a query that reads the cache as it is.
    fn appended(&self) -> Option<&Qkv> {
        match self {
            Self::Appended(token) | Self::Rotated(token, _) => Some(token),
            Self::Cached | Self::Chosen { .. } => None,
        }
    }

    /// Checks the operands that belong to these keys.
    fn operands(self, shape: &AttentionShape, cache: &KvCache) -> Result<SeenOperands, KernelError> {
        let plain = |form, tensors: Vec<CudaTensor>, kv_words| SeenOperands {
            form,
            tensors: tensors.into_iter().chain([cache.k.clone(), cache.v.clone()]).collect(),
            kv_words,
            heads: *shape,
            num_chosen: 0,
            select_size: 0,
            rotation: RotationWords::default(),
            far: FarWords::default(),
        };
        let joining = |form, token: &Qkv| -> Result<SeenOperands, KernelError> {
            let [k, v] = [&token.k, &token.v].map(Heads::with_kernel_strides);
            let words = [k.require_words(NAME, "k")?, v.require_words(NAME, "v")?];
            Ok(plain(form, vec![k.tensor().clone(), v.tensor().clone()], words))
        };
        let reading = |form| plain(form, Vec::new(), Default::default());
        Ok(match self {
            Self::Appended(token) => joining(DecodeForm::Appended, token)?,
            Self::Cached => reading(DecodeForm::Cached),
            Self::Rotated(token, rotation) => {
                let mut operands = joining(DecodeForm::rotated(rotation.norm.is_some()), token)?;
                if let Some(([q_weight, k_weight], epsilon)) = rotation.norm {
                    operands!(NAME,
                        q_weight: BF16[shape.head_dim] aligned,
                        k_weight: BF16[shape.head_dim] aligned,
                    );
                    operands.tensors.extend([q_weight, k_weight]);
                    operands.rotation.epsilon = epsilon;
                }
                let RotaryTables { cos, sin, max_positions, stride } =
                    RotaryTables::of(NAME, rotation.tables, shape.head_dim)?;
                operands.tensors.extend([cos, sin]);
                operands.rotation = RotationWords { max_positions, table_stride: stride, ..operands.rotation };
                operands
            }
            Self::Chosen { form, chosen, block_size } => {
                let [_, choosers, num_chosen] = chosen.dims(NAME, "chosen")?;
                operands!(only NAME, chosen: I32[shape.batch, choosers, num_chosen] contiguous);
                require_non_empty(NAME, "chosen", num_chosen)?;
                let mut operands = reading(form);
                operands.tensors.push(chosen.clone());
                operands.heads.num_kv_heads = choosers;
                (operands.num_chosen, operands.select_size) = (num_chosen, block_size);
                operands
            }
        })
    }
}

/// Checks a decoding call and launches the kernel for the keys that its queries see.
fn launch(
    q: &Heads,
    cache: &KvCache,
    length: &CudaTensor,
    step: DecodeStep<'_>,
    scratch: &DecodeScratch,
    seen: Seen<'_>,
) -> Result<CudaTensor, KernelError> {
    let appended = seen.appended();
    let shape = &match appended {
        Some(token) => one_token(NAME, token)?,
        None => cache.query_shape(NAME, q)?,
    };
    let capacity = cache.capacity(NAME, shape)?;
    require!(appended.is_none() || step.max_length < capacity, NAME, "length": step.max_length,
        "below the cache's capacity of {capacity}");
    let q = q.with_kernel_strides();
    let q_words = q.require_words(NAME, "q")?;
    require_scale(NAME, step.softmax_scale)?;
    operands!(only NAME, length: I32[shape.batch] strided);
    // Without a window a query sees every cached key and the new one.
    let window = step.window.unwrap_or(capacity + 1);
    require_non_empty(NAME, "window", window)?;
    let o = cache.k.empty_contiguous(&shape.output(), DType::BF16);
    let seen = SeenOperands { far: FarWords::new(NAME, step.far)?, ..seen.operands(shape, cache)? };
    if step.far.is_some() {
        require!(seen.form.joins(), NAME, "bands": "there", "none where the token does not join its cache");
        require!(step.num_first == 0, NAME, "first keys": step.num_first, "0: bands have their own");
        require_non_empty(NAME, "window", step.window.unwrap_or(0))?;
    }
    scratch.require(NAME, &seen.heads)?;
    let sinks = step.sinks.map(|sinks| {
        require!(!seen.form.reads_blocks(), NAME, "sinks": "there", "none over chosen blocks");
        operands!(NAME, sinks: BF16[shape.num_heads]);
        Ok(sinks)
    });
    let sinks = sinks.transpose()?;
    let mut tensors = vec![q.tensor()];
    tensors.extend(seen.tensors.iter().chain(&sinks));
    tensors.extend([length, &o]);
    let seen_keys = step.most_keys(capacity);
    if token::takes(shape, q.tensor(), seen.form, &step, seen_keys) {
        let call = TokenCall { shape, seen: &seen, step: &step, q_words, window, seen_keys, capacity };
        // SAFETY: sizes, strides and types checked above.
        unsafe { call.launch(&tensors) }?;
        return Ok(o);
    }
    tensors.extend([&scratch.partials, &scratch.counters]);
    let [k_words, v_words] = seen.kv_words;
    let params = params!(AttentionDecodeParams {
        base: token_params(&seen.heads, step.softmax_scale, [q_words, k_words, v_words]),
        capacity,
        window_size: window,
        num_splits: scratch.num_splits,
        cache_heads: shape.num_kv_heads,
        { num_chosen, select_size }: seen,
        { num_dropped, num_first }: step,
        { max_positions, table_stride, epsilon }: seen.rotation,
        { sink_tokens, first_distance, last_distance, num_bands, first_band }: seen.far,
    });
    let kernel = define_far(attention_decode_kernel(scratch.tiling, seen.form, sinks.is_some()), &step);
    // SAFETY: sizes, strides and types checked above; the kernel clamps lengths to the capacity; writes every element
    // of o and, when appending, row `length` of the caches.
    unsafe { kernel.launch(scratch.grid(), &tensors, &params) }?;
    Ok(o)
}

/// The keys that a specialisation of the kernel reads, and what it does to the token first.
#[derive(Debug, Clone, Copy)]
pub(crate) enum DecodeForm {
    /// The keys of a cache, which the token does not join.
    Cached,
    /// Chosen blocks of a cache, as many as there are up to the token's own, which is the last.
    Chosen,
    /// Any blocks of a cache.
    Listed,
    /// A cache that the token joins.
    Appended,
    /// A cache that the token joins after its rotation.
    Rotated,
    /// A cache that the token joins after norms of its heads and its rotation.
    NormedRotated,
}

impl DecodeForm {
    /// The form that rotates, with or without norms of the heads.
    const fn rotated(has_norm: bool) -> Self {
        if has_norm { Self::NormedRotated } else { Self::Rotated }
    }

    /// Whether the token joins the cache.
    pub(crate) const fn joins(self) -> bool {
        matches!(self, Self::Appended | Self::Rotated | Self::NormedRotated)
    }

    /// Whether the queries read listed blocks of the cache.
    const fn reads_blocks(self) -> bool {
        matches!(self, Self::Chosen | Self::Listed)
    }

    /// `ROTATE` of the kernels.
    pub(crate) const fn rotation(self) -> u8 {
        match self {
            Self::Cached | Self::Chosen | Self::Listed | Self::Appended => 0,
            Self::Rotated => 1,
            Self::NormedRotated => 2,
        }
    }
}

/// The specialisation for a tiling and a form, with sinks or without.
fn attention_decode_kernel(tiling: DecodeTiling, form: DecodeForm, has_sinks: bool) -> SourceKernel {
    tiling
        .kernel(SourceKernel::new(NAME))
        .define("APPEND", u8::from(form.joins()))
        .define("CHOSEN", u8::from(form.reads_blocks()) + u8::from(matches!(form, DecodeForm::Listed)))
        .define("ROTATE", form.rotation())
        .define("SINKS", has_sinks as u8)
        .starts_early()
}

/// Adds the `#define` HAS_FAR where queries see keys beyond their window.
pub(crate) fn define_far(kernel: SourceKernel, step: &DecodeStep<'_>) -> SourceKernel {
    if step.far.is_some() { kernel.define("HAS_FAR", 1u8) } else { kernel }
}

/// The sizes of a decoding call; refuses more than one token a row.
pub(crate) fn one_token(kernel: &'static str, token: &Qkv) -> Result<AttentionShape, KernelError> {
    require_one_token(kernel, token.shape(kernel)?)
}

fn require_one_token(kernel: &'static str, shape: AttentionShape) -> Result<AttentionShape, KernelError> {
    require!(shape.seq_len == 1, kernel, "tokens a row": shape.seq_len, "1");
    Ok(shape)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Hardware, Recorder, Step};

    #[test]
    fn a_query_of_a_cache_needs_no_token_and_one_of_other_heads_is_refused() {
        let gpu = Recorder::new(Hardware::HOPPER);
        let bf16 = |shape: &[usize]| gpu.tensor(shape, DType::BF16);
        let cache = KvCache { k: bf16(&[3, 2, 40, 64]), v: bf16(&[3, 2, 40, 48]) };
        let queries = |batch, tokens, heads| Heads::all(&bf16(&[batch, tokens, heads, 64]));
        let q = queries(3, 1, 4);
        let shape = cache.query_shape("test", &q).expect("a query for each row");
        assert_eq!(shape, AttentionShape::new(3, 1, [4, 2], [64, 48]));
        let scratch = DecodeScratch::new(&cache.k, shape, 40).expect("a batch");
        gpu.take_steps();
        let length = gpu.tensor(&[3], DType::I32);
        let decode = |q: &Heads| cache.attention_decode_cached(q, &length, DecodeStep::new(30, 0.125), &scratch);
        assert_eq!(decode(&q).expect("sizes fit").shape(), [3, 1, 4, 48]);
        let steps = gpu.take_steps();
        let [Step::Launch(launch)] = &steps[..] else {
            panic!("{steps:?}");
        };
        // Queries, the two caches, the lengths, o and the scratch buffers.
        assert_eq!(launch.tensors.len(), 7);
        // Offsets of k and v, and batch strides of k and v. Before each pair stands the word of q.
        assert_eq!([4, 5, 7, 8].map(|word| launch.words[word]), [0; 4]);
        assert_eq!(launch.words[6], 4 * 64);
        for (q, sentence) in [
            (queries(3, 1, 3), "number of KV heads 2"),
            (queries(3, 2, 4), "tokens a row 2"),
            (queries(2, 1, 4), "k_cache has shape [3, 2, 40, 64], expected [2, 2, 40, 64]"),
        ] {
            let error = decode(&q).expect_err("another size").to_string();
            assert!(error.contains(sentence), "{error}");
        }
    }
}
