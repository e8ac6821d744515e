//! The plan against numbers worked out by hand.

use super::*;
use crate::model::test_shapes::{qwen3_0_6b, tiny_dma, tiny_mla, tiny_nsa};
use crate::model::{Attention, gpu};

fn recipe(text: &str, overrides: &[&str]) -> Recipe {
    let overrides = overrides
        .iter()
        .map(|item| (*item).to_owned())
        .collect::<Vec<_>>();
    Recipe::load(text, "a recipe", &overrides).unwrap_or_else(|error| panic!("{error}"))
}

const DMA_80M: &str = include_str!("../../../../recipes/dma_80m.toml");
const DMA_1P7B: &str = include_str!("../../../../recipes/dma_1p7b.toml");

fn h200() -> Target {
    Target::Gpu(gpu::find("h200").expect("known"))
}

#[test]
fn cache_of_each_kind() {
    // Qwen3-0.6B: 28 layers, 2 x 8 x 128 numbers of 2 bytes a token.
    let shape = qwen3_0_6b();
    let cache = cache_plan(&shape, 4096, 2);
    assert_eq!(cache.bytes_per_token, 28 * 2 * 1024 * 2);
    assert_eq!(cache.bytes_at_seq_len, 4096 * 28 * 4096);
    assert_eq!(cache.stops_at_tokens, None);

    // 3 layers, 2 KV heads of 6: 24 numbers a token.
    let mut shape = tiny_dma();
    let cache = cache_plan(&shape, 10, 4);
    assert_eq!(cache.bytes_per_token, 3 * (24 * 4 + 2 * 8));
    assert_eq!(cache.stops_at_tokens, Some(4));
    assert_eq!(cache.bytes_at_seq_len, 4 * cache.bytes_per_token);
    shape.attention = Attention::Swa { window_size: 7 };
    assert_eq!(cache_plan(&shape, 5, 4).bytes_at_seq_len, 3 * 5 * 24 * 4);
    assert_eq!(cache_plan(&shape, 50, 4).bytes_at_seq_len, 3 * 7 * 24 * 4);
    // Latent of 8 and rotated key of 2.
    assert_eq!(
        cache_plan(&tiny_mla(), 9, 2).bytes_at_seq_len,
        3 * 9 * 10 * 2
    );
    // Two growing copies of 24 numbers, a window of 7, 9 compressed blocks, 4 un-rotated keys.
    let at = 2 * 24 * 20 + 24 * 7 + 24 * 9 + 12 * 4;
    assert_eq!(cache_plan(&tiny_nsa(), 20, 1).bytes_at_seq_len, 3 * at);
}

#[test]
fn memory_of_dma_80m_on_an_h200() {
    let recipe = recipe(DMA_80M, &[]);
    let plan = plan(&recipe, 50_277, &h200()).expect("plans");
    let parameters = plan.num_parameters;
    // 50,304 x 768 embedding; per layer 2 x 768 x (768 + 384) + 3 x 768 x 2304 + 2 x (768 + 128) norms
    // + 3 KV heads x (1 + 384) of the mask; 768 at the end.
    let layer = 2 * 768 * 1152 + 3 * 768 * 2304 + 2 * 896 + 3 * 385;
    assert_eq!(parameters, 50_304 * 768 + 12 * layer + 768);
    let memory = &plan.memory;
    assert_eq!(memory.parameter_bytes, 2 * parameters);
    assert_eq!(memory.master_bytes, 4 * parameters);
    assert_eq!(memory.moment_bytes, 8 * parameters);
    assert_eq!(memory.gradient_bytes, 4 * parameters);
    // A token in a block: 4 x 768 + 3 x 2304 + 2 x (768 + 2 x 384) + 768 numbers of 2 bytes; f32: 6 lse, 4 x 3 of DMA.
    let block = 2 * (4 * 768 + 3 * 2304 + 2 * 1536 + 768) + 4 * 6 + 16 * 3;
    let tokens = 16 * 2048;
    assert_eq!(memory.activation_bytes, tokens * (12 * block + 2 * 768 * 2));
    let modes = &memory.activations_by_mode;
    assert_eq!(modes[0], ("none", memory.activation_bytes));
    assert_eq!(
        modes[1],
        ("selective", tokens * (6 * block + 6 * 1536 + 3072))
    );
    assert_eq!(modes[2], ("full", tokens * (12 * 1536 + 3072)));
    assert_eq!(memory.fits, Some(true));
    assert_eq!(plan.stages[0].micro_batches, 4);
    assert_eq!(plan.num_tokens, 13_500 * 64 * 2048);
}

