//! Sizes, documents and masks of an attention op.

use sieve_core::{AttentionShape, FarKeys};
use std::ops::{Deref, Range};

/// Sizes of an attention op, and the factor on its logits. The sizes are read as if they were its own fields. A query
/// head p reads KV head `p / (num_heads / num_kv_heads)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScaledShape {
    /// The sizes.
    pub shape: AttentionShape,
    /// Factor on `q . k`, usually `1 / sqrt(head_dim)`.
    pub softmax_scale: f32,
}

impl Deref for ScaledShape {
    type Target = AttentionShape;

    fn deref(&self) -> &AttentionShape {
        &self.shape
    }
}

/// Which document each token belongs to: consecutive ranges of positions within the row.
#[derive(Clone, Copy, Debug)]
pub struct Documents<'a> {
    /// First position of the token's document, `[batch, seq_len]`.
    pub start: &'a [i32],
    /// One past the last position of the token's document, `[batch, seq_len]`.
    pub end: &'a [i32],
}

impl<'a> Documents<'a> {
    /// The bounds of each token's document, `[batch, seq_len]`.
    pub fn new(start: &'a [i32], end: &'a [i32]) -> Self {
        Self { start, end }
    }
}

/// Which keys a query sees, always inside its document and never later than itself.
#[derive(Clone, Copy, Debug)]
pub enum Mask<'a> {
    /// All keys up to the query's own.
    Causal,
    /// The last keys, as many as this; the query's own is one of them.
    Window(usize),
    /// The last keys, as in [`Window`](Self::Window), and others farther away.
    Far(usize, FarKeys),
    /// The keys that have not expired, each with a bias that is added to its logits.
    Expire {
        /// First position that no longer sees the key, `[batch, num_kv_heads, seq_len]`; at most the document's end.
        expire: &'a [i32],
        /// Bias of each key, added to the logit of every query, `[batch, num_kv_heads, seq_len]`.
        delta: &'a [f32],
    },
    /// The keys in the blocks that the query chose.
    Chosen(ChosenBlocks<'a>),
}

/// Which blocks of keys each query sees.
#[derive(Clone, Copy, Debug)]
pub struct ChosenBlocks<'a> {
    /// Block numbers, counted from the first token of the query's document, `[batch, seq_len, num_kv_heads, count]`. No
    /// block may come after the query's own; negative numbers are ignored.
    pub indices: &'a [i32],
    /// Blocks per query.
    pub count: usize,
    /// Keys per block.
    pub block_size: usize,
}

impl<'a> ChosenBlocks<'a> {
    /// The blocks that one token of the batch chose for one of `num_kv_heads` heads.
    pub(crate) fn of(&self, token: usize, num_kv_heads: usize, kv_head: usize) -> &'a [i32] {
        &self.indices[(token * num_kv_heads + kv_head) * self.count..][..self.count]
    }
}

impl ScaledShape {
    /// Sizes of a call whose values are as wide as its keys, with the usual softmax scale, `1 / sqrt(head_dim)`.
    pub fn new([batch, seq_len]: [usize; 2], heads: [usize; 2], head_dim: usize) -> Self {
        let shape = AttentionShape::new(batch, seq_len, heads, [head_dim; 2]);
        Self { shape, softmax_scale: 1.0 / (head_dim as f32).sqrt() }
    }

    /// These sizes with values of width `head_dim_v` instead of `head_dim`, which latent attention needs.
    ///
    /// # Panics
    /// Unless `0 < head_dim_v <= head_dim`.
    pub fn with_value_width(self, head_dim_v: usize) -> Self {
        assert!(0 < head_dim_v && head_dim_v <= self.head_dim, "attention: head_dim_v must be in 1..=head_dim");
        Self { shape: AttentionShape { head_dim_v, ..self.shape }, ..self }
    }

    /// Panics unless sizes, documents and mask fit each other.
    pub(super) fn check(&self, documents: Documents<'_>, mask: Mask<'_>) {
        assert!(self.num_kv_heads > 0 && self.head_dim > 0, "attention: num_kv_heads and head_dim must not be 0");
        assert!(self.num_heads > 0, "attention: num_heads must not be 0");
        assert_eq!(self.num_heads % self.num_kv_heads, 0, "attention: num_heads is not a multiple of num_kv_heads");
        documents.check(self.batch, self.seq_len);
        let has_no_window = matches!(mask, Mask::Window(0) | Mask::Far(0, _));
        assert!(!has_no_window, "attention: a window must hold at least the query's own key");
        if let Mask::Chosen(chosen) = mask {
            assert!(chosen.block_size > 0, "attention: a block must hold at least one key");
            assert_eq!(
                chosen.indices.len(),
                self.batch * self.seq_len * self.num_kv_heads * chosen.count,
                "attention: the chosen blocks are not [batch, seq_len, num_kv_heads, count]"
            );
        }
        if let Mask::Expire { expire, delta } = mask {
            let keys = self.batch * self.num_kv_heads * self.seq_len;
            assert_eq!(expire.len(), keys, "attention: expire is not [batch, num_kv_heads, seq_len]");
            assert_eq!(delta.len(), keys, "attention: delta is not [batch, num_kv_heads, seq_len]");
        }
    }

    pub(super) fn check_operands(&self, op: &str, qkv: &[f32], o: &[f32], lse: &[f32]) {
        let tokens = self.batch * self.seq_len;
        assert_eq!(qkv.len(), tokens * self.token_len(), "{op}: qkv has the wrong size");
        assert_eq!(o.len(), tokens * self.num_heads * self.head_dim_v, "{op}: o has the wrong size");
        assert_eq!(lse.len(), tokens * self.num_heads, "{op}: lse has the wrong size");
    }
}

impl Documents<'_> {
    /// The documents of one batch row in order, each as its range of positions.
    pub(crate) fn of_row(&self, row: usize, seq_len: usize) -> impl Iterator<Item = Range<usize>> {
        let end = &self.end[row * seq_len..(row + 1) * seq_len];
        let mut first = 0;
        std::iter::from_fn(move || {
            let next = *end.get(first)? as usize;
            let document = first..next;
            first = next;
            Some(document)
        })
    }

    /// Panics unless the documents of every row are consecutive ranges that cover it.
    pub(crate) fn check(&self, batch: usize, seq_len: usize) {
        let tokens = batch * seq_len;
        assert_eq!(self.start.len(), tokens, "documents.start is not [batch, seq_len]");
        assert_eq!(self.end.len(), tokens, "documents.end is not [batch, seq_len]");
        for row in 0..batch {
            let mut first = 0;
            while first < seq_len {
                let end = self.end[row * seq_len + first];
                assert!(
                    end as i64 > first as i64 && end as i64 <= seq_len as i64,
                    "documents: row {row} has a document [{first}, {end}) outside (0, {seq_len}]"
                );
                for token in row * seq_len + first..row * seq_len + end as usize {
                    assert!(
                        self.start[token] as i64 == first as i64 && self.end[token] == end,
                        "documents: tokens of [{first}, {end}) in row {row} disagree about it"
                    );
                }
                first = end as usize;
            }
        }
    }
}
