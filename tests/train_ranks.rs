//! Several ranks train as one process would: the same rows, steps and weights.
use crate::tiny_run::{TinyRun, spawned, wait_until};
use crate::train_guard::{B, Outcome, Transport, at, disturbed, disturbed_rank, of_step, unlabelled, wrong_loss};
use burn_flex::FlexTensor;
use sieve_comm::{Mesh, Pieces, ReservedPort, ShardGroup, Timeouts, World};
use sieve_train::{Collectives, Exchanged, FaultInjection, Gathered, HostCollectives, Moment, Pending, TrainError};
use std::io::{BufRead, BufReader};
use std::process::{Child, Command};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Settings with which several processes reach the same bits as one: an untied model, and clipping that never acts.
/// Otherwise the sums over a tied embedding's two gradients, and over the squares of the norm, would have another
/// order.
pub(crate) const UNTIED: &str = "--set model.tie_word_embeddings=false --set training.max_norm=1e9";

impl TinyRun {
    /// The command `sieve launch` with `nproc` processes that train the recipe into `out`.
    pub(crate) fn launch(&self, nproc: usize, out: &str, more: &str) -> Command {
        self.sieve(&format!("launch --nproc {nproc} -- train --recipe tiny.toml --device cpu --out {out} {more}"))
    }
}

/// Starts `command` and waits until it has logged `step`.
pub(crate) fn started(command: &mut Command, step: u64) -> Child {
    let mut child = spawned(command);
    let output = child.stdout.take().expect("piped");
    let mut lines = BufReader::new(output).lines().map_while(Result::ok);
    let line = format!("step: {step:>5} ");
    let found = lines.any(|found| found.starts_with(&line));
    assert!(found, "{command:?} ended before step {step}");
    // The output must be read on, or the process would block on a full pipe.
    std::thread::spawn(move || lines.for_each(drop));
    child
}

/// A run of the tiny recipe into `out` by two ranks, which are threads or processes of these tests.
#[derive(Clone, Copy)]
pub(crate) struct Pair<'a> {
    pub(crate) tiny: &'a TinyRun,
    pub(crate) out: &'a str,
    pub(crate) overrides: &'a [&'a str],
    pub(crate) transport: Transport,
}

impl<'a> Pair<'a> {
    pub(crate) fn new(tiny: &'a TinyRun, out: &'a str, overrides: &'a [&'a str]) -> Self {
        Self { tiny, out, overrides, transport: |mesh| Box::new(HostCollectives::new(mesh, 0)) }
    }

    /// Connects `rank` with the other rank.
    pub(crate) fn join(rank: usize, port: u16, timeouts: Timeouts) -> Arc<Mesh> {
        let world = World::on_this_host(rank, 2, port);
        Arc::new(Mesh::join(world, "1", timeouts, |_| {}).expect("two ranks"))
    }

    /// Trains as the rank that `mesh` connects.
    pub(crate) fn train(&self, mesh: Arc<Mesh>, disturbance: FaultInjection) -> Outcome {
        let group = Some((mesh, self.transport));
        disturbed_rank(self.tiny, self.out, self.overrides, disturbance, group)
    }

    /// Trains with two threads as ranks; each has its own fault.
    pub(crate) fn run(&self, disturbances: [FaultInjection; 2]) -> [Outcome; 2] {
        self.run_within(disturbances, Default::default(), &Default::default())
    }

    /// As [`run`](Self::run), with timeouts for each rank. Stores the connections of each rank in `meshes`.
    fn run_within(
        &self,
        disturbances: [FaultInjection; 2],
        timeouts: [Timeouts; 2],
        meshes: &[OnceLock<Arc<Mesh>>; 2],
    ) -> [Outcome; 2] {
        let port = ReservedPort::take().expect("a port");
        let outcome = |rank: usize| {
            let mesh = meshes[rank].get_or_init(|| Self::join(rank, port.number(), timeouts[rank]));
            let outcome = self.train(mesh.clone(), disturbances[rank].clone());
            mesh.leave();
            outcome
        };
        std::thread::scope(|scope| {
            let second = scope.spawn(|| outcome(1));
            let first = outcome(0);
            [first, second.join().expect("no panic")]
        })
    }
}

/// As [`Pair::run`], in a new folder.
fn two_ranks(overrides: &[&str], disturbances: [FaultInjection; 2]) -> [Outcome; 2] {
    Pair::new(&TinyRun::dma(), "run", overrides).run(disturbances)
}

#[test]
fn a_nan_loss_of_one_rank_is_judged_alike_by_all() {
    for overrides in [
        &["training.steps=16", "lr_scheduler.decay_ratio=0"][..],
        &["training.steps=16", "lr_scheduler.decay_ratio=0", "parallelism.zero_stage=2", "training.local_batch_size=2"],
    ] {
        judged_alike(overrides);
    }
}

