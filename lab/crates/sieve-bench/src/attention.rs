//! Attention and its gradients on random shapes and layouts, through the launch wrappers.
use crate::case::{Case, Cuts, Keys};
use crate::device::Device;
use crate::error::Result;
use crate::extent::Extent;
use crate::on_device::{self, OnDevice};
use crate::outputs::Outputs;
use crate::reference::{Reference, attention};
use crate::report::{Outcome, Report, Wrong, wrong};
use crate::scores::Scores;
use crate::shape::{queries_of, values_of};
use crate::strided::Layout;
use crate::tolerance::{RowTolerance, Tolerance, lost_digits};
use rayon::prelude::*;
use sieve_cpu::reference::Rounding;
use sieve_kernels::{AttentionResult, AttentionShape, KernelError, KernelPolicy, KeyLists, SumOrder};
use sieve_testing::Random;
use std::ops::Range;

/// Tolerance of `ddelta` as a share of the largest [`Reference::ddelta_terms`]: 2^-16, where bf16 sums would need 2^-8.
/// It is no share of `ddelta` itself, whose true value is 0 where a query sees a single key.
const DDELTA_TERMS: f32 = 1.0 / 65536.0;

/// A case with its references in f32 and in bf16.
pub(super) struct Prepared {
    case: Case,
    layout: Layout,
    exact: Reference,
    plain: Reference,
    label: String,
}

impl Prepared {
    pub(super) fn new(case: Case, layout: Layout, label: String) -> Self {
        Self { exact: attention(&case, Rounding::None), plain: attention(&case, Rounding::Bf16), layout, label, case }
    }
}

/// Sizes, mask and data kinds of one random call; [`Draw::prepare`] draws its numbers.
struct Draw {
    shape: AttentionShape,
    keys: Keys,
    cuts: Cuts,
    scores: Scores,
    layout: Layout,
    /// Factor on the random queries and keys.
    magnitude: f32,
    seed: u64,
    policy: KernelPolicy,
}

impl Draw {
    /// Draws sizes that no tile divides, and sizes at the edges of tiles (63, 64, 65). `mode`: see [`for_each_case`].
    fn new(mode: usize, magnitude: f32, extent: &Extent, random: &mut Random) -> Self {
        let longest = extent.longest;
        let (head_dim, head_dim_v) = random.one_of(extent.widths);
        let group = random.one_of(extent.groups);
        let num_kv_heads = if group < 4 { random.between(1, 4) } else { 1 };
        let drawn = random.between(2, longest.max(3));
        let mut seq_len = random.one_of(&[1, 2, 15, 63, 64, 65, 127, 129, 191, drawn, drawn]);
        let dma = mode.is_multiple_of(2);
        if dma && random.chance(0.25) {
            // More than one super-block, that is, more than 1024 queries.
            seq_len = random.between(1025, 1025 + 2 * longest);
        }
        let window = random.one_of(&[1, 2, 7, 33, 64, 100, seq_len / 2 + 1, seq_len, 5 * seq_len]);
        let batch = if seq_len < 300 { random.between(1, 4) } else { 1 };
        let heads = [group * num_kv_heads, num_kv_heads];
        Self {
            shape: AttentionShape::new(batch, seq_len, heads, [head_dim, head_dim_v]),
            keys: match mode {
                1 => Keys::Dense,
                3 => Keys::Window(window),
                5 => Keys::Biased,
                2 => Keys::local_of(window, random),
                _ => Keys::chosen(window),
            },
            cuts: random.one_of(&[Cuts::Count(1), Cuts::Count(1), Cuts::Few, Cuts::Mixed, Cuts::Tokens]),
            scores: Scores::RANDOM[random.below(Scores::RANDOM.len())].clone(),
            layout: random.one_of(&Layout::ALL),
            magnitude,
            seed: random.between(0, 1 << 30) as u64,
            policy: KernelPolicy {
                blocks_per_tile: random.one_of(&[None, Some(1), Some(2), Some(3), Some(2 * group)]),
                ..extent.policy
            },
        }
    }

    /// The call in a report: sizes, mask, scores and what else it takes to draw it again.
    fn label(&self) -> String {
        let ([batch, seq_len, num_heads, head_dim], seed) = (queries_of(self.shape), self.seed);
        let [_, _, num_kv_heads, head_dim_v] = values_of(self.shape);
        format!(
            "batch={batch},seq_len={seq_len},heads={num_heads},kv_heads={num_kv_heads},head_dim={head_dim},\
             head_dim_v={head_dim_v} {} {:?} {} {:?} q, k x {} blocks {:?} seed {seed}",
            self.keys,
            self.cuts,
            self.scores.name(),
            self.layout,
            self.magnitude,
            self.policy.blocks_per_tile,
        )
    }

