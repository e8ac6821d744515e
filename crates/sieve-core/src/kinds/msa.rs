//! MSA (arXiv:2606.13392): queries read the blocks that a small learned indexer scores highest.

use super::chosen_blocks::{CHOSEN_BY_GROUP, Chosen, as_chosen_blocks, chosen_words};
use super::{
    Activations, AttentionOp, BackwardCall, BlockPairs, Exchanged, HeadWidths, KeptCall, KeyReads, Kind, LayerFlops,
    ParamSpec,
};
use crate::NsaBlocks;
use crate::model::{BranchDensity, IndexScores, ModelShape, MsaShape};
use serde_json::{Value, json};

impl MsaShape {
    fn chosen(&self) -> Chosen {
        Chosen { choice: self.choice(), reads_all: self.index_warmup, name: "msa", rate: CHOSEN_BY_GROUP }
    }
}

impl Kind for MsaShape {
    as_chosen_blocks!();

    fn has_indexer(&self) -> bool {
        true
    }

    fn has_pooled_indexer(&self) -> bool {
        self.choice().pools_for_all_heads()
    }

    fn shared_rows_too_fast(&self) -> Option<&'static str> {
        Some("72 to 102 %")
    }

    fn form_words(&self, _layer: &ModelShape) -> Vec<String> {
        let indexer = match self.indexer {
            IndexScores::Msa => "msa",
            IndexScores::Qsa => "qsa",
        };
        vec![format!("{} of them local", self.num_local_blocks), format!("indexer {indexer}")]
    }
}
