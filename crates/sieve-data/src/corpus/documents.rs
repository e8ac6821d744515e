//! Reads the documents of a corpus, applies its limits, and counts duplicates and invalid documents.

use sieve_core::ShownPath;
use std::collections::HashSet;
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_128;

use super::config::{Format, SourceFile};
use super::source::{self, DocumentSource};
use super::{Corpus, Document};
use crate::chat::{ChatFormat, MESSAGES};
use crate::error::DataError;

/// How many documents were read and dropped.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CorpusReport {
    /// Number of files opened.
    pub num_files: u64,
    /// Number of documents returned.
    pub num_documents: u64,
    /// Bytes of UTF-8 text of the returned documents.
    pub num_bytes: u64,
    /// Number of documents dropped because they are blank.
    pub num_blank: u64,
    /// Documents dropped because an earlier one has the same text.
    pub num_duplicates: u64,
    /// Number of invalid documents that were skipped.
    pub num_invalid: u64,
    /// Error message about the first invalid document, if there was one.
    pub first_invalid: Option<String>,
    /// Whether reading stopped at the limit `max_bytes`.
    pub reached_max_bytes: bool,
    /// What was not trained on because the validation text has it, too.
    #[serde(default, skip_serializing_if = "AlsoHeldOut::is_none")]
    pub also_held_out: AlsoHeldOut,
}

/// Training text that was left out because a copy of it is held out for validation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AlsoHeldOut {
    /// Number of documents whose whole text was left out.
    pub num_documents: u64,
    /// Number of documents whose end was left out, so that only their beginning is trained on.
    pub num_shortened: u64,
    /// Bytes of text that were left out; of chats only the answers count.
    pub num_bytes: u64,
}

impl AlsoHeldOut {
    /// Whether nothing was left out.
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }
}

impl std::ops::AddAssign for AlsoHeldOut {
    fn add_assign(&mut self, other: Self) {
        self.num_documents += other.num_documents;
        self.num_shortened += other.num_shortened;
        self.num_bytes += other.num_bytes;
    }
}

impl CorpusReport {
    /// The sums over several corpora.
    pub(crate) fn sum(reports: &[Self]) -> Self {
        let mut sum = Self::default();
        reports.iter().for_each(|report| sum += report);
        sum
    }

    /// Why documents were dropped, for an error message.
    fn summary(&self) -> String {
        let mut summary =
            format!("{} blank, {} duplicates, {} invalid", self.num_blank, self.num_duplicates, self.num_invalid);
        if self.reached_max_bytes {
            summary.push_str(", the next is larger than max_bytes");
        }
        if let Some(first) = &self.first_invalid {
            summary.push_str(&format!("; the first invalid one: {}", first.lines().next().unwrap_or_default()));
        }
        summary
    }
}

impl std::ops::AddAssign<&Self> for CorpusReport {
    fn add_assign(&mut self, other: &Self) {
        self.num_files += other.num_files;
        self.num_documents += other.num_documents;
        self.num_bytes += other.num_bytes;
        self.num_blank += other.num_blank;
        self.num_duplicates += other.num_duplicates;
        self.num_invalid += other.num_invalid;
        if self.first_invalid.is_none() {
            self.first_invalid.clone_from(&other.first_invalid);
        }
        self.reached_max_bytes |= other.reached_max_bytes;
        self.also_held_out += other.also_held_out;
    }
}

/// How far a corpus was read. Between two files, the cursor and the hashes of the texts seen are enough to continue.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Cursor {
    /// Index of the file that is being read.
    pub(crate) file_idx: usize,
    pub(crate) report: CorpusReport,
}

/// The documents of a corpus, in order. Ends after its first error; a corpus without any document is an error too.
pub struct Documents<'a> {
    corpus: &'a Corpus,
    /// The reader of the open file; `None` between files.
    source: Option<Box<dyn DocumentSource>>,
    /// A second reader of the same file, for the prompt of each document; `None` if documents have no prompts.
    prompts: Option<Box<dyn DocumentSource>>,
    /// Path of the open file on this disk.
    path: PathBuf,
    cursor: Cursor,
    seen: HashSet<u128>,
    /// Hashes added to `seen` since the last [`take_newly_seen`](Self::take_newly_seen).
    newly_seen: Vec<u128>,
    done: bool,
}

