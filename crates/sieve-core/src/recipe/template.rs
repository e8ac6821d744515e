//! Writes a recipe as a text to edit, in which a comment gives the meaning, bounds and default of every key; and
//! recipes of some sizes to start from.

use toml::{Table, Value};

use super::manual::{default_words, value_words};
use super::{AttentionKind, Recipe, RecipeError, resolve};
use crate::keys::{Choices, Key, Kind, Section};

/// Longest comment line of a new recipe, in characters.
const WIDTH: usize = 100;

impl Recipe {
    /// The recipe as TOML with a comment on every key; keys whose value is the default are commented out.
    ///
    /// # Errors
    /// [`RecipeError::NotRepresentable`], as [`to_toml`](Self::to_toml).
    pub fn to_template(&self) -> Result<String, RecipeError> {
        self.template(Keys::All)
    }

    /// The keys whose value is not the default, as TOML, each with the first sentence of its meaning.
    ///
    /// # Errors
    /// [`RecipeError::NotRepresentable`], as [`to_toml`](Self::to_toml).
    pub fn to_short_template(&self) -> Result<String, RecipeError> {
        self.template(Keys::Set)
    }

    /// The recipe as TOML, with the keys of `which` and their comments.
    fn template(&self, which: Keys) -> Result<String, RecipeError> {
        let table = Table::try_from(self)?;
        // Values that follow from others count as defaults, so that a user can change the others alone: the warm-up
        // follows from the steps, `training.steps` from the stages' steps, the rest of a stage from other sections.
        let steps = self.training.steps as i64;
        let warmup = resolve::default_warmup(steps);
        let mut follows = Table::from_iter([("warmup_steps".to_owned(), Value::Integer(warmup))]);
        if !self.stage.is_empty() {
            follows.insert("steps".to_owned(), Value::Integer(steps));
        }
        let mut of_stages = Table::try_from(self.whole_run())?;
        of_stages.remove("steps");
        let mut text = String::new();
        for section in Recipe::KEYS {
            match (section.kind, table.get(section.name)) {
                (Kind::Tables(_), None) if which == Keys::Set => {}
                (Kind::Tables(_), None) => {
                    comment(&mut text, section.doc);
                    text += "# Each begins with [[stage]]; `sieve recipe keys` lists its keys.\n\n";
                }
                (Kind::Tables(keys), Some(Value::Array(stages))) => {
                    for stage in stages.iter().filter_map(Value::as_table) {
                        comment(&mut text, which.words(section.doc));
                        text += &format!("[[{}]]\n", section.name);
                        let mut follows = of_stages.clone();
                        let attention = table.get("attention").and_then(Value::as_table);
                        for (name, default) in resolve::of_attention(attention, stage) {
                            match default {
                                Some(value) => follows.insert(name.to_owned(), value),
                                None => follows.remove(name),
                            };
                        }
                        write_keys(&mut text, which, keys, stage, &follows);
                        text.push('\n');
                    }
                }
                (Kind::Table(keys), Some(Value::Table(table))) => {
                    let start = text.len();
                    comment(&mut text, which.words(section.doc));
                    text += &format!("[{}]\n", section.name);
                    let empty = text.len();
                    match section.name {
                        "attention" => {
                            // The first key is `kind`; then come the keys of this kind alone.
                            write_keys(&mut text, which, &keys[..1], table, &follows);
                            write_keys(&mut text, which, self.attention.kind().keys(), table, &follows);
                            for (name, other) in &self.attention.others {
                                text += &format!("\n# The kind of the layers that model.layer_types calls {name:?}.\n");
                                text += &format!("[attention.{name}]\n");
                                let table = Table::try_from(other)?;
                                write_keys(&mut text, which, &keys[..1], &table, &follows);
                                write_keys(&mut text, which, other.kind().keys(), &table, &follows);
                            }
                        }
                        _ => write_keys(&mut text, which, keys, table, &follows),
                    }
                    if text.len() == empty { text.truncate(start) } else { text.push('\n') }
                }
                _ => unreachable!("a recipe holds every section, and sections alone"),
            }
        }
        text.truncate(text.trim_end().len());
        text.push('\n');
        Ok(text)
    }
}

/// Which keys a template has.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Keys {
    /// Every key; those with their default are commented out.
    All,
    /// The keys whose value is not the default, each with the first sentence of its meaning.
    Set,
}

