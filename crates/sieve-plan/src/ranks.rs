//! Communication of several ranks that train one model, one rank per GPU.
//!
//! A time is a number of bytes divided by a rate. Between GPUs of one host the rate was measured with NCCL on H200s;
//! between hosts it is an assumption.

use serde::Serialize;
use sieve_core::recipe::ParallelismSection;

/// Bytes per second of all-reduces and all-gathers between GPUs of one host (NCCL's bus bandwidth), measured on two
/// H200s.
const HOST_RATE: f64 = 240e9;
/// Bytes per second of an exchange without overlap between four H200s (lab/rivals/bus.py).
const EXCHANGE_RATE: f64 = 316e9;
/// Bytes per second between hosts with one 400 Gb/s network card each: an assumption.
const NETWORK_RATE: f64 = 46e9;
/// Seconds that a step gets longer for each second of overlapped all-reduces and all-gathers, which take
/// multiprocessors and bandwidth from the model's kernels. Measured: 0.7 to 1.0 on two and four H200s
/// (lab/docs/scale.md).
const LENGTHENING: f64 = 0.8;

/// Number of ranks and hosts of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Ranks {
    /// Number of ranks of the run.
    pub size: usize,
    /// Number of hosts of the run.
    pub hosts: usize,
}

/// Bytes and seconds that a step spends on communication.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct RanksPlan {
    /// Number of ranks and hosts.
    pub ranks: Ranks,
    /// Number of ranks that divide what ZeRO shards; if not all do, every group of so many has a copy. 1 without ZeRO.
    pub num_shards: usize,
    /// Bytes of f32 gradients that each rank sends in a step (it receives as many): after the last micro-batch or, with
    /// ZeRO-2, after every one; without ZeRO twice as many, since an all-reduce also sends the sums. With copies of
    /// shards, the all-reduce of their sums too.
    pub sum_bytes: f64,
    /// Bytes of weights that each rank sends in a step, and of Muon's updates; it receives as many. 0 if each rank
    /// updates all of them.
    pub gather_bytes: f64,
    /// Seconds that a step spends on reducing gradients.
    pub sum_seconds: f64,
    /// Seconds that a step spends on gathering weights.
    pub gather_seconds: f64,
}

impl Ranks {
    /// One rank on one host.
    pub const ALONE: Self = Self { size: 1, hosts: 1 };

    /// Bytes per second of all-reduces and all-gathers.
    fn rate(self) -> f64 {
        match self.hosts {
            ..=1 => HOST_RATE,
            _ => NETWORK_RATE,
        }
    }

    /// Bytes per second between ranks that divide weights `num_shards` ways.
    fn rate_within(self, num_shards: usize) -> f64 {
        if (self.size / self.hosts.max(1)).is_multiple_of(num_shards) { HOST_RATE } else { self.rate() }
    }

    /// Communication of a model of `num_parameters` with weights of `value_bytes`, whose gradients are reduced over all
    /// ranks `num_sums` times per step, as `parallelism` divides them. A step gathers or exchanges `num_gathered`
    /// parameters, a weight that it gathers twice counted twice.
    pub(crate) fn together(
        self,
        num_parameters: u64,
        value_bytes: u64,
        num_sums: usize,
        num_gathered: u64,
        parallelism: &ParallelismSection,
    ) -> RanksPlan {
        let num_shards = parallelism.num_shards(self.size);
        let (rate, rate_within) = (self.rate(), self.rate_within(num_shards));
        // In a ring all-gather of n ranks each link carries every shard but one.
        let share = |ranks: usize| (ranks - 1) as f64 / ranks as f64;
        // Gradients are reduced in f32: scattered among the ranks that divide them, their shards all-reduced over the
        // others.
        let gradient_bytes = (num_sums as u64 * num_parameters * 4) as f64;
        let within = share(num_shards) * gradient_bytes;
        let across = 2.0 * share(self.size / num_shards) * gradient_bytes / num_shards as f64;
        let gather_bytes = share(num_shards) * (num_gathered * value_bytes) as f64;
        RanksPlan {
            ranks: self,
            num_shards,
            sum_bytes: within + across,
            gather_bytes,
            sum_seconds: within / rate_within + across / rate,
            gather_seconds: gather_bytes / rate_within,
        }
    }
}

impl RanksPlan {
    /// Seconds in which a rank receives `bytes` from the ranks that share its rows.
    pub(crate) fn row_seconds(&self, bytes: f64) -> f64 {
        match self.ranks.hosts {
            ..=1 => bytes / EXCHANGE_RATE,
            _ => bytes / NETWORK_RATE,
        }
    }

