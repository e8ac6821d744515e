//! The backend trait: every fused op, with the plain-Burn reference as its default body.
use crate::attention_layer::{AttentionLayerCall, AttentionLayerWeights};
use crate::decode::{DmaCache, DmaToken};
use crate::feed_forward::{FeedForwardWeights, Residual};
use crate::mla::MlaBackend;
use crate::nsa::NsaBackend;
use crate::reference;
use crate::snapshot::Snapshot;
use burn::backend::Autodiff;
use burn::tensor::FloatDType;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::ops::{FloatTensor, IntTensor};
use sieve_core::DmaBias;

/// Sizes and scale of one grouped-query attention call on a packed tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionSpec {
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Factor on `q·k`, usually `1/sqrt(head_dim)`.
    pub softmax_scale: f64,
    /// Keys a query may see at most, itself included (`i - window < j <= i`); `None` is dense causal.
    pub window_size: Option<usize>,
}

impl AttentionSpec {
    /// Heads of the packed tensor: queries, then keys, then values.
    pub fn packed_heads(&self) -> usize {
        self.num_heads + 2 * self.num_kv_heads
    }

    /// Query heads that share one KV head.
    pub fn group_size(&self) -> usize {
        self.num_heads / self.num_kv_heads
    }
}

/// Largest score that still enters the exponential: `exp(z)` overflows f32 at 88.7.
pub const DMA_SCORE_CLAMP: f64 = 60.0;

/// First position and one-past-last position of each token's document inside its row, both `[batch, seq_len]` ints.
///
/// A type alias of plain primitives, so that an autodiff backend and its inner backend share it.
pub type DocumentBounds<B> = [IntTensor<B>; 2];

/// Output of an attention forward pass.
#[derive(Clone, Debug)]
pub struct AttentionOutput<B: Backend> {
    /// `[batch, seq_len, num_heads, head_dim]`, dtype of the packed input.
    pub o: FloatTensor<B>,
    /// Natural logarithm of each row's softmax sum, f32 `[batch, num_heads, seq_len]`; `-inf` where a row sees nothing.
    pub lse: FloatTensor<B>,
    /// What rounding took from o, where the backend's backward pass makes use of it.
    pub o_rest: Option<FloatTensor<B>>,
}

/// What `dma_select` found: the exact mask, and what a backend derived from it for its kernels.
#[derive(Clone, Debug)]
pub struct DmaSelection<B: Backend> {
    /// First query that no longer sees the key, i32 `[batch, num_kv_heads, seq_len]`:
    /// `active(i, j) <=> j <= i < expire[j]`.
    pub expire: IntTensor<B>,
    /// Key lists of the backend's kernels, shared by forward and backward; empty where none are used.
    pub lists: Vec<IntTensor<B>>,
}

/// Hyper-parameters of one AdamW update (arXiv:1711.05101), bias corrections already computed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWStep {
    /// Learning rate of this step.
    pub lr: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay; zero for tensors that do not decay.
    pub weight_decay: f64,
    /// `1 - beta1^t`.
    pub bias_correction1: f64,
    /// `1 - beta2^t`.
    pub bias_correction2: f64,
}

/// One parameter's state in an AdamW update, all of one shape and, but for `leaf` and what belongs to it, f32 (f64 in tests).
#[derive(Clone, Debug)]
pub struct AdamWTensors<B: Backend> {
    /// The master weights; beside a leaf, what [`SieveBackend::split_master`] returned beside it.
    pub param: FloatTensor<B>,
    /// The weights that the model computes with, in bf16, where they are another tensor than `param`.
    pub leaf: Option<FloatTensor<B>>,
    /// First moment.
    pub exp_avg: FloatTensor<B>,
    /// Second moment.
    pub exp_avg_sq: FloatTensor<B>,
}

/// Cosine and sine tables of rotary position embeddings, each `[max_positions, head_dim / 2]`.
#[derive(Clone, Debug)]
pub struct RopeTables<B: Backend> {
    /// Cosines.
    pub cos: FloatTensor<B>,
    /// Sines.
    pub sin: FloatTensor<B>,
}

