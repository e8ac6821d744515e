//! Decode methods on the device: the KV cache stays there, and each new token attends to some of its keys.
use crate::InferError;
use crate::selection::dense_pairs;
use burn::tensor::Tensor;
use sieve_core::TokenKeys;
use sieve_nn::{LayerCache, LayerOperands, RecentCache, SlotCache};
use sieve_ops::{
    DeviceBackend, Documents, SelectorCache, SparseOutput, attention_with_lse, cached_attention, has_sparse_attention,
    heavy_decode, keep_heavy_keys, selector_decode, split_heads,
};
use sieve_select::Selector;

/// Dense attention by the model's usual op.
pub(crate) fn dense<B: DeviceBackend>(operands: &LayerOperands<B>) -> SparseOutput<B> {
    let documents = Documents::whole_rows([1, operands.num_tokens()], &operands.qkv.device());
    attention_with_lse(operands.qkv.clone(), &documents, operands.spec())
}

/// Fills a layer's cache from its prompt. There are four forms: all keys, if the layer is dense; all keys, if each
/// token will choose which it reads; the keys chosen at the prompt's end, to which later keys are added (SnapKV); or a
/// fixed-size cache, where a new key evicts the one with the least accumulated attention (H2O). Returns the prompt's
/// dense output if the choice of keys read its log-sum-exp.
///
/// # Errors
/// Operands that a kernel refuses.
pub(crate) fn keep_prompt<B: DeviceBackend>(
    selector: &Selector,
    operands: &LayerOperands<B>,
    cache: &mut LayerCache<B>,
) -> Result<Option<Tensor<B, 4>>, InferError> {
    let num_tokens = operands.num_tokens();
    match selector.heavy_keys(operands.shape(num_tokens), operands.layer) {
        None if selector.reads_all(operands.layer) => cache.keep_recent(&operands.qkv, operands.spec()),
        None => {
            let reads = selector.token_keys(num_tokens, operands.layer);
            let reads = reads.ok_or_else(|| on_the_host(selector))?;
            let [_, k, v] = split_heads(operands.qkv.clone(), operands.num_kv_heads);
            let is_fixed = !selector.reads_a_share();
            *cache = LayerCache::Selector(SelectorCache::new([k, v], reads, is_fixed));
        }
        Some(heavy) => {
            let SparseOutput { o, lse } = dense(operands);
            let kept = keep_heavy_keys(&operands.qkv, lse, &heavy);
            let kept = kept.map_err(|reason| refused(selector, reason))?;
            *cache = match heavy.slots {
                Some(_) => LayerCache::Selected(SlotCache { slots: kept, next_position: num_tokens }),
                None => LayerCache::Recent(RecentCache { keys: kept.keys, kept: None }),
            };
            return Ok(Some(o));
        }
    }
    Ok(None)
}

/// One decoding step, for token number `num_tokens` of a text: stores its key and value, chooses the keys for its
/// query, and attends. Returns o, the number of computed pairs of all heads, and whether the device chose the keys.
///
/// # Errors
/// Operands that a kernel refuses.
pub(crate) fn step<B: DeviceBackend>(
    selector: &Selector,
    operands: &LayerOperands<B>,
    num_tokens: usize,
    cache: &mut LayerCache<B>,
    scratch: &mut B::DecodeScratch,
) -> Result<(Tensor<B, 4>, f64, bool), InferError> {
    let spec = operands.spec();
    let (o, read, is_chosen) = match cache {
        LayerCache::Selector(cache) => {
            let (o, pairs) = decode_tokens(selector, operands, cache, scratch)?;
            (o, pairs, is_chosen(selector, operands.layer))
        }
        LayerCache::Recent(RecentCache { keys, .. }) => {
            let o = cached_attention(keys, operands.qkv.clone(), None, spec, scratch);
            (o, keys.len() as f64, is_chosen(selector, operands.layer))
        }
        LayerCache::Selected(SlotCache { slots, next_position }) => {
            *next_position = num_tokens;
            let o = heavy_decode(slots, operands.qkv.clone(), num_tokens - 1, spec.softmax_scale, scratch);
            (o.map_err(|reason| refused(selector, reason))?, slots.len() as f64, true)
        }
        _ => return Err(refused(selector, "a prompt comes first".to_owned())),
    };
    Ok((o, read * operands.num_heads as f64, is_chosen))
}

fn refused(selector: &Selector, reason: String) -> InferError {
    InferError::kernel(selector.name(), reason)
}

/// The refusal of a selector that chooses a token's keys on the host.
fn on_the_host(selector: &Selector) -> InferError {
    let what = format!("{} cannot run on this device: it chooses keys on the host when decoding", selector.name());
    InferError::refused(what, "use --device cpu")
}

