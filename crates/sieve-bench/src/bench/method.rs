//! A selector on one call's operands: its lists, attention under them, and what that keeps of dense attention.
use super::operands::Operands;
use crate::device::{Device, Gpu, mask_data};
use crate::error::{BenchError, Result};
use crate::shape::prompt_shape;
use sieve_core::{BlockSelection, MaskLayout};
use sieve_kernels::{AttentionResult, CudaTensor, KernelError};
use sieve_select::{Call, CallShape, Selector, density};
use std::time::Instant;

/// A selector and the call it acts on.
pub(super) struct Method<'a> {
    operands: &'a Operands,
    device: &'a Gpu,
    selector: Selector,
    call: CallShape,
    kind: Kind,
}

enum Kind {
    /// Chooses by queries and keys, on the device.
    Chooses(BlockSelection),
    /// Keeps the same positions of every prompt of this length: made once, on the host.
    Positions {
        lists: Box<Lists>,
        /// Kept pairs over causal ones.
        density: f64,
        host_ms: f64,
    },
}

/// What attention reads.
#[derive(Clone)]
pub(super) struct Lists {
    layout: MaskLayout,
    data: CudaTensor,
    /// Of each row of each list, where the device chose.
    pairs: Option<CudaTensor>,
}

impl<'a> Method<'a> {
    /// `None` where the method is dense at this length.
    pub(super) fn of(selector: &Selector, operands: &'a Operands, device: &'a Gpu) -> Result<Option<Self>> {
        let call = prompt_shape(&operands.shape);
        let kind = match selector.block_selection(call, 0, 0) {
            Some(selection) => Kind::Chooses(selection),
            None => {
                let refused = |error: sieve_select::SelectError| BenchError::Refused(error.to_string());
                let started = Instant::now();
                let empty = Call::of_shape(call).map_err(refused)?;
                let mask = selector.select_uncorrected(&empty).map_err(refused)?;
                if mask.keeps_everything() {
                    return Ok(None);
                }
                let packed = mask.packed().map_err(refused)?;
                let data = mask_data(device, &packed);
                let host_ms = 1e3 * started.elapsed().as_secs_f64();
                let lists = Lists {
                    layout: packed.layout().clone(),
                    data,
                    pairs: None,
                };
                Kind::Positions {
                    lists: Box::new(lists),
                    density: density(&mask).token,
                    host_ms,
                }
            }
        };
        Ok(Some(Self {
            operands,
            device,
            selector: selector.clone(),
            call,
            kind,
        }))
    }

    /// Milliseconds of the host for lists that depend on positions alone, which no prompt takes again.
    pub(super) fn host_ms(&self) -> Option<f64> {
        match &self.kind {
            Kind::Positions { host_ms, .. } => Some(*host_ms),
            Kind::Chooses(_) => None,
        }
    }

    pub(super) fn select(&self) -> Result<Lists, KernelError> {
        match &self.kind {
            Kind::Positions { lists, .. } => Ok(Lists::clone(lists)),
            Kind::Chooses(selection) => {
                let made = self.operands.qkv.select_blocks(selection, None)?;
                Ok(Lists {
                    layout: made.layout,
                    data: made.data,
                    pairs: Some(made.pairs),
                })
            }
        }
    }

    /// With the method's correction.
    pub(super) fn attend(&self, lists: &Lists) -> Result<AttentionResult, KernelError> {
        let (qkv, scale) = (&self.operands.qkv, self.operands.scale());
        let done = qkv.sparse_attention_forward(&lists.layout, &lists.data, scale)?;
        if let Some(correction) = self.selector.correction(self.call, 0)
            && let Kind::Chooses(selection) = &self.kind
        {
            let dense = selection.dense_rows.first().cloned().unwrap_or(0..0);
            qkv.correct_by_probes(&done.o, correction, dense, scale)?;
        }
        Ok(done)
    }

    /// Kept pairs over causal ones.
    pub(super) fn density(&self, lists: &Lists) -> Result<f64> {
        let (pairs, selection) = match (&lists.pairs, &self.kind) {
            (Some(pairs), Kind::Chooses(selection)) => (pairs, selection),
            (_, Kind::Positions { density, .. }) => return Ok(*density),
            (None, Kind::Chooses(_)) => return Ok(f64::NAN),
        };
        let pairs = self.device.ints(pairs)?;
        let pairs: f64 = pairs.iter().map(|&pairs| f64::from(pairs)).sum();
        let all = self.call.causal_pairs() as f64 * selection.num_lists() as f64;
        Ok(pairs / all)
    }
}

/// The share of dense attention's mass that attention kept, of each head.
pub(super) fn masses(device: &Gpu, lse: &CudaTensor, dense_lse: &[f32], num_heads: usize) -> Result<Vec<f64>> {
    let lse = device.floats(lse)?;
    let rows = lse.len() / num_heads;
    let of_head = lse.chunks_exact(rows).zip(dense_lse.chunks_exact(rows));
    let mass = of_head.map(|(lse, dense)| {
        let kept = lse.iter().zip(dense);
        let kept = kept.map(|(x, dense)| f64::from(x - dense).exp().min(1.0));
        kept.sum::<f64>() / rows as f64
    });
    Ok(mass.collect())
}
