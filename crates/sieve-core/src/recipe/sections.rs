//! The sections of a recipe, one type each. A new key needs a field here and the code that uses it.

use crate::keys::{
    MAX_BATCH, MAX_COUNT, MAX_F32, MAX_HEAD_DIM, MAX_ROPE_THETA, MAX_SEQ_LEN, MAX_STEPS, MAX_VOCAB, MAX_WIDTH, MIN_F32,
    USUAL_ROPE_THETA, choices, keys,
};
use crate::model::RopeScaling;
use std::ops::Range;

keys! {
    /// `[model]`: sizes of a Qwen3-style model, in Hugging Face's names.
    pub struct ModelSection {
        /// Width of the residual stream.
        #[key(size(MAX_WIDTH))]
        pub hidden_size: usize,
        /// Width of the SwiGLU layer.
        #[key(filled("3 times `hidden_size`"), optional, size(MAX_WIDTH))]
        pub intermediate_size: usize,
        /// Number of transformer blocks.
        #[key(size(MAX_COUNT))]
        pub num_hidden_layers: usize,
        /// Number of query heads.
        #[key(size(MAX_COUNT))]
        pub num_attention_heads: usize,
        /// Number of key and value heads; divides `num_attention_heads`. Another kind by `--set` that needs another
        /// number takes its default.
        #[key(
            filled("half of `num_attention_heads`, all of an odd number; kind `\"mla\"`: all"),
            optional,
            size(MAX_COUNT)
        )]
        pub num_key_value_heads: usize,
        /// Width of one head; even, because rotary embedding turns pairs.
        #[key(filled("`hidden_size / num_attention_heads`"), optional, size(MAX_HEAD_DIM))]
        pub head_dim: usize,
        /// Rows of the embedding. Absent: the tokenizer's vocabulary.
        #[key(size(MAX_VOCAB))]
        pub vocab_size: Option<usize>,
        /// Base of the rotary frequencies.
        #[key(between(1.0, MAX_ROPE_THETA, USUAL_ROPE_THETA))]
        pub rope_theta: f64 = 10_000.0,
        /// Added to the mean square inside RMSNorm.
        #[key(between(MIN_F32, 1.0, "1e-6 and 1e-5 are usual"))]
        pub rms_norm_eps: f64 = 1e-6,
        /// Whether the output projection is the embedding.
        pub tie_word_embeddings: bool = true,
        /// Longest sequence the rotary tables cover, in tokens.
        #[key(from("training.seq_len"), size(MAX_SEQ_LEN), may_change)]
        pub max_position_embeddings: usize,
        /// Standard deviation of the normal initialisation.
        #[key(between(MIN_F32, 10.0, "0.02 is usual"))]
        pub initializer_range: f64 = 0.02,
        /// Whether each block scales its residual inputs by learned vectors (as Doge does; they start at one).
        pub residual_scale: bool = false,
        /// Whether each head's queries and keys go through RMSNorm with a weight before the rotation: Qwen3 and Doge
        /// do, Llama, Mistral and Qwen2 do not. MLA has a key of its own, `attention.qk_norm`.
        pub qk_norm: bool = true,
        /// Whether the projections of queries, keys and values have biases, as in Qwen2.
        pub qkv_bias: bool = false,
        /// Whether dense and window layers (kinds `mha` and `swa`) have sinks: a learned logit of each query head in
        /// the softmax, whose value is zero, as in gpt-oss. They start as small random numbers, as gpt-oss draws them.
        pub attention_sinks: bool = false,
        /// How the rotary frequencies differ from `rope_theta`'s; absent: they do not.
        pub rope_scaling: Option<RopeScaling>,
        /// Whether each layer rotates its queries and keys, a list repeated over the layers: `[true, true, true,
        /// false]` makes every fourth layer one without positions (NoPE, arXiv:2305.19466), as in SmolLM3, whose
        /// `config.json` calls the list `no_rope_layers`. What a kind has besides, such as an indexer, is not rotated
        /// there either; `recency` of `dma` stays. Absent: every layer rotates. `mla` has no such layers.
        pub rope_layers: Option<Vec<bool>>,
        /// Kind of each layer, a list repeated over the layers: `"sparse"` or its name for the kind of `[attention]`,
        /// `"mha"` (or `"full_attention"`) for a dense layer, the NAME of a table `[attention.NAME]` for its kind,
        /// `"shared"` (kinds `infllm_v2`, `moba`, `msa`) for one whose queries read the blocks that the last layer
        /// before it chose: it has no indexer, and an indexer learns from the layer that it is in. `"3 swa"` stands for
        /// three entries `"swa"`. Absent: every layer has the kind of `[attention]`.
        pub layer_types: Option<Vec<String>>,
        /// What a new run's weights are: `"random"`, drawn from `training.seed`, or a checkpoint's folder, with which
        /// the run begins as with `sieve train --branch-from FOLDER` (that flag wins over this key). A path is relative
        /// to the recipe's file, by `--set` to the current folder; `~` and variables are expanded as in `data.paths`;
        /// `hf://OWNER/NAME` is fetched and imported. A run's `config.toml` names the folder in full. Absent: random,
        /// and refused where a checkpoint of the same model lies beside the recipe; a resumed run keeps its own.
        pub initial_weights: Option<String>,
    }
}

