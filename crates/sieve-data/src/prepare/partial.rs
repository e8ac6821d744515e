//! The journal of an unfinished preparation, so that the next one need not read finished source files again.
//!
//! Between two source files, `prepare.journal.tmp` may get a line about the documents since the previous line. The
//! shards are fsynced before the line is written, so the tokens of a complete line are on the disk. An incomplete line,
//! and tokens after the last complete line, are dropped; the result is the same as without an interruption.

use std::collections::HashSet;
use std::path::Path;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use super::meta::{DocumentSize, FORMAT_VERSION, SplitMeta};
use super::split::{Cuts, Target};
use super::tokenise::Encoded;
use crate::corpus::{AlsoHeldOut, CorpusReport, Cursor};
use crate::error::DataError;
use crate::shard::ShardWriter;
use sieve_files::{AtomicFile, temporary_name};

/// File name of the journal, followed by `.tmp` until the journal is removed.
pub(super) const JOURNAL: &str = "prepare.journal";

/// The first line of the journal, which identifies the preparation.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Header {
    format_version: u32,
    fingerprint: String,
}

impl Header {
    fn of(fingerprint: &str) -> Self {
        Self { format_version: FORMAT_VERSION, fingerprint: fingerprint.to_owned() }
    }
}

/// How far the corpora have been read.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct Place {
    /// Reports of the corpora that were read to their end.
    pub(super) done: Vec<CorpusReport>,
    /// Position in the corpus that is being read.
    pub(super) cursor: Cursor,
    /// What of that corpus was left out so far because it is also held out.
    #[serde(default)]
    pub(super) also_held_out: AlsoHeldOut,
    /// Where corpora are cut into training and validation text ([`cuts`](super::split::cuts)); `None` before that is
    /// decided. It is kept because files of the hub may have been removed after use.
    pub(super) cuts: Option<Cuts>,
}

/// Any further line of the journal: how far the preparation is, and what is new since the previous line.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Step {
    place: Place,
    /// Sizes of each shard so far.
    splits: Vec<SplitMeta>,
    /// Number of tokens of each new sequence, for each shard.
    lengths: Vec<Vec<i32>>,
    /// Number of sequences of each new document, for each shard; empty where each document is one sequence.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    parts: Vec<Vec<u32>>,
    /// Sizes of new documents in the validation split.
    pub(super) sizes: Vec<DocumentSize>,
    /// Whether `seen` of this and earlier lines is discarded, because later corpora are not compared with it.
    pub(super) clears_seen: bool,
    /// Hashes of the new texts, if duplicates are dropped.
    pub(super) seen: Vec<u128>,
    /// Hashes of new documents of a separate validation corpus.
    pub(super) held_out: Vec<u128>,
}

/// A shard that is being written.
pub(super) struct Split {
    pub(super) name: String,
    pub(super) writer: ShardWriter,
    pub(super) meta: SplitMeta,
    /// Number of sequences that the journal lists.
    num_kept: usize,
    /// Number of documents whose number of parts the journal lists; 0 where documents have no parts.
    num_parts_kept: usize,
}

/// An unfinished preparation: its shards and its journal.
pub(super) struct Partial {
    /// The training splits, then the validation split.
    pub(super) splits: Vec<Split>,
    pub(super) place: Place,
    /// Sizes of the documents in the validation split that the journal lists.
    pub(super) sizes: Vec<DocumentSize>,
    /// Hashes of the validation corpus's documents that the journal lists.
    pub(super) held_out: Vec<u128>,
    /// What the journal does not list yet.
    pub(super) new: Step,
    journal: AtomicFile,
}

