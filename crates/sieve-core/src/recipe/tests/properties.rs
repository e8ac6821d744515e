//! Many valid recipes survive a round trip.

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use sieve_testing::Random;

use super::*;
use crate::keys::MIN_F32;
use crate::model::test_shapes::mean_key_kind;
use crate::model::{DmaBias, DmaRecency, DmaShape, IndexScores, InfllmV2Shape, MsaShape, NsaCompression, NsaShape};

/// Values that a recipe may hold.
struct Draw(Random);

impl Draw {
    fn between(&mut self, first: usize, end: usize) -> usize {
        self.0.between(first, end)
    }

    fn coin(&mut self) -> bool {
        self.0.chance(0.5)
    }

    fn maybe<T>(&mut self, draw: impl FnOnce(&mut Self) -> T) -> Option<T> {
        self.coin().then(|| draw(self))
    }

    /// At least 0 and below 1.
    fn below_one(&mut self) -> f64 {
        1.0 - self.0.unit()
    }

    /// From 0 to 1, often one of these two.
    fn share(&mut self) -> f64 {
        let any = self.0.unit();
        self.0.one_of(&[0.0, 1.0, any])
    }

    fn positive(&mut self) -> f64 {
        let any = self.0.unit().max(1e-12);
        self.0.one_of(&[any, MIN_F32, 1.0, 0.1])
    }

    fn at_least_one(&mut self) -> f64 {
        let any = 1.0 + self.0.unit() * (1e12 - 1.0);
        self.0.one_of(&[any, 1.0, 1e12])
    }

    /// At least 1, up to the largest number of TOML.
    fn bytes(&mut self) -> u64 {
        (self.0.bits() >> 1).max(1)
    }

    /// Quotes, escapes, control letters, dollar signs and letters beyond ASCII must survive TOML.
    fn text(&mut self) -> String {
        let num_letters = self.between(0, 12);
        let letter = |_| {
            let any = char::from_u32(self.between(0, 0x11_0000) as u32).unwrap_or('\0');
            self.0.one_of(&[any, '"', '\\', '\n', '$', '\'', 'ü', '\u{7f}'])
        };
        (0..num_letters).map(letter).collect()
    }

    fn path(&mut self) -> String {
        format!("a{}", self.text())
    }

    /// At least one path, and fewer than `end`.
    fn paths(&mut self, end: usize) -> Vec<String> {
        let num_paths = self.between(1, end);
        (0..num_paths).map(|_| self.path()).collect()
    }

    /// Any kind but MLA, with valid sizes.
    fn attention(&mut self) -> Attention {
        let window = self.between(1, 1 << 27);
        let (stride, blocks, k) = (self.between(1, 99), self.between(1, 9), self.between(2, 65));
        let select = self.between(1, 9);
        match self.between(0, 7) {
            0 => Attention::Mha,
            1 => Attention::swa(window),
            2 => {
                let hidden = self.maybe(|draw| draw.between(1, 500));
                Attention::Nsa(NsaShape {
                    compress_block_size: stride * blocks,
                    compress_stride: stride,
                    compress: match hidden {
                        Some(_) => NsaCompression::Mlp,
                        None => NsaCompression::Mean,
                    },
                    compress_hidden_size: hidden,
                    select_block_size: stride * select,
                    num_selected_blocks: k + 1,
                    window_size: window.min(1 << 20),
                    shared_kv: self.coin(),
                })
            }
            3 => mean_key_kind(64 * select, k),
            4 => Attention::Msa(MsaShape {
                indexer: if select == 1 { IndexScores::Qsa } else { IndexScores::Msa },
                select_block_size: 64 * select,
                num_selected_blocks: k,
                num_local_blocks: (k / 2).max(1),
                index_loss_weight: stride as f64 / 3.0,
                index_warmup: false,
                index_loss_of_shared: k % 2 == 0,
            }),
            5 => Attention::InfllmV2(InfllmV2Shape {
                compress_block_size: stride.min(8) * blocks,
                compress_stride: stride.min(8),
                select_block_size: stride.min(8) * select.min(7),
                num_selected_blocks: k,
                num_local_blocks: (k / 2).max(1),
            }),
            _ => {
                let linear = self.coin();
                Attention::Dma(DmaShape {
                    bias: if linear { DmaBias::Linear } else { DmaBias::Exp },
                    a_init: 2e3 * self.below_one() - 1e3,
                    recency: if linear { DmaRecency::Slope } else { DmaRecency::None },
                    shortest_period: linear.then_some(3.0),
                    longest_period: linear.then_some(1e6),
                    local_window_size: window / 3,
                    ..DmaShape::published(window)
                })
            }
        }
    }