    /// Draws the numbers of the call and computes its references.
    fn prepare(&self) -> Result<Prepared> {
        let (keys, cuts) = (self.keys, self.cuts);
        let case = Case::draw(self.shape, keys, cuts, &self.scores, self.seed)?;
        let mut case = case.under(self.policy).magnified(self.magnitude);
        if self.layout == Layout::Expanded {
            case.repeat_first_row();
        }
        Ok(Prepared::new(case, self.layout, self.label()))
    }
}

/// Draws the random calls of a check and gives each to `visit`. References of as many calls as there are threads are
/// computed at the same time.
fn for_each_case(extent: &Extent, mut visit: impl FnMut(&Prepared)) -> Result<()> {
    // The modes of `Draw::new`. 0: DMA; 2: DMA with a local window; 1: dense; 3: sliding window; 5: dense with a bias.
    const MODES: [usize; 5] = [0, 1, 2, 3, 5];
    let mut random = Random(extent.seed);
    let draws: Vec<Draw> = (0..extent.cases)
        .map(|at| Draw::new(MODES[at % MODES.len()], extent.magnitude_of(at), extent, &mut random))
        .collect();
    for some in draws.chunks(rayon::current_num_threads().max(1)) {
        let prepared: Vec<Result<Prepared>> = some.par_iter().map(Draw::prepare).collect();
        for prepared in prepared {
            visit(&prepared?);
        }
    }
    Ok(())
}

/// Checks the launch wrappers of attention: values narrower than keys, gradient buffers that begin as NaN, both sum
/// orders, and two runs in the fixed order, whose bits must be equal.
pub(crate) fn check_wrappers(report: &mut Report, device: &dyn Device, extent: &Extent) -> Result<()> {
    let mut random = Random(extent.seed);
    let drawn = Extent { seed: extent.seed + 1, ..*extent };
    for_each_case(&drawn, |prepared| {
        let tile_queries = random.one_of(&[32, 64, 64, 128]);
        let name = prepared.case.keys.name_of("attention");
        check_wrapper(report, &name, prepared, device, |call| call.lists(tile_queries));
    })?;
    check_nan(report, device, extent)?;
    if extent.is_emulated {
        // The emulator runs blocks of threads one after the other, so no run can differ from another.
        Ok(())
    } else {
        check_repeats(report, device, extent)
    }
}

/// How many backward passes in a fixed order must have equal bits.
const REPEATS: usize = 20;

/// Repeats backward passes in a fixed order and requires equal bits. The rows are so long that blocks of threads wait
/// for each other.
fn check_repeats(report: &mut Report, device: &dyn Device, extent: &Extent) -> Result<()> {
    for (seq_len, heads, width, keys) in [
        (2000, [6, 2], 128, Keys::Dense),
        (3000, [4, 1], 64, Keys::Dense),
        (3000, [2, 2], 128, Keys::Window(700)),
        (2000, [4, 2], 64, Keys::Biased),
        (3000, [4, 2], 128, Keys::chosen(700)),
        (5000, [6, 1], 64, Keys::local(400, 300)),
    ] {
        let shape = AttentionShape::new(1, seq_len, heads, [width; 2]);
        let case = Case::draw(shape, keys, Cuts::Count(2), &Scores::Independent, extent.seed)?;
        let case = case.under(extent.policy);
        let call = OnDevice::new(&case, device);
        let outcome = || -> Outcome {
            let lists = call.lists(KeyLists::TILE_QUERIES)?;
            let result = call.forward(lists.as_ref())?;
            repeat(|| call.gradients(lists.as_ref(), &result, SumOrder::Fixed))?;
            match keys {
                Keys::Chosen(_) => orders_agree(&call),
                _ => Ok(0.0),
            }
        };
        let label = format!("{seq_len} tokens, heads {heads:?}, width {width}, {keys}");
        let path = on_device::family(&case, device);
        report.add_wrapper("attention, fixed order, repeated", path, &label, outcome());
    }
    Ok(())
}

