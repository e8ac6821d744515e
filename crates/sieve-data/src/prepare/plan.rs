//! The steps of a preparation, from reading documents to renaming the finished files.

use sieve_core::ShownPath;
use std::collections::HashSet;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use super::call::{OnChange, PrepareConfig, Progress, ValidationSource};
use super::lock::Lock;
use super::meta::{
    self, ChatsMeta, FORMAT_VERSION, PreparedMeta, SourceMeta, SplitMeta, TrainBytes, ValidationSettings,
};
use super::names::{TRAIN, VALIDATION, VALIDATION_SIZES, hex, train_names};
use super::partial::{self, JOURNAL, Partial};
use super::split::{Cuts, Split, cuts};
use super::tokenise::{Batch, Pace, encode};
use crate::corpus::{Corpus, CorpusReport, Cursor, Documents};
use crate::error::DataError;
use crate::shard::{FinishedShard, TokenDtype};
use crate::tokenizer::Tokenizer;
use sieve_files::{AtomicFile, sync_folder};

/// One preparation: its sources, its settings, and the lock of its folder.
pub(super) struct Plan<'a> {
    pub(super) corpora: &'a [Corpus],
    pub(super) tokenizer: &'a Tokenizer,
    pub(super) config: &'a PrepareConfig<'a>,
    pub(super) eos_id: u32,
    pub(super) fingerprint: String,
    pub(super) lock: Lock,
    pub(super) pace: Pace,
}

