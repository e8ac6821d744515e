//! NSA's cache: every token for the selected branch, the last ones for the window, one pair per compressed block, and
//! the tokens that the next block is made of.
use super::{recent, split};
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Int, Tensor, TensorData, activation::softmax};
use sieve_ops::{AttentionSpec, Documents, NsaBlocks, SieveBackend, attention_decode, choose_blocks, overlap_weight};

/// Packed tensors of new tokens, by branch.
pub(crate) struct Growing<'a, B: Backend> {
    pub(crate) compressed: &'a Tensor<B, 4>,
    pub(crate) selected: &'a Tensor<B, 4>,
    pub(crate) window: &'a Tensor<B, 4>,
}

/// Keys and values, `[batch, len, num_kv_heads, head_dim]` each.
type Pair<B> = [Tensor<B, 4>; 2];

/// Makes the compressed keys and values of packed tokens.
type Compress<'a, B> = dyn Fn(Tensor<B, 4>, &Documents<B>) -> Tensor<B, 3> + 'a;

/// What NSA keeps of earlier tokens.
#[derive(Clone, Debug)]
pub struct BlockCache<B: Backend> {
    /// Of all tokens.
    selected: Pair<B>,
    /// Of the last `window_size` tokens.
    window: Pair<B>,
    /// Of the compressed blocks; absent before the first is whole.
    compressed: Option<Pair<B>>,
    /// The last `compress_block_size` tokens of the compressed branch, packed.
    tail: Tensor<B, 4>,
}

fn append<B: Backend>(old: &Tensor<B, 4>, new: Tensor<B, 4>) -> Tensor<B, 4> {
    Tensor::cat(vec![old.clone(), new], 1)
}

fn last<B: Backend>(x: Tensor<B, 4>, count: usize) -> Tensor<B, 4> {
    let len = x.dims()[1];
    match len > count {
        true => x.narrow(1, len - count, count),
        false => x,
    }
}

impl<B: Backend> BlockCache<B> {
    /// Tokens that went through.
    pub fn num_tokens(&self) -> usize {
        self.selected[0].dims()[1]
    }

    /// Compressed keys a head.
    pub fn num_compressed(&self) -> usize {
        self.compressed.as_ref().map_or(0, |[k, _]| k.dims()[1])
    }

    /// The cache of one row as that of several equal rows.
    pub(super) fn repeat(&mut self, rows: usize) {
        let pairs = [&mut self.selected, &mut self.window];
        let tensors = pairs.into_iter().chain(self.compressed.as_mut()).flatten();
        for x in tensors.chain([&mut self.tail]) {
            *x = x.clone().repeat_dim(0, rows);
        }
    }

    /// After a prompt; `compressed` is the prompt's, `[2, batch * num_slots * num_kv_heads, head_dim]`.
    pub(crate) fn of_prompt(
        new: Growing<'_, B>,
        compressed: Tensor<B, 3>,
        spec: AttentionSpec,
        blocks: NsaBlocks,
    ) -> Self {
        let [batch, len, _, _] = new.selected.dims();
        let [_, k, v] = split(new.selected.clone(), spec);
        let [_, window_k, window_v] = split(new.window.clone(), spec);
        let count = blocks.num_compressed_blocks(len);
        Self {
            selected: [k, v],
            window: [recent(window_k, spec), recent(window_v, spec)],
            compressed: (count > 0).then(|| first_blocks(compressed, batch, blocks.num_slots(len), count, spec)),
            tail: last(new.compressed.clone(), blocks.compress_block_size),
        }
    }
}

/// The tensor in f32 where it has a 16-bit type.
fn at_least_f32<B: Backend, const D: usize>(x: Tensor<B, D>) -> Tensor<B, D> {
    match x.dtype() {
        DType::BF16 | DType::F16 => x.cast(DType::F32),
        _ => x,
    }
}

/// The first `count` compressed keys and values of each row.
fn first_blocks<B: Backend>(
    compressed: Tensor<B, 3>,
    batch: usize,
    num_slots: usize,
    count: usize,
    spec: AttentionSpec,
) -> Pair<B> {
    let d = compressed.dims()[2];
    [0, 1].map(|which| {
        let x = compressed.clone().narrow(0, which, 1);
        let x = x.reshape([batch, num_slots, spec.num_kv_heads, d]);
        x.narrow(1, 0, count)
    })
}

