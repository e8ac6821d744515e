//! The tensors of one attention call on a device, and its forward and backward pass.
use crate::device::{Device, Gpu};
use crate::shape::{packed_of, queries_of};
use burn::tensor::{Distribution, Tensor};
use sieve_core::{DmaBias, DmaWindow, FarKeys, KeepOLow};
use sieve_kernels::{
    AttentionGradients, AttentionResult, AttentionShape, CudaTensor, DType, KernelError, KernelPolicy, KeyLists,
    MlaPack, Qkv, Selection, SumOrder, burn_dtype, dma_select,
};
use sieve_ops::Cuda;

/// Packed q, k, v and everything a call needs.
#[derive(Clone)]
pub(crate) struct Inputs {
    pub(crate) shape: AttentionShape,
    pub(crate) qkv: Qkv,
    /// The tensor that the gradients are written to.
    pub(crate) grads: Qkv,
    pub(crate) d_o: CudaTensor,
    pub(crate) doc_start: CudaTensor,
    pub(crate) doc_end: CudaTensor,
    pub(crate) scale: f32,
    /// In which rows a forward pass with a bias keeps `o_low`, what rounding o to bf16 loses.
    pub(crate) o_low: KeepOLow,
}

/// Arguments of [`Inputs::forward`] and [`Inputs::backward`] for attention to all keys, and without a bias.
pub(crate) const NO_WINDOW: Option<usize> = None;
pub(crate) const NO_BIAS: Option<&CudaTensor> = None;

/// A contiguous tensor of normal random numbers.
pub(crate) fn normal<const D: usize>(shape: [usize; D], dtype: DType, device: &Gpu) -> CudaTensor {
    let normal = Distribution::Normal(0.0, 1.0);
    let tensor = Tensor::<Cuda, D>::random(shape, normal, &device.device).cast(burn_dtype(dtype));
    device.tensor(tensor.into_primitive().tensor()).contiguous()
}

impl Inputs {
    /// Estimates the bytes that the inputs and a forward and backward call of this shape need at once.
    pub(crate) fn bytes(shape: AttentionShape) -> u64 {
        let tokens = (shape.batch * shape.seq_len) as u64;
        let query = (shape.num_heads * shape.head_dim) as u64;
        let key = (shape.num_kv_heads * shape.head_dim) as u64;
        let packed = query + 2 * key;
        // Random numbers in f32; q, k, v and their gradients in bf16; three bf16 tensors as large as q (o, do and
        // scratch); f32 sums of dq, dk and dv.
        tokens * (4 * packed + 2 * 2 * packed + 3 * 2 * query + 4 * packed)
    }

    /// Draws normal numbers on a GPU, with q, k and v packed in one tensor.
    pub(crate) fn new(shape: AttentionShape, device: &Gpu) -> Self {
        let [batch, seq_len, heads, width] = queries_of(shape);
        let (tokens, width_v) = (batch * seq_len, shape.head_dim_v);
        let bf16 = DType::BF16;
        let packed = if width == width_v {
            normal(packed_of(shape), bf16, device)
        } else {
            normal([batch, seq_len, heads * (2 * width + width_v)], bf16, device)
        };
        let gradient = packed.empty_contiguous(packed.shape(), bf16);
        let heads = |packed: &CudaTensor| {
            if width == width_v {
                Qkv::packed(packed, heads, shape.num_kv_heads)
            } else {
                MlaPack::heads(packed, heads, [width_v, width - width_v]).expect("a packed tensor of latent attention")
            }
        };
        Self {
            shape,
            qkv: heads(&packed),
            grads: heads(&gradient),
            d_o: normal(shape.output(), bf16, device),
            doc_start: device.int(&vec![0; tokens], &[batch, seq_len]),
            doc_end: device.int(&vec![seq_len as i32; tokens], &[batch, seq_len]),
            scale: 1.0 / (width as f32).sqrt(),
            o_low: KeepOLow::default(),
        }
    }

    /// The same tensors for backward passes in which about `blocks` blocks of threads share a tile of keys.
    pub(crate) fn with_blocks_per_tile(&self, blocks: usize) -> Self {
        let policy = KernelPolicy { blocks_per_tile: Some(blocks), ..self.qkv.policy() };
        Self { qkv: self.qkv.under(policy), ..self.clone() }
    }

