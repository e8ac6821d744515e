//! Sharding beside everything that changes what a step keeps: each combination trains as one process does.
use crate::tiny_run::{TinyRun, succeed};
use std::fs;

/// Steps of each run.
const STEPS: u64 = 4;

/// Rows of a step.
const ROWS: usize = 8;

/// Number of processes of each run.
const RANKS: usize = 4;

/// Settings of the numbers in which a step computes and accumulates, and how far losses may be from one process's with
/// the same settings, relatively: micro-batches and parts of rows are added up in another order. fp8 rounds by the
/// largest magnitude of a micro-batch or part.
const NUMBERS: [(&str, &str, f64); 4] = [
    ("f32", "--set training.gradient_dtype=f32", 1e-5),
    ("bf16", "--set training.gradient_dtype=bf16", 1e-3),
    ("fp8", "--set training.precision=fp8", 3e-3),
    ("muon", "--set optimizer.name=Muon", 1e-4),
];

/// How the steps of a run are shared out.
#[derive(Clone, Copy)]
struct Shares {
    /// `parallelism.context_parallel_degree`.
    degree: usize,
    /// Micro-batches of each process.
    micro_batches: usize,
}

impl Shares {
    /// Trains by all processes and returns the name of the run's folder.
    fn train(self, tiny: &TinyRun, numbers: (&str, &str, f64), stage: usize, mode: &str) -> String {
        let Self { degree, micro_batches } = self;
        let (name, settings, _) = numbers;
        let out = format!("{name}-{degree}-{micro_batches}-{stage}-{mode}");
        let rows = ROWS / (RANKS / degree * micro_batches);
        let more = format!(
            "{settings} {} --set parallelism.zero_stage={stage} --set activation_checkpoint.mode={mode} \
             --set parallelism.context_parallel_degree={degree} --set training.local_batch_size={rows}",
            common()
        );
        succeed(&mut tiny.launch(RANKS, &out, &more));
        out
    }
}

/// Settings of all runs: an untied model, and clipping out of reach, so that some sums have one order for any number of
/// processes.
fn common() -> String {
    format!("{} --set training.steps={STEPS}", crate::train_ranks::UNTIED)
}

/// Asserts that the last checkpoints of two runs have the same files.
fn assert_same_files(tiny: &TinyRun, one: &str, other: &str) {
    for file in ["model", "optimizer"] {
        for part in 1..=RANKS {
            let [one, other] = [one, other].map(|run| {
                let file = format!("{run}/checkpoint/step-{STEPS}/{file}-{part:05}-of-{RANKS:05}.safetensors");
                fs::read(tiny.path(&file)).unwrap_or_else(|error| panic!("{file}: {error}"))
            });
            assert!(one == other, "{file} of rank {part}");
        }
    }
}

/// Asserts that all losses of a run are within a relative distance of those of one process.
fn assert_near(tiny: &TinyRun, out: &str, reference: &str, most: f64) {
    let [found, expected] = [out, reference].map(|run| tiny.metrics(run, "step"));
    assert!(found.keys().copied().eq(1..=STEPS), "{out}: {found:?}");
    for (step, line) in expected {
        let [found, expected] = [&found[&step], &line].map(|line| line["loss"].as_f64().expect("a number"));
        let distance = (found - expected).abs() / expected;
        assert!(distance <= most, "{out}: loss {found} of step {step}, and {expected} of one process");
    }
}

fn combinations_of(tiny: &TinyRun, numbers: (&str, &str, f64)) {
    let (name, settings, most) = numbers;
    let reference = format!("{name}-one");
    tiny.trained(&reference, &format!("{settings} {} --set training.local_batch_size=2", common()));
    for (degree, micro_batches) in [(1, 1), (1, 2), (2, 1), (2, 2)] {
        let shares = Shares { degree, micro_batches };
        let train = |stage, mode| shares.train(tiny, numbers, stage, mode);
        let base = train(2, "none");
        assert_near(tiny, &base, &reference, most);
        // Sharding and recomputing change no bit.
        for (stage, mode) in [(3, "none"), (3, "full"), (2, "full")] {
            assert_same_files(tiny, &train(stage, mode), &base);
        }
        // With ZeRO-1 micro-batches are added up before the ranks' gradients are.
        let first = train(1, "full");
        match micro_batches {
            1 => assert_same_files(tiny, &first, &base),
            _ => assert_near(tiny, &first, &reference, most),
        }
        // Each process has one of one process's micro-batches; bf16 rounds the sum after each micro-batch.
        if degree * micro_batches == 1 && name != "bf16" {
            tiny.assert_same_at(&base, &reference, STEPS);
        }
    }
}

#[test]
fn sharding_recomputation_and_parts_of_rows_train_as_one_process_in_every_combination() {
    let tiny = TinyRun::dma();
    // The text is tokenised once, before several runs read it.
    tiny.trained("first", &common());
    std::thread::scope(|scope| {
        for numbers in NUMBERS {
            let tiny = &tiny;
            scope.spawn(move || combinations_of(tiny, numbers));
        }
    });
}
