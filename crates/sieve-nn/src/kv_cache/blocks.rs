//! NSA's cache: all tokens for the selected branch, the last ones for the window, a key and value per compressed block,
//! and the tokens of the next, incomplete block.
use super::chosen::at_least_f32;
use super::{last, split};
use crate::attention::native_sparse::Branches;
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData, activation::softmax};
use sieve_core::ForcedBlocks;
use sieve_ops::{
    AttentionSpec, DeviceBackend, Documents, KeyCache, NsaBlocks, TokenCache, attention_decode, cached_attention,
    choose_blocks, overlap_weight,
};

/// Makes the compressed keys and values of packed tokens.
type Compress<'a, B> = dyn Fn(Tensor<B, 4>, &Documents<B>) -> Tensor<B, 3> + 'a;

/// What NSA keeps of earlier tokens.
#[derive(Clone, Debug)]
pub struct BlockCache<B: Backend> {
    /// Of all tokens.
    selected: KeyCache<B>,
    /// Of the last `window_size` tokens at least.
    window: KeyCache<B>,
    /// Of the compressed blocks.
    compressed: KeyCache<B>,
    /// Of the compressed branch at least the last `compress_block_size` tokens.
    tail: KeyCache<B>,
    blocks: NsaBlocks,
}

impl<B: Backend> BlockCache<B> {
    /// Tokens that went through.
    pub fn num_tokens(&self) -> usize {
        self.selected.len()
    }

    /// Compressed keys a head.
    pub fn num_compressed(&self) -> usize {
        self.compressed.len()
    }

    /// Makes each row several equal ones.
    pub(super) fn repeat(&mut self, rows: usize) {
        let caches = [
            &mut self.selected,
            &mut self.window,
            &mut self.compressed,
            &mut self.tail,
        ];
        caches.into_iter().for_each(|cache| cache.repeat(rows));
    }

    /// The cache as a step of one token takes it.
    pub(super) fn for_token_step(&mut self) -> TokenCache<'_, B> {
        let Self {
            selected,
            window,
            compressed,
            tail,
            blocks,
        } = self;
        TokenCache::Branches {
            compressed,
            selected,
            window,
            tail,
            blocks: *blocks,
        }
    }

    /// Counts the token that a captured step has written, and the compressed key and value that end at it.
    pub(super) fn count_token(&mut self) {
        let caches = [&mut self.selected, &mut self.window, &mut self.tail];
        caches.into_iter().for_each(KeyCache::count_token);
        if self.blocks.num_compressed_blocks(self.num_tokens()) > self.num_compressed() {
            self.compressed.count_token();
        }
    }

    /// After a prompt; `compressed` is the prompt's, `[2, batch * num_slots * num_kv_heads, head_dim]`.
    pub(crate) fn of_prompt(
        new: &Branches<B>,
        compressed: Tensor<B, 3>,
        spec: AttentionSpec,
        blocks: NsaBlocks,
    ) -> Self {
        let [batch, len, _, d] = new.selected.dims();
        let keys = |qkv: &Tensor<B, 4>, seen: usize| {
            let [_, k, v] = split(qkv.clone(), spec);
            KeyCache::new(last(k, seen), last(v, seen))
        };
        let count = blocks.num_compressed_blocks(len);
        let options = (&new.selected.device(), new.selected.dtype());
        let mut of_blocks = KeyCache::empty([batch, spec.num_kv_heads, count + 1, d], options);
        if count > 0 {
            let [k, v] = first_blocks(compressed, batch, blocks.num_slots(len), count, spec);
            of_blocks.append(k, v);
        }
        Self {
            selected: keys(&new.selected, usize::MAX),
            window: keys(&new.window, spec.window_size.unwrap_or(usize::MAX)),
            compressed: of_blocks,
            tail: keys(&new.compressed, blocks.compress_block_size),
            blocks,
        }
    }
}

