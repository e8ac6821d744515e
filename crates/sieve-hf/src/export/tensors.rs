//! Maps a checkpoint's tensors to the tensors of `transformers`.
use super::Architecture;
use crate::tensor_file::TensorHeader;
use crate::{CheckpointError, TensorFiles};
use burn::tensor::{DType, TensorData};
use sieve_core::model::{AttentionForm, NUM_NSA_BRANCHES};
use sieve_core::{MlaShape, ModelShape, NsaShape};
use std::collections::BTreeSet;
use std::ops::Range;

/// One tensor of an exported model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ExportTensor {
    /// Name of the tensor in `transformers`.
    pub(crate) name: String,
    pub(crate) shape: Vec<usize>,
    pub(crate) source: Source,
}

/// Where the values of an exported tensor come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// `rows` of a checkpoint's tensor, which has `num_rows` rows.
    Rows { name: String, rows: Range<usize>, num_rows: usize },
    /// All ones: the class multiplies by a tensor that the model does not have.
    Ones,
}

impl ExportTensor {
    fn whole(name: String, shape: &[usize], source: String) -> Self {
        Self::rows(name, shape, source, 0..shape[0], shape[0])
    }

    /// A tensor that is `rows` of the tensor `source` of the checkpoint, which has `num_rows` rows.
    fn rows(name: String, shape: &[usize], source: String, rows: Range<usize>, num_rows: usize) -> Self {
        Self { name, shape: shape.to_vec(), source: Source::Rows { name: source, rows, num_rows } }
    }

    pub(super) fn num_elements(&self) -> u64 {
        self.shape.iter().map(|&size| size as u64).product()
    }

    pub(super) fn num_bytes(&self, dtype: DType) -> u64 {
        self.num_elements() * dtype.size() as u64
    }

    /// Name, type and shape for the header of a file.
    pub(super) fn header(&self, dtype: DType) -> TensorHeader {
        TensorHeader { name: self.name.clone(), dtype, shape: self.shape.clone() }
    }

    /// Reads the values as `dtype`; other rows of the checkpoint's tensor are not read.
    pub(super) fn read(&self, weights: &TensorFiles, dtype: DType) -> Result<TensorData, CheckpointError> {
        let data = match &self.source {
            Source::Ones => TensorData::new(vec![1f32; self.num_elements() as usize], self.shape.clone()),
            Source::Rows { name, rows, num_rows } => {
                let mut shape = self.shape.clone();
                shape[0] = *num_rows;
                let width: usize = shape[1..].iter().product();
                let mut data = weights.part(name, &shape, Some(rows.start * width..rows.end * width))?;
                data.shape = self.shape.clone().into();
                data
            }
        };
        Ok(data.convert_dtype(dtype))
    }
}

/// All tensors of the export, in the order of the forward pass.
pub(crate) fn tensors_of(shape: &ModelShape, architecture: Architecture) -> Vec<ExportTensor> {
    let (d_model, vocab_size) = (shape.d_model, shape.vocab_size);
    let embedding = "embed_tokens.weight";
    let mut tensors =
        vec![ExportTensor::whole(format!("model.{embedding}"), &[vocab_size, d_model], embedding.to_owned())];
    for layer_idx in 0..shape.num_layers {
        push_layer(&mut tensors, &shape.of_layer(layer_idx), architecture, layer_idx);
    }
    tensors.push(ExportTensor::whole("model.norm.weight".to_owned(), &[d_model], "head.norm.weight".to_owned()));
    if !shape.tie_word_embeddings {
        tensors.push(ExportTensor::whole(
            "lm_head.weight".to_owned(),
            &[vocab_size, d_model],
            "head.lm_head.weight".to_owned(),
        ));
    }
    tensors
}

