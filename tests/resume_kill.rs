//! A run that is killed or stopped goes on as if nothing had happened.
use crate::tiny_run::{TinyRun, spawned, succeed, text};
use chacha20::ChaCha8Rng;
use chacha20::rand_core::{Rng, SeedableRng};
use std::fs;
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

impl TinyRun {
    /// The last step that a killed run logged.
    fn metrics_of_killed(&self, out: &str) -> u64 {
        let text = fs::read_to_string(self.path(out).join("metrics.jsonl")).unwrap_or_default();
        let lines = text.lines().filter_map(|line| serde_json::from_str(line).ok());
        let steps = lines.filter_map(|line: serde_json::Value| line["step"].as_u64());
        steps.max().unwrap_or(0)
    }
}
