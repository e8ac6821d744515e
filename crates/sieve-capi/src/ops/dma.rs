//! Dynamic mask attention: scores, selection, attention over key lists.
use super::{Inputs, Outputs, o_low, result, wrong};
use crate::plan::ALIGNMENT;
use crate::request::PlanError;
use serde::{Deserialize, Serialize};
use sieve_core::DmaWindow;
use sieve_gpu::{
    CudaTensor, DType, Heads, KernelError, KeyLists, MOST_ORDERED, PositionOrigin, Recency, ScoreBias, ScoresBackward,
    Selection, dma_select, oracle,
};

/// v, w_dt `[KV heads, KV heads * width]`, a, doc_start? → x, z
#[derive(Debug, Clone, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct DmaScores {
    /// What recency adds to a rank per token of the position, one number per KV head; empty: no recency.
    #[serde(default)]
    pub slopes: Vec<f32>,
}

impl DmaScores {
    pub(super) fn launches(&self, t: &Inputs) -> Result<Outputs, PlanError> {
        let Self { slopes } = self;
        let (v, w_dt, a) = (t.get("v")?, t.get("w_dt")?, t.get("a")?);
        let start = t.maybe("doc_start");
        let scores = Heads::all(&v).dma_ranks(&w_dt, &a, recency(slopes, start.as_ref())?.as_ref())?;
        Ok(vec![("x", scores.x), ("z", scores.z)])
    }
}

/// v, w_dt, a, x, dz → dv, dw_dt, da
#[derive(Debug, Clone, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct DmaScoresBackward {}

impl DmaScoresBackward {
    /// With slopes a recency is added to z; its positions count from `doc_start`, or without it from the row's first
    /// token.
    pub(super) fn launches(&self, t: &Inputs) -> Result<Outputs, PlanError> {
        let (v, w_dt, a) = (t.get("v")?, t.get("w_dt")?, t.get("a")?);
        let dv = v.zeros_contiguous(v.shape(), DType::BF16);
        let backward =
            ScoresBackward { values: &Heads::all(&v), w_dt: &w_dt, a: &a, x: &t.get("x")?, dz: &t.get("dz")? };
        let (dw_dt, da) = backward.dma_scores_backward(&Heads::all(&dv))?;
        Ok(vec![("dv", dv), ("dw_dt", dw_dt), ("da", da)])
    }
}

/// rank, doc_start, doc_end → expire (first position that no longer sees the key), lists? (the key lists of
/// `dma_attention_forward`; absent if `keep` is at least `seq_len`, because then every key is kept)
#[derive(Debug, Clone, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct DmaSelect {
    /// Number of keys that a query keeps.
    pub keep: usize,
    /// How many of these are the last keys, which are kept whatever their rank.
    #[serde(default)]
    pub local: usize,
}

impl DmaSelect {
    /// Where `keep` is at least the tokens of a row, there are no lists.
    pub(super) fn launches(&self, t: &Inputs) -> Result<Outputs, PlanError> {
        let &Self { keep, local } = self;
        let documents = t.documents()?;
        let (selection, window) = selection(&t.get("rank")?, keep, local, &documents)?;
        let lists = key_lists(&selection, window, &documents)?.into_iter().flat_map(of_lists);
        Ok([("expire", selection.expire.clone())].into_iter().chain(lists).collect())
    }
}

/// q, k, v, bias, lists (of `dma_select`) → o, lse, o_low?, base
#[derive(Debug, Clone, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct DmaAttentionForward {
    /// Factor on `q . k`.
    pub scale: f32,
    /// Whether `o` is the only output.
    #[serde(default)]
    pub only_o: bool,
}

impl DmaAttentionForward {
    pub(super) fn launches(&self, t: &Inputs) -> Result<Outputs, PlanError> {
        let &Self { scale, only_o } = self;
        let (bias, lists) = (t.get("bias")?, t.lists()?);
        let forward = t.qkv()?.dma_attention_forward(&bias, &lists, scale, o_low(only_o))?;
        Ok(result(forward, only_o))
    }
}

/// The forward's inputs, o, lse, o_low?, base, d_o → dq, dk, dv, d_bias
#[derive(Debug, Clone, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct DmaAttentionBackward {
    /// Factor on `q . k`.
    pub scale: f32,
    /// Whether sums are added in a fixed order.
    #[serde(default)]
    pub fixed_order: bool,
}

impl DmaAttentionBackward {
    pub(super) fn launches(&self, t: &Inputs) -> Result<Outputs, PlanError> {
        let &Self { scale, fixed_order } = self;
        let (bias, lists) = (t.get("bias")?, t.lists()?);
        t.gradients(scale, fixed_order, |call| call.dma_attention_backward(&bias, &lists).map(Some))
    }
}

