//! Uploads a case to a GPU or the emulator and runs the launch wrappers on it: q, k and v separate or packed in any
//! layout, gradient buffers that begin as NaN, either sum order.
use crate::case::{Case, Keys};
use crate::device::{self, Device, separate};
use crate::outputs::Outputs;
use crate::shape::packed_of;
use crate::strided::{self, Layout, packed};
use crate::timed::Inputs;
use sieve_core::KeepOLow;
use sieve_kernels::{
    AttentionResult, AttentionShape, CudaTensor, DType, DecodeScratch, DecodeStep, DmaSlots, KernelError, KeyLists,
    KeySource, KvCache, Qkv, ScoreBias, Selection, SumOrder,
};

/// The family of attention kernels that a call of the wrappers takes, in words.
pub(crate) fn family(case: &Case, device: &dyn Device) -> &'static str {
    let source = match case.keys {
        Keys::Dense | Keys::Window(_) => KeySource::Dense,
        Keys::Far(..) => KeySource::Bands,
        Keys::Biased => KeySource::Biased,
        Keys::Chosen(_) => KeySource::Gathered,
    };
    device::family_name(device::family(device, &case.shape, source))
}

/// A case whose tensors are on a device.
pub(crate) struct OnDevice<'a> {
    case: &'a Case,
    /// The case's tensors; each backward pass gets new gradient buffers.
    pub(crate) inputs: Inputs,
    delta: CudaTensor,
    z: CudaTensor,
    device: &'a dyn Device,
}

impl<'a> OnDevice<'a> {
    /// Uploads a case as separate contiguous tensors.
    pub(crate) fn new(case: &'a Case, device: &'a dyn Device) -> Self {
        Self::laid_out(case, Layout::Contiguous, device)
    }

    /// Uploads a case: as separate tensors, or packed in any other layout where keys and values have one width.
    pub(crate) fn laid_out(case: &'a Case, layout: Layout, device: &'a dyn Device) -> Self {
        let (shape, per_token) = (case.shape, [case.shape.batch, case.shape.seq_len]);
        // A case without biases or scores gets zeros, which its calls do not read.
        let per_key = |values: &[f32]| {
            let zeros = vec![0.0; case.expire.len()];
            let values = if values.is_empty() { &zeros } else { values };
            device.float(values, &shape.per_key(), DType::F32)
        };
        let qkv = if layout == Layout::Contiguous || shape.head_dim != shape.head_dim_v {
            separate(device, [&case.q, &case.k, &case.v], shape)
        } else {
            let (sizes, strides) = (packed_of(shape), layout.strides(packed_of(shape)));
            let memory = strided::laid_out(&packed(case), sizes, strides);
            let buffer = device.float(&memory, &[memory.len()], DType::BF16);
            let view = buffer.view("check", "qkv", &sizes, &strides);
            let view = view.expect("the buffer was made for these strides");
            Qkv::packed(&view, shape.num_heads, shape.num_kv_heads)
        };
        let inputs = Inputs {
            shape,
            grads: nan_like(&qkv, shape),
            qkv,
            d_o: device.float(&case.d_o, &shape.output(), DType::BF16),
            doc_start: device.int(&case.doc_start, &per_token),
            doc_end: device.int(&case.doc_end, &per_token),
            scale: case.scale,
            o_low: KeepOLow::default(),
        };
        Self { case, inputs, delta: per_key(&case.delta), z: per_key(&case.z), device }
    }

    fn bias(&self) -> Option<&CudaTensor> {
        (self.case.keys == Keys::Biased).then_some(&self.delta)
    }

    /// Runs DMA's selection of keys.
    pub(crate) fn select(&self) -> Result<Selection, KernelError> {
        self.inputs.select(&self.z, self.case.dma_window())
    }

    /// Runs DMA's selection and returns its key lists; `None` where DMA does not choose keys.
    pub(crate) fn lists(&self, tile_queries: usize) -> Result<Option<KeyLists>, KernelError> {
        let Keys::Chosen(_) = self.case.keys else {
            return Ok(None);
        };
        self.inputs.lists_of(&self.select()?, tile_queries).map(Some)
    }

    /// Runs the forward pass of attention.
    pub(crate) fn forward(&self, lists: Option<&KeyLists>) -> Result<AttentionResult, KernelError> {
        match (lists, self.case.keys) {
            (Some(lists), _) => self.inputs.dma_forward(&self.delta, lists),
            (None, Keys::Far(window, far)) => self.inputs.far_forward(window, far),
            (None, _) => self.inputs.forward(self.case.sliding_window(), self.bias()),
        }
    }

    /// Runs forward and backward pass and reads all results back.
    pub(crate) fn run(&self, lists: Option<&KeyLists>, order: SumOrder) -> Result<Outputs, KernelError> {
        let result = self.forward(lists)?;
        self.gradients(lists, &result, order)
    }

