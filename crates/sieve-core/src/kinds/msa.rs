//! MSA (arXiv:2606.13392): queries read the blocks that a small learned indexer scores highest.

use super::chosen_blocks::{ChoosesBlocks, MAX_CHOSEN_BLOCKS, MOST_BLOCKS, block_sizes, check_pieces};
use super::settings::{AttentionPreset, Settings, Sizes};
use super::sizes::IndexScores;
use super::{Attention, HasFacts, Indexer, KindFacts};
use crate::keys::{MAX_SEQ_LEN, keys};
use crate::model::ModelShape;
use crate::recipe::{ModelSection, Rules};
use crate::{BlockChoice, ChoiceRule, ForcedBlocks};
use crate::{NsaBlocks, Refusal};
use toml::Table;

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
        /// Whether layers that read an earlier layer's choice (`"shared"` in `model.layer_types`) train its indexer
        /// too: each adds its own loss, so that the indexer learns the mean of their attention (arXiv:2603.12201).
        /// `false`: it learns its own layer's alone.
        pub index_loss_of_shared: bool = true,
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
            index_loss_of_shared: true,
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

/// The hint for a model that a class of [`MsaAndDense`] does not compute.
const LEAVE_OUT: &str = "leave the form out to get the class that computes this model";

/// The attention of a model whose layers are MSA of one size, or dense, as in MiniMax-M3.
#[derive(Clone, Debug, PartialEq)]
pub struct MsaAndDense {
    /// The sizes of the MSA layers.
    pub msa: MsaShape,
    /// For each layer whether it is MSA.
    pub is_msa: Vec<bool>,
}

impl MsaAndDense {
    /// The attention of `model`.
    ///
    /// # Errors
    /// No layer of MSA, or a layer that is neither: the refusal names the recipe's key.
    pub fn of(model: &ModelShape) -> Result<Self, Refusal> {
        let mut sizes: Vec<MsaShape> = Vec::new();
        for (attention, _) in model.attentions() {
            match attention {
                Attention::Msa(msa) => sizes.push(msa),
                Attention::DENSE => {}
                other => {
                    let name = other.kind().name();
                    let what = format!("attention.kind or model.layer_types has {name}, and the class has msa and mha");
                    return Err(Refusal::new(what, LEAVE_OUT));
                }
            }
        }
        let &[msa, ref others @ ..] = sizes.as_slice() else {
            return Err(Refusal::new("no layer is msa (attention.kind, model.layer_types)", LEAVE_OUT));
        };
        let rules = [
            (
                others.iter().all(|other| other.choice() == msa.choice()),
                "the msa layers of [attention] and of its tables differ in their blocks, and the class has one size",
            ),
            (msa.indexer == IndexScores::Msa, "attention.indexer is \"qsa\", and the class scores each token's key"),
            (
                model.num_shared_layers() == 0,
                "model.layer_types has \"shared\", and in the class each layer chooses for itself",
            ),
        ];
        if let Some((_, what)) = rules.into_iter().find(|(holds, _)| !holds) {
            return Err(Refusal::new(what, LEAVE_OUT));
        }
        let is_msa = (0..model.num_layers).map(|layer| model.attention_of(layer) != Attention::DENSE);
        Ok(Self { msa, is_msa: is_msa.collect() })
    }
}

impl Settings for MsaShape {
    fn example(_head_dim: usize) -> Self {
        Self::published()
    }

    fn resolve(attention: &mut Table, sizes: Sizes) {
        block_sizes(attention, sizes);
    }

    /// The forced blocks are among the selected ones, and the indexer can score blocks of this size.
    fn check(&self, _model: Option<&ModelSection>, rules: &mut Rules<'_>) {
        let (selected, local) = (self.num_selected_blocks, self.num_local_blocks);
        rules.require(
            local <= selected,
            "attention.num_local_blocks",
            format!("is {local}, more than num_selected_blocks = {selected}"),
            "1 is the published form, the query's own block",
        );
        if self.indexer == IndexScores::Msa {
            return check_pieces(self.select_block_size, rules);
        }
        rules.require(
            self.select_block_size <= 64,
            "attention.select_block_size",
            format!("is {}, and indexer = \"qsa\" scores blocks of up to 64 tokens", self.select_block_size),
            "64 is the largest, or set attention.indexer = \"msa\"",
        );
    }
}

impl HasFacts for MsaShape {
    const FACTS: KindFacts = KindFacts { has_one_order: true, ..KindFacts::CHOSEN_BLOCKS };
}

impl ChoosesBlocks for MsaShape {
    const NAME: &'static str = "msa";

    fn choice(&self) -> BlockChoice {
        MsaShape::choice(self)
    }

    fn indexer(&self) -> Option<Indexer> {
        Some(Indexer {
            scores: self.indexer,
            warms_up: self.index_warmup,
            learns: self.index_loss_weight > 0.0,
            learns_from_shared: self.index_loss_of_shared,
        })
    }

    fn set_index_warmup(&mut self, index_warmup: bool) {
        self.index_warmup = index_warmup;
    }

    fn form_words(&self) -> Vec<String> {
        let indexer = match self.indexer {
            IndexScores::Msa => "msa",
            IndexScores::Qsa => "qsa",
        };
        vec![format!("{} of them local", self.num_local_blocks), format!("indexer {indexer}")]
    }
}
