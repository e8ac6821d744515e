//! Everything the program prints: lines, progress bars, errors.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "the one place that prints")]
mod bar;
mod colour;
mod reader;

use crate::exit::{Exit, is_of_the_disk};
use anyhow::{Context, Result};
use bar::above_bars;
pub use bar::{DownloadBar, FolderBar, is_interactive, progress_bar, style, styled_bar, with_bar, with_bytes_bar};
use colour::coloured;
pub use reader::end_with_reader;
use sieve_core::{ReferenceTooLarge, ShownPath, shown_text};
pub use sieve_core::{counted, quoted, shell_word, thousands};
use std::borrow::Cow;
use std::fs::{File, OpenOptions};
use std::io::{IsTerminal, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

/// How much the program prints.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Loudness {
    /// Only results, warnings and errors.
    Quiet,
    /// Results, warnings, errors and progress.
    Usual,
    /// Also the device's name, and all numbers of each logged step.
    Verbose,
}

struct Output {
    loudness: Loudness,
    log: Option<Mutex<File>>,
}

static OUTPUT: OnceLock<Output> = OnceLock::new();

/// Whether this process prints faults alone.
static IS_MUTED: AtomicBool = AtomicBool::new(false);

/// The first output that could not be written, and why.
static LOST: OnceLock<String> = OnceLock::new();

/// How messages name the file of `--log-file`.
const LOG: &str = "the file of --log-file";

/// Records that output was lost. The work continues: a run must not lose its steps because its lines cannot be written.
/// That a log was lost is said at once, because a server may go on for weeks.
fn lose(place: &str, error: &std::io::Error) {
    // A closed pipe is no loss: its reader, such as `head`, has read enough.
    if error.kind() == std::io::ErrorKind::BrokenPipe {
        return;
    }
    let lost = format!("{place} could not be written: {error}");
    if LOST.set(lost.clone()).is_ok() && place == LOG {
        // Not by `warning`, which would write to the log file, which is locked.
        let _ = writeln!(std::io::stderr(), "warning: {lost}; later lines may be missing there");
    }
}

/// The exit code of a program that would end with `exit`. If output was lost, prints that and turns success into
/// failure.
pub fn after_lost_output(exit: Exit) -> Exit {
    let Some(lost) = LOST.get() else {
        return exit;
    };
    errors(&format!(
        "error: {lost}\n  hint: what was printed is not whole; make room there, or print elsewhere, and repeat the \
         command. Files that it wrote are whole, and a training run has its lines in its own log\n"
    ));
    match exit {
        Exit::Done => Exit::Failed,
        exit => exit,
    }
}

/// Prints clap's message and ends the program with clap's exit code. Help and the version count as output: if they
/// cannot be written, the program fails.
pub fn end_with(error: &clap::Error) -> ! {
    let printed = error.print().and_then(|()| std::io::stdout().flush());
    if let (false, Err(error)) = (error.use_stderr(), printed) {
        lose("standard output", &error);
        after_lost_output(Exit::Done).now();
    }
    std::process::exit(error.exit_code())
}

/// Sets how much is printed, and the file of `--log-file`. Call it once, before anything is printed.
pub fn open(loudness: Loudness, log_file: Option<&Path>) -> Result<()> {
    let log = log_file.map(|path| {
        let file = OpenOptions::new().create(true).append(true).open(path);
        file.with_context(|| format!("opening {} for --log-file", path.shown()))
    });
    let log = log.transpose()?.map(Mutex::new);
    OUTPUT.get_or_init(|| Output { loudness, log });
    // In unit tests, another test may already have set the logger.
    if log::set_logger(&LibraryWarnings).is_ok() {
        log::set_max_level(log::LevelFilter::Warn);
    }
    Ok(())
}

/// Prints the warnings that Sieve's libraries give through `log`.
struct LibraryWarnings;

impl log::Log for LibraryWarnings {
    fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
        metadata.level() <= log::Level::Warn && metadata.target().starts_with("sieve_")
    }

    fn log(&self, record: &log::Record<'_>) {
        if self.enabled(record.metadata()) {
            warning(&record.args().to_string());
        }
    }

    fn flush(&self) {}
}

fn loudness() -> Loudness {
    OUTPUT.get().map_or(Loudness::Usual, |output| output.loudness)
}

/// Whether `--verbose` was given.
pub fn is_verbose() -> bool {
    loudness() == Loudness::Verbose
}

/// Appends printed text to the file of `--log-file`.
fn keep(text: &str) {
    if let Some(log) = OUTPUT.get().and_then(|output| output.log.as_ref()) {
        let mut log = log.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = log.write_all(shown_text(text).as_bytes()) {
            lose(LOG, &error);
        }
    }
}

/// Prints one line of a result. A failed write is reported at the program's end ([`after_lost_output`]).
pub fn line(line: &str) {
    results(&format!("{line}\n"), coloured);
}

