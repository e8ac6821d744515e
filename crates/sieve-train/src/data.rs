//! From a recipe to a tokenizer and two shards.
use crate::TrainError;
use crate::lock::{Taken, try_lock};
use sieve_core::Recipe;
use sieve_core::recipe::{DataFormat, TokenizerSection};
use sieve_data::{
    BpeConfig, Corpus, CorpusConfig, DataError, FileOrder, OnChange, PrepareConfig, Prepared,
    Progress, Tokenizer, ValidationSource, prepare,
};
use sieve_hf::Checkpoint;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Seed of the sample that `data.max_bytes` takes of a larger corpus.
const CORPUS_SEED: u64 = 0;

/// A tokenizer and the shards it made.
#[derive(Debug)]
pub struct TrainingData {
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    /// Its `tokenizer.json`, kept because the file may go or change while a run lasts.
    pub tokenizer_json: String,
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

/// The files a recipe names, found and listed; nothing is written yet.
#[derive(Debug)]
pub struct DataSource {
    train: Corpus,
    validation: Option<Corpus>,
    /// `None` where the recipe has one trained.
    tokenizer: Option<(Tokenizer, String)>,
}

impl DataSource {
    /// Lists the files and reads the tokenizer, where the recipe names one. Writes nothing.
    ///
    /// # Errors
    /// A path that matches no file, an unreadable tokenizer, a vocabulary that does not fit the model.
    pub fn open(
        recipe: &Recipe,
        variable: &dyn Fn(&str) -> Option<String>,
    ) -> Result<Self, TrainError> {
        let tokenizer = match &recipe.tokenizer {
            TokenizerSection::Path(path) => {
                let path = PathBuf::from(sieve_core::paths::expand(path, variable)?);
                let found = read_tokenizer(&path)?;
                recipe.model_shape(found.0.vocab_size())?;
                Some(found)
            }
            TokenizerSection::Train(_) => None,
        };
        let (train, validation) = corpus_configs(recipe, variable)?;
        Ok(Self {
            train: Corpus::open(train)?,
            validation: validation.map(Corpus::open).transpose()?,
            tokenizer,
        })
    }

