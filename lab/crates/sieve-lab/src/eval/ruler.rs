//! `sieve eval ruler`: RULER's tasks (arXiv:2404.06654) and others about long texts.
use crate::OwnText;
use crate::draw::grid::{Map, MapCell, Picture};
use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use indicatif::ProgressBar;
use sieve_core::{ShownPath, attention_label};
use sieve_data::Tokenizer;
use sieve_eval::{
    EvalError, LONG_TASKS, LongCell, LongReport, LongSource, LongTask, LongTaskReport, LongText, LongTexts, NUM_WRONG,
    QaData, SampleScore, Split, ask_long, long_texts,
};
use sieve_hf::{Kept, LoadedModel, peek_model, peek_tokenizer};
use sieve_host::evaluation::{output, so_far, text};
use sieve_host::loaded::{PlaceArgs, on_device};
use sieve_host::once::once;
use sieve_host::out_file::{OutFile, PictureFile};
use sieve_host::{hub, loaded, selector, terminal};
use sieve_infer::{Selection, TaskModel};
use sieve_ops::DeviceBackend;
use std::path::{Path, PathBuf};

/// Name under which `--save` keeps the result.
const COMMAND: &str = "ruler";

/// Arguments of `sieve eval ruler`.
#[derive(Args, Debug)]
pub struct RulerArgs {
    /// A checkpoint (step-N) of any kind, or a run folder: then its latest; or hf://OWNER/NAME
    #[arg(long, value_name = "DIR", required_unless_present = "list")]
    checkpoint: Option<PathBuf>,
    /// Tasks by name; RULER's thirteen when absent, without those that ask the questions of a file that is not given
    #[arg(long, value_delimiter = ',', value_name = "NAME,…")]
    tasks: Vec<String>,
    /// Tokens of the whole sample: text, question, and the tokens generated; the model's context when absent
    #[arg(long, value_delimiter = ',', value_name = "N,…")]
    lengths: Vec<usize>,
    /// Samples of each task and length
    #[arg(long, default_value_t = 20, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    samples: u32,
    #[command(flatten)]
    source: SourceArgs,
    /// Draws the samples
    #[arg(long, default_value_t = 42, value_name = "N")]
    seed: u64,
    #[command(flatten)]
    sparse: selector::SelectorsArgs,
    #[command(flatten)]
    result: output::ResultArgs,
    /// Also write each sample's score, rank and generated text: one JSON object a line
    #[arg(long, value_name = "FILE")]
    samples_file: Option<OutFile>,
    /// Also write an SVG: heat maps of scores and ranks, by length and task, and by length and depth
    #[arg(long, value_name = "FILE")]
    plot: Option<PictureFile>,
    /// Name the tasks
    #[arg(long)]
    list: bool,
    #[command(flatten)]
    place: PlaceArgs,
}

/// `--haystack`: the text around the needles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum HaystackArg {
    /// Sentences: from --data, else synthetic
    Prose,
    /// Lines of code: from --data, else from Sieve's own sources
    Code,
}

/// Texts and questions of the tasks.
#[derive(Args, Debug)]
pub(crate) struct SourceArgs {
    /// What needles are hidden in, in place of RULER's essays
    #[arg(long, value_enum, default_value_t = HaystackArg::Prose)]
    haystack: HaystackArg,
    /// Text, JSONL or Parquet files, folders or globs for it
    #[arg(long, num_args = 1.., value_name = "PATH")]
    data: Vec<String>,
    /// SQuAD 2.0 as published (dev-v2.0.json), for qa_1
    #[arg(long, value_name = "FILE")]
    qa_1: Option<PathBuf>,
    /// HotpotQA as published (hotpot_dev_distractor_v1.json), for qa_2
    #[arg(long, value_name = "FILE")]
    qa_2: Option<PathBuf>,
}

impl SourceArgs {
    /// Reads the files that the flags name.
    pub(crate) fn source(&self, split: Split, own_text: OwnText) -> Result<LongSource> {
        let name = self.data.join(" ");
        let own = || {
            let files = own_text.iter();
            let code = files.filter(|(name, _)| name.ends_with(".rs"));
            code.map(|(_, text)| *text).collect::<String>()
        };
        let text = match (self.haystack, self.data.is_empty()) {
            (HaystackArg::Prose, true) => LongText::made_up(split),
            (HaystackArg::Prose, false) => LongText::prose(name, &self.text()?),
            (HaystackArg::Code, true) => LongText::code("Sieve's sources".to_owned(), &own()),
            (HaystackArg::Code, false) => LongText::code(name, &self.text()?),
        };
        if text.parts.is_empty() {
            bail!("--data holds no sentence\n  hint: give more text");
        }
        let qa = |path: &Option<PathBuf>| {
            let read = |path: &PathBuf| {
                let name = path.to_string_lossy().into_owned();
                let text = sieve_files::read_text(path).with_context(|| format!("reading {name}"))?;
                Ok::<_, anyhow::Error>(QaData::parse(&name, &text)?)
            };
            path.as_ref().map(read).transpose()
        };
        Ok(LongSource { text, qa: [qa(&self.qa_1)?, qa(&self.qa_2)?] })
    }

