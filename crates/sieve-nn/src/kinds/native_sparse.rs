//! Native sparse attention (arXiv:2502.11089): the gated sum of a compressed, a selected and a window branch.
mod block_mlp;
mod cache;

pub use block_mlp::BlockMlp;
pub use cache::BlockCache;

use super::{Attention, BuildLayer, KindLayer, LayerCache};
use crate::attention_weights::{by_key, with_values};
use crate::layer::{LayerContext, LayerOutput, PassState, from_device, on_device};
use crate::{AttentionConfig, LayerCaches, Linear, QkvProjection, WeightInit};
use burn::module::{Module, Param};
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};
use sieve_core::ModelShape;
use sieve_core::model::{NUM_NSA_BRANCHES, NsaCompression, NsaShape};
use sieve_ops::{
    AttentionSpec, ContextParallel, Documents, Heads, KernelPolicy, NsaCall, SieveBackend, TokenAttention,
    TokenBranches, TokenExtra,
};

/// Initial bias of the gates (compressed, selected, window): training begins almost as window attention.
const GATE_BIAS: [f64; NUM_NSA_BRANCHES] = [-2.0, -2.0, 2.0];

/// Each query attends to all compressed blocks before it, to the tokens of the blocks to which the compressed branch
/// gives most weight, and to a window of the last tokens. A gate per token, head and branch weighs the three outputs.
///
/// With mean compression the compressed branch's queries and keys are rotated. With the MLP they are not, because the
/// MLP has learned position embeddings.
#[derive(Module, Debug)]
pub struct NativeSparseAttention<B: Backend> {
    /// Packed projection with q/k-norm and RoPE: the queries, and the keys and values of the window branch and of
    /// branches without a projection of their own.
    pub qkv: QkvProjection<B>,
    /// Keys and values of the compressed branch, `[2 * num_kv_heads * head_dim, d_model]`; `None` with `shared_kv`.
    pub compress_kv_proj: Option<Linear<B>>,
    /// Keys and values of the selected branch, `[2 * num_kv_heads * head_dim, d_model]`; `None` with `shared_kv`.
    pub select_kv_proj: Option<Linear<B>>,
    /// MLP that compresses blocks of keys; `None` takes their mean.
    pub k_compress: Option<BlockMlp<B>>,
    /// MLP that compresses blocks of values; `None` takes their mean.
    pub v_compress: Option<BlockMlp<B>>,
    /// `[num_heads * 3, d_model]`: for each head the compressed, selected and window branch.
    pub gate_proj: Linear<B>,
    /// Bias of the gates' logits, `[num_heads * 3]`.
    pub gate_bias: Param<Tensor<B, 1>>,
    /// Output projection, `[d_model, num_heads * head_dim]`.
    pub o_proj: Linear<B>,
    #[module(skip)]
    nsa: NsaShape,
}

/// The packed queries, keys and values of the three branches. Branches that share keys, values and rotation are clones.
#[derive(Clone)]
struct Branches<B: Backend> {
    compressed: Tensor<B, 4>,
    selected: Tensor<B, 4>,
    window: Tensor<B, 4>,
}

impl<B: SieveBackend> Branches<B> {
    /// A copy with `values`, `[1, seq_len, head_dim]`, for every KV head of the selected and the window branch.
    fn with_values(&self, values: Tensor<B, 3>, num_kv_heads: usize) -> Self {
        Self {
            compressed: self.compressed.clone(),
            selected: with_values(&self.selected, values.clone(), num_kv_heads),
            window: with_values(&self.window, values, num_kv_heads),
        }
    }
}

impl<B: SieveBackend> Branches<B> {
    /// The same tensors without a graph.
    fn on_device(self) -> Branches<B::Inner> {
        let Self { compressed, selected, window } = self;
        Branches { compressed: on_device(compressed), selected: on_device(selected), window: on_device(window) }
    }
}

impl<B: Backend> Branches<B> {
    fn map(self, change: impl Fn(Tensor<B, 4>) -> Tensor<B, 4>) -> Self {
        Self { compressed: change(self.compressed), selected: change(self.selected), window: change(self.window) }
    }

