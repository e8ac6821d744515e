//! Where ops run: Sieve's own backends, through the same trait that models use.
use crate::case::{Case, Keys};
use crate::outputs::Outputs;
use crate::shape::{keys_of, packed_of, queries_of};
use crate::strided::Strided;
use burn::tensor::DType;
use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{Int, Tensor, TensorData, TensorPrimitive};
use burn_flex::{Flex, FlexDevice};
use sieve_core::KeepOLow;
use sieve_kernels::AttentionShape;
use sieve_ops::{
    AttentionCall, DeviceBackend, DmaBias, DmaCache, DmaCall, DmaSelection, DmaToken, KeyCache, SieveBackend,
};
use std::ops::Range;

/// A backend that can be given a tensor of any strides.
pub(crate) trait Place: DeviceBackend {
    /// Type of q, k, v and o.
    const DTYPE: DType;
    /// Whether it is a GPU, whose kernels compute in bf16.
    const IS_CUDA: bool;
    /// What rows of a report call its kernels.
    const KERNEL: &'static str;
    /// The family of attention kernels that a call takes, in words.
    fn family(case: &Case, device: &Self::Device) -> &'static str;
    /// A float tensor with these values and, where the backend allows it, these strides.
    fn strided(values: &Strided, device: &Self::Device) -> FloatTensor<Self>;
}

impl Place for Flex {
    const DTYPE: DType = DType::F32;
    const IS_CUDA: bool = false;
    const KERNEL: &'static str = "cpu";

    fn family(_case: &Case, _device: &FlexDevice) -> &'static str {
        "cpu"
    }

    fn strided(values: &Strided, device: &FlexDevice) -> FloatTensor<Self> {
        let shape: [usize; 4] = values.shape;
        let data = TensorData::new(values.gathered(), shape);
        Tensor::<Flex, 4>::from_data(data, device).into_primitive().tensor()
    }
}

/// The packed call of a case on a backend.
struct Call<'a, B: Place> {
    case: &'a Case,
    qkv: FloatTensor<B>,
    d_o: FloatTensor<B>,
    attention: AttentionCall<B>,
    device: &'a B::Device,
}

/// Forward and backward pass through the ops of `B`: packed q, k, v of the given layout.
pub(crate) fn attention<B: Place>(case: &Case, qkv: &Strided, d_o: &Strided, device: &B::Device) -> Outputs {
    let call = Call::<B> {
        case,
        qkv: B::strided(qkv, device),
        d_o: B::strided(d_o, device),
        attention: AttentionCall::new(
            case.documents::<B>(device).bounds(),
            case.spec(match case.keys {
                Keys::Window(window) => Some(window),
                _ => None,
            }),
        ),
        device,
    };
    match case.keys {
        Keys::Dense | Keys::Window(_) => call.neighbours(),
        Keys::Biased | Keys::Chosen(_) => call.chosen(),
    }
}

impl<B: Place> Call<'_, B> {
    fn neighbours(self) -> Outputs {
        let output = <B as DeviceBackend>::attention(self.qkv.clone(), &self.attention);
        let mut outputs = self.forward_outputs(&output.o, &output.lse);
        let dqkv = B::attention_backward(self.qkv, &self.attention, output, self.d_o);
        outputs.set_packed_gradient(self.case.shape, &floats::<B, 4>(dqkv));
        outputs
    }

    fn chosen(self) -> Outputs {
        let shape = self.case.shape;
        let per_key = |values: &[f32]| float::<B, 3>(values, shape.per_key(), self.device);
        let selection: DmaSelection<B> = match self.case.keys {
            Keys::Chosen(window) => B::dma_select(per_key(&self.case.z), &self.attention.documents, window),
            _ => {
                let equal = vec![0.0; self.case.delta.len()];
                B::dma_select(per_key(&equal), &self.attention.documents, shape.seq_len.into())
            }
        };
        let call = DmaCall {
            qkv: self.qkv.clone(),
            delta: per_key(&self.case.delta),
            selection,
            attention: self.attention.clone(),
        };
        let output = B::dma_attention(&call, KeepOLow::default());
        let mut outputs = self.forward_outputs(&output.o, &output.lse);
        outputs.expire = ints::<B>(&call.selection);
        let [dqkv, ddelta] = B::dma_attention_backward(&call, output, self.d_o);
        outputs.set_packed_gradient(shape, &floats::<B, 4>(dqkv));
        outputs.ddelta = floats::<B, 3>(ddelta);
        outputs
    }

    fn forward_outputs(&self, o: &FloatTensor<B>, lse: &FloatTensor<B>) -> Outputs {
        Outputs {
            o: cut(floats::<B, 4>(o.clone()), self.case.shape),
            lse: floats::<B, 3>(lse.clone()),
            ..Outputs::default()
        }
    }
}

