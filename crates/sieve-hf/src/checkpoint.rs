//! A checkpoint: one folder `step-N` that is either complete or absent.
//!
//! All files are written into `step-N.tmp` and synced; then the folder is renamed. `state.json` holds a checksum of
//! every file and of its own other fields, so that a damaged file is detected and named. Each rank of a group writes
//! its own files, with its pieces of the tensors; a reader joins the pieces.
use crate::odd_folders::{refuse_odd_file, refuse_odd_model};
use crate::tensor_file::{TensorHeader, of_step, step_of, stream_tensor_file};
use crate::tensor_files::{INDEX, SINGLE};
use crate::{CheckpointError, NamedTensor, TensorFiles, write_tensor_file};
use burn::tensor::Bytes;
use serde::{Deserialize, Serialize};
use sieve_core::ShownPath;
use sieve_files::{open_file, publish_folder, read_text, sync_folder, temporary_name, write_synced};
use std::collections::BTreeMap;
use std::fs;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

/// Version of the checkpoint layout; raised when an older reader would misread it.
pub const FORMAT_VERSION: u32 = 1;

const STATE: &str = "state.json";
const MODEL: &str = "model";
const OPTIMIZER: &str = "optimizer";
const RECIPE: &str = "config.toml";
const TOKENIZER: &str = "tokenizer.json";

/// The running mean of the training loss. It is stored as bits, because reading decimal digits may round differently.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GuardState {
    /// Mean loss of the taken steps, nats.
    #[serde(rename = "mean_loss_bits", with = "bits")]
    pub mean_loss: f32,
    /// Number of losses that the mean is taken over.
    #[serde(rename = "num_losses_bits", with = "bits")]
    pub num_losses: f32,
}

/// Serialises an f32 as a whole number with the same bits.
mod bits {
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(value: &f32, out: S) -> Result<S::Ok, S::Error> {
        out.serialize_u32(value.to_bits())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<f32, D::Error> {
        u32::deserialize(from).map(f32::from_bits)
    }
}

/// The state of training besides weights and moments: the contents of `state.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CheckpointState {
    /// The writer's [`FORMAT_VERSION`].
    pub format_version: u32,
    /// Number of optimizer steps done.
    pub step: u64,
    /// Index of the next training row in the present stage: the loader's whole state.
    pub next_sample: u64,
    /// Number of tokens trained on.
    pub tokens_seen: u64,
    /// The running mean of the training loss; absent before the first step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guard: Option<GuardState>,
    /// Rows of the embedding matrix.
    pub vocab_size: usize,
    /// Fingerprint of the prepared data that the run reads.
    pub data_fingerprint: String,
    /// Hashes of the data's tokens; empty where no text is prepared.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub data_tokens: String,
    /// Threads the run used; Burn's own GEMMs may round differently with another number.
    pub num_threads: usize,
    /// Version of Sieve that wrote the checkpoint.
    pub sieve_version: String,
    /// Number of ranks that wrote their pieces of weights and moments.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub num_shards: usize,
    /// XXH3 of every other file of the checkpoint, by name. On disk there is also an entry for `state.json` itself, a
    /// hash of its JSON without that entry.
    #[serde(default)]
    pub checksums: BTreeMap<String, String>,
}

impl CheckpointState {
    /// The state of a model before its first step.
    pub fn untrained(vocab_size: usize) -> Self {
        Self {
            format_version: FORMAT_VERSION,
            step: 0,
            next_sample: 0,
            tokens_seen: 0,
            guard: None,
            vocab_size,
            data_fingerprint: String::new(),
            data_tokens: String::new(),
            num_threads: 1,
            sieve_version: env!("CARGO_PKG_VERSION").to_owned(),
            num_shards: 1,
            checksums: BTreeMap::new(),
        }
    }
}

fn one() -> usize {
    1
}

fn is_one(count: &usize) -> bool {
    *count == 1
}

/// The contents of a checkpoint besides its state; with several ranks, the part that one of them writes.
#[derive(Clone, Debug)]
pub struct CheckpointFiles {
    /// Weights of the model, by name.
    pub model: Vec<NamedTensor>,
    /// Optimizer state; empty to store only the weights.
    pub optimizer: Vec<NamedTensor>,
    /// The resolved recipe as TOML.
    pub recipe_toml: String,
    /// The contents of `tokenizer.json`.
    pub tokenizer_json: String,
}

