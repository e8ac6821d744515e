//! Runs a prefill selector on one layer's prompt: as one call, or in chunks of queries that each see all earlier keys.
//! The attention runs on the host or on the device; the selection may run on either.
//!
//! Nothing else runs a prefill selector on a model.
use crate::InferError;
use burn::tensor::{DType, Int, Tensor};
use sieve_core::{BlockSelection, ChosenKeys, KeyMask};
use sieve_nn::{HostOperands, LayerOperands};
use sieve_ops::{DeviceBackend, SparseOutput, correct_by_probes, select_blocks, sparse_attention, upload_mask};
use sieve_select::{BlockMeans, Call, CallShape, Reads, SelectError, SelectStats, Selected, Selector, density};
use std::any::Any;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// Output of a layer's attention on one document under a prefill selector, all calls together.
#[derive(Debug)]
pub struct Prefilled {
    /// Attention output, `[num_tokens, num_heads, head_dim]`.
    pub o: Vec<f32>,
    /// Log-sum-exp over the kept pairs, `[num_heads, num_tokens]`.
    pub lse: Vec<f32>,
    /// Statistics of all calls.
    pub cost: Cost,
}

/// Statistics of the calls on one document in one layer.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cost {
    /// Computed pairs over causal pairs, probe rows included.
    pub density: f64,
    /// Kept tiles over causal tiles. For several calls, their mean weighted by causal pairs.
    pub tile_density: f64,
    /// Seconds spent on choosing the masks.
    pub select_seconds: f64,
    /// Number of calls.
    pub calls: u64,
    /// Calls whose masks were made on the device.
    pub device_calls: u64,
    /// Calls that ran dense.
    pub dense_calls: u64,
    /// Choices that became dense because a score was NaN.
    pub nan_lists: u64,
    /// Bytes copied from the device to the host.
    pub host_bytes: u64,
    causal_pairs: f64,
}

impl Cost {
    /// For dense attention or a method that reads token by token, which have no tiles.
    pub fn of_density(density: f64) -> Self {
        Self { density, tile_density: density, ..Self::default() }
    }

    /// Adds a call whose mask was made on the host, with the arguments of [`add_shares`](Self::add_shares).
    fn add(&mut self, shape: CallShape, shares: [f64; 2], stats: &SelectStats) {
        self.add_shares(shape, shares);
        self.select_seconds += stats.select_seconds;
        self.dense_calls += u64::from(stats.dense_call);
        self.nan_lists += stats.nan_lists as u64;
    }

    /// Adds the pairs of the probe rows: a correction computes these rows densely, in addition to the kept pairs. Call
    /// it after the call itself was added.
    fn add_probes(&mut self, shape: CallShape, selector: &Selector, layer: usize) {
        // `causal_pairs` already includes this call.
        self.density += selector.probe_pairs(shape, layer) as f64 / self.causal_pairs;
    }

    /// Adds a call with its `[computed pairs over causal pairs, kept tiles over causal tiles]`.
    fn add_shares(&mut self, shape: CallShape, [pairs, tiles]: [f64; 2]) {
        let causal = shape.causal_pairs() as f64;
        let share = causal / (self.causal_pairs + causal);
        self.causal_pairs += causal;
        self.density += (pairs - self.density) * share;
        self.tile_density += (tiles - self.tile_density) * share;
        self.calls += 1;
    }

