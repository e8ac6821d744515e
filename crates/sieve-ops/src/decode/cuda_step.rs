//! A step of one token on CUDA: run once, then replayed as a graph.
use super::cuda::{Recent, SCRATCH_KEYS, score_bias, slots_of, writable};
use super::{TokenCache, TokenLayer, TokenStep};
use crate::device::cuda::{Cuda, CudaPrimitive, cast};
use crate::device::paths::{kernel_or, kernel_or_refusal};
use crate::linear::cuda::product_and_sum;
use crate::tensors::{Float, Ints, primitive};
use burn::tensor::Tensor;
use sieve_kernels::step::{
    MAX_VECTORS, QkNormRope, Vectors, embedding_forward, matrix_vector, rms_norm_forward, rope, swiglu_forward,
};
use sieve_kernels::{
    AttentionShape, CudaTensor, DType, DecodeScratch, DecodeStep, DmaSlots, KernelError, KvCache, MatmulOutput,
    PooledStep, PositionOrigin, Product, Qkv, Recency, StepGraph, StepInputs, StepTape, ToBurn, kernel_tensor, matmul,
    require_chosen_decode,
};

const NAME: &str = "token_step";

/// The step of a cache's last token, for so many more: then a buffer is full, or more keys need more blocks.
#[derive(Debug, Default)]
pub struct CudaStepGraph(Option<(StepGraph, usize)>);

/// A copy has other caches.
impl Clone for CudaStepGraph {
    fn clone(&self) -> Self {
        Self::default()
    }
}

pub(crate) fn repeat_token_step(graph: &mut CudaStepGraph, ids: Ints<Cuda>, position: usize) -> Option<Float<Cuda>> {
    let (step, left) = graph.0.as_mut()?;
    *left = left.checked_sub(1)?;
    let logits = step.replay(&kernel_tensor(ids), position);
    Some(kernel_or(NAME, logits.map(ToBurn::burn), || {
        unreachable!("the graph took these rows")
    }))
}

pub(crate) fn token_step(mut step: TokenStep<'_, Cuda>, graph: &mut CudaStepGraph) -> Option<Float<Cuda>> {
    *graph = CudaStepGraph::default();
    kernel_or_refusal(NAME, require_kernels(&step)).ok()?;
    let left = step.layers.iter_mut().map(tokens_until_growth).min().unwrap_or(0);
    let tape = StepTape::default();
    // Caches have changed where it fails, so that no other path could take over.
    let (inputs, logits) = run(&mut step, &tape).unwrap_or_else(|error| panic!("a decoding step: {error}"));
    let result = logits.clone().burn();
    let captured = kernel_or_refusal(NAME, tape.graph(inputs, logits));
    graph.0 = captured.ok().map(|captured| (captured, left));
    Some(result)
}

/// Refuses weights and sizes that the kernels do not take.
fn require_kernels(step: &TokenStep<'_, Cuda>) -> Result<(), KernelError> {
    let bf16 = |tensor: &CudaTensor| tensor.require_dtype(NAME, "a weight", DType::BF16);
    bf16(&of(&step.embedding))?;
    bf16(&of(&step.output))?;
    step.layers.iter().try_for_each(|layer| {
        let TokenLayer {
            qkv, o, gate_up, down, ..
        } = layer;
        if let TokenCache::Chosen { keys, choice, .. } = &layer.cache {
            let head_dims = [&keys.k, &keys.v].map(|x| x.buffer().dims()[3]);
            require_chosen_decode(*choice, head_dims, layer.spec.num_heads / layer.spec.num_kv_heads)?;
        }
        [qkv, o, gate_up, down]
            .iter()
            .try_for_each(|weight| bf16(&of(weight)))?;
        layer.norms.iter().try_for_each(|weight| bf16(&of(weight)))
    })
}

/// Makes room for this token in a layer's cache; how many more come before the step needs other buffers.
fn tokens_until_growth(layer: &mut TokenLayer<'_, Cuda>) -> usize {
    match &mut layer.cache {
        TokenCache::Slots(_) => usize::MAX,
        TokenCache::Recent(cache) => {
            let window = layer.spec.window_size;
            cache.reserve(1, window.map_or(cache.len(), |window| window - 1));
            let seen = cache.len() + 1;
            let of_scratch = match window {
                Some(window) if window <= seen => usize::MAX,
                _ => seen.next_multiple_of(SCRATCH_KEYS) - seen,
            };
            of_scratch.min(cache.k.room() - seen)
        }
        TokenCache::Chosen { keys, pooled, choice } => {
            keys.reserve(1, keys.len());
            pooled.reserve(1, pooled.len());
            let (blocks, seen) = (choice.blocks, keys.len() + 1);
            let full = blocks.compress_block_size + pooled.room() * blocks.compress_stride;
            (keys.k.room() - seen).min(full - 1 - seen)
        }
    }
}