/// Fills memory of the sizes of a call's outputs with NaN and frees it, so that the pool hands it to the call: an
/// element that a kernel forgets shows.
pub(crate) fn poison<B: Place>(shape: AttentionShape, device: &B::Device) {
    let held: Vec<Tensor<B, 1>> = [
        (&queries_of(shape)[..], B::DTYPE),
        (&shape.output(), B::DTYPE),
        (&packed_of(shape), B::DTYPE),
        (&keys_of(shape), B::DTYPE),
        (&shape.lse(), DType::F32),
        (&shape.per_key(), DType::F32),
    ]
    .into_iter()
    .flat_map(|sizes| [sizes; 2])
    .map(|(sizes, dtype)| Tensor::full([sizes.iter().product::<usize>()], f32::NAN, (device, dtype)))
    .collect();
    drop(held);
}

/// `expire` of a case's scores.
pub(crate) fn select<B: Place>(case: &Case, device: &B::Device) -> Vec<i32> {
    let shape = case.shape;
    let documents = case.documents::<B>(device);
    let z = float::<B, 3>(&case.z, shape.per_key(), device);
    ints::<B>(&B::dma_select(z, &documents.bounds(), case.dma_window()))
}

/// Every token against the keys before it, or the last `window`: `[batch, seq_len, num_heads, head_dim_v]`.
pub(crate) fn decode<B: Place>(case: &Case, device: &B::Device) -> Vec<f32> {
    let shape = case.shape;
    let tokens = Tokens::<B>::new(case, device);
    let mut rows = Vec::new();
    for at in 0..shape.seq_len {
        let first = (at + 1).saturating_sub(case.window());
        let keys = |x: &Tensor<B, 4>| part(x, first..at + 1);
        let (q, scale) = (token(&tokens.q, at), f64::from(case.scale));
        let o = B::attention_decode(q, keys(&tokens.k), keys(&tokens.v), None, scale);
        rows.push(cut(floats::<B, 3>(o), shape));
    }
    by_token(&rows, shape)
}

/// The same through a cache that each token joins; at times somebody else holds the cache, too.
pub(crate) fn cached_attention<B: Place>(case: &Case, device: &B::Device) -> Vec<f32> {
    let shape = case.shape;
    let Tokens { q, k, v } = Tokens::<B>::new(case, device);
    let spec = case.spec((case.window() < shape.seq_len).then(|| case.window()));
    let first = |x: &Tensor<B, 4>| part(x, 0..1);
    let mut cache = KeyCache::<B> {
        k: first(&k),
        v: first(&v),
    };
    let o = B::attention_decode(token(&q, 0), first(&k), first(&v), None, spec.softmax_scale);
    let mut rows = vec![cut(floats::<B, 3>(o), shape)];
    let qkv = Tensor::cat(vec![q, k, v], 2);
    for at in 1..shape.seq_len {
        let token = part(&qkv, at..at + 1);
        let also_held = (at % 50 == 7).then(|| cache.clone());
        let (next, o) = B::cached_attention(cache, token, spec);
        drop(also_held);
        cache = next;
        rows.push(cut(floats::<B, 4>(o), shape));
    }
    by_token(&rows, shape)
}

/// DMA's slots, one token after the other: `[batch, seq_len, num_heads, head_dim_v]`.
pub(crate) fn dma_decode<B: Place>(case: &Case, device: &B::Device) -> Vec<f32> {
    let shape = case.shape;
    let tokens = Tokens::<B>::new(case, device);
    let z = TensorData::new(case.z.clone(), shape.per_key());
    let z = Tensor::<B, 3>::from_data(z, device);
    let z_of = |at: usize| z.clone().narrow(2, at, 1);
    // The first key is always kept, and its query sees it alone.
    let (k, v) = (part(&tokens.k, 0..1), part(&tokens.v, 0..1));
    let scale = f64::from(case.scale);
    let o = B::attention_decode(token(&tokens.q, 0), k.clone(), v.clone(), None, scale);
    let heads = [shape.batch, shape.num_kv_heads, 1];
    let mut cache = DmaCache::<B> {
        k,
        v,
        rank: z_of(0).into_primitive().tensor(),
        positions: Tensor::<B, 3, Int>::zeros(heads, device).into_primitive(),
        window: case.dma_window(),
    };
    let mut rows = vec![cut(floats::<B, 3>(o), shape)];
    for at in 1..shape.seq_len {
        let token = DmaToken::<B> {
            q: token(&tokens.q, at),
            k: token(&tokens.k, at),
            v: token(&tokens.v, at),
            rank: z_of(at).flatten::<2>(1, 2).into_primitive().tensor(),
            position: at,
        };
        let (next, o) = B::dma_decode(cache, token, scale, DmaBias::Exp);
        cache = next;
        rows.push(cut(floats::<B, 3>(o), shape));
    }
    by_token(&rows, shape)
}

