//! What a device does for one token while a model writes.
use sieve_core::{BlockScores, BlockSelection, KeepBlocks};

use super::amount;
use super::quest::MIN_PAGES;
use crate::call::{Call, CallShape};
use crate::mask::SparseMask;
use crate::selector::on_device::of_blocks;
use crate::selector::{Method, Selector};

/// How the keys that one token reads are found.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// By their positions.
    Mask(Box<SparseMask>),
    /// By steps of a device; and the keys that a query head reads.
    Blocks(Box<BlockSelection>, usize),
}

impl Selector {
    /// How a device finds what the last of `shape.num_keys` tokens reads; `None` where the method decodes on the host.
    /// `known` pages have bounds from earlier tokens.
    pub fn step(&self, shape: CallShape, layer: usize, known: usize) -> Option<Step> {
        let n = shape.num_keys;
        let shape = CallShape {
            num_queries: 1,
            ..shape
        };
        if self.is_dense_layer(layer) && self.steps_on_device() {
            return Some(Step::Mask(Box::new(SparseMask::dense(shape))));
        }
        let of = |block, scores, keep| of_blocks(shape, block, scores, keep);
        match &self.method {
            Method::Streamingllm(config) if !config.reindex => Some(Step::Mask(Box::new(
                config.select(&Call::of_shape(shape).ok()?),
            ))),
            Method::Quest(config) if layer < config.dense_layers => {
                Some(Step::Mask(Box::new(SparseMask::dense(shape))))
            }
            Method::Quest(config) => {
                let (last, all) = ((n - 1) / config.page, n.div_ceil(config.page));
                let pages = (amount(config.budget, n) / config.page).max(MIN_PAGES);
                let keys = n - last * config.page + (pages.min(all) - 1) * config.page;
                let selection = BlockSelection {
                    heads_per_list: shape.group_size(),
                    // The last page is one of them.
                    ..of(
                        config.page,
                        BlockScores::Bounds(known),
                        KeepBlocks::Top(pages - 1),
                    )
                };
                Some(Step::Blocks(Box::new(selection), keys))
            }
            Method::ExactTop(config) => {
                let top = amount(config.k, n);
                let selection = BlockSelection {
                    keeps_own: false,
                    ..of(1, BlockScores::Logits, KeepBlocks::Top(top))
                };
                Some(Step::Blocks(Box::new(selection), top.min(n)))
            }
            _ => None,
        }
    }

    /// Whether [`step`](Self::step) has an answer.
    pub fn steps_on_device(&self) -> bool {
        match &self.method {
            Method::Streamingllm(config) => !config.reindex,
            Method::Dense | Method::Quest(_) | Method::ExactTop(_) => true,
            _ => false,
        }
    }

    /// Tokens of a page whose bounds are kept from token to token, where the method has such.
    pub fn page(&self) -> Option<usize> {
        match &self.method {
            Method::Quest(config) => Some(config.page),
            _ => None,
        }
    }
}
