//! Divides weights among files of bounded size.
use super::tensors::ExportTensor;
use burn::tensor::DType;
use serde_json::{Map, Value, json};

/// One safetensors file of the exported weights.
#[derive(Debug)]
pub(super) struct Shard<'a> {
    /// Name of the file.
    pub(super) file: String,
    /// The tensors that the file holds.
    pub(super) tensors: &'a [ExportTensor],
}

/// Divides the tensors among files, in their order: a file ends before the tensor that would exceed `max_bytes`.
pub(super) fn plan(tensors: &[ExportTensor], dtype: DType, max_bytes: u64) -> Vec<Shard<'_>> {
    let mut ends = Vec::new();
    let mut filled = 0;
    for (n, tensor) in tensors.iter().enumerate() {
        let bytes = tensor.num_bytes(dtype);
        if filled > 0 && filled + bytes > max_bytes {
            ends.push(n);
            filled = 0;
        }
        filled += bytes;
    }
    ends.push(tensors.len());
    let num_shards = ends.len();
    let starts = std::iter::once(0).chain(ends.clone());
    starts
        .zip(ends)
        .enumerate()
        .map(|(n, (start, end))| Shard {
            file: match num_shards {
                1 => "model.safetensors".to_owned(),
                _ => format!("model-{:05}-of-{num_shards:05}.safetensors", n + 1),
            },
            tensors: &tensors[start..end],
        })
        .collect()
}

/// Text of `model.safetensors.index.json`, which names the file of each tensor.
pub(super) fn index(shards: &[Shard<'_>], dtype: DType) -> String {
    let tensors = || {
        let all = shards.iter();
        all.flat_map(|shard| shard.tensors.iter().map(move |tensor| (shard, tensor)))
    };
    let total_size: u64 = tensors().map(|(_, tensor)| tensor.num_bytes(dtype)).sum();
    let mut places: Vec<(&str, &str)> =
        tensors().map(|(shard, tensor)| (tensor.name.as_str(), shard.file.as_str())).collect();
    places.sort_unstable();
    let weight_map: Map<String, Value> =
        places.into_iter().map(|(name, file)| (name.to_owned(), file.into())).collect();
    super::config::to_text(&json!({
        "metadata": { "total_size": total_size },
        "weight_map": weight_map,
    }))
}
