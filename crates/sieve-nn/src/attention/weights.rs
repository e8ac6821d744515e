//! Attention weights of a layer, by its own ops.
//!
//! An attention's output is linear in its values. So with one-hot values, `head_dim` keys at a time, column c of the
//! output is the weight of key c: this works for every kind, and gives the weights of the kernels that trained the
//! model.
use super::native_sparse::NativeSparseAttention;
use super::{Attention, LayerContext};
use burn::tensor::{Tensor, TensorData};
use sieve_ops::SieveBackend;

impl<B: SieveBackend> Attention<B> {
    /// The weight of each key for each query, `[num_heads, seq_len, seq_len]` with the keys last, of one document.
    ///
    /// Rows sum to 1; those of NSA to the sum of the query's gates, and a compressed block's weight is spread evenly
    /// over its tokens.
    ///
    /// Pass the context of the whole pass: an earlier layer may have chosen the blocks that this one reads.
    ///
    /// # Shapes
    /// - x: `[1, seq_len, d_model]`, after the layer's norm
    ///
    /// # Panics
    /// With more than one row in `x`.
    pub fn weights(&self, x: Tensor<B, 3>, context: &LayerContext<'_, B>) -> Tensor<B, 3> {
        let documents = context.documents;
        match self {
            Self::Grouped(layer) => {
                let (qkv, spec) = (layer.qkv.forward(x, context), layer.spec());
                by_key(&qkv.clone(), |one_hot| {
                    sieve_ops::attention(with_values(&qkv, one_hot, spec.num_kv_heads), documents, spec)
                })
            }
            Self::Dma(layer) => {
                let (qkv, spec) = (layer.qkv.forward(x, context), layer.spec());
                // Scores come from the values, so the mask is made before they are replaced.
                let chosen = layer.attend(qkv.clone(), documents, spec);
                by_key(&qkv.clone(), |one_hot| {
                    let qkv = with_values(&qkv, one_hot, spec.num_kv_heads);
                    let (rank, expire) = (chosen.rank.clone(), chosen.expire.clone());
                    sieve_ops::dma_attention(qkv, rank, expire, documents, spec, layer.bias())
                })
            }
            Self::Mla(layer) => {
                let (packed, spec) = (layer.packed_of(x, context), layer.spec());
                let [_, seq_len, width] = packed.dims();
                let values = spec.num_heads * spec.head_dim;
                let kept = packed.narrow(2, 0, width - values);
                let like = Tensor::<B, 4>::zeros([1, seq_len, 1, spec.head_dim], (&kept.device(), kept.dtype()));
                by_key(&like, |one_hot| {
                    let v = one_hot.unsqueeze_dim::<4>(2).repeat_dim(2, spec.num_heads);
                    let v = v.reshape([1, seq_len, values]);
                    sieve_ops::mla_attention(Tensor::cat(vec![kept.clone(), v], 2), documents, spec)
                })
            }
            Self::Nsa(layer) => layer.weights(x, context),
            Self::Chosen(layer) => {
                let chosen = layer.block_indices(x.clone(), context);
                let (qkv, spec, choice) = (layer.qkv.forward(x, context), layer.spec(), layer.choice());
                by_key(&qkv.clone(), |one_hot| {
                    let qkv = with_values(&qkv, one_hot, spec.num_kv_heads);
                    match &chosen {
                        Some(chosen) => sieve_ops::chosen_attention(qkv, chosen.clone(), documents, spec, choice),
                        None => sieve_ops::attention(qkv, documents, spec),
                    }
                })
            }
        }
    }

    /// The weights that dense attention would have with the same queries and keys, as [`weights`](Self::weights);
    /// `None` but of kinds that choose blocks for one softmax.
    pub fn dense_weights(&self, x: Tensor<B, 3>, context: &LayerContext<'_, B>) -> Option<Tensor<B, 3>> {
        let Self::Chosen(layer) = self else {
            return None;
        };
        let (qkv, spec) = (layer.qkv.forward(x, context), layer.spec());
        Some(by_key(&qkv.clone(), |one_hot| {
            let qkv = with_values(&qkv, one_hot, spec.num_kv_heads);
            sieve_ops::attention(qkv, context.documents, spec)
        }))
    }
}

