//! The attention kinds and their sizes.

use super::flops::window_pairs;
use crate::NsaBlocks;
use crate::block_choice::{BlockChoice, ChoiceRule, ForcedBlocks};
use crate::keys::{MAX_SEQ_LEN, MAX_WIDTH, choices, keys};

choices! {
    /// How a DMA key's score z enters the logit.
    #[derive(Hash)]
    pub enum DmaBias {
        /// `q.k / sqrt(head_dim) + exp(min(z, 60))`
        Exp = "exp",
        /// `q.k / sqrt(head_dim) + z`
        Linear = "linear",
    }
}

choices! {
    /// What makes later keys of a document rank higher in DMA.
    #[derive(Hash)]
    pub enum DmaRecency {
        /// Nothing: content alone ranks, as published.
        None = "none",
        /// `position / period` with one fixed period per KV head is added to each key's score (as ALiBi's slopes,
        /// arXiv:2108.12409), in the rank and in the logit.
        Slope = "slope",
    }
}

choices! {
    /// Sets several keys of a kind at once.
    #[derive(Hash)]
    pub enum AttentionPreset {
        /// The values of the paper that describes the kind.
        Paper = "paper",
    }
}

/// The default of a window, in words.
pub(crate) const A_QUARTER_OF_THE_ROW: &str = "a quarter of `training.seq_len`";

/// Bounds of a period (1 / slope of a KV head's recency), in tokens.
const PERIODS: [f64; 2] = [1.0, 1e9];
const A_PERIOD: &str = "a period is a number of tokens; 64 is usual for the shortest";

keys! {
    /// Dynamic mask attention (arXiv:2508.02124, eq. 3), with two additions that are on by default: recency and a
    /// window that is always seen. `preset = "paper"` is the published form, which has neither.
    ///
    /// `z_j = A softplus(v_j . W_dt)`; `rank_j = z_j + p_j / period` with p_j the position in the document (recency
    /// "slope") or `rank_j = z_j`. A query sees the last `local_window_size` keys and, of the older ones, those with
    /// the largest (rank, position), `keep_window_size` in all. The logit adds `exp(min(rank_j, 60))` or `rank_j`.
    #[derive(Copy)]
    pub struct DmaShape {
        /// Sets the keys below but `keep_window_size` to the form of arXiv:2508.02124: no recency, no local window, the
        /// exponential as bias, A starts at 0. A recipe gives no other values beside it. As an override it replaces
        /// the recipe's values, and `model.layer_types`.
        text preset: Option<AttentionPreset>,
        /// Keys a query keeps, per KV head, the local window's among them.
        #[key(filled(A_QUARTER_OF_THE_ROW), optional, size(MAX_SEQ_LEN))]
        pub keep_window_size: usize,
        /// How a key's rank enters the logit.
        #[key(filled("`\"linear\"` with `recency = \"slope\"`, else `\"exp\"`"), optional)]
        pub bias: DmaBias,
        /// Initial value of every entry of A. At 0 all scores tie, and DMA starts as a sliding window.
        #[key(between(-1000.0, 1000.0, "0.0 starts DMA as a sliding window"))]
        pub a_init: f64 = 0.0,
        /// What makes later keys rank higher.
        #[key(filled("`\"slope\"`; `\"none\"` with `bias = \"exp\"`"), optional)]
        pub recency: DmaRecency,
        /// Tokens over which recency raises a key's rank by 1 in the first KV head. Absent: 64.
        #[key(between(PERIODS[0], PERIODS[1], A_PERIOD))]
        pub shortest_period: Option<f64>,
        /// The same for the last KV head; periods of the heads between are spaced geometrically. Absent: four times
        /// `keep_window_size`.
        #[key(between(PERIODS[0], PERIODS[1], A_PERIOD))]
        pub longest_period: Option<f64>,
        /// Keys every query sees whatever their rank: the last ones, its own included, in tokens; at most
        /// `keep_window_size`.
        #[key(filled("an eighth of `keep_window_size`"), optional)]
        pub local_window_size: usize,
    }
}

