//! A decoding step on CUDA, one new token for each row: the first step runs and is captured as a graph, which computes
//! the later ones.
//!
//! The second single token of a text is captured, and later tokens replay the graph. Whatever differs between
//! tokens is read on the device: id, position, chosen and compressed blocks, joined latents. A window's cache moves
//! its last keys to the front when it is full, and kernels subtract the number of dropped tokens. The graph belongs
//! to the `KvCache` and is dropped when a cache grows, when the keys must be split into more parts, or when any
//! other pass touches the cache. Each of its kernels starts while the one before it ends
//! (`kernels/common/programmatic_launch.cuh`).
use super::cuda::{slots_of, writable, writable_buffer};
use super::scratch::{CudaStepGraph, KernelScratch, Recent, SCRATCH_KEYS};
use super::{
    DmaCache, KeyCache, SelectorCache, TokenAttention, TokenBranches, TokenBuffer, TokenCache, TokenExtra, TokenLayer,
    TokenStep, TokensBefore,
};
use crate::device::{cast, kernel_or, kernel_or_refusal};
use crate::linear::cuda::gemm_plus_residual;
use crate::tensors::{Float, Ints, primitive};
use crate::{Cuda, DmaLayer, QkNorm, RotaryEmbedding};
use burn::tensor::{Int, Tensor, TensorData};
use sieve_core::{BlockChoice, KernelPolicy, NsaBlocks, SumOrder, TokenKeys};
use sieve_kernels::step::{
    Epilogue, MAX_VECTORS, QkNormRope, Vectors, embedding_forward, linear_in_order, matrix_vector, residual_add,
    rms_norm_forward, rope, swiglu_forward,
};
use sieve_kernels::{
    AttentionShape, CudaTensor, DType, DecodeScratch, DecodeStep, DmaSlots, GemmKind, Heads, IndexedToken, KernelError,
    KvCache, LatentToken, MatmulOutput, MlaNorm, MlaPack, NsaToken, PooledStep, PositionOrigin, Qkv, Recency,
    SelectorStep, StepInputs, StepPositions, StepTape, ToBurn, TokenRotation, device_of, kernel_tensor, matmul,
    nsa_gates, require_chosen_decode,
};

const NAME: &str = "token_step";

/// The logits of the next tokens, by a replay of the captured step. `None` without a graph that this thread captured,
/// and once a cache's buffer is full.
pub(crate) fn repeat_token_step(
    graph: &mut CudaStepGraph,
    ids: Ints<Cuda>,
    before: TokensBefore<'_>,
) -> Option<Float<Cuda>> {
    let (step, left) = graph.0.as_mut().filter(|(step, _)| step.is_of_this_thread())?;
    *left = left.checked_sub(1)?;
    let ids = kernel_tensor(ids);
    let logits = step.replay(&ids, &positions_of(before, &ids));
    Some(kernel_or(NAME, logits.map(ToBurn::burn), || unreachable!("the graph took these rows")))
}

/// Runs a step, captures it for later tokens, and returns its logits. `None` where launches would differ from token to
/// token, or a kernel refuses the model.
pub(crate) fn token_step(mut step: TokenStep<'_, Cuda>, graph: &mut CudaStepGraph) -> Option<Float<Cuda>> {
    *graph = CudaStepGraph::default();
    let before = step.before;
    let mut pairs = step.layers.iter().zip(&step.caches);
    if !pairs.all(|(layer, cache)| has_fixed_launches(before, layer, cache)) {
        return None;
    }
    kernel_or_refusal(NAME, require_kernels(&step)).ok()?;
    let pairs = step.layers.iter().zip(&mut step.caches);
    let left = match before {
        TokensBefore::Same(_) => pairs.map(|(layer, cache)| tokens_until_growth(layer, cache)).min(),
        TokensBefore::Each(_) => Some(usize::MAX),
    };
    let left = left.unwrap_or(0);
    let tape = StepTape::default();
    // A step that fails may have changed the caches, so no other path could take over.
    let (inputs, logits) = run(&mut step, &tape).unwrap_or_else(|error| panic!("a decoding step: {error}"));
    let mut result = logits.clone().burn();
    let captured = kernel_or_refusal(NAME, tape.graph(inputs, logits));
    graph.0 = captured.ok().map(|captured| (captured, left));
    // A replay overwrites the graph's own output.
    result.handle = sieve_cuda::contiguous_copy(&result);
    Some(result)
}

/// The positions of a step's tokens. Where rows have different lengths, the positions are copied to the device of
/// `like`.
fn positions_of(before: TokensBefore<'_>, like: &CudaTensor) -> StepPositions {
    let lengths = match before {
        TokensBefore::Same(position) => return StepPositions::Same(position),
        TokensBefore::Each(lengths) => lengths.iter().map(|&length| length as i32),
    };
    // Each position, then minus each position: where the row's document begins, relative to its token.
    let words: Vec<i32> = lengths.clone().chain(lengths.map(|length| -length)).collect();
    let words = Tensor::<Cuda, 1, Int>::from_data(words.as_slice(), device_of(like));
    StepPositions::Each(kernel_tensor(words.into_primitive()))
}