/// Adds the tensors of a layer. `theirs` are names in `transformers`, `ours` names in the checkpoint.
fn push_layer(tensors: &mut Vec<ExportTensor>, shape: &ModelShape, architecture: Architecture, layer_idx: usize) {
    let (d_model, d_ff, head_dim) = (shape.d_model, shape.d_ff, shape.head_dim);
    let (q_width, kv_width) = (shape.q_width(), shape.kv_width());
    let theirs = |name: &str| format!("model.layers.{layer_idx}.{name}");
    let ours = |name: &str| format!("layers.{layer_idx}.{name}");

    let whole = |name: &str, source: &str, shape: &[usize]| ExportTensor::whole(theirs(name), shape, ours(source));
    let same_name = |name: &str, shape: &[usize]| whole(name, name, shape);
    let head_norms = |theirs: &str, ours: &str| {
        ["q_norm", "k_norm"].map(|norm| {
            let names = [format!("self_attn.{theirs}{norm}.weight"), format!("self_attn.{ours}.{norm}.weight")];
            whole(&names[0], &names[1], &[head_dim])
        })
    };
    // Splits the packed weight or bias of projections, by their names and numbers of rows.
    let split_rows = |source: &str, parts: &[(&str, usize)], kind: &str, row_shape: &[usize]| {
        let num_rows = parts.iter().map(|(_, rows)| rows).sum();
        let mut start = 0;
        let part = |(name, rows): &(&str, usize)| {
            let range = start..start + rows;
            start = range.end;
            let shape = [&[*rows], row_shape].concat();
            ExportTensor::rows(theirs(&format!("{name}.{kind}")), &shape, ours(source), range, num_rows)
        };
        parts.iter().map(part).collect::<Vec<_>>()
    };
    let split = |source: &str, parts: &[(&str, usize)]| split_rows(source, parts, "weight", &[d_model]);

    tensors.push(same_name("input_layernorm.weight", &[d_model]));
    match shape.attention.form() {
        AttentionForm::Latent(mla) => push_latent(tensors, shape, mla, &whole),
        _ => {
            let parts = [("self_attn.q_proj", q_width), ("self_attn.k_proj", kv_width), ("self_attn.v_proj", kv_width)];
            tensors.extend(split("self_attn.qkv.qkv_proj.weight", &parts));
            if shape.qkv_bias {
                tensors.extend(split_rows("self_attn.qkv.qkv_bias", &parts, "bias", &[]));
            }
            if shape.qk_norm {
                tensors.extend(head_norms("", "qkv"));
            }
        }
    }
    match shape.attention.form() {
        AttentionForm::Ranked(_) => {
            let num_kv_heads = shape.num_kv_heads;
            tensors.push(whole("self_attn.A", "self_attn.a", &[num_kv_heads]));
            tensors.push(same_name("self_attn.dt_proj.weight", &[num_kv_heads, kv_width]));
        }
        AttentionForm::Blocks(_) if shape.has_indexer() => {
            tensors.extend(split(
                "self_attn.indexer.proj.weight",
                &[("self_attn.index_q_proj", kv_width), ("self_attn.index_k_proj", head_dim)],
            ));
            tensors.extend(head_norms("index_", "indexer"));
        }
        AttentionForm::Branches(nsa) => {
            if !nsa.shared_kv {
                for branch in ["compress", "select"] {
                    let part = |part: &str| format!("self_attn.{branch}_{part}_proj");
                    tensors.extend(split(
                        &format!("self_attn.{branch}_kv_proj.weight"),
                        &[(&part("k"), kv_width), (&part("v"), kv_width)],
                    ));
                }
            }
            push_compression(tensors, shape, nsa, &whole);
        }
        _ => {}
    }
    tensors.push(same_name("self_attn.o_proj.weight", &[d_model, q_width]));
    tensors.push(same_name("post_attention_layernorm.weight", &[d_model]));
    tensors.extend(split("mlp.gate_up_proj.weight", &[("mlp.gate_proj", d_ff), ("mlp.up_proj", d_ff)]));
    tensors.push(same_name("mlp.down_proj.weight", &[d_model, d_ff]));
    let has_scales = architecture == Architecture::Sieve && shape.residual_scale;
    if architecture == Architecture::Doge || has_scales {
        for scale in ["input_residual", "post_attention_residual"] {
            let mut tensor = same_name(scale, &[d_model]);
            if !shape.residual_scale {
                tensor.source = Source::Ones;
            }
            tensors.push(tensor);
        }
    }
}