fn judged_alike(overrides: &[&str]) {
    // Steps begin with rows 0, 8, 16, …: the seventh step has a NaN loss, and after the checkpoint of step 8 three
    // steps in a row have a NaN loss.
    let wrong = wrong_loss(|row| match row {
        48 | 72..=88 => f64::NAN,
        _ => 1.0,
    });
    let [first, second] = two_ranks(overrides, [FaultInjection::default(), wrong]);
    for outcome in [&first, &second] {
        let summary = outcome.result.as_ref().expect("it goes on");
        assert_eq!(summary.step, 16);
        let skipped = outcome.skipped.iter().map(|step| step.step).collect::<Vec<_>>();
        assert_eq!(skipped, [7, 10, 11, 12]);
        let back = outcome.notices.iter().filter(|line| line.contains("back from step 12"));
        assert_eq!(back.count(), 1, "{:?}", outcome.notices);
    }
    assert!(first.weights == second.weights);
    // Rank 0 reports the rows and documents of both ranks.
    let skipped = &first.skipped[0];
    assert_eq!((skipped.first_row, skipped.num_rows), (48, 8));
    assert!(skipped.num_documents > 0 && second.skipped[0].num_documents == 0);
}

#[test]
fn ranks_that_compute_with_other_weights_are_named_and_write_nothing() {
    // The weights of one rank change after the checkpoint of step 4, which is kept.
    let wrong = of_step(|row, step| step.weights = if row == 48 { 1.0 + 1e-6 } else { 1.0 });
    for disturbed in [0, 1] {
        let mut disturbances = <[FaultInjection; 2]>::default();
        disturbances[disturbed] = wrong.clone();
        for outcome in two_ranks(&["training.steps=12"], disturbances) {
            let error = outcome.result.expect_err("their weights differ").to_string();
            assert!(error.contains("ranks 0 and 1 differ at step 8"), "{error}");
            assert!(outcome.checkpoints.iter().all(|name| name == "step-4"));
        }
    }
}

#[test]
fn a_step_without_a_label_is_skipped_by_all_ranks() {
    let steps = &["training.steps=12", "lr_scheduler.decay_ratio=0"];
    let [first, second] = two_ranks(steps, [(); 2].map(|()| unlabelled(16..32)));
    for outcome in [&first, &second] {
        assert_eq!(outcome.result.as_ref().expect("it continues").step, 12);
        let passed = ["step 3: rows 16 to 23 hold no token with a label", "step 4: rows 24 to 31"];
        for words in passed {
            assert!(outcome.notices.iter().any(|line| line.contains(words)), "{:?}", outcome.notices);
        }
    }
    assert!(first.weights == second.weights && first.losses.len() == 10);
    // If only one rank's rows lack labels, no step is skipped.
    let [first, second] = two_ranks(steps, [unlabelled(16..32), FaultInjection::default()]);
    assert!(first.weights == second.weights && first.losses.len() == 12);
}

/// Makes the transport of rank 1 fail.
static IS_CUT: AtomicBool = AtomicBool::new(false);

struct Cut(HostCollectives);

impl Collectives<B> for Cut {
    fn shard_group(&self) -> ShardGroup {
        Collectives::<B>::shard_group(&self.0)
    }

    fn sum(&self, tensors: Vec<(FlexTensor, Option<Pieces>)>) -> Result<Pending<B>, TrainError> {
        if self.0.mesh.world().rank == 1 && IS_CUT.load(Ordering::Acquire) {
            Err(TrainError::Collective("the wire is cut".to_owned()))
        } else {
            Collectives::<B>::sum(&self.0, tensors)
        }
    }

    fn gather(&self, tensors: Vec<Gathered<B>>) -> Result<Pending<B>, TrainError> {
        Collectives::<B>::gather(&self.0, tensors)
    }

    fn exchange(&self, exchanged: Exchanged<B>) -> Result<Pending<B>, TrainError> {
        Collectives::<B>::exchange(&self.0, exchanged)
    }
}

#[test]
fn the_error_of_a_rank_that_writes_a_checkpoint_reaches_rank_0() {
    let tiny = TinyRun::dma();
    let pair = Pair {
        transport: |mesh| Box::new(Cut(HostCollectives::new(mesh, 0))),
        ..Pair::new(&tiny, "run", &["training.steps=12"])
    };
    let port = ReservedPort::take().expect("a port");
    let cut = at("files", 4, || {
        IS_CUT.store(true, Ordering::Release);
        std::thread::sleep(Duration::from_millis(500));
    });
    let error = |rank: usize, disturbance: FaultInjection| {
        let mesh = Pair::join(rank, port.number(), Timeouts::default());
        let error = pair.train(mesh.clone(), disturbance).result.expect_err("a rank fails");
        // The program also sends its error to the other ranks.
        mesh.fail(&error.to_string());
        error.to_string()
    };
    std::thread::scope(|scope| {
        let second = scope.spawn(|| error(1, cut));
        let first = error(0, FaultInjection::default());
        assert!(first.contains("the wire is cut") && first.contains("rank 1"), "{first}");
        assert!(second.join().expect("no panic").contains("the wire is cut"));
    });
    assert!(tiny.names("run/checkpoint").is_empty());
}

