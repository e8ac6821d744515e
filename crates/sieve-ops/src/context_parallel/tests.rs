#[cfg(feature = "cuda")]
mod gpus;

use super::attend::DmaParts;
use super::halo::Halo;
use super::heads::{to_heads, to_tokens};
use super::{ContextParallel, Heads, Parted, RankGroup, ThreadGroup, backward, forward};
use crate::dma::composed;
use crate::tensors::{Float, Ints, primitive, tensor};
use crate::testing::{Random, RandomInput, assert_close, host_ints};
use crate::{AttentionCall, AttentionSpec, DeviceBackend, DmaLayer, DocumentBounds, Documents};
use burn::tensor::{DType, Int, Tensor, TensorMetadata};
use burn_flex::{Flex, FlexDevice, FlexTensor};
use sieve_core::{DmaBias, DmaRecency, DmaShape, FarKeys, KeepOLow};
use sieve_testing::wide;
use std::sync::Arc;

/// Columns of a head.
const WIDTH: usize = 8;
const BATCH: usize = 2;
/// Tokens of a whole row.
const ROW: usize = 24;

/// One kind of attention to test: DMA where `dma` is set, else dense or a window, as `spec` says. `spec` has the heads.
#[derive(Clone, Copy, Debug)]
struct Case {
    spec: AttentionSpec,
    dma: Option<DmaShape>,
}

fn case(num_kv_heads: usize, window_size: Option<usize>, dma: Option<DmaShape>) -> Case {
    let spec = AttentionSpec { window_size, ..AttentionSpec::dense([2 * num_kv_heads, num_kv_heads], WIDTH) };
    Case { spec, dma }
}

/// A window of 3 tokens, and beyond it 2 first tokens and a band for each KV head.
fn far(num_kv_heads: usize) -> Case {
    let far = FarKeys { sink_tokens: 2, distances: [3, 21], num_bands: num_kv_heads, first_band: 0 };
    let Case { spec, dma } = case(num_kv_heads, Some(3), None);
    Case { spec: AttentionSpec { far: Some(far), ..spec }, dma }
}

/// DMA whose ranks have a recency term, and which always keeps the last `local_window_size` keys.
fn recency(keep_window_size: usize, local_window_size: usize) -> DmaShape {
    DmaShape {
        bias: DmaBias::Linear,
        recency: DmaRecency::Slope,
        local_window_size,
        ..DmaShape::published(keep_window_size)
    }
}

/// Dense and window attention, and DMA of both forms.
fn cases() -> Vec<Case> {
    let dma = |num_kv_heads, shape| case(num_kv_heads, None, Some(shape));
    vec![
        // Dense: tokens are exchanged for heads where the number of parts divides that of the KV heads. With more
        // parts, attention runs over longer rows.
        case(2, None, None),
        case(1, None, None),
        // Windows shorter than a part, longer than two parts, and of the query's own token alone.
        case(2, Some(5), None),
        case(3, Some(17), None),
        case(2, Some(1), None),
        // Bands of distances: each part has the bands of its heads, or all earlier keys.
        far(2),
        far(3),
        dma(2, DmaShape::published(4)),
        dma(3, DmaShape::published(99)),
        dma(2, recency(6, 3)),
        dma(2, recency(15, 9)),
        dma(1, recency(4, 4)),
    ]
}

/// Lengths of the documents of the two rows. Documents begin and end at the borders of parts, before and after them;
/// some have one token.
const ROWS: [[&[usize]; BATCH]; 3] =
    [[&[ROW], &[12, 12]], [&[1, 10, 2, 11], &[5, 1, 18]], [&[13, 1, 1, 9], &[6, 6, 6, 6]]];

/// Start and end of the document of each token, by the lengths of each row's documents.
fn bounds<'a>(rows: impl IntoIterator<Item = &'a [usize]>, row_len: usize) -> [Vec<u32>; 2] {
    let mut bounds = [Vec::new(), Vec::new()];
    for lengths in rows {
        let mut start = 0;
        for &length in lengths {
            bounds[0].extend(vec![start as u32; length]);
            bounds[1].extend(vec![(start + length) as u32; length]);
            start += length;
        }
        assert_eq!(start, row_len);
    }
    bounds
}

/// qkv, the gradient of o, and DMA's weights w_dt and a. The numbers in a have mean `a`; with 0 all keys have score 0.
fn inputs(case: Case, a: f64) -> [FlexTensor; 4] {
    let mut random = Random(3);
    let kv = case.spec.num_kv_heads;
    let shapes: [&[usize]; 3] =
        [&[BATCH, ROW, case.spec.packed_heads(), WIDTH], &[BATCH, ROW, case.spec.num_heads, WIDTH], &[kv, kv * WIDTH]];
    let [qkv, d_o, w_dt] = shapes.map(|shape| random.input(shape).tensor(DType::F32));
    let a = random.input(&[kv]).affine(a, a).tensor(DType::F32);
    [qkv, d_o, w_dt, a]
}