    /// Adds a call whose mask was computed on the device. Waits for the device to read the mask's statistics.
    fn add_selection<B: DeviceBackend>(
        &mut self,
        shape: CallShape,
        selection: &BlockSelection,
        made: &KeyMask<Tensor<B, 1, Int>>,
    ) {
        let counts = made.counts.as_ref().expect("a device counts what it keeps");
        let sum = |numbers: &Tensor<B, 1, Int>| -> f64 {
            let numbers = numbers.clone().into_data();
            numbers.iter::<i64>().map(|x| x as f64).sum()
        };
        let lists = selection.num_lists() as f64;
        let (tiles, pairs) = (sum(&counts.tiles), sum(&counts.pairs));
        let causal = shape.causal_pairs() as f64;
        let most = lists * selection.admissible_tiles() as f64;
        // As for masks made on the host, dense rows count all their causal pairs, in place of their pairs in the lists.
        let density = pairs / (lists * causal);
        let pairs_share = match made.dense_rows.first() {
            None => density,
            Some(rows) => {
                let dense = CallShape { num_queries: rows.len(), ..shape };
                let share = dense.causal_pairs() as f64 / causal;
                share + density * (1.0 - share)
            }
        };
        let nan_rows = counts.nan_rows.clone().into_data();
        let nan_heads = nan_rows.iter::<i64>().filter(|&rows| rows > 0).count();
        self.add_shares(shape, [pairs_share, tiles / most]);
        self.dense_calls += u64::from(tiles == most);
        self.nan_lists += nan_heads as u64;
        self.device_calls += 1;
    }
}

/// `[computed pairs over causal pairs, kept tiles over causal tiles]` of a selection.
fn shares(selected: &Selected) -> [f64; 2] {
    let shares = density(selected);
    [shares.token + shares.probes, shares.tile]
}

/// A selection made on the host, with its mask uploaded to the device.
#[derive(Debug)]
pub struct Made {
    shape: CallShape,
    shares: [f64; 2],
    stats: SelectStats,
    /// A `KeyMask<Tensor<B, 1, Int>>`; `Any` keeps the backend out of [`KeptMasks`]' type.
    on_device: Box<dyn Any + Send + Sync>,
}

impl Made {
    /// The uploaded mask. Panics for a backend other than the one that uploaded it.
    fn mask<B: DeviceBackend>(&self) -> &KeyMask<Tensor<B, 1, Int>> {
        let mask = self.on_device.downcast_ref();
        mask.expect("all layers of a prompt are on one device")
    }
}

/// Masks that depend only on a call's shape: (selector, tokens of the prompt, mask). They are reused in the next layers
/// and for later prompts of the same length.
pub type KeptMasks = Vec<(Selector, usize, Arc<Made>)>;

/// Runs a prefill selector on a document on the host, in calls of `chunk` tokens or in one call. A row depends only on
/// earlier rows of the layer below, so chunking each layer gives the same output as a model that reads its prompt chunk
/// by chunk.
pub fn prefill(selector: &Selector, operands: HostOperands<'_>, chunk: Option<usize>) -> Result<Prefilled, InferError> {
    let call = call(operands)?;
    let (tokens, heads) = (operands.shape.num_queries, operands.shape.num_heads);
    let mut done = Prefilled {
        o: Vec::with_capacity(operands.q.len()),
        lse: vec![f32::NEG_INFINITY; heads * tokens],
        cost: Cost::default(),
    };
    let parts = match chunk {
        Some(chunk) => selector.prefill_in_chunks(&call, chunk)?,
        None => vec![selector.prefill(&call)?],
    };
    let mut first = 0;
    for part in parts {
        let selected = &part.selected;
        done.cost.add(selected.mask.shape, shares(selected), &selected.stats);
        done.o.extend(part.output.o);
        let rows = selected.mask.shape.num_queries;
        for (head, lse) in part.output.lse.chunks(rows.max(1)).enumerate() {
            done.lse[head * tokens + first..][..rows].copy_from_slice(lse);
        }
        first += rows;
    }
    Ok(done)
}

/// Shapes of the calls on a document: `chunk` queries each, or all queries in one call.
pub(crate) fn calls_of<B: DeviceBackend>(
    operands: &LayerOperands<B>,
    chunk: Option<usize>,
) -> impl Iterator<Item = CallShape> + use<B> {
    let tokens = operands.num_tokens();
    let (whole, step) = (operands.shape(tokens), chunk.unwrap_or(tokens).max(1));
    (0..tokens).step_by(step).map(move |first| {
        let end = (first + step).min(tokens);
        CallShape { num_queries: end - first, num_keys: end, ..whole }
    })
}

