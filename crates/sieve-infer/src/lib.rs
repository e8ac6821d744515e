//! What a trained model says to a text: logits, losses, and generation token by token, alone or with others as a batch.
//!
//! The crate prints nothing and reads no environment; the caller decides where text and progress go.

mod error;

pub mod input;
mod logits;
pub mod pass;
pub mod rows;

mod continuation;
mod conversation;
mod generator;
mod grammar;
mod greedy;
mod kept_texts;
mod logit_rules;
mod open_texts;
mod sampler;
mod stop;
mod task_model;
mod together;
mod token_scores;

pub mod chunks;
pub mod device_steps;
mod selection;

mod document;
mod perplexity;
mod words;

#[cfg(test)]
mod test_model;

pub use continuation::{Continuation, Drawn, Ending, TextsWithEndings, prompt_part, texts_together};
pub use conversation::{Answer, AnswerConfig, Conversation};
pub use document::{EvalDocument, TextSize, first_tokens, prepared_documents, text_documents};
pub use error::InferError;
pub use generator::{GenerateConfig, Generator};
pub use grammar::{Grammar, Grammars, Structure};
pub use greedy::{AfterPrompt, Greedy};
pub use logit_rules::LogitRules;
pub use logits::{NextLogits, logits};
pub use open_texts::OpenTexts;
pub use perplexity::{
    Extrapolation, LossByDistance, MeanLoss, PerplexityConfig, PerplexityReport, PositionLoss, RollingPerplexity,
    WordLoss, extrapolation, perplexity,
};
pub use sampler::{Sampler, Sampling};
pub use selection::{LayerPath, Selection, SelectionTotals, copied_bytes, dense_pairs, layer_shape};
pub use stop::{StopTexts, StoppedText};
pub use task_model::TaskModel;
pub use together::BatchGenerator;
pub use token_scores::{PromptScores, TokenScore, score_prompts};
pub use words::WordUse;