/// Results of whole rows, or of all parts concatenated.
#[derive(Default)]
struct Found {
    o: Vec<f32>,
    d_qkv: Vec<f32>,
    d_w_dt: Vec<f32>,
    d_a: Vec<f32>,
    /// For each row, KV head and query: the keys that it sees.
    seen_keys: Vec<Vec<usize>>,
    /// Number of keys in the part's halo; `None` where tokens were exchanged for heads.
    slots: Option<usize>,
}

fn values<const D: usize>(x: FlexTensor) -> Vec<f32> {
    let data = tensor::<Flex, D>(x).into_data();
    data.iter::<f32>().collect()
}

/// o, the gradient of qkv and, with DMA, `expire` (the first query that no longer sees each key) and the gradients of
/// w_dt and a.
type Attended<B> = (Float<B>, Float<B>, Option<(Ints<B>, [Float<B>; 2])>);

/// Attention over whole rows by the backend's own ops; the inputs in the order of [`inputs`].
fn attend<B: DeviceBackend>(
    [qkv, d_o, w_dt, a]: [Float<B>; 4],
    documents: DocumentBounds<B>,
    spec: AttentionSpec,
    dma: Option<DmaShape>,
    o_low: KeepOLow,
) -> Attended<B> {
    let Some(dma) = dma else {
        let call = AttentionCall::new(documents, spec);
        let output = <B as DeviceBackend>::attention(qkv.clone(), &call);
        let o = output.o.clone();
        return (o, B::attention_backward(qkv, &call, output, d_o), None);
    };
    let inputs = layer::<B>(w_dt, a, dma).inputs(qkv, &AttentionCall::new(documents, spec));
    let forward = composed::forward::<B>(&inputs, o_low);
    let (o, expire) = (forward.output.o.clone(), forward.selection.expire.clone());
    let [d_qkv, d_w_dt, d_a] = composed::backward::<B>(&inputs, forward, d_o);
    (o, d_qkv, Some((expire, [d_w_dt, d_a])))
}

/// The results of whole rows, from which those of the parts must not differ.
fn whole_results(case: Case, bounds: &[Vec<u32>; 2], inputs: &[FlexTensor; 4]) -> Found {
    let device = Default::default();
    let documents = Documents::<Flex>::new(&bounds[0], &bounds[1], [BATCH, ROW], &device).bounds();
    let (o, d_qkv, dma) = attend::<Flex>(inputs.clone(), documents, case.spec, case.dma, KeepOLow::Never);
    let mut found = Found { o: values::<4>(o), d_qkv: values::<4>(d_qkv), ..Found::default() };
    if let Some((expire, [d_w_dt, d_a])) = dma {
        (found.d_w_dt, found.d_a) = (values::<2>(d_w_dt), values::<1>(d_a));
        for head in expire_of(expire).chunks(ROW) {
            let seen = |query: usize| (0..=query).filter(|&key| (query as i64) < head[key]).collect();
            found.seen_keys.extend((0..ROW).map(seen));
        }
    }
    found
}

/// The numbers of DMA's mask.
fn expire_of(expire: FlexTensor) -> Vec<i64> {
    host_ints::<Flex, 3>(Tensor::from_primitive(expire))
}

fn layer<B: DeviceBackend>(w_dt: Float<B>, a: Float<B>, spec: DmaShape) -> DmaLayer<B> {
    let (w_dt, a) = (tensor(w_dt), tensor(a));
    DmaLayer { w_dt, a, spec }
}

/// One rank's results for its part.
fn part_results(case: Case, parts: ContextParallel, inputs: &[FlexTensor; 4]) -> Found {
    let (len, first) = (parts.len(), parts.links.part() * parts.len());
    let [qkv, d_o, w_dt, a] = inputs.clone();
    let own = |x: FlexTensor| primitive(tensor::<Flex, 4>(x).narrow(1, first, len));
    let documents = Documents::<Flex>::of_part(&parts, &Default::default());
    let dma = || -> Option<DmaParts<Flex>> {
        let positions = documents.positions.clone().into_primitive();
        Some((layer(w_dt.clone(), a.clone(), case.dma?), positions))
    };
    let own_call = AttentionCall::new(documents.bounds(), case.spec);
    let place = (&parts, &own_call);
    let parted = forward::<Flex>(own(qkv.clone()), dma(), place, KeepOLow::Never);
    let seen_keys = seen_keys(&parted, first, len, qkv.clone());
    let slots = parted.halo().map(|(halo, _)| halo.slots);
    let o = values::<4>(parted.o.clone());
    let (d_qkv, d_dma) = backward::<Flex>(parted, own(qkv), dma(), place, own(d_o));
    let (d_w_dt, d_a) = d_dma.map_or((Vec::new(), Vec::new()), |[d_w_dt, d_a]| (values::<2>(d_w_dt), values::<1>(d_a)));
    Found { o, d_qkv: values::<4>(d_qkv), d_w_dt, d_a, seen_keys, slots }
}

