//! Native sparse attention (arXiv:2502.11089): the gated sum of a compressed, a selected and a window branch.
mod block_mlp;
mod cache;

pub use block_mlp::BlockMlp;
pub use cache::BlockCache;

use super::{Attention, BuildLayer, KindLayer, LayerCache};
use crate::attention_weights::{by_key, with_values};
use crate::kv_cache::CachedRows;
use crate::layer::{Cached, KindAttention, PerToken, Rows};
use crate::pass::{LayerContext, PassState, from_device, on_device};
use crate::{AttentionConfig, Linear, QkvProjection, WeightInit};
use burn::module::{Module, Param};
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};
use sieve_core::ModelShape;
use sieve_core::model::{NUM_NSA_BRANCHES, NsaCompression, NsaShape};
use sieve_ops::{
    AttentionSpec, ContextParallel, DeviceBackend, Documents, Heads, KernelPolicy, KeyOrder, NsaCall, SieveBackend,
    SumOrder, TokenAttention, TokenBranches, TokenExtra,
};
use std::ops::Range;

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

/// The packed queries, keys and values of the three branches, and their gates. Branches that share keys, values and
/// rotation are clones.
#[derive(Clone)]
pub(crate) struct Branches<B: Backend> {
    pub(super) compressed: Tensor<B, 4>,
    selected: Tensor<B, 4>,
    window: Tensor<B, 4>,
    /// Logits of the gates, before their bias, `[batch, tokens, num_heads, 3]`.
    gates: Tensor<B, 4>,
}

impl<B: SieveBackend> Branches<B> {
    /// A copy with `values`, `[1, seq_len, head_dim]`, for every KV head of the selected and the window branch.
    fn with_values(&self, values: Tensor<B, 3>, num_kv_heads: usize) -> Self {
        Self {
            compressed: self.compressed.clone(),
            selected: with_values(&self.selected, values.clone(), num_kv_heads),
            window: with_values(&self.window, values, num_kv_heads),
            gates: self.gates.clone(),
        }
    }
}

impl<S: Backend> PerToken<S> for Branches<S> {
    type On<T: Backend> = Branches<T>;

    fn change<T: Backend>(self, change: &dyn Fn(Tensor<S, 4>) -> Tensor<T, 4>) -> Branches<T> {
        let Self { compressed, selected, window, gates } = self;
        Branches {
            compressed: change(compressed),
            selected: change(selected),
            window: change(window),
            gates: change(gates),
        }
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

    pub(super) fn spec(&self) -> AttentionSpec {
        self.qkv.spec(Some(self.nsa.window_size))
    }
}

impl<B: SieveBackend> NativeSparseAttention<B> {
    /// The attention call for a packed tensor of all heads, or of some KV heads with their query heads.
    fn call(&self, packed: &Tensor<B, 4>, documents: &Documents<B>, policy: KernelPolicy) -> NsaCall<B::Inner> {
        let spec = AttentionSpec { policy, ..self.spec() };
        NsaCall::new(documents.bounds(), spec.of_packed_heads(packed.dims()[2]), self.nsa.blocks())
    }

