//! A text that goes on with its keys and values on the device, of which a decode method's queries read some.
use crate::EvalError;
use burn::tensor::{DType, Tensor};
use sieve_nn::LayerOperands;
use sieve_ops::{
    DeviceMask, SieveBackend, SparseOutput, select_blocks_by_bounds, sparse_attention,
};
use sieve_select::{CallShape, Selector, Step};

/// Tokens of a new cache, at least.
const FEWEST_TOKENS: usize = 256;

/// One layer of one text.
#[derive(Clone, Debug)]
pub(crate) struct DeviceCache<B: SieveBackend> {
    /// `[1, room, packed heads, head_dim]`.
    qkv: Tensor<B, 4>,
    num_tokens: usize,
    /// `[num_kv_heads, pages, 2, head_dim]`, and how many pages are whole and have theirs.
    bounds: Option<(Tensor<B, 4>, usize)>,
}

impl<B: SieveBackend> DeviceCache<B> {
    /// A prompt.
    pub(crate) fn of(operands: &LayerOperands<B>) -> Self {
        let mut cache = Self {
            qkv: operands.qkv.clone(),
            num_tokens: 0,
            bounds: None,
        };
        cache.append(&operands.qkv);
        cache
    }

    /// Tokens so far.
    pub(crate) fn num_tokens(&self) -> usize {
        self.num_tokens
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

    /// One token: stores it, finds what its query reads, attends. Returns o, the pairs that it took, and whether its
    /// keys were chosen on the device.
    pub(crate) fn step(
        &mut self,
        selector: &Selector,
        operands: &LayerOperands<B>,
    ) -> Result<(Tensor<B, 4>, f64, bool), EvalError> {
        self.append(&operands.qkv);
        let [_, room, _, head_dim] = self.qkv.dims();
        let shape = CallShape {
            num_queries: 1,
            num_keys: self.num_tokens,
            num_heads: operands.num_heads,
            num_kv_heads: operands.num_kv_heads,
            head_dim,
        };
        let refused = |reason: String| EvalError::Kernel {
            selector: selector.name(),
            reason,
        };
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
        Ok((o, read * shape.num_heads as f64, is_chosen))
    }
}
