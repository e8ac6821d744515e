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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_takes_what_its_steps_say_and_no_more() {
        let shape = CallShape {
            num_queries: 300,
            num_keys: 428,
            num_heads: 4,
            num_kv_heads: 2,
            head_dim: 64,
        };
        let selection = |text: &str| {
            let selector = Selector::parse(text).expect("valid");
            selector.block_selection(shape, 0)
        };
        for text in [
            "bfla:prob=0.1",
            "bfla:pooling=center",
            "meanpool:gqa=mean",
            "xattention:mode=random",
            "meanpool:min_prefill_tokens=301",
            "flexprefill",
            "momo",
            "quest",
        ] {
            assert_eq!(selection(text), None, "{text}");
        }
        let of = |text| selection(text).expect("a device takes it");
        let bfla = of("bfla:last_dense_rows=7");
        assert_eq!(
            (bfla.heads_per_list, bfla.tile, bfla.first_tiles),
            (2, 64, 1)
        );
        assert_eq!(bfla.dense_rows.len(), 1);
        assert_eq!(bfla.dense_rows[0], 293..300);
        // Its blocks end at multiples of 128 tokens; the others' begin at the call's first row.
        let offsets = [
            "xattention:block=64",
            "xattention:block=256,stride=16",
            "meanpool",
        ];
        assert_eq!(offsets.map(|text| of(text).offset), [0, 128, 0]);
    }
}
