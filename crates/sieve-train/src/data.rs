//! Prepares a run's tokenizer and the source of its rows: shards of tokenised text, or a synthetic task.
mod chats;
mod mqar;
mod sources;
pub(crate) mod stages;

use crate::TrainError;
pub use chats::{chat_format, chat_format_of, chat_template};
use sieve_core::Recipe;
use sieve_files::{Taken, read_text, try_lock};
pub use sources::corpus_configs;

use sieve_core::recipe::{DataFormat, TokenizerSource};
use sieve_data::{
    BpeConfig, Corpus, DataError, HubConfig, MqarPart, OnChange, PrepareConfig, Prepared, Progress, Surroundings,
    Tokenizer, ValidationSource, check_owner, prepare,
};
use sieve_hf::Checkpoint;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// A run's tokenizer, and the source of its rows.
#[derive(Debug)]
pub struct TrainingData {
    /// The run's tokenizer.
    pub tokenizer: Tokenizer,
    /// Text of its `tokenizer.json`, kept because the file may change or disappear during the run.
    pub tokenizer_json: String,
    /// Source of the rows of every stage that names no text.
    pub rows: RowSource,
    /// Text of the stages that name their own, by the index of the stage, from 0.
    pub stages: BTreeMap<usize, StageText>,
    /// Time spent on training the tokenizer; zero if there was one already.
    pub tokenizer_time: Duration,
    /// Time spent writing or opening the shards.
    pub prepare_time: Duration,
    /// Folders whose shards are taken if they are the same ([`DataSource::looking_in`]).
    known: Vec<PathBuf>,
}

/// Text that one stage names for itself.
#[derive(Debug)]
pub struct StageText {
    /// The tokenised text of the stage.
    pub prepared: Prepared,
    /// The stage's `weights`: one for each shard to train on.
    pub weights: Option<Vec<f64>>,
}

/// Where training and validation rows come from.
#[derive(Debug)]
pub enum RowSource {
    /// From text that was tokenised into shards.
    Shards {
        /// The folder of shards and its `meta.json`.
        prepared: Box<Prepared>,
        /// `data.weights`: one for each shard to train on.
        weights: Option<Vec<f64>>,
    },
    /// From generated samples of multi-query associative recall.
    Mqar {
        /// Kinds of training samples and their numbers.
        train: Vec<MqarPart>,
        /// Validation samples, drawn from the same distribution.
        test: Vec<MqarPart>,
    },
}

/// The number of rows that a recipe's embedding needs at least. If `model.vocab_size` is set, tokens that were added to
/// the tokenizer may lack a row; a text that holds such a token is refused later.
pub(crate) fn rows_needed(recipe: &Recipe, tokenizer: &Tokenizer) -> usize {
    match recipe.model.vocab_size {
        Some(_) => tokenizer.num_base_tokens(),
        None => tokenizer.vocab_size(),
    }
}

/// What is happening while data is prepared.
#[derive(Clone, Copy, Debug)]
pub enum DataEvent {
    /// A tokenizer is being trained.
    TrainingTokenizer {
        /// Vocabulary size of the tokenizer.
        vocab_size: usize,
        /// Most bytes of text that the training reads.
        sample_bytes: u64,
    },
    /// Text is being tokenised into shards.
    Preparing(Progress),
}

/// The files that a recipe names, found and listed; nothing is written yet.
#[derive(Debug)]
pub struct DataSource {
    /// `None` for rows that are generated (MQAR).
    text: Option<TextSource>,
    /// The tokenizer and the text of its file; `None` if the recipe asks for a new one to be trained.
    tokenizer: Option<(Tokenizer, String)>,
    /// Folders whose shards are taken if they are the same.
    known: Vec<PathBuf>,
}

/// The corpora of a recipe whose rows are text.
#[derive(Debug)]
struct TextSource {
    /// One corpus of all paths, or with `data.weights` a corpus for each path.
    train: Vec<Corpus>,
    /// All paths as one corpus, which a tokenizer is trained on.
    whole: Corpus,
    /// A corpus of its own for validation; `None` if a part of the training text is held out.
    validation: Option<Corpus>,
    /// Settings of the hub; [`connect`](Self::connect) sets its folder.
    hub: HubConfig,
}

