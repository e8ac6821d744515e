//! The cache of layers whose queries choose blocks by pooled keys: keys and values of every token, and the pooled keys.
use super::split;
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Int, Tensor, TensorData, activation::softmax};
use sieve_core::{BlockChoice, ChoiceRule};
use sieve_ops::{AttentionSpec, DeviceBackend, KeyCache, TokenBuffer, attention_decode, choose_blocks, overlap_weight};

/// What such a layer keeps of earlier tokens.
#[derive(Clone, Debug)]
pub struct ChosenCache<B: Backend> {
    /// Of all tokens.
    keys: KeyCache<B>,
    /// Means of keys, `[batch, num_kv_heads, room, head_dim]`; absent before the first is whole.
    pooled: Option<TokenBuffer<B, 4>>,
}

/// Axis of tokens in the buffers.
const TOKENS: usize = 2;

/// The tensor in f32 where it has a 16-bit type.
pub(super) fn at_least_f32<B: Backend, const D: usize>(x: Tensor<B, D>) -> Tensor<B, D> {
    match x.dtype() {
        DType::BF16 | DType::F16 => x.cast(DType::F32),
        _ => x,
    }
}

impl<B: Backend> ChosenCache<B> {
    /// Tokens that went through.
    pub fn num_tokens(&self) -> usize {
        self.keys.len()
    }

    /// Pooled keys a head.
    pub fn num_pooled(&self) -> usize {
        self.pooled.as_ref().map_or(0, TokenBuffer::len)
    }

    /// Makes each row several equal ones.
    pub(super) fn repeat(&mut self, rows: usize) {
        self.keys.repeat(rows);
        self.pooled.iter_mut().for_each(|pooled| pooled.repeat(rows));
    }

    /// After a prompt.
    pub(crate) fn of_prompt(qkv: &Tensor<B, 4>, spec: AttentionSpec, choice: BlockChoice) -> Self {
        let [_, k, v] = split(qkv.clone(), spec);
        let mut cache = Self {
            keys: KeyCache::new(k, v),
            pooled: None,
        };
        cache.pool(choice);
        cache
    }

    /// A packed row of all keys, with queries of zero, and then new tokens.
    pub(crate) fn row(&self, qkv: &Tensor<B, 4>) -> Tensor<B, 4> {
        self.keys.before(qkv, self.keys.len())
    }

    /// Takes tokens in.
    pub(crate) fn append(&mut self, qkv: &Tensor<B, 4>, spec: AttentionSpec, choice: BlockChoice) {
        let [_, k, v] = split(qkv.clone(), spec);
        self.keys.append(k, v);
        self.pool(choice);
    }

    /// Adds the pooled keys that have ended since.
    fn pool(&mut self, choice: BlockChoice) {
        let blocks = choice.blocks;
        let (size, stride) = (blocks.compress_block_size, blocks.compress_stride);
        let [first, end] = [self.num_pooled(), blocks.num_compressed_blocks(self.num_tokens())];
        if first == end {
            return;
        }
        let keys = self.keys.k.tokens();
        let dtype = keys.dtype();
        let mean = |c: usize| {
            at_least_f32(keys.clone().narrow(TOKENS, c * stride, size))
                .mean_dim(TOKENS)
                .cast(dtype)
        };
        let new = Tensor::cat((first..end).map(mean).collect(), TOKENS);
        match &mut self.pooled {
            Some(pooled) => pooled.append(new),
            none => *none = Some(TokenBuffer::new(new, TOKENS, None)),
        }
    }
}

impl<B: DeviceBackend> ChosenCache<B> {
    /// Takes one token in and returns its attention, `[batch, 1, num_heads, head_dim]`.
    pub(crate) fn attend(
        &mut self,
        qkv: Tensor<B, 4>,
        spec: AttentionSpec,
        choice: BlockChoice,
        scratch: &mut B::DecodeScratch,
    ) -> Tensor<B, 4> {
        let [batch, _, _, d] = qkv.dims();
        self.append(&qkv, spec, choice);
        let [q, _, _] = split(qkv, spec);
        let q = q.reshape([batch, spec.num_heads, d]);
        let importance = self.importance(q.clone(), spec, choice);
        let keys = self.chosen(importance, spec, choice);
        let o = attention_decode(q, &keys, None, spec.softmax_scale, scratch);
        o.reshape([batch, 1, spec.num_heads, d])
    }

