//! The trainer's guard must not report any of twenty healthy runs, and must report every one of several faults.
use crate::tiny_run::TinyRun;
use crate::train_guard::{Outcome, disturbed, of_step, wrong_loss};
use sieve_data::Batch;
use sieve_train::FaultInjection;
use std::fs;
use std::ops::Range;

const MHA: &str = "kind = \"mha\"";
const SWA: &str = "kind = \"swa\"\nsliding_window = 8";
const DMA: &str = "kind = \"dma\"\nkeep_window_size = 8\na_init = 0.5\n\
    recency = \"none\"\nlocal_window_size = 0";
const LINEAR: &str = "kind = \"dma\"\nkeep_window_size = 8\nbias = \"linear\"\n\
    recency = \"none\"\nlocal_window_size = 0";
const NSA: &str = "kind = \"nsa\"\ncompress_block_size = 4\ncompress_stride = 2\ncompress = \"mean\"\n\
    select_block_size = 4\nnum_selected_blocks = 4\nwindow_size = 8";
const MLA: &str = "kind = \"mla\"\nkv_lora_rank = 16\nqk_rope_head_dim = 8";

/// MQAR with two pairs in samples of 16 tokens, which a small model learns in part within a few hundred steps.
const MQAR: (&str, &str) = (
    "[tokenizer]\nnumbers = 32\n",
    "[data]\nformat = \"mqar\"\nmqar = { vocab_size = 32, seq_lens = [16], num_pairs = [2], num_samples = [4000], \
     num_test_samples = 50 }\n",
);

/// A folder whose recipe has these `[attention]` lines.
fn run(attention: &str) -> TinyRun {
    let run = TinyRun::new(attention);
    if attention.contains("mla") {
        rewrite(&run, "num_key_value_heads = 1", "num_key_value_heads = 2");
    }
    run
}

/// Replaces the first `from` in the recipe.
fn rewrite(run: &TinyRun, from: &str, to: &str) {
    let text = run.read("tiny.toml");
    assert!(text.contains(from), "{from}");
    run.write("tiny.toml", text.replacen(from, to, 1));
}

/// As [`run`], with MQAR as its data.
fn mqar(attention: &str) -> TinyRun {
    let run = run(attention);
    let text = run.read("tiny.toml");
    let sections = ["[tokenizer]", "[training]"].map(|name| text.find(name).expect("a section"));
    let text = [&text[..sections[0]], MQAR.0, MQAR.1, &text[sections[1]..]].concat();
    run.write("tiny.toml", text);
    run
}

/// Writes 80 documents into `folder`; `text` gets a document's number.
fn documents(run: &TinyRun, folder: &str, text: impl Fn(u64) -> String) {
    fs::create_dir_all(run.path(folder)).expect("new");
    for number in 0..80 {
        run.write(&format!("{folder}/other-{number}.txt"), text(number));
    }
}

/// `len` pseudo-random digits.
fn digits(seed: u64, len: usize) -> String {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        char::from(b'0' + (state >> 33) as u8 % 10)
    };
    (0..len).map(|_| next()).collect()
}

const USUAL: &[&str] = &["training.steps=160", "checkpoint.interval=40", "validation.interval=1000"];

fn train(run: &TinyRun, overrides: &[&str], disturbance: FaultInjection) -> Outcome {
    disturbed(run, "out", &[USUAL, overrides].concat(), disturbance)
}

fn alarms(found: &Outcome) -> Vec<&String> {
    let notices = found.notices.iter();
    notices.filter(|text| text.starts_with("guard:")).collect()
}

fn healthy(name: &str, run: &TinyRun, overrides: &[&str]) {
    healthy_run(name, run, &[USUAL, overrides].concat());
}

/// Trains a run, in which every step must be taken and the guard must report nothing.
fn healthy_run(name: &str, run: &TinyRun, overrides: &[&str]) {
    let found = disturbed(run, "out", overrides, FaultInjection::default());
    let summary = found.result.as_ref().unwrap_or_else(|error| panic!("{name}: {error}"));
    assert!(!summary.interrupted);
    assert!(found.skipped.is_empty(), "{name}: {:?}", found.skipped);
    assert!(alarms(&found).is_empty(), "{name}: {:?}", found.notices);
}