    /// Keys that are not drawn keep what they are in the minimal recipe. `model.vocab_size` is enough for any tokenizer
    /// that is drawn.
    fn recipe(&mut self) -> Recipe {
        let mut recipe = minimal();
        recipe.attention = self.attention().into();
        let model = &mut recipe.model;
        model.hidden_size = self.between(1, 4096);
        model.intermediate_size = self.between(1, 9000);
        model.num_hidden_layers = self.between(1, 80);
        model.num_key_value_heads = self.between(1, 9);
        model.num_attention_heads = model.num_key_value_heads * self.between(1, 9);
        model.head_dim = 2 * self.between(1, 129);
        model.vocab_size = self.maybe(|draw| draw.between(70_000, 1 << 24));
        model.rope_theta = self.at_least_one();
        model.rms_norm_eps = self.positive();
        model.tie_word_embeddings = self.coin();
        model.max_position_embeddings = 5000;
        model.initializer_range = self.positive();
        model.residual_scale = self.coin();
        let tokenizer = &mut recipe.tokenizer;
        if self.coin() {
            tokenizer.train = None;
            tokenizer.path = Some(self.path());
            tokenizer.eos_token = self.maybe(Self::path);
        } else {
            tokenizer.train =
                Some(TokenizerTraining { vocab_size: self.between(258, 70_000), sample_bytes: self.bytes() });
        }
        let data = &mut recipe.data;
        let jsonl = self.coin();
        data.paths = self.paths(4);
        data.weights = jsonl.then(|| (1..=data.paths.len()).map(|part| part as f64 / 3.0).collect());
        data.fallback = jsonl.then_some(DataFallback::Sieve);
        data.format = if jsonl { DataFormat::Jsonl } else { DataFormat::Parquet };
        data.text_column = self.path();
        data.deduplicate = self.coin();
        data.prompt_column = data.deduplicate.then(|| format!("{}?", data.text_column));
        data.max_bytes = self.maybe(Self::bytes);
        data.max_document_bytes = self.maybe(Self::bytes);
        data.skip_invalid = self.coin();
        data.validation_fraction = self.below_one().max(1e-9);
        data.cache_dir = self.maybe(Self::path);
        let training = &mut recipe.training;
        training.steps = self.between(1, 1 << 40);
        training.seq_len = self.between(1, 5001);
        training.local_batch_size = self.between(1, 100);
        training.guard_patience = self.between(1, 50);
        training.guard_replay = training.guard_patience;
        training.global_batch_size = training.local_batch_size * training.guard_patience;
        training.max_norm = self.at_least_one();
        training.guard_spike_factor = training.max_norm + 2.0;
        training.seed = self.bytes();
        training.deterministic = self.coin();
        training.one_document_per_row = self.coin();
        training.same_bits = training.deterministic && training.one_document_per_row && self.coin();
        let optimizer = &mut recipe.optimizer;
        optimizer.lr = self.positive();
        optimizer.beta1 = self.below_one();
        optimizer.beta2 = self.below_one();
        optimizer.eps = self.positive();
        optimizer.weight_decay = 10.0 * self.below_one();
        let lr_scheduler = &mut recipe.lr_scheduler;
        lr_scheduler.warmup_steps = (training.steps as f64 * self.share() * 0.99) as usize;
        lr_scheduler.decay_ratio = self.share();
        lr_scheduler.decay_type = self.0.one_of(&[DecayType::Linear, DecayType::Sqrt, DecayType::Cosine]);
        lr_scheduler.min_lr_factor = self.share();
        let checkpoint = &mut recipe.checkpoint;
        checkpoint.interval = self.between(1, 1000);
        checkpoint.keep_latest_k = self.between(0, 10);
        checkpoint.keep_every = 3 * checkpoint.keep_latest_k;
        checkpoint.keep_best = self.coin();
        checkpoint.at_start = self.coin();
        checkpoint.folder = "a/b".to_owned();
        recipe.metrics.log_freq = self.between(1, 100);
        recipe.metrics.enable_tensorboard = self.coin();
        let validation = &mut recipe.validation;
        validation.interval = if checkpoint.keep_best { checkpoint.interval } else { self.between(1, 1000) };
        validation.tokens = self.between(1, 1000);
        validation.paths = self.maybe(|draw| draw.paths(3));
        let activations = &mut recipe.activation_checkpoint;
        activations.mode = ActivationCheckpointMode::Selective;
        activations.selective_ac_option = checkpoint.interval;
        let num_prompts = self.between(0, 3);
        recipe.generation.prompts = (0..num_prompts).map(|_| self.text()).collect();
        recipe.generation.max_new_tokens = self.between(1, 1000);
        recipe.generation.interval = if num_prompts > 0 { self.between(0, 1000) } else { 0 };
        // Half of the recipes have two stages.
        let steps = (training.seed % 2 == 1 && training.steps > 1).then(|| [1, training.steps - 1]);
        let stage = steps.into_iter().flatten().map(|steps| StageSection {
            steps,
            seq_len: training.seq_len,
            rope_theta: optimizer.weight_decay + 1.0,
            window: recipe.attention.window(),
            index_warmup: recipe.attention.index_warmup(),
            kind: None,
            layer_types: None,
            windows: None,
            drop: false,
            paths: validation.paths.clone(),
            weights: None,
            local_batch_size: training.local_batch_size,
            global_batch_size: training.global_batch_size,
        });
        recipe.stage = stage.collect();
        recipe
    }
}

#[test]
fn valid_recipes_round_trip() {
    TestRunner::new(Config { cases: 2000, failure_persistence: None, ..Config::default() })
        .run(&any::<u64>().no_shrink(), |seed| {
            let recipe = Draw(Random(seed)).recipe();
            prop_assert_eq!(recipe.validate(), Ok(()));
            let text = recipe.to_toml().expect("a valid recipe can be written");
            let loaded = Recipe::load(&text, "round trip", &[]);
            prop_assert_eq!(loaded, Ok(recipe));
            Ok(())
        })
        .unwrap_or_else(|error| panic!("{error}"));
}
