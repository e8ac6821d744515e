//! Attention over blocks that a caller gives each query.
use super::Reads;
use crate::operands::Operands;
use crate::tensors::{primitive, tensor};
use crate::{AttentionSpec, DeviceBackend, Documents, OperandError, SieveBackend};
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};
use sieve_core::{NsaBlocks, SELECTED_SIZES, selected_in_pairs, selected_pieces};

/// Blocks that a caller gives each query of [`selected_attention`], in any order. Indices below 0, of blocks after the
/// query's own one and of a block that is named before count as none.
#[derive(Clone, Debug)]
pub struct SelectedBlocks<B: Backend> {
    /// Indices of blocks from the document's first token on, `[batch, seq_len, choosers, num_indices]`. Choosers are
    /// the KV heads, the query heads, or a number between that the former divide and that divides the latter.
    pub indices: Tensor<B, 4, Int>,
    /// How many of its indices each query has, the first ones, `[batch, seq_len, choosers]`; `None`: all.
    pub counts: Option<Tensor<B, 3, Int>>,
    /// Tokens of a block, one of [`SELECTED_SIZES`].
    pub block: usize,
}

impl<B: Backend> SelectedBlocks<B> {
    /// Refuses shapes that do not fit a packed tensor of these dimensions, and blocks of another size.
    fn check(&self, [batch, seq_len, width, _]: [usize; 4], spec: AttentionSpec) -> Result<(), OperandError> {
        let operands = Operands("selected_attention");
        let [num_heads, kv_heads] = [spec.num_heads, spec.num_kv_heads];
        let hint = "q, k and v are packed: query heads, then key heads, then value heads";
        operands.value(width == num_heads + 2 * kv_heads, "the number of heads of qkv", width, hint)?;
        let sizes = SELECTED_SIZES.map(|size| size.to_string()).join(", ");
        let hint = format!("blocks may have {sizes} tokens");
        operands.value(SELECTED_SIZES.contains(&self.block), "block", self.block, hint)?;
        let [_, _, choosers, num_indices] = self.indices.dims();
        let hint = "an index for each query at least; -1 is none";
        operands.value(num_indices > 0, "the number of indices", num_indices, hint)?;
        let divides = |of: usize, number: usize| of > 0 && number > 0 && number.is_multiple_of(of);
        let hint = format!("a multiple of the {kv_heads} KV heads that divides the {num_heads} query heads");
        let fits = divides(kv_heads, choosers) && divides(choosers, num_heads);
        operands.value(fits, "the number of choosers of indices", choosers, hint)?;
        let (axes, hint) = ("[batch, seq_len, choosers, num_indices]", "a row of indices for each token of qkv");
        let wanted = [batch, seq_len, choosers, num_indices];
        operands.shape(("indices", axes, &wanted), &self.indices.dims(), hint)?;
        match &self.counts {
            None => Ok(()),
            Some(counts) => {
                let (axes, hint) = ("[batch, seq_len, choosers]", "a count for each row of indices");
                operands.shape(("counts", axes, &[batch, seq_len, choosers]), &counts.dims(), hint)
            }
        }
    }

    /// Sizes of the blocks as attention reads them.
    fn attended(&self) -> NsaBlocks {
        let pieces = selected_pieces(self.block);
        let size = self.block / pieces;
        NsaBlocks { num_selected_blocks: self.indices.dims()[3] * pieces, ..NsaBlocks::of([size; 4]) }
    }
}

