//! Attention of one new token for each row of the batch over a cache.
use super::attention::far_of;
use super::dma::{require_ordered, score_bias};
use super::{Inputs, Outputs, wrong};
use crate::request::PlanError;
use serde::{Deserialize, Serialize};
use sieve_gpu::{
    AttentionShape, DecodeScratch, DecodeStep, DmaSlots, Heads, KernelError, KvCache, LatentKeys, WARP_KEYS, mla_decode,
};

/// q, k, v of one token a row, k_cache, v_cache (written in place), length, sinks? (bf16 `[heads]`) → o
#[derive(Debug, Clone, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct AttentionDecode {
    /// Factor on `q . k`.
    pub scale: f32,
    /// The most keys that a query sees, its own included; absent: all keys up to its own.
    #[serde(default)]
    pub window: Option<usize>,
    /// As of [`AttentionForward`](super::AttentionForward).
    #[serde(default)]
    pub bands: Option<[usize; 3]>,
    /// Whether o has the bits of this row of [`AttentionForward`](super::AttentionForward), behind any number of keys.
    #[serde(default)]
    pub same_bits: bool,
}

impl AttentionDecode {
    /// A row may have up to the caches' capacity less one keys before the new one; the scratch is made for as many as a
    /// query sees.
    pub(super) fn launches(&self, t: &Inputs) -> Result<Outputs, PlanError> {
        let &Self { scale, window, bands, same_bits } = self;
        let far = far_of("attention_decode", window, bands)?.map(|(_, far)| far);
        let (token, cache) = (t.qkv_in_order(same_bits)?, t.cache()?);
        let shape = token.shape("attention_decode")?;
        let [_, _, capacity, _] = cache.k.dims("attention_decode", "k_cache")?;
        let sinks = t.maybe("sinks");
        let all = DecodeStep::new(capacity.saturating_sub(1), scale);
        let step = DecodeStep { window, far, sinks: sinks.as_ref(), ..all };
        let scratch = DecodeScratch::new(&cache.k, shape, step.most_keys(capacity))?;
        Ok(vec![("o", cache.attention_decode(&token, &t.get("length")?, step, &scratch)?)])
    }
}

/// q of one token a row whose key is in the cache, k_cache, v_cache, length, chosen?, sinks? → o. `length` counts the
/// keys that the query sees; with `chosen`, i32 `[batch, choosers, blocks]`, the tokens before it. Keys of a cache: see
/// [`Plan::capacity`](crate::Plan::capacity)
#[derive(Debug, Clone, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct CachedDecode {
    /// Factor on `q . k`.
    pub scale: f32,
    /// The most keys that a query sees, its own included; absent: all keys up to its own.
    #[serde(default)]
    pub window: Option<usize>,
    /// Keys of a chosen block: of the blocks in `chosen`, in ascending order and then -1, a query sees all tokens.
    #[serde(default)]
    pub block: Option<usize>,
}

impl CachedDecode {
    /// Nothing is written to the caches. `chosen` and `block` come together; choosers are as many as KV heads, or a
    /// multiple that divides the query heads.
    pub(super) fn launches(&self, t: &Inputs) -> Result<Outputs, PlanError> {
        let &Self { scale, window, block } = self;
        let (q, cache, length) = (Heads::all(&t.get("q")?), t.cache()?, t.get("length")?);
        let shape = cache.query_shape(t.op, &q)?;
        let [_, kv_heads, capacity, _] = cache.k.dims(t.op, "k_cache")?;
        let sinks = t.maybe("sinks");
        let step = DecodeStep { window, sinks: sinks.as_ref(), ..DecodeStep::new(capacity, scale) };
        let max_keys = window.unwrap_or(capacity).min(capacity);
        let o = match (t.maybe("chosen"), block) {
            (None, None) => {
                let scratch = DecodeScratch::new(&cache.k, shape, max_keys)?;
                cache.attention_decode_cached(&q, &length, step, &scratch)?
            }
            (Some(chosen), Some(block)) => {
                if block == 0 || !block.is_multiple_of(WARP_KEYS) {
                    let supported = format!("multiples of {WARP_KEYS}");
                    return Err(KernelError::unsupported(t.op, "block", block, supported).into());
                }
                let [_, num_kv_heads, num_chosen] = chosen.dims(t.op, "chosen")?;
                let fits = |heads: usize, of: usize| of > 0 && heads > 0 && heads.is_multiple_of(of);
                if !fits(num_kv_heads, kv_heads) || !fits(shape.num_heads, num_kv_heads) {
                    let got = format!("{num_kv_heads} for {}/{kv_heads} heads", shape.num_heads);
                    let supported = "a divisor of the heads and a multiple of the KV heads";
                    return Err(KernelError::unsupported(t.op, "choosers", got, supported).into());
                }
                let choosers = AttentionShape { num_kv_heads, ..shape };
                let max_keys = num_chosen.saturating_mul(block).min(max_keys);
                let scratch = DecodeScratch::new(&cache.k, choosers, max_keys)?;
                cache.attention_decode_listed(&q, &length, step, &scratch, &chosen, block)?
            }
            _ => return Err(wrong(t.op, "chosen", "must be given together with block, the number of keys of a block")),
        };
        Ok(vec![("o", o)])
    }
}