/// The value of `model.initial_weights` that names no folder.
pub const RANDOM_WEIGHTS: &str = "random";

impl ModelSection {
    /// The folder that `initial_weights` names, as the recipe writes it; `None`: weights from the seed.
    pub fn initial_folder(&self) -> Option<&str> {
        self.initial_weights.as_deref().filter(|name| *name != RANDOM_WEIGHTS)
    }
}

/// The name in `model.layer_types` of a layer of the kind of `[attention]`.
pub(crate) const OWN_LAYER: &str = "sparse";

/// The name in `model.layer_types` of a layer whose queries read the blocks that an earlier layer chose.
pub(crate) const SHARED_LAYER: &str = "shared";

keys! {
    /// `[tokenizer]`: exactly one of `path`, `numbers` and `train`.
    pub struct TokenizerSection {
        /// A Hugging Face `tokenizer.json`, or `hf://OWNER/NAME[@REVISION]` for a model's on the hub; expanded as
        /// `data.paths` are.
        pub path: Option<String>,
        /// One token for each number below this, named by it: for synthetic tasks.
        #[key(size(MAX_VOCAB))]
        pub numbers: Option<usize>,
        /// A byte-level BPE trained on the recipe's own data.
        pub train: Option<TokenizerTraining>,
        /// Name of the token that ends a document. Absent: the first known name that the vocabulary has
        /// (`<|endoftext|>`, `<|end_of_text|>`, `</s>`, `<eos>`, …).
        pub eos_token: Option<String>,
    }
}

/// Where a run's tokenizer comes from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum TokenizerSource<'a> {
    /// A `tokenizer.json` at this path.
    Path(&'a str),
    /// No tokenizer: tokens are numbers below this one.
    Numbers(usize),
    /// A tokenizer that is trained on the run's text.
    Train(&'a TokenizerTraining),
}

impl TokenizerSection {
    /// The keys that name a source; a recipe gives exactly one.
    pub(super) const SOURCES: [&'static str; 3] = ["path", "numbers", "train"];

    /// The source that the recipe gives.
    ///
    /// # Panics
    /// The recipe gives no source; [`Recipe::load`](super::Recipe::load) refuses such a recipe.
    pub fn source(&self) -> TokenizerSource<'_> {
        let given = self.given();
        given.expect("a recipe without a tokenizer is refused")
    }

    /// The source, or `None` if a recipe that is not checked yet has none.
    pub(super) fn given(&self) -> Option<TokenizerSource<'_>> {
        match (&self.path, self.numbers, &self.train) {
            (Some(path), _, _) => Some(TokenizerSource::Path(path)),
            (None, Some(numbers), _) => Some(TokenizerSource::Numbers(numbers)),
            (None, None, Some(train)) => Some(TokenizerSource::Train(train)),
            (None, None, None) => None,
        }
    }
}