/// A checkpoint on disk whose state and checksums were read and verified.
#[derive(Debug)]
pub struct Checkpoint {
    /// Path of the folder `step-N`.
    pub path: PathBuf,
    /// The contents of `state.json`.
    pub state: CheckpointState,
}

/// The folder of a step: `step-N`.
fn step_folder(folder: &Path, step: u64) -> PathBuf {
    folder.join(format!("step-{step}"))
}

/// The temporary folder that a checkpoint is written into.
fn partial(folder: &Path, step: u64) -> PathBuf {
    temporary_name(&step_folder(folder, step))
}

/// All complete checkpoints in `folder`, by ascending step; none if the folder does not exist.
///
/// # Errors
/// An unreadable folder.
pub fn list_checkpoints(folder: &Path) -> Result<Vec<(u64, PathBuf)>, CheckpointError> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(CheckpointError::io("reading", folder)(error)),
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry.map_err(CheckpointError::io("reading", folder))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if let Some(step) = name.strip_prefix("step-").and_then(|n| n.parse().ok()) {
            found.push((step, entry.path()));
        }
    }
    found.sort();
    Ok(found)
}

impl Checkpoint {
    /// Writes `folder/step-N` atomically, and replaces an existing checkpoint of the same step.
    ///
    /// # Errors
    /// Any failure of the file system; an existing checkpoint is then unchanged.
    pub fn write(folder: &Path, state: CheckpointState, files: &CheckpointFiles) -> Result<PathBuf, CheckpointError> {
        // As rank 0 of 1.
        Self::write_by(folder, state, |step| Self::write_shard(folder, step, [0, 1], files))
    }

    /// As [`write`](Self::write), of weights that `read` returns for each index of `headers`, so that only one tensor
    /// is in memory at a time. `texts` are recipe and tokenizer; `beside` writes further files into the folder.
    pub(crate) fn write_model(
        folder: &Path,
        state: CheckpointState,
        texts: [&str; 2],
        headers: &[TensorHeader],
        read: impl FnMut(usize) -> Result<Bytes, CheckpointError>,
        beside: impl FnOnce(&Path) -> Result<(), CheckpointError>,
    ) -> Result<PathBuf, CheckpointError> {
        Self::write_by(folder, state, |step| {
            let partial = partial(folder, step);
            let mut checksums = write_texts(&partial, texts)?;
            beside(&partial)?;
            let name = TensorFiles::name(MODEL, 0, 1);
            let sum = stream_tensor_file(&partial.join(&name), headers, Some(of_step(step)), read)?;
            checksums.insert(name, sum);
            sync_folder(&partial)?;
            Ok(checksums)
        })
    }

    /// Writes a checkpoint whose files, but its state, `write` writes into the temporary folder of a step.
    fn write_by(
        folder: &Path,
        state: CheckpointState,
        write: impl FnOnce(u64) -> Result<BTreeMap<String, String>, CheckpointError>,
    ) -> Result<PathBuf, CheckpointError> {
        let step = state.step;
        let written = Self::begin(folder, step)
            .and_then(|()| write(step))
            .and_then(|checksums| Self::publish(folder, state, checksums));
        if written.is_err() {
            Self::discard(folder, step);
        }
        written
    }

    /// Creates the empty folder that a checkpoint is written into.
    ///
    /// # Errors
    /// Any failure of the file system.
    pub fn begin(folder: &Path, step: u64) -> Result<(), CheckpointError> {
        let partial = partial(folder, step);
        if partial.exists() {
            fs::remove_dir_all(&partial).map_err(CheckpointError::io("clearing", &partial))?;
        }
        fs::create_dir_all(&partial).map_err(CheckpointError::io("creating", partial))
    }

    /// Writes the files of `rank`, one of `size`, into the folder that [`begin`](Self::begin) made; returns their
    /// checksums by name. Rank 0 writes recipe and tokenizer too.
    ///
    /// # Errors
    /// Any failure of the file system.
    pub fn write_shard(
        folder: &Path,
        step: u64,
        [rank, size]: [usize; 2],
        files: &CheckpointFiles,
    ) -> Result<BTreeMap<String, String>, CheckpointError> {
        let partial = partial(folder, step);
        let mut checksums = match rank {
            0 => write_texts(&partial, [&files.recipe_toml, &files.tokenizer_json])?,
            _ => BTreeMap::new(),
        };
        for (stem, tensors) in [(MODEL, &files.model), (OPTIMIZER, &files.optimizer)] {
            // With several ranks, a reader expects a file of each, even if it holds no tensor.
            if stem == MODEL || rank > 0 || !tensors.is_empty() {
                let name = TensorFiles::name(stem, rank, size);
                let sum = write_tensor_file(&partial.join(&name), tensors, Some(of_step(step)))?;
                checksums.insert(name, sum);
            }
        }
        sync_folder(&partial)?;
        Ok(checksums)
    }