impl DataSource {
    /// Lists the recipe's files on this machine and reads its tokenizer, if it names one. Writes nothing but
    /// a tokenizer of the hub into its cache.
    ///
    /// # Errors
    /// A path that matches no file, an unreadable tokenizer, a vocabulary that does not fit the model.
    pub fn open(recipe: &Recipe, around: &Surroundings<'_>) -> Result<Self, TrainError> {
        Self::with_tokenizer_of(None, recipe, around)
    }

    /// As [`open`](Self::open), for a run that begins with `checkpoint`: reads the checkpoint's tokenizer instead of
    /// the recipe's.
    ///
    /// # Errors
    /// The errors of [`open`](Self::open).
    pub fn with_tokenizer_of(
        checkpoint: Option<&Checkpoint>,
        recipe: &Recipe,
        around: &Surroundings<'_>,
    ) -> Result<Self, TrainError> {
        let tokenizer = match (checkpoint, recipe.tokenizer.source()) {
            (Some(checkpoint), _) => Some(read_tokenizer(&checkpoint.tokenizer_path(), recipe)?),
            (None, TokenizerSource::Path(path)) => {
                let path = tokenizer_file(path, around)?;
                let found = read_tokenizer(&path, recipe)?;
                recipe.model_shape(rows_needed(recipe, &found.0))?;
                Some(found)
            }
            (None, TokenizerSource::Numbers(count)) => {
                let tokenizer = Tokenizer::numbers(count)?;
                let json = tokenizer.to_json()?;
                Some((tokenizer, json))
            }
            (None, TokenizerSource::Train(_)) => None,
        };
        let text = match recipe.data.format {
            DataFormat::Mqar => None,
            _ => Some(TextSource::open(recipe, around)?.with_chats(recipe, checkpoint, around)?),
        };
        stages::check_stages(recipe, around)?;
        // The column may be of other text, for validation or a stage.
        let has_other_text =
            recipe.validation.paths.is_some() || recipe.stage.iter().any(|stage| stage.paths.is_some());
        if let Some(text) = text.as_ref().filter(|_| !has_other_text) {
            text.whole.check_text_column(&recipe.data.text_column)?;
        }
        Ok(Self { text, tokenizer, known: Vec::new() })
    }

    /// Names further folders of prepared data, as other runs have them. Where [`prepare`](Self::prepare) finds none in
    /// its own folder, it takes the tokenizer and the shards of one that has them for the same text and settings.
    #[must_use]
    pub fn looking_in(self, known: Vec<PathBuf>) -> Self {
        Self { known, ..self }
    }

    /// The training corpus, and the validation corpus if the recipe names one.
    pub fn corpora(&self) -> impl Iterator<Item = &Corpus> {
        let corpora = self.text.iter();
        corpora.flat_map(|text| std::iter::once(&text.whole).chain(&text.validation))
    }

    /// Creates or reopens the tokenizer and shards of a run in `dir`. Data sets of the Hugging Face hub are resolved
    /// here: their list of files is kept in `dir`, and a file is fetched when it is read.
    ///
    /// # Errors
    /// Broken files; a data set that cannot be reached; shards in `dir` that were made from other text or settings,
    /// unless `on_change` says to replace them.
    pub fn prepare(
        self,
        recipe: &Recipe,
        dir: &Path,
        on_change: OnChange,
        observe: &mut dyn FnMut(DataEvent),
    ) -> Result<TrainingData, TrainError> {
        let Some(mut text) = self.text else {
            let (tokenizer, tokenizer_json) = self.tokenizer.ok_or(TrainError::NoTokenizer)?;
            let (train, test) = mqar::parts(recipe)?;
            let rows = RowSource::Mqar { train, test };
            return Ok(TrainingData::new((tokenizer, tokenizer_json), rows));
        };
        std::fs::create_dir_all(dir).map_err(TrainError::io("creating", dir))?;
        text.connect(dir)?;
        let started = Instant::now();
        let (tokenizer, tokenizer_json) = match (self.tokenizer, recipe.tokenizer.source()) {
            (Some(found), _) => found,
            (None, TokenizerSource::Train(training)) => {
                let config = BpeConfig { vocab_size: training.vocab_size, sample_bytes: training.sample_bytes };
                trained_tokenizer(&text.whole, (config, recipe), (dir, &self.known), on_change, observe)?
            }
            (None, _) => return Err(TrainError::NoTokenizer),
        };
        let tokenizer_time = started.elapsed();

        let started = Instant::now();
        let no_base = None;
        let prepared = text.prepare(recipe, &tokenizer, (dir, &self.known, on_change), no_base, observe)?;
        let prepare_time = started.elapsed();
        let rows = RowSource::shards(recipe, prepared);
        let known = self.known;
        Ok(TrainingData { tokenizer_time, prepare_time, known, ..TrainingData::new((tokenizer, tokenizer_json), rows) })
    }
}

