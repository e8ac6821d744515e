//! From a recipe to a tokenizer and two shards.
use crate::TrainError;
use sieve_core::Recipe;
use sieve_core::recipe::{DataFormat, TokenizerSection};
use sieve_data::{
    BpeConfig, Corpus, CorpusConfig, FileOrder, OnChange, PrepareConfig, Prepared, Progress,
    Tokenizer, ValidationSource, prepare,
};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Seed of the sample that `data.max_bytes` takes of a larger corpus.
const CORPUS_SEED: u64 = 0;

/// A tokenizer and the shards it made.
#[derive(Debug)]
pub struct TrainingData {
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    /// Where its `tokenizer.json` lies.
    pub tokenizer_path: PathBuf,
    /// The shards.
    pub prepared: Prepared,
    /// Time spent training the tokenizer; zero when it was there.
    pub tokenizer_time: Duration,
    /// Time spent on the shards.
    pub prepare_time: Duration,
}

/// What is happening while data is prepared.
#[derive(Clone, Copy, Debug)]
pub enum DataEvent {
    /// A tokenizer is being trained on about this many bytes.
    TrainingTokenizer {
        /// Tokens wanted.
        vocab_size: usize,
        /// Text read at most, in bytes.
        sample_bytes: u64,
    },
    /// Text is becoming shards.
    Preparing(Progress),
}

/// Settings of the training corpus, and of the validation corpus where the recipe names one.
///
/// `variable` looks environment variables up.
///
/// # Errors
/// A variable in a path that is not set.
pub fn corpus_configs(
    recipe: &Recipe,
    variable: &dyn Fn(&str) -> Option<String>,
) -> Result<(CorpusConfig, Option<CorpusConfig>), TrainError> {
    let expand = |paths: &[String]| {
        let expanded = paths
            .iter()
            .map(|path| sieve_core::paths::expand(path, variable));
        expanded.collect::<Result<Vec<_>, _>>()
    };
    let data = &recipe.data;
    let base = |paths: Vec<String>| match data.format {
        DataFormat::Text => CorpusConfig::text(paths),
        DataFormat::Jsonl => CorpusConfig::jsonl(paths, &data.text_column),
    };
    let train = CorpusConfig {
        order: match data.max_bytes {
            Some(_) => FileOrder::Hashed { seed: CORPUS_SEED },
            None => FileOrder::Sorted,
        },
        max_bytes: data.max_bytes,
        max_document_bytes: data.max_document_bytes,
        deduplicate: data.deduplicate,
        skip_invalid: data.skip_invalid,
        ..base(expand(&data.paths)?)
    };
    let validation = match &recipe.validation.paths {
        Some(paths) => Some(CorpusConfig {
            max_document_bytes: data.max_document_bytes,
            skip_invalid: data.skip_invalid,
            ..base(expand(paths)?)
        }),
        None => None,
    };
    Ok((train, validation))
}

/// Makes, or finds again, everything a run reads, in `dir`.
///
/// # Errors
/// Missing or broken files of the recipe; an unchanged preparation is reused, a changed one replaced.
pub fn prepare_data(
    recipe: &Recipe,
    dir: &Path,
    variable: &dyn Fn(&str) -> Option<String>,
    observe: &mut dyn FnMut(DataEvent),
) -> Result<TrainingData, TrainError> {
    let (train, validation) = corpus_configs(recipe, variable)?;
    let corpus = Corpus::open(train)?;
    let validation = validation.map(Corpus::open).transpose()?;
    std::fs::create_dir_all(dir).map_err(TrainError::io("creating", dir))?;

    let started = Instant::now();
    let (tokenizer, tokenizer_path) = match &recipe.tokenizer {
        TokenizerSection::Path(path) => {
            let path = PathBuf::from(sieve_core::paths::expand(path, variable)?);
            (Tokenizer::from_file(&path)?, path)
        }
        TokenizerSection::Train(training) => {
            let config = BpeConfig {
                vocab_size: training.vocab_size,
                sample_bytes: training.sample_bytes,
            };
            trained_tokenizer(&corpus, config, dir, observe)?
        }
    };
    let tokenizer_time = started.elapsed();

    let started = Instant::now();
    let config = PrepareConfig {
        dir: dir.to_owned(),
        validation: match &validation {
            Some(corpus) => ValidationSource::Corpus(corpus),
            None => ValidationSource::Fraction(recipe.data.validation_fraction),
        },
        eos_token: None,
        on_change: OnChange::Replace,
    };
    let observe = std::cell::RefCell::new(observe);
    let report = |progress| observe.borrow_mut()(DataEvent::Preparing(progress));
    let prepared = prepare(&corpus, &tokenizer, &config, &report)?;
    let prepare_time = started.elapsed();
    Ok(TrainingData {
        tokenizer,
        tokenizer_path,
        prepared,
        tokenizer_time,
        prepare_time,
    })
}

/// The tokenizer of `dir`, trained unless one for the same corpus and settings is there.
fn trained_tokenizer(
    corpus: &Corpus,
    config: BpeConfig,
    dir: &Path,
    observe: &mut dyn FnMut(DataEvent),
) -> Result<(Tokenizer, PathBuf), TrainError> {
    let path = dir.join("tokenizer.json");
    let mark_path = dir.join("tokenizer.origin");
    let mark = format!("{:032x} {config:?}\n", corpus.fingerprint());
    let same = std::fs::read_to_string(&mark_path).is_ok_and(|found| found == mark);
    if same && path.is_file() {
        return Ok((Tokenizer::from_file(&path)?, path));
    }
    observe(DataEvent::TrainingTokenizer {
        vocab_size: config.vocab_size,
        sample_bytes: config.sample_bytes,
    });
    let tokenizer = Tokenizer::train(corpus, config)?;
    tokenizer.save(&path)?;
    std::fs::write(&mark_path, mark).map_err(TrainError::io("writing", &mark_path))?;
    Ok((tokenizer, path))
}