/// Runs the step on tensors of a tape. Returns what it read and the logits.
fn run(step: &mut TokenStep<'_, Cuda>, tape: &StepTape) -> Result<(StepInputs, CudaTensor), KernelError> {
    let ids = kernel_tensor(step.ids.clone().into_primitive());
    let inputs = StepInputs::new(tape, &ids, step.position)?;
    let tables = [&step.rope.cos, &step.rope.sin];
    let tables = tables.map(|table| tape.noted(&cast(&primitive(table.clone()), burn::tensor::DType::F32)));
    let epsilon = step.epsilon as f32;
    let mut scratch = Recent::default();
    let mut x = embedding_forward(&tape.noted(&of(&step.embedding)), &inputs.ids)?;
    for layer in &mut step.layers {
        let layer = Layer {
            inputs: &inputs,
            tables: tables.each_ref(),
            epsilon,
            tape,
            layer,
        };
        x = layer.run(x, &mut scratch)?;
    }
    let (norm, output) = (tape.noted(&of(&step.norm)), tape.noted(&of(&step.output)));
    let logits = project(Vectors::Normed(&x, &norm, epsilon), &output, None)?;
    let [batch, _, vocab_size] = logits.dims(NAME, "logits")?;
    Ok((inputs, logits.reshaped(NAME, "logits", &[batch, vocab_size])?))
}

/// A block on its way through a step.
struct Layer<'s, 'a> {
    inputs: &'s StepInputs,
    tables: [&'s CudaTensor; 2],
    epsilon: f32,
    tape: &'s StepTape,
    layer: &'s mut TokenLayer<'a, Cuda>,
}

impl Layer<'_, '_> {
    fn run(
        self,
        x: CudaTensor,
        scratch: &mut Recent<(AttentionShape, usize), DecodeScratch>,
    ) -> Result<CudaTensor, KernelError> {
        let (tape, epsilon) = (self.tape, self.epsilon);
        let weight = |tensor: &Tensor<Cuda, 2>| tape.noted(&of(tensor));
        let norms = [0, 1].map(|n| tape.noted(&of(&self.layer.norms[n])));
        let batch = self.inputs.ids.num_elements();
        let bias = self.layer.qkv_bias.as_ref();
        let bias = bias.map(|bias| of(&bias.clone().unsqueeze::<3>().repeat_dim(0, batch)).contiguous());
        let bias = bias.map(|bias| tape.noted(&bias));
        let normed = Vectors::Normed(&x, &norms[0], epsilon);
        let qkv = project(normed, &weight(&self.layer.qkv), bias.as_ref())?;
        let (o, down) = (weight(&self.layer.o), weight(&self.layer.down));
        let gate_up = weight(&self.layer.gate_up);
        let attended = self.attend(qkv, scratch)?;
        let x = project(Vectors::Plain(&attended), &o, Some(&x))?;
        let packed = project(Vectors::Normed(&x, &norms[1], epsilon), &gate_up, None)?;
        project(Vectors::SwiGlu(&packed), &down, Some(&x))
    }

