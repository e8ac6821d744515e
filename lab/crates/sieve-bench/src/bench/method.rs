//! A prefill selector on the queries, keys and values of one call: its mask, attention under the mask, and the share of
//! dense attention's pairs and mass that the mask keeps.
use super::operands::Operands;
use crate::device::{Device, Gpu, upload_mask};
use crate::error::{BenchError, Result, refused};
use crate::shape::prompt_shape;
use sieve_core::{BlockSelection, ChosenKeys, KeyMask};
use sieve_kernels::{AttentionResult, CudaTensor, KernelError};
use sieve_select::{Call, CallShape, Reads, Selector, density};
use std::time::Instant;

/// Index of the layer whose call is timed.
const LAYER: usize = 0;

/// A prefill selector and the attention call that it masks.
pub(super) struct Method<'a> {
    operands: &'a Operands,
    device: &'a Gpu,
    selector: Selector,
    call: CallShape,
    kind: Kind,
}

/// How a selector's mask is made.
enum Kind {
    /// Chooses by queries and keys, on the device.
    Chooses(Box<BlockSelection>),
    /// The mask depends on positions alone: the host makes it once for all prompts of this length.
    Positions {
        mask: Box<KeyMask<CudaTensor>>,
        /// Kept pairs of query and key, divided by causal pairs.
        density: f64,
        /// Time that the host took to compute the mask.
        host_ms: f64,
    },
}

impl<'a> Method<'a> {
    /// How this selector runs on a prompt of `operands`' length; `None` if it is dense at that length.
    pub(super) fn of(selector: &Selector, operands: &'a Operands, device: &'a Gpu) -> Result<Option<Self>> {
        let call = prompt_shape(&operands.shape);
        let num_layers = 0;
        let kind = match selector.block_selection(call, LAYER, num_layers) {
            Some(selection) => Kind::Chooses(Box::new(selection)),
            None if selector.reads(LAYER, call.num_queries) != Reads::Nothing => {
                return refused("this setting chooses on the host\n  hint: eval selectors times it in a model");
            }
            None => {
                let refused = |error: sieve_select::SelectError| BenchError::Refused(error.to_string());
                let started = Instant::now();
                let empty = Call::of_shape(call).map_err(refused)?;
                let chosen = selector.select_uncorrected(&empty).map_err(refused)?;
                if chosen.mask.keeps_everything() {
                    return Ok(None);
                }
                let mask = upload_mask(device, &chosen.mask).map_err(|error| refused(error.into()))?;
                let host_ms = 1e3 * started.elapsed().as_secs_f64();
                Kind::Positions { mask: Box::new(mask), density: density(&chosen).token, host_ms }
            }
        };
        Ok(Some(Self { operands, device, selector: selector.clone(), call, kind }))
    }

    /// Milliseconds that the host took for a mask of positions alone, which all prompts of this length share; `None`
    /// where the device chooses.
    pub(super) fn host_ms(&self) -> Option<f64> {
        match &self.kind {
            Kind::Positions { host_ms, .. } => Some(*host_ms),
            Kind::Chooses(_) => None,
        }
    }

    /// The keys that the selector keeps: chosen on the device, or by the mask of positions.
    pub(super) fn select(&self) -> Result<ChosenKeys<CudaTensor>, KernelError> {
        match &self.kind {
            Kind::Positions { mask, .. } => Ok(ChosenKeys { mask: KeyMask::clone(mask), probe_o: None }),
            Kind::Chooses(selection) => self.operands.qkv.select_blocks(selection),
        }
    }

    /// Attention under the mask, with the selector's correction where it has one.
    pub(super) fn attend(&self, chosen: &ChosenKeys<CudaTensor>) -> Result<AttentionResult, KernelError> {
        let ChosenKeys { mask, probe_o } = chosen;
        let (qkv, scale) = (&self.operands.qkv, self.operands.scale());
        let done = qkv.sparse_attention_forward(mask, scale)?;
        if let Some(correction) = self.selector.correction(self.call, LAYER)
            && let Kind::Chooses(_) = &self.kind
        {
            let dense_rows = mask.dense_rows.first().cloned().unwrap_or(0..0);
            qkv.correct_by_probes(&done.o, probe_o.as_ref(), correction, dense_rows, scale)?;
        }
        Ok(done)
    }

    /// Pairs of query and key that are read, divided by causal pairs: the mask's and those of probe rows, as `eval
    /// selectors` counts them. NaN where the device did not count the mask's.
    pub(super) fn density(&self, mask: &KeyMask<CudaTensor>) -> Result<f64> {
        let kept = match (&mask.counts, &self.kind) {
            (Some(counts), _) => {
                let pairs: f64 = self.device.ints(&counts.pairs)?.iter().map(|&pairs| f64::from(pairs)).sum();
                pairs / (self.call.causal_pairs() as f64 * mask.num_lists() as f64)
            }
            (None, Kind::Positions { density, .. }) => *density,
            (None, Kind::Chooses(_)) => return Ok(f64::NAN),
        };
        Ok(kept + self.probes())
    }

    /// Pairs that the probe rows read in addition to the mask's, divided by causal pairs.
    pub(super) fn probes(&self) -> f64 {
        match self.kind {
            Kind::Chooses(_) => self.selector.probe_pairs(self.call, LAYER) as f64 / self.call.causal_pairs() as f64,
            Kind::Positions { .. } => 0.0,
        }
    }
}

/// For each head, the share of dense attention's mass that attention under a mask keeps: the mean over queries of
/// `exp(lse - dense_lse)`. Both are `[num_heads, queries]`.
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