/// Smallest vocabulary: 256 bytes, the token that ends a document, and the padding token.
const MIN_TRAINED_VOCAB: usize = 258;
const IN_A_TRAINED_VOCAB: &str =
    "a byte-level vocabulary holds 256 bytes, an end-of-text and a padding token, and the merges";

keys! {
    /// `[tokenizer] train = {…}`: a byte-level BPE tokenizer to train.
    pub struct TokenizerTraining {
        /// Tokens in the trained vocabulary, special ones included.
        #[key(within(MIN_TRAINED_VOCAB, MAX_VOCAB, IN_A_TRAINED_VOCAB))]
        pub vocab_size: usize,
        /// Text the training reads, in bytes.
        #[key(at_least_one)]
        pub sample_bytes: u64 = 16 * 1024 * 1024,
    }
}

keys! {
    /// `[training]`: steps, batch sizes, precision, and the guard against diverging losses.
    pub struct TrainingSection {
        /// Optimizer steps of the whole run.
        #[key(filled("the sum of the stages'"), size(MAX_STEPS), may_change)]
        pub steps: usize,
        /// Tokens in one row.
        #[key(size(MAX_SEQ_LEN))]
        pub seq_len: usize,
        /// Rows one device holds at a time.
        #[key(size(MAX_BATCH), may_change)]
        pub local_batch_size: usize,
        /// Rows of one optimizer step over all devices and micro-batches; a multiple of `local_batch_size`.
        #[key(from("training.local_batch_size"), size(MAX_BATCH))]
        pub global_batch_size: usize,
        /// Gradients are scaled down to this global norm.
        #[key(between(MIN_F32, MAX_F32, "1.0 is usual; a large number clips nothing"))]
        pub max_norm: f64 = 1.0,
        /// Seed of weights, data order and sampling.
        pub seed: u64 = 0,
        /// Whether kernels sum in a fixed order, so that two runs on the same number of GPUs of one kind are equal bit
        /// for bit. It costs up to 3 % of a step on Hopper GPUs with heads of 64 and 128, and more on other GPUs,
        /// whose kernels then sum in several launches.
        #[key(may_change)]
        pub deterministic: bool = true,
        /// Whether the forward pass gives a token the log-probability that `serve`, `generate` and `eval ppl` give it
        /// with `--same-bits`, to the bit, for training on a model's own samples: `"dma"` and the kinds that choose
        /// blocks then read a query's keys in another order, and `"dma"` keeps no `o_low`. On a GPU for the models
        /// that the flag takes. Needs `deterministic`, `one_document_per_row` and bf16, in one process a row. A CPU
        /// always does it.
        #[key(may_change)]
        pub same_bits: bool = false,
        /// Data type of the blocks' GEMMs in training. Weights, moments and checkpoints have the same types with both.
        #[key(may_change)]
        pub precision: TrainingPrecision = TrainingPrecision::Bf16,
        /// `precision = "fp8"`: how many blocks at each end of the model stay in bf16; less than half of them.
        #[key(may_change)]
        pub bf16_end_blocks: usize = 0,
        /// Type in which gradients of matrices are stored between micro-batches and until the update. They are
        /// computed, summed over all processes and added to the stored ones in f32.
        #[key(may_change)]
        pub gradient_dtype: GradientDtype = GradientDtype::F32,
        /// Whether a row holds one document (cut or padded) instead of packed ones.
        pub one_document_per_row: bool = false,
        /// Kinds that choose blocks (`infllm_v2`, `moba`, `msa`): share of the steps in which queries read all keys,
        /// spread evenly: step s, from 0, is one where `floor((s + 1) share) > floor(s share)`. SSA (arXiv:2511.20102)
        /// draws half of the steps. An indexer learns from all keys then, as under `index_warmup`. Validation always
        /// chooses.
        #[key(between(0.0, 0.999, "0.5 takes every second step"))]
        pub dense_steps: f64 = 0.0,
        /// What is trained: `["indexer"]` are the indexers of `msa` alone, which learn from the attention of a model
        /// that stays as it is. Nothing else has gradients and moments, 12 bytes a parameter fewer, and a step has no
        /// backward pass through the model. One process. Absent: everything.
        pub train: Option<Vec<String>>,
        /// A loss counts as far above the running mean loss if its perplexity is more than this many times the mean's.
        /// The step is taken all the same. 0: no loss is far above the mean.
        #[key(may_change)]
        pub guard_spike_factor: f64 = 10.0,
        /// The run goes back to its last checkpoint, and skips the data since, after this many steps in a row that were
        /// not taken because loss or gradient norm is not finite, or after ten times as many with a loss far above the
        /// mean.
        #[key(at_least_one, may_change)]
        pub guard_patience: usize = 3,
        /// Every this many steps all ranks compute the gradients of the same micro-batch, with sums in a fixed order,
        /// and compare them bit for bit (a single process computes them twice). If they differ, the run ends and names
        /// the faulty device. 0: never.
        #[key(may_change)]
        pub guard_replay: usize = 0,
    }
}

