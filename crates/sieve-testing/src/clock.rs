//! How long something takes on a machine that others use too.

use std::time::Instant;

/// How long something took.
#[derive(Clone, Copy, Debug)]
pub struct Time {
    /// Seconds on the clock.
    pub wall: f64,
    /// CPU seconds of all threads; NaN on systems without `/proc`. On a shared machine rates per CPU second compare
    /// kernels where rates per second on the clock do not.
    pub cpu: f64,
}

/// The result of `work`, and how long it took.
pub fn timed<T>(work: impl FnOnce() -> T) -> (T, Time) {
    let (started, cpu_before) = (Instant::now(), cpu_seconds());
    let result = work();
    let time = Time {
        wall: started.elapsed().as_secs_f64(),
        cpu: cpu_seconds() - cpu_before,
    };
    (result, time)
}

/// Medians over at least five runs and half a second, after one to warm up.
pub fn measure(mut work: impl FnMut()) -> Time {
    work();
    let begin = Instant::now();
    let mut times = Vec::new();
    while times.len() < 5 || (begin.elapsed().as_secs_f64() < 0.5 && times.len() < 200) {
        times.push(timed(&mut work).1);
    }
    let median = |of: fn(&Time) -> f64| {
        let mut seconds: Vec<f64> = times.iter().map(of).collect();
        seconds.sort_by(f64::total_cmp);
        seconds[seconds.len() / 2]
    };
    Time {
        wall: median(|time| time.wall),
        cpu: median(|time| time.cpu),
    }
}

/// Seconds that all threads of this process have run, as Linux counts them.
fn cpu_seconds() -> f64 {
    let Ok(tasks) = std::fs::read_dir("/proc/self/task") else {
        return f64::NAN;
    };
    let nanoseconds: f64 = tasks
        .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("schedstat")).ok())
        .filter_map(|text| text.split(' ').next()?.parse::<f64>().ok())
        .sum();
    nanoseconds / 1e9
}
