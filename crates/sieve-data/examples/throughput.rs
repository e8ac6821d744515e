//! Trains a tokenizer on some folders, prepares them, and prints how fast each part went.
//!
//! `cargo run --release -p sieve-data --example throughput -- OUT_DIR VOCAB_SIZE PATH…`

#![allow(clippy::print_stdout, reason = "this is a program")]

use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use sieve_data::{
    BpeConfig, Corpus, CorpusConfig, FileOrder, Loader, LoaderConfig, OnChange, Order, Packing,
    PrepareConfig, Tokenizer, ValidationSource, prepare,
};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments = std::env::args().skip(1).collect::<Vec<_>>();
    let [out, vocab_size, paths @ ..] = arguments.as_slice() else {
        return Err("give OUT_DIR VOCAB_SIZE PATH…".into());
    };
    let out = Path::new(out);
    let megabytes = |bytes: u64, since: Instant| bytes as f64 / 1e6 / since.elapsed().as_secs_f64();

    let corpus = Corpus::open(CorpusConfig {
        order: FileOrder::Hashed { seed: 0 },
        max_document_bytes: Some(1 << 20),
        deduplicate: true,
        skip_invalid: true,
        ..CorpusConfig::text(paths.to_vec())
    })?;
    let start = Instant::now();
    let mut documents = corpus.documents();
    documents
        .by_ref()
        .try_for_each(|document| document.map(drop))?;
    let report = documents.report().clone();
    println!(
        "read      {:8.1} MB/s  {report:?}",
        megabytes(report.num_bytes, start)
    );

    let start = Instant::now();
    let config = BpeConfig {
        vocab_size: vocab_size.parse()?,
        sample_bytes: 20_000_000,
    };
    let tokenizer = Tokenizer::train(&corpus, config)?;
    std::fs::create_dir_all(out)?;
    tokenizer.save(&out.join("tokenizer.json"))?;
    println!(
        "train     {:8.2} s on at most {} MB",
        start.elapsed().as_secs_f64(),
        config.sample_bytes / 1_000_000
    );

    let start = Instant::now();
    let config = PrepareConfig {
        dir: out.to_path_buf(),
        validation: ValidationSource::Fraction(0.01),
        on_change: OnChange::Replace,
    };
    let prepared = prepare(std::slice::from_ref(&corpus), &tokenizer, &config, &|_| {})?;
    let num_tokens = prepared.meta.train.num_tokens + prepared.meta.validation.num_tokens;
    println!(
        "prepare   {:8.2} MB/s, {num_tokens} tokens, reused: {}",
        megabytes(report.num_bytes, start),
        prepared.reused
    );

    let start = Instant::now();
    let loader = Loader::new(
        Arc::new(prepared.train()?),
        LoaderConfig {
            seq_len: 2048,
            order: Order::Shuffled { seed: 1 },
            packing: Packing::Concatenated,
            vocab_size: tokenizer.vocab_size(),
            pad_id: 0,
        },
    )?;
    println!("open      {:8.2} ms", start.elapsed().as_secs_f64() * 1e3);
    let start = Instant::now();
    let num_batches = 2000u64;
    for number in 0..num_batches {
        loader.batch(number * 8, 8)?;
    }
    let tokens = (num_batches * 8 * 2048) as f64;
    println!(
        "batches   {:8.1} million tokens/s",
        tokens / 1e6 / start.elapsed().as_secs_f64()
    );
    Ok(())
}