impl Keys {
    /// As much of a doc comment as a template has.
    fn words(self, doc: &str) -> &str {
        match (self, doc.find(". ")) {
            (Self::Set, Some(end)) => &doc[..=end],
            _ => doc,
        }
    }
}

/// Writes the keys of one table; `follows` holds defaults that follow from other values.
fn write_keys(text: &mut String, which: Keys, keys: &[Key], table: &Table, follows: &Table) {
    for key in keys {
        let default = key.default.and_then(|default| default());
        let default = default.or_else(|| follows.get(key.name).cloned());
        let value = table.get(key.name);
        if which == Keys::Set && (value.is_none() || value == default.as_ref()) {
            continue;
        }
        match which {
            Keys::All => comment(text, &about(key)),
            Keys::Set => comment(text, which.words(key.doc)),
        }
        match value {
            Some(value) if default.as_ref() != Some(value) => {
                *text += &format!("{} = {}\n", key.name, inline(value));
            }
            Some(value) => *text += &format!("# {} = {}\n", key.name, inline(value)),
            None => *text += &format!("# {} =\n", key.name),
        }
    }
}

/// The meaning of a key, the values that it takes, and its default, with line breaks where its doc comment has them.
fn about(key: &Key) -> String {
    let mut text = key.doc.to_owned();
    if let Kind::Choice(Choices { names, docs }) = key.kind {
        for (name, doc) in names.iter().zip(docs.iter()) {
            text += &format!(" {name:?}: {doc}");
        }
    } else if !matches!(key.kind, Kind::Table(_)) {
        text += &format!(" ({})", value_words(key));
    }
    let default = default_words(key);
    if !matches!(default.as_str(), "needed" | "none") {
        text += &format!(" Default: {default}.");
    }
    text
}

/// Appends `text` to `to` as comment lines.
fn comment(to: &mut String, text: &str) {
    let mut line = "#".to_owned();
    for word in text.split_whitespace() {
        if line.chars().count() + 1 + word.chars().count() > WIDTH {
            *to += &line;
            to.push('\n');
            line = "#".to_owned();
        }
        line.push(' ');
        line += word;
    }
    *to += &line;
    to.push('\n');
}

/// Writes a TOML value on one line.
fn inline(value: &Value) -> String {
    match value {
        // Debug prints 1e-8; TOML's own writer would print 0.00000001.
        Value::Float(number) => format!("{number:?}"),
        Value::Array(items) => {
            let items = items.iter().map(inline).collect::<Vec<_>>();
            format!("[{}]", items.join(", "))
        }
        Value::Table(table) => {
            let items = table.iter();
            let items = items.map(|(name, value)| format!("{name} = {}", inline(value)));
            format!("{{ {} }}", items.collect::<Vec<_>>().join(", "))
        }
        other => other.to_string(),
    }
}

/// Estimated bytes of text per token. Tokenizers reach 1.9 to 4.5; a larger vocabulary has more bytes per token.
const BYTES_PER_TOKEN: f64 = 3.0;
/// The fewest bytes of text from which a tokenizer can learn one merge, in texts of a few hundred kilobytes.
const BYTES_PER_MERGE: u64 = 64;
/// Merges over the root of a text's bytes, at least: a larger text repeats itself. Measured: 11 in a folder with some
/// files twice, 13 in English notes, 18 to 27 in code.
const MERGES_PER_ROOT_BYTE: u64 = 10;
/// Tokens of a trained tokenizer that are no merges: 256 bytes, end of text, padding.
const BYTE_TOKENS: u64 = 258;
/// Up to this number of epochs, repeated text teaches about as much as new text (arXiv:2305.16264).
pub const EPOCHS_AS_NEW: f64 = 4.0;
/// From this number of epochs on, another epoch is not worth its cost (arXiv:2305.16264).
const MOST_EPOCHS: f64 = 16.0;
/// How often chats and questions are read, about.
const ANSWER_EPOCHS: f64 = 2.5;
/// With fewer steps than this, the steps of a fine-tuning are divided.
const FEW_STEPS: usize = 20;
/// The fewest steps of a recipe to start from.
const LEAST_STEPS: usize = 100;

/// Vocabulary size of a tokenizer trained on a text of `num_bytes`: `most`, or fewer if some text of that size could
/// not give so many tokens.
pub fn vocab_size_for_text(num_bytes: u64, most: usize) -> usize {
    let merges = (num_bytes / BYTES_PER_MERGE).min(MERGES_PER_ROOT_BYTE.saturating_mul(num_bytes.isqrt()));
    usize::try_from(BYTE_TOKENS.saturating_add(merges)).map_or(most, |learnable| most.min(learnable))
}

