//! PBS-Attn (arXiv:2510.21270): keys sorted by importance inside segments, so that important keys share blocks.

use rayon::prelude::*;
use sieve_core::{KeyScores, SlotOrder};

use crate::keep::{keep_mass, softmax};
use crate::permute::{self, Orders, Segments, order_queries, sort_ranges};
use crate::pool::{causal_probabilities, key_means, last_rows, query_means, scores};
use crate::prefill::xattention::{XattentionConfig, add_block_softmax};
use crate::prelude::*;
use crate::vector::add;

choices! {
    /// How blocks of permuted keys are scored.
    pub enum PbsSelect {
        /// Dot products of block means.
        Meanpool,
        /// Sums over antidiagonals, as in `xattention`.
        Xattention,
    }

    /// Whether keys, queries or both are permuted.
    pub enum Permute {
        /// Keys alone.
        Keys,
        /// Queries alone.
        Queries,
        /// Queries and keys.
        Both,
        /// Nothing: the baseline for the permutation's gain.
        None,
    }

    /// Which permutation comes first with [`Permute::Both`]; the second sees its result.
    pub enum PermuteOrder {
        /// Keys first, then queries.
        KeysFirst,
        /// Queries first, then keys.
        QueriesFirst,
    }

    /// Which heads share a permutation of the keys.
    pub enum PermutePer {
        /// One permutation for each KV head; importance is averaged over its query heads.
        Kv,
        /// One permutation for each query head, as in the published code.
        Query,
    }
}

settings! {
    /// Settings of the prefill method `pbs`.
    pub struct PbsConfig {
        /// Block size in tokens; divides `segment`.
        pub block: usize = 128,
        /// Tokens of a segment, inside which keys move.
        pub segment: usize = 256,
        /// Share of the estimated mass over earlier segments that stays.
        pub tau: f64 = 0.9,
        /// How blocks of permuted keys are scored.
        pub select: PbsSelect = PbsSelect::Meanpool,
        /// With `select=xattention`, tokens on a side of the squares of scores whose antidiagonals are summed. Divides
        /// `block`.
        pub stride: usize = 8,
        /// Whether keys, queries or both are permuted.
        pub permute: Permute = Permute::Keys,
        /// Which permutation comes first with `permute=both`.
        pub order: PermuteOrder = PermuteOrder::KeysFirst,
        /// Which heads share a permutation of the keys.
        pub perm: PermutePer = PermutePer::Kv,
    }
    small
        "pbs:block=16,segment=32,tau=0.5",
        "pbs:block=16,segment=32,tau=0.5,select=xattention,stride=4,gqa=union",
        "pbs:block=16,segment=32,tau=0.5,permute=queries",
        "pbs:block=16,segment=32,tau=0.5,permute=none,gqa=mean",
        "pbs:block=16,segment=32,tau=0.5,permute=both,order=queries_first,perm=query";
    everything
        "pbs:tau=1,block=16,segment=32",
        "pbs:tau=1,block=16,segment=32,permute=both,select=xattention,stride=4",
        "pbs:tau=1,block=16,segment=32,permute=queries";
}

impl PrefillMethod for PbsConfig {
    fn check(&self, gqa: GqaPolicy) -> Result<(), SelectError> {
        let rules = Rules("pbs");
        rules.divides("block", self.block, "segment", self.segment)?;
        rules.divides("stride", self.stride, "block", self.block)?;
        rules.share("tau", self.tau)?;
        if gqa != GqaPolicy::PerQuery && self.perm == PermutePer::Query {
            return rules.fail(
                "perm=query gives the heads of a group different keys per block, so they cannot share a list",
                "use perm=kv, or gqa=per_query",
            );
        }
        match self.permute {
            Permute::Keys | Permute::None => Ok(()),
            Permute::Queries | Permute::Both => rules.no_mean(
                gqa,
                "gqa=mean averages blocks of queries, which permute=queries moves differently for each head",
            ),
        }
    }

    fn select(&self, call: &Call<'_>, gqa: GqaPolicy) -> Selected {
        // Only blocks of earlier segments compete; a call within one segment has none.
        if call.shape.num_keys <= self.segment {
            return Selected::dense(call.shape);
        }
        let segments = Segments::new(call, self.segment, self.block);
        let orders = || self.orders(call, segments);
        let rows = |heads: &[usize], orders: &Orders| self.rows(call, segments, heads, orders);
        let causal = true;
        permute::select(call, segments, gqa, causal, orders, rows)
    }

