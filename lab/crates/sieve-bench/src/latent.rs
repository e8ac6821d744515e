//! Checks latent attention (MLA) from the projections' outputs on: packing, attention and all gradients.
mod decode;

use crate::case::{Case, Cuts, Keys, magnify};
use crate::device::Device;
use crate::error::Result;
use crate::extent::{Extent, add_attention};
use crate::on_device;
use crate::report::{Outcome, Report, wrong};
use crate::scores::Scores;
use crate::tensors::{cast, floats, table_type};
use crate::tolerance::{Results, RowTolerance, Tolerance, lost_digits};
use burn::tensor::ops::FloatTensor;
use burn::tensor::{DType, Tensor};
use burn_flex::{Flex, FlexDevice};
use sieve_cpu::reference::{AttentionCall, Heads, Rounding, Terms};
use sieve_cpu::{Documents, Mask};
use sieve_kernels::{
    AttentionGradients, AttentionShape, CudaTensor, DeviceReport, KernelError, KernelPolicy, MlaNorm, MlaPack,
    NeededKernels, NeededKeys, SumOrder,
};
use sieve_ops::{DeviceBackend, MlaCall, MlaPackCall, MlaSpec, RotaryEmbedding, reference};
use sieve_testing::{Random, round_bf16};

/// Head widths of the part without rotation and of the rotated part.
const WIDTHS: &[[usize; 2]] = &[[128, 64], [128, 64], [64, 32], [96, 48], [32, 16], [16, 16]];

/// Columns of the latent that lies before `k_rope` in memory; NaN here, since no packing kernel may read it.
const RANK: usize = 24;

/// Theta of the rotary embedding.
pub(crate) const ROPE_THETA: f32 = 100.0;

/// Added to the mean square of a normed head.
const EPSILON: f32 = 1e-6;

/// How large the random inputs of a call are.
#[derive(Clone, Copy, Debug)]
enum Size {
    Usual,
    /// Queries so large that the softmax has one key.
    Peaked,
    /// Values and output gradients of about 1e15, whose products are near the largest f32.
    Large,
}

/// Operands of one call of latent attention, exact in bf16.
pub(crate) struct Call {
    spec: MlaSpec,
    case: Case,
    /// Each head's key without its rotated part, then its value: `[batch, seq_len, heads, 2 head_dim]`.
    kv: Vec<f32>,
    /// The rotated part of the keys, the same for all heads, before the rotation: `[batch, seq_len, rope_dim]`.
    k_rope: Vec<f32>,
    /// Weights of the norms of queries and keys, where there are norms.
    norms: Option<[Vec<f32>; 2]>,
    /// Position of each token in its document.
    positions: Vec<i32>,
    label: String,
}

impl Call {
    /// A random call. `at`, its number in the check, picks the magnitude and the blocks per tile in turn.
    fn draw(extent: &Extent, at: usize, random: &mut Random) -> Result<Self> {
        let [head_dim, rope_dim] = random.one_of(extent.pick(&[[32, 16]], WIDTHS));
        let drawn = random.between(2, extent.longest.max(3));
        let seq_len = random.one_of(&[1, 2, 63, 65, 129, drawn, drawn, drawn]);
        let num_heads = random.between(1, 6);
        let (batch, key_dim) = (random.between(1, 4), head_dim + rope_dim);
        let shape = AttentionShape::new(batch, seq_len, [num_heads; 2], [key_dim, head_dim]);
        // Where a query sees a single key, the gradients of both are 0. With large numbers rounding leaves something
        // else, and in a short batch row there are no other gradients to compare its size with.
        let largest = if seq_len < 15 { Size::Usual } else { Size::Large };
        let size = random.one_of(&[Size::Usual, Size::Usual, Size::Peaked, largest]);
        let cuts = random.one_of(&[Cuts::Count(1), Cuts::Few, Cuts::Mixed]);
        let seed = random.between(0, 1 << 30) as u64;
        let magnitude = match size {
            Size::Usual => extent.magnitude_of(at),
            Size::Peaked | Size::Large => 1.0,
        };
        let case = Case::draw(shape, Keys::Dense, cuts, &Scores::Independent, seed)?;
        let label = format!("{shape:?} rope {rope_dim} {size:?} {cuts:?} q, k x {magnitude} seed {seed}");
        let policy = KernelPolicy { blocks_per_tile: [None, Some(2), Some(3)][at % 3], ..extent.policy };
        let case = case.under(policy).magnified(magnitude);
        let call = Self::of(case, size, seed, label);
        Ok(if random.chance(0.5) { call.normed(size, random) } else { call })
    }

