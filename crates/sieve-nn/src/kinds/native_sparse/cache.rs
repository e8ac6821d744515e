//! NSA's cache: keys and values of all tokens for the selected branch, of the last tokens for the window branch, of
//! each compressed block, and of the tokens of the next, incomplete block.
use super::Branches;
use crate::kinds::chosen_blocks::{chosen_blocks, keys_of_blocks};
use crate::kinds::dense::attend_in_row;
use crate::kinds::{KindCache, LayerCache, OTHER_CACHE};
use crate::kv_cache::last;
use crate::pass::PassState;
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use sieve_core::BlockChoice;
use sieve_ops::{
    AttentionSpec, DeviceBackend, KeyCache, NsaBlocks, RowsOf, SieveBackend, TokenCache, attention_decode,
    cached_attention, kept_ends, split_heads,
};

/// Computes the compressed keys and values, `[2, slots, head_dim]`, of the packed tokens of rows.
type Compress<'a, B> = dyn Fn(Tensor<B, 4>) -> Tensor<B, 3> + 'a;

/// Keys and values of NSA's three branches.
#[derive(Clone, Debug)]
pub struct BlockCache<B: Backend> {
    /// The selected branch's keys and values of all tokens.
    selected: KeyCache<B>,
    /// The window branch's keys and values of at least the last `window_size` tokens.
    window: KeyCache<B>,
    /// Compressed keys and values, one per block.
    compressed: KeyCache<B>,
    /// The compressed branch's keys and values before compression, of at least the last `compress_block_size` tokens.
    tail: KeyCache<B>,
    blocks: NsaBlocks,
}

/// A row of cached and new tokens for two of the branches.
pub(super) struct BranchRows<B: Backend> {
    /// Packed queries of the compressed branch.
    pub(super) compressed: Tensor<B, 4>,
    /// Compressed keys, then values, `[2, batch * num_slots * num_kv_heads, head_dim]`.
    pub(super) pooled: Tensor<B, 3>,
    /// Packed queries, keys and values of the selected branch.
    pub(super) selected: Tensor<B, 4>,
}

impl<B: Backend> BlockCache<B> {
    /// Number of tokens processed so far.
    fn num_tokens(&self) -> usize {
        self.selected.len()
    }

    /// Number of compressed keys of each head.
    fn num_compressed(&self) -> usize {
        self.compressed.len()
    }

    /// The cache after a prompt. `compressed` are the prompt's compressed keys, then values,
    /// `[2, batch * num_slots * num_kv_heads, head_dim]`.
    pub(super) fn of_prompt(
        new: &Branches<B>,
        compressed: Tensor<B, 3>,
        spec: AttentionSpec,
        blocks: NsaBlocks,
    ) -> Self {
        let [batch, len, _, d] = new.selected.dims();
        let keys = |qkv: &Tensor<B, 4>, seen: usize| {
            let [_, k, v] = split_heads(qkv.clone(), spec.num_kv_heads);
            KeyCache::new(last(k, seen), last(v, seen))
        };
        // In whole stages, as a window's own cache; a window has no first keys.
        let [_, last_seen] = kept_ends(len, spec.kept_keys(), 0);
        let count = blocks.num_compressed_blocks(len);
        let options = (&new.selected.device(), new.selected.dtype());
        // The buffer has room for the next block.
        let mut of_blocks = KeyCache::empty([batch, spec.num_kv_heads, count + 1, d], options);
        if count > 0 {
            let [k, v] = first_blocks(compressed, batch, blocks.num_slots(len), count, spec);
            of_blocks.append(k, v);
        }
        Self {
            selected: keys(&new.selected, usize::MAX),
            window: keys(&new.window, last_seen),
            compressed: of_blocks,
            tail: keys(&new.compressed, blocks.compress_block_size),
            blocks,
        }
    }
}

impl<B: Backend> KindCache<B> for BlockCache<B> {
    fn num_keys(&self) -> usize {
        self.num_tokens()
    }