/// As [`prefill`], with the attention on the device; o is `[1, num_tokens, num_heads, head_dim]`. If the selection has
/// no kernel, it copies its operands to the host and the mask back. With `has_clock`, the host waits for the device
/// after each selection to time it.
pub fn prefill_on_device<B: DeviceBackend>(
    selector: &Selector,
    operands: &LayerOperands<B>,
    chunk: Option<usize>,
    has_clock: bool,
    kept: &mut KeptMasks,
) -> Result<(SparseOutput<B>, Cost), InferError> {
    let (layer, tokens) = (operands.layer, operands.num_tokens());
    let (mut cost, mut parts) = (Cost::default(), Vec::new());
    let mut copied = None;
    for shape in calls_of(operands, chunk) {
        let qkv = operands.qkv.clone().narrow(1, 0, shape.num_keys);
        if let Some(chosen) = select_on_device(selector, operands, &qkv, shape, has_clock, &mut cost)? {
            let is_dense = false;
            let ChosenKeys { mask, probe_o } = chosen;
            parts.push(attend(selector, layer, qkv, shape, &mask, probe_o, is_dense)?);
            cost.add_probes(shape, selector, layer);
            continue;
        }
        let rows = shape.context()..shape.num_keys;
        let whole = operands.shape(tokens);
        let copied = &mut copied;
        let made = select_on_host(selector, operands, whole, rows, kept, copied, &mut cost)?;
        let is_dense = made.stats.dense_call;
        if !is_dense {
            cost.add_probes(shape, selector, layer);
        }
        parts.push(attend(selector, layer, qkv, shape, made.mask(), None, is_dense)?);
    }
    let joined = match parts.len() {
        1 => parts.remove(0),
        _ => SparseOutput {
            o: Tensor::cat(parts.iter().map(|part| part.o.clone()).collect(), 1),
            lse: Tensor::cat(parts.into_iter().map(|part| part.lse).collect(), 2),
        },
    };
    Ok((joined, cost))
}

/// A mask that the device chose, with the output of its probe rows.
type ChosenOnDevice<B> = ChosenKeys<Tensor<B, 1, Int>, Tensor<B, 4>>;

/// Selects on the device and adds the selection's statistics to `cost`. `None` if there is no kernel for this call.
/// `qkv` ends with the call's last key. With `has_clock`, waits for the device to time the selection.
fn select_on_device<B: DeviceBackend>(
    selector: &Selector,
    operands: &LayerOperands<B>,
    qkv: &Tensor<B, 4>,
    shape: CallShape,
    has_clock: bool,
    cost: &mut Cost,
) -> Result<Option<ChosenOnDevice<B>>, InferError> {
    let Some(selection) = selector.block_selection(shape, operands.layer, operands.num_layers) else {
        return Ok(None);
    };
    let started = Instant::now();
    // An error, such as a head width without a kernel, is recorded by the op; the selection then runs on the host.
    let Ok(chosen) = select_blocks(qkv, &selection) else {
        return Ok(None);
    };
    if has_clock {
        B::sync(&qkv.device()).map_err(|error| InferError::kernel(selector.name(), error.to_string()))?;
        cost.select_seconds += started.elapsed().as_secs_f64();
    }
    // Before the attention is launched: reading the statistics waits for all launched work.
    cost.add_selection(shape, &selection, &chosen.mask);
    Ok(Some(chosen))
}

