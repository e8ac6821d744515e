//! The cache of layers whose queries choose blocks: keys and values of every token, and the keys by which blocks are
//! chosen, which are pooled keys or an indexer's keys.
use super::Packed;
use crate::kinds::{KindCache, LayerCache, OTHER_CACHE};
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Int, Tensor, activation::softmax};
use sieve_core::{BlockChoice, ChoiceRule, NsaBlocks};
use sieve_ops::{
    AttentionSpec, DeviceBackend, Documents, KeyCache, NsaCall, RowsOf, TokenBuffer, TokenCache, attention_decode,
    cached_attention, choose_blocks, choose_token_blocks, indexer_spec, nsa_mean_pool, overlap_weight, split_heads,
};

/// Keys and values of all tokens, and the keys by which blocks are chosen.
#[derive(Clone, Debug)]
pub struct ChosenCache<B: Backend> {
    /// Keys and values of all tokens.
    keys: KeyCache<B>,
    /// Means of keys, `[batch, num_kv_heads, room, head_dim]`, or an indexer's keys, `[batch, 1, room, head_dim]`; the
    /// buffer can hold `room` of them. The keys of a QSA indexer are stored before their norm.
    pooled: TokenBuffer<B, 4>,
    choice: BlockChoice,
    /// Whether this layer chooses blocks. Otherwise it reads the blocks that another layer chose, and `pooled` is
    /// empty.
    pools: bool,
}

/// Axis of the tokens in the buffers.
const TOKENS: usize = 2;

/// A bf16 or f16 tensor in f32; other tensors unchanged.
fn at_least_f32<B: Backend, const D: usize>(x: Tensor<B, D>) -> Tensor<B, D> {
    match x.dtype() {
        DType::BF16 | DType::F16 => x.cast(DType::F32),
        _ => x,
    }
}

/// Means of the first `count` blocks of consecutive keys, `[batch, heads, count, head_dim]`, from the keys
/// `[batch, heads, tokens, head_dim]`: by the op that pools a whole text, to the bit.
fn means_of_blocks<B: DeviceBackend>(keys: Tensor<B, 4>, blocks: NsaBlocks, count: usize) -> Tensor<B, 4> {
    let keys = keys.swap_dims(1, TOKENS);
    let [batch, len, heads, d] = keys.dims();
    let documents = Documents::<B>::whole_rows([batch, len], &keys.device());
    let call = NsaCall::new(documents.bounds(), AttentionSpec::dense([heads; 2], d), blocks);
    // The op takes a packed tensor; its queries and values are not read.
    let pooled = nsa_mean_pool(Tensor::cat(vec![keys; 3], 2), &call).narrow(0, 0, 1);
    let pooled = pooled.reshape([batch, blocks.num_slots(len), heads, d]).narrow(1, 0, count);
    pooled.swap_dims(1, TOKENS)
}

impl<B: Backend> ChosenCache<B> {
    /// Number of tokens processed so far.
    pub(super) fn num_tokens(&self) -> usize {
        self.keys.len()
    }
}

