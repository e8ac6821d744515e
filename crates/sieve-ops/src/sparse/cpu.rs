//! These ops do not exist on the CPU: there the crate sieve-select computes masks, and attention under them, from
//! slices.
use crate::{DmaCache, SelectorCache};
use burn_flex::{Flex, FlexTensor};
use sieve_core::{BlockSelection, ChosenKeys, HeavyKeys, KeyMask, ProbeCorrection, TokenKeys};
use std::ops::Range;

pub(crate) fn has_sparse_attention(_qkv: &FlexTensor) -> bool {
    false
}

pub(crate) fn sparse_attention(
    _qkv: FlexTensor,
    _mask: KeyMask<FlexTensor>,
    _softmax_scale: f64,
) -> Result<[FlexTensor; 2], String> {
    Err("the CPU computes it from slices (sieve_select::block_sparse_attention)".to_owned())
}

pub(crate) fn select_blocks(_qkv: FlexTensor, _selection: &BlockSelection) -> Result<ChosenKeys<FlexTensor>, String> {
    Err("the CPU selects from slices (sieve_select::Selector::select)".to_owned())
}

/// Never computes: names the function of sieve-select that corrects on the host.
pub(crate) fn correct_by_probes(
    _qkv: FlexTensor,
    _o: FlexTensor,
    _probe_o: Option<FlexTensor>,
    _correction: ProbeCorrection,
    _dense_rows: Range<usize>,
    _softmax_scale: f64,
) -> Result<FlexTensor, String> {
    Err("the CPU corrects slices (sieve_select::block_sparse_attention)".to_owned())
}

pub(crate) fn keep_heavy_keys(
    _qkv: FlexTensor,
    _lse: FlexTensor,
    _heavy: &HeavyKeys,
) -> Result<DmaCache<Flex>, String> {
    Err("the CPU chooses from slices (sieve_select::DecodeSession)".to_owned())
}

/// Never computes: names the session of sieve-select that keeps the keys on the host.
pub(crate) fn heavy_decode(
    _cache: &mut DmaCache<Flex>,
    _qkv: FlexTensor,
    _position: usize,
    _softmax_scale: f64,
    (): &mut (),
) -> Result<FlexTensor, String> {
    Err("the CPU chooses from slices (sieve_select::DecodeSession)".to_owned())
}

/// Never computes: names the session of sieve-select that chooses each token's keys on the host.
pub(crate) fn selector_decode(
    _cache: &mut SelectorCache<Flex>,
    _qkv: FlexTensor,
    _reads: &[TokenKeys],
    _softmax_scale: f64,
    (): &mut (),
) -> Result<Vec<FlexTensor>, String> {
    Err("the CPU chooses from slices (sieve_select::DecodeSession)".to_owned())
}