impl TrainingSection {
    /// Number of tokens that one optimizer step reads.
    pub fn tokens_per_step(&self) -> usize {
        self.global_batch_size * self.seq_len
    }

    /// Whether queries of kinds that choose blocks read all keys in step `step`, counted from 0.
    pub fn reads_all(&self, step: usize) -> bool {
        let until = |steps: usize| (steps as f64 * self.dense_steps).floor();
        until(step + 1) > until(step)
    }

    /// Whether only indexers are trained.
    pub fn trains_indexers_alone(&self) -> bool {
        self.train.is_some()
    }

    /// The range of a model's `num_layers` blocks that run their GEMMs in fp8.
    pub fn fp8_blocks(&self, num_layers: usize) -> Range<usize> {
        let first = match self.precision {
            TrainingPrecision::Bf16 => num_layers,
            TrainingPrecision::Fp8 => self.bf16_end_blocks.min(num_layers),
        };
        first..num_layers.saturating_sub(first).max(first)
    }

    /// Micro-batches per step on each of `world_size` devices; `None` if `global_batch_size` is not a multiple of
    /// `local_batch_size * world_size`.
    pub fn accumulation_steps(&self, world_size: usize) -> Option<usize> {
        let rows = self.local_batch_size.checked_mul(world_size)?;
        (rows > 0 && self.global_batch_size.is_multiple_of(rows)).then(|| self.global_batch_size / rows)
    }
}

choices! {
    /// `[training] precision`.
    pub enum TrainingPrecision {
        /// bf16 over f32 masters; f32 on the CPU.
        Bf16 = "bf16",
        /// Eight-bit floats with one scale a tensor for the projections of attention and feed-forward layers: e4m3
        /// forward, e5m2 for gradients, f32 sums. Latent and native sparse attention keep bf16, as do embedding, norms,
        /// scores and head. Needs a GPU of compute capability 8.9 or later; the CPU rounds f32 to such numbers, slowly.
        Fp8 = "fp8",
    }
}

choices! {
    /// `[training] gradient_dtype`.
    pub enum GradientDtype {
        /// Four bytes a parameter; sums of micro-batches lose nothing.
        F32 = "f32",
        /// Half the memory. The sum is rounded after every micro-batch: a gradient below 1/512 of the sum so far is
        /// lost.
        Bf16 = "bf16",
    }
}

impl GradientDtype {
    /// Size of one gradient element in bytes.
    pub fn bytes(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }
}

/// Hint of an error in `beta1` or `beta2`.
const USUAL_BETAS: &str = "0.9 and 0.95 are usual";

keys! {
    /// `[optimizer]`: the optimizer and its hyper-parameters.
    pub struct OptimizerSection {
        /// Which optimizer.
        pub name: OptimizerName = OptimizerName::AdamW,
        /// Highest learning rate.
        #[key(between(0.0, MAX_F32, "1e-4 to 1e-2 is usual"))]
        pub lr: f64,
        /// Highest learning rate of the indexer of `msa`, with the schedule of `lr`. Absent: `lr`.
        #[key(between(0.0, MAX_F32, "lr to four times lr is usual; 0 leaves the indexer as it is"))]
        pub indexer_lr: Option<f64>,
        /// Decay of the first moment; of Muon's momentum too, where 0.95 is usual.
        #[key(share("[0, 1)", USUAL_BETAS))]
        pub beta1: f64 = 0.9,
        /// Decay of the second moment.
        #[key(share("[0, 1)", USUAL_BETAS))]
        pub beta2: f64 = 0.95,
        /// Added to the root of the second moment.
        #[key(between(MIN_F32, 1.0, "1e-8 is usual; the optimizer counts in f32, where smaller numbers are 0"))]
        pub eps: f64 = 1e-8,
        /// Decoupled weight decay; matrices only.
        #[key(between(0.0, 100.0, "0.1 is usual"))]
        pub weight_decay: f64 = 0.1,
    }
}

