//! What each kind of attention is, in one file a kind: parameters, pairs of queries and keys, FLOPs, caches,
//! activations, ops, and what processes exchange.
//!
//! A kind is asked by whom it concerns: [`Kind`] says what it is, [`Cost`] what a layer costs (plans), [`Exported`] how
//! it is exported, [`Launched`] which kernels it takes, and [`KindFacts`] what holds whatever its sizes.
//! [`Attention::as_kind`] is the one dispatch, which the list of the kinds generates. Plans, exports, checkpoints and
//! reports ask these and never which kind it is; what was measured of a kind on a card is in sieve-plan. A kind's Burn
//! layer is the second file that it has, in sieve-nn.
//!
//! A method's `layer` is the shape of a model whose layers all have the kind
//! ([`ModelShape::of_layer`](crate::ModelShape::of_layer), [`ModelShape::by_kind`](crate::ModelShape::by_kind)); a
//! number counts one layer unless said.

mod chosen_blocks;
mod cost;
mod cowindow;
mod dense;
mod dynamic_mask;
mod exported;
mod facts;
mod infllm;
mod kind;
mod latent;
mod launched;
mod list;
mod moba;
mod msa;
mod native_sparse;
mod op;
mod param;
pub(crate) mod settings;
mod sizes;
mod window;

pub use cost::{Cost, LayerFlops};
pub use cowindow::CowaShape;
pub use dense::Dense;
pub use dynamic_mask::{DmaForm, DmaRecency, DmaShape, DmaWindow};
pub use exported::{ConfigKey, Exported, FULL_ATTENTION, SLIDING_ATTENTION, Stock, StockClass};
use facts::HasFacts;
pub use facts::{Chooses, KindFacts, Projections};
pub use infllm::InfllmV2Shape;
pub use kind::{BlockPairs, Indexer, Kind};
pub use latent::{DEEPSEEK_LATENT_EPS, MlaShape};
pub use launched::Launched;
pub(crate) use list::{ATTENTION_KEYS, kind_of_layer_type, table_name};
pub use list::{Attention, AttentionKind, names_of_kinds, shapes};
pub use moba::MobaShape;
pub use msa::{MsaAndDense, MsaShape};
pub use native_sparse::{NUM_NSA_BRANCHES, NsaCompression, NsaShape};
pub use op::AttentionOp;
pub use param::{ParamSpec, Part, Rows};
pub use settings::AttentionPreset;
pub use sizes::{
    Activations, BackwardCall, DmaBias, Exchanged, Halo, HeadWidths, IndexScores, KeptCall, KernelSizes, KeyReads,
    LatentSizes, times,
};
pub use window::SwaShape;

impl Attention {
    /// The window that a stage may change, in tokens; `None` for kinds without a window.
    pub fn window(&self) -> Option<usize> {
        self.as_kind().window()
    }

    /// The same attention with another window; unchanged for kinds without a window.
    pub fn with_window(&self, window: usize) -> Self {
        let mut changed = *self;
        if let Some(kind) = changed.as_kind_mut() {
            kind.set_window(window);
        }
        changed
    }

    /// The same attention for heads of another width.
    pub fn with_head_width(&self, head_dim: usize) -> Self {
        let mut changed = *self;
        if let Some(kind) = changed.as_kind_mut() {
            kind.set_head_width(head_dim);
        }
        changed
    }

    /// Whether queries read all keys while an indexer learns to choose; `None` for kinds without one.
    pub fn index_warmup(&self) -> Option<bool> {
        self.as_kind().indexer().map(|indexer| indexer.warms_up)
    }

    /// The same attention with another answer to whether queries read all keys while an indexer learns; unchanged for
    /// kinds without an indexer.
    pub fn with_index_warmup(&self, warms_up: bool) -> Self {
        let mut changed = *self;
        if let Some(kind) = changed.as_kind_mut() {
            kind.set_index_warmup(warms_up);
        }
        changed
    }

    /// Number of latest keys that every query sees whatever their scores: `local_window_size` of DMA, 0 for other
    /// kinds.
    pub fn local_window(&self) -> usize {
        self.as_kind().local_window()
    }
}