/// The keys of DMA's form that were given; [`DmaShape::with_form`] chooses what is absent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DmaForm {
    /// [`DmaShape::bias`]; absent: the rank itself with a slope, else the exponential.
    pub bias: Option<DmaBias>,
    /// [`DmaShape::recency`]; absent: a slope, but none with the exponential as bias.
    pub recency: Option<DmaRecency>,
    /// [`DmaShape::local_window_size`]; absent: an eighth of `keep_window_size`.
    pub local_window_size: Option<usize>,
}

/// Number of keys that DMA keeps for a query: the last ones whatever their rank, and the best-ranked of the older ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DmaWindow {
    /// Number of keys that a query sees.
    pub keep_window_size: usize,
    /// Number of last keys among them, the query's own included; at most `keep_window_size`.
    pub local_window_size: usize,
}

impl DmaWindow {
    /// Number of keys that are kept for their rank.
    pub fn num_ranked(&self) -> usize {
        self.keep_window_size - self.local_window_size
    }
}

impl From<usize> for DmaWindow {
    /// A DMA window without keys kept for their recency alone.
    fn from(keep_window_size: usize) -> Self {
        Self { keep_window_size, local_window_size: 0 }
    }
}

impl DmaShape {
    /// Number of keys that a query keeps.
    pub fn window(&self) -> DmaWindow {
        DmaWindow { keep_window_size: self.keep_window_size, local_window_size: self.local_window_size }
    }

    /// The default form, which a recipe of `kind = "dma"` has, too: a recency slope, the rank itself as bias, a local
    /// window of an eighth of `keep_window_size`; A starts at 0.
    pub fn new(keep_window_size: usize) -> Self {
        Self::with_form(keep_window_size, DmaForm::default())
    }

    /// The form that the given keys say, with a recipe's defaults for the others. A starts at 0, and periods are the
    /// default ones.
    pub fn with_form(keep_window_size: usize, form: DmaForm) -> Self {
        // Without a recency slope DMA loses much quality on long rows (docs/results.md).
        let recency = form.recency.unwrap_or(match form.bias {
            Some(DmaBias::Exp) => DmaRecency::None,
            _ => DmaRecency::Slope,
        });
        let bias = form.bias.unwrap_or(match recency {
            DmaRecency::Slope => DmaBias::Linear,
            DmaRecency::None => DmaBias::Exp,
        });
        Self {
            keep_window_size,
            bias,
            a_init: 0.0,
            recency,
            shortest_period: None,
            longest_period: None,
            local_window_size: form.local_window_size.unwrap_or(keep_window_size / 8),
        }
    }

    /// The form of arXiv:2508.02124, a recipe's `preset = "paper"`: no recency, no local window, the exponential as
    /// bias; A starts at 0.
    pub fn published(keep_window_size: usize) -> Self {
        let form = DmaForm { bias: Some(DmaBias::Exp), recency: Some(DmaRecency::None), local_window_size: Some(0) };
        Self::with_form(keep_window_size, form)
    }

    /// Whether this is the published form, up to `bias` and `a_init`.
    pub fn ranks_by_content_alone(&self) -> bool {
        self.recency == DmaRecency::None && self.local_window_size == 0
    }

    /// The first and the last KV head's period: tokens over which recency raises a key's rank by 1 (1 / slope).
    pub(crate) fn periods(&self) -> [f64; 2] {
        let last = self.longest_period.unwrap_or(4.0 * self.keep_window_size as f64);
        [self.shortest_period.unwrap_or(SHORTEST_PERIOD), last]
    }

    /// The same layer with another `keep_window_size`; the slopes stay.
    pub fn with_window(self, keep_window_size: usize) -> Self {
        let longest_period = match self.recency {
            // An absent period would follow the new `keep_window_size`.
            DmaRecency::Slope if keep_window_size != self.keep_window_size => Some(self.periods()[1]),
            _ => self.longest_period,
        };
        Self { keep_window_size, longest_period, ..self }
    }

