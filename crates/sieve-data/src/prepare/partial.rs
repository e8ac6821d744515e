//! What an unfinished preparation keeps, so that the next one reads no finished source file again.
//!
//! `prepare.journal.tmp` gets a line between two source files: what the files since the line before gave. The shards
//! are fsynced before their line is written, so the tokens of a whole line are on the disk. A line cut by a kill, and
//! tokens behind the last whole line, are dropped, and the result is the same as without the kill.

use std::collections::HashSet;
use std::fs;
use std::path::Path;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use super::meta::FORMAT_VERSION;
use super::split::{Cuts, Target};
use super::tokenise::Encoded;
use super::{DocumentSize, SplitMeta};
use crate::corpus::{CorpusReport, Cursor};
use crate::error::DataError;
use crate::shard::ShardWriter;
use sieve_files::{AtomicFile, temporary_name};

/// It keeps its temporary name until it is removed.
pub(super) const JOURNAL: &str = "prepare.journal";

/// The first line: which preparation this is.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Header {
    format_version: u32,
    fingerprint: String,
}

impl Header {
    fn of(fingerprint: &str) -> Self {
        Self {
            format_version: FORMAT_VERSION,
            fingerprint: fingerprint.to_owned(),
        }
    }
}

/// Where in the corpora the preparation is.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct Place {
    /// Reports of the corpora that are done; the next one is being read.
    pub(super) done: Vec<CorpusReport>,
    pub(super) cursor: Cursor,
    /// What [`cuts`](super::split::cuts) found; kept because the files it read may be gone: fetched, used and removed.
    pub(super) cuts: Option<Cuts>,
}

/// Any further line: where the preparation is, and what is new since the line before.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Step {
    place: Place,
    /// What is in each shard.
    splits: Vec<SplitMeta>,
    /// Of each shard: tokens of its new sequences.
    lengths: Vec<Vec<i32>>,
    /// New documents of the validation split.
    pub(super) sizes: Vec<DocumentSize>,
    /// Whether the hashes of texts that earlier lines have no longer count: the next corpus is not compared with them.
    pub(super) clears_seen: bool,
    /// Hashes of texts met, where duplicates are dropped.
    pub(super) seen: Vec<u128>,
    /// Hashes of the validation corpus's documents.
    pub(super) held_out: Vec<u128>,
}

/// One shard being written.
pub(super) struct Split {
    pub(super) name: String,
    pub(super) writer: ShardWriter,
    pub(super) meta: SplitMeta,
    /// Sequences that the journal has.
    num_kept: usize,
}

/// All that an unfinished preparation has written.
pub(super) struct Partial {
    /// The validation split last.
    pub(super) splits: Vec<Split>,
    pub(super) place: Place,
    /// Of the documents of the validation split that the journal has.
    pub(super) sizes: Vec<DocumentSize>,
    /// Hashes of the validation corpus's documents that the journal has.
    pub(super) held_out: Vec<u128>,
    /// What the journal has not yet.
    pub(super) new: Step,
    journal: AtomicFile,
}