    /// The first 8 MiB of the documents of `--data`.
    fn text(&self) -> Result<String> {
        let corpus = text::corpus(&self.data)?;
        let mut all = String::new();
        for document in corpus.documents() {
            all += &document?.text;
            all.push('\n');
            // 8 MiB are more text than a sample of any length needs.
            if all.len() > 8 << 20 {
                break;
            }
        }
        Ok(all)
    }

    /// The named tasks. Without names: RULER's thirteen, but `qa_1` and `qa_2` only if their file is given.
    pub(crate) fn tasks(&self, names: &[String]) -> Result<Vec<LongTask>> {
        once("--tasks", names)?;
        let mut chosen: Vec<&str> = names.iter().map(String::as_str).collect();
        if chosen.is_empty() {
            let has = |name: &&&str| match **name {
                "qa_1" => self.qa_1.is_some(),
                "qa_2" => self.qa_2.is_some(),
                _ => true,
            };
            // RULER's own tasks come first in the list.
            chosen = LONG_TASKS[..13].iter().filter(has).copied().collect();
        }
        let tasks = chosen.into_iter().map(LongTask::new);
        Ok(tasks.collect::<Result<_, _>>()?)
    }
}

/// Runs `sieve eval ruler`: a model's scores on RULER's tasks.
pub(crate) fn run(mut args: RulerArgs, own_text: OwnText) -> Result<()> {
    if args.list {
        terminal::lines(LONG_TASKS);
        return Ok(());
    }
    let checkpoint = hub::folder(args.checkpoint.as_ref().context("--checkpoint is missing")?)?;
    args.result.check(&checkpoint, COMMAND, args.samples_file.is_some() || args.plot.is_some())?;
    let tasks = args.source.tasks(&args.tasks)?;
    let source = args.source.source(Split::Test, own_text)?;
    let place = args.place.place(&checkpoint)?;
    let (recipe, shape) = peek_model(&checkpoint)?;
    if args.lengths.is_empty() {
        args.lengths.push(shape.max_seq_len);
    }
    if let Some(length) = args.lengths.iter().find(|&&length| length > shape.max_seq_len) {
        bail!(
            "--lengths has {length}, and the model's positions end at {}\n  \
             hint: use lengths up to max_position_embeddings",
            shape.max_seq_len
        );
    }
    let longest = args.lengths.iter().max().copied().unwrap_or(0);
    let size = text::size_with_endings(&shape, longest, NUM_WRONG + 1);
    (args.place.memory).check_inference(&checkpoint, &place, |_, _| size)?;
    let tokenizer = loaded::tokenizer(&peek_tokenizer(&checkpoint)?, &recipe, &shape)?;
    let asked = Asked { texts: texts(&args, &tasks, &source, &tokenizer, shape.max_seq_len)?, source };
    on_device!(place, run_on(&args, &checkpoint, &asked))
}

/// The samples to measure, and the texts that they were built from.
struct Asked {
    source: LongSource,
    /// Samples of each task and length, `[task][length]`.
    texts: Vec<Vec<LongTexts>>,
}

/// Builds the samples of each task and length, `[task][length]`. Without `--tasks`, tasks whose texts are longer than
/// the model's `max_seq_len` are left out.
fn texts(
    args: &RulerArgs,
    tasks: &[LongTask],
    source: &LongSource,
    tokenizer: &Tokenizer,
    max_seq_len: usize,
) -> Result<Vec<Vec<LongTexts>>> {
    let mut lengths = args.lengths.clone();
    lengths.sort_unstable();
    lengths.dedup();
    let (seed, numbers) = ((Split::Test, args.seed), 0..u64::from(args.samples));
    let mut all = Vec::new();
    for &task in tasks {
        let texts = lengths.iter().map(|&length| long_texts(task, source, tokenizer, seed, length, numbers.clone()));
        match texts.collect::<Result<Vec<_>, _>>() {
            Err(EvalError::NoRoom { task, enough, .. }) if enough > max_seq_len => {
                let words = format!(
                    "prompts of {task} take up to {enough} tokens of this tokenizer, and the model's positions end at \
                     {max_seq_len}"
                );
                if !args.tasks.is_empty() {
                    bail!("{words}\n  hint: leave the task out");
                }
                terminal::note(&format!("note: {words}: the task is left out"));
            }
            texts => all.push(texts?),
        }
    }
    if all.is_empty() {
        bail!(
            "the model has too few positions for RULER's tasks\n  \
             hint: a model with more positions (model.max_position_embeddings)"
        );
    }
    Ok(all)
}

