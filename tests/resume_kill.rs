//! A run that is killed or stopped goes on as if nothing had happened.
use crate::tiny_run::{TinyRun, signal, spawned, succeed, text, wait_until};
use chacha20::ChaCha8Rng;
use chacha20::rand_core::{Rng, SeedableRng};
use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

/// How often the process is killed.
const NUM_KILLS: usize = 20;

/// Random moments: others each time, or those of `SIEVE_TEST_SEED`, which is printed.
#[expect(clippy::print_stdout, reason = "a test that fails shows what it printed")]
pub(crate) fn seeded() -> ChaCha8Rng {
    let seed = match std::env::var("SIEVE_TEST_SEED") {
        Ok(seed) => seed.parse().expect("SIEVE_TEST_SEED is a number"),
        Err(_) => SystemTime::UNIX_EPOCH.elapsed().expect("after 1970").as_nanos() as u64,
    };
    println!("SIEVE_TEST_SEED={seed}");
    ChaCha8Rng::seed_from_u64(seed)
}

/// A random moment of the time that a whole run takes.
pub(crate) fn moment(random: &mut ChaCha8Rng, whole: Duration) -> Duration {
    whole.mul_f64(f64::from(random.next_u32()) / f64::from(u32::MAX))
}

#[test]
fn killed_at_random_moments_and_resumed_it_ends_with_the_same_weights() {
    let mut random = seeded();
    let tiny = TinyRun::dma();
    let whole = tiny.trained("reference", "");

    let (mut kills, mut round, mut resumed_at) = (0, 0, Vec::new());
    while kills < NUM_KILLS {
        round += 1;
        let out = format!("killed-{round}");
        loop {
            // Until the recipe is in the folder there is no run to resume, and the message says so.
            let more = match tiny.path(&out).join("config.toml").exists() {
                true => "--resume",
                false => "",
            };
            let mut command = tiny.train(&out, more);
            if kills == NUM_KILLS {
                succeed(&mut command);
                break;
            }
            let mut child = spawned(&mut command);
            let moment = moment(&mut random, whole);
            let started = Instant::now();
            while started.elapsed() < moment && child.try_wait().expect("a child").is_none() {
                std::thread::sleep(Duration::from_micros(500));
            }
            let ended = child.try_wait().expect("a child").is_some();
            if !ended {
                child.kill().expect("SIGKILL is sent");
                kills += 1;
            }
            let output = child.wait_with_output().expect("it ends");
            if ended {
                assert!(output.status.success(), "{}", text(&output));
                break;
            }
            let latest = tiny.metrics_of_killed(&out);
            resumed_at.push(latest);
        }
        tiny.assert_same_end(&out, "reference");
        tiny.assert_same_metrics(&out, "reference");
        let left = tiny.names(&format!("{out}/checkpoint"));
        assert_eq!(left.len(), 3, "something half written was left: {left:?}");
    }
    println!("killed at steps {resumed_at:?}, in {round} runs");
}

/// Starts a command. Returns it with the lines that it prints.
fn spoken(command: &mut Command) -> (Child, impl Iterator<Item = String> + use<>) {
    let child = command.stdout(Stdio::piped()).spawn();
    let mut child = child.expect("the program starts");
    let lines = BufReader::new(child.stdout.take().expect("it is piped")).lines();
    (child, lines.map(|line| line.expect("text")))
}

impl TinyRun {
    /// The last step that a killed run logged.
    fn metrics_of_killed(&self, out: &str) -> u64 {
        let text = fs::read_to_string(self.path(out).join("metrics.jsonl")).unwrap_or_default();
        let lines = text.lines().filter_map(|line| serde_json::from_str(line).ok());
        let steps = lines.filter_map(|line: serde_json::Value| line["step"].as_u64());
        steps.max().unwrap_or(0)
    }
}

#[test]
fn the_first_signal_keeps_the_state_and_the_run_goes_on_from_it() {
    let tiny = TinyRun::dma();
    tiny.trained("reference", "");
    for name in ["INT", "TERM"] {
        let (mut child, mut lines) = spoken(&mut tiny.train(name, ""));
        // Between two checkpoints.
        let third = lines.find(|line| line.starts_with("step:     3"));
        third.expect("the run gets to step 3");
        signal(&child, name);
        let rest: Vec<String> = lines.collect();
        let code = child.wait().expect("it ends").code();
        let said = rest.join("\n");
        if said.contains("trained 40 steps") {
            assert_eq!(code, Some(0), "{said}");
        } else {
            // Not 0: what follows in a script would take half a run for a whole one.
            assert_eq!(code, Some(75), "{said}");
            assert!(said.contains("stopping after this step"), "{said}");
            assert!(said.contains("--resume"), "{said}");
            let printed = succeed(&mut tiny.train(name, "--resume"));
            assert!(printed.contains("continuing at step"), "{printed}");
        }
        tiny.assert_same_end(name, "reference");
        tiny.assert_same_metrics(name, "reference");
        let log = tiny.read(&format!("{name}/log"));
        assert!(log.contains("step:     1 ") && log.contains("step:    40 "));
    }
}

#[test]
fn the_second_signal_ends_the_process_at_once() {
    let tiny = TinyRun::dma();
    // A step of a quarter of a million tokens takes seconds.
    let slow = "--set training.local_batch_size=8192 --set training.global_batch_size=8192";
    let (mut child, mut lines) = spoken(&mut tiny.train("run", slow));
    // Printed after the recipe is in the folder; the first step begins next.
    lines
        .find(|line| line.starts_with("validate step:"))
        .expect("the run begins");
    signal(&child, "INT");
    lines
        .find(|line| line.contains("stopping after this step"))
        .expect("it is told");
    let told = Instant::now();
    signal(&child, "TERM");
    assert_eq!(child.wait().expect("it ends").code(), Some(130));
    println!("ended {:?} after the second signal", told.elapsed());
    assert!(!tiny.path("run/checkpoint").exists());
}

#[test]
fn a_signal_before_the_first_step_ends_the_process() {
    let tiny = TinyRun::dma();
    // As if another process prepared the same folder.
    fs::create_dir_all(tiny.path("run/data")).expect("writable");
    let lock = fs::File::create(tiny.path("run/data/tokenizer.lock")).expect("writable");
    lock.lock().expect("nobody else has it");
    let (mut child, mut lines) = spoken(&mut tiny.train("run", ""));
    lines
        .find(|line| line.contains("waiting"))
        .expect("it waits for the folder");
    signal(&child, "INT");
    assert_eq!(child.wait().expect("it ends").code(), Some(130));
    assert!(!tiny.path("run/config.toml").exists());
    drop(lock);
    tiny.trained("run", "--set training.steps=4 --set checkpoint.interval=2");
}

#[test]
fn a_run_killed_before_its_first_checkpoint_starts_over() {
    let tiny = TinyRun::dma();
    tiny.trained("reference", "");
    let mut child = tiny
        .train("run", "--set checkpoint.interval=1000")
        .stdout(Stdio::null())
        .spawn()
        .expect("the program starts");
    wait_until("three steps", || tiny.metrics_of_killed("run") >= 3);
    child.kill().expect("SIGKILL is sent");
    child.wait().expect("it ends");
    if tiny.path("run/checkpoint").exists() {
        return; // It was faster than the signal.
    }
    // Without --resume the folder stays as it is.
    tiny.refuse(&mut tiny.train("run", ""), "run | --resume");
    let printed = succeed(&mut tiny.train("run", "--resume"));
    assert!(printed.contains("starts over"), "{printed}");
    tiny.assert_same_end("run", "reference");
    tiny.assert_same_metrics("run", "reference");
}
