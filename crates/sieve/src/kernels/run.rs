//! `sieve kernels run`: one op's inputs, outputs and gradients as a file, for other programs to check.
use super::case::{Case, Cuts, Keys};
use super::on_cuda::{OnCuda, download_ints};
use super::outputs::Outputs;
use super::place;
use super::scores::Scores;
use super::shape::CaseShape;
use super::strided::{Layout, packed, packed_d_o};
use crate::device::{Device, DeviceChoice};
use crate::terminal;
use anyhow::{Context, Result, bail, ensure};
use burn::tensor::{DType, TensorData};
use burn_cuda::CudaDevice;
use burn_flex::{Flex, FlexDevice};
use clap::{Args, ValueEnum};
use sieve_hf::{NamedTensor, write_tensor_file};
use sieve_kernels::{AttentionShape, SumOrder, TILE_QUERIES};
use std::collections::HashMap;
use std::path::PathBuf;

/// What `sieve kernels run` can compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub(crate) enum Op {
    /// Dense causal attention and its gradients
    Attention,
    /// Sliding-window attention and its gradients
    Swa,
    /// Dynamic mask attention and its gradients
    Dma,
    /// DMA's selection alone
    DmaSelect,
    /// One new token after the other against a key-value cache
    Decode,
    /// The same against DMA's slots
    DmaDecode,
}

/// Arguments of `sieve kernels run`.
#[derive(Args, Debug)]
pub(crate) struct RunArgs {
    /// What to compute
    #[arg(value_name = "OP")]
    op: Op,
    /// Sizes, for example batch=2,seq_len=300,heads=4,kv_heads=2,head_dim=64
    #[arg(long, value_name = "SIZES")]
    shape: CaseShape,
    /// Keys a query sees (swa, decode) or keeps (dma, dma_select, dma_decode)
    #[arg(long, value_name = "KEYS")]
    window: Option<usize>,
    /// Documents a row is cut into, at random places
    #[arg(long, value_name = "COUNT", default_value_t = 1)]
    documents: usize,
    /// DMA's scores: independent, rising, falling, tied, few-values, signed-zeros or captured:FILE
    #[arg(long)]
    scores: Option<Scores>,
    /// Seed of all inputs
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Sum in a fixed order, as training.deterministic does
    #[arg(long)]
    deterministic: bool,
    /// The safetensors file to write
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// auto, cpu, cuda or cuda:N
    #[arg(long, default_value = "auto")]
    device: DeviceChoice,
}

/// Runs the command.
pub(crate) fn run(args: &RunArgs) -> Result<()> {
    let case = case(args)?;
    let device = args.device.resolve()?;
    let (outputs, name) = match &device {
        Device::Cpu => (on_cpu(args.op, &case), "cpu".to_owned()),
        Device::Cuda(gpu) => {
            let device = CudaDevice::new(gpu.index);
            let order = if args.deterministic {
                SumOrder::Fixed
            } else {
                SumOrder::Any
            };
            let outputs =
                on_cuda(args.op, &case, order, &device).context("no kernel takes this call")?;
            (outputs, format!("{} ({})", gpu.name, gpu.arch()))
        }
    };
    let on_gpu = matches!(device, Device::Cuda(_));
    let tensors = tensors(args.op, &case, outputs, on_gpu);
    let metadata = metadata(args, &case, &name);
    write_tensor_file(&args.out, &tensors, Some(metadata))?;
    let names: Vec<&str> = tensors.iter().map(|tensor| tensor.name.as_str()).collect();
    terminal::line(&format!(
        "wrote {} to {}, computed on {name}",
        names.join(" "),
        args.out.display()
    ));
    Ok(())
}

/// The inputs; refuses options that the op would ignore.
fn case(args: &RunArgs) -> Result<Case> {
    let CaseShape(shape) = args.shape;
    let chosen = matches!(args.op, Op::Dma | Op::DmaSelect | Op::DmaDecode);
    let keys = match (args.op, args.window) {
        (_, Some(0)) => bail!("--window 0: a query sees at least one key"),
        (Op::Attention, Some(_)) => {
            bail!("attention sees all keys\n  hint: leave --window out, or use swa")
        }
        (Op::Attention | Op::Decode, None) => Keys::Dense,
        (Op::Swa | Op::Decode, Some(window)) => Keys::Window(window),
        (Op::Dma | Op::DmaSelect | Op::DmaDecode, Some(window)) => Keys::Chosen(window),
        (_, None) => bail!("this op needs --window: how many keys a query sees or keeps"),
    };
    ensure!(
        chosen || args.scores.is_none(),
        "--scores are for dma, dma_select and dma_decode"
    );
    ensure!(
        args.documents == 1 || !matches!(args.op, Op::Decode | Op::DmaDecode),
        "--documents {}: decoding continues one document a row",
        args.documents
    );
    let scores = args.scores.clone().unwrap_or(Scores::Independent);
    let cuts = Cuts::Count(args.documents);
    Case::draw(shape, keys, cuts, &scores, args.seed)
}