/// Estimated number of tokens of a text of `num_bytes`.
pub fn tokens_of_text(num_bytes: u64) -> f64 {
    num_bytes as f64 / BYTES_PER_TOKEN
}

/// `steps`, or fewer if `steps` would read a text of `num_tokens` more than 16 times; `None` if fewer than the least
/// useful number of steps are left.
pub fn steps_for_text(num_tokens: f64, tokens_per_step: usize, steps: usize) -> Option<usize> {
    let fit = steps.min(most_steps(num_tokens, tokens_per_step));
    (fit >= LEAST_STEPS.min(steps)).then_some(fit)
}

/// `steps`, or fewer if `steps` would read a text of `num_tokens` more than 16 times, but at least 1: for a model whose
/// weights are trained already.
pub fn fine_tuning_steps(num_tokens: f64, tokens_per_step: usize, steps: usize) -> usize {
    steps.min(most_steps(num_tokens, tokens_per_step).max(1))
}

/// The steps and the rows of a step, `rows` or fewer, that read chats or questions of `num_tokens` two to three times.
/// Their answers are learned in fewer passes than a text is, and by heart in more. A step of few rows is for a text
/// that `rows` would read in less than `FEW_STEPS`.
pub fn steps_for_answers(num_tokens: f64, rows: usize, seq_len: usize) -> (usize, usize) {
    let steps = |rows: usize| (ANSWER_EPOCHS * num_tokens / (rows * seq_len).max(1) as f64).round() as usize;
    let mut fit = rows.max(1);
    while fit > 1 && steps(fit) < FEW_STEPS {
        fit = fit.div_ceil(2);
    }
    (steps(fit).max(1), fit)
}

/// The number of steps that read a text of `num_tokens` 16 times, rounded down.
fn most_steps(num_tokens: f64, tokens_per_step: usize) -> usize {
    (MOST_EPOCHS * num_tokens / tokens_per_step.max(1) as f64) as usize
}

/// The fewest tokens of text with which [`steps_for_text`] never returns `None`.
pub fn least_tokens(tokens_per_step: usize) -> f64 {
    (LEAST_STEPS * tokens_per_step) as f64 / MOST_EPOCHS
}

/// Sizes of a model to start from, with a vocabulary, a batch size, steps and a learning rate that fit it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StartingSize {
    /// The approximate number of parameters without the embedding.
    pub name: &'static str,
    /// How long a model of this size trains, and on what device.
    pub about: &'static str,
    hidden_size: usize,
    num_layers: usize,
    num_heads: usize,
    vocab_size: usize,
    seq_len: usize,
    rows: usize,
    steps: usize,
    lr: &'static str,
}

impl StartingSize {
    /// All sizes, the smallest first.
    pub const ALL: [Self; 3] = [
        Self {
            name: "1m",
            about: "two minutes on a CPU",
            hidden_size: 128,
            num_layers: 4,
            num_heads: 2,
            vocab_size: 1024,
            seq_len: 1024,
            rows: 2,
            steps: 400,
            lr: "3e-3",
        },
        Self {
            name: "10m",
            about: "hours on a CPU, minutes on a GPU",
            hidden_size: 384,
            num_layers: 6,
            num_heads: 6,
            vocab_size: 8192,
            seq_len: 1024,
            rows: 8,
            steps: 3000,
            lr: "2e-3",
        },
        Self {
            name: "30m",
            about: "a GPU",
            hidden_size: 512,
            num_layers: 9,
            num_heads: 8,
            vocab_size: 16_384,
            seq_len: 1024,
            rows: 32,
            steps: 10_000,
            lr: "1.5e-3",
        },
    ];

    /// Number of tokens that one optimizer step reads.
    pub fn tokens_per_step(&self) -> usize {
        self.rows * self.seq_len
    }

    /// The same size with rows of `seq_len` tokens, and about the same number of tokens per step.
    pub fn with_context(self, seq_len: usize) -> Self {
        let rows = (self.rows * self.seq_len / seq_len.max(1)).max(1);
        Self { seq_len, rows, ..self }
    }

