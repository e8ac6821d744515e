//! MoBA (arXiv:2502.13189): each query head reads the blocks whose mean keys fit it best; no parameter of its own.

use super::chosen_blocks::{CHOSEN_BY_HEAD, Chosen, as_chosen_blocks, chosen_words};
use super::{
    Activations, AttentionOp, BackwardCall, BlockPairs, Exchanged, HeadWidths, KeptCall, KeyReads, Kind, LayerFlops,
    ParamSpec,
};
use crate::NsaBlocks;
use crate::model::{BranchDensity, MobaShape, ModelShape};
use serde_json::{Value, json};

impl MobaShape {
    fn chosen(&self) -> Chosen {
        Chosen { choice: self.choice(), reads_all: false, name: "moba", rate: CHOSEN_BY_HEAD }
    }
}

impl Kind for MobaShape {
    as_chosen_blocks!();

    fn has_dense_parameters(&self) -> bool {
        true
    }

    fn shared_rows_too_fast(&self) -> Option<&'static str> {
        Some("10 %")
    }
}
