//! Decoding under a decode method on the device: keys and values of a text stay there, and each query reads some.
use crate::EvalError;
use burn::tensor::ops::FloatTensor;
use burn::tensor::{DType, Tensor, TensorMetadata};
use sieve_nn::LayerOperands;
use sieve_ops::{
    AttentionSpec, DeviceMask, DmaCache, KernelPolicy, KeyCache, SieveBackend, SparseOutput, cached_attention,
    heavy_decode, keep_heavy_keys, select_blocks_by_bounds, sparse_attention,
};
use sieve_select::{CallShape, Selector, Step};

/// Tokens of a new cache, at least.
const FEWEST_TOKENS: usize = 256;

/// The keys and values that one layer keeps of one text, on the device.
#[derive(Clone, Debug)]
pub(crate) struct DeviceCache<B: SieveBackend> {
    keys: Keys<B>,
    num_tokens: usize,
}

/// What a layer holds of a text.
#[derive(Clone, Debug)]
enum Keys<B: SieveBackend> {
    /// All keys; each token finds those that it reads.
    All(AllKeys<B>),
    /// Those of the prompt that were chosen, or all where a layer reads everything; and all later ones.
    Chosen(KeyCache<B>),
    /// Slots: a later key takes that of the lightest.
    Heavy(DmaCache<B>),
    /// Stands here while a step works on the keys that it took out.
    Taken,
}

#[derive(Clone, Debug)]
struct AllKeys<B: SieveBackend> {
    /// `[1, room, packed heads, head_dim]`.
    qkv: Tensor<B, 4>,
    num_tokens: usize,
    /// `[num_kv_heads, pages, 2, head_dim]`, and how many pages are whole and have theirs.
    bounds: Option<(Tensor<B, 4>, usize)>,
}

impl<B: SieveBackend> DeviceCache<B> {
    /// A prompt.
    ///
    /// # Errors
    /// Operands that a kernel refuses.
    pub(crate) fn of(selector: &Selector, operands: &LayerOperands<B>) -> Result<Self, EvalError> {
        let num_tokens = operands.num_tokens();
        let shape = shape_of(operands, num_tokens);
        let keys = match selector.heavy_keys(shape, operands.layer) {
            None if selector.reads_all(operands.layer) => {
                let heads = |first| operands.qkv.clone().narrow(2, first, shape.num_kv_heads);
                let [k, v] = [0, shape.num_kv_heads].map(|at| heads(shape.num_heads + at));
                Keys::Chosen(KeyCache {
                    k: k.into_primitive().tensor(),
                    v: v.into_primitive().tensor(),
                })
            }
            None => Keys::All(AllKeys::of(&operands.qkv)),
            Some(heavy) => {
                let kept = keep_heavy_keys(&operands.qkv, &heavy);
                let kept = kept.map_err(|reason| refused(selector, reason))?;
                match heavy.slots {
                    Some(_) => Keys::Heavy(kept),
                    None => Keys::Chosen(KeyCache { k: kept.k, v: kept.v }),
                }
            }
        };
        Ok(Self { keys, num_tokens })
    }

    /// Tokens so far.
    pub(crate) fn num_tokens(&self) -> usize {
        self.num_tokens
    }

    /// One token: stores it, finds what its query reads, attends. Returns o, the pairs that it took, and whether its
    /// keys were chosen on the device.
    pub(crate) fn step(
        &mut self,
        selector: &Selector,
        operands: &LayerOperands<B>,
    ) -> Result<(Tensor<B, 4>, f64, bool), EvalError> {
        let position = self.num_tokens;
        self.num_tokens += 1;
        let shape = shape_of(operands, self.num_tokens);
        let scale = f64::from(shape.softmax_scale());
        // Taken out, so that buffers have one owner and are written in place.
        let (keys, o, read, is_chosen) = match std::mem::replace(&mut self.keys, Keys::Taken) {
            Keys::All(mut keys) => {
                let (o, read, is_chosen) = keys.step(selector, operands)?;
                (Keys::All(keys), o, read, is_chosen)
            }
            Keys::Chosen(keys) => {
                let spec = AttentionSpec {
                    num_heads: shape.num_heads,
                    num_kv_heads: shape.num_kv_heads,
                    softmax_scale: scale,
                    window_size: None,
                    policy: KernelPolicy::default(),
                };
                let (keys, o) = cached_attention(keys, operands.qkv.clone(), spec);
                let read = length_of::<B>(&keys.k);
                let is_chosen = !selector.reads_all(operands.layer);
                (Keys::Chosen(keys), o, read, is_chosen)
            }
            Keys::Heavy(keys) => {
                let done = heavy_decode(keys, operands.qkv.clone(), position, scale);
                let (keys, o) = done.map_err(|reason| refused(selector, reason))?;
                let read = length_of::<B>(&keys.k);
                (Keys::Heavy(keys), o, read, true)
            }
            Keys::Taken => return Err(refused(selector, "an earlier token failed".to_owned())),
        };
        self.keys = keys;
        Ok((o, read * shape.num_heads as f64, is_chosen))
    }
}

