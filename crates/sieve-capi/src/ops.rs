//! Turns a request into launches by sieve-gpu's wrappers, op by op.
use crate::plan::ALIGNMENT;
use crate::request::{Blocks, Call, Choice, PlanError, Request};
use sieve_core::{BlockChoice, CallShape, DmaWindow, ForcedBlocks, KeepOLow, KeyMask, MaskPlaces, NsaBlocks, Tiles};
use sieve_gpu::{
    AttentionGradients, AttentionResult, AttentionShape, CudaTensor, DType, DecodeScratch, DecodeStep, DmaSlots,
    KernelError, KernelPolicy, KeyLists, KvCache, LatentKeys, PositionOrigin, Qkv, Recency, Recorder, ScoreBias,
    ScoresBackward, SelectedBlocks, SumOrder, WARP_KEYS, dma_select, mla_decode, nsa_gates, nsa_gates_backward,
    nsa_mean_pool_backward,
};
use std::cell::Cell;

/// Inputs or outputs by name, in the order of their pointers. Outputs of one name are parts of one buffer.
pub(crate) type Named = Vec<(String, CudaTensor)>;

/// Records an op; returns its inputs and outputs.
pub(crate) fn record(request: &Request, gpu: &Recorder) -> Result<[Named; 2], PlanError> {
    let inputs = Inputs::new(request, gpu)?;
    let outputs = launches(&request.call, &inputs)?;
    inputs.all_used()?;
    let inputs = inputs.tensors.into_iter().map(|(name, tensor, _)| (name, tensor));
    let outputs = outputs.into_iter().map(|(name, tensor)| (name.to_owned(), tensor));
    Ok([inputs.collect(), outputs.collect()])
}

impl Call {
    /// Name of the op in requests.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::AttentionForward { .. } => "attention_forward",
            Self::AttentionBackward { .. } => "attention_backward",
            Self::DmaScores { .. } => "dma_scores",
            Self::DmaScoresBackward {} => "dma_scores_backward",
            Self::DmaSelect { .. } => "dma_select",
            Self::DmaAttentionForward { .. } => "dma_attention_forward",
            Self::DmaAttentionBackward { .. } => "dma_attention_backward",
            Self::NsaMeanPool { .. } => "nsa_mean_pool",
            Self::NsaMeanPoolBackward { .. } => "nsa_mean_pool_backward",
            Self::NsaCompressedForward { .. } => "nsa_compressed_forward",
            Self::NsaCompressedBackward { .. } => "nsa_compressed_backward",
            Self::NsaSelectedForward { .. } => "nsa_selected_forward",
            Self::NsaSelectedBackward { .. } => "nsa_selected_backward",
            Self::NsaGatesBackward {} => "nsa_gates_backward",
            Self::NsaForward { .. } => "nsa_forward",
            Self::DmaForward { .. } => "dma_forward",
            Self::ChooseBlocks { .. } => "choose_blocks",
            Self::ChosenForward { .. } => "chosen_forward",
            Self::SelectedForward { .. } => "selected_forward",
            Self::BlockSparse { .. } => "block_sparse",
            Self::AttentionDecode { .. } => "attention_decode",
            Self::CachedDecode { .. } => "cached_decode",
            Self::DmaDecode { .. } => "dma_decode",
            Self::MlaDecode { .. } => "mla_decode",
        }
    }
}