impl Plan<'_> {
    /// Tokenises the validation corpus, if there is one, then the training corpora, and publishes the files. Continues
    /// an unfinished preparation of the same fingerprint.
    pub(super) fn run(&self, progress: &dyn Fn(Progress)) -> Result<PreparedMeta, DataError> {
        let dir = &self.config.dir;
        let mut names = train_names(self.corpora.len());
        names.push(VALIDATION.to_owned());
        let vocab_size = self.tokenizer.vocab_size();
        let has_parts = self.corpora[0].config().has_parts();
        let resumed = Partial::resume(dir, &names, vocab_size, &self.fingerprint, has_parts);
        let (mut partial, mut seen) = match resumed {
            Some(found) => found,
            None => {
                if self.lock.has_mark()? {
                    remove_leftovers(dir)?;
                }
                let partial = Partial::create(dir, &names, vocab_size, &self.fingerprint, has_parts)?;
                (partial, HashSet::new())
            }
        };
        let own_validation = self.config.validation.corpus();
        if let Some(corpus) = own_validation
            && partial.place.done.is_empty()
        {
            let train_split = None;
            self.read(corpus, train_split, &mut partial, seen, Split::AllHeldOut, progress)?;
            // Duplicates are dropped separately in the validation corpus and in the training corpora: a training
            // document that is also held out is left out by `Split::Without`, and is not a duplicate in the report.
            seen = HashSet::new();
            (partial.new.seen, partial.new.clears_seen) = (Vec::new(), true);
            self.keep(&mut partial, corpus)?;
        }
        let held_out = partial.held_out.iter().copied().collect();
        let (fraction, cuts) = match (self.config.validation, partial.place.cuts.take()) {
            (ValidationSource::Corpus(_), _) => (0.0, Cuts::default()),
            (ValidationSource::Fraction(fraction), Some(found)) => (fraction, found),
            (ValidationSource::Fraction(fraction), None) => (fraction, self.cuts_with_base(fraction)?),
        };
        partial.place.cuts = Some(cuts.clone());
        let split_of = |number: usize| match (own_validation, cuts.places.get(number)) {
            (Some(_), _) => Split::Without(&held_out),
            (None, Some(Some(cut))) => Split::End(*cut, &cuts.train_bytes),
            (None, _) => Split::Hash(fraction, &cuts.train_bytes),
        };
        // `place.done` has the report of the validation corpus before the reports of the training corpora.
        let num_before = usize::from(own_validation.is_some());
        let first = partial.place.done.len().saturating_sub(num_before);
        for (number, corpus) in self.corpora.iter().enumerate().skip(first) {
            let split = split_of(number);
            seen = self.read(corpus, Some(number), &mut partial, seen, split, progress)?;
        }
        self.require_documents(&partial.splits, &partial.place.done[num_before..])?;
        progress(Progress::Writing);
        let meta = self.publish(partial)?;
        for corpus in own_validation.into_iter().chain(self.corpora) {
            corpus.discard_fetched(0..corpus.files().len());
        }
        Ok(meta)
    }

    /// Refuses an empty split. `reports`: one for each training corpus, in the order of their splits.
    fn require_documents(&self, splits: &[partial::Split], reports: &[CorpusReport]) -> Result<(), DataError> {
        let Some(number) = splits.iter().position(|split| split.meta.num_documents == 0) else {
            return Ok(());
        };
        let report = match reports.get(number) {
            Some(report) => report.clone(),
            None => CorpusReport::sum(reports),
        };
        let num_documents = report.num_documents;
        let name = &splits[number].name;
        let (why, hint) = match self.config.validation {
            // Only a training split lacks text because other text is held out.
            ValidationSource::Fraction(_) if name != VALIDATION && report.also_held_out.num_documents > 0 => (
                format!("{num_documents} in all, and each that is not held out repeats one that is"),
                "set data.deduplicate = true, or name different text to validate on with [validation] paths",
            ),
            ValidationSource::Corpus(_) if name == VALIDATION => {
                ("[validation] paths".to_owned(), "name files that contain documents")
            }
            ValidationSource::Corpus(_) => (
                format!("{num_documents} in all, each of them among [validation] paths"),
                "name different text to validate on with [validation] paths, or leave it out and a part of the text is \
                 held out",
            ),
            ValidationSource::Fraction(fraction) => (
                format!("{num_documents} in all, validation_fraction {fraction}"),
                "name text to validate on with [validation] paths, change validation_fraction, or give more text",
            ),
        };
        let what = format!("the {name} split holds no document: {why}");
        Err(DataError::refused(what, hint))
    }

    /// Where these corpora are cut because they have too few documents to hold whole ones out. A document that is also
    /// cut in the run's data (`base`, if the corpora are a stage's) is trained on up to the earlier cut.
    fn cuts_with_base(&self, fraction: f64) -> Result<Cuts, DataError> {
        let base = self.config.base;
        let mut cuts = cuts(self.corpora, fraction, base)?;
        for (hash, base_limit) in base.iter().flat_map(|base| &base.meta.train_bytes) {
            let limit = cuts.train_bytes.entry(hash.clone()).or_insert(*base_limit);
            *limit = (*limit).min(*base_limit);
        }
        Ok(cuts)
    }

    /// Reads and tokenises one corpus to its end, into split `train_split` or, for `None`, into the validation split;
    /// text that `held_out` selects always goes into the validation split. Returns the hashes of the texts seen.
    fn read(
        &self,
        corpus: &Corpus,
        train_split: Option<usize>,
        partial: &mut Partial,
        seen: HashSet<u128>,
        held_out: Split,
        progress: &dyn Fn(Progress),
    ) -> Result<HashSet<u128>, DataError> {
        let (name, own) = match train_split {
            Some(number) => (TRAIN, number),
            None => (VALIDATION, partial.splits.len() - 1),
        };
        let mut documents = Documents::resume(corpus, partial.place.cursor.clone(), seen);
        let mut bytes_done = documents.report().num_bytes;
        let (mut num_documents, mut num_tokens, mut bytes_since_kept) = (0, 0, 0);
        let bytes_total = corpus.max_text_bytes();
        let report = |bytes_done, num_documents, num_tokens, num_files_done| {
            progress(Progress::Tokenising {
                split: name,
                bytes_done,
                bytes_total,
                num_documents,
                num_tokens,
                num_files_done,
                num_files: corpus.files().len(),
            });
        };
        // Called before the first file is fetched, because that may take a while.
        report(bytes_done, num_documents, num_tokens, documents.cursor().file_idx);
        let mut batch = Batch::read(&mut documents, self.pace, bytes_since_kept);
        loop {
            let num_bytes = batch.num_bytes();
            bytes_since_kept += num_bytes;
            let taken = std::mem::take(&mut batch.documents);
            let (encoded, next) = rayon::join(
                || encode(self.tokenizer, self.eos_id, held_out, bytes_done, taken),
                || Batch::read(&mut documents, self.pace, bytes_since_kept),
            );
            bytes_done += num_bytes as u64;
            let (encoded, also_held_out) = encoded?;
            partial.place.also_held_out += also_held_out;
            for document in encoded {
                num_documents += 1;
                num_tokens += document.num_tokens();
                partial.take(document, own, train_split.is_none())?;
            }
            partial.new.seen.append(&mut batch.newly_seen);
            partial.place.cursor = batch.cursor;
            // Also made durable if the next file cannot be read, for example because the network fails.
            if batch.ends_file && (bytes_since_kept >= self.pace.keep_bytes || batch.error.is_some()) {
                self.keep(partial, corpus)?;
                bytes_since_kept = 0;
            }
            if let Some(error) = batch.error {
                return Err(error);
            }
            report(bytes_done, num_documents, num_tokens, partial.place.cursor.file_idx);
            if batch.is_last {
                break;
            }
            batch = next;
        }
        let place = &mut partial.place;
        let also_held_out = std::mem::take(&mut place.also_held_out);
        place.done.push(CorpusReport { also_held_out, ..documents.report().clone() });
        place.cursor = Cursor::default();
        Ok(documents.into_seen())
    }

    /// Makes durable what was tokenised so far, which ends between two files of `corpus`.
    fn keep(&self, partial: &mut Partial, corpus: &Corpus) -> Result<(), DataError> {
        // Written first, because by this mark the next preparation recognises the temporary files as Sieve's.
        self.lock.mark()?;
        partial.keep()?;
        corpus.discard_fetched(0..partial.place.cursor.file_idx);
        Ok(())
    }

    /// Fsyncs all files under temporary names, removes an earlier preparation's, then renames the new ones, `meta.json`
    /// last.
    fn publish(&self, partial: Partial) -> Result<PreparedMeta, DataError> {
        let dir = &self.config.dir;
        let Partial { splits, place, .. } = &partial;
        let sizes = [partial.sizes.as_slice(), &partial.new.sizes].concat();
        let mut sizes_file = AtomicFile::create(&dir.join(VALIDATION_SIZES))?;
        sizes_file.write(&meta::document_sizes_json(&sizes))?;
        let sizes_file = sizes_file.finish()?;
        let mut names = splits.iter().map(|split| split.name.clone()).collect::<Vec<_>>();
        let cuts = place.cuts.clone().unwrap_or_default();
        let mut reports = place.done.clone();
        let validation_report = self.config.validation.corpus().map(|_| reports.remove(0));
        let (shards, mut metas) = finish(partial)?;
        let validation = metas.pop().expect("the validation split is the last");
        let meta = PreparedMeta {
            is_cut: cuts.places.iter().any(Option::is_some),
            train_bytes: cuts.train_bytes,
            ..self.meta(metas, validation, reports, validation_report)
        };
        let mut meta_file = AtomicFile::create(&meta::path(dir))?;
        meta_file.write(&meta.to_json())?;
        let meta_file = meta_file.finish()?;

        self.lock.mark()?;
        // While files are renamed one by one, the folder has no meta.json, without which no reader opens it.
        match fs::remove_file(meta::path(dir)) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                return Err(DataError::io("remove", &meta::path(dir))(error));
            }
            _ => sync_folder(dir)?,
        }
        names.push(VALIDATION_SIZES.to_owned());
        remove_shards_of_earlier(dir, &names)?;
        for shard in shards {
            shard.publish()?;
        }
        sizes_file.publish()?;
        sync_folder(dir)?;
        meta_file.publish()?;
        sync_folder(dir)?;
        remove_leftovers(dir)?;
        Ok(meta)
    }

    /// The contents of `meta.json`, but for `is_cut` and `train_bytes`, which [`publish`](Self::publish) sets: both
    /// concern corpora that are too short to hold whole documents out, so that a document is cut.
    fn meta(
        &self,
        train: Vec<SplitMeta>,
        validation: SplitMeta,
        reports: Vec<CorpusReport>,
        validation_report: Option<CorpusReport>,
    ) -> PreparedMeta {
        let report = CorpusReport::sum(&reports);
        let total = SplitMeta::total(&train);
        let sources = match self.corpora {
            [_] => Vec::new(),
            corpora => corpora
                .iter()
                .zip(train)
                .zip(reports)
                .map(|((corpus, train), report)| SourceMeta {
                    sources_hash: hex(corpus.fingerprint()),
                    settings: corpus.config().clone(),
                    train,
                    report,
                })
                .collect(),
        };
        PreparedMeta {
            format_version: FORMAT_VERSION,
            fingerprint: self.fingerprint.clone(),
            tokenizer_hash: hex(self.tokenizer.hash()),
            vocab_size: self.tokenizer.vocab_size(),
            dtype: TokenDtype::for_vocab_size(self.tokenizer.vocab_size()),
            chats: ChatsMeta::of(&self.corpora[0]),
            eos_id: self.eos_id,
            sources_hash: hex(self.corpora[0].fingerprint()),
            settings: self.corpora[0].config().clone(),
            sources,
            validation_settings: match self.config.validation {
                ValidationSource::Fraction(fraction) => ValidationSettings::Fraction(fraction),
                ValidationSource::Corpus(corpus) => ValidationSettings::Corpus {
                    sources_hash: hex(corpus.fingerprint()),
                    settings: Box::new(corpus.config().clone()),
                },
            },
            is_cut: false,
            train_bytes: TrainBytes::new(),
            train: total,
            validation,
            report,
            validation_report,
        }
    }

    /// A sentence that says in what respect data prepared earlier differs from this preparation.
    pub(super) fn difference(&self, earlier: &PreparedMeta) -> String {
        let mut changed = Vec::new();
        if earlier.format_version != FORMAT_VERSION {
            changed.push("the format's version");
        }
        if earlier.tokenizer_hash != hex(self.tokenizer.hash()) || earlier.eos_id != self.eos_id {
            changed.push("the tokenizer");
        }
        if earlier.chats != ChatsMeta::of(&self.corpora[0]) {
            changed.push("the chat template");
        }
        let before = earlier.corpora();
        let same_settings = before.len() == self.corpora.len()
            && before.iter().zip(self.corpora).all(|((_, settings, _), corpus)| *settings == corpus.config());
        let mut pairs = before.iter().zip(self.corpora);
        if !same_settings {
            changed.push("the corpus's settings");
        } else if pairs.any(|((hash, ..), corpus)| !corpus.is_of_hash(hash)) {
            changed.push("the source files");
        }
        if changed.is_empty() {
            changed.push("the validation documents");
        }
        format!("holds data prepared otherwise: {} changed", changed.join(" and "))
    }
}