    /// Writes `state.json` and renames the folder to its final name, when all other files are written. Replaces an
    /// existing checkpoint of the same step.
    ///
    /// # Errors
    /// Any failure of the file system; an existing checkpoint is then unchanged.
    pub fn publish(
        folder: &Path,
        mut state: CheckpointState,
        checksums: BTreeMap<String, String>,
    ) -> Result<PathBuf, CheckpointError> {
        let partial = partial(folder, state.step);
        state.checksums = checksums;
        let mut value = serde_json::to_value(&state).expect("plain data serialises");
        let own = checksum_without_own(&value);
        value["checksums"][STATE] = own.into();
        let text = serde_json::to_string_pretty(&value).expect("plain data serialises");
        write_synced(&partial.join(STATE), text.as_bytes())?;
        sync_folder(&partial)?;
        let path = step_folder(folder, state.step);
        publish_folder(&partial, &path)?;
        Ok(path)
    }

    /// Removes the temporary folder of a checkpoint that could not be written; errors are ignored.
    pub fn discard(folder: &Path, step: u64) {
        let _ = fs::remove_dir_all(partial(folder, step));
    }

    /// Bytes on disk in the temporary folder of a checkpoint that is being written.
    pub fn bytes_written(folder: &Path, step: u64) -> u64 {
        let files = fs::read_dir(partial(folder, step)).into_iter().flatten();
        let sizes = files.filter_map(|file| Some(file.ok()?.metadata().ok()?.len()));
        sizes.sum()
    }

