//! Divides weights among files of bounded size.
use super::tensors::ExportTensor;
use crate::TensorFiles;
use burn::tensor::DType;
use serde_json::json;
use std::collections::BTreeMap;

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
    let mut parts = Vec::new();
    let (mut start, mut filled) = (0, 0);
    for (n, tensor) in tensors.iter().enumerate() {
        let bytes = tensor.num_bytes(dtype);
        if filled > 0 && filled + bytes > max_bytes {
            parts.push(&tensors[start..n]);
            (start, filled) = (n, 0);
        }
        filled += bytes;
    }
    parts.push(&tensors[start..]);
    let num_shards = parts.len();
    let shard = |(n, tensors)| Shard { file: TensorFiles::name("model", n, num_shards), tensors };
    parts.into_iter().enumerate().map(shard).collect()
}

/// Text of `model.safetensors.index.json`, which names the file of each tensor.
pub(super) fn index(shards: &[Shard<'_>], dtype: DType) -> String {
    let tensors = || shards.iter().flat_map(|shard| shard.tensors.iter().map(move |tensor| (shard, tensor)));
    let total_size: u64 = tensors().map(|(_, tensor)| tensor.num_bytes(dtype)).sum();
    let weight_map: BTreeMap<&str, &str> =
        tensors().map(|(shard, tensor)| (tensor.name.as_str(), shard.file.as_str())).collect();
    super::json_text::to_text(&json!({
        "metadata": { "total_size": total_size },
        "weight_map": weight_map,
    }))
}
