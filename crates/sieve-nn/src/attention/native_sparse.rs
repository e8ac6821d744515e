//! Native sparse attention (arXiv:2502.11089): compressed, selected and window branches, gated.
use super::LayerContext;
use super::block_mlp::BlockMlp;
use super::weights::{by_key, with_values};
use crate::kv_cache::BlockCache;
use crate::{AttentionConfig, LayerCache, LayerCaches, Linear, QkvProjection, WeightInit};
use burn::module::{Module, Param};
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};
use sieve_core::model::{NUM_NSA_BRANCHES, NsaCompression, NsaShape};
use sieve_core::{Attention, ModelShape};
use sieve_ops::{
    AttentionSpec, ContextParallel, DeviceBackend, Documents, Heads, KernelPolicy, NsaBlocks, NsaCall, SieveBackend,
    TokenAttention, TokenBranches, TokenExtra,
};

/// Bias of the gates at the start, by branch: training begins as a window.
const GATE_BIAS: [f64; NUM_NSA_BRANCHES] = [-2.0, -2.0, 2.0];

/// Each query sees every compressed block before it, the tokens of a few blocks that the compressed branch finds
/// important, and a window; a gate per token, head and branch weighs them.
///
/// With mean compression keys and queries are rotated. With the MLP both are unrotated, since it has learned position
/// embeddings.
#[derive(Module, Debug)]
pub struct NativeSparseAttention<B: Backend> {
    /// Packed projection with q/k-norm and RoPE: queries, and keys and values of the window branch (of all branches
    /// where they are shared).
    pub qkv: QkvProjection<B>,
    /// Keys and values of the compressed branch, `[2 * num_kv_heads * head_dim, d_model]`; absent where shared.
    pub compress_kv_proj: Option<Linear<B>>,
    /// Keys and values of the selected branch, `[2 * num_kv_heads * head_dim, d_model]`; absent where shared.
    pub select_kv_proj: Option<Linear<B>>,
    /// Compression of keys; absent for means.
    pub k_compress: Option<BlockMlp<B>>,
    /// Compression of values; absent for means.
    pub v_compress: Option<BlockMlp<B>>,
    /// `[num_heads * 3, d_model]`, the branch varying fastest: compressed, selected, window.
    pub gate_proj: Linear<B>,
    /// `[num_heads * 3]`.
    pub gate_bias: Param<Tensor<B, 1>>,
    /// `[d_model, num_heads * head_dim]`.
    pub o_proj: Linear<B>,
    #[module(skip)]
    nsa: NsaShape,
}

/// The packed tensors of the three branches; clones of one where keys and values are shared and rotated alike.
pub(crate) struct Branches<B: Backend> {
    pub(crate) compressed: Tensor<B, 4>,
    pub(crate) selected: Tensor<B, 4>,
    pub(crate) window: Tensor<B, 4>,
}

impl<B: SieveBackend> Branches<B> {
    /// The same with `values` `[1, seq_len, head_dim]` for every KV head of the selected and the window branch.
    fn with_values(&self, values: Tensor<B, 3>, num_kv_heads: usize) -> Self {
        Self {
            compressed: self.compressed.clone(),
            selected: with_values(&self.selected, values.clone(), num_kv_heads),
            window: with_values(&self.window, values, num_kv_heads),
        }
    }
}

impl<B: Backend> Branches<B> {
    /// The branches of some rows, or of some tokens.
    fn part(&self, dim: usize, [first, count]: [usize; 2]) -> Self {
        let part = |x: &Tensor<B, 4>| x.clone().narrow(dim, first, count);
        Self {
            compressed: part(&self.compressed),
            selected: part(&self.selected),
            window: part(&self.window),
        }
    }
}

impl AttentionConfig {
    /// Native sparse attention. Panics when [`validate`](Self::validate) fails or a block size does.
    pub fn native_sparse<B: Backend>(&self, nsa: NsaShape, device: &B::Device) -> NativeSparseAttention<B> {
        let shape = self.shape(Attention::Nsa(nsa));
        NativeSparseAttention::new(&shape, nsa, &mut self.weights(), device)
    }
}

impl<B: Backend> NativeSparseAttention<B> {
    /// Normal weights from `init`; gates of weight 0 that let the window through.
    pub fn new(shape: &ModelShape, nsa: NsaShape, init: &mut WeightInit, device: &B::Device) -> Self {
        let ModelShape {
            d_model,
            num_heads,
            head_dim,
            ..
        } = *shape;
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
            gate_proj: Linear {
                weight: init.constant(0.0, [num_gates, d_model], device),
            },
            gate_bias: init.repeated(&GATE_BIAS, num_gates, device),
            o_proj: Linear::new(num_heads * head_dim, d_model, init, device),
            nsa,
        }
    }

    fn spec(&self) -> AttentionSpec {
        self.qkv.spec(Some(self.nsa.window_size))
    }

    fn blocks(&self) -> NsaBlocks {
        self.nsa.blocks()
    }
}

