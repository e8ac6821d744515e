//! Checks decoding over a cache of latents: one or several new tokens, more heads than a block has rows, one KV split
//! and many.
use crate::case::scaled_normals;
use crate::device::Device;
use crate::extent::Extent;
use crate::report::{Outcome, Report, wrong};
use crate::tensors::{cast, floats, table_type};
use crate::tolerance::Tolerance;
use burn::tensor::DType;
use burn_flex::{Flex, FlexDevice};
use sieve_kernels::{CudaTensor, KernelError, LatentKeys, LatentToken, mla_decode};
use sieve_ops::DeviceBackend;
use sieve_testing::{Random, round_bf16};

/// Ranks of latents, and widths of the rotated key.
pub(super) const WIDTHS: &[[usize; 2]] = &[[512, 64], [256, 64], [192, 64], [96, 32], [48, 16], [16, 16]];

/// Elements between two latents in memory, which hold NaN.
const GAP: usize = 8;

struct Call {
    batch: usize,
    /// Number of new tokens, the last ones of `len`.
    new: usize,
    heads: usize,
    /// Number of cached tokens, the new ones included.
    len: usize,
    /// Rank of the latent, and width of the rotated key.
    widths: [usize; 2],
    /// Queries of new tokens, `[batch, new, heads, rank + rope_dim]`.
    q: Vec<f32>,
    /// Latent cache, `[batch, len, rank + rope_dim]`.
    latents: Vec<f32>,
    /// Factors 1 / rms of each head's key, `[batch, len, heads]`; `None` without norms.
    key_scale: Option<Vec<f32>>,
    /// Factor on the random queries.
    size: f32,
    label: String,
}

impl Call {
    /// Draws call number `at`; half of the calls have factors 1 / rms of keys.
    fn draw(extent: &Extent, at: usize, random: &mut Random) -> Self {
        let [rank, rope] = random.one_of(extent.pick(&[[48, 16]], WIDTHS));
        let drawn = random.between(1, extent.pick(300, 5000));
        let len = random.one_of(&[1, 15, 64, 65, drawn, drawn]);
        let several = random.between(1, len.min(9) + 1);
        let (batch, new) = (random.between(1, 4), random.one_of(&[1, 1, several]));
        let heads = random.one_of(&[1, 3, 6, 16, 17, 40]);
        // Latents are keys and values, so only queries are scaled, by the square of the factor.
        let size = extent.magnitude_of(at).powi(2);
        let q = scaled_normals(random, batch * new * heads * (rank + rope), size);
        let latents = random.bf16_normals(batch * len * (rank + rope));
        let mut label = format!("{batch} rows, {new} of {len} tokens, {heads} heads, rank {rank} + {rope}, q x {size}");
        let key_scale = random.chance(0.5).then(|| {
            label += ", keys with factors";
            (0..batch * len * heads).map(|_| 0.2 + 2.0 * random.unit() as f32).collect()
        });
        Self { batch, new, heads, len, widths: [rank, rope], q, latents, key_scale, size, label }
    }

    fn width(&self) -> usize {
        self.widths[0] + self.widths[1]
    }

    fn scale(&self) -> f64 {
        1.0 / (self.width() as f64).sqrt()
    }

    /// The reference, in f64 or with a plain computation's rounding to bf16.
    fn reference(&self, dtype: DType) -> Vec<f32> {
        let (width, rank, scale) = (self.width(), self.widths[0], self.scale());
        let q = [self.batch, self.new, self.heads, width];
        let q = cast::<Flex, 4>(&self.q, q, dtype, &FlexDevice);
        let latents = [self.batch, self.len, width];
        let latents = cast::<Flex, 3>(&self.latents, latents, dtype, &FlexDevice);
        let factors = [self.batch, self.len, self.heads];
        let key_scale = self.key_scale.as_ref();
        let key_scale = key_scale.map(|values| cast::<Flex, 3>(values, factors, table_type(dtype), &FlexDevice));
        floats::<Flex, 4>(Flex::mla_decode(q, latents, key_scale, rank, scale))
    }

