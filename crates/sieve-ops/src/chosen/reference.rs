//! The choice of blocks on the host, in f64.
use super::ChoiceCall;
use crate::attention::cpu::shape_of;
use crate::documents::HostBounds;
use crate::tensors::{Float, Ints, split_heads, tensor};
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData};

/// Each query's blocks, by the keys in `pooled[0]`; `pooled` is `[1 or 2, batch * num_slots * num_kv_heads, head_dim]`.
pub fn choose_key_blocks<B: Backend>(qkv: Float<B>, pooled: Float<B>, call: &ChoiceCall<B>) -> Ints<B> {
    let (spec, choice) = (call.spec, call.choice);
    let qkv = tensor::<B, 4>(qkv);
    let (dims, device) = (qkv.dims(), qkv.device());
    let host = |x: TensorData| x.iter::<f64>().collect::<Vec<f64>>();
    let [q, _, _] = split_heads(qkv, spec.num_kv_heads);
    let keys = host(tensor::<B, 3>(pooled).narrow(0, 0, 1).into_data());
    let choosers = choice.num_choosers(spec.num_heads, spec.num_kv_heads);
    let sizes = [dims[0], dims[1], choosers, choice.blocks.num_selected_blocks];
    let mut chosen = vec![0i32; sizes.iter().product()];
    sieve_cpu::nsa::choose_key_blocks(
        shape_of(dims, spec),
        choice,
        &host(q.into_data()),
        HostBounds::new::<B>(&call.documents).slices(),
        &keys,
        &mut chosen,
    );
    Tensor::<B, 4, Int>::from_data(TensorData::new(chosen, sizes), &device).into_primitive()
}
