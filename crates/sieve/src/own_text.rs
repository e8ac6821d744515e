//! The text of a recipe that a command writes: how long a run of it is worth.
use crate::epochs;
use anyhow::{Context, Result, bail};
use sieve_core::Recipe;
use sieve_core::recipe::{DataFormat, EPOCHS_AS_NEW, TokenizerSource, steps_for_answers};
use sieve_data::{BpeConfig, Corpus, DataError, OnChange, Tokenizer, is_hub_tokenizer};
use sieve_host::environment::variable;
use sieve_host::text_files::{BEGINNING_BYTES, Beginning, first_words, local_tokenizer};
use sieve_host::{hub, terminal};
use sieve_train::{DataSource, chat_format, corpus_configs};
use std::path::Path;

/// The first characters of the text become the prompt of a run's samples: this many at most.
const PROMPT_CHARACTERS: usize = 32;
/// Characters of a question that becomes such a prompt as it is: without its end it would be another one.
const QUESTION_CHARACTERS: usize = 400;
/// Checkpoints of a run on answers, about, of which the best one on held-out answers is kept.
const CHECKPOINTS: usize = 5;

/// Whether `--set` gives a number of steps, which is then not fitted to the text.
pub(crate) fn gives_steps(overrides: &[String]) -> bool {
    overrides.iter().any(|set| {
        let key = set.split('=').next().unwrap_or_default().trim();
        key == "training.steps" || key.starts_with("stage.") && key.ends_with(".steps")
    })
}

/// The steps of the whole run that `--set` gives a recipe with so many stages: `training.steps`, or the sum over every
/// stage. `None` where a stage has none, or where a value is no whole number, which loading the recipe refuses.
pub(crate) fn given_steps(overrides: &[String], num_stages: usize) -> Option<usize> {
    let given = |key: &str| -> Option<usize> {
        let pairs = overrides.iter().rev().filter_map(|set| set.split_once('='));
        let value = pairs.map(|(name, value)| (name.trim(), value)).find(|(name, _)| *name == key)?.1;
        value.trim().replace('_', "").parse().ok()
    };
    let of_stages = || (1..=num_stages).map(|stage| given(&format!("stage.{stage}.steps"))).sum::<Option<usize>>();
    given("training.steps").or_else(|| of_stages().filter(|_| num_stages > 0))
}

/// The training text of a new recipe, if it is on this machine.
pub(crate) struct OwnText {
    pub(crate) num_bytes: u64,
    /// Tokens of the text, estimated from its beginning.
    pub(crate) num_tokens: f64,
    /// The text's first words, as a prompt for samples: the model is trained on such text. Of chats it is what the
    /// first user says, of prompts the first one.
    pub(crate) prompt: Option<String>,
    /// Tokens that a tokenizer trained on the text has at most, where the text is short enough to try it.
    most_tokens: Option<usize>,
}

/// Whether `--set` gives a key.
fn gives(overrides: &[String], key: &str) -> bool {
    overrides.iter().any(|set| set.split('=').next().unwrap_or_default().trim() == key)
}

/// Tokens that the recipe's tokenizer has if it is trained on this corpus; `None` if it is trained elsewhere.
fn most_tokens(corpus: &Corpus, recipe: &Recipe) -> Result<Option<usize>> {
    let TokenizerSource::Train(training) = recipe.tokenizer.source() else {
        return Ok(None);
    };
    let config = BpeConfig { vocab_size: training.vocab_size, sample_bytes: training.sample_bytes };
    Ok(Some(Tokenizer::num_trained(corpus, config)?))
}

/// A question as a prompt for samples.
fn question(text: &str) -> Option<String> {
    let plain = |letter: char| letter == '\n' || !letter.is_control();
    let is_short = text.chars().count() <= QUESTION_CHARACTERS && text.chars().all(plain);
    if is_short && !text.trim().is_empty() { Some(text.to_owned()) } else { first_words(text, QUESTION_CHARACTERS) }
}

