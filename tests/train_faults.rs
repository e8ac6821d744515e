//! Faults of many kinds, one after another, over a run of four processes: each time it continues from the last whole
//! checkpoint, and it ends with the bits of a run that nothing happened to. `.ci/faults` asks for fifty.
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

/// The process of each rank that a launcher has started.
fn ranks_of(launcher: u32) -> Vec<u32> {
    let children = fs::read_to_string(format!("/proc/{launcher}/task/{launcher}/children")).expect("Linux");
    // One that has just ended has no environment any more.
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
    // One that has ended and was not asked for is there with no command line.
    let line = fs::read(Path::new("/proc").join(id.to_string()).join("cmdline"));
    line.is_ok_and(|line| !line.is_empty())
}

/// What happens to a run, or to its files while nobody writes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// `kill -9` of a rank.
    Kill,
    /// The same, and a bit of the latest checkpoint is another.
    KillAndFlip,
    /// The same, and `metrics.jsonl` ends with half a line.
    KillAndHalfLine,
    /// SIGTERM to a rank, as a scheduler sends it.
    Terminate,
    /// A rank stands still for good.
    Stop,
    /// A rank stands still for a moment.
    Pause,
    /// `kill -9` of the launcher.
    KillLauncher,
    /// Checkpoints cannot be written for a moment.
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

/// How many: enough for one of each kind, or as many as `SIEVE_TEST_FAULTS` says.
fn num_faults() -> usize {
    let count = std::env::var("SIEVE_TEST_FAULTS").ok();
    count.map_or(FAULTS.len(), |count| {
        count.parse().expect("SIEVE_TEST_FAULTS is a number")
    })
}

/// Sends a signal to a process that may have ended.
fn try_send(signal: &str, id: u32) {
    _ = Command::new("kill").args(["-s", signal, &id.to_string()]).output();
}

fn pick(random: &mut ChaCha8Rng, count: usize) -> usize {
    random.next_u32() as usize % count
}

impl Fault {
    /// Makes it happen while the job of so many ranks runs, which was started so often before. Whether it found a rank.
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
                // The others wait for minutes for a rank that was not there yet.
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
                // A start that reads its checkpoint is refused: its first step must be over.
                while num_starts(tiny, out) == starts && child.try_wait().expect("a child").is_none() {
                    std::thread::sleep(Duration::from_millis(1));
                }
                // No checkpoint was written.
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

    /// Does to files what a fault leaves behind.
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

/// How many processes of a run have taken a first step.
fn num_starts(tiny: &TinyRun, out: &str) -> usize {
    let log = fs::read_to_string(tiny.path(&format!("{out}/log"))).unwrap_or_default();
    log.matches("started: ").count()
}

/// The steps of the checkpoints that are whole.
fn whole_checkpoints(tiny: &TinyRun, out: &str) -> Vec<u64> {
    let found = sieve_hf::list_checkpoints(&tiny.path(&format!("{out}/checkpoint"))).expect("a folder");
    let whole = found
        .into_iter()
        .filter(|(_, path)| sieve_hf::Checkpoint::open(path).is_ok());
    whole.map(|(step, _)| step).collect()
}

/// Asserts that a start went on from there, as far as it came to say so.
fn went_on_from(said: &str, last: Option<u64>, what: &str) {
    let from = said
        .split("continuing at step ")
        .nth(1)
        .and_then(|rest| rest.split(' ').next());
    if let Some(from) = from {
        assert_eq!(from.parse().ok(), last, "{what}: {said}");
    } else if said.contains("step:     1 ") {
        assert_eq!(last, None, "{what} began again: {said}");
    }
}

#[test]
fn random_faults_over_four_processes_lose_no_step_beyond_the_last_checkpoint() {
    let more = format!("{UNTIED} --set training.local_batch_size=2 --patience 4");
    // The launcher itself was killed, its ranks were stopped before their first step, or the job says that it is to be
    // started again.
    endure(4, num_faults(), &FAULTS, &[None, Some(75), Some(130)], &more);
}

#[test]
fn a_rank_killed_at_random_moments_costs_no_step_and_no_bit() {
    // As they start, in steps and validations, while a checkpoint is written and as it gets its name.
    endure(2, 6, &[Fault::Kill], &[Some(75)], UNTIED);
}

/// Runs a job again and again, each time with the next of the faults, until so many have struck; a job that a fault
/// ends has one of these exit codes.
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
        assert!(
            faults != [Fault::Kill] || left.len() == 3,
            "{out}: something half written was left: {left:?}"
        );
        if struck >= wanted {
            break;
        }
    }
    let left = tiny.names("");
    assert!(!left.iter().any(|name| name == "aside"), "{left:?}");
}
