//! `metrics.jsonl` and TensorBoard, with torchtitan's tags.
use crate::tensorboard::{TensorBoard, fenced};
use crate::{PeakMemory, RunFolder, SkippedStep, StepReport, TrainError, ValidationReport};
use serde::{Deserialize, Serialize};
use sieve_core::Recipe;
use sieve_files::write_atomically;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// Writers of a run's numbers.
pub(crate) struct Metrics {
    path: PathBuf,
    /// `None` where another process writes.
    file: Option<File>,
    tensorboard: TensorBoard,
}

#[derive(Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
enum Line<'a> {
    Step(&'a StepReport),
    Skipped(&'a SkippedStep),
    Validation(&'a ValidationReport),
    Memory(MemoryLine),
}

/// A line and when it was written.
#[derive(Serialize)]
struct Stamped<'a> {
    #[serde(flatten)]
    line: &'a Line<'a>,
    unix_seconds: f64,
}

/// The most memory that the watched steps had in use.
#[derive(Serialize)]
struct MemoryLine {
    step: u64,
    #[serde(flatten)]
    peak: PeakMemory,
    in_use_bytes_by_rank: Vec<u64>,
}

/// The validations that an earlier process of the same run wrote.
#[derive(Clone, Debug, Default)]
pub(crate) struct History {
    pub(crate) first: Option<ValidationReport>,
    pub(crate) last: Option<ValidationReport>,
}

impl Metrics {
    /// Opens both; lines of steps after `step`, and a half line left by a process that was killed, are dropped.
    pub(crate) fn open(folder: &RunFolder, step: u64, enable_tensorboard: bool) -> Result<(Self, History), TrainError> {
        let path = folder.metrics_path();
        let history = if path.exists() {
            drop_later_lines(&path, step)?
        } else {
            History::default()
        };
        let file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(&path)
            .map_err(TrainError::io("opening", &path))?;
        let tb = folder.tensorboard_path();
        let tensorboard = if enable_tensorboard {
            std::fs::create_dir_all(&tb).map_err(TrainError::io("creating", &tb))?;
            TensorBoard::create(&tb)
        } else {
            TensorBoard::nowhere()
        };
        let metrics = Self {
            path,
            file: Some(file),
            tensorboard,
        };
        Ok((metrics, history))
    }

    /// Writes nothing: for a process whose numbers another one of its group writes.
    pub(crate) fn nowhere() -> Self {
        Self {
            path: PathBuf::new(),
            file: None,
            tensorboard: TensorBoard::nowhere(),
        }
    }

    pub(crate) fn step(&mut self, report: &StepReport) -> Result<(), TrainError> {
        self.line(&Line::Step(report))?;
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
        scalars.extend(attention.clamped.map(|share| ("attention/clamped", share)));
        scalars.extend(report.mfu_percent.map(|mfu| ("mfu(%)", mfu)));
        scalars.extend(report.dense_mfu_percent.map(|mfu| ("mfu_dense_equivalent(%)", mfu)));
        self.tensorboard.scalars(&scalars, report.step);
        Ok(())
    }

    /// What the run is, beside its curves in TensorBoard.
    pub(crate) fn recipe(&mut self, recipe: &Recipe, step: u64) -> Result<(), TrainError> {
        self.tensorboard.recipe(recipe, &recipe.to_toml()?, step);
        Ok(())
    }

    /// A text that the model wrote, for TensorBoard.
    pub(crate) fn sample(&mut self, number: usize, text: &str, step: u64) {
        self.tensorboard.text(&format!("samples/{number}"), &fenced(text), step);
    }

    pub(crate) fn skipped(&mut self, report: &SkippedStep) -> Result<(), TrainError> {
        self.line(&Line::Skipped(report))
    }

    /// The peak of the steps up to `step`.
    pub(crate) fn memory(
        &mut self,
        step: u64,
        peak: PeakMemory,
        in_use_bytes_by_rank: Vec<u64>,
    ) -> Result<(), TrainError> {
        let line = MemoryLine {
            step,
            peak,
            in_use_bytes_by_rank,
        };
        self.line(&Line::Memory(line))
    }

    pub(crate) fn validation(&mut self, report: &ValidationReport) -> Result<(), TrainError> {
        self.line(&Line::Validation(report))?;
        let scalars = [
            ("validation_metrics/loss", report.loss),
            ("validation_metrics/perplexity", report.perplexity),
            ("validation_metrics/bits_per_byte", report.bits_per_byte),
        ];
        self.tensorboard.scalars(&scalars, report.step);
        Ok(())
    }

    fn line(&mut self, line: &Line<'_>) -> Result<(), TrainError> {
        let Some(file) = &mut self.file else {
            return Ok(());
        };
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let stamped = Stamped {
            line,
            unix_seconds: now.unwrap_or_default().as_secs_f64(),
        };
        let mut text = serde_json::to_string(&stamped).expect("plain numbers serialise");
        text.push('\n');
        file.write_all(text.as_bytes())
            .map_err(TrainError::io("writing", &self.path))
    }
}

const GIB: f64 = (1u64 << 30) as f64;

/// The last validation that the run in `folder` wrote.
pub fn last_validation(folder: &Path) -> Option<ValidationReport> {
    let text = std::fs::read_to_string(folder.join("metrics.jsonl")).ok()?;
    let mut lines = text.lines().rev();
    lines.find_map(|line| serde_json::from_str::<ValidationReport>(line).ok())
}

/// What is needed of a line written earlier.
#[derive(Deserialize)]
struct Written {
    kind: String,
    step: u64,
}

fn drop_later_lines(path: &Path, step: u64) -> Result<History, TrainError> {
    let text = std::fs::read(path).map_err(TrainError::io("reading", path))?;
    let text = String::from_utf8_lossy(&text);
    let mut kept = String::with_capacity(text.len());
    let mut history = History::default();
    for line in text.split_inclusive('\n') {
        let Ok(written) = serde_json::from_str::<Written>(line) else {
            continue;
        };
        if written.step > step || !line.ends_with('\n') {
            continue;
        }
        kept.push_str(line);
        if written.kind == "validation" {
            // A loss that was no number is written as null, and is no report to go on with.
            let report: Option<ValidationReport> = serde_json::from_str(line).ok();
            history.first = history.first.or_else(|| report.clone());
            history.last = report.or(history.last);
        }
    }
    if kept != text {
        write_atomically(path, kept.as_bytes())?;
    }
    Ok(history)
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

    fn reopened(text: &str, step: u64) -> (String, History) {
        let dir = tempfile::tempdir().unwrap();
        let folder = RunFolder::open(dir.path(), "checkpoint", &Start::New).unwrap();
        std::fs::write(folder.metrics_path(), text).unwrap();
        let (metrics, history) = Metrics::open(&folder, step, false).unwrap();
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
    fn a_half_line_is_dropped() {
        let text = LINES.join("\n") + "\n" + &LINES[3][..17];
        assert_eq!(reopened(&text, 9).0, LINES.join("\n") + "\n");
        // Whole, but its end was not written: the next line would be glued to it.
        let text = LINES.join("\n");
        assert_eq!(reopened(&text, 9).0, LINES[..3].join("\n") + "\n");
    }
}