/// Causal attention of each query over the tokens of the blocks that it is given. A query without a block gets 0, and
/// keys that no query has get gradients of exactly 0.
///
/// # Shapes
/// - qkv: `[batch, seq_len, num_heads + 2 * num_kv_heads, head_dim]`
/// - returns: `[batch, seq_len, num_heads, head_dim]`
///
/// # Errors
/// [`OperandError`] for shapes that do not fit and blocks of another size.
pub fn selected_attention<B: SieveBackend>(
    qkv: Tensor<B, 4>,
    selected: &SelectedBlocks<B>,
    documents: &Documents<B>,
    spec: AttentionSpec,
) -> Result<Tensor<B, 4>, OperandError> {
    let [batch, seq_len, heads, width] = qkv.dims();
    selected.check([batch, seq_len, heads, width], spec)?;
    let counts = selected.counts.clone().map(Tensor::into_primitive);
    let bounds = documents.bounds();
    let chosen = B::Inner::selected_blocks(selected.indices.clone().into_primitive(), counts, &bounds, selected.block);
    let reads = Reads::<B::Inner> {
        documents: bounds,
        chosen: Some(chosen),
        blocks: selected.attended(),
        local: None,
        in_pairs: selected_in_pairs(selected.block),
    };
    let qkv = primitive(qkv);
    let x = B::value(qkv.clone());
    let read = reads.forward(x.clone(), spec);
    let o = read.output().o.clone();
    Ok(tensor(B::node([&qkv], o, move |d_o| [reads.backward(x, spec, read, d_o)])))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::attention;
    use crate::testing::{
        Ad, Call, Float as AdFloat, calls, check_finite_differences, check_parity, check_views, float,
    };
    use crate::{AttentionCall, reference};
    use burn::tensor::{DType, TensorData};
    use sieve_testing::Random;

    /// Random blocks of a call: some later than the query's own one, some twice, some none.
    fn given(call: &Call, choosers: usize, num_indices: usize, block: usize, has_counts: bool) -> SelectedBlocks<Ad> {
        let [batch, n] = call.dims;
        let mut random = Random(block as u64 + n as u64);
        let mut ints = |count: usize, first: i64, end: usize| -> Vec<i64> {
            (0..count).map(|_| first + random.below(end) as i64).collect()
        };
        let lists = batch * n * choosers;
        let indices = ints(lists * num_indices, -2, n.div_ceil(block) + 3);
        let counts = ints(lists, -1, num_indices + 3);
        let indices = TensorData::new(indices, [batch, n, choosers, num_indices]);
        let counts = TensorData::new(counts, [batch, n, choosers]);
        SelectedBlocks {
            indices: Tensor::from_data(indices, &Default::default()),
            counts: has_counts.then(|| Tensor::from_data(counts, &Default::default())),
            block,
        }
    }

    fn op(call: &Call, selected: &SelectedBlocks<Ad>, inputs: &[AdFloat]) -> AdFloat {
        primitive(selected_attention(float(&inputs[0]), selected, &call.documents, call.spec).expect("sizes fit"))
    }

    #[test]
    fn all_blocks_give_dense_attention_and_no_block_gives_zero() {
        for call in calls() {
            let [batch, n] = call.dims;
            let count = n.div_ceil(16);
            let descending: Vec<i64> = (0..count as i64).rev().collect();
            let choosers = call.spec.num_kv_heads;
            let data = TensorData::new(descending.repeat(batch * n * choosers), [batch, n, choosers, count]);
            let indices = Tensor::from_data(data, &Default::default());
            let mut selected = SelectedBlocks::<Ad> { indices, counts: None, block: 16 };
            check_parity("all blocks", &[call.qkv(3)], &|inputs| op(&call, &selected, inputs), &|inputs| {
                reference::attention::<Ad>(inputs[0].clone(), &AttentionCall::new(call.documents.bounds(), call.spec)).o
            });
            selected.counts = Some(Tensor::zeros([batch, n, choosers], &Default::default()));
            let qkv = float::<4>(&call.qkv(3).untracked(DType::F32));
            let o = selected_attention(qkv.clone(), &selected, &call.documents, call.spec).expect("sizes fit");
            assert!(o.into_data().iter::<f64>().all(|x| x == 0.0));
            assert_eq!(attention(qkv, &call.documents, call.spec).dims()[..2], [batch, n]);
        }
    }

    #[test]
    fn attention_reads_exactly_the_given_blocks() {
        for (at, call) in calls().into_iter().enumerate() {
            let choosers = [call.spec.num_kv_heads, call.spec.num_heads][at % 2];
            let selected = given(&call, choosers, 4, [16, 32, 64, 128][at % 4], at % 3 > 0);
            let inputs = [call.qkv(4)];
            // Gradients of the same blocks as a mask of scores, in f64.
            let exact = |inputs: &[AdFloat]| masked(&call, &selected, inputs);
            check_parity("selected_attention", &inputs, &|inputs| op(&call, &selected, inputs), &exact);
            check_views("selected_attention", &inputs, &|inputs| op(&call, &selected, inputs));
        }
        let call = Call::new([2, 37], [4, 2], 3, &[18]);
        let selected = given(&call, 2, 3, 16, true);
        check_finite_differences("selected_attention", &[call.qkv(4)], &|inputs| op(&call, &selected, inputs));
    }

    /// Attention over the given blocks by its definition, in plain Burn with a mask over all scores.
    fn masked(call: &Call, selected: &SelectedBlocks<Ad>, inputs: &[AdFloat]) -> AdFloat {
        let ([batch, n], [heads, groups]) = (call.dims, [call.spec.num_heads, call.spec.num_kv_heads]);
        let [_, _, choosers, most] = selected.indices.dims();
        let ints = |data: TensorData| data.iter::<i64>().collect::<Vec<i64>>();
        let (starts, indices) = (ints(call.documents.start.to_data()), ints(selected.indices.to_data()));
        let counts = selected.counts.as_ref().map(|counts| ints(counts.to_data()));
        let mut unread = Vec::new();
        for (row, head, query) in (0..batch * heads * n).map(|at| (at / (heads * n), at / n % heads, at % n)) {
            let list = (row * n + query) * choosers + head * choosers / heads;
            let count = counts.as_ref().map_or(most as i64, |counts| counts[list].clamp(0, most as i64));
            let blocks = &indices[list * most..][..count as usize];
            let start = starts[row * n + query];
            unread.extend((0..n as i64).map(|key| {
                key < start || key > query as i64 || !blocks.contains(&((key - start) / selected.block as i64))
            }));
        }
        let unread = Tensor::<Ad, 4, burn::tensor::Bool>::from_data(
            TensorData::new(unread, [batch, heads, n, n]),
            &Default::default(),
        );
        let [q, k, v] = crate::tensors::split_heads::<Ad>(float(&inputs[0]), groups).map(|x| x.swap_dims(1, 2));
        let repeat = |x: Tensor<Ad, 4>| {
            let width = x.dims()[3];
            x.unsqueeze_dim::<5>(2).repeat_dim(2, heads / groups).reshape([batch, heads, n, width])
        };
        let scores = q.matmul(repeat(k).swap_dims(2, 3)) * call.spec.softmax_scale;
        let p = burn::tensor::activation::softmax(scores.mask_fill(unread.clone(), -1e9), 3).mask_fill(unread, 0.0);
        primitive(p.matmul(repeat(v)).swap_dims(1, 2))
    }

    #[test]
    fn wrong_operands_are_refused_by_name() {
        let call = Call::new([1, 20], [4, 2], 8, &[]);
        let qkv = || float::<4>(&call.qkv(1).untracked(DType::F32));
        let refused = |selected: SelectedBlocks<Ad>| {
            let result = selected_attention(qkv(), &selected, &call.documents, call.spec);
            result.expect_err("refused").to_string()
        };
        let longer = Call::new([1, 21], [4, 2], 8, &[]);
        for (selected, sentence) in [
            (given(&call, 2, 3, 48, false), "block is 48\n  hint: blocks may have 16, 32, 64, 128 tokens"),
            (given(&call, 3, 3, 16, false), "the number of choosers of indices is 3"),
            (given(&longer, 2, 3, 16, false), "indices has shape [1, 21, 2, 3] and must be"),
            (
                SelectedBlocks { counts: given(&longer, 2, 3, 16, true).counts, ..given(&call, 2, 3, 16, false) },
                "counts has shape [1, 21, 2] and must be",
            ),
        ] {
            let error = refused(selected);
            assert!(error.starts_with("selected_attention: ") && error.contains(sentence), "{error}");
        }
    }
}