/// Attention of one call under a mask, on the device, with the selector's correction unless the call is dense.
/// `probe_o`: dense attention of its probe rows, if the selection has computed it.
fn attend<B: DeviceBackend>(
    selector: &Selector,
    layer: usize,
    qkv: Tensor<B, 4>,
    shape: CallShape,
    mask: &KeyMask<Tensor<B, 1, Int>>,
    probe_o: Option<Tensor<B, 4>>,
    is_dense: bool,
) -> Result<SparseOutput<B>, InferError> {
    let refused = |reason: String| InferError::kernel(selector.name(), reason);
    let scale = f64::from(shape.softmax_scale());
    let mut output = sparse_attention(qkv.clone(), mask, scale).map_err(refused)?;
    let correction = selector.correction(shape, layer);
    if let Some(correction) = correction.filter(|_| !is_dense) {
        let dense = mask.dense_rows.first().cloned().unwrap_or(0..0);
        output.o = correct_by_probes(qkv, output.o, probe_o, correction, dense, scale).map_err(refused)?;
    }
    Ok(output)
}

/// Queries and keys of a layer, copied to the host.
type HostQueriesAndKeys = (Vec<f32>, Vec<f32>);

/// Makes the mask of the queries `rows` on the host and uploads it; `whole` is the shape of the whole prompt. Queries
/// and keys are copied to the host once, into `copied`. A mask that needs no operands is made in one layer and reused
/// from `kept` in the next ones.
fn select_on_host<B: DeviceBackend>(
    selector: &Selector,
    operands: &LayerOperands<B>,
    whole: CallShape,
    rows: Range<usize>,
    kept: &mut KeptMasks,
    copied: &mut Option<HostQueriesAndKeys>,
    cost: &mut Cost,
) -> Result<Arc<Made>, InferError> {
    let shape = CallShape { num_queries: rows.len(), num_keys: rows.end, ..whole };
    let reads = selector.reads(operands.layer, rows.len());
    let serves_others = reads == Reads::Nothing && operands.layer >= selector.first_alike_layer();
    let mut fitting = kept.iter().filter(|(by, _, mask)| mask.shape == shape && by == selector);
    if serves_others && let Some((_, _, mask)) = fitting.next() {
        cost.add(shape, mask.shares, &mask.stats);
        return Ok(mask.clone());
    }
    let means;
    let call = match reads {
        Reads::Nothing => Call::of_shape(shape)?,
        Reads::BlockMeans(block) => {
            means = block_means(&operands.qkv.clone().narrow(1, 0, rows.end), shape, block);
            cost.host_bytes += (size_of::<f32>() * (means[0].len() + means[1].len())) as u64;
            let [q, k] = &means;
            Call::of_means(shape, BlockMeans { block, q, k })?
        }
        Reads::Values => {
            return Err(InferError::kernel(
                selector.name(),
                "its selection reads values, which stay on the device".to_owned(),
            ));
        }
        Reads::Tokens => {
            let (q, k) = copied.get_or_insert_with(|| {
                let (q, k) = (operands.queries(), operands.keys());
                cost.host_bytes += ((q.len() + k.len()) * operands.qkv.dtype().size()) as u64;
                (q, k)
            });
            Call::without_values(whole, q, k)?.chunk(rows)
        }
    };
    let call = call.in_layer(operands.layer, operands.num_layers);
    let mut chosen = selector.select_uncorrected(&call)?;
    chosen.stats.dense_call |= chosen.mask.keeps_everything();
    let shares = shares(&chosen);
    cost.add(shape, shares, &chosen.stats);
    // A reused mask adds its statistics again, but no time.
    chosen.stats.select_seconds = 0.0;
    let on_device = upload_mask::<B>(&chosen.mask, &operands.qkv.device()).map_err(SelectError::from)?;
    let made = Arc::new(Made { shape, shares, stats: chosen.stats, on_device: Box::new(on_device) });
    if serves_others {
        // Masks for prompts of another length are dropped.
        kept.retain(|(_, tokens, _)| *tokens == whole.num_queries);
        kept.push((selector.clone(), whole.num_queries, made.clone()));
    }
    Ok(made)
}

