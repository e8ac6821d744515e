//! Texts that a model continues the recipe's prompts with, while it trains and at its end.
use super::log::Log;
use anyhow::{Result, bail, ensure};
use burn::module::AutodiffModule;
use sieve_core::{ModelShape, Recipe};
use sieve_data::Tokenizer;
use sieve_hf::{ChatMessage, ChatTemplate, end_ids};
use sieve_host::hub;
use sieve_infer::{GenerateConfig, Generator, InferError, Sampling};
use sieve_ops::TrainBackend;
use sieve_train::{Session, Trainer, chat_template};
use std::path::PathBuf;

/// The tokens that a model continues others with, until one of the last ones would come.
type Continues<'a> = dyn Fn(&[u32], GenerateConfig, &[u32]) -> Result<Vec<u32>, InferError> + 'a;

/// How a run's prompts are put to its model: as the beginnings of texts, or as messages of chats.
#[derive(Clone)]
pub(super) struct Prompts {
    /// The template that makes texts of the run's chats; `None` for a run on text. A run that is resumed needs it for
    /// its samples only, so that one that cannot be read is no error before.
    template: Result<Option<ChatTemplate>, String>,
    /// A checkpoint of the model, whose folder may name tokens that end a text.
    of_model: PathBuf,
}

impl Prompts {
    /// What prompts of a session's samples need.
    pub(super) fn of(session: &Session) -> Self {
        let checkpoint = session.origin().checkpoint.as_ref();
        let template = chat_template(session.recipe(), checkpoint, &hub::surroundings());
        Self {
            template: template.map_err(|error| error.to_string()),
            of_model: checkpoint.map_or(session.path(), |found| &found.path).to_owned(),
        }
    }

    /// The token ids that the model gets for a prompt.
    fn ids(&self, prompt: &str, tokenizer: &Tokenizer) -> Result<Vec<u32>> {
        let template = match &self.template {
            Ok(template) => template,
            Err(why) => bail!("{why}"),
        };
        let message = ChatMessage { role: "user", content: prompt };
        let chat = template.as_ref().map(|template| template.render(&[message])).transpose()?;
        Ok(tokenizer.encode_marked(chat.as_deref().unwrap_or(prompt))?)
    }
}

/// Has texts written every `generation.interval` steps, where this process prints and holds the model.
///
/// # Errors
/// A prompt that does not fit into the model's context: it would be refused again and again.
pub(super) fn while_training<B: TrainBackend>(
    log: &Log,
    prompts: &Prompts,
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
        let num_tokens = prompts.ids(prompt, &trainer.data().tokenizer)?.len();
        ensure!(
            num_tokens < context,
            "a prompt of generation.prompts has {num_tokens} tokens, and the model's context {context}\n  \
             hint: shorten it, or leave generation.interval out"
        );
    }
    let (prompts, recipe, device) = (prompts.clone(), recipe.clone(), device.clone());
    trainer.set_samples(Box::new(move |model, shape, tokenizer| {
        let sampling = Sampling { temperature: 0.0, top_p: 1.0, top_k: None, seed: 0 };
        let write =
            |ids: &[u32], config, ends: &[u32]| Generator::new(model, ids, config, &device)?.ending_at(ends).collect();
        texts((&recipe, &prompts), sampling, (shape, tokenizer), &write).map_err(|error| format!("{error:#}"))
    }));
    Ok(())
}

/// Prints a continuation of each of the recipe's `generation.prompts`, at the end of a run.
pub(super) fn at_the_end<B: TrainBackend>(
    log: &Log,
    prompts: &Prompts,
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
    let write =
        |ids: &[u32], config, ends: &[u32]| Generator::new(&model, ids, config, device)?.ending_at(ends).collect();
    let texts = texts((recipe, prompts), sampling, of_model, &write)?;
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

/// Each of the recipe's prompts with what `write` continues its tokens with: the same text, or an answer below it.
fn texts(
    (recipe, prompts): (&Recipe, &Prompts),
    sampling: Sampling,
    (shape, tokenizer): (&ModelShape, &Tokenizer),
    write: &Continues<'_>,
) -> Result<Vec<String>> {
    let eos_id = tokenizer.eos_id()?;
    let ends = end_ids(&prompts.of_model, recipe, eos_id)?;
    let text = |prompt: &String| {
        let ids = prompts.ids(prompt, tokenizer)?;
        let positions_left = shape.max_seq_len.saturating_sub(ids.len().max(1));
        let config = GenerateConfig {
            max_new_tokens: recipe.generation.max_new_tokens.min(positions_left),
            sampling,
            eos_id,
            num_tokens: tokenizer.vocab_size(),
        };
        let tokens = write(&ids, config, &ends)?;
        let written = tokenizer.decode_behind(&ids, &tokens)?;
        Ok(match prompts.template {
            Ok(Some(_)) => format!("{prompt}\n{}", written.trim_start()),
            _ => format!("{prompt}{written}"),
        })
    };
    recipe.generation.prompts.iter().map(text).collect()
}