#[test]
fn both_stages_of_dma_1p7b_are_planned() {
    let recipe = recipe(DMA_1P7B, &[]);
    let plan = plan(&recipe, 50_277, &h200()).expect("plans");
    assert_eq!(plan.num_tokens, 40_000 << 20);
    assert_eq!(plan.stages.len(), 2);
    let [first, second] = [&plan.stages[0], &plan.stages[1]];
    // Nothing is left out at 2048 keys; at 8192 a query sees (2048 / 8192) (8192 - 1023.5) keys.
    assert_eq!(first.executed_flops_per_token, first.dense_flops_per_token);
    assert_eq!(first.mean_active_keys, 1024.5);
    assert_eq!(second.mean_active_keys, 0.25 * (8192.0 - 1023.5));
    assert!(second.executed_flops_per_token < second.dense_flops_per_token);
    let flops = (32_000u64 << 20) as f64 * first.executed_flops_per_token
        + (8000u64 << 20) as f64 * second.executed_flops_per_token;
    assert_eq!(plan.total_flops, flops);
    let seconds = plan.seconds.expect("a known GPU");
    assert!((seconds - flops / (ASSUMED_MFU * 989e12)).abs() < 1e-6 * seconds);
    assert_eq!(plan.cache.seq_len, 8192);
    assert_eq!(plan.cache.stops_at_tokens, Some(2048));
}

#[test]
fn activation_checkpointing_is_in_the_total() {
    let total = |mode: &str| {
        let recipe = recipe(DMA_80M, &[mode]);
        plan(&recipe, 50_277, &h200())
            .expect("plans")
            .memory
            .total_bytes
    };
    let none = total("activation_checkpoint.mode=none");
    let selective = total("activation_checkpoint.mode=selective");
    let full = total("activation_checkpoint.mode=full");
    assert!(
        full < selective && selective < none,
        "{full} {selective} {none}"
    );
}

#[test]
fn a_gpu_that_is_too_small_is_told() {
    let target = Target::Gpu(gpu::find("L4").expect("known"));
    let plan = plan(&recipe(DMA_1P7B, &[]), 50_277, &target).expect("plans");
    assert_eq!(plan.memory.fits, Some(false));
}

#[test]
fn ops_say_their_path_and_why() {
    let shape = qwen3_0_6b();
    let path = |shape: &ModelShape, target: &Target, op: &str| {
        let ops = op_plans(shape, target);
        let found = ops.iter().find(|plan| plan.op == op);
        let plan = found.unwrap_or_else(|| panic!("{op} is not in {ops:?}"));
        assert!(!plan.reason.is_empty());
        (plan.path, plan.reason.clone())
    };
    let cpu = Target::Cpu {
        flops_per_second: None,
        memory_bytes: 0,
    };
    assert_eq!(path(&shape, &cpu, "attention").0, "cpu kernel");
    assert_eq!(path(&shape, &h200(), "attention").0, "cuda kernel");
    let narrow = ModelShape {
        head_dim: 40,
        ..shape
    };
    let (way, reason) = path(&narrow, &h200(), "attention");
    assert_eq!(way, "plain");
    assert!(reason.contains("heads of 40"), "{reason}");
    assert_eq!(path(&tiny_nsa(), &h200(), "selection").0, "plain");
    let latent = path(&tiny_mla(), &h200(), "latent attention");
    assert_eq!(latent.0, "plain");
}

#[test]
fn tokens_without_a_label_have_no_output_projection() {
    let recipe = recipe(include_str!("../../../../recipes/mqar_mha.toml"), &[]);
    // Four queries among 64 tokens.
    assert_eq!(recipe.label_share(), 1.0 / 16.0);
    let plan = plan(&recipe, 8192, &h200()).expect("plans");
    // Two layers: q, k, v, o 4 x 64 x 64, MLP 3 x 64 x 192; a sixteenth of 64 x 8192; attention of 128.5 keys.
    let weights = 2.0 * (4.0 * 4096.0 + 36_864.0) + 524_288.0 / 16.0;
    let attention = 2.0 * 4.0 * 64.0 * 128.5;
    let expected = 3.0 * (2.0 * weights + attention);
    let found = plan.stages[0].executed_flops_per_token;
    assert!(
        (found - expected).abs() < 1e-6 * expected,
        "{found} {expected}"
    );
}