impl Partial {
    /// Begins a new preparation with an empty shard for each of `names`. With `has_parts`, a document is several
    /// sequences.
    pub(super) fn create(
        dir: &Path,
        names: &[String],
        vocab_size: usize,
        fingerprint: &str,
        has_parts: bool,
    ) -> Result<Self, DataError> {
        let split = |name: &String| {
            let writer = ShardWriter::create(&dir.join(name), vocab_size)?;
            Ok(Split {
                name: name.clone(),
                writer: if has_parts { writer.with_parts() } else { writer },
                meta: SplitMeta { num_predicted: has_parts.then_some(0), ..SplitMeta::default() },
                num_kept: 0,
                num_parts_kept: 0,
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

    /// Continues the preparation of the journal in `dir`. Also returns the hashes of the texts that later duplicates
    /// are compared with. `None` if there is no journal, if it belongs to another preparation, or if the shards are
    /// shorter than it says.
    pub(super) fn resume(
        dir: &Path,
        names: &[String],
        vocab_size: usize,
        fingerprint: &str,
        has_parts: bool,
    ) -> Option<(Self, HashSet<u128>)> {
        let journal = dir.join(JOURNAL);
        let bytes = sieve_files::read_file(&temporary_name(&journal)).ok()?;
        let mut lines = bytes.split_inclusive(|&byte| byte == b'\n');
        let first = lines.next()?;
        if content::<Header>(first)? != Header::of(fingerprint) {
            return None;
        }
        let (mut num_bytes, mut last) = (first.len(), Step::default());
        let (mut sizes, mut held_out, mut seen) = (Vec::new(), Vec::new(), HashSet::new());
        let mut lengths = vec![Vec::new(); names.len()];
        let mut parts = vec![Vec::new(); names.len()];
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
            for (all, new) in parts.iter_mut().zip(&step.parts) {
                all.extend_from_slice(new);
            }
            last = step;
        }
        let split = |(((name, meta), lengths), parts): (Found<'_>, Vec<u32>)| {
            Some(Split {
                name: name.clone(),
                meta,
                num_kept: lengths.len(),
                num_parts_kept: parts.len(),
                writer: ShardWriter::resume(&dir.join(name), vocab_size, lengths, has_parts.then_some(parts)).ok()?,
            })
        };
        let splits = names.iter().zip(last.splits).zip(lengths).zip(parts).map(split);
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

    /// Appends a document to the validation shard or to training shard `train`. With `remembers`, the hashes of
    /// held-out documents are collected, so that training corpora can leave these documents out.
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
        match document.parts.as_slice() {
            [whole] => split.writer.push(whole)?,
            parts => {
                split.writer.push_parts(parts)?;
                *split.meta.num_predicted.get_or_insert(0) += document.num_predicted();
            }
        }
        if document.target == Target::Validation {
            self.new.sizes.push(document.size);
            if remembers {
                self.new.held_out.push(document.hash);
            }
        }
        Ok(())
    }

    /// Makes all documents so far durable and lists them in the journal, so that they survive an error or a kill.
    pub(super) fn keep(&mut self) -> Result<(), DataError> {
        let mut step = std::mem::take(&mut self.new);
        step.place = self.place.clone();
        for split in &mut self.splits {
            split.writer.keep()?;
            let lengths = split.writer.lengths();
            step.lengths.push(lengths[split.num_kept..].to_vec());
            step.splits.push(split.meta.clone());
            split.num_kept = lengths.len();
            if let Some(parts) = split.writer.parts() {
                step.parts.push(parts[split.num_parts_kept..].to_vec());
                split.num_parts_kept = parts.len();
            }
        }
        self.journal.write(&line(&step))?;
        self.journal.keep()?;
        self.sizes.append(&mut step.sizes);
        self.held_out.append(&mut step.held_out);
        Ok(())
    }
}

/// A shard in the journal: its name, its sizes, and the number of tokens of each sequence.
type Found<'a> = ((&'a String, SplitMeta), Vec<i32>);

/// A line of the journal: JSON after its hash, by which a damaged line is recognised.
fn line(content: &impl Serialize) -> Vec<u8> {
    let json = serde_json::to_string(content).expect("plain numbers and strings serialise");
    format!("{:016x} {json}\n", xxh3_64(json.as_bytes())).into_bytes()
}

/// The content of a line; `None` if the line is incomplete or damaged.
fn content<T: DeserializeOwned>(line: &[u8]) -> Option<T> {
    // 16 hexadecimal digits and a space come before the JSON.
    let (hash, json) = line.strip_suffix(b"\n")?.split_at_checked(17)?;
    let wanted = format!("{:016x} ", xxh3_64(json));
    (hash == wanted.as_bytes()).then(|| serde_json::from_slice(json).ok())?
}
