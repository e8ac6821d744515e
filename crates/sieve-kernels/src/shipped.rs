//! The specialisations that ship, as launches ask for them: the Rust side of `kernels/manifest.toml`.
//!
//! A test keeps both lists equal, so that CI compiles exactly what runs on a large GPU for the usual shapes, and a build
//! ahead of time has something to go by.
use crate::attention::backward::{
    attention_backward_convert_kernel, attention_backward_kernel,
    attention_backward_prepare_kernel, attention_backward_query_kernel, attention_row_sums_kernel,
};
use crate::attention::backward_tiling::{BackwardTiling, QueryPass, QueryTiling, SumOrder};
use crate::attention::bias_base::bias_base_kernel;
use crate::attention::decode::attention_decode_kernel;
use crate::attention::forward::attention_forward_kernel;
use crate::attention::heads::AttentionShape;
use crate::attention::hopper_tiling::{
    HopperPass, HopperTiling, has_hopper_gradient, hopper_attention_backward_prepare_kernel,
    hopper_backward_kernel,
};
use crate::attention::sparse_forward::{
    hopper_sparse_attention_forward_kernel, sparse_attention_forward_kernel,
    sparse_attention_tiling,
};
use crate::attention::tiling::{ForwardTiling, KeySource};
use crate::dma::attention_backward::{
    dma_attention_backward_convert_kernel, dma_attention_backward_kernel,
    dma_attention_backward_query_kernel, dma_attention_row_sums_kernel,
};
use crate::dma::attention_forward::dma_attention_forward_kernel;
use crate::dma::decode::dma_decode_kernel;
use crate::dma::lists::{dma_lists_kernel, dma_lists_prefix_kernel};
use crate::dma::scores::{ScoreBias, dma_scores_kernel};
use crate::dma::select::dma_select_kernels;
use crate::error::KernelError;
use crate::mla::decode::{mla_decode_join_kernel, mla_decode_kernel};
use crate::needed::NeededKernels;
use crate::nsa::nsa_kernels;
use crate::runtime::source_kernel::SourceKernel;
use crate::step::fill_zero::fill_zero_kernel;
use crate::step::swiglu_backward::{swiglu_backward_kernel, swiglu_backward_with_output_kernel};
use crate::step::swiglu_forward::swiglu_forward_kernel;
use crate::step_kernels::step_kernels;

const NAME: &str = "shipped_kernels";

/// Shared memory of a block on the devices the list is for: H100 and H200. Smaller devices take smaller tilings of some.
const SHARED_BYTES: usize = 227 * 1024;

/// Widths of queries and keys, and of values.
const WIDTHS: &[(usize, usize)] = &[
    (16, 16),
    (32, 32),
    (64, 64),
    (96, 96),
    (128, 128),
    (192, 128),
    (256, 256),
];

/// Query heads that share a KV head, where only the width matters.
const USUAL_GROUP: usize = 2;

/// All shipped specialisations.
///
/// # Errors
/// None for the sizes listed here; [`KernelError::DeviceLimit`] would mean that a tiling outgrew an H100.
pub fn shipped_kernels() -> Result<Vec<SourceKernel>, KernelError> {
    let mut list = shipped_kernels_for(SHARED_BYTES);
    match list.refused.pop() {
        Some(error) => Err(error),
        None => Ok(list.kernels),
    }
}

/// The same specialisations with the tilings of a device whose blocks may have `shared_bytes` of shared memory.
pub fn shipped_kernels_for(shared_bytes: usize) -> NeededKernels {
    let mut kernels = vec![
        fill_zero_kernel(),
        dma_lists_kernel(),
        dma_lists_prefix_kernel(),
        bias_base_kernel(KeySource::Biased),
        bias_base_kernel(KeySource::Gathered),
    ];
    kernels.extend(dma_select_kernels());
    kernels.extend(step_kernels());
    for (is_bf16, vector) in [(true, 8), (false, 4)] {
        kernels.push(swiglu_forward_kernel(is_bf16, vector));
        kernels.push(swiglu_backward_kernel(is_bf16, vector));
        kernels.push(swiglu_backward_with_output_kernel(is_bf16, vector));
    }
    for num_kv_heads in [4, 8] {
        // The launch's shared memory follows the head width; the code does not.
        kernels.push(dma_scores_kernel(num_kv_heads, 128, ScoreBias::Linear));
    }
    let mut seen = std::collections::HashSet::new();
    for width in [64, 128] {
        // Those without a head width are in both lists.
        let nsa = nsa_kernels(width).into_iter();
        kernels
            .extend(nsa.filter(|kernel| seen.insert((kernel.name(), kernel.defines().to_vec()))));
        kernels.push(attention_backward_prepare_kernel(width));
        kernels.push(attention_backward_convert_kernel(width));
        kernels.push(dma_attention_backward_convert_kernel(width));
        kernels.push(attention_decode_kernel(width, width, 0));
        kernels.push(attention_decode_kernel(width, width, 1));
        kernels.push(dma_decode_kernel(width, width, ScoreBias::Exp));
    }
    // Latents of DeepSeek-V2 and of the 80M and 200M recipes.
    for rank in [192, 256, 512] {
        kernels.push(mla_decode_kernel(rank + 64, rank, shared_bytes));
        kernels.push(mla_decode_join_kernel(rank));
    }
    let mut list = NeededKernels {
        kernels,
        refused: Vec::new(),
    };
    forward(&mut list, shared_bytes);
    backward(&mut list, shared_bytes);
    if shared_bytes >= SHARED_BYTES {
        list.kernels.extend(hopper());
    }
    list
}