impl<B: DeviceBackend> ChosenCache<B> {
    /// The cache after a prompt; without `pools` the layer reads the blocks that another layer chose.
    pub(super) fn of_prompt(packed: &Packed<B>, spec: AttentionSpec, choice: BlockChoice, pools: bool) -> Self {
        let [batch, seq_len, _, d] = packed.qkv.dims();
        let [_, k, v] = split_heads(packed.qkv.clone(), spec.num_kv_heads);
        let room = match packed.index {
            _ if !pools => [batch, 1, 1, d],
            Some(_) => [batch, 1, seq_len, d],
            // The buffer has room for one mean more than the prompt has.
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
        cache.add_choice_keys(packed);
        cache
    }

    /// Packed tensors of all cached tokens, with queries of zero, followed by the new tokens `packed`.
    pub(super) fn row(&self, packed: &Packed<B>) -> Packed<B> {
        let index = packed.index.as_ref().map(|new| {
            let keys = self.pooled.tokens().swap_dims(1, 2);
            let [batch, _, heads, d] = new.dims();
            // After the queries come the indexer's key head, and a value head that is not read; the cached keys fill
            // both.
            let queries = Tensor::zeros([batch, self.pooled.len(), heads - 2, d], (&new.device(), new.dtype()));
            let earlier = Tensor::cat(vec![queries, keys.clone(), keys], 2);
            Tensor::cat(vec![earlier, new.clone()], 1)
        });
        Packed { qkv: self.keys.before(&packed.qkv, [0, self.keys.len()]), index }
    }

    /// Appends keys and values of new tokens.
    pub(super) fn append(&mut self, packed: &Packed<B>, spec: AttentionSpec) {
        let [_, k, v] = split_heads(packed.qkv.clone(), spec.num_kv_heads);
        self.keys.append(k, v);
        self.add_choice_keys(packed);
    }

    /// Adds the new tokens' indexer keys, or the pooled keys that end with the new tokens. `self.keys` already has the
    /// new tokens.
    fn add_choice_keys(&mut self, packed: &Packed<B>) {
        let new = match &packed.index {
            _ if !self.pools => None,
            Some(index) => {
                let num_key_heads = 1;
                // The value head of an indexer's packed tensor has the key before its norm.
                let [_, k, before_norm] = split_heads(index.clone(), num_key_heads);
                let is_qsa = self.choice.rule == ChoiceRule::SumOfHeads;
                Some(if is_qsa { before_norm } else { k }.swap_dims(1, 2))
            }
            None => self.new_means(),
        };
        if let Some(new) = new {
            self.pooled.append(new);
        }
    }

    /// Means of a QSA indexer's keys over each complete block, `[batch, blocks, 1, head_dim]`, and the positions of the
    /// blocks' first tokens, `[batch, blocks]`; `None` without a complete block.
    pub(super) fn block_means(&self) -> Option<(Tensor<B, 4>, Tensor<B, 2, Int>)> {
        let size = self.choice.blocks.select_block_size;
        let blocks = self.pooled.len() / size;
        if blocks == 0 {
            return None;
        }
        let keys = self.pooled.tokens().narrow(TOKENS, 0, blocks * size);
        let ([batch, _, _, d], dtype) = (keys.dims(), keys.dtype());
        let means = if B::ON_HOST {
            means_of_blocks(keys, self.choice.blocks, blocks).swap_dims(1, TOKENS)
        } else {
            at_least_f32(keys).reshape([batch, blocks, size, d]).mean_dim(2).cast(dtype)
        };
        let first = Tensor::<B, 1, Int>::arange(0..blocks as i64, &means.device()) * size as i64;
        Some((means, first.unsqueeze_dim::<2>(0).repeat_dim(0, batch)))
    }

    /// Pooled keys of the blocks that are complete and not in `pooled` yet, `[batch, num_kv_heads, blocks, head_dim]`;
    /// `None` if there are none.
    fn new_means(&self) -> Option<Tensor<B, 4>> {
        let blocks = self.choice.blocks;
        let (size, stride) = (blocks.compress_block_size, blocks.compress_stride);
        let [first, end] = [self.pooled.len(), blocks.num_compressed_blocks(self.num_tokens())];
        if first == end {
            return None;
        }
        let count = end - first;
        let keys = self.keys.k.tokens().narrow(TOKENS, first * stride, size + (count - 1) * stride);
        Some(means_of_blocks(keys, blocks, count))
    }
}

impl<B: Backend> KindCache<B> for ChosenCache<B> {
    fn num_keys(&self) -> usize {
        self.num_tokens()
    }

    fn for_token_step(&mut self) -> Option<TokenCache<'_, B>> {
        Some(TokenCache::Chosen { keys: &mut self.keys, pooled: &mut self.pooled, choice: self.choice })
    }

    /// The token, and the pooled key that ends with it, if any.
    fn count_token(&mut self) {
        self.keys.count_token();
        let ended = self.choice.blocks.num_compressed_blocks(self.num_tokens());
        self.pooled.count(ended - self.pooled.len());
    }

