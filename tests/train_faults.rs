//! Random faults, one after another, in a run of four processes. After each fault the run must continue from the last
//! whole checkpoint, and it must end with the same bits as a run without faults. `.ci/faults` runs fifty.
use crate::resume_kill::{moment, seeded};
use crate::tiny_run::{STEPS, TinyRun, spawned, succeed, text, wait_until};
use crate::train_ranks::UNTIED;
use chacha20::ChaCha8Rng;
use chacha20::rand_core::Rng;
use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

/// Process ids of a launcher's ranks, in the order of their ranks.
fn ranks_of(launcher: u32) -> Vec<u32> {
    let children = fs::read_to_string(format!("/proc/{launcher}/task/{launcher}/children")).expect("Linux");
    // A rank that has just ended has no environment any more, and is left out.
    let mut found = children
        .split_whitespace()
        .filter_map(|id| {
            let environment = fs::read(format!("/proc/{id}/environ")).ok()?;
            let environment = String::from_utf8_lossy(&environment).into_owned();
            let mut variables = environment.split('\0');
            let rank = variables.find_map(|variable| variable.strip_prefix("RANK="))?;
            Some((rank.parse().ok()?, id.parse().ok()?))
        })
        .collect::<Vec<(usize, u32)>>();
    found.sort_unstable();
    found.into_iter().map(|(_, id)| id).collect()
}

fn is_there(id: u32) -> bool {
    // A process that has ended but was not waited for still has an entry in /proc, with an empty command line.
    let line = fs::read(Path::new("/proc").join(id.to_string()).join("cmdline"));
    line.is_ok_and(|line| !line.is_empty())
}

/// What happens to a run while it works, or to its files after it has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// `kill -9` of a rank.
    Kill,
    /// `kill -9` of a rank; then one bit of the latest checkpoint is flipped.
    KillAndFlip,
    /// `kill -9` of a rank; then half a line is appended to `metrics.jsonl`.
    KillAndHalfLine,
    /// SIGTERM to a rank, as a scheduler sends it.
    Terminate,
    /// SIGSTOP to a rank.
    Stop,
    /// SIGSTOP to a rank, and SIGCONT half a second later.
    Pause,
    /// `kill -9` of the launcher.
    KillLauncher,
    /// For a moment no checkpoint can be written.
    NoRoom,
}

const FAULTS: [Fault; 8] = [
    Fault::Kill,
    Fault::KillAndFlip,
    Fault::KillAndHalfLine,
    Fault::Terminate,
    Fault::Stop,
    Fault::Pause,
    Fault::KillLauncher,
    Fault::NoRoom,
];

/// Number of faults in a test: one of each kind, or `SIEVE_TEST_FAULTS`.
fn num_faults() -> usize {
    let count = std::env::var("SIEVE_TEST_FAULTS").ok();
    count.map_or(FAULTS.len(), |count| count.parse().expect("SIEVE_TEST_FAULTS is a number"))
}

/// Sends a signal to a process, which may have ended already.
fn try_send(signal: &str, id: u32) {
    _ = Command::new("kill").args(["-s", signal, &id.to_string()]).output();
}

fn pick(random: &mut ChaCha8Rng, count: usize) -> usize {
    random.next_u32() as usize % count
}

impl Fault {
    /// Causes the fault in the job `child` of `num_ranks` processes. `starts` is the number of earlier starts of the
    /// run that took a first step. Returns false if the rank to hit had not started yet.
    fn strike(
        self,
        tiny: &TinyRun,
        (out, starts, num_ranks): (&str, usize, usize),
        child: &mut Child,
        random: &mut ChaCha8Rng,
    ) -> bool {
        let ranks = ranks_of(child.id());
        let Some(&rank) = ranks.get(pick(random, num_ranks)) else {
            return false;
        };
        match self {
            Self::Kill | Self::KillAndFlip | Self::KillAndHalfLine => try_send("KILL", rank),
            Self::Terminate => try_send("TERM", rank),
            Self::Stop => {
                try_send("STOP", rank);
                // If the rank had not connected yet, the others would wait for it for minutes. After a minute it
                // continues.
                let since = Instant::now();
                while child.try_wait().expect("a child").is_none() && since.elapsed() < Duration::from_secs(60) {
                    std::thread::sleep(Duration::from_millis(20));
                }
                try_send("CONT", rank);
            }
            Self::Pause => {
                try_send("STOP", rank);
                std::thread::sleep(Duration::from_millis(500));
                try_send("CONT", rank);
            }
            Self::KillLauncher => {
                child.kill().expect("SIGKILL is sent");
                child.wait().expect("it ends");
                wait_until("the ranks end", || !ranks.iter().any(|&id| is_there(id)));
            }
            Self::NoRoom => {
                let (folder, aside) = (tiny.path(&format!("{out}/checkpoint")), tiny.path("aside"));
                // The folder may be moved only after the first step, since a resumed run reads its checkpoint from
                // there.
                while num_starts(tiny, out) == starts && child.try_wait().expect("a child").is_none() {
                    std::thread::sleep(Duration::from_millis(1));
                }
                // The rename fails if no checkpoint was written yet.
                if fs::rename(&folder, &aside).is_err() {
                    return true;
                }
                fs::write(&folder, "in the way").expect("writable");
                std::thread::sleep(Duration::from_millis(300));
                fs::remove_file(&folder).expect("it is a file");
                fs::rename(&aside, &folder).expect("nothing is in the way");
            }
        }
        true
    }

