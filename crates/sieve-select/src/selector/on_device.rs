//! Selections in steps that a device can take, so that queries and keys need not leave it.

use sieve_core::{BlockScores, BlockSelection, KeepBlocks, KeyScores, ProbeCorrection, SlotOrder};

use crate::call::{CallShape, Tiles};
use crate::gqa::GqaPolicy;
use crate::mask::CorrectionMode;
use crate::prefill::ba_att::{BaAttConfig, Compensation, NormSort};
use crate::prefill::bfla::{BflaConfig, Pooling};
use crate::prefill::flexprefill::FlexprefillConfig;
use crate::prefill::momo::{MomoConfig, ProbeScore, TopK};
use crate::prefill::pbs::{PbsConfig, PbsSelect, Permute, PermutePer};
use crate::prefill::vertical_slash::{self, VerticalSlashConfig};
use crate::prefill::xattention::SampleMode;
use crate::selector::{Method, Reads, Selector};

/// Blocks of `block` queries and keys, a list for each query head, which keeps its own block.
pub(crate) fn of_blocks(shape: CallShape, block: usize, scores: BlockScores, keep: KeepBlocks) -> BlockSelection {
    BlockSelection {
        num_queries: shape.num_queries,
        num_keys: shape.num_keys,
        num_heads: shape.num_heads,
        num_kv_heads: shape.num_kv_heads,
        block,
        query_block: block,
        order: None,
        offset: 0,
        scores,
        keep,
        counts_own: false,
        heads_per_list: 1,
        keeps_own: true,
        tile: block,
        local_tokens: 0,
        first_tiles: 0,
        softmax_scale: shape.softmax_scale(),
        dense_rows: Vec::new(),
    }
}

impl Selector {
    /// The selection of a call in a layer as steps of a device; `None` where the method, or one of its settings,
    /// selects on the host. A call that is dense whatever its operands are has none.
    pub fn block_selection(&self, shape: CallShape, layer: usize, num_layers: usize) -> Option<BlockSelection> {
        let heads_per_list = match self.common.gqa {
            GqaPolicy::PerQuery => 1,
            GqaPolicy::Union => shape.group_size(),
            GqaPolicy::Mean => return None,
        };
        if self.is_dense(layer, shape.num_queries) {
            return None;
        }
        let of = |block, scores, keep| BlockSelection {
            heads_per_list,
            ..of_blocks(shape, block, scores, keep)
        };
        let mut selection = match &self.method {
            Method::Meanpool(config) => {
                let keep = config.top_k.map_or(KeepBlocks::Mass(config.tau), KeepBlocks::Top);
                BlockSelection {
                    first_tiles: 1,
                    ..of(config.block, BlockScores::Means, keep)
                }
            }
            Method::BlockSparse(config) => of(config.block, BlockScores::Means, KeepBlocks::Top(config.topk)),
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
            Method::OracleTopk(config) => {
                let scores = BlockScores::Cells {
                    stride: 1,
                    reversed: false,
                    norm: 1.0,
                };
                let keep = config.tau.map_or(KeepBlocks::Top(config.k), KeepBlocks::Mass);
                of(config.block, scores, keep)
            }
            Method::VerticalSlash(config) if heads_per_list == 1 => BlockSelection {
                scores: scores_of_lines(config),
                ..of(vertical_slash::TILE, BlockScores::Means, KeepBlocks::Mass(1.0))
            },
            Method::Minference(config) => BlockSelection {
                scores: scores_of_lines(&config.same_lines(layer, shape.num_heads)?),
                heads_per_list: 1,
                ..of(vertical_slash::TILE, BlockScores::Means, KeepBlocks::Mass(1.0))
            },
            Method::Flexprefill(config) => {
                let scores = scores_of_patterns(config, shape.num_keys)?;
                of(config.block, scores, KeepBlocks::Mass(1.0))
            }
            Method::Pbs(config) => BlockSelection {
                order: Some(order_of_pbs(config, shape.num_keys)?),
                ..of(config.block, BlockScores::Means, KeepBlocks::Mass(config.tau))
            },
            Method::BaAtt(config) => {
                let (order, scores) = steps_of_ba_att(config, shape, layer, num_layers)?;
                // Queries of a group move apart.
                if order.moves_queries && heads_per_list > 1 {
                    return None;
                }
                BlockSelection {
                    order: Some(order),
                    ..of(config.block, scores, KeepBlocks::Share(1.0 - config.sparsity))
                }
            }
            Method::Momo(config) => {
                let keep = KeepBlocks::Top(config.k_trim.unwrap_or(config.k));
                BlockSelection {
                    query_block: config.chi,
                    local_tokens: config.beta - 1,
                    first_tiles: config.sink_blocks,
                    ..of(config.beta, scores_of_momo(config, shape)?, keep)
                }
            }
            Method::Delta(config, base) => {
                let mut selection = base.block_selection(shape, layer, num_layers)?;
                selection.add_dense_end(config.tail(shape));
                selection
            }
            _ => return None,
        };
        if selection.keep == KeepBlocks::Top(0) {
            return None;
        }
        let last = self.common.last_dense_rows;
        selection.add_dense_end((last > 0).then(|| shape.num_queries.saturating_sub(last)));
        Some(selection)
    }