/// q, k, v of one token a row, z, k_cache, v_cache, z_cache, positions (all written in place), length → o
#[derive(Debug, Clone, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct DmaDecode {
    /// Factor on `q . k`.
    pub scale: f32,
    /// The last keys, which never lose their place.
    pub local: usize,
    /// Whether the bias is z itself, not `exp(min(z, 60))`.
    pub linear: bool,
    /// Whether o has the bits of this row of a [`DmaForward`](super::DmaForward) that asks for the same.
    #[serde(default)]
    pub same_bits: bool,
}

impl DmaDecode {
    /// The slots are what the caches, `z_cache` and `positions` hold together; the new token takes one of them.
    pub(super) fn launches(&self, t: &Inputs) -> Result<Outputs, PlanError> {
        let &Self { scale, local, linear, same_bits } = self;
        let (token, kv) = (t.qkv_in_order(same_bits)?, t.cache()?);
        let shape = token.shape("dma_decode")?;
        let [_, _, capacity, _] = kv.k.dims("dma_decode", "k_cache")?;
        let slots = DmaSlots { kv, z: t.get("z_cache")?, positions: t.get("positions")?, local_window_size: local };
        let (bias, z, length) = (score_bias(linear), t.get("z")?, t.get("length")?);
        let o = if same_bits {
            require_ordered(t.op, capacity)?;
            slots.dma_decode_in_order(&token, &z, &length, scale, bias)?
        } else {
            let scratch = DecodeScratch::new(&slots.kv.k, shape, capacity)?;
            slots.dma_decode(&token, &z, &length, scale, bias, &scratch)?
        };
        Ok(vec![("o", o)])
    }
}

/// q of one token a row whose key is in the cache, k_cache, v_cache, length, chosen → o, with the bits of this row of
/// [`SelectedForward`](super::SelectedForward). `length` counts the tokens before; `chosen`: as
/// [`KvCache::selected_attention_token`] has it.
#[derive(Debug, Clone, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct SelectedDecode {
    /// Factor on `q . k`.
    pub scale: f32,
    /// Tokens of a block: 16, 32, 64 or 128.
    pub block: usize,
}

impl SelectedDecode {
    /// Nothing is written to the caches.
    pub(super) fn launches(&self, t: &Inputs) -> Result<Outputs, PlanError> {
        let &Self { scale, block } = self;
        let (q, cache, length, chosen) = (t.get("q")?, t.cache()?, t.get("length")?, t.get("chosen")?);
        let [_, _, capacity, _] = cache.k.dims(t.op, "k_cache")?;
        let step = DecodeStep::new(capacity.saturating_sub(1), scale);
        Ok(vec![("o", cache.selected_attention_token(&q, &length, step, &chosen, block)?)])
    }
}

/// q, latents, key_scale?, length? → o. `length`: tokens of each row before the new ones, where latents have room
#[derive(Debug, Clone, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct MlaDecode {
    /// Factor on `q . k`.
    pub scale: f32,
    /// How many columns of a latent, from the first on, are its values.
    pub rank: usize,
}

impl MlaDecode {
    pub(super) fn launches(&self, t: &Inputs) -> Result<Outputs, PlanError> {
        let &Self { scale, rank } = self;
        let (q, latents, key_scale) = (t.get("q")?, t.get("latents")?, t.maybe("key_scale"));
        let length = t.maybe("length");
        let keys = LatentKeys { latents: &latents, rank, key_scale: key_scale.as_ref(), length: length.as_ref() };
        Ok(vec![("o", mla_decode(&q, keys, scale)?)])
    }
}

impl Inputs {
    fn cache(&self) -> Result<KvCache, PlanError> {
        let (k, v) = (self.get("k_cache")?, self.get("v_cache")?);
        Ok(KvCache { k, v })
    }
}
