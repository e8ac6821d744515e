//! Estimates the time of a step on a GPU: the sum of GEMMs, attention, memory traffic and launch gaps.
//!
//! Rates are shares of the data sheet's peak, measured on an H200 (lab/docs/benchmarks.md). GEMMs reach 0.71 of the
//! peak FLOP/s during a step, where the card's power is the limit; memory-bound kernels reach 0.84 of the bandwidth. A
//! test compares the estimate with 21 measured runs. Other GPUs are assumed to reach the same shares.

use crate::gpu_training_gap;
use crate::measured::{pairs_rate, pays_late};
use crate::memory::fp8_gemms;
use sieve_core::kinds::IndexScores;
use sieve_core::model::ModelShape;
use sieve_core::model::gpu::Gpu;
use std::ops::Range;

/// Share of the peak that GEMMs with weights reach.
const GEMMS: f64 = 0.71;
/// Share of the peak that an indexer's scores over all causal pairs reach.
const INDEX_SCORES: f64 = 0.42;
/// Share of the peak that an indexer's loss over attention's pairs reaches; it recomputes their scores.
const INDEX_LOSS: f64 = 0.145;
/// Bytes that QSA's loss reads and writes for each score of a head: to write it, scale it, take its exponential, and
/// sum over heads. Not measured.
const QSA_SCORE_BYTES: f64 = 24.0;
/// Share of the memory bandwidth that memory-bound kernels reach.
const MEMORY: f64 = 0.84;
/// Speed of fp8 GEMMs relative to bf16.
const FP8_SPEED: f64 = 1.88;
/// Bytes read and written to round an element to fp8: two reads in bf16 and two fp8 copies.
const FP8_BYTES: f64 = 6.0;
/// Seconds at the start and end of a kernel in which the GPU is not full.
const KERNEL_ENDS: f64 = 6e-6;
/// Kernels of a block, forward and backward.
const KERNELS_OF_A_BLOCK: f64 = 60.0;
/// Kernels of a micro-batch outside the blocks.
const KERNELS_BESIDE: f64 = 100.0;
/// Bytes per parameter that the gradient norm and AdamW read and write.
pub(super) const UPDATE_BYTES: f64 = 36.0;

/// Size of a micro-batch, and how many make a step.
pub(super) struct StepSize {
    pub(super) tokens: usize,
    pub(super) seq_len: usize,
    pub(super) micro_batches: usize,
    /// Share of the blocks whose forward pass runs twice.
    pub(super) recomputed: f64,
    /// Blocks that run their GEMMs in fp8.
    pub(super) fp8: Range<usize>,
    /// Whether indexers alone are trained, without a backward pass of the model.
    pub(super) indexers_alone: bool,
}

/// Seconds of the gradient norm and the optimizer's update on one GPU.
pub(super) fn update_seconds(num_parameters: u64, gpu: &Gpu) -> f64 {
    memory_seconds(UPDATE_BYTES * num_parameters as f64, gpu)
}

/// Seconds in which memory-bound kernels read and write `bytes`.
pub(super) fn memory_seconds(bytes: f64, gpu: &Gpu) -> f64 {
    bytes / (MEMORY * gpu.memory_bytes_per_second)
}

/// Whether the shares above were measured on this GPU.
pub(super) fn is_measured(gpu: &Gpu) -> bool {
    sieve_core::model::gpu::find("H200").is_some_and(|h200| {
        (h200.bf16_flops, h200.memory_bytes_per_second) == (gpu.bf16_flops, gpu.memory_bytes_per_second)
    })
}