#[test]
fn a_rank_that_computes_other_gradients_is_named() {
    // The tenth step begins with row 72.
    let wrong = |times: u32| {
        let left = Arc::new(AtomicU32::new(times));
        FaultInjection::new(move |row, moment| {
            let one_less = |left: u32| left.checked_sub(1);
            if let (Moment::Replay(loss_scale), 72) = (moment, row)
                && left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less).is_ok()
            {
                *loss_scale *= 1.0 + 1e-6;
            }
        })
    };
    let overrides = &["training.steps=16", "training.guard_replay=5"];
    for (times, words) in [
        // Wrong in one replay: in the next, rank 1 differs from itself.
        (1, "the gradients of rank 1 of one micro-batch, which all ranks computed before step 10, are wrong"),
        // Wrong in two replays: rank 1 agrees with itself and not with rank 0, and neither is known to be right.
        (2, "the gradients of ranks 0, 1 of one micro-batch"),
    ] {
        for outcome in two_ranks(overrides, [FaultInjection::default(), wrong(times)]) {
            let error = outcome.result.expect_err("a device computes wrong").to_string();
            assert!(error.contains(words), "{error}");
            assert_eq!(outcome.checkpoints.last().map_or("step-8", String::as_str), "step-8");
        }
    }
    let tiny = TinyRun::dma();
    let alone = disturbed(&tiny, "alone", overrides, wrong(1));
    let error = alone.result.expect_err("another gradient the second time").to_string();
    assert!(error.contains("the gradients of rank 0 of one micro-batch"), "{error}");
    // A replay changes no weight.
    let steps = "training.steps=16";
    let [with, without] = [&[steps, "training.guard_replay=1"][..], &[steps]].map(|overrides| {
        let [first, _] = two_ranks(overrides, Default::default());
        first.result.expect("all is well");
        first.weights
    });
    assert!(with == without);
}

/// Cases of a rank that hangs: (place, number, limit in seconds), with place and number as in [`at`]. The limit is of a
/// step's progress in ("step", 16), and of longer work otherwise: reading files in the first step, validation before
/// the first step and after the fourth, and the first checkpoint's files and name.
const STANDING: [(&str, u64, u64); 6] =
    [("step", 0, 2), ("step", 16, 5), ("validation", 0, 2), ("validation", 4, 2), ("files", 4, 2), ("name", 4, 2)];

/// Asserts that both ranks end with an error that names the rank that hangs, before a checkpoint is written.
fn assert_named(still: usize, (place, number, seconds): (&'static str, u64, u64)) {
    // The rank hangs until the other one's report of that has reached it, so that the test depends on no sleep. Before,
    // it could still write a checkpoint, and a whole one, because the other rank had sent all that belongs to it.
    let meshes = Arc::new(<[OnceLock<Arc<Mesh>>; 2]>::default());
    let own = meshes.clone();
    let mut disturbances = <[FaultInjection; 2]>::default();
    disturbances[still] = at(place, number, move || {
        let is_reported = || own[still].get().is_some_and(|mesh| mesh.check().is_err());
        wait_until("the rank is reported as hanging", is_reported);
    });
    // Only the limit for the hanging rank is short: on a busy machine the other rank must not be named.
    let mut timeouts = <[Timeouts; 2]>::default();
    let limit = match (place, number) {
        ("step", 16) => &mut timeouts[still].silence,
        _ => &mut timeouts[still].long,
    };
    *limit = Duration::from_secs(seconds);
    let overrides = &["training.steps=12", "validation.interval=4"];
    for outcome in Pair::new(&TinyRun::dma(), "run", overrides).run_within(disturbances, timeouts, &meshes) {
        let error = outcome.result.expect_err("a rank does not go on").to_string();
        let words = [format!("rank {still} ("), format!("made no progress for {seconds} s")];
        let case = format!("{place} {number}, rank {still}");
        assert!(words.iter().all(|words| error.contains(words)), "{case}: {error}");
        assert!(outcome.checkpoints.is_empty(), "{case}");
    }
}

#[test]
fn a_rank_that_lives_and_stands_still_is_named_in_each_phase() {
    std::thread::scope(|scope| {
        for still in [0, 1] {
            for standing in STANDING {
                scope.spawn(move || assert_named(still, standing));
            }
        }
    });
}
