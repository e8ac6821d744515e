//! The lines that `sieve train` prints.
use sieve_core::{Recipe, ShownPath};
use sieve_host::terminal::{self, gib};
use sieve_kernels::LaunchCounts;
use sieve_ops::MemoryPeak;
use sieve_train::{MemoryProbe, SkippedStep, StepReport, TrainSummary, ValidationReport};
use std::path::Path;
use std::time::Duration;

/// The line of the run's size.
pub(super) fn describe(recipe: &Recipe, hardware: &str) -> String {
    let training = &recipe.training;
    let counted = |count: usize, noun| terminal::counted(count as u64, noun);
    // Rows of stages have lines of their own.
    if !recipe.stage.is_empty() {
        let (steps, stages) = (counted(training.steps, "step"), counted(recipe.stage.len(), "stage"));
        return format!("run: {steps} in {stages} on {hardware}");
    }
    format!(
        "run: {} x {} x {} on {hardware}",
        counted(training.steps, "step"),
        counted(training.global_batch_size, "row"),
        counted(training.seq_len, "token"),
    )
}

/// A logged step, in at most 80 columns.
pub(super) fn step_line(report: &StepReport) -> String {
    let mfu = report.mfu_percent.map_or(String::new(), |mfu| format!("  mfu {mfu:.0}%"));
    format!(
        "step: {:>5}  loss {:>7.4}  grad {:>5}  lr {:.2e}  tps {}{mfu}  {} left",
        report.step,
        report.loss,
        four_digits(report.grad_norm),
        report.lr,
        terminal::short_count(report.tokens_per_second),
        short_duration(report.eta_seconds),
    )
}

/// A number from 0 with four digits; from 9999.5 on, with one digit and an exponent.
fn four_digits(number: f64) -> String {
    match number {
        x if x < 9.9995 => format!("{x:.3}"),
        x if x < 99.995 => format!("{x:.2}"),
        x if x < 999.95 => format!("{x:.1}"),
        x if x < 9999.5 => format!("{x:.0}"),
        x => format!("{x:.0e}"),
    }
}

/// Formats seconds in one unit: `65s`, `42m`, `31h`.
fn short_duration(seconds: f64) -> String {
    let seconds = seconds.max(0.0).round() as u64;
    match seconds {
        0..100 => format!("{seconds}s"),
        100..6000 => format!("{}m", (seconds + 30) / 60),
        _ => format!("{}h", (seconds + 1800) / 3600),
    }
}

/// A logged step with all its numbers: torchtitan's line, then density, percent done and time left.
pub(super) fn whole_step_line(report: &StepReport) -> String {
    let gib = report.memory_bytes as f64 / (1u64 << 30) as f64;
    let share = 100.0 * report.memory_bytes as f64 / report.memory_total_bytes.max(1) as f64;
    let mfu = report.mfu_percent.zip(report.dense_mfu_percent);
    let mfu =
        mfu.map_or(String::new(), |(executed, dense)| format!("  mfu: {executed:.2}% (dense equivalent {dense:.2}%)"));
    let clamped = report.attention.clamped;
    let clamped = clamped.map_or(String::new(), |share| format!("  clamped: {:.2}%", 100.0 * share));
    let fit = report.attention.indexer.map_or(String::new(), |fit| {
        format!("  index KL: {:.4} (recall {:.3}, entropy {:.2})", fit.index_kl, fit.index_recall, fit.index_entropy)
    });
    format!(
        "step: {:>5}  loss: {:>8.5}  grad_norm: {:>7.4}  lr: {:.3e}  memory: {gib:>5.2}GiB({share:.2}%)  tps: {}  \
         tflops: {:.3}{mfu}  density: {:.3} ({:.1} keys){clamped}{fit}  {:.0}% done, {} left",
        report.step,
        report.loss,
        report.grad_norm,
        report.lr,
        terminal::thousands(report.tokens_per_second as u64),
        report.tflops,
        report.attention.density,
        report.attention.mean_active_keys,
        100.0 * report.step as f64 / report.num_steps as f64,
        terminal::duration(report.eta_seconds),
    )
}

/// The line that says how long the start took.
pub(super) fn startup_line(elapsed: Duration) -> String {
    format!("started: {:.1} s from the start of the program to the end of the first step", elapsed.as_secs_f64())
}

/// Lines about a run's peak memory and, with `--verbose` or if they took the slow path, its launches of Sieve's
/// kernels.
pub(super) fn cost_lines(peak: Option<MemoryPeak>, memory: MemoryProbe) -> Vec<String> {
    let memory = peak.map(|peak| {
        let in_use = gib(peak.in_use_bytes);
        match memory {
            MemoryProbe::Process => format!("peak memory: {in_use} resident"),
            MemoryProbe::Device(_) => {
                format!("peak memory: {in_use} in use by tensors, {} reserved for them", gib(peak.reserved_bytes))
            }
        }
    });
    let counts = LaunchCounts::so_far();
    let slow = match counts.is_inline {
        Some(false) => "; on a stream of their own, because Burn's was not found: some 20 microseconds slower each",
        _ => "",
    };
    let is_printed = counts.is_inline.is_some() && (terminal::is_verbose() || !slow.is_empty());
    let launches = is_printed.then(|| {
        format!(
            "launches: {} of Sieve's kernels, {} buffers came from other streams{slow}",
            counts.launches, counts.foreign_buffers
        )
    });
    memory.into_iter().chain(launches).collect()
}