/// Asks all samples with the model's own attention and with each selector; prints the result and writes the files.
fn run_on<B: DeviceBackend>(
    args: &RulerArgs,
    checkpoint: &Path,
    asked: &Asked,
    device: &B::Device,
    kept: Kept,
) -> Result<()> {
    let (loaded, tokenizer) = loaded::load::<B>(checkpoint, device, kept)?;
    let model =
        TaskModel { model: &loaded.model, tokenizer: &tokenizer, ends: &loaded.end_ids(tokenizer.eos_id()?)?, device };
    let selections = args.sparse.own_and_each(&loaded.shape)?;
    let all = asked.texts.iter().flatten().map(|texts| texts.samples.len());
    let total = (all.sum::<usize>() * selections.len()) as u64;
    let (reports, lines) = so_far::with_bar(total, "samples", |bar| ask(&model, asked, selections, bar))?;
    if let Some(path) = &args.samples_file {
        path.write_text(&lines)?;
    }
    if let Some(path) = &args.plot {
        path.write_text(&picture(&loaded, &reports).svg())?;
    }
    print(args, &loaded, &reports)
}

/// Asks all samples with the model's own attention and with each selector. Returns a report for each of these, and the
/// text of `--samples-file`.
fn ask<B: DeviceBackend>(
    model: &TaskModel<'_, B>,
    asked: &Asked,
    selections: Vec<Option<Selection>>,
    bar: &ProgressBar,
) -> Result<(Vec<LongReport>, String)> {
    let (mut reports, mut lines, mut num_done) = (Vec::new(), String::new(), 0);
    for mut selection in selections {
        let selector = selection.as_ref().map(|one| one.selectors().to_string());
        let mut tasks = Vec::new();
        for of_task in &asked.texts {
            let mut scores = Vec::new();
            for texts in of_task {
                let mut observe = |done: usize| bar.set_position((num_done + done) as u64);
                scores.extend(ask_long(model, texts, selection.as_mut(), &mut observe)?);
                num_done += texts.samples.len();
            }
            for score in &scores {
                lines += &line(score, selector.as_deref())?;
            }
            let report = |texts| LongTaskReport::new(texts, &asked.source, &scores);
            if let Some(report) = of_task.first().map(report) {
                let method = selector.as_ref().map_or(String::new(), |name| format!(" under {name}"));
                so_far::done(format!("{}{method}: score {:.1}", report.task, 100.0 * report.score));
                tasks.push(report);
            }
        }
        let paths = selection.as_ref().map_or(Vec::new(), Selection::paths);
        let totals = selection.as_ref().map(Selection::totals);
        reports.push(LongReport { selector, paths, selection: totals, tasks });
    }
    Ok((reports, lines))
}

fn line(score: &SampleScore, selector: Option<&str>) -> Result<String> {
    let mut line = serde_json::to_value(score)?;
    if let (Some(object), Some(selector)) = (line.as_object_mut(), selector) {
        object.insert("selector".to_owned(), selector.into());
    }
    Ok(line.to_string() + "\n")
}

/// Prints, for each method, score and rank of each task by length; or one JSON object.
fn print<B: DeviceBackend>(args: &RulerArgs, loaded: &LoadedModel<B>, reports: &[LongReport]) -> Result<()> {
    let json = serde_json::json!({
        "attention": attention_label(&loaded.shape),
        "trained_length": loaded.trained_len(),
        "samples": args.samples,
        "seed": args.seed,
        "chunk": args.sparse.chunk,
        "stream": args.sparse.stream,
        "methods": reports,
    });
    if args.result.report(loaded, COMMAND, json)? {
        return Ok(());
    }
    terminal::line(&format!(
        "{}, {}; {} samples of each task and length\n\
         score: the answers in the generated text, in percent; rank: of the answer's likelihood among {NUM_WRONG} \
         others, 1 is best, a guess {}",
        output::heading(loaded),
        output::trained_words(loaded),
        args.samples,
        1 + NUM_WRONG / 2,
    ));
    for report in reports {
        let lengths = report.tasks.first().map_or(&[][..], |task| &task.lengths);
        let heads = lengths.iter().map(|cell| format!("{:>15}", cell.length));
        terminal::line(&format!(
            "\n{}\n{:<17}{:>15}{}  text",
            selector::method(report.selector.as_deref(), &loaded.shape),
            "score / rank",
            "all",
            heads.collect::<String>()
        ));
        for task in &report.tasks {
            let cell = |score: f64, rank: f64| format!("{:>7.1} / {rank:>5.2}", 100.0 * score);
            let cells = task.lengths.iter();
            let cells = cells.map(|one| cell(one.score, one.mean_rank));
            terminal::line(&format!(
                "{:<17}{}{}  {}",
                task.task,
                cell(task.score, task.mean_rank),
                cells.collect::<String>(),
                task.haystack
            ));
        }
        if !report.paths.is_empty() {
            terminal::line(&selector::paths(&report.paths));
        }
        if let Some(words) = report.selection.as_ref().and_then(selector::dense_calls) {
            terminal::line(&words);
        }
    }
    for path in args.samples_file.iter().chain(args.plot.as_deref()) {
        terminal::line(&format!("wrote {}", path.shown()));
    }
    Ok(())
}

