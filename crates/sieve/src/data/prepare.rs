//! `sieve data prepare`: text into shards, ahead of training.
use crate::recipe::RecipeArgs;
use anyhow::Result;
use clap::Args;
use indicatif::ProgressBar;
use sieve_core::recipe::DataFormat;
use sieve_core::{Recipe, ShownPath};
use sieve_data::{OnChange, PreparedMeta, Progress, SplitMeta};
use sieve_host::out_file::on_this_machine;
use sieve_host::{hub, terminal, text_files};
use sieve_train::{DataEvent, DataSource, initial_checkpoint};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Arguments of `sieve data prepare`.
#[derive(Args, Debug)]
pub(crate) struct PrepareArgs {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// Folder of the shards; as `sieve train` finds it when absent
    #[arg(long, value_name = "DIR", value_parser = on_this_machine())]
    data_dir: Option<PathBuf>,
    /// Replace what the folder contains, if it is damaged or was made from different text, settings or a different
    /// tokenizer
    #[arg(long)]
    replace: bool,
}

/// Runs the command: tokenises the text, or finds complete shards, verifies their checksums and leaves them.
pub(super) fn run(args: PrepareArgs) -> Result<()> {
    let (recipe, text) = args.recipe.load_with_text()?;
    anyhow::ensure!(
        recipe.data.format != DataFormat::Mqar,
        "data.format = \"mqar\" is generated as it is read; there is nothing to prepare"
    );
    terminal::lines(text);
    let dir = args.recipe.data_folder(&recipe, args.data_dir.clone())?;
    let on_change = if args.replace { OnChange::ReplaceDamaged } else { OnChange::Refuse };
    // A run that begins with a checkpoint reads the checkpoint's tokenizer.
    let begins_with = initial_checkpoint(&recipe)?;
    let around = hub::surroundings();
    let source = DataSource::with_tokenizer_of(begins_with.as_ref(), &recipe, &around)?;
    let source = source.looking_in(args.recipe.known_data(dir.parent().unwrap_or(&dir)));
    for corpus in source.corpora() {
        text_files::warn_of_json(corpus);
        terminal::lines(text_files::passed_over(corpus));
    }
    let say = |line: &str| terminal::line(line);
    let has_lines = true;
    let mut watch = Watch::new(["", ""], has_lines, &say);
    let mut data = source.prepare(&recipe, &dir, on_change, &mut |event| watch.see(event))?;
    let place = (dir.as_path(), on_change);
    let observe = &mut |event| watch.see(event);
    let resumed = None;
    data.prepare_stages(&recipe, place, resumed, &around, observe)?;
    drop(watch);
    // With --replace, shards that are damaged have been prepared again.
    for found in data.shards().filter(|shards| shards.reused && on_change == OnChange::Refuse) {
        found.verify()?;
    }
    let prepared = data.prepared().expect("text becomes shards");
    let meta = &prepared.meta;
    let (verb, from) = super::account::taken(prepared);
    terminal::line(&format!(
        "{verb} {}{from} in {:.1} s",
        dir.shown(),
        (data.tokenizer_time + data.prepare_time).as_secs_f64()
    ));
    print_train_split("train", meta, &recipe);
    for (index, text) in &data.stages {
        let name = format!("train, stage {}", index + 1);
        print_train_split(&name, &text.prepared.meta, &recipe.at_stage(&recipe.stages()[*index]));
    }
    print_split("validation", &meta.validation);
    let warning = super::account::too_little_held_out(meta);
    let has_changed = false;
    let lines = super::account::lines("", &data, has_changed);
    terminal::lines(lines.iter().chain(&warning));
    if let Some(train) = args.recipe.train_command() {
        // A run finds the recipe's own folder, and those beside its own, by itself.
        let place = args.data_dir.as_deref().map(|dir| {
            let key = format!("data.cache_dir={}", dir.to_string_lossy().replace('$', "$$"));
            format!(" --set {}", terminal::shell_word(&key))
        });
        terminal::line(&terminal::next(&[format!("{train}{}", place.unwrap_or_default())]));
    }
    Ok(())
}

/// Prints the size of the training split, by source where `data.weights` is given (else `meta.sources` is empty).
fn print_train_split(name: &str, meta: &PreparedMeta, recipe: &Recipe) {
    let weights = recipe.data.weights.as_deref().unwrap_or_default();
    for ((source, path), weight) in meta.sources.iter().zip(&recipe.data.paths).zip(weights) {
        print_split(&format!("{name}, weight {weight}, {path}"), &source.train);
    }
    if meta.sources.is_empty() {
        print_split(name, &meta.train);
    }
}

/// Prints the size of a split: the training or the held-out documents.
fn print_split(name: &str, split: &SplitMeta) {
    terminal::line(&format!(
        "{name}: {} in {}, {:.2} bytes of text a token, {} on disk",
        terminal::counted(split.num_tokens, "token"),
        terminal::counted(split.num_documents, "document"),
        split.num_bytes as f64 / split.num_tokens.max(1) as f64,
        terminal::bytes(split.bin_bytes + split.idx_bytes)
    ));
}

/// Shows the progress of preparing data: a bar on a terminal; else, with `has_lines`, a line every
/// [`BETWEEN_LINES`].
pub(crate) struct Watch<'a> {
    /// Prefixes of the lines about the tokenizer and of the lines about the data.
    starts: [&'static str; 2],
    has_lines: bool,
    say: &'a dyn Fn(&str),
    bar: Option<ProgressBar>,
    last_line: Option<Instant>,
}

const BETWEEN_LINES: Duration = Duration::from_secs(15);

impl<'a> Watch<'a> {
    pub(crate) fn new(starts: [&'static str; 2], has_lines: bool, say: &'a dyn Fn(&str)) -> Self {
        Self { starts, has_lines, say, bar: None, last_line: None }
    }

    /// Shows an event: prints a line, or moves the bar.
    pub(crate) fn see(&mut self, event: DataEvent) {
        let ([tokenizer, data], say) = (self.starts, self.say);
        match event {
            DataEvent::TrainingTokenizer { vocab_size, sample_bytes } => say(&format!(
                "{tokenizer}training a byte-level BPE of {vocab_size} tokens on up to {}",
                terminal::bytes(sample_bytes)
            )),
            DataEvent::Preparing(Progress::Waiting) => {
                say(&format!("{data}another process is preparing the same folder; waiting"))
            }
            // Files are fsynced, which takes no line.
            DataEvent::Preparing(Progress::Writing) => {}
            DataEvent::Preparing(Progress::Tokenising {
                split,
                bytes_done,
                bytes_total,
                num_tokens,
                num_files_done,
                num_files,
                ..
            }) => {
                let bar = self.bar.get_or_insert_with(|| {
                    terminal::progress_bar(
                        bytes_total,
                        "tokenising {wide_bar} {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec}  {left}",
                    )
                });
                // bytes_total is an estimate: the text in a compressed file may be longer.
                bar.set_length(bytes_total.max(bytes_done));
                bar.set_position(bytes_done);
                let last = self.last_line;
                let is_due = last.is_none_or(|last| last.elapsed() >= BETWEEN_LINES);
                if self.has_lines && !terminal::is_interactive() && is_due {
                    say(&format!(
                        "{split}: {} of about {} of text, {num_files_done} of {num_files} files, {} tokens in this run",
                        terminal::bytes(bytes_done),
                        terminal::bytes(bytes_total.max(bytes_done)),
                        terminal::thousands(num_tokens)
                    ));
                    self.last_line = Some(Instant::now());
                }
            }
        }
    }
}

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        self.bar.iter().for_each(ProgressBar::finish_and_clear);
    }
}
