//! New tokens against a cache of latents: one or several, more heads than a block has rows, one split and many.
use crate::bar::Bar;
use crate::device::Device;
use crate::extent::Extent;
use crate::place::{Place, float, floats};
use crate::report::{Path, PathWatch, Report};
use burn::tensor::{DType, Tensor, TensorPrimitive};
use burn_flex::{Flex, FlexDevice};
use sieve_kernels::{CudaTensor, KernelError, mla_decode};
use sieve_ops::reference;
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
    label: String,
}

impl Call {
    fn draw(extent: &Extent, random: &mut Random) -> Self {
        let widths = match extent.is_emulated {
            true => &[[48, 16]][..],
            false => WIDTHS,
        };
        let [rank, rope] = random.one_of(widths);
        let longest = if extent.is_emulated { 300 } else { 5000 };
        let drawn = random.between(1, longest);
        let len = random.one_of(&[1, 15, 64, 65, drawn, drawn]);
        let several = random.between(1, len.min(9) + 1);
        let (batch, new) = (random.between(1, 4), random.one_of(&[1, 1, several]));
        let heads = random.one_of(&[1, 3, 6, 16, 17, 40]);
        let size = random.one_of(&[1.0, 1.0, 20.0]);
        let mut scaled = |count: usize, factor: f32| -> Vec<f32> {
            let values = random.bf16_normals(count).into_iter();
            values.map(|x| round_bf16(x * factor)).collect()
        };
        let q = scaled(batch * new * heads * (rank + rope), size);
        let latents = scaled(batch * len * (rank + rope), 1.0);
        let label = format!("{batch} rows, {new} of {len} tokens, {heads} heads, rank {rank} + {rope}, q x {size}");
        Self {
            batch,
            new,
            heads,
            len,
            widths: [rank, rope],
            q,
            latents,
            label,
        }
    }

    fn width(&self) -> usize {
        self.widths[0] + self.widths[1]
    }

    fn scale(&self) -> f64 {
        1.0 / (self.width() as f64).sqrt()
    }

    fn on<B: Place>(&self, device: &B::Device, dtype: DType, own: bool) -> Vec<f32> {
        let Self {
            batch, new, heads, len, ..
        } = *self;
        let (width, rank, scale) = (self.width(), self.widths[0], self.scale());
        let q = float::<B, 4>(&self.q, [batch, new, heads, width], device);
        let q = Tensor::<B, 4>::from_primitive(TensorPrimitive::Float(q)).cast(dtype);
        let latents = float::<B, 3>(&self.latents, [batch, len, width], device);
        let latents = Tensor::<B, 3>::from_primitive(TensorPrimitive::Float(latents)).cast(dtype);
        let [q, latents] = [q.into_primitive().tensor(), latents.into_primitive().tensor()];
        floats::<B, 4>(match own {
            true => B::mla_decode(q, latents, rank, scale),
            false => reference::mla_decode::<B>(q, latents, rank, scale),
        })
    }

    fn wrapper(&self, device: &dyn Device) -> Result<Vec<f32>, KernelError> {
        let Self {
            batch, new, heads, len, ..
        } = *self;
        let (width, pitch) = (self.width(), self.width() + GAP);
        let q = device.float(&self.q, &[batch, new, heads, width], DType::BF16);
        let mut all = vec![f32::NAN; batch * (len + 1) * pitch];
        for (row, values) in self.latents.chunks_exact(len * width).enumerate() {
            for (at, values) in values.chunks_exact(width).enumerate() {
                all[(row * (len + 1) + at) * pitch..][..width].copy_from_slice(values);
            }
        }
        let all: CudaTensor = device.float(&all, &[batch, len + 1, pitch], DType::BF16);
        let strides = [(len + 1) * pitch, pitch, 1];
        let latents = all.view("check", "latents", &[batch, len, width], &strides)?;
        device.floats(&mla_decode(&q, &latents, self.widths[0], self.scale() as f32)?)
    }

    fn judge(&self, got: &[f32], is_bf16: bool) -> Result<f32, String> {
        let exact = self.on::<Flex>(&FlexDevice, DType::F64, false);
        let plain = self.on::<Flex>(&FlexDevice, DType::BF16, false);
        let bar = Bar {
            plain: if is_bf16 { 2.0 } else { 0.0 },
            floor: Bar::FLOOR,
            share: if is_bf16 { 1.0 / 256.0 } else { 1e-4 },
            norm: false,
        };
        bar.judge("o", got, &plain, &exact)
    }
}

fn draws(extent: &Extent) -> impl Iterator<Item = Call> {
    let (mut random, extent) = (Random(extent.seed), *extent);
    (0..extent.few()).map(move |_| Call::draw(&extent, &mut random))
}

pub(super) fn check_wrappers(report: &mut Report, device: &dyn Device, extent: &Extent) {
    for call in draws(extent) {
        let outcome = call.wrapper(device).map_err(|e| e.to_string());
        let outcome = outcome.and_then(|o| call.judge(&o, true));
        report.add("mla_decode", "kernel", &call.label, outcome);
    }
}

pub(super) fn check_ops<B: Place>(report: &mut Report, device: &B::Device, extent: &Extent, is_cuda: bool) {
    for call in draws(extent) {
        let watch = PathWatch::start();
        let o = call.on::<B>(device, B::DTYPE, true);
        let (path, outcome) = match (is_cuda, watch.path()) {
            (false, _) => ("cpu", call.judge(&o, false)),
            (true, Path::Kernel) => ("kernel", call.judge(&o, true)),
            (true, Path::Reference(reason)) => ("reference", Err(reason)),
            (true, Path::None) => ("none", Err("no kernel was called".to_owned())),
        };
        report.add("op mla_decode", path, &call.label, outcome);
    }
}