    /// The gated sum of the three branches with the query heads `heads`; `compressed` are the compressed keys and
    /// values.
    fn attend_to(
        &self,
        branches: Branches<B>,
        compressed: Tensor<B, 3>,
        (documents, heads): (&Documents<B>, Range<usize>),
        policy: KernelPolicy,
    ) -> Tensor<B, 4> {
        let call = self.call(&branches.window, documents, policy);
        let coarse = sieve_ops::nsa_compressed_attention(branches.compressed, compressed, &call);
        let indices = coarse.block_indices;
        let selected = sieve_ops::nsa_selected_attention(branches.selected, indices, &call);
        let window = sieve_ops::attention(branches.window, documents, call.spec);
        let bias = self.gate_bias.val().narrow(0, heads.start * NUM_NSA_BRANCHES, heads.len() * NUM_NSA_BRANCHES);
        sieve_ops::nsa_gates([coarse.o, selected, window], branches.gates.flatten(2, 3), bias)
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
    fn compress(&self, qkv: Tensor<B, 4>, documents: &Documents<B>, policy: KernelPolicy) -> Tensor<B, 3> {
        let call = self.call(&qkv, documents, policy);
        let (Some(k), Some(v)) = (&self.k_compress, &self.v_compress) else {
            return sieve_ops::nsa_mean_pool(qkv, &call);
        };
        let (k_positions, v_positions) = (k.positions.val(), v.positions.val());
        let inputs = sieve_ops::nsa_blocks(qkv, k_positions, v_positions, &call);
        let [_, rows, width] = inputs.dims();
        let part = |which| inputs.clone().narrow(0, which, 1).reshape([rows, width]);
        let pair = if in_order::<B>(policy) {
            [k.forward_in_order(part(0)), v.forward_in_order(part(1))]
        } else {
            [k.forward(part(0)), v.forward(part(1))]
        };
        Tensor::stack(pair.into(), 0)
    }
}

/// Whether a pass takes the order of sums that a decoding step has, which a GPU's kernels have for this alone.
fn in_order<B: SieveBackend>(policy: KernelPolicy) -> bool {
    policy.keys == KeyOrder::Epochs && !<B::Inner as DeviceBackend>::ON_HOST
}

impl<B: SieveBackend> NativeSparseAttention<B> {
    /// Compressed keys and values of rows that are one document each.
    fn compress_row(&self, qkv: Tensor<B::Inner, 4>, policy: KernelPolicy) -> Tensor<B::Inner, 3> {
        let [batch, tokens, _, _] = qkv.dims();
        let documents = Documents::whole_rows([batch, tokens], &qkv.device());
        on_device(self.compress(from_device(qkv), &documents, policy))
    }

    /// Attention of several new tokens after cached ones, which it adds to the cache, by the ops of whole rows: the
    /// cached tokens, with queries of zero, then the new ones. Returns `[batch, new, num_heads, head_dim]`.
    pub(super) fn attend_in_row(
        &self,
        branches: Branches<B::Inner>,
        cache: &mut BlockCache<B::Inner>,
        context: &LayerContext<'_, B>,
        state: &mut PassState<B>,
    ) -> Tensor<B::Inner, 4> {
        let spec = context.under_policy(self.spec());
        let (bias, gates) = (on_device(self.gate_bias.val()), branches.gates.clone().flatten(2, 3));
        let [batch, new, ..] = branches.window.dims();
        let (row, window) = cache.row(branches, spec, &|tokens| self.compress_row(tokens, spec.policy), state);
        let [_, tokens, ..] = row.selected.dims();
        let (first, device) = (tokens - new, row.selected.device());
        let documents = Documents::<B::Inner>::whole_rows([batch, tokens], &device);
        let call = NsaCall::new(documents.bounds(), spec, self.nsa.blocks()).of_last(first);
        let coarse = sieve_ops::nsa_compressed_attention(row.compressed, row.pooled, &call);
        let selected = sieve_ops::nsa_selected_attention(row.selected, coarse.block_indices, &call);
        let [compressed, selected] = [coarse.o, selected].map(|o| o.narrow(1, first, new));
        sieve_ops::nsa_gates([compressed, selected, window], gates, bias)
    }
}

impl<B: SieveBackend> KindAttention<B> for NativeSparseAttention<B> {
    type Packed = Branches<B>;
    /// The compressed keys and values.
    type Found = Tensor<B, 3>;

    fn num_heads(&self) -> usize {
        self.spec().num_heads
    }

    fn project(&self, x: Tensor<B, 3>, context: &LayerContext<'_, B>) -> Branches<B> {
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
        let [batch, len, _d_model] = x.dims();
        // A GEMM has one order of sums where the number of its columns is a multiple of eight; gates may have others.
        let gates = if in_order::<B>(context.settings.policy) {
            self.gate_proj.forward_in_order(x)
        } else {
            self.gate_proj.forward(x)
        };
        let gates = gates.reshape([batch, len, self.spec().num_heads, NUM_NSA_BRANCHES]);
        Branches { compressed, selected, window, gates }
    }

