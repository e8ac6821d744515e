//! The text of a recipe that a command writes: how long a run of it is worth.
use crate::environment::variable;
use crate::terminal;
use crate::text_files::{BEGINNING_BYTES, Beginning, first_words, local_tokenizer};
use anyhow::{Context, Result, bail};
use sieve_core::Recipe;
use sieve_core::recipe::{DataFormat, EPOCHS_AS_NEW};
use sieve_data::{Corpus, DataError};
use sieve_train::{chat_format, corpus_configs};
use std::path::Path;

/// The first characters of the text become the prompt of a run's samples: this many at most.
const PROMPT_CHARACTERS: usize = 32;

/// Whether `--set` gives a number of steps, which is then not fitted to the text.
pub(crate) fn gives_steps(overrides: &[String]) -> bool {
    overrides.iter().any(|set| {
        let key = set.split('=').next().unwrap_or_default().trim();
        key == "training.steps" || key.starts_with("stage.") && key.ends_with(".steps")
    })
}

/// The training text of a new recipe, if it is on this machine.
pub(crate) struct OwnText {
    pub(crate) num_bytes: u64,
    /// Tokens of the text, estimated from its beginning.
    pub(crate) num_tokens: f64,
    /// The text's first words, as a prompt for samples: the model is trained on such text.
    pub(crate) prompt: Option<String>,
}

impl OwnText {
    /// Reads the beginning of the recipe's text, as a run would. Returns the training text, unless it is on the hub or
    /// not there, and false if any file is not there: it may be put there after the recipe is written.
    pub(crate) fn read(recipe: &Recipe) -> Result<(Option<Self>, bool)> {
        let tokenizer = local_tokenizer(recipe).context("the tokenizer (--tokenizer) cannot be used")?;
        if recipe.data.format == DataFormat::Mqar {
            return Ok((None, true));
        }
        // A variable of a path may be set where the run starts.
        let Ok((train, validation)) = corpus_configs(recipe, &variable) else {
            return Ok((None, false));
        };
        let no_checkpoint = None;
        let chats = chat_format(recipe, no_checkpoint, &variable)?;
        let is_divided = validation.is_none();
        let mut own = None;
        for (config, is_own) in [(Some(train), true), (validation, false)] {
            let corpus = match config.map(Corpus::open).transpose() {
                Err(DataError::NoFiles { pattern, .. }) if !Path::new(&pattern).is_dir() => return Ok((own, false)),
                corpus => corpus?.map(|corpus| corpus.with_chats(chats.clone())),
            };
            // The files of a data set on the hub are not known before it is fetched.
            let Some(corpus) = corpus.filter(|corpus| !corpus.files().is_empty()) else {
                continue;
            };
            let beginning = Beginning::read(&corpus, tokenizer.as_ref())?;
            let (num_bytes, fraction) = (beginning.num_bytes, recipe.data.validation_fraction);
            let held_out = (num_bytes as f64 * fraction).round() as usize;
            if is_divided && num_bytes < BEGINNING_BYTES && (held_out == 0 || held_out == num_bytes) {
                bail!(
                    "{num_bytes} bytes of text are too few for a training document and a validation document \
                     (data.validation_fraction = {fraction})\n  \
                     hint: more text, or text to validate on: --set 'validation.paths=[\"FILE\"]'"
                );
            }
            if is_own {
                let num_bytes = corpus.text_bytes();
                let num_tokens = beginning.tokens_of(num_bytes);
                let first = beginning.first.map(|first| first.prompt.unwrap_or(first.text));
                let prompt = first.and_then(|first| first_words(&first, PROMPT_CHARACTERS));
                own = Some(Self { num_bytes, num_tokens, prompt });
            }
        }
        Ok((own, true))
    }

    /// A line if the run reads the text for more epochs than teach something new.
    pub(crate) fn epochs(&self, recipe: &Recipe) -> Option<String> {
        let epochs = recipe.num_tokens() as f64 / self.num_tokens;
        (epochs > EPOCHS_AS_NEW).then(|| {
            format!(
                "the text has about {} tokens: {} steps read it about {epochs:.0} times; more text would teach more",
                terminal::short_count(self.num_tokens),
                terminal::thousands(recipe.training.steps as u64),
            )
        })
    }
}
