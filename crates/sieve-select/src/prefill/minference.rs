//! MInference (arXiv:2407.02490): a pattern per head, from a file or from a search on one long sample.

use std::path::Path;

use serde_json::{Map, Value, json};

use sieve_core::{HeadRule, TokenWindow};

use crate::attention::block_sparse_attention;
use crate::error::read_json;
use crate::measure::dense_attention;
use crate::prefill::a_shape::{tiles_of_ranges, window};
use crate::prefill::block_sparse::best_blocks;
use crate::prefill::vertical_slash::{TILE, VerticalSlashConfig};
use crate::prelude::*;

settings! {
    /// Settings of the prefill method `minference`.
    pub struct MinferenceConfig {
        /// File with a pattern per layer and head, as MInference writes it; empty: vertical-slash (1000, 6096)
        /// everywhere.
        pub pattern: String = String::new(),
        /// The parsed patterns of that file.
        #[serde(skip)]
        pub patterns: PatternFile = PatternFile::default(),
    }
    small "minference";
    everything "minference";
}

/// The sparsity pattern of one query head.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Pattern {
    /// The first and the last tokens of the text.
    AShape {
        /// First tokens of the text that stay.
        n_init: usize,
        /// Last tokens before each query that stay.
        n_local: usize,
    },
    /// Key columns and diagonals of the score matrix.
    VerticalSlash {
        /// Columns kept: the keys with the most attention.
        vertical: usize,
        /// Diagonals kept: the distances with the most attention.
        slash: usize,
    },
    /// The best blocks of 64 tokens, by their means.
    BlockSparse {
        /// Blocks that a row of blocks keeps.
        topk: usize,
    },
    /// The best eighth of the blocks, by their means.
    BlockSparseEighth,
}

/// Patterns per layer and head; a head without one takes vertical-slash (1000, 6096).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PatternFile {
    /// A pattern for each layer and query head, `[layers][heads]`.
    pub layers: Vec<Vec<Option<Pattern>>>,
}

/// Pattern of heads that the file does not name.
const DEFAULT: Pattern = Pattern::VerticalSlash { vertical: 1000, slash: 6096 };

/// Patterns that the search compares for each head.
const CANDIDATES: [Pattern; 6] = [
    Pattern::AShape { n_init: 100, n_local: 800 },
    Pattern::VerticalSlash { vertical: 30, slash: 800 },
    Pattern::VerticalSlash { vertical: 100, slash: 750 },
    Pattern::VerticalSlash { vertical: 500, slash: 700 },
    Pattern::VerticalSlash { vertical: 3500, slash: 100 },
    Pattern::BlockSparseEighth,
];

impl PrefillMethod for MinferenceConfig {
    fn select(&self, call: &Call<'_>, _: GqaPolicy) -> Selected {
        of_patterns(call, &self.patterns.of(call))
    }

    /// `None` if a head of the layer has the pattern a-shape or keeps no block: only the host selects so.
    fn steps(&self, call: &Call<'_>, _: GqaPolicy) -> Option<BlockSelection> {
        let means = BlockScores::Means { variances: 0.0 };
        let mut selection = BlockSelection::new(call.shape, TILE, means, KeepBlocks::Mass(1.0));
        for same in self.patterns.of(call).chunk_by(|a, b| a == b) {
            let (scores, keep) = match same[0] {
                Pattern::VerticalSlash { vertical, slash } => {
                    let lines = VerticalSlashConfig { vertical, slash }.lines(call.shape);
                    (lines.scores.by, lines.keep.by)
                }
                Pattern::BlockSparse { topk } if topk > 0 => (means, KeepBlocks::Top(topk)),
                Pattern::BlockSparseEighth => (means, KeepBlocks::Share(0.125)),
                Pattern::AShape { .. } | Pattern::BlockSparse { .. } => return None,
            };
            let first = selection.head_rules.last().map_or(0, |rule: &HeadRule| rule.heads.end);
            let heads = first..first + same.len();
            selection.head_rules.push(HeadRule { heads, scores, keep });
        }
        Some(selection)
    }

    fn takes_gqa(&self) -> bool {
        false
    }
}

/// A mask of one pattern per query head.
fn of_patterns(call: &Call<'_>, patterns: &[Pattern]) -> Selected {
    let tiles = Tiles::new(call.shape, TILE, TILE);
    let mut chosen = gqa::mask(call, tiles, GqaPolicy::PerQuery, |heads| match patterns[heads[0]] {
        Pattern::AShape { n_init, n_local } => Some(tiles_of_ranges(tiles, n_init, n_local)),
        Pattern::VerticalSlash { vertical, slash } => VerticalSlashConfig { vertical, slash }.rows(call, tiles, heads),
        Pattern::BlockSparse { topk } => best_blocks(call, tiles, heads, |_| topk),
        Pattern::BlockSparseEighth => best_blocks(call, tiles, heads, |blocks| blocks.div_ceil(8)),
    });
    let everything = TokenWindow { init: 0, local: i32::MAX };
    let windows: Vec<TokenWindow> = patterns
        .iter()
        .map(|pattern| match *pattern {
            Pattern::AShape { n_init, n_local } => window(n_init, n_local),
            _ => everything,
        })
        .collect();
    if windows.iter().any(|window| *window != everything) {
        chosen.mask.set_windows(&windows);
    }
    let count = |wanted: fn(&Pattern) -> bool| patterns.iter().filter(|pattern| wanted(pattern)).count();
    chosen.stats.patterns = vec![
        ("a_shape", count(|p| matches!(p, Pattern::AShape { .. }))),
        ("vertical_slash", count(|p| matches!(p, Pattern::VerticalSlash { .. }))),
        ("block_sparse", count(|p| matches!(p, Pattern::BlockSparse { .. } | Pattern::BlockSparseEighth))),
    ];
    chosen
}

