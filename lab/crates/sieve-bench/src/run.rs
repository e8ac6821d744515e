//! `sieve kernels run`: writes one op's inputs, outputs and gradients to a file, for other programs to check.
mod branches;
mod fp8;
mod masked;
mod parts;

use crate::case::{Case, Cuts, Keys};
use crate::device::{Device, Gpu};
use crate::error::{BenchError, Result, refused};
use crate::latent::ROPE_THETA;
use crate::on_device::OnDevice;
use crate::outputs::Outputs;
use crate::reference;
use crate::report::PathWatch;
use crate::scores::Scores;
use crate::shape::{CaseShape, keys_of, queries_of, values_of};
use crate::tensors::Computes;
pub use branches::NsaForm;
use branches::Tensors;
use burn::tensor::DType;
use burn_flex::{Flex, FlexDevice};
use sieve_cpu::reference::Rounding;
use sieve_hf::{NamedTensor, write_tensor_file};
use sieve_kernels::{KernelError, KernelPolicy, KeyLists, SumOrder};
use sieve_ops::Cuda;
use sieve_select::Selector;
use std::collections::HashMap;
use std::path::Path;

/// An op that `sieve kernels run` can compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Dense causal attention.
    Attention,
    /// Sliding-window attention.
    Swa,
    /// Dynamic mask attention.
    Dma,
    /// DMA's selection of keys.
    DmaSelect,
    /// Decoding one token against a KV cache.
    Decode,
    /// Decoding one token against DMA's fixed-size cache.
    DmaDecode,
    /// Native sparse attention (NSA).
    Nsa,
    /// Multi-head latent attention (MLA).
    Mla,
    /// Block-sparse attention under a selector's mask.
    BlockSparse,
    /// A GEMM with a weight in fp8.
    Fp8,
}

impl Op {
    /// All of them, each with its name on the command line and in files, and a line about it.
    pub const ALL: [(Self, &str, &str); 10] = [
        (Self::Attention, "attention", "Dense causal attention and its gradients"),
        (Self::Swa, "swa", "Sliding-window attention and its gradients"),
        (Self::Dma, "dma", "Dynamic mask attention and its gradients"),
        (Self::DmaSelect, "dma_select", "DMA's selection alone"),
        (Self::Decode, "decode", "One new token after the other against a key-value cache"),
        (Self::DmaDecode, "dma_decode", "The same against DMA's slots"),
        (Self::Nsa, "nsa", "Native sparse attention, its gates, its choice and all gradients"),
        (Self::Mla, "mla", "Latent attention from the projections on, and its gradients"),
        (Self::BlockSparse, "block_sparse", "Attention under a selector's mask, without its correction, and the mask"),
        (Self::Fp8, "fp8", "A GEMM in fp8 from heads to KV heads, its rounded operands and its gradients"),
    ];

    fn name(self) -> &'static str {
        let found = Self::ALL.iter().find(|(op, _, _)| *op == self);
        found.map_or("", |(_, name, _)| name)
    }
}

/// The op to compute, its sizes and inputs.
#[derive(Clone, Debug)]
pub struct RunSettings {
    /// The op to compute.
    pub op: Op,
    /// Batch size, row length, numbers of heads and head widths.
    pub shape: CaseShape,
    /// Keys a query sees (swa, decode) or keeps (dma, dma_select, dma_decode).
    pub window: Option<usize>,
    /// How many of DMA's kept keys are the last ones, kept whatever their rank.
    pub local_window: usize,
    /// Period of each KV head's slope, in tokens (dma, dma_select); empty: no recency.
    pub periods: Vec<f64>,
    /// Documents a row is cut into, at random places.
    pub documents: usize,
    /// How DMA's scores are drawn; `None` draws them independently.
    pub scores: Option<Scores>,
    /// Seed of all random inputs.
    pub seed: u64,
    /// Factor on the random queries and keys.
    pub magnitude: f32,
    /// Sum in a fixed order, as training.deterministic does.
    pub deterministic: bool,
    /// The selector that chooses the keys of block_sparse.
    pub selector: Option<Selector>,
    /// Parts that the rows of dma and swa are cut into, one for each rank; 1: whole rows.
    pub parts: usize,
    /// Blocks of nsa; the paper's and their means when absent.
    pub nsa: Option<NsaForm>,
}

