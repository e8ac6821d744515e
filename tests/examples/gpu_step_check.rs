//! A training step on a GPU, checked and timed: `gpu_step_check CACHE_DIR [check] [time] [deterministic] [portable]
//! [fp8] [recompute] [keep]`.
//!
//! `check` compares the loss and every gradient of small models of all kinds with the CPU's f32 step on the same
//! weights; `deterministic` repeats a step in fixed order and wants equal bits; `time` prints milliseconds of a step's
//! parts at the size of the 80M recipes, `rival=1.7B-2K-dma` (or another case of main) at a size that others are
//! measured at. `portable` takes no Hopper kernel; `fp8` runs the GEMMs of all blocks in fp8, on the CPU too;
//! `recompute` computes every block a second time in the backward pass, `keep` keeps activations that it could
//! recompute.
#![allow(clippy::print_stdout)]
use burn::backend::Autodiff;
use burn::tensor::{DType, Tensor, TensorData};
use burn_flex::Flex;
use chacha20::ChaCha8Rng;
use chacha20::rand_core::{Rng, SeedableRng};
use cubecl::Runtime;
use cubecl::cuda::CudaRuntime;
use sieve_core::recipe::{ActivationCheckpointMode, ActivationCheckpointSection};
use sieve_core::{Keeping, Recipe};
use sieve_data::{Batch, IGNORE_LABEL};
use sieve_hf::{NamedTensor, load_parameters, named_parameters};
use sieve_kernels::{
    CudaReport, KernelCache, KernelFamilies, KernelPolicy, KernelTrace, MemoryPeak, SumOrder, TraceResult,
};
use sieve_nn::Qwen3;
use sieve_ops::{Cuda, TrainBackend, op_paths};
use sieve_train::{BlockSettings, DeviceBatch, GradientBuffer, Optimizer, accumulate_gradients_with};
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

type Gpu = Autodiff<Cuda>;
type Cpu = Autodiff<Flex>;

/// Relative error (Euclidean) that a bf16 step may have against f32, gradient by gradient.
const GRADIENT_BAR: f64 = 3e-2;
/// The same where DMA chooses keys: bf16 values move the scores, near ties fall the other way, and a query with another
/// key has another gradient. That the kernels follow a given choice is for `sieve kernels check`; "dma all" has nothing
/// to choose.
const CHOOSING_BAR: f64 = 0.3;
/// The same for A where nothing is masked: a sum over all keys of gradients that add up to zero a query, so mostly
/// rounding.
const CANCELLING_BAR: f64 = 0.15;
/// The same for fp8 beside the CPU's: where bf16 moves an operand over the middle between two of them,
/// the next one is a sixteenth or an eighth away, in every layer anew. What the kernels round to, and what cuBLASLt
/// makes of it, `sieve kernels check` compares.
const FP8_BAR: f64 = 0.3;

/// How a step runs, from the words of the command line.
#[derive(Clone, Copy)]
struct Modes {
    /// Whether the blocks' GEMMs are in fp8.
    fp8: bool,
    /// Whether the blocks' activations are computed twice.
    recompute: bool,
    /// Whether blocks keep activations that they could recompute.
    keep: bool,
    policy: KernelPolicy,
}

impl Modes {
    fn of(words: &[String]) -> Self {
        let has = |word: &str| words.iter().any(|x| x == word);
        Self {
            fp8: has("fp8"),
            recompute: has("recompute"),
            keep: has("keep"),
            policy: KernelPolicy {
                families: match has("portable") {
                    true => KernelFamilies::Portable,
                    false => KernelFamilies::All,
                },
                ..KernelPolicy::default()
            },
        }
    }

    fn settings(&self, layers: usize) -> BlockSettings {
        let mode = match self.recompute {
            true => ActivationCheckpointMode::Full,
            false => ActivationCheckpointMode::None,
        };
        BlockSettings {
            checkpointing: ActivationCheckpointSection {
                mode,
                ..ActivationCheckpointSection::default()
            },
            fp8: 0..if self.fp8 { layers } else { 0 },
            keeping: Keeping {
                made_again: self.keep,
                ..Keeping::default()
            },
            policy: self.policy,
            ..BlockSettings::default()
        }
    }
}