/// Estimated tokens per second; `None` if attention has no kernel on this GPU, since its reference was not measured.
/// `spared_flops` of a token's executed FLOPs are not computed, because tokens without a label have no logits.
pub(super) fn tokens_per_second(shape: &ModelShape, spared_flops: f64, size: &StepSize, gpu: &Gpu) -> Option<f64> {
    if gpu_training_gap(shape, &gpu.arch).is_some() {
        return None;
    }
    // A backward pass costs as much as two forward passes. Indexers alone need none.
    let recomputed = if size.indexers_alone { 0.0 } else { size.recomputed };
    let passes = if size.indexers_alone { 1.0 } else { 3.0 + recomputed };
    // Seconds of attention and bytes of memory traffic, per token.
    let (mut pairs, mut bytes) = (0.0, 0.0);
    for part in shape.by_kind() {
        let rate = pairs_rate(part.attention, size.seq_len);
        let flops = part.executed_flops_per_token(size.seq_len);
        pairs += passes * flops.attention / (rate * gpu.bf16_flops);
        if let Some(indexer) = part.indexer() {
            let loss = if indexer.warms_up {
                // The loss runs attention forward and backward, with the indexer's keys as values.
                3.0 * flops.attention / rate
            } else {
                (flops.attention / 2.0 + 1.5 * flops.index_gradient) / INDEX_LOSS
            };
            pairs += (flops.index_scores / INDEX_SCORES + loss) / gpu.bf16_flops;
            if indexer.scores == IndexScores::Qsa {
                // The loss reads the scores of every head and earlier key, in f32.
                let keys = (size.seq_len / 2 * part.num_heads * part.num_layers) as f64;
                bytes += QSA_SCORE_BYTES * keys;
            }
        }
        bytes += block_bytes_per_token(&part);
    }
    // bf16 logits and their gradients are written and read once each.
    bytes += 2.0 * 4.0 * shape.vocab_size as f64;
    let linear = shape.executed_flops_per_token(size.seq_len).linear;
    // A recomputed feed-forward layer leaves out its second GEMM, except in fp8.
    let unread = (shape.num_layers - size.fp8.len()) as f64 * 2.0 * (shape.d_ff * shape.d_model) as f64;
    let mut gemms = (passes * linear - spared_flops - recomputed * unread) / (GEMMS * gpu.bf16_flops);
    for layer_idx in size.fp8.clone() {
        let (weights, [inner, outer]) = fp8_gemms(&shape.of_layer(layer_idx));
        let seconds = passes * 2.0 * weights as f64 / (GEMMS * gpu.bf16_flops);
        gemms -= seconds * (1.0 - 1.0 / FP8_SPEED);
        bytes += FP8_BYTES * (inner + outer) as f64;
    }
    let memory = memory_seconds(passes / 3.0 * bytes, gpu);
    let micro_batch_tokens = size.tokens as f64;
    let step_tokens = micro_batch_tokens * size.micro_batches as f64;
    let update = update_seconds(shape.parameters().total(), gpu) / step_tokens;
    let kernels = KERNELS_OF_A_BLOCK * shape.num_layers as f64 + KERNELS_BESIDE;
    let ends = kernels * KERNEL_ENDS / micro_batch_tokens;
    Some(1.0 / (gemms + pairs + memory + update + ends))
}

/// The shortest rows, among powers of two, for which training is estimated to be faster than with dense attention.
/// `None` if there are none, and for kinds that are not slower in short rows
/// ([`pays_late`]).
pub(super) fn pays_from(shape: &ModelShape, size: &StepSize, gpu: &Gpu) -> Option<usize> {
    if !shape.attentions().iter().any(|(attention, _)| pays_late(attention.kind())) {
        return None;
    }
    let dense = shape.dense();
    let speed = |shape: &ModelShape, seq_len| {
        let size = StepSize { tokens: size.tokens.max(seq_len), seq_len, fp8: size.fp8.clone(), ..*size };
        let spared_flops = 0.0;
        tokens_per_second(shape, spared_flops, &size, gpu)
    };
    let lengths = (9..=20).map(|power| 1 << power);
    lengths.into_iter().find(|&seq_len| {
        let speeds = speed(shape, seq_len).zip(speed(&dense, seq_len));
        speeds.is_some_and(|(sparse, dense)| sparse > dense)
    })
}

/// Bytes per token that norms, RoPE, SwiGLU, residuals and the preparation of attention read and write, over all
/// layers.
fn block_bytes_per_token(shape: &ModelShape) -> f64 {
    let (width, ff) = (shape.d_model as f64, shape.d_ff as f64);
    let (q, kv) = (shape.q_width() as f64, shape.kv_width() as f64);
    // In bf16 values. 9 d_ff: SwiGLU, 3 forward and 6 backward. 17 d_model: two norms, 4 forward and 10 backward, and 3
    // for residuals. 7 (q + 2 kv): RoPE. 30 q: f32 sums of dq, which are cleared, added to and read.
    let values = 9.0 * ff + 17.0 * width + 7.0 * (q + 2.0 * kv) + 30.0 * q;
    2.0 * shape.num_layers as f64 * (values + shape.attention.as_kind().extra_traffic(shape))
}

#[cfg(test)]
mod tests {
    use sieve_core::model::gpu;
    use sieve_core::recipe::Recipe;

    const CODE_80M: &str = include_str!("../../../lab/recipes/code_80m.toml");

    /// Tokens/s of `code_80m.toml` on an H200 with these settings.
    fn estimate(settings: &str) -> f64 {
        let settings: Vec<String> = settings.split_whitespace().map(str::to_owned).collect();
        let recipe = Recipe::load(CODE_80M, "code_80m.toml", &settings).expect("valid");
        let h200 = crate::Target::Gpu(gpu::find("h200").expect("listed"));
        let vocab_size = recipe.stated_vocab_size().expect("stated");
        let plan = crate::plan(&recipe, vocab_size, &h200).expect("plans");
        plan.stages[0].tokens_per_second.expect("a GPU")
    }

