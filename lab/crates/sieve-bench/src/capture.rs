//! `sieve kernels capture`: writes DMA's scores, or the queries, keys and values of dense attention, which a trained
//! model computes for a text. Benchmarks and checks read the file.
use crate::error::{BenchError, Result, refused};
use burn::tensor::{DType, Int, Tensor, TensorData};
use sieve_hf::{LoadedModel, NamedTensor, write_tensor_file};
use sieve_kernels::KernelText;
use sieve_nn::{DecoderLayer, LayerContext, PassState, Qwen3};
use sieve_ops::{DeviceBackend, Documents};
use std::path::Path;

/// Most tokens read: enough for the longest benchmark.
const MAX_TOKENS: usize = 1 << 17;

/// Most query heads of captured operands; they are the heads of whole layers, spread evenly over the model.
const MAX_HEADS: usize = 32;

/// What a capture wrote, with its sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Captured {
    /// DMA's scores: KV heads, and tokens of each.
    Scores([usize; 2]),
    /// Queries, keys and values: tokens, query heads and KV heads.
    Operands([usize; 3]),
}

/// Runs a model over a text and writes a safetensors file: queries, keys and values of dense attention, or DMA's
/// scores.
///
/// # Errors
/// A model with neither DMA nor dense attention, a text without a token, a file that cannot be written.
pub fn capture<B: DeviceBackend>(
    loaded: &LoadedModel<B>,
    tokens: Vec<u32>,
    out: &Path,
    device: &B::Device,
) -> Result<Captured> {
    let is_dense = |layer: &DecoderLayer<B>| layer.self_attn.as_layer().as_grouped().is_some();
    let (tensors, captured) = if loaded.model.layers.iter().all(is_dense) {
        operands(loaded, tokens, device)?
    } else {
        scores(loaded, tokens, device)?
    };
    let no_metadata = None;
    write_tensor_file(out, &tensors, no_metadata)?;
    Ok(captured)
}

/// Tensors "q", "k" and "v" of one row as long as a training row, `[tokens, heads, head_dim]` in f32 after norms and
/// RoPE. The heads come from [`MAX_HEADS`] `/ num_heads` layers, spread evenly over the model.
fn operands<B: DeviceBackend>(
    loaded: &LoadedModel<B>,
    mut tokens: Vec<u32>,
    device: &B::Device,
) -> Result<(Vec<NamedTensor>, Captured)> {
    tokens.truncate(loaded.recipe.training.seq_len);
    let (model, shape) = (&loaded.model, &loaded.shape);
    let num_wanted = (MAX_HEADS / shape.num_heads).clamp(1, model.layers.len());
    let is_wanted = |layer: usize| {
        let layer_of = |at: usize| (at * model.layers.len()).div_ceil(num_wanted);
        (0..num_wanted).any(|at| layer_of(at) == layer)
    };
    let mut parts: [Vec<Tensor<B, 3>>; 3] = Default::default();
    each_layer(model, &tokens, device, &mut |at, layer, x, context| {
        if let (true, Some(mha)) = (is_wanted(at), layer.self_attn.as_layer().as_grouped()) {
            let qkv = mha.qkv.forward(layer.input_layernorm.forward(x), &layer.attention_context(context));
            let mut first = 0;
            let heads = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads];
            for (part, heads) in parts.iter_mut().zip(heads) {
                part.push(qkv.clone().narrow(2, first, heads).squeeze_dim(0));
                first += heads;
            }
        }
        Ok(())
    })?;
    let named = ["q", "k", "v"].into_iter().zip(parts).map(|(name, part)| {
        let all = Tensor::cat(part, 1).cast(DType::F32);
        NamedTensor { name: name.to_owned(), data: all.into_data() }
    });
    let heads = [shape.num_heads, shape.num_kv_heads].map(|heads| heads * num_wanted);
    Ok((named.collect(), Captured::Operands([tokens.len(), heads[0], heads[1]])))
}