/// The line of an optimizer step that the guard skipped.
pub(super) fn skipped_line(report: &SkippedStep) -> String {
    let documents = report.documents.iter().map(u32::to_string);
    let more = report.num_documents - report.documents.len();
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    let norms = report.grad_norms.iter();
    let norms = norms.map(|(part, norm)| format!("{part} {norm:.4}"));
    let norms = norms.collect::<Vec<_>>().join(", ");
    format!(
        "guard: step {} was not taken: loss {:.5} (mean before {:.5}), grad_norm {:.4}\n  \
         rows {} to {}, documents {}{more}{}",
        report.step,
        report.loss,
        report.mean_loss,
        report.grad_norm,
        report.first_row,
        report.first_row + report.num_rows.max(1) - 1,
        documents.collect::<Vec<_>>().join(", "),
        if norms.is_empty() { String::new() } else { format!("\n  gradient norms: {norms}") }
    )
}

/// The line that reports a validation.
pub(super) fn validation_line(report: &ValidationReport) -> String {
    let (labels, bytes) = (report.num_labels, report.num_bytes);
    format!(
        "validate step: {:>5}  loss: {:>8}  perplexity: {}  bits per byte: {}  (unigram: {}; {} tokens)",
        report.step,
        mean_of(labels, format!("{:.5}", report.loss)),
        mean_of(labels, terminal::perplexity(report.perplexity, 2)),
        mean_of(bytes, format!("{:.4}", report.bits_per_byte)),
        mean_of(bytes, format!("{:.4}", report.unigram_bits_per_byte)),
        terminal::thousands(labels),
    )
}

/// A printed mean over `count` labels or bytes; `-` if there are none, so that there is no mean.
pub(super) fn mean_of(count: u64, printed: String) -> String {
    match count {
        0 => "-".to_owned(),
        _ => printed,
    }
}

/// The lines of a run that was stopped before its last step.
pub(super) fn stopped_line(recipe: &Recipe, summary: &TrainSummary, fallback: Option<&Path>) -> String {
    let checkpoint = summary.checkpoint.as_deref().unwrap_or(Path::new(""));
    // Only --resume=auto looks for a checkpoint in the folder of --checkpoint-fallback.
    let flag =
        if fallback.is_some_and(|fallback| checkpoint.starts_with(fallback)) { "--resume=auto" } else { "--resume" };
    format!(
        "stopped at step {} of {}; the state is in {}\n  to continue: the same command with {flag}",
        summary.step,
        recipe.training.steps,
        checkpoint.shown()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_validation_without_text_says_nothing_of_bytes() {
        let report = ValidationReport {
            step: 2,
            loss: 1.5,
            perplexity: 4.48,
            bits_per_byte: f64::NAN,
            unigram_bits_per_byte: f64::NAN,
            num_labels: 7,
            num_bytes: 0,
        };
        let wanted = "validate step:     2  loss:  1.50000  perplexity: 4.48  bits per byte: -  (unigram: -; 7 tokens)";
        assert_eq!(validation_line(&report), wanted);
        // A NaN loss of a model that diverged is printed as NaN.
        let diverged = ValidationReport { loss: f64::NAN, perplexity: f64::NAN, num_bytes: 3, ..report };
        assert!(validation_line(&diverged).contains("loss:      NaN  perplexity: NaN  bits per byte: NaN"));
        let empty = ValidationReport { num_labels: 0, num_bytes: 0, ..diverged };
        assert!(validation_line(&empty).contains("loss:        -  perplexity: -  bits per byte: -"));
    }

    #[test]
    fn a_step_line_fits_80_columns() {
        let report = |loss: f64, grad_norm, tokens_per_second, eta_seconds| StepReport {
            step: 13_500,
            num_steps: 20_000,
            loss,
            grad_norm,
            lr: 2.25e-3,
            tokens_seen: 0,
            tokens_per_second,
            tflops: 1.0,
            mfu_percent: Some(41.26),
            dense_mfu_percent: None,
            memory_bytes: 0,
            memory_total_bytes: 0,
            eta_seconds,
            attention: sieve_train::AttentionStatistics::default(),
        };
        let line = step_line(&report(10.8785, 0.2512, 555_000.0, 7800.0));
        assert_eq!(line, "step: 13500  loss 10.8785  grad 0.251  lr 2.25e-3  tps 555.0K  mfu 41%  2h left");
        for report in [
            report(10.8785, 0.2512, 999_900.0, 350_000.0),
            report(2.5, 99_999.0, 12.0, 99.0),
            report(2.5, 999.94, 12_345_678.0, 5999.0),
        ] {
            let line = step_line(&report);
            assert!(line.chars().count() <= 80, "{} columns: {line}", line.chars().count());
        }
    }
}