    /// Runs the backward pass after the forward pass with this `result`, and reads both passes' results back.
    pub(crate) fn gradients(
        &self,
        lists: Option<&KeyLists>,
        result: &AttentionResult,
        order: SumOrder,
    ) -> Result<Outputs, KernelError> {
        let inputs = Inputs { grads: nan_like(&self.inputs.qkv, self.case.shape), ..self.inputs.clone() };
        let ddelta = match (lists, self.case.keys) {
            (Some(lists), _) => Some(inputs.dma_backward(result, &self.delta, lists, order)?),
            (None, Keys::Far(window, far)) => {
                inputs.far_backward(result, window, far, order)?;
                None
            }
            (None, _) => inputs.backward(result, self.case.sliding_window(), self.bias(), order)?,
        };
        let read = |x: &CudaTensor| self.device.floats(x);
        let mut outputs = Outputs {
            o: read(&result.o)?,
            lse: read(&result.lse)?,
            ddelta: ddelta.as_ref().map_or(Ok(Vec::new()), read)?,
            ..Outputs::default()
        };
        if is_packed(&inputs.qkv, self.case.shape) {
            // The gradients of q, k and v are heads of one tensor.
            outputs.set_packed_gradient(self.case.shape, &read(inputs.grads.q.tensor())?)
        } else {
            let Qkv { q, k, v } = &inputs.grads;
            [outputs.dq, outputs.dk, outputs.dv] = [read(q.tensor())?, read(k.tensor())?, read(v.tensor())?];
        }
        Ok(outputs)
    }

    /// Uploads token number `at` of every row, `[batch, 1, heads, width]`.
    fn token(&self, at: usize) -> Qkv {
        let shape = self.case.shape;
        let of = |values: &Vec<f32>| -> Vec<f32> {
            let token_len = values.len() / (shape.batch * shape.seq_len);
            let rows = values.chunks_exact(token_len).skip(at).step_by(shape.seq_len);
            rows.flatten().copied().collect()
        };
        let [q, k, v] = [&self.case.q, &self.case.k, &self.case.v].map(of);
        let token = AttentionShape { seq_len: 1, ..shape };
        separate(self.device, [&q, &k, &v], token)
    }

    /// The length of each row's cache, the same for all.
    fn lengths(&self, length: usize) -> CudaTensor {
        let batch = self.case.shape.batch;
        self.device.int(&vec![length as i32; batch], &[batch])
    }

    /// Decodes all tokens one after the other by `step`, which returns o of token number `at` of every row. Returns o,
    /// `[batch, seq_len, num_heads, head_dim_v]`.
    fn token_by_token(&self, step: impl Fn(usize) -> Result<CudaTensor, KernelError>) -> Result<Vec<f32>, KernelError> {
        let shape = self.case.shape;
        let rows = (0..shape.seq_len).map(|at| self.device.floats(&step(at)?));
        let rows = rows.collect::<Result<Vec<_>, _>>()?;
        let width = shape.num_heads * shape.head_dim_v;
        let of_row = |b: usize| rows.iter().flat_map(move |row| &row[b * width..][..width]);
        Ok((0..shape.batch).flat_map(of_row).copied().collect())
    }

    /// Decodes all tokens one after the other against a growing cache; returns o, `[batch, seq_len, num_heads,
    /// head_dim_v]`.
    pub(crate) fn decode(&self) -> Result<Vec<f32>, KernelError> {
        let shape = self.case.shape;
        let like = self.inputs.qkv.q.tensor();
        // One place more than the row has tokens, so that the cache's stride and the row's length differ.
        let cache = KvCache::new(like, &shape, shape.seq_len + 1);
        let scratch = DecodeScratch::new(like, shape, shape.seq_len)?;
        self.token_by_token(|at| {
            let (window, far) = match self.case.keys {
                Keys::Far(window, far) => (Some(window), Some(far)),
                _ => (self.case.sliding_window(), None),
            };
            let step = DecodeStep { window, far, ..DecodeStep::new(at, self.case.scale) };
            cache.attention_decode(&self.token(at), &self.lengths(at), step, &scratch)
        })
    }

    /// Decodes token by token against DMA's fixed-size cache, which keeps the keys of the best scores `z`; returns o,
    /// `[batch, seq_len, num_heads, head_dim_v]`.
    pub(crate) fn dma_decode(&self) -> Result<Vec<f32>, KernelError> {
        let shape = self.case.shape;
        let like = self.inputs.qkv.q.tensor();
        let window = self.case.dma_window();
        let slots = DmaSlots {
            local_window_size: window.local_window_size,
            ..DmaSlots::new(like, &shape, window.keep_window_size)
        };
        let scratch = DecodeScratch::new(like, shape, window.keep_window_size)?;
        self.token_by_token(|at| {
            let z = self.case.z.iter().skip(at).step_by(shape.seq_len);
            let z: Vec<f32> = z.copied().collect();
            let z = (self.device).float(&z, &[shape.batch, shape.num_kv_heads], DType::F32);
            let (token, length) = (self.token(at), self.lengths(at));
            slots.dma_decode(&token, &z, &length, self.case.scale, ScoreBias::Exp, &scratch)
        })
    }
}

/// Whether queries, keys and values are heads of one tensor.
fn is_packed(qkv: &Qkv, shape: AttentionShape) -> bool {
    qkv.q.tensor().shape()[2] > shape.num_heads
}

/// Gradient buffers full of NaN, packed where the inputs are.
fn nan_like(qkv: &Qkv, shape: AttentionShape) -> Qkv {
    let nan = |x: &CudaTensor| x.nan_contiguous(x.shape(), x.dtype());
    if is_packed(qkv, shape) {
        Qkv::packed(&nan(qkv.q.tensor()), shape.num_heads, shape.num_kv_heads)
    } else {
        Qkv::separate(&nan(qkv.q.tensor()), &nan(qkv.k.tensor()), &nan(qkv.v.tensor()))
    }
}
