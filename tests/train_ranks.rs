//! Several processes train what one would: the same rows, steps and weights.
use crate::tiny_run::{STEPS, TinyRun, signal, succeed, text};
use crate::train_guard::{Outcome, disturbed_rank};
use sieve_comm::{Mesh, Patience, World};
use sieve_train::Disturbance;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

/// An untied model, with clipping out of reach: one process adds the two parts of a tied embedding's gradient, and the
/// squares of a norm, in another order than several do.
pub(crate) const UNTIED: &str = "--set model.tie_word_embeddings=false --set training.max_norm=1e9";

impl TinyRun {
    /// `sieve launch` of as many processes that train the recipe into `out`.
    pub(crate) fn launch(&self, nproc: usize, out: &str, more: &str) -> Command {
        self.sieve(&format!(
            "launch --nproc {nproc} -- train --recipe tiny.toml --device cpu --out {out} {more}"
        ))
    }
}

/// Starts `command` and waits until it has logged this step.
pub(crate) fn started(command: &mut Command, step: u64) -> Child {
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("the program starts");
    let output = child.stdout.take().expect("piped");
    let mut lines = BufReader::new(output).lines().map_while(Result::ok);
    let line = format!("step: {step:>5} ");
    let found = lines.any(|found| found.starts_with(&line));
    assert!(found, "{command:?} ended before step {step}");
    // Read on, or the process would wait for room in the pipe.
    std::thread::spawn(move || lines.for_each(drop));
    child
}

#[test]
fn two_processes_end_with_the_weights_of_one_to_the_last_bit() {
    let tiny = TinyRun::dma();
    tiny.trained("of-1", UNTIED);
    let said = succeed(&mut tiny.launch(2, "of-2", UNTIED));
    assert!(said.contains("2 processes, each on the CPU"), "{said}");
    assert_eq!(said.matches("step:     1 ").count(), 1, "{said}");
    tiny.assert_same_end("of-2", "of-1");
    for kind in ["step", "validation"] {
        let (found, expected) = (tiny.metrics("of-2", kind), tiny.metrics("of-1", kind));
        assert!(found.keys().eq(expected.keys()), "{kind}");
        for (step, line) in expected {
            for key in ["loss", "lr", "tokens_seen", "bits_per_byte"] {
                assert_eq!(found[&step][key], line[key], "{kind} {step}: {key}");
            }
            assert_near(&found[&step], &line, &["grad_norm"], 1e-6);
        }
    }
    // Each process has written its part, and one reads them all.
    let folder = tiny.path(&format!("of-2/checkpoint/step-{STEPS}"));
    assert!(
        folder
            .join("optimizer-00002-of-00002.safetensors")
            .is_file()
    );
    let same = |command: &str| {
        let said = ["of-1", "of-2"].map(|run| {
            let said = succeed(&mut tiny.sieve(&command.replace("RUN", run)));
            said.replace(run, "RUN")
        });
        assert_eq!(said[0], said[1], "{command}");
    };
    same("eval ppl --checkpoint RUN --data corpus/00.txt --device cpu");
    same("generate -q --checkpoint RUN --prompt the --max-new-tokens 8 --device cpu");
    same("export --checkpoint RUN --out hf-RUN");
    let exported = ["of-1", "of-2"].map(|run| {
        let file = tiny.path(&format!("hf-{run}/model.safetensors"));
        std::fs::read(file).expect("an export")
    });
    assert!(exported[0] == exported[1]);
}

/// Asserts that numbers of two reports are equal up to a relative difference.
pub(crate) fn assert_near(
    found: &serde_json::Value,
    expected: &serde_json::Value,
    keys: &[&str],
    most: f64,
) {
    for key in keys {
        let [found, expected] = [found, expected].map(|line| line[key].as_f64());
        let (Some(found), Some(expected)) = (found, expected) else {
            assert_eq!(found, expected, "{key}");
            continue;
        };
        let apart = (found / expected - 1.0).abs();
        assert!(apart < most, "{key} {found}, {expected}");
    }
}