impl Partial {
    /// Begins anew: a shard for each of `names`, of prompts and texts or of texts.
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
                num_kept: 0,
            })
        };
        let mut journal = AtomicFile::create(&dir.join(JOURNAL))?;
        journal.write(&line(&Header::of(fingerprint)))?;
        Ok(Self {
            splits: names.iter().map(split).collect::<Result<_, DataError>>()?,
            place: Place::default(),
            sizes: Vec::new(),
            held_out: Vec::new(),
            new: Step::default(),
            journal,
        })
    }

    /// Continues what the journal in `dir` describes, and gives the hashes of the texts seen; `None` where there is no
    /// journal, or one of another preparation, or shards that do not fit it.
    pub(super) fn resume(
        dir: &Path,
        names: &[String],
        vocab_size: usize,
        fingerprint: &str,
        has_prompts: bool,
    ) -> Option<(Self, HashSet<u128>)> {
        let journal = dir.join(JOURNAL);
        let bytes = fs::read(temporary_name(&journal)).ok()?;
        let mut lines = bytes.split_inclusive(|&byte| byte == b'\n');
        let first = lines.next()?;
        if content::<Header>(first)? != Header::of(fingerprint) {
            return None;
        }
        let (mut num_bytes, mut last) = (first.len(), Step::default());
        let (mut sizes, mut held_out, mut seen) = (Vec::new(), Vec::new(), HashSet::new());
        let mut lengths = vec![Vec::new(); names.len()];
        for line in lines {
            let Some(mut step) = content::<Step>(line) else { break };
            num_bytes += line.len();
            if step.clears_seen {
                seen.clear();
            }
            seen.extend(step.seen.drain(..));
            sizes.append(&mut step.sizes);
            held_out.append(&mut step.held_out);
            for (all, new) in lengths.iter_mut().zip(&step.lengths) {
                all.extend_from_slice(new);
            }
            last = step;
        }
        let split = |((name, meta), lengths): ((&String, SplitMeta), Vec<i32>)| {
            let sequences = 1 + usize::from(has_prompts);
            Some(Split {
                name: name.clone(),
                meta,
                num_kept: lengths.len(),
                writer: ShardWriter::resume(&dir.join(name), vocab_size, lengths, sequences).ok()?,
            })
        };
        let splits = names.iter().zip(last.splits).zip(lengths).map(split);
        let splits = splits.collect::<Option<Vec<_>>>()?;
        let partial = Self {
            journal: AtomicFile::resume(&journal, num_bytes as u64).ok()?,
            place: last.place,
            new: Step::default(),
            splits,
            sizes,
            held_out,
        };
        (partial.splits.len() == names.len()).then_some((partial, seen))
    }

    /// Writes a document to the shard that it is for, to shard `train` where it is to be trained on. `remembers` says
    /// whether one that is held out is to be known again in other corpora.
    pub(super) fn take(&mut self, document: Encoded, train: usize, remembers: bool) -> Result<(), DataError> {
        let number = match document.target {
            Target::Train => train,
            Target::Validation => self.splits.len() - 1,
        };
        let split = &mut self.splits[number];
        split.meta.num_documents += 1;
        split.meta.num_tokens += document.num_tokens();
        split.meta.num_bytes += document.size.num_bytes;
        split.meta.num_words += document.size.num_words;
        match &document.prompt {
            None => split.writer.push(&document.ids)?,
            Some(prompt) => split.writer.push_with_prompt(prompt, &document.ids)?,
        }
        if document.target == Target::Validation {
            self.new.sizes.push(document.size);
            if remembers {
                self.new.held_out.push(document.hash);
            }
        }
        Ok(())
    }

    /// Makes everything so far durable; from now on it outlives an error or a kill.
    pub(super) fn keep(&mut self) -> Result<(), DataError> {
        let mut step = std::mem::take(&mut self.new);
        step.place = self.place.clone();
        for split in &mut self.splits {
            split.writer.keep()?;
            let lengths = split.writer.lengths();
            step.lengths.push(lengths[split.num_kept..].to_vec());
            step.splits.push(split.meta.clone());
            split.num_kept = lengths.len();
        }
        self.journal.write(&line(&step))?;
        self.journal.keep()?;
        self.sizes.append(&mut step.sizes);
        self.held_out.append(&mut step.held_out);
        Ok(())
    }
}

/// A line of the journal: a hash, so that a damaged line is no line, and JSON.
fn line(content: &impl Serialize) -> Vec<u8> {
    let json = serde_json::to_string(content).expect("plain numbers and strings serialise");
    format!("{:016x} {json}\n", xxh3_64(json.as_bytes())).into_bytes()
}

/// What a whole line holds.
fn content<T: DeserializeOwned>(line: &[u8]) -> Option<T> {
    let (hash, json) = line.strip_suffix(b"\n")?.split_at_checked(17)?;
    let wanted = format!("{:016x} ", xxh3_64(json));
    (hash == wanted.as_bytes()).then(|| serde_json::from_slice(json).ok())?
}