/// The scores of all layers and KV heads: tensor "z", f32 `[layers * kv_heads, tokens]`. The text is read in rows as
/// long as a training row, each a document of its own, and the rows' scores are joined.
///
/// # Errors
/// A model without DMA, a text without a token.
fn scores<B: DeviceBackend>(
    loaded: &LoadedModel<B>,
    mut tokens: Vec<u32>,
    device: &B::Device,
) -> Result<(Vec<NamedTensor>, Captured)> {
    tokens.truncate(MAX_TOKENS);
    let length = loaded.recipe.training.seq_len.min(tokens.len());
    if length == 0 {
        return refused("the text has no token");
    }
    let mut rows: Vec<Vec<f32>> = Vec::new();
    for piece in tokens.chunks_exact(length) {
        let scores = scores_of_row(&loaded.model, piece, device)?;
        rows.resize(scores.len(), Vec::new());
        for (row, scores) in rows.iter_mut().zip(scores) {
            row.extend(scores);
        }
    }
    let shape = [rows.len(), rows.first().map_or(0, Vec::len)];
    let z = NamedTensor { name: "z".to_owned(), data: TensorData::new(rows.concat(), shape) };
    Ok((vec![z], Captured::Scores(shape)))
}

/// The source text of all kernels, some hundred kilobytes: a text for a capture without a file of one's own.
///
/// # Errors
/// None that a whole program can meet.
pub fn kernel_sources() -> Result<String> {
    let mut all = String::new();
    for name in KernelText::files() {
        all.push_str(KernelText::of_file(name)?);
    }
    Ok(all)
}

/// A callback for each layer of a forward pass: the layer's index, the layer, its input and the context.
type Observe<'a, B> = dyn FnMut(usize, &DecoderLayer<B>, Tensor<B, 3>, &LayerContext<'_, B>) -> Result<()> + 'a;

/// Runs the layers over one row of tokens, a single document; calls `observe` before each layer.
fn each_layer<B: DeviceBackend>(
    model: &Qwen3<B>,
    tokens: &[u32],
    device: &B::Device,
    observe: &mut Observe<'_, B>,
) -> Result<()> {
    if tokens.is_empty() {
        return refused("the text has no token");
    }
    let ids: Vec<i32> = tokens.iter().map(|&id| id as i32).collect();
    let ids = Tensor::<B, 2, Int>::from_data(TensorData::new(ids, [1, tokens.len()]), device);
    let documents = Documents::whole_rows([1, tokens.len()], device);
    let rope = model.rope(tokens.len(), device);
    let (context, mut state) = (LayerContext::new(&documents, &rope), PassState::default());
    let hidden = model.through_layers(ids, |at, layer, x| {
        observe(at, layer, x.clone(), &context)?;
        let no_caches = None;
        Ok(layer.forward(x, &context, &mut state, no_caches).x)
    });
    hidden.map(drop)
}

/// DMA's scores z of one row of tokens, for each layer and KV head.
fn scores_of_row<B: DeviceBackend>(model: &Qwen3<B>, tokens: &[u32], device: &B::Device) -> Result<Vec<Vec<f32>>> {
    let mut rows = Vec::new();
    each_layer(model, tokens, device, &mut |_, layer, x, context| {
        let normed = || layer.input_layernorm.forward(x.clone());
        let Some(z) = layer.self_attn.as_layer().key_scores(&normed, &layer.attention_context(context)) else {
            return refused(
                "not every layer has DMA, so not all keys have scores, and not every layer is dense\n  hint: use a \
                 checkpoint with kind = \"dma\" or \"mha\" in every layer",
            );
        };
        let z = z.map_err(BenchError::Refused)?.into_data();
        let z: Vec<f32> = z.convert::<f32>().to_vec().map_err(BenchError::gpu)?;
        rows.extend(z.chunks_exact(tokens.len()).map(<[f32]>::to_vec));
        Ok(())
    })?;
    Ok(rows)
}