/// The Hopper family of the attention kernels.
fn hopper() -> Vec<SourceKernel> {
    let latent = shape((192, 128), 1);
    let forward = HopperTiling::new(HopperPass::Output, &latent, KeySource::Dense);
    let mut kernels = vec![forward.kernel()];
    for order in [SumOrder::Any, SumOrder::Fixed] {
        for set in BackwardTiling::launches(&latent, order) {
            kernels.push(hopper_backward_kernel(
                &latent,
                KeySource::Dense,
                set,
                false,
            ));
        }
    }
    for width in [64, 128] {
        let of_group = |group| shape((width, width), group);
        let usual = of_group(USUAL_GROUP);
        kernels.push(hopper_attention_backward_prepare_kernel(width));
        kernels.push(hopper_sparse_attention_forward_kernel(&usual));
        let mut query = |shape: &AttentionShape, pass, source| {
            kernels.push(HopperTiling::new(pass, shape, source).kernel());
        };
        query(&usual, HopperPass::Output, KeySource::Dense);
        for pass in [
            HopperPass::Output,
            HopperPass::OutputAndRest,
            HopperPass::RowSums,
        ] {
            query(&usual, pass, KeySource::Biased);
            for group in [1, USUAL_GROUP] {
                query(&of_group(group), pass, KeySource::Gathered);
            }
        }
        query(&usual, HopperPass::Gradient, KeySource::Dense);
        query(&usual, HopperPass::Gradient, KeySource::Biased);
        for group in [1, USUAL_GROUP] {
            let shape = of_group(group);
            if has_hopper_gradient(&shape, KeySource::Gathered) {
                query(&shape, HopperPass::Gradient, KeySource::Gathered);
            }
        }
        for order in [SumOrder::Any, SumOrder::Fixed] {
            for set in BackwardTiling::launches(&usual, order) {
                for source in [KeySource::Dense, KeySource::Biased, KeySource::Gathered] {
                    let fixed = source == KeySource::Gathered && order == SumOrder::Fixed;
                    kernels.push(hopper_backward_kernel(&usual, source, set, fixed));
                }
            }
        }
    }
    kernels
}

fn forward(list: &mut NeededKernels, shared_bytes: usize) {
    let mut dense = |shape: AttentionShape, source| {
        let tiling = ForwardTiling::choose(NAME, &shape, source, shared_bytes);
        list.add(tiling.map(|tiling| attention_forward_kernel(&shape, &tiling, source)));
    };
    for &widths in WIDTHS {
        dense(shape(widths, USUAL_GROUP), KeySource::Dense);
    }
    for width in [64, 128] {
        dense(shape((width, width), USUAL_GROUP), KeySource::Biased);
    }
    let wide = shape((128, 128), USUAL_GROUP);
    let tiling = sparse_attention_tiling(&wide, shared_bytes);
    list.add(tiling.map(|tiling| sparse_attention_forward_kernel(&wide, &tiling)));
    let groups = [32, 64, 96, 128].map(|width| (width, USUAL_GROUP));
    for (width, group) in groups
        .into_iter()
        .chain([(64, 1), (64, 4), (128, 1), (128, 4)])
    {
        let shape = shape((width, width), group);
        let tiling = ForwardTiling::choose(NAME, &shape, KeySource::Gathered, shared_bytes);
        list.add(tiling.map(|tiling| dma_attention_forward_kernel(&shape, &tiling)));
    }
}

