//! What forward and backward tiles share: panels of queries, gathered blocks of keys, and the pairs that are visible.

use std::ops::Range;

use pulp::Simd;
use sieve_core::AttentionShape;

use super::keys::{Keys, ReadKey};
use super::panel::{Aligned, BLOCK_KEYS, KEY_STEP, LANES};

/// Columns of a panel for this head_dim: 16 up to a head_dim of 16, else 64 where that needs no more padding than 32.
pub(crate) fn panel_width(head_dim: usize) -> usize {
    if head_dim <= 16 {
        16
    } else if head_dim.div_ceil(32) % 2 == 1 {
        32
    } else {
        64
    }
}

/// A tile of queries of one KV head.
#[derive(Clone, Copy)]
pub(crate) struct Tile {
    pub(crate) row: usize,
    pub(crate) kv_head: usize,
    /// First token of the query tile.
    pub(crate) first: usize,
    /// One past the last token of the query tile.
    pub(crate) end: usize,
}

impl Tile {
    /// Query rows: one for each token and head of the group, token by token.
    pub(crate) fn num_rows(&self, shape: AttentionShape) -> usize {
        (self.end - self.first) * shape.group_size()
    }

    /// Token and query head of a row.
    pub(crate) fn token_and_head(&self, shape: AttentionShape, row: usize) -> (usize, usize) {
        let group_size = shape.group_size();
        (self.first + row / group_size, self.kv_head * group_size + row % group_size)
    }
}

/// Rows of one operand (q or d_o), cut into panels of [`LANES`] rows; unused rows are zero.
pub(crate) struct RowPanels<const W: usize> {
    /// Rows transposed, `[num_panels, head_dim panels, W, LANES]`.
    pub(crate) transposed: Vec<Aligned<[[f32; LANES]; W]>>,
    /// Rows as they are, `[num_panels, head_dim panels, LANES, W]`.
    pub(crate) natural: Vec<Aligned<[[f32; W]; LANES]>>,
}

impl<const W: usize> RowPanels<W> {
    pub(crate) fn new() -> Self {
        Self { transposed: Vec::new(), natural: Vec::new() }
    }

    /// Copies `scale * rows` into the natural panels.
    #[inline(always)]
    pub(crate) fn load<'r>(&mut self, rows: impl ExactSizeIterator<Item = &'r [f32]>, head_dim: usize, scale: f32) {
        let columns = head_dim.div_ceil(W);
        let row_panels = rows.len().div_ceil(LANES);
        self.natural.resize(row_panels * columns, Aligned([[0.0; W]; LANES]));
        let used = rows.len();
        for (r, x) in rows.enumerate() {
            for (c, x) in x.chunks(W).enumerate() {
                let row = &mut self.natural[r / LANES * columns + c][r % LANES];
                for (row, &x) in row.iter_mut().zip(x) {
                    *row = scale * x;
                }
                row[x.len()..].fill(0.0);
            }
        }
        for r in used..row_panels * LANES {
            for c in 0..columns {
                self.natural[r / LANES * columns + c][r % LANES].fill(0.0);
            }
        }
    }

    /// Fills the transposed panels from the natural ones.
    #[inline(always)]
    pub(crate) fn transpose(&mut self) {
        self.transposed.resize(self.natural.len(), Aligned([[0.0; LANES]; W]));
        for (transposed, natural) in self.transposed.iter_mut().zip(&self.natural) {
            for (block, rows) in natural.as_chunks::<SQUARE>().0.iter().enumerate() {
                for at in 0..W / SQUARE {
                    let square = rows.each_ref().map(|row| row.as_chunks::<SQUARE>().0[at]);
                    let columns = &mut transposed[at * SQUARE..(at + 1) * SQUARE];
                    for (column, x) in columns.iter_mut().zip(transpose_square(square)) {
                        column.as_chunks_mut::<SQUARE>().0[block] = x;
                    }
                }
            }
        }
    }
}

/// Panels are transposed in squares of this side, the number of f32 lanes of the widest vectors.
const SQUARE: usize = 16;