    fn for_token_step(&mut self) -> Option<TokenCache<'_, B>> {
        let Self { selected, window, compressed, tail, blocks } = self;
        Some(TokenCache::Branches { compressed, selected, window, tail, blocks: *blocks })
    }

    /// The token, and the compressed block that ends with it, if any.
    fn count_token(&mut self) {
        let caches = [&mut self.selected, &mut self.window, &mut self.tail];
        caches.into_iter().for_each(KeyCache::count_token);
        if self.blocks.num_compressed_blocks(self.num_tokens()) > self.num_compressed() {
            self.compressed.count_token();
        }
    }

    fn rows(&self, rows: RowsOf) -> LayerCache<B> {
        let of_tokens = |cache: &KeyCache<B>| cache.rows(rows, |tokens| [tokens; 2]);
        let num_compressed = |tokens| [self.blocks.num_compressed_blocks(tokens); 2];
        LayerCache::Blocks(Self {
            selected: of_tokens(&self.selected),
            window: of_tokens(&self.window),
            compressed: self.compressed.rows(rows, num_compressed),
            tail: of_tokens(&self.tail),
            blocks: self.blocks,
        })
    }

    fn put(&mut self, row: usize, text: &LayerCache<B>, tokens: usize) {
        let LayerCache::Blocks(text) = text else { panic!("{OTHER_CACHE}") };
        self.selected.put(row, &text.selected, tokens);
        self.window.put(row, &text.window, tokens);
        self.compressed.put(row, &text.compressed, text.num_compressed());
        self.tail.put(row, &text.tail, tokens);
    }
}

/// The first `count` compressed keys and values of each row, `[batch, count, num_kv_heads, head_dim]` each.
fn first_blocks<B: Backend>(
    compressed: Tensor<B, 3>,
    batch: usize,
    num_slots: usize,
    count: usize,
    spec: AttentionSpec,
) -> [Tensor<B, 4>; 2] {
    let d = compressed.dims()[2];
    [0, 1].map(|which| {
        let x = compressed.clone().narrow(0, which, 1);
        let x = x.reshape([batch, num_slots, spec.num_kv_heads, d]);
        x.narrow(1, 0, count)
    })
}

impl<B: DeviceBackend> BlockCache<B> {
    /// Appends one token and returns the outputs of the compressed, selected and window branches,
    /// `[batch, 1, num_heads, head_dim]` each. `compress` computes the compressed key and value of a block.
    ///
    /// Panics on more than one token.
    pub(super) fn attend(
        &mut self,
        new: &Branches<B>,
        spec: AttentionSpec,
        blocks: NsaBlocks,
        compress: &Compress<'_, B>,
        scratch: &mut B::DecodeScratch,
    ) -> [Tensor<B, 4>; 3] {
        let [batch, num_new, _, d] = new.selected.dims();
        assert_eq!(num_new, 1, "a filled cache takes one token at a time");
        let [q, k, v] = split_heads(new.selected.clone(), spec.num_kv_heads);
        self.selected.append(k, v);
        let window = cached_attention(&mut self.window, new.window.clone(), None, spec, scratch);
        let size = blocks.compress_block_size;
        // This token completes a compressed block, whose other size - 1 tokens are the last ones of `tail`.
        if blocks.num_compressed_blocks(self.num_tokens()) > self.num_compressed() {
            let pair = compress(self.tail.before(&new.compressed, [0, size - 1]));
            let [k, v] = first_blocks(pair, batch, blocks.num_slots(size), 1, spec);
            self.compressed.append(k, v);
        }
        let [coarse_q, k, v] = split_heads(new.compressed.clone(), spec.num_kv_heads);
        self.tail.reserve(1, size - 1);
        self.tail.append(k, v);
        let one = |x: Tensor<B, 4>| x.reshape([batch, spec.num_heads, d]);
        let coarse_q = one(coarse_q);
        // Before the first complete block the compressed branch adds nothing. `None`: no bias per key.
        let coarse = if self.compressed.is_empty() {
            coarse_q.zeros_like()
        } else {
            attention_decode(coarse_q.clone(), &self.compressed, None, spec.softmax_scale, scratch)
        };
        let chosen = self.choose(coarse_q, spec);
        let keys = keys_of_blocks(&self.selected, &chosen, BlockChoice::nsa(blocks), spec);
        let selected = attention_decode(one(q), &keys, None, spec.softmax_scale, scratch);
        let [coarse, selected] = [coarse, selected].map(|o| o.reshape([batch, 1, spec.num_heads, d]));
        [coarse, selected, window]
    }

