//! Burn's CUDA backend, compiled once.
//!
//! CubeCL's CUDA ops are generic: rustc compiles an op, with all its kernels, in the crate that calls it. At opt-level
//! "s" or 1 it reuses an instance of a generic function from a dependency. The tables here instantiate the large ops in
//! this crate, so that an edit in `sieve-ops` compiles `sieve-ops` alone. An op that is missing here still works, but
//! costs compile time in the crates above.
//!
//! `sieve-kernels` is compiled at a higher opt-level and would instantiate ops again, so it calls [`contiguous_copy`].

use burn::tensor::ops::{BoolTensorOps, FloatTensor, FloatTensorOps, IntTensorOps, QTensorOps};
use burn::tensor::quantization::{QuantScheme, QuantizationParametersPrimitive};
use burn::tensor::{BoolDType, FloatDType, IntDType, Scalar, Slice};

pub use burn_cuda::CudaDevice;

/// Burn's CUDA backend, without fusion.
pub type Cuda = burn_cuda::Cuda<f32, i32>;

/// A tensor of any element type; CubeCL has one type for all.
pub type Primitive = FloatTensor<Cuda>;

/// A copy of a tensor's elements in index order, without gaps, made on the stream.
pub fn contiguous_copy(tensor: &Primitive) -> cubecl::server::Handle {
    cubecl::std::tensor::into_contiguous(&tensor.client, tensor.clone().binding(), tensor.dtype.into()).handle
}

type Quantize = fn(Primitive, &QuantScheme, QuantizationParametersPrimitive<Cuda>) -> Primitive;
type SelectAdd = fn(Primitive, usize, Primitive, Primitive) -> Primitive;
type SliceAssign = fn(Primitive, &[Slice], Primitive) -> Primitive;

/// Burn's float ops of one tensor.
pub static UNARY: &[fn(Primitive) -> Primitive] = &[
    Cuda::float_abs,
    Cuda::float_exp,
    Cuda::float_log,
    Cuda::float_max,
    Cuda::float_mean,
    Cuda::float_min,
    Cuda::float_recip,
    Cuda::float_sqrt,
    Cuda::float_sum,
];

/// Burn's bool, float and int ops of two tensors.
pub static BINARY: &[fn(Primitive, Primitive) -> Primitive] = &[
    Cuda::bool_and,
    Cuda::bool_or,
    Cuda::float_add,
    Cuda::float_div,
    Cuda::float_matmul,
    Cuda::float_mul,
    Cuda::float_sub,
    Cuda::int_add,
    Cuda::int_mul,
    Cuda::int_sub,
];

/// Burn's float and int ops of a tensor and a number.
pub static SCALAR: &[fn(Primitive, Scalar) -> Primitive] = &[
    Cuda::float_add_scalar,
    Cuda::float_div_scalar,
    Cuda::float_mul_scalar,
    Cuda::float_powf_scalar_impl,
    Cuda::float_sub_scalar,
    Cuda::int_add_scalar,
    Cuda::int_mul_scalar,
    Cuda::int_sub_scalar,
];

/// Comparisons of two tensors.
pub static COMPARE: &[fn(Primitive, Primitive, BoolDType) -> Primitive] = &[
    Cuda::float_equal,
    Cuda::float_greater_equal,
    Cuda::float_lower,
    Cuda::int_equal,
    Cuda::int_greater,
    Cuda::int_greater_equal,
    Cuda::int_lower,
];

/// Comparisons with a number.
pub static COMPARE_SCALAR: &[fn(Primitive, Scalar, BoolDType) -> Primitive] = &[
    Cuda::float_equal_elem,
    Cuda::float_greater_elem,
    Cuda::int_equal_elem,
    Cuda::int_greater_equal_elem,
    Cuda::int_lower_elem,
];

/// Burn's reductions along a dimension.
pub static REDUCE: &[fn(Primitive, usize) -> Primitive] = &[
    Cuda::float_max_dim,
    Cuda::float_mean_dim,
    Cuda::float_min_dim,
    Cuda::float_sum_dim,
    Cuda::int_max_dim,
    Cuda::int_min_dim,
    Cuda::int_sum_dim,
];

/// Index of the largest or smallest element along a dimension.
pub static ARG: &[fn(Primitive, usize, IntDType) -> Primitive] = &[Cuda::float_argmax, Cuda::float_argmin];

/// Ops that take a tensor, a mask and values.
pub static MASK: &[fn(Primitive, Primitive, Primitive) -> Primitive] = &[Cuda::float_mask_where, Cuda::int_mask_where];

/// Ops that take a tensor, a mask and a number.
pub static MASK_FILL: &[fn(Primitive, Primitive, Scalar) -> Primitive] = &[Cuda::float_mask_fill, Cuda::int_mask_fill];

/// Ops that take a dimension, a tensor and indices.
pub static GATHER: &[fn(usize, Primitive, Primitive) -> Primitive] = &[Cuda::float_gather, Cuda::int_gather];

/// Ops that take a tensor, a dimension and indices.
pub static SELECT: &[fn(Primitive, usize, Primitive) -> Primitive] = &[Cuda::float_select, Cuda::int_select];

/// The op that takes a tensor, a dimension, indices and values, and adds the values.
pub static SELECT_ADD: SelectAdd = Cuda::float_select_add;

/// Ops that take a tensor and ranges.
pub static SLICE: &[fn(Primitive, &[Slice]) -> Primitive] = &[Cuda::float_slice, Cuda::int_slice];

/// Ops that take a tensor, ranges and values.
pub static SLICE_ASSIGN: &[SliceAssign] = &[Cuda::float_slice_assign, Cuda::int_slice_assign];

/// The op that takes a dimension, a tensor, indices and values, and adds the values.
pub static SCATTER_ADD: fn(usize, Primitive, Primitive, Primitive) -> Primitive = Cuda::float_scatter_add;

/// Ops that test each element for infinity or NaN.
pub static TEST: &[fn(Primitive, BoolDType) -> Primitive] = &[Cuda::float_is_inf, Cuda::float_is_nan];

/// Casts of a bool or float tensor to a float type.
pub static CAST: &[fn(Primitive, FloatDType) -> Primitive] = &[Cuda::bool_into_float, Cuda::float_cast];

/// Quantisation to eight-bit integers. Sieve does not use it, but Burn's matmuls take such tensors too.
pub static QUANTIZE: Quantize = Cuda::quantize;
