//! Text in, batches out: corpora, tokenizers, Megatron-LM shards and the stateless loader.
//!
//! [`Corpus`] finds and reads documents, [`Tokenizer`] turns text into token ids, [`prepare`] writes shards once,
//! [`ShardReader`] maps them, and [`Loader`] makes batches from them. A batch is a pure function of the number of its
//! first sample, so the loader's whole state is that number. The crate prints nothing and reads no environment.

#![cfg_attr(
    test,
    allow(clippy::unwrap_used, reason = "a test may fail by panicking")
)]

mod atomic_file;
mod corpus;
mod error;
mod loader;
mod mapped_file;
mod permutation;
mod prefetch;
mod prepare;
mod shard;
mod tokenizer;

pub use corpus::{
    Corpus, CorpusConfig, CorpusReport, Document, Documents, FileOrder, Format, SourceFile,
};
pub use error::DataError;
pub use loader::{Batch, IGNORED_LABEL, Loader, LoaderConfig, Order, PAD_DOCUMENT, Packing};
pub use permutation::Permutation;
pub use prefetch::{Prefetch, PrefetchPlan};
pub use prepare::{
    DocumentSize, OnChange, PrepareConfig, Prepared, PreparedMeta, Progress, SplitMeta,
    ValidationSource, prepare, read_document_sizes,
};
pub use shard::{ShardReader, ShardWriter, TokenDtype};
pub use tokenizer::{BpeConfig, DecodeStream, Tokenizer};