    const LARGE: &str = "model.hidden_size=2048 model.intermediate_size=6144 model.num_hidden_layers=28 \
        model.num_attention_heads=16 model.num_key_value_heads=8 model.vocab_size=50280 \
        model.max_position_embeddings=32768";
    const OTHER_80M: &str = "model.intermediate_size=2048 model.num_key_value_heads=6 model.vocab_size=50280";
    const LATENT_80M: &str = "model.hidden_size=768 model.intermediate_size=2304 model.num_hidden_layers=12 \
        model.num_attention_heads=6 model.num_key_value_heads=6 model.head_dim=128 tokenizer.train.vocab_size=2048";
    /// Tokens of a row, rows, measured tokens/s; then settings: the model above, `dense` for one dense layer in four,
    /// keys of the attention without their section, and others in full.
    const MEASURED: &str = "2048 8 57105 LARGE kind=mha
        2048 8 56083 LARGE keep_window_size=2048
        8192 2 50892 LARGE kind=mha
        8192 2 51925 LARGE keep_window_size=2048
        32768 1 34915 LARGE kind=mha
        32768 1 52417 LARGE keep_window_size=2048
        2048 32 556054 OTHER_80M kind=mha
        2048 16 591084 kind=mha
        2048 16 636911 kind=swa sliding_window=512
        2048 16 618721 kind=swa sliding_window=1024
        2048 16 576887 keep_window_size=1024
        2048 16 590229 keep_window_size=512
        8192 4 431401 kind=mha
        8192 4 597988 kind=swa sliding_window=1024
        8192 4 565599 keep_window_size=1024
        2048 16 605782 dense keep_window_size=512
        8192 4 522406 dense keep_window_size=1024
        2048 16 585048 LATENT_80M kind=mla kv_lora_rank=192 qk_rope_head_dim=64
        8192 2 44600 LARGE model.intermediate_size=5760 kind=nsa compress_block_size=32 compress_stride=16 \
            compress=mlp compress_hidden_size=256 select_block_size=64 num_selected_blocks=16 window_size=512
        2048 8 53150 LARGE model.num_key_value_heads=16 kind=mla kv_lora_rank=512 qk_rope_head_dim=64
        2048 8 76420 LARGE kind=mha training.precision=fp8";

    /// lab/notes/experiments.md (A training step on one GPU) and lab/docs/results.md, one H200.
    #[test]
    fn measured_runs_are_met_within_a_fifth() {
        assert_eq!(MEASURED.lines().count(), 21);
        for run in MEASURED.lines() {
            let mut words = run.split_whitespace();
            let [seq_len, rows, measured] = [(); 3].map(|()| words.next().expect("three numbers"));
            let settings = words.map(|word| match word {
                "LARGE" => LARGE.to_owned(),
                "OTHER_80M" => OTHER_80M.to_owned(),
                "LATENT_80M" => LATENT_80M.to_owned(),
                "dense" => "model.layer_types=[\"sparse\",\"sparse\",\"sparse\",\"mha\"]".to_owned(),
                _ if word.contains('.') => word.to_owned(),
                _ => format!("attention.{word}"),
            });
            let size = format!("training.seq_len={seq_len} training.local_batch_size={rows}");
            let every_layer = "model.layer_types=[\"sparse\"]".to_owned();
            let all: Vec<String> = [every_layer].into_iter().chain(settings).chain([size]).collect();
            let ratio = estimate(&all.join(" ")) / measured.parse::<f64>().expect("tokens/s");
            assert!((0.8..1.2).contains(&ratio), "{run}: {ratio}");
        }
    }

    #[test]
    fn nsa_is_estimated_faster_only_in_rows_longer_than_8192() {
        // At 1.7B and rows of 8192 dense attention was faster: 55,700 against 44,600 tokens/s.
        let h200 = crate::Target::Gpu(gpu::find("h200").expect("listed"));
        let pays_from = |text, rows: &str| {
            let settings = [rows.to_owned()];
            let recipe = Recipe::load(text, "a recipe", &settings).expect("valid");
            let plan = crate::plan(&recipe, 50_304, &h200).expect("plans");
            plan.stages[0].pays_from
        };
        let nsa = include_str!("../../../recipes/nsa_1p7b.toml");
        let length = pays_from(nsa, "training.local_batch_size=8").expect("it does");
        assert!((16_384..=65_536).contains(&length), "{length}");
        let dense = include_str!("../../../recipes/mha_1p7b.toml");
        assert_eq!(pays_from(dense, "training.local_batch_size=8"), None);
    }

    #[test]
    fn recomputing_blocks_costs_a_forward_pass() {
        let none = estimate("");
        let full = estimate("activation_checkpoint.mode=full");
        // A backward pass costs two forward passes, so a recomputed block takes four passes instead of three.
        assert!((0.7..0.85).contains(&(full / none)), "{}", full / none);
    }
}
