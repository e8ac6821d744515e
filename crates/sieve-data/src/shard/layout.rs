//! Checks an `.idx` file and finds documents in it.

use std::ops::Range;

use super::{HEADER_BYTES, MAGIC, TokenDtype, VERSION};

/// The sizes in the header of a checked `.idx` file. The bytes of the file are passed to each method, so that they can
/// stay memory-mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) dtype: TokenDtype,
    pub(super) num_sequences: u64,
    pub(super) num_documents: u64,
    pub(super) num_tokens: u64,
}

impl Layout {
    /// Checks every entry of `idx`, at the offsets of the table in [`super`], against the others and against the size
    /// of the `.bin` file.
    ///
    /// # Errors
    /// What is wrong with the file, in words.
    pub(super) fn check(idx: &[u8], bin_bytes: u64) -> Result<Self, String> {
        let idx_bytes = idx.len() as u64;
        if idx_bytes < HEADER_BYTES {
            return Err(format!("{idx_bytes} bytes are fewer than the header's {HEADER_BYTES}"));
        }
        if &idx[..MAGIC.len()] != MAGIC {
            return Err("does not begin with MMIDIDX".into());
        }
        let version = read_u64(idx, 9);
        if version != VERSION {
            return Err(format!("version {version}; only version 1 is known"));
        }
        let dtype = match idx[17] {
            4 => TokenDtype::I32,
            8 => TokenDtype::U16,
            code => return Err(format!("dtype code {code}; only 4 (int32) and 8 (uint16) hold token ids")),
        };
        let (num_sequences, num_boundaries) = (read_u64(idx, 18), read_u64(idx, 26));
        let wanted = num_sequences
            .checked_mul(12)
            .and_then(|bytes| bytes.checked_add(num_boundaries.checked_mul(8)?))
            .and_then(|bytes| bytes.checked_add(HEADER_BYTES));
        if wanted != Some(idx_bytes) {
            let wanted = wanted.map_or("more than can be".into(), |bytes| bytes.to_string());
            return Err(format!(
                "{idx_bytes} bytes, but {num_sequences} sequences and {num_boundaries} document boundaries \
                 take {wanted}"
            ));
        }
        if num_boundaries == 0 {
            return Err("it lacks document boundaries; even an empty shard has one".into());
        }
        // From here on every table lies inside `idx`.
        let mut layout = Self { dtype, num_sequences, num_documents: num_boundaries - 1, num_tokens: 0 };
        layout.num_tokens = layout.check_sequences(idx)?;
        layout.check_documents(idx)?;
        // No overflow: `check_sequences` has computed this product.
        if layout.num_tokens * dtype.num_bytes() != bin_bytes {
            return Err(format!(
                "{} tokens of {} bytes, but the .bin file has {bin_bytes} bytes",
                layout.num_tokens,
                dtype.num_bytes()
            ));
        }
        Ok(layout)
    }

    /// Checks that the sequences lie one after another. Returns the number of their tokens.
    fn check_sequences(&self, idx: &[u8]) -> Result<u64, String> {
        let mut next_byte = 0i64;
        for sequence in 0..self.num_sequences {
            let length = read_i32(idx, HEADER_BYTES + 4 * sequence);
            if length < 0 {
                return Err(format!("sequence {sequence} has length {length}"));
            }
            let pointer = self.pointer(idx, sequence);
            if pointer != next_byte {
                return Err(format!(
                    "sequence {sequence} begins at byte {pointer}, but the one before ends at {next_byte}"
                ));
            }
            let bytes = i64::from(length) * self.dtype.num_bytes() as i64;
            next_byte = next_byte.checked_add(bytes).ok_or("the lengths add up to more than can be")?;
        }
        Ok(next_byte as u64 / self.dtype.num_bytes())
    }

    /// Checks that the documents' boundaries ascend from 0 to the number of sequences.
    fn check_documents(&self, idx: &[u8]) -> Result<(), String> {
        let mut before = 0;
        for document in 0..=self.num_documents {
            let boundary = self.boundary(idx, document);
            if document == 0 && boundary != 0 {
                return Err(format!("the first document begins at sequence {boundary}, not 0"));
            }
            if boundary < before {
                return Err(format!("document boundary {document} is {boundary}, below the one before ({before})"));
            }
            before = boundary;
        }
        if before as u64 != self.num_sequences {
            return Err(format!("the last document ends at sequence {before} of {}", self.num_sequences));
        }
        Ok(())
    }

    /// The range of a document's tokens in the shard. `idx` is the checked file.
    pub(super) fn document_tokens(&self, idx: &[u8], document: u64) -> Range<u64> {
        self.boundary_token(idx, document)..self.boundary_token(idx, document + 1)
    }

    /// The sequences of a document.
    pub(super) fn sequences_of(&self, idx: &[u8], document: u64) -> Range<u64> {
        self.boundary(idx, document) as u64..self.boundary(idx, document + 1) as u64
    }

    /// Number of tokens in a sequence.
    pub(super) fn sequence_len(&self, idx: &[u8], sequence: u64) -> u64 {
        read_i32(idx, HEADER_BYTES + 4 * sequence) as u64
    }

    /// The first token of a document, or the end of the last document.
    fn boundary_token(&self, idx: &[u8], document: u64) -> u64 {
        let sequence = self.boundary(idx, document) as u64;
        if sequence == self.num_sequences {
            return self.num_tokens;
        }
        self.pointer(idx, sequence) as u64 / self.dtype.num_bytes()
    }

    /// Byte offset of a sequence in the `.bin` file.
    fn pointer(&self, idx: &[u8], sequence: u64) -> i64 {
        read_u64(idx, HEADER_BYTES + 4 * self.num_sequences + 8 * sequence) as i64
    }

    /// The first sequence of a document, or the number of sequences for `document = num_documents`.
    fn boundary(&self, idx: &[u8], document: u64) -> i64 {
        read_u64(idx, HEADER_BYTES + 12 * self.num_sequences + 8 * document) as i64
    }
}

fn read_u64(bytes: &[u8], offset: u64) -> u64 {
    let offset = offset as usize;
    u64::from_le_bytes(bytes[offset..offset + 8].try_into().expect("eight bytes"))
}

fn read_i32(bytes: &[u8], offset: u64) -> i32 {
    let offset = offset as usize;
    i32::from_le_bytes(bytes[offset..offset + 4].try_into().expect("four bytes"))
}
