//! Progress of an unfinished preparation, so that the next one resumes instead of starting over.
//!
//! `prepare.state.json` says how much of each temporary file counts. It is replaced (never changed) after those files
//! are fsynced, so anything after the counted part is truncated, and the result is the same as without the kill.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::meta::FORMAT_VERSION;
use super::{DocumentSize, SplitMeta};
use crate::corpus::{CorpusReport, Cursor};
use crate::error::DataError;
use crate::shard::ShardWriter;
use sieve_files::{AtomicFile, temporary_name, write_atomically};

pub(super) const STATE: &str = "prepare.state.json";
const SIZES_LOG: &str = "validation.sizes";
const SEEN_LOG: &str = "prepare.seen";
const HELD_OUT_LOG: &str = "prepare.held_out";
/// Logs that keep their temporary names until they are removed; a shard's file is renamed when it is whole.
pub(super) const LOGS: [&str; 3] = [SIZES_LOG, SEEN_LOG, HELD_OUT_LOG];

/// The contents of `prepare.state.json`.
#[derive(Debug, Serialize, Deserialize)]
struct State {
    format_version: u32,
    fingerprint: String,
    place: Place,
    splits: Vec<SplitMeta>,
    num_seen: u64,
    num_held_out: u64,
}

/// Where in the corpora the preparation is.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct Place {
    /// Reports of the corpora that are done; the next one is being read.
    pub(super) done: Vec<CorpusReport>,
    pub(super) cursor: Cursor,
    /// What [`cuts`](super::split::cuts) found; kept because the files it read may be gone: fetched, used and removed.
    #[serde(default)]
    pub(super) cuts: Option<Vec<Option<u64>>>,
}

/// One shard being written.
pub(super) struct Split {
    pub(super) name: String,
    pub(super) writer: ShardWriter,
    pub(super) meta: SplitMeta,
}

/// All that an unfinished preparation has written.
pub(super) struct Partial {
    dir: PathBuf,
    fingerprint: String,
    /// The validation split last.
    pub(super) splits: Vec<Split>,
    sizes: Log<16>,
    pub(super) sizes_list: Vec<DocumentSize>,
    seen: Log<16>,
    held_out: Log<16>,
    /// Hashes of the validation corpus's documents.
    pub(super) held_out_set: HashSet<u128>,
    pub(super) place: Place,
}

impl Partial {
    /// Begins anew.
    pub(super) fn create(
        dir: &Path,
        names: &[String],
        vocab_size: usize,
        fingerprint: &str,
        has_prompts: bool,
    ) -> Result<Self, DataError> {
        let split = |name: &String| {
            let writer = ShardWriter::create(&dir.join(name), vocab_size)?;
            Ok(Split {
                name: name.clone(),
                writer: if has_prompts { writer.with_prompts() } else { writer },
                meta: SplitMeta::default(),
            })
        };
        Ok(Self {
            dir: dir.to_path_buf(),
            fingerprint: fingerprint.to_owned(),
            splits: names.iter().map(split).collect::<Result<_, DataError>>()?,
            sizes: Log::create(&dir.join(SIZES_LOG))?,
            sizes_list: Vec::new(),
            seen: Log::create(&dir.join(SEEN_LOG))?,
            held_out: Log::create(&dir.join(HELD_OUT_LOG))?,
            held_out_set: HashSet::new(),
            place: Place::default(),
        })
    }

    /// Resumes the preparation that the state in `dir` describes, and returns the hashes of the texts seen; `None`
    /// where there is no state, or one of another preparation, or files that do not fit it.
    pub(super) fn resume(
        dir: &Path,
        names: &[String],
        vocab_size: usize,
        fingerprint: &str,
        has_prompts: bool,
    ) -> Option<(Self, HashSet<u128>)> {
        let bytes = fs::read(dir.join(STATE)).ok()?;
        let state = serde_json::from_slice::<State>(&bytes).ok()?;
        if state.format_version != FORMAT_VERSION
            || state.fingerprint != fingerprint
            || state.splits.len() != names.len()
        {
            return None;
        }
        let num_sizes = state.splits.last()?.num_documents;
        let (sizes, size_records) = Log::resume(&dir.join(SIZES_LOG), num_sizes).ok()?;
        let (seen, seen_records) = Log::resume(&dir.join(SEEN_LOG), state.num_seen).ok()?;
        let (held_out, held_out_records) = Log::resume(&dir.join(HELD_OUT_LOG), state.num_held_out).ok()?;
        let split = |(name, meta): (&String, SplitMeta)| {
            let sequences = 1 + usize::from(has_prompts);
            let writer = ShardWriter::resume(&dir.join(name), vocab_size, meta.num_documents, sequences).ok()?;
            (writer.num_tokens() == meta.num_tokens).then(|| Split {
                name: name.clone(),
                writer,
                meta,
            })
        };
        let partial = Self {
            dir: dir.to_path_buf(),
            fingerprint: state.fingerprint,
            splits: names.iter().zip(state.splits).map(split).collect::<Option<_>>()?,
            sizes,
            sizes_list: size_records.into_iter().map(size_of_record).collect(),
            seen,
            held_out,
            held_out_set: held_out_records.into_iter().map(u128::from_le_bytes).collect(),
            place: state.place,
        };
        let seen = seen_records.into_iter().map(u128::from_le_bytes).collect();
        Some((partial, seen))
    }

