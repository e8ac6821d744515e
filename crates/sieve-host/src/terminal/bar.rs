//! Progress bars on standard error, a line each. Lines that would say what they say already are not written again.
use super::{Loudness, duration, is_muted, loudness};
use console::Term;
use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle, TermLike};
use sieve_core::shown_text;
use std::fmt::{self, Write as _};
use std::io::{self, IsTerminal, Write};
use std::path::Path;
use std::sync::mpsc::{RecvTimeoutError, Sender};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// The bars on the screen; unset before the first.
static BARS: OnceLock<MultiProgress> = OnceLock::new();

/// Hides all bars while `print` writes to the terminal.
pub(super) fn above_bars<T>(print: impl FnOnce() -> T) -> T {
    match BARS.get() {
        Some(bars) => bars.suspend(print),
        None => print(),
    }
}

/// Whether standard error, where progress bars go, is a terminal.
pub fn is_interactive() -> bool {
    io::stderr().is_terminal()
}

/// A progress bar on standard error; hidden if that is no terminal, with `--quiet`, or where another rank prints.
pub fn progress_bar(len: u64, template: &str) -> ProgressBar {
    styled_bar(len, style(template))
}

/// The look of a bar by a template of indicatif, where `{left}` is the time left.
pub fn style(template: &str) -> ProgressStyle {
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    style.progress_chars("=> ").with_key("left", |state: &ProgressState, out: &mut dyn fmt::Write| {
        // Before some of the work is done its speed is not known.
        if !state.eta().is_zero() {
            let _ = write!(out, "{} left", duration(state.eta().as_secs_f64()));
        }
    })
}

/// As [`progress_bar`], with a look of its own.
pub fn styled_bar(len: u64, style: ProgressStyle) -> ProgressBar {
    if !is_interactive() || loudness() == Loudness::Quiet || is_muted() {
        return ProgressBar::hidden();
    }
    let bars = BARS.get_or_init(|| {
        let screen = Screen { term: Term::stderr(), frame: Mutex::default() };
        MultiProgress::with_draw_target(ProgressDrawTarget::term_like_with_hz(Box::new(screen), 10))
    });
    let bar = ProgressBar::with_draw_target(Some(len), ProgressDrawTarget::hidden()).with_style(style);
    let bar = bars.add(bar);
    bar.enable_steady_tick(Duration::from_millis(250));
    bar
}

/// Runs `work` with a [`progress_bar`], and removes the bar when it returns.
pub fn with_bar<T>(len: u64, template: &str, work: impl FnOnce(&ProgressBar) -> T) -> T {
    let bar = progress_bar(len, template);
    let result = work(&bar);
    bar.finish_and_clear();
    result
}

/// The look of a bar of bytes.
const BYTES: &str = "{wide_bar} {bytes}/{total_bytes}  {left}";

/// A bar of the bytes that come into a folder while this lives.
pub struct FolderBar {
    bar: ProgressBar,
    /// Dropped first, which ends the thread that looks at the folder.
    ends: Option<Sender<()>>,
    looks: Option<JoinHandle<()>>,
}

impl FolderBar {
    /// A bar until `folder` has `num_bytes` more than now.
    pub fn new(folder: &Path, num_bytes: u64) -> Self {
        let bar = progress_bar(num_bytes, BYTES);
        let (mut ends, mut looks) = (None, None);
        if !bar.is_hidden() {
            let (sender, stop) = std::sync::mpsc::channel::<()>();
            let (bar, folder, begun) = (bar.clone(), folder.to_owned(), folder_bytes(folder));
            let look = move || {
                while stop.recv_timeout(Duration::from_millis(250)) == Err(RecvTimeoutError::Timeout) {
                    bar.set_position(folder_bytes(&folder).saturating_sub(begun));
                }
            };
            (ends, looks) = (Some(sender), Some(std::thread::spawn(look)));
        }
        Self { bar, ends, looks }
    }
}

