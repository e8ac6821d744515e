//! `sieve kernels capture`: the scores that a trained DMA model gives to the tokens of a text, for benchmarks and checks.
use crate::device::{Device, DeviceChoice};
use crate::loaded;
use crate::terminal;
use anyhow::{Context, Result, bail, ensure};
use burn::tensor::{DType, Int, Tensor, TensorData, TensorPrimitive};
use burn_cuda::CudaDevice;
use burn_flex::{Flex, FlexDevice};
use clap::Args;
use sieve_hf::{NamedTensor, write_tensor_file};
use sieve_kernels::{kernel_file, kernel_files};
use sieve_nn::{Attention, LayerContext, Qwen3};
use sieve_ops::{Cuda, Documents, SieveBackend};
use std::path::{Path, PathBuf};

/// Most tokens read: enough for the longest benchmark.
const MAX_TOKENS: usize = 1 << 17;

/// Arguments of `sieve kernels capture`.
#[derive(Args, Debug)]
pub(crate) struct CaptureArgs {
    /// A checkpoint (step-N) of a DMA model, or a run folder: then its latest
    #[arg(long, value_name = "DIR")]
    checkpoint: PathBuf,
    /// The text to read; the kernels' own sources when absent
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// The safetensors file to write: "z", f32 [layers * kv_heads, tokens]
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// auto, cpu, cuda or cuda:N
    #[arg(long, default_value = "auto")]
    device: DeviceChoice,
}

/// Runs the command.
pub(crate) fn run(args: &CaptureArgs) -> Result<()> {
    let text = args.text.as_deref();
    match args.device.resolve()? {
        Device::Cpu => capture::<Flex>(&args.checkpoint, text, &args.out, &FlexDevice, DType::F32),
        Device::Cuda(gpu) => {
            let device = CudaDevice::new(gpu.index);
            capture::<Cuda>(&args.checkpoint, text, &args.out, &device, DType::BF16)
        }
    }
}

/// Writes the scores of all layers and KV heads. The text is cut into pieces as long as a training row, each read from its
/// beginning, whose scores follow each other in the file: a score depends on its token's values alone.
pub(crate) fn capture<B: SieveBackend>(
    checkpoint: &Path,
    text: Option<&Path>,
    out: &Path,
    device: &B::Device,
    dtype: DType,
) -> Result<()> {
    let (loaded, tokenizer) = loaded::load::<B>(checkpoint, device, dtype)?;
    let text = match text {
        Some(path) => std::fs::read_to_string(path)
            .with_context(|| format!("reading text from {}", path.display()))?,
        None => kernel_sources()?,
    };
    let mut tokens = tokenizer.encode(&text)?;
    tokens.truncate(MAX_TOKENS);
    let length = loaded.recipe.training.seq_len.min(tokens.len());
    ensure!(length > 0, "the text has no token");
    let mut rows: Vec<Vec<f32>> = Vec::new();
    for piece in tokens.chunks_exact(length) {
        let scores = scores(&loaded.model, piece, device)?;
        rows.resize(scores.len(), Vec::new());
        for (row, scores) in rows.iter_mut().zip(scores) {
            row.extend(scores);
        }
    }
    let shape = [rows.len(), rows.first().map_or(0, Vec::len)];
    let z = NamedTensor {
        name: "z".to_owned(),
        data: TensorData::new(rows.concat(), shape),
    };
    write_tensor_file(out, &[z], None)?;
    terminal::line(&format!(
        "captured the scores of {} tokens by {} KV heads of step {} in {}; use them with --scores captured:{}",
        shape[1],
        shape[0],
        loaded.state.step,
        out.display(),
        out.display()
    ));
    Ok(())
}

/// The text of all kernels: some hundred kilobytes that every copy of the program has.
fn kernel_sources() -> Result<String> {
    let mut all = String::new();
    for name in kernel_files() {
        all.push_str(kernel_file(name)?);
    }
    Ok(all)
}

/// Scores of one row of tokens, for each layer and KV head.
fn scores<B: SieveBackend>(
    model: &Qwen3<B>,
    tokens: &[u32],
    device: &B::Device,
) -> Result<Vec<Vec<f32>>> {
    let ids: Vec<i32> = tokens.iter().map(|&id| id as i32).collect();
    let ids = Tensor::<B, 2, Int>::from_data(TensorData::new(ids, [1, tokens.len()]), device);
    let documents = Documents::whole_rows([1, tokens.len()], device);
    let rope = model.rope(tokens.len(), device);
    let context = LayerContext::new(&documents, &rope);
    let mut x = model.embed_tokens.forward(ids);
    let mut rows = Vec::new();
    for layer in &model.layers {
        let Attention::Dma(dma) = &layer.self_attn else {
            bail!("this model has no DMA, so its keys have no scores");
        };
        let qkv = dma
            .qkv
            .forward(layer.input_layernorm.forward(x.clone()), &context);
        let z = B::dma_scores(
            qkv.into_primitive().tensor(),
            dma.dt_proj
                .weight
                .val()
                .transpose()
                .into_primitive()
                .tensor(),
            dma.a.val().into_primitive().tensor(),
            dma.qkv.spec(None),
        );
        let z = Tensor::<B, 3>::from_primitive(TensorPrimitive::Float(z)).into_data();
        let z: Vec<f32> = z
            .convert::<f32>()
            .to_vec()
            .map_err(|e| anyhow::anyhow!("{e:?}"))
            .context("reading scores")?;
        rows.extend(z.chunks_exact(tokens.len()).map(<[f32]>::to_vec));
        x = layer.forward(x, &context).x;
    }
    Ok(rows)
}