    /// The output of the launch wrapper, over a cache with NaN between its values.
    fn wrapper(&self, device: &dyn Device) -> Result<Vec<f32>, KernelError> {
        let Self { batch, new, heads, len, .. } = *self;
        let width = self.width();
        let q = device.float(&self.q, &[batch, new, heads, width], sieve_kernels::DType::BF16);
        // NaN behind each token's values, and one token of NaN behind each batch row.
        let apart = |values: &[f32], width: usize, gap: usize, dtype| {
            let pitch = width + gap;
            let mut all = vec![f32::NAN; batch * (len + 1) * pitch];
            for (row, values) in values.chunks_exact(len * width).enumerate() {
                for (at, values) in values.chunks_exact(width).enumerate() {
                    all[(row * (len + 1) + at) * pitch..][..width].copy_from_slice(values);
                }
            }
            let all: CudaTensor = device.float(&all, &[batch, len + 1, pitch], dtype);
            let strides = [(len + 1) * pitch, pitch, 1];
            all.view("check", "cache", &[batch, len, width], &strides)
        };
        let latents = apart(&self.latents, width, GAP, sieve_kernels::DType::BF16)?;
        let key_scale = self.key_scale.as_ref();
        let key_scale = key_scale.map(|values| apart(values, heads, 3, sieve_kernels::DType::F32)).transpose()?;
        let keys = LatentKeys {
            latents: &latents,
            rank: self.widths[0],
            key_scale: key_scale.as_ref(),
            // Every row has all `len` tokens.
            length: None,
        };
        let o = mla_decode(&q, keys, self.scale() as f32)?;
        device.floats(&o)
    }

    /// Compares the output of the launch wrapper with the reference.
    fn judge(&self, device: &dyn Device) -> Outcome {
        let got = self.wrapper(device)?;
        let exact = self.reference(DType::F64);
        let plain = self.reference(DType::BF16);
        // Rounding logits of this size in f32 changes a probability by this share.
        let lost_digits = 2.0 * f32::EPSILON * self.size * (self.width() as f32).sqrt();
        let tolerance = Tolerance::new(2.0, Tolerance::FLOOR, 1.0 / 256.0 + lost_digits);
        tolerance.judge("o", &got, &plain, &exact)
    }
}

/// Checks attention over given latents (`mla_decode`), then the whole step of a new token, with and without norms.
pub(super) fn check_wrappers(report: &mut Report, device: &dyn Device, extent: &Extent) {
    let mut random = Random(extent.seed);
    for at in 0..extent.few() {
        let call = Call::draw(extent, at, &mut random);
        report.add("mla_decode", "kernel", &call.label, call.judge(device));
    }
    let mut random = Random(extent.seed);
    for at in 0..extent.few().max(4) {
        let has_norm = at % 2 == 0;
        let token = TokenCall::draw(extent, has_norm, &mut random);
        let label = format!("{:?} heads, {} tokens of room", token.heads, token.room);
        report.add("mla token", "kernel", &label, token.judge(device));
    }
}

/// One new token for each row of a batch, from its packed heads on; rows have different lengths.
struct TokenCall {
    batch: usize,
    /// Number of heads, and their widths without and with rotation.
    heads: [usize; 3],
    rank: usize,
    /// Tokens that the cache has room for.
    room: usize,
    /// Tokens of each row before the new one.
    lengths: Vec<usize>,
    has_norm: bool,
    random: Random,
}

impl TokenCall {
    /// Draws sizes, and how many tokens each row has; the numbers are drawn when the call is judged.
    fn draw(extent: &Extent, has_norm: bool, random: &mut Random) -> Self {
        let [rank, rope] = random.one_of(extent.pick(&[[48, 16]], WIDTHS));
        let (batch, room) = (random.between(1, 4), random.between(1, extent.pick(300, 3000)));
        Self {
            batch,
            heads: [random.one_of(&[1, 3, 17]), 2 * rope, rope],
            rank,
            room,
            lengths: (0..batch).map(|_| random.below(room)).collect(),
            has_norm,
            random: Random(random.between(0, 1 << 30) as u64),
        }
    }

