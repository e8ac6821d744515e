//! Texts that a model continues the recipe's prompts with, while it trains and at its end.
use super::log::Log;
use anyhow::{Result, ensure};
use burn::module::AutodiffModule;
use sieve_core::{ModelShape, Recipe};
use sieve_data::Tokenizer;
use sieve_infer::{GenerateConfig, Generator, InferError, Sampling};
use sieve_ops::TrainBackend;
use sieve_train::Trainer;

/// The tokens that a model continues others with.
type Continues<'a> = dyn Fn(&[u32], GenerateConfig) -> Result<Vec<u32>, InferError> + 'a;

/// Has texts written every `generation.interval` steps, where this process prints and holds the model.
///
/// # Errors
/// A prompt that does not fit into the model's context: it would be refused again and again.
pub(super) fn while_training<B: TrainBackend>(
    log: &Log,
    recipe: &Recipe,
    trainer: &mut Trainer<B>,
    device: &B::Device,
) -> Result<()> {
    if recipe.generation.interval == 0 || !log.prints() {
        return Ok(());
    }
    if trainer.shards_weights() {
        log.line("no samples while it trains: with parallelism.zero_stage = 3 no process holds the model");
        return Ok(());
    }
    let context = trainer.shape().max_seq_len;
    for prompt in &recipe.generation.prompts {
        let num_tokens = trainer.data().tokenizer.encode_marked(prompt)?.len();
        ensure!(
            num_tokens < context,
            "a prompt of generation.prompts has {num_tokens} tokens, and the model's context {context}\n  \
             hint: shorten it, or leave generation.interval out"
        );
    }
    let (recipe, device) = (recipe.clone(), device.clone());
    trainer.set_samples(Box::new(move |model, shape, tokenizer| {
        let sampling = Sampling { temperature: 0.0, top_p: 1.0, top_k: None, seed: 0 };
        let write = |ids: &[u32], config| Generator::new(model, ids, config, &device)?.collect();
        texts(&recipe, sampling, (shape, tokenizer), &write).map_err(|error| format!("{error:#}"))
    }));
    Ok(())
}

/// Prints a continuation of each of the recipe's `generation.prompts`, at the end of a run.
pub(super) fn at_the_end<B: TrainBackend>(
    log: &Log,
    recipe: &Recipe,
    trainer: &mut Trainer<B>,
    device: &B::Device,
) -> Result<()> {
    if trainer.shards_weights() {
        if !recipe.generation.prompts.is_empty() {
            log.line(
                "no samples: with parallelism.zero_stage = 3 no process holds the model; sieve generate makes them",
            );
        }
        return Ok(());
    }
    let sampling = Sampling { temperature: 0.7, top_p: 0.95, top_k: None, seed: recipe.training.seed };
    let of_model = (trainer.shape(), &trainer.data().tokenizer);
    let model = trainer.model().valid();
    let write = |ids: &[u32], config| Generator::new(&model, ids, config, device)?.collect();
    let texts = texts(recipe, sampling, of_model, &write)?;
    for (number, text) in (1..).zip(&texts) {
        log.line(&line("sample", text));
        trainer.keep_sample(number, text);
    }
    Ok(())
}

/// The lines of the log about a sample.
pub(super) fn line(head: &str, text: &str) -> String {
    format!("{head}:\n  {}", text.replace('\n', "\n  "))
}

/// Each of the recipe's prompts with what `write` continues its tokens with.
fn texts(
    recipe: &Recipe,
    sampling: Sampling,
    (shape, tokenizer): (&ModelShape, &Tokenizer),
    write: &Continues<'_>,
) -> Result<Vec<String>> {
    let text = |prompt: &String| {
        let ids = tokenizer.encode_marked(prompt)?;
        let positions_left = shape.max_seq_len.saturating_sub(ids.len().max(1));
        let config = GenerateConfig {
            max_new_tokens: recipe.generation.max_new_tokens.min(positions_left),
            sampling,
            eos_id: tokenizer.eos_id()?,
            num_tokens: tokenizer.vocab_size(),
        };
        let tokens = write(&ids, config)?;
        Ok(format!("{prompt}{}", tokenizer.decode_behind(&ids, &tokens)?))
    };
    recipe.generation.prompts.iter().map(text).collect()
}