    /// Changes the run's files as the fault demands, after the processes have ended.
    fn damage(self, tiny: &TinyRun, out: &str, random: &mut ChaCha8Rng) {
        match self {
            Self::KillAndFlip => {
                let whole = whole_checkpoints(tiny, out);
                let Some(step) = whole.last().filter(|_| whole.len() > 1) else {
                    return;
                };
                let folder = format!("{out}/checkpoint/step-{step}");
                let names = tiny.names(&folder);
                let path = tiny.path(&folder).join(&names[pick(random, names.len())]);
                let mut bytes = fs::read(&path).expect("a file of a checkpoint");
                let at = pick(random, bytes.len());
                bytes[at] ^= 1 << pick(random, 8);
                fs::write(&path, bytes).expect("writable");
            }
            Self::KillAndHalfLine => {
                let path = tiny.path(&format!("{out}/metrics.jsonl"));
                if let Ok(mut metrics) = fs::OpenOptions::new().append(true).open(path) {
                    metrics.write_all(b"{\"kind\":\"step\",\"st").expect("writable");
                }
            }
            _ => {}
        }
    }
}

/// Number of a run's starts that took a first step.
fn num_starts(tiny: &TinyRun, out: &str) -> usize {
    let log = fs::read_to_string(tiny.path(&format!("{out}/log"))).unwrap_or_default();
    log.matches("started: ").count()
}

/// Steps of the undamaged checkpoints, in order.
fn whole_checkpoints(tiny: &TinyRun, out: &str) -> Vec<u64> {
    let found = sieve_hf::list_checkpoints(&tiny.path(&format!("{out}/checkpoint"))).expect("a folder");
    let whole = found.into_iter().filter(|(_, path)| sieve_hf::Checkpoint::open(path).is_ok());
    whole.map(|(step, _)| step).collect()
}

/// Asserts that a process continued from step `last`, or began the run if `last` is `None`. The process may have ended
/// before it printed which.
fn went_on_from(said: &str, last: Option<u64>, what: &str) {
    let from = said.split("continuing at step ").nth(1).and_then(|rest| rest.split(' ').next());
    if let Some(from) = from {
        assert_eq!(from.parse().ok(), last, "{what}: {said}");
    } else if said.contains("step:     1 ") {
        assert_eq!(last, None, "{what} began again: {said}");
    }
}

#[test]
fn random_faults_over_four_processes_lose_no_step_beyond_the_last_checkpoint() {
    let more = format!("{UNTIED} --set training.local_batch_size=2 --patience 4");
    // Exit codes: none if the launcher itself was killed, 75 if the job can be started again, 130 if its ranks were
    // stopped before their first step.
    endure(4, num_faults(), &FAULTS, &[None, Some(75), Some(130)], &more);
}

#[test]
fn a_rank_killed_at_random_moments_costs_no_step_and_no_bit() {
    // The random moments fall into the start, steps, validations, and the writing and renaming of checkpoints.
    endure(2, 6, &[Fault::Kill], &[Some(75)], UNTIED);
}

/// Starts a job again and again, each time with the next of the faults, until `wanted` faults have hit it. A job that a
/// fault ends must have one of these exit codes.
#[expect(clippy::print_stdout, reason = "a test that fails shows what it printed")]
fn endure(num_ranks: usize, wanted: usize, faults: &[Fault], codes: &[Option<i32>], all: &str) {
    let (mut random, tiny) = (seeded(), TinyRun::dma());
    tiny.trained("reference", all);
    let more = format!("{all} --resume=auto");
    let begun = Instant::now();
    succeed(&mut tiny.launch(num_ranks, "whole", &more));
    let whole = begun.elapsed();
    tiny.assert_same_end("whole", "reference");
    let mut struck = 0;
    for round in 0.. {
        let out = format!("faults-{round}");
        let mut last = None;
        loop {
            let (since, moment, starts) = (Instant::now(), moment(&mut random, whole), num_starts(&tiny, &out));
            let mut child = spawned(&mut tiny.launch(num_ranks, &out, &more));
            let mut fault = None;
            while struck < wanted && fault.is_none() && child.try_wait().expect("a child").is_none() {
                std::thread::sleep(Duration::from_micros(500));
                if since.elapsed() >= moment {
                    let next = faults[struck % faults.len()];
                    let is_struck = next.strike(&tiny, (&out, starts, num_ranks), &mut child, &mut random);
                    fault = is_struck.then_some(next);
                    struck += usize::from(is_struck);
                }
            }
            let output = child.wait_with_output().expect("it ends");
            let (said, what) = (text(&output), format!("{out}, fault {struck}, {fault:?}"));
            println!("{what}: {:?}, was at step {last:?}", output.status.code());
            went_on_from(&said, last, &what);
            if output.status.success() {
                break;
            }
            assert!(fault.is_some(), "{what}: {said}");
            assert!(codes.contains(&output.status.code()), "{what}: {said}");
            fault.inspect(|fault| fault.damage(&tiny, &out, &mut random));
            last = whole_checkpoints(&tiny, &out).pop();
        }
        tiny.assert_same_end(&out, "reference");
        let steps = tiny.metrics(&out, "step").into_keys();
        assert!(steps.eq(1..=STEPS), "{out}: a step was lost or told twice");
        let left = tiny.names(&format!("{out}/checkpoint"));
        assert!(faults != [Fault::Kill] || left.len() == 3, "{out}: something half written was left: {left:?}");
        if struck >= wanted {
            break;
        }
    }
    let left = tiny.names("");
    assert!(!left.iter().any(|name| name == "aside"), "{left:?}");
}