    /// Opens `path` (a `step-N` folder, a folder with several of them, or a run folder) and verifies every checksum.
    ///
    /// Of several checkpoints, the latest is opened. If it is damaged, the error names the one before it.
    ///
    /// # Errors
    /// No checkpoint, a damaged or truncated file, a layout of another version.
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        let (folder, previous) = Self::find(path)?;
        Self::open_verified(&folder, previous, |_name| true)
    }

    /// As [`open`](Self::open), without the optimizer's files, which only training reads.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_model(path: &Path) -> Result<Self, CheckpointError> {
        let (folder, previous) = Self::find(path)?;
        Self::open_verified(&folder, previous, |name| !name.starts_with(OPTIMIZER))
    }

    /// As [`open_model`](Self::open_model), and calls `read` while the files are verified. If a file is damaged, that
    /// is the returned error, whatever `read` returned.
    ///
    /// # Errors
    /// As [`open`](Self::open); the errors of `read`.
    pub(crate) fn open_while<T>(
        path: &Path,
        read: impl FnOnce(&Self) -> Result<T, CheckpointError>,
    ) -> Result<(Self, T), CheckpointError> {
        let (folder, previous) = Self::find(path)?;
        let checkpoint = Self::read_state(&folder, &previous)?;
        let result = std::thread::scope(|scope| {
            let verified = scope.spawn(|| Self::open_verified(&folder, previous, |name| !name.starts_with(OPTIMIZER)));
            let result = read(&checkpoint);
            match verified.join() {
                Ok(verified) => verified.and(result),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        })?;
        Ok((checkpoint, result))
    }

    /// As [`open`](Self::open), but reads only `state.json`, which is enough for the model's sizes.
    ///
    /// # Errors
    /// No checkpoint, a damaged state, a layout of another version.
    pub fn peek(path: &Path) -> Result<Self, CheckpointError> {
        let (folder, previous) = Self::find(path)?;
        Self::read_state(&folder, &previous)
    }

    /// The folder `step-N` that `path` leads to, and the folder of the checkpoint before it, if there is one.
    fn find(path: &Path) -> Result<(PathBuf, Option<PathBuf>), CheckpointError> {
        refuse_odd_file(&path.join(STATE))?;
        if path.join(STATE).is_file() {
            return Ok((path.to_owned(), previous_of(path)));
        }
        if path.is_file() {
            refuse_odd_model(path)?;
        }
        let nested = path.join("checkpoint");
        let folder = if nested.is_dir() { nested.as_path() } else { path };
        let all = list_checkpoints(folder)?;
        let Some((_, latest)) = all.last() else {
            if path.to_str().is_some_and(|path| path.starts_with("hf://")) {
                let what = format!("{} is a model on the Hugging Face hub, not a checkpoint of a run", path.shown());
                let hint = format!("sieve import --from {} --out RUN makes a run folder of it", path.shown());
                return Err(CheckpointError::refused(what, hint));
            }
            if path.join("config.json").is_file() {
                let what = format!("{} is a model of transformers, not a checkpoint of a run", path.shown());
                let hint = "sieve import --from DIR --out RUN makes a run folder of it, with a checkpoint";
                return Err(CheckpointError::refused(what, hint));
            }
            refuse_odd_model(path)?;
            // A checkpoint's folder would have config.toml.
            let has_weights = [SINGLE, INDEX].iter().any(|name| path.join(name).is_file());
            if has_weights && !path.join(RECIPE).is_file() {
                let what = format!("{} has a model's weights, but config.json is missing", path.shown());
                return Err(CheckpointError::refused(what, "fetch or copy the model's config.json into this folder"));
            }
            let (beside, runs) = (latest_beside(path), runs_in(path));
            return Err(CheckpointError::NotFound { path: path.to_owned(), beside, runs });
        };
        let previous = all.len().checked_sub(2).map(|n| all[n].1.clone());
        Ok((latest.clone(), previous.or_else(|| previous_of(latest))))
    }

    /// Opens the checkpoint at `path` and verifies the files for which `is_read` is true. Errors name `previous`.
    fn open_verified(
        path: &Path,
        previous: Option<PathBuf>,
        is_read: impl Fn(&str) -> bool,
    ) -> Result<Self, CheckpointError> {
        let checkpoint = Self::read_state(path, &previous)?;
        let step = checkpoint.state.step;
        for (name, expected) in checkpoint.state.checksums.iter().filter(|(name, _)| is_read(name)) {
            let file = path.join(name);
            let found = checksum_of(&file).map_err(|error| unreadable(&file, error, &previous))?;
            let problem = match step_of(&file) {
                _ if found != *expected => format!("its checksum is {found}, {STATE} says {expected}"),
                Some(other) if other != step => format!("it was written at step {other}, {STATE} is of step {step}"),
                _ => continue,
            };
            return Err(CheckpointError::Damaged { problem, path: file, previous });
        }
        Ok(checkpoint)
    }

    /// Reads and checks `state.json`. Errors name `previous`, the checkpoint before this one, if there is one.
    fn read_state(path: &Path, previous: &Option<PathBuf>) -> Result<Self, CheckpointError> {
        let file = path.join(STATE);
        let damaged =
            |path: PathBuf, problem: String| CheckpointError::Damaged { path, problem, previous: previous.clone() };
        let text = read_text(&file).map_err(|error| unreadable(&file, error, previous))?;
        let no_state =
            |error: serde_json::Error| damaged(file.clone(), format!("it is not the state of a run ({error})"));
        let value: serde_json::Value = serde_json::from_str(&text).map_err(no_state)?;
        let mut state: CheckpointState = serde_json::from_value(value.clone()).map_err(no_state)?;
        if state.format_version != FORMAT_VERSION {
            let (found, writer) = (state.format_version, &state.sieve_version);
            let problem = format!(
                "layout version {found} was written by Sieve {writer}, this one reads version {FORMAT_VERSION}"
            );
            return Err(CheckpointError::malformed(&file, problem));
        }
        if state.num_shards == 0 || state.checksums.is_empty() {
            let problem = "it lists no files, so nothing can be verified";
            return Err(damaged(file, problem.to_owned()));
        }
        // The entry may be missing, so that a state can be edited by hand. If damage changes the entry's name, it names
        // a file that does not exist, which is reported when the files are verified.
        if let Some(own) = state.checksums.remove(STATE)
            && own != checksum_without_own(&value)
        {
            let problem = "its values are not the ones it was written with".to_owned();
            return Err(damaged(file, problem));
        }
        Ok(Self { path: path.to_owned(), state })
    }

    /// The weights.
    ///
    /// # Errors
    /// An unreadable file.
    pub fn model(&self) -> Result<TensorFiles, CheckpointError> {
        TensorFiles::open(&self.path, MODEL, self.state.num_shards)
    }

    /// The optimizer state.
    ///
    /// # Errors
    /// An unreadable file; a checkpoint of weights alone has none.
    pub fn optimizer(&self) -> Result<TensorFiles, CheckpointError> {
        TensorFiles::open(&self.path, OPTIMIZER, self.state.num_shards)
    }

    /// Whether the checkpoint holds optimizer state.
    pub fn has_optimizer(&self) -> bool {
        let first = TensorFiles::name(OPTIMIZER, 0, self.state.num_shards);
        self.state.checksums.contains_key(&first)
    }

    /// The resolved recipe as text.
    ///
    /// # Errors
    /// An unreadable file.
    pub fn recipe_toml(&self) -> Result<String, CheckpointError> {
        let path = self.path.join(RECIPE);
        read_text(&path).map_err(CheckpointError::io("reading", path))
    }

    /// Path of the checkpoint's `tokenizer.json`.
    pub fn tokenizer_path(&self) -> PathBuf {
        self.path.join(TOKENIZER)
    }
}