    /// How much a key's rank grows per token of its position, `[num_kv_heads]`; `None` without recency.
    pub fn slopes(&self, num_kv_heads: usize) -> Option<Vec<f64>> {
        match self.recency {
            DmaRecency::None => None,
            DmaRecency::Slope => {
                let [first, last] = self.periods();
                // A single KV head takes the last period, which is the longest by default.
                let exponent = |head: usize| match num_kv_heads {
                    1 => 1.0,
                    _ => head as f64 / (num_kv_heads - 1) as f64,
                };
                let period = |head| first * (last / first).powf(exponent(head));
                Some((0..num_kv_heads).map(|head| 1.0 / period(head)).collect())
            }
        }
    }
}

/// Default period of the first KV head's slope, in tokens.
const SHORTEST_PERIOD: f64 = 64.0;

keys! {
    /// Sizes of multi-head latent attention (arXiv:2405.04434, section 2.1), without query compression.
    ///
    /// `c = RMSNorm(x W_DKV)`; per head `k_C = c W_UK` and `v = c W_UV`, both of the model's `head_dim`; one
    /// `k_R = RoPE(x W_KR)` for all heads; `q = [x W_QC ; RoPE(x W_QR)]`. Keys and values exist per query head, so
    /// `num_kv_heads` equals `num_heads`. With `qk_norm`, which the paper does not have, RMSNorm is applied to each
    /// head's q and k, `[k_C ; x W_KR]`, before the rotation.
    ///
    /// Parameters of a layer: W_Q `[num_heads * (head_dim + qk_rope_head_dim), d_model]`, W_DKV and W_KR together
    /// `[kv_lora_rank + qk_rope_head_dim, d_model]`, the latent's norm `[kv_lora_rank]`, W_UK and W_UV together
    /// `[num_heads * 2 * head_dim, kv_lora_rank]`, W_O `[d_model, num_heads * head_dim]`; with `qk_norm` a weight of
    /// [`qk_norm_dim`](Self::qk_norm_dim) numbers for queries and one for keys, which all heads share.
    #[derive(Copy, Eq, Hash)]
    pub struct MlaShape {
        /// Sets the keys below to DeepSeek-V2's values (arXiv:2405.04434, section 2.1): a latent of four heads, a
        /// rotated part of half a head. As an override it replaces the recipe's values.
        text preset: Option<AttentionPreset>,
        /// Width of the latent c that keys and values are made from (`d_c`).
        #[key(filled("a quarter of `model.hidden_size`"), optional, size(MAX_WIDTH))]
        pub kv_lora_rank: usize,
        /// Width of the rotated part of queries and keys (`d_r`); even.
        #[key(filled("half of `model.head_dim`"), optional, size(MAX_WIDTH))]
        pub qk_rope_head_dim: usize,
        /// Whether each head's queries and keys go through RMSNorm with a weight before the rotation. An addition of
        /// ours, with which MLA learns faster; the paper has none.
        pub qk_norm: bool = true,
    }
}

impl MlaShape {
    /// Width of the norms of queries and keys, for heads of `head_dim`; 0 without norms.
    pub fn qk_norm_dim(&self, head_dim: usize) -> usize {
        match self.qk_norm {
            true => head_dim + self.qk_rope_head_dim,
            false => 0,
        }
    }

    /// The sizes of arXiv:2405.04434, section 2.1, for heads of `head_dim`.
    pub fn published(head_dim: usize) -> Self {
        Self { kv_lora_rank: 4 * head_dim, qk_rope_head_dim: Self::half_a_head(head_dim), qk_norm: false }
    }

    /// Default width of the rotated part: half a head, rounded up to an even number because rotation works on pairs.
    pub(crate) fn half_a_head(head_dim: usize) -> usize {
        (head_dim / 2).next_multiple_of(2).max(2)
    }
}

choices! {
    /// How NSA makes one key (and one value) of a block.
    #[derive(Hash)]
    pub enum NsaCompression {
        /// A learned vector per position is added, then `block * head_dim -> compress_hidden_size -> ReLU -> head_dim`.
        Mlp = "mlp",
        /// The mean over the block.
        Mean = "mean",
    }
}