    /// Decodes the token, requires its latent in the cache, and compares o with latent attention in f64; the tolerance
    /// follows from a plain computation that rounds to bf16.
    fn judge(mut self, device: &dyn Device) -> Outcome {
        let numbers = self.draw_numbers();
        let [cache, o] = self.on_device(&numbers, device)?;
        let width = numbers.width;
        for (row, length) in self.lengths.iter().enumerate() {
            if cache[(row * self.room + length) * width..][..width] != self.new_latent(&numbers, row) {
                return wrong(format!("the new latent of row {row} is not in the cache"));
            }
        }
        let [num_heads, ..] = self.heads;
        let [exact, plain] = [false, true].map(|is_plain| {
            let all = (0..self.batch).flat_map(|row| (0..num_heads).map(move |head| (row, head)));
            let outputs = all.flat_map(|(row, head)| self.output_of_head(&numbers, row, head, is_plain));
            outputs.collect::<Vec<f32>>()
        });
        Tolerance::new(2.0, Tolerance::FLOOR, 1.0 / 256.0).judge("o", &o, &plain, &exact)
    }

    /// Draws the packed token, the weights, the new latent with its rotated part, and caches for `room` tokens of each
    /// row; factors on keys lie between 0.2 and 2.2.
    fn draw_numbers(&mut self) -> TokenNumbers {
        let [num_heads, head_dim, rope] = self.heads;
        let (batch, rank, key_dim) = (self.batch, self.rank, head_dim + rope);
        let (width, packed_width) = (rank + rope, num_heads * (2 * key_dim + head_dim));
        let random = &mut self.random;
        let packed = random.bf16_normals(batch * packed_width);
        let up = scaled_normals(random, num_heads * 2 * head_dim * rank, 1.0 / (rank as f32).sqrt());
        let mut normals = |count: usize| random.bf16_normals(count);
        let (latent, rotated, norm) = (normals(batch * rank), normals(batch * rope), normals(key_dim));
        let latents = normals(batch * self.room * width);
        let mut factors = |count: usize| -> Vec<f32> { (0..count).map(|_| 0.2 + 2.0 * random.unit() as f32).collect() };
        let (key_scale, scales) = (factors(batch * num_heads), factors(batch * self.room * num_heads));
        TokenNumbers { width, packed_width, packed, up, latent, rotated, norm, latents, key_scale, scales }
    }

    /// The cache after the call, and the call's output.
    fn on_device(&self, numbers: &TokenNumbers, device: &dyn Device) -> Result<[Vec<f32>; 2], KernelError> {
        let [num_heads, head_dim, rope] = self.heads;
        let (batch, room, rank, key_dim) = (self.batch, self.room, self.rank, head_dim + rope);
        let TokenNumbers { width, packed_width, packed, up, latent, rotated, norm, key_scale, .. } = numbers;
        // On the device the cache holds NaN behind each row's tokens.
        let [mut latents, mut scales] = [&numbers.latents, &numbers.scales].map(Clone::clone);
        for (row, &length) in self.lengths.iter().enumerate() {
            latents[(row * room + length) * width..(row + 1) * room * width].fill(f32::NAN);
            scales[(row * room + length) * num_heads..(row + 1) * room * num_heads].fill(f32::NAN);
        }
        let bf16 = |values: &[f32], shape: &[usize]| device.float(values, shape, sieve_kernels::DType::BF16);
        let f32s = |values: &[f32], shape: &[usize]| device.float(values, shape, sieve_kernels::DType::F32);
        let cache = bf16(&latents, &[batch, room, *width]);
        let scales = f32s(&scales, &[batch, room, num_heads]);
        let norms = [bf16(norm, &[key_dim]), bf16(rotated, &[batch, 1, rope]), f32s(key_scale, &[batch, 1, num_heads])];
        let lengths: Vec<i32> = self.lengths.iter().map(|&length| length as i32).collect();
        let token = LatentToken {
            packed: &bf16(packed, &[batch, 1, *packed_width]),
            up: &bf16(up, &[num_heads * 2 * head_dim, rank]),
            latent: &bf16(latent, &[batch, 1, rank]),
            norm: self.has_norm.then(|| norms.each_ref()),
            length: &device.int(&lengths, &[batch]),
            heads: self.heads,
        };
        let o = token.decode(&cache, self.has_norm.then_some(&scales), self.softmax_scale())?;
        Ok([device.floats(&cache)?, device.floats(&o)?])
    }