/// Means over blocks of a call's queries and of its keys, `[blocks, heads, head_dim]` each, computed on the device in
/// f32. A short last block has the mean of its own tokens. `qkv` is `[1, num_keys, packed heads, head_dim]`.
fn block_means<B: DeviceBackend>(qkv: &Tensor<B, 4>, shape: CallShape, block: usize) -> [Vec<f32>; 2] {
    let mean = |x: &Tensor<B, 4>, first: usize, count: usize, block: usize| -> Vec<f32> {
        let [_, _, heads, width] = x.dims();
        let part = x.clone().narrow(1, first, count).cast(DType::F32);
        let part = part.reshape([count / block, block, heads * width]);
        part.mean_dim(1).into_data().iter::<f32>().collect()
    };
    let q = qkv.clone().narrow(2, 0, shape.num_heads);
    let q = q.narrow(1, shape.context(), shape.num_queries);
    let k = qkv.clone().narrow(2, shape.num_heads, shape.num_kv_heads);
    [q, k].map(|x| {
        let tokens = x.dims()[1];
        let whole = tokens / block * block;
        let mut means = match whole {
            0 => Vec::new(),
            _ => mean(&x, 0, whole, block),
        };
        if whole < tokens {
            means.extend(mean(&x, whole, tokens - whole, tokens - whole));
        }
        means
    })
}

