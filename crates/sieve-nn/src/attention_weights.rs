//! Attention weights of a layer, computed by the layer's own ops.
//!
//! The output of attention is linear in the values. If key c has a value that is one-hot in column c, column c of the
//! output is the weight of key c. One call gives the weights of `head_dim` keys. This works for every kind of
//! attention, with the kernels that trained the model.
use crate::{LayerContext, QkvProjection};
use burn::tensor::{Tensor, TensorData};
use sieve_ops::{AttentionSpec, SieveBackend};

/// Weights of dense or sliding-window attention with the queries and keys of `qkv`.
pub(crate) fn dense<B: SieveBackend>(
    qkv: &QkvProjection<B>,
    spec: AttentionSpec,
    x: Tensor<B, 3>,
    context: &LayerContext<'_, B>,
) -> Tensor<B, 3> {
    let qkv = qkv.forward(x, context);
    by_key(&qkv, |one_hot| sieve_ops::attention(with_values(&qkv, one_hot, spec.num_kv_heads), context.documents, spec))
}

/// The packed tensor with `values`, `[1, seq_len, head_dim]`, in place of every KV head's values.
pub(crate) fn with_values<B: SieveBackend>(
    qkv: &Tensor<B, 4>,
    values: Tensor<B, 3>,
    num_kv_heads: usize,
) -> Tensor<B, 4> {
    let heads = qkv.dims()[2];
    let values = values.unsqueeze_dim::<4>(2).repeat_dim(2, num_kv_heads);
    Tensor::cat(vec![qkv.clone().narrow(2, 0, heads - num_kv_heads), values], 2)
}

/// Calls `attend` with one-hot values of `head_dim` keys at a time, `[1, seq_len, head_dim]`, and concatenates its
/// outputs, `[1, seq_len, num_heads, head_dim]`, to the weights `[num_heads, seq_len, seq_len]`. `like`, `[1, seq_len,
/// _, head_dim]`, gives sizes, device and dtype.
pub(crate) fn by_key<B: SieveBackend>(
    like: &Tensor<B, 4>,
    attend: impl Fn(Tensor<B, 3>) -> Tensor<B, 4>,
) -> Tensor<B, 3> {
    let [batch, seq_len, _, head_dim] = like.dims();
    assert_eq!(batch, 1, "weights are of one document");
    let columns = (0..seq_len).step_by(head_dim).map(|first| {
        let mut rows = vec![0.0_f32; seq_len * head_dim];
        for key in first..(first + head_dim).min(seq_len) {
            rows[key * head_dim + key - first] = 1.0;
        }
        let rows = TensorData::new(rows, [1, seq_len, head_dim]);
        let o = attend(Tensor::from_data(rows, (&like.device(), like.dtype())));
        o.squeeze_dim::<3>(0).swap_dims(0, 1)
    });
    let all = Tensor::cat(columns.collect(), 2);
    all.narrow(2, 0, seq_len)
}

#[cfg(test)]
mod tests {
    use crate::layer::KindAttention;
    use crate::testing::{Rows, assert_close, input, kinds, msa_in_warmup, nsa, shape, values};
    use crate::{Attention, PassState, WeightInit};
    use burn::tensor::Tensor;
    use burn_flex::Flex;
    use sieve_core::model::NsaCompression;

    /// Values of every query head, `[seq_len, num_heads, head_dim]`.
    fn of_queries(kv: Tensor<Flex, 4>, group: usize) -> Tensor<Flex, 3> {
        let [_, seq_len, heads, head_dim] = kv.dims();
        let all = kv.reshape([seq_len, heads, 1, head_dim]).repeat_dim(2, group);
        all.reshape([seq_len, heads * group, head_dim])
    }

    #[test]
    fn weights_times_values_are_the_layers_output() {
        // In the other forms of NSA the branches have different values, so no single matrix of weights gives the
        // output.
        let with_one_value_a_key =
            |attention: &sieve_core::Attention| !matches!(attention, sieve_core::Attention::Nsa(_));
        let kinds = kinds(0.5).into_iter().filter(with_one_value_a_key);
        for attention in kinds.chain([nsa(NsaCompression::Mean, true), msa_in_warmup()]) {
            let shape = shape(attention);
            let rows = Rows::new([1, 29], &shape);
            let context = rows.context();
            let x = input::<Flex, 3>([1, 29, 24], 5);
            let mut init = WeightInit::new(1, 0.2);
            let layer = Attention::<Flex>::new(&shape, &mut init, &Default::default());
            let layer_of = layer.as_layer();
            let weights = layer_of.weights(x.clone(), &context, &PassState::default());
            assert_eq!(weights.dims(), [shape.num_heads, 29, 29], "{attention:?}");
            let kv_heads = shape.num_kv_heads;
            let v = |qkv: Tensor<Flex, 4>| {
                let heads = qkv.dims()[2];
                of_queries(qkv.narrow(2, heads - kv_heads, kv_heads), shape.num_heads / kv_heads)
            };
            let (v, o_proj) = match &layer {
                Attention::Grouped(layer) => (v(layer.qkv.forward(x.clone(), &context)), &layer.o_proj),
                Attention::Ranked(layer) => (v(layer.qkv.forward(x.clone(), &context)), &layer.o_proj),
                Attention::Latent(layer) => {
                    let packed = layer.project(x.clone(), &context).packed;
                    let spec = layer.spec();
                    let (width, values) = (packed.dims()[2], spec.num_heads * spec.head_dim);
                    let v = packed.narrow(2, width - values, values);
                    (v.reshape([29, spec.num_heads, spec.head_dim]), &layer.o_proj)
                }
                Attention::Branches(layer) => (v(layer.qkv.forward(x.clone(), &context)), &layer.o_proj),
                Attention::Chosen(layer) => (v(layer.qkv.forward(x.clone(), &context)), &layer.o_proj),
            };
            let o = weights.matmul(v.swap_dims(0, 1)).swap_dims(0, 1);
            let [seq_len, heads, head_dim] = o.dims();
            let y = o_proj.forward(o.reshape([1, seq_len, heads * head_dim]));
            let expected = layer_of.forward(x.clone(), x.zeros_like(), &context, &mut PassState::default(), None).x;
            assert_close(&format!("{attention:?}"), &values(y), &values(expected), 1e-5);
        }
    }

    #[test]
    fn rows_sum_to_one_and_no_key_comes_later() {
        for attention in kinds(0.5) {
            let is_nsa = matches!(attention, sieve_core::Attention::Nsa(_));
            let shape = shape(attention);
            let rows = Rows::new([1, 21], &shape);
            let mut init = WeightInit::new(1, 0.2);
            let layer = Attention::<Flex>::new(&shape, &mut init, &Default::default());
            let x = input::<Flex, 3>([1, 21, 24], 5);
            let weights = layer.as_layer().weights(x, &rows.context(), &PassState::default());
            for row in values(weights).chunks(21).enumerate() {
                let (query, row) = (row.0 % 21, row.1);
                let sum: f64 = row.iter().sum();
                // NSA's weights sum to the sum of its three gates, each below 1.
                assert!(is_nsa && sum > 0.0 && sum < 3.0 || (sum - 1.0).abs() < 1e-5, "{attention:?} {query} {sum}");
                assert!(row[query + 1..].iter().all(|&weight| weight == 0.0), "{attention:?} {query}");
            }
        }
    }
}
