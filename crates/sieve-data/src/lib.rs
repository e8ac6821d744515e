//! From text to batches: corpora, tokenizers, Megatron-LM shards and a stateless loader.
//!
//! [`Corpus`] finds and reads documents (text, JSONL, Parquet, packed or not, on this disk or on the Hugging Face hub),
//! [`Tokenizer`] turns text into token ids, [`prepare`] writes shards once and resumes after an interruption,
//! [`ShardReader`] maps them, and [`Loader`] makes batches: from a shard, from a weighted mixture of shards, or from
//! generated samples of associative recall ([`Mqar`]). A batch is a pure function of the number of its first sample, so
//! that number is the loader's whole state. The crate prints nothing and reads no environment variables; waits for the
//! hub are reported through `log`.
//!
//! ```
//! use std::sync::Arc;
//! use sieve_data::*;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let dir = tempfile::tempdir()?;
//! # for number in 0..50 {
//! #     std::fs::write(dir.path().join(format!("{number}.txt")), format!("Document {number} says something."))?;
//! # }
//! # let folder = dir.path().to_str().unwrap().to_owned();
//! let corpus = Corpus::open(CorpusConfig::text(vec![folder]))?;
//! let tokenizer = Tokenizer::train(&corpus, BpeConfig { vocab_size: 270, sample_bytes: 10_000_000 })?;
//! let config = PrepareConfig {
//!     dir: dir.path().join("prepared"),
//!     validation: ValidationSource::Fraction(0.1),
//!     on_change: OnChange::Refuse,
//!     base: None,
//!     known: &[],
//! };
//! let prepared = prepare(&[corpus], &tokenizer, &config, &|_progress| {})?;
//! let loader = Loader::new(
//!     Arc::new(prepared.train()?),
//!     LoaderConfig {
//!         seq_len: 16,
//!         order: Order::Shuffled { seed: 1 },
//!         packing: Packing::Concatenated,
//!         vocab_size: tokenizer.vocab_size(),
//!         pad_id: 0,
//!     },
//! )?;
//! let batch = loader.batch(0, 4)?;
//! assert_eq!(batch.tokens.len(), 4 * 16);
//! # Ok(())
//! # }
//! ```

#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a test may fail by panicking"))]

mod chat;
mod corpus;
mod error;
mod guard;
mod loader;
mod mapped_file;
mod mixture;
mod mqar;
#[cfg(test)]
mod mutated;
mod permutation;
mod prefetch;
mod prepare;
mod shard;
#[cfg(test)]
mod test_files;
mod tokenizer;

pub use chat::{ChatError, ChatFormat, ChatText};
pub use corpus::{
    AlsoHeldOut, Corpus, CorpusConfig, CorpusReport, Document, Documents, DownloadProgress, FileOrder, Format,
    HubConfig, HubLimits, HubModel, HubModelEvent, SeeDownload, SourceFile, Surroundings, TableAsText, TableRow,
    hub_model, hub_tokenizer, is_hub_model, is_hub_tokenizer, read_table,
};
pub use error::DataError;
pub use guard::expects_panic;
pub use loader::{Batch, IGNORE_LABEL, Loader, LoaderConfig, Order, PAD_DOCUMENT, Packing};
pub use mqar::{Mqar, MqarConfig, MqarMixture, MqarNoise, MqarPart, MqarQuery, MqarSample, MqarSplit};
pub use prefetch::{Prefetch, PrefetchPlan};
pub use prepare::{
    ChatsMeta, DocumentSize, DocumentTokens, OnChange, PrepareConfig, Prepared, PreparedMeta, Progress, ShardCheck,
    SourceMeta, SplitMeta, ValidationSettings, ValidationSource, check_owner, prepare, read_document_sizes,
};
pub use shard::{ShardReader, ShardWriter, TokenDtype};
pub use tokenizer::{BpeConfig, DecodeStream, Tokenizer};
