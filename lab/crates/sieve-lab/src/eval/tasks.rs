//! `sieve eval tasks`: language-model benchmarks on local files.
use anyhow::{Context, Result, bail};
use clap::Args;
use sieve_data::read_table;
use sieve_eval::{
    LongBenchAverage, READY_TASKS, Task, TaskChat, TaskReport, TaskRows, TaskRun, TaskSize, TaskTexts, Turn, run_task,
};
use sieve_hf::{ChatMessage, Kept, LoadedModel, peek_model, peek_tokenizer};
use sieve_host::evaluation::{output, so_far};
use sieve_host::loaded::{PlaceArgs, on_device};
use sieve_host::out_file::OutFile;
use sieve_host::{hub, loaded, selector, terminal};
use sieve_infer::{Selection, TaskModel};
use sieve_ops::DeviceBackend;
use sieve_plan::InferenceSize;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Width of the column of scores' names, in letters.
const SCORE: usize = 21;

/// Arguments of `sieve eval tasks`.
#[derive(Args, Debug)]
pub struct TasksArgs {
    /// A checkpoint (step-N), or a run folder: then its latest; or hf://OWNER/NAME
    #[arg(long, value_name = "DIR", required_unless_present_any = ["list", "show"])]
    checkpoint: Option<PathBuf>,
    /// A task and its rows, a JSONL or Parquet file with the data set's own columns; several may follow. The task is a
    /// name of --list, or the path of a TOML file
    #[arg(long, num_args = 1.., value_name = "TASK=FILE")]
    data: Vec<String>,
    /// Solved examples before each question: the first rows; the task's own number when absent, mostly 0
    #[arg(long, value_name = "K")]
    fewshot: Option<usize>,
    /// Rows that the examples are taken from (a data set's training split); the task's other rows when absent
    #[arg(long, num_args = 1.., value_name = "TASK=FILE")]
    fewshot_data: Vec<String>,
    /// Only the first rows of each task
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    limit: Option<u32>,
    /// Cut a prompt that does not fit into the model's context, at its beginning or as the task says, in place of an
    /// error
    #[arg(long)]
    truncate: bool,
    /// Ask as a chat, by the model's chat template: examples are turns, and nothing is between a question and a choice
    #[arg(long)]
    apply_chat_template: bool,
    /// A system message for the chats, before a task's own description
    #[arg(long, value_name = "TEXT", requires = "apply_chat_template")]
    system: Option<String>,
    /// Also write each row's likelihoods or answer: one JSON object a line
    #[arg(long, value_name = "FILE")]
    samples: Option<OutFile>,
    #[command(flatten)]
    sparse: selector::SelectorArgs,
    #[command(flatten)]
    result: output::ResultArgs,
    /// Name the tasks inside the program
    #[arg(long)]
    pub(super) list: bool,
    /// Print a task of --list as TOML, to write a task of your own from it
    #[arg(long, value_name = "TASK")]
    show: Option<String>,
    #[command(flatten)]
    place: PlaceArgs,
    /// The benchmark whose tasks these are, set by `sieve eval longbench`; then `--save` keeps the result under its
    /// name.
    #[arg(skip)]
    benchmark: Option<&'static str>,
}

/// Name under which `--save` keeps the result.
const COMMAND: &str = "tasks";

impl TasksArgs {
    /// The arguments with the data of a benchmark. Its prompts are cut if they are too long.
    pub(super) fn with_data(self, benchmark: &'static str, data: Vec<String>) -> Self {
        Self { data, truncate: true, benchmark: Some(benchmark), ..self }
    }

    /// Whether flags name tasks or print one.
    pub(super) fn names_tasks(&self) -> bool {
        !self.data.is_empty() || self.show.is_some()
    }

    fn command(&self) -> &'static str {
        self.benchmark.unwrap_or(COMMAND)
    }
}

/// A task, and the rows that it asks.
struct Asked {
    task: Task,
    rows: TaskRows,
    /// Name of the file that holds the rows.
    file: String,
}

