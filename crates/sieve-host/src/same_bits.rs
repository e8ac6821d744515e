//! `--same-bits` and `training.same_bits`: tokens with the bits of whole rows, where a GPU would take faster kernels
//! with other sums.
use crate::device::Device;
use anyhow::{Result, bail, ensure};
use clap::Args;
use sieve_core::model::Chooses;
use sieve_core::model::gpu::Gpu;
use sieve_core::recipe::AttentionKind;
use sieve_core::{ChoiceRule, ModelShape};
use sieve_hf::LoadedModel;
use sieve_kernels::{DeviceReport, MOST_ORDERED};
use sieve_ops::DeviceBackend;

/// Widths of heads whose kernels for a token can add in the order of whole rows.
const HEAD_DIMS: [usize; 2] = [64, 128];

/// What a GEMM's columns and the columns that it sums over are a multiple of, where it adds in one order: cuBLASLt's
/// kernels for Hopper load 16 bytes of bf16.
const GEMM_COLUMNS: usize = 8;

/// The compute capability of the GPUs that have these kernels.
const HOPPER: (u32, u32) = (9, 0);

/// What asks for it on the command line.
const FLAG: &str = "--same-bits";

/// The recipe's key that asks for it in training.
const KEY: &str = "training.same_bits";

/// What helps against a refusal.
const HINT: &str = "\n  hint: leave it out, or add --device cpu, where it is so for every model";

/// `--same-bits`.
#[derive(Args, Clone, Copy, Debug)]
pub struct SameBitsArgs {
    /// On an H100 or H200: a token has the same log-probability, to the bit, among any number of texts, with caches of
    /// any length and in a whole row; for dense, dynamic mask, MiniMax sparse, native sparse and mixture of block
    /// attention, InfLLM-V2, windows and bands, slower with few or long texts. On a CPU every model does
    #[arg(long)]
    same_bits: bool,
}

impl SameBitsArgs {
    /// Checks that the model can hold it on this device, before the model is loaded. `shape` is called where the flag
    /// asks for more than the device does anyway.
    ///
    /// # Errors
    /// A GPU that is no Hopper GPU; kinds of attention or widths of heads without such kernels; a selector.
    pub fn check(self, device: &Device, has_selector: bool, shape: impl FnOnce() -> Result<ModelShape>) -> Result<()> {
        if !self.same_bits {
            return Ok(());
        }
        // What a selector leaves out depends on how the text is read, on every device.
        ensure!(
            !has_selector,
            "--same-bits is for a model's own attention, and --selector replaces it\n  hint: leave one of them out"
        );
        let Device::Cuda(gpu) = device else { return Ok(()) };
        require_hopper(FLAG, gpu)?;
        require_order(FLAG, &shape()?)
    }

    /// The model as the flag wants it.
    pub fn of<B: DeviceBackend>(self, loaded: LoadedModel<B>) -> LoadedModel<B> {
        if self.same_bits { LoadedModel { model: loaded.model.with_same_bits(), ..loaded } } else { loaded }
    }
}

/// Checks that a recipe's `training.same_bits` holds for its model on this device; on a CPU it does for every model.
///
/// # Errors
/// As [`SameBitsArgs::check`], but for a selector.
pub fn check_training(device: &Device, shape: &ModelShape) -> Result<()> {
    let Device::Cuda(gpu) = device else { return Ok(()) };
    require_hopper(KEY, gpu)?;
    require_order(KEY, shape)
}

/// As [`check_training`], for a GPU that a run is only planned for.
///
/// # Errors
/// As [`check_training`].
pub fn check_planned(gpu: &Gpu, shape: &ModelShape) -> Result<()> {
    ensure!(gpu.is_hopper(), "{KEY} needs an H100 or H200, and the plan is for {}{HINT}", gpu.name);
    require_order(KEY, shape)
}

/// Refuses GPUs without these kernels. `what` is what asks for them.
fn require_hopper(what: &str, gpu: &DeviceReport) -> Result<()> {
    let is_hopper = (gpu.major, gpu.minor) == HOPPER;
    ensure!(is_hopper, "{what} needs an H100 or H200, and cuda:{} is {}{HINT}", gpu.index, gpu.name);
    Ok(())
}

