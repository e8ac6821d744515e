//! An OpenAI-compatible HTTP server for a trained model.
//!
//! One thread owns the model and decodes all texts as one batch; texts join and leave between tokens. Another thread
//! takes requests, checks them, and sends them over as texts through a bounded queue. A request that cannot be
//! answered gets OpenAI's error JSON. No text of a request is printed or kept; what is told of each are sizes and times
//! ([`ServedRequest`]).

mod error;
mod metrics;
mod queue;
mod served;
mod server;
mod worker;

mod fields;
mod reply;
mod request;
mod structure;

mod http;
mod listen;
mod serve;
mod web;

pub use error::ServeError;
pub use listen::listen;
pub use serve::{serve, serve_metrics};
pub use served::{RequestLog, ServedRequest};
pub use server::{Engine, Settings, Stop};
pub use web::Access;
