//! Eight-bit floats on CUDA: rounded by our kernels, multiplied by cuBLASLt.
use super::backend::{Fp8Gradients, Fp8Kept};
use super::reference;
use crate::device::cuda::{Cuda, tensors};
use crate::device::paths::kernel_or;
use crate::linear::reference::added;
use burn::tensor::DType::{BF16, F32};
use sieve_kernels::step::{Fp8Format, Fp8Matrix, fp8_quantise, residual_add};
use sieve_kernels::{CudaPrimitive as Float, CudaTensor, KernelError, MatmulOutput};

const NAME: &str = "fp8_linear";

impl Fp8Gradients for Cuda {
    fn fp8_linear(x: Float, weight: Float, residual: Option<Float>) -> (Float, Fp8Kept<Self>) {
        let attempt = forward(tensors([&x, &weight]), residual.as_ref());
        kernel_or(NAME, attempt, || reference::fp8_linear::<Self>(x, weight, residual))
    }

    fn fp8_linear_backward(kept: Fp8Kept<Self>, dy: Float, sum: Option<Float>) -> [Float; 2] {
        let total = sum.clone().map(CudaTensor::from);
        let attempt = match &kept.scales {
            Some(scales) => backward(&kept, scales, &CudaTensor::from(dy.clone()), total.as_ref()),
            None => {
                let [dx, dweight] = reference::fp8_linear_backward::<Self>(kept, dy);
                return [dx, added::<Self>(sum, dweight)];
            }
        };
        kernel_or("fp8_linear_backward", attempt, || {
            unreachable!("whoever rounded the operands can round the gradient")
        })
    }
}

fn forward([x, weight]: [CudaTensor; 2], residual: Option<&Float>) -> Result<(Float, Fp8Kept<Cuda>), KernelError> {
    let mut shape = x.shape().to_vec();
    let [out, inner] = weight.dims(NAME, "weight")?;
    *shape.last_mut().expect("fp8_quantise wants a width") = out;
    let x = fp8_quantise(&x, Fp8Format::E4m3)?;
    let weight = fp8_quantise(&weight, Fp8Format::E4m3)?;
    let product = |output| x.rows.times(&weight.rows, output);
    let y = match residual.map(|residual| CudaTensor::from(residual.clone())) {
        None => product(MatmulOutput::New(BF16))?,
        // As in bf16: free where the product is square.
        Some(residual) if inner <= out => product(MatmulOutput::Plus(&residual))?,
        Some(residual) => {
            let y = product(MatmulOutput::New(BF16))?.reshaped(NAME, "y", &shape)?;
            residual_add(&residual, &y)?
        }
    };
    let kept = Fp8Kept {
        x: x.columns.values.into(),
        weight: weight.columns.values.into(),
        scales: Some([x.columns.scale.into(), weight.columns.scale.into()]),
    };
    Ok((y.reshaped(NAME, "y", &shape)?.into(), kept))
}

fn backward(
    kept: &Fp8Kept<Cuda>,
    scales: &[Float; 2],
    dy: &CudaTensor,
    sum: Option<&CudaTensor>,
) -> Result<[Float; 2], KernelError> {
    let [x, weight] = [(&kept.x, &scales[0]), (&kept.weight, &scales[1])].map(|(values, scale)| Fp8Matrix {
        values: values.clone().into(),
        scale: scale.clone().into(),
        format: Fp8Format::E4m3,
    });
    let mut shape = dy.shape().to_vec();
    let [inner, _out] = weight.values.dims(NAME, "the weight")?;
    *shape.last_mut().expect("fp8_quantise wants a width") = inner;
    let dy = fp8_quantise(dy, Fp8Format::E5m2)?;
    let dx = dy.rows.times(&weight, MatmulOutput::New(BF16))?;
    let output = sum.map_or(MatmulOutput::New(F32), MatmulOutput::AddTo);
    let dweight = dy.columns.times(&x, output)?;
    Ok([dx.reshaped(NAME, "dx", &shape)?.into(), dweight.into()])
}