/// Fsyncs all shards under their temporary names, and completes their metas with file sizes and hashes.
fn finish(partial: Partial) -> Result<(Vec<FinishedShard>, Vec<SplitMeta>), DataError> {
    let (mut shards, mut metas) = (Vec::new(), Vec::new());
    for mut split in partial.splits {
        let shard = split.writer.finish_unnamed()?;
        split.meta.bin_bytes = shard.bin_bytes;
        split.meta.idx_bytes = shard.idx_bytes;
        split.meta.tokens_hash = hex(shard.bin_hash);
        split.meta.bounds_hash = split.meta.num_predicted.map(|_| hex(shard.idx_hash));
        shards.push(shard);
        metas.push(split.meta);
    }
    Ok((shards, metas))
}

/// The `meta.json` of data prepared earlier, if there is one. A damaged one counts as an unfinished preparation's.
///
/// # Errors
/// The folder has shards, but neither `meta.json` nor the mark in the lock file: other software may own them.
pub(super) fn earlier_preparation(
    dir: &Path,
    has_mark: bool,
    on_change: OnChange,
) -> Result<Option<PreparedMeta>, DataError> {
    if !meta::path(dir).exists() {
        return refuse_foreign_files(dir, has_mark).map(|()| None);
    }
    match PreparedMeta::read(dir) {
        Err(DataError::BadFile { .. }) if has_mark => Ok(None),
        Err(DataError::BadFile { .. } | DataError::OtherPreparation { .. }) if on_change != OnChange::Refuse => {
            Ok(None)
        }
        meta => meta.map(Some),
    }
}

