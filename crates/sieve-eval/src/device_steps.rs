//! Decode methods on the device: the KV cache stays there, and each new token attends to some of its keys.
use crate::EvalError;
use burn::tensor::{DType, Tensor};
use sieve_nn::{LayerCache, LayerOperands, PackedCache};
use sieve_ops::{
    DeviceBackend, Documents, SparseOutput, TokenBuffer, attention_with_lse, cached_attention, heavy_decode,
    keep_heavy_keys, select_blocks, sparse_attention, upload_mask,
};
use sieve_select::{CallShape, SelectError, Selected, Selector, Step};

/// Dense attention by the model's usual op.
pub(crate) fn dense<B: DeviceBackend>(operands: &LayerOperands<B>) -> SparseOutput<B> {
    let documents = Documents::whole_rows([1, operands.num_tokens()], &operands.qkv.device());
    attention_with_lse(operands.qkv.clone(), &documents, operands.spec())
}

/// Fills a layer's cache from its prompt. There are four forms: all keys, if the layer is dense; all keys, packed, if
/// each token will choose its own; the keys chosen at the prompt's end, to which later keys are added (SnapKV); or a
/// fixed-size cache, where a new key evicts the one with the least accumulated attention (H2O). Returns the prompt's
/// dense output if the choice of keys read its log-sum-exp.
///
/// # Errors
/// Operands that a kernel refuses.
pub(crate) fn keep_prompt<B: DeviceBackend>(
    selector: &Selector,
    operands: &LayerOperands<B>,
    cache: &mut LayerCache<B>,
) -> Result<Option<Tensor<B, 4>>, EvalError> {
    let num_tokens = operands.num_tokens();
    match selector.heavy_keys(shape_of(operands, num_tokens), operands.layer) {
        None if selector.reads_all(operands.layer) => cache.keep_recent(&operands.qkv, operands.spec()),
        None => {
            let (token_axis, room) = (1, None);
            *cache = LayerCache::Packed(PackedCache {
                qkv: TokenBuffer::new(operands.qkv.clone(), token_axis, room),
                bounds: None,
            })
        }
        Some(heavy) => {
            let SparseOutput { o, lse } = dense(operands);
            let kept = keep_heavy_keys(&operands.qkv, lse, &heavy);
            let kept = kept.map_err(|reason| refused(selector, reason))?;
            *cache = match heavy.slots {
                Some(_) => LayerCache::Selected {
                    cache: kept,
                    next_position: num_tokens,
                },
                None => LayerCache::Recent {
                    cache: kept.keys,
                    window_size: None,
                },
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
) -> Result<(Tensor<B, 4>, f64, bool), EvalError> {
    let spec = operands.spec();
    let (o, read, is_chosen) = match cache {
        LayerCache::Packed(cache) => choose_and_attend(selector, operands, cache)?,
        LayerCache::Recent { cache, .. } => {
            let o = cached_attention(cache, operands.qkv.clone(), spec, scratch);
            (o, cache.len() as f64, !selector.reads_all(operands.layer))
        }
        LayerCache::Selected { cache, next_position } => {
            *next_position = num_tokens;
            let o = heavy_decode(cache, operands.qkv.clone(), num_tokens - 1, spec.softmax_scale, scratch);
            (o.map_err(|reason| refused(selector, reason))?, cache.len() as f64, true)
        }
        _ => return Err(refused(selector, "a prompt comes first".to_owned())),
    };
    Ok((o, read * operands.num_heads as f64, is_chosen))
}

fn refused(selector: &Selector, reason: String) -> EvalError {
    EvalError::kernel(selector.name(), reason)
}

/// Shape of the call of `operands`' queries on the first `num_keys` keys.
fn shape_of<B: DeviceBackend>(operands: &LayerOperands<B>, num_keys: usize) -> CallShape {
    CallShape::new(
        [operands.num_tokens(), num_keys],
        [operands.num_heads, operands.num_kv_heads],
        operands.qkv.dims()[3],
    )
}

/// Appends the token's key and value, chooses keys and attends. Returns o, the number of keys that a head reads, and
/// whether the device chose them.
fn choose_and_attend<B: DeviceBackend>(
    selector: &Selector,
    operands: &LayerOperands<B>,
    cache: &mut PackedCache<B>,
) -> Result<(Tensor<B, 4>, f64, bool), EvalError> {
    cache.qkv.append(operands.qkv.clone());
    let num_tokens = cache.qkv.len();
    let shape = shape_of(operands, num_tokens);
    let refused = |reason| refused(selector, reason);
    let device = operands.qkv.device();
    if let Some(page) = selector.page() {
        let pages = cache.qkv.room().div_ceil(page);
        // The keys' buffer grows with the text; the bounds of its pages must grow with it.
        if cache.bounds.as_ref().is_none_or(|bounds| bounds.room() < pages) {
            // A page has a smallest and a largest value in each channel.
            let (size, page_axis) = ([shape.num_kv_heads, pages, 2, shape.head_dim], 1);
            cache.bounds = Some(TokenBuffer::empty(size, page_axis, (&device, DType::F32)));
        }
    }
    let known = cache.bounds.as_ref().map_or(0, TokenBuffer::len);
    let step = selector.step(shape, operands.layer, known);
    let step = step.ok_or_else(|| refused("it decodes on the host".to_owned()))?;
    let keys = cache.qkv.tokens();
    let (mask, read, is_chosen) = match step {
        Step::Mask(mask) => {
            let on_device = upload_mask::<B>(&mask, &device).map_err(SelectError::from)?;
            let read = sieve_select::density(&Selected::from(*mask)).token * shape.num_keys as f64;
            (on_device, read, false)
        }
        Step::Blocks(selection, read) => {
            let bounds = cache.bounds.as_ref().map(TokenBuffer::buffer);
            let made = select_blocks(&keys, &selection, bounds);
            if let (Some(bounds), Some(page)) = (&mut cache.bounds, selector.page()) {
                // The selection wrote the bounds of the pages that are complete now.
                bounds.count(num_tokens / page - known);
            }
            (made.map_err(refused)?, read as f64, true)
        }
    };
    let SparseOutput { o, .. } = sparse_attention(keys, &mask, operands.spec().softmax_scale).map_err(refused)?;
    Ok((o, read, is_chosen))
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
