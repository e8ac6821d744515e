//! Training runs side by side, as one HTML page that needs no network.
//!
//! A run is the folder that `sieve train --out` wrote: `config.toml`, `metrics.jsonl` and, if the user put them there,
//! JSON results and pictures of evaluations under `eval/`.
//!
//! ```no_run
//! use sieve_report::{Run, page};
//!
//! let runs = vec![Run::open("out/mha".as_ref(), None)?, Run::open("out/dma".as_ref(), Some("DMA, w 64"))?];
//! std::fs::write("compare.html", page(runs, Some("mha"))?)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod error;
mod evaluations;
mod groups;
mod page;
mod paired;
mod run;
mod series;
mod tables;

pub use error::ReportError;
pub use page::page;
pub use run::Run;
