//! The backends that Sieve's ops run on, and the one table of what a device computes.
//!
//! A row of the table is a method of [`DeviceBackend`]; the CPU computes it in `FAMILY::cpu` and CUDA in
//! `FAMILY::cuda`, under the same name. A device without a kernel for a call runs the op's `reference`, which is
//! counted. Autodiff is not part of the table: the function that users call adds one node to the graph
//! ([`SieveBackend::node`]), whose backward pass calls the device again.
use crate::tensors::{Float, Ints};
use crate::{
    AdamWTensors, AttentionCall, AttentionOutput, AttentionSpec, BackwardPass, ChoiceCall, Cuda, DmaCache, DmaCall,
    DmaScoresCall, DmaSelection, DmaToken, DocumentBounds, Fp8Kept, IndexGradientCall, KeyCache, MlaCall, MlaPackCall,
    NsaCall, NsaCompressed, NsaSelected, QkNormRopeCall, RankGroup, Recency, RmsNormCall, RopeCall, SendRecv, Snapshot,
    ToQuantise, TokenStep,
};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn_flex::Flex;
use sieve_core::{AdamWStep, BlockSelection, DmaBias, DmaWindow, HeavyKeys, KeepOLow, KeyMask, ProbeCorrection};
use sieve_kernels::Product;
use std::fmt::Debug;
use std::ops::Range;

/// A Burn backend that Sieve's ops run on: a device, or autodiff over one.
pub trait SieveBackend: Backend {
    /// The device below the graph; a device is its own.
    type Inner: DeviceBackend<
            Device = Self::Device,
            IntTensorPrimitive = Self::IntTensorPrimitive,
            BoolTensorPrimitive = Self::BoolTensorPrimitive,
        >;
    /// Whether ops enter nodes for a backward pass.
    const HAS_GRAPH: bool;

    /// A tensor's value, without its place in the graph.
    fn value(x: Float<Self>) -> Float<Self::Inner>;
    /// A value as a tensor without gradient.
    fn constant(value: Float<Self::Inner>) -> Float<Self>;
    /// Whether this tensor needs a gradient.
    fn is_tracked(x: &Float<Self>) -> bool;
    /// An op's output as a tensor: in a graph, a function of `parents`, whose gradients `backward` computes from the
    /// output's. A device drops `backward`.
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
            /// Tensors that the layers of a decoding step share and that are reused by the next step. The owner of the
            /// caches owns them too.
            type DecodeScratch: Clone + Debug + Default + Send;
            /// A captured decoding step for the next token of the same caches, where the device supports it. The owner
            /// of the caches owns it too and drops it before any other pass writes to them; a clone is empty.
            type StepGraph: Clone + Debug + Default + Send;