/// For each method, a heat map of all tasks by length, and one by length and depth for each task that hides something
/// at a depth.
fn picture<B: DeviceBackend>(loaded: &LoadedModel<B>, reports: &[LongReport]) -> Picture {
    let mut maps = Vec::new();
    for report in reports.iter().filter(|report| !report.tasks.is_empty()) {
        let method = selector::method(report.selector.as_deref(), &loaded.shape);
        maps.push(map_of_tasks(&report.tasks, &method));
        let with_depths = report.tasks.iter().filter(|task| !task.cells.is_empty());
        maps.extend(with_depths.map(|task| map_of_depths(task, &method)));
    }
    Picture {
        title: match reports.first().map(|report| &report.tasks[..]) {
            Some([task]) => format!("RULER's {}: {}", task.task, output::model_name(loaded)),
            _ => format!("RULER: {}", output::model_name(loaded)),
        },
        trained_len: loaded.trained_len(),
        maps,
    }
}

/// A map with a row for each task. All tasks have the same lengths.
fn map_of_tasks(tasks: &[LongTaskReport], method: &str) -> Map {
    let lengths = lengths_of(&tasks[0]);
    let rows = tasks.iter().enumerate();
    let cells = rows.flat_map(|(row, task)| task.lengths.iter().map(move |cell| (cell, row, task.task)));
    let mean = |value: fn(&LongTaskReport) -> f64| tasks.iter().map(value).sum::<f64>() / tasks.len() as f64;
    // With a single task the map has one row, so it is named after the task.
    let name = match tasks {
        [task] => task.task,
        _ => "all tasks",
    };
    Map {
        name: format!("{name}: {method}"),
        summary: summary(mean(|task| task.score), mean(|task| task.mean_rank)),
        rows: tasks.iter().map(|task| task.task.to_owned()).collect(),
        about_rows: "",
        cells: cells.map(|(cell, row, task)| map_cell(cell, &lengths, row, task)).collect(),
        lengths,
    }
}

/// A map of a task with a row for each fifth of the depths.
fn map_of_depths(task: &LongTaskReport, method: &str) -> Map {
    const PERCENT_OF_ROW: usize = 20;
    let lengths = lengths_of(task);
    let row = |cell: &LongCell| (cell.depth.unwrap_or(0.0) / PERCENT_OF_ROW as f64) as usize;
    let borders = |row: usize| format!("{}-{} %", PERCENT_OF_ROW * row, PERCENT_OF_ROW * (row + 1));
    Map {
        name: format!("{}, {}: {method}", task.task, task.haystack),
        summary: summary(task.score, task.mean_rank),
        rows: (0..100 / PERCENT_OF_ROW).map(borders).collect(),
        about_rows: "depth",
        cells: task.cells.iter().map(|cell| map_cell(cell, &lengths, row(cell), task.task)).collect(),
        lengths,
    }
}

fn lengths_of(task: &LongTaskReport) -> Vec<usize> {
    task.lengths.iter().map(|cell| cell.length).collect()
}

fn summary(score: f64, mean_rank: f64) -> String {
    format!("score {:.1} %, mean rank {mean_rank:.2}", 100.0 * score)
}

/// A cell of a map, in the column of its length; its title begins with the name of the task.
fn map_cell(cell: &LongCell, lengths: &[usize], row: usize, task: &str) -> MapCell {
    MapCell {
        column: lengths.partition_point(|&length| length < cell.length),
        row,
        score: cell.score,
        mean_rank: cell.mean_rank,
        title: format!(
            "{task}, {} tokens: score {:.1} %, mean rank {:.2} of {} samples",
            cell.length,
            100.0 * cell.score,
            cell.mean_rank,
            cell.num_samples
        ),
    }
}