    /// A call that `sieve kernels run mla` writes to a file.
    pub(crate) fn written(case: Case, seed: u64) -> Self {
        Self::of(case, Size::Usual, seed, String::new())
    }

    /// The projections' outputs: q, kv (keys beside values of each head), and the rotated key that all heads share.
    pub(crate) fn inputs(&self) -> [(&'static str, &[f32]); 3] {
        [("q", &self.case.q), ("kv", &self.kv), ("k_rope", &self.k_rope)]
    }

    /// The same call with norms of queries and keys; peaked calls have large norm weights of queries.
    fn normed(mut self, size: Size, random: &mut Random) -> Self {
        let factors = match size {
            Size::Peaked => [16.0, 1.0],
            _ => [1.0, 1.0],
        };
        self.norms = Some(factors.map(|factor| {
            let values = random.bf16_normals(self.spec.key_dim()).into_iter();
            values.map(|x| round_bf16(factor * (1.0 + 0.3 * x))).collect()
        }));
        self.label += " normed";
        self
    }

    /// A call with the numbers of a case, whose keys are wider than its values by the rotated part.
    fn of(mut case: Case, size: Size, seed: u64, label: String) -> Self {
        let shape = case.shape;
        let (seq_len, num_heads) = (shape.seq_len, shape.num_heads);
        let (key_dim, head_dim) = (shape.head_dim, shape.head_dim_v);
        let rope_dim = key_dim - head_dim;
        let mut random = Random(seed);
        let tokens = shape.batch * seq_len;
        let k_rope = random.bf16_normals(tokens * rope_dim);
        match size {
            Size::Usual => {}
            // Queries alone: were rotated keys as large too, one differently rounded number would change a softmax row.
            Size::Peaked => magnify(&mut case.q, 32.0),
            Size::Large => drop([&mut case.v, &mut case.d_o].map(|x| magnify(x, 1e15))),
        }
        let heads = case.k.chunks_exact(key_dim).zip(case.v.chunks_exact(head_dim));
        let kv = heads.flat_map(|(k, v)| k[..head_dim].iter().chain(v)).copied();
        let kv = kv.collect();
        let position = |(at, start): (usize, &i32)| (at % seq_len) as i32 - start;
        Self {
            spec: MlaSpec {
                num_heads,
                head_dim,
                rope_dim,
                softmax_scale: 1.0 / (key_dim as f64).sqrt(),
                policy: case.policy,
            },
            kv,
            k_rope,
            norms: None,
            positions: case.doc_start.iter().enumerate().map(position).collect(),
            label,
            case,
        }
    }

    /// Rows of the batch, and tokens of each.
    fn rows(&self) -> [usize; 2] {
        [self.case.shape.batch, self.case.shape.seq_len]
    }

    /// Sizes of the last dimension of q, kv and `k_rope`.
    fn widths(&self) -> [usize; 3] {
        let (heads, width) = (self.spec.num_heads, self.spec.head_dim);
        [heads * self.spec.key_dim(), heads * 2 * width, self.spec.rope_dim]
    }

    /// The inputs of the packing op on a backend, and its other arguments.
    fn inputs_on<B: DeviceBackend>(&self, device: &B::Device, dtype: DType) -> ([FloatTensor<B>; 3], MlaPackCall<B>) {
        let [batch, seq_len] = self.rows();
        let [q, kv, k_rope] = self.widths();
        let inputs = [(&self.case.q, q), (&self.kv, kv), (&self.k_rope, k_rope)];
        let inputs = inputs.map(|(values, width)| cast::<B, 3>(values, [batch, seq_len, width], dtype, device));
        let table_type = table_type(dtype);
        let rope = RotaryEmbedding::<B>::with_dtype(self.spec.rope_dim, seq_len, ROPE_THETA.into(), device, table_type);
        let call = MlaPackCall::<B> {
            positions: self.case.documents::<B>(device).positions.into_primitive(),
            rope: rope.tables(),
            norm: self.norms.as_ref().map(|[q_weight, k_weight]| {
                let weight = |values: &[f32]| cast::<B, 1>(values, [values.len()], dtype, device);
                sieve_ops::MlaNorm { q_weight: weight(q_weight), k_weight: weight(k_weight), epsilon: EPSILON.into() }
            }),
            spec: self.spec,
        };
        (inputs, call)
    }

    /// Packed queries, keys and values as attention reads them, `[tokens, heads of q, of k, of v]`, in f32.
    fn packed(&self) -> Vec<f32> {
        let (inputs, call) = self.inputs_on::<Flex>(&FlexDevice, DType::F32);
        floats::<Flex, 3>(reference::mla_pack::<Flex>(inputs, call).0)
    }

    /// Runs forward and backward pass by a backend's ops. On the CPU f64 and bf16 take the plain-Burn references; only
    /// f32 has kernels.
    pub(crate) fn on<B: DeviceBackend>(&self, device: &B::Device, dtype: DType) -> Results {
        let (inputs, call) = self.inputs_on::<B>(device, dtype);
        let normed = self.norms.as_ref().map(|_| inputs.clone());
        let attention = MlaCall::new(self.case.documents::<B>(device).bounds(), self.spec);
        let d_o = cast::<B, 4>(&self.case.d_o, self.case.shape.output(), dtype, device);
        let (packed, keys) = B::mla_pack(inputs, call.clone());
        let output = B::mla_attention(packed.clone(), &attention);
        let d_packed = B::mla_attention_backward(packed, &attention, output.clone(), d_o);
        let (gradients, weights) = B::mla_pack_backward(call, normed, d_packed);
        let [dq, dkv, dk_rope] = gradients.map(floats::<B, 3>);
        let mut results = vec![
            ("o", floats::<B, 4>(output.o)),
            ("lse", floats::<B, 3>(output.lse)),
            ("dq", dq),
            ("dkv", dkv),
            ("dk_rope", dk_rope),
        ];
        if let (Some(keys), Some(weights)) = (keys, weights) {
            results.extend(
                NORM_RESULTS.into_iter().zip(norm_results(keys.map(floats::<B, 3>), weights.map(floats::<B, 1>))),
            );
        }
        results
    }

    /// Runs forward and backward pass by the launch wrappers; each operand has NaN between its rows.
    fn wrappers(&self, device: &dyn Device, order: SumOrder) -> Result<Results, KernelError> {
        let [batch, seq_len] = self.rows();
        let with_gaps = |values: &[f32], before: usize, width: usize, after: usize| {
            let pitch = before + width + after;
            let mut all = vec![f32::NAN; batch * seq_len * pitch];
            for (row, values) in all.chunks_exact_mut(pitch).zip(values.chunks_exact(width)) {
                row[before..before + width].copy_from_slice(values);
            }
            let all = device.float(&all, &[batch, seq_len, pitch], sieve_kernels::DType::BF16);
            let strides = [seq_len * pitch, pitch, 1];
            all.view_at("check", "input", before, &[batch, seq_len, width], &strides)
        };
        let [q, kv, k_rope] = self.widths();
        let inputs = [
            with_gaps(&self.case.q, 0, q, 24)?,
            with_gaps(&self.kv, 8, kv, 0)?,
            with_gaps(&self.k_rope, RANK, k_rope, 0)?,
        ];
        let rope = RotaryEmbedding::<Flex>::new(self.spec.rope_dim, seq_len, ROPE_THETA.into(), &FlexDevice);
        let table = |table: Tensor<Flex, 2>| {
            let values: Vec<f32> = table.into_data().to_vec().expect("f32 tables");
            device.float(&values, &[seq_len, self.spec.rope_dim / 2], sieve_kernels::DType::F32)
        };
        let (cos, sin) = (table(rope.cos), table(rope.sin));
        let weight = |values: &Vec<f32>| device.float(values, &[values.len()], sieve_kernels::DType::BF16);
        let weights = self.norms.as_ref().map(|weights| weights.each_ref().map(weight));
        let args = MlaPack {
            num_heads: self.spec.num_heads,
            head_dim: self.spec.head_dim,
            rope_dim: self.spec.rope_dim,
            positions: &device.int(&self.positions, &self.rows()),
            cos: &cos,
            sin: &sin,
            norm: weights.as_ref().map(|[q_weight, k_weight]| MlaNorm { q_weight, k_weight, epsilon: EPSILON }),
        };
        device.poison(self.case.shape);
        let (packed, keys) = args.mla_pack_forward(inputs.each_ref())?;
        let widths = [self.spec.head_dim, self.spec.rope_dim];
        let heads = |packed: &CudaTensor| MlaPack::heads(packed, self.spec.num_heads, widths);
        let qkv = heads(&packed)?;
        let bounds = [&self.case.doc_start, &self.case.doc_end];
        let [start, end] = bounds.map(|x| device.int(x, &self.rows()));
        let scale = self.spec.softmax_scale as f32;
        let (no_window, no_bias) = (None, None);
        let result = qkv.attention_forward(&start, no_window, scale, no_bias)?;
        let d_packed = packed.nan_contiguous(packed.shape(), sieve_kernels::DType::BF16);
        let call = AttentionGradients {
            qkv: &qkv.in_order(order),
            result: &result,
            d_o: &device.float(&self.case.d_o, &self.case.shape.output(), sieve_kernels::DType::BF16),
            grads: &heads(&d_packed)?,
            softmax_scale: scale,
        };
        let (no_window, no_bias) = (None, None);
        call.attention_backward([&start, &end], no_window, no_bias)?;
        let normed = weights.as_ref().map(|_| inputs.each_ref());
        let ([dq, dkv, dk_rope], d_weights) = args.mla_pack_backward(normed, &d_packed)?;
        let mut results = vec![
            ("o", device.floats(&result.o)?),
            ("lse", device.floats(&result.lse)?),
            ("dq", device.floats(&dq)?),
            ("dkv", device.floats(&dkv)?),
            ("dk_rope", device.floats(&dk_rope)?),
        ];
        if let (Some(keys), Some(weights)) = (keys, d_weights) {
            for (name, tensor) in NORM_RESULTS.into_iter().zip(norm_results(keys, weights)) {
                results.push((name, device.floats(&tensor)?));
            }
        }
        Ok(results)
    }

    /// How much a row's logits change when one rotated number is rounded to the other bf16 neighbour, as two orders of
    /// the rotation's f32 operations may; at most an eighth.
    fn moved_by_a_rounding(&self) -> f64 {
        let (heads, width, key_dim) = (self.spec.num_heads, self.spec.head_dim, self.spec.key_dim());
        let packed = self.packed();
        let [batch, seq_len] = self.rows();
        let largest = |first: usize| {
            let tokens = packed.chunks_exact(packed.len() / (batch * seq_len));
            let heads = tokens.flat_map(|token| token[first..first + heads * key_dim].chunks_exact(key_dim));
            heads.flat_map(|head| &head[width..]).fold(0.0, |most: f32, x| most.max(x.abs()))
        };
        let product = f64::from(largest(0)) * f64::from(largest(heads * key_dim));
        (product * self.spec.softmax_scale / 256.0).min(0.125)
    }

    /// For each row of each result, the root of the sum of squares of the terms that the row sums ([`Terms`]). Its
    /// rounding error grows with that. A row is one head of a token; of `dk_rope`, a token. With norms, dq and dk are
    /// the gradients of the norms' inputs, which a norm's backward pass enlarges by its gain.
    fn terms(&self) -> [(&'static str, Vec<f64>); 4] {
        let [batch, seq_len] = self.rows();
        let (heads, widths) = (self.spec.num_heads, [self.spec.key_dim(), self.spec.head_dim]);
        let packed = self.packed();
        let part = |first: usize, width: usize| Heads {
            values: &packed[first..],
            token_len: packed.len() / (batch * seq_len),
            width,
        };
        let keys = heads * widths[0];
        let call = AttentionCall {
            shape: sieve_cpu::ScaledShape {
                softmax_scale: self.spec.softmax_scale as f32,
                ..sieve_cpu::ScaledShape::new([batch, seq_len], [heads; 2], widths[0])
            },
            q: part(0, widths[0]),
            k: part(keys, widths[0]),
            v: part(2 * keys, widths[1]),
            d_o: Heads::new(&self.case.d_o, heads, widths[1]),
            documents: Documents::new(&self.case.doc_start, &self.case.doc_end),
            mask: Mask::Causal,
        };
        let Terms { o, mut dq, mut dk, dv } = call.run(Rounding::None).terms;
        if let Some([q_weight, k_weight]) = &self.norms {
            let q_rows = self.case.q.chunks_exact(widths[0]).map(<[f32]>::to_vec);
            let k_rows = self.kv.chunks_exact(2 * widths[1]).enumerate().map(|(at, kv)| {
                let k_rope = &self.k_rope[at / heads * self.spec.rope_dim..][..self.spec.rope_dim];
                [&kv[..widths[1]], k_rope].concat()
            });
            dq.iter_mut().zip(q_rows).for_each(|(dq, q)| *dq *= norm_gain(&q, q_weight));
            dk.iter_mut().zip(k_rows).for_each(|(dk, k)| *dk *= norm_gain(&k, k_weight));
        }
        let of_keys = dk.chunks_exact(heads).map(|dk| dk.iter().map(|x| x * x).sum::<f64>().sqrt());
        let dk_rope = of_keys.collect();
        let dkv = dk.iter().zip(&dv).map(|(dk, dv)| dk.hypot(*dv)).collect();
        [("o", o), ("dq", dq), ("dkv", dkv), ("dk_rope", dk_rope)]
    }
}

/// Largest factor by which a norm's backward pass enlarges the gradient of a row, given the norm's weight.
fn norm_gain(row: &[f32], weight: &[f32]) -> f64 {
    let mean_square = row.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / row.len() as f64;
    let largest = weight.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
    f64::from(largest) / (mean_square + f64::from(EPSILON)).sqrt()
}

/// Names of the further results of a call with norms.
const NORM_RESULTS: [&str; 4] = ["rotated_keys", "key_scale", "dq_weight", "dk_weight"];

/// Results of a call with norms, in the order of [`NORM_RESULTS`].
fn norm_results<T>([rotated_keys, key_scale]: [T; 2], [dq_weight, dk_weight]: [T; 2]) -> [T; 4] {
    [rotated_keys, key_scale, dq_weight, dk_weight]
}

/// Exact results of a call, and the numbers that its tolerance follows from.
struct Expected {
    exact: Results,
    plain: Results,
    terms: [(&'static str, Vec<f64>); 4],
    /// Share of its terms that a single row may lose when one number rounds the other way.
    of_a_row: f64,
}

impl Expected {
    fn of(call: &Call) -> Self {
        let [exact, plain] = [DType::F64, DType::BF16].map(|dtype| call.on::<Flex>(&FlexDevice, dtype));
        Self { exact, plain, terms: call.terms(), of_a_row: call.moved_by_a_rounding() }
    }

    /// Compares every result with the exact one; returns the largest ratio of error to tolerance.
    fn judge(&self, own: &Results) -> Outcome {
        let exact_lse = self.exact.iter().find(|(name, _)| *name == "lse");
        let lost_digits = exact_lse.map_or(0.0, |(_, lse)| lost_digits(lse));
        // The plain bf16 run rounds packed queries and keys as the kernels do, and large logits amplify that error in
        // both alike. So its error counts in full.
        let rows = RowTolerance {
            most_of_plain: f64::INFINITY,
            of_a_row: self.of_a_row,
            ..RowTolerance::of_bf16(lost_digits)
        };
        let mut worst = 0.0f32;
        for (((name, own), (_, plain)), (_, exact)) in own.iter().zip(&self.plain).zip(&self.exact) {
            let ratio = match self.terms.iter().find(|(of, _)| of == name) {
                Some((_, terms)) => rows.judge(name, own, plain, exact, terms)?,
                None => {
                    let share = match *name {
                        "lse" | "key_scale" => 1e-4,
                        _ => 1.0 / 128.0,
                    };
                    Tolerance::new(2.0, Tolerance::FLOOR, share).judge(name, own, plain, exact)?
                }
            };
            worst = worst.max(ratio);
        }
        Ok(worst)
    }
}

/// Every specialisation that a check of latent attention launches.
pub(crate) fn latent_kernels(gpu: &DeviceReport) -> NeededKernels {
    let arch = gpu.arch();
    let mut list = NeededKernels::default();
    for &[head_dim, rope_dim] in WIDTHS {
        let shape = AttentionShape::new(1, 1, [1, 1], [head_dim + rope_dim, head_dim]);
        add_attention(&mut list, gpu, shape, &[NeededKeys::Neighbours]);
        for has_norm in [false, true] {
            list.extend(NeededKernels::mla_pack(&arch, [head_dim, rope_dim], has_norm));
        }
    }
    for &[rank, rope_dim] in decode::WIDTHS {
        for has_norm in [false, true] {
            list.extend(NeededKernels::mla_decode(&arch, rank, [2 * rope_dim, rope_dim], has_norm));
        }
    }
    list
}

/// Checks the launch wrappers in both sum orders; two runs in the fixed order must be equal.
pub(crate) fn check_wrappers(report: &mut Report, device: &dyn Device, extent: &Extent) -> Result<()> {
    decode::check_wrappers(report, device, extent);
    let mut random = Random(extent.seed);
    for at in 0..extent.few() {
        let call = Call::draw(extent, at, &mut random)?;
        let expected = Expected::of(&call);
        // The row of the report is named after the kernel family of the forward pass.
        let family = on_device::family(&call.case, device);
        for order in [SumOrder::Any, SumOrder::Fixed] {
            let name = match order {
                SumOrder::Any => "mla",
                SumOrder::Fixed => "mla, fixed order",
            };
            let outcome = || -> Outcome {
                let own = call.wrappers(device, order)?;
                let worst = expected.judge(&own)?;
                if order == SumOrder::Any || own == call.wrappers(device, order)? {
                    Ok(worst)
                } else {
                    wrong("two runs differ")
                }
            };
            report.add_wrapper(name, family, &call.label, outcome());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_result_does_not_pass() {
        let shape = AttentionShape::new(1, 120, [3, 3], [48, 32]);
        let case = Case::draw(shape, Keys::Dense, Cuts::Count(1), &Scores::Independent, 3).expect("one document");
        let mut call = Call::of(case, Size::Usual, 3, String::new()).normed(Size::Usual, &mut Random(3));
        let expected = Expected::of(&call);
        let Expected { exact, plain, .. } = &expected;
        for right in [exact, plain] {
            assert!(expected.judge(right).is_ok());
        }
        for at in 0..exact.len() {
            let mut wrong = exact.clone();
            wrong[at].1[0] = f32::NAN;
            let judged = expected.judge(&wrong);
            assert!(judged.is_err(), "{}", wrong[at].0);
            // The last tokens of one result are 10 % too small: late gradients are far smaller than the first ones,
            // and a tolerance for the whole tensor would not see them.
            let mut wrong = plain.clone();
            let late = wrong[at].1.len() / 20;
            wrong[at].1.iter_mut().rev().take(late).for_each(|x| *x *= 0.9);
            let judged = expected.judge(&wrong);
            assert!(judged.is_err(), "{}", wrong[at].0);
        }
        // The gradient of one head in place of their sum.
        call.spec.softmax_scale *= 1.1;
        assert!(expected.judge(&call.on::<Flex>(&FlexDevice, DType::F64)).is_err());
    }
}
