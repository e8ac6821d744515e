//! `kill -9` of one of two or four ranks with divided weights, before its part of a collective of a step: the others
//! wait inside that collective, must name the rank, and any number of processes must continue the run.
use crate::killed_rank::{kill_at_its_place, start, told, wait_for_the_end};
use crate::tiny_run::{TinyRun, succeed};
use crate::train_guard::{B, Outcome, Transport, at, disturbed_rank};
use burn::tensor::TensorMetadata;
use burn_flex::FlexTensor;
use sieve_comm::{Mesh, Pieces, ReservedPort, ShardGroup, Timeouts, World};
use sieve_train::{Collectives, Exchanged, FaultInjection, Gathered, HostCollectives, Pending, TrainError};
use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// Cases: rank that is killed, number of ranks, kind of the collective of the seventh step in which it is killed, which
/// collective of that kind in the step (from 1), number of processes that continue.
///
/// With four blocks a micro-batch gathers embedding, blocks and head, then three blocks again, and sums the gradients
/// of six segments. "norm" is the sum between the last micro-batch and the update; "exchange" is of Muon, inside the
/// update; "files" is the checkpoint behind the step.
const CASES: [(usize, usize, &str, u32, usize); 12] = [
    // The embedding, which nothing overlaps with; the head; the first block that is gathered again.
    (0, 2, "gather", 1, 1),
    (3, 4, "gather", 6, 2),
    (1, 4, "gather", 7, 1),
    // A block of the second micro-batch.
    (1, 2, "gather", 12, 4),
    (2, 4, "sum", 1, 1),
    (0, 4, "sum", 6, 2),
    (1, 2, "sum", 9, 1),
    (0, 2, "norm", 1, 4),
    (3, 4, "norm", 1, 1),
    (1, 2, "exchange", 1, 1),
    (2, 4, "exchange", 2, 2),
    (1, 4, "files", 1, 2),
];

const STEPS: u64 = 8;

/// The seventh step's first row.
const ROW: u64 = 48;

/// Settings of all runs, for a number of ranks: two micro-batches of a step on each.
fn overrides(size: usize, optimizer: &str) -> Vec<String> {
    let rows = 4 / size;
    let all = format!(
        "model.num_hidden_layers=4 model.tie_word_embeddings=false training.max_norm=1e9 training.steps={STEPS} \
         validation.interval={STEPS} parallelism.zero_stage=3 activation_checkpoint.mode=full \
         training.local_batch_size={rows} optimizer.name={optimizer}"
    );
    all.split_whitespace().map(str::to_owned).collect()
}

/// Whether the step has begun in which this process is killed.
static IS_IN_STEP: AtomicBool = AtomicBool::new(false);
/// How many collectives of the step were of the kind in which this process is killed.
static NUM_BEGUN: AtomicU32 = AtomicU32::new(0);

/// Waits to be killed before a collective.
struct Killed(HostCollectives);

impl Killed {
    fn begin(&self, collective: &str) {
        let told = told();
        let [.., wanted, number, _] = &told[..] else {
            panic!("{told:?}");
        };
        if IS_IN_STEP.load(Ordering::Acquire) && collective == wanted {
            let begun = NUM_BEGUN.fetch_add(1, Ordering::AcqRel) + 1;
            if begun == number.parse::<u32>().expect("a number") {
                wait_for_the_end();
            }
        }
    }
}

impl Collectives<B> for Killed {
    fn shard_group(&self) -> ShardGroup {
        Collectives::<B>::shard_group(&self.0)
    }

    fn sum(&self, tensors: Vec<(FlexTensor, Option<Pieces>)>) -> Result<Pending<B>, TrainError> {
        // Loss and squared norm.
        let is_norm = matches!(&tensors[..], [(values, None)] if values.shape().num_elements() == 2);
        self.begin(if is_norm { "norm" } else { "sum" });
        Collectives::<B>::sum(&self.0, tensors)
    }

    fn gather(&self, tensors: Vec<Gathered<B>>) -> Result<Pending<B>, TrainError> {
        self.begin("gather");
        Collectives::<B>::gather(&self.0, tensors)
    }

    fn exchange(&self, exchanged: Exchanged<B>) -> Result<Pending<B>, TrainError> {
        self.begin("exchange");
        Collectives::<B>::exchange(&self.0, exchanged)
    }
}

/// Trains as `rank` of `size` ranks that meet at a port.
fn train(
    tiny: &TinyRun,
    out: &str,
    ([rank, size], port, optimizer): ([usize; 2], u16, &str),
    disturbance: Option<FaultInjection>,
) -> Outcome {
    let world = World::on_this_host(rank, size, port);
    let mesh = Arc::new(Mesh::join(world, "1", Timeouts::default(), |_| {}).expect("all ranks"));
    let overrides = overrides(size, optimizer);
    let overrides = overrides.iter().map(String::as_str).collect::<Vec<_>>();
    let transport: Transport = match disturbance {
        Some(_) => |mesh| Box::new(Killed(HostCollectives::new(mesh, 0))),
        None => |mesh| Box::new(HostCollectives::new(mesh, 0)),
    };
    let group = Some((mesh.clone(), transport));
    let outcome = disturbed_rank(tiny, out, &overrides, disturbance.unwrap_or_default(), group);
    mesh.leave();
    outcome
}

