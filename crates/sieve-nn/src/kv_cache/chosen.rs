//! The cache of layers whose queries choose blocks by pooled keys: keys and values of every token, and the pooled keys.
use super::split;
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Int, Tensor, TensorData, activation::softmax};
use sieve_core::{BlockChoice, ChoiceRule};
use sieve_ops::{
    AttentionSpec, DeviceBackend, KeyCache, TokenBuffer, TokenCache, attention_decode, choose_blocks, overlap_weight,
};

/// What such a layer keeps of earlier tokens.
#[derive(Clone, Debug)]
pub struct ChosenCache<B: Backend> {
    /// Of all tokens.
    keys: KeyCache<B>,
    /// Means of keys, `[batch, num_kv_heads, room, head_dim]`.
    pooled: TokenBuffer<B, 4>,
    choice: BlockChoice,
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

    /// Makes each row several equal ones.
    pub(super) fn repeat(&mut self, rows: usize) {
        self.keys.repeat(rows);
        self.pooled.repeat(rows);
    }

    /// The cache as a step of one token takes it.
    pub(super) fn for_token_step(&mut self) -> TokenCache<'_, B> {
        TokenCache::Chosen {
            keys: &mut self.keys,
            pooled: &mut self.pooled,
            choice: self.choice,
        }
    }

    /// Counts the token that such a step has written, and the pooled key that ends at it.
    pub(super) fn count_token(&mut self) {
        self.keys.count_token();
        let ended = self.choice.blocks.num_compressed_blocks(self.num_tokens());
        self.pooled.count(ended - self.pooled.len());
    }

    /// After a prompt.
    pub(crate) fn of_prompt(qkv: &Tensor<B, 4>, spec: AttentionSpec, choice: BlockChoice) -> Self {
        let [batch, seq_len, _, d] = qkv.dims();
        let [_, k, v] = split(qkv.clone(), spec);
        let room = choice.blocks.num_compressed_blocks(seq_len) + 1;
        let room = [batch, spec.num_kv_heads, room, d];
        let mut cache = Self {
            keys: KeyCache::new(k, v),
            pooled: TokenBuffer::empty(room, TOKENS, (&qkv.device(), qkv.dtype())),
            choice,
        };
        cache.pool();
        cache
    }

    /// A packed row of all keys, with queries of zero, and then new tokens.
    pub(crate) fn row(&self, qkv: &Tensor<B, 4>) -> Tensor<B, 4> {
        self.keys.before(qkv, self.keys.len())
    }

    /// Takes tokens in.
    pub(crate) fn append(&mut self, qkv: &Tensor<B, 4>, spec: AttentionSpec) {
        let [_, k, v] = split(qkv.clone(), spec);
        self.keys.append(k, v);
        self.pool();
    }

    /// Adds the pooled keys that have ended since.
    fn pool(&mut self) {
        let blocks = self.choice.blocks;
        let (size, stride) = (blocks.compress_block_size, blocks.compress_stride);
        let [first, end] = [self.pooled.len(), blocks.num_compressed_blocks(self.num_tokens())];
        if first == end {
            return;
        }
        // Means of single strides first: a pooled key is the mean of neighbouring ones.
        let (count, strides) = (end - first, size / stride);
        let num_strides = count + strides - 1;
        let keys = self
            .keys
            .k
            .tokens()
            .narrow(TOKENS, first * stride, num_strides * stride);
        let ([batch, heads, _, d], dtype) = (keys.dims(), keys.dtype());
        let keys = at_least_f32(keys).reshape([batch, heads, num_strides, stride, d]);
        let means = keys.mean_dim(3).reshape([batch, heads, num_strides, d]);
        let parts = (0..strides).map(|at| means.clone().narrow(TOKENS, at, count));
        let sum = parts.reduce(|sum, part| sum + part).expect("a pooled key has a stride");
        self.pooled.append((sum / strides as f64).cast(dtype));
    }
}

impl<B: DeviceBackend> ChosenCache<B> {
    /// Takes one token in and returns its attention, `[batch, 1, num_heads, head_dim]`.
    pub(crate) fn attend(
        &mut self,
        qkv: Tensor<B, 4>,
        spec: AttentionSpec,
        scratch: &mut B::DecodeScratch,
    ) -> Tensor<B, 4> {
        let [batch, _, _, d] = qkv.dims();
        self.append(&qkv, spec);
        let [q, _, _] = split(qkv, spec);
        let q = q.reshape([batch, spec.num_heads, d]);
        let importance = self.importance(q.clone(), spec);
        let keys = self.chosen(importance, spec);
        let o = attention_decode(q, &keys, None, spec.softmax_scale, scratch);
        o.reshape([batch, 1, spec.num_heads, d])
    }

    /// Scores of the blocks up to the last token's own, per row and chooser.
    fn importance(&self, q: Tensor<B, 3>, spec: AttentionSpec) -> Vec<Vec<f32>> {
        let choice = self.choice;
        let [batch, num_heads, d] = q.dims();
        let kv_heads = spec.num_kv_heads;
        let choosers = choice.num_choosers(num_heads, kv_heads);
        let num_blocks = (self.num_tokens() - 1) / choice.blocks.select_block_size + 1;
        if self.pooled.is_empty() {
            return vec![vec![0.0; num_blocks]; batch * choosers];
        }
        // Where blocks are nearly as important as each other, rounded scores would choose others than a whole pass.
        let (q, k) = (at_least_f32(q), at_least_f32(self.pooled.tokens()));
        let scores = q
            .reshape([batch, kv_heads, num_heads / kv_heads, d])
            .matmul(k.swap_dims(2, 3));
        let scores = match choice.rule {
            ChoiceRule::MeanKey => scores,
            _ => softmax(scores * spec.softmax_scale, 3).sum_dim(2),
        };
        let scores: Vec<f32> = scores.into_data().iter::<f32>().collect();
        let rows = scores.chunks_exact(self.pooled.len());
        rows.map(|row| of_blocks(row, choice, num_blocks)).collect()
    }

    /// Keys and values of the chosen blocks, of each chooser.
    fn chosen(&self, importance: Vec<Vec<f32>>, spec: AttentionSpec) -> KeyCache<B> {
        let choice = self.choice;
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

/// Scores of blocks from those of pooled keys, or from their probabilities over a group.
fn of_blocks(row: &[f32], choice: BlockChoice, num_blocks: usize) -> Vec<f32> {
    let blocks = choice.blocks;
    let (size, stride) = (blocks.select_block_size, blocks.compress_stride);
    let overlapping = |block: usize| {
        let first = (block * size + stride).saturating_sub(blocks.compress_block_size) / stride;
        let end = ((block + 1) * size / stride).min(row.len());
        (first..end).map(move |c| (overlap_weight(blocks, c, block), row[c]))
    };
    let of_block = |block: usize| match choice.rule {
        ChoiceRule::MeanKey => row.get(block).copied().unwrap_or(0.0),
        ChoiceRule::WeightedProbability => overlapping(block).map(|(weight, p)| weight as f32 * p).sum(),
        ChoiceRule::LargestProbability => overlapping(block).fold(0.0, |most, (_, p)| p.max(most)),
    };
    (0..num_blocks).map(of_block).collect()
}