/// Whether a layer's launches are the same for all later tokens. Slots of a layer without DMA keep the keys with the
/// most attention so far (H2O): their launches stay the same once all slots are in use. Their kernel takes one text and
/// heads of a multiple of 32 columns.
fn has_fixed_launches(before: TokensBefore<'_>, layer: &TokenLayer<Cuda>, cache: &TokenCache<'_, Cuda>) -> bool {
    let TokenCache::Slots(slots) = cache else {
        return true;
    };
    let [batch, _, room, head_dim] = slots.keys.k.buffer().dims();
    let is_full = matches!(before, TokensBefore::Same(tokens) if tokens >= room);
    layer.attention.dma.is_some() || (is_full && batch == 1 && head_dim.is_multiple_of(32))
}

/// Refuses weights and sizes that the kernels do not take.
fn require_kernels(step: &TokenStep<'_, Cuda>) -> Result<(), KernelError> {
    let bf16 = |tensor: &CudaTensor| tensor.require_dtype(NAME, "a weight", DType::BF16);
    bf16(&of(&step.embedding))?;
    bf16(&of(&step.output))?;
    step.layers.iter().zip(&step.caches).try_for_each(|(layer, cache)| {
        let (gate_up, down) = (&layer.gate_up, &layer.down);
        let TokenAttention { qkv, o, spec, extra, sinks, .. } = &layer.attention;
        sinks.iter().try_for_each(|sinks| bf16(&of(sinks)))?;
        let group = spec.num_heads / spec.num_kv_heads;
        let head_dims = |keys: &KeyCache<Cuda>| [&keys.k, &keys.v].map(|x| x.buffer().dims()[3]);
        match cache {
            TokenCache::Chosen { keys, choice, .. } => require_chosen_decode(*choice, head_dims(keys), group)?,
            TokenCache::Branches { selected, blocks, .. } => {
                require_chosen_decode(BlockChoice::nsa(*blocks), head_dims(selected), group)?;
            }
            _ => {}
        }
        let of_kind: Vec<&Tensor<Cuda, 2>> = match extra {
            TokenExtra::None => Vec::new(),
            TokenExtra::Indexer { proj, .. } => vec![proj],
            TokenExtra::Latent { down, up, .. } => vec![down, up],
            TokenExtra::Branches(branches) => {
                let TokenBranches { compress_kv, select_kv, mlp, gate, .. } = branches;
                let weights = [compress_kv, select_kv].into_iter().flatten().chain([gate]);
                weights.chain(mlp.iter().flatten().flatten()).collect()
            }
        };
        [qkv, o, gate_up, down].into_iter().chain(of_kind).try_for_each(|weight| bf16(&of(weight)))?;
        layer.norms.iter().try_for_each(|weight| bf16(&of(weight)))
    })
}

/// Makes room for this token in a cache of the `kept` keys ([`AttentionSpec::kept_keys`](crate::AttentionSpec)), or of
/// all (`None`). Returns how many more fit.
fn recent_room(cache: &mut KeyCache<Cuda>, kept: Option<[usize; 2]>) -> usize {
    cache.make_room(1, kept);
    cache.k.room() - (cache.len() + 1)
}

/// How many more tokens the scratch buffers serve, which have room for a multiple of [`SCRATCH_KEYS`] keys, where a
/// step sees `seen` keys. Without end for a full window, which always sees as many.
fn scratch_room(seen: usize, window: Option<usize>) -> usize {
    match window {
        Some(window) if window <= seen => usize::MAX,
        _ => seen.next_multiple_of(SCRATCH_KEYS) - seen,
    }
}

/// How many more tokens come before a buffer for `room` pooled keys is too small; `seen` counts the tokens so far, this
/// one included. Pooled key p is complete with token `compress_block_size + p * compress_stride`, counted from 1, so
/// key `room` is the first that does not fit.
fn pooled_room(room: usize, blocks: NsaBlocks, seen: usize) -> usize {
    blocks.compress_block_size + room * blocks.compress_stride - 1 - seen
}

/// Makes room for this token in a layer's cache. Returns how many further tokens fit before a buffer must grow.
fn tokens_until_growth(layer: &TokenLayer<Cuda>, cache: &mut TokenCache<'_, Cuda>) -> usize {
    match cache {
        // A new key takes the slot of an old one.
        TokenCache::Slots(_) => usize::MAX,
        TokenCache::Recent(cache) => {
            let spec = layer.attention.spec;
            let room = recent_room(cache, spec.kept_keys());
            // A query that reads bands sees its last new key when the text is as long as the last band's end.
            let full = spec.kept_keys().map(|[first, last]| first + last);
            scratch_room(cache.len() + 1, full).min(room)
        }
        TokenCache::Selector(cache) => {
            let room = cache.reserve_token();
            match cache.reads {
                TokenKeys::Ends { first, last } => scratch_room(cache.keys.len() + 1, Some(first + last)).min(room),
                TokenKeys::Pages { .. } | TokenKeys::Largest(_) => room,
            }
        }
        TokenCache::Chosen { keys, pooled, choice } => {
            pooled.reserve(1, pooled.len());
            recent_room(keys, None).min(pooled_room(pooled.room(), choice.blocks, keys.len() + 1))
        }
        TokenCache::Branches { compressed, selected, window, tail, blocks } => {
            let size = layer.attention.spec.window_size;
            compressed.reserve(1, compressed.len());
            let seen = selected.len() + 1;
            let rooms = [
                recent_room(selected, None),
                recent_room(window, size.map(|size| [0, size])),
                scratch_room(window.len() + 1, size),
                recent_room(tail, Some([0, blocks.compress_block_size])),
                pooled_room(compressed.k.room(), *blocks, seen),
            ];
            rooms.into_iter().min().unwrap_or(0)
        }
        TokenCache::Latents(latents, scales) => {
            latents.reserve(1, latents.len());
            if let Some(scales) = scales {
                scales.reserve(1, scales.len());
            }
            latents.room() - (latents.len() + 1)
        }
    }
}