/// The keys that each query of a part sees, by their positions in the whole row; none without DMA. Keys are
/// counted through the halo's `slots` (keys of earlier parts), then the part's own `len`, which begin at `first`.
fn seen_keys(parted: &Parted<Flex>, first: usize, len: usize, qkv: FlexTensor) -> Vec<Vec<usize>> {
    let Some((halo, Some(expire))) = parted.halo() else {
        return Vec::new();
    };
    let (slots, positions) = (halo.slots, halo_positions(halo, qkv));
    let mut seen_keys = Vec::new();
    for (head, expire) in expire_of(expire).chunks(slots + len).enumerate() {
        for query in slots..slots + len {
            let seen = (0..=query).filter(|&key| (query as i64) < expire[key]);
            let positions = seen.filter_map(|key| match key.checked_sub(slots) {
                Some(own) => Some(first + own),
                None => positions[head * slots + key],
            });
            seen_keys.push(positions.collect());
        }
    }
    seen_keys
}

/// Positions of a halo's keys in the whole rows `qkv`, by row, KV head and slot. They are found by value: no two keys
/// are equal.
fn halo_positions(halo: &Halo<Flex>, qkv: FlexTensor) -> Vec<Option<usize>> {
    let Some(keys) = &halo.keys else {
        return Vec::new();
    };
    let [_, slots, heads, _] = keys.shape().dims();
    let [_, _, all_heads, _] = qkv.shape().dims();
    let (keys, qkv) = (values::<4>(keys.clone()), values::<4>(qkv));
    let key =
        |of: &[f32], token: usize, [head, heads]: [usize; 2]| of[(token * heads + head) * WIDTH..][..WIDTH].to_vec();
    let mut positions = Vec::new();
    for row in 0..BATCH {
        for head in 0..heads / 2 {
            for slot in 0..slots {
                let found = key(&keys, row * slots + slot, [head, heads]);
                let place = [all_heads - heads + head, all_heads];
                positions.push((0..ROW).find(|at| key(&qkv, row * ROW + at, place) == found));
            }
        }
    }
    positions
}

/// The results of all parts, each computed by a thread that stands for a rank.
fn all_parts(case: Case, num_parts: usize, bounds: &[Vec<u32>; 2], inputs: &[FlexTensor; 4]) -> Vec<Found> {
    std::thread::scope(|scope| {
        let ranks = ThreadGroup::all(num_parts).into_iter().map(|links| {
            let parts = ContextParallel::new(Arc::new(links), bounds.clone(), [BATCH, ROW]);
            scope.spawn(move || part_results(case, parts, inputs))
        });
        let ranks = ranks.collect::<Vec<_>>().into_iter();
        ranks.map(|rank| rank.join().expect("it ends well")).collect()
    })
}

/// Parts of rows `[batch, len, width]` as whole rows.
fn joined_rows(parts: &[&[f32]]) -> Vec<f32> {
    let row = |row: usize| {
        parts.iter().flat_map(move |part| {
            let width = part.len() / BATCH;
            &part[row * width..(row + 1) * width]
        })
    };
    (0..BATCH).flat_map(row).copied().collect()
}

/// Checks that the values differ by rounding errors at most.
fn assert_near(what: &str, found: &[f32], expected: &[f32]) {
    let expected = wide(expected);
    let largest = expected.iter().fold(1.0, |most: f64, x| most.max(x.abs()));
    assert_close(what, found, &expected, 2e-6 * largest);
}