    /// Device steps exist only if queries stay, and keys move per KV head or stay.
    fn steps(&self, call: &Call<'_>, _: GqaPolicy) -> Option<BlockSelection> {
        let fits = match self.permute {
            Permute::Keys => self.perm == PermutePer::Kv,
            Permute::None => true,
            Permute::Queries | Permute::Both => false,
        };
        let scores = match self.select {
            PbsSelect::Meanpool => BlockScores::Means { variances: 0.0 },
            PbsSelect::Xattention => BlockScores::Cells { stride: self.stride, reversed: true, norm: 1.0 },
        };
        let mut selection = BlockSelection::new(call.shape, self.block, scores, KeepBlocks::Mass(self.tau));
        selection.order = Some(SlotOrder {
            segment: self.segment,
            keys: (self.permute == Permute::Keys).then_some(KeyScores::Attention(self.block)),
            moves_queries: false,
            keeps_first: true,
        });
        (fits && call.shape.num_keys > self.segment).then_some(selection)
    }

    fn knob(&self) -> Option<Knob> {
        Some(("tau", SHARES))
    }
}

impl PbsConfig {
    /// The permutations by the settings `permute`, `order` and `perm`. A head whose importance is NaN keeps its order.
    fn orders(&self, call: &Call<'_>, segments: Segments) -> Orders {
        let own_order = vec![unmoved(call); call.shape.num_kv_heads];
        match self.order {
            PermuteOrder::KeysFirst => {
                // The queries still have their own order.
                let keys = self.key_orders(call, segments, &[]);
                let queries = self.query_orders(call, segments, &keys);
                Orders { keys, queries }
            }
            PermuteOrder::QueriesFirst => {
                let queries = self.query_orders(call, segments, &own_order);
                let keys = self.key_orders(call, segments, &queries);
                Orders { keys, queries }
            }
        }
    }

    /// The order of the keys for each head or KV head (`perm`), by their importance to the queries, which are in the
    /// order `queries`; unmoved where `permute` says so.
    fn key_orders(&self, call: &Call<'_>, segments: Segments, queries: &[Vec<i32>]) -> Vec<Vec<i32>> {
        let (num_heads, num_kv_heads) = (call.shape.num_heads, call.shape.num_kv_heads);
        if matches!(self.permute, Permute::Queries | Permute::None) {
            return vec![unmoved(call); num_kv_heads];
        }
        let heads_of_order: Vec<Vec<usize>> = match self.perm {
            PermutePer::Kv => (0..num_kv_heads).map(|kv_head| call.group(kv_head).collect()).collect(),
            PermutePer::Query => (0..num_heads).map(|head| vec![head]).collect(),
        };
        let order = |heads: &Vec<usize>| key_order(call, segments, heads, queries).unwrap_or_else(|| unmoved(call));
        heads_of_order.par_iter().map(order).collect()
    }

    /// The order of each head's queries, by the means of key tiles in the order `keys`; empty where `permute` leaves
    /// queries unmoved.
    fn query_orders(&self, call: &Call<'_>, segments: Segments, keys: &[Vec<i32>]) -> Vec<Vec<i32>> {
        if matches!(self.permute, Permute::Keys | Permute::None) {
            return Vec::new();
        }
        let num_heads = call.shape.num_heads;
        let order = |head: usize| {
            let keys = &keys[head * keys.len() / num_heads];
            let means = key_means(call, call.kv_head(head), segments.tiles, |slot| keys[slot] as usize);
            order_queries(call, head, segments, &means)
        };
        (0..num_heads).into_par_iter().map(order).collect()
    }

    /// The key tiles that some heads of a group keep together; `None` on NaN.
    fn rows(&self, call: &Call<'_>, segments: Segments, heads: &[usize], orders: &Orders) -> Option<KeptRows> {
        let tiles = segments.tiles;
        let order = orders.keys_of(heads[0], call.shape.num_heads);
        let tile_of_token_0 = order.iter().position(|&key| key == 0).unwrap_or(0) / self.block;
        let mut masses: Vec<Vec<f32>> = vec![Vec::new(); tiles.num_query_tiles()];
        for &head in heads {
            let rows = match self.select {
                PbsSelect::Meanpool => self.pooled(call, segments, head, orders)?,
                PbsSelect::Xattention => self.antidiagonals(call, segments, head, orders)?,
            };
            for (mass, row) in masses.iter_mut().zip(rows) {
                add(mass, row);
            }
        }
        Some(gqa::rows(tiles, |i| {
            let mut kept = keep_mass(&masses[i], self.tau);
            kept.extend(segments.own(i));
            // Token 0 is the attention sink.
            kept.push(tile_of_token_0);
            kept
        }))
    }