keys! {
    /// Sizes of native sparse attention (arXiv:2502.11089): compressed, selected and window branches, gated.
    ///
    /// Parameters of a layer, besides the projections and per-head q/k norms of grouped-query attention: the gate
    /// `[num_heads * 3, d_model]` and its bias `[num_heads * 3]`; with `shared_kv = false` two more pairs of key and
    /// value projections (the key norm is shared); with `compress = "mlp"`, once for keys and once for values, shared
    /// by all heads and without biases: positions `[compress_block_size, head_dim]`, first matrix
    /// `[compress_hidden_size, compress_block_size * head_dim]`, second matrix `[head_dim, compress_hidden_size]`.
    #[derive(Copy, Eq, Hash)]
    pub struct NsaShape {
        /// Sets the keys below but `compress_hidden_size` to the values of arXiv:2502.11089, section 4.1: blocks of 32
        /// every 16 tokens, an MLP, 16 blocks of 64, a window of 512, keys and values of each branch's own. As an
        /// override it replaces the recipe's values, and `model.layer_types`.
        text preset: Option<AttentionPreset>,
        /// Tokens of a compressed block (l).
        #[key(filled("twice `compress_stride`"), optional, size(MAX_SEQ_LEN))]
        pub compress_block_size: usize,
        /// Tokens between the starts of two compressed blocks (s); divides both block sizes.
        #[key(filled("8; 16 for rows of 2048 tokens or more"), optional, size(MAX_SEQ_LEN))]
        pub compress_stride: usize,
        /// How a block is compressed.
        #[key(filled("`\"mean\"`; `\"mlp\"` where `compress_hidden_size` is given"), optional)]
        pub compress: NsaCompression,
        /// Hidden width of the compression MLP; absent for `compress = "mean"`.
        #[key(filled("with `\"mlp\"`, twice `model.head_dim`"), size(MAX_WIDTH))]
        pub compress_hidden_size: Option<usize>,
        /// Tokens of a selected block (l').
        #[key(
            filled("twice `compress_stride`; four times for rows of 2048 tokens or more"),
            optional,
            size(MAX_SEQ_LEN)
        )]
        pub select_block_size: usize,
        /// Blocks a query selects per KV head, forced ones included (k).
        #[key(
            filled("as many as hold a quarter of `training.seq_len`, 4 to 16"),
            optional,
            within(NUM_FORCED_BLOCKS, MAX_SEQ_LEN, FORCED_BLOCKS)
        )]
        pub num_selected_blocks: usize,
        /// Keys of the window branch, in tokens.
        #[key(filled("an eighth of `training.seq_len`, at most 512"), optional, size(MAX_SEQ_LEN))]
        pub window_size: usize,
        /// Whether the three branches read the same keys and values.
        pub shared_kv: bool = true,
    }
}

/// Number of blocks that every query selects.
const NUM_FORCED_BLOCKS: usize = 3;
const FORCED_BLOCKS: &str = "the first block, the query's own and the one before are always selected";

/// Number of NSA's branches: compressed, selected, window.
pub const NUM_NSA_BRANCHES: usize = 3;

impl NsaShape {
    /// The sizes of arXiv:2502.11089, section 4.1, which does not say how wide its MLP is.
    pub fn published(compress_hidden_size: Option<usize>) -> Self {
        Self {
            compress_block_size: 32,
            compress_stride: 16,
            compress: NsaCompression::Mlp,
            compress_hidden_size,
            select_block_size: 64,
            num_selected_blocks: 16,
            window_size: 512,
            shared_kv: false,
        }
    }

    /// Sizes of the compressed and the selected blocks.
    pub fn blocks(&self) -> NsaBlocks {
        let Self { compress_block_size, compress_stride, select_block_size, num_selected_blocks, .. } = *self;
        NsaBlocks { compress_block_size, compress_stride, select_block_size, num_selected_blocks }
    }

    /// Number of key and value projections: one, or one for each branch.
    pub fn num_kv_copies(&self) -> usize {
        if self.shared_kv { 1 } else { NUM_NSA_BRANCHES }
    }

    /// Number of (query, key) pairs of one query head in a document of `seq_len` tokens, by branch: compressed,
    /// selected, window.
    ///
    /// Query t sees the compressed blocks that end at or before t; its own block up to t and `num_selected_blocks - 1`
    /// whole blocks before it; and the window.
    pub fn pairs(&self, seq_len: usize) -> [f64; NUM_NSA_BRANCHES] {
        let blocks = self.blocks();
        [blocks.compressed_pairs(seq_len), blocks.selected_pairs(seq_len), window_pairs(self.window_size, seq_len)]
    }
}