/// Keys of `[1, keys, num_kv_heads, head_dim]`.
fn length_of<B: SieveBackend>(keys: &FloatTensor<B>) -> f64 {
    keys.shape()[1] as f64
}

fn refused(selector: &Selector, reason: String) -> EvalError {
    EvalError::Kernel {
        selector: selector.name(),
        reason,
    }
}

/// The call of a text's tokens so far.
fn shape_of<B: SieveBackend>(operands: &LayerOperands<B>, num_keys: usize) -> CallShape {
    CallShape {
        num_queries: operands.num_tokens(),
        num_keys,
        num_heads: operands.num_heads,
        num_kv_heads: operands.num_kv_heads,
        head_dim: operands.qkv.dims()[3],
    }
}

impl<B: SieveBackend> AllKeys<B> {
    fn of(qkv: &Tensor<B, 4>) -> Self {
        let mut keys = Self {
            qkv: qkv.clone(),
            num_tokens: 0,
            bounds: None,
        };
        keys.append(qkv);
        keys
    }

    fn append(&mut self, rows: &Tensor<B, 4>) {
        let [_, new, heads, width] = rows.dims();
        let all = self.num_tokens + new;
        let room = self.qkv.dims()[1];
        if self.num_tokens == 0 || all > room {
            let room = (2 * all).max(FEWEST_TOKENS);
            let (device, dtype) = (rows.device(), rows.dtype());
            let empty = Tensor::zeros([1, room, heads, width], (&device, dtype));
            let old = std::mem::replace(&mut self.qkv, empty);
            if self.num_tokens > 0 {
                let kept = old.narrow(1, 0, self.num_tokens);
                self.write(0, kept);
            }
            self.bounds = None;
        }
        self.write(self.num_tokens, rows.clone());
        self.num_tokens = all;
    }

    fn write(&mut self, first: usize, rows: Tensor<B, 4>) {
        let [_, new, heads, width] = rows.dims();
        let at = [0..1, first..first + new, 0..heads, 0..width];
        // Taken out, so that the buffer has one owner and is written in place.
        let room = std::mem::replace(&mut self.qkv, rows.clone());
        self.qkv = room.slice_assign(at, rows);
    }

    /// Returns o, the keys that a head reads, and whether they were chosen on the device.
    fn step(
        &mut self,
        selector: &Selector,
        operands: &LayerOperands<B>,
    ) -> Result<(Tensor<B, 4>, f64, bool), EvalError> {
        self.append(&operands.qkv);
        let [_, room, _, head_dim] = self.qkv.dims();
        let shape = shape_of(operands, self.num_tokens);
        let refused = |reason| refused(selector, reason);
        let device = self.qkv.device();
        let page = selector.page();
        if let (None, Some(page)) = (&self.bounds, page) {
            let pages = room.div_ceil(page);
            let size = [shape.num_kv_heads, pages, 2, head_dim];
            self.bounds = Some((Tensor::zeros(size, (&device, DType::F32)), 0));
        }
        let known = self.bounds.as_ref().map_or(0, |(_, known)| *known);
        let step = selector.step(shape, operands.layer, known);
        let step = step.ok_or_else(|| refused("it decodes on the host".to_owned()))?;
        let keys = self.qkv.clone().narrow(1, 0, self.num_tokens);
        let (mask, read, is_chosen) = match step {
            Step::Mask(mask) => {
                let read = sieve_select::density(&mask).token * shape.num_keys as f64;
                (DeviceMask::upload(&mask.packed()?, &device), read, false)
            }
            Step::Blocks(selection, read) => {
                let bounds = self.bounds.as_ref().map(|(bounds, _)| bounds);
                let made = select_blocks_by_bounds(&keys, &selection, bounds);
                if let (Some((_, known)), Some(page)) = (&mut self.bounds, page) {
                    *known = self.num_tokens / page;
                }
                (made.map_err(refused)?.mask, read as f64, true)
            }
        };
        let scale = f64::from(shape.softmax_scale());
        let SparseOutput { o, .. } = sparse_attention(keys, &mask, scale).map_err(refused)?;
        Ok((o, read, is_chosen))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::Distribution;
    use burn_flex::{Flex, FlexDevice};
    use sieve_ops::{Documents, attention};

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
        let mut cache = DeviceCache::of(&selector, &operands(0, TOKENS - 2)).expect("a prompt");
        for position in [TOKENS - 2, TOKENS - 1] {
            let step = cache.step(&selector, &operands(position, 1));
            let (o, pairs, is_chosen) = step.expect("the CPU has dense attention");
            assert_eq!((pairs, is_chosen), (4.0 * (position + 1) as f64, false));
            let spec = AttentionSpec::dense([4, 2], 32);
            let documents = Documents::whole_rows([1, position + 1], &FlexDevice);
            let dense = attention(operands(0, position + 1).qkv, &documents, spec);
            let far = (dense.narrow(1, position, 1) - o).abs().max().into_scalar();
            assert!(far < 1e-5, "{position}: {far}");
        }
    }
}