/// Transposes by four rounds of perfect shuffles; a shuffle is one instruction per vector.
#[inline(always)]
fn transpose_square(mut x: [[f32; SQUARE]; SQUARE]) -> [[f32; SQUARE]; SQUARE] {
    for _ in 0..SQUARE.ilog2() {
        let mut y = [[0.0; SQUARE]; SQUARE];
        for i in 0..SQUARE / 2 {
            for lane in 0..SQUARE / 2 {
                y[2 * i][2 * lane] = x[i][lane];
                y[2 * i][2 * lane + 1] = x[i + SQUARE / 2][lane];
                y[2 * i + 1][2 * lane] = x[i][lane + SQUARE / 2];
                y[2 * i + 1][2 * lane + 1] = x[i + SQUARE / 2][lane + SQUARE / 2];
            }
        }
        x = y;
    }
    x
}

/// Positions of the rows of each panel; -1 for unused rows, which see no key.
#[inline(always)]
pub(crate) fn row_positions(num_rows: usize, position: impl Fn(usize) -> i32, positions: &mut Vec<[i32; LANES]>) {
    positions.clear();
    positions.resize(num_rows.div_ceil(LANES), [-1; LANES]);
    for row in 0..num_rows {
        positions[row / LANES][row % LANES] = position(row);
    }
}

/// The keys of a block that some row of a panel sees.
pub(crate) struct SeenKeys {
    /// Slots of the block; both ends are multiples of [`KEY_STEP`].
    pub(crate) slots: Range<usize>,
    /// Whether the mask hides some of these keys from some row.
    pub(crate) masked: bool,
}

/// Operands of the mask and the biases for the rows of one panel and some keys of a block.
pub(crate) struct Pairs<'s> {
    /// Position of each row, -1 for a row that sees none of the keys.
    pub(crate) positions: &'s [i32; LANES],
    begin: &'s [i32],
    expire: &'s [i32],
    /// Bias of each key, where the mask has biases.
    pub(crate) delta: Option<&'s [f32]>,
    /// Subtracted from the biases of each row: the largest bias that the row sees.
    pub(crate) base: &'s [f32; LANES],
    /// Whether the mask hides some of these pairs.
    pub(crate) masked: bool,
}

impl Pairs<'_> {
    /// Which of the rows at `positions` see key `key`.
    #[inline(always)]
    pub(crate) fn visible<S: Simd>(&self, simd: S, key: usize, positions: S::i32s) -> S::m32s {
        let begun = simd.less_than_or_equal_i32s(simd.splat_i32s(self.begin[key]), positions);
        let not_expired = simd.less_than_i32s(positions, simd.splat_i32s(self.expire[key]));
        simd.and_m32s(begun, not_expired)
    }
}

/// Keys and values gathered from the packed tensor; unused slots are zero and hidden from every query.
pub(crate) struct KeyBlock<const W: usize> {
    /// Keys, `[head_dim panels, BLOCK_KEYS, W]`.
    pub(crate) k: Vec<Aligned<[[f32; W]; BLOCK_KEYS]>>,
    /// Values, `[head_dim panels, BLOCK_KEYS, W]`.
    pub(crate) v: Vec<Aligned<[[f32; W]; BLOCK_KEYS]>>,
    /// The first position that sees each key.
    pub(crate) begin: [i32; BLOCK_KEYS],
    pub(crate) expire: [i32; BLOCK_KEYS],
    pub(crate) delta: [f32; BLOCK_KEYS],
    /// How many slots hold a key, from the first on.
    pub(crate) len: usize,
}

impl<const W: usize> KeyBlock<W> {
    /// A block without a key: every slot is zero and lies behind all queries.
    pub(crate) fn new(head_dim: usize) -> Self {
        let columns = head_dim.div_ceil(W);
        Self {
            k: vec![Aligned([[0.0; W]; BLOCK_KEYS]); columns],
            v: vec![Aligned([[0.0; W]; BLOCK_KEYS]); columns],
            begin: [i32::MAX; BLOCK_KEYS],
            expire: [0; BLOCK_KEYS],
            delta: [0.0; BLOCK_KEYS],
            len: 0,
        }
    }