/// The first `count` compressed keys and values of each row, `[batch, count, num_kv_heads, head_dim]`.
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
    /// Appends one token and returns the outputs of its three branches, `[batch, 1, num_heads, head_dim]` each;
    /// `compress` computes the compressed key and value of a block.
    ///
    /// Panics on more than one token.
    pub(crate) fn attend(
        &mut self,
        new: &Branches<B>,
        spec: AttentionSpec,
        blocks: NsaBlocks,
        compress: &Compress<'_, B>,
        scratch: &mut B::DecodeScratch,
    ) -> [Tensor<B, 4>; 3] {
        let [batch, num_new, _, d] = new.selected.dims();
        assert_eq!(num_new, 1, "a filled cache takes one token at a time");
        let [q, k, v] = split(new.selected.clone(), spec);
        self.selected.append(k, v);
        let window = cached_attention(&mut self.window, new.window.clone(), spec, scratch);
        let size = blocks.compress_block_size;
        if blocks.num_compressed_blocks(self.num_tokens()) > self.num_compressed() {
            let documents = Documents::whole_rows([batch, size], &q.device());
            let pair = compress(self.tail.before(&new.compressed, size - 1), &documents);
            let [k, v] = first_blocks(pair, batch, blocks.num_slots(size), 1, spec);
            self.compressed.append(k, v);
        }
        let [_, k, v] = split(new.compressed.clone(), spec);
        self.tail.reserve(1, size - 1);
        self.tail.append(k, v);
        let one = |x: Tensor<B, 4>| x.reshape([batch, spec.num_heads, d]);
        let [coarse_q, _, _] = split(new.compressed.clone(), spec);
        let (coarse, importance) = self.coarse(one(coarse_q), spec, blocks, scratch);
        let chosen = self.chosen(importance, blocks);
        let selected = attention_decode(one(q), &chosen, None, spec.softmax_scale, scratch);
        let [coarse, selected] = [coarse, selected].map(|o| o.reshape([batch, 1, spec.num_heads, d]));
        [coarse, selected, window]
    }

    /// The compressed branch of one query, `[batch, num_heads, head_dim]`, and the importance of the blocks up to its
    /// own, per row and KV head.
    fn coarse(
        &self,
        q: Tensor<B, 3>,
        spec: AttentionSpec,
        blocks: NsaBlocks,
        scratch: &mut B::DecodeScratch,
    ) -> (Tensor<B, 3>, Vec<Vec<f32>>) {
        let [batch, num_heads, d] = q.dims();
        let kv_heads = spec.num_kv_heads;
        let num_blocks = (self.num_tokens() - 1) / blocks.select_block_size + 1;
        let keys = &self.compressed;
        if keys.is_empty() {
            return (q.zeros_like(), vec![vec![0.0; num_blocks]; batch * kv_heads]);
        }
        let o = attention_decode(q.clone(), keys, None, spec.softmax_scale, scratch);
        // Where blocks are almost equally important, rounded probabilities would choose other blocks than a whole pass
        // does.
        let (q, k) = (at_least_f32(q), at_least_f32(keys.k.tokens()));
        let logits = q
            .reshape([batch, kv_heads, num_heads / kv_heads, d])
            .matmul(k.swap_dims(2, 3))
            * spec.softmax_scale;
        let p: Vec<f32> = softmax(logits, 3).sum_dim(2).into_data().iter::<f32>().collect();
        let importance = p.chunks_exact(keys.len()).map(|p| {
            let mut sums = vec![0.0; num_blocks];
            for (c, p) in p.iter().enumerate() {
                for (block, sum) in sums.iter_mut().enumerate() {
                    *sum += overlap_weight(blocks, c, block) as f32 * p;
                }
            }
            sums
        });
        (o, importance.collect())
    }

    /// Keys and values of the chosen blocks.
    fn chosen(&self, importance: Vec<Vec<f32>>, blocks: NsaBlocks) -> KeyCache<B> {
        let (len, k) = (self.num_tokens(), self.selected.k.buffer());
        let [batch, kv_heads, _, d] = k.dims();
        let size = blocks.select_block_size;
        let own = (len - 1) / size;
        let mut tokens = Vec::new();
        for importance in importance {
            let mut chosen = vec![-1; blocks.num_selected_blocks];
            choose_blocks(&importance, own, ForcedBlocks::NSA, &mut chosen);
            for block in chosen.into_iter().filter(|&block| block >= 0) {
                let first = block as usize * size;
                tokens.extend((first..(first + size).min(len)).map(|token| token as i32));
            }
        }
        // Every head has its own block and as many others, so all have equally many tokens.
        let count = tokens.len() / (batch * kv_heads);
        let rows = TensorData::new(tokens, [batch, kv_heads, count, 1]);
        let rows = Tensor::<B, 4, Int>::from_data(rows, &k.device()).expand([batch, kv_heads, count, d]);
        let [k, v] = [k, self.selected.v.buffer()].map(|x| x.clone().gather(2, rows.clone()));
        KeyCache::with_room(k, v, Some(count))
    }
}
