//! The scores that a trained DMA model gives to the tokens of a text, for benchmarks and checks.
use crate::error::{BenchError, Result, refused};
use burn::tensor::{Int, Tensor, TensorData, TensorPrimitive};
use sieve_hf::{LoadedModel, NamedTensor, write_tensor_file};
use sieve_kernels::KernelText;
use sieve_nn::{Attention, LayerContext, Qwen3};
use sieve_ops::{Documents, SieveBackend};
use std::path::Path;

/// Most tokens read: enough for the longest benchmark.
const MAX_TOKENS: usize = 1 << 17;

/// Writes the scores of all layers and KV heads to a safetensors file: "z", f32 `[layers * kv_heads, tokens]`;
/// returns that shape. The text is cut into pieces as long as a training row, each read from its beginning, whose
/// scores follow each other in the file: a score depends on its token's values alone.
///
/// # Errors
/// A model without DMA, a text without a token, a file that cannot be written.
pub fn capture<B: SieveBackend>(
    loaded: &LoadedModel<B>,
    mut tokens: Vec<u32>,
    out: &Path,
    device: &B::Device,
) -> Result<[usize; 2]> {
    tokens.truncate(MAX_TOKENS);
    let length = loaded.recipe.training.seq_len.min(tokens.len());
    if length == 0 {
        return refused("the text has no token");
    }
    let mut rows: Vec<Vec<f32>> = Vec::new();
    for piece in tokens.chunks_exact(length) {
        let scores = scores(&loaded.model, piece, device)?;
        rows.resize(scores.len(), Vec::new());
        for (row, scores) in rows.iter_mut().zip(scores) {
            row.extend(scores);
        }
    }
    let shape = [rows.len(), rows.first().map_or(0, Vec::len)];
    let z = NamedTensor {
        name: "z".to_owned(),
        data: TensorData::new(rows.concat(), shape),
    };
    write_tensor_file(out, &[z], None)?;
    Ok(shape)
}

/// The text of all kernels: some hundred kilobytes that every copy of the program has.
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

/// Scores of one row of tokens, for each layer and KV head.
fn scores<B: SieveBackend>(
    model: &Qwen3<B>,
    tokens: &[u32],
    device: &B::Device,
) -> Result<Vec<Vec<f32>>> {
    let ids: Vec<i32> = tokens.iter().map(|&id| id as i32).collect();
    let ids = Tensor::<B, 2, Int>::from_data(TensorData::new(ids, [1, tokens.len()]), device);
    let documents = Documents::whole_rows([1, tokens.len()], device);
    let rope = model.rope(tokens.len(), device);
    let context = LayerContext::new(&documents, &rope);
    let mut x = model.embed_tokens.forward(ids);
    let mut rows = Vec::new();
    for layer in &model.layers {
        let Attention::Dma(dma) = &layer.self_attn else {
            return refused(
                "this model has no DMA, so its keys have no scores\n  hint: use a checkpoint with kind = \"dma\"",
            );
        };
        let qkv = dma
            .qkv
            .forward(layer.input_layernorm.forward(x.clone()), &context);
        let z = B::dma_scores(
            qkv.into_primitive().tensor(),
            dma.dt_proj
                .weight
                .val()
                .transpose()
                .into_primitive()
                .tensor(),
            dma.a.val().into_primitive().tensor(),
            dma.qkv.spec(None),
        );
        let z = Tensor::<B, 3>::from_primitive(TensorPrimitive::Float(z)).into_data();
        let z: Vec<f32> = z.convert::<f32>().to_vec().map_err(BenchError::gpu)?;
        rows.extend(z.chunks_exact(tokens.len()).map(<[f32]>::to_vec));
        x = layer.forward(x, &context).x;
    }
    Ok(rows)
}
