//! The branches of native sparse attention and their gates.
use super::{Inputs, Outputs, result, wrong};
use crate::request::{Blocks, PlanError};
use serde::{Deserialize, Serialize};
use sieve_core::NsaBlocks;
use sieve_gpu::{
    AttendedBlocks, CudaTensor, Heads, PackedGradient, nsa_gates, nsa_gates_backward, nsa_mean_pool,
    nsa_mean_pool_backward,
};

/// k, v, doc_start, doc_end → compressed
#[derive(Debug, Clone, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct NsaMeanPool {
    /// Block sizes.
    pub blocks: Blocks,
}

impl NsaMeanPool {
    /// `compressed` is `[2, batch, slots, KV heads, width]`: the means of the keys, then of the values.
    pub(super) fn launches(&self, t: &Inputs) -> Result<Outputs, PlanError> {
        let Self { blocks } = self;
        let (k, v, [start, end]) = (t.get("k")?, t.get("v")?, t.documents()?);
        let blocks = blocks.checked()?;
        let pooled = nsa_mean_pool([&Heads::all(&k), &Heads::all(&v)], [&start, &end], blocks)?;
        let [batch, seq_len, kv_heads, head_dim] = k.dims("nsa_mean_pool", "k")?;
        let shape = [2, batch, blocks.num_slots(seq_len), kv_heads, head_dim];
        let pooled = pooled.reshaped("nsa_mean_pool", "compressed", &shape)?;
        Ok(vec![("compressed", pooled)])
    }
}

/// k, doc_start, doc_end, d_compressed → dqkv, packed: as many query heads as KV heads, whose gradient is zero, then
/// the gradients of keys and of values
#[derive(Debug, Clone, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct NsaMeanPoolBackward {
    /// Block sizes.
    pub blocks: Blocks,
}

impl NsaMeanPoolBackward {
    /// `k` gives the sizes alone; its numbers are not read.
    pub(super) fn launches(&self, t: &Inputs) -> Result<Outputs, PlanError> {
        let Self { blocks } = self;
        let (k, [start, end], blocks) = (t.get("k")?, t.documents()?, blocks.checked()?);
        let d_compressed = t.compressed("d_compressed", blocks)?;
        let [batch, seq_len, num_kv_heads, head_dim] = k.dims(t.op, "k")?;
        let packed = PackedGradient { dims: [batch, seq_len, 3 * num_kv_heads, head_dim], num_kv_heads };
        let dqkv = nsa_mean_pool_backward(packed, [&start, &end], blocks, &d_compressed)?;
        Ok(vec![("dqkv", dqkv)])
    }
}

/// q, compressed, doc_start, doc_end → o, lse, block_indices
#[derive(Debug, Clone, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct NsaCompressedForward {
    /// Factor on `q . k`.
    pub scale: f32,
    /// Block sizes.
    pub blocks: Blocks,
}

impl NsaCompressedForward {
    /// `block_indices` are the blocks that each query's attention to the compressed keys chooses, those that the
    /// selected branch reads.
    pub(super) fn launches(&self, t: &Inputs) -> Result<Outputs, PlanError> {
        let Self { scale, blocks } = self;
        let ([start, end], blocks) = (t.documents()?, blocks.checked()?);
        let compressed = t.compressed("compressed", blocks)?;
        let queries = Heads::all(&t.get("q")?);
        let forward = queries.nsa_compressed_attention_forward([&start, &end], &compressed, blocks, *scale);
        let (forward, indices) = forward?;
        Ok(vec![("o", forward.o), ("lse", forward.lse), ("block_indices", indices)])
    }
}

/// The forward's inputs, o, lse, d_o → dqkv (zero but for q), d_compressed
#[derive(Debug, Clone, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct NsaCompressedBackward {
    /// Factor on `q . k`.
    pub scale: f32,
    /// Block sizes.
    pub blocks: Blocks,
    /// Whether sums are added in a fixed order.
    #[serde(default)]
    pub fixed_order: bool,
}

impl NsaCompressedBackward {
    /// The order of sums comes from the queries, which carry the policy; `d_compressed` has the shape in which
    /// `compressed` was given.
    pub(super) fn launches(&self, t: &Inputs) -> Result<Outputs, PlanError> {
        let Self { scale, blocks, fixed_order } = self;
        let ([start, end], blocks) = (t.documents()?, blocks.checked()?);
        let compressed = t.compressed("compressed", blocks)?;
        let queries = Heads::all(&t.q_in(*fixed_order)?);
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
}

/// q, k, v, block_indices, doc_start, doc_end → o, lse
#[derive(Debug, Clone, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct NsaSelectedForward {
    /// Factor on `q . k`.
    pub scale: f32,
    /// Block sizes.
    pub blocks: Blocks,
}

