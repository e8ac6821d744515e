//! Spoilt steps on a GPU: `gpu_guard_check CACHE_DIR TEXT_FILE`.
//!
//! A small DMA model trains on the text, once with the third step's loss made NaN. That step must be skipped and leave every weight
//! as two steps left it, to the last bit, and the run must go on. With a loss 1000 times as large, no step is skipped.
#![allow(clippy::print_stdout)]
use burn::backend::Autodiff;
use burn_cuda::CudaDevice;
use sieve_core::Recipe;
use sieve_data::OnChange;
use sieve_hf::named_parameters;
use sieve_kernels::{KernelCache, init_runtime, probe};
use sieve_ops::Cuda;
use sieve_train::{
    DataSource, Disturbance, Hardware, MemoryProbe, Origin, Precision, RunFolder, Start,
    TrainEvent, Trainer,
};
use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::AtomicBool;

const RECIPE: &str = include_str!("../../recipes/quickstart.toml");
const STEPS: usize = 6;
const ROWS: u64 = 8;
/// The first row of the third step.
const SPOILT: u64 = 2 * ROWS;

/// Weights after `steps` steps, and which steps were skipped.
fn train(
    folder: &Path,
    text: &str,
    steps: usize,
    factor: fn(u64) -> f64,
) -> (Vec<Vec<f32>>, Vec<u64>) {
    let settings = [
        format!("data.paths=[{text:?}]"),
        format!("training.steps={steps}"),
        "training.deterministic=true".to_owned(),
        "metrics.enable_tensorboard=false".to_owned(),
        "lr_scheduler.warmup_steps=1".to_owned(),
        "lr_scheduler.decay_ratio=0.0".to_owned(),
        "attention.a_init=0.5".to_owned(),
    ];
    let recipe = Recipe::load(RECIPE, "quickstart.toml", &settings).expect("valid");
    let data = DataSource::open(&recipe, &|_| None).expect("the text");
    let data = data.prepare(&recipe, &folder.join("data"), OnChange::Refuse, &mut |_| {});
    let out = folder.join(format!("run-{steps}-{}", factor(SPOILT).is_nan()));
    let mut run = RunFolder::open(&out, &recipe.checkpoint.folder, &Start::New).expect("free");
    run.claim(&Start::New).expect("free");
    let hardware = Hardware::<Autodiff<Cuda>> {
        device: CudaDevice::new(0),
        precision: Precision::Bf16,
        peak_flops: None,
        memory: MemoryProbe::Process,
    };
    let data = data.expect("prepared");
    let mut trainer = Trainer::new(recipe, data, run, Origin::seed(), hardware).expect("it fits");
    trainer.disturb(Disturbance {
        loss: factor,
        ..Disturbance::default()
    });
    let mut skipped = Vec::new();
    let result = trainer.run(&AtomicBool::new(false), &mut |event| {
        if let TrainEvent::Skipped(step) = event {
            skipped.push(step.step);
        }
    });
    result.expect("the run goes on");
    let weights = named_parameters(trainer.model()).into_iter();
    let weights = weights.map(|x| x.data.convert::<f32>().to_vec().expect("f32"));
    (weights.collect(), skipped)
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [cache_dir, text] = &args[..] else {
        println!("usage: gpu_guard_check CACHE_DIR TEXT_FILE");
        return ExitCode::FAILURE;
    };
    let report = match probe() {
        Ok(report) => report,
        Err(error) => {
            println!("{error}");
            return ExitCode::FAILURE;
        }
    };
    let arch = report.device(0).expect("probe found one").arch();
    let cache = KernelCache::open(Path::new(cache_dir), &arch, report.nvrtc).expect("cache");
    init_runtime(&cache).expect("runtime");
    let folder = tempfile::tempdir().expect("a temporary folder");
    let spoilt = |row| if row == SPOILT { f64::NAN } else { 1.0 };
    let (two, none) = train(folder.path(), text, 2, |_| 1.0);
    let (three, third) = train(folder.path(), text, 3, spoilt);
    let (six, skipped) = train(folder.path(), text, STEPS, spoilt);
    let large = |row| if row == SPOILT { 1000.0 } else { 1.0 };
    let (_, of_large) = train(folder.path(), text, 4, large);
    let finite = six.iter().flatten().all(|x| x.is_finite());
    let checks = [
        ("no step of a sound run is skipped", none.is_empty()),
        ("the third step is skipped", third == [3] && skipped == [3]),
        (
            "and leaves every weight as it was, to the last bit",
            two == three,
        ),
        ("the run goes on from there", six != three && finite),
        ("a large finite norm is clipped", of_large.is_empty()),
    ];
    for (what, good) in checks {
        println!("{} {what}", if good { "ok  " } else { "FAIL" });
    }
    if checks.iter().all(|(_, good)| *good) {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