/// Refuses models whose tokens have no one order of sums on a GPU. `what` is what asks for it.
fn require_order(what: &str, shape: &ModelShape) -> Result<()> {
    let known = AttentionKind::ALL.into_iter().filter(|kind| kind.facts().has_one_order);
    let known: Vec<_> = known.map(AttentionKind::name).collect();
    for part in shape.by_kind() {
        let kind = part.attention.kind();
        ensure!(
            kind.facts().has_one_order,
            "{what} is for layers of kind {} on a GPU, and this model has {} layers{HINT}",
            known.join(", "),
            kind.name()
        );
        let choice = part.attention.as_kind().block_choice();
        ensure!(
            choice.is_none_or(|choice| choice.rule != ChoiceRule::SumOfHeads),
            "{what} is for indexers that score each token, and this model has {} layers with indexer \
             \"qsa\"{HINT}",
            kind.name()
        );
        let group = part.num_heads / part.num_kv_heads;
        if let Some((got, supported)) = part.attention.as_kind().block_gap(part.head_dim, group) {
            bail!("{what} is for {supported} on a GPU, and this model has {} layers of {got}{HINT}", kind.name());
        }
        let kept = part.attention.as_kind().num_kept().filter(|_| kind.facts().chooses == Chooses::Keys);
        ensure!(
            kept.is_none_or(|kept| kept <= MOST_ORDERED),
            "{what} is for layers that keep up to {MOST_ORDERED} keys on a GPU, and this model has {} layers \
             that keep {}{HINT}",
            kind.name(),
            kept.unwrap_or_default()
        );
    }
    ensure!(
        HEAD_DIMS.contains(&shape.head_dim),
        "{what} is for heads of 64 or 128 columns on a GPU, and this model has heads of {}{HINT}",
        shape.head_dim
    );
    for (key, columns) in
        [("hidden_size", shape.d_model), ("intermediate_size", shape.d_ff), ("vocab_size", shape.vocab_size)]
    {
        ensure!(
            columns.is_multiple_of(GEMM_COLUMNS),
            "{what} is for a {key} that is a multiple of {GEMM_COLUMNS} on a GPU, and this model's is {columns}{HINT}"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use sieve_core::MsaShape;
    use sieve_core::model::gpu::find;
    use sieve_core::model::test_shapes::{kind_that_chooses_by, qwen3_0_6b, tiny_dma, tiny_mla, tiny_nsa, with_keys};
    use sieve_core::model::{Attention, IndexScores};

    fn gpu(major: u32, name: &str) -> Device {
        let name = name.to_owned();
        Device::Cuda(DeviceReport {
            index: 0,
            name,
            major,
            minor: 0,
            num_multiprocessors: 132,
            total_memory_bytes: 1 << 37,
        })
    }

    #[test]
    fn what_cannot_have_equal_bits_is_refused_by_name() {
        let wanted = SameBitsArgs { same_bits: true };
        let (hopper, ampere) = (gpu(9, "NVIDIA H100"), gpu(8, "NVIDIA A100"));
        let dense = qwen3_0_6b();
        let window = ModelShape { attention: Attention::swa(4), ..dense.clone() };
        let wide = ModelShape { head_dim: 256, ..dense.clone() };
        let chosen = tiny_dma();
        let keys = with_keys(chosen.attention, &[("keep_window_size", 4096)]);
        // Small shapes with sizes that a GPU takes.
        let on_gpu = |shape| ModelShape { d_model: 128, d_ff: 64, vocab_size: 40, head_dim: 64, ..shape };
        let (chosen, many) = (on_gpu(chosen), on_gpu(ModelShape { attention: keys, ..tiny_dma() }));
        let of_blocks = |rule| ModelShape { attention: kind_that_chooses_by(rule, &[]), ..dense.clone() };
        let (indexed, pooled) = (of_blocks(ChoiceRule::LargestScore), of_blocks(ChoiceRule::LargestProbability));
        let Attention::Msa(msa) = indexed.attention else { panic!("MSA scores each token") };
        let qsa = Attention::Msa(MsaShape { indexer: IndexScores::Qsa, select_block_size: 64, ..msa });
        let qsa = ModelShape { attention: qsa, ..dense.clone() };
        let large = ModelShape { num_heads: 65 * dense.num_kv_heads, ..indexed.clone() };
        let branches = on_gpu(tiny_nsa());
        // GPT-2's vocabulary.
        let odd = ModelShape { vocab_size: 50_257, ..dense.clone() };
        for shape in [&dense, &window, &chosen, &indexed, &of_blocks(ChoiceRule::MeanKey), &pooled, &branches] {
            wanted.check(&hopper, false, || Ok(shape.clone())).expect("kernels in order");
        }
        for device in [&hopper, &Device::Cpu] {
            let error = wanted.check(device, true, || Ok(dense.clone())).expect_err("a selector").to_string();
            assert!(error.contains("--selector replaces it"), "{error}");
            SameBitsArgs { same_bits: false }.check(device, true, || Ok(dense.clone())).expect("not asked for");
        }
        for (shape, device, part) in [
            (&dense, &ampere, "needs an H100 or H200, and cuda:0 is NVIDIA A100"),
            (&tiny_mla(), &hopper, "has mla layers"),
            (&tiny_nsa(), &hopper, "has nsa layers of heads of 6"),
            (&qsa, &hopper, "has msa layers with indexer \"qsa\""),
            (&large, &hopper, "has msa layers of 65 query heads a KV head"),
            (&wide, &hopper, "has heads of 256"),
            (&many, &hopper, "has dma layers that keep 4096"),
            (&odd, &hopper, "for a vocab_size that is a multiple of 8 on a GPU, and this model's is 50257"),
        ] {
            let shape = || Ok(shape.clone());
            let error = wanted.check(device, false, shape).expect_err(part).to_string();
            assert!(error.contains(part) && error.contains("--device cpu"), "{error}");
            SameBitsArgs { same_bits: false }.check(device, false, shape).expect("not asked for");
            wanted.check(&Device::Cpu, false, shape).expect("a CPU adds in one order");
        }
    }

    #[test]
    fn a_plan_is_refused_where_training_is() {
        let shapes = [qwen3_0_6b(), tiny_mla(), tiny_nsa(), tiny_dma(), ModelShape { head_dim: 256, ..qwen3_0_6b() }];
        for (name, major) in [("h200", 9), ("h100", 9), ("a100", 8), ("4090", 8), ("b200", 10)] {
            for shape in &shapes {
                let planned = check_planned(&find(name).expect("a known GPU"), shape);
                assert_eq!(planned.is_err(), check_training(&gpu(major, name), shape).is_err(), "{name}");
            }
        }
        let error = check_planned(&find("a100").expect("a known GPU"), &shapes[0]).expect_err("no Hopper GPU");
        assert!(error.to_string().contains("needs an H100 or H200, and the plan is for a100"), "{error}");
    }
}
