//! What an evaluation has when Ctrl-C stops it: how far it came, and the figures that are known by then.
use crate::environment::{LAUNCHED, variable};
use crate::exit::Exit;
use crate::terminal;
use indicatif::ProgressBar;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The work under way.
struct SoFar {
    /// The bar, and what it counts.
    bar: Option<(ProgressBar, String)>,
    /// A figure of each part that is done.
    done: Vec<String>,
    /// The figure of the part under way.
    now: Option<String>,
}

static SO_FAR: Mutex<SoFar> = Mutex::new(SoFar { bar: None, done: Vec::new(), now: None });

fn so_far() -> MutexGuard<'static, SoFar> {
    SO_FAR.lock().unwrap_or_else(PoisonError::into_inner)
}

/// From now on a signal prints what there is, and ends the program. One of several ranks has a handler of its own.
pub fn watch() {
    if variable(LAUNCHED).is_some() {
        return;
    }
    // Without a handler a signal ends the program as it always does.
    let _ = ctrlc::set_handler(|| {
        so_far().end().iter().for_each(|line| terminal::fault(line));
        Exit::Interrupted.at_once();
    });
}

impl SoFar {
    /// Removes the bar. Returns how far the work came, and a line for each figure: of the parts that are done, then of
    /// the one under way.
    fn end(&self) -> Vec<String> {
        let first = match &self.bar {
            None => "stopped before the first result".to_owned(),
            Some((bar, what)) => {
                let [at, of] = [bar.position(), bar.length().unwrap_or(0)].map(terminal::thousands);
                let of = if bar.length().unwrap_or(0) > 0 { format!(" of {of}") } else { String::new() };
                // A bar that was removed counts as full.
                bar.finish_and_clear();
                format!("stopped after {at}{of} {what}; nothing was saved")
            }
        };
        let figures = self.done.iter().chain(&self.now).map(|figure| format!("  so far: {figure}"));
        std::iter::once(first).chain(figures).collect()
    }
}

/// Runs `work` with a progress bar over `len` of `what`, such as "tokens"; a length of 0 is not known yet.
pub fn with_bar<T>(len: u64, what: &str, work: impl FnOnce(&ProgressBar) -> T) -> T {
    let template = match len {
        0 => format!("{{human_pos}} {what}, {{elapsed}}"),
        _ => format!("{{bar:30}} {{human_pos}}/{{human_len}} {what}  {{left}}"),
    };
    terminal::with_bar(len, &template, |bar| {
        so_far().bar = Some((bar.clone(), what.to_owned()));
        work(bar)
    })
}

/// Keeps the figure of the part under way, in place of an earlier one.
pub fn now(figure: String) {
    so_far().now = Some(figure);
}

/// Keeps the figure of a part that is done.
pub fn done(figure: String) {
    let mut so_far = so_far();
    so_far.now = None;
    so_far.done.push(figure);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stop_names_how_far_it_came_and_what_is_known() {
        let mut so_far = SoFar { bar: None, done: Vec::new(), now: None };
        assert_eq!(so_far.end(), ["stopped before the first result"]);
        let bar = ProgressBar::hidden();
        bar.set_length(4000);
        bar.set_position(1200);
        so_far.bar = Some((bar, "tokens".to_owned()));
        so_far.done.push("piqa acc 0.5".to_owned());
        so_far.now = Some("loss 3.1".to_owned());
        let expected =
            ["stopped after 1,200 of 4,000 tokens; nothing was saved", "  so far: piqa acc 0.5", "  so far: loss 3.1"];
        assert_eq!(so_far.end(), expected);
        so_far.bar = Some((ProgressBar::hidden(), "tokens".to_owned()));
        assert_eq!(so_far.end()[0], "stopped after 0 tokens; nothing was saved");
    }
}