fn backward(list: &mut NeededKernels, shared_bytes: usize) {
    let mut dense = |widths, source, order| {
        let shape = shape(widths, USUAL_GROUP);
        let tiling = BackwardTiling::choose(NAME, &shape, source, shared_bytes);
        for set in BackwardTiling::launches(&shape, order) {
            let kernel = tiling.clone();
            list.add(kernel.map(|tiling| attention_backward_kernel(&shape, &tiling, source, set)));
        }
    };
    for widths in WIDTHS.iter().copied().filter(|widths| widths.0 > 16) {
        dense(widths, KeySource::Dense, SumOrder::Any);
    }
    for width in [64, 128] {
        dense((width, width), KeySource::Biased, SumOrder::Any);
    }
    dense((128, 128), KeySource::Dense, SumOrder::Fixed);
    let fixed = shape((128, 128), USUAL_GROUP);
    let query = |shape: &AttentionShape, pass, source| {
        QueryTiling::choose(NAME, pass, shape, source, shared_bytes)
    };
    let tiling = query(&fixed, QueryPass::Gradient, KeySource::Dense);
    list.add(
        tiling.map(|tiling| attention_backward_query_kernel(&fixed, &tiling, KeySource::Dense)),
    );
    let tiling = query(&fixed, QueryPass::Gradient, KeySource::Gathered);
    list.add(tiling.map(|tiling| dma_attention_backward_query_kernel(&fixed, &tiling)));
    for width in [64, 128] {
        let shape = shape((width, width), USUAL_GROUP);
        let tiling = query(&shape, QueryPass::RowSums, KeySource::Biased);
        list.add(
            tiling.map(|tiling| attention_row_sums_kernel(&shape, &tiling, KeySource::Biased)),
        );
        let tiling = query(&shape, QueryPass::RowSums, KeySource::Gathered);
        list.add(tiling.map(|tiling| dma_attention_row_sums_kernel(&shape, &tiling)));
    }
    for (width, order) in [
        (32, SumOrder::Any),
        (64, SumOrder::Any),
        (128, SumOrder::Any),
        (128, SumOrder::Fixed),
    ] {
        let shape = shape((width, width), USUAL_GROUP);
        let tiling = BackwardTiling::choose(NAME, &shape, KeySource::Gathered, shared_bytes);
        for set in BackwardTiling::launches(&shape, order) {
            let kernel = tiling.clone();
            list.add(
                kernel.map(|tiling| dma_attention_backward_kernel(&shape, &tiling, set, order)),
            );
        }
    }
}

/// A shape of which only widths and group count.
fn shape((head_dim, head_dim_v): (usize, usize), group: usize) -> AttentionShape {
    let (batch, seq_len, num_kv_heads) = (1, 1, 1);
    AttentionShape {
        batch,
        seq_len,
        num_heads: group,
        num_kv_heads,
        head_dim,
        head_dim_v,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::{BTreeMap, BTreeSet};

    /// File and defines of every specialisation in `kernels/manifest.toml`.
    fn manifest() -> BTreeSet<(String, BTreeMap<String, String>)> {
        let text = include_str!("../../../kernels/manifest.toml");
        let manifest: toml::Table = text.parse().expect("the manifest is TOML");
        let mut all = BTreeSet::new();
        for kernel in manifest["kernel"].as_array().expect("a list") {
            let file = kernel["file"].as_str().expect("a name").to_owned();
            let table = |value: Option<&toml::Value>| -> BTreeMap<String, String> {
                let pairs = value.and_then(toml::Value::as_table).into_iter().flatten();
                pairs
                    .map(|(name, value)| (name.clone(), value.to_string()))
                    .collect()
            };
            let common = table(kernel.get("defines"));
            let variants = kernel.get("variants").and_then(toml::Value::as_array);
            let variants = variants.map_or_else(
                || vec![BTreeMap::new()],
                |v| v.iter().map(|v| table(Some(v))).collect(),
            );
            for variant in variants {
                let mut defines = common.clone();
                defines.extend(variant);
                all.insert((file.clone(), defines));
            }
        }
        all
    }

    #[test]
    fn the_manifest_lists_what_launches_ask_for() {
        let launched: BTreeSet<_> = shipped_kernels()
            .expect("every tiling fits")
            .iter()
            .map(|kernel| {
                let defines = kernel
                    .defines()
                    .iter()
                    .map(|(name, value)| ((*name).to_owned(), value.clone()));
                (
                    format!("{}.cu", kernel.name()),
                    defines.collect::<BTreeMap<_, _>>(),
                )
            })
            .collect();
        let manifest = manifest();
        let missing: Vec<_> = launched.difference(&manifest).collect();
        let unused: Vec<_> = manifest.difference(&launched).collect();
        assert!(
            missing.is_empty() && unused.is_empty(),
            "not in the manifest: {missing:#?}\nnot launched: {unused:#?}"
        );
    }

    #[test]
    fn every_shipped_kernel_has_a_key_of_its_own() {
        let kernels = shipped_kernels().expect("every tiling fits");
        let keys: BTreeSet<u128> = kernels
            .iter()
            .map(|k| k.cache_key().expect("the file exists"))
            .collect();
        assert_eq!(keys.len(), kernels.len());
    }
}