/// Writes recipe and tokenizer into the temporary folder of a checkpoint; returns their checksums by name.
fn write_texts(partial: &Path, [recipe, tokenizer]: [&str; 2]) -> Result<BTreeMap<String, String>, CheckpointError> {
    let mut checksums = BTreeMap::new();
    for (name, text) in [(RECIPE, recipe), (TOKENIZER, tokenizer)] {
        write_synced(&partial.join(name), text.as_bytes())?;
        checksums.insert(name.to_owned(), format!("{:016x}", xxh3_64(text.as_bytes())));
    }
    Ok(checksums)
}

/// The error of a file that cannot be read, because it is damaged or its permissions forbid it.
fn unreadable(file: &Path, error: std::io::Error, previous: &Option<PathBuf>) -> CheckpointError {
    match error.kind() {
        ErrorKind::PermissionDenied => CheckpointError::io("reading", file)(error),
        _ => CheckpointError::Damaged {
            path: file.to_owned(),
            problem: format!("it cannot be read ({error})"),
            previous: previous.clone(),
        },
    }
}

/// XXH3 hash of a file, in hexadecimal.
fn checksum_of(path: &Path) -> std::io::Result<String> {
    let mut file = open_file(path)?;
    let mut sum = Xxh3::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(format!("{:016x}", sum.digest())),
            len => sum.update(&buffer[..len]),
        }
    }
}

/// XXH3 of a state's JSON without the entry for that checksum.
fn checksum_without_own(state: &serde_json::Value) -> String {
    let mut rest = state.clone();
    if let Some(checksums) = rest.get_mut("checksums").and_then(|sums| sums.as_object_mut()) {
        checksums.shift_remove(STATE);
    }
    format!("{:016x}", xxh3_64(rest.to_string().as_bytes()))
}

/// The checkpoint of the next lower step beside `path`; `None` if there is none, or `path` is no folder `step-N`.
fn previous_of(path: &Path) -> Option<PathBuf> {
    let own = path.file_name()?.to_str()?.strip_prefix("step-")?.parse::<u64>().ok()?;
    let all = list_checkpoints(path.parent()?).ok()?;
    all.into_iter().rev().find(|(step, _)| *step < own).map(|(_, path)| path)
}

/// The names of the runs in a folder that have checkpoints, sorted; `…` in place of those that are many.
fn runs_in(folder: &Path) -> Vec<String> {
    const MOST: usize = 24;
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let has_checkpoint = |run: &Path| list_checkpoints(&run.join("checkpoint")).is_ok_and(|all| !all.is_empty());
    let runs = entries.filter(|entry| has_checkpoint(&entry.path()));
    let mut names: Vec<_> = runs.map(|entry| Path::new(&entry.file_name()).shown().to_string()).collect();
    names.sort();
    if names.len() > MOST {
        names.truncate(MOST);
        names.push("…".to_owned());
    }
    names
}