/// Scores, selection and attention: q, k, v, w_dt `[KV heads, KV heads * width]`, a, doc_start, doc_end → o, and
/// unless `only_o` lse, o_low?, base, x, z, bias unless `linear`, and lists where `keep` is below the tokens of a
/// row
#[derive(Debug, Clone, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct DmaForward {
    /// Factor on `q . k`.
    pub scale: f32,
    /// Number of keys that a query keeps.
    pub keep: usize,
    /// How many of these are the last keys, which are kept whatever their rank.
    pub local: usize,
    /// What recency adds to a rank per token of the position, one number per KV head; empty: no recency.
    pub slopes: Vec<f32>,
    /// Whether the bias is z itself.
    pub linear: bool,
    /// Whether `o` is the only output.
    #[serde(default)]
    pub only_o: bool,
    /// Whether a row of o has the bits of its [`DmaDecode`](super::DmaDecode): keys are added by epochs of 128 queries.
    #[serde(default)]
    pub same_bits: bool,
}

impl DmaForward {
    /// Where `keep` is at least the tokens of a row, every key is kept: dense attention with a bias runs, and no lists
    /// are an output; its keys have the order of epochs. The lists of the backward pass have another one.
    pub(super) fn launches(&self, t: &Inputs) -> Result<Outputs, PlanError> {
        let &Self { scale, keep, local, ref slopes, linear, only_o, same_bits } = self;
        let (qkv, w_dt, a, documents) = (t.qkv_in_order(same_bits)?, t.get("w_dt")?, t.get("a")?, t.documents()?);
        if same_bits {
            require_ordered(t.op, keep)?;
        }
        let recency = recency(slopes, Some(&documents[0]))?;
        let (scores, bias) = qkv.v.dma_ranks_and_bias(&w_dt, &a, recency.as_ref(), score_bias(linear))?;
        let start = &documents[0];
        let (selection, window) = selection(&scores.z, keep, local, &documents)?;
        let lists = if same_bits && only_o { None } else { key_lists(&selection, window, &documents)? };
        // A kernel that keeps `o_low` follows a row's maximum more closely, and has other bits than steps.
        let o_low = o_low(only_o || same_bits);
        let is_ordered = same_bits && keep < qkv.shape(t.op)?.seq_len;
        let ordered = is_ordered.then(|| selection.dma_ordered_lists(&scores.z, start, window, None));
        let forward = match ordered.transpose()?.as_ref().or(lists.as_ref()) {
            Some(lists) => qkv.dma_attention_forward(&bias, lists, scale, o_low)?,
            None => qkv.attention_forward(start, None, scale, Some((&bias, o_low)))?,
        };
        let mut outputs = result(forward, only_o);
        if !only_o {
            outputs.extend([("x", scores.x), ("z", scores.z)]);
            outputs.extend((!linear).then_some(("bias", bias)));
            outputs.extend(lists.into_iter().flat_map(of_lists));
        }
        Ok(outputs)
    }
}

pub(super) fn score_bias(linear: bool) -> ScoreBias {
    if linear { ScoreBias::Linear } else { ScoreBias::Exp }
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

/// Refuses windows of more keys than are added in one order.
pub(super) fn require_ordered(op: &'static str, keep: usize) -> Result<(), PlanError> {
    if keep <= MOST_ORDERED {
        return Ok(());
    }
    let hint = "leave it out, or keep fewer keys";
    Err(PlanError::Call(format!(
        "{op}: same_bits needs keep of at most {MOST_ORDERED}, and it is {keep}\n  hint: {hint}"
    )))
}

/// The keys that queries keep by ranks f32 `[batch, num_kv_heads, seq_len]`, and their window.
fn selection(
    rank: &CudaTensor,
    keep: usize,
    local: usize,
    [start, end]: &[CudaTensor; 2],
) -> Result<(Selection, DmaWindow), PlanError> {
    rank.require_dtype("dma_select", "rank", DType::F32)?;
    let window = DmaWindow { keep_window_size: keep, local_window_size: local };
    Ok((dma_select(rank, start, end, window)?, window))
}

/// The key lists of attention under a selection; `None` if the window keeps every key.
fn key_lists(
    selection: &Selection,
    window: DmaWindow,
    [start, end]: &[CudaTensor; 2],
) -> Result<Option<KeyLists>, KernelError> {
    let [_, _, seq_len] = selection.expire.dims("dma_select", "expire")?;
    let is_listed = window.keep_window_size < seq_len;
    is_listed.then(|| selection.dma_lists(start, end, KeyLists::TILE_QUERIES)).transpose()
}

/// The lists of a selection as outputs of a plan.
fn of_lists(lists: KeyLists) -> [(&'static str, CudaTensor); 3] {
    [lists.list_len, lists.tile_window, lists.list].map(|part| ("lists", part))
}

impl Inputs {
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
            queries: oracle::SUPER_BLOCK,
        })
    }
}