const MOST_BLOCKS: &str = "a query chooses 64 blocks at most; larger blocks hold more tokens";
/// The most blocks that a query of InfLLM-V2, MoBA or MSA chooses.
pub(crate) const MAX_CHOSEN_BLOCKS: usize = 64;

keys! {
    /// Sizes of InfLLM-V2 (arXiv:2509.24663): one exact attention over the tokens of a few blocks, without a parameter
    /// of its own, so a dense model's weights fit this kind unchanged.
    ///
    /// `c_m` is the mean of the keys `[s m, s m + l)` of a document; `p_m = softmax_m(q . c_m / sqrt(head_dim))` over
    /// the pooled keys that have ended, summed over the heads of a group; a block's score is the largest `p_m` of the
    /// pooled keys that overlap it. A query of KV head g reads the document's first block, its own and those before it
    /// up to `num_local_blocks`, and those with the largest scores, `num_selected_blocks` in all. The probabilities are
    /// exact, where the paper takes their sum from a coarser pooling.
    #[derive(Copy, Eq, Hash)]
    pub struct InfllmV2Shape {
        /// Sets the keys below to the values of arXiv:2509.24663: means of 32 every 16 tokens, 64 blocks of 64, 32 of
        /// them local. (Published inference code reads the local ones beside 64 others.) As an override it replaces the
        /// recipe's values, and `model.layer_types`.
        text preset: Option<AttentionPreset>,
        /// Tokens that a pooled key is the mean of (l).
        #[key(filled("twice `compress_stride`"), optional, size(MAX_SEQ_LEN))]
        pub compress_block_size: usize,
        /// Tokens between the starts of two pooled keys (s); divides both block sizes.
        #[key(filled("8; 16 for rows of 2048 tokens or more"), optional, size(MAX_SEQ_LEN))]
        pub compress_stride: usize,
        /// Tokens of a selected block: up to 64, or a multiple of it.
        #[key(
            filled("twice `compress_stride`; four times for rows of 2048 tokens or more"),
            optional,
            size(MAX_SEQ_LEN)
        )]
        pub select_block_size: usize,
        /// Blocks a query selects per KV head, forced ones included.
        #[key(
            filled("as many as hold a quarter of `training.seq_len`, 4 to 64"),
            optional,
            within(1, MAX_CHOSEN_BLOCKS, MOST_BLOCKS)
        )]
        pub num_selected_blocks: usize,
        /// Of these, the last ones up to the query's own, which are selected whatever their scores.
        #[key(filled("half of `num_selected_blocks`"), optional, within(1, MAX_CHOSEN_BLOCKS, MOST_BLOCKS))]
        pub num_local_blocks: usize,
    }
}

impl InfllmV2Shape {
    /// The sizes of arXiv:2509.24663.
    pub fn published() -> Self {
        Self {
            compress_block_size: 32,
            compress_stride: 16,
            select_block_size: 64,
            num_selected_blocks: 64,
            num_local_blocks: 32,
        }
    }

    /// How a query chooses blocks.
    pub fn choice(&self) -> BlockChoice {
        let Self { compress_block_size, compress_stride, select_block_size, num_selected_blocks, .. } = *self;
        BlockChoice {
            blocks: NsaBlocks { compress_block_size, compress_stride, select_block_size, num_selected_blocks },
            rule: ChoiceRule::LargestProbability,
            forced: ForcedBlocks { first: true, local: self.num_local_blocks },
        }
    }
}