#[derive(Clone, Copy)]
struct Size {
    d_model: usize,
    d_ff: usize,
    layers: usize,
    heads: [usize; 2],
    head_dim: usize,
    vocab: usize,
    batch: usize,
    seq_len: usize,
}

const SMALL: Size = Size {
    d_model: 192,
    d_ff: 320,
    layers: 3,
    heads: [4, 2],
    head_dim: 64,
    vocab: 1031,
    // 1008 tokens, a multiple of 16 as eight-bit products need.
    batch: 3,
    seq_len: 336,
};

fn recipe(size: Size, attention: &str) -> Recipe {
    let Size {
        d_model,
        d_ff,
        layers,
        heads: [heads, kv_heads],
        head_dim,
        seq_len,
        ..
    } = size;
    let text = format!(
        "[model]\nhidden_size = {d_model}\nintermediate_size = {d_ff}\nnum_hidden_layers = {layers}\n\
         num_attention_heads = {heads}\nnum_key_value_heads = {kv_heads}\nhead_dim = {head_dim}\n\
         max_position_embeddings = {seq_len}\ntie_word_embeddings = true\n[attention]\n{attention}\n\
         [tokenizer]\npath = \"none\"\n[data]\npaths = [\"none\"]\n[training]\nsteps = 1\nseq_len = {seq_len}\n\
         local_batch_size = 1\n[optimizer]\nlr = 1e-3\n[lr_scheduler]\nwarmup_steps = 0\ndecay_ratio = 0.0\n"
    );
    Recipe::load(&text, "gpu_step_check", &[]).expect("the text above is valid")
}

fn model<B: TrainBackend>(size: Size, attention: &str, device: &B::Device) -> Qwen3<B> {
    let shape = recipe(size, attention).model_shape(size.vocab);
    Qwen3::new(&shape.expect("it fits"), 5, device)
}

/// Random tokens in documents of uneven length, or in one a row; some labels are missing.
fn batch(size: Size, seed: u64, one_a_row: bool) -> Batch {
    let mut batch = Batch {
        first_sample: 0,
        batch: size.batch,
        seq_len: size.seq_len,
        tokens: Vec::new(),
        labels: Vec::new(),
        doc_start: Vec::new(),
        doc_end: Vec::new(),
        positions: Vec::new(),
        documents: Vec::new(),
    };
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    for row in 0..size.batch {
        let cut = match one_a_row {
            true => 0,
            false => (size.seq_len * (row + 1)) / (size.batch + 2),
        };
        for (number, (start, end)) in [(0, cut), (cut, size.seq_len)].into_iter().enumerate() {
            for place in start..end {
                batch.tokens.push(random.next_u32() % size.vocab as u32);
                let label = (random.next_u32() % size.vocab as u32) as i32;
                let is_last = place + 1 == end;
                batch.labels.push(if is_last { IGNORE_LABEL } else { label });
                batch.doc_start.push(start as u32);
                batch.doc_end.push(end as u32);
                batch.positions.push((place - start) as u32);
                batch.documents.push(number as u32);
            }
        }
    }
    batch
}

fn gradients<B: TrainBackend>(
    modes: Modes,
    model: &Qwen3<B>,
    batch: &Batch,
    device: &B::Device,
) -> (f32, Vec<NamedTensor>) {
    let rope = model.rope(batch.seq_len, device);
    let mut gradients = GradientBuffer::default();
    let scale = 1.0 / batch.num_labels() as f64;
    let batch = DeviceBatch::<B>::new(batch, device);
    let settings = modes.settings(model.layers.len());
    let result = accumulate_gradients_with(&settings, model, &batch, &rope, scale, &mut gradients);
    let loss = result.loss.into_data().convert::<f32>().to_vec::<f32>().expect("f32")[0];
    (loss, gradients.named(model))
}

fn floats(data: &TensorData) -> Vec<f32> {
    data.clone().convert::<f32>().to_vec().expect("converted")
}

fn relative_error(found: &[f32], expected: &[f32]) -> f64 {
    let pairs = || found.iter().zip(expected);
    let difference: f64 = pairs().map(|(a, b)| f64::from(a - b).powi(2)).sum();
    let norm: f64 = expected.iter().map(|b| f64::from(*b).powi(2)).sum();
    (difference / norm.max(1e-60)).sqrt()
}

