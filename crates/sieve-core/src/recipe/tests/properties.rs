//! Many valid recipes survive a round trip.

#![allow(clippy::needless_update)]

use std::sync::LazyLock;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use super::*;
use crate::keys::MIN_F32;
use crate::model::{DmaBias, DmaRecency, DmaShape, InfllmV2Shape, MobaShape, MsaShape, NsaCompression, NsaShape};

/// What keys that no strategy draws keep.
static BASE: LazyLock<Recipe> = LazyLock::new(minimal);

fn finite_share() -> impl Strategy<Value = f64> {
    prop_oneof![Just(0.0), Just(1.0), 0.0..=1.0f64]
}

fn positive() -> impl Strategy<Value = f64> {
    prop_oneof![1e-12..1.0f64, Just(MIN_F32), Just(1.0), Just(0.1)]
}

fn at_least_one() -> impl Strategy<Value = f64> {
    prop_oneof![1.0..1e12f64, Just(1.0), Just(1e12)]
}

fn text() -> impl Strategy<Value = String> {
    // Quotes, escapes, control letters, dollar signs and letters beyond ASCII must survive TOML.
    proptest::collection::vec(
        prop_oneof![
            any::<char>(),
            Just('"'),
            Just('\\'),
            Just('\n'),
            Just('$'),
            Just('\''),
            Just('ü'),
            Just('\u{7f}')
        ],
        0..12,
    )
    .prop_map(|letters| letters.into_iter().collect::<String>())
}

fn path() -> impl Strategy<Value = String> {
    text().prop_map(|text| format!("a{text}"))
}

fn model() -> impl Strategy<Value = ModelSection> {
    let sizes = (
        1usize..4096,
        1usize..9000,
        1usize..80,
        1usize..9,
        1usize..9,
        1usize..129,
        any::<bool>(),
    );
    let rest = (
        at_least_one(),
        positive(),
        positive(),
        any::<bool>(),
        proptest::option::of(70_000usize..1 << 24),
    );
    (sizes, rest).prop_map(
        |(sizes, (rope_theta, rms_norm_eps, initializer_range, residual_scale, vocab_size))| {
            let (hidden_size, intermediate_size, num_hidden_layers, num_key_value_heads, group, half, tied) = sizes;
            ModelSection {
                hidden_size,
                intermediate_size,
                num_hidden_layers,
                num_attention_heads: num_key_value_heads * group,
                num_key_value_heads,
                head_dim: 2 * half,
                vocab_size,
                rope_theta,
                rms_norm_eps,
                tie_word_embeddings: tied,
                max_position_embeddings: 5000,
                initializer_range,
                residual_scale,
                qk_norm: true,
                qkv_bias: false,
                rope_scaling: None,
                ..BASE.model.clone()
            }
        },
    )
}

fn attention() -> impl Strategy<Value = Attention> {
    prop_oneof![
        Just(Attention::Mha),
        (1usize..1 << 27).prop_map(|sliding_window| Attention::Swa(SwaShape { sliding_window })),
        (
            1usize..99,
            1usize..9,
            1usize..9,
            3usize..99,
            1usize..1 << 20,
            any::<bool>(),
            proptest::option::of(1usize..500)
        )
            .prop_map(|(stride, blocks, select, k, window_size, shared_kv, hidden)| {
                Attention::Nsa(NsaShape {
                    compress_block_size: stride * blocks,
                    compress_stride: stride,
                    compress: match hidden {
                        Some(_) => NsaCompression::Mlp,
                        None => NsaCompression::Mean,
                    },
                    compress_hidden_size: hidden,
                    select_block_size: stride * select,
                    num_selected_blocks: k,
                    window_size,
                    shared_kv,
                })
            }),
        (1usize..9, 1usize..5, 1usize..8, 2usize..65, 0..3).prop_map(|(stride, blocks, select, k, kind)| {
            match kind {
                0 => Attention::Moba(MobaShape {
                    select_block_size: 64 * select,
                    num_selected_blocks: k,
                }),
                1 => Attention::Msa(MsaShape {
                    select_block_size: 64 * select,
                    num_selected_blocks: k,
                    index_loss_weight: stride as f64 / 3.0,
                    index_warmup: false,
                }),
                _ => Attention::InfllmV2(InfllmV2Shape {
                    compress_block_size: stride * blocks,
                    compress_stride: stride,
                    select_block_size: stride * select,
                    num_selected_blocks: k,
                    num_local_blocks: (k / 2).max(1),
                }),
            }
        }),
        (1usize..1 << 27, any::<bool>(), -1e3..1e3f64).prop_map(|(keep_window_size, linear, a_init)| {
            let bias = if linear { DmaBias::Linear } else { DmaBias::Exp };
            let recency = if linear { DmaRecency::Slope } else { DmaRecency::None };
            Attention::Dma(DmaShape {
                bias,
                a_init,
                recency,
                shortest_period: linear.then_some(3.0),
                longest_period: linear.then_some(1e6),
                local_window_size: keep_window_size / 3,
                ..DmaShape::published(keep_window_size)
            })
        }),
    ]
}

