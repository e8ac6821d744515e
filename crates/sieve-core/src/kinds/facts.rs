//! What holds of a kind whatever its sizes.

/// What holds of a kind whatever its sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KindFacts {
    /// What keys and values are made from.
    pub projections: Projections,
    /// What queries choose by content, in layers whose attention weights show what was chosen.
    pub chooses: Chooses,
    /// Why layers cannot share a choice, for kinds that choose no blocks in a step of its own.
    pub no_shared_choice: &'static str,
    /// Whether training computes the norm, the projections, attention and the residual addition of a layer as one op.
    pub is_one_op: bool,
    /// Whether the softmax of a layer can have a learned logit of each query head, `model.attention_sinks`.
    pub takes_sinks: bool,
    /// Whether a new token on a Hopper GPU can add in the order of whole rows, to the bit: by a kernel that goes
    /// through neighbouring keys as whole rows do, for keys that are chosen one by one with [`KeyOrder::Epochs`] in
    /// both, or for chosen blocks by the kernels of whole rows. A kind that chooses blocks by probabilities needs that
    /// order in whole rows, too.
    ///
    /// [`KeyOrder::Epochs`]: crate::KeyOrder::Epochs
    pub has_one_order: bool,
    /// The kind's name in `layer_types` of the `transformers` classes of grouped-query attention; `None` for kinds that
    /// no such class has.
    pub stock_layer_type: Option<&'static str>,
}

impl KindFacts {
    /// The facts of most kinds: grouped queries, and a layer of several ops.
    pub(super) const GROUPED: Self = Self {
        projections: Projections::Grouped,
        chooses: Chooses::Nothing,
        no_shared_choice: "do not choose blocks that could be shared",
        is_one_op: false,
        takes_sinks: false,
        has_one_order: false,
        stock_layer_type: None,
    };
    /// The facts of kinds that read all keys of chosen blocks.
    pub(super) const CHOSEN_BLOCKS: Self = Self { chooses: Chooses::Blocks, ..Self::GROUPED };
}

/// What keys and values are made from. A model cannot mix layers of the two, and weights do not pass from one to the
/// other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Projections {
    /// Projections of the hidden state, shared by the query heads of a group.
    Grouped,
    /// A latent, one key and value for each query head.
    Latent,
}

impl Projections {
    /// The recipe's default of `model.num_key_value_heads` for this even or odd number of query heads.
    pub(crate) fn default_kv_heads(self, heads: i64) -> i64 {
        match self {
            Self::Grouped if heads % 2 == 0 => heads / 2,
            Self::Grouped | Self::Latent => heads,
        }
    }
}

/// What queries choose by content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chooses {
    /// Nothing, or blocks that one branch of several reads.
    Nothing,
    /// Single keys.
    Keys,
    /// Blocks, in a step of its own, so that layers can share a choice and `training.dense_steps` can read all keys
    /// instead.
    Blocks,
}

/// A kind that has facts.
pub(super) trait HasFacts {
    /// The facts.
    const FACTS: KindFacts;
}