/// For each query head of one long sample: the candidate that keeps the most probability mass of dense attention, and
/// that mass, 0 to 1.
///
/// # Errors
/// None for a call that passed [`Call::new`].
pub fn search_patterns(call: &Call<'_>) -> Result<Vec<(Pattern, f64)>, SelectError> {
    let rows = call.shape.num_queries;
    let dense = dense_attention(call)?;
    // Every mass is above -1.
    let mut best = vec![(DEFAULT, -1.0); call.shape.num_heads];
    for pattern in CANDIDATES {
        let chosen = of_patterns(call, &vec![pattern; call.shape.num_heads]);
        let sparse = block_sparse_attention(call, &chosen)?;
        for (head, best) in best.iter_mut().enumerate() {
            let lse = |x: &[f32]| x[head * rows..(head + 1) * rows].to_vec();
            let mass = crate::measure::recall(&lse(&sparse.lse), &lse(&dense.lse));
            if mass > best.1 {
                *best = (pattern, mass);
            }
        }
    }
    Ok(best)
}

impl PatternFile {
    /// The pattern of each query head of a call.
    fn of(&self, call: &Call<'_>) -> Vec<Pattern> {
        let named = self.layers.get(call.layer).map_or(&[][..], Vec::as_slice);
        let of = |head: usize| named.get(head).copied().flatten().unwrap_or(DEFAULT);
        (0..call.shape.num_heads).map(of).collect()
    }

    /// Reads a file as MInference writes it: per layer an object from head to `[type, v, s, …]`.
    ///
    /// # Errors
    /// A file that cannot be read, or an invalid pattern.
    pub fn read(path: &Path) -> Result<Self, SelectError> {
        let hint = "the file is a JSON list with one object per layer: \
                    {\"0\": [\"vertical_and_slash\", 1000, 6096], …}";
        let problem = |problem: String| SelectError::file(path, hint, problem);
        let layers: Vec<Map<String, Value>> = read_json(path, hint)?;
        if layers.is_empty() {
            return Err(problem("it has no layer".to_owned()));
        }
        let mut file = Self::default();
        for (index, layer) in layers.iter().enumerate() {
            let mut heads = Vec::new();
            for (head, value) in layer {
                let place = || format!("layer {index}, head {head}: {value}");
                let at: usize = head.parse().map_err(|_| problem(format!("{} has no head number", place())))?;
                if at > 4096 {
                    return Err(problem(format!("{} is beyond any model", place())));
                }
                if at >= heads.len() {
                    heads.resize(at + 1, None);
                }
                heads[at] = Some(pattern_of(value).ok_or_else(|| problem(format!("{} is not a pattern", place())))?);
            }
            file.layers.push(heads);
        }
        Ok(file)
    }

    /// The patterns as the JSON text of a pattern file.
    pub fn to_json(&self) -> String {
        let head = |(head, pattern): (usize, &Option<Pattern>)| {
            let value = match (*pattern)? {
                Pattern::AShape { n_init, n_local } => json!(["stream_llm", n_init, n_local]),
                Pattern::VerticalSlash { vertical, slash } => json!(["vertical_and_slash", vertical, slash]),
                // MInference's files have numbers here that `pattern_of` does not read.
                Pattern::BlockSparse { topk } => json!(["block_sparse", topk, 1]),
                Pattern::BlockSparseEighth => json!(["block_sparse_eighth", 0, 0]),
            };
            Some((head.to_string(), value))
        };
        let layer = |heads: &Vec<Option<Pattern>>| Value::Object(heads.iter().enumerate().filter_map(head).collect());
        Value::Array(self.layers.iter().map(layer).collect()).to_string()
    }
}

/// The pattern `[type, v, s, …]` of a head in a file; `None` if it is none.
fn pattern_of(value: &Value) -> Option<Pattern> {
    let number = |at: usize| value.get(at)?.as_u64().map(|x| x as usize);
    match value.get(0)?.as_str()? {
        "vertical_and_slash" | "vertical_slash" => {
            Some(Pattern::VerticalSlash { vertical: number(1)?, slash: number(2)? })
        }
        "stream_llm" | "a_shape" => {
            Some(Pattern::AShape { n_init: number(1)?, n_local: number(2).filter(|&n| n > 0)? })
        }
        "block_sparse" => Some(Pattern::BlockSparse { topk: number(1)? }),
        "block_sparse_eighth" => Some(Pattern::BlockSparseEighth),
        _ => None,
    }
}