fn tokenizer() -> impl Strategy<Value = TokenizerSection> {
    let none = TokenizerSection {
        path: None,
        numbers: None,
        train: None,
        eos_token: None,
    };
    let of_path = none.clone();
    prop_oneof![
        (path(), proptest::option::of(path())).prop_map(move |(path, eos_token)| {
            TokenizerSection {
                path: Some(path),
                eos_token,
                ..of_path.clone()
            }
        }),
        (258usize..70_000, 1..i64::MAX as u64).prop_map(move |(vocab_size, sample_bytes)| {
            TokenizerSection {
                train: Some(TokenizerTraining {
                    vocab_size,
                    sample_bytes,
                }),
                ..none.clone()
            }
        }),
    ]
}

fn data() -> impl Strategy<Value = DataSection> {
    (
        proptest::collection::vec(path(), 1..4),
        any::<bool>(),
        path(),
        (
            proptest::option::of(1..i64::MAX as u64),
            proptest::option::of(1..i64::MAX as u64),
        ),
        any::<(bool, bool)>(),
        1e-9..1.0f64,
        proptest::option::of(path()),
    )
        .prop_map(
            |(
                paths,
                jsonl,
                text_column,
                (max_bytes, max_document_bytes),
                (skip_invalid, deduplicate),
                fraction,
                cache_dir,
            )| {
                DataSection {
                    weights: jsonl.then(|| (1..=paths.len()).map(|part| part as f64 / 3.0).collect()),
                    paths,
                    fallback: jsonl.then_some(DataFallback::Sieve),
                    format: if jsonl { DataFormat::Jsonl } else { DataFormat::Parquet },
                    prompt_column: deduplicate.then(|| format!("{text_column}?")),
                    text_column,
                    max_bytes,
                    max_document_bytes,
                    skip_invalid,
                    deduplicate,
                    validation_fraction: fraction,
                    cache_dir,
                    mqar: None,
                    ..BASE.data.clone()
                }
            },
        )
}

fn training() -> impl Strategy<Value = TrainingSection> {
    (
        1usize..1 << 40,
        1usize..=5000,
        1usize..100,
        1usize..50,
        at_least_one(),
        0..=i64::MAX as u64,
        any::<(bool, bool)>(),
    )
        .prop_map(
            |(steps, seq_len, local, rounds, max_norm, seed, (deterministic, one_document_per_row))| TrainingSection {
                steps,
                seq_len,
                local_batch_size: local,
                global_batch_size: local * rounds,
                max_norm,
                seed,
                deterministic,
                one_document_per_row,
                guard_spike_factor: max_norm + 2.0,
                guard_patience: rounds,
                guard_replay: rounds,
                ..BASE.training.clone()
            },
        )
}