impl NsaSelectedForward {
    /// `block_indices` must have as many blocks a query as the sizes say.
    pub(super) fn launches(&self, t: &Inputs) -> Result<Outputs, PlanError> {
        let Self { scale, blocks } = self;
        let (indices, size) = t.chosen_blocks(*blocks)?;
        let (blocks, [start, end]) = (AttendedBlocks::single(&indices, size), t.documents()?);
        let (forward, _) = t.qkv()?.nsa_selected_attention_forward([&start, &end], blocks, *scale)?;
        let only_o = false;
        Ok(result(forward, only_o))
    }
}

/// The forward's inputs, o, lse, d_o → dq, dk, dv
#[derive(Debug, Clone, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct NsaSelectedBackward {
    /// Factor on `q . k`.
    pub scale: f32,
    /// Block sizes.
    pub blocks: Blocks,
    /// Whether sums are added in a fixed order.
    #[serde(default)]
    pub fixed_order: bool,
}

impl NsaSelectedBackward {
    /// The lists of the queries of each block are made from `block_indices` again, as a request carries none.
    pub(super) fn launches(&self, t: &Inputs) -> Result<Outputs, PlanError> {
        let Self { scale, blocks, fixed_order } = self;
        let (indices, size) = t.chosen_blocks(*blocks)?;
        let [start, end] = t.documents()?;
        t.gradients(*scale, *fixed_order, |call| {
            call.nsa_selected_attention_backward([&start, &end], AttendedBlocks::single(&indices, size), &[])?;
            Ok(None)
        })
    }
}

/// compressed, selected, window (outputs of the branches), logits `[batch, tokens, heads, 3]`, gate_bias
/// `[heads, 3]`, d_o → d_compressed, d_selected, d_window, d_logits, d_bias
#[derive(Debug, Clone, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct NsaGatesBackward {}

impl NsaGatesBackward {
    /// The gradients of the logits and of the bias have the shapes in which these were given.
    pub(super) fn launches(&self, t: &Inputs) -> Result<Outputs, PlanError> {
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
}

/// All of NSA: q, k, v, compressed, logits, gate_bias, doc_start, doc_end → o, and unless `only_o`
/// compressed_o, compressed_lse, block_indices, selected_o, selected_lse, window_o, window_lse
#[derive(Debug, Clone, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct NsaForward {
    /// Factor on `q . k`.
    pub scale: f32,
    /// Block sizes.
    pub blocks: Blocks,
    /// Keys that the window's branch sees.
    pub window: usize,
    /// Whether `o` is the only output.
    #[serde(default)]
    pub only_o: bool,
}

impl NsaForward {
    /// The three branches run one after the other: the selected one reads the blocks that the compressed one chose;
    /// then the gates add them up.
    pub(super) fn launches(&self, t: &Inputs) -> Result<Outputs, PlanError> {
        let &Self { scale, blocks, window, only_o } = self;
        let (qkv, [start, end], blocks) = (t.qkv()?, t.documents()?, blocks.checked()?);
        let (documents, compressed) = ([&start, &end], t.compressed("compressed", blocks)?);
        let (coarse, indices) = qkv.q.nsa_compressed_attention_forward(documents, &compressed, blocks, scale)?;
        let chosen = AttendedBlocks::single(&indices, blocks.select_block_size);
        let (selected, _) = qkv.nsa_selected_attention_forward(documents, chosen, scale)?;
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
}

impl Inputs {
    /// The blocks that queries chose, as many for each as `blocks` says, and the tokens of a block.
    fn chosen_blocks(&self, blocks: Blocks) -> Result<(CudaTensor, usize), PlanError> {
        let (indices, blocks) = (self.get("block_indices")?, blocks.checked()?);
        let [.., count] = indices.dims::<4>(self.op, "block_indices")?;
        if count != blocks.num_selected_blocks {
            let problem = format!("has {count} blocks of a query, expected {}", blocks.num_selected_blocks);
            return Err(wrong(self.op, "block_indices", &problem));
        }
        Ok((indices, blocks.select_block_size))
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
}
