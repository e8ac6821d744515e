//! Training-free sparse attention: which pairs of queries and keys are worth computing.
//!
//! Every method gives one form of mask ([`KeyMask`]), which one block-sparse attention computes and one set of measures
//! evaluates. Operands are plain f32 slices of one layer and one request.
//!
//! ```
//! use sieve_select::{Call, CallShape, Selector, density};
//!
//! let shape = CallShape { num_queries: 1000, num_keys: 1000, num_heads: 2, num_kv_heads: 1, head_dim: 16 };
//! let q: Vec<f32> = (0..1000 * 2 * 16).map(|i| ((i * 37) % 101) as f32 / 50.0 - 1.0).collect();
//! let k: Vec<f32> = (0..1000 * 16).map(|i| ((i * 53) % 97) as f32 / 50.0 - 1.0).collect();
//! let call = Call::new(shape, &q, &k, &k)?;
//! let done = Selector::parse("xattention:tau=0.8")?.prefill(&call)?;
//! assert_eq!(done.output.o.len(), q.len());
//! assert!(density(&done.selected).token <= 1.0);
//! # Ok::<(), sieve_select::SelectError>(())
//! ```
//!
//! Prefill selectors look at a whole call at once: most of them choose a row's keys by later rows too, so the map
//! from text to logits is not causal ([`Selector::is_causal_map`]). A likelihood under such a selector is a "prefill
//! perplexity"; it must not be used to score single rows. Decode methods ([`DecodeSession`]) are causal, except
//! `infllm` with a `chunk` above 1.

mod call;
mod error;
mod mask;

mod attention;
mod measure;
pub mod oracle;

mod gqa;
mod keep;
mod permute;
mod pool;
mod prelude;
mod range;
mod settings;
mod vector;

pub mod decode;
pub mod prefill;
mod selector;

#[cfg(test)]
mod test_data;
#[cfg(test)]
mod tests;

pub use attention::{AttentionOutput, block_sparse_attention, dense_rows_attention};
pub use call::{BlockMeans, Call, Reads};
pub use decode::{DecodeSession, LayerShape};
pub use error::SelectError;
pub use gqa::GqaPolicy;
pub use mask::{Correction, CorrectionMode, SelectStats, Selected};
pub use measure::{Density, dense_attention, density, recall};
pub use oracle::{oracle_attention, oracle_dense};
pub use selector::layers::LayerSelectors;
pub use selector::{Common, ENTRIES, Entry, Method, Phase, Prefill, Selector, names_of};
pub use sieve_core::{CallShape, KeyMask, Tiles, TokenKeys, TokenWindow};