keys! {
    /// Sizes of MoBA, mixture of block attention (arXiv:2502.13189): every query head reads its own block and those
    /// before it whose mean key has the largest product with the query. Without a parameter of its own.
    #[derive(Copy, Eq, Hash)]
    pub struct MobaShape {
        /// Sets the keys below to the values of arXiv:2502.13189, section 3.1: 3 blocks of 512. As an override it
        /// replaces the recipe's values, and `model.layer_types`.
        text preset: Option<AttentionPreset>,
        /// Tokens of a block: up to 64, or a multiple of it.
        #[key(filled("16; 64 for rows of 2048 tokens or more"), optional, size(MAX_SEQ_LEN))]
        pub select_block_size: usize,
        /// Blocks a query head selects, its own included.
        #[key(
            filled("as many as hold a quarter of `training.seq_len`, 4 to 16"),
            optional,
            within(1, MAX_CHOSEN_BLOCKS, MOST_BLOCKS)
        )]
        pub num_selected_blocks: usize,
    }
}

impl MobaShape {
    /// The sizes of arXiv:2502.13189, section 3.1.
    pub fn published() -> Self {
        Self { select_block_size: 512, num_selected_blocks: 3 }
    }

    /// How a query chooses blocks.
    pub fn choice(&self) -> BlockChoice {
        BlockChoice {
            blocks: NsaBlocks {
                num_selected_blocks: self.num_selected_blocks,
                ..NsaBlocks::of([self.select_block_size; 4])
            },
            rule: ChoiceRule::MeanKey,
            forced: ForcedBlocks { first: false, local: 1 },
        }
    }
}

choices! {
    /// How MSA's indexer scores a block.
    #[derive(Hash)]
    pub enum IndexScores {
        /// By the largest score of its tokens, for each KV head apart, as published.
        Msa = "msa",
        /// As QSA (Qwen3.8-Flash-Next): by the mean of its keys, for all KV heads together. Blocks of up to 64 tokens.
        Qsa = "qsa",
    }
}

keys! {
    /// Sizes of MiniMax sparse attention (arXiv:2606.13392): an indexer of one query head a KV head and one key head
    /// chooses blocks, and one exact attention reads their tokens.
    ///
    /// `q_i^r = RoPE(RMSNorm(x_i W_q^r))`, `k_j = RoPE(RMSNorm(x_j W_k))`, both of `model.head_dim`; a block's score
    /// for KV head r is the largest `q_i^r . k_j` of its tokens up to i. A query reads its own block, those before it
    /// up to `num_local_blocks`, and those with the largest scores. The choice has no gradient: the indexer learns from
    /// `index_loss_weight` times the mean, over tokens and KV heads, of `KL(P || softmax_j(q_i^r . k_j /
    /// sqrt(head_dim)))` over the tokens that are read, P the mean probabilities of the KV head's query heads. x and P
    /// take no gradient from it.
    ///
    /// With `indexer = "qsa"` a complete block b has one key, `kb_b = RoPE(RMSNorm(mean of x_j W_k))` at the position
    /// of its first token, and the score `sum_r max(0, q_i^r . kb_b) / sqrt(head_dim)`: one choice for all KV heads.
    /// Local blocks are read in any case. P is then the largest probability in a block, of probabilities summed
    /// over all heads, normalised over the complete blocks that are read, and the loss the mean over tokens of `KL(P ||
    /// softmax_b(score))` over these.
    ///
    /// Parameters of a layer, besides grouped-query attention's: the indexer's W_q and W_k
    /// `[(num_kv_heads + 1) * head_dim, d_model]` and two norms `[head_dim]`.
    #[derive(Copy)]
    pub struct MsaShape {
        /// Sets `select_block_size`, `num_selected_blocks` and `num_local_blocks` to the values of arXiv:2606.13392: 16
        /// blocks of 128, the query's own among them. As an override it replaces the recipe's values, and
        /// `model.layer_types`.
        text preset: Option<AttentionPreset>,
        /// How the indexer scores a block: by each token's key (`"msa"`), or by one pooled key (`"qsa"`).
        pub indexer: IndexScores = IndexScores::Msa,
        /// Tokens of a block: up to 64, or a multiple of it; with `indexer = "qsa"` up to 64.
        #[key(filled("16; 64 for rows of 2048 tokens or more"), optional, size(MAX_SEQ_LEN))]
        pub select_block_size: usize,
        /// Blocks a query selects per KV head, its own included.
        #[key(
            filled("as many as hold a quarter of `training.seq_len`, 4 to 16"),
            optional,
            within(1, MAX_CHOSEN_BLOCKS, MOST_BLOCKS)
        )]
        pub num_selected_blocks: usize,
        /// Of these, the last ones up to the query's own, which are selected whatever their scores. More than 1 is an
        /// addition to the paper's form.
        #[key(within(1, MAX_CHOSEN_BLOCKS, MOST_BLOCKS))]
        pub num_local_blocks: usize = 1,
        /// Weight of the indexer's loss in each layer, beside a cross-entropy of weight 1. It reaches the indexer's
        /// parameters alone, so that with AdamW it matters through the clipping of gradients only.
        #[key(between(0.0, 1e6, "1.0 is the default of the published kernels; 0.0 trains no indexer"), may_change)]
        pub index_loss_weight: f64 = 1.0,
        /// Whether queries read all keys while the indexer learns from all of them, so that a choice begins with a
        /// trained indexer. A `[[stage]]` has a key of the same name: the first stage of a run, and the first of a
        /// dense model that trains on as MSA.
        pub index_warmup: bool = false,
    }
}