/// Computes one call and writes its inputs, outputs and gradients to a safetensors file. `target` is called once the
/// settings are checked. Returns the names of the tensors and the device in words.
///
/// # Errors
/// Options that the op would ignore, a call that no kernel takes, a file that cannot be written.
pub fn run<E: From<BenchError>>(
    settings: &RunSettings,
    out: &Path,
    target: impl FnOnce() -> Result<sieve_kernels::Device, E>,
) -> Result<(Vec<String>, String), E> {
    let mut case = case(settings)?;
    // With --periods the case holds ranks in place of scores; the file then has the scores, `z`, beside them.
    let z = sloped(settings, &mut case)?;
    let target = target()?;
    let mut metadata = metadata(settings, &case, &target.name());
    let sums = if settings.deterministic { SumOrder::Fixed } else { SumOrder::Any };
    case.policy = KernelPolicy { sums, ..case.policy };
    let on_gpu = matches!(target, sieve_kernels::Device::Cuda(_));
    let by_ops = settings.parts != 1 || matches!(settings.op, Op::Fp8 | Op::Nsa | Op::Mla);
    let tensors = match (&target, settings.op) {
        (_, Op::BlockSparse) => {
            let selector = settings.selector.as_ref().expect("checked with the case");
            let done = match &target {
                sieve_kernels::Device::Cpu => masked::on_cpu(selector, &case)?,
                sieve_kernels::Device::Cuda(gpu) => {
                    masked::on_cuda(selector, &case, &Gpu::new(gpu.index, case.policy))?
                }
            };
            let more = done.metadata(selector);
            metadata.extend(more.into_iter().map(|(key, value)| (key.to_owned(), value)));
            done.tensors(&case)
        }
        (sieve_kernels::Device::Cpu, _) if by_ops => of_ops::<Flex>(settings, case, &FlexDevice, &fp8::on_host)?,
        (sieve_kernels::Device::Cuda(gpu), _) if by_ops => {
            let device = Gpu::new(gpu.index, case.policy);
            let round = |values: &[f32], sizes, format| fp8::on_cuda(&device, values, sizes, format);
            by_kernels(|| of_ops::<Cuda>(settings, case, &device, &round))??
        }
        (sieve_kernels::Device::Cpu, op) => tensors(op, &case, z.as_deref(), on_cpu(op, &case), on_gpu),
        (sieve_kernels::Device::Cuda(gpu), op) => {
            let device = Gpu::new(gpu.index, case.policy);
            let outputs = on_cuda(op, &case, &device).map_err(BenchError::NotTaken)?;
            tensors(op, &case, z.as_deref(), outputs, on_gpu)
        }
    };
    write_tensor_file(out, &tensors, Some(metadata)).map_err(BenchError::from)?;
    let names = tensors.into_iter().map(|tensor| tensor.name).collect();
    Ok((names, target.name()))
}

/// Runs ops on a GPU; refuses the call when one of them took its reference.
fn by_kernels<T>(run: impl FnOnce() -> T) -> Result<T> {
    let watch = PathWatch::start();
    let found = run();
    match watch.reference() {
        Some(reason) => refused(format!("no kernel takes this call: {reason}")),
        None => Ok(found),
    }
}