#[test]
fn a_tied_embedding_and_four_processes_differ_in_the_last_bits_alone() {
    let tiny = TinyRun::dma();
    let rows = "--set training.local_batch_size=2 --set training.steps=10";
    tiny.trained("one", rows);
    // Two ranks of two micro-batches, four of one.
    for nproc in [2, 4] {
        let out = format!("of-{nproc}");
        succeed(&mut tiny.launch(nproc, &out, rows));
        let (found, expected) = (tiny.metrics(&out, "step"), tiny.metrics("one", "step"));
        assert_eq!(found.len(), 10);
        for (step, line) in expected {
            assert_near(&found[&step], &line, &["loss", "grad_norm"], 1e-5);
            assert_eq!(found[&step]["tokens_seen"], line["tokens_seen"]);
        }
    }
}

#[test]
fn a_run_goes_on_with_two_processes_then_one_then_two() {
    let tiny = TinyRun::dma();
    let all = format!("{UNTIED} --set checkpoint.keep_latest_k=0");
    tiny.trained("one", &all);
    succeed(&mut tiny.launch(2, "a", &all));
    let from =
        |folder: &str, step: u64| format!("{all} --resume-from {folder}/checkpoint/step-{step}");
    succeed(&mut tiny.train("b", &from("a", 12)));
    succeed(&mut tiny.launch(2, "c", &from("b", 24)));
    tiny.assert_same_end("c", "one");
    // The same rows: as many as one process has read by then.
    let tokens = |out: &str| tiny.metrics(out, "step")[&STEPS]["tokens_seen"].clone();
    assert_eq!(tokens("c"), tokens("one"));
    // What is finished says so once, and ends well.
    let said = succeed(&mut tiny.launch(2, "c", &format!("{all} --resume")));
    assert_eq!(said.matches("nothing to do").count(), 1, "{said}");
}

#[test]
fn a_signal_to_the_launcher_stops_all_with_one_checkpoint_and_exit_code_75() {
    let tiny = TinyRun::dma();
    let more = format!("{UNTIED} --set training.steps=100000 --set checkpoint.interval=100000");
    let child = started(&mut tiny.launch(2, "run", &more), 3);
    signal(&child, "TERM");
    let output = child.wait_with_output().expect("it ends");
    assert_eq!(output.status.code(), Some(75), "{}", text(&output));
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    let log = std::fs::read_to_string(tiny.path("run/log")).expect("a log");
    assert_eq!(log.matches("stopped at step ").count(), 1, "{log}");
    let found = sieve_hf::list_checkpoints(&tiny.path("run/checkpoint")).expect("a folder");
    let [(step, _)] = found[..] else {
        panic!("{found:?}");
    };
    // One process goes on from it.
    let steps = step + 5;
    let more = format!("{UNTIED} --resume --set training.steps={steps}");
    succeed(&mut tiny.train("run", &more));
    assert!(tiny.path(&format!("run/checkpoint/step-{steps}")).is_dir());
}

/// Trains in two threads that are two ranks, with another disturbance each.
fn two_ranks(
    overrides: &'static [&str],
    disturbances: [Disturbance; 2],
    patience: Patience,
) -> [Outcome; 2] {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("an address").port();
    drop(listener);
    let tiny = TinyRun::dma();
    let outcome = |rank: usize| {
        let world = World {
            rank,
            size: 2,
            local_rank: rank,
            local_size: 2,
            master_addr: "127.0.0.1".to_owned(),
            master_port: port,
            run_id: "guard".to_owned(),
        };
        let mesh = Mesh::join(world, "1", patience, |_| {}).expect("two ranks");
        let mesh = Arc::new(mesh);
        let outcome = disturbed_rank(
            &tiny,
            "run",
            overrides,
            disturbances[rank],
            Some(mesh.clone()),
        );
        mesh.leave();
        outcome
    };
    std::thread::scope(|scope| {
        let second = scope.spawn(|| outcome(1));
        let first = outcome(0);
        [first, second.join().expect("no panic")]
    })
}

