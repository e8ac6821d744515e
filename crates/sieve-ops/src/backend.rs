//! The backends that Sieve's ops run on, and the one table of what a device computes.
//!
//! A row of the table is a method of [`DeviceBackend`]; the CPU computes it in `FAMILY::cpu` and CUDA in
//! `FAMILY::cuda`, under the same name. A device without a kernel for a call runs the op's `reference` and counts it.
//! Autodiff is not part of the table: a public op adds one node to the graph ([`SieveBackend::node`]), whose backward
//! pass calls the device again.
//!
//! No method has a default body. An op computes below the graph, on `SieveBackend::Inner`. Decoding ops have no
//! gradient and refuse tensors that need one.
use crate::tensors::{Float, Ints, primitive, tensor};
use crate::{
    AdamWTensors, AttentionCall, AttentionOutput, AttentionSpec, ChoiceCall, DmaCache, DmaCall, DmaOrder,
    DmaScoresCall, DmaSelection, DmaToken, DocumentBounds, Fp8Kept, IndexGradientCall, KeyCache, MlaCall, MlaPackCall,
    NsaCall, NsaCompressed, NsaSelected, QkNormRopeCall, RankGroup, Recency, RmsNormCall, RopeCall, SelectorCache,
    SendRecv, Snapshot, ToQuantise, TokenStep, TokensBefore,
};
use burn::tensor::Tensor;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn_flex::Flex;
use sieve_core::{
    AdamWStep, BlockSelection, ChosenKeys, DmaBias, DmaWindow, GemmKind, HeavyKeys, KeepOLow, KeyMask, ProbeCorrection,
    TokenKeys,
};
use std::fmt::Debug;
use std::ops::Range;

/// A Burn backend that Sieve's ops run on: a device, or autodiff over one.
pub trait SieveBackend: Backend {
    /// The device below the graph; for a device, itself.
    type Inner: DeviceBackend<
            Device = Self::Device,
            IntTensorPrimitive = Self::IntTensorPrimitive,
            BoolTensorPrimitive = Self::BoolTensorPrimitive,
        >;
    /// Whether ops add nodes to a graph for the backward pass.
    const HAS_GRAPH: bool;

    /// A tensor's value, without its place in the graph.
    fn value(x: Float<Self>) -> Float<Self::Inner>;
    /// A value as a tensor without gradient.
    fn constant(value: Float<Self::Inner>) -> Float<Self>;
    /// Whether this tensor needs a gradient.
    fn is_tracked(x: &Float<Self>) -> bool;
    /// The tensor of an op's output. In a graph it depends on `parents`, whose gradients `backward` computes from the
    /// output's gradient. A device drops `backward`.
    fn node<F: BackwardPass<Self::Inner, N>, const N: usize>(
        parents: [&Float<Self>; N],
        output: Float<Self::Inner>,
        backward: F,
    ) -> Float<Self>;
}

impl<D: DeviceBackend> SieveBackend for D {
    type Inner = D;
    const HAS_GRAPH: bool = false;

    fn value(x: Float<D>) -> Float<D> {
        x
    }

    fn constant(value: Float<D>) -> Float<D> {
        value
    }

    fn is_tracked(_x: &Float<D>) -> bool {
        false
    }

    fn node<F: BackwardPass<D, N>, const N: usize>(_: [&Float<D>; N], output: Float<D>, _: F) -> Float<D> {
        output
    }
}

/// The gradients of an op's `N` differentiable inputs from the gradient of its output.
pub trait BackwardPass<B: Backend, const N: usize>: FnOnce(Float<B>) -> [Float<B>; N] + Clone + Send + 'static {}

impl<B: Backend, F, const N: usize> BackwardPass<B, N> for F where
    F: FnOnce(Float<B>) -> [Float<B>; N] + Clone + Send + 'static
{
}

/// A tensor's value on the device, without its place in the graph.
pub(crate) fn value<B: SieveBackend, const D: usize>(x: Tensor<B, D>) -> Tensor<B::Inner, D> {
    tensor(B::value(primitive(x)))
}

