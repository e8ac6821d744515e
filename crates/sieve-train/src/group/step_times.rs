//! Finds slow ranks by the time that each rank's host takes for a step, without its waits for other ranks.
use sieve_comm::Work;
use std::time::{Duration, Instant};

/// The fewest steps that a mean is taken of.
const LEAST_STEPS: u32 = 5;
/// A rank is slow if its mean time is more than this many times the median rank's, and longer by at least
/// [`LEAST_DIFFERENCE`].
const SLOW: f64 = 1.1;
const LEAST_DIFFERENCE: Duration = Duration::from_millis(20);
/// Shortest time between two messages about a slow rank.
const BETWEEN_LINES: Duration = Duration::from_secs(60);

/// Times of steps of the kind [`Work::Step`]: steps that compile kernels or are very slow do not count.
#[derive(Debug, Default)]
pub(super) struct StepTimes {
    /// When the present step began, and how long this rank had waited for others by then.
    began: Option<(Instant, Duration)>,
    /// Duration of this rank's last step.
    pub(super) own: Duration,
    /// Sum of the times of each rank since the last report.
    sums: Vec<Duration>,
    num_steps: u32,
    last_message: Option<Instant>,
}

impl StepTimes {
    /// Notes that `work` begins, and stores the time of the step that ends, if one was timed. `waited` is the time that
    /// this rank has waited for others since the run began.
    pub(super) fn set_work(&mut self, work: Work, waited: Duration) {
        let now = Instant::now();
        if let Some((began, before)) = self.began.take() {
            self.own = now.duration_since(began).saturating_sub(waited.saturating_sub(before));
        }
        self.began = (work == Work::Step).then_some((now, waited));
    }

    /// Adds the time of a rank's last step.
    pub(super) fn add(&mut self, rank: usize, time: Duration) {
        self.sums.resize(self.sums.len().max(rank + 1), Duration::ZERO);
        self.sums[rank] += time;
        // `add` is called for every rank in each step.
        self.num_steps += u32::from(rank == 0);
    }

    /// A message about the slowest rank since the last report. `None` after too few steps, if no rank is slow, or if
    /// the last message is recent.
    pub(super) fn slow_rank(&mut self) -> Option<String> {
        if self.num_steps < LEAST_STEPS {
            return None;
        }
        let num_steps = std::mem::take(&mut self.num_steps);
        let mut means =
            std::mem::take(&mut self.sums).into_iter().map(|sum| sum / num_steps).zip(0..).collect::<Vec<_>>();
        means.sort();
        let (slowest, rank) = *means.last()?;
        let (median, _) = means[(means.len() - 1) / 2];
        let is_slow = slowest > median.mul_f64(SLOW) && slowest - median > LEAST_DIFFERENCE;
        if !is_slow || self.last_message.is_some_and(|at| at.elapsed() < BETWEEN_LINES) {
            return None;
        }
        self.last_message = Some(Instant::now());
        let [slowest, median] = [slowest, median].map(|time| time.as_secs_f64());
        Some(format!(
            "slow: rank {rank} takes {slowest:.3} s a step without its waits for others, the median rank {median:.3} s"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slowest_rank_is_named_where_it_is_a_tenth_slower_and_once_a_minute() {
        let millis = Duration::from_millis;
        let look = |times: &mut StepTimes, of_ranks: [u64; 4]| {
            for _ in 0..LEAST_STEPS {
                (0..).zip(of_ranks).for_each(|(rank, time)| times.add(rank, millis(time)));
            }
            times.slow_rank()
        };
        let mut times = StepTimes::default();
        assert_eq!(look(&mut times, [1000, 1010, 1090, 990]), None);
        assert_eq!(look(&mut times, [10, 10, 19, 10]), None, "noise");
        let told = look(&mut times, [1000, 1010, 1250, 990]).unwrap();
        assert!(told.contains("rank 2 takes 1.250 s") && told.contains("1.000 s"), "{told}");
        assert_eq!(look(&mut times, [1000, 1010, 1250, 990]), None, "it was told just now");
    }

    #[test]
    fn the_time_of_a_step_leaves_out_waits_and_other_work() {
        let mut times = StepTimes::default();
        let pause = Duration::from_millis(30);
        times.set_work(Work::Long, Duration::ZERO);
        std::thread::sleep(pause);
        times.set_work(Work::Step, Duration::from_secs(7));
        assert_eq!(times.own, Duration::ZERO);
        std::thread::sleep(pause);
        times.set_work(Work::Long, Duration::from_secs(7));
        assert!(times.own >= pause, "{:?}", times.own);
        times.set_work(Work::Step, Duration::from_secs(7));
        std::thread::sleep(pause);
        times.set_work(Work::Long, Duration::from_secs(7) + Duration::from_secs(60));
        assert_eq!(times.own, Duration::ZERO, "all of it was waiting");
    }
}