/// Rows of `[batch, heads, width]` for each token, as `[batch, seq_len, heads, width]`.
pub(crate) fn by_token(rows: &[Vec<f32>], shape: AttentionShape) -> Vec<f32> {
    let width = shape.num_heads * shape.head_dim_v;
    (0..shape.batch)
        .flat_map(|b| rows.iter().flat_map(move |row| &row[b * width..][..width]))
        .copied()
        .collect()
}

/// q, k and v `[batch, seq_len, heads, head_dim]` on a device; values padded to the width of keys.
struct Tokens<B: Place> {
    q: Tensor<B, 4>,
    k: Tensor<B, 4>,
    v: Tensor<B, 4>,
}

impl<B: Place> Tokens<B> {
    fn new(case: &Case, device: &B::Device) -> Self {
        let shape = case.shape;
        let of = |values: Vec<f32>, sizes: [usize; 4]| {
            Tensor::<B, 4>::from_data(TensorData::new(values, sizes), device).cast(B::DTYPE)
        };
        let v = padded(&case.v, shape.head_dim_v, shape.head_dim);
        Self {
            q: of(case.q.clone(), queries_of(shape)),
            k: of(case.k.clone(), keys_of(shape)),
            v: of(v, keys_of(shape)),
        }
    }
}

/// Some tokens of `[batch, seq_len, heads, width]`.
fn part<B: Place>(x: &Tensor<B, 4>, tokens: Range<usize>) -> FloatTensor<B> {
    let part = x.clone().narrow(1, tokens.start, tokens.len());
    part.into_primitive().tensor()
}

/// One token of `[batch, seq_len, heads, width]` as `[batch, heads, width]`.
fn token<B: Place>(x: &Tensor<B, 4>, at: usize) -> FloatTensor<B> {
    let [batch, _, heads, width] = x.dims();
    let token = x.clone().narrow(1, at, 1).reshape([batch, heads, width]);
    token.into_primitive().tensor()
}

/// Rows made wider with zeros.
pub(crate) fn padded(values: &[f32], width: usize, wider: usize) -> Vec<f32> {
    let mut all = Vec::with_capacity(values.len() / width * wider);
    for row in values.chunks_exact(width) {
        all.extend(row);
        all.resize(all.len() + wider - width, 0.0);
    }
    all
}

/// Rows of width `head_dim` cut to `head_dim_v`.
fn cut(values: Vec<f32>, shape: AttentionShape) -> Vec<f32> {
    let rows = values.chunks_exact(shape.head_dim);
    rows.flat_map(|row| &row[..shape.head_dim_v]).copied().collect()
}

/// A contiguous f32 tensor.
pub(crate) fn float<B: SieveBackend, const D: usize>(
    values: &[f32],
    shape: [usize; D],
    device: &B::Device,
) -> FloatTensor<B> {
    let data = TensorData::new(values.to_vec(), shape);
    Tensor::<B, D>::from_data(data, device).into_primitive().tensor()
}

/// A tensor's values in f32.
pub(crate) fn floats<B: SieveBackend, const D: usize>(x: FloatTensor<B>) -> Vec<f32> {
    let data = Tensor::<B, D>::from_primitive(TensorPrimitive::Float(x)).into_data();
    let values = data.convert::<f32>().to_vec();
    values.expect("data converted to f32 is read as f32")
}

fn ints<B: SieveBackend>(selection: &DmaSelection<B>) -> Vec<i32> {
    indices::<B, 3>(selection.expire.clone())
}

/// A tensor's whole numbers.
pub(crate) fn indices<B: SieveBackend, const D: usize>(x: IntTensor<B>) -> Vec<i32> {
    let data = Tensor::<B, D, Int>::from_primitive(x).into_data();
    let values = data.convert::<i32>().to_vec();
    values.expect("data converted to i32 is read as i32")
}
