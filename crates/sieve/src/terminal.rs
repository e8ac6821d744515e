//! All that reaches the terminal: lines, progress bars, errors.
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "the one place that prints"
)]
use indicatif::{ProgressBar, ProgressStyle};
use std::io::{IsTerminal, Write};
use std::time::Duration;

/// Prints one line; a reader that went away (a closed pipe) is no error.
pub(crate) fn line(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{text}");
}

/// Prints text without a line end, at once.
pub(crate) fn text(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(text.as_bytes());
    let _ = out.flush();
}

/// Prints an error and its causes; a cause that its parent already quotes is left out.
pub(crate) fn print_error(error: &anyhow::Error) {
    let mut message = error.to_string();
    for cause in error.chain().skip(1) {
        let cause = cause.to_string();
        if !message.contains(&cause) {
            message.push_str(": ");
            message.push_str(&cause);
        }
    }
    eprintln!("error: {message}");
}

/// Whether progress bars make sense.
pub(crate) fn is_interactive() -> bool {
    std::io::stderr().is_terminal()
}

/// A bar on standard error; hidden where that is no terminal.
pub(crate) fn progress_bar(len: u64, template: &str) -> ProgressBar {
    if !is_interactive() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new(len);
    let style = ProgressStyle::with_template(template)
        .unwrap_or_else(|_| ProgressStyle::default_bar())
        .progress_chars("=> ");
    bar.set_style(style);
    bar.enable_steady_tick(Duration::from_millis(250));
    bar
}

/// `1.23 GiB` and the like.
pub(crate) fn bytes(count: u64) -> String {
    indicatif::BinaryBytes(count).to_string()
}

/// `12,345`.
pub(crate) fn thousands(count: u64) -> String {
    indicatif::HumanCount(count).to_string()
}

/// `1m 05s`, `2h 03m`.
pub(crate) fn duration(seconds: f64) -> String {
    let total = seconds.max(0.0).round() as u64;
    match total {
        0..60 => format!("{total}s"),
        60..3600 => format!("{}m {:02}s", total / 60, total % 60),
        _ => format!("{}h {:02}m", total / 3600, total % 3600 / 60),
    }
}

/// Replaces the panic report by one line that says what to do with it. Panics of helper threads that their owners catch
/// (a TensorBoard writer on a full disk) stay silent.
pub(crate) fn install_panic_message() {
    std::panic::set_hook(Box::new(|panic| {
        let thread = std::thread::current();
        if thread.name() != Some("main") {
            return;
        }
        let place = panic
            .location()
            .map(|l| format!(" at {}:{}", l.file(), l.line()));
        let what = panic.payload_as_str().unwrap_or("no message");
        eprintln!("error: a bug in Sieve{}: {what}", place.unwrap_or_default());
        eprintln!(
            "  hint: please report it with the command and the recipe; checkpoints on disk are whole"
        );
    }));
}
