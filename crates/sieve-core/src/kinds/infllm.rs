//! InfLLM-V2 (arXiv:2509.24663): queries read the blocks whose pooled keys are most probable; no parameter of its own.

use super::chosen_blocks::{CHOSEN_BY_GROUP, Chosen, as_chosen_blocks, chosen_words, pooled_words};
use super::{
    Activations, AttentionOp, BackwardCall, BlockPairs, Exchanged, HeadWidths, KeptCall, KeyReads, Kind, LayerFlops,
    ParamSpec,
};
use crate::NsaBlocks;
use crate::model::{BranchDensity, InfllmV2Shape, ModelShape};
use serde_json::{Value, json};

impl InfllmV2Shape {
    fn chosen(&self) -> Chosen {
        Chosen { choice: self.choice(), reads_all: false, name: "infllm_v2", rate: CHOSEN_BY_GROUP }
    }
}

impl Kind for InfllmV2Shape {
    as_chosen_blocks!();

    fn has_dense_parameters(&self) -> bool {
        true
    }

    fn form_words(&self, _layer: &ModelShape) -> Vec<String> {
        let pooled = pooled_words(self.compress_block_size, self.compress_stride, "mean");
        vec![format!("{} of them local", self.num_local_blocks), pooled]
    }
}