/// What a training loop needs of its backend: Sieve's ops with gradients, over a device.
pub trait TrainBackend:
    SieveBackend<Inner = <Self as AutodiffBackend>::InnerBackend> + AutodiffBackend<InnerBackend: DeviceBackend>
{
}

impl<B> TrainBackend for B where
    B: SieveBackend<Inner = <B as AutodiffBackend>::InnerBackend> + AutodiffBackend<InnerBackend: DeviceBackend>
{
}

/// The trait of all ops, and its two devices: a row `fn OP(..)` of `FAMILY` is `FAMILY::cpu::OP` and
/// `FAMILY::cuda::OP`.
macro_rules! device_ops {
    ($(#[doc = $about:literal])+ $trait:ident:
     $($family:ident {
         $($(#[doc = $doc:literal])+ fn $op:ident($($arg:ident: $type:ty),+ $(,)?) -> $result:ty;)+
     })+) => {
        $(#[doc = $about])+
        pub trait $trait: SieveBackend<Inner = Self> {
            /// Buffers that the layers of a decoding step share and that the next step reuses. They belong to the owner
            /// of the caches.
            type DecodeScratch: Clone + Debug + Default + Send;
            /// A captured decoding step for the next token of the same caches, where the device supports it. It belongs
            /// to the owner of the caches, who drops it before any other pass writes to them; a clone is empty.
            type StepGraph: Clone + Debug + Default + Send;
            /// Whether the host computes the ops, where reading a tensor's numbers costs a copy in memory alone. New
            /// tokens are then computed as in a pass over the whole text, to the bit, and layer by layer: there is no
            /// [`crate::token_step`].
            const ON_HOST: bool;

            $($($(#[doc = $doc])+ fn $op($($arg: $type),+) -> $result;)+)+
        }

        impl $trait for Flex {
            type DecodeScratch = ();
            type StepGraph = ();
            const ON_HOST: bool = true;

            $($(fn $op($($arg: $type),+) -> $result {
                crate::$family::cpu::$op($($arg),+)
            })+)+
        }

        #[cfg(feature = "cuda")]
        impl $trait for crate::Cuda {
            type DecodeScratch = crate::decode::cuda::CudaDecodeScratch;
            type StepGraph = crate::decode::cuda::CudaStepGraph;
            const ON_HOST: bool = false;

            $($(fn $op($($arg: $type),+) -> $result {
                crate::$family::cuda::$op($($arg),+)
            })+)+
        }
    };
}

device_ops! {
    /// A backend without autodiff that computes every op and every op's gradient: the CPU's and CUDA's. No method has a
    /// default body.
    ///
    /// Burn's own backend trait has a `linear`, an `embedding` and an `attention` too: write
    /// `<B as DeviceBackend>::linear`.
    DeviceBackend:

    linear {
        /// The op [`crate::linear`]; with a residual, [`crate::linear_add`].
        fn linear(x: Float<Self>, weight: Float<Self>, residual: Option<Float<Self>>) -> Float<Self>;
        /// The op [`crate::linear_in_order`].
        fn linear_in_order(x: Float<Self>, weight: Float<Self>) -> Float<Self>;
        /// Gradient `dx` of [`crate::linear`].
        fn linear_input_gradient(weight: Float<Self>, dy: Float<Self>) -> Float<Self>;
        /// `dweight` of [`crate::linear`], added to `sum` if there is one; `sum` may be changed in place.
        fn linear_weight_gradient(x: Float<Self>, dy: Float<Self>, sum: Option<Float<Self>>) -> Float<Self>;
        /// `a b`, or with a `sum` of `([alpha, beta], c)`, `alpha a b + beta c`; `kind` says which operand is
        /// transposed. All matrices have one dtype, and the kernel rounds once. It has no gradient.
        fn gemm(
            kind: GemmKind,
            x: Float<Self>,
            w: Float<Self>,
            sum: Option<([f64; 2], Float<Self>)>,
        ) -> Float<Self>;
    }

    fp8 {
        /// `x wᵀ` with x and w rounded to e4m3, plus the residual if there is one; and what the backward pass needs.
        fn fp8_linear(
            x: ToQuantise<Self>,
            weight: Float<Self>,
            residual: Option<Float<Self>>,
        ) -> (Float<Self>, Fp8Kept<Self>);
        /// `[dx, dweight]` from dy rounded to e5m2 and the rounded operands of the forward pass; the gradient of
        /// rounding is taken to be 1 (straight-through). dweight is added to `sum` if there is one, possibly in place.
        fn fp8_linear_backward(kept: Fp8Kept<Self>, dy: ToQuantise<Self>, sum: Option<Float<Self>>) -> [Float<Self>; 2];
        /// [`crate::swiglu`], its output prepared for a following fp8 GEMM.
        fn fp8_swiglu(gate_up: Float<Self>) -> ToQuantise<Self>;
        /// Gradient of [`crate::swiglu`] for a following fp8 GEMM.
        fn fp8_swiglu_backward(gate_up: Float<Self>, dy: Float<Self>) -> ToQuantise<Self>;
    }

    embedding {
        /// The op [`crate::embedding`].
        fn embedding(weight: Float<Self>, ids: Ints<Self>) -> Float<Self>;
        /// Gradient `dweight` of [`crate::embedding`], `[vocab_size, d_model]`.
        fn embedding_backward(dy: Float<Self>, ids: Ints<Self>, vocab_size: usize) -> Float<Self>;
    }

    norm {
        /// The op [`crate::rms_norm`].
        fn rms_norm(call: RmsNormCall<Self>) -> Float<Self>;
        /// `[dx, dweight]` of [`crate::rms_norm`]. `d_residual`, the gradient of the residual connection around the
        /// norm, is added to dx.
        fn rms_norm_backward(
            call: RmsNormCall<Self>,
            dy: Float<Self>,
            d_residual: Option<Float<Self>>,
        ) -> [Float<Self>; 2];
        /// `[dx, dweight, y]`: as [`rms_norm_backward`](Self::rms_norm_backward), and y, the recomputed output of the
        /// norm.
        fn rms_norm_backward_with_output(
            call: RmsNormCall<Self>,
            dy: Float<Self>,
            d_residual: Float<Self>,
        ) -> [Float<Self>; 3];
    }

    rope {
        /// The op [`crate::qk_norm_rope`].
        fn qk_norm_rope(qkv: Float<Self>, call: QkNormRopeCall<Self>) -> Float<Self>;
        /// Gradients `[dqkv, dq_weight, dk_weight]` of [`crate::qk_norm_rope`].
        fn qk_norm_rope_backward(qkv: Float<Self>, call: QkNormRopeCall<Self>, dy: Float<Self>) -> [Float<Self>; 3];
        /// The op [`crate::rope`]; its gradient is the rotation by the negative angles.
        fn rope(qkv: Float<Self>, call: RopeCall<Self>) -> Float<Self>;
    }

    swiglu {
        /// The op [`crate::swiglu`].
        fn swiglu(gate_up: Float<Self>) -> Float<Self>;
        /// Gradient of [`crate::swiglu`].
        fn swiglu_backward(gate_up: Float<Self>, dy: Float<Self>) -> Float<Self>;
        /// `[dgate_up, y]`: the gradient of [`crate::swiglu`], and y, its recomputed output.
        fn swiglu_backward_with_output(gate_up: Float<Self>, dy: Float<Self>) -> [Float<Self>; 2];
    }

    attention {
        /// The op [`crate::attention`].
        fn attention(qkv: Float<Self>, call: &AttentionCall<Self>) -> AttentionOutput<Self>;
        /// As [`attention`](Self::attention), of the tokens from `first` on in each row; the outputs of the others may
        /// hold anything.
        fn attention_of_last(qkv: Float<Self>, call: &AttentionCall<Self>, first: usize) -> AttentionOutput<Self>;
        /// Gradient `dqkv` of [`crate::attention`].
        fn attention_backward(
            qkv: Float<Self>,
            call: &AttentionCall<Self>,
            output: AttentionOutput<Self>,
            d_o: Float<Self>,
        ) -> Float<Self>;
        /// Output of dense or window attention with one more logit of each query head, `sinks` `[num_heads]`, in the
        /// softmax; see [`crate::attention_with_sinks`]. May change o in place.
        fn join_sinks(output: AttentionOutput<Self>, sinks: Float<Self>) -> AttentionOutput<Self>;
        /// Gradient of the sinks, `[num_heads]`, from the joined output and the gradient of its o.
        fn sinks_backward(output: &AttentionOutput<Self>, sinks: Float<Self>, d_o: Float<Self>) -> Float<Self>;
    }

    dma {
        /// DMA's scores `z[b, g, j] = A[g] * softplus(concat(v_j) . W_dt[:, g])`, f32 `[batch, num_kv_heads, seq_len]`.
        fn dma_scores(call: &DmaScoresCall<Self>) -> Float<Self>;
        /// The keys' ranks: scores plus recency, rounded as in [`dma_rank`](crate::dma_rank).
        fn dma_ranks(call: &DmaScoresCall<Self>, recency: Option<Recency<Self>>) -> Float<Self>;
        /// The backward pass of [`dma_scores`](Self::dma_scores): `[dqkv, dw_dt, da]`, where the gradient of the values
        /// is added to the `dqkv` that is passed in.
        fn dma_scores_backward(call: &DmaScoresCall<Self>, dz: Float<Self>, dqkv: Float<Self>) -> [Float<Self>; 3];
        /// The op [`crate::dma_select`], with the keys in `order` for kernels that read lists.
        fn dma_select(
            rank: Float<Self>,
            documents: &DocumentBounds<Self>,
            window: DmaWindow,
            order: DmaOrder<Self>,
        ) -> DmaSelection<Self>;
        /// Attention over the selected keys with an additive bias per key. Where `o_low` asks for it and the kernel
        /// supports it, the output includes [`AttentionOutput::o_low`].
        fn dma_attention(call: &DmaCall<Self>, o_low: KeepOLow) -> AttentionOutput<Self>;
        /// Gradients `[dqkv, ddelta]` of [`dma_attention`](Self::dma_attention).
        fn dma_attention_backward(
            call: &DmaCall<Self>,
            output: AttentionOutput<Self>,
            d_o: Float<Self>,
        ) -> [Float<Self>; 2];
    }

    nsa {
        /// The op [`crate::nsa_blocks`]; `positions` are the learned vectors of keys, then of values.
        fn nsa_blocks(qkv: Float<Self>, positions: [Float<Self>; 2], call: &NsaCall<Self>) -> Float<Self>;
        /// `[dqkv, dk_positions, dv_positions]` of [`nsa_blocks`](Self::nsa_blocks); `dims` are qkv's.
        fn nsa_blocks_backward(dims: [usize; 4], call: &NsaCall<Self>, dy: Float<Self>) -> [Float<Self>; 3];
        /// The op [`crate::nsa_mean_pool`].
        fn nsa_mean_pool(qkv: Float<Self>, call: &NsaCall<Self>) -> Float<Self>;
        /// Gradient `dqkv` of [`nsa_mean_pool`](Self::nsa_mean_pool); `dims` is the shape of qkv.
        fn nsa_mean_pool_backward(dims: [usize; 4], call: &NsaCall<Self>, dy: Float<Self>) -> Float<Self>;
        /// The op [`crate::nsa_compressed_attention`].
        fn nsa_compressed_attention(
            qkv: Float<Self>,
            compressed: Float<Self>,
            call: &NsaCall<Self>,
        ) -> NsaCompressed<Self>;
        /// `[dqkv, dcompressed]` of [`nsa_compressed_attention`](Self::nsa_compressed_attention); dqkv is zero for keys
        /// and values.
        fn nsa_compressed_attention_backward(
            qkv: Float<Self>,
            compressed: Float<Self>,
            call: &NsaCall<Self>,
            output: AttentionOutput<Self>,
            d_o: Float<Self>,
        ) -> [Float<Self>; 2];
        /// The op [`crate::nsa_selected_attention`].
        fn nsa_selected_attention(
            qkv: Float<Self>,
            block_indices: Ints<Self>,
            call: &NsaCall<Self>,
        ) -> NsaSelected<Self>;
        /// Gradient `dqkv` of [`nsa_selected_attention`](Self::nsa_selected_attention).
        fn nsa_selected_attention_backward(
            qkv: Float<Self>,
            block_indices: Ints<Self>,
            call: &NsaCall<Self>,
            selected: NsaSelected<Self>,
            d_o: Float<Self>,
        ) -> Float<Self>;
        /// The op [`crate::nsa_gates`].
        fn nsa_gates(branches: [Float<Self>; 3], logits: Float<Self>, bias: Float<Self>) -> Float<Self>;
        /// Gradients of the branches, the logits and the bias of [`nsa_gates`](Self::nsa_gates).
        fn nsa_gates_backward(
            branches: [Float<Self>; 3],
            logits: Float<Self>,
            bias: Float<Self>,
            d_o: Float<Self>,
        ) -> [Float<Self>; 5];
    }

    chosen {
        /// The blocks that each query chooses by the pooled keys, `[batch, seq_len, choosers, num_selected_blocks]`;
        /// `pooled` is the result of [`nsa_mean_pool`](Self::nsa_mean_pool).
        fn choose_key_blocks(qkv: Float<Self>, pooled: Float<Self>, call: &ChoiceCall<Self>) -> Ints<Self>;
        /// The blocks of [`crate::selected_attention`] as attention reads them, `[batch, seq_len, choosers, blocks]`:
        /// ascending, each once, then -1; blocks of more than 64 tokens in pieces of 64.
        fn selected_blocks(
            indices: Ints<Self>,
            counts: Option<Ints<Self>>,
            documents: &DocumentBounds<Self>,
            block: usize,
        ) -> Ints<Self>;
        /// The gradient of the indexer's packed tensor, the second of `packed`, by a fused kernel over the chosen
        /// blocks (see [`crate::indexed_attention`]). `None` where the device has no such kernel: the caller then
        /// computes the gradient as attention with the indexer's keys as values.
        fn index_gradient(
            packed: [Float<Self>; 2],
            chosen: Ints<Self>,
            call: &IndexGradientCall<'_, Self>,
        ) -> Option<Float<Self>>;
    }

    mla {
        /// The op [`crate::mla_pack`]; inputs are q, kv, k_rope.
        fn mla_pack(inputs: [Float<Self>; 3], call: MlaPackCall<Self>) -> (Float<Self>, Option<[Float<Self>; 2]>);
        /// Gradients of the inputs of [`mla_pack`](Self::mla_pack) and, with norms, of the norms' weights; then
        /// `normed` holds the inputs.
        fn mla_pack_backward(
            call: MlaPackCall<Self>,
            normed: Option<[Float<Self>; 3]>,
            dy: Float<Self>,
        ) -> ([Float<Self>; 3], Option<[Float<Self>; 2]>);
        /// The op [`crate::mla_attention`].
        fn mla_attention(packed: Float<Self>, call: &MlaCall<Self>) -> AttentionOutput<Self>;
        /// Gradient of the packed tensor of [`mla_attention`](Self::mla_attention).
        fn mla_attention_backward(
            packed: Float<Self>,
            call: &MlaCall<Self>,
            output: AttentionOutput<Self>,
            d_o: Float<Self>,
        ) -> Float<Self>;
    }

    decode {
        /// The op [`crate::token_step`].
        fn token_step(step: TokenStep<'_, Self>, graph: &mut Self::StepGraph) -> Option<Float<Self>>;
        /// The op [`crate::repeat_token_step`].
        fn repeat_token_step(
            graph: &mut Self::StepGraph, ids: Ints<Self>, before: TokensBefore<'_>
        ) -> Option<Float<Self>>;
        /// The op [`crate::draw`]; `draws` are i32 `[rows, 8]`, the words of each; token ids, `[rows, 1]`, -1 where a
        /// logit is NaN or infinite.
        fn draw(logits: Float<Self>, draws: Ints<Self>, num_tokens: usize) -> Ints<Self>;
        /// The op [`crate::draw`] where every row takes its likeliest token; token ids, `[rows, 1]`, -1 where a logit
        /// is NaN or infinite.
        fn likeliest(logits: Float<Self>, num_tokens: usize) -> Ints<Self>;
        /// The op [`crate::losses_of_logits`]; f32 losses, `[rows]`.
        fn losses_of_logits(logits: Float<Self>, labels: Ints<Self>) -> Float<Self>;
        /// The op [`crate::attention_decode`].
        fn attention_decode(
            q: Float<Self>,
            keys: &KeyCache<Self>,
            delta: Option<Float<Self>>,
            softmax_scale: f64,
            scratch: &mut Self::DecodeScratch,
        ) -> Float<Self>;
        /// See [`crate::cached_attention`]; the caller has made room for the token in the cache.
        fn cached_attention(
            cache: &mut KeyCache<Self>,
            qkv: Float<Self>,
            sinks: Option<Float<Self>>,
            spec: AttentionSpec,
            scratch: &mut Self::DecodeScratch,
        ) -> Float<Self>;
        /// The op [`crate::mla_decode`].
        fn mla_decode(
            q: Float<Self>,
            latents: Float<Self>,
            key_scale: Option<Float<Self>>,
            rank: usize,
            softmax_scale: f64,
        ) -> Float<Self>;
        /// One decoding step of DMA; see [`crate::dma_decode`].
        fn dma_decode(
            cache: &mut DmaCache<Self>,
            token: DmaToken<Self>,
            softmax_scale: f64,
            bias: DmaBias,
            scratch: &mut Self::DecodeScratch,
        ) -> Float<Self>;
    }

    sparse {
        /// The op [`crate::has_sparse_attention`].
        fn has_sparse_attention(qkv: &Float<Self>) -> bool;
        /// The op [`crate::sparse_attention`]; returns `[o, lse]`.
        fn sparse_attention(
            qkv: Float<Self>,
            mask: KeyMask<Ints<Self>>,
            softmax_scale: f64,
        ) -> Result<[Float<Self>; 2], String>;
        /// The op [`crate::select_blocks`].
        fn select_blocks(
            qkv: Float<Self>,
            selection: &BlockSelection,
        ) -> Result<ChosenKeys<Ints<Self>, Float<Self>>, String>;
        /// The op [`crate::correct_by_probes`].
        fn correct_by_probes(
            qkv: Float<Self>,
            o: Float<Self>,
            probe_o: Option<Float<Self>>,
            correction: ProbeCorrection,
            dense_rows: Range<usize>,
            softmax_scale: f64,
        ) -> Result<Float<Self>, String>;
        /// The op [`crate::keep_heavy_keys`]: the cache of a prompt's keys that got the most attention (H2O).
        fn keep_heavy_keys(
            qkv: Float<Self>,
            lse: Float<Self>,
            heavy: &HeavyKeys,
        ) -> Result<DmaCache<Self>, String>;
        /// The op [`crate::heavy_decode`]: a token over the keys that got the most attention so far (H2O).
        fn heavy_decode(
            cache: &mut DmaCache<Self>,
            qkv: Float<Self>,
            position: usize,
            softmax_scale: f64,
            scratch: &mut Self::DecodeScratch,
        ) -> Result<Float<Self>, String>;
        /// The op [`crate::selector_decode`], without joining the tokens' outputs.
        fn selector_decode(
            cache: &mut SelectorCache<Self>,
            qkv: Float<Self>,
            reads: &[TokenKeys],
            softmax_scale: f64,
            scratch: &mut Self::DecodeScratch,
        ) -> Result<Vec<Float<Self>>, String>;
    }

    loss {
        /// Per-token cross-entropy in nats, f32 `[tokens]`, zero where the label is [`crate::IGNORE_LABEL`]; without
        /// gradient.
        fn token_losses(h: Float<Self>, weight: Float<Self>, labels: Ints<Self>) -> Float<Self>;
        /// The op [`crate::linear_cross_entropy`].
        fn linear_cross_entropy(h: Float<Self>, weight: Float<Self>, labels: Ints<Self>) -> Float<Self>;
        /// Summed cross-entropy and its gradients in one pass: `[loss [1], dh, dweight]`.
        fn linear_cross_entropy_with_gradients(
            h: Float<Self>,
            weight: Float<Self>,
            labels: Ints<Self>,
        ) -> [Float<Self>; 3];
        /// `x` times `factor`, a `[1]` on the device; x may be changed in place if it has no other owner.
        fn scale(x: Float<Self>, factor: Float<Self>) -> Float<Self>;
    }

    optimizer {
        /// One AdamW update with the gradient times `grad_scale`, a `[1]` on the device. Nothing changes if
        /// `grad_scale` is 0 or not finite, which skips steps with NaN or infinite gradients.
        fn adamw(
            tensors: AdamWTensors<Self>,
            grad: Float<Self>,
            grad_scale: Float<Self>,
            step: AdamWStep,
        ) -> AdamWTensors<Self>;
        /// Splits f32 master weights into the bf16 weights that a model computes with (the leaf) and the bits that the
        /// leaf lacks (the rest); [`adamw`](Self::adamw) updates both.
        fn split_master(master: Float<Self>) -> (Float<Self>, Float<Self>);
        /// The exact inverse of [`split_master`](Self::split_master): f32 master weights.
        fn join_master(leaf: Float<Self>, rest: Float<Self>) -> Float<Self>;
        /// Sum of squares in a fixed order, `[1]`.
        fn sum_of_squares(x: Float<Self>) -> Float<Self>;
        /// Euclidean norm of all elements of `tensors`, summed in their order, `[1]`. Panics without a tensor.
        fn global_norm(tensors: Vec<Float<Self>>) -> Float<Self>;
        /// The current values of a tensor, readable later on any thread.
        fn snapshot(tensor: Float<Self>) -> Snapshot;
        /// Bytes of the device's own memory that are free; 0 on a CPU, whose snapshots are copies on the host.
        fn free_memory(device: &Self::Device) -> u64;
    }

    context_parallel {
        /// Positions of the keys that are still visible after the last query of each row, ascending,
        /// `[batch, num_kv_heads, slots]`; -1 in the first slots where there are fewer keys. `rank`, by
        /// which DMA orders keys, is `[batch, num_kv_heads, seq_len]`.
        fn dma_last_kept(
            rank: Float<Self>,
            documents: &DocumentBounds<Self>,
            window: DmaWindow,
            slots: usize,
        ) -> Ints<Self>;
        /// As [`dma_last_kept`](Self::dma_last_kept), from the first query that no longer sees each key, `expire`
        /// `[batch, num_kv_heads, seq_len]`.
        fn dma_kept_keys(expire: Ints<Self>, slots: usize) -> Ints<Self>;
        /// Gathers the halo keys at the positions `kept`: their K and V, `[batch, slots, 2 * num_kv_heads, head_dim]`,
        /// from the last heads of `packed`, `[batch, seq_len, heads, head_dim]`, and their DMA ranks, `[batch,
        /// num_kv_heads, slots]`; 0 in empty slots.
        fn dma_halo_keys(
            packed: Float<Self>,
            rank: Float<Self>,
            kept: Ints<Self>,
            spec: AttentionSpec,
        ) -> [Float<Self>; 2];
        /// Adds the gradients of the halo keys and of their DMA ranks (`halo_gradients`) to `totals`, the gradients of
        /// the packed tensor and of the ranks that [`dma_halo_keys`](Self::dma_halo_keys) gathered from.
        fn dma_halo_keys_backward(
            totals: [Float<Self>; 2],
            kept: Ints<Self>,
            halo_gradients: [Float<Self>; 2],
            spec: AttentionSpec,
        ) -> [Float<Self>; 2];
        /// Sends tensors to the processes of other parts of the row and returns the received tensors, part by part. All
        /// processes of a row make these calls in the same order.
        fn exchange(links: &dyn RankGroup, parcel: SendRecv<Self>) -> Vec<Float<Self>>;
        /// Sends slice p of `x`, `[parts, batch, len, heads, width]`, to the process of part p, and returns the slices
        /// received from all processes, shaped as `x`. All processes of a row make these calls in the same order.
        fn all_to_all(links: &dyn RankGroup, x: Float<Self>) -> Float<Self>;
    }
}
