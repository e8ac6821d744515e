//! Launches of `kernels/fp8_amax.cu` and `kernels/fp8_quantise.cu`: a bf16 matrix and its transpose in fp8 with one
//! scale. In fp8 GEMMs both operands must be contiguous along the summed dimension, so a matrix that is summed along
//! rows in one GEMM and along columns in another is needed in both layouts.
use crate::KernelError;
use crate::runtime::{CudaTensor, DType, SourceKernel, params, require, require_non_empty};
use crate::step::{WORD_ELEMENTS, require_alignment};
use sieve_core::Fp8Format;

const NAME: &str = "fp8_quantise";
const AMAX: &str = "fp8_amax";

/// Elements that a thread block of fp8_amax reads in one step.
const AMAX_ELEMENTS: usize = 256 * 4 * WORD_ELEMENTS;
/// Most thread blocks of fp8_amax: four for each multiprocessor of a large GPU.
const MAX_PARTIALS: usize = 528;
/// Partial maxima of a kernel that computes them beside its output, see [`with_amax`].
pub(crate) const AMAX_PARTIALS: usize = 512;
/// Rows and columns of a thread block of fp8_quantise.
const TILE: usize = 128;
/// Every size of an fp8 GEMM is a multiple of this.
const MULTIPLE: usize = 16;

/// A contiguous fp8 matrix and its scale, both on the device.
#[derive(Debug, Clone)]
pub struct Fp8Matrix {
    /// `[rows, width]`, one byte for each element.
    pub values: CudaTensor,
    /// The factor that turns fp8 numbers into values, f32 `[1]`.
    pub scale: CudaTensor,
    /// The fp8 format of the bytes.
    pub format: Fp8Format,
}

/// An fp8 matrix and its transpose.
#[derive(Debug, Clone)]
pub struct Fp8Pair {
    /// The matrix, `[rows, width]`.
    pub rows: Fp8Matrix,
    /// The transpose of the matrix, `[width, rows]`.
    pub columns: Fp8Matrix,
}

/// Quantises a bf16 tensor `[.., width]` to fp8. The scale maps the largest magnitude to the largest number of the
/// format. `amax` holds partial maxima of |x|, f32 and contiguous, if the kernel that wrote x computed them.
///
/// # Errors
/// Another type, a width or a number of rows that is not a multiple of 16, a GPU below compute capability 8.9.
pub fn fp8_quantise(x: &CudaTensor, format: Fp8Format, amax: Option<&CudaTensor>) -> Result<Fp8Pair, KernelError> {
    x.require_dtype(NAME, "x", DType::BF16)?;
    let width = x.shape().last().copied().unwrap_or(0);
    require_non_empty(NAME, "the number of elements", x.num_elements())?;
    let rows = x.num_elements() / width;
    require!(rows.is_multiple_of(MULTIPLE), NAME, "number of rows": rows, "multiples of {MULTIPLE}");
    require!(width.is_multiple_of(MULTIPLE), NAME, "width": width, "multiples of {MULTIPLE}");
    require_fp8(x.hardware().compute_capability)?;
    let x = x.contiguous();
    require_alignment(NAME, "x", &x)?;
    let amax = match amax {
        Some(amax) => {
            amax.require_dtype(NAME, "amax", DType::F32)?;
            amax.require_contiguous(NAME, "amax")?;
            amax.clone()
        }
        None => largest_magnitudes(&x)?,
    };
    let new = |shape: &[usize], dtype| x.empty_contiguous(shape, dtype);
    let (values, transposed) = (new(&[rows, width], DType::U8), new(&[width, rows], DType::U8));
    let scale = new(&[1], DType::F32);
    let grid = [width.div_ceil(TILE), rows.div_ceil(TILE), 1];
    let params = params!(Fp8QuantiseParams { num_rows: rows, width, num_partials: amax.num_elements() });
    // SAFETY: reads all elements and maxima, writes every byte of both copies and the scale.
    unsafe {
        let tensors = [&x, &amax, &values, &transposed, &scale];
        fp8_quantise_kernel(format).launch(grid, &tensors, &params)
    }?;
    let matrix = |values| Fp8Matrix { values, scale: scale.clone(), format };
    Ok(Fp8Pair { rows: matrix(values), columns: matrix(transposed) })
}

/// Partial maxima of |x| of a contiguous tensor, one for each thread block.
fn largest_magnitudes(x: &CudaTensor) -> Result<CudaTensor, KernelError> {
    let num_elements = x.num_elements();
    let num_partials = num_elements.div_ceil(AMAX_ELEMENTS).min(MAX_PARTIALS);
    let amax = x.empty_contiguous(&[num_partials], DType::F32);
    let params = params!(Fp8AmaxParams { num_elements });
    // SAFETY: reads all elements, writes one number for each thread block.
    unsafe { FP8_AMAX.launch([num_partials, 1, 1], &[x, &amax], &params) }?;
    Ok(amax)
}

/// Whether a GPU of this compute capability runs fp8 GEMMs.
///
/// # Errors
/// [`KernelError::Refused`] below 8.9.
pub fn require_fp8((major, minor): (u32, u32)) -> Result<(), KernelError> {
    let fits = (major, minor) >= (8, 9);
    require!(fits, NAME, "compute capability": format!("{major}.{minor}"), "8.9 and later");
    Ok(())
}

/// Makes a kernel also write partial maxima of its output's magnitude (`kernels/common/amax.cuh`).
pub(crate) fn with_amax(kernel: SourceKernel) -> SourceKernel {
    kernel.define("AMAX_PARTIALS", AMAX_PARTIALS)
}

/// The kernel that computes partial maxima of absolute values.
const FP8_AMAX: SourceKernel = SourceKernel::new(AMAX).threads(256);

/// The kernel that quantises to an fp8 format.
fn fp8_quantise_kernel(format: Fp8Format) -> SourceKernel {
    SourceKernel::new(NAME).define("E5M2", (format == Fp8Format::E5m2) as u8).threads(256)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Hardware, Recorder};

    #[test]
    fn sizes_and_devices_without_fp8_gemms_are_refused_by_name() {
        let ada = Hardware { compute_capability: (8, 9), ..Hardware::AMPERE };
        let text = |hardware, shape: &[usize]| {
            let x = Recorder::new(hardware).tensor(shape, DType::BF16);
            fp8_quantise(&x, Fp8Format::E4m3, None).map_or_else(|e| e.to_string(), |_| "taken".to_owned())
        };
        assert_eq!(text(ada, &[2, 24, 48]), "taken");
        assert!(text(ada, &[2, 20, 48]).contains("number of rows 40"));
        assert!(text(ada, &[16, 24]).contains("width 24"));
        assert!(text(Hardware::AMPERE, &[16, 32]).contains("compute capability 8.0"));
    }
}
