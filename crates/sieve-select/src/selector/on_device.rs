//! Selections in steps that a device can take, so that queries and keys need not leave it.

use sieve_core::{BlockScores, BlockSelection, KeepBlocks};

use crate::call::{CallShape, Tiles};
use crate::gqa::GqaPolicy;
use crate::prefill::bfla::{BflaConfig, Pooling};
use crate::prefill::xattention::SampleMode;
use crate::selector::{Method, Selector};

impl Selector {
    /// The selection of a call in a layer as steps of a device; `None` where the method, or one of its settings, selects on the
    /// host. A call that is dense whatever its operands are has none.
    pub fn block_selection(&self, shape: CallShape, layer: usize) -> Option<BlockSelection> {
        let heads_per_list = match self.common.gqa {
            GqaPolicy::PerQuery => 1,
            GqaPolicy::Union => shape.group_size(),
            GqaPolicy::Mean => return None,
        };
        if self.is_dense(layer, shape.num_queries) {
            return None;
        }
        let of = |block, scores, keep| BlockSelection {
            num_queries: shape.num_queries,
            num_keys: shape.num_keys,
            num_heads: shape.num_heads,
            num_kv_heads: shape.num_kv_heads,
            block,
            offset: 0,
            scores,
            keep,
            counts_own: false,
            heads_per_list,
            tile: block,
            local_tokens: 0,
            first_tiles: 0,
            softmax_scale: shape.softmax_scale(),
            dense_rows: Vec::new(),
        };
        let mut selection = match &self.method {
            Method::Meanpool(config) => {
                let keep = config
                    .top_k
                    .map_or(KeepBlocks::Mass(config.tau), KeepBlocks::Top);
                BlockSelection {
                    first_tiles: 1,
                    ..of(config.block, BlockScores::Means, keep)
                }
            }
            Method::BlockSparse(config) => of(
                config.block,
                BlockScores::Means,
                KeepBlocks::Top(config.topk),
            ),
            Method::Bfla(config) if !config.rescues() => BlockSelection {
                tile: config.tile,
                local_tokens: config.local_tokens,
                first_tiles: config.sink_tiles,
                ..of(
                    config.block,
                    scores_of_bfla(config)?,
                    KeepBlocks::Mass(config.keep_mass),
                )
            },
            Method::Xattention(config) if config.head_taus.is_empty() => {
                let reversed = match config.mode {
                    SampleMode::Antidiagonal => true,
                    SampleMode::Slash => false,
                    SampleMode::Random => return None,
                };
                let scores = BlockScores::Cells {
                    stride: config.stride,
                    reversed,
                    norm: config.norm,
                };
                BlockSelection {
                    offset: Tiles::aligned(shape, config.block).query_offset,
                    counts_own: true,
                    ..of(config.block, scores, KeepBlocks::Mass(config.tau))
                }
            }
            _ => return None,
        };
        if selection.keep == KeepBlocks::Top(0) {
            return None;
        }
        let rows = shape.num_queries;
        let last = rows.saturating_sub(self.common.last_dense_rows)..rows;
        selection
            .dense_rows
            .extend((!last.is_empty()).then_some(last));
        Some(selection)
    }
}

fn scores_of_bfla(config: &BflaConfig) -> Option<BlockScores> {
    match config.pooling {
        Pooling::Flat => Some(BlockScores::LargestOfGroups(config.group)),
        Pooling::Mean => Some(BlockScores::Means),
        Pooling::Center | Pooling::Maxabs => None,
    }
}