#[test]
fn healthy_runs_of_every_kind_and_rate() {
    let kinds = [("mha", MHA), ("swa", SWA), ("dma", DMA), ("dma, linear", LINEAR), ("nsa", NSA), ("mla", MLA)];
    for (name, attention) in kinds {
        for lr in ["optimizer.lr=3e-3", "optimizer.lr=1e-1"] {
            healthy(&format!("{name}, {lr}"), &run(attention), &[lr]);
        }
    }
}

#[test]
fn healthy_runs_on_other_data() {
    let repeated = run(MHA);
    documents(&repeated, "corpus", |n| format!("{n}: {}", "zebra quick ".repeat(100)));
    healthy("repeated", &repeated, &["optimizer.lr=3e-2"]);
    // Every step has one row, of sentences or of digits.
    let mixed = run(DMA);
    documents(&mixed, "corpus", |n| digits(n, 900));
    let one_row = ["training.global_batch_size=1", "training.local_batch_size=1"];
    healthy("mixed", &mixed, &one_row);
    let hasty = ["lr_scheduler.warmup_steps=0", "model.initializer_range=0.5", "optimizer.lr=3e-2"];
    healthy("hasty", &run(SWA), &hasty);
    for (name, attention, lr) in [
        ("mha", MHA, "optimizer.lr=5e-2"),
        // With DMA the loss was seen to rise from 0.8 to 4.1 in one step and to need a hundred steps to fall again.
        ("dma", DMA, "optimizer.lr=1e-2"),
        ("nsa", NSA, "optimizer.lr=1e-2"),
    ] {
        let name = format!("MQAR, {name}");
        healthy(&name, &mqar(attention), &[lr, "training.steps=600"]);
    }
}

/// As [`run`], with stages instead of 40 steps.
fn staged(attention: &str, stages: &str) -> TinyRun {
    let run = run(attention);
    rewrite(&run, "steps = 40\n", "");
    rewrite(&run, "[optimizer]", &format!("{stages}[optimizer]"));
    run
}

#[test]
fn healthy_runs_in_stages() {
    let stages = "[[stage]]\nsteps = 60\n[[stage]]\nsteps = 50\nseq_len = 64\nrope_theta = 50000.0\n\
        local_batch_size = 2\nglobal_batch_size = 4\n[[stage]]\nsteps = 50\nwindow = 2\n";
    healthy_run("stages", &staged(DMA, stages), &["checkpoint.interval=40"]);
    // The first stage has sentences, the second digits, whose loss is far higher.
    let stages = "[[stage]]\nsteps = 100\n[[stage]]\nsteps = 60\npaths = [\"DIGITS/*.txt\"]\n";
    let digits_later = staged(MHA, stages);
    let folder = digits_later.path("digits").display().to_string();
    rewrite(&digits_later, "DIGITS", &folder);
    documents(&digits_later, "digits", |n| digits(n, 900));
    healthy_run("digits later", &digits_later, &["checkpoint.interval=40"]);
}

