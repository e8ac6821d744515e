//! The choice of blocks on the host, in f64.
use super::ChoiceCall;
use crate::DocumentBounds;
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

/// The blocks that a caller gives each query, in the form that attention reads.
pub fn selected_blocks<B: Backend>(
    indices: Ints<B>,
    counts: Option<Ints<B>>,
    documents: &DocumentBounds<B>,
    block: usize,
) -> Ints<B> {
    let indices = Tensor::<B, 4, Int>::from_primitive(indices);
    let ([batch, seq_len, choosers, num_indices], device) = (indices.dims(), indices.device());
    // A number that 32 bits do not hold is no block of a row, and more than all indices.
    let host = |data: TensorData| -> Vec<i32> {
        data.iter::<i64>().map(|x| x.clamp(i64::from(i32::MIN), i64::from(i32::MAX)) as i32).collect()
    };
    let indices = host(indices.into_data());
    let counts = counts.map(|counts| host(Tensor::<B, 3, Int>::from_primitive(counts).into_data()));
    let given = sieve_cpu::nsa::SelectedBlocks { indices: &indices, counts: counts.as_deref(), num_indices, block };
    let attended = given.attended(HostBounds::new::<B>(documents).slices().start, seq_len);
    let blocks = attended.len() / (batch * seq_len * choosers);
    let data = TensorData::new(attended, [batch, seq_len, choosers, blocks]);
    Tensor::<B, 4, Int>::from_data(data, &device).into_primitive()
}
