//! `--on-event`: the user's command, run when a training run ends or stalls.
use crate::exit::Exit;
use crate::terminal;
use anyhow::{Context, Result};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

/// A command that takes longer is killed.
const LIMIT: Duration = Duration::from_secs(60);
/// A run counts as stalled after this many times its longest pause without an event.
const LONGEST_PAUSES: u32 = 20;

/// Values of `SIEVE_EVENT` in the command's environment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The run ended with exit code 0.
    Finished,
    /// The run stopped with exit code 75; `--resume=auto` continues it.
    Stopped,
    /// Exit code 75, because another process of the run is lost.
    Lost,
    /// The run ended with any other exit code.
    Failed,
    /// No event for long; the run still exists.
    Stalled,
}

impl Event {
    /// The word in `SIEVE_EVENT`.
    fn name(self) -> &'static str {
        match self {
            Self::Finished => "finished",
            Self::Stopped => "stopped",
            Self::Lost => "lost",
            Self::Failed => "failed",
            Self::Stalled => "stalled",
        }
    }
}

/// The command of `--on-event`, and the output folder of its run.
#[derive(Clone, Debug)]
pub struct OnEvent {
    command: Option<String>,
    out: PathBuf,
    limit: Duration,
}

impl OnEvent {
    /// The command of a run in the folder `out`, if it has one.
    pub fn new(command: Option<String>, out: &Path) -> Self {
        Self { command, out: out.to_owned(), limit: LIMIT }
    }

    /// No command.
    pub fn nothing() -> Self {
        Self::new(None, Path::new(""))
    }

    /// Runs the command and waits for it. If it fails, prints a warning; the run is not affected.
    pub fn tell(&self, event: Event, message: &str) {
        let Some(command) = &self.command else {
            return;
        };
        if let Err(error) = self.run(command, event, message) {
            terminal::warning(&format!("--on-event {}: {error:#}", event.name()));
        }
    }

    /// Runs the command with sh and waits for it; kills it after `limit`.
    fn run(&self, command: &str, event: Event, message: &str) -> Result<()> {
        let mut child = Command::new("sh")
            .args(["-c", command])
            .env("SIEVE_EVENT", event.name())
            .env("SIEVE_OUT", &self.out)
            .env("SIEVE_MESSAGE", message)
            .stdin(Stdio::null())
            .spawn()
            .context("sh does not start")?;
        let until = Instant::now() + self.limit;
        loop {
            match child.try_wait()? {
                Some(status) if status.success() => return Ok(()),
                Some(status) => anyhow::bail!("the command ended with {status}"),
                None if Instant::now() < until => std::thread::sleep(Duration::from_millis(20)),
                None => break,
            }
        }
        child.kill().context("it cannot be ended")?;
        child.wait()?;
        anyhow::bail!("the command was ended after {} s", self.limit.as_secs_f64())
    }

    /// Runs the command for the end of a run, and returns the run's result.
    pub fn ended(&self, result: Result<Exit>) -> Result<Exit> {
        match &result {
            Ok(Exit::Done) => self.tell(Event::Finished, ""),
            Ok(Exit::StoppedEarly) => self.tell(Event::Stopped, ""),
            Ok(_) => self.tell(Event::Failed, ""),
            Err(error) => self.tell(Event::Failed, &terminal::error_text(error)),
        }
        result
    }