/// The GPU's bf16 model and the CPU's f32 model with the same (rounded) weights.
fn twins(size: Size, attention: &str, device: &burn_cuda::CudaDevice) -> (Qwen3<Gpu>, Qwen3<Cpu>) {
    let gpu = model::<Gpu>(size, attention, device);
    let settings = recipe(size, attention).optimizer;
    let gpu = Optimizer::new(settings).hold_masters(gpu);
    let weights = named_parameters(&gpu);
    let cpu = model::<Cpu>(size, attention, &Default::default());
    let read = &mut |name: &str, _shape: &[usize]| -> Result<TensorData, String> {
        let found = weights.iter().find(|tensor| tensor.name == name);
        let found = found.ok_or_else(|| format!("{name} is missing"))?;
        Ok(found.data.clone().convert::<f32>())
    };
    let cpu = load_parameters(cpu, DType::F32, read).expect("the same names");
    (gpu, cpu)
}

fn check(modes: Modes, name: &str, size: Size, attention: &str, device: &burn_cuda::CudaDevice) -> bool {
    let (gpu, cpu) = twins(size, attention, device);
    let batch = batch(size, 3, false);
    let (gpu_loss, found) = gradients(modes, &gpu, &batch, device);
    let (cpu_loss, expected) = gradients(modes, &cpu, &batch, &Default::default());
    let errors = found.iter().zip(&expected).map(|(found, expected)| {
        assert_eq!(found.name, expected.name);
        let error = relative_error(&floats(&found.data), &floats(&expected.data));
        (error, found.name.as_str())
    });
    let mut errors: Vec<_> = errors.collect();
    errors.sort_by(|a, b| b.0.total_cmp(&a.0));
    let worst: Vec<String> = errors
        .iter()
        .take(4)
        .map(|(error, name)| format!("{name} {error:.1e}"))
        .collect();
    let loss_error = f64::from((gpu_loss - cpu_loss).abs());
    let bar = |tensor: &str| match name.split(' ').collect::<Vec<_>>()[..] {
        ["dma", "all", ..] if tensor.ends_with(".a") => CANCELLING_BAR,
        ["dma", "all", ..] if !modes.fp8 => GRADIENT_BAR,
        ["dma", ..] => CHOOSING_BAR,
        _ if modes.fp8 => FP8_BAR,
        _ => GRADIENT_BAR,
    };
    let good =
        errors.iter().all(|(error, tensor)| *error < bar(tensor)) && loss_error < 5e-3 && found.len() == expected.len();
    println!(
        "{} {name:10} loss {gpu_loss:.5} cpu {cpu_loss:.5}; worst: {}",
        if good { "ok  " } else { "FAIL" },
        worst.join(", ")
    );
    good
}

fn deterministic(mut modes: Modes, name: &str, size: Size, attention: &str, device: &burn_cuda::CudaDevice) -> bool {
    modes.policy.sums = SumOrder::Fixed;
    let (gpu, _) = twins(size, attention, device);
    let batch = batch(size, 4, false);
    let (first_loss, first) = gradients(modes, &gpu, &batch, device);
    let mut differing = std::collections::BTreeMap::<String, usize>::new();
    const REPEATS: usize = 20;
    for _ in 0..REPEATS {
        let (loss, again) = gradients(modes, &gpu, &batch, device);
        if loss.to_bits() != first_loss.to_bits() {
            *differing.entry("loss".to_owned()).or_default() += 1;
        }
        for (a, b) in first.iter().zip(&again) {
            let same = floats(&a.data)
                .iter()
                .zip(&floats(&b.data))
                .all(|(a, b)| a.to_bits() == b.to_bits());
            if !same {
                *differing.entry(a.name.clone()).or_default() += 1;
            }
        }
    }
    let listed: Vec<String> = differing
        .iter()
        .take(8)
        .map(|(name, count)| format!("{name} {count}x"))
        .collect();
    println!(
        "{} {name:10} {REPEATS} repeats in fixed order; {} tensors differ: {}",
        if differing.is_empty() { "ok  " } else { "FAIL" },
        differing.len(),
        listed.join(", ")
    );
    differing.is_empty()
}

fn sync(device: &burn_cuda::CudaDevice) {
    let _value = Tensor::<Cuda, 1>::zeros([1], (device, DType::F32)).into_data();
}