/// Runs in the process to be killed. Its arguments behind the folders: rank, number of ranks, port, collective, which
/// of them in the step, optimizer.
#[test]
#[ignore = "a part of a_rank_killed_inside_a_collective_is_named_and_any_number_continues"]
fn the_rank_that_is_killed_inside() {
    let told = told();
    let [folder, out, rank, size, port, collective, _, optimizer] = &told[..] else {
        panic!("{told:?}");
    };
    let tiny = TinyRun::of_another(folder.into());
    let [rank, size] = [rank, size].map(|number| number.parse::<usize>().expect("a number"));
    let disturbance = match collective.as_str() {
        // The checkpoint's files of the last step.
        "files" => at("files", STEPS, wait_for_the_end),
        _ => at("step", ROW, || IS_IN_STEP.store(true, Ordering::Release)),
    };
    let place = ([rank, size], port.parse().expect("a port"), optimizer.as_str());
    let _ = train(&tiny, out, place, Some(disturbance));
    panic!("the run ended before this process was killed");
}

/// Trains by threads as all ranks but `killed`, which `process` is; it is killed when it is at its place.
fn run(tiny: &TinyRun, out: &str, size: usize, optimizer: &str, killed: Option<(usize, &str, u32)>) -> Vec<Outcome> {
    let port = ReservedPort::take().expect("a port");
    let process = killed.map(|(rank, collective, number)| {
        let own_name = "train_ranks_killed_inside::the_rank_that_is_killed_inside";
        let numbers = [rank, size, port.number().into()].map(|number| number.to_string());
        let which = [collective.to_owned(), number.to_string(), optimizer.to_owned()];
        start(tiny, own_name, out, &[numbers, which].concat())
    });
    std::thread::scope(|scope| {
        let others = (0..size).filter(|rank| killed.is_none_or(|(killed, ..)| killed != *rank));
        let others = others.map(|rank| {
            let port = port.number();
            scope.spawn(move || train(tiny, out, ([rank, size], port, optimizer), None))
        });
        let others = others.collect::<Vec<_>>();
        if let Some(process) = process {
            kill_at_its_place(process, tiny, out, || others.iter().all(|other| !other.is_finished()));
        }
        others.into_iter().map(|other| other.join().expect("no panic")).collect()
    })
}

fn kill_and_continue(tiny: &TinyRun, case: (usize, usize, &str, u32, usize)) {
    let (rank, size, collective, number, count) = case;
    let optimizer = if collective == "exchange" { "Muon" } else { "AdamW" };
    let out = format!("killed-{rank}-of-{size}-{collective}-{number}");
    for outcome in run(tiny, &out, size, optimizer, Some((rank, collective, number))) {
        let error = outcome.result.expect_err("a rank is lost").to_string();
        let words = format!("rank {rank} (");
        assert!(error.contains(&words) && error.contains("ended"), "{out}: {error}");
    }
    // The checkpoint of step 4 has its name, unless it was still being written.
    let found = sieve_hf::list_checkpoints(&tiny.path(&format!("{out}/checkpoint"))).unwrap_or_default();
    assert!(found.iter().all(|(step, _)| *step == 4), "{out}: {found:?}");

    let reference = format!("reference-{size}-{optimizer}");
    if count == size {
        for outcome in run(tiny, &out, size, optimizer, None) {
            assert_eq!(outcome.result.expect("it goes on").step, STEPS, "{out}");
        }
        for file in ["model", "optimizer"] {
            let of = |run: &str, part: usize| {
                tiny.path(&format!("{run}/checkpoint/step-{STEPS}/{file}-{part:05}-of-{size:05}.safetensors"))
            };
            let read = |path| fs::read(&path).unwrap_or_else(|error| panic!("{path:?}: {error}"));
            let is_same = (1..=size).all(|part| read(of(&out, part)) == read(of(&reference, part)));
            assert!(is_same, "{out}: {file}");
        }
        return;
    }
    // Another number of processes adds up in another order.
    let sets = overrides(count, optimizer).into_iter().map(|set| format!("--set {set} "));
    let sets = sets.collect::<String>();
    let corpus = tiny.path("corpus/*.txt");
    let train = format!(
        "train --recipe tiny.toml --device cpu --out {out} --resume {sets} --set data.paths=[\"{}\"]",
        corpus.display()
    );
    let launch = if count == 1 { train } else { format!("launch --nproc {count} -- {train}") };
    succeed(&mut tiny.sieve(&launch));
    let [found, expected] = [&out, &reference].map(|run| tiny.metrics(run, "step"));
    assert!(found.keys().copied().eq(1..=STEPS), "{out}: {found:?}");
    for (step, line) in expected {
        let [found, expected] = [&found[&step], &line].map(|line| line["loss"].as_f64().expect("a number"));
        assert!((found - expected).abs() <= 1e-4 * expected, "{out}: loss {found} of step {step}, not {expected}");
    }
}

#[test]
fn a_rank_killed_inside_a_collective_is_named_and_any_number_continues() {
    let tiny = TinyRun::dma();
    for (size, optimizer) in [(2, "AdamW"), (4, "AdamW"), (2, "Muon"), (4, "Muon")] {
        for outcome in run(&tiny, &format!("reference-{size}-{optimizer}"), size, optimizer, None) {
            outcome.result.expect("it ends");
        }
    }
    // A few cases at a time: a case is as many threads and processes as it has ranks.
    for cases in CASES.chunks(4) {
        std::thread::scope(|scope| {
            for case in cases {
                let tiny = &tiny;
                scope.spawn(move || kill_and_continue(tiny, *case));
            }
        });
    }
}
