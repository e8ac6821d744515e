//! The sections of a recipe, one type each. Field names are the recipe's keys.

use serde::{Deserialize, Serialize};

use crate::model::{DmaShape, MlaShape, NsaShape};

/// `[model]`: sizes of a Qwen3-style model, in Hugging Face's names.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelSection {
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the SwiGLU layer.
    pub intermediate_size: usize,
    /// Number of transformer blocks.
    pub num_hidden_layers: usize,
    /// Number of query heads.
    pub num_attention_heads: usize,
    /// Number of key and value heads; divides `num_attention_heads`.
    pub num_key_value_heads: usize,
    /// Width of one head; even, because rotary embedding turns pairs.
    pub head_dim: usize,
    /// Rows of the embedding. Absent: the tokenizer's vocabulary.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vocab_size: Option<usize>,
    /// Base of the rotary frequencies.
    #[serde(default = "default_rope_theta")]
    pub rope_theta: f64,
    /// Added to the mean square inside RMSNorm.
    #[serde(default = "default_rms_norm_eps")]
    pub rms_norm_eps: f64,
    /// Whether the output projection is the embedding.
    pub tie_word_embeddings: bool,
    /// Longest sequence the rotary tables cover, in tokens.
    pub max_position_embeddings: usize,
    /// Standard deviation of the normal initialisation.
    #[serde(default = "default_initializer_range")]
    pub initializer_range: f64,
    /// Whether each block scales its residual inputs by learned vectors (as Doge does; they start at one).
    #[serde(default)]
    pub residual_scale: bool,
    /// Kind of each layer, a list repeated over the layers: the kind of `[attention]`, or `"mha"` for a dense layer. Absent:
    /// every layer has the kind of `[attention]`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layer_types: Option<Vec<String>>,
}

pub(super) fn default_rope_theta() -> f64 {
    10_000.0
}

fn default_rms_norm_eps() -> f64 {
    1e-6
}

fn default_initializer_range() -> f64 {
    0.02
}

/// `[attention]`: the kind and what that kind needs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum AttentionSection {
    /// Dense causal attention with grouped queries.
    Mha,
    /// Sliding window: each query sees the `sliding_window` latest keys, itself included.
    Swa {
        /// Keys a query sees, in tokens.
        sliding_window: usize,
    },
    /// Multi-head latent attention.
    Mla(MlaShape),
    /// Native sparse attention: compressed, selected and window branches.
    Nsa(NsaShape),
    /// Dynamic mask attention: each query sees the `keep_window_size` best-scored keys before it.
    Dma(DmaShape),
}

impl AttentionSection {
    /// The kind alone.
    pub fn kind(&self) -> AttentionKind {
        match self {
            Self::Mha => AttentionKind::Mha,
            Self::Swa { .. } => AttentionKind::Swa,
            Self::Mla(_) => AttentionKind::Mla,
            Self::Nsa(_) => AttentionKind::Nsa,
            Self::Dma(_) => AttentionKind::Dma,
        }
    }
}

/// The kinds of attention a recipe can name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AttentionKind {
    /// `"mha"`
    Mha,
    /// `"swa"`
    Swa,
    /// `"mla"`
    Mla,
    /// `"nsa"`
    Nsa,
    /// `"dma"`
    Dma,
}

impl AttentionKind {
    /// Every kind there is, in the order of the documentation.
    pub const ALL: [Self; 5] = [Self::Mha, Self::Swa, Self::Mla, Self::Nsa, Self::Dma];

    /// The name a recipe uses.
    pub fn name(self) -> &'static str {
        match self {
            Self::Mha => "mha",
            Self::Swa => "swa",
            Self::Mla => "mla",
            Self::Nsa => "nsa",
            Self::Dma => "dma",
        }
    }
}

/// `[tokenizer]`: exactly one of them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TokenizerSection {
    /// A Hugging Face `tokenizer.json`; expanded as `data.paths` are.
    Path(String),
    /// A byte-level BPE trained on the recipe's own data.
    Train(TokenizerTraining),
    /// One token for each number below this, named by it: for synthetic tasks.
    Numbers(usize),
}

/// `[tokenizer] train = {…}`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TokenizerTraining {
    /// Tokens in the trained vocabulary, special ones included.
    pub vocab_size: usize,
    /// Text the training reads, in bytes.
    #[serde(default = "default_sample_bytes")]
    pub sample_bytes: u64,
}

fn default_sample_bytes() -> u64 {
    16 * 1024 * 1024
}

/// `[training]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainingSection {
    /// Optimizer steps of the whole run.
    pub steps: usize,
    /// Tokens in one row.
    pub seq_len: usize,
    /// Rows one device holds at a time.
    pub local_batch_size: usize,
    /// Rows of one optimizer step over all devices and micro-batches; absent in the text: `local_batch_size`.
    pub global_batch_size: usize,
    /// Gradients are scaled down to this global norm.
    #[serde(default = "default_max_norm")]
    pub max_norm: f64,
    /// Seed of weights, data order and sampling.
    #[serde(default)]
    pub seed: u64,
    /// Whether two runs must be equal bit for bit.
    #[serde(default)]
    pub deterministic: bool,
    /// Whether a row holds one document (cut or padded) instead of packed ones.
    #[serde(default)]
    pub one_document_per_row: bool,
    /// A step's loss is far above the running mean loss where its perplexity is more than this many times the mean's.
    /// The step is taken. 0: no loss is far above the mean.
    #[serde(default = "default_guard_spike_factor")]
    pub guard_spike_factor: f64,
    /// The run goes back to its last checkpoint, and skips the data since, after this many steps in a row that were not
    /// taken because loss or gradient norm is not finite, or after ten times as many with a loss far above the mean.
    #[serde(default = "default_guard_patience")]
    pub guard_patience: usize,
}