/// Runs `sieve eval tasks`: a model's scores on multiple-choice and other tasks.
pub(crate) fn run(args: TasksArgs) -> Result<()> {
    if let Some(name) = &args.show {
        Task::ready(name)?;
        let found = READY_TASKS.iter().find(|(known, _)| known == name);
        terminal::text(found.map_or("", |(_, text)| *text));
        return Ok(());
    }
    if args.list {
        return list("");
    }
    let checkpoint = hub::folder(args.checkpoint.as_ref().context("--checkpoint is missing")?)?;
    if args.data.is_empty() {
        bail!("--data is missing\n  hint: write for example --data piqa=validation.jsonl");
    }
    args.result.check(&checkpoint, args.command(), args.samples.is_some())?;
    let asked = asked(&args)?;
    let place = args.place.place(&checkpoint)?;
    let (recipe, shape) = peek_model(&checkpoint)?;
    let tokenizer = loaded::tokenizer(&peek_tokenizer(&checkpoint)?, &recipe, &shape)?;
    let template = if args.apply_chat_template {
        Some(loaded::chat_template(&checkpoint, "leave --apply-chat-template out")?)
    } else {
        None
    };
    let render = |turns: &[Turn<'_>]| {
        let messages = turns.iter().map(|&(role, content)| ChatMessage { role, content }).collect::<Vec<_>>();
        template.as_ref().map_or(Ok(String::new()), |template| template.render(&messages).map_err(|e| e.to_string()))
    };
    let chat = template.as_ref().map(|_| TaskChat::new(args.system.as_deref(), &render));
    let texts = asked.iter().map(|asked| {
        let run = TaskRun {
            fewshot: args.fewshot.unwrap_or(asked.task.fewshot()),
            limit: args.limit.map(|limit| limit as usize),
            truncate: args.truncate,
        };
        TaskTexts::new(&asked.task, &asked.rows, run, chat.as_ref(), &tokenizer, shape.max_seq_len)
            .with_context(|| asked.file.clone())
    });
    let texts: Vec<TaskTexts<'_>> = texts.collect::<Result<_>>()?;
    if chat.as_ref().is_some_and(TaskChat::lacks_system) {
        terminal::warning("the chat template refuses a system message, and chats have none (as in the harness)");
    }
    let is_sparse = args.sparse.selector.is_some();
    let sizes = texts.iter().map(|texts| texts.size(is_sparse));
    let size = sizes.reduce(TaskSize::max).unwrap_or_default();
    (args.place.memory).check_inference(&checkpoint, &place, |_, _| InferenceSize {
        cached_tokens: size.cached,
        num_caches: size.num_caches,
        ..InferenceSize::rows_of(size.longest, size.pass)
    })?;
    on_device!(place, run_on(&args, &checkpoint, &texts))
}

/// Prints the tasks inside the program whose names begin with `prefix`, without it.
pub(super) fn list(prefix: &str) -> Result<()> {
    let names = READY_TASKS.iter().filter(|(name, _)| name.starts_with(prefix)).map(|(name, _)| *name);
    let width = names.clone().map(str::len).max().unwrap_or(0) - prefix.len();
    for name in names {
        terminal::line(&format!("{:<width$}  {}", &name[prefix.len()..], Task::ready(name)?.about()));
    }
    Ok(())
}

/// Reads the tasks and their rows. This happens before the model is loaded, so that errors come early.
fn asked(args: &TasksArgs) -> Result<Vec<Asked>> {
    let mut asked: Vec<Asked> = Vec::new();
    for (name, file) in pairs(&args.data)? {
        let task = if !name.ends_with(".toml") {
            Task::ready(name)?
        } else {
            let text = sieve_files::read_text(Path::new(name)).with_context(|| format!("reading the task {name}"))?;
            Task::parse(name, &text)?
        };
        if asked.iter().any(|asked| asked.task.name() == name) {
            bail!("the task {name} is named twice\n  hint: one file a task");
        }
        let rows = TaskRows { rows: read_table(Path::new(file))?, examples: None };
        let file = file.to_owned();
        asked.push(Asked { task, rows, file });
    }
    for (name, file) in pairs(&args.fewshot_data)? {
        let Some(asked) = asked.iter_mut().find(|asked| asked.task.name() == name) else {
            bail!("--fewshot-data names {name}, and --data does not");
        };
        if args.fewshot.unwrap_or(asked.task.fewshot()) == 0 {
            bail!(
                "--fewshot-data names {name}, whose questions have no examples before them\n  \
                 hint: ask for some, for example --fewshot 5, or leave --fewshot-data out"
            );
        }
        if asked.rows.examples.replace(read_table(Path::new(file))?).is_some() {
            bail!("--fewshot-data names the task {name} twice\n  hint: one file a task");
        }
    }
    Ok(asked)
}

/// Splits each argument `TASK=FILE` at its first `=`.
fn pairs(arguments: &[String]) -> Result<Vec<(&str, &str)>> {
    let pairs = arguments.iter().map(|argument| {
        let pair = argument.split_once('=').filter(|(name, file)| !name.is_empty() && !file.is_empty());
        pair.with_context(|| {
            format!("{argument:?} is not of the form TASK=FILE\n  hint: write for example --data piqa=validation.jsonl")
        })
    });
    pairs.collect()
}