/// Draws the inputs; refuses options that the op would ignore.
fn case(settings: &RunSettings) -> Result<Case> {
    let CaseShape(shape) = settings.shape;
    let (op, rope_dim) = (settings.op, shape.head_dim - shape.head_dim_v);
    let is_dma = matches!(op, Op::Dma | Op::DmaSelect | Op::DmaDecode);
    let needs_window = is_dma || matches!(op, Op::Swa | Op::Nsa);
    let one_document = matches!(op, Op::Decode | Op::DmaDecode | Op::BlockSparse | Op::Fp8);
    let (has_window, window) = (settings.window.is_some(), settings.window.unwrap_or(0));
    let in_parts = settings.parts != 1;
    for (is_wrong, reason) in [
        (settings.window == Some(0), "--window 0: a query sees at least one key"),
        (op == Op::Attention && has_window, "attention sees all keys\n  hint: leave --window out, or use swa"),
        (op == Op::Mla && has_window, "mla sees all keys\n  hint: leave --window out"),
        (op == Op::BlockSparse && has_window, "block_sparse sees what its selector keeps\n  hint: leave --window out"),
        (op == Op::Fp8 && has_window, "fp8 is a GEMM\n  hint: leave --window out"),
        (needs_window && !has_window, "this op needs --window: how many keys a query sees or keeps"),
        (
            is_dma && settings.local_window > window,
            format!(
                "--local-window {} is more than --window {window}, the keys that are kept in all",
                settings.local_window
            )
            .as_str(),
        ),
        (!is_dma && settings.scores.is_some(), "--scores are for dma, dma_select and dma_decode"),
        (!is_dma && settings.local_window > 0, "--local-window is for dma, dma_select and dma_decode"),
        (
            op == Op::Mla && (rope_dim == 0 || !rope_dim.is_multiple_of(2)),
            "mla: keys are wider than values by their rotated part, an even number of columns\n  \
             hint: head_dim=192,head_dim_v=128",
        ),
        (
            op == Op::Mla && shape.num_heads != shape.num_kv_heads,
            "mla: every head has keys of its own\n  hint: leave kv_heads out",
        ),
        (op == Op::Nsa && rope_dim != 0, "nsa: keys and values have one width\n  hint: leave head_dim_v out"),
        (
            settings.documents != 1 && one_document,
            format!("--documents {}: {} reads one document a row", settings.documents, op.name()).as_str(),
        ),
        (
            in_parts && !matches!(op, Op::Dma | Op::Swa),
            "--parts is for dma and swa, whose parts read keys of earlier parts",
        ),
        (
            in_parts && (settings.scores.is_some() || !settings.periods.is_empty()),
            "--parts: dma's scores come from the values\n  hint: leave --scores and --periods out",
        ),
        (op != Op::Nsa && settings.nsa.is_some(), "--blocks and --pool are for nsa"),
        (op != Op::BlockSparse && settings.selector.is_some(), "--selector is for block_sparse"),
    ] {
        if is_wrong {
            return refused(reason);
        }
    }
    if op == Op::BlockSparse {
        masked::check(settings.selector.as_ref(), &shape)?;
    }
    let keys = match settings.window {
        Some(window) if is_dma => Keys::local(window, settings.local_window),
        Some(window) => Keys::Window(window),
        None => Keys::Dense,
    };
    let scores = settings.scores.clone().unwrap_or(Scores::Independent);
    let cuts = Cuts::Count(settings.documents);
    let case = Case::draw(shape, keys, cuts, &scores, settings.seed)?;
    if in_parts {
        parts::check(settings.parts, &shape)?;
    }
    Ok(case.magnified(settings.magnitude))
}

/// Adds slope times position to the scores; the sum is the keys' rank and also their bias. Returns the scores without
/// it, or `None` without slopes. A slope is `1 / period`, rounded to f32; product and sum are rounded once each.
fn sloped(settings: &RunSettings, case: &mut Case) -> Result<Option<Vec<f32>>> {
    let (periods, kv_heads) = (&settings.periods, case.shape.num_kv_heads);
    if periods.is_empty() {
        return Ok(None);
    }
    if !matches!(settings.op, Op::Dma | Op::DmaSelect) {
        return refused("--periods are for dma and dma_select");
    }
    if periods.len() != kv_heads {
        let given = periods.len();
        return refused(format!("--periods names {given}, and there are {kv_heads} KV heads: one each"));
    }
    if let Some(period) = periods.iter().find(|period| period.is_nan() || **period <= 0.0) {
        return refused(format!("--periods: {period} is not a positive number of tokens"));
    }
    let z = case.z.clone();
    let seq_len = case.shape.seq_len;
    let rank = z.iter().enumerate().map(|(at, &z)| {
        let (row, key) = (at / seq_len, at % seq_len);
        let first = case.doc_start[row / kv_heads * seq_len + key];
        let slope = (1.0 / periods[row % kv_heads]) as f32;
        z + (key as i32 - first) as f32 * slope
    });
    let rank: Vec<f32> = rank.collect();
    case.set_biases(rank.clone(), rank);
    Ok(Some(z))
}

/// The tensors of a call that models compute by several ops: fp8 GEMMs, NSA, MLA, and attention under context
/// parallelism. `round` rounds to fp8.
fn of_ops<B: Computes>(
    settings: &RunSettings,
    case: Case,
    device: &B::Device,
    round: &fp8::Round<'_>,
) -> Result<Vec<NamedTensor>> {
    let seed = settings.seed;
    match settings.op {
        Op::Fp8 => fp8::tensors::<B>(case.shape, (seed, settings.magnitude), device, round),
        Op::Mla => Ok(branches::mla::<B>(case, seed, device)),
        Op::Nsa => Ok(branches::nsa::<B>(&case, settings.nsa.unwrap_or_default(), seed, device)),
        _ => Ok(parts::tensors::<B>(&case, settings.parts, seed, device)),
    }
}

/// Outputs of an attention op by its definition in f64.
fn on_cpu(op: Op, case: &Case) -> Outputs {
    let defined = || reference::attention(case, Rounding::None).outputs;
    match op {
        Op::Attention | Op::Swa | Op::Dma => defined(),
        Op::DmaSelect => Outputs { expire: case.expire.clone(), ..Outputs::default() },
        Op::Decode | Op::DmaDecode => Outputs { o: defined().o, ..Outputs::default() },
        // `run` computes these elsewhere.
        Op::Nsa | Op::Mla | Op::BlockSparse | Op::Fp8 => Outputs::default(),
    }
}

