//! Measures every rank's device before the first step: FLOP/s of a GEMM, bandwidth of copies and of all-reduces.
use super::Group;
use crate::collectives::Collectives;
use crate::{Precision, TrainError};
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Tensor};
use serde::{Deserialize, Serialize};
use sieve_comm::{Mesh, Work};
use sieve_ops::{DeviceBackend, GpuState, TrainBackend};
use std::time::Instant;

/// A rank is slow if its rate is below this share of the median rate.
const LEAST_SHARE: f64 = 0.8;
/// Each rate is the best of this many tries, because other work on the host slows some of them.
const TRIES: usize = 5;
/// How often all ranks measure again if one seems slow, keeping their best rates.
const MORE_ROUNDS: usize = 3;

/// The measured rates of all ranks, in words.
#[derive(Clone, Debug, PartialEq)]
pub struct Health {
    /// The range of every rate over the ranks, in one line.
    pub line: String,
    /// A line for each rank that is slow or has memory errors.
    pub warnings: Vec<String>,
}

/// Rates of one rank, and the driver's report of its clocks and memory errors.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Rates {
    /// FLOP/s of a GEMM in the model's float type.
    gemm: f64,
    /// Bytes read and written per second by an elementwise op.
    copy: f64,
    /// Bus bandwidth of an all-reduce in bytes per second, as nccl-tests defines it.
    sum: f64,
    /// The rank's host name and process id.
    place: String,
    state: Option<GpuState>,
}

/// An operation and the rate at which this rank runs it.
struct Probe<'a> {
    /// FLOPs or bytes of one call of `work`.
    amount: f64,
    /// Runs the operation and waits until the device has done it.
    work: Box<dyn FnMut() -> Result<(), TrainError> + 'a>,
}

impl Probe<'_> {
    /// FLOPs or bytes per second in the best of [`TRIES`] calls, after a call that warms up.
    fn rate(&mut self, mesh: &Mesh) -> Result<f64, TrainError> {
        let mut best = f64::INFINITY;
        for number in 0..=TRIES {
            // All ranks begin at once, so that a shared bus or power supply is loaded as in a step.
            mesh.barrier()?;
            let began = Instant::now();
            (self.work)()?;
            if number > 0 {
                best = best.min(began.elapsed().as_secs_f64());
            }
        }
        Ok(self.amount / best)
    }
}

/// GEMM, copy and all-reduce of this rank. The sizes take a CPU a few milliseconds each, and keep a GPU busy long
/// enough to be measured.
fn probes<'a, B: TrainBackend>(
    collectives: &'a dyn Collectives<B>,
    num_ranks: usize,
    device: &'a B::Device,
    precision: Precision,
) -> [Probe<'a>; 3] {
    let (width, repeats, num_copied, num_summed) = match precision {
        Precision::F32 => (256, 1, 1 << 20, 1 << 16),
        Precision::Bf16 => (4096, 16, 1 << 26, 1 << 24),
    };
    let wait = move || {
        let done = B::InnerBackend::sync(device);
        done.map_err(|error| TrainError::Device(error.to_string()))
    };
    let matrix = Tensor::<B::InnerBackend, 2>::ones([width, width], device);
    let matrix = match precision {
        Precision::F32 => matrix,
        Precision::Bf16 => matrix.cast(DType::BF16),
    };
    let matrix = matrix.into_primitive().tensor();
    let gemm = move || {
        for _ in 0..repeats {
            let _gemm = B::InnerBackend::linear(matrix.clone(), matrix.clone(), None);
        }
        wait()
    };
    let values = Tensor::<B::InnerBackend, 1>::ones([num_copied], device);
    let copy = move || {
        for _ in 0..repeats {
            let _copy = values.clone().mul_scalar(2.0);
        }
        wait()
    };
    let sum = move || {
        let ones = Tensor::<B::InnerBackend, 1>::ones([num_summed], device);
        let _sums = collectives.sum(vec![(ones.into_primitive().tensor(), None)])?()?;
        wait()
    };
    // An f32 is read and written by a copy, 8 bytes; in a ring all-reduce, each link carries this share of the tensor.
    let share_per_link = 2.0 * (num_ranks as f64 - 1.0) / num_ranks as f64;
    [
        Probe { amount: 2.0 * (width as f64).powi(3) * f64::from(repeats), work: Box::new(gemm) },
        Probe { amount: 8.0 * num_copied as f64 * f64::from(repeats), work: Box::new(copy) },
        Probe { amount: 4.0 * num_summed as f64 * share_per_link, work: Box::new(sum) },
    ]
}