/// A fault with its name, and what the guard must do about it: number of skipped steps (`None` if it depends on when
/// the weights overflow), number of returns to a checkpoint, and whether the run ends with an error.
type Fault = (&'static str, FaultInjection, Option<usize>, usize, bool);

/// The rows of 40 steps, from step 51 on.
const MIDDLE: Range<u64> = 400..720;

/// A fault that multiplies a step's learning rate by `factor`, which gets the number of the step's first row.
fn wrong_rate(factor: impl Fn(u64) -> f64 + Send + Sync + 'static) -> FaultInjection {
    of_step(move |row, step| step.lr *= factor(row))
}

/// A fault that replaces the labels of the steps that begin with one of `rows` by random tokens.
fn poisoned(rows: Range<u64>) -> FaultInjection {
    of_step(move |row, step| {
        if rows.contains(&row) {
            poison(row, &mut step.batches);
        }
    })
}

/// Replaces the labels by pseudo-random tokens.
fn poison(row: u64, batches: &mut [Batch]) {
    let mut state = row + 1;
    for label in batches.iter_mut().flat_map(|batch| &mut batch.labels) {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        if *label >= 0 {
            *label = (state >> 33) as i32 % 300;
        }
    }
}

/// The faults. Functions of a row get the first row of a step; steps have 8 rows.
fn faults() -> Vec<Fault> {
    const NAN: f64 = f64::NAN;
    // A factor for all rows from `first` on, or for `rows`.
    let from = |first: u64, factor: f64| move |row: u64| if row >= first { factor } else { 1.0 };
    let within = |rows: Range<u64>, factor: f64| move |row: u64| if rows.contains(&row) { factor } else { 1.0 };
    let one = |factor: f64| within(400..401, factor);
    let in_turn = |row: u64| match row {
        400..448 if row.is_multiple_of(16) => NAN,
        400..448 => 12.0,
        _ => 1.0,
    };
    vec![
        ("one NaN loss", wrong_loss(one(NAN)), Some(1), 0, false),
        ("one infinite loss", wrong_loss(one(f64::INFINITY)), Some(1), 0, false),
        ("one infinite gradient", wrong_loss(one(1e30)), Some(1), 0, false),
        ("two NaN losses in a row", wrong_loss(within(400..416, NAN)), Some(2), 0, false),
        ("three NaN losses in a row", wrong_loss(within(480..504, NAN)), Some(3), 1, false),
        ("NaN to the end", wrong_loss(from(400, NAN)), Some(9), 2, true),
        ("NaN before the first checkpoint", wrong_loss(from(80, NAN)), Some(3), 0, true),
        ("a high loss", wrong_loss(within(MIDDLE, 12.0)), Some(0), 1, false),
        ("a high loss to the end", wrong_loss(from(400, 12.0)), Some(0), 2, true),
        ("a high loss and NaN in turn", wrong_loss(in_turn), Some(3), 1, false),
        ("poisoned data", poisoned(MIDDLE), Some(0), 1, false),
        ("poisoned data to the end", poisoned(400..u64::MAX), Some(0), 2, true),
        ("spoilt weights", wrong_rate(one(1e3)), None, 1, false),
        ("weights of NaN", wrong_rate(one(NAN)), Some(3), 1, false),
        ("a rate that diverges for a while", wrong_rate(within(MIDDLE, 300.0)), None, 2, false),
        ("a rate that diverges", wrong_rate(from(400, 300.0)), None, 2, true),
    ]
}

#[test]
fn faults_are_not_missed() {
    for (number, (name, disturbance, expected_skips, returns, ends)) in faults().into_iter().enumerate() {
        let run = run([MHA, DMA][number % 2]);
        let found = train(&run, &["optimizer.lr=1e-2", "training.steps=120"], disturbance);
        let skipped = found.skipped.len();
        assert_eq!(skipped, expected_skips.unwrap_or(skipped), "{name}");
        assert_eq!(alarms(&found).len(), returns, "{name}: {:?}", found.notices);
        match found.result {
            Ok(summary) => {
                assert!(!ends, "{name}");
                let loss = summary.last_validation.expect("a validation").loss;
                assert!(loss < 1.0, "{name}: the run has not learned, {loss}");
            }
            Err(error) => assert!(ends && error.to_string().contains("diverged"), "{name}: {error}"),
        }
    }
}

#[test]
fn a_loss_that_comes_down_again_is_no_fault_and_its_checkpoint_waits() {
    // Steps 31 to 50 have a high loss; a checkpoint is due at step 40.
    let leap = |row: u64| if (240..400).contains(&row) { 8.0 } else { 1.0 };
    let found = train(&run(MHA), &["training.steps=60"], wrong_loss(leap));
    found.result.as_ref().expect("the run continues");
    assert!(alarms(&found).is_empty(), "{:?}", found.notices);
    assert!(found.losses[49] > 5.0, "{:?}", found.losses);
    assert_eq!(found.checkpoints, ["step-51", "step-60"]);
}

#[test]
fn a_factor_of_zero_lets_every_finite_loss_pass() {
    let leap = |row: u64| if row >= 400 { 12.0 } else { 1.0 };
    let without = &["training.steps=120", "training.guard_spike_factor=0"];
    let found = train(&run(MHA), without, wrong_loss(leap));
    assert!(found.result.is_ok() && alarms(&found).is_empty());
}
