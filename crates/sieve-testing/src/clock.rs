//! Wall and CPU time of work on a shared machine.

use std::time::Instant;

/// Duration of some work.
#[derive(Clone, Copy, Debug)]
pub struct Time {
    /// Wall-clock seconds.
    pub wall: f64,
    /// CPU seconds of all threads; NaN on systems without `/proc`. Wall time on a shared machine depends on other
    /// processes; CPU time hardly does.
    pub cpu: f64,
}

/// Runs `work` once; returns its result and duration.
pub fn timed<T>(work: impl FnOnce() -> T) -> (T, Time) {
    let (started, cpu_before) = (Instant::now(), cpu_seconds());
    let result = work();
    let time = Time { wall: started.elapsed().as_secs_f64(), cpu: cpu_seconds() - cpu_before };
    (result, time)
}

/// Runs `work` once to warm up, then for half a second, 5 to 200 times; returns the medians.
pub fn measure(mut work: impl FnMut()) -> Time {
    work();
    let begin = Instant::now();
    let mut times = Vec::new();
    while times.len() < 5 || (begin.elapsed().as_secs_f64() < 0.5 && times.len() < 200) {
        times.push(timed(&mut work).1);
    }
    let median = |seconds_of: fn(&Time) -> f64| {
        let mut seconds: Vec<f64> = times.iter().map(seconds_of).collect();
        seconds.sort_by(f64::total_cmp);
        seconds[seconds.len() / 2]
    };
    Time { wall: median(|time| time.wall), cpu: median(|time| time.cpu) }
}

/// CPU seconds of all threads of this process, from `/proc/self/task/*/schedstat`; NaN where there is no such folder.
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
