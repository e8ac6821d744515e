//! Decoding token by token against the rows of the whole pass.
use super::attention::{GROUPS, WIDTHS};
use super::bar::Bar;
use super::report::{Path, PathWatch, Report, is_device_limit};
use crate::kernels::case::{Case, Cuts, Keys};
use crate::kernels::on_cuda::OnCuda;
use crate::kernels::place::{self, Place};
use crate::kernels::random::Random;
use crate::kernels::reference::{Rounding, attention};
use crate::kernels::scores::Scores;
use anyhow::Result;
use burn_cuda::CudaDevice;
use sieve_kernels::AttentionShape;

fn cases(count: usize, seed: u64) -> impl Iterator<Item = Result<(Case, String)>> {
    let mut random = Random::new(seed);
    (0..count).map(move |at| {
        let (head_dim, head_dim_v) = random.one_of(&WIDTHS);
        let group = random.one_of(&GROUPS);
        let num_kv_heads = random.between(1, 4);
        let seq_len = random.between(1, 70);
        let shape = AttentionShape {
            batch: random.between(1, 4),
            seq_len,
            num_heads: group * num_kv_heads,
            num_kv_heads,
            head_dim,
            head_dim_v,
        };
        let window = random.one_of(&[1, 5, 16, 33, 100]);
        let keys = match at % 3 {
            0 => Keys::Dense,
            1 => Keys::Window(window),
            _ => Keys::Chosen(window),
        };
        let scores = &Scores::RANDOM[random.below(Scores::RANDOM.len())];
        let seed = random.between(0, 1 << 30) as u64;
        let label = format!("{shape:?} {keys:?} {} seed {seed}", scores.name());
        Ok((
            Case::draw(shape, keys, Cuts::Count(1), scores, seed)?,
            label,
        ))
    })
}

fn name(keys: Keys) -> &'static str {
    match keys {
        Keys::Dense | Keys::Biased => "decode",
        Keys::Window(_) => "decode, window",
        Keys::Chosen(_) => "dma_decode",
    }
}

pub(super) fn judge(case: &Case, o: &[f32], is_bf16: bool) -> Result<f32, String> {
    let exact = attention(case, Rounding::None).outputs.o;
    let plain = attention(case, Rounding::Bf16).outputs.o;
    let bar = Bar {
        plain: if is_bf16 { 2.0 } else { 0.0 },
        floor: Bar::FLOOR,
        // One token's row is short, and its plain computation is often exact.
        share: if is_bf16 { 1.0 / 256.0 } else { 1e-4 },
        norm: false,
    };
    bar.judge("o", o, &plain, &exact)
}

/// The ops of `B`.
pub(crate) fn check_ops<B: Place>(
    report: &mut Report,
    device: &B::Device,
    count: usize,
    seed: u64,
    is_cuda: bool,
) -> Result<()> {
    for case in cases(count, seed) {
        let (case, label) = case?;
        let watch = PathWatch::start();
        let o = match case.keys {
            Keys::Chosen(_) => place::dma_decode::<B>(&case, device),
            _ => place::decode::<B>(&case, device),
        };
        let name = format!("op {}", name(case.keys));
        let outcome = judge(&case, &o, is_cuda);
        match watch.path() {
            _ if !is_cuda => report.add(&name, "cpu", &label, outcome),
            Path::Kernel => report.add(&name, "kernel", &label, outcome),
            Path::Reference(reason) if is_device_limit(&reason) => {
                report.add_missing(&name, &reason);
            }
            Path::Reference(reason) => {
                let failure = Err(format!("took the reference: {reason}"));
                report.add(&name, "reference", &label, failure);
            }
            Path::None => {
                let failure = Err("no kernel was called".to_owned());
                report.add(&name, "none", &label, failure);
            }
        }
    }
    Ok(())
}

/// The launch wrappers, with the token's key written into the cache by the kernel.
pub(crate) fn check_wrappers(
    report: &mut Report,
    device: &CudaDevice,
    count: usize,
    seed: u64,
) -> Result<()> {
    for case in cases(count, seed) {
        let (case, label) = case?;
        let call = OnCuda::new(&case, device);
        let o = match case.keys {
            Keys::Chosen(_) => call.dma_decode(),
            _ => call.decode(),
        };
        match o {
            Ok(o) => {
                let outcome = judge(&case, &o, true);
                report.add(name(case.keys), "kernel", &label, outcome);
            }
            Err(error) => {
                report.add(name(case.keys), "refused", &label, Err(error.to_string()));
            }
        }
    }
    Ok(())
}
