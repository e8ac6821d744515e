//! Reads a run's folder.
use crate::ReportError;
use crate::evaluations::{Picture, Scores, pictures, scores};
use serde::Deserialize;
use serde_json::Value;
use sieve_core::{InitialWeights, MODEL_LINE, NumberFormat, Recipe, model_line};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

const CONFIG: &str = "config.toml";
const METRICS: &str = "metrics.jsonl";
/// Numbers of a logged step that are not charted, since they do not describe the training.
const NOT_SHOWN: [&str; 4] = ["step", "num_steps", "memory_total_bytes", "eta_seconds"];

/// The metrics, recipe and evaluations of one run folder.
#[derive(Debug)]
pub struct Run {
    pub(crate) name: String,
    pub(crate) folder: PathBuf,
    /// The resolved recipe, `section.key` to value as TOML.
    pub(crate) config: BTreeMap<String, String>,
    /// The recipe: the text of `config.toml`.
    pub(crate) recipe: String,
    /// Rows of the embedding, from a checkpoint or the run's data; `None` if neither gives it.
    pub(crate) vocab_size: Option<usize>,
    /// Numbers of the logged steps.
    pub(crate) steps: Vec<f32>,
    /// By name, a number for each of `steps`; NaN if the step did not log it.
    pub(crate) numbers: BTreeMap<String, Vec<f64>>,
    /// What was trained, on one line: the comment at the top of `config.toml`; worked out from the keys of the recipe
    /// where an older run has no such comment.
    pub(crate) model: String,
    /// Number of steps that the whole run plans.
    pub(crate) num_steps: u64,
    /// The last checkpoint, if there is one. A run that was stopped has it at its last step, which is seldom a logged
    /// step.
    pub(crate) last_checkpoint: Option<LastCheckpoint>,
    /// Whether the run's log ends with the error of a run that diverged.
    pub(crate) is_given_up: bool,
    /// Number of steps that the guard against diverging losses skipped.
    pub(crate) num_skipped: usize,
    pub(crate) validations: Vec<Validation>,
    pub(crate) scores: Vec<Scores>,
    pub(crate) pictures: Vec<Picture>,
    /// The flags of a run that began with a checkpoint, as `origin.json` has them.
    pub(crate) began: Began,
    /// Number of processes that trained it last.
    pub(crate) num_processes: usize,
    /// The texts that the model wrote at the run's end, as its log has them.
    pub(crate) samples: Vec<String>,
}

/// The loss of one validation.
#[derive(Clone, Copy, Debug, Deserialize)]
pub(crate) struct Validation {
    pub(crate) step: f64,
    /// Mean cross-entropy of a token, in nats; NaN of a model that diverged.
    #[serde(deserialize_with = "or_nan")]
    pub(crate) loss: f64,
    #[serde(default = "not_logged", deserialize_with = "or_nan")]
    pub(crate) bits_per_byte: f64,
    #[serde(default = "not_logged", deserialize_with = "or_nan")]
    pub(crate) unigram_bits_per_byte: f64,
}

/// A number; JSON writes NaN and infinity as null.
fn or_nan<'de, D: serde::Deserializer<'de>>(number: D) -> Result<f64, D::Error> {
    Ok(Option::<f64>::deserialize(number)?.unwrap_or(f64::NAN))
}

/// What the state of a run's last checkpoint says.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct LastCheckpoint {
    pub(crate) step: u64,
    pub(crate) tokens_seen: u64,
    /// Checksum of the text that was trained on.
    #[serde(default)]
    pub(crate) data_fingerprint: Value,
}

/// How a run took over the checkpoint that it began with. A run that began with its seed has no such file.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
pub(crate) struct Began {
    #[serde(default)]
    pub(crate) fresh_optimizer: bool,
    #[serde(default)]
    pub(crate) drops: bool,
    #[serde(default)]
    state: BeganState,
}

/// What `origin.json` says of the checkpoint.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
struct BeganState {
    #[serde(default)]
    tokens_seen: u64,
}

fn not_logged() -> f64 {
    f64::NAN
}