#[test]
fn a_loss_that_is_no_number_in_one_rank_is_judged_alike_by_all() {
    let overrides = &["training.steps=16", "lr_scheduler.decay_ratio=0"];
    // Steps begin with rows 0, 8, 16, …: the seventh alone, then three in a row after the checkpoint of step 8.
    let wrong = Disturbance {
        loss: |row| match row {
            48 | 72..=88 => f64::NAN,
            _ => 1.0,
        },
        ..Disturbance::default()
    };
    let [first, second] = two_ranks(
        overrides,
        [Disturbance::default(), wrong],
        Patience::default(),
    );
    for outcome in [&first, &second] {
        let summary = outcome.result.as_ref().expect("it goes on");
        assert_eq!(summary.step, 16);
        let skipped = outcome
            .skipped
            .iter()
            .map(|step| step.step)
            .collect::<Vec<_>>();
        assert_eq!(skipped, [7, 10, 11, 12]);
        let back = outcome
            .notices
            .iter()
            .filter(|line| line.contains("back from step 12"));
        assert_eq!(back.count(), 1, "{:?}", outcome.notices);
    }
    assert!(first.weights == second.weights);
    // Rank 0 names the rows and documents of both ranks.
    let skipped = &first.skipped[0];
    assert_eq!((skipped.first_row, skipped.num_rows), (48, 8));
    assert!(skipped.num_documents > 0 && second.skipped[0].num_documents == 0);
}

#[test]
fn ranks_that_compute_with_other_weights_are_named_and_write_nothing() {
    // After the checkpoint of step 4, which stays.
    let wrong = Disturbance {
        leaves: |row| if row == 40 { 1.0 + 1e-6 } else { 1.0 },
        ..Disturbance::default()
    };
    for disturbed in [0, 1] {
        let mut disturbances = [Disturbance::default(); 2];
        disturbances[disturbed] = wrong;
        let outcomes = two_ranks(&["training.steps=12"], disturbances, Patience::default());
        for outcome in outcomes {
            let error = outcome
                .result
                .expect_err("their weights differ")
                .to_string();
            assert!(error.contains("ranks 0 and 1 differ at step 8"), "{error}");
            assert!(outcome.checkpoints.iter().all(|name| name == "step-4"));
        }
    }
}

#[test]
fn a_rank_that_stands_still_in_a_step_is_named_though_it_lives() {
    // Rank 1's files do not answer in the third step, which begins with row 16, or in the first, which may last longer.
    fn wait(waits: bool) {
        std::thread::sleep(Duration::from_secs(if waits { 6 } else { 0 }));
    }
    let third = Disturbance {
        batches: |row, _| wait(row == 16),
        ..Disturbance::default()
    };
    let first = Disturbance {
        batches: |row, _| wait(row == 0),
        ..Disturbance::default()
    };
    for (still, silence, long) in [(third, 2, 600), (first, 30, 2)] {
        let patience = Patience {
            silence: Duration::from_secs(silence),
            long: Duration::from_secs(long),
            ..Patience::default()
        };
        for outcome in two_ranks(&[], [Disturbance::default(), still], patience) {
            assert_stood_still(&outcome, 1);
        }
    }
}

fn assert_stood_still(outcome: &Outcome, rank: usize) {
    let error = outcome.result.as_ref().expect_err("a rank does not go on");
    let (error, name) = (error.to_string(), format!("rank {rank} ("));
    assert!(
        error.contains(&name) && error.contains("stood still for 2 s"),
        "{error}"
    );
}

#[test]
fn a_rank_that_stands_still_in_a_validation_or_a_checkpoint_is_named() {
    fn wait(waits: bool) {
        std::thread::sleep(Duration::from_secs(if waits { 8 } else { 0 }));
    }
    // Held-out text does not answer, at the start and after step 4, or the disk that the checkpoint of step 4 goes to.
    let faults = [
        Disturbance {
            validating: |step| wait(step == 0),
            ..Disturbance::default()
        },
        Disturbance {
            validating: |step| wait(step == 4),
            ..Disturbance::default()
        },
        Disturbance {
            writing: |step| wait(step == 4),
            ..Disturbance::default()
        },
    ];
    let patience = Patience {
        long: Duration::from_secs(2),
        ..Patience::default()
    };
    let overrides = &["training.steps=12", "validation.interval=4"];
    std::thread::scope(|scope| {
        for (place, still) in faults.into_iter().enumerate() {
            for rank in [0, 1] {
                let mut disturbances = [Disturbance::default(); 2];
                disturbances[rank] = still;
                scope.spawn(move || {
                    for outcome in two_ranks(overrides, disturbances, patience) {
                        assert_stood_still(&outcome, rank);
                        let written = &outcome.checkpoints;
                        assert!(written.is_empty(), "{place}: {written:?}");
                    }
                });
            }
        }
    });
}