impl Corpus {
    /// The text of the chat in line or row `line` of a file, and the bytes of the assistant's messages; `json` is what
    /// [`ChatFormat::text`](crate::ChatFormat::text) takes.
    fn chat(&self, path: &Path, (column, line): (&str, u64), json: &str) -> Result<ChatOfRow, DataError> {
        let row = match self.config().format.of(path) {
            Format::Parquet { .. } => "row",
            _ => "line",
        };
        let Some(chats) = self.chats() else {
            let reason = "names messages, and there is no chat template to make a text of them";
            return Err(DataError::setting("messages_column", reason.to_owned()));
        };
        let found = chats.text(json).map_err(|error| {
            let what = format!("{row} {line}: column {column:?}: {}", error.what);
            if error.is_of_template {
                return DataError::refused(format!("{}: {what}", path.shown()), error.hint);
            }
            DataError::document(path, what, error.hint)
        })?;
        Ok((found.text, Some(found.answers)))
    }
}

impl Corpus {
    /// What the first user says in the first chat that can be read; `None` where documents are no chats.
    pub fn first_question(&self) -> Option<String> {
        let column = self.config().messages_column.as_ref()?;
        let file = self.files().first().filter(|file| file.remote.is_none())?;
        let format = self.config().format.of(&file.path).with_column(column);
        let mut rows = source::open_messages(&format, &file.path, self.max_document_bytes(file), Vec::new()).ok()?;
        let (json, _line) = std::iter::from_fn(|| rows.next_document()).find_map(Result::ok)?;
        let row: serde_json::Map<String, serde_json::Value> = serde_json::from_str(&json).ok()?;
        let messages = row.get(MESSAGES)?.as_array()?;
        let first = messages.iter().find(|message| message.get("role").is_some_and(|role| role == "user"))?;
        first.get("content")?.as_str().map(str::to_owned)
    }
}

/// The text of a chat, and the bytes of it that are predicted.
type ChatOfRow = (String, Option<Vec<Range<usize>>>);

impl<'a> Documents<'a> {
    /// Continues with the file of `cursor`; `seen` holds the hashes of the texts in earlier files.
    pub(crate) fn resume(corpus: &'a Corpus, cursor: Cursor, seen: HashSet<u128>) -> Self {
        Self {
            corpus,
            source: None,
            prompts: None,
            path: PathBuf::new(),
            cursor,
            seen,
            newly_seen: Vec::new(),
            done: false,
        }
    }

    /// Position up to which the corpus was read.
    pub(crate) fn cursor(&self) -> &Cursor {
        &self.cursor
    }

    /// The hashes of texts read since the last call; none unless duplicates are dropped.
    pub(crate) fn take_newly_seen(&mut self) -> Vec<u128> {
        std::mem::take(&mut self.newly_seen)
    }

    /// The hashes of all texts read, for the next corpus.
    pub(crate) fn into_seen(self) -> HashSet<u128> {
        self.seen
    }

    /// Counts of the documents read so far.
    pub fn report(&self) -> &CorpusReport {
        &self.cursor.report
    }

    /// Whether no file is open: the next document is the first of a file.
    pub(crate) fn is_between_files(&self) -> bool {
        self.source.is_none()
    }

    /// Whether the last document or an error was returned.
    pub(crate) fn is_done(&self) -> bool {
        self.done
    }

    /// The share of the only file that was read; the file has about `num_bytes`, unpacked.
    pub(super) fn share_read(&self, num_bytes: u64) -> f64 {
        self.source.as_ref().map_or(1.0, |source| source.share_read(num_bytes))
    }

    /// Whether there is nothing more to read.
    fn is_at_end(&self) -> bool {
        self.cursor.report.reached_max_bytes || self.cursor.file_idx == self.corpus.files().len()
    }

    /// Opens the file at the cursor's position.
    fn open(&mut self, file: &SourceFile) -> Result<(), DataError> {
        let config = self.corpus.config();
        let path = self.corpus.local_path(file)?;
        let max_bytes = self.corpus.max_document_bytes(file);
        let of_file = config.format.of(&path);
        let source = match &config.messages_column {
            Some(column) if of_file == Format::Text => {
                return Err(DataError::no_column(&path, column, "messages_column"));
            }
            Some(column) => {
                let beside = self.corpus.chats().map_or(Vec::new(), ChatFormat::columns);
                source::open_messages(&of_file.with_column(column), &path, max_bytes, beside)?
            }
            None => source::open(&of_file, &path, max_bytes)?,
        };
        let prompts = match &config.prompt_column {
            Some(column) if of_file == Format::Text => {
                return Err(DataError::no_column(&path, column, "prompt_column"));
            }
            Some(column) => Some(source::open(&of_file.with_column(column), &path, max_bytes)?),
            None => None,
        };
        self.cursor.report.num_files += 1;
        self.source = Some(source);
        self.prompts = prompts;
        self.path = path;
        Ok(())
    }