/// Prints lines of a result.
pub fn lines<T: AsRef<str>>(lines: impl IntoIterator<Item = T>) {
    lines.into_iter().for_each(|text| line(text.as_ref()));
}

/// Prints one line of progress.
pub fn status(text: &str) {
    if loudness() > Loudness::Quiet {
        line(text);
    }
}

/// Prints one line to standard error, since standard output may be another program's input.
pub fn note(text: &str) {
    if !is_muted() {
        fault(text);
    }
}

/// Prints a line about a fault, also where [`mute`] was called.
pub fn fault(text: &str) {
    errors(&format!("{text}\n"));
}

/// From now on prints faults alone: another rank prints what this one would.
pub fn mute() {
    IS_MUTED.store(true, Ordering::Relaxed);
}

fn is_muted() -> bool {
    IS_MUTED.load(Ordering::Relaxed)
}

/// Prints like [`note`], but not with `--quiet`.
pub fn remark(text: &str) {
    if loudness() > Loudness::Quiet {
        note(text);
    }
}

/// Prints text without a line end, and flushes. A terminal gets no control characters and no colours: the text may be a
/// model's.
pub fn text(text: &str) {
    results(text, |text| text);
}

/// Prints to standard output, on a terminal in `colours`.
fn results(text: &str, colours: impl FnOnce(Cow<'_, str>) -> Cow<'_, str>) {
    if is_muted() {
        return;
    }
    keep(text);
    let mut out = std::io::stdout().lock();
    if let Err(error) = write_to(&mut out, text, colours) {
        lose("standard output", &error);
    }
}

/// Prints to standard error. A failed write is ignored: there is no other place to report it.
fn errors(text: &str) {
    keep(text);
    let _ = write_to(&mut std::io::stderr(), text, coloured);
}

/// Writes a text, on a terminal in `colours` and above the bars.
fn write_to<W: Write + IsTerminal>(
    out: &mut W,
    text: &str,
    colours: impl FnOnce(Cow<'_, str>) -> Cow<'_, str>,
) -> std::io::Result<()> {
    let is_terminal = out.is_terminal();
    let text = for_stream(is_terminal, text, colours);
    let mut write = || out.write_all(text.as_bytes()).and_then(|()| out.flush());
    if is_terminal { above_bars(write) } else { write() }
}

/// The text as a terminal may show it, in `colours`; or as it is for a file or a pipe.
fn for_stream(is_terminal: bool, text: &str, colours: impl FnOnce(Cow<'_, str>) -> Cow<'_, str>) -> Cow<'_, str> {
    if is_terminal { colours(shown_text(text)) } else { Cow::Borrowed(text) }
}

/// An error's message followed by its causes and a hint. A cause whose text the message already contains is left out.
pub fn error_text(error: &anyhow::Error) -> String {
    let mut message = error.to_string();
    for cause in error.chain().skip(1) {
        let cause = cause.to_string();
        if !message.contains(&cause) {
            message.push_str(": ");
            message.push_str(&cause);
        }
    }
    let system = error.chain().find_map(|cause| cause.downcast_ref::<std::io::Error>());
    if let Some(hint) = system.and_then(system_hint)
        && !message.contains("hint: ")
    {
        message.push_str("\n  hint: ");
        message.push_str(hint);
    }
    format!("error: {message}")
}

/// A hint about an error of the operating system.
fn system_hint(error: &std::io::Error) -> Option<&'static str> {
    use std::io::ErrorKind;
    Some(match error.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge => {
            "make room there, then repeat the command; a training continues from its last checkpoint with --resume"
        }
        ErrorKind::NotFound => "check the path: there is no such file, or no folder to write it into",
        ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => {
            "name a place that you may read and write, or change its rights"
        }
        ErrorKind::AlreadyExists | ErrorKind::NotADirectory => {
            "this is a file, and a folder is needed: name another path"
        }
        ErrorKind::IsADirectory => "this is a folder, and a file is needed: name another path",
        ErrorKind::InvalidData => "the file must be UTF-8 text",
        _ if is_of_the_disk(error) => {
            "repeat the command when the disk works again; a training continues from its last checkpoint, or begins, \
             with --resume=auto"
        }
        _ => return None,
    })
}

/// An error without its causes and its hint.
pub fn first_line(error: &anyhow::Error) -> String {
    let text = error.to_string();
    text.lines().next().unwrap_or_default().to_owned()
}

/// Lines with the commands to run next. They begin with the name that this program was called by, so that they can be
/// copied.
pub fn next(commands: &[String]) -> String {
    let program = shell_word(&std::env::args().next().unwrap_or("sieve".to_owned()));
    let lines = commands.iter().map(|command| format!("\n  {program} {command}"));
    format!("next:{}", lines.collect::<String>())
}