impl RowSource {
    fn shards(recipe: &Recipe, prepared: Prepared) -> Self {
        Self::Shards { prepared: Box::new(prepared), weights: recipe.data.weights.clone() }
    }
}

impl TextSource {
    /// Lists the files of the recipe's text.
    fn open(recipe: &Recipe, around: &Surroundings<'_>) -> Result<Self, TrainError> {
        let (whole, validation) = corpus_configs(recipe, around.variable)?;
        let train = sources::weighted_configs(recipe, &whole).into_iter().map(Corpus::open);
        Ok(Self {
            train: train.collect::<Result<_, _>>()?,
            whole: Corpus::open(whole)?,
            validation: validation.map(Corpus::open).transpose()?,
            hub: HubConfig::new(around, PathBuf::new()),
        })
    }

    /// Sets the chat template that makes texts of messages, if the text is chats.
    fn with_chats(
        mut self,
        recipe: &Recipe,
        checkpoint: Option<&Checkpoint>,
        around: &Surroundings<'_>,
    ) -> Result<Self, TrainError> {
        if let Some(chats) = chat_format(recipe, checkpoint, around)? {
            let set = |corpus: Corpus| corpus.with_chats(Some(chats.clone()));
            self.train = self.train.into_iter().map(set).collect();
            self.whole = set(self.whole);
            self.validation = self.validation.map(set);
        }
        Ok(self)
    }

    /// Writes the shards into a folder, reopens them, or takes them from one of the folders `known`. `base` is the
    /// run's data if this is the text of a stage.
    fn prepare(
        &self,
        recipe: &Recipe,
        tokenizer: &Tokenizer,
        (dir, known, on_change): (&Path, &[PathBuf], OnChange),
        base: Option<&Prepared>,
        observe: &mut dyn FnMut(DataEvent),
    ) -> Result<Prepared, TrainError> {
        let config = PrepareConfig {
            dir: dir.to_owned(),
            validation: match &self.validation {
                Some(corpus) => ValidationSource::Corpus(corpus),
                None => ValidationSource::Fraction(recipe.data.validation_fraction),
            },
            on_change,
            base,
            known,
        };
        let observe = std::cell::RefCell::new(observe);
        let report = |progress| observe.borrow_mut()(DataEvent::Preparing(progress));
        prepare(&self.train, tokenizer, &config, &report).map_err(in_cache)
    }

    /// Fetches the file lists of the hub's data sets that the recipe names, if any, into `dir`.
    fn connect(&mut self, dir: &Path) -> Result<(), TrainError> {
        let config = HubConfig { dir: dir.join("hub"), ..self.hub.clone() };
        let corpora = self.train.iter_mut().chain([&mut self.whole]);
        for corpus in corpora.chain(&mut self.validation) {
            corpus.connect(&config)?;
        }
        Ok(())
    }
}

impl TrainingData {
    /// Data that took no time to prepare, without text of stages.
    fn new((tokenizer, tokenizer_json): (Tokenizer, String), rows: RowSource) -> Self {
        Self {
            tokenizer,
            tokenizer_json,
            rows,
            stages: BTreeMap::new(),
            tokenizer_time: Duration::ZERO,
            prepare_time: Duration::ZERO,
            known: Vec::new(),
        }
    }

