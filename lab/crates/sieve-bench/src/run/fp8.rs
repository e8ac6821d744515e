//! `sieve kernels run fp8`: a GEMM with a weight in fp8, its rounded operands and its gradients.
use super::branches::Tensors;
use crate::case::scaled_normals;
use crate::device::{Device, Gpu};
use crate::error::{BenchError, Result};
use crate::tensors::{Computes, floats, typed};
use burn::tensor::DType;
use sieve_hf::NamedTensor;
use sieve_kernels::AttentionShape;
use sieve_kernels::step::{Fp8Format, fp8_quantise};
use sieve_ops::{ToQuantise, reference};
use sieve_testing::Random;

/// Values rounded to an fp8 format, and the scale by which they must be multiplied to get the originals.
pub(super) type Rounded = Result<(Vec<f32>, f32)>;

/// Rounds a matrix of these rows and columns to an fp8 format.
pub(super) type Round<'a> = dyn Fn(&[f32], [usize; 2], Fp8Format) -> Rounded + 'a;

/// Rounds values to fp8 by the definition.
pub(super) fn on_host(values: &[f32], _sizes: [usize; 2], format: Fp8Format) -> Rounded {
    Ok(reference::fp8_quantise(values, format))
}

/// Rounds values to fp8 by the kernels; `sizes` are rows and columns.
pub(super) fn on_cuda(device: &Gpu, values: &[f32], sizes: [usize; 2], format: Fp8Format) -> Rounded {
    let x = device.float(values, &sizes, sieve_kernels::DType::BF16);
    let read = || {
        let no_partial_maxima = None;
        let rows = fp8_quantise(&x, format, no_partial_maxima)?.rows;
        Ok((device.floats(&rows.values)?, device.floats(&rows.scale)?[0]))
    };
    let (bytes, scale) = read().map_err(BenchError::NotTaken)?;
    let numbers = bytes.into_iter().map(|byte| format.number_of(byte as u8));
    Ok((numbers.collect(), scale))
}

/// `y = x w^T` of x `[batch, seq_len, num_heads * head_dim]` and w `[num_kv_heads * head_dim, num_heads * head_dim]`,
/// both rounded to e4m3; dx and dw of dy, which is rounded to e5m2.
pub(super) fn tensors<B: Computes>(
    shape: AttentionShape,
    (seed, magnitude): (u64, f32),
    device: &B::Device,
    round: &Round<'_>,
) -> Result<Vec<NamedTensor>> {
    let (batch, seq_len) = (shape.batch, shape.seq_len);
    let [inner, outer] = [shape.num_heads, shape.num_kv_heads].map(|heads| heads * shape.head_dim);
    let mut random = Random(seed);
    let rows = batch * seq_len;
    let [x, weight, dy] = [(rows * inner, magnitude), (outer * inner, magnitude), (rows * outer, 1.0)]
        .map(|(count, factor)| scaled_normals(&mut random, count, factor));
    let mut tensors = Tensors::new(B::DTYPE);
    for (name, values, sizes, format) in [
        ("x", &x, [rows, inner], Fp8Format::E4m3),
        ("weight", &weight, [outer, inner], Fp8Format::E4m3),
        ("dy", &dy, [rows, outer], Fp8Format::E5m2),
    ] {
        let (numbers, scale) = round(values, sizes, format)?;
        tensors.floats(name, values, &sizes, DType::BF16);
        tensors.floats(&format!("{name}_rounded"), &numbers, &sizes, DType::F32);
        tensors.floats(&format!("{name}_scale"), &[scale], &[1], DType::F32);
    }
    let to_round = |values: &[f32], width| ToQuantise::new(typed::<B, 3>(values, [batch, seq_len, width], device));
    let (no_residual, no_earlier_dweight) = (None, None);
    let (y, kept) = B::fp8_linear(to_round(&x, inner), typed::<B, 2>(&weight, [outer, inner], device), no_residual);
    let [dx, dweight] = B::fp8_linear_backward(kept, to_round(&dy, outer), no_earlier_dweight);
    tensors.output("y", &floats::<B, 3>(y), &[rows, outer]);
    tensors.output("dx", &floats::<B, 3>(dx), &[rows, inner]);
    tensors.floats("dweight", &floats::<B, 2>(dweight), &[outer, inner], DType::F32);
    Ok(tensors.list)
}
