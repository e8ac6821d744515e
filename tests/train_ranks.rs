//! Several processes train what one would: the same rows, steps and weights.
use crate::tiny_run::{STEPS, TinyRun, ended, json, number, signal, spawned, succeed, wait_until};
use crate::train_guard::{Outcome, Transport, at, disturbed, disturbed_rank, wrong_loss};
use sieve_comm::{HeldPort, Mesh, Patience, World};
use sieve_train::{Disturbance, Moment, OnHost};
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
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
    let mut child = spawned(command);
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
    let mut launched = tiny.launch(2, "of-2", UNTIED);
    let said = succeed(launched.arg0("sieve"));
    assert!(said.contains("next:\n  sieve generate --prompt "), "{said}");
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
    assert!(folder.join("optimizer-00002-of-00002.safetensors").is_file());
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

#[test]
fn validation_reads_the_same_text_for_any_batch_and_number_of_processes() {
    let tiny = TinyRun::dma();
    let short = "--set training.steps=4 --set validation.interval=4";
    // The sums over the predicted tokens' bytes and frequencies tell which tokens they are.
    let read = |out: &str| {
        let last = tiny.metrics(out, "validation")[&4].clone();
        ["num_labels", "num_bytes", "unigram_bits_per_byte"].map(|key| number(&last[key]))
    };
    // A sum over batches has its order from them: the last bits of a double.
    let same = |out: &str, what: &str| {
        let (found, expected) = (read(out), read("of-4"));
        let is_same = |(a, b): (&f64, &f64)| (a - b).abs() <= 1e-14 * b.abs();
        assert!(
            found.iter().zip(&expected).all(is_same),
            "{what}: {found:?}, {expected:?}"
        );
    };
    tiny.trained("of-4", short);
    for rows in [1, 2, 8] {
        let out = format!("of-{rows}");
        tiny.trained(&out, &format!("{short} --set training.local_batch_size={rows}"));
        same(&out, &format!("{rows} rows a batch"));
        let [loss, expected] = [out.as_str(), "of-4"].map(|out| tiny.metrics(out, "validation")[&0].clone());
        assert_near(&loss, &expected, &["loss"], 1e-6);
    }
    for (nproc, more) in [(2, ""), (4, "--set parallelism.context_parallel_degree=2")] {
        let out = format!("ranks-{nproc}");
        succeed(&mut tiny.launch(
            nproc,
            &out,
            &format!("{short} --set training.local_batch_size=2 {more}"),
        ));
        same(&out, &format!("{nproc} processes"));
    }
    // A run that goes on with another batch.
    tiny.trained("resumed", &format!("{short} --stop-after 2"));
    tiny.trained(
        "resumed",
        &format!("{short} --resume --set training.local_batch_size=1"),
    );
    same("resumed", "resumed");
    // Whole rows: eight of 32 tokens, in which documents end.
    let num_labels = read("of-4")[0] as u64;
    assert!((200..=256).contains(&num_labels), "{num_labels}");

    // Less held-out text than asked for is read whole: as many tokens as `eval ppl` predicts.
    tiny.trained("whole", &format!("{short} --set validation.tokens=10000000"));
    let ppl = tiny.prints("eval ppl --recipe-validation --json --device cpu --checkpoint whole");
    assert_eq!(read("whole")[0], number(&json(&ppl)["num_tokens"]));
}

