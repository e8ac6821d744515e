//! Operands that the ops refuse, with both shapes in the text.
use super::{dma, inputs, layer, spec, with_recency};
use crate::testing::{Ad, float};
use crate::{
    AttentionSpec, DmaBias, DmaLayer, DmaOrder, Documents, KeyOrder, OperandError, Recency, dma_attention,
    dma_attention_by_rank, dma_ranks, dma_select, dynamic_mask_attention,
};
use burn::tensor::{DType, Int, Tensor};
use burn_flex::Flex;
use sieve_core::{DmaShape, DmaWindow};
use sieve_testing::refusal;

const DIMS: [usize; 3] = [2, 20, 16];

/// The operands of `dynamic_mask_attention`.
struct Call {
    spec: AttentionSpec,
    qkv: Tensor<Ad, 4>,
    layer: DmaLayer<Ad>,
    documents: Documents<Ad>,
}

/// Operands that fit.
fn call(dma: DmaShape) -> Call {
    let spec = spec(2, DIMS[2]);
    let inputs = inputs(spec, DIMS, 1).map(|input| input.untracked(DType::F32));
    let documents = Documents::whole_rows([DIMS[0], DIMS[1]], &Default::default());
    Call { spec, qkv: float(&inputs[0]), layer: layer(&inputs, dma), documents }
}

/// What the op says of operands that fit, after `change`.
fn run(change: impl FnOnce(&mut Call)) -> Result<(), OperandError> {
    let mut call = call(dma(5, DmaBias::Exp));
    change(&mut call);
    dynamic_mask_attention(call.qkv, call.layer, &call.documents, call.spec).map(|_| ())
}

#[test]
fn a_transposed_weight_and_other_wrong_operands_are_refused_by_their_shapes() {
    assert_eq!(run(|_| ()), Ok(()));
    refusal(
        run(|call| call.layer.w_dt = call.layer.w_dt.clone().transpose()),
        "dynamic_mask_attention: w_dt has shape [48, 3] and must be [num_kv_heads, num_kv_heads * head_dim] = [3, 48] \
         | hint: W_dt is a linear layer's weight",
    );
    refusal(run(|call| call.layer.a = call.layer.a.clone().repeat_dim(0, 2)), "a has shape [6] and must be | [3]");
    refusal(
        run(|call| call.qkv = call.qkv.clone().narrow(2, 0, 11)),
        "qkv has shape [2, 20, 11, 16] and must be | [2, 20, 12, 16]",
    );
    // As many numbers in another order of axes.
    refusal(run(|call| call.qkv = call.qkv.clone().swap_dims(1, 2)), "[2, 12, 20, 16] and must be | [2, 12, 12, 16]");
    refusal(
        run(|call| call.documents = Documents::whole_rows([2, 19], &Default::default())),
        "documents.start has shape [2, 19] and must be [batch, seq_len] = [2, 20]",
    );
    refusal(run(|call| call.spec.num_kv_heads = 4), "num_heads is 6 | a multiple of num_kv_heads = 4");
    refusal(run(|call| call.layer.spec.keep_window_size = 0), "keep_window_size is 0 | at least one key");
    refusal(run(|call| call.layer.spec.local_window_size = 6), "local_window_size is 6 | at most keep_window_size = 5");
    refusal(
        run(|call| call.layer.spec = DmaShape { bias: DmaBias::Exp, ..with_recency(6) }),
        "bias is Exp with a recency slope | DmaBias::Linear",
    );
    // More kept keys than a row has: dense attention with a bias.
    assert_eq!(run(|call| call.layer.spec.keep_window_size = 99), Ok(()));
}

#[test]
fn selection_ranks_and_attention_alone_refuse_the_same_operands() {
    let Call { spec, qkv, layer, documents } = call(dma(5, DmaBias::Exp));
    let rank = Tensor::<Ad, 3>::zeros([2, 3, 20], &Default::default());
    let expire = Tensor::<Ad, 3, Int>::zeros([2, 3, 20], &Default::default());
    let other = rank.clone().swap_dims(1, 2);
    refusal(
        dma_attention(qkv.clone(), other.clone(), expire.clone(), &documents, spec, DmaBias::Exp),
        "dma_attention: rank has shape [2, 20, 3] and must be [batch, num_kv_heads, seq_len] = [2, 3, 20]",
    );
    refusal(
        dma_attention(qkv, rank.clone(), expire.swap_dims(1, 2), &documents, spec, DmaBias::Exp),
        "expire has shape [2, 20, 3]",
    );
    refusal(dma_select(other, &documents, 4), "dma_select: documents.start has shape [2, 20] and must be | [2, 3]");
    refusal(dma_select(rank.clone(), &documents, 0), "dma_select: keep_window_size is 0");
    let window = DmaWindow { keep_window_size: 4, local_window_size: 5 };
    refusal(dma_select(rank, &documents, window), "local_window_size is 5");

    let plain = |x: Tensor<Ad, 4>| x.inner();
    let Call { qkv, documents: _, .. } = call(dma(5, DmaBias::Exp));
    let layer = layer.values();
    let documents = Documents::<Flex>::whole_rows([2, 20], &Default::default());
    let origin = || crate::PositionOrigin::DocumentStart(documents.start.clone().into_primitive());
    let recency = |slopes: Vec<f64>| Some(Recency { slopes, origin: origin() });
    let qkv = plain(qkv);
    refusal(dma_ranks(qkv.clone(), &layer, spec, recency(vec![0.1; 2])), "number of slopes is 2 | the 3 KV heads");
    let rank = dma_ranks(qkv.clone(), &layer, spec, recency(vec![0.1; 3])).expect("fits");
    let order = DmaOrder::Of(KeyOrder::Leaving);
    refusal(
        dma_attention_by_rank(qkv, rank.narrow(2, 0, 19), &documents, spec, layer.spec, order),
        "dma_attention_by_rank: rank has shape [2, 3, 19] and must be | [2, 3, 20]",
    );
}