    /// Copies the keys and values of the tokens in `list`, at most [`BLOCK_KEYS`], for the tile's KV head; `qkv_row` is
    /// the tile's batch row of the packed tensor.
    #[inline(always)]
    pub(crate) fn gather(
        &mut self,
        qkv_row: &[f32],
        shape: AttentionShape,
        keys: &Keys<'_>,
        tile: Tile,
        list: &[ReadKey],
    ) {
        let (d, d_v) = (shape.head_dim, shape.head_dim_v);
        let k_at = (shape.num_heads + tile.kv_head) * d;
        let v_at = (shape.num_heads + shape.num_kv_heads) * d + tile.kv_head * d_v;
        let delta = keys.delta(tile.row, tile.kv_head);
        for (slot, &ReadKey { position, seen: [begin, expire] }) in list.iter().enumerate() {
            let j = position as usize;
            let token = &qkv_row[j * shape.token_len()..(j + 1) * shape.token_len()];
            copy_columns(&token[k_at..k_at + d], slot, &mut self.k);
            copy_columns(&token[v_at..v_at + d_v], slot, &mut self.v);
            self.begin[slot] = begin;
            self.expire[slot] = expire;
            self.delta[slot] = delta.map_or(0.0, |delta| delta[j]);
        }
        self.finish_gather(list.len());
    }

    /// Sets the number of keys, and empties the slots that an earlier, longer list has filled.
    #[inline(always)]
    pub(crate) fn finish_gather(&mut self, len: usize) {
        for slot in len..self.len {
            copy_columns(&[], slot, &mut self.k);
            copy_columns(&[], slot, &mut self.v);
            self.begin[slot] = i32::MAX;
            self.expire[slot] = 0;
            self.delta[slot] = 0.0;
        }
        self.len = len;
    }

    /// Range of the block's slots with all keys that rows at these positions see; `None` when they see none of the
    /// block. Rows at -1 see nothing.
    #[inline(always)]
    pub(crate) fn seen_by(&self, positions: &[i32; LANES]) -> Option<SeenKeys> {
        // The smallest position but -1, which as an unsigned number is the largest.
        let first = positions.iter().fold(u32::MAX, |first, &at| first.min(at as u32)) as i32;
        let [least, last] = positions.iter().fold([i32::MAX, -1], |[least, last], &at| [least.min(at), last.max(at)]);
        let sees = |s: &usize| self.begin[*s] <= last && self.expire[*s] > self.begin[*s].max(first);
        let low = (0..self.len).find(sees)?;
        let high = (0..self.len).rfind(sees)?;
        let slots = low / KEY_STEP * KEY_STEP..(high + 1).next_multiple_of(KEY_STEP);
        let masked = least < 0 || slots.clone().any(|s| self.begin[s] > first || self.expire[s] <= last);
        Some(SeenKeys { slots, masked })
    }

    /// The pairs of rows at `positions` with the keys that [`seen_by`](Self::seen_by) found.
    #[inline(always)]
    pub(crate) fn pairs<'s>(
        &'s self,
        positions: &'s [i32; LANES],
        seen: &SeenKeys,
        base: &'s [f32; LANES],
        has_bias: bool,
    ) -> Pairs<'s> {
        let slots = seen.slots.clone();
        Pairs {
            positions,
            begin: &self.begin[slots.clone()],
            expire: &self.expire[slots.clone()],
            delta: has_bias.then(|| &self.delta[slots]),
            base,
            masked: seen.masked,
        }
    }
}

/// Writes a vector into row `slot` of the panels, its columns divided among them; the rest of the row becomes 0.
#[inline(always)]
pub(crate) fn copy_columns<const W: usize>(x: &[f32], slot: usize, panels: &mut [Aligned<[[f32; W]; BLOCK_KEYS]>]) {
    for (c, panel) in panels.iter_mut().enumerate() {
        let x = &x[(c * W).min(x.len())..((c + 1) * W).min(x.len())];
        match <&[f32; W]>::try_from(x) {
            Ok(whole) => panel[slot] = *whole,
            Err(_) => {
                panel[slot][..x.len()].copy_from_slice(x);
                panel[slot][x.len()..].fill(0.0);
            }
        }
    }
}