/// Asserts that numbers of two reports are equal up to a relative difference.
pub(crate) fn assert_near(found: &serde_json::Value, expected: &serde_json::Value, keys: &[&str], most: f64) {
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

/// No order of sums is that of one process for every number of ranks: squares of the norm are added up piece by piece,
/// and a tied embedding's two shares before those of another rank. For six steps that is one unit in the last place of
/// loss and norm. Then the runs go apart: measured were 3e-5 of the norm and 7e-7 of the loss at most in step 10.
#[test]
fn a_tied_embedding_and_clipping_differ_in_the_last_bits_alone() {
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
            assert_near(&found[&step], &line, &["loss"], 1e-6);
            let most = if step <= 6 { 1e-6 } else { 1e-5 };
            assert_near(&found[&step], &line, &["grad_norm"], most);
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
    let from = |folder: &str, step: u64| format!("{all} --resume-from {folder}/checkpoint/step-{step}");
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
fn four_processes_end_with_the_bits_of_one_and_their_run_goes_on_with_four_two_and_one() {
    let tiny = TinyRun::dma();
    let all =
        format!("{UNTIED} --set checkpoint.keep_latest_k=0 --set training.local_batch_size=2 --set training.steps=16");
    // Four micro-batches of one process, one each of four.
    tiny.trained("one", &all);
    succeed(&mut tiny.launch(4, "a", &all));
    tiny.assert_same_at("a", "one", 16);
    let from = |folder: &str, step: u64| format!("{all} --resume-from {folder}/checkpoint/step-{step}");
    succeed(&mut tiny.launch(2, "b", &from("a", 4)));
    succeed(&mut tiny.train("c", &from("b", 8)));
    succeed(&mut tiny.launch(4, "d", &from("c", 12)));
    succeed(&mut tiny.launch(4, "e", &from("a", 8)));
    tiny.assert_same_at("e", "one", 16);
    // What was loaded is written before the first step: the same weights and moments, whoever holds them.
    tiny.assert_same_at("b", "one", 4);
    tiny.assert_same_at("b", "c", 8);
    tiny.assert_same_at("d", "c", 12);
    // Two processes add up their micro-batches in another order.
    for (run, steps) in [("b", 5..=16), ("c", 9..=16), ("d", 13..=16)] {
        let (found, expected) = (tiny.metrics(run, "step"), tiny.metrics("one", "step"));
        assert!(found.keys().copied().eq(steps), "{run}");
        for (step, line) in found {
            assert_near(&line, &expected[&step], &["loss", "grad_norm"], 1e-5);
            assert_eq!(line["tokens_seen"], expected[&step]["tokens_seen"]);
        }
    }
}

/// ZeRO-2 (arXiv:1910.02054).
const ZERO_2: &str = "--set parallelism.zero_stage=2";

#[test]
fn sharded_gradients_end_with_the_bits_of_one_process_and_go_on_with_any_sharding() {
    let tiny = TinyRun::dma();
    let all =
        format!("{UNTIED} --set checkpoint.keep_latest_k=0 --set training.local_batch_size=2 --set training.steps=16");
    tiny.trained("one", &all);
    succeed(&mut tiny.launch(4, "a", &format!("{all} {ZERO_2}")));
    tiny.assert_same_at("a", "one", 16);
    // Two processes of two micro-batches each with ZeRO-1, then with ZeRO-2, then one; and four from the run of one.
    let from = |folder: &str, step: u64| format!("{all} --resume-from {folder}/checkpoint/step-{step}");
    succeed(&mut tiny.launch(2, "b", &from("a", 4)));
    succeed(&mut tiny.launch(2, "c", &format!("{} {ZERO_2}", from("b", 8))));
    succeed(&mut tiny.train("d", &from("c", 12)));
    succeed(&mut tiny.launch(4, "e", &format!("{} {ZERO_2}", from("one", 8))));
    tiny.assert_same_at("e", "one", 16);
    tiny.assert_same_at("b", "one", 4);
    for (run, steps) in [("b", 5..=16), ("c", 9..=16), ("d", 13..=16)] {
        let (found, expected) = (tiny.metrics(run, "step"), tiny.metrics("one", "step"));
        assert!(found.keys().copied().eq(steps), "{run}");
        for (step, line) in found {
            assert_near(&line, &expected[&step], &["loss", "grad_norm"], 1e-5);
        }
    }
}

#[test]
fn sharded_gradients_follow_one_process_with_a_tied_embedding_clipping_stages_and_fp8() {
    for more in [
        "",
        "--set training.precision=fp8",
        "--set activation_checkpoint.mode=full",
    ] {
        let tiny = TinyRun::dma();
        let text = tiny.read("tiny.toml");
        let stages = "[[stage]]\nsteps = 4\n[[stage]]\nsteps = 4\nwindow = 16\n";
        let staged = text.replace("[optimizer]", &format!("{stages}[optimizer]"));
        tiny.write("tiny.toml", staged.replace("steps = 40\n", ""));
        let rows = format!("--set training.local_batch_size=1 {more}");
        tiny.trained("one", &rows);
        // fp8 rounds by the largest magnitude of a micro-batch: a last bit of a weight can move a rounding.
        let most = if more.contains("fp8") { 1e-3 } else { 1e-5 };
        for nproc in [2, 4] {
            let out = format!("of-{nproc}");
            succeed(&mut tiny.launch(nproc, &out, &format!("{rows} {ZERO_2}")));
            let (found, expected) = (tiny.metrics(&out, "step"), tiny.metrics("one", "step"));
            assert_eq!(found.len(), 8);
            for (step, line) in expected {
                assert_near(&found[&step], &line, &["loss", "grad_norm"], most);
                assert_eq!(found[&step]["tokens_seen"], line["tokens_seen"]);
            }
        }
    }
}

#[test]
fn gradients_kept_in_bf16_follow_those_in_f32() {
    let tiny = TinyRun::dma();
    let rows = "--set training.local_batch_size=1 --set training.steps=10";
    let bf16 = format!("{rows} --set training.gradient_dtype=bf16");
    tiny.trained("f32", rows);
    tiny.trained("one", &bf16);
    succeed(&mut tiny.launch(2, "zero-1", &bf16));
    succeed(&mut tiny.launch(2, "zero-2", &format!("{bf16} {ZERO_2}")));
    // An element is off by 2^-9 at most after each of eight micro-batches, a norm by less. Later steps amplify that.
    for run in ["one", "zero-1", "zero-2"] {
        let (found, expected) = (tiny.metrics(run, "step"), tiny.metrics("f32", "step"));
        assert_eq!(found.len(), 10);
        for (step, line) in expected {
            let most = if step <= 3 { [1e-4, 3e-3] } else { [5e-3, 0.2] };
            assert_near(&found[&step], &line, &["loss"], most[0]);
            assert_near(&found[&step], &line, &["grad_norm"], most[1]);
        }
        // The same to the last bit would mean that nothing was rounded.
        let norm = |run: &str| tiny.metrics(run, "step")[&1]["grad_norm"].clone();
        assert_ne!(norm(run), norm("f32"), "{run}");
    }
    tiny.refuses_each(
        "train --recipe tiny.toml --device cpu --out never",
        "
        --set parallelism.zero_stage=3 => parallelism.zero_stage: is 3, outside 0 to 2 | weights are whole
        --set parallelism.zero_stage=-1 => parallelism.zero_stage | -1
        --set training.gradient_dtype=f16 => training.gradient_dtype | f32 | bf16
        ",
    );
}

#[test]
fn a_signal_to_the_launcher_stops_all_with_one_checkpoint_and_exit_code_75() {
    let tiny = TinyRun::dma();
    let more = format!("{UNTIED} --set training.steps=100000 --set checkpoint.interval=100000");
    let child = started(&mut tiny.launch(2, "run", &more), 3);
    signal(&child, "TERM");
    let output = ended(child, 75);
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    let log = tiny.read("run/log");
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

/// The tiny recipe, trained into `out` by two ranks that are threads or processes of these tests.
#[derive(Clone, Copy)]
pub(crate) struct Pair<'a> {
    pub(crate) tiny: &'a TinyRun,
    pub(crate) out: &'a str,
    pub(crate) overrides: &'a [&'a str],
    pub(crate) transport: Transport,
}

impl<'a> Pair<'a> {
    pub(crate) fn new(tiny: &'a TinyRun, out: &'a str, overrides: &'a [&'a str]) -> Self {
        Self {
            tiny,
            out,
            overrides,
            transport: |mesh| Box::new(OnHost(mesh)),
        }
    }

    /// Connects a rank with the other one.
    pub(crate) fn join(rank: usize, port: u16, patience: Patience) -> Arc<Mesh> {
        let world = World::on_this_host(rank, 2, port);
        Arc::new(Mesh::join(world, "1", patience, |_| {}).expect("two ranks"))
    }

    /// Trains as one rank.
    pub(crate) fn train(&self, mesh: Arc<Mesh>, disturbance: Disturbance) -> Outcome {
        let group = Some((mesh, self.transport));
        disturbed_rank(self.tiny, self.out, self.overrides, disturbance, group)
    }

    /// Trains in two threads, with another disturbance and patience each. Sets `ended` when one ends.
    pub(crate) fn run(
        &self,
        disturbances: [Disturbance; 2],
        patience: [Patience; 2],
        ended: &AtomicBool,
    ) -> [Outcome; 2] {
        let port = HeldPort::take().expect("a port");
        let outcome = |rank: usize| {
            let mesh = Self::join(rank, port.number(), patience[rank]);
            let outcome = self.train(mesh.clone(), disturbances[rank].clone());
            ended.store(true, Ordering::Release);
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

/// Trains in two threads, in a folder of their own.
fn two_ranks(
    overrides: &[&str],
    disturbances: [Disturbance; 2],
    patience: [Patience; 2],
    ended: &AtomicBool,
) -> [Outcome; 2] {
    Pair::new(&TinyRun::dma(), "run", overrides).run(disturbances, patience, ended)
}

#[test]
fn a_loss_that_is_no_number_in_one_rank_is_judged_alike_by_all() {
    for overrides in [
        &["training.steps=16", "lr_scheduler.decay_ratio=0"][..],
        &[
            "training.steps=16",
            "lr_scheduler.decay_ratio=0",
            "parallelism.zero_stage=2",
            "training.local_batch_size=2",
        ],
    ] {
        judged_alike(overrides);
    }
}

fn judged_alike(overrides: &[&str]) {
    // Steps begin with rows 0, 8, 16, …: the seventh alone, then three in a row after the checkpoint of step 8.
    let wrong = wrong_loss(|row| match row {
        48 | 72..=88 => f64::NAN,
        _ => 1.0,
    });
    let disturbances = [Disturbance::default(), wrong];
    let [first, second] = two_ranks(overrides, disturbances, Default::default(), &AtomicBool::default());
    for outcome in [&first, &second] {
        let summary = outcome.result.as_ref().expect("it goes on");
        assert_eq!(summary.step, 16);
        let skipped = outcome.skipped.iter().map(|step| step.step).collect::<Vec<_>>();
        assert_eq!(skipped, [7, 10, 11, 12]);
        let back = outcome.notices.iter().filter(|line| line.contains("back from step 12"));
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
    let wrong = Disturbance::new(|row, moment| match moment {
        Moment::Leaves if row == 40 => 1.0 + 1e-6,
        _ => 1.0,
    });
    for disturbed in [0, 1] {
        let mut disturbances = <[Disturbance; 2]>::default();
        disturbances[disturbed] = wrong.clone();
        let ended = AtomicBool::default();
        for outcome in two_ranks(&["training.steps=12"], disturbances, Default::default(), &ended) {
            let error = outcome.result.expect_err("their weights differ").to_string();
            assert!(error.contains("ranks 0 and 1 differ at step 8"), "{error}");
            assert!(outcome.checkpoints.iter().all(|name| name == "step-4"));
        }
    }
}

#[test]
fn a_rank_that_computes_other_gradients_is_named() {
    // The tenth step begins with row 72.
    let wrong = |times: u32| {
        let left = Arc::new(AtomicU32::new(times));
        Disturbance::new(move |row, moment| match moment {
            Moment::Replay if row == 72 => {
                let one_less = |left: u32| left.checked_sub(1);
                let is_wrong = left
                    .fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less)
                    .is_ok();
                if is_wrong { 1.0 + 1e-6 } else { 1.0 }
            }
            _ => 1.0,
        })
    };
    let overrides = &["training.steps=16", "training.guard_replay=5"];
    for (times, words) in [
        (
            1,
            "the gradients of rank 1 of one micro-batch, which all ranks computed before step 10, are wrong",
        ),
        // Nobody knows which of two is right.
        (2, "the gradients of ranks 0, 1 of one micro-batch"),
    ] {
        let disturbances = [Disturbance::default(), wrong(times)];
        for outcome in two_ranks(overrides, disturbances, Default::default(), &AtomicBool::default()) {
            let error = outcome.result.expect_err("a device computes wrong").to_string();
            assert!(error.contains(words), "{error}");
            assert_eq!(outcome.checkpoints.last().map_or("step-8", String::as_str), "step-8");
        }
    }
    let tiny = TinyRun::dma();
    let alone = disturbed(&tiny, "alone", overrides, wrong(1));
    let error = alone.result.expect_err("another gradient the second time").to_string();
    assert!(error.contains("the gradients of rank 0 of one micro-batch"), "{error}");
    // Nothing else is changed by it.
    let steps = "training.steps=16";
    let [with, without] = [&[steps, "training.guard_replay=1"][..], &[steps]].map(|overrides| {
        let [first, _] = two_ranks(
            overrides,
            Default::default(),
            Default::default(),
            &AtomicBool::default(),
        );
        first.result.expect("all is well");
        first.weights
    });
    assert!(with == without);
}

/// Where a rank stands still, in what step, and the limit that it breaks, of a step or of what may last, in seconds:
/// files that are read, in the first step, which may last, and in the third, which begins with row 16; held-out text,
/// before the first step and after the fourth; the disk that the first checkpoint goes to, its files and its name.
const STANDING: [(&str, u64, u64); 6] = [
    ("step", 0, 2),
    ("step", 16, 5),
    ("validation", 0, 2),
    ("validation", 4, 2),
    ("files", 4, 2),
    ("name", 4, 2),
];

/// Asserts that both ranks end with the name of the one that stands still, before there is a checkpoint.
fn assert_named(still: usize, (place, number, seconds): (&'static str, u64, u64)) {
    // It stands still until the other one has ended: no test waits for a time.
    let ended = Arc::new(AtomicBool::default());
    let other = ended.clone();
    let mut disturbances = <[Disturbance; 2]>::default();
    disturbances[still] = at(place, number, move || {
        wait_until("the other rank ends", || other.load(Ordering::Acquire));
    });
    // The limits of the other one are so wide that a busy machine does not make it the one that is named.
    let mut patience = <[Patience; 2]>::default();
    let limit = match (place, number) {
        ("step", 16) => &mut patience[still].silence,
        _ => &mut patience[still].long,
    };
    *limit = Duration::from_secs(seconds);
    let overrides = &["training.steps=12", "validation.interval=4"];
    for outcome in two_ranks(overrides, disturbances, patience, &ended) {
        let error = outcome.result.expect_err("a rank does not go on").to_string();
        let words = [format!("rank {still} ("), format!("stood still for {seconds} s")];
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