/// Refuses shards without a `meta.json` and without the mark in the lock file.
pub(super) fn refuse_foreign_files(dir: &Path, has_mark: bool) -> Result<(), DataError> {
    if has_mark || meta::path(dir).exists() || !dir.exists() {
        return Ok(());
    }
    // A preparation writes the mark before it renames a file, so without it finished files are not Sieve's.
    let mut files = own_names(dir)?;
    files.retain(|name| !name.ends_with(".tmp"));
    match files.first() {
        Some(name) => {
            let what = format!("holds {} without the meta.json of a preparation", dir.join(name).shown());
            Err(DataError::OtherPreparation { dir: dir.to_path_buf(), what })
        }
        None => Ok(()),
    }
}

/// Removes the temporary files of an unfinished preparation.
pub(super) fn remove_leftovers(dir: &Path) -> Result<(), DataError> {
    remove_own(dir, |name| name.ends_with(".tmp"))
}

/// Removes shards of an earlier preparation that the new one does not replace.
fn remove_shards_of_earlier(dir: &Path, new_names: &[String]) -> Result<(), DataError> {
    remove_own(dir, |name| {
        let stem = name.trim_end_matches(".bin").trim_end_matches(".idx");
        !name.ends_with(".tmp") && !new_names.iter().any(|new| new == stem)
    })
}