/// Where the GPU's time went, and how much of the span it idled.
fn print_trace(trace: &TraceResult, steps: f64) {
    let (busy, span) = (trace.busy_ns() as f64, trace.span_ns() as f64);
    println!(
        "  a step: {:.2} ms on the GPU's clock, idle {:.1} %, {:.0} kernels",
        span / steps * 1e-6,
        100.0 * (1.0 - busy / span),
        trace.records.len() as f64 / steps
    );
    let is_product = |name: &str| ["nvjet", "cublas", "gemm"].iter().any(|x| name.contains(x));
    let totals = trace.totals();
    let products = totals.iter().filter(|total| is_product(&total.name));
    let products: u64 = products.map(|total| total.total_ns).sum();
    println!(
        "  products: {:.2} ms a step, {:.1} %",
        products as f64 / steps * 1e-6,
        100.0 * products as f64 / busy
    );
    for total in totals.iter().take(28) {
        println!(
            "  {:5.1} %  {:9.3} ms  {:6.0} x  {:.100}",
            100.0 * total.total_ns as f64 / busy,
            total.total_ns as f64 / steps * 1e-6,
            total.count as f64 / steps,
            total.name
        );
    }
}

fn time(modes: Modes, name: &str, size: Size, attention: &str, device: &burn_cuda::CudaDevice) {
    let recipe = recipe(size, attention);
    let shape = recipe.model_shape(size.vocab).expect("it fits");
    let mut optimizer = Optimizer::<Gpu>::new(recipe.optimizer);
    let mut model = Some(optimizer.hold_masters(Qwen3::<Gpu>::new(&shape, 5, device)));
    // As what it is compared with: every query sees its whole row.
    let batch = batch(size, 3, true);
    let scale = 1.0 / batch.num_labels() as f64;
    let mut rows = Vec::new();
    const STEPS: usize = 12;
    const TRACED: usize = 2;
    let mut trace = None;
    for step in 0..STEPS + TRACED {
        if step == 1 {
            // The first step with moments. Not timed: it is among the ones that warm up.
            MemoryPeak::watch();
        }
        if step == 2 {
            MemoryPeak::unwatch();
        }
        if step == STEPS {
            trace = KernelTrace::start().map_err(|error| println!("{error}")).ok();
        }
        let current = model.take().expect("put back below");
        let rope = current.rope(batch.seq_len, device);
        let on_device = DeviceBatch::<Gpu>::new(&batch, device);
        sync(device);
        let started = Instant::now();
        let mut gradients = GradientBuffer::default();
        let settings = modes.settings(size.layers);
        let result = accumulate_gradients_with(&settings, &current, &on_device, &rope, scale, &mut gradients);
        let host_pass = started.elapsed().as_secs_f64();
        sync(device);
        let pass = started.elapsed().as_secs_f64();
        drop(result);
        let norm = gradients.norm(&current, device);
        let grad_scale = norm.recip().clamp_max(1.0);
        model = Some(optimizer.step(current, &mut gradients, grad_scale, 1e-4));
        let host_all = started.elapsed().as_secs_f64() - pass;
        sync(device);
        let all = started.elapsed().as_secs_f64();
        rows.push([pass, host_pass, all - pass, host_all, all]);
    }
    let median = |at: usize| {
        let mut column: Vec<f64> = rows[3..STEPS].iter().map(|row| row[at]).collect();
        column.sort_by(f64::total_cmp);
        1e3 * column[column.len() / 2]
    };
    let tokens = (size.batch * size.seq_len) as f64;
    let client = CudaRuntime::client(device);
    let usage = client.memory_usage().expect("the device thread answers");
    let peak = MemoryPeak::seen().unwrap_or_default();
    let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
    println!(
        "{name:14} {:.1} GiB used, {:.1} reserved, at most {:.2} used and {:.2} reserved; pass {:8.2} ms \
         (host {:7.2}), update {:7.2} ms (host {:6.2}), step {:8.2} ms: {:9.0} tokens/s",
        gib(usage.bytes_in_use),
        gib(usage.bytes_reserved),
        gib(peak.in_use_bytes),
        gib(peak.reserved_bytes),
        median(0),
        median(1),
        median(2),
        median(3),
        median(4),
        tokens / median(4) * 1e3
    );
    if let Some(trace) = trace {
        match trace.finish() {
            Ok(result) => print_trace(&result, TRACED as f64),
            Err(error) => println!("{error}"),
        }
    }
}