impl Run {
    /// Reads the run in `folder` or, if `folder` is a sweep, its runs. A run of a sweep is named after its own folder,
    /// with `name` before it. Runs of a sweep without a logged step are left out.
    ///
    /// # Errors
    /// The errors of [`open`](Self::open).
    pub fn open_all(folder: &Path, name: Option<&str>) -> Result<Vec<Self>, ReportError> {
        let holds_run = |path: &PathBuf| path.join(CONFIG).is_file() && path.join(METRICS).is_file();
        let mut inside = Vec::new();
        if !folder.join(CONFIG).exists()
            && let Ok(entries) = std::fs::read_dir(folder)
        {
            inside.extend(entries.filter_map(|entry| Some(entry.ok()?.path())).filter(holds_run));
        }
        inside.sort();
        let mut runs = Vec::new();
        for path in inside {
            match Self::open(&path, None) {
                Ok(run) => runs.push(Self {
                    name: name.map_or_else(|| run.name.clone(), |name| format!("{name} {}", run.name)),
                    ..run
                }),
                Err(ReportError::NoSteps { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        if runs.is_empty() { Ok(vec![Self::open(folder, name)?]) } else { Ok(runs) }
    }

    /// Reads the run in `folder`. Without `name` the run has the folder's name.
    ///
    /// # Errors
    /// A folder that holds no run or a run without a step; a damaged file.
    pub fn open(folder: &Path, name: Option<&str>) -> Result<Self, ReportError> {
        for missing in [CONFIG, METRICS] {
            if !folder.join(missing).is_file() {
                let path = folder.to_owned();
                let there_is = if !folder.exists() {
                    "nothing of that name".to_owned()
                } else if folder.is_dir() {
                    format!("no {missing} in it")
                } else {
                    "a file of that name, and a run is a folder".to_owned()
                };
                return Err(ReportError::NoRun { path, there_is });
            }
        }
        let path = folder.join(CONFIG);
        let recipe = sieve_files::read_text(&path).map_err(ReportError::io(&path))?;
        let table: toml::Table =
            toml::from_str(&recipe).map_err(|error| ReportError::content(&path, error.to_string()))?;
        let mut config = BTreeMap::new();
        flatten_config("", &toml::Value::Table(table), &mut config);
        let own_name = || {
            let full = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
            full.file_name().map_or_else(|| "run".to_owned(), |name| name.to_string_lossy().into_owned())
        };
        let vocab_size = vocab_size(folder, &config);
        let checkpoints = folder.join(config.get("checkpoint.folder").map_or("checkpoint", String::as_str));
        let mut run = Self {
            name: name.map_or_else(own_name, str::to_owned),
            folder: folder.to_owned(),
            model: model_of(&recipe, vocab_size),
            vocab_size,
            last_checkpoint: last_checkpoint(&checkpoints),
            is_given_up: is_given_up(&folder.join("log")),
            config,
            recipe,
            steps: Vec::new(),
            numbers: BTreeMap::new(),
            num_steps: 0,
            num_skipped: 0,
            validations: Vec::new(),
            scores: scores(&folder.join("eval"))?,
            pictures: pictures(&folder.join("eval"))?,
            began: began(&folder.join("origin.json")),
            num_processes: num_processes(&folder.join("log")),
            samples: samples(&folder.join("log")),
        };
        run.read_metrics(&folder.join(METRICS))?;
        Ok(run)
    }

    /// Name of the run in the report.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Reads the steps, skipped steps and validations of metrics.jsonl; its other events are not shown.
    fn read_metrics(&mut self, path: &Path) -> Result<(), ReportError> {
        let file = sieve_files::open_file(path).map_err(ReportError::io(path))?;
        let mut lines = BufReader::new(file).lines().enumerate().peekable();
        while let Some((idx, line)) = lines.next() {
            let line = line.map_err(ReportError::io(path))?;
            let value: Value = match serde_json::from_str(&line) {
                Ok(value) => value,
                // The last line may be incomplete while the run is still training.
                Err(_) if lines.peek().is_none() => break,
                Err(error) => {
                    return Err(ReportError::content(path, format!("line {}: {error}", idx + 1)));
                }
            };
            match value["kind"].as_str() {
                Some("step") => self.add_step(&value),
                Some("skipped") => self.num_skipped += 1,
                Some("validation") => {
                    let validation = serde_json::from_value(value)
                        .map_err(|error| ReportError::content(path, format!("line {}: {error}", idx + 1)))?;
                    self.validations.push(validation);
                }
                _ => {}
            }
        }
        if self.steps.is_empty() { Err(ReportError::NoSteps { path: path.to_owned() }) } else { Ok(()) }
    }

    /// Adds a logged step: one number to each column, NaN where the step lacks it. A line without a step number is
    /// skipped.
    fn add_step(&mut self, line: &Value) {
        let Some(step) = line["step"].as_f64() else {
            return;
        };
        let num_before = self.steps.len();
        self.steps.push(step as f32);
        self.num_steps = line["num_steps"].as_u64().unwrap_or(self.num_steps);
        let numbers = &mut self.numbers;
        for_each_number("", line, &mut |name, number| {
            if NOT_SHOWN.contains(&name) {
                return;
            }
            let column = match numbers.get_mut(name) {
                Some(column) => column,
                None => numbers.entry(name.to_owned()).or_default(),
            };
            column.resize(num_before, f64::NAN);
            column.push(number);
        });
        for column in numbers.values_mut() {
            column.resize(num_before + 1, f64::NAN);
        }
    }

    /// Number of steps that the run did.
    pub(crate) fn num_done(&self) -> f64 {
        let logged = self.steps.last().map_or(0.0, |&step| f64::from(step));
        self.last_checkpoint.as_ref().map_or(logged, |last| logged.max(last.step as f64))
    }

    /// Number of tokens that the run trained on.
    pub(crate) fn num_tokens(&self) -> f64 {
        let logged = self.sums().last().map_or(f64::NAN, |sums| sums[0]);
        let last = self.last_checkpoint.as_ref().filter(|last| last.step as f64 >= self.num_done());
        last.map_or(logged, |last| last.tokens_seen as f64)
    }

    /// Whether the run ended before its last step, or still trains.
    pub(crate) fn is_short(&self) -> bool {
        self.num_steps > 0 && self.num_done() < self.num_steps as f64
    }

    /// Whether the run diverged: its guard gave up, its last loss is not finite, or the loss ended above its first
    /// value and above twice the unigram loss.
    pub(crate) fn has_diverged(&self) -> bool {
        let loss = self.column("loss");
        let (Some(&first), Some(&last)) = (loss.first(), loss.last()) else {
            return self.is_given_up;
        };
        let is_unknown = self.validations.last().is_some_and(|check| !check.loss.is_finite());
        self.is_given_up || is_unknown || !last.is_finite() || (last > first && last > 2.0 * self.unigram_loss())
    }

    /// The step with the largest of the logged losses above the first one and above twice the unigram loss, and that
    /// loss.
    pub(crate) fn worst_spike(&self) -> Option<(f32, f64)> {
        let loss = self.column("loss");
        let (first, unigram) = (*loss.first()?, self.unigram_loss());
        let spikes = self.steps.iter().copied().zip(loss.iter().copied());
        let spikes = spikes.filter(|(_, loss)| *loss > first && *loss > 2.0 * unigram);
        spikes.max_by(|(_, a), (_, b)| a.total_cmp(b))
    }

    /// Loss of a model that knows how often each token occurs, in nats; NaN without a validation.
    fn unigram_loss(&self) -> f64 {
        let checks = self.validations.iter();
        let nats = checks.map(|check| check.loss * check.unigram_bits_per_byte / check.bits_per_byte);
        nats.filter(|nats| nats.is_finite()).fold(f64::NAN, f64::max)
    }

    /// The numbers of `name`; empty if none was logged.
    pub(crate) fn column(&self, name: &str) -> &[f64] {
        self.numbers.get(name).map_or(&[], Vec::as_slice)
    }

    /// `[tokens, seconds, FLOPs of one device]` up to each logged step. Seconds are tokens divided by the logged speed,
    /// which leaves out validation and checkpoints.
    pub(crate) fn sums(&self) -> Vec<[f64; 3]> {
        let (tokens, speed, tflops) =
            (self.column("tokens_seen"), self.column("tokens_per_second"), self.column("tflops"));
        let mut sums = Vec::with_capacity(self.steps.len());
        // Tokens of the run that it began with took it no time.
        let (mut seconds, mut flops, mut last_tokens) = (0.0, 0.0, self.began.state.tokens_seen as f64);
        for idx in 0..self.steps.len() {
            let at = |column: &[f64]| column.get(idx).copied().unwrap_or(f64::NAN);
            let elapsed = (at(tokens) - last_tokens) / at(speed);
            if elapsed.is_finite() && elapsed > 0.0 {
                seconds += elapsed;
                let rate = at(tflops);
                flops += if rate.is_finite() { rate * 1e12 * elapsed } else { 0.0 };
            }
            if at(tokens).is_finite() {
                last_tokens = at(tokens);
            }
            sums.push([last_tokens, seconds, flops]);
        }
        sums
    }
}

/// The line about the model: the comment at the beginning of `config.toml`, else what the recipe alone says.
fn model_of(recipe: &str, vocab_size: Option<usize>) -> String {
    if let Some(line) = recipe.lines().next().and_then(|first| first.strip_prefix(MODEL_LINE)) {
        return line.to_owned();
    }
    let line = Recipe::load(recipe, CONFIG, &[]).ok().and_then(|recipe| {
        let shape = recipe.model_shape(vocab_size.or_else(|| recipe.stated_vocab_size())?).ok()?;
        Some(model_line(&recipe, &shape, NumberFormat::NotRecorded, &InitialWeights::NotRecorded))
    });
    line.unwrap_or_default()
}

/// The state of the latest `step-N` in a folder of checkpoints.
fn last_checkpoint(folder: &Path) -> Option<LastCheckpoint> {
    let entries = std::fs::read_dir(folder).ok()?.flatten().map(|entry| entry.path());
    let states = entries.filter_map(|path| {
        let step: u64 = path.file_name()?.to_str()?.strip_prefix("step-")?.parse().ok()?;
        let state = sieve_files::read_text(&path.join("state.json")).ok()?;
        serde_json::from_str::<LastCheckpoint>(&state).ok().filter(|state| state.step == step)
    });
    states.max_by_key(|state| state.step)
}

/// The last samples in the log of a run: a line `sample:` each, and the text indented below it. Samples of a run that
/// was made longer replace the earlier ones.
fn samples(log: &Path) -> Vec<String> {
    let text = sieve_files::read_file(log).unwrap_or_default();
    let (mut all, mut open): (Vec<String>, bool) = (Vec::new(), false);
    for line in String::from_utf8_lossy(&text).lines() {
        match line.strip_prefix("  ").filter(|_| open) {
            Some(words) => {
                let sample = all.last_mut().expect("a sample is open");
                sample.push_str(if sample.is_empty() { "" } else { "\n" });
                sample.push_str(words);
            }
            None if line == "sample:" => {
                if !open {
                    all.clear();
                }
                all.push(String::new());
                open = true;
            }
            None => open = false,
        }
    }
    all
}

/// What `origin.json` says; a file that cannot be read says nothing.
fn began(path: &Path) -> Began {
    let text = sieve_files::read_file(path).unwrap_or_default();
    serde_json::from_slice(&text).unwrap_or_default()
}

/// Number of processes of the last start in the log of a run: `run: … on 2 processes, each on …`.
fn num_processes(log: &Path) -> usize {
    let text = sieve_files::read_file(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let started = text.lines().rev().find(|line| line.starts_with("run: "));
    let count = started.and_then(|line| line.split(" on ").nth(1)?.split_once(" processes")?.0.parse().ok());
    count.unwrap_or(1)
}

/// Whether the log of a run ends with its guard's error.
fn is_given_up(log: &Path) -> bool {
    let Ok(text) = sieve_files::read_file(log) else {
        return false;
    };
    let text = String::from_utf8_lossy(&text);
    // The error has a line for its hint; a run that was begun again has later lines.
    let mut last = text.lines().rev().filter(|line| !line.trim().is_empty()).take(3);
    last.any(|line| line.contains("training diverged"))
}

/// The vocabulary's size: from a checkpoint of the run, else from its prepared data; `None` without either.
fn vocab_size(folder: &Path, config: &BTreeMap<String, String>) -> Option<usize> {
    let stated = |path: PathBuf| {
        let value: Value = serde_json::from_str(&sieve_files::read_text(&path).ok()?).ok()?;
        usize::try_from(value["vocab_size"].as_u64()?).ok()
    };
    let checkpoints = folder.join(config.get("checkpoint.folder").map_or("checkpoint", String::as_str));
    let checkpoints = std::fs::read_dir(checkpoints).into_iter().flatten().flatten();
    let mut states = checkpoints.map(|entry| entry.path().join("state.json"));
    states.find_map(stated).or_else(|| {
        let data = match config.get("data.cache_dir") {
            // In a recipe's paths `$$` is a dollar sign.
            Some(dir) => PathBuf::from(dir.replace("$$", "$")),
            None => folder.join("data"),
        };
        stated(data.join("meta.json"))
    })
}

/// Calls `found` with every number in `value` and its path, joined by dots.
fn for_each_number(name: &str, value: &Value, found: &mut impl FnMut(&str, f64)) {
    match value {
        Value::Number(number) => found(name, number.as_f64().unwrap_or(f64::NAN)),
        Value::Object(fields) => {
            for (key, value) in fields {
                match name {
                    "" => for_each_number(key, value, found),
                    _ => for_each_number(&format!("{name}.{key}"), value, found),
                }
            }
        }
        _ => {}
    }
}

/// Adds every key below `value`, whose own key is `name`, to `into` as `section.key`.
fn flatten_config(name: &str, value: &toml::Value, into: &mut BTreeMap<String, String>) {
    match value {
        toml::Value::Table(table) => {
            for (key, value) in table {
                let full = if name.is_empty() { key.clone() } else { format!("{name}.{key}") };
                flatten_config(&full, value, into);
            }
        }
        // An array of tables is [[stage]]; each table becomes a section `stage[N]`.
        toml::Value::Array(items) if items.iter().any(toml::Value::is_table) => {
            for (idx, value) in items.iter().enumerate() {
                flatten_config(&format!("{name}[{}]", idx + 1), value, into);
            }
        }
        toml::Value::String(text) => {
            into.insert(name.to_owned(), text.clone());
        }
        other => {
            into.insert(name.to_owned(), other.to_string());
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::fs;

    pub(crate) const STEP: &str = r#"{"kind":"step","step":10,"num_steps":20,"loss":2.5,"lr":0.1,"tokens_seen":100,
"tokens_per_second":50,"tflops":2.0,"memory_total_bytes":9,"eta_seconds":1,"attention":{"density":0.5}}"#;

    /// A folder with the given recipe and metrics.
    pub(crate) fn folder(recipe: &str, metrics: &str) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join(CONFIG), recipe).unwrap();
        // The constants are wrapped for the reader; a line of the file is not.
        let metrics = metrics.replace(",\n\"", ",\"");
        fs::write(folder.path().join(METRICS), metrics).unwrap();
        folder
    }

    #[test]
    fn tokens_of_the_run_before_took_a_branch_no_time() {
        let log = r#"{"kind":"step","step":65,"num_steps":70,"loss":2.0,"tokens_seen":3300,"tokens_per_second":100.0}
{"kind":"step","step":70,"num_steps":70,"loss":2.0,"tokens_seen":3600,"tokens_per_second":300.0}"#;
        let folder = folder("", log);
        let seconds = |folder: &Path| Run::open(folder, None).unwrap().sums().last().unwrap()[1];
        assert_eq!(seconds(folder.path()), 33.0 + 1.0);
        let began = r#"{"checkpoint":"x","is_branch":true,"state":{"step":60,"tokens_seen":3000}}"#;
        std::fs::write(folder.path().join("origin.json"), began).unwrap();
        assert_eq!(seconds(folder.path()), 3.0 + 1.0);
    }

    #[test]
    fn every_number_of_a_step_is_a_column() {
        let second = r#"{"kind":"step","step":20,"num_steps":20,"loss":2.0,"tokens_seen":300,
"tokens_per_second":100,"tflops":1.0}"#;
        let check = r#"{"kind":"validation","step":20,"loss":2.1,"bits_per_byte":1.5}"#;
        let run = folder("[training]\nseed = 3\n", &format!("{STEP}\n{second}\n{check}\n{{\"kind\":\"st"));
        let run = Run::open(run.path(), Some("a")).unwrap();
        assert_eq!((run.name(), run.num_steps, run.num_skipped), ("a", 20, 0));
        assert_eq!(run.column("loss"), [2.5, 2.0]);
        let density = run.column("attention.density");
        assert_eq!(density[0], 0.5);
        assert!(density[1].is_nan());
        assert!(run.column("eta_seconds").is_empty());
        assert_eq!(run.sums(), [[100.0, 2.0, 4e12], [300.0, 4.0, 6e12]]);
        assert_eq!((run.validations.len(), run.validations[0].bits_per_byte), (1, 1.5));
        assert_eq!(run.config["training.seed"], "3");
    }

    #[test]
    fn the_folder_of_a_sweep_is_its_runs() {
        let sweep = tempfile::tempdir().unwrap();
        for (name, seed) in [("seed=10", 10), ("seed=2", 2), ("seed=3", 3)] {
            let run = sweep.path().join(name);
            fs::create_dir(&run).unwrap();
            fs::write(run.join(CONFIG), format!("[training]\nseed = {seed}\n")).unwrap();
            // The last run has only begun: it has logged no step.
            let metrics = if seed == 3 { String::new() } else { STEP.replace(",\n\"", ",\"") };
            fs::write(run.join(METRICS), metrics).unwrap();
        }
        fs::create_dir(sweep.path().join("data")).unwrap();
        fs::write(sweep.path().join("sweep.json"), "[]").unwrap();
        let names = |name| {
            let runs = Run::open_all(sweep.path(), name).unwrap();
            runs.into_iter().map(|run| run.name).collect::<Vec<_>>()
        };
        assert_eq!(names(None), ["seed=10", "seed=2"]);
        assert_eq!(names(Some("a")), ["a seed=10", "a seed=2"]);
        let one = Run::open_all(&sweep.path().join("seed=2"), Some("b")).unwrap();
        assert_eq!((one.len(), one[0].name()), (1, "b"));
        let error = Run::open_all(&sweep.path().join("data"), None).unwrap_err().to_string();
        assert!(error.contains("holds no run"), "{error}");
    }

    #[test]
    fn a_folder_that_is_no_run_or_damaged_is_refused() {
        let empty = tempfile::tempdir().unwrap();
        let error = Run::open(empty.path(), None).unwrap_err().to_string();
        assert!(error.contains("holds no run: there is no config.toml") && error.contains("hint"), "{error}");
        for (name, there_is) in [("none", "there is nothing of that name"), ("file", "there is a file of that name")] {
            fs::write(empty.path().join("file"), "").unwrap();
            let error = Run::open(&empty.path().join(name), None).unwrap_err().to_string();
            assert!(error.contains(there_is), "{error}");
        }
        let begun = folder("", "");
        let error = Run::open(begun.path(), None).unwrap_err().to_string();
        assert!(error.contains("no step has been logged yet"), "{error}");
        let damaged = folder("", &format!("{STEP}\nnot json\n{STEP}\n"));
        let error = Run::open(damaged.path(), None).unwrap_err().to_string();
        assert!(error.contains("line 2"), "{error}");
        let damaged = folder("[training", STEP);
        assert!(Run::open(damaged.path(), None).unwrap_err().to_string().contains("config.toml"));
    }

    #[test]
    fn stages_are_sections_of_their_own() {
        let run = folder("[[stage]]\nsteps = 5\n[[stage]]\nsteps = 7\n[data]\npaths = [\"a\"]\n", STEP);
        let run = Run::open(run.path(), None).unwrap();
        assert_eq!((run.config["stage[1].steps"].as_str(), run.config["stage[2].steps"].as_str()), ("5", "7"));
        assert_eq!(run.config["data.paths"], "[\"a\"]");
    }
}