    /// `count` rows of the batch (`dim` 0) or tokens (`dim` 1) of each branch, from `first` on.
    fn part(&self, dim: usize, [first, count]: [usize; 2]) -> Self {
        self.clone().map(|branch| branch.narrow(dim, first, count))
    }
}

impl BuildLayer for NsaShape {
    fn build<B: Backend>(&self, shape: &ModelShape, init: &mut WeightInit, device: &B::Device) -> Attention<B> {
        Attention::Branches(NativeSparseAttention::new(shape, *self, init, device))
    }
}

impl AttentionConfig {
    /// Native sparse attention. Panics when [`validate`](Self::validate) fails or a block size is not valid.
    pub fn native_sparse<B: Backend>(&self, nsa: NsaShape, device: &B::Device) -> NativeSparseAttention<B> {
        let shape = self.shape(sieve_core::Attention::Nsa(nsa));
        NativeSparseAttention::new(&shape, nsa, &mut self.weights(), device)
    }
}

impl<B: Backend> NativeSparseAttention<B> {
    /// Normal weights from `init`. The gates have weights of 0 and a bias that favours the window branch.
    pub fn new(shape: &ModelShape, nsa: NsaShape, init: &mut WeightInit, device: &B::Device) -> Self {
        let ModelShape { d_model, num_heads, head_dim, .. } = *shape;
        let qkv = QkvProjection::new(shape, init, device);
        let mut kv_proj = || (!nsa.shared_kv).then(|| Linear::new(d_model, 2 * shape.kv_width(), init, device));
        let (compress_kv_proj, select_kv_proj) = (kv_proj(), kv_proj());
        let mut mlp = || {
            let hidden = nsa.compress_hidden_size.unwrap_or(head_dim);
            let size = nsa.compress_block_size;
            (nsa.compress == NsaCompression::Mlp).then(|| BlockMlp::new(size, head_dim, hidden, init, device))
        };
        let (k_compress, v_compress) = (mlp(), mlp());
        let num_gates = num_heads * NUM_NSA_BRANCHES;
        Self {
            qkv,
            compress_kv_proj,
            select_kv_proj,
            k_compress,
            v_compress,
            gate_proj: Linear { weight: init.constant(0.0, [num_gates, d_model], device) },
            gate_bias: init.repeated(&GATE_BIAS, num_gates, device),
            o_proj: Linear::new(num_heads * head_dim, d_model, init, device),
            nsa,
        }
    }

    fn spec(&self) -> AttentionSpec {
        self.qkv.spec(Some(self.nsa.window_size))
    }
}

impl<B: SieveBackend> NativeSparseAttention<B> {
    /// The attention call for a packed tensor of all heads, or of some KV heads with their query heads.
    fn call(&self, packed: &Tensor<B, 4>, documents: &Documents<B>, policy: KernelPolicy) -> NsaCall<B::Inner> {
        let spec = AttentionSpec { policy, ..self.spec() };
        NsaCall::new(documents.bounds(), spec.of_packed_heads(packed.dims()[2]), self.nsa.blocks())
    }

    /// The gated sum after the output projection, shape of x, `[batch, seq_len, d_model]`, without a cache.
    fn forward_of_rows(&self, x: Tensor<B, 3>, context: &LayerContext<'_, B>) -> Tensor<B, 3> {
        let branches = self.branches(x.clone(), context);
        if let Some(parts) = context.parts {
            return self.forward_of_part(x, branches, parts, context.settings.policy);
        }
        let o = match context.shared {
            None => self.attend_compressing(branches, context.documents, context.settings.policy),
            Some(shared) => {
                let branches = branches.map(|branch| shared.repeat(branch));
                let o = self.attend_compressing(branches, shared.documents(), context.settings.policy);
                o.map(|o| shared.once(o))
            }
        };
        self.gate_and_project(x, o)
    }

