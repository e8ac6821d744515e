//! Writes `metrics.jsonl` and TensorBoard files; the tags are torchtitan's.
use crate::run_folder::{METRICS_ASIDE, is_same_file};
use crate::tensorboard::{TensorBoard, fenced};
use crate::tries::Tries;
use crate::{RunFolder, SkippedStep, StepReport, TrainError, ValidationReport};
use serde::{Deserialize, Serialize};
use sieve_core::{Recipe, ShownPath};
use sieve_files::{read_file, read_text, write_atomically};
use sieve_ops::MemoryPeak;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// Writers of a run's numbers. If a file cannot be written, the run continues and the lines wait in memory. The default
/// writes nothing, for ranks other than 0.
#[derive(Default)]
pub(crate) struct Metrics {
    /// Path of `metrics.jsonl`; `None` if another process writes it.
    path: Option<PathBuf>,
    /// The open `metrics.jsonl`; `None` after a failed write, until the next try.
    file: Option<File>,
    /// Bytes of complete lines in the file.
    len: u64,
    /// Lines that could not be written yet.
    waiting: String,
    tries: Tries,
    /// Lines set aside, and failed and recovered writes, not yet reported.
    messages: Vec<String>,
    tensorboard: TensorBoard,
}

#[derive(Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
enum Line<'a> {
    Step(&'a StepReport),
    Skipped(&'a SkippedStep),
    Validation(&'a ValidationReport),
    /// The peak memory of the steps up to `step`.
    Memory {
        step: u64,
        #[serde(flatten)]
        peak: MemoryPeak,
        in_use_bytes_by_rank: Vec<u64>,
    },
}

#[derive(Serialize)]
struct Stamped<'a> {
    #[serde(flatten)]
    line: &'a Line<'a>,
    unix_seconds: f64,
}

/// What an earlier process of the same run wrote.
#[derive(Clone, Debug, Default)]
pub(crate) struct History {
    /// Its validations.
    pub(crate) first: Option<ValidationReport>,
    pub(crate) last: Option<ValidationReport>,
    /// The last step that has a line, and the most steps between two lines; `None` without a file.
    steps: Option<[u64; 2]>,
}

impl Metrics {
    /// Opens `metrics.jsonl` and TensorBoard's file. Lines of steps after `step`, and an incomplete line of a killed
    /// process, are dropped; the former are appended to the file `aside`, if given.
    pub(crate) fn open(
        folder: &RunFolder,
        step: u64,
        enable_tensorboard: bool,
        aside: Option<&Path>,
    ) -> Result<(Self, History), TrainError> {
        let path = folder.metrics_path();
        let (history, num_aside) =
            if path.exists() { drop_later_lines(&path, step, aside)? } else { Default::default() };
        let messages = aside.filter(|_| num_aside > 0).map(|aside| {
            format!("note: {num_aside} lines of {} after step {step} are now in {}", path.shown(), aside.shown())
        });
        let opened = open_lines(&path, None);
        let (file, len) = opened.map_err(TrainError::io("opening", &path))?;
        let tb = folder.tensorboard_path();
        let tensorboard = if enable_tensorboard {
            std::fs::create_dir_all(&tb).map_err(TrainError::io("creating", &tb))?;
            TensorBoard::create(&tb)
        } else {
            TensorBoard::default()
        };
        let messages = Vec::from_iter(messages);
        let metrics = Self { path: Some(path), file: Some(file), len, tensorboard, messages, ..Self::default() };
        Ok((metrics, history))
    }

    /// Warns if the file lacks lines before `step`, from which the run goes on: more steps than it logs, every
    /// `interval`, and than lie between two lines.
    pub(crate) fn warn_of_lost_lines(&mut self, history: &History, step: u64, interval: u64) {
        let (Some(path), Some([last, most])) = (&self.path, history.steps) else {
            return;
        };
        if step - last.min(step) > interval.max(most) {
            let aside = path.with_file_name(METRICS_ASIDE);
            let kept = if aside.exists() { format!("; {} may have them", aside.shown()) } else { String::new() };
            let path = path.shown();
            self.messages.push(format!(
                "warning: {path} has no line of the {} steps before step {step}, from which the run goes on{kept}",
                step - last
            ));
        }
    }

    /// Writes a logged step to `metrics.jsonl` and TensorBoard.
    pub(crate) fn step(&mut self, report: &StepReport) {
        self.line(&Line::Step(report));
        let attention = &report.attention;
        let mut scalars = vec![
            ("loss_metrics/global_avg_loss", report.loss),
            ("grad_norm", report.grad_norm),
            ("lr", report.lr),
            ("throughput(tps)", report.tokens_per_second),
            ("tflops", report.tflops),
            ("memory/in_use(GiB)", report.memory_bytes as f64 / GIB),
            ("n_tokens_seen", report.tokens_seen as f64),
            ("attention/density", attention.density),
            ("attention/mean_active_keys", attention.mean_active_keys),
        ];
        if let Some(ages) = attention.ages {
            scalars.extend([
                ("attention/never_active", attention.never_active),
                ("attention/not_self_visible", attention.not_self_visible),
                ("attention/median_key_age", ages.median_key_age as f64),
                ("attention/late_key_age", ages.late_key_age as f64),
                ("attention/beyond_window", ages.beyond_window),
            ]);
        }
        if let Some(fit) = attention.indexer {
            scalars.extend([
                ("attention/index_kl", fit.index_kl),
                ("attention/index_recall", fit.index_recall),
                ("attention/index_entropy", fit.index_entropy),
            ]);
        }
        scalars.extend(attention.clamped.map(|share| ("attention/clamped", share)));
        scalars.extend(report.mfu_percent.map(|mfu| ("mfu(%)", mfu)));
        scalars.extend(report.dense_mfu_percent.map(|mfu| ("mfu_dense_equivalent(%)", mfu)));
        self.tensorboard.scalars(&scalars, report.step);
    }

    /// Writes the recipe to TensorBoard, as text and as hyperparameters.
    pub(crate) fn recipe(&mut self, recipe: &Recipe, step: u64) -> Result<(), TrainError> {
        self.tensorboard.recipe(recipe, &recipe.to_toml()?, step);
        Ok(())
    }

    /// Writes a text that the model generated while it trains to TensorBoard.
    pub(crate) fn greedy_sample(&mut self, number: usize, text: &str, step: u64) {
        self.tensorboard.text(&format!("samples_greedy/{number}"), &fenced(text), step);
    }

    /// Writes a text that the model generated to TensorBoard.
    pub(crate) fn sample(&mut self, number: usize, text: &str, step: u64) {
        self.tensorboard.text(&format!("samples/{number}"), &fenced(text), step);
    }

    pub(crate) fn skipped(&mut self, report: &SkippedStep) {
        self.line(&Line::Skipped(report));
    }

    /// Writes the peak memory of the steps up to `step`.
    pub(crate) fn memory(&mut self, step: u64, peak: MemoryPeak, in_use_bytes_by_rank: Vec<u64>) {
        self.line(&Line::Memory { step, peak, in_use_bytes_by_rank });
    }

    /// Writes a validation to `metrics.jsonl` and TensorBoard.
    pub(crate) fn validation(&mut self, report: &ValidationReport) {
        self.line(&Line::Validation(report));
        let scalars = [
            ("validation_metrics/loss", report.loss),
            ("validation_metrics/perplexity", report.perplexity),
            ("validation_metrics/bits_per_byte", report.bits_per_byte),
        ];
        self.tensorboard.scalars(&scalars, report.step);
    }

    /// Appends a line with the present time to `metrics.jsonl`. Ranks other than 0 write nothing, and a line is lost
    /// while too many others wait.
    fn line(&mut self, line: &Line<'_>) {
        if self.path.is_none() || self.waiting.len() > MAX_WAITING_BYTES {
            return;
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let stamped = Stamped { line, unix_seconds: now.unwrap_or_default().as_secs_f64() };
        self.waiting += &serde_json::to_string(&stamped).expect("plain numbers serialise");
        self.waiting.push('\n');
        if !self.tries.has_failed() || self.tries.is_due() {
            self.write_waiting();
        }
    }

    /// Writes the waiting lines, or schedules another try; a message reports the first failure and the recovery.
    fn write_waiting(&mut self) {
        let Some(path) = &self.path else {
            return;
        };
        let opened = match self.file.take() {
            Some(file) => Ok((file, self.len)),
            None => open_lines(path, Some(self.len)),
        };
        let written = opened.and_then(|(mut file, len)| {
            file.write_all(self.waiting.as_bytes())?;
            Ok((file, len + self.waiting.len() as u64))
        });
        match written {
            Ok((file, len)) => {
                (self.file, self.len) = (Some(file), len);
                self.waiting.clear();
                if self.tries.succeed() {
                    self.messages.push(format!("{} is written again, and lacks no line", path.shown()));
                }
            }
            // The next try opens the file again and cuts off an incomplete line that this write may have left.
            Err(error) => {
                let pause = self.tries.fail().as_secs();
                if self.tries.num_failed == 1 {
                    self.messages.push(format!(
                        "warning: writing {}: {error}; training continues, and its lines wait (next try in {pause} s)",
                        path.shown()
                    ));
                }
            }
        }
    }

    /// Takes the messages about lines set aside, and failed and recovered writes.
    pub(crate) fn take_messages(&mut self) -> Vec<String> {
        std::mem::take(&mut self.messages)
    }

    /// Whether the open `metrics.jsonl` is no longer at its path, because it was removed, moved or replaced.
    pub(crate) fn is_elsewhere(&self) -> bool {
        let held = self.file.as_ref().zip(self.path.as_ref());
        held.is_some_and(|(file, path)| !is_same_file(file, path))
    }

    /// Opens or creates the file that is now at the path, for later lines.
    pub(crate) fn reopen(&mut self) {
        let opened = self.path.as_ref().map(|path| open_lines(path, None));
        (self.file, self.len) = match opened {
            Some(Ok((file, len))) => (Some(file), len),
            // The next line tries again; with this length it cuts nothing off.
            _ => (None, u64::MAX),
        };
    }

    /// Tries a last time to write the waiting lines.
    pub(crate) fn finish(&mut self) {
        if self.waiting.is_empty() {
            return;
        }
        self.write_waiting();
        if let (Some(path), false) = (&self.path, self.waiting.is_empty()) {
            let count = self.waiting.lines().count();
            self.messages.push(format!("warning: {} lacks the last {count} lines", path.shown()));
        }
    }
}

/// When this many bytes of lines wait, further lines are lost.
const MAX_WAITING_BYTES: usize = 64 << 20;

/// Opens a file to append lines to. With a `len`, cuts it off after so many bytes. Returns the file and its length.
fn open_lines(path: &Path, len: Option<u64>) -> io::Result<(File, u64)> {
    let file = OpenOptions::new().create(true).append(true).open(path)?;
    let found = file.metadata()?.len();
    match len {
        Some(len) if len < found => {
            file.set_len(len)?;
            Ok((file, len))
        }
        _ => Ok((file, found)),
    }
}

const GIB: f64 = (1u64 << 30) as f64;

/// The last validation that the run in `folder` wrote, if there is one; a number that was NaN or infinite is NaN.
pub fn last_validation(folder: &Path) -> Option<ValidationReport> {
    let text = read_text(&folder.join("metrics.jsonl")).ok()?;
    let mut lines = text.lines().rev();
    lines.find_map(|line| serde_json::from_str::<ValidationReport>(line).ok())
}

/// All validations in a `metrics.jsonl`, in its order.
///
/// # Errors
/// A file that cannot be read.
pub(crate) fn validations(path: &Path) -> Result<Vec<ValidationReport>, TrainError> {
    let text = read_file(path).map_err(TrainError::io("reading", path))?;
    let text = String::from_utf8_lossy(&text);
    Ok(text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect())
}

/// The fields by which a written line is kept or removed.
#[derive(Deserialize)]
struct Written {
    kind: String,
    step: u64,
}

/// Removes incomplete lines, and lines of steps after `step`, from `metrics.jsonl`; the latter are appended to the file
/// `aside`, if given. Returns the validations that stay, and the number of appended lines.
pub(crate) fn drop_later_lines(path: &Path, step: u64, aside: Option<&Path>) -> Result<(History, usize), TrainError> {
    let text = read_file(path).map_err(TrainError::io("reading", path))?;
    let text = String::from_utf8_lossy(&text);
    let (mut kept, mut later) = (String::with_capacity(text.len()), String::new());
    let mut history = History { steps: Some([0; 2]), ..History::default() };
    for line in text.split_inclusive('\n') {
        let Ok(written) = serde_json::from_str::<Written>(line) else {
            continue;
        };
        if !line.ends_with('\n') {
            continue;
        }
        if written.step > step {
            later.push_str(line);
            continue;
        }
        kept.push_str(line);
        let [last, most] = history.steps.unwrap_or_default();
        history.steps = Some([written.step.max(last), most.max(written.step.saturating_sub(last))]);
        if written.kind == "validation" {
            let report: Option<ValidationReport> = serde_json::from_str(line).ok();
            history.first = history.first.or_else(|| report.clone());
            history.last = report.or(history.last);
        }
    }
    // Before the lines are removed, so that a kill in between loses none.
    let num_aside = match aside.filter(|_| !later.is_empty()) {
        Some(aside) => {
            let appended = open_lines(aside, None).and_then(|(mut file, _)| file.write_all(later.as_bytes()));
            appended.map_err(TrainError::io("writing", aside))?;
            later.lines().count()
        }
        None => 0,
    };
    if kept != text {
        write_atomically(path, kept.as_bytes())?;
    }
    Ok((history, num_aside))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Start;

    const LINES: [&str; 4] = [
        concat!(
            r#"{"kind":"validation","step":0,"loss":2.0,"perplexity":7.4,"bits_per_byte":1.0,"#,
            r#""unigram_bits_per_byte":1.0,"num_labels":3,"num_bytes":4}"#
        ),
        r#"{"kind":"step","step":1,"loss":1.5}"#,
        concat!(
            r#"{"kind":"validation","step":2,"loss":1.0,"perplexity":2.7,"bits_per_byte":0.5,"#,
            r#""unigram_bits_per_byte":1.0,"num_labels":3,"num_bytes":4}"#
        ),
        r#"{"kind":"step","step":3,"loss":0.5}"#,
    ];

    /// Opens a `metrics.jsonl` with this text for a run at `step`: the text that stays, and its validations.
    fn reopened(text: &str, step: u64) -> (String, History) {
        let dir = tempfile::tempdir().unwrap();
        let folder = RunFolder::open(dir.path(), "checkpoint", &Start::New).unwrap();
        std::fs::write(folder.metrics_path(), text).unwrap();
        let (metrics, history) = Metrics::open(&folder, step, false, None).unwrap();
        drop(metrics);
        let kept = std::fs::read_to_string(folder.metrics_path()).unwrap();
        (kept, history)
    }

    #[test]
    fn lines_after_the_checkpoint_are_dropped() {
        let text = LINES.join("\n") + "\n";
        let (kept, history) = reopened(&text, 2);
        assert_eq!(kept, LINES[..3].join("\n") + "\n");
        assert_eq!(history.first.unwrap().step, 0);
        assert_eq!(history.last.unwrap().step, 2);
        assert_eq!(reopened(&text, 3).0, text);
    }

    #[test]
    fn a_file_without_its_last_lines_is_told() {
        let line = |step: u64| format!("{{\"kind\":\"step\",\"step\":{step},\"loss\":0.5}}\n");
        for (steps, step, interval, missing) in [
            (&[1, 5, 10, 12][..], 12, 5, None),
            // The run logged every fifth step, and logs each one now.
            (&[1, 5, 10], 14, 1, None),
            (&[1, 5], 14, 5, Some("no line of the 9 steps before step 14")),
            (&[], 14, 5, Some("no line of the 14 steps before step 14")),
            (&[], 3, 5, None),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let folder = RunFolder::open(dir.path(), "checkpoint", &Start::New).unwrap();
            std::fs::write(folder.metrics_path(), steps.iter().map(|&step| line(step)).collect::<String>()).unwrap();
            let (mut metrics, history) = Metrics::open(&folder, step, false, None).unwrap();
            metrics.warn_of_lost_lines(&history, step, interval);
            let said = metrics.take_messages().concat();
            assert!(missing.map_or(said.is_empty(), |words| said.contains(words)), "{steps:?}: {said}");
        }
    }

    #[test]
    fn lines_that_are_set_aside_are_kept_in_a_file_of_their_own() {
        let dir = tempfile::tempdir().unwrap();
        let folder = RunFolder::open(dir.path(), "checkpoint", &Start::New).unwrap();
        let aside = folder.metrics_aside_path();
        for _ in 0..2 {
            std::fs::write(folder.metrics_path(), LINES.join("\n") + "\n{\"kind").unwrap();
            let (mut metrics, _) = Metrics::open(&folder, 1, false, Some(&aside)).unwrap();
            let message = metrics.take_messages().concat();
            assert!(message.starts_with("note: 2 lines of ") && message.ends_with("metrics.aside.jsonl"), "{message}");
        }
        assert_eq!(std::fs::read_to_string(aside).unwrap(), (LINES[2..].join("\n") + "\n").repeat(2));
        assert_eq!(std::fs::read_to_string(folder.metrics_path()).unwrap(), LINES[..2].join("\n") + "\n");
    }

    #[test]
    fn a_validation_that_is_not_finite_counts_as_the_last_one() {
        let spoilt = LINES[2]
            .replace("1.0,\"perplexity\":2.7,\"bits_per_byte\":0.5", "null,\"perplexity\":null,\"bits_per_byte\":null");
        let text = [LINES[0], LINES[1], &spoilt, LINES[3]].join("\n") + "\n";
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("metrics.jsonl"), &text).unwrap();
        for last in [last_validation(dir.path()), reopened(&text, 9).1.last] {
            let last = last.unwrap();
            assert_eq!(last.step, 2);
            assert!([last.loss, last.perplexity, last.bits_per_byte].iter().all(|number| number.is_nan()));
        }
    }

    #[test]
    fn a_half_line_is_dropped() {
        let text = LINES.join("\n") + "\n" + &LINES[3][..17];
        assert_eq!(reopened(&text, 9).0, LINES.join("\n") + "\n");
        // The last line is whole but lacks its newline, so the next line would be appended to it.
        let text = LINES.join("\n");
        assert_eq!(reopened(&text, 9).0, LINES[..3].join("\n") + "\n");
    }

    #[cfg(unix)]
    #[test]
    fn unwritten_lines_wait_and_a_half_written_one_is_cut_off() {
        use crate::tries::WriteLimits;
        const PEAK: MemoryPeak = MemoryPeak { in_use_bytes: 1, reserved_bytes: 2 };
        let dir = tempfile::tempdir().unwrap();
        let folder = RunFolder::open(dir.path(), "checkpoint", &Start::New).unwrap();
        let path = folder.metrics_path();
        std::fs::write(&path, "{\"kind\":\"step\",\"step\":1}\n").unwrap();
        let (mut metrics, _) = Metrics::open(&folder, 1, false, None).unwrap();
        metrics.tries.limits = WriteLimits { first_pause: std::time::Duration::ZERO, ..WriteLimits::default() };
        // The disk is full, and half of a line was written.
        metrics.file = Some(OpenOptions::new().append(true).open("/dev/full").unwrap());
        metrics.memory(2, PEAK, vec![7]);
        std::fs::write(&path, "{\"kind\":\"step\",\"step\":1}\n{\"kind\":\"mem").unwrap();
        let messages = metrics.take_messages().join("\n");
        assert!(messages.contains("metrics.jsonl") && messages.contains("training continues"), "{messages}");
        metrics.memory(3, PEAK, vec![7]);
        assert!(metrics.take_messages().concat().contains("written again"));
        let steps = |text: &str| {
            let lines = text.lines().map(|line| serde_json::from_str::<Written>(line).unwrap().step);
            lines.collect::<Vec<_>>()
        };
        assert_eq!(steps(&std::fs::read_to_string(&path).unwrap()), [1, 2, 3]);
        // The folder is removed and created again.
        assert!(!metrics.is_elsewhere());
        std::fs::remove_file(&path).unwrap();
        assert!(metrics.is_elsewhere());
        metrics.reopen();
        metrics.memory(4, PEAK, vec![7]);
        assert_eq!(steps(&std::fs::read_to_string(&path).unwrap()), [4]);
        metrics.file = Some(OpenOptions::new().append(true).open("/dev/full").unwrap());
        metrics.path = Some(dir.path().join("none/metrics.jsonl"));
        metrics.memory(5, PEAK, vec![7]);
        metrics.finish();
        assert!(metrics.take_messages().concat().contains("lacks the last 1 lines"));
    }
}