impl Drop for FolderBar {
    fn drop(&mut self) {
        drop(self.ends.take());
        if let Some(looks) = self.looks.take() {
            // It only moves the bar: a panic in it changes no result.
            let _ = looks.join();
        }
        self.bar.finish_and_clear();
    }
}

/// Bytes of all files in a folder and below it; of one that cannot be read, 0.
fn folder_bytes(folder: &Path) -> u64 {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| Some((entry.metadata().ok()?, entry.path())))
        .fold(0, |sum, (metadata, path)| sum + if metadata.is_dir() { folder_bytes(&path) } else { metadata.len() })
}

/// A bar of the bytes of the file that is being downloaded.
#[derive(Default)]
pub struct DownloadBar(Mutex<Option<(String, ProgressBar)>>);

impl DownloadBar {
    /// Moves the bar of the file `name` to `num_fetched` of `num_bytes`. A file that begins takes the place of another
    /// one, and a file that is whole has no bar.
    pub fn see(&self, name: &str, num_fetched: u64, num_bytes: u64) {
        let mut shown = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if num_fetched >= num_bytes {
            // A bar that is dropped goes from the screen.
            *shown = None;
            return;
        }
        match shown.as_ref().filter(|(of, _)| of == name) {
            Some((_, bar)) => bar.set_position(num_fetched),
            None => {
                *shown = None;
                let bar = progress_bar(num_bytes, &format!("downloading {{msg}} {BYTES}"));
                bar.set_message(shown_name(name));
                bar.set_position(num_fetched);
                // Bytes of an earlier, broken download say nothing about the speed of this one.
                bar.reset_eta();
                *shown = Some((name.to_owned(), bar));
            }
        }
    }
}

/// Letters of a file's name that a bar shows.
const MOST_LETTERS: usize = 32;

/// The name of a file without its folder; of a long one the end, which tells files of a data set apart.
fn shown_name(path: &str) -> String {
    let name = shown_text(path.rsplit('/').next().unwrap_or_default()).into_owned();
    let num_letters = name.chars().count();
    if num_letters <= MOST_LETTERS {
        name
    } else {
        std::iter::once('…').chain(name.chars().skip(num_letters + 1 - MOST_LETTERS)).collect()
    }
}

/// Runs `work` with a bar of `num_bytes` bytes.
pub fn with_bytes_bar<T>(num_bytes: u64, work: impl FnOnce(&ProgressBar) -> T) -> T {
    with_bar(num_bytes, BYTES, work)
}

/// The terminal as a bar's place.
#[derive(Debug)]
struct Screen {
    term: Term,
    frame: Mutex<Frame>,
}

/// What is drawn until the next flush.
#[derive(Debug, Default)]
struct Frame {
    /// Moves of the cursor and cleared lines before the text.
    moves: String,
    text: String,
    /// The text on the screen.
    shown: String,
}

impl Frame {
    fn add_move(&mut self, code: fmt::Arguments<'_>) {
        let place = if self.text.is_empty() { &mut self.moves } else { &mut self.text };
        place.write_fmt(code).expect("a String takes all text");
    }

    /// What is to be written, if it changes the screen: a text that clears itself away and comes again does not.
    fn take(&mut self) -> Option<String> {
        let (moves, text) = (std::mem::take(&mut self.moves), std::mem::take(&mut self.text));
        if !text.is_empty() && !moves.is_empty() && text == self.shown {
            return None;
        }
        let all = moves + &text;
        self.shown = text;
        Some(all)
    }
}

impl Screen {
    fn frame(&self) -> MutexGuard<'_, Frame> {
        self.frame.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add_move(&self, code: fmt::Arguments<'_>) -> io::Result<()> {
        self.frame().add_move(code);
        Ok(())
    }

    /// A move by `n` places; the terminal takes 0 for 1.
    fn go(&self, n: usize, way: char) -> io::Result<()> {
        if n > 0 { self.add_move(format_args!("\x1b[{n}{way}")) } else { Ok(()) }
    }
}

