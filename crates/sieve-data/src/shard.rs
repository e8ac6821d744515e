//! Megatron-LM's indexed data set, version 1: `<prefix>.bin` holds token ids, `<prefix>.idx` the bounds of documents.
//!
//! The `.idx` file is little-endian and its values are not aligned (Megatron-LM,
//! `megatron/core/datasets/indexed_dataset.py`):
//!
//! | offset | type | what |
//! |---|---|---|
//! | 0 | 9 bytes | `MMIDIDX\0\0` |
//! | 9 | u64 | version, always 1 |
//! | 17 | u8 | dtype of the tokens: 4 = int32, 8 = uint16 |
//! | 18 | u64 | number of sequences, S |
//! | 26 | u64 | number of document boundaries, D + 1 |
//! | 34 | i32 × S | tokens of each sequence |
//! | 34 + 4S | i64 × S | byte offset of each sequence in `.bin` |
//! | 34 + 12S | i64 × (D + 1) | first sequence of each document, then S |
//!
//! The writer writes a document as one sequence, or as an even number of them where not all is predicted: a prompt and
//! a text, or what others say in a chat and what the assistant says, in turn. The reader accepts documents of any
//! number of sequences. It refuses multimodal shards, which append one byte per sequence.

mod layout;
mod reader;
mod writer;

use serde::{Deserialize, Serialize};

pub use reader::ShardReader;
pub use writer::ShardWriter;
pub(crate) use writer::{FinishedShard, check_vocab_size};

const MAGIC: &[u8; 9] = b"MMIDIDX\0\0";
const VERSION: u64 = 1;
const HEADER_BYTES: u64 = 34;

/// How a token is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TokenDtype {
    /// Two bytes, unsigned.
    U16,
    /// Four bytes, signed; negative ids are refused.
    I32,
}

impl TokenDtype {
    /// The type that Megatron-LM chooses: `U16` for vocabularies below 65500.
    pub fn for_vocab_size(vocab_size: usize) -> Self {
        if vocab_size < 65_500 { Self::U16 } else { Self::I32 }
    }

    /// Bytes of a token.
    pub fn num_bytes(self) -> u64 {
        match self {
            Self::U16 => 2,
            Self::I32 => 4,
        }
    }

    fn code(self) -> u8 {
        match self {
            Self::I32 => 4,
            Self::U16 => 8,
        }
    }
}

/// `prefix` followed by `ending`; unlike `Path::with_extension`, keeps dots in the prefix.
pub(crate) fn with_ending(prefix: &std::path::Path, ending: &str) -> std::path::PathBuf {
    let mut name = prefix.as_os_str().to_owned();
    name.push(ending);
    name.into()
}

#[cfg(test)]
mod tests;