fn on_cpu(op: Op, case: &Case) -> Outputs {
    let device = FlexDevice;
    match op {
        Op::Attention | Op::Swa | Op::Dma => {
            let (qkv, d_o) = (
                packed(case, Layout::Contiguous),
                packed_d_o(case, Layout::Contiguous),
            );
            place::attention::<Flex>(case, &qkv, &d_o, &device)
        }
        Op::DmaSelect => Outputs {
            expire: place::select::<Flex>(case, &device),
            ..Outputs::default()
        },
        Op::Decode => Outputs {
            o: place::decode::<Flex>(case, &device),
            ..Outputs::default()
        },
        Op::DmaDecode => Outputs {
            o: place::dma_decode::<Flex>(case, &device),
            ..Outputs::default()
        },
    }
}

fn on_cuda(op: Op, case: &Case, order: SumOrder, device: &CudaDevice) -> Result<Outputs> {
    let call = OnCuda::new(case, device);
    let mut outputs = match op {
        Op::Attention | Op::Swa | Op::Dma => {
            let lists = call.lists(TILE_QUERIES)?;
            call.run(lists.as_ref(), order)?
        }
        Op::DmaSelect => Outputs::default(),
        Op::Decode => Outputs {
            o: call.decode()?,
            ..Outputs::default()
        },
        Op::DmaDecode => Outputs {
            o: call.dma_decode()?,
            ..Outputs::default()
        },
    };
    if matches!(op, Op::Dma | Op::DmaSelect) {
        outputs.expire = download_ints(&call.select()?.expire);
    }
    Ok(outputs)
}

/// The tensors of the file. On a GPU o, dq, dk and dv are bf16, as the kernels wrote them; on the CPU f32.
fn tensors(op: Op, case: &Case, outputs: Outputs, on_gpu: bool) -> Vec<NamedTensor> {
    let AttentionShape {
        batch,
        seq_len,
        num_heads,
        num_kv_heads,
        head_dim,
        head_dim_v,
    } = case.shape;
    let rows = |heads, width| vec![batch, seq_len, heads, width];
    let per_key = case.shape.per_key().to_vec();
    let mut list = Vec::new();
    let mut floats = |name: &str, values: &[f32], shape: Vec<usize>, bf16: bool| {
        if !values.is_empty() {
            let data = TensorData::new(values.to_vec(), shape);
            let dtype = if bf16 { DType::BF16 } else { DType::F32 };
            list.push(NamedTensor {
                name: name.to_owned(),
                data: data.convert_dtype(dtype),
            });
        }
    };
    if op != Op::DmaSelect {
        floats("q", &case.q, rows(num_heads, head_dim), true);
        floats("k", &case.k, rows(num_kv_heads, head_dim), true);
        floats("v", &case.v, rows(num_kv_heads, head_dim_v), true);
    }
    floats("z", &case.z, per_key.clone(), false);
    floats("delta", &case.delta, per_key.clone(), false);
    if !outputs.dq.is_empty() {
        floats("do", &case.d_o, rows(num_heads, head_dim_v), true);
    }
    floats("o", &outputs.o, rows(num_heads, head_dim_v), on_gpu);
    floats("lse", &outputs.lse, case.shape.lse().to_vec(), false);
    floats("dq", &outputs.dq, rows(num_heads, head_dim), on_gpu);
    floats("dk", &outputs.dk, rows(num_kv_heads, head_dim), on_gpu);
    floats("dv", &outputs.dv, rows(num_kv_heads, head_dim_v), on_gpu);
    floats("ddelta", &outputs.ddelta, per_key.clone(), false);
    let bounds = case.cu_seqlens();
    // What the path computed where it computes it, else what the mask means.
    let expire = if outputs.expire.is_empty() {
        case.expire.clone()
    } else {
        outputs.expire
    };
    for (name, values, shape) in [
        ("expire", expire, per_key),
        ("cu_seqlens", bounds.clone(), vec![bounds.len()]),
    ] {
        let data = TensorData::new(values, shape);
        let name = name.to_owned();
        list.push(NamedTensor { name, data });
    }
    list
}

fn metadata(args: &RunArgs, case: &Case, device: &str) -> HashMap<String, String> {
    let op = args
        .op
        .to_possible_value()
        .map_or(String::new(), |name| name.get_name().to_owned());
    let scores = args.scores.as_ref().map_or("independent", Scores::name);
    let pairs = [
        ("op", op),
        ("window", case.window().to_string()),
        ("scale", case.scale.to_string()),
        ("seed", args.seed.to_string()),
        ("scores", scores.to_owned()),
        ("documents", args.documents.to_string()),
        ("deterministic", args.deterministic.to_string()),
        ("device", device.to_owned()),
        ("sieve", env!("CARGO_PKG_VERSION").to_owned()),
    ];
    pairs.map(|(key, value)| (key.to_owned(), value)).into()
}