    /// [`forward_of_rows`](Self::forward_of_rows) with context parallelism: this rank has one part of each row, and
    /// attends over whole rows with its share of the KV heads and their queries. Blocks are compressed and chosen per
    /// KV head, so nothing else is exchanged.
    fn forward_of_part(
        &self,
        x: Tensor<B, 3>,
        branches: Branches<B>,
        parts: &ContextParallel,
        policy: KernelPolicy,
    ) -> Tensor<B, 3> {
        let ([batch, len, _], spec) = (x.dims(), self.spec());
        let kinds = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads].map(Heads::Split);
        let window = parts.to_heads(branches.window, &kinds);
        // A branch that is a clone of the window branch is not exchanged again.
        let exchanged = |branch, is_window| match is_window {
            true => window.clone(),
            false => parts.to_heads(branch, &kinds),
        };
        let selected = exchanged(branches.selected, self.select_kv_proj.is_none());
        let compressed_is_window = self.nsa.compress == NsaCompression::Mean && self.compress_kv_proj.is_none();
        let compressed = exchanged(branches.compressed, compressed_is_window);
        let rows = parts.whole_rows(&x.device());
        let branches = Branches { compressed, selected, window };
        let o = self.attend_compressing(branches, &rows, policy);
        // The gates are applied before the exchange back to tokens, so one output is exchanged and not three.
        let (heads, own) = (spec.num_heads, parts.own_heads(spec.num_heads));
        let logits = self.gate_proj.forward(x).reshape([batch, len, heads, NUM_NSA_BRANCHES]);
        let logits = parts.to_heads(logits, &[Heads::Split(heads)]).flatten(2, 3);
        let bias = self.gate_bias.val();
        let bias = bias.narrow(0, own.start * NUM_NSA_BRANCHES, own.len() * NUM_NSA_BRANCHES);
        let o = parts.to_tokens(sieve_ops::nsa_gates(o, logits, bias), heads);
        self.o_proj.forward(o.flatten(2, 3))
    }

    /// The output of new tokens without the residual; reads and extends the caches.
    fn forward_of_new(
        &self,
        x: Tensor<B, 3>,
        context: &LayerContext<'_, B>,
        caches: &mut LayerCaches<'_, B::Inner>,
    ) -> Tensor<B, 3> {
        let (spec, blocks) = (self.spec(), self.nsa.blocks());
        let branches = self.branches(x.clone(), context);
        if let Some(cache) = caches.empty() {
            let compressed = self.compress(branches.compressed.clone(), context.documents);
            let of_prompt = branches.clone().on_device();
            let of_prompt = BlockCache::of_prompt(&of_prompt, on_device(compressed.clone()), spec, blocks);
            *cache = LayerCache::Blocks(of_prompt);
            let o = self.attend(branches, compressed, context.documents, context.settings.policy);
            return self.gate_and_project(x, o);
        }
        let branches = branches.on_device();
        let compress = |block: Tensor<B::Inner, 4>| {
            let [batch, size, _, _] = block.dims();
            let documents = Documents::whole_rows([batch, size], &block.device());
            on_device(self.compress(from_device(block), &documents))
        };
        let mut parts = [const { Vec::new() }; NUM_NSA_BRANCHES];
        caches.each(x.dims()[0], |cached| {
            let LayerCache::Blocks(cache) = cached.cache else {
                panic!("an NSA layer decodes after a prompt");
            };
            let of_rows = branches.part(0, cached.rows);
            let mut tokens = [const { Vec::new() }; NUM_NSA_BRANCHES];
            // Attends one token at a time: a token may complete a block, which later tokens attend to.
            for token in 0..x.dims()[1] {
                let o = cache.attend(&of_rows.part(1, [token, 1]), spec, blocks, &compress, cached.scratch);
                tokens.iter_mut().zip(o).for_each(|(tokens, o)| tokens.push(o));
            }
            let o = tokens.map(|o| Tensor::cat(o, 1));
            parts.iter_mut().zip(o).for_each(|(parts, o)| parts.push(o));
        });
        self.gate_and_project(x, parts.map(|parts| from_device(Tensor::cat(parts, 0))))
    }

    /// Compresses the compressed branch's keys and values, and returns the outputs of the compressed, selected and
    /// window branch.
    fn attend_compressing(
        &self,
        branches: Branches<B>,
        documents: &Documents<B>,
        policy: KernelPolicy,
    ) -> [Tensor<B, 4>; NUM_NSA_BRANCHES] {
        let compressed = self.compress(branches.compressed.clone(), documents);
        self.attend(branches, compressed, documents, policy)
    }

    /// The outputs of the three branches; `compressed` are the compressed keys and values.
    fn attend(
        &self,
        branches: Branches<B>,
        compressed: Tensor<B, 3>,
        documents: &Documents<B>,
        policy: KernelPolicy,
    ) -> [Tensor<B, 4>; NUM_NSA_BRANCHES] {
        let call = self.call(&branches.window, documents, policy);
        let coarse = sieve_ops::nsa_compressed_attention(branches.compressed, compressed, &call);
        let indices = coarse.block_indices;
        let selected = sieve_ops::nsa_selected_attention(branches.selected, indices, &call);
        let window = sieve_ops::attention(branches.window, documents, call.spec);
        [coarse.o, selected, window]
    }

    /// The gated sum of the branches' outputs, after the output projection.
    fn gate_and_project(&self, x: Tensor<B, 3>, branches: [Tensor<B, 4>; NUM_NSA_BRANCHES]) -> Tensor<B, 3> {
        self.o_proj.forward(self.gated(x, branches).flatten(2, 3))
    }

    /// The gated sum of the branches' outputs, `[batch, seq_len, num_heads, head_dim]`.
    fn gated(&self, x: Tensor<B, 3>, branches: [Tensor<B, 4>; NUM_NSA_BRANCHES]) -> Tensor<B, 4> {
        sieve_ops::nsa_gates(branches, self.gate_proj.forward(x), self.gate_bias.val())
    }

    /// Normed and rotated queries, keys and values of the branches.
    fn branches(&self, x: Tensor<B, 3>, context: &LayerContext<'_, B>) -> Branches<B> {
        let raw = self.qkv.project(x.clone());
        let with_own_kv = |kv_proj: &Option<Linear<B>>| {
            let kv = kv_proj.as_ref()?.forward(x.clone());
            Some(self.with_kv(raw.clone(), kv))
        };
        let window = self.qkv.norm_rope(raw.clone(), context);
        // Without keys and values of its own a branch reads the window branch's.
        let rotated = |own| match own {
            Some(own) => self.qkv.norm_rope(own, context),
            None => window.clone(),
        };
        let selected = rotated(with_own_kv(&self.select_kv_proj));
        let compressed = with_own_kv(&self.compress_kv_proj);
        let compressed = match self.nsa.compress {
            NsaCompression::Mean => rotated(compressed),
            NsaCompression::Mlp => self.qkv.norm(compressed.unwrap_or(raw), context),
        };
        Branches { compressed, selected, window }
    }

    /// The packed tensor `raw` with `kv`, `[batch, seq_len, 2 * num_kv_heads * head_dim]`, as its keys and values.
    fn with_kv(&self, raw: Tensor<B, 4>, kv: Tensor<B, 3>) -> Tensor<B, 4> {
        let [batch, seq_len, heads, head_dim] = raw.dims();
        let AttentionSpec { num_heads, num_kv_heads, .. } = self.spec();
        debug_assert_eq!(heads, num_heads + 2 * num_kv_heads);
        let kv = kv.reshape([batch, seq_len, 2 * num_kv_heads, head_dim]);
        Tensor::cat(vec![raw.narrow(2, 0, num_heads), kv], 2)
    }

    /// Compressed keys and values, `[2, batch * num_slots * num_kv_heads, head_dim]`.
    fn compress(&self, qkv: Tensor<B, 4>, documents: &Documents<B>) -> Tensor<B, 3> {
        let call = self.call(&qkv, documents, KernelPolicy::default());
        let (Some(k), Some(v)) = (&self.k_compress, &self.v_compress) else {
            return sieve_ops::nsa_mean_pool(qkv, &call);
        };
        let (k_positions, v_positions) = (k.positions.val(), v.positions.val());
        let inputs = sieve_ops::nsa_blocks(qkv, k_positions, v_positions, &call);
        let [_, rows, width] = inputs.dims();
        let part = |which| inputs.clone().narrow(0, which, 1).reshape([rows, width]);
        Tensor::stack(vec![k.forward(part(0)), v.forward(part(1))], 0)
    }
}