    /// Appends several tokens. Returns the row in which they attend in the compressed and the selected branch, and
    /// their output of the window branch, `[batch, new, num_heads, head_dim]`. `compress` computes the compressed keys
    /// and values of rows of tokens.
    pub(super) fn row<S: SieveBackend<Inner = B>>(
        &mut self,
        new: Branches<B>,
        spec: AttentionSpec,
        compress: &Compress<'_, B>,
        state: &mut PassState<S>,
    ) -> (BranchRows<B>, Tensor<B, 4>) {
        let ([batch, num_new, heads, d], blocks) = (new.selected.dims(), self.blocks);
        let (earlier, size) = (self.num_tokens(), blocks.compress_block_size);
        let window = attend_in_row(&mut self.window, new.window, None, spec, state);
        let selected = self.selected.before(&new.selected, [0, earlier]);
        let [_, k, v] = split_heads(new.selected, spec.num_kv_heads);
        self.selected.append(k, v);
        // The blocks that end with the new tokens, from the first one's first token on, which is in `tail`.
        let begun = earlier - self.num_compressed() * blocks.compress_stride;
        let ended = blocks.num_compressed_blocks(earlier + num_new) - self.num_compressed();
        if ended > 0 {
            let pair = compress(self.tail.before(&new.compressed, [0, begun]));
            let [k, v] = first_blocks(pair, batch, blocks.num_slots(begun + num_new), ended, spec);
            self.compressed.append(k, v);
        }
        let [_, k, v] = split_heads(new.compressed.clone(), spec.num_kv_heads);
        self.tail.reserve(num_new, size - 1);
        self.tail.append(k, v);
        // Of the tokens only queries are read.
        let options = (&selected.device(), selected.dtype());
        let queries = Tensor::zeros([batch, earlier, heads, d], options);
        let compressed = Tensor::cat(vec![queries, new.compressed], 1);
        let num_slots = blocks.num_slots(earlier + num_new);
        let num_unused = num_slots - self.num_compressed();
        let unused = (num_unused > 0).then(|| Tensor::zeros([batch, num_unused, spec.num_kv_heads, d], options));
        let pooled = [&self.compressed.k, &self.compressed.v].map(|x| {
            // Burn has no view of no token, and no tensor without one.
            let used = (!x.is_empty()).then(|| x.tokens().swap_dims(1, 2));
            let all = Tensor::cat(used.into_iter().chain(unused.clone()).collect(), 1);
            all.reshape([1, batch * num_slots * spec.num_kv_heads, d])
        });
        (BranchRows { compressed, pooled: Tensor::cat(pooled.into(), 0), selected }, window)
    }

    /// The blocks that the last cached token chooses by its query in the compressed branch,
    /// `[batch, num_heads, head_dim]`, one list per row and KV head.
    pub(in crate::kinds) fn choose(&self, coarse_q: Tensor<B, 3>, spec: AttentionSpec) -> Vec<Vec<i32>> {
        let pooled = (!self.compressed.is_empty()).then(|| self.compressed.k.tokens());
        chosen_blocks(coarse_q, pooled, self.num_tokens(), BlockChoice::nsa(self.blocks), spec)
    }
}