    /// This size fitted to a text of `num_bytes` and about `num_tokens`: fewer steps by [`steps_for_text`], and no more
    /// merges than a tokenizer can learn from the text. `None` if the text is too small for the size; the smallest size
    /// takes any text.
    pub fn for_text(self, num_bytes: u64, num_tokens: f64) -> Option<Self> {
        let steps = match steps_for_text(num_tokens, self.tokens_per_step(), self.steps) {
            None if self.name == Self::ALL[0].name => LEAST_STEPS,
            steps => steps?,
        };
        Some(Self { steps, vocab_size: vocab_size_for_text(num_bytes, self.vocab_size), ..self })
    }

    /// A recipe of this size for the text of `paths`, with a tokenizer trained on that text. `overrides` as in
    /// [`Recipe::load`].
    ///
    /// # Errors
    /// The errors of [`Recipe::load`].
    pub fn recipe(&self, kind: AttentionKind, paths: &[String], overrides: &[String]) -> Result<Recipe, RecipeError> {
        let text = format!(
            "[model]\nhidden_size = {}\nnum_hidden_layers = {}\nnum_attention_heads = {}\ninitializer_range = {}\n\
             [attention]\nkind = {:?}\n[tokenizer]\ntrain = {{ vocab_size = {} }}\n[data]\npaths = {paths:?}\n\
             [training]\nsteps = {}\nseq_len = {}\nlocal_batch_size = {}\n[optimizer]\nlr = {}\n\
             [checkpoint]\ninterval = {}\n[metrics]\nlog_freq = {}\n[validation]\ninterval = {}\n",
            self.hidden_size,
            self.num_layers,
            self.num_heads,
            // A narrow model learns faster from larger initial weights, of about 1 / sqrt(hidden_size).
            if self.hidden_size < 384 { 0.06 } else { 0.02 },
            kind.name(),
            self.vocab_size,
            self.steps,
            self.seq_len,
            self.rows,
            self.lr,
            self.steps / 2,
            (self.steps / 20).min(50),
            self.steps / 4,
        );
        Recipe::load(&text, "the new recipe", overrides)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_new_recipe_is_read_back_equal_and_names_every_key() {
        let paths = ["my \"text\"/*.txt".to_owned()];
        for size in StartingSize::ALL {
            for kind in AttentionKind::ALL {
                let recipe = size.recipe(kind, &paths, &[]).expect("a valid start");
                assert_eq!(recipe.data.paths, paths);
                let text = recipe.to_template().expect("writable");
                // Fewer steps than the default warm-up need no other change.
                let few = ["training.steps=3".to_owned()];
                let tried = Recipe::load(&text, "template", &few).expect("fewer steps");
                assert_eq!(tried.lr_scheduler.warmup_steps, 0);
                let read = Recipe::load(&text, "template", &[]);
                let recipe_of = recipe.clone();
                assert_eq!(read, Ok(recipe), "{} {kind:?}\n{text}", size.name);
                assert!(text.lines().all(|line| line.chars().count() <= 120), "{text}");
                // The short template loads as the same recipe.
                let short = recipe_of.to_short_template().expect("writable");
                assert_eq!(Recipe::load(&short, "short", &[]).as_ref(), Ok(&recipe_of), "{short}");
                assert!(
                    short.lines().count() < 80
                        && !short.lines().any(|line| line.starts_with("# ") && line.ends_with(" =")),
                    "{short}"
                );
                // A key's comment has the bounds that docs/recipe.md has.
                assert!(text.contains("# Width of the residual stream. (whole number, 1 to 1048576)"), "{text}");
                for section in Recipe::KEYS.iter().filter(|it| it.name != "attention") {
                    let Kind::Table(keys) = section.kind else {
                        continue;
                    };
                    for key in keys {
                        let start = format!("{} =", key.name);
                        let is_there = text.lines().any(|line| line.trim_start_matches("# ").starts_with(&start));
                        assert!(is_there, "{}.{} in\n{text}", section.name, key.name);
                    }
                }
            }
        }
    }

    #[test]
    fn a_recipe_fits_its_text_and_its_context() {
        let [small, middle, large] = StartingSize::ALL;
        let steps_vocabulary_and_tokens = |size: StartingSize| {
            let recipe = size.recipe(AttentionKind::Dma, &["x".to_owned()], &[]).expect("valid");
            let vocab_size = recipe.stated_vocab_size().expect("trained");
            (recipe.training.steps, vocab_size, recipe.num_tokens())
        };
        let fit = |size: StartingSize, num_bytes| size.for_text(num_bytes, tokens_of_text(num_bytes));
        // A megabyte is enough for the smallest size as it is, and far too little for the largest size.
        let fitted = fit(small, 1_000_000).expect("enough");
        assert_eq!(steps_vocabulary_and_tokens(fitted), steps_vocabulary_and_tokens(small));
        let fitted = fit(middle, 1_000_000).expect("enough for some steps");
        let (steps, vocabulary, tokens) = steps_vocabulary_and_tokens(fitted);
        // 651 steps of 8192 tokens read the text's 333,333 tokens 16 times.
        assert_eq!((steps, vocabulary), (651, 8192));
        let epochs = tokens as f64 / tokens_of_text(1_000_000);
        assert!((15.9..=MOST_EPOCHS).contains(&epochs), "{epochs}");
        let least = least_tokens(large.tokens_per_step());
        assert_eq!(large.for_text(1_000_000, least - 100.0), None);
        assert_eq!(large.for_text(1_000_000, least).expect("just enough").steps, LEAST_STEPS);
        // Measured: 3.4 MB of documents and code, some of it twice, give 19,917 tokens, and 494 KB of English 9337.
        assert_eq!(vocab_size_for_text(3_360_466, 32_768), 18_588);
        assert_eq!(vocab_size_for_text(494_107, usize::MAX), 7278);
        // The smallest size takes any text, with a tokenizer that the text can give.
        let (steps, vocabulary, _) = steps_vocabulary_and_tokens(fit(small, 2_000).expect("any"));
        // 256 bytes, end of text and padding, and a merge for each 64 of the text's 2000 bytes.
        assert_eq!((steps, vocabulary), (LEAST_STEPS, 289));
        for context in [1, 64, 300, 4096, 1 << 20] {
            let recipe = small.with_context(context).recipe(AttentionKind::Nsa, &["x".to_owned()], &[]);
            let recipe = recipe.expect("any context");
            assert_eq!((recipe.training.seq_len, recipe.model.max_position_embeddings), (context, context));
            let tokens = recipe.training.tokens_per_step();
            assert!(tokens == context || (1800..=2048).contains(&tokens), "{context}: {tokens}");
        }
    }

    #[test]
    fn answers_are_read_two_to_three_times() {
        for num_tokens in [270_000.0, 20_000.0, 5_000.0, 2_100.0, 3e9] {
            for rows in [1, 3, 8, 64] {
                let (steps, fit) = steps_for_answers(num_tokens, rows, 2048);
                let epochs = (steps * fit * 2048) as f64 / num_tokens;
                assert!((2.0..=3.0).contains(&epochs), "{num_tokens} {rows}: {steps} {fit} {epochs}");
                assert!(fit <= rows && (fit == 1 || steps >= FEW_STEPS));
            }
        }
        assert_eq!(steps_for_answers(270_000.0, 8, 2048), (41, 8));
        // Less text than a row has a step all the same.
        assert_eq!(steps_for_answers(100.0, 8, 2048), (1, 1));
    }

    #[test]
    fn a_fine_tuning_reads_its_text_sixteen_times_at_most() {
        for (num_tokens, steps, expected) in [(4_000.0, 1000, 3), (100.0, 1000, 1), (4e6, 1000, 1000), (4e6, 7, 7)] {
            assert_eq!(fine_tuning_steps(num_tokens, 16_384, steps), expected, "{num_tokens}");
        }
        // A model without trained weights needs more steps than so short a text is worth.
        assert_eq!(steps_for_text(4_000.0, 16_384, 1000), None);
    }

    #[test]
    fn names_say_the_number_of_parameters() {
        for (size, most) in StartingSize::ALL.into_iter().zip([1.3e6, 12e6, 33e6]) {
            for kind in AttentionKind::ALL {
                let recipe = size.recipe(kind, &["x".to_owned()], &[]).expect("valid");
                let shape = recipe.model_shape(size.vocab_size).expect("a shape");
                let number = shape.parameters().non_embedding() as f64;
                assert!((most * 0.6..most).contains(&number), "{} {kind:?}: {number}", size.name);
            }
        }
    }

    #[test]
    fn templates_of_shipped_recipes_load_as_these_recipes() {
        for text in [
            include_str!("../../../../recipes/quickstart.toml"),
            include_str!("../../../../lab/recipes/mqar_dma.toml"),
            include_str!("../../../../recipes/dma_1p7b.toml"),
        ] {
            let recipe = Recipe::load(text, "shipped", &[]).expect("valid");
            let text = recipe.to_template().expect("writable");
            assert_eq!(Recipe::load(&text, "template", &[]), Ok(recipe), "{text}");
        }
    }
}