impl MsaShape {
    /// The sizes of arXiv:2606.13392.
    pub fn published() -> Self {
        Self {
            indexer: IndexScores::Msa,
            select_block_size: 128,
            num_selected_blocks: 16,
            num_local_blocks: 1,
            index_loss_weight: 1.0,
            index_warmup: false,
        }
    }

    /// How the indexer chooses blocks.
    pub fn choice(&self) -> BlockChoice {
        // `pooled` is the number of tokens of a pooled key.
        let (rule, pooled) = match self.indexer {
            IndexScores::Msa => (ChoiceRule::LargestScore, 1),
            IndexScores::Qsa => (ChoiceRule::SumOfHeads, self.select_block_size),
        };
        BlockChoice {
            blocks: NsaBlocks::of([pooled, pooled, self.select_block_size, self.num_selected_blocks]),
            rule,
            forced: ForcedBlocks { first: false, local: self.num_local_blocks },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slopes_are_spaced_geometrically_between_two_periods() {
        let dma = DmaShape::published(1024);
        assert_eq!(dma.slopes(3), None);
        let slope = DmaShape { recency: DmaRecency::Slope, ..dma };
        let periods = |dma: DmaShape, heads| -> Vec<i64> {
            let slopes = dma.slopes(heads).expect("recency");
            slopes.iter().map(|slope| (1.0 / slope).round() as i64).collect()
        };
        assert_eq!(periods(slope, 3), [64, 512, 4096]);
        assert_eq!(periods(slope, 1), [4096]);
        let given = DmaShape { shortest_period: Some(10.0), longest_period: Some(1000.0), ..slope };
        assert_eq!(periods(given, 3), [10, 100, 1000]);
        // A stage with another window keeps the slopes.
        assert_eq!(slope.with_window(64).slopes(3), slope.slopes(3));
        // A period that was not given stays so where the window does: a given one must not be under the shortest.
        assert_eq!(slope.with_window(1024), slope);
    }

    #[test]
    fn nsa_pairs_equal_the_count_query_by_query() {
        for (l, s, select, k, w) in [(4, 2, 4, 3, 5), (8, 4, 4, 3, 1), (4, 4, 8, 4, 9)] {
            let shape = NsaShape {
                compress_block_size: l,
                compress_stride: s,
                compress: NsaCompression::Mean,
                compress_hidden_size: None,
                select_block_size: select,
                num_selected_blocks: k,
                window_size: w,
                shared_kv: true,
            };
            for seq_len in 0..90usize {
                let mut counted = [0usize; 3];
                for t in 0..seq_len {
                    let blocks = shape.blocks().num_compressed_blocks(seq_len);
                    counted[0] += (0..blocks).filter(|c| c * s + l - 1 <= t).count();
                    let own = t / select;
                    let first = (own + 1).saturating_sub(k);
                    counted[1] += (own - first) * select + t % select + 1;
                    counted[2] += (t + 1).min(w);
                }
                assert_eq!(shape.pairs(seq_len), counted.map(|count| count as f64), "{shape:?} {seq_len}");
            }
        }
    }
}