/// The names of the latest checkpoints beside a path that holds none.
fn latest_beside(path: &Path) -> Vec<String> {
    let all = path.parent().and_then(|folder| list_checkpoints(folder).ok()).unwrap_or_default();
    let others = all.into_iter().filter(|(_, other)| other != path).map(|(step, _)| format!("step-{step}"));
    let others = others.collect::<Vec<_>>();
    others[others.len().saturating_sub(8)..].to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_that_lists_no_files_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let files = CheckpointFiles {
            model: Vec::new(),
            optimizer: Vec::new(),
            recipe_toml: String::new(),
            tokenizer_json: String::new(),
        };
        let path = Checkpoint::write(dir.path(), CheckpointState::untrained(7), &files).unwrap();
        Checkpoint::open(&path).unwrap();
        let state = path.join(STATE);
        let whole: serde_json::Value = serde_json::from_slice(&fs::read(&state).unwrap()).unwrap();
        for (key, value) in [("checksums", serde_json::json!({})), ("num_shards", 0.into())] {
            let mut edited = whole.clone();
            // A state edited by hand has no checksum of its own.
            edited["checksums"].as_object_mut().unwrap().remove(STATE);
            edited[key] = value;
            fs::write(&state, edited.to_string()).unwrap();
            for opened in [Checkpoint::open(&path), Checkpoint::peek(&path)] {
                let error = opened.expect_err(key).to_string();
                sieve_testing::says(&error, "state.json is damaged: it lists no files");
            }
        }
    }

    #[test]
    fn a_piece_of_another_step_is_refused_whatever_its_checksum() {
        let dir = tempfile::tempdir().unwrap();
        let files = |value: f32| CheckpointFiles {
            model: vec![NamedTensor { name: "a".to_owned(), data: burn::tensor::TensorData::new(vec![value; 4], [4]) }],
            optimizer: vec![NamedTensor {
                name: "a.exp_avg".to_owned(),
                data: burn::tensor::TensorData::new(vec![value; 4], [4]),
            }],
            recipe_toml: String::new(),
            tokenizer_json: String::new(),
        };
        for size in [1, 2] {
            let folder = dir.path().join(size.to_string());
            let written = |step: u64| {
                Checkpoint::begin(&folder, step).unwrap();
                let mut sums = BTreeMap::new();
                for rank in 0..size {
                    sums.extend(Checkpoint::write_shard(&folder, step, [rank, size], &files(step as f32)).unwrap());
                }
                let state = CheckpointState { step, num_shards: size, ..CheckpointState::untrained(7) };
                Checkpoint::publish(&folder, state, sums).unwrap()
            };
            let (first, second) = (written(4), written(8));
            for name in [TensorFiles::name(MODEL, size - 1, size), TensorFiles::name(OPTIMIZER, size - 1, size)] {
                Checkpoint::open(&second).unwrap();
                let (file, state) = (second.join(&name), second.join(STATE));
                let kept = [&file, &state].map(|path| fs::read(path).unwrap());
                // The checksum is made right too, as if the state had been edited by hand.
                fs::copy(first.join(&name), &file).unwrap();
                let mut edited: serde_json::Value = serde_json::from_slice(&kept[1]).unwrap();
                edited["checksums"].as_object_mut().unwrap().remove(STATE);
                edited["checksums"][&name] = checksum_of(&file).unwrap().into();
                fs::write(&state, edited.to_string()).unwrap();
                let error = Checkpoint::open(&second).unwrap_err().to_string();
                sieve_testing::says(
                    &error,
                    &format!("{name} is damaged: it was written at step 4, state.json is of step 8"),
                );
                // A piece that another program wrote says no step.
                write_tensor_file(&file, &files(8.0).model, None).unwrap();
                edited["checksums"][&name] = checksum_of(&file).unwrap().into();
                fs::write(&state, edited.to_string()).unwrap();
                Checkpoint::open(&second).unwrap();
                for (path, bytes) in [&file, &state].into_iter().zip(kept) {
                    fs::write(path, bytes).unwrap();
                }
            }
        }
    }

    #[test]
    fn a_file_of_another_user_is_not_called_damaged() {
        let file = Path::new("step-4/model.safetensors");
        let said = |kind: ErrorKind| unreadable(file, kind.into(), &None).to_string();
        let denied = said(ErrorKind::PermissionDenied);
        sieve_testing::says(&denied, "reading step-4/model.safetensors: permission denied | hint: this user may not");
        assert!(!denied.contains("damaged"), "{denied}");
        sieve_testing::says(&said(ErrorKind::NotFound), "model.safetensors is damaged: it cannot be read");
    }
}