impl<B: SieveBackend> NativeSparseAttention<B> {
    fn weights(&self, x: Tensor<B, 3>, context: &LayerContext<'_, B>) -> Tensor<B, 3> {
        let branches = self.branches(x.clone(), context);
        let compressed = self.compress(branches.compressed.clone(), context.documents);
        let (kv_heads, blocks) = (self.spec().num_kv_heads, self.blocks());
        let [_, rows, head_dim] = compressed.dims();
        let keys = compressed.narrow(0, 0, 1);
        by_key(&branches.window.clone(), |one_hot| {
            let [_, seq_len, _] = one_hot.dims();
            // A block's value is the mean of its tokens' values; a slot past the last block is never read.
            let starts = (0..rows / kv_heads).map(|slot| slot * blocks.compress_stride);
            let means: Vec<Tensor<B, 3>> = starts
                .map(|start| {
                    let size = blocks.compress_block_size.min(seq_len.saturating_sub(start));
                    match size {
                        0 => Tensor::zeros([1, 1, head_dim], (&one_hot.device(), one_hot.dtype())),
                        _ => one_hot.clone().narrow(1, start, size).sum_dim(1) / blocks.compress_block_size as f64,
                    }
                })
                .collect();
            let means = Tensor::cat(means, 1).unsqueeze_dim::<4>(2).repeat_dim(2, kv_heads);
            let values = means.reshape([1, rows, head_dim]);
            let compressed = Tensor::cat(vec![keys.clone(), values], 0);
            let branches = branches.with_values(one_hot, kv_heads);
            self.gated(
                x.clone(),
                self.attend(branches, compressed, context.documents, context.policy),
            )
        })
    }
}

/// The packed tensor with `values` `[1, seq_len, head_dim]` as those of every KV head.
pub(super) fn with_values<B: SieveBackend>(
    qkv: &Tensor<B, 4>,
    values: Tensor<B, 3>,
    num_kv_heads: usize,
) -> Tensor<B, 4> {
    let heads = qkv.dims()[2];
    let values = values.unsqueeze_dim::<4>(2).repeat_dim(2, num_kv_heads);
    Tensor::cat(vec![qkv.clone().narrow(2, 0, heads - num_kv_heads), values], 2)
}

/// Calls `attend` with the one-hot rows `[1, seq_len, head_dim]` of `head_dim` keys at a time and joins its outputs,
/// `[1, seq_len, num_heads, head_dim]`, to `[num_heads, seq_len, seq_len]`. `like` is `[1, seq_len, _, head_dim]`.
fn by_key<B: SieveBackend>(like: &Tensor<B, 4>, attend: impl Fn(Tensor<B, 3>) -> Tensor<B, 4>) -> Tensor<B, 3> {
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
    use crate::testing::{Rows, assert_close, input, kinds, msa_in_warmup, nsa, shape, values};
    use crate::{Attention, WeightInit};
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
        // The other forms of NSA give a branch other values than the window's.
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
            let weights = layer.weights(x.clone(), &context);
            assert_eq!(weights.dims(), [shape.num_heads, 29, 29], "{attention:?}");
            let kv_heads = shape.num_kv_heads;
            let v = |qkv: Tensor<Flex, 4>| {
                let heads = qkv.dims()[2];
                of_queries(qkv.narrow(2, heads - kv_heads, kv_heads), shape.num_heads / kv_heads)
            };
            let (v, o_proj) = match &layer {
                Attention::Grouped(layer) => (v(layer.qkv.forward(x.clone(), &context)), &layer.o_proj),
                Attention::Dma(layer) => (v(layer.qkv.forward(x.clone(), &context)), &layer.o_proj),
                Attention::Mla(layer) => {
                    let packed = layer.packed_of(x.clone(), &context);
                    let spec = layer.spec();
                    let (width, values) = (packed.dims()[2], spec.num_heads * spec.head_dim);
                    let v = packed.narrow(2, width - values, values);
                    (v.reshape([29, spec.num_heads, spec.head_dim]), &layer.o_proj)
                }
                Attention::Nsa(layer) => (v(layer.qkv.forward(x.clone(), &context)), &layer.o_proj),
                Attention::Chosen(layer) => (v(layer.qkv.forward(x.clone(), &context)), &layer.o_proj),
            };
            let o = weights.matmul(v.swap_dims(0, 1)).swap_dims(0, 1);
            let [seq_len, heads, head_dim] = o.dims();
            let y = o_proj.forward(o.reshape([1, seq_len, heads * head_dim]));
            let expected = layer.forward(x.clone(), x.zeros_like(), &context).x;
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
            let weights = layer.weights(input::<Flex, 3>([1, 21, 24], 5), &rows.context());
            for row in values(weights).chunks(21).enumerate() {
                let (query, row) = (row.0 % 21, row.1);
                let sum: f64 = row.iter().sum();
                assert!(
                    is_nsa && sum > 0.0 && sum < 3.0 || (sum - 1.0).abs() < 1e-5,
                    "{attention:?} {query} {sum}"
                );
                assert!(
                    row[query + 1..].iter().all(|&weight| weight == 0.0),
                    "{attention:?} {query}"
                );
            }
        }
    }
}
