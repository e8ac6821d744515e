//! The cache of layers whose queries choose blocks: keys and values of every token, and the keys that choose blocks,
//! pooled ones or an indexer's.
use super::split;
use crate::attention::chosen_blocks::Packed;
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Int, Tensor, TensorData, activation::softmax};
use sieve_core::{BlockChoice, ChoiceRule};
use sieve_ops::{
    AttentionSpec, DeviceBackend, KeyCache, TokenBuffer, TokenCache, attention_decode, choose_blocks, indexer_spec,
    overlap_weight,
};

/// What such a layer keeps of earlier tokens.
#[derive(Clone, Debug)]
pub struct ChosenCache<B: Backend> {
    /// Of all tokens.
    keys: KeyCache<B>,
    /// Means of keys, `[batch, num_kv_heads, room, head_dim]`, or an indexer's keys, `[batch, 1, room, head_dim]`:
    /// QSA's before their norm.
    pooled: TokenBuffer<B, 4>,
    choice: BlockChoice,
    /// Whether blocks are chosen here; else another layer's are read, and `pooled` stays empty.
    pools: bool,
}

/// Axis of tokens in the buffers.
const TOKENS: usize = 2;

/// The tensor in f32 where it has a 16-bit type.
fn at_least_f32<B: Backend, const D: usize>(x: Tensor<B, D>) -> Tensor<B, D> {
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

    /// After a prompt; without `pools` the layer reads blocks that another one chose.
    pub(crate) fn of_prompt(packed: &Packed<B>, spec: AttentionSpec, choice: BlockChoice, pools: bool) -> Self {
        let [batch, seq_len, _, d] = packed.qkv.dims();
        let [_, k, v] = split(packed.qkv.clone(), spec);
        let room = match packed.index {
            _ if !pools => [batch, 1, 1, d],
            Some(_) => [batch, 1, seq_len, d],
            None => {
                let means = choice.blocks.num_compressed_blocks(seq_len) + 1;
                [batch, spec.num_kv_heads, means, d]
            }
        };
        let mut cache = Self {
            keys: KeyCache::new(k, v),
            pooled: TokenBuffer::empty(room, TOKENS, (&packed.qkv.device(), packed.qkv.dtype())),
            choice,
            pools,
        };
        cache.pool(packed, spec);
        cache
    }

    /// Packed rows of all keys, with queries of zero, and then new tokens.
    pub(crate) fn row(&self, packed: &Packed<B>) -> Packed<B> {
        let index = packed.index.as_ref().map(|new| {
            let keys = self.pooled.tokens().swap_dims(1, 2);
            let [batch, _, heads, d] = new.dims();
            let queries = Tensor::zeros([batch, self.pooled.len(), heads - 2, d], (&new.device(), new.dtype()));
            let earlier = Tensor::cat(vec![queries, keys.clone(), keys], 2);
            Tensor::cat(vec![earlier, new.clone()], 1)
        });
        Packed {
            qkv: self.keys.before(&packed.qkv, self.keys.len()),
            index,
        }
    }

    /// Takes tokens in.
    pub(crate) fn append(&mut self, packed: &Packed<B>, spec: AttentionSpec) {
        let [_, k, v] = split(packed.qkv.clone(), spec);
        self.keys.append(k, v);
        self.pool(packed, spec);
    }

    /// Adds the pooled keys that have ended since, or the indexer's.
    fn pool(&mut self, packed: &Packed<B>, spec: AttentionSpec) {
        let new = match &packed.index {
            _ if !self.pools => None,
            Some(index) => {
                let [_, k, before_norm] = split(index.clone(), indexer_spec(spec));
                let is_qsa = self.choice.rule == ChoiceRule::SumOfHeads;
                Some(if is_qsa { before_norm } else { k }.swap_dims(1, 2))
            }
            None => self.new_means(),
        };
        if let Some(new) = new {
            self.pooled.append(new);
        }
    }

    /// Of an indexer's keys that are kept before their norm: means of the complete blocks, `[batch, blocks, 1,
    /// head_dim]`, and the positions of their first tokens; `None` without a complete block.
    pub(crate) fn block_means(&self) -> Option<(Tensor<B, 4>, Tensor<B, 2, Int>)> {
        let size = self.choice.blocks.select_block_size;
        let blocks = self.pooled.len() / size;
        if blocks == 0 {
            return None;
        }
        let keys = self.pooled.tokens().narrow(TOKENS, 0, blocks * size);
        let ([batch, _, _, d], dtype) = (keys.dims(), keys.dtype());
        let means = at_least_f32(keys)
            .reshape([batch, blocks, size, d])
            .mean_dim(2)
            .cast(dtype);
        let first = Tensor::<B, 1, Int>::arange(0..blocks as i64, &means.device()) * size as i64;
        Some((means, first.unsqueeze_dim::<2>(0).repeat_dim(0, batch)))
    }

    /// Means of keys that have ended since the last.
    fn new_means(&self) -> Option<Tensor<B, 4>> {
        let blocks = self.choice.blocks;
        let (size, stride) = (blocks.compress_block_size, blocks.compress_stride);
        let [first, end] = [self.pooled.len(), blocks.num_compressed_blocks(self.num_tokens())];
        if first == end {
            return None;
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
        Some((sum / strides as f64).cast(dtype))
    }
}

impl<B: DeviceBackend> ChosenCache<B> {
    /// Appends one token and returns its attention over all keys, `[batch, 1, num_heads, head_dim]`.
    pub(crate) fn attend_to_all(
        &mut self,
        packed: Packed<B>,
        spec: AttentionSpec,
        scratch: &mut B::DecodeScratch,
    ) -> Tensor<B, 4> {
        let [batch, _, _, d] = packed.qkv.dims();
        self.append(&packed, spec);
        let [q, _, _] = split(packed.qkv, spec);
        let q = q.reshape([batch, spec.num_heads, d]);
        let o = attention_decode(q, &self.keys, None, spec.softmax_scale, scratch);
        o.reshape([batch, 1, spec.num_heads, d])
    }

    /// Appends one token and returns its attention, `[batch, 1, num_heads, head_dim]`, and the blocks that it read, of
    /// each row and chooser: `earlier`, where another layer chose them; else by the pooled keys, in place of which
    /// `block_keys` are QSA's of the complete blocks before the token, `[batch, 1, blocks, head_dim]`.
    pub(crate) fn attend(
        &mut self,
        packed: Packed<B>,
        spec: AttentionSpec,
        (earlier, block_keys): (Option<Vec<Vec<i32>>>, Option<Tensor<B, 4>>),
        scratch: &mut B::DecodeScratch,
    ) -> (Tensor<B, 4>, Vec<Vec<i32>>) {
        let [batch, _, _, d] = packed.qkv.dims();
        self.append(&packed, spec);
        let queries = |packed: Tensor<B, 4>, spec: AttentionSpec| {
            let [q, _, _] = split(packed, spec);
            q.reshape([batch, spec.num_heads, d])
        };
        let q = queries(packed.qkv, spec);
        let chosen = earlier.unwrap_or_else(|| {
            let (q, spec) = match packed.index {
                None => (q.clone(), spec),
                Some(index) => (queries(index, indexer_spec(spec)), indexer_spec(spec)),
            };
            let pooled = match self.choice.rule {
                ChoiceRule::SumOfHeads => block_keys,
                _ => (!self.pooled.is_empty()).then(|| self.pooled.tokens()),
            };
            chosen_blocks(q, pooled, self.num_tokens(), self.choice, spec)
        });
        let keys = keys_of_blocks(&self.keys, &chosen, self.choice, spec);
        let o = attention_decode(q, &keys, None, spec.softmax_scale, scratch);
        (o.reshape([batch, 1, spec.num_heads, d]), chosen)
    }
}

/// The blocks that queries `[batch, num_heads, head_dim]` of the last of `num_tokens` tokens choose by pooled keys, of
/// each row and chooser; where all heads choose together, of each row and query head, which an indexer has one of for
/// each KV head.
pub(super) fn chosen_blocks<B: Backend>(
    q: Tensor<B, 3>,
    pooled: Option<Tensor<B, 4>>,
    num_tokens: usize,
    choice: BlockChoice,
    spec: AttentionSpec,
) -> Vec<Vec<i32>> {
    let [batch, num_heads, d] = q.dims();
    let kv_heads = spec.num_kv_heads;
    let own = (num_tokens - 1) / choice.blocks.select_block_size;
    let choose = |importance: Vec<f32>| {
        let mut chosen = vec![-1; choice.blocks.num_selected_blocks];
        choose_blocks(&importance, own, choice.forced, &mut chosen);
        chosen
    };
    // How often each choice is read.
    let copies = if choice.rule == ChoiceRule::SumOfHeads {
        num_heads
    } else {
        1
    };
    let Some(pooled) = pooled else {
        return vec![choose(vec![0.0; own + 1]); batch * choice.num_choosers(num_heads, kv_heads) * copies];
    };
    let num_pooled = pooled.dims()[TOKENS];
    // Where blocks are nearly as important as each other, rounded scores would choose others than a whole pass.
    let (q, k) = (at_least_f32(q), at_least_f32(pooled));
    let scores = q
        .reshape([batch, kv_heads, num_heads / kv_heads, d])
        .matmul(k.swap_dims(2, 3));
    let scores = match choice.rule {
        ChoiceRule::MeanKey | ChoiceRule::LargestScore => scores,
        ChoiceRule::SumOfHeads => scores.clamp_min(0.0).sum_dim(2),
        _ => softmax(scores * spec.softmax_scale, 3).sum_dim(2),
    };
    let scores: Vec<f32> = scores.into_data().iter::<f32>().collect();
    let rows = scores
        .chunks_exact(num_pooled)
        .map(|row| choose(of_blocks(row, choice, own + 1)));
    rows.flat_map(|chosen| vec![chosen; copies]).collect()
}

/// Keys and values of the chosen blocks, of each chooser.
pub(super) fn keys_of_blocks<B: Backend>(
    keys: &KeyCache<B>,
    chosen: &[Vec<i32>],
    choice: BlockChoice,
    spec: AttentionSpec,
) -> KeyCache<B> {
    let (len, k) = (keys.len(), keys.k.buffer());
    let [batch, kv_heads, _, d] = k.dims();
    let size = choice.blocks.select_block_size;
    let mut tokens = Vec::new();
    for &block in chosen.iter().flatten().filter(|&&block| block >= 0) {
        let first = block as usize * size;
        tokens.extend((first..(first + size).min(len)).map(|token| token as i32));
    }
    // Every chooser has its own block and as many others, so all have equally many tokens.
    let choosers = choice.choices_per_token([spec.num_heads, kv_heads]);
    let count = tokens.len() / (batch * choosers);
    let rows = TensorData::new(tokens, [batch, kv_heads, choosers / kv_heads * count, 1]);
    let rows = Tensor::<B, 4, Int>::from_data(rows, &k.device());
    let rows = rows.expand([batch, kv_heads, choosers / kv_heads * count, d]);
    let [k, v] = [k, keys.v.buffer()].map(|x| {
        x.clone()
            .gather(TOKENS, rows.clone())
            .reshape([batch, choosers, count, d])
    });
    KeyCache::with_capacity(k, v, Some(count))
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
        ChoiceRule::MeanKey | ChoiceRule::SumOfHeads => row.get(block).copied().unwrap_or(0.0),
        ChoiceRule::LargestScore => {
            let tokens = &row[block * size..((block + 1) * size).min(row.len())];
            tokens.iter().copied().fold(f32::NEG_INFINITY, f32::max)
        }
        ChoiceRule::WeightedProbability => overlapping(block).fold(0.0, |sum, (weight, p)| sum + weight as f32 * p),
        ChoiceRule::LargestProbability => overlapping(block).fold(0.0, |most, (_, p)| p.max(most)),
    };
    (0..num_blocks).map(of_block).collect()
}