            $($($(#[doc = $doc])+ fn $op($($arg: $type),+) -> $result;)+)+
        }

        impl $trait for Flex {
            type DecodeScratch = ();
            type StepGraph = ();

            $($(fn $op($($arg: $type),+) -> $result {
                crate::$family::cpu::$op($($arg),+)
            })+)+
        }

        impl $trait for Cuda {
            type DecodeScratch = crate::decode::cuda::CudaDecodeScratch;
            type StepGraph = crate::decode::cuda::CudaStepGraph;

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
        /// See [`crate::linear`].
        fn linear(x: Float<Self>, weight: Float<Self>) -> Float<Self>;
        /// See [`crate::linear_add`]; its gradients are those of [`crate::linear`] and, for the residual, dy itself.
        fn linear_add(x: Float<Self>, weight: Float<Self>, residual: Float<Self>) -> Float<Self>;
        /// `dx` of [`crate::linear`].
        fn linear_input_gradient(weight: Float<Self>, dy: Float<Self>) -> Float<Self>;
        /// `dweight` of [`crate::linear`], added to `sum` where there is one, which may be changed in place.
        fn linear_weight_gradient(x: Float<Self>, dy: Float<Self>, sum: Option<Float<Self>>) -> Float<Self>;
        /// `a b` of two matrices of one type, or with `([alpha, beta], c)` `alpha a b + beta c` of that type; the
        /// kernel rounds once. It has no gradient.
        fn gemm(
            kind: Product,
            x: Float<Self>,
            w: Float<Self>,
            sum: Option<([f64; 2], Float<Self>)>,
        ) -> Float<Self>;
    }

    fp8 {
        /// `x wᵀ`, and the residual where there is one, of x and w rounded to e4m3; what the gradients need beside it.
        fn fp8_linear(
            x: ToQuantise<Self>,
            weight: Float<Self>,
            residual: Option<Float<Self>>,
        ) -> (Float<Self>, Fp8Kept<Self>);
        /// `[dx, dweight]` from dy rounded to e5m2 and the rounded operands of the forward pass (straight-through:
        /// rounding has gradient 1). dweight is added to `sum` if given, possibly in place.
        fn fp8_linear_backward(kept: Fp8Kept<Self>, dy: ToQuantise<Self>, sum: Option<Float<Self>>) -> [Float<Self>; 2];
        /// [`crate::swiglu`], to be rounded.
        fn fp8_swiglu(gate_up: Float<Self>) -> ToQuantise<Self>;
        /// Its gradient, to be rounded.
        fn fp8_swiglu_backward(gate_up: Float<Self>, dy: Float<Self>) -> ToQuantise<Self>;
    }

    embedding {
        /// See [`crate::embedding`].
        fn embedding(weight: Float<Self>, ids: Ints<Self>) -> Float<Self>;
        /// `dweight` of [`crate::embedding`], `[vocab_size, d_model]`.
        fn embedding_backward(dy: Float<Self>, ids: Ints<Self>, vocab_size: usize) -> Float<Self>;
    }

    norm {
        /// See [`crate::rms_norm`].
        fn rms_norm(call: RmsNormCall<Self>) -> Float<Self>;
        /// `[dx, dweight]` of [`crate::rms_norm`]; `d_residual`, the gradient that reaches x past the norm, is added to
        /// dx.
        fn rms_norm_backward(
            call: RmsNormCall<Self>,
            dy: Float<Self>,
            d_residual: Option<Float<Self>>,
        ) -> [Float<Self>; 2];
        /// `[dx, dweight, y]`: as [`rms_norm_backward`](Self::rms_norm_backward), and the norm's output once more.
        fn rms_norm_backward_with_output(
            call: RmsNormCall<Self>,
            dy: Float<Self>,
            d_residual: Float<Self>,
        ) -> [Float<Self>; 3];
    }

    rope {
        /// See [`crate::qk_norm_rope`].
        fn qk_norm_rope(qkv: Float<Self>, call: QkNormRopeCall<Self>) -> Float<Self>;
        /// `[dqkv, dq_weight, dk_weight]` of [`crate::qk_norm_rope`].
        fn qk_norm_rope_backward(qkv: Float<Self>, call: QkNormRopeCall<Self>, dy: Float<Self>) -> [Float<Self>; 3];
        /// See [`crate::rope`]; its gradient is the rotation by the negative angles.
        fn rope(qkv: Float<Self>, call: RopeCall<Self>) -> Float<Self>;
    }

    swiglu {
        /// See [`crate::swiglu`].
        fn swiglu(gate_up: Float<Self>) -> Float<Self>;
        /// Gradient of [`crate::swiglu`].
        fn swiglu_backward(gate_up: Float<Self>, dy: Float<Self>) -> Float<Self>;
        /// `[dgate_up, y]`: gradient of [`crate::swiglu`], and its output once more.
        fn swiglu_backward_with_output(gate_up: Float<Self>, dy: Float<Self>) -> [Float<Self>; 2];
    }

    attention {
        /// See [`crate::attention`].
        fn attention(qkv: Float<Self>, call: &AttentionCall<Self>) -> AttentionOutput<Self>;
        /// `dqkv` of [`crate::attention`].
        fn attention_backward(
            qkv: Float<Self>,
            call: &AttentionCall<Self>,
            output: AttentionOutput<Self>,
            d_o: Float<Self>,
        ) -> Float<Self>;
    }

    dma {
        /// DMA's scores `z[b, g, j] = A[g] * softplus(concat(v_j) . W_dt[:, g])`, f32 `[batch, num_kv_heads, seq_len]`.
        fn dma_scores(call: &DmaScoresCall<Self>) -> Float<Self>;
        /// What ranks the keys: the scores plus what recency adds, rounded as [`dma_rank`](crate::dma_rank) does.
        fn dma_ranks(call: &DmaScoresCall<Self>, recency: Option<Recency<Self>>) -> Float<Self>;
        /// Adds the path through the scores to `dqkv`; returns `[dqkv, dw_dt, da]`.
        fn dma_scores_backward(call: &DmaScoresCall<Self>, dz: Float<Self>, dqkv: Float<Self>) -> [Float<Self>; 3];
        /// See [`crate::dma_select`].
        fn dma_select(rank: Float<Self>, documents: &DocumentBounds<Self>, window: DmaWindow) -> DmaSelection<Self>;
        /// Attention over the kept keys with an additive bias per key. A kernel that supports it also returns the
        /// output's low bits for the rows that `o_low` names.
        fn dma_attention(call: &DmaCall<Self>, o_low: KeepOLow) -> AttentionOutput<Self>;
        /// `[dqkv, ddelta]` of [`dma_attention`](Self::dma_attention).
        fn dma_attention_backward(
            call: &DmaCall<Self>,
            output: AttentionOutput<Self>,
            d_o: Float<Self>,
        ) -> [Float<Self>; 2];
    }

    nsa {
        /// See [`crate::nsa_blocks`]; positions of keys, then of values.
        fn nsa_blocks(qkv: Float<Self>, positions: [Float<Self>; 2], call: &NsaCall<Self>) -> Float<Self>;
        /// `[dqkv, dk_positions, dv_positions]` of [`nsa_blocks`](Self::nsa_blocks); `dims` are qkv's.
        fn nsa_blocks_backward(dims: [usize; 4], call: &NsaCall<Self>, dy: Float<Self>) -> [Float<Self>; 3];
        /// See [`crate::nsa_mean_pool`].
        fn nsa_mean_pool(qkv: Float<Self>, call: &NsaCall<Self>) -> Float<Self>;
        /// `dqkv` of [`nsa_mean_pool`](Self::nsa_mean_pool); `dims` are qkv's.
        fn nsa_mean_pool_backward(dims: [usize; 4], call: &NsaCall<Self>, dy: Float<Self>) -> Float<Self>;
        /// See [`crate::nsa_compressed_attention`].
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
        /// See [`crate::nsa_selected_attention`].
        fn nsa_selected_attention(
            qkv: Float<Self>,
            block_indices: Ints<Self>,
            call: &NsaCall<Self>,
        ) -> NsaSelected<Self>;
        /// `dqkv` of [`nsa_selected_attention`](Self::nsa_selected_attention).
        fn nsa_selected_attention_backward(
            qkv: Float<Self>,
            block_indices: Ints<Self>,
            call: &NsaCall<Self>,
            selected: NsaSelected<Self>,
            d_o: Float<Self>,
        ) -> Float<Self>;
        /// See [`crate::nsa_gates`].
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
        /// The blocks that each query chooses by its pooled keys, `pooled` as
        /// [`nsa_mean_pool`](Self::nsa_mean_pool) makes them: `[batch, seq_len, choosers, num_selected_blocks]`.
        fn choose_key_blocks(qkv: Float<Self>, pooled: Float<Self>, call: &ChoiceCall<Self>) -> Ints<Self>;
        /// The gradient of an indexer's packed tensor over chosen blocks (see [`crate::indexed_attention`]), by one
        /// fused kernel; `None` where the device has none, and the gradient is computed as attention with the indexer's
        /// keys as values.
        fn index_gradient(
            packed: [Float<Self>; 2],
            chosen: Ints<Self>,
            call: &IndexGradientCall<'_, Self>,
        ) -> Option<Float<Self>>;
    }

    mla {
        /// See [`crate::mla_pack`]; inputs are q, kv, k_rope.
        fn mla_pack(inputs: [Float<Self>; 3], call: MlaPackCall<Self>) -> (Float<Self>, Option<[Float<Self>; 2]>);
        /// Gradients of the inputs of [`mla_pack`](Self::mla_pack), and of its norms' weights. `normed` are the inputs
        /// of a call with norms.
        fn mla_pack_backward(
            call: MlaPackCall<Self>,
            normed: Option<[Float<Self>; 3]>,
            dy: Float<Self>,
        ) -> ([Float<Self>; 3], Option<[Float<Self>; 2]>);
        /// See [`crate::mla_attention`].
        fn mla_attention(packed: Float<Self>, call: &MlaCall<Self>) -> AttentionOutput<Self>;
        /// Gradient of [`mla_attention`](Self::mla_attention).
        fn mla_attention_backward(
            packed: Float<Self>,
            call: &MlaCall<Self>,
            output: AttentionOutput<Self>,
            d_o: Float<Self>,
        ) -> Float<Self>;
    }

    decode {
        /// See [`crate::token_step`].
        fn token_step(step: TokenStep<'_, Self>, graph: &mut Self::StepGraph) -> Option<Float<Self>>;
        /// See [`crate::repeat_token_step`].
        fn repeat_token_step(graph: &mut Self::StepGraph, ids: Ints<Self>, position: usize) -> Option<Float<Self>>;
        /// See [`crate::likeliest`]; ids `[rows, 1]`, -1 for none.
        fn likeliest(logits: Float<Self>, num_tokens: usize) -> Ints<Self>;
        /// See [`crate::attention_decode`].
        fn attention_decode(
            q: Float<Self>,
            keys: &KeyCache<Self>,
            delta: Option<Float<Self>>,
            softmax_scale: f64,
            scratch: &mut Self::DecodeScratch,
        ) -> Float<Self>;
        /// See [`crate::cached_attention`]; the cache has room for the token.
        fn cached_attention(
            cache: &mut KeyCache<Self>,
            qkv: Float<Self>,
            spec: AttentionSpec,
            scratch: &mut Self::DecodeScratch,
        ) -> Float<Self>;
        /// See [`crate::mla_decode`].
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
        /// See [`crate::has_sparse_attention`].
        fn has_sparse_attention(qkv: &Float<Self>) -> bool;
        /// See [`crate::sparse_attention`]. Returns o and the log-sum-exp.
        fn sparse_attention(
            qkv: Float<Self>,
            mask: KeyMask<Ints<Self>>,
            softmax_scale: f64,
        ) -> Result<[Float<Self>; 2], String>;
        /// See [`crate::select_blocks`].
        fn select_blocks(
            qkv: Float<Self>,
            selection: &BlockSelection,
            bounds: Option<Float<Self>>,
        ) -> Result<KeyMask<Ints<Self>>, String>;
        /// See [`crate::correct_by_probes`].
        fn correct_by_probes(
            qkv: Float<Self>,
            o: Float<Self>,
            correction: ProbeCorrection,
            dense_rows: Range<usize>,
            softmax_scale: f64,
        ) -> Result<Float<Self>, String>;
        /// See [`crate::keep_heavy_keys`].
        fn keep_heavy_keys(qkv: Float<Self>, heavy: &HeavyKeys) -> Result<DmaCache<Self>, String>;
        /// See [`crate::heavy_decode`].
        fn heavy_decode(
            cache: &mut DmaCache<Self>,
            qkv: Float<Self>,
            position: usize,
            softmax_scale: f64,
            scratch: &mut Self::DecodeScratch,
        ) -> Result<Float<Self>, String>;
    }

    loss {
        /// Per-token cross-entropy in nats, f32 `[tokens]`, zero where the label is [`crate::IGNORE_LABEL`]; without
        /// gradient.
        fn token_losses(h: Float<Self>, weight: Float<Self>, labels: Ints<Self>) -> Float<Self>;
        /// See [`crate::linear_cross_entropy`].
        fn linear_cross_entropy(h: Float<Self>, weight: Float<Self>, labels: Ints<Self>) -> Float<Self>;
        /// Summed cross-entropy and its gradients in one pass: `[loss [1], dh, dweight]`.
        fn linear_cross_entropy_with_gradients(
            h: Float<Self>,
            weight: Float<Self>,
            labels: Ints<Self>,
        ) -> [Float<Self>; 3];
        /// `x` times a `[1]` that lies on the device; x may be changed in place where nobody else holds it.
        fn scale(x: Float<Self>, factor: Float<Self>) -> Float<Self>;
    }

    optimizer {
        /// One AdamW update; `grad_scale` is `[1]` on the device. Where it is zero or not finite nothing changes: this
        /// is how a step with NaN or infinite gradients is skipped.
        fn adamw(
            tensors: AdamWTensors<Self>,
            grad: Float<Self>,
            grad_scale: Float<Self>,
            step: AdamWStep,
        ) -> AdamWTensors<Self>;
        /// `(leaf, rest)` of f32 master weights: the bf16 weights that a model computes with, and the low bits that
        /// [`adamw`](Self::adamw) needs to reconstruct the masters.
        fn split_master(master: Float<Self>) -> (Float<Self>, Float<Self>);
        /// The inverse of [`split_master`](Self::split_master), exact.
        fn join_master(leaf: Float<Self>, rest: Float<Self>) -> Float<Self>;
        /// Sum of squares in a fixed order, `[1]`.
        fn sum_of_squares(x: Float<Self>) -> Float<Self>;
        /// Euclidean norm over all `tensors` together, in their order, `[1]`; at least one tensor.
        fn global_norm(tensors: Vec<Float<Self>>) -> Float<Self>;
        /// The values of a tensor as they are now, to be read on any thread.
        fn snapshot(tensor: Float<Self>) -> Snapshot;
        /// Bytes that snapshots may hold on a device beside everything else; 0 where they hold none there.
        fn snapshot_room(device: &Self::Device) -> u64;
    }

    context_parallel {
        /// The keys that DMA keeps at the last query of each row, by position: `[batch, num_kv_heads, slots]`, the
        /// first ones -1 where there are fewer. `rank` is `[batch, num_kv_heads, seq_len]`.
        fn dma_last_kept(
            rank: Float<Self>,
            documents: &DocumentBounds<Self>,
            window: DmaWindow,
            slots: usize,
        ) -> Ints<Self>;
        /// K and V of the kept keys, `[batch, slots, 2 * num_kv_heads, head_dim]`, gathered from the last heads of
        /// `[batch, seq_len, heads, head_dim]`, and their ranks, `[batch, num_kv_heads, slots]`; zeros in empty slots.
        fn dma_border_keys(
            packed: Float<Self>,
            rank: Float<Self>,
            kept: Ints<Self>,
            spec: AttentionSpec,
        ) -> [Float<Self>; 2];
        /// Adds the gradients of these results to those of the packed tensor and of the ranks.
        fn dma_border_keys_backward(
            sums: [Float<Self>; 2],
            kept: Ints<Self>,
            gradients: [Float<Self>; 2],
            spec: AttentionSpec,
        ) -> [Float<Self>; 2];
        /// Sends tensors to the ranks of other parts and returns the received ones, part by part. All ranks of a row
        /// call it in the same order.
        fn exchange(links: &dyn RankGroup, parcel: SendRecv<Self>) -> Vec<Float<Self>>;
        /// Sends each part's rank one slice `[1, batch, len, heads, width]` of `x`, and returns the slices received
        /// from all ranks, part by part. All ranks of a row call it in the same order.
        fn all_to_all(links: &dyn RankGroup, x: Float<Self>) -> Float<Self>;
    }
}