    /// Uploads the scores `z` and their biases, each `[batch, num_kv_heads, seq_len]`.
    pub(crate) fn scores(&self, z: &[f32], bias: DmaBias, device: &Gpu) -> [CudaTensor; 2] {
        let delta: Vec<f32> = match bias {
            DmaBias::Exp => z.iter().map(|z| z.min(60.0).exp()).collect(),
            DmaBias::Linear => z.to_vec(),
        };
        [z, &delta].map(|values| device.float(values, &self.shape.per_key(), DType::F32))
    }

    /// Selects keys by the scores `z` and returns their key lists alone.
    pub(crate) fn lists(&self, z: &CudaTensor, window: DmaWindow) -> Result<KeyLists, KernelError> {
        Ok(self.selection_and_lists(z, window)?.1)
    }

    /// Selects keys by the scores `z`; returns the selection and its key lists.
    pub(crate) fn selection_and_lists(
        &self,
        z: &CudaTensor,
        window: DmaWindow,
    ) -> Result<(Selection, KeyLists), KernelError> {
        let selection = self.select(z, window)?;
        let lists = self.lists_of(&selection, KeyLists::TILE_QUERIES)?;
        Ok((selection, lists))
    }

    /// The key lists of a DMA selection.
    pub(crate) fn lists_of(&self, selection: &Selection, tile_queries: usize) -> Result<KeyLists, KernelError> {
        selection.dma_lists(&self.doc_start, &self.doc_end, tile_queries)
    }

    /// Runs DMA's selection on the scores `z`.
    pub(crate) fn select(&self, z: &CudaTensor, window: DmaWindow) -> Result<Selection, KernelError> {
        dma_select(z, &self.doc_start, &self.doc_end, window)
    }

    /// Forward pass of attention to all keys or to a sliding window, without or with a bias.
    pub(crate) fn forward(
        &self,
        window: Option<usize>,
        bias: Option<&CudaTensor>,
    ) -> Result<AttentionResult, KernelError> {
        self.qkv.attention_forward(&self.doc_start, window, self.scale, bias.map(|bias| (bias, self.o_low)))
    }

    /// Backward pass of [`forward`](Self::forward) into `grads`; returns the gradient of the bias.
    pub(crate) fn backward(
        &self,
        result: &AttentionResult,
        window: Option<usize>,
        bias: Option<&CudaTensor>,
        order: SumOrder,
    ) -> Result<Option<CudaTensor>, KernelError> {
        self.call(&self.qkv.in_order(order), result).attention_backward(self.documents(), window, bias)
    }

    /// Forward pass over a window and keys beyond it.
    pub(crate) fn far_forward(&self, window: usize, far: FarKeys) -> Result<AttentionResult, KernelError> {
        self.qkv.far_attention_forward(&self.doc_start, window, far, self.scale)
    }

    /// Backward pass of [`far_forward`](Self::far_forward) into `grads`.
    pub(crate) fn far_backward(
        &self,
        result: &AttentionResult,
        window: usize,
        far: FarKeys,
        order: SumOrder,
    ) -> Result<(), KernelError> {
        self.call(&self.qkv.in_order(order), result).far_attention_backward(self.documents(), window, far)
    }

    /// First position and end of each token's document.
    pub(crate) fn documents(&self) -> [&CudaTensor; 2] {
        [&self.doc_start, &self.doc_end]
    }

    /// Forward pass of DMA over key lists.
    pub(crate) fn dma_forward(&self, delta: &CudaTensor, lists: &KeyLists) -> Result<AttentionResult, KernelError> {
        self.qkv.dma_attention_forward(delta, lists, self.scale, self.o_low)
    }

    /// Backward pass of [`dma_forward`](Self::dma_forward) into `grads`; returns the gradient of the bias.
    pub(crate) fn dma_backward(
        &self,
        result: &AttentionResult,
        delta: &CudaTensor,
        lists: &KeyLists,
        order: SumOrder,
    ) -> Result<CudaTensor, KernelError> {
        self.call(&self.qkv.in_order(order), result).dma_attention_backward(delta, lists)
    }

    /// The arguments of a backward pass; `qkv` are the inputs with a sum order ([`Qkv::in_order`]).
    pub(crate) fn call<'a>(&'a self, qkv: &'a Qkv, result: &'a AttentionResult) -> AttentionGradients<'a> {
        AttentionGradients { qkv, result, d_o: &self.d_o, grads: &self.grads, softmax_scale: self.scale }
    }
}