/// Whether the tokens of a layer read keys that the device chooses, not all keys or the same positions for all heads.
pub(crate) fn is_chosen(selector: &Selector, layer: usize) -> bool {
    let num_tokens = 1;
    let by_position = matches!(selector.token_keys(num_tokens, layer), Some(TokenKeys::Ends { .. }));
    !by_position && !selector.reads_all(layer)
}

/// Reads the tokens of `operands`, which follow those in the cache, one by one. Returns o and the number of computed
/// pairs of a head.
fn decode_tokens<B: DeviceBackend>(
    selector: &Selector,
    operands: &LayerOperands<B>,
    cache: &mut SelectorCache<B>,
    scratch: &mut B::DecodeScratch,
) -> Result<(Tensor<B, 4>, f64), InferError> {
    let first = cache.keys.len() + 1;
    let seen = first..first + operands.num_tokens();
    let keys_of = |num_keys: usize| selector.token_keys(num_keys, operands.layer);
    let reads: Option<Vec<TokenKeys>> = seen.clone().map(keys_of).collect();
    let reads = reads.ok_or_else(|| on_the_host(selector))?;
    let pairs = seen.zip(&reads).map(|(num_keys, keys)| keys.num_read(num_keys) as f64).sum();
    let scale = operands.spec().softmax_scale;
    let o = selector_decode(cache, operands.qkv.clone(), &reads, scale, scratch);
    Ok((o.map_err(|reason| refused(selector, reason))?, pairs))
}

/// Whether the device reads a layer's whole text token by token, from its first token on: where each token reads all
/// keys, or chooses some of them.
pub fn streams<B: DeviceBackend>(selector: &Selector, operands: &LayerOperands<B>) -> bool {
    let (num_tokens, layer) = (operands.num_tokens(), operands.layer);
    let has_keys = selector.reads_all(layer) || selector.token_keys(num_tokens, layer).is_some();
    has_keys && selector.steps_on_device(operands.qkv.dims()[3]) && has_sparse_attention(&operands.qkv)
}

/// Reads a layer's text token by token, if [`streams`] says that the device does, and leaves its keys in `cache`.
/// Returns o and the number of computed pairs of all heads.
///
/// # Errors
/// Operands that a kernel refuses.
pub fn stream<B: DeviceBackend>(
    selector: &Selector,
    operands: &LayerOperands<B>,
    cache: &mut LayerCache<B>,
    scratch: &mut B::DecodeScratch,
) -> Result<(Tensor<B, 4>, f64), InferError> {
    let part = |first: usize, count: usize| LayerOperands {
        qkv: operands.qkv.clone().narrow(1, first, count),
        ..operands.clone()
    };
    let num_tokens = operands.num_tokens();
    if selector.reads_all(operands.layer) {
        keep_prompt(selector, operands, cache)?;
        return Ok((dense(operands).o, dense_pairs(num_tokens, operands.num_heads)));
    }
    let start = part(0, 1);
    keep_prompt(selector, &start, cache)?;
    // The first token reads itself alone.
    let o = dense(&start).o;
    let (o, pairs) = match cache {
        LayerCache::Selector(cache) if num_tokens > 1 => {
            let (rest, pairs) = decode_tokens(selector, &part(1, num_tokens - 1), cache, scratch)?;
            (Tensor::cat(vec![o, rest], 1), 1.0 + pairs)
        }
        _ => (o, 1.0),
    };
    Ok((o, pairs * operands.num_heads as f64))
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::Distribution;
    use burn_flex::{Flex, FlexDevice};
    use sieve_ops::attention;

    #[test]
    fn a_layer_that_reads_everything_decodes_as_dense_attention_does() {
        const TOKENS: usize = 37;
        let shape = [1, TOKENS, 8, 32];
        let all = Tensor::<Flex, 4>::random(shape, Distribution::Default, &FlexDevice);
        let operands = |first, count| LayerOperands {
            layer: 1,
            num_layers: 4,
            num_heads: 4,
            num_kv_heads: 2,
            qkv: all.clone().narrow(1, first, count),
        };
        let selector = Selector::parse("quest").expect("valid");
        let mut cache = LayerCache::Empty;
        keep_prompt(&selector, &operands(0, TOKENS - 2), &mut cache).expect("a prompt");
        for position in [TOKENS - 2, TOKENS - 1] {
            let step = step(&selector, &operands(position, 1), position + 1, &mut cache, &mut ());
            let (o, pairs, is_chosen) = step.expect("the CPU has dense attention");
            assert_eq!((pairs, is_chosen), (4.0 * (position + 1) as f64, false));
            let documents = Documents::whole_rows([1, position + 1], &FlexDevice);
            let whole = operands(0, position + 1);
            let dense = attention(whole.qkv.clone(), &documents, whole.spec());
            let far = (dense.narrow(1, position, 1) - o).abs().max().into_scalar();
            assert!(far < 1e-5, "{position}: {far}");
        }
    }
}