    /// Softmax over blocks of earlier segments by products of means, `[query tiles][earlier blocks]`; `None` on NaN.
    fn pooled(&self, call: &Call<'_>, segments: Segments, head: usize, orders: &Orders) -> Option<Vec<Vec<f32>>> {
        let (shape, tiles) = (call.shape, segments.tiles);
        let order = orders.keys_of(head, shape.num_heads);
        let k = key_means(call, call.kv_head(head), tiles, |slot| order[slot] as usize);
        let q = query_means(call, head, tiles, |slot| orders.query_row(head, slot));
        let mut all = scores(&q, &k, shape.head_dim, shape.softmax_scale());
        all.chunks_exact_mut(tiles.num_key_tiles())
            .enumerate()
            .map(|(i, row)| {
                let row = &mut row[..segments.earlier(i)];
                softmax(row).then(|| row.to_vec())
            })
            .collect()
    }

    /// Softmax over blocks of earlier segments by antidiagonal sums, `[query tiles][earlier blocks]`. A cell is
    /// `stride` tokens; the cells of queries count from the tile's first row. `None` on NaN.
    fn antidiagonals(
        &self,
        call: &Call<'_>,
        segments: Segments,
        head: usize,
        orders: &Orders,
    ) -> Option<Vec<Vec<f32>>> {
        let (tiles, order) = (segments.tiles, orders.keys_of(head, call.shape.num_heads));
        let cells = XattentionConfig { block: self.block, stride: self.stride, ..XattentionConfig::default() };
        let (stride, width) = (self.stride, self.stride * call.shape.head_dim);
        let keys = cells.cells_of_keys(call, head, |slot| order[slot] as usize);
        (0..tiles.num_query_tiles())
            .into_par_iter()
            .map(|i| {
                let earlier = segments.earlier(i);
                let rows = tiles.rows(i);
                let queries = cells.cells_of_queries(call, 0..rows.len().div_ceil(stride), |offset| {
                    let slot = rows.start + offset;
                    (slot < rows.end).then(|| call.query(head, orders.query_row(head, slot)))
                });
                let cols = earlier * self.block / stride;
                let mut sum = vec![0.0; earlier];
                if cols == 0 {
                    return Some(sum);
                }
                let scale = call.shape.softmax_scale() / stride as f32;
                for row in scores(&queries, &keys[..cols * width], width, scale).chunks_exact_mut(cols) {
                    add_block_softmax(row, self.block / stride, &mut sum)?;
                }
                Some(sum)
            })
            .collect()
    }
}

/// The keys in their own order.
fn unmoved(call: &Call<'_>) -> Vec<i32> {
    (0..call.shape.num_keys as i32).collect()
}

/// Keys of each whole segment by falling importance: the attention from the last block of queries (eq. 10; inside that
/// block a query sees no key after its own position). `None` on NaN.
fn key_order(call: &Call<'_>, segments: Segments, heads: &[usize], queries: &[Vec<i32>]) -> Option<Vec<i32>> {
    let n = call.shape.num_keys;
    let rows = last_rows(call, segments.tiles.key_tile);
    let mut importance = vec![0.0; n];
    for &head in heads {
        // Where queries are permuted, the last queries are the rows in the last block of slots, not the last rows of
        // the call.
        let rows: Vec<usize> = match queries.get(head) {
            Some(order) => order[rows.clone()].iter().map(|&row| row as usize).collect(),
            None => rows.clone().collect(),
        };
        // Consecutive rows take one GEMM.
        if rows.windows(2).all(|w| w[0] + 1 == w[1]) {
            let p = causal_probabilities(call, head, rows[0]..rows[0] + rows.len())?;
            for row in p.chunks_exact(call.shape.context() + rows[0] + rows.len()) {
                importance.iter_mut().zip(row).for_each(|(sum, &p)| *sum += p);
            }
        } else {
            for row in rows {
                let p = causal_probabilities(call, head, row..row + 1)?;
                importance.iter_mut().zip(&p).for_each(|(sum, &p)| *sum += p);
            }
        }
    }
    Some(sort_ranges(n, segments.whole(n), &importance))
}
