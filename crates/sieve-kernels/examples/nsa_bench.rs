//! Times the kernels of native sparse attention on a GPU: `nsa_bench CACHE_DIR [HEADSxKV_HEADSxTOKENS ...]`.
//!
//! Blocks of 32 by 16, 16 selected blocks of 64, a window of 512, heads of 128. Prints, for each shape, the time in
//! which each branch kept the GPU busy, forward and backward, and the kernels that took most of it.
#![allow(clippy::print_stdout)]
use burn::tensor::{DType, Distribution, Int, Shape, Tensor};
use burn_cuda::CudaDevice;
use sieve_core::NsaBlocks;
use sieve_kernels::{
    AttentionGradients, AttentionResult, CudaTensor, KernelCache, KernelError, KernelTrace, Qkv,
    SumOrder, attention_backward, attention_forward, init_runtime, nsa_blocks, nsa_blocks_backward,
    nsa_compressed_attention_backward, nsa_compressed_attention_forward, nsa_gates,
    nsa_gates_backward, nsa_selected_attention_backward, nsa_selected_attention_forward, probe,
};
use std::path::Path;
use std::process::ExitCode;

type Cuda = burn_cuda::Cuda<f32, i32>;

const HEAD_DIM: usize = 128;
const WINDOW: usize = 512;
const REPEATS: usize = 3;
const BLOCKS: NsaBlocks = NsaBlocks {
    compress_block_size: 32,
    compress_stride: 16,
    select_block_size: 64,
    num_selected_blocks: 16,
};

fn random<const D: usize>(shape: [usize; D], device: &CudaDevice) -> CudaTensor {
    let normal = Distribution::Normal(0.0, 1.0);
    let tensor = Tensor::<Cuda, D>::random(Shape::new(shape), normal, device).cast(DType::BF16);
    CudaTensor::from(tensor.into_primitive().tensor()).contiguous()
}

fn filled(value: i32, tokens: usize, device: &CudaDevice) -> CudaTensor {
    let tensor = Tensor::<Cuda, 2, Int>::full([1, tokens], value, device);
    CudaTensor::from(tensor.into_primitive()).contiguous()
}

/// Waits for the GPU.
fn synchronize(tensor: &CudaTensor) {
    let first = tensor.primitive().clone();
    let tensor = Tensor::<Cuda, 3>::from_primitive(burn::tensor::TensorPrimitive::Float(first));
    let _ = tensor.slice([0..1, 0..1, 0..1]).into_data();
}

/// Time that the GPU was busy, in ms, and the kernels.
fn busy(
    name: &str,
    lse: &CudaTensor,
    mut run: impl FnMut() -> Result<(), KernelError>,
) -> Result<f64, KernelError> {
    run()?;
    synchronize(lse);
    let trace = KernelTrace::start()?;
    for _ in 0..REPEATS {
        run()?;
    }
    synchronize(lse);
    let result = trace.finish()?;
    let ms = |ns: u64| ns as f64 / 1e6 / REPEATS as f64;
    let all = ms(result.busy_ns());
    let kernels: Vec<String> = result
        .totals()
        .iter()
        .take(6)
        .map(|total| format!("{} {:.3}", total.name, ms(total.total_ns)))
        .collect();
    println!("    {name:22} {all:8.3} ms   {}", kernels.join(", "));
    Ok(all)
}

fn shape_of(text: &str) -> Option<[usize; 3]> {
    let sizes: Vec<usize> = text.split('x').filter_map(|x| x.parse().ok()).collect();
    sizes.try_into().ok()
}