impl<B: TrainBackend> Group<B> {
    /// Measures the devices of all ranks at the same time and compares them. `state` queries this rank's driver,
    /// directly after the GEMMs.
    ///
    /// # Errors
    /// A rank is lost, or a device fails.
    pub fn health(
        &self,
        device: &B::Device,
        precision: Precision,
        state: &dyn Fn() -> Option<GpuState>,
    ) -> Result<Health, TrainError> {
        let collectives = self.collectives.as_ref();
        let probes = probes::<B>(collectives, self.share().size, device, precision);
        // From here on the other ranks report this one if its device hangs.
        self.mesh.set_work(Work::Long);
        let health = measure(&self.mesh, probes, state)?;
        self.mesh.set_work(Work::Any);
        Ok(health)
    }
}

/// Measures this rank's rates and gathers all ranks' rates, up to [`MORE_ROUNDS`] times more while a rank seems slow.
fn measure(
    mesh: &Mesh,
    mut probes: [Probe<'_>; 3],
    state: &dyn Fn() -> Option<GpuState>,
) -> Result<Health, TrainError> {
    let mut own = Rates { gemm: 0.0, copy: 0.0, sum: 0.0, place: sieve_comm::place(), state: None };
    for round in 0.. {
        let [gemm, copy, sum] = &mut probes;
        own.gemm = own.gemm.max(gemm.rate(mesh)?);
        // Read right after a load, since clocks fall when the device is idle.
        own.state = state();
        own.copy = own.copy.max(copy.rate(mesh)?);
        own.sum = own.sum.max(sum.rate(mesh)?);
        let all = super::gather_data(mesh, &own)?;
        // All ranks see the same rates, so all of them measure again or none does.
        if round == MORE_ROUNDS || slow_ranks(&all).is_empty() {
            return Ok(Health { line: line_of(&all), warnings: warnings_of(&all) });
        }
    }
    unreachable!("the rounds end above")
}

/// The slow ranks, each with its rate and the median rate in words.
fn slow_ranks(all: &[Rates]) -> Vec<(usize, String)> {
    type Rate = fn(&Rates) -> f64;
    let kinds = [("GEMM", (|rates| rates.gemm / 1e12) as Rate, "TFLOP/s"), ("copy", |rates| rates.copy / 1e9, "GB/s")];
    let mut found = Vec::new();
    for (what, rate, unit) in kinds {
        let mut sorted = all.iter().map(rate).collect::<Vec<_>>();
        sorted.sort_by(f64::total_cmp);
        // The upper median: of two ranks, the faster one.
        let median = sorted[sorted.len() / 2];
        for (rank, rates) in all.iter().enumerate() {
            let own = rate(rates);
            if own < LEAST_SHARE * median {
                let words = format!("{what} {own:.3} {unit}, the median {median:.3} ({:.2})", own / median);
                found.push((rank, words));
            }
        }
    }
    found
}

/// A warning for each rank that is slow, then for each whose GPU had memory errors.
fn warnings_of(all: &[Rates]) -> Vec<String> {
    let mut warnings = Vec::new();
    for (rank, words) in slow_ranks(all) {
        let Rates { place, state, .. } = &all[rank];
        let state = state.map(|state| words_of(&state)).unwrap_or_default();
        warnings.push(format!("warning: rank {rank} ({place}) is slow: {words}{state}; every step waits for it"));
    }
    for (rank, rates) in all.iter().enumerate() {
        let errors = rates.state.and_then(|state| state.uncorrected_ecc_errors).unwrap_or(0);
        if errors > 0 {
            let place = &rates.place;
            warnings.push(format!(
                "warning: rank {rank} ({place}): {errors} memory errors that ECC could not correct since the driver \
                 was loaded"
            ));
        }
    }
    warnings
}

/// Clock and temperature as the end of a sentence; a value that the driver does not report is left out.
fn words_of(state: &GpuState) -> String {
    let clocks = state.clocks_mhz.map(|[now, most]| format!(", clock {now} of {most} MHz"));
    let degrees = state.temperature.map(|degrees| format!(", {degrees} degrees C"));
    clocks.unwrap_or_default() + &degrees.unwrap_or_default()
}

/// One line about all ranks: the range of each rate, and the state of the first rank's GPU.
fn line_of(all: &[Rates]) -> String {
    let range = |rate: &dyn Fn(&Rates) -> f64, digits: usize| {
        let rates = all.iter().map(rate);
        let (least, most) = rates.fold((f64::INFINITY, 0.0), |(least, most), rate| (rate.min(least), rate.max(most)));
        format!("{least:.digits$} to {most:.digits$}")
    };
    let first = all.first().and_then(|rates| rates.state).unwrap_or_default();
    format!(
        "health: {} ranks, each GEMM {} TFLOP/s, copy {} GB/s; all-reduce {} GB/s{}",
        all.len(),
        range(&|rates| rates.gemm / 1e12, 3),
        range(&|rates| rates.copy / 1e9, 1),
        range(&|rates| rates.sum / 1e9, 2),
        words_of(&first)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::HostCollectives;
    use burn::backend::Autodiff;
    use burn_flex::{Flex, FlexDevice};
    use sieve_comm::{ReservedPort, Timeouts, World};
    use std::sync::Arc;
    use std::time::Duration;

    /// The health of three ranks on the CPU, with this pause in each GEMM of rank 1.
    fn health_of_three(pause: Duration) -> Health {
        let port = ReservedPort::take().expect("a port");
        let rank = |rank: usize| {
            let world = World::on_this_host(rank, 3, port.number());
            let mesh = Arc::new(Mesh::join(world, "1", Timeouts::default(), |_| {}).expect("three ranks"));
            let collectives = HostCollectives::new(mesh.clone(), 0);
            let [mut gemm, copy, sum] = probes::<Autodiff<Flex>>(&collectives, 3, &FlexDevice, Precision::F32);
            if rank == 1 && pause > Duration::ZERO {
                let mut work = gemm.work;
                gemm.work = Box::new(move || {
                    std::thread::sleep(pause);
                    work()
                });
            }
            let health = measure(&mesh, [gemm, copy, sum], &|| None).expect("all are well");
            mesh.leave();
            health
        };
        std::thread::scope(|scope| {
            let others = [1, 2].map(|other| scope.spawn(move || rank(other)));
            let first = rank(0);
            for other in others {
                assert_eq!(other.join().expect("no panic"), first, "all ranks say the same");
            }
            first
        })
    }

    #[test]
    fn a_rank_whose_gemms_are_slow_is_named() {
        let health = health_of_three(Duration::from_millis(100));
        let slow = health.warnings.iter().filter(|line| line.contains("GEMM")).collect::<Vec<_>>();
        assert!(slow.len() == 1 && slow[0].starts_with("warning: rank 1 ("), "{health:?}");
        assert!(health.line.starts_with("health: 3 ranks, each GEMM 0."), "{health:?}");
    }

    fn rates(gemm: f64, copy: f64, errors: u64) -> Rates {
        Rates {
            gemm,
            copy,
            sum: 1e11,
            place: "host a, pid 7".to_owned(),
            state: Some(GpuState {
                clocks_mhz: Some([1200, 1980]),
                uncorrected_ecc_errors: Some(errors),
                temperature: Some(81),
            }),
        }
    }

    #[test]
    fn a_rate_below_four_fifths_of_the_median_and_memory_errors_give_warnings() {
        let slow = |all: [[f64; 2]; 4]| {
            let all = all.map(|[gemm, copy]| rates(gemm * 1e12, copy * 1e9, 0));
            let slow = slow_ranks(&all).into_iter();
            slow.map(|(rank, _)| rank).collect::<Vec<_>>()
        };
        // TFLOP/s of the GEMM, GB/s of the copy. Four fifths of these rates are 480 and 3200.
        let well = [600.0, 4000.0];
        assert_eq!(slow([well, [481.0, 3300.0], well, well]), [0; 0]);
        assert_eq!(slow([well, well, [479.0, 4000.0], well]), [2]);
        assert_eq!(slow([well, [600.0, 3000.0], [300.0, 4000.0], well]), [2, 1]);
        // A rank with a rate of 0 is slow.
        assert_eq!(slow([[0.0, 4000.0], well, well, well]), [0]);
        let warnings = warnings_of(&[rates(6e14, 4e12, 0), rates(3e14, 4e12, 2)]);
        let [slow, errors] = &warnings[..] else {
            panic!("{warnings:?}");
        };
        assert_eq!(
            slow,
            "warning: rank 1 (host a, pid 7) is slow: GEMM 300.000 TFLOP/s, the median 600.000 (0.50), clock 1200 of \
             1980 MHz, 81 degrees C; every step waits for it"
        );
        assert!(errors.starts_with("warning: rank 1 (host a, pid 7): 2 memory errors"), "{errors}");
    }
}