const KINDS: [(&str, &str); 4] = [
    ("mha", "kind = \"mha\""),
    ("swa", "kind = \"swa\"\nsliding_window = 70"),
    ("dma", "kind = \"dma\"\nkeep_window_size = 70\na_init = 0.5"),
    ("dma all", "kind = \"dma\"\nkeep_window_size = 400\na_init = 0.5"),
];

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    let Some(cache_dir) = args.next() else {
        println!("usage: gpu_step_check CACHE_DIR [check] [deterministic] [time]");
        return ExitCode::FAILURE;
    };
    let wanted: Vec<String> = args.collect();
    let wants = |what: &str| wanted.is_empty() || wanted.iter().any(|x| x == what);
    let report = match CudaReport::probe() {
        Ok(report) => report,
        Err(error) => {
            println!("{error}");
            return ExitCode::FAILURE;
        }
    };
    let arch = report.device(0).expect("probe found one").arch();
    let cache = KernelCache::open(Path::new(&cache_dir), &arch, report.nvrtc).expect("cache");
    cache.init_runtime().expect("runtime");
    let device = burn_cuda::CudaDevice::default();
    let modes = Modes::of(&wanted);
    let mut good = true;
    if wants("check") {
        for (name, attention) in KINDS {
            good &= check(modes, name, SMALL, attention, &device);
            let wide = Size {
                head_dim: 128,
                heads: [3, 1],
                d_model: 256,
                ..SMALL
            };
            good &= check(modes, &format!("{name} d128"), wide, attention, &device);
        }
    }
    if wants("deterministic") {
        let quickstart = Size {
            d_ff: 512,
            layers: 4,
            heads: [3, 1],
            vocab: 4096,
            batch: 16,
            seq_len: 256,
            ..SMALL
        };
        for (name, attention) in KINDS {
            good &= deterministic(modes, name, SMALL, attention, &device);
            good &= deterministic(modes, name, quickstart, attention, &device);
        }
    }
    if wants("time") {
        let size = Size {
            d_model: 768,
            d_ff: 2304,
            layers: 12,
            heads: [6, 3],
            head_dim: 128,
            vocab: 50304,
            batch: 16,
            seq_len: 2048,
        };
        time(modes, "80m mha", size, "kind = \"mha\"", &device);
        time(
            modes,
            "80m dma",
            size,
            "kind = \"dma\"\nkeep_window_size = 1024\na_init = 0.0",
            &device,
        );
    }
    if let Some(case) = wanted.iter().find_map(|x| x.strip_prefix("rival=")) {
        // The shapes of a compiled Qwen3 that this is compared with.
        let large = |batch, seq_len| Size {
            d_model: 2048,
            d_ff: 6144,
            layers: 28,
            heads: [16, 8],
            head_dim: 128,
            vocab: 50280,
            batch,
            seq_len,
        };
        let small = Size {
            d_model: 768,
            d_ff: 2048,
            layers: 12,
            heads: [6, 6],
            batch: 32,
            ..large(32, 2048)
        };
        let (mha, dma) = (
            "kind = \"mha\"",
            "kind = \"dma\"\nkeep_window_size = 2048\na_init = 0.5",
        );
        let cases = [
            ("80M-2K-mha", small, mha),
            ("1.7B-2K-mha", large(8, 2048), mha),
            ("1.7B-2K-dma", large(8, 2048), dma),
            ("1.7B-8K-mha", large(2, 8192), mha),
            ("1.7B-8K-dma", large(2, 8192), dma),
            ("1.7B-32K-mha", large(1, 32768), mha),
            ("1.7B-32K-dma", large(1, 32768), dma),
        ];
        for (name, size, attention) in cases {
            if name == case {
                time(modes, name, size, attention, &device);
            }
        }
    }
    for ((place, op), path) in op_paths() {
        if path.reference_calls > 0 {
            println!(
                "reference {op} on {place}: {} of {} calls: {}",
                path.reference_calls,
                path.reference_calls + path.kernel_calls,
                path.reason.unwrap_or_default()
            );
        }
    }
    if good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
