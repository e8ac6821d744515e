//! What a trained model says: logits, perplexity over documents, and text token by token.
//!
//! The crate prints nothing and reads no environment; the caller decides where text and progress go.

mod error;

mod input;
mod logits;

mod generator;
mod sampler;

mod document;
mod perplexity;

mod recall;

pub use document::{EvalDocument, prepared_documents, text_documents};
pub use error::EvalError;
pub use generator::{GenerateConfig, Generator};
pub use logits::logits;
pub use perplexity::{PerplexityConfig, PerplexityReport, perplexity};
pub use recall::{Answers, DistanceAnswers, RecallOfKind, RecallReport, recall};
pub use sampler::{Sampler, Sampling};