    fn rows(&self, rows: RowsOf) -> LayerCache<B> {
        let num_pooled = |tokens| match self.choice.has_indexer() {
            _ if !self.pools => 0,
            true => tokens,
            false => self.choice.blocks.num_compressed_blocks(tokens),
        };
        LayerCache::Chosen(Self {
            keys: self.keys.rows(rows, |tokens| [tokens; 2]),
            pooled: self.pooled.rows(rows, |tokens| [num_pooled(tokens); 2]),
            ..*self
        })
    }

    fn put(&mut self, row: usize, text: &LayerCache<B>, tokens: usize) {
        let LayerCache::Chosen(text) = text else { panic!("{OTHER_CACHE}") };
        self.keys.put(row, &text.keys, tokens);
        self.pooled.put(row, &text.pooled, text.pooled.len());
    }
}

impl<B: DeviceBackend> ChosenCache<B> {
    /// Appends one token and returns its attention over all keys, `[batch, 1, num_heads, head_dim]`.
    pub(super) fn attend_to_all(
        &mut self,
        packed: Packed<B>,
        spec: AttentionSpec,
        scratch: &mut B::DecodeScratch,
    ) -> Tensor<B, 4> {
        let sinks = None;
        let o = cached_attention(&mut self.keys, packed.qkv.clone(), sinks, spec, scratch);
        self.add_choice_keys(&packed);
        o
    }

    /// Appends one token and returns its attention, `[batch, 1, num_heads, head_dim]`, and the blocks that it read, one
    /// list per row and chooser. These blocks are `earlier` where another layer chose them. Otherwise the token chooses
    /// them by the pooled keys or, with a QSA indexer, by `block_keys`, the indexer's keys of the complete blocks
    /// before the token, `[batch, 1, blocks, head_dim]`.
    pub(super) fn attend(
        &mut self,
        packed: Packed<B>,
        spec: AttentionSpec,
        (earlier, block_keys): (Option<Vec<Vec<i32>>>, Option<Tensor<B, 4>>),
        scratch: &mut B::DecodeScratch,
    ) -> (Tensor<B, 4>, Vec<Vec<i32>>) {
        self.append(&packed, spec);
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
        let bias = None;
        let o = attention_decode(q, &keys, bias, spec.softmax_scale, scratch);
        (o.unsqueeze_dim(1), chosen)
    }
}

/// The queries of one token in a packed tensor, `[batch, num_heads, head_dim]`.
fn queries<B: Backend>(packed: Tensor<B, 4>, spec: AttentionSpec) -> Tensor<B, 3> {
    let [q, _, _] = split_heads(packed, spec.num_kv_heads);
    q.squeeze_dim(1)
}

/// The blocks that the last of `num_tokens` tokens chooses by pooled keys, one list per row and chooser. Its queries
/// `q` are `[batch, num_heads, head_dim]`. With [`ChoiceRule::SumOfHeads`] all heads choose together, and their list is
/// repeated for each head of `q`. `pooled` is `None` before the first pooled key; all blocks then score 0.
pub(in crate::kinds) fn chosen_blocks<B: DeviceBackend>(
    q: Tensor<B, 3>,
    pooled: Option<Tensor<B, 4>>,
    num_tokens: usize,
    choice: BlockChoice,
    spec: AttentionSpec,
) -> Vec<Vec<i32>> {
    let [batch, num_heads, d] = q.dims();
    let kv_heads = spec.num_kv_heads;
    let own_block = (num_tokens - 1) / choice.blocks.select_block_size;
    let choose = |importance: Vec<f32>| {
        let mut chosen = vec![-1; choice.blocks.num_selected_blocks];
        choose_blocks(&importance, own_block, choice.forced, &mut chosen);
        chosen
    };
    let copies = if choice.rule == ChoiceRule::SumOfHeads { num_heads } else { 1 };
    if B::ON_HOST {
        let chosen = choose_token_blocks(q, pooled, num_tokens, spec, choice);
        return chosen.into_iter().flat_map(|chosen| vec![chosen; copies]).collect();
    }
    let Some(pooled) = pooled else {
        return vec![choose(vec![0.0; own_block + 1]); batch * choice.num_choosers(num_heads, kv_heads) * copies];
    };
    let num_pooled = pooled.dims()[TOKENS];
    // Scores are f32: bf16 scores of nearly equal blocks would give other choices than a pass over all tokens.
    let (q, k) = (at_least_f32(q), at_least_f32(pooled));
    let products = q.reshape([batch, kv_heads, num_heads / kv_heads, d]).matmul(k.swap_dims(2, 3));
    let scores = match choice.rule {
        ChoiceRule::MeanKey | ChoiceRule::LargestScore => products,
        ChoiceRule::SumOfHeads => products.clamp_min(0.0).sum_dim(2),
        _ => softmax(products * spec.softmax_scale, 3).sum_dim(2),
    };
    let scores: Vec<f32> = scores.into_data().iter::<f32>().collect();
    let rows = scores.chunks_exact(num_pooled).map(|row| choose(block_scores(row, choice, own_block + 1)));
    rows.flat_map(|chosen| vec![chosen; copies]).collect()
}