/// Runs `gradients` [`REPEATS`] times; fails where a run's bits differ from the first run's.
pub(crate) fn repeat<T: PartialEq, E>(gradients: impl Fn() -> Result<T, E>) -> Outcome
where
    Wrong: From<E>,
{
    let first = gradients()?;
    for at in 1..REPEATS {
        if gradients()? != first {
            return wrong(format!("the gradients of pass {at} differ from the first one's"));
        }
    }
    Ok(0.0)
}

/// Position of the key with a NaN in [`check_nan`].
const NAN_KEY: usize = 70;
/// Row length in [`check_nan`], in tokens.
const NAN_TOKENS: usize = 150;

/// Puts a NaN into one key. Every later query sees that key, so its o, lse and dq must be NaN. Each key is seen by such
/// a query, so all dk and dv must be NaN too: a finite gradient would hide the fault from the training loop.
fn check_nan(report: &mut Report, device: &dyn Device, extent: &Extent) -> Result<()> {
    let width = extent.pick(32, 64);
    let shape = AttentionShape::new(1, NAN_TOKENS, [2, 1], [width, width]);
    for keys in [Keys::Dense, Keys::Biased, Keys::chosen(NAN_TOKENS)] {
        let mut case = Case::draw(shape, keys, Cuts::Count(1), &Scores::Independent, extent.seed)?;
        case.k[NAN_KEY * width + 3] = f32::NAN;
        let call = OnDevice::new(&case, device);
        let path = on_device::family(&case, device);
        let outcome = || -> Outcome {
            let lists = call.lists(KeyLists::TILE_QUERIES)?;
            for order in [SumOrder::Any, SumOrder::Fixed] {
                all_nan(&call.run(lists.as_ref(), order)?, 2 * width)?;
            }
            Ok(0.0)
        };
        let label = format!("{keys}, a NaN in key {NAN_KEY} of {NAN_TOKENS}");
        report.add_wrapper("attention, NaN in a key", path, &label, outcome());
    }
    Ok(())
}

/// Fails where o, dq or lse of a query from [`NAN_KEY`] on, or any dk or dv, is not NaN. `token` is the number of
/// elements of q per token.
fn all_nan(got: &Outputs, token: usize) -> Result<(), Wrong> {
    let late = NAN_KEY * token..;
    for (name, values) in [("o", &got.o[late.clone()]), ("dq", &got.dq[late]), ("dk", &got.dk), ("dv", &got.dv)] {
        if let Some(at) = values.iter().position(|x| !x.is_nan()) {
            return wrong(format!("{name}: number {at} of those that a NaN reaches is {}", values[at]));
        }
    }
    let is_late = |(at, _): &(usize, &f32)| at % NAN_TOKENS >= NAN_KEY;
    let lse = got.lse.iter().enumerate().filter(is_late).find(|(_, lse)| !lse.is_nan());
    match lse {
        Some((at, lse)) => wrong(format!("lse: number {at}, which a NaN reaches, is {lse}")),
        None => Ok(()),
    }
}

