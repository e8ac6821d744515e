//! Checks launches that read a buffer which another thread allocated and drops at once: the allocator must not reuse
//! its memory before the launch has run.
use super::wrappers::{LaunchCheck, same};
use crate::device::Gpu;
use crate::error::Result;
use crate::extent::Extent;
use crate::report::{Outcome, Report, Wrong, wrong};
use burn::tensor::Tensor;
use sieve_kernels::{CudaTensor, DType, LaunchCounts, kernel_tensor};
use sieve_ops::Cuda;
use std::sync::mpsc::sync_channel;

const NAME: &str = "launch order";

/// Number of launches, each with a buffer of another thread's stream.
const LAUNCHES: usize = 10_000;

/// Elements that each launch scales. A launch takes some 30 microseconds, so the host queues far ahead of the GPU.
const ELEMENTS: usize = 16 << 20;

/// Checks that the factors of 10,000 launches, allocated by a second thread, are intact when the launches run. The
/// second thread also fills new buffers of the same size with NaN: one of them overwrites a factor if the allocator
/// frees the factor too early.
pub(crate) fn check_order(report: &mut Report, device: &Gpu, extent: &Extent) -> Result<()> {
    let path = match LaunchCounts::so_far().is_inline {
        Some(false) => "on a stream of their own",
        _ => "on Burn's own stream",
    };
    let outcome = factors_stay(LaunchCheck::new(device, extent.seed), device);
    report.add(NAME, path, "10,000 buffers of another thread", outcome);
    Ok(())
}

/// Scales a tensor by 10,000 factors of 1: it stays the same unless the memory of a factor was used again too early.
fn factors_stay(mut calls: LaunchCheck<'_>, device: &Gpu) -> Outcome {
    let total = calls.flat(&[ELEMENTS / 256, 256], DType::F32);
    // Buffers of other streams that launches keep until they have run.
    let before = LaunchCounts::so_far().foreign_buffers;
    let (send, receive) = sync_channel::<CudaTensor>(4);
    let made = std::thread::scope(|scope| {
        let maker = scope.spawn(move || {
            let filled = |value: f32| {
                let tensor = Tensor::<Cuda, 1>::full([1], value, &device.device);
                kernel_tensor(tensor.into_primitive().tensor())
            };
            for _ in 0..LAUNCHES {
                let factor = filled(1.0);
                drop((filled(f32::NAN), filled(f32::NAN)));
                if send.send(factor).is_err() {
                    // A launch failed, so the receiver is gone.
                    break;
                }
            }
        });
        for factor in receive {
            sieve_kernels::step::scale(&total.tensor, &factor)?;
        }
        maker.join().map_err(|_| Wrong::from("the second thread panicked".to_owned()))
    });
    made?;
    same("what 10,000 factors of 1 scaled", &calls.device.floats(&total.tensor)?, &total.values)?;
    match LaunchCounts::so_far().foreign_buffers - before {
        LAUNCHES => Ok(0.0),
        kept => wrong(format!("{kept} buffers of another stream were kept, of {LAUNCHES}")),
    }
}