/// Runs the step on tensors whose launches `tape` records for the graph. Returns the step's inputs and the logits.
fn run(step: &mut TokenStep<'_, Cuda>, tape: &StepTape) -> Result<(StepInputs, CudaTensor), KernelError> {
    let ids = kernel_tensor(step.ids.clone().into_primitive());
    let inputs = StepInputs::new(tape, &ids, &positions_of(step.before, &ids))?;
    let noted = |rope: &RotaryEmbedding<Cuda>| {
        [&rope.cos, &rope.sin].map(|table| tape.noted(&cast(&primitive(table.clone()), burn::tensor::DType::F32)))
    };
    let (tables, still) = (noted(step.rope), step.rope.still.as_deref().map(noted));
    let epsilon = step.epsilon as f32;
    let mut scratch = Recent::default();
    let mut x = embedding_forward(&tape.noted(&of(&step.embedding)), &inputs.ids)?;
    for (layer, cache) in step.layers.iter().zip(&mut step.caches) {
        let layer = Layer {
            inputs: &inputs,
            tables: still.as_ref().filter(|_| !layer.rotates).unwrap_or(&tables).each_ref(),
            epsilon,
            before: step.before,
            policy: step.policy,
            tape,
            layer,
            attention: &layer.attention,
        };
        x = layer.run(x, cache, &mut scratch)?;
    }
    let (norm, output) = (tape.noted(&of(&step.norm)), tape.noted(&of(&step.output)));
    let logits = project((step.before, step.policy), Vectors::Normed(&x, &norm, epsilon), &output, Epilogue::Stored)?;
    let [batch, _, vocab_size] = logits.dims(NAME, "logits")?;
    Ok((inputs, logits.reshaped(NAME, "logits", &[batch, vocab_size])?))
}

/// Buffers of decode kernels by the heads of a call and its keys at most.
type Scratch = KernelScratch;

/// One block of a step, attention and feed-forward layer, and the step's shared operands.
struct Layer<'s> {
    inputs: &'s StepInputs,
    tables: [&'s CudaTensor; 2],
    epsilon: f32,
    /// Tokens before this one when the step is recorded.
    before: TokensBefore<'s>,
    policy: KernelPolicy,
    tape: &'s StepTape,
    layer: &'s TokenLayer<Cuda>,
    attention: &'s TokenAttention<Cuda>,
}