/// A Burn backend with Sieve's fused ops. Each default body is the plain-Burn reference of [`reference`], so a new op
/// breaks no backend; `Flex` and CUDA override them, `Autodiff` registers their backward passes.
///
/// These are primitives-level methods; users call the functions of this crate that carry the ops' names.
pub trait SieveBackend: NsaBackend + MlaBackend {
    /// See [`crate::linear`].
    fn linear_nt(x: FloatTensor<Self>, weight: FloatTensor<Self>) -> FloatTensor<Self> {
        reference::linear::<Self>(x, weight)
    }
    /// See [`crate::linear_add`]; its gradients are those of [`crate::linear`] and, for the residual, dy itself.
    fn linear_nt_add(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        residual: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        Self::float_add(residual, Self::linear_nt(x, weight))
    }
    /// `dx` of [`crate::linear`].
    fn linear_nt_input_gradient(
        weight: FloatTensor<Self>,
        dy: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        reference::linear_input_gradient::<Self>(weight, dy)
    }
    /// `dweight` of [`crate::linear`].
    fn linear_nt_weight_gradient(x: FloatTensor<Self>, dy: FloatTensor<Self>) -> FloatTensor<Self> {
        reference::linear_weight_gradient::<Self>(x, dy)
    }
    /// `(dx, dweight)` of [`crate::linear`].
    fn linear_nt_backward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        dy: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        (
            Self::linear_nt_input_gradient(weight, dy.clone()),
            Self::linear_nt_weight_gradient(x, dy),
        )
    }

    /// See [`crate::embedding`].
    fn embedding_rows(weight: FloatTensor<Self>, ids: IntTensor<Self>) -> FloatTensor<Self> {
        reference::embedding::<Self>(weight, ids)
    }
    /// `dweight` of [`crate::embedding`], `[vocab_size, d_model]`.
    fn embedding_rows_backward(
        dy: FloatTensor<Self>,
        ids: IntTensor<Self>,
        vocab_size: usize,
    ) -> FloatTensor<Self> {
        reference::embedding_backward::<Self>(dy, ids, vocab_size)
    }

    /// See [`crate::rms_norm`].
    fn rms_norm(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        epsilon: f64,
    ) -> FloatTensor<Self> {
        reference::rms_norm::<Self>(x, weight, epsilon)
    }
    /// `(dx, dweight)` of [`crate::rms_norm`].
    fn rms_norm_backward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        epsilon: f64,
        dy: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        reference::rms_norm_backward::<Self>(x, weight, epsilon, dy)
    }
    /// `(dx, dweight, y)`: as [`rms_norm_backward`](Self::rms_norm_backward) with `d_residual`, the gradient that reaches x
    /// beside the norm, added to dx, and the norm's output once more.
    fn rms_norm_backward_with_output(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        epsilon: f64,
        dy: FloatTensor<Self>,
        d_residual: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let y = Self::rms_norm(x.clone(), weight.clone(), epsilon);
        let (dx, dweight) = Self::rms_norm_backward(x, weight, epsilon, dy);
        (Self::float_add(dx, d_residual), dweight, y)
    }

    /// See [`crate::qk_norm_rope`]. `positions` is `[batch, seq_len]`, an index into the tables' rows.
    fn qk_norm_rope(
        qkv: FloatTensor<Self>,
        q_weight: FloatTensor<Self>,
        k_weight: FloatTensor<Self>,
        positions: IntTensor<Self>,
        rope: &RopeTables<Self>,
        num_kv_heads: usize,
        epsilon: f64,
    ) -> FloatTensor<Self> {
        let args = reference::QkNormRope {
            q_weight,
            k_weight,
            positions,
            num_kv_heads,
            epsilon,
        };
        reference::qk_norm_rope::<Self>(qkv, args, rope)
    }
    /// `(dqkv, dq_weight, dk_weight)` of [`crate::qk_norm_rope`].
    #[allow(clippy::too_many_arguments)]
    fn qk_norm_rope_backward(
        qkv: FloatTensor<Self>,
        q_weight: FloatTensor<Self>,
        k_weight: FloatTensor<Self>,
        positions: IntTensor<Self>,
        rope: &RopeTables<Self>,
        num_kv_heads: usize,
        epsilon: f64,
        dy: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let args = reference::QkNormRope {
            q_weight,
            k_weight,
            positions,
            num_kv_heads,
            epsilon,
        };
        reference::qk_norm_rope_backward::<Self>(qkv, args, rope, dy)
    }

    /// See [`crate::swiglu`].
    fn swiglu(gate_up: FloatTensor<Self>) -> FloatTensor<Self> {
        reference::swiglu::<Self>(gate_up)
    }
    /// Gradient of [`crate::swiglu`].
    fn swiglu_backward(gate_up: FloatTensor<Self>, dy: FloatTensor<Self>) -> FloatTensor<Self> {
        reference::swiglu_backward::<Self>(gate_up, dy)
    }
    /// `(dgate_up, y)`: gradient of [`crate::swiglu`], and its output once more.
    fn swiglu_backward_with_output(
        gate_up: FloatTensor<Self>,
        dy: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let y = Self::swiglu(gate_up.clone());
        (Self::swiglu_backward(gate_up, dy), y)
    }

    /// The composed op behind [`crate::feed_forward()`].
    fn feed_forward(
        x: FloatTensor<Self>,
        weights: FeedForwardWeights<Self>,
        residual: Residual,
    ) -> FloatTensor<Self> {
        crate::feed_forward::forward::<Self>(x, weights, residual).1
    }

    /// The composed op behind [`crate::attention_layer()`]: the output, and DMA's mask.
    fn attention_layer(
        x: FloatTensor<Self>,
        weights: AttentionLayerWeights<Self>,
        call: AttentionLayerCall<Self>,
    ) -> (FloatTensor<Self>, Option<IntTensor<Self>>) {
        let forward = crate::attention_layer::forward::<Self>(x, weights, &call);
        let expire = forward.attended.expire();
        (forward.y, expire)
    }

    /// See [`crate::attention`].
    fn packed_attention(
        qkv: FloatTensor<Self>,
        documents: &DocumentBounds<Self>,
        spec: AttentionSpec,
    ) -> AttentionOutput<Self> {
        reference::attention::<Self>(qkv, documents, spec)
    }
    /// `dqkv` of [`crate::attention`].
    fn packed_attention_backward(
        qkv: FloatTensor<Self>,
        documents: &DocumentBounds<Self>,
        spec: AttentionSpec,
        output: AttentionOutput<Self>,
        d_o: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        reference::attention_backward::<Self>(qkv, documents, spec, output, d_o)
    }

    /// DMA's scores `z[b, g, j] = A[g] * softplus(concat(v_j) . W_dt[:, g])`, f32 `[batch, num_kv_heads, seq_len]`.
    ///
    /// `w_dt` is `[num_kv_heads * head_dim, num_kv_heads]`, `a` is `[num_kv_heads]`; v is read from the packed tensor.
    fn dma_scores(
        qkv: FloatTensor<Self>,
        w_dt: FloatTensor<Self>,
        a: FloatTensor<Self>,
        spec: AttentionSpec,
    ) -> FloatTensor<Self> {
        reference::dma_scores::<Self>(qkv, w_dt, a, spec)
    }
    /// Adds the path through the scores to `dqkv`; returns `(dqkv, dw_dt, da)`.
    fn dma_scores_backward(
        qkv: FloatTensor<Self>,
        w_dt: FloatTensor<Self>,
        a: FloatTensor<Self>,
        spec: AttentionSpec,
        dz: FloatTensor<Self>,
        dqkv: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        reference::dma_scores_backward::<Self>(qkv, w_dt, a, spec, dz, dqkv)
    }

    /// See [`crate::dma_select`].
    fn dma_select(
        z: FloatTensor<Self>,
        documents: &DocumentBounds<Self>,
        keep_window_size: usize,
    ) -> DmaSelection<Self> {
        reference::dma_select::<Self>(z, documents, keep_window_size)
    }

    /// Attention over the kept keys with an additive bias per key, `delta` `[batch, num_kv_heads, seq_len]`.
    fn dma_attention(
        qkv: FloatTensor<Self>,
        delta: FloatTensor<Self>,
        documents: &DocumentBounds<Self>,
        selection: &DmaSelection<Self>,
        spec: AttentionSpec,
    ) -> AttentionOutput<Self> {
        reference::dma_attention::<Self>(qkv, delta, documents, selection, spec)
    }
    /// `(dqkv, ddelta)` of [`SieveBackend::dma_attention`].
    fn dma_attention_backward(
        qkv: FloatTensor<Self>,
        delta: FloatTensor<Self>,
        documents: &DocumentBounds<Self>,
        selection: &DmaSelection<Self>,
        spec: AttentionSpec,
        output: AttentionOutput<Self>,
        d_o: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        reference::dma_attention_backward::<Self>(
            qkv, delta, documents, selection, spec, output, d_o,
        )
    }

    /// The composed op behind [`crate::dynamic_mask_attention`]; returns the output, the selection and the scores.
    fn dynamic_mask_attention(
        qkv: FloatTensor<Self>,
        w_dt: FloatTensor<Self>,
        a: FloatTensor<Self>,
        documents: &DocumentBounds<Self>,
        spec: AttentionSpec,
        dma: crate::DmaSpec,
    ) -> crate::DmaForward<Self> {
        crate::dma::forward::<Self>(qkv, w_dt, a, documents, spec, dma)
    }

    /// One query per sequence over `kv_len` given keys; see [`crate::decode_attention`].
    fn decode_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        delta: Option<FloatTensor<Self>>,
        softmax_scale: f64,
    ) -> FloatTensor<Self> {
        reference::decode_attention::<Self>(q, k, v, delta, softmax_scale)
    }

    /// One decoding step of DMA; see [`crate::dma_decode`].
    fn dma_decode_step(
        cache: DmaCache<Self>,
        token: DmaToken<Self>,
        softmax_scale: f64,
        bias: DmaBias,
    ) -> (DmaCache<Self>, FloatTensor<Self>) {
        crate::decode::dma_decode_reference::<Self>(cache, token, softmax_scale, bias)
    }

    /// Per-token cross-entropy in nats, f32 `[tokens]`, zero where the label is [`crate::IGNORE_LABEL`].
    fn token_losses(
        h: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        labels: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        reference::token_losses::<Self>(h, weight, labels)
    }
    /// Summed cross-entropy and its gradients in one pass: `(loss [1], dh, dweight)`.
    fn linear_cross_entropy_with_gradients(
        h: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        labels: IntTensor<Self>,
        z_loss: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        reference::linear_cross_entropy_with_gradients::<Self>(h, weight, labels, z_loss)
    }
    /// See [`crate::linear_cross_entropy`].
    fn linear_cross_entropy(
        h: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        labels: IntTensor<Self>,
        z_loss: f64,
    ) -> FloatTensor<Self> {
        reference::linear_cross_entropy::<Self>(h, weight, labels, z_loss)
    }

    /// `x` times a `[1]` that lies on the device; x may be changed in place where nobody else holds it.
    fn scaled(x: FloatTensor<Self>, factor: FloatTensor<Self>) -> FloatTensor<Self> {
        reference::scaled::<Self>(x, factor)
    }

    /// Replaces whatever gradient arrives by `dy`; the output is a zero `[1]`. See [`crate::seed_gradient`].
    fn seed_gradient(y: FloatTensor<Self>, _dy: FloatTensor<Self>) -> FloatTensor<Self> {
        reference::zero_scalar::<Self>(y)
    }

    /// Sum of squares in a fixed order, `[1]`.
    fn sum_of_squares(x: FloatTensor<Self>) -> FloatTensor<Self> {
        reference::sum_of_squares::<Self>(x)
    }

    /// Euclidean norm over all `tensors` together, in their order, `[1]`; at least one tensor.
    fn global_norm(tensors: Vec<FloatTensor<Self>>) -> FloatTensor<Self> {
        reference::global_norm::<Self>(tensors)
    }

    /// `(leaf, rest)` of f32 master weights: the bf16 leaf that a model computes with, and what [`adamw_step`](Self::adamw_step)
    /// needs beside it to know the master. Here that is the master itself.
    fn split_master(master: FloatTensor<Self>) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let leaf = Self::float_cast(master.clone(), FloatDType::BF16);
        (leaf, master)
    }
    /// The inverse of [`split_master`](Self::split_master), exact.
    fn join_master(_leaf: FloatTensor<Self>, rest: FloatTensor<Self>) -> FloatTensor<Self> {
        rest
    }

    /// The values of a tensor as they are now, to be read on any thread; here they are read at once.
    fn snapshot(tensor: FloatTensor<Self>) -> Snapshot {
        Snapshot::read_now::<Self>(tensor)
    }
    /// Bytes that snapshots may hold on a device beside everything else; 0 where they hold none there.
    fn snapshot_room(_device: &Self::Device) -> u64 {
        0
    }

    /// One AdamW update; `grad_scale` is `[1]` on the device. Where it is zero or no finite number nothing changes: the
    /// gate of a step whose gradients are spoilt.
    fn adamw_step(
        tensors: AdamWTensors<Self>,
        grad: FloatTensor<Self>,
        grad_scale: FloatTensor<Self>,
        step: AdamWStep,
    ) -> AdamWTensors<Self> {
        reference::adamw_step::<Self>(tensors, grad, grad_scale, step)
    }
}

/// What a training loop needs of its backend: Sieve's ops with and without gradients.
pub trait TrainBackend: SieveBackend + AutodiffBackend<InnerBackend: SieveBackend> {}

impl<B: SieveBackend> TrainBackend for Autodiff<B> {}