    /// The next document that is not dropped. `None` at the end of a file or of the corpus, and where the document
    /// would exceed `max_bytes`. Blank documents, repeated documents (with `deduplicate`) and invalid documents (with
    /// `skip_invalid`) are dropped and counted.
    fn advance(&mut self) -> Result<Option<Document>, DataError> {
        let corpus = self.corpus;
        let config = corpus.config();
        corpus.check_connected()?;
        if self.is_at_end() {
            return Ok(None);
        }
        if self.source.is_none() {
            self.open(&corpus.files()[self.cursor.file_idx])?;
        }
        while let Some(source) = &mut self.source {
            // Both readers return one item for each line or row, valid or not, so text and prompt stay together.
            let document = source.next_document();
            let file_idx = self.cursor.file_idx;
            let prompt = self.prompts.as_mut().and_then(|prompts| prompts.next_document());
            let document = document.map(|document| -> Result<_, DataError> {
                let (text, line) = document?;
                let prompt: Option<String> = prompt.transpose()?.map(|(prompt, _)| prompt);
                let (text, answers) = match &config.messages_column {
                    Some(column) => corpus.chat(&self.path, (column, line), &text)?,
                    None => (text, None),
                };
                Ok(Document { text, prompt, answers, file_idx, line })
            });
            let report = &mut self.cursor.report;
            let document = match document {
                None => {
                    (self.source, self.prompts) = (None, None);
                    self.cursor.file_idx += 1;
                    break;
                }
                Some(Err(error)) if config.skip_invalid && error.is_invalid_document() => {
                    report.num_invalid += 1;
                    report.first_invalid.get_or_insert_with(|| error.to_string());
                    continue;
                }
                Some(Err(error)) if error.is_invalid_document() => {
                    // A damaged archive can decompress to invalid text; then the archive is the error.
                    return Err(source::broken_archive(&self.path).unwrap_or(error));
                }
                Some(document) => document?,
            };
            let text = &document.text;
            let hash = config.deduplicate.then(|| match &document.prompt {
                None => xxh3_128(text.as_bytes()),
                // Valid texts hold no NUL, so it separates prompt and text.
                Some(prompt) => xxh3_128([prompt.as_str(), "\0", text].concat().as_bytes()),
            });
            if text.trim().is_empty() {
                report.num_blank += 1;
            } else if hash.is_some_and(|hash| self.seen.contains(&hash)) {
                report.num_duplicates += 1;
            } else {
                let num_bytes = report.num_bytes + text.len() as u64;
                if num_bytes > config.max_bytes.unwrap_or(u64::MAX) {
                    report.reached_max_bytes = true;
                    return Ok(None);
                }
                // A document beyond the limit is not taken, so another source may have it.
                if let Some(hash) = hash {
                    self.seen.insert(hash);
                    self.newly_seen.push(hash);
                }
                report.num_documents += 1;
                report.num_bytes = num_bytes;
                return Ok(Some(document));
            }
        }
        Ok(None)
    }

    /// Like [`next`](Self::next), but also returns `None` at the end of each file.
    pub(crate) fn next_in_file(&mut self) -> Option<Result<Document, DataError>> {
        if self.done {
            return None;
        }
        let next = match self.advance() {
            Ok(None) if self.is_at_end() && self.report().num_documents == 0 => {
                let (files, summary) = (self.corpus.files(), self.report().summary());
                let first = files.first().map(|file| file.path.shown().to_string());
                let more = match files.len() {
                    0 | 1 => String::new(),
                    more => format!(" and {} files more", more - 1),
                };
                let what = format!("no document in {}{more} ({summary})", first.unwrap_or_default());
                Err(DataError::refused(what, no_document(self.report())))
            }
            next => next,
        };
        self.done = next.is_err() || self.is_at_end() && matches!(next, Ok(None));
        next.transpose()
    }
}

/// What to do about a text of which no document was taken.
fn no_document(report: &CorpusReport) -> &'static str {
    if report.reached_max_bytes {
        "the first document alone is longer than data.max_bytes: raise it"
    } else if report.num_blank > 0 && report.num_duplicates + report.num_invalid == 0 {
        "all documents are empty or blank: check the paths, and the key of the text where the files are JSON or Parquet"
    } else {
        "check the paths and the format, and what limits them: data.max_document_bytes for files of folders and globs, \
         data.max_bytes for all"
    }
}

impl Iterator for Documents<'_> {
    type Item = Result<Document, DataError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let next = self.next_in_file();
            if next.is_some() || self.done {
                return next;
            }
        }
    }
}