/// Removes the files of [`own_names`] that are selected.
fn remove_own(dir: &Path, is_selected: impl Fn(&str) -> bool) -> Result<(), DataError> {
    for name in own_names(dir)?.into_iter().filter(|name| is_selected(name)) {
        let path = dir.join(name);
        fs::remove_file(&path).map_err(DataError::io("remove", &path))?;
    }
    Ok(())
}

/// Sorted names of the files in `dir` that a preparation could have written, finished or temporary (`.tmp`).
fn own_names(dir: &Path) -> Result<Vec<String>, DataError> {
    let mut names = Vec::new();
    for entry in fs::read_dir(dir).map_err(DataError::io("list", dir))? {
        let entry = entry.map_err(DataError::io("list", dir))?;
        let Ok(name) = entry.file_name().into_string() else {
            continue;
        };
        let is_temporary = name.ends_with(".tmp");
        let stem = name.trim_end_matches(".tmp");
        let shard = [".bin", ".idx"].iter().find_map(|ending| stem.strip_suffix(ending));
        let is_ours = match shard {
            Some(shard) => is_shard_name(shard),
            None => stem == VALIDATION_SIZES || stem == "meta.json" || is_temporary && stem == JOURNAL,
        };
        if is_ours {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}

fn is_shard_name(name: &str) -> bool {
    let numbered = name.strip_prefix(TRAIN).and_then(|rest| rest.strip_prefix('-'));
    let is_number = |digits: &str| digits.len() == 3 && digits.bytes().all(|b| b.is_ascii_digit());
    name == TRAIN || name == VALIDATION || numbered.is_some_and(is_number)
}