    /// Tokens per second of all ranks. One rank alone takes `step_seconds` for its `step_tokens`; of these,
    /// `update_seconds` are the optimizer's update, which the ranks divide among them with ZeRO.
    pub(crate) fn tokens_per_second(&self, step_tokens: f64, step_seconds: f64, update_seconds: f64) -> f64 {
        let size = self.ranks.size as f64;
        let saved = update_seconds * (1.0 - 1.0 / self.num_shards as f64);
        let together = LENGTHENING * (self.sum_seconds + self.gather_seconds);
        size * step_tokens / (step_seconds - saved + together)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// lab/docs/scale.md, lab/notes/experiments.md: four H200s, 8 rows of 2048 a micro-batch; tokens/s of one GPU and
    /// of four.
    #[test]
    fn measured_runs_on_several_gpus_are_met_within_three_percent() {
        for (parameters, size, micro_batches, alone, together) in [
            (1_512_432_640, 4, 1, 57_430.0, 221_615.0),
            (1_512_432_640, 4, 4, 58_987.0, 231_904.0),
            (123_000_000, 2, 1, 509_009.0, 974_817.0),
            (123_000_000, 4, 1, 509_009.0, 1_961_594.0),
        ] {
            let tokens = 16_384.0 * f64::from(micro_batches);
            let ranks = Ranks { size, hosts: 1 };
            // As `time::update_seconds` on an H200: 0.84 of its 4.8 TB/s.
            let update = crate::time::UPDATE_BYTES * parameters as f64 / (0.84 * 4.8e12);
            let plan = ranks.together(parameters, 2, 1, parameters, &ParallelismSection::default());
            let found = plan.tokens_per_second(tokens, tokens / alone, update);
            let ratio: f64 = found / together;
            assert!((ratio - 1.0).abs() < 0.03, "{size} GPUs, {parameters}: {ratio}");
        }
    }

    #[test]
    fn without_zero_gradients_are_all_reduced_and_each_rank_updates_all_weights() {
        let ranks = Ranks { size: 4, hosts: 1 };
        let stages = [0, 1].map(|zero_stage| ParallelismSection { zero_stage, ..Default::default() });
        let [none, one] = stages.map(|stage| ranks.together(1_000_000, 2, 1, 1_000_000, &stage));
        assert_eq!((none.sum_bytes, none.gather_bytes), (2.0 * one.sum_bytes, 0.0));
        assert_eq!(none.sum_seconds, 2.0 * one.sum_seconds);
        let step = 1.0 + LENGTHENING * none.sum_seconds;
        assert_eq!(none.tokens_per_second(1.0, 1.0, 0.5), 4.0 / step);
        assert!(one.tokens_per_second(1.0, 1.0, 0.5) > 6.0);
    }

    #[test]
    fn with_shards_inside_hosts_only_sums_are_sent_between_hosts() {
        let ranks = Ranks { size: 8, hosts: 2 };
        let of = |shard_ranks| ParallelismSection { zero_stage: 3, shard_ranks, ..Default::default() };
        let together = |shard_ranks| ranks.together(1_000_000, 2, 3, 5_000_000, &of(shard_ranks));
        let [all, inside, across] = [0, 4, 2].map(together);
        assert_eq!([all, inside, across].map(|plan| plan.num_shards), [8, 4, 2]);
        let bytes = |plan: RanksPlan| [plan.sum_bytes, plan.gather_bytes];
        assert_eq!(bytes(all), [3.0 * 4e6 * 7.0 / 8.0, 1e7 * 7.0 / 8.0]);
        // Each process sends three of four shards inside its host, and its own shard once to the other host.
        assert_eq!(bytes(inside), [3.0 * (4e6 * 3.0 / 4.0 + 1e6), 1e7 * 3.0 / 4.0]);
        assert_eq!(inside.gather_seconds, inside.gather_bytes / HOST_RATE);
        assert_eq!(inside.sum_seconds, 9e6 / HOST_RATE + 3e6 / NETWORK_RATE);
        assert_eq!(all.gather_seconds, all.gather_bytes / NETWORK_RATE);
        assert!(inside.sum_seconds < all.sum_seconds && across.sum_seconds > inside.sum_seconds);
        // Hosts of four processes do not hold whole groups of three.
        let odd = Ranks { size: 12, hosts: 3 }.together(1_000_000, 2, 1, 1_000_000, &of(3));
        assert_eq!(odd.gather_seconds, odd.gather_bytes / NETWORK_RATE);
    }
}
