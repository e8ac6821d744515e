//! Rows of tokens, and how a loader makes them.

/// The label of a token without a prediction: before a token that the model only reads (of a prompt, or what others
/// say in a chat), at a document's end, and in padding.
pub const IGNORE_LABEL: i32 = -100;

/// Document id of padding tokens.
pub const PAD_DOCUMENT: u32 = u32::MAX;

/// The order in which documents are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// For training: another permutation in each epoch, determined by the seed. Tokens at the end of an epoch that do
    /// not fill a row are left out; they differ from epoch to epoch.
    Shuffled {
        /// Seed of the epochs' permutations.
        seed: u64,
    },
    /// For validation: the order of the shard, each document once, the last row padded.
    Sequential,
}

/// How documents are packed into rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Packing {
    /// Documents are concatenated: a row may hold many, and a document may continue in the next row.
    Concatenated,
    /// A row holds one document, or `seq_len` tokens of it, and then padding. The last token of a document, which has
    /// no label, is left out. For comparison with programs without packing.
    OneDocumentPerRow,
}

/// Settings of a data loader.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoaderConfig {
    /// Tokens of each row.
    pub seq_len: usize,
    /// The order in which documents are read.
    pub order: Order,
    /// How documents are packed into rows.
    pub packing: Packing,
    /// Rows of the model's embedding; a token id of this size or more is an error.
    pub vocab_size: usize,
    /// Token id that fills rows up.
    pub pad_id: u32,
}

/// Rows of tokens. Every list is `[batch, seq_len]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// Index of the first row among all rows of the run.
    pub first_sample: u64,
    /// Number of rows.
    pub batch: usize,
    /// Tokens of each row.
    pub seq_len: usize,
    /// Token ids, `[batch, seq_len]`.
    pub tokens: Vec<u32>,
    /// The next token of the same document, or [`IGNORE_LABEL`].
    pub labels: Vec<i32>,
    /// Column where the token's segment begins. A segment is the part of a row that holds one document, or padding.
    pub doc_start: Vec<u32>,
    /// Column where the token's segment ends, exclusive.
    pub doc_end: Vec<u32>,
    /// Position in the segment, from 0, even if the document began in an earlier row.
    pub positions: Vec<u32>,
    /// Index of the token's document in the shard, or [`PAD_DOCUMENT`].
    pub documents: Vec<u32>,
}

impl Batch {
    /// Number of tokens with a label.
    pub fn num_labels(&self) -> usize {
        self.labels.iter().filter(|&&label| label != IGNORE_LABEL).count()
    }

    /// Makes each token that no label depends on padding, and a document of its own, so that its query attends only to
    /// itself. Such a token is padding, or the last one of a segment without a label of its own: the end-of-document
    /// token, which rows of one document lack.
    pub fn part_padding(&mut self) {
        for at in 0..self.documents.len() {
            let column = (at % self.seq_len) as u32;
            let start = at - (column - self.doc_start[at]) as usize;
            let is_last = self.doc_end[at] == column + 1 && self.labels[at] == IGNORE_LABEL;
            if is_last && self.documents[at] != PAD_DOCUMENT {
                self.doc_end[start..at].fill(column);
                self.documents[at] = PAD_DOCUMENT;
            }
            if self.documents[at] == PAD_DOCUMENT {
                (self.doc_start[at], self.doc_end[at], self.positions[at]) = (column, column + 1, 0);
            }
        }
    }

    /// A batch whose lists are empty, with room for `batch` rows.
    pub(crate) fn empty(first_sample: u64, batch: usize, seq_len: usize) -> Self {
        let len = batch * seq_len;
        Self {
            first_sample,
            batch,
            seq_len,
            tokens: Vec::with_capacity(len),
            labels: Vec::with_capacity(len),
            doc_start: Vec::with_capacity(len),
            doc_end: Vec::with_capacity(len),
            positions: Vec::with_capacity(len),
            documents: Vec::with_capacity(len),
        }
    }

    /// Appends a segment at column `start` of the current row to all lists but `tokens` and `labels`.
    pub(crate) fn push_segment(&mut self, document: u32, start: usize, len: usize) {
        self.doc_start.extend(std::iter::repeat_n(start as u32, len));
        self.doc_end.extend(std::iter::repeat_n((start + len) as u32, len));
        self.positions.extend(0..len as u32);
        self.documents.extend(std::iter::repeat_n(document, len));
    }

    /// Fills the current row up from column `start`.
    pub(crate) fn push_padding(&mut self, pad_id: u32, start: usize) {
        let len = self.seq_len - start;
        self.tokens.extend(std::iter::repeat_n(pad_id, len));
        self.labels.extend(std::iter::repeat_n(IGNORE_LABEL, len));
        self.push_segment(PAD_DOCUMENT, start, len);
    }
}