    fn softmax_scale(&self) -> f32 {
        let [_, head_dim, rope] = self.heads;
        1.0 / ((head_dim + rope) as f32).sqrt()
    }

    /// The new token's row of the cache: its latent, then its rotated key. Without norms the rotated key is the end of
    /// the first head's packed key.
    fn new_latent(&self, numbers: &TokenNumbers, row: usize) -> Vec<f32> {
        let ([num_heads, head_dim, rope], rank) = (self.heads, self.rank);
        let first_key = row * numbers.packed_width + num_heads * (head_dim + rope);
        let rotated = if self.has_norm {
            &numbers.rotated[row * rope..][..rope]
        } else {
            &numbers.packed[first_key + head_dim..][..rope]
        };
        [&numbers.latent[row * rank..][..rank], rotated].concat()
    }

    /// The output of a head by the definition, in f64; with `is_plain` values are rounded to bf16 where kernels may.
    fn output_of_head(&self, numbers: &TokenNumbers, row: usize, head: usize, is_plain: bool) -> Vec<f32> {
        let ([num_heads, head_dim, rope], room, rank) = (self.heads, self.room, self.rank);
        let (length, width, key_dim) = (self.lengths[row], numbers.width, head_dim + rope);
        let round = |x: f64| if is_plain { f64::from(round_bf16(x as f32)) } else { x };
        // A row of the up-projection of keys (`which` = 0) or of values (1).
        let weights = |which: usize, d: usize| &numbers.up[((head * 2 + which) * head_dim + d) * rank..][..rank];
        let q = &numbers.packed[row * numbers.packed_width + head * key_dim..][..key_dim];
        // The query times the up-projection of keys, to be multiplied with latents.
        let mut folded = vec![0.0f64; rank];
        for d in 0..head_dim {
            let q = if self.has_norm { round(f64::from(q[d]) * f64::from(numbers.norm[d])) } else { q[d].into() };
            folded.iter_mut().zip(weights(0, d)).for_each(|(to, w)| *to += q * f64::from(*w));
        }
        folded.iter_mut().for_each(|x| *x = round(*x));
        folded.extend(q[head_dim..].iter().map(|x| f64::from(*x)));
        let new = self.new_latent(numbers, row);
        let key =
            |at: usize| if at == length { &new[..] } else { &numbers.latents[(row * room + at) * width..][..width] };
        let factor = |at: usize| match (self.has_norm, at == length) {
            (false, _) => 1.0,
            (true, true) => numbers.key_scale[row * num_heads + head].into(),
            (true, false) => numbers.scales[(row * room + at) * num_heads + head].into(),
        };
        let dot = |at: usize| key(at).iter().zip(&folded).map(|(k, q)| f64::from(*k) * q).sum::<f64>();
        let scale = f64::from(self.softmax_scale());
        let logits: Vec<f64> = (0..=length).map(|at| scale * factor(at) * dot(at)).collect();
        let most = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let p: Vec<f64> = logits.iter().map(|x| (x - most).exp()).collect();
        let sum: f64 = p.iter().sum();
        let column = |r: usize| (0..=length).map(|at| p[at] * f64::from(key(at)[r])).sum::<f64>() / sum;
        let attended: Vec<f64> = (0..rank).map(|r| round(column(r))).collect();
        let value = |d: usize| attended.iter().zip(weights(1, d)).map(|(c, w)| c * f64::from(*w)).sum::<f64>();
        (0..head_dim).map(|d| round(value(d)) as f32).collect()
    }
}

/// The numbers of a [`TokenCall`], in the layout of [`LatentToken`].
struct TokenNumbers {
    /// Columns of a row of the cache, and of the packed tensor.
    width: usize,
    packed_width: usize,
    packed: Vec<f32>,
    up: Vec<f32>,
    latent: Vec<f32>,
    /// Rotated keys, the weight of the norm, and its factors for the new keys.
    rotated: Vec<f32>,
    norm: Vec<f32>,
    key_scale: Vec<f32>,
    /// The cache and the factors of its keys; each row's tokens are its first ones.
    latents: Vec<f32>,
    scales: Vec<f32>,
}