    /// Scores of the blocks up to the last token's own, per row and chooser.
    fn importance(&self, q: Tensor<B, 3>, spec: AttentionSpec, choice: BlockChoice) -> Vec<Vec<f32>> {
        let [batch, num_heads, d] = q.dims();
        let kv_heads = spec.num_kv_heads;
        let choosers = choice.num_choosers(num_heads, kv_heads);
        let num_blocks = (self.num_tokens() - 1) / choice.blocks.select_block_size + 1;
        let Some(pooled) = &self.pooled else {
            return vec![vec![0.0; num_blocks]; batch * choosers];
        };
        // Where blocks are nearly as important as each other, rounded scores would choose others than a whole pass.
        let (q, k) = (at_least_f32(q), at_least_f32(pooled.tokens()));
        let scores = q
            .reshape([batch, kv_heads, num_heads / kv_heads, d])
            .matmul(k.swap_dims(2, 3));
        let host = |x: Tensor<B, 4>| x.into_data().iter::<f32>().collect::<Vec<f32>>();
        let blocks = choice.blocks;
        let of_blocks = |p: &[f32], of_block: &dyn Fn(&[f32], usize) -> f32| -> Vec<f32> {
            (0..num_blocks).map(|block| of_block(p, block)).collect()
        };
        let (scores, of_block): (_, Box<dyn Fn(&[f32], usize) -> f32>) = match choice.rule {
            ChoiceRule::MeanKey => (scores, Box::new(|p, block| p.get(block).copied().unwrap_or(0.0))),
            rule => {
                let p = softmax(scores * spec.softmax_scale, 3).sum_dim(2);
                let of_block = move |p: &[f32], block: usize| {
                    let weighted = p
                        .iter()
                        .enumerate()
                        .map(|(c, p)| (overlap_weight(blocks, c, block), *p));
                    match rule {
                        ChoiceRule::WeightedProbability => weighted.map(|(weight, p)| weight as f32 * p).sum(),
                        _ => weighted
                            .filter(|(weight, _)| *weight > 0)
                            .fold(0.0, |most, (_, p)| p.max(most)),
                    }
                };
                (p, Box::new(of_block))
            }
        };
        host(scores)
            .chunks_exact(pooled.len())
            .map(|p| of_blocks(p, &of_block))
            .collect()
    }

    /// Keys and values of the chosen blocks, of each chooser.
    fn chosen(&self, importance: Vec<Vec<f32>>, spec: AttentionSpec, choice: BlockChoice) -> KeyCache<B> {
        let (len, k) = (self.num_tokens(), self.keys.k.buffer());
        let [batch, kv_heads, _, d] = k.dims();
        let size = choice.blocks.select_block_size;
        let own = (len - 1) / size;
        let mut tokens = Vec::new();
        for importance in importance {
            let mut chosen = vec![-1; choice.blocks.num_selected_blocks];
            choose_blocks(&importance, own, choice.forced, &mut chosen);
            for block in chosen.into_iter().filter(|&block| block >= 0) {
                let first = block as usize * size;
                tokens.extend((first..(first + size).min(len)).map(|token| token as i32));
            }
        }
        // Every chooser has its own block and as many others, so all have equally many tokens.
        let choosers = choice.num_choosers(spec.num_heads, kv_heads);
        let count = tokens.len() / (batch * choosers);
        let rows = TensorData::new(tokens, [batch, kv_heads, choosers / kv_heads * count, 1]);
        let rows = Tensor::<B, 4, Int>::from_data(rows, &k.device());
        let rows = rows.expand([batch, kv_heads, choosers / kv_heads * count, d]);
        let [k, v] = [k, self.keys.v.buffer()].map(|x| {
            x.clone()
                .gather(TOKENS, rows.clone())
                .reshape([batch, choosers, count, d])
        });
        KeyCache::with_room(k, v, Some(count))
    }
}