impl<B: SieveBackend> NativeSparseAttention<B> {
    /// The call on a packed tensor of all heads, or of some KV heads with their queries.
    fn call(&self, packed: &Tensor<B, 4>, documents: &Documents<B>, policy: KernelPolicy) -> NsaCall<B> {
        let spec = AttentionSpec { policy, ..self.spec() };
        NsaCall::new(documents, spec.of_packed_heads(packed.dims()[2]), self.blocks())
    }

    /// `[batch, seq_len, d_model]`, shape kept.
    pub fn forward(&self, x: Tensor<B, 3>, context: &LayerContext<'_, B>) -> Tensor<B, 3> {
        let branches = self.branches(x.clone(), context);
        if let Some(parts) = context.parts {
            return self.forward_of_part(x, branches, parts, context.policy);
        }
        let o = match context.shared {
            None => self.attend_compressing(branches, context.documents, context.policy),
            Some(shared) => {
                let branches = Branches {
                    compressed: shared.repeat(branches.compressed),
                    selected: shared.repeat(branches.selected),
                    window: shared.repeat(branches.window),
                };
                let o = self.attend_compressing(branches, shared.documents(), context.policy);
                o.map(|o| shared.once(o))
            }
        };
        self.gate(x, o)
    }

    /// As [`forward`](Self::forward) of a part of each row: this rank attends over whole rows with its share of the KV
    /// heads and their queries. Blocks are compressed and chosen head by head, so nothing else is exchanged.
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
        let other = |branch, is_shared| match is_shared {
            true => window.clone(),
            false => parts.to_heads(branch, &kinds),
        };
        let selected = other(branches.selected, self.select_kv_proj.is_none());
        let shares_compressed = self.nsa.compress == NsaCompression::Mean && self.compress_kv_proj.is_none();
        let compressed = other(branches.compressed, shares_compressed);
        let rows = parts.whole_rows(&x.device());
        let branches = Branches {
            compressed,
            selected,
            window,
        };
        let o = self.attend_compressing(branches, &rows, policy);
        // The gated sum crosses, not the three branches.
        let (heads, own) = (spec.num_heads, parts.own_heads(spec.num_heads));
        let logits = self.gate_proj.forward(x).reshape([batch, len, heads, NUM_NSA_BRANCHES]);
        let logits = parts.to_heads(logits, &[Heads::Split(heads)]).flatten(2, 3);
        let bias = self.gate_bias.val();
        let bias = bias.narrow(0, own.start * NUM_NSA_BRANCHES, own.len() * NUM_NSA_BRANCHES);
        let o = parts.to_tokens(sieve_ops::nsa_gates(o, logits, bias), heads);
        self.o_proj.forward(o.flatten(2, 3))
    }

    /// The blocks whose tokens each query reads in the selected branch,
    /// `[batch, seq_len, num_kv_heads, num_selected_blocks]`:
    /// counted from the document's first token, ascending, then -1. For measures; [`forward`](Self::forward) chooses
    /// the same.
    pub fn block_indices(&self, x: Tensor<B, 3>, context: &LayerContext<'_, B>) -> Tensor<B, 4, Int> {
        let compressed = self.branches(x, context).compressed;
        let pooled = self.compress(compressed.clone(), context.documents);
        let call = self.call(&compressed, context.documents, context.policy);
        sieve_ops::nsa_compressed_attention(compressed, pooled, &call).block_indices
    }

    /// As [`forward`](Self::forward) with a cache; see [`LayerCache`](crate::LayerCache).
    pub fn forward_cached(
        &self,
        x: Tensor<B, 3>,
        context: &LayerContext<'_, B>,
        caches: &mut LayerCaches<'_, B>,
    ) -> Tensor<B, 3>
    where
        B: DeviceBackend,
    {
        let (spec, blocks) = (self.spec(), self.blocks());
        let branches = self.branches(x.clone(), context);
        if let Some(cache) = caches.empty() {
            let compressed = self.compress(branches.compressed.clone(), context.documents);
            let of_prompt = BlockCache::of_prompt(&branches, compressed.clone(), spec, blocks);
            *cache = LayerCache::Blocks(of_prompt);
            let o = self.attend(branches, compressed, context.documents, context.policy);
            return self.gate(x, o);
        }
        let block = |tail, documents: &Documents<B>| self.compress(tail, documents);
        let mut parts = [const { Vec::new() }; NUM_NSA_BRANCHES];
        caches.each(x.dims()[0], |cached| {
            let LayerCache::Blocks(cache) = cached.cache else {
                panic!("an NSA layer decodes after a prompt");
            };
            let of_rows = branches.part(0, cached.rows);
            let mut tokens = [const { Vec::new() }; NUM_NSA_BRANCHES];
            // One at a time: each may end a block, which the next ones compare.
            for token in 0..x.dims()[1] {
                let o = cache.attend(&of_rows.part(1, [token, 1]), spec, blocks, &block, cached.scratch);
                tokens.iter_mut().zip(o).for_each(|(tokens, o)| tokens.push(o));
            }
            let o = tokens.map(|o| Tensor::cat(o, 1));
            parts.iter_mut().zip(o).for_each(|(parts, o)| parts.push(o));
        });
        self.gate(x, parts.map(|parts| Tensor::cat(parts, 0)))
    }

    /// The layer as a step of one token takes it.
    pub(super) fn for_token_step(&self) -> TokenAttention<B> {
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
        TokenAttention {
            extra: TokenExtra::Branches(branches),
            ..self.qkv.for_token_step(&self.o_proj, self.spec())
        }
    }

    /// See [`Attention::weights`](super::Attention::weights).
    pub(super) fn weights(&self, x: Tensor<B, 3>, context: &LayerContext<'_, B>) -> Tensor<B, 3> {
        let branches = self.branches(x.clone(), context);
        let compressed = self.compress(branches.compressed.clone(), context.documents);
        let (kv_heads, blocks) = (self.spec().num_kv_heads, self.blocks());
        let [_, rows, head_dim] = compressed.dims();
        let keys = compressed.narrow(0, 0, 1);
        by_key(&branches.window, |one_hot| {
            let [_, seq_len, _] = one_hot.dims();
            // A block's value is the mean of its tokens' values; a slot past the last block is never read.
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
            self.gated(
                x.clone(),
                self.attend(branches, compressed, context.documents, context.policy),
            )
        })
    }

    fn attend_compressing(
        &self,
        branches: Branches<B>,
        documents: &Documents<B>,
        policy: KernelPolicy,
    ) -> [Tensor<B, 4>; NUM_NSA_BRANCHES] {
        let compressed = self.compress(branches.compressed.clone(), documents);
        self.attend(branches, compressed, documents, policy)
    }

    /// The outputs of the three branches.
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

    /// The gated sum and its projection.
    fn gate(&self, x: Tensor<B, 3>, branches: [Tensor<B, 4>; NUM_NSA_BRANCHES]) -> Tensor<B, 3> {
        self.o_proj.forward(self.gated(x, branches).flatten(2, 3))
    }

    /// The gated sum, `[batch, seq_len, num_heads, head_dim]`.
    fn gated(&self, x: Tensor<B, 3>, branches: [Tensor<B, 4>; NUM_NSA_BRANCHES]) -> Tensor<B, 4> {
        sieve_ops::nsa_gates(branches, self.gate_proj.forward(x), self.gate_bias.val())
    }

    fn branches(&self, x: Tensor<B, 3>, context: &LayerContext<'_, B>) -> Branches<B> {
        let raw = self.qkv.project(x.clone());
        let with = |kv_proj: &Option<Linear<B>>| match kv_proj {
            Some(kv_proj) => self.with_kv(raw.clone(), kv_proj.forward(x.clone())),
            None => raw.clone(),
        };
        let rotated = |raw| self.qkv.norm_rope(raw, context);
        let window = rotated(raw.clone());
        let selected = match &self.select_kv_proj {
            Some(_) => rotated(with(&self.select_kv_proj)),
            None => window.clone(),
        };
        let compressed = match (self.nsa.compress, &self.compress_kv_proj) {
            (NsaCompression::Mean, None) => window.clone(),
            (NsaCompression::Mean, Some(_)) => rotated(with(&self.compress_kv_proj)),
            (NsaCompression::Mlp, _) => self.qkv.norm(with(&self.compress_kv_proj), context),
        };
        Branches {
            compressed,
            selected,
            window,
        }
    }

    /// The packed tensor with other keys and values, `kv` `[batch, seq_len, 2 * num_kv_heads * head_dim]`.
    fn with_kv(&self, raw: Tensor<B, 4>, kv: Tensor<B, 3>) -> Tensor<B, 4> {
        let [batch, seq_len, heads, head_dim] = raw.dims();
        let AttentionSpec {
            num_heads,
            num_kv_heads,
            ..
        } = self.spec();
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