/// Maps a whole tensor of a layer, by its name in `transformers`, its name in the checkpoint, and its shape.
type Whole<'a> = dyn Fn(&str, &str, &[usize]) -> ExportTensor + 'a;

/// MLA's projections and norms without the output projection, in DeepSeek's names.
fn push_latent(tensors: &mut Vec<ExportTensor>, shape: &ModelShape, mla: MlaShape, whole: &Whole<'_>) {
    let (d_model, num_heads, head_dim) = (shape.d_model, shape.num_heads, shape.head_dim);
    let MlaShape { kv_lora_rank: rank, qk_rope_head_dim: rope, qk_norm } = mla;
    let norm_dim = mla.qk_norm_dim(head_dim);
    let parts: [(&str, &str, &[usize]); 6] = [
        ("q_proj", "q_proj", &[num_heads * (head_dim + rope), d_model]),
        ("kv_a_proj_with_mqa", "kv_a_proj", &[rank + rope, d_model]),
        ("kv_a_layernorm", "kv_a_norm", &[rank]),
        ("kv_b_proj", "kv_b_proj", &[num_heads * 2 * head_dim, rank]),
        ("q_norm", "q_norm", &[norm_dim]),
        ("k_norm", "k_norm", &[norm_dim]),
    ];
    // The last two exist only with norms of queries and keys.
    for (theirs, ours, shape) in &parts[..if qk_norm { 6 } else { 4 }] {
        let name = |name: &str| format!("self_attn.{name}.weight");
        tensors.push(whole(&name(theirs), &name(ours), shape));
    }
}

/// Adds the tensors of NSA's compression MLPs and gates.
fn push_compression(tensors: &mut Vec<ExportTensor>, shape: &ModelShape, nsa: NsaShape, whole: &Whole<'_>) {
    let (head_dim, block) = (shape.head_dim, nsa.compress_block_size);
    if let Some(hidden) = nsa.compress_hidden_size {
        for part in ["k_compress", "v_compress"] {
            let parts: [(&str, &[usize]); 3] = [
                ("positions", &[block, head_dim]),
                ("up_proj.weight", &[hidden, block * head_dim]),
                ("down_proj.weight", &[head_dim, hidden]),
            ];
            for (name, shape) in parts {
                let name = format!("self_attn.{part}.{name}");
                tensors.push(whole(&name, &name, shape));
            }
        }
    }
    let num_gates = shape.num_heads * NUM_NSA_BRANCHES;
    let weight = "self_attn.gate_proj.weight";
    tensors.push(whole(weight, weight, &[num_gates, shape.d_model]));
    let (theirs, ours) = ("self_attn.gate_proj.bias", "self_attn.gate_bias");
    tensors.push(whole(theirs, ours, &[num_gates]));
}

/// Refuses weights with a tensor that the export would leave out.
pub(super) fn check_complete(tensors: &[ExportTensor], weights: &TensorFiles) -> Result<(), CheckpointError> {
    let used: BTreeSet<&str> = tensors
        .iter()
        .filter_map(|tensor| match &tensor.source {
            Source::Rows { name, .. } => Some(name.as_str()),
            Source::Ones => None,
        })
        .collect();
    match weights.names().into_iter().find(|name| !used.contains(name.as_str())) {
        None => Ok(()),
        Some(name) => {
            let problem = format!("tensor {name} has no place in the model of the recipe");
            Err(CheckpointError::other_model(weights.path(), problem))
        }
    }
}