fn recipe() -> impl Strategy<Value = Recipe> {
    let optimizer = (positive(), 0.0..1.0f64, 0.0..1.0f64, positive(), 0.0..10.0f64);
    let lr_scheduler = (finite_share(), finite_share(), finite_share(), 0..3u8);
    let rest = (
        (1usize..1000, 0usize..10, any::<(bool, bool)>(), 1usize..100),
        (
            1usize..1000,
            1usize..1000,
            proptest::option::of(proptest::collection::vec(path(), 1..3)),
        ),
        (proptest::collection::vec(text(), 0..3), 1usize..1000),
    );
    (
        model(),
        attention(),
        tokenizer(),
        data(),
        training(),
        optimizer,
        lr_scheduler,
        rest,
    )
        .prop_map(
            |(model, attention, tokenizer, data, training, optimizer, lr_scheduler, rest)| {
                let (lr, beta1, beta2, eps, weight_decay) = optimizer;
                let (warmup_share, decay_ratio, min_lr_factor, decay) = lr_scheduler;
                let ((interval, keep_latest_k, (at_start, enable_tensorboard), log_freq), validation, generation) =
                    rest;
                // Half of them in two stages.
                let steps = (training.seed % 2 == 1 && training.steps > 1).then(|| [1, training.steps - 1]);
                let stage = steps.into_iter().flatten().map(|steps| StageSection {
                    steps,
                    seq_len: training.seq_len,
                    rope_theta: weight_decay + 1.0,
                    window: attention.window(),
                    index_warmup: attention.index_warmup(),
                    paths: validation.2.clone().filter(|_| data.format != DataFormat::Mqar),
                    local_batch_size: training.local_batch_size,
                    global_batch_size: training.global_batch_size,
                    ..BASE.stages()[0].section.clone()
                });
                Recipe {
                    stage: stage.collect(),
                    lr_scheduler: LrSchedulerSection {
                        warmup_steps: (training.steps as f64 * warmup_share * 0.99) as usize,
                        decay_ratio,
                        decay_type: [DecayType::Linear, DecayType::Sqrt, DecayType::Cosine][decay as usize],
                        min_lr_factor,
                        ..BASE.lr_scheduler.clone()
                    },
                    model,
                    attention,
                    tokenizer,
                    data,
                    training,
                    optimizer: OptimizerSection {
                        name: OptimizerName::AdamW,
                        lr,
                        beta1,
                        beta2,
                        eps,
                        weight_decay,
                        ..BASE.optimizer.clone()
                    },
                    checkpoint: CheckpointSection {
                        interval,
                        keep_latest_k,
                        keep_every: 3 * keep_latest_k,
                        at_start,
                        folder: "a/b".to_owned(),
                        ..BASE.checkpoint.clone()
                    },
                    metrics: MetricsSection {
                        log_freq,
                        enable_tensorboard,
                        ..BASE.metrics.clone()
                    },
                    validation: ValidationSection {
                        interval: validation.0,
                        tokens: validation.1,
                        paths: validation.2,
                        ..BASE.validation.clone()
                    },
                    activation_checkpoint: ActivationCheckpointSection {
                        mode: ActivationCheckpointMode::Selective,
                        selective_ac_option: interval,
                        ..BASE.activation_checkpoint.clone()
                    },
                    parallelism: BASE.parallelism,
                    generation: GenerationSection {
                        prompts: generation.0,
                        max_new_tokens: generation.1,
                        ..BASE.generation.clone()
                    },
                }
            },
        )
}

#[test]
fn valid_recipes_round_trip() {
    TestRunner::new(Config {
        cases: 2000,
        failure_persistence: None,
        ..Config::default()
    })
    .run(&recipe(), |recipe| {
        prop_assert_eq!(recipe.validate(), Ok(()));
        let text = recipe.to_toml().expect("a valid recipe can be written");
        let loaded = Recipe::load(&text, "round trip", &[]);
        prop_assert_eq!(loaded, Ok(recipe));
        Ok(())
    })
    .unwrap_or_else(|error| panic!("{error}"));
}