impl OwnText {
    /// Fails if the text has too few tokens for one row. Where that is in doubt, the text is tokenised as for a run.
    pub(crate) fn check_rows(&self, recipe: &Recipe) -> Result<()> {
        let seq_len = recipe.stages().iter().map(|stage| stage.section.seq_len).max().unwrap_or_default();
        // Tokens are less than twice as long as estimated. A tokenizer on the hub is not fetched.
        let is_remote = matches!(recipe.tokenizer.source(), TokenizerSource::Path(path) if is_hub_tokenizer(path));
        if is_remote || self.num_tokens > 2.0 * seq_len as f64 {
            return Ok(());
        }
        let dir = tempfile::tempdir().context("making a folder for the text's tokens")?;
        let source = DataSource::open(recipe, &hub::surroundings())?;
        source.prepare(recipe, dir.path(), OnChange::Refuse, &mut |_event| {})?;
        for text in epochs::of_run(recipe, dir.path()).into_iter().flatten() {
            if let Some([what, hint]) = text.too_short() {
                bail!("{what}\n  hint: {hint}");
            }
        }
        Ok(())
    }

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
        let chats = chat_format(recipe, no_checkpoint, &hub::surroundings())?;
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
                let prompt = match (corpus.first_question(), beginning.first) {
                    (Some(asked), _) => question(&asked),
                    (None, Some(first)) => match first.prompt {
                        Some(prompt) => question(&prompt),
                        None => first_words(&first.text, PROMPT_CHARACTERS),
                    },
                    (None, None) => None,
                };
                let is_short = num_bytes < BEGINNING_BYTES as u64;
                let most_tokens = is_short.then(|| most_tokens(&corpus, recipe)).transpose()?.flatten();
                own = Some(Self { num_bytes, num_tokens, prompt, most_tokens });
            }
        }
        Ok((own, true))
    }

    /// `generation.prompts` with the text's prompt, as `section.key=value`.
    pub(crate) fn prompts_key(&self) -> Option<String> {
        // A list of JSON strings is one of TOML strings too.
        self.prompt.as_ref().map(|prompt| format!("generation.prompts={}", serde_json::json!([prompt])))
    }

    /// `tokenizer.train` with no more tokens than the text gives, as keys `section.key=value`; none where the recipe
    /// has no more.
    pub(crate) fn keys_of_tokenizer(&self, recipe: &Recipe) -> Vec<String> {
        let TokenizerSource::Train(training) = recipe.tokenizer.source() else {
            return Vec::new();
        };
        let most = self.most_tokens.filter(|most| *most < training.vocab_size);
        most.map(|most| format!("tokenizer.train.vocab_size={most}")).into_iter().collect()
    }

    /// The keys of a recipe that learns to predict only the answers of a text, as `section.key=value`: so many steps
    /// that the text is read two to three times, and a kept checkpoint, the best one on held-out answers. Keys that
    /// `overrides` give are left out. A text without answers has no such keys.
    pub(crate) fn keys_for_answers(&self, recipe: &Recipe, overrides: &[String]) -> Vec<String> {
        let training = &recipe.training;
        let mut keys = Vec::new();
        if !recipe.data.has_answers() {
            return keys;
        }
        let mut steps = training.steps;
        if !gives_steps(overrides) && recipe.stage.is_empty() {
            let is_free = ["training.global_batch_size", "training.local_batch_size"];
            let is_free = !is_free.iter().any(|key| gives(overrides, key));
            let local = training.local_batch_size.max(1);
            // A step is divided in whole micro-batches, and no further than into one row.
            let (fit, rows) = if is_free {
                steps_for_answers(self.num_tokens, training.global_batch_size, training.seq_len)
            } else {
                steps_for_answers(self.num_tokens, 1, training.tokens_per_step())
            };
            steps = fit;
            keys.push(format!("training.steps={fit}"));
            if is_free && rows < training.global_batch_size {
                let local = if rows.is_multiple_of(local) { local } else { 1 };
                keys.push(format!("training.local_batch_size={local}"));
                keys.push(format!("training.global_batch_size={rows}"));
            }
        }
        let chosen = ["checkpoint.keep_best", "checkpoint.interval", "validation.interval"];
        if !chosen.iter().any(|key| gives(overrides, key)) {
            let interval = steps.div_ceil(CHECKPOINTS).max(1);
            let values = ["true".to_owned(), interval.to_string(), interval.to_string()];
            keys.extend(chosen.iter().zip(values).map(|(key, value)| format!("{key}={value}")));
        }
        keys
    }

    /// A line if the run reads the text for more epochs than teach something new.
    pub(crate) fn epochs(&self, recipe: &Recipe) -> Option<String> {
        let epochs = recipe.num_tokens() as f64 / self.num_tokens;
        (epochs > EPOCHS_AS_NEW).then(|| {
            format!(
                "the text has about {} tokens: {} {} it about {epochs:.0} times; more text would teach more",
                terminal::short_count(self.num_tokens),
                terminal::thousands(recipe.training.steps as u64),
                if recipe.training.steps == 1 { "step reads" } else { "steps read" },
            )
        })
    }
}