    /// Makes, or finds again, everything a run reads, in `dir`.
    ///
    /// # Errors
    /// Broken files; a folder that holds another preparation, unless `on_change` has it replaced.
    pub fn prepare(
        self,
        recipe: &Recipe,
        dir: &Path,
        on_change: OnChange,
        observe: &mut dyn FnMut(DataEvent),
    ) -> Result<TrainingData, TrainError> {
        std::fs::create_dir_all(dir).map_err(TrainError::io("creating", dir))?;
        let started = Instant::now();
        let (tokenizer, tokenizer_json) = match (self.tokenizer, &recipe.tokenizer) {
            (Some(found), _) => found,
            (None, TokenizerSection::Train(training)) => {
                let config = BpeConfig {
                    vocab_size: training.vocab_size,
                    sample_bytes: training.sample_bytes,
                };
                trained_tokenizer(&self.train, config, dir, on_change, observe)?
            }
            (None, TokenizerSection::Path(path)) => read_tokenizer(Path::new(path))?,
        };
        let tokenizer_time = started.elapsed();

        let started = Instant::now();
        let config = PrepareConfig {
            dir: dir.to_owned(),
            validation: match &self.validation {
                Some(corpus) => ValidationSource::Corpus(corpus),
                None => ValidationSource::Fraction(recipe.data.validation_fraction),
            },
            eos_token: None,
            on_change,
        };
        let observe = std::cell::RefCell::new(observe);
        let report = |progress| observe.borrow_mut()(DataEvent::Preparing(progress));
        let corpora = std::slice::from_ref(&self.train);
        let prepared = prepare(corpora, &tokenizer, &config, &report).map_err(in_cache)?;
        let prepare_time = started.elapsed();
        Ok(TrainingData {
            tokenizer,
            tokenizer_json,
            prepared,
            tokenizer_time,
            prepare_time,
        })
    }
}

impl TrainingData {
    /// What the run of `checkpoint` reads: its tokenizer, and the shards in `dir`, which are made again from the
    /// recipe's files only where they are gone. What is in `dir` stays as it is.
    ///
    /// # Errors
    /// Other shards in `dir`; files that have changed since the run began.
    pub fn resume(
        recipe: &Recipe,
        dir: &Path,
        checkpoint: &Checkpoint,
        variable: &dyn Fn(&str) -> Option<String>,
        observe: &mut dyn FnMut(DataEvent),
    ) -> Result<Self, TrainError> {
        let expected = &checkpoint.state.data_fingerprint;
        let (tokenizer, tokenizer_json) = read_tokenizer(&checkpoint.tokenizer_path())?;
        // The files may have changed or gone since: what counts is what was made of them.
        if let Ok(prepared) = Prepared::open(dir)
            && prepared.meta.fingerprint == *expected
        {
            return Ok(Self {
                tokenizer,
                tokenizer_json,
                prepared,
                tokenizer_time: Duration::ZERO,
                prepare_time: Duration::ZERO,
            });
        }
        let source = DataSource {
            tokenizer: Some((tokenizer, tokenizer_json)),
            ..DataSource::open(recipe, variable)?
        };
        let other = |what: String| TrainError::OtherData {
            path: dir.to_owned(),
            what,
        };
        match source.prepare(recipe, dir, OnChange::Refuse, observe) {
            Ok(data) if data.prepared.meta.fingerprint == *expected => Ok(data),
            Ok(_) => Err(other("the text files have changed since".to_owned())),
            Err(TrainError::CacheInUse { what, .. }) => Err(other(format!("it {what}"))),
            Err(error) => Err(error),
        }
    }
}

/// The tokenizer of a file, and the file's text.
fn read_tokenizer(path: &Path) -> Result<(Tokenizer, String), TrainError> {
    let tokenizer = Tokenizer::from_file(path)?;
    let json = std::fs::read_to_string(path).map_err(TrainError::io("reading", path))?;
    Ok((tokenizer, json))
}

/// Says of a folder in use which key of the recipe names it.
fn in_cache(error: DataError) -> TrainError {
    match error {
        DataError::OtherPreparation { dir, what } => TrainError::CacheInUse { path: dir, what },
        error => error.into(),
    }
}

/// The tokenizer of `dir`, trained unless one for the same corpus and settings is there.
fn trained_tokenizer(
    corpus: &Corpus,
    config: BpeConfig,
    dir: &Path,
    on_change: OnChange,
    observe: &mut dyn FnMut(DataEvent),
) -> Result<(Tokenizer, String), TrainError> {
    let path = dir.join("tokenizer.json");
    let mark_path = dir.join("tokenizer.origin");
    let lock_path = dir.join("tokenizer.lock");
    // Two runs that share the folder: one trains, the other finds what it made.
    let locked = try_lock(&lock_path).and_then(|taken| match taken {
        Taken::Yes(file) => Ok(file),
        Taken::ByAnother(file) => {
            observe(DataEvent::Preparing(Progress::Waiting));
            file.lock().map(|()| file)
        }
    });
    let _lock = locked.map_err(TrainError::io("locking", &lock_path))?;
    let mark = format!("{:032x} {config:?}\n", corpus.fingerprint());
    let found = std::fs::read_to_string(&mark_path).ok();
    if found.as_ref() == Some(&mark) && path.is_file() {
        return read_tokenizer(&path);
    }
    if found.is_some() && path.is_file() && on_change == OnChange::Refuse {
        return Err(TrainError::CacheInUse {
            path: dir.to_owned(),
            what: "holds a tokenizer trained on other files or with other settings".to_owned(),
        });
    }
    observe(DataEvent::TrainingTokenizer {
        vocab_size: config.vocab_size,
        sample_bytes: config.sample_bytes,
    });
    let tokenizer = Tokenizer::train(corpus, config)?;
    // The mark goes first and comes last, so that it never stands beside another tokenizer than its own.
    match std::fs::remove_file(&mark_path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            return Err(TrainError::io("removing", &mark_path)(error));
        }
        _ => tokenizer.save(&path)?,
    }
    std::fs::write(&mark_path, mark).map_err(TrainError::io("writing", &mark_path))?;
    read_tokenizer(&path)
}