/// Runs the tasks one after the other; prints the scores and writes the file of `--samples`.
fn run_on<B: DeviceBackend>(
    args: &TasksArgs,
    checkpoint: &Path,
    texts: &[TaskTexts<'_>],
    device: &B::Device,
    kept: Kept,
) -> Result<()> {
    let (loaded, tokenizer) = loaded::load::<B>(checkpoint, device, kept)?;
    let mut selection = args.sparse.selection(&loaded.shape)?;
    let model =
        TaskModel { model: &loaded.model, tokenizer: &tokenizer, ends: &loaded.end_ids(tokenizer.eos_id()?)?, device };
    let (mut reports, mut seconds) = (Vec::new(), Vec::new());
    for texts in texts {
        let started = Instant::now();
        let what = format!("texts of {}", texts.name());
        let report = so_far::with_bar(texts.num_texts() as u64, &what, |bar| {
            let mut observe = |done: usize, all: usize| {
                bar.set_length(all as u64);
                bar.set_position(done as u64);
            };
            run_task(&model, texts, selection.as_mut(), &mut observe)
        })?;
        let scores = report.scores.iter().map(|score| format!("{} {:.4}", score.name, score.value));
        so_far::done(format!("{}: {}", report.task, scores.collect::<Vec<_>>().join(", ")));
        reports.push(report);
        seconds.push(started.elapsed().as_secs_f64());
    }
    if let Some(path) = &args.samples {
        path.write_text(&samples(&reports)?)?;
    }
    print(args, &loaded, &reports, &seconds, selection.as_ref())
}

/// The text of `--samples`: a JSON line for each row, with its task.
fn samples(reports: &[TaskReport]) -> Result<String> {
    let mut text = String::new();
    for report in reports {
        for row in &report.rows {
            let mut line = serde_json::Map::from_iter([("task".to_owned(), report.task.as_str().into())]);
            if let serde_json::Value::Object(row) = serde_json::to_value(row)? {
                line.extend(row);
            }
            text += &serde_json::Value::Object(line).to_string();
            text.push('\n');
        }
    }
    Ok(text)
}

/// Prints the scores, and LongBench's averages where its tasks were run; or one JSON object.
fn print<B: DeviceBackend>(
    args: &TasksArgs,
    loaded: &LoadedModel<B>,
    reports: &[TaskReport],
    seconds: &[f64],
    selection: Option<&Selection>,
) -> Result<()> {
    let average = LongBenchAverage::new(reports);
    let mut json = serde_json::json!({
        "data": args.data,
        "fewshot_data": args.fewshot_data,
        "tasks": reports,
        "seconds": seconds,
        "apply_chat_template": args.apply_chat_template,
        "system": args.system,
    });
    if let Some(average) = &average {
        json["longbench"] = serde_json::to_value(average)?;
    }
    if let Some(selection) = selection {
        selector::report(selection, &mut json);
        json["stream"] = args.sparse.stream.into();
        json["is_causal_map"] = selection.selectors().is_causal_map().into();
    }
    if args.result.report(loaded, args.command(), json)? {
        return Ok(());
    }
    print_table(loaded, reports, seconds);
    if let Some(average) = average {
        terminal::line(&format!(
            "average {:.4} over {} of 16 data sets; {:.4} over their {} categories (LongBench's overall: the mean of \
             each category's mean)",
            average.mean,
            average.num_data_sets,
            average.overall,
            average.categories.len()
        ));
    }
    if let Some(selection) = selection {
        terminal::line(&selector::summary(selection));
    }
    Ok(())
}

/// Prints a line for each score of each task.
fn print_table<B: DeviceBackend>(loaded: &LoadedModel<B>, reports: &[TaskReport], seconds: &[f64]) {
    let width = reports.iter().map(|report| report.task.len() + 2).fold(18, usize::max);
    terminal::line(&format!(
        "{}\n{:<width$}{:>8} {:>5}  {:<SCORE$}{:>14}  {:>7}{:>10}",
        output::heading(loaded),
        "task",
        "rows",
        "shots",
        "score",
        "value",
        "stderr",
        "seconds"
    ));
    for (report, seconds) in reports.iter().zip(seconds) {
        for (n, score) in report.scores.iter().enumerate() {
            let (task, rows, shots, seconds) = match n {
                0 => (
                    report.task.as_str(),
                    terminal::thousands(report.num_rows as u64),
                    report.fewshot.to_string(),
                    format!("{seconds:.1}"),
                ),
                _ => ("", String::new(), String::new(), String::new()),
            };
            let stderr = score.stderr.map_or_else(|| "-".to_owned(), |stderr| format!("{stderr:.4}"));
            terminal::line(&format!(
                "{task:<width$}{rows:>8} {shots:>5}  {:<SCORE$}{:>14.4}  {stderr:>7}{seconds:>10}",
                score.name, score.value
            ));
        }
        if report.num_truncated > 0 {
            let cut = terminal::thousands(report.num_truncated as u64);
            let place = if report.cuts_middle { "in their middle" } else { "at their beginning" };
            terminal::line(&format!("{:<width$}{cut} texts were cut {place}", ""));
        }
    }
}