impl Layer<'_> {
    /// The block's output for the residual stream `x`; adds the token to the cache.
    fn run(
        &self,
        x: CudaTensor,
        cache: &mut TokenCache<'_, Cuda>,
        scratch: &mut Scratch,
    ) -> Result<CudaTensor, KernelError> {
        let norms = [0, 1].map(|n| self.noted(&self.layer.norms[n]));
        let epsilon = self.epsilon;
        let normed = Vectors::Normed(&x, &norms[0], epsilon);
        let bias = self.attention.qkv_bias.as_ref();
        let bias = bias.map(|bias| of(&bias.clone().unsqueeze::<3>().repeat_dim(0, self.batch())).contiguous());
        let bias = bias.map(|bias| self.tape.noted(&bias));
        let weight = self.noted(&self.attention.qkv);
        let qkv = match &bias {
            None => self.project(normed, &weight, Epilogue::Stored)?,
            Some(bias) if is_vectors((self.before, self.policy), &x) => {
                self.project(normed, &weight, Epilogue::Added(bias))?
            }
            // As in whole rows, the bias is added to the rounded product.
            Some(bias) => residual_add(bias, &self.project(normed, &weight, Epilogue::Stored)?)?,
        };
        let attended = self.attend(normed, &qkv, cache, scratch)?;
        let [o, down, gate_up] = [&self.attention.o, &self.layer.down, &self.layer.gate_up].map(|w| self.noted(w));
        let x = self.project(Vectors::Plain(&attended), &o, Epilogue::Added(&x))?;
        let h = self.project(Vectors::Normed(&x, &norms[1], epsilon), &gate_up, Epilogue::SwiGlu)?;
        self.project(Vectors::Plain(&h), &down, Epilogue::Added(&x))
    }

    /// How many tokens of the longest row a cache holds, and how many before them it has dropped. A step for rows of
    /// different lengths is recorded as for a full cache, so that the graph serves rows of any length.
    fn held_and_dropped(&self, keys: &KeyCache<Cuda>) -> [usize; 2] {
        match self.before {
            TokensBefore::Same(position) => [keys.len(), position - keys.len()],
            TokensBefore::Each(_) => [keys.k.room() - 1, 0],
        }
    }

    fn batch(&self) -> usize {
        self.inputs.ids.num_elements()
    }

    /// As the function [`project`], for the rows of this step.
    fn project(&self, rows: Vectors<'_>, weight: &CudaTensor, finish: Epilogue<'_>) -> Result<CudaTensor, KernelError> {
        project((self.before, self.policy), rows, weight, finish)
    }

    /// The tensor as an operand of launches that the tape records.
    fn noted<const D: usize>(&self, tensor: &Tensor<Cuda, D>) -> CudaTensor {
        self.tape.noted(&of(tensor))
    }

    /// A weight without gaps between its rows, which Burn may leave: a copy where there are some.
    fn without_gaps<const D: usize>(&self, tensor: &Tensor<Cuda, D>) -> CudaTensor {
        self.tape.noted(&of(tensor).contiguous())
    }

    /// A weight in f32, without gaps between its rows.
    fn in_f32<const D: usize>(&self, tensor: &Tensor<Cuda, D>) -> CudaTensor {
        let tensor = cast(&primitive(tensor.clone()), burn::tensor::DType::F32);
        self.tape.noted(&tensor.contiguous())
    }

    /// Number of tokens before this one, for each row, `[batch]`.
    fn length(&self) -> Result<CudaTensor, KernelError> {
        self.inputs.position.reshaped(NAME, "length", &[self.batch()])
    }

    /// Norms where there are some, and rotation to `positions`, of packed heads `[batch, 1, heads * head_dim]`.
    fn rotated(
        &self,
        packed: &CudaTensor,
        norm: Option<&QkNorm<Cuda>>,
        positions: &CudaTensor,
        num_kv_heads: usize,
    ) -> Result<CudaTensor, KernelError> {
        // The tables have one cosine for each pair of a head's columns.
        let head_dim = 2 * self.tables[0].shape()[1];
        let heads = packed.num_elements() / (self.batch() * head_dim);
        let packed = packed.reshaped(NAME, "packed", &[self.batch(), 1, heads, head_dim])?;
        match norm {
            None => rope(&packed, positions, self.tables, num_kv_heads),
            Some(norm) => QkNormRope {
                q_weight: &self.noted(&norm.q_weight),
                k_weight: &self.noted(&norm.k_weight),
                positions,
                cos: self.tables[0],
                sin: self.tables[1],
                num_kv_heads,
                epsilon: norm.epsilon as f32,
            }
            .qk_norm_rope_forward(&packed),
        }
    }

    /// Attention of the token from its packed projection `qkv` on (latent attention: from its queries),
    /// `[batch, 1, num_heads * head_dim]`. Other projections of the layer read `normed`.
    fn attend(
        &self,
        normed: Vectors<'_>,
        qkv: &CudaTensor,
        cache: &mut TokenCache<'_, Cuda>,
        scratch: &mut Scratch,
    ) -> Result<CudaTensor, KernelError> {
        let (spec, batch, length) = (self.attention.spec, self.batch(), self.length()?);
        let (num_heads, num_kv_heads) = (spec.num_heads, spec.num_kv_heads);
        match cache {
            TokenCache::Latents(latents, scales) => {
                return self.attend_latents(normed, qkv, latents, scales.as_deref_mut());
            }
            TokenCache::Recent(keys) => return self.attend_recent(qkv, keys, scratch),
            TokenCache::Chosen { keys, pooled, choice } => {
                let pooled = PooledStep { pooled: &self.buffer(pooled), start: &self.inputs.start, choice: *choice };
                return self.attend_chosen_blocks(normed, qkv, keys, pooled, scratch);
            }
            _ => {}
        }
        let qk_norm = self.attention.qk_norm.as_ref();
        let qkv_rotated = self.rotated(qkv, qk_norm, &self.inputs.position, num_kv_heads)?;
        let token = Qkv::packed(&qkv_rotated, num_heads, num_kv_heads).under(self.policy);
        let shape = token.shape(NAME)?;
        let o = match cache {
            TokenCache::Slots(cache) => {
                self.attend_slots(&token, cache, self.attention.dma.as_ref(), &length, scratch)?
            }
            TokenCache::Selector(cache) => self.attend_by_selector(&token, cache, &length, scratch)?,
            TokenCache::Branches { .. } => self.attend_branches(&token, qkv, normed, cache, &length, scratch)?,
            TokenCache::Latents(..) | TokenCache::Recent(_) | TokenCache::Chosen { .. } => unreachable!("taken above"),
        };
        o.reshaped(NAME, "o", &[batch, 1, num_heads * shape.head_dim])
    }

    /// A step that sees all of at most `max_length` cached keys.
    fn whole_step(&self, max_length: usize) -> DecodeStep<'static> {
        DecodeStep::new(max_length, self.attention.spec.softmax_scale as f32)
    }

    /// Attention of `token` over the keys that a selector chooses for it.
    fn attend_by_selector(
        &self,
        token: &Qkv,
        cache: &mut SelectorCache<Cuda>,
        length: &CudaTensor,
        scratch: &mut Scratch,
    ) -> Result<CudaTensor, KernelError> {
        let ([len, _], kv) = (self.held_and_dropped(&cache.keys), self.cache(&mut cache.keys));
        let seen = match cache.reads {
            TokenKeys::Ends { .. } => len + 1,
            // Replays for later tokens read more keys, at most as many as the buffers hold.
            TokenKeys::Pages { .. } | TokenKeys::Largest(_) => cache.keys.k.room(),
        };
        let (choosers, seen) = SelectorStep::scratch(cache.reads, token.shape(NAME)?, seen);
        let bounds = cache.bounds.as_mut().map(|bounds| self.buffer(bounds));
        let choice = SelectorStep { length, start: &self.inputs.start, keys: cache.reads, bounds: bounds.as_ref() };
        let buffers = scratch_of(scratch, &kv.k, choosers, seen)?;
        kv.selector_decode(token, self.whole_step(len), choice, &buffers)
    }

    /// Attention over the blocks that the token chooses, or that its indexer chooses, from the packed projection `qkv`
    /// on. The launch that scores blocks rotates the token and adds it to the cache.
    fn attend_chosen_blocks(
        &self,
        normed: Vectors<'_>,
        qkv: &CudaTensor,
        keys: &mut KeyCache<Cuda>,
        pooled: PooledStep<'_>,
        scratch: &mut Scratch,
    ) -> Result<CudaTensor, KernelError> {
        let (batch, length, spec) = (self.batch(), self.length()?, self.attention.spec);
        let ([len, _], kv) = (self.held_and_dropped(keys), self.cache(keys));
        let (qkv, weights) = (self.heads_of(qkv)?, self.norm_weights(self.attention.qk_norm.as_ref()));
        let token = Qkv::packed(&qkv, spec.num_heads, spec.num_kv_heads).under(self.policy);
        let rotation = self.rotation(&weights);
        let shape = token.shape(NAME)?;
        let num_kv_heads = pooled.choice.choices_per_token([spec.num_heads, spec.num_kv_heads]);
        let choosers = AttentionShape { num_kv_heads, ..shape };
        let blocks = pooled.choice.blocks;
        let seen = blocks.num_selected_blocks * blocks.select_block_size;
        let buffers = scratch_of(scratch, &kv.k, choosers, seen)?;
        let o = if let TokenExtra::Indexer { proj, norm } = &self.attention.extra {
            let index = self.project(normed, &self.noted(proj), Epilogue::Stored)?;
            let index = index.reshaped(NAME, "index", &[batch, 1, spec.num_kv_heads + 1, shape.head_dim])?;
            let heads = [(0, spec.num_kv_heads), (spec.num_kv_heads, 1)];
            let [index_q, index_k] = heads.map(|(first, count)| Heads::some(&index, first, count));
            let index_weights = [&norm.q_weight, &norm.k_weight].map(|w| self.noted(w));
            let call = IndexedToken {
                token: &token,
                index: [&index_q, &index_k],
                rotation,
                index_norm: (index_weights.each_ref(), norm.epsilon as f32),
            };
            kv.indexed_decode(call, &length, self.whole_step(len), pooled, &buffers)?
        } else {
            kv.chosen_decode(&token, rotation, &length, self.whole_step(len), pooled, &buffers)?
        };
        o.reshaped(NAME, "o", &[batch, 1, spec.num_heads * shape.head_dim])
    }

    /// A packed projection as its heads, `[batch, 1, num_heads + 2 * num_kv_heads, head_dim]`.
    fn heads_of(&self, qkv: &CudaTensor) -> Result<CudaTensor, KernelError> {
        let spec = self.attention.spec;
        let heads = spec.num_heads + 2 * spec.num_kv_heads;
        let head_dim = qkv.num_elements() / (self.batch() * heads);
        qkv.reshaped(NAME, "qkv", &[self.batch(), 1, heads, head_dim])
    }

    /// Weights of the norms of queries and keys, and their epsilon.
    fn norm_weights(&self, norm: Option<&QkNorm<Cuda>>) -> Option<([CudaTensor; 2], f32)> {
        norm.map(|norm| ([&norm.q_weight, &norm.k_weight].map(|w| self.noted(w)), norm.epsilon as f32))
    }

    /// A rotation that a launch does itself, after these norms.
    fn rotation<'w>(&'w self, weights: &'w Option<([CudaTensor; 2], f32)>) -> TokenRotation<'w> {
        let norm = weights.as_ref().map(|(weights, epsilon)| (weights.each_ref(), *epsilon));
        TokenRotation { norm, tables: self.tables }
    }

    /// Attention of NSA's three branches, added up by their gates. `token` are the heads of the window branch, rotated
    /// from the packed projection `qkv`.
    fn attend_branches(
        &self,
        token: &Qkv,
        qkv: &CudaTensor,
        normed: Vectors<'_>,
        cache: &mut TokenCache<'_, Cuda>,
        length: &CudaTensor,
        scratch: &mut Scratch,
    ) -> Result<CudaTensor, KernelError> {
        let (TokenCache::Branches { compressed, selected, window, tail, blocks }, TokenExtra::Branches(weights)) =
            (cache, &self.attention.extra)
        else {
            unreachable!("NSA's caches are its layers'")
        };
        let fine = self.selected_token(token, normed, weights)?;
        let coarse = self.compressed_token(token, qkv, normed, weights)?;
        let (near_step, near, near_seen) = self.recent_step(window);
        let ([len, _], [_, dropped], all) =
            (self.held_and_dropped(selected), self.held_and_dropped(tail), self.cache(selected));
        let room = compressed.k.room();
        let (compressed, tail) = (self.cache(compressed), self.cache(tail));
        let mlp = weights.mlp.as_ref().map(|mlp| mlp.each_ref().map(|w| w.each_ref().map(|w| self.without_gaps(w))));
        let (shape, chosen) = (token.shape(NAME)?, blocks.num_selected_blocks * blocks.select_block_size);
        let [of_compressed, of_chosen, of_near] =
            [room, chosen, near_seen].map(|keys| scratch_of(scratch, &all.k, shape, keys));
        let buffers = [of_compressed?, of_chosen?, of_near?];
        let token = NsaToken {
            branches: [&coarse, &fine, token],
            caches: [&compressed, &all, &near],
            tail: (&tail, dropped),
            mlp: mlp.as_ref().map(|mlp| mlp.each_ref().map(|w| w.each_ref())),
            start: &self.inputs.start,
            blocks: *blocks,
        };
        let branches = token.decode(length, [self.whole_step(len), near_step], buffers.each_ref())?;
        let logits = self.gate_logits(normed, &weights.gate)?;
        nsa_gates(branches.each_ref(), &logits, &self.in_f32(&weights.gate_bias))
    }

    /// Logits of NSA's gates, `[batch, 1, 3 * num_heads]`: numbers of columns for which no GEMM has one order of sums.
    fn gate_logits(&self, normed: Vectors<'_>, gate: &Tensor<Cuda, 2>) -> Result<CudaTensor, KernelError> {
        match normed {
            Vectors::Normed(x, norm, epsilon) if self.policy.sums == SumOrder::Fixed => {
                linear_in_order(&rms_norm_forward(x, norm, epsilon)?, &self.without_gaps(gate))
            }
            _ => self.project(normed, &self.noted(gate), Epilogue::Stored),
        }
    }

    /// Attention of `token` over DMA's slots, or, without DMA, over the keys that were kept of a prompt.
    fn attend_slots(
        &self,
        token: &Qkv,
        cache: &mut DmaCache<Cuda>,
        dma: Option<&DmaLayer<Cuda>>,
        length: &CudaTensor,
        scratch: &mut Scratch,
    ) -> Result<CudaTensor, KernelError> {
        let (spec, shape) = (self.attention.spec, token.shape(NAME)?);
        let (num_kv_heads, scale) = (spec.num_kv_heads, spec.softmax_scale as f32);
        let (window, slots) = (cache.window.keep_window_size, slots_of(cache));
        let buffers = scratch_of(scratch, &slots.kv.k, shape, window)?;
        let slots = DmaSlots {
            z: self.tape.noted(&slots.z),
            positions: self.tape.noted(&slots.positions),
            kv: self.noted_cache(&slots.kv),
            ..slots
        };
        let Some(dma) = dma else {
            // The slots are full, so the launches do not depend on how many tokens came before.
            return slots.heavy_decode(token, length, window, scale, &buffers);
        };
        let (w_dt, a) = (self.in_f32(&dma.w_dt), self.in_f32(&dma.a));
        let slopes = dma.spec.slopes(num_kv_heads);
        let slopes = slopes.map(|slopes| slopes.iter().map(|&slope| slope as f32).collect::<Vec<_>>());
        let recency = slopes
            .as_deref()
            .map(|slopes| Recency { slopes, origin: PositionOrigin::DocumentStart(&self.inputs.start) });
        let rank = token.v.dma_ranks(&w_dt, &a, recency.as_ref())?.z;
        let rank = rank.reshaped(NAME, "rank", &[self.batch(), num_kv_heads])?;
        let bias = dma.spec.bias.into();
        if slots.has_one_order(token) {
            return slots.dma_decode_in_order(token, &rank, length, scale, bias);
        }
        slots.dma_decode(token, &rank, length, scale, bias, &buffers)
    }

    /// Operands of a step over a cache of all keys or of a window's: the step's sizes, the cache's buffers, and the
    /// most keys that the step sees.
    fn recent_step(&self, keys: &mut KeyCache<Cuda>) -> (DecodeStep<'static>, KvCache, usize) {
        let ([len, num_dropped], spec) = (self.held_and_dropped(keys), self.attention.spec);
        let all = DecodeStep::new(len, spec.softmax_scale as f32);
        let step = DecodeStep { window: spec.window_size, far: spec.far_keys(), num_dropped, ..all };
        (step, self.cache(keys), step.most_keys(len + 1))
    }

    /// Attention over all cached keys or a window, from the packed projection `qkv` on. For one text a single launch
    /// rotates the token, adds it to the cache and attends.
    fn attend_recent(
        &self,
        qkv: &CudaTensor,
        keys: &mut KeyCache<Cuda>,
        scratch: &mut Scratch,
    ) -> Result<CudaTensor, KernelError> {
        let (spec, norm) = (self.attention.spec, self.attention.qk_norm.as_ref());
        let (qkv, weights) = (self.heads_of(qkv)?, self.norm_weights(norm));
        let token = Qkv::packed(&qkv, spec.num_heads, spec.num_kv_heads).under(self.policy);
        let rotation = self.rotation(&weights);
        let sinks = self.attention.sinks.as_ref().map(|sinks| self.noted(sinks));
        let (step, kv, seen) = self.recent_step(keys);
        let step = DecodeStep { sinks: sinks.as_ref(), ..step };
        let buffers = scratch_of(scratch, &kv.k, token.shape(NAME)?, seen)?;
        let length = self.length()?;
        let o = if self.batch() == 1 {
            kv.attention_decode_rotated(&token, rotation, &length, step, &buffers)?
        } else {
            // On an H200 four texts took 3 to 6 % longer without a launch for the rotation; two were not measured.
            let rotated = self.rotated(&qkv, norm, &self.inputs.position, spec.num_kv_heads)?;
            let token = Qkv::packed(&rotated, spec.num_heads, spec.num_kv_heads).under(self.policy);
            kv.attention_decode(&token, &length, step, &buffers)?
        };
        let width = o.num_elements() / self.batch();
        o.reshaped(NAME, "o", &[self.batch(), 1, width])
    }

    /// Query, key and value of NSA's selected branch: those of the window branch, `token`, or its query with key and
    /// value from the selected branch's own projection.
    fn selected_token(
        &self,
        token: &Qkv,
        normed: Vectors<'_>,
        weights: &TokenBranches<Cuda>,
    ) -> Result<Qkv, KernelError> {
        let Some(kv) = &weights.select_kv else {
            return Ok(token.clone());
        };
        let kv = self.project(normed, &self.noted(kv), Epilogue::Stored)?;
        self.with_kv(token, &kv, &self.inputs.position)
    }

    /// Query, key and value of NSA's compressed branch; `token` are the window branch's. With compression MLPs, learned
    /// position embeddings replace the rotation, so all heads are rotated as at position 0.
    fn compressed_token(
        &self,
        token: &Qkv,
        qkv: &CudaTensor,
        normed: Vectors<'_>,
        weights: &TokenBranches<Cuda>,
    ) -> Result<Qkv, KernelError> {
        let spec = self.attention.spec;
        let kv = weights.compress_kv.as_ref().map(|kv| self.project(normed, &self.noted(kv), Epilogue::Stored));
        let kv = kv.transpose()?;
        let (token, positions) = match &weights.mlp {
            None => (token.clone(), self.inputs.position.clone()),
            Some(_) => {
                let zeros = TensorData::new(vec![0i32; self.batch()], [self.batch(), 1]);
                let zeros = Tensor::<Cuda, 2, Int>::from_data(zeros, device_of(qkv));
                let zeros = self.tape.noted(&kernel_tensor(zeros.into_primitive()));
                let unrotated = self.rotated(qkv, self.attention.qk_norm.as_ref(), &zeros, spec.num_kv_heads)?;
                (Qkv::packed(&unrotated, spec.num_heads, spec.num_kv_heads), zeros)
            }
        };
        match kv {
            None => Ok(token),
            Some(kv) => self.with_kv(&token, &kv, &positions),
        }
    }

    /// The queries of a token with other keys and values, `[batch, 1, 2 * num_kv_heads * head_dim]`.
    fn with_kv(&self, token: &Qkv, kv: &CudaTensor, positions: &CudaTensor) -> Result<Qkv, KernelError> {
        let num_kv_heads = self.attention.spec.num_kv_heads;
        let kv = self.rotated(kv, self.attention.qk_norm.as_ref(), positions, num_kv_heads)?;
        let num_heads = 0;
        let kv = Qkv::packed(&kv, num_heads, num_kv_heads);
        Ok(Qkv { q: token.q.clone(), ..kv })
    }

    /// Latent attention of queries `q`, `[batch, 1, num_heads * key_dim]`.
    fn attend_latents(
        &self,
        normed: Vectors<'_>,
        q: &CudaTensor,
        latents: &mut TokenBuffer<Cuda, 3>,
        scales: Option<&mut TokenBuffer<Cuda, 3>>,
    ) -> Result<CudaTensor, KernelError> {
        let TokenExtra::Latent { down, norm, up, rope_dim } = &self.attention.extra else {
            unreachable!("a cache of latents is a latent layer's")
        };
        let (spec, batch) = (self.attention.spec, self.batch());
        let [_, rank] = up.dims();
        let head_dim = q.num_elements() / (batch * spec.num_heads) - rope_dim;
        let (up, down) = (self.without_gaps(up), self.project(normed, &self.noted(down), Epilogue::Stored)?);
        let width = rank + rope_dim;
        let [latent, k_rope] = [(0, rank), (rank, *rope_dim)]
            .map(|(first, columns)| down.view_at(NAME, "latent", first, &[batch, 1, columns], &[width, width, 1]));
        let latent = rms_norm_forward(&latent?, &self.noted(norm), self.epsilon)?;
        // Without norms of keys, attention over the cached latents does not read these keys and values.
        let kv = self.project(Vectors::Plain(&latent), &up, Epilogue::Stored)?;
        let weights = self.attention.qk_norm.as_ref();
        let weights = weights.map(|norm| [&norm.q_weight, &norm.k_weight].map(|w| self.noted(w)));
        let pack = MlaPack {
            num_heads: spec.num_heads,
            head_dim,
            rope_dim: *rope_dim,
            positions: &self.inputs.position,
            cos: self.tables[0],
            sin: self.tables[1],
            norm: weights.as_ref().zip(self.attention.qk_norm.as_ref()).map(|([q_weight, k_weight], norm)| MlaNorm {
                q_weight,
                k_weight,
                epsilon: norm.epsilon as f32,
            }),
        };
        let (packed, keys) = pack.mla_pack_forward([q, &kv, &k_rope?])?;
        let keys = weights.as_ref().zip(keys.as_ref());
        let token = LatentToken {
            packed: &packed,
            up: &up,
            latent: &latent,
            norm: keys.map(|([_, k_weight], [rotated, scale])| [k_weight, rotated, scale]),
            length: &self.length()?,
            heads: [spec.num_heads, head_dim, *rope_dim],
        };
        let scales = scales.map(|scales| self.buffer(scales));
        token.decode(&self.buffer(latents), scales.as_ref(), spec.softmax_scale as f32)
    }

    fn noted_cache(&self, KvCache { k, v }: &KvCache) -> KvCache {
        let [k, v] = [k, v].map(|x| self.tape.noted(x));
        KvCache { k, v }
    }

    /// The buffers of a layer's KV cache, which kernels write in place.
    fn cache(&self, keys: &mut KeyCache<Cuda>) -> KvCache {
        self.noted_cache(&writable(keys))
    }

    /// A buffer that kernels write in place; if it is not contiguous, it is replaced by a contiguous copy.
    fn buffer<const D: usize>(&self, tokens: &mut TokenBuffer<Cuda, D>) -> CudaTensor {
        self.tape.noted(&writable_buffer(tokens))
    }
}

