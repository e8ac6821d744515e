//! `metrics.jsonl` and TensorBoard, with torchtitan's tags.
use crate::{RunFolder, StepReport, TrainError, ValidationReport};
use serde::Serialize;
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use tensorboard_rs::summary_writer::SummaryWriter;

/// Writers of a run's numbers.
pub(crate) struct Metrics {
    path: PathBuf,
    file: File,
    /// `None` when the recipe wants none, or after it failed.
    tensorboard: Option<SummaryWriter>,
}

#[derive(Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
enum Line<'a> {
    Step(&'a StepReport),
    Validation(&'a ValidationReport),
}

impl Metrics {
    /// Opens both; lines of steps after `step`, left by a run that was killed, are dropped.
    pub(crate) fn open(
        folder: &RunFolder,
        step: u64,
        enable_tensorboard: bool,
    ) -> Result<Self, TrainError> {
        let path = folder.metrics_path();
        if path.exists() {
            drop_later_lines(&path, step)?;
        }
        let file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(&path)
            .map_err(TrainError::io("opening", &path))?;
        let tb = folder.tensorboard_path();
        let tensorboard = if enable_tensorboard {
            std::fs::create_dir_all(&tb).map_err(TrainError::io("creating", &tb))?;
            catch_unwind(|| SummaryWriter::new(&tb)).ok()
        } else {
            None
        };
        Ok(Self {
            path,
            file,
            tensorboard,
        })
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
            ("attention/never_active", attention.never_active),
            ("attention/not_self_visible", attention.not_self_visible),
        ];
        scalars.extend(report.mfu_percent.map(|mfu| ("mfu(%)", mfu)));
        scalars.extend(
            report
                .dense_mfu_percent
                .map(|mfu| ("mfu_dense_equivalent(%)", mfu)),
        );
        self.scalars(&scalars, report.step);
        Ok(())
    }

    pub(crate) fn validation(&mut self, report: &ValidationReport) -> Result<(), TrainError> {
        self.line(&Line::Validation(report))?;
        let scalars = [
            ("validation_metrics/loss", report.loss),
            ("validation_metrics/perplexity", report.perplexity),
            ("validation_metrics/bits_per_byte", report.bits_per_byte),
        ];
        self.scalars(&scalars, report.step);
        Ok(())
    }

    fn line(&mut self, line: &Line<'_>) -> Result<(), TrainError> {
        let mut text = serde_json::to_string(line).expect("plain numbers serialise");
        text.push('\n');
        self.file
            .write_all(text.as_bytes())
            .map_err(TrainError::io("writing", &self.path))
    }

    /// TensorBoard's writer panics when its file cannot be written; a picture is not worth a run, so it is dropped then.
    fn scalars(&mut self, scalars: &[(&str, f64)], step: u64) {
        let Some(mut writer) = self.tensorboard.take() else {
            return;
        };
        let written = catch_unwind(AssertUnwindSafe(|| {
            for (tag, value) in scalars {
                writer.add_scalar(tag, *value as f32, step as usize);
            }
            writer.flush();
        }));
        match written {
            Ok(()) => self.tensorboard = Some(writer),
            // Its destructor panics too.
            Err(_) => std::mem::forget(writer),
        }
    }
}

const GIB: f64 = (1u64 << 30) as f64;

impl Drop for Metrics {
    fn drop(&mut self) {
        if let Some(writer) = self.tensorboard.take() {
            let _ = catch_unwind(AssertUnwindSafe(|| drop(writer)));
        }
    }
}

fn drop_later_lines(path: &PathBuf, step: u64) -> Result<(), TrainError> {
    let file = File::open(path).map_err(TrainError::io("reading", path))?;
    let mut kept = String::new();
    for line in BufReader::new(file).lines() {
        let line = line.map_err(TrainError::io("reading", path))?;
        let value: Option<serde_json::Value> = serde_json::from_str(&line).ok();
        let at = value
            .as_ref()
            .and_then(|v| v.get("step"))
            .and_then(serde_json::Value::as_u64);
        if at.is_some_and(|at| at <= step) {
            kept.push_str(&line);
            kept.push('\n');
        }
    }
    std::fs::write(path, kept).map_err(TrainError::io("writing", path))
}