/// Checks the parts' outputs, gradients and masks against those of whole rows; `a` as in [`inputs`].
fn check(case: Case, num_parts: usize, lengths: [&[usize]; BATCH], a: f64) {
    let what = format!("{case:?} in {num_parts} parts, documents {lengths:?}, a {a}");
    let (bounds, inputs) = (bounds(lengths, ROW), inputs(case, a));
    let expected = whole_results(case, &bounds, &inputs);
    let found = all_parts(case, num_parts, &bounds, &inputs);
    let joined = |of: fn(&Found) -> &[f32]| joined_rows(&found.iter().map(of).collect::<Vec<_>>());
    assert_near(&format!("o of {what}"), &joined(|part| &part.o), &expected.o);
    let d_qkv = joined(|part| &part.d_qkv);
    assert_near(&format!("dqkv of {what}"), &d_qkv, &expected.d_qkv);
    // The gradients of weights are summed over the parts.
    let sum = |of: fn(&Found) -> &[f32]| {
        let mut sum = vec![0.0; of(&found[0]).len()];
        for part in &found {
            let sums = sum.iter_mut().zip(of(part));
            sums.for_each(|(sum, value)| *sum += value);
        }
        sum
    };
    let d_w_dt = sum(|part| &part.d_w_dt);
    assert_near(&format!("dw_dt of {what}"), &d_w_dt, &expected.d_w_dt);
    assert_near(&format!("da of {what}"), &sum(|part| &part.d_a), &expected.d_a);
    // Masks are exactly equal.
    let len = ROW / num_parts;
    for (index, expected) in expected.seen_keys.iter().enumerate() {
        let (head, query) = (index / ROW, index % ROW);
        let part = &found[query / len].seen_keys[head * len + query % len];
        assert_eq!(part, expected, "query {query} of head {head} of {what}");
    }
}

#[test]
fn parts_of_rows_attend_as_whole_rows_do() {
    for case in cases() {
        for num_parts in [1, 2, 3, 4] {
            for lengths in ROWS {
                check(case, num_parts, lengths, 0.5);
            }
        }
    }
}

// Scores of 0 give the keys of a document equal ranks, or ranks of recency alone. Of keys with equal ranks the later
// one is kept, also where they are in different parts.
#[test]
fn of_keys_with_equal_ranks_parts_keep_those_that_whole_rows_keep() {
    for num_parts in [2, 4] {
        for dma in [DmaShape::published(5), recency(7, 2)] {
            check(case(2, None, Some(dma)), num_parts, ROWS[1], 0.0);
        }
    }
}

#[test]
fn a_halo_has_at_most_the_keys_that_a_query_keeps() {
    let case = case(2, None, Some(recency(5, 2)));
    let (bounds, inputs) = (bounds(ROWS[0], ROW), inputs(case, 0.5));
    for num_parts in [2, 4, 8] {
        let slots = all_parts(case, num_parts, &bounds, &inputs).into_iter();
        let slots = slots.map(|part| part.slots.expect("a halo"));
        // All keys before the part, at most the 5 that a query keeps.
        let expected = (0..num_parts).map(|part| 5.min(part * ROW / num_parts));
        assert!(expected.eq(slots), "{num_parts} parts");
    }
}

#[test]
fn tokens_are_exchanged_for_heads_and_back() {
    // 13 heads: 4 and 8 that are divided among the parts, and between them one that every part gets.
    let kinds = [Heads::Split(4), Heads::Shared(1), Heads::Split(8)];
    for num_parts in [1, 2, 4] {
        let rows = Random(5).input(&[BATCH, ROW, 13, 3]).tensor(DType::F32);
        std::thread::scope(|scope| {
            for links in ThreadGroup::all(num_parts) {
                let rows = tensor::<Flex, 4>(rows.clone());
                scope.spawn(move || {
                    let (part, len) = (links.part(), ROW / num_parts);
                    let own = rows.clone().narrow(1, part * len, len);
                    let heads = to_heads(&links, own.clone(), &kinds);
                    let [four, eight] = [4 / num_parts, 8 / num_parts];
                    let wanted = [(part * four, four), (4, 1), (5 + part * eight, eight)];
                    let wanted = wanted.map(|(first, count)| rows.clone().narrow(2, first, count));
                    assert_eq!(heads.to_data(), Tensor::cat(wanted.to_vec(), 2).to_data());
                    // The values of a shared head are summed over the parts.
                    let back = to_tokens(&links, heads, &kinds);
                    let shared = own.clone().narrow(2, 4, 1) * num_parts as f64;
                    let wanted = [own.clone().narrow(2, 0, 4), shared, own.narrow(2, 5, 8)];
                    assert_eq!(back.to_data(), Tensor::cat(wanted.to_vec(), 2).to_data());
                });
            }
        });
    }
}

#[test]
fn the_kept_keys_of_a_walk_are_those_of_the_reference() {
    // Tokens, and the first query that no longer sees each; the last head keeps one key alone.
    let expire = [3, 6, 5, 6, 6, 6, 6, 2, 6, 4, 6, 6, 1, 2, 3, 4, 5, 6].map(i64::from);
    let expire = Tensor::<Flex, 1, Int>::from_ints(expire, &FlexDevice).reshape([1, 3, 6]);
    for slots in [1, 3, 6] {
        let [of_walk, of_sort] = [Flex::dma_kept_keys, super::reference::dma_last_kept::<Flex>].map(|kept| {
            host_ints(Tensor::<Flex, 3, Int>::from_primitive(kept(expire.clone().into_primitive(), slots)))
        });
        assert_eq!(of_walk, of_sort, "{slots} slots");
    }
}
