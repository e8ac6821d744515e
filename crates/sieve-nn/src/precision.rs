//! A model's parameters in another float type.
use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Tensor};

/// Casts every float parameter, for example to bf16 before inference on a GPU.
pub fn cast_parameters<B: Backend, M: Module<B>>(module: M, dtype: DType) -> M {
    module.map(&mut Cast { dtype })
}

struct Cast {
    dtype: DType,
}

impl<B: Backend> ModuleMapper<B> for Cast {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        param.map(|tensor| tensor.cast(self.dtype))
    }
}