    /// Whether a call's attention can run on a device with kernels for it: a correction by probes among them.
    pub fn runs_on_device(&self, shape: CallShape, layer: usize, num_layers: usize) -> bool {
        let corrects = |correction: ProbeCorrection| correction.gamma > 1 && shape.num_queries > correction.gamma;
        let (values, made) = match &self.method {
            _ if self.is_dense(layer, shape.num_queries) => return true,
            Method::Momo(_) => (true, self.block_selection(shape, layer, num_layers).is_some()),
            Method::Delta(_, base) => (
                base.reads(layer, shape.num_queries) == Reads::Values,
                base.correction(shape, layer).is_none(),
            ),
            _ => return true,
        };
        let fits = self.correction(shape, layer).is_none_or(corrects);
        fits && made && (!values || matches!(self.method, Method::Momo(_)))
    }

    /// How dense rows correct the output of a call, where the method does that and the call is no dense one.
    pub fn correction(&self, shape: CallShape, layer: usize) -> Option<ProbeCorrection> {
        if self.is_dense(layer, shape.num_queries) {
            return None;
        }
        let (gamma, mode) = match &self.method {
            Method::Momo(config) => (config.gamma, config.mode),
            Method::Delta(config, base) if !base.is_dense(layer, shape.num_queries) => (config.gamma, config.mode),
            _ => return None,
        };
        (mode != CorrectionMode::SparseOnly).then_some(ProbeCorrection {
            gamma,
            replaces_only: mode == CorrectionMode::Recompute,
        })
    }
}

/// Blocks that a probe's buffer of the surely best holds on a device.
const MOST_EXACT: usize = 32;

fn scores_of_lines(config: &VerticalSlashConfig) -> BlockScores {
    BlockScores::Lines {
        rows: vertical_slash::PROBE,
        columns: [
            config.vertical.max(vertical_slash::FORCED_COLUMNS),
            vertical_slash::FORCED_COLUMNS,
        ],
        diagonals: [
            config.slash.max(vertical_slash::MIN_OFFSETS),
            vertical_slash::FORCED_OFFSETS,
        ],
    }
}

fn scores_of_patterns(config: &FlexprefillConfig, num_keys: usize) -> Option<BlockScores> {
    let most = config.max_budget.map_or(num_keys, |most| most / config.block);
    (!config.is_short(num_keys)).then_some(BlockScores::Patterns {
        gamma: config.gamma,
        tau: config.tau,
        blocks: [config.min_budget / config.block, most],
    })
}

fn order_of_pbs(config: &PbsConfig, num_keys: usize) -> Option<SlotOrder> {
    let fits = config.permute == Permute::Keys
        && config.perm == PermutePer::Kv
        && config.select == PbsSelect::Meanpool
        && num_keys > config.segment;
    fits.then_some(SlotOrder {
        segment: config.segment,
        keys: KeyScores::Attention(config.block),
        moves_queries: false,
        keeps_first: true,
    })
}

fn steps_of_ba_att(
    config: &BaAttConfig,
    shape: CallShape,
    layer: usize,
    num_layers: usize,
) -> Option<(SlotOrder, BlockScores)> {
    let scores = match config.compensates(layer, num_layers) {
        false => BlockScores::Means,
        true if config.compensation == Compensation::Covariance => {
            BlockScores::MeansAndVariances(config.beta as f32 / shape.head_dim as f32)
        }
        true => return None,
    };
    let fits = matches!(config.sort, NormSort::K | NormSort::Qk) && config.causal && shape.num_keys > config.segment;
    let order = SlotOrder {
        segment: config.segment,
        keys: KeyScores::Length,
        moves_queries: config.sort == NormSort::Qk,
        keeps_first: false,
    };
    fits.then_some((order, scores))
}

fn scores_of_momo(config: &MomoConfig, shape: CallShape) -> Option<BlockScores> {
    let num_exact = match config.topk {
        TopK::Hybrid => config.k_exact,
        TopK::Gauss => 0,
        TopK::Exact | TopK::Tree => return None,
    };
    let fits = config.score == ProbeScore::Raw
        && num_exact <= MOST_EXACT
        && shape.context().is_multiple_of(config.gamma)
        && config.chi.is_multiple_of(config.gamma)
        && config.beta.is_power_of_two()
        && config.beta <= 128
        && shape.head_dim.is_multiple_of(64);
    fits.then_some(BlockScores::Probes {
        gamma: config.gamma,
        chosen: [config.k, num_exact],
    })
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
        let shape = crate::test_data::shape([300, 428], [4, 2], 64);
        let selection = |text: &str| {
            let selector = Selector::parse(text).expect("valid");
            selector.block_selection(shape, 0, 2)
        };
        for text in [
            "bfla:prob=0.1",
            "bfla:pooling=center",
            "meanpool:gqa=mean",
            "xattention:mode=random",
            "meanpool:min_prefill_tokens=301",
            "flexprefill:min_budget=428",
            "vertical_slash:gqa=union",
            "pbs:permute=both",
            "pbs:segment=512",
            "ba_att:segment=256,sort=q",
            "momo:topk=exact",
            "infinitehip",
            "quest",
        ] {
            assert_eq!(selection(text), None, "{text}");
        }
        let of = |text| selection(text).expect("a device takes it");
        let bfla = of("bfla:last_dense_rows=7");
        assert_eq!((bfla.heads_per_list, bfla.tile, bfla.first_tiles), (2, 64, 1));
        assert_eq!(bfla.dense_rows.len(), 1);
        assert_eq!(bfla.dense_rows[0], 293..300);
        // Its blocks end at multiples of 128 tokens; the others' begin at the call's first row.
        let offsets = ["xattention:block=64", "xattention:block=256,stride=16", "meanpool"];
        assert_eq!(offsets.map(|text| of(text).offset), [0, 128, 0]);
    }
}
