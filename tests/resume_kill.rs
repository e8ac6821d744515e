//! A run that is killed and resumed ends as a run that nothing interrupted.
use crate::tiny_run::{TinyRun, spawned, succeed, text};
use chacha20::ChaCha8Rng;
use chacha20::rand_core::{Rng, SeedableRng};
use std::fs;
use std::time::{Duration, Instant, SystemTime};

/// Number of kills in the test.
const NUM_KILLS: usize = 20;

/// A random generator: seeded by `SIEVE_TEST_SEED`, otherwise differently in each run. Prints its seed.
#[expect(clippy::print_stdout, reason = "a test that fails shows what it printed")]
pub(crate) fn seeded() -> ChaCha8Rng {
    let seed = match std::env::var("SIEVE_TEST_SEED") {
        Ok(seed) => seed.parse().expect("SIEVE_TEST_SEED is a number"),
        Err(_) => SystemTime::UNIX_EPOCH.elapsed().expect("after 1970").as_nanos() as u64,
    };
    println!("SIEVE_TEST_SEED={seed}");
    ChaCha8Rng::seed_from_u64(seed)
}

/// A random duration below `whole`, the time that a run takes.
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
            // `--resume` is refused until the recipe is in the folder.
            let more = if tiny.path(&out).join("config.toml").exists() { "--resume" } else { "" };
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

impl TinyRun {
    /// The last step that a killed run logged.
    fn metrics_of_killed(&self, out: &str) -> u64 {
        let text = fs::read_to_string(self.path(out).join("metrics.jsonl")).unwrap_or_default();
        let lines = text.lines().filter_map(|line| serde_json::from_str(line).ok());
        let steps = lines.filter_map(|line: serde_json::Value| line["step"].as_u64());
        steps.max().unwrap_or(0)
    }
}