impl<B: SieveBackend> BlockCache<B> {
    /// Takes one token in and returns its three branches, `[batch, 1, num_heads, head_dim]` each; `compress` makes the
    /// compressed pair of one block of tokens.
    ///
    /// Panics on more than one token.
    pub(crate) fn attend(
        &mut self,
        new: Growing<'_, B>,
        spec: AttentionSpec,
        blocks: NsaBlocks,
        compress: &Compress<'_, B>,
    ) -> [Tensor<B, 4>; 3] {
        let [batch, num_new, _, d] = new.selected.dims();
        assert_eq!(num_new, 1, "a filled cache takes one token at a time");
        let [q, k, v] = split(new.selected.clone(), spec);
        self.selected = [append(&self.selected[0], k), append(&self.selected[1], v)];
        let [_, k, v] = split(new.window.clone(), spec);
        self.window = [
            recent(append(&self.window[0], k), spec),
            recent(append(&self.window[1], v), spec),
        ];
        let size = blocks.compress_block_size;
        self.tail = last(append(&self.tail, new.compressed.clone()), size);
        let len = self.num_tokens();
        if blocks.num_compressed_blocks(len) > self.num_compressed() {
            let documents = Documents::whole_rows([batch, size], &q.device());
            let pair = compress(self.tail.clone(), &documents);
            let new = first_blocks(pair, batch, blocks.num_slots(size), 1, spec);
            self.compressed = Some(match self.compressed.take() {
                Some([k, v]) => {
                    let [new_k, new_v] = new;
                    [append(&k, new_k), append(&v, new_v)]
                }
                None => new,
            });
        }
        let one = |x: Tensor<B, 4>| x.reshape([batch, spec.num_heads, d]);
        let [coarse_q, _, _] = split(new.compressed.clone(), spec);
        let (coarse, importance) = self.coarse(one(coarse_q), spec, blocks);
        let q = one(q);
        let [k, v] = self.chosen(importance, spec, blocks);
        let selected = attention_decode(q.clone(), k, v, None, spec.softmax_scale);
        let [k, v] = self.window.clone();
        let window = attention_decode(q, k, v, None, spec.softmax_scale);
        [coarse, selected, window].map(|o| o.reshape([batch, 1, spec.num_heads, d]))
    }

    /// The compressed branch of one query, `[batch, num_heads, head_dim]`, and the importance of the blocks up to its
    /// own, per row and KV head.
    fn coarse(&self, q: Tensor<B, 3>, spec: AttentionSpec, blocks: NsaBlocks) -> (Tensor<B, 3>, Vec<Vec<f32>>) {
        let [batch, num_heads, d] = q.dims();
        let kv_heads = spec.num_kv_heads;
        let num_blocks = (self.num_tokens() - 1) / blocks.select_block_size + 1;
        let Some([k, v]) = self.compressed.clone() else {
            return (q.zeros_like(), vec![vec![0.0; num_blocks]; batch * kv_heads]);
        };
        let o = attention_decode(q.clone(), k.clone(), v, None, spec.softmax_scale);
        let count = k.dims()[1];
        // Where blocks are nearly as important as each other, rounded probabilities would choose others than a whole
        // pass.
        let (q, k) = (at_least_f32(q), at_least_f32(k));
        let logits = q
            .reshape([batch, kv_heads, num_heads / kv_heads, d])
            .matmul(k.permute([0, 2, 3, 1]))
            * spec.softmax_scale;
        let p: Vec<f32> = softmax(logits, 3).sum_dim(2).into_data().iter::<f32>().collect();
        let importance = p.chunks_exact(count).map(|p| {
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
    fn chosen(&self, importance: Vec<Vec<f32>>, spec: AttentionSpec, blocks: NsaBlocks) -> Pair<B> {
        let [k, v] = self.selected.clone();
        let [batch, len, kv_heads, d] = k.dims();
        debug_assert_eq!(kv_heads, spec.num_kv_heads);
        let size = blocks.select_block_size;
        let own = (len - 1) / size;
        let mut tokens = Vec::new();
        for importance in importance {
            let mut chosen = vec![-1; blocks.num_selected_blocks];
            choose_blocks(&importance, own, &mut chosen);
            for block in chosen.into_iter().filter(|&block| block >= 0) {
                let first = block as usize * size;
                tokens.extend((first..(first + size).min(len)).map(|token| token as i32));
            }
        }
        // Every head has its own block and as many others, so all have equally many tokens.
        let count = tokens.len() / (batch * kv_heads);
        let rows = TensorData::new(tokens, [batch, kv_heads, count]);
        let rows = Tensor::<B, 3, Int>::from_data(rows, &k.device())
            .swap_dims(1, 2)
            .reshape([batch, count, kv_heads, 1])
            .expand([batch, count, kv_heads, d]);
        [k, v].map(|x| x.gather(1, rows.clone()))
    }
}