fn bench([heads, kv_heads, tokens]: [usize; 3], device: &CudaDevice) -> Result<(), KernelError> {
    println!("{heads}/{kv_heads} heads, {tokens} tokens");
    let qkv = random([1, tokens, heads + 2 * kv_heads, HEAD_DIM], device);
    let d_o = random([1, tokens, heads, HEAD_DIM], device);
    let (start, end) = (
        filled(0, tokens, device),
        filled(tokens as i32, tokens, device),
    );
    let documents = [&start, &end];
    let rows = BLOCKS.num_slots(tokens) * kv_heads;
    let compressed = random([2, rows, HEAD_DIM], device);
    let packed = Qkv::packed(&qkv, heads, kv_heads);
    let shape = packed.shape("nsa_bench")?;
    let scale = 1.0 / (HEAD_DIM as f32).sqrt();
    let order = SumOrder::Any;
    let (coarse, indices) =
        nsa_compressed_attention_forward(&packed, documents, &compressed, BLOCKS, scale)?;
    let selected = nsa_selected_attention_forward(&packed, documents, &indices, BLOCKS, scale)?;
    let window = attention_forward(&packed, &start, Some(WINDOW), scale, None)?;
    let lse = &selected.lse;
    let grads = qkv.empty_contiguous(qkv.shape(), DType::BF16);
    let grads = Qkv::packed(&grads, heads, kv_heads);
    fn gradients<'a>(
        (qkv, grads): (&'a Qkv, &'a Qkv),
        result: &'a AttentionResult,
        d_o: &'a CudaTensor,
        softmax_scale: f32,
    ) -> AttentionGradients<'a> {
        AttentionGradients {
            qkv,
            result,
            d_o,
            grads,
            softmax_scale,
            order: SumOrder::Any,
        }
    }
    let mut forward = busy("compressed, choice", lse, || {
        nsa_compressed_attention_forward(&packed, documents, &compressed, BLOCKS, scale).map(drop)
    })?;
    forward += busy("selected", lse, || {
        nsa_selected_attention_forward(&packed, documents, &indices, BLOCKS, scale).map(drop)
    })?;
    forward += busy("window", lse, || {
        attention_forward(&packed, &start, Some(WINDOW), scale, None).map(drop)
    })?;
    let logits = random([1, tokens, heads * 3], device);
    let bias = random([heads * 3], device);
    let bias = CudaTensor::from(burn_cubecl::kernel::cast(
        bias.primitive().clone(),
        DType::F32,
    ));
    let branches = [&coarse.o, &selected.o, &window.o];
    forward += busy("gates", lse, || {
        nsa_gates(branches, &logits, &bias).map(drop)
    })?;
    let positions = random([BLOCKS.compress_block_size, HEAD_DIM], device);
    let positions = [&positions, &positions];
    let blocks = nsa_blocks(&packed, positions, documents, BLOCKS)?;
    forward += busy("blocks", lse, || {
        nsa_blocks(&packed, positions, documents, BLOCKS).map(drop)
    })?;
    let mut backward = busy("compressed backward", lse, || {
        nsa_compressed_attention_backward(
            &packed,
            documents,
            &compressed,
            BLOCKS,
            scale,
            &coarse,
            &d_o,
            order,
        )
        .map(drop)
    })?;
    backward += busy("selected backward", lse, || {
        let call = gradients((&packed, &grads), &selected, &d_o, scale);
        nsa_selected_attention_backward(call, documents, &indices, BLOCKS)
    })?;
    backward += busy("window backward", lse, || {
        let call = gradients((&packed, &grads), &window, &d_o, scale);
        attention_backward(call, documents, Some(WINDOW), None).map(drop)
    })?;
    backward += busy("gates backward", lse, || {
        nsa_gates_backward(branches, &logits, &bias, &d_o).map(drop)
    })?;
    backward += busy("blocks backward", lse, || {
        nsa_blocks_backward(&shape, documents, BLOCKS, &blocks).map(drop)
    })?;
    let dense = attention_forward(&packed, &start, None, scale, None)?;
    let dense_forward = busy("dense", lse, || {
        attention_forward(&packed, &start, None, scale, None).map(drop)
    })?;
    let dense_backward = busy("dense backward", lse, || {
        let call = gradients((&packed, &grads), &dense, &d_o, scale);
        attention_backward(call, documents, None, None).map(drop)
    })?;
    println!(
        "  nsa {forward:.2} + {backward:.2} ms, dense {dense_forward:.2} + {dense_backward:.2} ms"
    );
    Ok(())
}

fn run(arguments: &[String]) -> Result<(), KernelError> {
    let report = probe()?;
    let device = report.device(0)?;
    let cache = KernelCache::open(Path::new(&arguments[0]), &device.arch(), report.nvrtc)?;
    init_runtime(&cache)?;
    let device = CudaDevice::new(0);
    for shape in arguments[1..].iter().filter_map(|text| shape_of(text)) {
        bench(shape, &device)?;
    }
    Ok(())
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.is_empty() {
        println!("nsa_bench CACHE_DIR [HEADSxKV_HEADSxTOKENS ...]");
        return ExitCode::FAILURE;
    }
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("{error}");
            ExitCode::FAILURE
        }
    }
}