/// Outputs of an op, in the order of their pointers.
type Outputs = Vec<(&'static str, CudaTensor)>;

/// Records the launches of an op on its inputs `t`; returns its outputs.
fn launches(call: &Call, t: &Inputs) -> Result<Outputs, PlanError> {
    match call {
        &Call::AttentionForward { scale, window, only_o } => {
            let (start, bias) = (t.get("doc_start")?, t.maybe("bias"));
            let bias = bias.as_ref().map(|bias| (bias, o_low(only_o)));
            Ok(result(t.qkv()?.attention_forward(&start, window, scale, bias)?, only_o))
        }
        &Call::AttentionBackward { scale, window, fixed_order } => {
            let [start, end] = t.documents()?;
            t.gradients(scale, fixed_order, |call| {
                call.attention_backward([&start, &end], window, t.maybe("bias").as_ref())
            })
        }
        Call::DmaScores { slopes } => {
            let (v, w_dt, a) = (t.get("v")?, t.get("w_dt")?, t.get("a")?);
            // No launch reads queries or keys; the values stand in for them.
            let (qkv, start) = (Qkv::separate(&v, &v, &v), t.maybe("doc_start"));
            let scores = qkv.dma_ranks(&w_dt, &a, recency(slopes, start.as_ref())?.as_ref())?;
            Ok(vec![("x", scores.x), ("z", scores.z)])
        }
        Call::DmaScoresBackward {} => {
            let (v, w_dt, a) = (t.get("v")?, t.get("w_dt")?, t.get("a")?);
            let dv = v.zeros_contiguous(v.shape(), DType::BF16);
            let backward = ScoresBackward {
                qkv: &Qkv::separate(&v, &v, &v),
                w_dt: &w_dt,
                a: &a,
                x: &t.get("x")?,
                dz: &t.get("dz")?,
            };
            let (dw_dt, da) = backward.dma_scores_backward(&Qkv::separate(&dv, &dv, &dv))?;
            Ok(vec![("dv", dv), ("dw_dt", dw_dt), ("da", da)])
        }
        &Call::DmaSelect { keep, local } => {
            let (expire, lists) = selection(&t.get("rank")?, keep, local, &t.documents()?)?;
            let lists = lists.into_iter().flat_map(of_lists);
            Ok([("expire", expire)].into_iter().chain(lists).collect())
        }
        &Call::DmaAttentionForward { scale, only_o } => {
            let (bias, lists) = (t.get("bias")?, t.lists()?);
            let forward = t.qkv()?.dma_attention_forward(&bias, &lists, scale, o_low(only_o))?;
            Ok(result(forward, only_o))
        }
        &Call::DmaAttentionBackward { scale, fixed_order } => {
            let (bias, lists) = (t.get("bias")?, t.lists()?);
            t.gradients(scale, fixed_order, |call| call.dma_attention_backward(&bias, &lists).map(Some))
        }
        Call::NsaMeanPool { blocks } => {
            let (k, v, [start, end]) = (t.get("k")?, t.get("v")?, t.documents()?);
            let blocks = blocks.checked()?;
            let pooled = Qkv::separate(&k, &k, &v).nsa_mean_pool([&start, &end], blocks)?;
            let [batch, seq_len, kv_heads, head_dim] = k.dims("nsa_mean_pool", "k")?;
            let shape = [2, batch, blocks.num_slots(seq_len), kv_heads, head_dim];
            let pooled = pooled.reshaped("nsa_mean_pool", "compressed", &shape)?;
            Ok(vec![("compressed", pooled)])
        }
        Call::NsaMeanPoolBackward { blocks } => {
            let (k, [start, end], blocks) = (t.get("k")?, t.documents()?, blocks.checked()?);
            let d_compressed = t.compressed("d_compressed", blocks)?;
            let shape = Qkv::separate(&k, &k, &k).shape("nsa_mean_pool")?;
            let dqkv = nsa_mean_pool_backward(&shape, [&start, &end], blocks, &d_compressed)?;
            Ok(vec![("dqkv", dqkv)])
        }
        Call::NsaCompressedForward { scale, blocks } => {
            let ([start, end], blocks) = (t.documents()?, blocks.checked()?);
            let compressed = t.compressed("compressed", blocks)?;
            let queries = t.queries_of_blocks(&t.get("q")?, &compressed, blocks)?;
            let forward = queries.nsa_compressed_attention_forward([&start, &end], &compressed, blocks, *scale);
            let (forward, indices) = forward?;
            Ok(vec![("o", forward.o), ("lse", forward.lse), ("block_indices", indices)])
        }
        Call::NsaCompressedBackward { scale, blocks, fixed_order } => {
            let ([start, end], blocks) = (t.documents()?, blocks.checked()?);
            let compressed = t.compressed("compressed", blocks)?;
            let queries = t.queries_of_blocks(&t.q_in(*fixed_order)?, &compressed, blocks)?;
            let [dqkv, d_compressed] = queries.nsa_compressed_attention_backward(
                [&start, &end],
                &compressed,
                blocks,
                *scale,
                &t.result()?,
                &t.get("d_o")?,
            )?;
            let shape = t.get("compressed")?;
            let d_compressed = d_compressed.reshaped(t.op, "d_compressed", shape.shape())?;
            Ok(vec![("dqkv", dqkv), ("d_compressed", d_compressed)])
        }
        Call::NsaSelectedForward { scale, blocks } => {
            let (indices, [start, end]) = (t.get("block_indices")?, t.documents()?);
            let blocks = blocks.checked()?;
            let (forward, _) = t.qkv()?.nsa_selected_attention_forward([&start, &end], &indices, blocks, *scale)?;
            let only_o = false;
            Ok(result(forward, only_o))
        }
        Call::NsaSelectedBackward { scale, blocks, fixed_order } => {
            let (indices, [start, end]) = (t.get("block_indices")?, t.documents()?);
            let blocks = blocks.checked()?;
            t.gradients(*scale, *fixed_order, |call| {
                call.nsa_selected_attention_backward([&start, &end], &indices, blocks, &[])?;
                Ok(None)
            })
        }
        Call::NsaGatesBackward {} => {
            let [a, b, c] = [t.get("compressed")?, t.get("selected")?, t.get("window")?];
            let [logits, bias] = t.gates()?;
            let gradients = nsa_gates_backward([&a, &b, &c], &logits, &bias, &t.get("d_o")?)?;
            let names = ["d_compressed", "d_selected", "d_window"];
            let mut outputs: Outputs = names.into_iter().zip(gradients.branches).collect();
            let [logits, bias] = [t.get("logits")?, t.get("gate_bias")?];
            outputs.extend([
                ("d_logits", gradients.logits.reshaped(t.op, "d_logits", logits.shape())?),
                ("d_bias", gradients.bias.reshaped(t.op, "d_bias", bias.shape())?),
            ]);
            Ok(outputs)
        }
        &Call::NsaForward { scale, blocks, window, only_o } => {
            let (qkv, [start, end], blocks) = (t.qkv()?, t.documents()?, blocks.checked()?);
            let (documents, compressed) = ([&start, &end], t.compressed("compressed", blocks)?);
            let queries = t.queries_of_blocks(&t.get("q")?, &compressed, blocks)?;
            let (coarse, indices) = queries.nsa_compressed_attention_forward(documents, &compressed, blocks, scale)?;
            let (selected, _) = qkv.nsa_selected_attention_forward(documents, &indices, blocks, scale)?;
            let near = qkv.attention_forward(&start, Some(window), scale, None)?;
            let [logits, bias] = t.gates()?;
            let o = nsa_gates([&coarse.o, &selected.o, &near.o], &logits, &bias)?;
            let mut outputs = vec![("o", o)];
            let kept = [
                ("compressed_o", coarse.o),
                ("compressed_lse", coarse.lse),
                ("block_indices", indices),
                ("selected_o", selected.o),
                ("selected_lse", selected.lse),
                ("window_o", near.o),
                ("window_lse", near.lse),
            ];
            outputs.extend(kept.into_iter().filter(|_| !only_o));
            Ok(outputs)
        }
        &Call::DmaForward { scale, keep, local, ref slopes, linear, only_o } => {
            let (qkv, w_dt, a, documents) = (t.qkv()?, t.get("w_dt")?, t.get("a")?, t.documents()?);
            let recency = recency(slopes, Some(&documents[0]))?;
            let (scores, bias) = qkv.dma_ranks_and_bias(&w_dt, &a, recency.as_ref(), score_bias(linear))?;
            let (_, lists) = selection(&scores.z, keep, local, &documents)?;
            let o_low = o_low(only_o);
            let forward = match &lists {
                Some(lists) => qkv.dma_attention_forward(&bias, lists, scale, o_low)?,
                None => qkv.attention_forward(&documents[0], None, scale, Some((&bias, o_low)))?,
            };
            let mut outputs = result(forward, only_o);
            if !only_o {
                outputs.extend([("x", scores.x), ("z", scores.z)]);
                outputs.extend((!linear).then_some(("bias", bias)));
                outputs.extend(lists.into_iter().flat_map(of_lists));
            }
            Ok(outputs)
        }
        Call::ChooseBlocks(choice) => {
            let chosen = t.chosen(choice, ["q", "k"], &t.documents()?)?;
            Ok(vec![("block_indices", chosen)])
        }
        Call::ChosenForward(choice) => {
            let documents = t.documents()?;
            let by = match t.maybe("index_q") {
                Some(_) => ["index_q", "index_k"],
                None => ["q", "k"],
            };
            let (chosen, [start, end]) = (t.chosen(choice, by, &documents)?, &documents);
            let Blocks(_, _, size, count) = choice.blocks;
            let blocks = match by {
                // An indexer's means are of single tokens; attention reads blocks alone.
                ["index_q", _] => Blocks(size, size, size, count),
                _ => choice.blocks,
            };
            let (qkv, blocks) = (t.qkv()?, blocks.checked()?);
            let (forward, _) = qkv.nsa_selected_attention_forward([start, end], &chosen, blocks, choice.scale)?;
            let mut outputs = result(forward, choice.only_o);
            outputs.extend((!choice.only_o).then_some(("block_indices", chosen)));
            Ok(outputs)
        }
        &Call::SelectedForward { scale, block, only_o, block_sums } => {
            let (indices, counts, [start, end]) = (t.get("indices")?, t.maybe("counts"), t.documents()?);
            let selected = SelectedBlocks { indices: &indices, counts: counts.as_ref(), block };
            let forward = t.qkv()?.selected_attention_forward([&start, &end], selected, scale, block_sums)?;
            let mut outputs = result(forward.result, only_o);
            outputs.extend((!only_o).then_some(("block_indices", forward.block_indices)));
            outputs.extend(forward.block_sums.map(|sums| ("block_sums", sums)));
            Ok(outputs)
        }
        Call::BlockSparse { scale, block } => {
            let (qkv, words) = (t.qkv()?, t.get("words")?);
            let mask = block_mask(qkv.shape("block_sparse")?, *block, words)?;
            let only_o = false;
            Ok(result(qkv.sparse_attention_forward(&mask, *scale)?, only_o))
        }
        &Call::AttentionDecode { scale, window } => {
            let (token, cache) = (t.qkv()?, t.cache()?);
            let shape = token.shape("attention_decode")?;
            let [_, _, capacity, _] = cache.k.dims("attention_decode", "k_cache")?;
            let step = DecodeStep { window, ..DecodeStep::new(capacity.saturating_sub(1), scale) };
            let max_keys = window.unwrap_or(capacity).min(capacity);
            let scratch = DecodeScratch::new(&cache.k, shape, max_keys)?;
            Ok(vec![("o", cache.attention_decode(&token, &t.get("length")?, step, &scratch)?)])
        }
        &Call::CachedDecode { scale, window, block } => cached_decode(t, scale, window, block),
        &Call::DmaDecode { scale, local, linear } => {
            let (token, kv) = (t.qkv()?, t.cache()?);
            let shape = token.shape("dma_decode")?;
            let [_, _, capacity, _] = kv.k.dims("dma_decode", "k_cache")?;
            let scratch = DecodeScratch::new(&kv.k, shape, capacity)?;
            let slots = DmaSlots { kv, z: t.get("z_cache")?, positions: t.get("positions")?, local_window_size: local };
            let bias = score_bias(linear);
            let o = slots.dma_decode(&token, &t.get("z")?, &t.get("length")?, scale, bias, &scratch)?;
            Ok(vec![("o", o)])
        }
        &Call::MlaDecode { scale, rank } => {
            let (q, latents, key_scale) = (t.get("q")?, t.get("latents")?, t.maybe("key_scale"));
            let length = t.maybe("length");
            let keys = LatentKeys { latents: &latents, rank, key_scale: key_scale.as_ref(), length: length.as_ref() };
            Ok(vec![("o", mla_decode(&q, keys, scale)?)])
        }
    }
}

/// Records attention of one token a row over a cache that holds its key; of chosen blocks of `block` keys where the
/// request has them.
fn cached_decode(t: &Inputs, scale: f32, window: Option<usize>, block: Option<usize>) -> Result<Outputs, PlanError> {
    let (q, cache, length) = (t.get("q")?, t.cache()?, t.get("length")?);
    let [batch, tokens, _, head_dim] = q.dims(t.op, "q")?;
    let [_, kv_heads, capacity, head_dim_v] = cache.v.dims(t.op, "v_cache")?;
    // Stand in for the new token's k and v, which no launch reads.
    let unread = [head_dim, head_dim_v].map(|d| q.empty_contiguous(&[batch, tokens, kv_heads, d], DType::BF16));
    let token = Qkv::separate(&q, &unread[0], &unread[1]);
    let shape = token.shape(t.op)?;
    let step = DecodeStep { window, ..DecodeStep::new(capacity, scale) };
    let max_keys = window.unwrap_or(capacity).min(capacity);
    let o = match (t.maybe("chosen"), block) {
        (None, None) => {
            let scratch = DecodeScratch::new(&cache.k, shape, max_keys)?;
            cache.attention_decode_cached(&token, &length, step, &scratch)?
        }
        (Some(chosen), Some(block)) => {
            if block == 0 || !block.is_multiple_of(WARP_KEYS) {
                let supported = format!("multiples of {WARP_KEYS}");
                return Err(KernelError::unsupported(t.op, "block", block, supported).into());
            }
            let [_, num_kv_heads, num_chosen] = chosen.dims(t.op, "chosen")?;
            let fits = |heads: usize, of: usize| of > 0 && heads > 0 && heads.is_multiple_of(of);
            if !fits(num_kv_heads, kv_heads) || !fits(shape.num_heads, num_kv_heads) {
                let got = format!("{num_kv_heads} for {}/{kv_heads} heads", shape.num_heads);
                let supported = "a divisor of the heads and a multiple of the KV heads";
                return Err(KernelError::unsupported(t.op, "choosers", got, supported).into());
            }
            let choosers = AttentionShape { num_kv_heads, ..shape };
            let max_keys = num_chosen.saturating_mul(block).min(max_keys);
            let scratch = DecodeScratch::new(&cache.k, choosers, max_keys)?;
            cache.attention_decode_chosen(&token, &length, step, &scratch, &chosen, block)?
        }
        _ => return Err(wrong(t.op, "chosen", "must be given together with block, the number of keys of a block")),
    };
    Ok(vec![("o", o)])
}

/// The outputs of a forward pass: `o`, and unless `only_o` what the backward pass reads.
fn result(result: AttentionResult, only_o: bool) -> Outputs {
    if only_o {
        return vec![("o", result.o)];
    }
    let mut outputs = vec![("o", result.o), ("lse", result.lse)];
    outputs.extend(result.o_low.map(|o_low| ("o_low", o_low)));
    outputs.extend(result.base.map(|base| ("base", base)));
    outputs
}

/// Where a forward pass keeps `o_low`: only if a backward pass may follow.
fn o_low(only_o: bool) -> KeepOLow {
    match only_o {
        true => KeepOLow::Never,
        false => KeepOLow::ShortRows,
    }
}

fn score_bias(linear: bool) -> ScoreBias {
    match linear {
        true => ScoreBias::Linear,
        false => ScoreBias::Exp,
    }
}

/// The recency term of ranks; no slopes are none. Positions count from `start`, else from the row's first token.
fn recency<'a>(slopes: &'a [f32], start: Option<&'a CudaTensor>) -> Result<Option<Recency<'a>>, KernelError> {
    if slopes.iter().any(|slope| !slope.is_finite()) {
        let (got, supported) = ("that is not finite", "finite ones");
        return Err(KernelError::unsupported("dma_scores", "slope", got, supported));
    }
    let origin = start.map_or(PositionOrigin::First(0), PositionOrigin::DocumentStart);
    Ok((!slopes.is_empty()).then_some(Recency { slopes, origin }))
}

/// DMA's mask `expire`, i32 `[batch, num_kv_heads, seq_len]`, from ranks of that shape, and the key lists of attention;
/// `None` in place of lists if every key is kept.
fn selection(
    rank: &CudaTensor,
    keep: usize,
    local: usize,
    [start, end]: &[CudaTensor; 2],
) -> Result<(CudaTensor, Option<KeyLists>), PlanError> {
    rank.require_dtype("dma_select", "rank", DType::F32)?;
    let window = DmaWindow { keep_window_size: keep, local_window_size: local };
    let selection = dma_select(rank, start, end, window)?;
    let [_, _, seq_len] = rank.dims("dma_select", "rank")?;
    let lists = match keep < seq_len {
        true => Some(selection.dma_lists(start, end, KeyLists::TILE_QUERIES)?),
        false => None,
    };
    Ok((selection.expire.clone(), lists))
}

/// The lists of a selection as outputs of a plan.
fn of_lists(lists: KeyLists) -> [(&'static str, CudaTensor); 3] {
    [lists.list_len, lists.tile_window, lists.list].map(|part| ("lists", part))
}

/// The mask of all query heads' own lists of blocks; `words` on the device hold it.
fn block_mask(
    shape: AttentionShape,
    [query_tile, key_tile]: [usize; 2],
    words: CudaTensor,
) -> Result<KeyMask<CudaTensor>, PlanError> {
    let call = CallShape {
        num_queries: shape.seq_len,
        num_keys: shape.seq_len,
        num_heads: shape.num_heads,
        num_kv_heads: shape.num_kv_heads,
        head_dim: shape.head_dim,
    };
    // Tiles must be whole stages of the kernels' shared memory.
    if ![64, 128].contains(&query_tile) || ![64, 128].contains(&key_tile) {
        let got = format!("{query_tile} x {key_tile}");
        return Err(KernelError::unsupported("block_sparse", "block", got, "64 or 128 queries and keys").into());
    }
    let tiles = Tiles::new(call, query_tile, key_tile);
    // Word 0 is unused; then come the start of each (head, query tile) in `tile_idx` and the end of the last, and
    // `tile_idx`.
    let row_ptr_len = shape.num_heads * tiles.num_query_tiles() + 1;
    let [num_words] = words.dims("block_sparse", "words")?;
    if num_words < 1 + row_ptr_len {
        let supported = format!("at least {}: 0, the rows' starts and the blocks", 1 + row_ptr_len);
        return Err(KernelError::unsupported("block_sparse", "number of words", num_words, supported).into());
    }
    let places =
        MaskPlaces { row_ptr: 1..1 + row_ptr_len, tile_idx: 1 + row_ptr_len..num_words, ..MaskPlaces::default() };
    Ok(KeyMask {
        shape: call,
        tiles,
        heads_per_list: 1,
        heads_per_order: 1,
        causal: true,
        dense_rows: Vec::new(),
        places,
        words,
        counts: None,
    })
}

/// The tensors of a request, and whether the op has read each.
struct Inputs {
    op: &'static str,
    tensors: Vec<(String, CudaTensor, Cell<bool>)>,
}

impl Inputs {
    /// Declares the tensors of a request to the recorder, after checking their types and sizes.
    fn new(request: &Request, gpu: &Recorder) -> Result<Self, PlanError> {
        let op = request.call.name();
        let mut tensors: Vec<(String, CudaTensor, Cell<bool>)> = Vec::new();
        for spec in &request.tensors {
            let (dtype, strides) = spec.checked(op)?;
            if tensors.iter().any(|(name, ..)| *name == spec.name) {
                return Err(wrong(op, &spec.name, "is given twice"));
            }
            tensors.push((spec.name.clone(), gpu.strided(&spec.shape, &strides, dtype), Cell::new(false)));
        }
        Ok(Self { op, tensors })
    }

    /// A tensor by name, `None` if the request lacks it; counts as read.
    fn maybe(&self, name: &str) -> Option<CudaTensor> {
        let (_, tensor, used) = self.tensors.iter().find(|(known, ..)| known == name)?;
        used.set(true);
        Some(tensor.clone())
    }

    fn get(&self, name: &str) -> Result<CudaTensor, PlanError> {
        self.maybe(name).ok_or_else(|| wrong(self.op, name, "is missing"))
    }

    fn all_used(&self) -> Result<(), PlanError> {
        match self.tensors.iter().find(|(_, _, used)| !used.get()) {
            Some((name, ..)) => Err(wrong(self.op, name, "is not an input of this op")),
            None => Ok(()),
        }
    }

    fn qkv(&self) -> Result<Qkv, PlanError> {
        Ok(Qkv::separate(&self.get("q")?, &self.get("k")?, &self.get("v")?))
    }

    /// The queries. Ops on them sum in a fixed order if `fixed_order`, else in any.
    fn q_in(&self, fixed_order: bool) -> Result<CudaTensor, PlanError> {
        let sums = if fixed_order { SumOrder::Fixed } else { SumOrder::Any };
        let policy = KernelPolicy { sums, ..KernelPolicy::DEFAULT };
        Ok(self.get("q")?.under(policy))
    }

    /// The queries of NSA's compressed branch, with placeholder keys and values: no launch reads them.
    fn queries_of_blocks(&self, q: &CudaTensor, compressed: &CudaTensor, blocks: NsaBlocks) -> Result<Qkv, PlanError> {
        let [batch, seq_len, _, head_dim] = q.dims(self.op, "q")?;
        let [_, rows, _] = compressed.dims(self.op, "compressed")?;
        let kv_heads = rows / (batch * blocks.num_slots(seq_len)).max(1);
        let unread = q.empty_contiguous(&[batch, seq_len, kv_heads, head_dim], DType::BF16);
        Ok(Qkv::separate(q, &unread, &unread))
    }

    /// Compressed keys, then values, or their gradients, `[2, rows, width]`. `[2, batch, slots, kv_heads, width]` is
    /// accepted too and flattened.
    fn compressed(&self, name: &'static str, blocks: NsaBlocks) -> Result<CudaTensor, PlanError> {
        let (tensor, of_tokens) = (self.get(name)?, self.maybe("q").map_or_else(|| self.get("k"), Ok)?);
        let [batch, seq_len, ..] = of_tokens.dims::<4>(self.op, "q or k")?;
        match *tensor.shape() {
            [halves, b, slots, heads, width] if [b, slots] == [batch, blocks.num_slots(seq_len)] => {
                Ok(tensor.reshaped(self.op, name, &[halves, b * slots * heads, width])?)
            }
            [_, _, _] => Ok(tensor),
            _ => {
                let problem = format!("has shape {:?}, which does not fit tokens and blocks", tensor.shape());
                Err(wrong(self.op, name, &problem))
            }
        }
    }

    /// Logits of NSA's gates, `[batch, tokens, heads * 3]`, and their bias, `[heads * 3]`. Either may end with
    /// `[heads, 3]` instead, which is flattened.
    fn gates(&self) -> Result<[CudaTensor; 2], PlanError> {
        let joined = |name, leading_axes: usize| -> Result<CudaTensor, PlanError> {
            let tensor = self.get(name)?;
            let (kept, gates) = tensor.shape().split_at(leading_axes.min(tensor.shape().len()));
            if !matches!(gates, [_] | [_, 3]) {
                return Err(wrong(self.op, name, "must end with heads and 3 branches"));
            }
            let shape = [kept, &[gates.iter().product()]].concat();
            Ok(tensor.reshaped(self.op, name, &shape)?)
        };
        Ok([joined("logits", 2)?, joined("gate_bias", 0)?])
    }

    /// The blocks that each query chooses by means of the keys, `by` the tensors of these names.
    fn chosen(&self, choice: &Choice, by: [&str; 2], [start, end]: &[CudaTensor; 2]) -> Result<CudaTensor, PlanError> {
        let &Choice { first, local, .. } = choice;
        let (blocks, forced) = (choice.blocks.checked()?, ForcedBlocks { first, local });
        if forced.local == 0 || forced.count() > blocks.num_selected_blocks {
            let got = format!("{} local ones of {} chosen", forced.local, blocks.num_selected_blocks);
            let supported = "1 or more, and no more than chosen";
            return Err(KernelError::unsupported(self.op, "blocks", got, supported).into());
        }
        let (q, k) = (self.get(by[0])?, self.get(by[1])?);
        let pooled = Qkv::separate(&k, &k, &k).nsa_mean_pool([start, end], blocks)?;
        let rule = choice.rule.into();
        let by = BlockChoice { blocks, rule, forced };
        let queries = self.queries_of_blocks(&q, &pooled, blocks)?;
        Ok(queries.choose_key_blocks([start, end], &pooled, by, choice.scale)?)
    }

    fn documents(&self) -> Result<[CudaTensor; 2], PlanError> {
        Ok([self.get("doc_start")?, self.get("doc_end")?])
    }

    /// A selection's lists, which are one input as they were one output (`of_lists`).
    fn lists(&self) -> Result<KeyLists, PlanError> {
        let lists = self.get("lists")?;
        let [num_words] = lists.dims(self.op, "lists")?;
        let [batch, kv_heads, seq_len] = self.get("bias")?.dims(self.op, "bias")?;
        // A list for each block of queries; its length depends on the window, which is not known here.
        let any_window = 1;
        let [blocks, _, pair] = KeyLists::shape(seq_len, any_window);
        let (rows, tiles) = (batch * kv_heads, seq_len.div_ceil(KeyLists::TILE_QUERIES));
        let word = DType::I32.size();
        let padded = |words: usize| (words * word).next_multiple_of(ALIGNMENT) / word;
        // The first words of tile_window and list; list_len begins at 0. What is left of the input is list.
        let windows = padded(rows * blocks);
        let list = windows + padded(rows * tiles * 2);
        let words_per_entry = rows * blocks * pair;
        let capacity = num_words.saturating_sub(list) / words_per_entry.max(1);
        if list + words_per_entry * capacity != num_words {
            return Err(wrong(self.op, "lists", "are not those of a selection for this bias"));
        }
        let part = |first: usize, shape: &[usize]| {
            let words = lists.row_range(self.op, "lists", first, shape.iter().product())?;
            words.reshaped(self.op, "lists", shape)
        };
        Ok(KeyLists {
            list: part(list, &[batch, kv_heads, blocks, capacity, pair])?,
            list_len: part(0, &[batch, kv_heads, blocks])?,
            tile_window: part(windows, &[batch, kv_heads, tiles, 2])?,
            tile_queries: KeyLists::TILE_QUERIES,
        })
    }

    fn cache(&self) -> Result<KvCache, PlanError> {
        let (k, v) = (self.get("k_cache")?, self.get("v_cache")?);
        Ok(KvCache { k, v })
    }

    fn result(&self) -> Result<AttentionResult, PlanError> {
        Ok(AttentionResult {
            o: self.get("o")?,
            lse: self.get("lse")?,
            o_low: self.maybe("o_low"),
            base: self.maybe("base"),
        })
    }

    /// A backward pass over separate q, k and v: `[dq, dk, dv]` and the gradient of a bias.
    fn gradients(
        &self,
        softmax_scale: f32,
        fixed_order: bool,
        pass: impl FnOnce(AttentionGradients<'_>) -> Result<Option<CudaTensor>, KernelError>,
    ) -> Result<Outputs, PlanError> {
        let qkv = Qkv::separate(&self.q_in(fixed_order)?, &self.get("k")?, &self.get("v")?);
        let [q, k, v] = [&qkv.q, &qkv.k, &qkv.v].map(|heads| heads.tensor());
        let [dq, dk, dv] = [q, k, v].map(|x| q.empty_contiguous(x.shape(), DType::BF16));
        let d_bias = pass(AttentionGradients {
            qkv: &qkv,
            result: &self.result()?,
            d_o: &self.get("d_o")?,
            grads: &Qkv::separate(&dq, &dk, &dv),
            softmax_scale,
        })?;
        let mut outputs = vec![("dq", dq), ("dk", dk), ("dv", dv)];
        outputs.extend(d_bias.map(|d_bias| ("d_bias", d_bias)));
        Ok(outputs)
    }
}

fn wrong(op: &'static str, tensor: &str, problem: &str) -> PlanError {
    PlanError::Tensor { op, tensor: tensor.to_owned(), problem: problem.to_owned() }
}