impl<B: SieveBackend> KindLayer<B> for NativeSparseAttention<B> {
    /// `residual` plus the gated branches: of whole rows, or of new tokens after the cached ones.
    fn forward(
        &self,
        x: Tensor<B, 3>,
        residual: Tensor<B, 3>,
        context: &LayerContext<'_, B>,
        _state: &mut PassState<B>,
        caches: Option<&mut LayerCaches<'_, B::Inner>>,
    ) -> LayerOutput<B> {
        let y = match caches {
            None => self.forward_of_rows(x, context),
            Some(caches) => self.forward_of_new(x, context, caches),
        };
        LayerOutput::of(residual + y)
    }

    /// The blocks whose tokens each query reads in the selected branch, counted from the first token of the document.
    fn block_indices(
        &self,
        x: &dyn Fn() -> Tensor<B, 3>,
        context: &LayerContext<'_, B>,
        _state: &PassState<B>,
    ) -> Option<Tensor<B, 4, Int>> {
        let compressed = self.branches(x(), context).compressed;
        let pooled = self.compress(compressed.clone(), context.documents);
        let call = self.call(&compressed, context.documents, context.settings.policy);
        Some(sieve_ops::nsa_compressed_attention(compressed, pooled, &call).block_indices)
    }

    /// The weights of all branches as the op for one new token takes them.
    fn for_token_step(&self) -> Option<TokenAttention<B>> {
        let weights = |mlp: &BlockMlp<B>| {
            let (up, down) = (mlp.up_proj.weight.val(), mlp.down_proj.weight.val());
            [mlp.positions.val(), up, down]
        };
        let mlp = self.k_compress.as_ref().zip(self.v_compress.as_ref());
        let weight = |proj: &Option<Linear<B>>| proj.as_ref().map(|proj| proj.weight.val());
        let branches = TokenBranches {
            compress_kv: weight(&self.compress_kv_proj),
            select_kv: weight(&self.select_kv_proj),
            mlp: mlp.map(|(k, v)| [weights(k), weights(v)]),
            gate: self.gate_proj.weight.val(),
            gate_bias: self.gate_bias.val(),
        };
        let extra = TokenExtra::Branches(branches);
        Some(TokenAttention { extra, ..self.qkv.for_token_step(&self.o_proj, self.spec()) })
    }