    /// Blocks are compressed and chosen per KV head, and gates are per head, so nothing else is exchanged.
    fn project_own_heads(&self, x: Tensor<B, 3>, parts: &ContextParallel, rows: &Rows<'_, B>) -> Branches<B> {
        let Branches { compressed, selected, window, gates } = self.project(x, rows.context);
        let window = self.qkv.own_heads(window, parts);
        // A branch that is a clone of the window branch is not exchanged again.
        let exchanged = |branch, is_window| if is_window { window.clone() } else { self.qkv.own_heads(branch, parts) };
        let selected = exchanged(selected, self.select_kv_proj.is_none());
        let compressed_is_window = self.nsa.compress == NsaCompression::Mean && self.compress_kv_proj.is_none();
        let compressed = exchanged(compressed, compressed_is_window);
        let gates = parts.to_heads(gates, &[Heads::Split(self.num_heads())]);
        Branches { compressed, selected, window, gates }
    }

    fn attend(
        &self,
        branches: Branches<B>,
        rows: &Rows<'_, B>,
        _state: &mut PassState<B>,
    ) -> (Tensor<B, 4>, Tensor<B, 3>) {
        let policy = rows.context.settings.policy;
        let compressed = self.compress(branches.compressed.clone(), rows.documents, policy);
        let rows = (rows.documents, rows.heads.clone());
        (self.attend_to(branches, compressed.clone(), rows, policy), compressed)
    }

    fn fill(&self, branches: Branches<B::Inner>, compressed: Tensor<B, 3>) -> LayerCache<B::Inner> {
        LayerCache::Blocks(BlockCache::of_prompt(&branches, on_device(compressed), self.spec(), self.nsa.blocks()))
    }

    /// On a GPU several tokens attend in one row, and a single one whose sums have a fixed order. On a CPU, which would
    /// compute a query for each cached token, and where there is one token, each attends by itself: it may complete a
    /// block, which later tokens attend to.
    fn attend_cached(&self, branches: Branches<B::Inner>, cached: Cached<'_, '_, B>) -> Tensor<B::Inner, 4> {
        let (spec, blocks) = (self.spec(), self.nsa.blocks());
        let Cached { rows: CachedRows { cache, scratch, .. }, context, state } = cached;
        let LayerCache::Blocks(cache) = cache else {
            panic!("an NSA layer decodes after a prompt");
        };
        let (policy, several) = (context.settings.policy, branches.window.dims()[1] > 1);
        if !<B::Inner as DeviceBackend>::ON_HOST && (several || policy.sums == SumOrder::Fixed) {
            return self.attend_in_row(branches, cache, context, state);
        }
        let compress = |block| self.compress_row(block, policy);
        let mut tokens = [const { Vec::new() }; NUM_NSA_BRANCHES];
        for token in 0..branches.window.dims()[1] {
            let new = branches.clone().change(&|branch| branch.narrow(1, token, 1));
            let o = cache.attend(&new, spec, blocks, &compress, scratch);
            tokens.iter_mut().zip(o).for_each(|(tokens, o)| tokens.push(o));
        }
        let o = tokens.map(|o| Tensor::cat(o, 1));
        sieve_ops::nsa_gates(o, branches.gates.flatten(2, 3), on_device(self.gate_bias.val()))
    }

    /// In order the GEMM adds the residual, as a decoding step's does.
    fn project_out(&self, o: Tensor<B, 3>, residual: Tensor<B, 3>, context: &LayerContext<'_, B>) -> Tensor<B, 3> {
        if in_order::<B>(context.settings.policy) {
            return self.o_proj.forward_add(o, residual);
        }
        residual + self.o_proj.forward(o)
    }
}

impl<B: SieveBackend> KindLayer<B> for NativeSparseAttention<B> {
    /// The blocks whose tokens each query reads in the selected branch, counted from the first token of the document.
    fn block_indices(
        &self,
        x: &dyn Fn() -> Tensor<B, 3>,
        context: &LayerContext<'_, B>,
        _state: &PassState<B>,
    ) -> Option<Tensor<B, 4, Int>> {
        let compressed = self.project(x(), context).compressed;
        let pooled = self.compress(compressed.clone(), context.documents, context.settings.policy);
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
        let branches = self.project(x, context);
        let compressed = self.compress(branches.compressed.clone(), context.documents, context.settings.policy);
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
            let rows = (context.documents, 0..self.num_heads());
            self.attend_to(branches, compressed, rows, context.settings.policy)
        })
    }
}
