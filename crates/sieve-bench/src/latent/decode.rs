//! New tokens against a cache of latents: one or several, more heads than a block has rows, one split and many.
use super::cast;
use crate::bar::Bar;
use crate::device::Device;
use crate::extent::Extent;
use crate::place::{Place, floats};
use crate::report::{Outcome, Path, PathWatch, Report, Wrong, wrong};
use burn::tensor::DType;
use burn_flex::{Flex, FlexDevice};
use sieve_kernels::{CudaTensor, KernelError, LatentKeys, mla_decode};
use sieve_testing::{Random, round_bf16};

/// Ranks of latents, and widths of the rotated key.
pub(super) const WIDTHS: &[[usize; 2]] = &[[512, 64], [256, 64], [192, 64], [96, 32], [48, 16], [16, 16]];

/// Elements between a latent and the next, NaN.
const GAP: usize = 8;

struct Call {
    batch: usize,
    new: usize,
    heads: usize,
    len: usize,
    widths: [usize; 2],
    /// `[batch, new, heads, rank + rope_dim]`.
    q: Vec<f32>,
    /// `[batch, len, rank + rope_dim]`.
    latents: Vec<f32>,
    /// `[batch, len, heads]`, where keys have factors.
    key_scale: Option<Vec<f32>>,
    /// Factor on the queries.
    size: f32,
    label: String,
}

impl Call {
    fn draw(extent: &Extent, at: usize, random: &mut Random) -> Self {
        let [rank, rope] = random.one_of(extent.pick(&[[48, 16]], WIDTHS));
        let drawn = random.between(1, extent.pick(300, 5000));
        let len = random.one_of(&[1, 15, 64, 65, drawn, drawn]);
        let several = random.between(1, len.min(9) + 1);
        let (batch, new) = (random.between(1, 4), random.one_of(&[1, 1, several]));
        let heads = random.one_of(&[1, 3, 6, 16, 17, 40]);
        // Latents are values too, so queries alone make logits large.
        let size = extent.magnitude_of(at).powi(2);
        let mut scaled = |count: usize, factor: f32| -> Vec<f32> {
            let values = random.bf16_normals(count).into_iter();
            values.map(|x| round_bf16(x * factor)).collect()
        };
        let q = scaled(batch * new * heads * (rank + rope), size);
        let latents = scaled(batch * len * (rank + rope), 1.0);
        let mut label = format!("{batch} rows, {new} of {len} tokens, {heads} heads, rank {rank} + {rope}, q x {size}");
        let key_scale = random.chance(0.5).then(|| {
            label += ", keys with factors";
            (0..batch * len * heads)
                .map(|_| 0.2 + 2.0 * random.unit() as f32)
                .collect()
        });
        Self {
            batch,
            new,
            heads,
            len,
            widths: [rank, rope],
            q,
            latents,
            key_scale,
            size,
            label,
        }
    }

    fn width(&self) -> usize {
        self.widths[0] + self.widths[1]
    }

    fn scale(&self) -> f64 {
        1.0 / (self.width() as f64).sqrt()
    }

    fn on<B: Place>(&self, device: &B::Device, dtype: DType) -> Vec<f32> {
        let (width, rank, scale) = (self.width(), self.widths[0], self.scale());
        let q = [self.batch, self.new, self.heads, width];
        let q = cast::<B, 4>(&self.q, q, dtype, device);
        let latents = [self.batch, self.len, width];
        let latents = cast::<B, 3>(&self.latents, latents, dtype, device);
        let factors = [self.batch, self.len, self.heads];
        let factor_type = match dtype {
            DType::F64 => DType::F64,
            _ => DType::F32,
        };
        let key_scale = self.key_scale.as_ref();
        let key_scale = key_scale.map(|values| cast::<B, 3>(values, factors, factor_type, device));
        floats::<B, 4>(B::mla_decode(q, latents, key_scale, rank, scale))
    }

    fn wrapper(&self, device: &dyn Device) -> Result<Vec<f32>, KernelError> {
        let Self {
            batch, new, heads, len, ..
        } = *self;
        let width = self.width();
        let q = device.float(&self.q, &[batch, new, heads, width], sieve_kernels::DType::BF16);
        // Rows with NaN behind each, and a row of NaN behind those of a batch row.
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
        let key_scale = key_scale
            .map(|values| apart(values, heads, 3, sieve_kernels::DType::F32))
            .transpose()?;
        let keys = LatentKeys {
            latents: &latents,
            rank: self.widths[0],
            key_scale: key_scale.as_ref(),
        };
        let o = mla_decode(&q, keys, self.scale() as f32)?;
        device.floats(&o)
    }

    fn judge(&self, got: &[f32], is_bf16: bool) -> Outcome {
        let exact = self.on::<Flex>(&FlexDevice, DType::F64);
        let plain = self.on::<Flex>(&FlexDevice, DType::BF16);
        // What rounding logits of that size in f32 costs a probability.
        let lost_digits = 2.0 * f32::EPSILON * self.size * (self.width() as f32).sqrt();
        let shares = [1.0 / 256.0, 1e-4].map(|share| share + lost_digits);
        let bar = Bar::of(is_bf16, Bar::FLOOR, shares);
        bar.judge("o", got, &plain, &exact)
    }
}

fn draws(extent: &Extent) -> impl Iterator<Item = Call> {
    let (mut random, extent) = (Random(extent.seed), *extent);
    (0..extent.few()).map(move |at| Call::draw(&extent, at, &mut random))
}

pub(super) fn check_wrappers(report: &mut Report, device: &dyn Device, extent: &Extent) {
    for call in draws(extent) {
        let outcome = call.wrapper(device).map_err(Wrong::from);
        let outcome = outcome.and_then(|o| call.judge(&o, true));
        report.add("mla_decode", "kernel", &call.label, outcome);
    }
}

pub(super) fn check_ops<B: Place>(report: &mut Report, device: &B::Device, extent: &Extent) {
    for call in draws(extent) {
        let watch = PathWatch::start(B::IS_CUDA);
        let o = call.on::<B>(device, B::DTYPE);
        let (path, outcome) = match watch.path() {
            Path::Kernel => (B::KERNEL, call.judge(&o, B::IS_CUDA)),
            Path::Reference(reason) => ("reference", wrong(reason)),
            Path::None => ("none", wrong("no kernel was called")),
        };
        report.add("op mla_decode", path, &call.label, outcome);
    }
}