    /// The weight of each key over all branches; the tokens of a compressed block share its weight.
    fn weights(&self, x: Tensor<B, 3>, context: &LayerContext<'_, B>, _state: &PassState<B>) -> Tensor<B, 3> {
        let branches = self.branches(x.clone(), context);
        let compressed = self.compress(branches.compressed.clone(), context.documents);
        let (kv_heads, blocks) = (self.spec().num_kv_heads, self.nsa.blocks());
        let [_, rows, head_dim] = compressed.dims();
        let keys = compressed.narrow(0, 0, 1);
        // The weights are the layer's output where a key's value is one-hot.
        by_key(&branches.window, |one_hot| {
            let [_, seq_len, _] = one_hot.dims();
            // The value of a compressed block is the mean of its tokens' values. Slots after the last block are not
            // read.
            let starts = (0..rows / kv_heads).map(|slot| slot * blocks.compress_stride);
            let means: Vec<Tensor<B, 3>> = starts
                .map(|start| {
                    let size = blocks.compress_block_size.min(seq_len.saturating_sub(start));
                    match size {
                        0 => Tensor::zeros([1, 1, head_dim], (&one_hot.device(), one_hot.dtype())),
                        _ => one_hot.clone().narrow(1, start, size).sum_dim(1) / blocks.compress_block_size as f64,
                    }
                })
                .collect();
            let means = Tensor::cat(means, 1).unsqueeze_dim::<4>(2).repeat_dim(2, kv_heads);
            let values = means.reshape([1, rows, head_dim]);
            let compressed = Tensor::cat(vec![keys.clone(), values], 0);
            let branches = branches.with_values(one_hot, kv_heads);
            self.gated(x.clone(), self.attend(branches, compressed, context.documents, context.settings.policy))
        })
    }
}