    /// Attention from the packed product on: `[batch, 1, num_heads * head_dim]`.
    fn attend(
        self,
        qkv: CudaTensor,
        scratch: &mut Recent<(AttentionShape, usize), DecodeScratch>,
    ) -> Result<CudaTensor, KernelError> {
        let Self {
            inputs, tape, layer, ..
        } = self;
        let (spec, batch) = (layer.spec, inputs.ids.num_elements());
        let (num_heads, num_kv_heads) = (spec.num_heads, spec.num_kv_heads);
        let heads = num_heads + 2 * num_kv_heads;
        let head_dim = qkv.num_elements() / (batch * heads);
        let qkv = qkv.reshaped(NAME, "qkv", &[batch, 1, heads, head_dim])?;
        let qkv = match &layer.qk_norm {
            None => rope(&qkv, &inputs.position, self.tables, num_kv_heads)?,
            Some(norm) => QkNormRope {
                q_weight: &tape.noted(&of(&norm.q_weight)),
                k_weight: &tape.noted(&of(&norm.k_weight)),
                positions: &inputs.position,
                cos: self.tables[0],
                sin: self.tables[1],
                num_kv_heads,
                epsilon: norm.epsilon as f32,
            }
            .qk_norm_rope_forward(&qkv)?,
        };
        let token = Qkv::packed(&qkv, num_heads, num_kv_heads);
        let (shape, scale) = (token.shape(NAME)?, spec.softmax_scale as f32);
        let length = inputs.position.reshaped(NAME, "length", &[batch])?;
        let noted = |kv: KvCache| KvCache {
            k: tape.noted(&kv.k),
            v: tape.noted(&kv.v),
        };
        let mut scratch_of = |like: &CudaTensor, keys: usize, choosers: usize| {
            let keys = keys.next_multiple_of(SCRATCH_KEYS);
            let shape = AttentionShape {
                num_kv_heads: choosers,
                ..shape
            };
            let made = scratch.get((shape, keys), || DecodeScratch::new(like, shape, keys));
            made.cloned()
        };
        let o = match (&mut layer.cache, &layer.dma) {
            (TokenCache::Recent(cache), _) => {
                let (len, kv) = (cache.len(), writable(cache));
                let seen = spec.window_size.unwrap_or(len + 1).min(len + 1);
                let buffers = scratch_of(&kv.k, seen, num_kv_heads)?;
                let step = DecodeStep {
                    window: spec.window_size,
                    softmax_scale: scale,
                    max_length: len,
                };
                noted(kv).attention_decode(&token, &length, step, &buffers)?
            }
            (TokenCache::Slots(cache), Some(dma)) => {
                let f32s = |tensor: CudaPrimitive| tape.noted(&cast(&tensor, burn::tensor::DType::F32).contiguous());
                let (w_dt, a) = (f32s(primitive(dma.w_dt.clone())), f32s(primitive(dma.a.clone())));
                let slopes = dma.spec.slopes(num_kv_heads);
                let slopes = slopes.map(|slopes| slopes.iter().map(|&slope| slope as f32).collect::<Vec<_>>());
                let recency = slopes.as_deref().map(|slopes| Recency {
                    slopes,
                    origin: PositionOrigin::DocumentStart(&inputs.start),
                });
                let rank = token.dma_ranks(&w_dt, &a, recency.as_ref())?.z;
                let rank = rank.reshaped(NAME, "rank", &[batch, num_kv_heads])?;
                let slots = slots_of(cache);
                let buffers = scratch_of(&slots.kv.k, cache.window.keep_window_size, num_kv_heads)?;
                let slots = DmaSlots {
                    z: tape.noted(&slots.z),
                    positions: tape.noted(&slots.positions),
                    kv: noted(slots.kv),
                    ..slots
                };
                slots.dma_decode(&token, &rank, &length, scale, score_bias(dma.spec.bias), &buffers)?
            }
            (TokenCache::Slots(_), None) => unreachable!("slots are DMA's"),
            (TokenCache::Chosen { keys, pooled, choice }, _) => {
                let (len, kv) = (keys.len(), writable(keys));
                let found = of(pooled.buffer());
                if !found.is_contiguous() {
                    **pooled = pooled.clone();
                }
                let pooled = PooledStep {
                    pooled: &tape.noted(&of(pooled.buffer())),
                    start: &inputs.start,
                    choice: *choice,
                };
                let blocks = choice.blocks;
                let seen = blocks.num_selected_blocks * blocks.select_block_size;
                let buffers = scratch_of(&kv.k, seen, choice.num_choosers(num_heads, num_kv_heads))?;
                let step = DecodeStep {
                    window: None,
                    softmax_scale: scale,
                    max_length: len,
                };
                noted(kv).chosen_decode(&token, &length, step, pooled, &buffers)?
            }
        };
        o.reshaped(NAME, "o", &[batch, 1, num_heads * head_dim])
    }
}

fn of<const D: usize>(tensor: &Tensor<Cuda, D>) -> CudaTensor {
    kernel_tensor(primitive(tensor.clone()))
}

/// The rows times a weight `[out, in]`, plus the residual: few rows by one kernel, more by a GEMM and the kernels
/// before and after it.
fn project(rows: Vectors<'_>, weight: &CudaTensor, residual: Option<&CudaTensor>) -> Result<CudaTensor, KernelError> {
    let (Vectors::Plain(x) | Vectors::Normed(x, ..) | Vectors::SwiGlu(x)) = rows;
    if x.num_elements() / x.shape().last().copied().unwrap_or(1).max(1) <= MAX_VECTORS {
        return matrix_vector(rows, weight, residual);
    }
    let h = match rows {
        Vectors::Plain(x) => x.clone(),
        Vectors::Normed(x, norm, epsilon) => rms_norm_forward(x, norm, epsilon)?,
        Vectors::SwiGlu(packed) => swiglu_forward(packed)?,
    };
    match residual {
        Some(residual) => product_and_sum([h, weight.clone(), residual.clone()]),
        None => matmul(Product::Nt, &h, weight, MatmulOutput::New(DType::BF16)),
    }
}