/// Prints an error and its causes.
pub fn print_error(error: &anyhow::Error) {
    errors(&format!("{}\n", error_text(error)));
}

/// Prints a warning; the command continues.
pub fn warning(text: &str) {
    note(&format!("warning: {text}"));
}

/// Columns of the [`model_line`] on a terminal: two rows of 100.
const MODEL_COLUMNS: usize = 200;

/// The line about a model, from its words. A terminal gets what fits two rows, unless `--verbose` asks for the rest;
/// a file or a pipe gets all.
pub fn model_line(words: &str) -> String {
    let line = format!("model: {words}");
    if is_verbose() || !std::io::stdout().is_terminal() {
        line
    } else {
        sieve_core::fitted_model_line(&line, MODEL_COLUMNS)
    }
}

/// Formats a number of bytes in a fitting unit, such as `1.23 GiB`.
pub fn bytes(count: u64) -> String {
    indicatif::BinaryBytes(count).to_string()
}

/// Formats a number of bytes in GiB, whatever its size.
pub fn gib(count: u64) -> String {
    format!("{:.2} GiB", count as f64 / (1u64 << 30) as f64)
}

/// Formats a number in short: `980`, `12.3K`, `85.0M`, `1.72B`.
pub fn short_count(number: f64) -> String {
    match number {
        n if n >= 1e9 => format!("{:.2}B", n / 1e9),
        n if n >= 1e6 => format!("{:.1}M", n / 1e6),
        n if n >= 1e3 => format!("{:.1}K", n / 1e3),
        n => format!("{n:.0}"),
    }
}

/// A perplexity with `digits` digits behind the point; from ten million on, as of a run that diverges, a power of ten.
pub fn perplexity(value: f64, digits: usize) -> String {
    if value < 1e7 { format!("{value:.digits$}") } else { format!("{value:.2e}") }
}

/// Formats a time in seconds: `1m 05s`, `2h 03m`.
pub fn duration(seconds: f64) -> String {
    let total = seconds.max(0.0).round() as u64;
    match total {
        0..60 => format!("{total}s"),
        60..3600 => format!("{}m {:02}s", total / 60, total % 60),
        _ => format!("{}h {:02}m", total / 3600, total % 3600 / 60),
    }
}

/// Replaces Rust's panic report by one line with a hint, on every thread. Panics of TensorBoard's writer (on a full
/// disk) and of readers of damaged data are not printed: their callers catch them. Full GPU memory and a reference with
/// too many scores end the program here, since they come as panics on CubeCL's thread and reach no caller as an error.
/// `full_memory` words the former; it returns `None` for any other panic's text.
pub fn install_panic_message(full_memory: fn(&str) -> Option<String>) {
    std::panic::set_hook(Box::new(move |panic| {
        let file = panic.location().map_or("", |place| place.file());
        if file.contains("tensorboard-rs") || sieve_data::expects_panic() {
            return;
        }
        let too_large = panic.payload().downcast_ref::<ReferenceTooLarge>();
        let message = too_large.map(ToString::to_string).or_else(|| full_memory(panic.payload_as_str()?));
        if let Some(message) = message {
            // This may be CubeCL's device thread. The thread that waits for it would hang or report a second error, so
            // the process ends here.
            errors(&format!("error: {message}\n"));
            Exit::Failed.at_once();
        }
        let place = panic.location().map(|l| format!(" at {}:{}", l.file(), l.line()));
        let what = panic.payload_as_str().unwrap_or("no message");
        errors(&format!(
            "error: a bug in Sieve{}: {what}\n  hint: please report it with the command and the recipe; checkpoints \
             on disk are whole\n",
            place.unwrap_or_default()
        ));
    }));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_noun_is_singular_after_one() {
        let texts = [0, 1, 1234].map(|count| [counted(count, "step"), counted(count, "micro-batch")]);
        let expected =
            [["0 steps", "0 micro-batches"], ["1 step", "1 micro-batch"], ["1,234 steps", "1,234 micro-batches"]];
        assert_eq!(texts, expected);
    }

    #[test]
    fn a_huge_perplexity_is_a_power_of_ten() {
        let shown = [1.5, 9_999_999.0, 1e7, 2.5e261, f64::INFINITY, f64::NAN].map(|value| perplexity(value, 2));
        assert_eq!(shown, ["1.50", "9999999.00", "1.00e7", "2.50e261", "inf", "NaN"]);
    }

    #[test]
    fn a_terminal_gets_no_control_characters_and_a_pipe_gets_all() {
        let text = "a\u{1b}]0;title\u{7}\tb\n";
        assert_eq!(for_stream(true, text, |text| text), "a\\x1b]0;title\\x07\tb\n");
        assert_eq!(for_stream(false, text, |_| panic!("a pipe has no colours")), text);
    }
}