/// A selector's call on a whole document in one layer.
pub fn call(operands: HostOperands<'_>) -> Result<Call<'_>, InferError> {
    let call = Call::new(operands.shape, operands.q, operands.k, operands.v)?;
    Ok(call.in_layer(operands.layer, operands.num_layers))
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::TensorData;
    use burn_flex::{Flex, FlexDevice};

    /// The selector of `text`, for prompts of any length.
    fn always(text: &str) -> Selector {
        Selector::parse(&format!("{text},min_prefill_tokens=0")).expect("valid")
    }

    /// Operands of a layer with queries, keys and values that are all 1.
    fn ones(layer: usize, num_layers: usize, tokens: usize) -> LayerOperands<Flex> {
        LayerOperands {
            layer,
            num_layers,
            num_heads: 4,
            num_kv_heads: 2,
            qkv: Tensor::ones([1, tokens, 8, 8], &FlexDevice),
        }
    }

    #[test]
    fn block_means_choose_the_mask_that_their_tokens_choose() {
        let whole = CallShape::new([77; 2], [4, 2], 8);
        // Pseudo-random values from -2.5 to 2.5, for 77 tokens with 4 query, 2 key and 2 value heads of width 8.
        let number = |at: usize| ((at * 7919 + at / 13 * 104_729) % 1000) as f32 / 200.0 - 2.5;
        let packed: Vec<f32> = (0..77 * 8 * 8).map(number).collect();
        let qkv = TensorData::new(packed.clone(), [1, 77, 8, 8]);
        let qkv = Tensor::<Flex, 4>::from_data(qkv, &FlexDevice);
        let heads = |range: Range<usize>| -> Vec<f32> {
            let tokens = packed.chunks_exact(64);
            let part = |token: &[f32]| token[range.start * 8..range.end * 8].to_vec();
            tokens.flat_map(part).collect()
        };
        let (q, k) = (heads(0..4), heads(4..6));
        for text in ["meanpool:block=8,tau=0.5", "block_sparse:block=8"] {
            let selector = always(text);
            assert_eq!(selector.reads(0, 30), Reads::BlockMeans(8));
            // A whole prompt, and a chunk: its blocks of queries are counted from its first row.
            for rows in [0..77, 30..77] {
                let call = Call::without_values(whole, &q, &k).expect("sizes fit");
                let call = call.chunk(rows.clone());
                let keys = qkv.clone().narrow(1, 0, rows.end);
                let [q, k] = &block_means(&keys, call.shape, 8);
                let by_means = Call::of_means(call.shape, BlockMeans { block: 8, q, k }).expect("sizes fit");
                let by_means = selector.select(&by_means).expect("a prefill method");
                let by_tokens = selector.select(&call).expect("a prefill method");
                assert_eq!(by_means.mask, by_tokens.mask, "{text} {rows:?}");
                assert!(by_tokens.mask.num_tiles() > 12, "{text}");
            }
        }
    }

    #[test]
    fn a_mask_of_positions_is_made_once_for_all_layers_that_share_it() {
        // Each case: a selector, how many different masks four layers need, and which layers are dense.
        for (text, masks, dense) in [
            ("streamingllm:n_local=20,n_init=4", 1, 0..0),
            ("tri_shape:n_local=20,n_init=4,n_last=8", 1, 0..0),
            ("a_shape:n_local=20,n_init=4,first_dense_layers=2", 3, 0..2),
            (
                "delta:base=streamingllm,base.n_local=20,base.first_dense_layers=2,\
                 base.min_prefill_tokens=0,dense_tail=false",
                3,
                0..2,
            ),
            ("meanpool:block=8,tau=0.5", 4, 0..0),
        ] {
            let selector = always(text);
            let mut kept = KeptMasks::new();
            // Two calls in each layer; then a longer prompt, which replaces all masks of the first.
            for [first, tokens] in [[40, 77], [50, 90]] {
                let mut made: Vec<Arc<Made>> = Vec::new();
                for layer in 0..4 {
                    let operands = ones(layer, 4, tokens);
                    let whole = calls_of(&operands, None).next().expect("a call");
                    let mut cost = Cost::default();
                    for rows in [0..first, first..tokens] {
                        let mask = select_on_host(&selector, &operands, whole, rows, &mut kept, &mut None, &mut cost);
                        let mask = mask.expect("it selects");
                        assert_eq!(mask.stats.dense_call, dense.contains(&layer), "{text} {layer}");
                        if !made.iter().any(|one| Arc::ptr_eq(one, &mask)) {
                            made.push(mask);
                        }
                    }
                    assert_eq!(cost.calls, 2, "{text}");
                    let is_dense = dense.contains(&layer);
                    assert_eq!(cost.density == 1.0, is_dense, "{text} {layer} {cost:?}");
                }
                assert_eq!(made.len(), 2 * masks, "{text}");
                assert!(kept.iter().all(|(_, of, _)| *of == tokens), "{text}");
            }
        }
    }

    #[test]
    fn a_kept_mask_is_copied_to_the_device_once() {
        let selector = always("streamingllm:n_local=20,n_init=4");
        let mut kept = KeptMasks::new();
        let mut copies = Vec::new();
        for layer in 0..2 {
            let operands = ones(layer, 2, 70);
            // The CPU has no kernel for device tensors: the call fails after the mask was made and kept.
            prefill_on_device(&selector, &operands, None, false, &mut kept).expect_err("no kernel");
            let [(_, _, mask)] = &kept[..] else {
                panic!("one mask: {kept:?}");
            };
            copies.push(mask.mask::<Flex>() as *const KeyMask<Tensor<Flex, 1, Int>>);
        }
        assert_eq!(copies[0], copies[1]);
    }

    #[test]
    fn a_window_is_chosen_by_positions_alone() {
        let shape = CallShape::new([90, 130], [2, 1], 4);
        let (q, k) = (vec![0.5; 90 * 8], vec![0.5; 130 * 4]);
        for text in ["streamingllm:n_local=20", "a_shape:n_local=20", "tri_shape:n_local=20"] {
            let selector = always(text);
            assert_eq!(selector.reads(0, 90), Reads::Nothing);
            let call = Call::without_values(shape, &q, &k).expect("sizes fit");
            let by_shape = Call::of_shape(shape).expect("sizes fit");
            let (a, b) = (selector.select(&by_shape), selector.select(&call));
            let (a, b) = (a.expect("it selects"), b.expect("it selects"));
            assert_eq!(a.mask, b.mask, "{text}");
        }
    }
}