    /// Notes the size of a document that went into the validation split.
    pub(super) fn push_size(&mut self, size: DocumentSize) -> Result<(), DataError> {
        self.sizes_list.push(size);
        let (bytes, words) = (size.num_bytes.to_le_bytes(), size.num_words.to_le_bytes());
        self.sizes.push(std::array::from_fn(|at| match at {
            0..8 => bytes[at],
            _ => words[at - 8],
        }))
    }

    /// Notes texts met, where duplicates are dropped.
    pub(super) fn push_seen(&mut self, hashes: &[u128]) -> Result<(), DataError> {
        hashes.iter().try_for_each(|hash| self.seen.push(hash.to_le_bytes()))
    }

    /// Notes a document of the validation corpus.
    pub(super) fn push_held_out(&mut self, hash: u128) -> Result<(), DataError> {
        match self.held_out_set.insert(hash) {
            true => self.held_out.push(hash.to_le_bytes()),
            false => Ok(()),
        }
    }

    /// Makes everything so far durable; from now on it outlives an error or a kill.
    pub(super) fn keep(&mut self) -> Result<(), DataError> {
        for split in &mut self.splits {
            split.writer.keep()?;
        }
        self.sizes.file.keep()?;
        self.seen.file.keep()?;
        self.held_out.file.keep()?;
        let state = State {
            format_version: FORMAT_VERSION,
            fingerprint: self.fingerprint.clone(),
            place: self.place.clone(),
            splits: self.splits.iter().map(|split| split.meta.clone()).collect(),
            num_seen: self.seen.num_records,
            num_held_out: self.held_out.num_records,
        };
        let json = serde_json::to_vec(&state).expect("plain numbers and strings serialise");
        Ok(write_atomically(&self.dir.join(STATE), &json)?)
    }
}

/// Removes what an unfinished preparation left, the state first.
pub(super) fn discard(dir: &Path) -> Result<(), DataError> {
    let logs = LOGS.map(|name| temporary_name(&dir.join(name)));
    for path in [dir.join(STATE)].into_iter().chain(logs) {
        if path.exists() {
            fs::remove_file(&path).map_err(DataError::io("remove", &path))?;
        }
    }
    Ok(())
}

fn size_of_record(record: [u8; 16]) -> DocumentSize {
    let (bytes, words) = record.split_at(8);
    let number = |half: &[u8]| u64::from_le_bytes(half.try_into().expect("half of sixteen"));
    DocumentSize {
        num_bytes: number(bytes),
        num_words: number(words),
    }
}

/// A temporary file of records of one size.
struct Log<const SIZE: usize> {
    file: AtomicFile,
    num_records: u64,
}

impl<const SIZE: usize> Log<SIZE> {
    fn create(path: &Path) -> Result<Self, DataError> {
        Ok(Self {
            file: AtomicFile::create(path)?,
            num_records: 0,
        })
    }

    fn resume(path: &Path, num_records: u64) -> Result<(Self, Vec<[u8; SIZE]>), DataError> {
        let file = AtomicFile::resume(path, num_records * SIZE as u64)?;
        let temporary = temporary_name(path);
        let bytes = fs::read(&temporary).map_err(DataError::io("read", &temporary))?;
        Ok((Self { file, num_records }, bytes.as_chunks().0.to_vec()))
    }

    fn push(&mut self, record: [u8; SIZE]) -> Result<(), DataError> {
        self.num_records += 1;
        Ok(self.file.write(&record)?)
    }
}