fn default_max_norm() -> f64 {
    1.0
}

fn default_guard_spike_factor() -> f64 {
    10.0
}

fn default_guard_patience() -> usize {
    3
}

impl TrainingSection {
    /// Tokens one optimizer step reads.
    pub fn tokens_per_step(&self) -> usize {
        self.global_batch_size * self.seq_len
    }

    /// Micro-batches whose gradients add up to one step, on `world_size` devices.
    ///
    /// `None` when the global batch is not a multiple of one round over all devices.
    pub fn accumulation_steps(&self, world_size: usize) -> Option<usize> {
        let rows = self.local_batch_size.checked_mul(world_size)?;
        (rows > 0 && self.global_batch_size.is_multiple_of(rows))
            .then(|| self.global_batch_size / rows)
    }
}

/// `[optimizer]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OptimizerSection {
    /// Which optimizer.
    #[serde(default)]
    pub name: OptimizerName,
    /// Highest learning rate.
    pub lr: f64,
    /// Decay of the first moment.
    #[serde(default = "default_beta1")]
    pub beta1: f64,
    /// Decay of the second moment.
    #[serde(default = "default_beta2")]
    pub beta2: f64,
    /// Added to the root of the second moment.
    #[serde(default = "default_eps")]
    pub eps: f64,
    /// Decoupled weight decay; matrices only.
    #[serde(default = "default_weight_decay")]
    pub weight_decay: f64,
}

fn default_beta1() -> f64 {
    0.9
}

fn default_beta2() -> f64 {
    0.95
}

fn default_eps() -> f64 {
    1e-8
}

fn default_weight_decay() -> f64 {
    0.1
}

/// `[optimizer] name`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum OptimizerName {
    /// Adam with decoupled weight decay (arXiv:1711.05101).
    #[default]
    AdamW,
}

/// `[lr_scheduler]`: warm up, stay, decay.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LrSchedulerSection {
    /// Steps over which the learning rate rises linearly.
    pub warmup_steps: usize,
    /// Share of all steps spent in the final decay, in `[0, 1]`.
    pub decay_ratio: f64,
    /// Shape of the decay.
    #[serde(default)]
    pub decay_type: DecayType,
    /// Share of `optimizer.lr` that the decay ends at, in `[0, 1]`.
    #[serde(default)]
    pub min_lr_factor: f64,
}

/// `[lr_scheduler] decay_type`, over the decay's progress p in (0, 1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DecayType {
    /// `1 - p`
    #[default]
    Linear,
    /// `1 - sqrt(p)`
    Sqrt,
    /// `(1 + cos(pi p)) / 2`
    Cosine,
}

/// `[checkpoint]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CheckpointSection {
    /// Steps between two checkpoints; the last step always writes one.
    pub interval: usize,
    /// How many of the latest checkpoints stay. 0: all.
    pub keep_latest_k: usize,
    /// Whether the weights before the first step are written too.
    pub at_start: bool,
    /// Folder of the checkpoints, under the output folder.
    pub folder: String,
}

impl Default for CheckpointSection {
    fn default() -> Self {
        Self {
            interval: 500,
            keep_latest_k: 3,
            at_start: false,
            folder: "checkpoint".to_owned(),
        }
    }
}

/// `[metrics]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MetricsSection {
    /// Steps between two log lines.
    pub log_freq: usize,
    /// Whether TensorBoard files are written.
    pub enable_tensorboard: bool,
}

impl Default for MetricsSection {
    fn default() -> Self {
        Self {
            log_freq: 10,
            enable_tensorboard: true,
        }
    }
}

/// `[validation]`: runs before the first step, every `interval` steps, and after the last.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ValidationSection {
    /// Steps between two validations.
    pub interval: usize,
    /// Batches of one validation.
    pub steps: usize,
    /// Globs of validation files. Absent: the documents `[data] validation_fraction` holds out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub paths: Option<Vec<String>>,
}

impl Default for ValidationSection {
    fn default() -> Self {
        Self {
            interval: 500,
            steps: 20,
            paths: None,
        }
    }
}

/// `[activation_checkpoint]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ActivationCheckpointSection {
    /// What the backward pass recomputes.
    pub mode: ActivationCheckpointMode,
    /// `mode = "selective"`: every how many blocks one is recomputed.
    pub selective_ac_option: usize,
}

impl Default for ActivationCheckpointSection {
    fn default() -> Self {
        Self {
            mode: ActivationCheckpointMode::None,
            selective_ac_option: 2,
        }
    }
}

impl ActivationCheckpointSection {
    /// Whether block `layer_idx`, from 0, is computed a second time in the backward pass.
    pub fn recomputes(&self, layer_idx: usize) -> bool {
        match self.mode {
            ActivationCheckpointMode::None => false,
            ActivationCheckpointMode::Selective => {
                layer_idx.is_multiple_of(self.selective_ac_option.max(1))
            }
            ActivationCheckpointMode::Full => true,
        }
    }
}

/// `[activation_checkpoint] mode`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ActivationCheckpointMode {
    /// Nothing is recomputed: every block's activations wait for its backward pass.
    #[default]
    None,
    /// Every `selective_ac_option`-th block is recomputed from its input.
    Selective,
    /// Every block is recomputed from its input.
    Full,
}

/// `[generation]`: sample lines at the end of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GenerationSection {
    /// Texts to continue. Empty: none are generated.
    pub prompts: Vec<String>,
    /// Tokens after each prompt, at most.
    pub max_new_tokens: usize,
}

impl Default for GenerationSection {
    fn default() -> Self {
        Self {
            prompts: Vec::new(),
            max_new_tokens: 64,
        }
    }
}