    /// Whether the file of `tokenizer.path` no longer holds the tokenizer that the run reads. A tokenizer of the hub is
    /// not looked up.
    pub fn tokenizer_has_changed(&self, recipe: &Recipe, around: &Surroundings<'_>) -> bool {
        let path = match recipe.tokenizer.source() {
            TokenizerSource::Path(path) if !sieve_data::is_hub_tokenizer(path) => path,
            _ => return false,
        };
        let path = tokenizer_file(path, around).ok();
        path.and_then(|path| read_text(&path).ok()).as_ref() != Some(&self.tokenizer_json)
    }

    /// The shards of all texts that the run reads.
    pub fn shards(&self) -> impl Iterator<Item = &Prepared> {
        let of_stages = self.stages.values().map(|text| &text.prepared);
        self.prepared().into_iter().chain(of_stages)
    }

    /// The data of a run that resumes from `checkpoint`: the checkpoint's tokenizer, and the shards in `dir`, which are
    /// prepared again from the recipe's files only if they are missing. Existing files in `dir` are not changed.
    ///
    /// # Errors
    /// Other shards in `dir`; files that have changed since the run began.
    pub fn resume(
        recipe: &Recipe,
        dir: &Path,
        checkpoint: &Checkpoint,
        around: &Surroundings<'_>,
        observe: &mut dyn FnMut(DataEvent),
    ) -> Result<Self, TrainError> {
        let state = &checkpoint.state;
        let saved = [&state.data_fingerprint, &state.data_tokens].map(|all| stages::base(all));
        // The text files may have changed or disappeared since; the shards that were made from them decide.
        if recipe.data.format != DataFormat::Mqar
            && let Ok(mut prepared) = Prepared::open(dir)
            && is_known(&mut prepared, saved)
        {
            let tokenizer = read_tokenizer(&checkpoint.tokenizer_path(), recipe)?;
            return Ok(Self::new(tokenizer, RowSource::shards(recipe, prepared)));
        }
        let source = DataSource::with_tokenizer_of(Some(checkpoint), recipe, around)?;
        let mut data = match source.prepare(recipe, dir, OnChange::Refuse, observe) {
            Err(TrainError::CacheInUse { what, .. }) => {
                return Err(TrainError::other_data(dir, &format!("it {what}")));
            }
            prepared => prepared?,
        };
        if let RowSource::Shards { prepared, .. } = &mut data.rows {
            // Gives equal shards the checkpoint's fingerprint, which is compared below.
            is_known(prepared, saved);
        }
        if data.base_fingerprint() == saved[0] {
            Ok(data)
        } else {
            Err(TrainError::other_data(dir, "the text files have changed since"))
        }
    }
}

/// Whether shards equal the shards of a checkpoint, which stores the fingerprint of their source files and settings,
/// and a hash of their tokens. Copied files have new modification times and thus a new fingerprint; if the tokens are
/// equal, the shards get the checkpoint's fingerprint back.
fn is_known(prepared: &mut Prepared, [fingerprint, tokens]: [&str; 2]) -> bool {
    if prepared.meta.fingerprint != fingerprint && stages::tokens_of(prepared) == tokens {
        fingerprint.clone_into(&mut prepared.meta.fingerprint);
    }
    prepared.meta.fingerprint == fingerprint
}

/// The file that a recipe's `tokenizer.path` names. A tokenizer of the hub (`hf://OWNER/NAME`) is looked up in
/// `huggingface_hub`'s own cache, and fetched into a folder of that cache if it is missing.
///
/// # Errors
/// A variable that is not set; a hub that cannot be reached.
pub fn tokenizer_file(path: &str, around: &Surroundings<'_>) -> Result<PathBuf, TrainError> {
    let path = sieve_core::paths::expand(path, around.variable)?;
    if !sieve_data::is_hub_tokenizer(&path) {
        return Ok(PathBuf::from(path));
    }
    Ok(sieve_data::hub_tokenizer(&path, HubConfig::of_cache(around)?)?)
}