/// Buffers for a call of `shape` with at most `keys` keys.
fn scratch_of(
    scratch: &mut Scratch,
    like: &CudaTensor,
    shape: AttentionShape,
    keys: usize,
) -> Result<DecodeScratch, KernelError> {
    let keys = keys.next_multiple_of(SCRATCH_KEYS);
    let made = scratch.get((shape, keys), || DecodeScratch::new(like, shape, keys));
    made.cloned()
}

/// The kernels' view of a tensor; no copy.
fn of<const D: usize>(tensor: &Tensor<Cuda, D>) -> CudaTensor {
    kernel_tensor(primitive(tensor.clone()))
}

/// The rows times a weight `[out, in]` with the epilogue `finish`: few rows by one fused kernel, more by a GEMM and
/// separate kernels before and after it, which have the bits of whole rows.
fn project(
    step: (TokensBefore<'_>, KernelPolicy),
    rows: Vectors<'_>,
    weight: &CudaTensor,
    finish: Epilogue<'_>,
) -> Result<CudaTensor, KernelError> {
    let (Vectors::Plain(x) | Vectors::Normed(x, ..)) = rows;
    if is_vectors(step, x) {
        return matrix_vector(rows, weight, finish);
    }
    let h = match rows {
        Vectors::Plain(x) => x.clone(),
        Vectors::Normed(x, norm, epsilon) => rms_norm_forward(x, norm, epsilon)?,
    };
    let product = || matmul(GemmKind::Nt, &h, weight, MatmulOutput::New(DType::BF16));
    match finish {
        Epilogue::Stored => product(),
        Epilogue::Added(residual) => gemm_plus_residual([h, weight.clone(), residual.clone()]),
        Epilogue::SwiGlu => swiglu_forward(&product()?),
    }
}

/// Whether rows, `[.., width]`, are few enough for the kernel of single rows, which adds in another order than whole
/// rows do. Four texts of their own are not, so that their tokens have the same bits among any number of others. On an
/// H200 four texts of an 85M model were as fast with a GEMM; two were slower by a third, so only a policy of sums in a
/// fixed order takes the GEMM for them.
fn is_vectors((before, policy): (TokensBefore<'_>, KernelPolicy), rows: &CudaTensor) -> bool {
    let most = match before {
        _ if policy.sums == SumOrder::Fixed => 0,
        TokensBefore::Same(_) => MAX_VECTORS,
        TokensBefore::Each(_) => MAX_VECTORS - 1,
    };
    num_rows(rows) <= most
}

/// Number of rows, `[.., width]`.
fn num_rows(x: &CudaTensor) -> usize {
    x.num_elements() / x.shape().last().copied().unwrap_or(1).max(1)
}
