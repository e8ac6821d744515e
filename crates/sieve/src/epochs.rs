//! How many epochs a run reads of its text: exact if the text is tokenised, else estimated from the files' sizes.
use sieve_core::recipe::{DataFormat, EPOCHS_AS_NEW};
use sieve_core::{Recipe, ShownPath};
use sieve_data::{Corpus, Prepared, SplitMeta};
use sieve_host::environment::variable;
use sieve_host::text_files::{Beginning, local_tokenizer};
use sieve_host::{hub, terminal};
use sieve_train::{chat_format, corpus_configs};
use std::path::Path;

/// A text and how often the run reads it. The loader shuffles each text separately, so each has its own number of
/// epochs.
#[derive(Debug, serde::Serialize)]
pub(crate) struct TextEpochs {
    /// Folder of the text's shards, or its path in a recipe with `data.weights`.
    text: String,
    /// Number of training tokens of the text.
    num_tokens: u64,
    /// How many times the run reads the text.
    epochs: f64,
    /// Of these tokens, the predicted ones, where not all are.
    #[serde(skip_serializing_if = "Option::is_none")]
    num_predicted: Option<u64>,
    /// The fewest tokens that the text must have: those of the longest row of the run's stages, since rows are filled;
    /// 1 where each document has rows of its own, which need not be full.
    #[serde(skip)]
    seq_len: u64,
}

impl TextEpochs {
    /// What is wrong with a text that has too few tokens for one row, which training refuses, and a hint.
    pub(crate) fn too_short(&self) -> Option<[String; 2]> {
        let [tokens, row] = [self.num_tokens, self.seq_len].map(terminal::thousands);
        (self.num_tokens < self.seq_len).then(|| {
            [
                format!("{tokens} training tokens are too few for a row of {row}"),
                format!("rows of {tokens} tokens at most (--context or training.seq_len), or more text"),
            ]
        })
    }
}

/// The texts of a run whose shards are in `dir`: the run's own text, then its stages' texts. `None` if some of the
/// shards do not exist.
pub(crate) fn of_run(recipe: &Recipe, dir: &Path) -> Option<Vec<TextEpochs>> {
    let mut all = unread(recipe, dir)?;
    let num_own = all.len();
    // Here `epochs` counts tokens; the loop below divides them by the text's tokens.
    for stage in recipe.stages() {
        let alone = recipe.at_stage(&stage);
        let num_tokens = stage.section.steps as f64 * alone.training.tokens_per_step() as f64;
        let of_stage = match stage.section.paths {
            Some(_) => {
                let first = all.len();
                all.extend(unread(&alone, &dir.join(format!("stage-{}", stage.index + 1)))?);
                &mut all[first..]
            }
            None => &mut all[..num_own],
        };
        let weights = alone.data.weights.unwrap_or_else(|| vec![1.0]);
        let total = weights.iter().sum::<f64>();
        let seq_len = if alone.training.one_document_per_row { 1 } else { alone.training.seq_len as u64 };
        for (text, weight) in of_stage.iter_mut().zip(weights) {
            text.seq_len = text.seq_len.max(seq_len);
            text.epochs += num_tokens * weight / total;
        }
    }
    for text in &mut all {
        text.epochs /= text.num_tokens.max(1) as f64;
    }
    Some(all)
}

/// The texts of the shards in `dir`, 0 epochs each: one for each weighted path, else one for all paths. `None` if the
/// shards do not exist.
fn unread(recipe: &Recipe, dir: &Path) -> Option<Vec<TextEpochs>> {
    let meta = Prepared::open(dir).ok()?.meta;
    let text = |text: String, split: &SplitMeta| TextEpochs {
        text,
        num_tokens: split.num_tokens,
        epochs: 0.0,
        num_predicted: split.num_predicted,
        seq_len: 1,
    };
    let sources = meta.sources.iter().zip(&recipe.data.paths);
    let sources = sources.map(|(source, path)| text(path.clone(), &source.train));
    let sources = sources.collect::<Vec<_>>();
    if sources.is_empty() { Some(vec![text(dir.shown().to_string(), &meta.train)]) } else { Some(sources) }
}

/// Epochs of `data.paths`, estimated from the size of the files and their first documents; `None` if they are not on
/// this machine, or every stage has a text of its own.
fn estimate(recipe: &Recipe) -> Option<f64> {
    let (config, _) = corpus_configs(recipe, &variable).ok()?;
    let no_checkpoint = None;
    let chats = chat_format(recipe, no_checkpoint, &hub::surroundings()).ok()?;
    let corpus = Corpus::open(config).ok()?.with_chats(chats);
    // The files of a data set on the hub are not known before it is fetched.
    let num_bytes = Some(corpus.text_bytes()).filter(|_| !corpus.files().is_empty())?;
    let beginning = match local_tokenizer(recipe).ok()? {
        None => Beginning::default(),
        tokenizer => Beginning::read(&corpus, tokenizer.as_ref()).ok()?,
    };
    let stages = recipe.stages().into_iter().map(|stage| stage.section).filter(|stage| stage.paths.is_none());
    let tokens: f64 = stages.map(|stage| stage.num_tokens() as f64).sum();
    if tokens == 0.0 {
        return None;
    }
    Some(tokens / beginning.tokens_of(num_bytes).max(1.0))
}

/// The lines about epochs, from the tokenised texts if `found`, else estimated.
pub(crate) fn lines(found: Option<&[TextEpochs]>, recipe: &Recipe) -> Vec<String> {
    if recipe.data.format == DataFormat::Mqar {
        return Vec::new();
    }
    let most = match found {
        Some(found) => found.iter().map(|part| part.epochs).reduce(f64::max),
        None => estimate(recipe),
    };
    let mut lines = match found {
        None => vec![format!(
            "  text       not tokenised yet{}; sieve data prepare tokenises it, then this line tells how often the run \
             reads it",
            most.map_or(String::new(), |most| format!(", read about {most:.1} times by its size")),
        )],
        Some(found) => {
            let lines = |part: &TextEpochs| {
                let tokens = terminal::thousands(part.num_tokens);
                let line =
                    format!("  text       {tokens} training tokens of {}, read {:.2} times", part.text, part.epochs);
                let predicted = part.num_predicted.map(terminal::thousands);
                let predicted =
                    predicted.map(|predicted| format!("             loss on {predicted} of {tokens} tokens"));
                let too_short = part.too_short().map(|[what, hint]| format!("             {what}; hint: {hint}"));
                std::iter::once(line).chain(predicted).chain(too_short)
            };
            found.iter().flat_map(lines).collect()
        }
    };
    if most.is_some_and(|most| most > EPOCHS_AS_NEW) {
        lines.push(format!(
            "             more than {EPOCHS_AS_NEW} times teaches less each time (arXiv:2305.16264): take more text or \
             fewer steps"
        ));
    }
    lines
}