/// The tokenizer of a file as the recipe uses it, and the file's text.
fn read_tokenizer(path: &Path, recipe: &Recipe) -> Result<(Tokenizer, String), TrainError> {
    let tokenizer = Tokenizer::from_file(path)?;
    let tokenizer = tokenizer.with_eos_token(recipe.tokenizer.eos_token.as_deref());
    let json = read_text(path).map_err(TrainError::io("reading", path))?;
    Ok((tokenizer, json))
}

/// Turns the error of a folder with other data into one whose hint names `data.cache_dir`.
fn in_cache(error: DataError) -> TrainError {
    match error {
        DataError::OtherPreparation { dir, what } => TrainError::CacheInUse { path: dir, what },
        error => error.into(),
    }
}

/// The tokenizer of `dir`, trained unless `dir`, or else one of the folders `known`, has one for the same corpus and
/// settings.
fn trained_tokenizer(
    corpus: &Corpus,
    (config, recipe): (BpeConfig, &Recipe),
    (dir, known): (&Path, &[PathBuf]),
    on_change: OnChange,
    observe: &mut dyn FnMut(DataEvent),
) -> Result<(Tokenizer, String), TrainError> {
    let path = dir.join("tokenizer.json");
    let mark_path = dir.join("tokenizer.origin");
    let lock_path = dir.join("tokenizer.lock");
    // Of two runs that share the folder, one trains the tokenizer while the other waits for it.
    let locked = try_lock(&lock_path).and_then(|taken| match taken {
        Taken::Yes(file) => Ok(file),
        Taken::ByAnother(file) => {
            observe(DataEvent::Preparing(Progress::Waiting));
            file.lock().map(|()| file)
        }
    });
    let _lock = locked.map_err(TrainError::io("locking", &lock_path))?;
    let of_config = format!(" {config:?}\n");
    let mark = format!("{:032x}{of_config}", corpus.fingerprint());
    let found = read_text(&mark_path).ok();
    let origin = found.as_ref().and_then(|found| found.strip_suffix(&of_config));
    if origin.is_some_and(|hash| corpus.is_of_hash(hash)) && path.is_file() {
        return read_tokenizer(&path, recipe);
    }
    let in_use = |what: &str| TrainError::CacheInUse { path: dir.to_owned(), what: what.to_owned() };
    // An empty tokenizer.origin means that a training of the tokenizer did not finish.
    let is_unfinished = found.as_deref() == Some("");
    if found.is_none() && path.exists() {
        return Err(in_use("holds a tokenizer.json that no preparation has written"));
    }
    if !is_unfinished && path.is_file() && on_change == OnChange::Refuse {
        return Err(in_use("holds a tokenizer trained on other files or with other settings"));
    }
    check_owner(dir).map_err(in_cache)?;
    let tokenizer = match known.iter().find_map(|other| tokenizer_of_mark(other, &mark)) {
        Some(taken) => taken,
        None => {
            observe(DataEvent::TrainingTokenizer { vocab_size: config.vocab_size, sample_bytes: config.sample_bytes });
            Tokenizer::train(corpus, config)?
        }
    };
    // tokenizer.origin is emptied before the tokenizer is saved and written after it: if the process dies in between,
    // the next run finds an unfinished training rather than another tokenizer's origin.
    let write_mark = |mark: &str| std::fs::write(&mark_path, mark).map_err(TrainError::io("writing", &mark_path));
    write_mark("")?;
    tokenizer.save(&path)?;
    write_mark(&mark)?;
    read_tokenizer(&path, recipe)
}

/// The tokenizer in a folder of prepared data, if its `tokenizer.origin` says `mark`.
fn tokenizer_of_mark(dir: &Path, mark: &str) -> Option<Tokenizer> {
    let origin = read_text(&dir.join("tokenizer.origin")).ok()?;
    if origin != mark {
        return None;
    }
    Tokenizer::from_file(&dir.join("tokenizer.json")).ok()
}