choices! {
    /// `[optimizer] name`.
    pub enum OptimizerName {
        /// Adam with decoupled weight decay (arXiv:1711.05101).
        AdamW = "AdamW",
        /// Orthogonalised momentum for the matrices of the blocks, AdamW for everything else, at one learning rate
        /// (arXiv:2502.16982). Several processes share the work on the matrices, unless `parallelism.zero_stage = 0`.
        Muon = "Muon",
    }
}

impl OptimizerSection {
    /// The indexer's learning rate as a multiple of the other parameters'; `None` if it has none of its own or theirs
    /// is 0.
    pub fn indexer_scale(&self) -> Option<f64> {
        self.indexer_lr.filter(|_| self.lr > 0.0).map(|rate| rate / self.lr)
    }
}

/// Hint of an error in a key that must be a share.
const A_SHARE: &str = "it is a share, not a number of steps";

keys! {
    /// `[lr_scheduler]`: warm up, stay, decay.
    pub struct LrSchedulerSection {
        /// Steps over which the learning rate rises linearly.
        #[key(filled("a fifth of the steps, at most 100"), optional)]
        pub warmup_steps: usize,
        /// Share of all steps spent in the final decay.
        #[key(share("[0, 1]", A_SHARE), may_change)]
        pub decay_ratio: f64 = 0.2,
        /// Shape of the decay, over its progress p in (0, 1).
        #[key(may_change)]
        pub decay_type: DecayType = DecayType::Linear,
        /// Share of `optimizer.lr` that the decay ends at.
        #[key(share("[0, 1]", A_SHARE), may_change)]
        pub min_lr_factor: f64 = 0.0,
        /// Steps that an earlier schedule of the same shape took; this one warms up, stays and decays over the rest,
        /// of which a fifth warms up at most. `sieve train --extend` sets it.
        #[key(may_change)]
        pub after_step: usize = 0,
    }
}

choices! {
    /// `[lr_scheduler] decay_type`, over the decay's progress p in (0, 1).
    pub enum DecayType {
        /// `1 - p`
        Linear = "linear",
        /// `1 - sqrt(p)`
        Sqrt = "sqrt",
        /// `(1 + cos(pi p)) / 2`
        Cosine = "cosine",
    }
}

keys! {
    /// `[checkpoint]`: when checkpoints are written, and which are kept.
    pub struct CheckpointSection: Default {
        /// Steps between two checkpoints; the last step always writes one.
        #[key(at_least_one, may_change)]
        pub interval: usize = 500,
        /// How many of the latest checkpoints are kept, the best among them or not. 0: all.
        #[key(may_change)]
        pub keep_latest_k: usize = 3,
        /// Checkpoints of steps that are multiples of this are kept too, without a limit. 0: no others are kept.
        #[key(may_change)]
        pub keep_every: usize = 0,
        /// Whether the checkpoint with the lowest loss on held-out text is kept too. Each checkpoint needs a validation
        /// then: `interval` is a multiple of `validation.interval`.
        #[key(may_change)]
        pub keep_best: bool = false,
        /// Whether the weights before the first step are written too.
        #[key(may_change)]
        pub at_start: bool = false,
        /// Folder of the checkpoints, under the output folder.
        pub folder: String = "checkpoint".to_owned(),
    }
}

keys! {
    /// `[metrics]`: what is logged.
    pub struct MetricsSection: Default {
        /// Steps between two log lines.
        #[key(at_least_one, may_change)]
        pub log_freq: usize = 10,
        /// Whether TensorBoard files are written.
        #[key(may_change)]
        pub enable_tensorboard: bool = true,
    }
}

