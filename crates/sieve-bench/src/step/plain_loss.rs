//! Projection and cross-entropy as a plain bf16 computation has them.
use burn::tensor::DType;
use burn::tensor::backend::Backend;
use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{Int, Tensor, TensorPrimitive};

/// `(losses [tokens], loss [1], dh [tokens, width], dweight [vocab, width])` with logits and their gradients rounded to
/// bf16; softmax and sums are f32.
///
/// `reference::linear_cross_entropy` rounds neither, so that its error says nothing about that of logits kept in bf16.
/// Labels must be words; none is ignored.
pub(super) fn plain_loss<B: Backend>(
    h: FloatTensor<B>,
    weight: FloatTensor<B>,
    labels: IntTensor<B>,
) -> [FloatTensor<B>; 4] {
    let wide = |x| Tensor::<B, 2>::from_primitive(TensorPrimitive::Float(x)).cast(DType::F32);
    let rounded = |x: Tensor<B, 2>| x.cast(DType::BF16).cast(DType::F32);
    let (h, weight) = (wide(h), wide(weight));
    let labels = Tensor::<B, 1, Int>::from_primitive(labels).unsqueeze_dim::<2>(1);
    let logits = rounded(h.clone().matmul(weight.clone().transpose()));
    let largest = logits.clone().max_dim(1);
    let lse = (logits.clone() - largest.clone()).exp().sum_dim(1).log() + largest;
    let losses = lse.clone() - logits.clone().gather(1, labels.clone());
    let [tokens, vocab] = logits.dims();
    let words = Tensor::<B, 1, Int>::arange(0..vocab as i64, &logits.device());
    let onehot = labels
        .expand([tokens, vocab])
        .equal(words.reshape([1, vocab]).expand([tokens, vocab]));
    let d_logits = rounded((logits - lse).exp() - onehot.float().cast(DType::F32));
    let dh = rounded(d_logits.clone().matmul(weight));
    let dweight = d_logits.transpose().matmul(h);
    let primitive = |x: Tensor<B, 2>| x.into_primitive().tensor();
    [
        losses.clone().squeeze_dim::<1>(1).into_primitive().tensor(),
        losses.sum().into_primitive().tensor(),
        primitive(dh),
        primitive(dweight),
    ]
}