    /// Watches a run until the watch is dropped: if no event arrives for `least` and for `LONGEST_PAUSES` times the
    /// longest earlier pause, the command runs, once until the next event.
    pub fn watch(&self, least: Duration) -> Result<StallWatch> {
        let (sender, happened) = channel();
        // Without a command there is nothing to run, so no thread is started.
        if self.command.is_none() {
            return Ok(StallWatch(sender));
        }
        let this = self.clone();
        let watch = move || {
            let (mut limit, mut since, mut has_run) = (least, Instant::now(), false);
            loop {
                match happened.recv_timeout(limit) {
                    Ok(()) => {
                        if !has_run {
                            limit = limit.max(since.elapsed() * LONGEST_PAUSES);
                        }
                        (since, has_run) = (Instant::now(), false);
                    }
                    Err(RecvTimeoutError::Disconnected) => return,
                    Err(RecvTimeoutError::Timeout) if has_run => {}
                    Err(RecvTimeoutError::Timeout) => {
                        has_run = true;
                        let words = format!("nothing has happened for {:.0} s", since.elapsed().as_secs_f64());
                        this.tell(Event::Stalled, &words);
                    }
                }
            }
        };
        let thread = std::thread::Builder::new().name("sieve-stalls".to_owned());
        thread.spawn(watch).context("starting a thread")?;
        Ok(StallWatch(sender))
    }
}

/// Receives the events of a watched run; dropping it ends the watch.
pub struct StallWatch(Sender<()>);

impl StallWatch {
    /// Notes an event: the limit counts from now.
    pub fn restart(&self) {
        // Without a command there is no watching thread, and sending fails.
        let _ = self.0.send(());
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    fn lines(path: &Path) -> Vec<String> {
        let text = sieve_files::read_text(path).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    /// A command of `--on-event` that appends its variables to a file, and the file's path.
    fn keeper(dir: &Path) -> (OnEvent, PathBuf) {
        let kept = dir.join("kept");
        let command = format!("echo \"$SIEVE_EVENT $SIEVE_OUT $SIEVE_MESSAGE\" >> {}", kept.to_string_lossy());
        (OnEvent::new(Some(command), Path::new("out/a b")), kept)
    }

    #[test]
    fn the_command_gets_how_a_run_ended_and_does_not_change_the_exit_code() {
        let dir = std::env::temp_dir().join(format!("sieve-on-event-{}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("writable");
        let (events, kept) = keeper(&dir);
        for exit in [Exit::Done, Exit::StoppedEarly, Exit::Interrupted] {
            assert_eq!(events.ended(Ok(exit)).expect("as it was"), exit);
        }
        events.ended(Err(anyhow::anyhow!("$(no command)"))).expect_err("as it was");
        let expected =
            ["finished out/a b ", "stopped out/a b ", "failed out/a b ", "failed out/a b error: $(no command)"];
        assert_eq!(lines(&kept), expected);
        // A command may fail, or last longer than the limit.
        let fails = OnEvent::new(Some("exit 3".to_owned()), &dir);
        assert_eq!(fails.ended(Ok(Exit::Done)).expect("as it was"), Exit::Done);
        let lasts = OnEvent { limit: Duration::from_millis(100), ..OnEvent::new(None, &dir) };
        let error = lasts.run("exec sleep 600", Event::Stopped, "").expect_err("it lasts");
        assert!(error.to_string().contains("was ended after 0.1 s"), "{error}");
        std::fs::remove_dir_all(&dir).expect("writable");
    }

    #[test]
    fn a_stalled_run_is_reported_once_until_its_next_event() {
        let dir = std::env::temp_dir().join(format!("sieve-stalls-{}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("writable");
        let (events, kept) = keeper(&dir);
        let wait_for = |count: usize| {
            let since = Instant::now();
            while lines(&kept).len() < count {
                assert!(since.elapsed() < Duration::from_secs(60), "{:?}", lines(&kept));
                std::thread::sleep(Duration::from_millis(10));
            }
        };
        let watch = events.watch(Duration::from_millis(50)).expect("a thread");
        wait_for(1);
        // The command does not run again, even after several times the limit.
        std::thread::sleep(Duration::from_millis(300));
        assert_eq!(lines(&kept).len(), 1, "{:?}", lines(&kept));
        drop(watch);
        let watch = events.watch(Duration::from_millis(50)).expect("a thread");
        watch.restart();
        wait_for(2);
        let told = lines(&kept);
        assert!(told.iter().all(|line| line.starts_with("stalled out/a b nothing has")), "{told:?}");
        std::fs::remove_dir_all(&dir).expect("writable");
    }
}