/// Keys and values of the chosen blocks, with one KV head per chooser.
pub(in crate::kinds) fn keys_of_blocks<B: Backend>(
    keys: &KeyCache<B>,
    chosen: &[Vec<i32>],
    choice: BlockChoice,
    spec: AttentionSpec,
) -> KeyCache<B> {
    let (len, k) = (keys.len(), keys.k.buffer());
    let [batch, kv_heads, capacity, d] = k.dims();
    let size = choice.blocks.select_block_size;
    let choosers = choice.choices_per_token([spec.num_heads, kv_heads]);
    assert_eq!(chosen.len(), batch * choosers, "a list of blocks for each row and chooser");
    let mut rows = Vec::new();
    for (list, blocks) in chosen.iter().enumerate() {
        let first_row = list / (choosers / kv_heads) * capacity;
        for &block in blocks.iter().filter(|&&block| block >= 0) {
            let first = block as usize * size;
            rows.extend((first..(first + size).min(len)).map(|token| (first_row + token) as i32));
        }
    }
    // Every chooser reads the block of the token itself and the same number of complete blocks, so all read the same
    // number of tokens.
    let count = rows.len() / (batch * choosers);
    let rows = Tensor::<B, 1, Int>::from_data(&rows[..], &k.device());
    // Selects whole rows, one per token: on the CPU a gather would look up an index for each number.
    let [k, v] = [k, keys.v.buffer()].map(|x| {
        x.clone().reshape([batch * kv_heads * capacity, d]).select(0, rows.clone()).reshape([batch, choosers, count, d])
    });
    let capacity = Some(count);
    KeyCache::with_capacity(k, v, capacity)
}

/// Scores of the first `num_blocks` blocks by the rule of `choice`. `row` has a number for each pooled key or indexer
/// key: its score, or under the rules with probabilities its probability summed over a group of heads.
fn block_scores(row: &[f32], choice: BlockChoice, num_blocks: usize) -> Vec<f32> {
    let blocks = choice.blocks;
    let (size, stride) = (blocks.select_block_size, blocks.compress_stride);
    // Returns the pooled keys that overlap a block, with weights. Pooled key p begins at token p * stride.
    let overlapping = |block: usize| {
        let first = (block * size + stride).saturating_sub(blocks.compress_block_size) / stride;
        let end = ((block + 1) * size / stride).min(row.len());
        (first..end).map(move |pooled| (overlap_weight(blocks, pooled, block), row[pooled]))
    };
    let of_block = |block: usize| match choice.rule {
        ChoiceRule::MeanKey | ChoiceRule::SumOfHeads => row.get(block).copied().unwrap_or(0.0),
        // An indexer has a score for each token.
        ChoiceRule::LargestScore => {
            let tokens = &row[block * size..((block + 1) * size).min(row.len())];
            tokens.iter().copied().fold(f32::NEG_INFINITY, f32::max)
        }
        ChoiceRule::WeightedProbability => overlapping(block).fold(0.0, |sum, (weight, p)| sum + weight as f32 * p),
        ChoiceRule::LargestProbability => overlapping(block).fold(0.0, |most, (_, p)| p.max(most)),
    };
    (0..num_blocks).map(of_block).collect()
}