keys! {
    /// `[validation]`: runs before the first step, every `interval` steps, and after the last.
    pub struct ValidationSection: Default {
        /// Steps between two validations.
        #[key(at_least_one, may_change)]
        pub interval: usize = 500,
        /// Held-out tokens that one validation reads: whole rows, spread evenly over the held-out text. The same text
        /// for any batch size and any number of processes; held-out text of fewer tokens is read whole.
        #[key(at_least_one, may_change)]
        pub tokens: usize = 65_536,
        /// Globs of validation files. Absent: the documents `[data] validation_fraction` holds out.
        pub paths: Option<Vec<String>> = None,
    }
}

keys! {
    /// `[activation_checkpoint]`: which activations the backward pass recomputes.
    pub struct ActivationCheckpointSection: Default {
        /// What the backward pass recomputes.
        #[key(may_change)]
        pub mode: ActivationCheckpointMode = ActivationCheckpointMode::None,
        /// `mode = "selective"`: one block in this many is recomputed.
        #[key(at_least_one, may_change)]
        pub selective_ac_option: usize = 2,
    }
}

impl ActivationCheckpointSection {
    /// Whether the backward pass recomputes block `layer_idx`, counted from 0.
    pub fn recomputes(&self, layer_idx: usize) -> bool {
        match self.mode {
            ActivationCheckpointMode::None => false,
            ActivationCheckpointMode::Selective => layer_idx.is_multiple_of(self.selective_ac_option.max(1)),
            ActivationCheckpointMode::Full => true,
        }
    }
}

choices! {
    /// `[activation_checkpoint] mode`.
    pub enum ActivationCheckpointMode {
        /// Nothing is recomputed: every block's activations wait for its backward pass.
        None = "none",
        /// Every `selective_ac_option`-th block is recomputed from its input.
        Selective = "selective",
        /// Every block is recomputed from its input.
        Full = "full",
    }
}

keys! {
    /// `[parallelism]`: how several processes share a step.
    #[derive(Copy, Eq)]
    pub struct ParallelismSection: Default {
        /// Context parallelism: number of processes that share each row, in parts of equal length.
        #[key(at_least_one, may_change)]
        pub context_parallel_degree: usize = 1,
        /// What the processes shard (ZeRO, arXiv:1910.02054). 0: nothing, each process holds and updates all. 1: the
        /// optimizer's moments and masters; gradients are reduce-scattered once a step, in its last micro-batch. 2:
        /// gradients too; they are reduce-scattered in every micro-batch, and each process keeps only its shard. 3:
        /// weights too; a block's are gathered before its forward and its backward pass, and released after them.
        #[key(within(0, 3, "ZeRO has only these stages"), may_change)]
        pub zero_stage: usize = 1,
        /// How many consecutive processes divide what `zero_stage` shards. Other groups of as many hold copies. With
        /// the number of GPUs of a host, weights are gathered inside hosts, and only sums of gradients cross between
        /// them. 0: all processes.
        #[key(may_change)]
        pub shard_ranks: usize = 0,
    }
}

impl ParallelismSection {
    /// How many of `ranks` processes divide what `zero_stage` shards; 1 where nothing is divided.
    pub fn num_shards(&self, ranks: usize) -> usize {
        match (self.zero_stage, self.shard_ranks) {
            (0, _) => 1,
            (_, 0) => ranks,
            (_, shards) => shards.min(ranks),
        }
    }
}

keys! {
    /// `[generation]`: sample lines while a run trains and at its end.
    pub struct GenerationSection: Default {
        /// Texts to continue. Empty: none are generated.
        #[key(may_change)]
        pub prompts: Vec<String> = Vec::new(),
        /// Tokens after each prompt, at most.
        #[key(may_change)]
        pub max_new_tokens: usize = 64,
        /// Steps between two rounds of texts while the run trains, of the likeliest tokens; they go to the log and to
        /// TensorBoard, and change no loss. 0: texts are written at the end alone.
        #[key(may_change)]
        pub interval: usize = 0,
    }
}
