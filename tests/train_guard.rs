//! The trainer's guard against steps that would spoil the weights. The tests make such steps: they multiply the loss of
//! chosen rows, or remove labels.
use crate::tiny_run::TinyRun;
use burn::backend::Autodiff;
use burn_flex::{Flex, FlexDevice};
use sieve_comm::Mesh;
use sieve_core::{Keeping, Recipe};
use sieve_data::{IGNORE_LABEL, OnChange, Surroundings};
use sieve_hf::named_parameters;
use sieve_testing::says;
use sieve_train::{
    BranchOptions, Collectives, DataSource, FaultInjection, Group, Hardware, MemoryProbe, Moment, Origin, Precision,
    RunFolder, SkippedStep, Start, StepAhead, TrainError, TrainEvent, TrainSummary, Trainer,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

pub(crate) type B = Autodiff<Flex>;

/// Makes the transport of a rank's tensors from its connections to the other ranks.
pub(crate) type Transport = fn(Arc<Mesh>) -> Box<dyn Collectives<B>>;

/// Result of a training run, and what it reported.
pub(crate) struct Outcome {
    pub(crate) result: Result<TrainSummary, TrainError>,
    pub(crate) skipped: Vec<SkippedStep>,
    pub(crate) notices: Vec<String>,
    /// Steps that were logged.
    steps: Vec<u64>,
    /// Loss of each logged step.
    pub(crate) losses: Vec<f64>,
    /// Names of the checkpoints, in the order in which they were written.
    pub(crate) checkpoints: Vec<String>,
    /// The weights at the end; none of a run that failed.
    pub(crate) weights: Vec<Vec<u8>>,
    moments: Vec<u8>,
}

/// A fault that multiplies a step's loss by `factor`, which gets the number of the step's first row.
pub(crate) fn wrong_loss(factor: impl Fn(u64) -> f64 + Send + Sync + 'static) -> FaultInjection {
    of_step(move |row, step| step.loss_weight = factor(row))
}

/// A fault of steps; `change` gets the number of a step's first row, and the step.
pub(crate) fn of_step(change: impl Fn(u64, &mut StepAhead) + Send + Sync + 'static) -> FaultInjection {
    FaultInjection::new(move |row, moment| {
        if let Moment::Step(step) = moment {
            change(row, step);
        }
    })
}

/// A fault that calls `act` once, at a "step" that begins with row `number`; at a "validation" after `number` steps; or
/// while the checkpoint of step `number` gets its "files" or its "name".
pub(crate) fn at(place: &'static str, number: u64, act: impl Fn() + Send + Sync + 'static) -> FaultInjection {
    FaultInjection::new(move |at, moment| {
        let here = match moment {
            Moment::Step(_) => "step",
            Moment::Validating => "validation",
            Moment::Writing => "files",
            Moment::Naming => "name",
            Moment::Replay(_) => "",
        };
        if (here, at) == (place, number) {
            act();
        }
    })
}

/// Trains the tiny recipe, whose steps read 8 rows each. `factor` multiplies a step's loss; it gets the number of the
/// step's first row.
fn train(run: &TinyRun, out: &str, overrides: &[&str], factor: impl Fn(u64) -> f64 + Send + Sync + 'static) -> Outcome {
    disturbed(run, out, overrides, wrong_loss(factor))
}

/// Trains the tiny recipe with a fault.
pub(crate) fn disturbed(run: &TinyRun, out: &str, overrides: &[&str], disturbance: FaultInjection) -> Outcome {
    disturbed_rank(run, out, overrides, disturbance, None)
}

/// As [`disturbed`], as one of several ranks if `group` has its connections and transport. Resumes if `out` holds a
/// run.
pub(crate) fn disturbed_rank(
    run: &TinyRun,
    out: &str,
    overrides: &[&str],
    disturbance: FaultInjection,
    group: Option<(Arc<Mesh>, Transport)>,
) -> Outcome {
    let text = run.read("tiny.toml");
    let text = text.replace("corpus/*.txt", &run.path("corpus/*.txt").display().to_string());
    let mut all = vec!["metrics.enable_tensorboard=false".to_owned()];
    all.extend(overrides.iter().map(|item| (*item).to_owned()));
    let recipe = Recipe::load(&text, "tiny.toml", &all).unwrap_or_else(|error| panic!("{error}"));
    let around = Surroundings::unseen(&|_| None);
    let data = DataSource::open(&recipe, &around).expect("the corpus");
    let place = (run.path("data"), OnChange::Refuse);
    let mut data = data.prepare(&recipe, &place.0, place.1, &mut |_| {}).expect("prepared");
    data.prepare_stages(&recipe, (&place.0, place.1), None, &around, &mut |_| {}).expect("prepared");
    let name = &recipe.checkpoint.folder;
    let start = if RunFolder::holds_run(&run.path(out)) { Start::Resume } else { Start::New };
    let mut folder = match &group {
        Some((mesh, _)) if mesh.world().rank > 0 => RunFolder::of_group(&run.path(out), name),
        _ => RunFolder::open(&run.path(out), name, &start).expect("free"),
    };
    let origin = Origin::find(&folder, &start, &recipe, BranchOptions::default()).expect("of the same recipe");
    folder.claim(&start).expect("free");
    let hardware = Hardware::<B> {
        device: FlexDevice,
        precision: Precision::F32,
        peak_flops: None,
        memory: MemoryProbe::Process,
        keeping: Keeping::default(),
    };
    let is_alone = group.is_none();
    let group = group.map(|(mesh, transport)| Group::new(mesh.clone(), transport(mesh)));
    let trainer = Trainer::new(recipe, data, folder, origin, hardware, group);
    let mut trainer = trainer.expect("it fits");
    trainer.disturb(disturbance);
    let (mut skipped, mut notices) = (Vec::new(), Vec::new());
    let (mut steps, mut losses, mut checkpoints) = (Vec::new(), Vec::new(), Vec::new());
    let result = trainer.run(&AtomicBool::new(false), &mut |event| match event {
        TrainEvent::Skipped(step) => skipped.push(step.clone()),
        TrainEvent::Checkpoint(path) => {
            let name = path.file_name().expect("a folder has a name");
            checkpoints.push(name.to_string_lossy().into_owned());
        }
        TrainEvent::Notice(text) | TrainEvent::Warning(text) => notices.push(text.to_owned()),
        TrainEvent::Step(report) => {
            steps.push(report.step);
            losses.push(report.loss);
        }
        _ => {}
    });
    // A run that failed inside an update has no model.
    let weights = result.as_ref().map_or(Vec::new(), |_| named_parameters(trainer.model()));
    let last = result.as_ref().ok().filter(|_| is_alone).and_then(|summary| summary.checkpoint.clone());
    Outcome {
        skipped,
        notices,
        steps,
        losses,
        checkpoints,
        weights: weights.into_iter().map(|tensor| tensor.data.as_bytes().to_vec()).collect(),
        moments: last.map_or(Vec::new(), |path| std::fs::read(path.join("optimizer.safetensors")).expect("written")),
        result,
    }
}

/// A fault that removes all labels from the steps that begin with one of `rows`.
pub(crate) fn unlabelled(rows: std::ops::Range<u64>) -> FaultInjection {
    of_step(move |row, step| {
        if rows.contains(&row) {
            let labels = step.batches.iter_mut().flat_map(|batch| &mut batch.labels);
            labels.for_each(|label| *label = IGNORE_LABEL);
        }
    })
}

#[test]
fn text_without_a_label_ends_the_run() {
    // The run reads more rows than an epoch has.
    let large = &["training.steps=400", "training.global_batch_size=256", "validation.interval=400"];
    let found = disturbed(&TinyRun::dma(), "run", large, unlabelled(0..u64::MAX));
    let error = found.result.expect_err("nothing to learn").to_string();
    assert!(error.contains("no row of the text holds a token with a label"), "{error}");
}

#[test]
fn a_checkpoint_that_failed_is_not_taken_for_the_last_one() {
    let tiny = TinyRun::dma();
    let (folder, is_last) = (tiny.path("run/checkpoint/step-36.tmp"), AtomicBool::new(false));
    // While the checkpoint of step 36 is being written, the last step is skipped, so that the loop ends without a new
    // checkpoint.
    let disturbance = FaultInjection::new(move |at, moment| match (moment, at) {
        (Moment::Writing, 36) => {
            while !is_last.load(Ordering::Acquire) {
                std::thread::sleep(Duration::from_millis(1));
            }
            std::thread::sleep(Duration::from_millis(500));
            std::fs::remove_dir_all(&folder).expect("it was begun");
        }
        // Row 312 is the first of step 40, the last.
        (Moment::Step(step), 312) => {
            is_last.store(true, Ordering::Release);
            step.loss_weight = f64::NAN;
        }
        _ => (),
    });
    let found = disturbed(&tiny, "run", &["checkpoint.interval=4"], disturbance);
    assert_eq!(found.result.expect("it ends").step, 40);
    let says = |words: &str| found.notices.iter().any(|text| text.contains(words));
    assert!(says("no checkpoint at step 36"), "{:?}", found.notices);
    assert!(!says("the last checkpoint, of step"), "{:?}", found.notices);
    assert_eq!(found.checkpoints.last().map(String::as_str), Some("step-40"));
}

#[test]
fn a_stage_that_cannot_begin_leaves_the_state_before_it() {
    let tiny = TinyRun::dma();
    let text = tiny.read("tiny.toml");
    let stages = "[[stage]]\nsteps = 13\n[[stage]]\nsteps = 5\npaths = [\"corpus/*.txt\"]\n[optimizer]";
    tiny.write("tiny.toml", text.replace("steps = 40\n", "").replace("[optimizer]", stages));
    let shards = tiny.path("data/stage-2");
    let gone = at("step", 64, move || std::fs::remove_dir_all(&shards).expect("they were made"));
    let found = disturbed(&tiny, "run", &["lr_scheduler.decay_ratio=0"], gone);
    found.result.expect_err("its shards are gone");
    assert_eq!(found.checkpoints.last().map(String::as_str), Some("step-13"));
}

/// Settings of a run of twelve steps: too short for the guard to judge a loss as a spike.
const TWELVE: &[&str] = &["training.steps=12", "lr_scheduler.decay_ratio=0"];

#[test]
fn a_step_that_is_not_finite_leaves_weights_and_moments_alone() {
    let run = TinyRun::dma();
    for (number, factor) in [f64::NAN, f64::INFINITY, -f64::INFINITY].into_iter().enumerate() {
        // Rows 80 to 87 are the eleventh and last step.
        let bad = move |row| if row == 80 { factor } else { 1.0 };
        let out = format!("bad-{number}");
        let eleven = &["training.steps=11", "lr_scheduler.decay_ratio=0"];
        let found = train(&run, &out, eleven, bad);
        let ten = &["training.steps=10", "lr_scheduler.decay_ratio=0"];
        let expected = train(&run, &format!("good-{number}"), ten, |_| 1.0);
        found.result.as_ref().expect("the run continues");
        assert!(found.weights == expected.weights, "{factor}: weights changed");
        assert_eq!(found.steps, (1..=10).collect::<Vec<_>>());
        let metrics = run.read(&format!("{out}/metrics.jsonl"));
        assert_eq!(metrics.matches("\"kind\":\"skipped\"").count(), 1, "{metrics}");
        let [skipped] = found.skipped.as_slice() else { panic!("{factor}: {:?}", found.skipped) };
        assert_eq!((skipped.step, skipped.first_row, skipped.num_rows), (11, 80, 8));
        assert!(!skipped.loss.is_finite());
        assert!(skipped.num_documents > 0 && !skipped.documents.is_empty());
        let parts = skipped.grad_norms.iter().map(|(part, _)| part.as_str());
        assert!(parts.eq(["embedding", "layer 0", "layer 1", "head"]));
        // Only the sizes of the moments are compared: AdamW's count of updates includes the skipped attempt.
        assert_eq!(found.moments.len(), expected.moments.len());
    }
}

#[test]
fn a_large_norm_is_clipped_and_the_step_taken() {
    let run = TinyRun::dma();
    let spike = |row: u64| if row == 8 * 29 { 1000.0 } else { 1.0 };
    let found = train(&run, "out", &[], spike);
    let summary = found.result.expect("the run continues");
    assert!(found.skipped.is_empty(), "{:?}", found.skipped);
    assert!(found.losses[29] > 100.0 * found.losses[28]);
    let undisturbed = train(&run, "undisturbed", &[], |_| 1.0);
    assert!(found.weights != undisturbed.weights, "the step was taken");
    assert_eq!(summary.step, 40);
}

#[test]
fn several_in_a_row_go_back_to_the_checkpoint_and_skip_the_rows() {
    let run = TinyRun::dma();
    // A checkpoint is written every 4 steps; rows 72 to 95 are steps 10, 11 and 12.
    let bad = |row: u64| {
        if (72..96).contains(&row) { f64::NAN } else { 1.0 }
    };
    let found = train(&run, "out", TWELVE, bad);
    let summary = found.result.expect("the run continues");
    assert_eq!((summary.step, found.skipped.len()), (12, 3));
    let back = found.notices.iter().find(|text| text.starts_with("guard:"));
    let back = back.expect("a notice");
    says(back, "back from step 12 to | step-8, rows 64 to 95 are skipped");
    // After the return, steps 9 to 12 read the rows after the bad ones.
    assert!(found.steps.iter().copied().eq((1..=9).chain(9..=12)), "{:?}", found.steps);
    let state = run.read("out/checkpoint/step-12/state.json");
    let state: serde_json::Value = serde_json::from_str(&state).expect("JSON");
    assert_eq!(state["next_sample"], 128);
    // In the metrics each step occurs once.
    let metrics = run.read("out/metrics.jsonl");
    for step in 1..=12 {
        let line = format!("\"kind\":\"step\",\"step\":{step},");
        assert_eq!(metrics.matches(&line).count(), 1, "{step}: {metrics}");
    }
}

#[test]
fn a_run_that_cannot_go_on_says_so_and_keeps_its_checkpoints() {
    let run = TinyRun::dma();
    let hopeless = |row: u64| if row >= 72 { f64::NAN } else { 1.0 };
    let found = train(&run, "out", TWELVE, hopeless);
    let error = found.result.expect_err("nothing is left to do").to_string();
    says(&error, "diverged | step-8");
    assert!(run.path("out/checkpoint/step-8/state.json").is_file());
    // The run goes back twice, then ends: three times three skipped steps.
    assert_eq!(found.skipped.len(), 9);

    let at_once = train(&run, "other", TWELVE, |_| f64::NAN);
    let error = at_once.result.expect_err("no checkpoint").to_string();
    assert!(error.contains("no checkpoint yet"), "{error}");
}