/// Outputs of an attention op by the launch wrappers, in the case's order of sums.
fn on_cuda(op: Op, case: &Case, device: &Gpu) -> Result<Outputs, KernelError> {
    let call = OnDevice::new(case, device);
    let mut outputs = match op {
        Op::Attention | Op::Swa | Op::Dma => {
            let lists = call.lists(KeyLists::TILE_QUERIES)?;
            call.run(lists.as_ref(), case.policy.sums)?
        }
        Op::DmaSelect | Op::Nsa | Op::Mla | Op::BlockSparse | Op::Fp8 => Outputs::default(),
        Op::Decode => Outputs { o: call.decode()?, ..Outputs::default() },
        Op::DmaDecode => Outputs { o: call.dma_decode()?, ..Outputs::default() },
    };
    if matches!(op, Op::Dma | Op::DmaSelect) {
        outputs.expire = device.ints(&call.select()?.expire)?;
    }
    Ok(outputs)
}

/// The tensors of the file; `z` are the scores where the ranks differ from them. On a GPU o, dq, dk and dv are bf16, as
/// the kernels wrote them; on the CPU they are f32.
fn tensors(op: Op, case: &Case, z: Option<&[f32]>, outputs: Outputs, on_gpu: bool) -> Vec<NamedTensor> {
    let (shape, per_key) = (case.shape, case.shape.per_key());
    let own = if on_gpu { DType::BF16 } else { DType::F32 };
    let mut tensors = Tensors::new(own);
    if op != Op::DmaSelect {
        tensors.qkv(case);
    }
    let mut floats = |name: &str, values: &[f32], shape: &[usize], dtype: DType| {
        if !values.is_empty() {
            tensors.floats(name, values, shape, dtype);
        }
    };
    floats("z", z.unwrap_or(&case.z), &per_key, DType::F32);
    if z.is_some() {
        floats("rank", &case.z, &per_key, DType::F32);
    }
    floats("delta", &case.delta, &per_key, DType::F32);
    if !outputs.dq.is_empty() {
        floats("do", &case.d_o, &shape.output(), DType::BF16);
    }
    floats("o", &outputs.o, &shape.output(), own);
    floats("lse", &outputs.lse, &shape.lse(), DType::F32);
    if !outputs.lse.is_empty() && case.has_bias() {
        floats("base", &case.largest_biases(), &per_key, DType::F32);
    }
    floats("dq", &outputs.dq, &queries_of(shape), own);
    floats("dk", &outputs.dk, &keys_of(shape), own);
    floats("dv", &outputs.dv, &values_of(shape), own);
    floats("ddelta", &outputs.ddelta, &per_key, DType::F32);
    // The `expire` that the op computed, or else the mask of the call.
    let expire = if outputs.expire.is_empty() { case.expire.clone() } else { outputs.expire };
    tensors.ints("expire", expire, &per_key);
    tensors.finish(case.cu_seqlens())
}

/// The header of the file: the settings, and numbers that a program needs to compute the call again.
fn metadata(settings: &RunSettings, case: &Case, device: &str) -> HashMap<String, String> {
    let scores = settings.scores.as_ref().map_or("independent", Scores::name);
    let pairs = [
        ("op", settings.op.name().to_owned()),
        ("window", case.window().to_string()),
        ("local_window", settings.local_window.to_string()),
        ("periods", format!("{:?}", settings.periods)),
        ("scale", case.scale.to_string()),
        ("seed", settings.seed.to_string()),
        ("magnitude", settings.magnitude.to_string()),
        ("scores", scores.to_owned()),
        ("documents", settings.documents.to_string()),
        ("parts", settings.parts.to_string()),
        ("deterministic", settings.deterministic.to_string()),
        ("device", device.to_owned()),
        ("sieve", env!("CARGO_PKG_VERSION").to_owned()),
    ];
    let more = match settings.op {
        Op::Nsa => settings.nsa.unwrap_or_default().words().to_vec(),
        Op::Mla => vec![("rope_theta", ROPE_THETA.to_string())],
        Op::Dma => vec![("lse", "of the logits less base, the largest bias that the query sees".to_owned())],
        _ => Vec::new(),
    };
    let all = pairs.into_iter().chain(more);
    all.map(|(key, value)| (key.to_owned(), value)).collect()
}