impl TermLike for Screen {
    fn width(&self) -> u16 {
        self.term.size().1
    }

    fn height(&self) -> u16 {
        self.term.size().0
    }

    fn move_cursor_up(&self, n: usize) -> io::Result<()> {
        self.go(n, 'A')
    }

    fn move_cursor_down(&self, n: usize) -> io::Result<()> {
        self.go(n, 'B')
    }

    fn move_cursor_right(&self, n: usize) -> io::Result<()> {
        self.go(n, 'C')
    }

    fn move_cursor_left(&self, n: usize) -> io::Result<()> {
        self.go(n, 'D')
    }

    fn write_line(&self, text: &str) -> io::Result<()> {
        let frame = &mut self.frame();
        frame.text.push_str(text);
        frame.text.push('\n');
        Ok(())
    }

    fn write_str(&self, text: &str) -> io::Result<()> {
        self.frame().text.push_str(text);
        Ok(())
    }

    fn clear_line(&self) -> io::Result<()> {
        self.add_move(format_args!("\r\x1b[2K"))
    }

    fn flush(&self) -> io::Result<()> {
        match self.frame().take() {
            Some(text) => {
                let mut out = io::stderr().lock();
                out.write_all(text.as_bytes())?;
                out.flush()
            }
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_as_large_as_all_files_below_it() {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::create_dir(folder.path().join("below")).expect("new");
        for (name, len) in [("a", 10), ("below/b", 7)] {
            std::fs::write(folder.path().join(name), vec![0; len]).expect("writable");
        }
        assert_eq!((folder_bytes(folder.path()), folder_bytes(&folder.path().join("none"))), (17, 0));
    }

    #[test]
    fn a_download_has_a_bar_until_it_is_whole() {
        let bar = DownloadBar::default();
        let shown = || bar.0.lock().expect("no panic").as_ref().map(|(name, bar)| (name.clone(), bar.position()));
        bar.see("a", 30, 100);
        bar.see("a", 40, 100);
        assert_eq!(shown(), Some(("a".to_owned(), 40)));
        bar.see("b", 0, 10);
        assert_eq!(shown(), Some(("b".to_owned(), 0)));
        bar.see("b", 10, 10);
        assert_eq!(shown(), None);
    }

    #[test]
    fn a_long_name_is_shown_by_its_end() {
        assert_eq!(shown_name("data/train-00000-of-00042.parquet"), "train-00000-of-00042.parquet");
        let long = shown_name("a/part-00007-4b1d9f27-6f2e-4c9e-a6f9-c000.snappy.parquet");
        assert_eq!((long.as_str(), long.chars().count()), ("…e-4c9e-a6f9-c000.snappy.parquet", MOST_LETTERS));
        assert_eq!(shown_name("x/\u{1b}[2J"), "\\x1b[2J");
    }

    #[test]
    fn a_frame_that_says_the_same_is_not_written() {
        let screen = Screen { term: Term::stderr(), frame: Mutex::default() };
        let draw = |clears: bool, text: &str| {
            if clears {
                screen.move_cursor_up(0).expect("a frame");
                screen.clear_line().expect("a frame");
            }
            screen.write_str(text).expect("a frame");
            screen.frame().take()
        };
        assert_eq!(draw(false, "1 of 2").as_deref(), Some("1 of 2"));
        assert_eq!(draw(true, "1 of 2"), None);
        assert_eq!(draw(true, "2 of 2").as_deref(), Some("\r\x1b[2K2 of 2"));
        // The bar goes while a line is printed, and comes again.
        assert_eq!(draw(true, "").as_deref(), Some("\r\x1b[2K"));
        assert_eq!(draw(false, "2 of 2").as_deref(), Some("2 of 2"));
        assert_eq!(draw(true, "2 of 2"), None);
    }
}