/// Checks one call of the wrappers in both sum orders; `lists` makes DMA's key lists, or none for dense attention.
pub(super) fn check_wrapper(
    report: &mut Report,
    name: &str,
    prepared: &Prepared,
    device: &dyn Device,
    lists: impl FnOnce(&OnDevice<'_>) -> Result<Option<KeyLists>, KernelError>,
) {
    let case = masked_by_nan(&prepared.case);
    let path = on_device::family(&case, device);
    match wrappers(prepared, &case, device, lists) {
        Ok(outcomes) => {
            for (suffix, outcome) in outcomes {
                let name = format!("{name}{suffix}");
                report.add(&name, path, &prepared.label, outcome);
            }
        }
        Err(error) => report.add_wrapper(name, path, &prepared.label, Err(error.into())),
    }
}

/// Outcomes of one call; each with the suffix of its row's name in the report.
type Outcomes = Vec<(&'static str, Outcome)>;

/// Runs one call in either sum order, and twice in the fixed one. Where the forward pass keeps `o_low`, what bf16 cuts
/// off o, a further backward pass runs without it.
fn wrappers(
    prepared: &Prepared,
    case: &Case,
    device: &dyn Device,
    lists: impl FnOnce(&OnDevice<'_>) -> Result<Option<KeyLists>, KernelError>,
) -> Result<Outcomes, KernelError> {
    let call = OnDevice::laid_out(case, prepared.layout, device);
    device.poison(case.shape);
    let lists = lists(&call)?;
    let result = call.forward(lists.as_ref())?;
    let any = call.gradients(lists.as_ref(), &result, SumOrder::Any)?;
    let fixed = call.gradients(lists.as_ref(), &result, SumOrder::Fixed)?;
    let again = call.run(lists.as_ref(), SumOrder::Fixed)?;
    let mut in_order = judge(prepared, &fixed);
    // Results that `judge` accepts have no NaN, which would be unequal to itself here.
    if in_order.is_ok() && fixed != again {
        in_order = wrong("two runs differ");
    }
    let any = judge(prepared, &any);
    let mut outcomes = vec![("", any), (", fixed order", in_order)];
    if result.o_low.is_some() {
        // Long rows do not keep `o_low`: the backward pass then sums P dP itself.
        let rounded = AttentionResult { o_low: None, ..result };
        let summed = call.gradients(lists.as_ref(), &rounded, SumOrder::Any)?;
        outcomes.push((", row sums", judge(prepared, &summed)));
    }
    Ok(outcomes)
}

/// Tokens of a row whose backward pass takes two launches: one launch takes 16 super-blocks of 1024 queries.
const LONG: usize = 17_500;

/// Compares the two sum orders on a row whose backward pass takes several launches. A reference of this length would be
/// slow, and is not needed: short rows compare the fixed order with references.
pub(crate) fn check_long_row(report: &mut Report, device: &dyn Device, extent: &Extent) -> Result<()> {
    let shape = AttentionShape::new(1, LONG, [4, 2], [64, 64]);
    for (keys, scores) in [
        (Keys::chosen(100), Scores::Independent),
        (Keys::chosen(1500), Scores::Rising),
        (Keys::local(400, 300), Scores::Independent),
    ] {
        let cuts = Cuts::Count(2);
        // One thread block for each key tile: where the order of sums is free, it may sum over queries of several
        // super-blocks.
        let policy = KernelPolicy { blocks_per_tile: Some(1), ..extent.policy };
        let case = Case::draw(shape, keys, cuts, &scores, extent.seed)?.under(policy);
        let call = OnDevice::new(&case, device);
        let path = on_device::family(&case, device);
        let name = format!("{}, long row", keys.name_of("attention"));
        report.add(&name, path, "two orders", orders_agree(&call));
    }
    Ok(())
}

/// Tolerance between gradients of the two sum orders: both are rounded to bf16 once, so they may differ by two halves
/// of a unit in the last place.
pub(crate) const ORDERS: Tolerance = Tolerance::new(0.0, Tolerance::FLOOR, 1.0 / 128.0);

/// Runs both sum orders and compares their gradients.
pub(super) fn orders_agree(call: &OnDevice<'_>) -> Outcome {
    let lists = call.lists(KeyLists::TILE_QUERIES)?;
    let any = call.run(lists.as_ref(), SumOrder::Any)?;
    let fixed = call.run(lists.as_ref(), SumOrder::Fixed)?;
    let mut worst = 0.0f32;
    for (name, got, expected) in [
        ("dq", &any.dq, &fixed.dq),
        ("dk", &any.dk, &fixed.dk),
        ("dv", &any.dv, &fixed.dv),
        ("ddelta", &any.ddelta, &fixed.ddelta),
    ] {
        worst = worst.max(ORDERS.judge(name, got, expected, expected)?);
    }
    Ok(worst)
}

/// Puts NaN into k, v and bias of every key that no query sees: no result may change.
fn masked_by_nan(case: &Case) -> Case {
    let mut case = case.clone();
    for (at, _, [k, v]) in never_active(&case) {
        case.k[k].fill(f32::NAN);
        case.v[v].fill(f32::NAN);
        if let Some(delta) = case.delta.get_mut(at) {
            *delta = f32::NAN;
        }
    }
    case
}

/// Each key that no query sees: its index among the biases, its position in the row, and its ranges in k and v.
fn never_active(case: &Case) -> Vec<(usize, usize, [Range<usize>; 2])> {
    let [_, seq_len, num_kv_heads, width_v] = values_of(case.shape);
    let never = case.never_active().into_iter().enumerate();
    let never = never.filter(|(_, never)| *never).map(|(at, _)| {
        let (row, j) = (at / seq_len, at % seq_len);
        let token = (row / num_kv_heads * seq_len + j) * num_kv_heads + row % num_kv_heads;
        let rows = [case.shape.head_dim, width_v].map(|width| token * width..(token + 1) * width);
        (at, j, rows)
    });
    never.collect()
}

/// Compares every output with the references. Returns the largest ratio of error to tolerance.
fn judge(prepared: &Prepared, got: &Outputs) -> Outcome {
    let (exact, plain) = (&prepared.exact.outputs, &prepared.plain.outputs);
    let (terms, lost_digits) = (&prepared.exact.terms, lost_digits(&exact.lse));
    let rows = RowTolerance::of_bf16(lost_digits);
    let mut worst = 0.0f32;
    for (name, got, plain, exact, terms) in [
        ("o", &got.o, &plain.o, &exact.o, &terms.o),
        ("dq", &got.dq, &plain.dq, &exact.dq, &terms.dq),
        ("dk", &got.dk, &plain.dk, &exact.dk, &terms.dk),
        ("dv", &got.dv, &plain.dv, &exact.dv, &terms.dv),
    ] {
        worst = worst.max(rows.judge(name, got, plain, exact, terms)?);
    }
    let is_long = prepared.case.shape.seq_len >= 64;
    // Kernels compute rowsum(do * o) from o rounded to bf16, so `ddelta` has an error of about a bf16 rounding.
    let gradient_share = if is_long { 1.0 / 256.0 } else { 1.0 / 128.0 };
    let of_terms = (DDELTA_TERMS + lost_digits as f32) * prepared.exact.ddelta_terms;
    let ddelta = Tolerance { norm: is_long, ..Tolerance::new(2.0, Tolerance::FLOOR + of_terms, gradient_share) };
    let lse = Tolerance::new(2.0, 1e-4, 1e-4);
    worst = worst.max(lse.judge("lse", &got.lse, &plain.lse, &exact.lse)?);
    worst = worst.max(ddelta.judge("ddelta", &got.ddelta, &plain.ddelta, &exact.ddelta)?);
    if !got.expire.is_empty() && got.expire != exact.expire {
        return wrong("expire differs from the oracle");
    }
    never_active_are_zero(&prepared.case, got)?;
    Ok(worst)
}

/// Fails where a key that no query sees has a gradient other than exactly 0.
fn never_active_are_zero(case: &Case, got: &Outputs) -> Result<(), Wrong> {
    for (at, j, [k, v]) in never_active(case) {
        let ddelta = got.ddelta.get(at);
        let mut gradients = got.dk[k].iter().chain(&got.dv[v]).chain(ddelta);
        if gradients.any(|&x| x != 0.0) {
            return wrong(format!("key {j}, which no query sees, has a gradient"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use sieve_testing::refusal;

    #[test]
    fn a_wrong_result_does_not_pass() {
        let draw = |seed| Draw {
            shape: AttentionShape::new(1, 70, [2, 1], [16, 16]),
            keys: Keys::chosen(9),
            cuts: Cuts::Count(1),
            scores: Scores::Falling,
            layout: Layout::Contiguous,
            magnitude: 1.0,
            seed,
            policy: KernelPolicy::default(),
        };
        let prepared = draw(3).prepare().expect("one document");
        let right = &prepared.exact.outputs;
        assert_eq!(judge(&prepared, right), Ok(0.0));
        type Wrong = fn(&mut Outputs);
        let wrong: [(&str, Wrong); 6] = [
            ("o", |x| x.o[5] += 0.1),
            ("lse", |x| x.lse[0] = f32::NAN),
            ("dq", |x| x.dq.iter_mut().for_each(|x| *x *= 1.05)),
            ("ddelta", |x| x.ddelta[1] += 0.1),
            ("expire", |x| x.expire[3] += 1),
            ("no query sees", |x| {
                // With falling scores DMA does not keep the last key, so no query sees it.
                let last = x.dv.len() - 1;
                x.dv[last] = 1e-6;
            }),
        ];
        for (word, change) in wrong {
            let mut outputs = right.clone();
            change(&mut outputs);
            refusal(judge(&prepared, &outputs), word);
        }
    }

    #[test]
    fn plain_bf16_passes_its_own_tolerance() {
        // Factor 1 alone: with large logits, rounding them to bf16 changes results by more than a kernel may.
        let extent = Extent { magnitude: Some(1.0), ..Extent::all(10, 90, 11) };
        for_each_case(&extent, |prepared| {
            let ratio = judge(prepared, &prepared.plain.outputs);
            assert!(ratio.is_ok(), "{}: {ratio:?}", prepared.label);
        })
        .expect("random cases");
    }
}
