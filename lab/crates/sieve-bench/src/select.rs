//! Compares a device's selections with sieve-select's on the CPU, from the same bf16 operands.
#[cfg(test)]
mod golden;
mod heavy;
mod tokens;

use crate::device::{Device, download_mask, family, family_name, separate, upload_mask};
use crate::error::Result;
use crate::extent::Extent;
use crate::report::{Outcome, Report, wrong};
use crate::shape::shape_of_call;
use sieve_core::{BlockSelection, KeyMask};
use sieve_kernels::{Amount, DType, KernelError, KeySource, LongChoice};
use sieve_select::prefill::minference::Pattern;
use sieve_select::{Call, CallShape, Method, Selected, Selector};
use sieve_testing::Random;
use tokens::NEAR;

/// A selector that a device can run, and the sizes of its calls.
struct Checked {
    /// As `--selector` takes it; `TAU` stands for a share of attention mass.
    text: &'static str,
    sizes: Sizes,
}

/// Numbers of queries and keys of a selector's calls.
#[derive(Clone, Copy, Debug)]
enum Sizes {
    /// A whole prompt, a chunk that begins inside a block, and one query.
    Usual,
    /// The selector has needs of its own.
    Own(&'static [[usize; 2]]),
}

impl Checked {
    const fn usual(text: &'static str) -> Self {
        Self { text, sizes: Sizes::Usual }
    }

    /// With probe rows, at multiples of a `gamma` of 5: chunks begin there.
    const fn of_probes(text: &'static str) -> Self {
        Self { text, sizes: Sizes::Own(&[[300, 300], [150, 390], [130, 450]]) }
    }

    /// With probe rows at whose multiples no chunk begins.
    const fn whole_prompt(text: &'static str) -> Self {
        Self { text, sizes: Sizes::Own(&[[300, 300]]) }
    }

    /// With fewer keys the selector has nothing to choose from.
    const fn many_keys(text: &'static str, sizes: &'static [[usize; 2]]) -> Self {
        Self { text, sizes: Sizes::Own(sizes) }
    }
}

impl Sizes {
    fn of(self, extent: &Extent) -> &'static [[usize; 2]] {
        match self {
            Self::Usual => extent.pick(EMULATED_SIZES, SIZES),
            Self::Own(sizes) => sizes,
        }
    }
}

/// Selectors that a device can run.
const SELECTORS: &[Checked] = &[
    Checked::usual("meanpool:block=32,tau=TAU"),
    Checked::usual("meanpool:block=16,top_k=3,gqa=union"),
    Checked::usual("block_sparse:block=32,topk=2"),
    Checked::usual("bfla:block=64,group=16,tile=16,local_tokens=16,keep_mass=TAU"),
    Checked::usual("bfla:block=32,group=32,tile=32,local_tokens=0,keep_mass=TAU,gqa=per_query,sink_tiles=2"),
    // Its local band takes all of fewer keys.
    Checked::many_keys("bfla:block=64,pooling=mean,tile=32,keep_mass=TAU", &[[40, 1000]]),
    Checked::usual("bfla:block=32,group=16,tile=16,local_tokens=0,keep_mass=TAU,gqa=union,stride=5,prob=0.1"),
    Checked::usual(
        "bfla:block=64,group=16,tile=16,local_tokens=16,keep_mass=TAU,prob=0.3,hash=linear,rescue_grid=block,seed=7",
    ),
    Checked::usual("xattention:block=32,stride=8,tau=TAU"),
    Checked::usual("xattention:block=64,stride=16,tau=TAU,mode=slash,norm=0.5,gqa=union"),
    Checked::usual("oracle_topk:block=32,tau=TAU"),
    Checked::usual("oracle_topk:block=16,k=3"),
    Checked::usual("vertical_slash:vertical=40,slash=60"),
    Checked::usual("minference:first_dense_layers=0"),
    // So many keys that diagonals do not meet every tile.
    Checked::many_keys(MIXED, &[[40, 1000]]),
    // tau=0 never uses the map of blocks, tau=1 always.
    Checked::usual("flexprefill:block=16,min_budget=32,gamma=TAU,tau=0"),
    Checked::usual("flexprefill:block=32,min_budget=32,max_budget=64,gamma=TAU,tau=1,gqa=union"),
    Checked::usual("pbs:block=16,segment=64,tau=TAU"),
    Checked::usual("pbs:block=32,segment=32,tau=TAU,gqa=union"),
    Checked::usual("pbs:block=16,segment=64,tau=TAU,permute=none"),
    Checked::usual("pbs:block=16,segment=64,tau=TAU,select=xattention,stride=4"),
    Checked::usual("pbs:block=32,segment=32,tau=TAU,select=xattention,permute=none,gqa=union"),
    // A segment of 64 blocks, more than the bits of a 32-bit word. With fewer keys than a segment has pbs is dense.
    Checked::many_keys("pbs:block=8,segment=512,tau=TAU", &[[40, 1000]]),
    Checked::usual("ba_att:block=16,segment=64,sparsity=0.3,compensate_layers=all"),
    Checked::usual("ba_att:block=32,segment=128,sort=k,gqa=union,compensate_layers=none"),
    Checked::usual("ba_att:block=16,segment=64,sparsity=0.3,sort=q"),
    Checked::usual("ba_att:block=16,segment=64,sparsity=0.7,sort=none,gqa=union"),
    Checked::of_probes("momo:first_dense_layers=0,gamma=5,chi=10,beta=8,k=12,k_exact=4,k_trim=9"),
    // One slot (k - k_exact) for dozens of blocks: the gate rejects nearly all, so its normal quantile comes from the
    // approximation of the tail.
    Checked::of_probes("momo:first_dense_layers=0,gamma=5,chi=10,beta=8,k=5,k_exact=4"),
    // Streams of several chunks of 32 scores.
    Checked::of_probes("momo:first_dense_layers=0,gamma=5,chi=10,beta=2,k=21,k_exact=3"),
    // Blocks of half a stage of Hopper's attention, whose scores come from its weights; so many keys that probes have
    // blocks to choose from.
    Checked::many_keys("momo:first_dense_layers=0,gamma=5,chi=10,beta=64,k=6,k_exact=2", &[[40, 1000], [30, 800]]),
    Checked::whole_prompt("momo:first_dense_layers=0,gamma=8,chi=64,beta=16,k=6,topk=gauss,sink_blocks=2,gqa=union"),
    Checked::of_probes("momo:first_dense_layers=0,gamma=5,chi=10,beta=2,k=40,topk=exact"),
    Checked::usual("delta:base=meanpool,base.block=32,base.tau=TAU,base.min_prefill_tokens=0"),
];

/// MInference with [`PATTERNS`] in place of a pattern file.
const MIXED: &str = "minference:first_dense_layers=0,last_dense_rows=0";

/// Patterns of the query heads under [`MIXED`].
const PATTERNS: [Pattern; 6] = [
    Pattern::VerticalSlash { vertical: 40, slash: 60 },
    Pattern::BlockSparse { topk: 2 },
    Pattern::VerticalSlash { vertical: 70, slash: 110 },
    Pattern::BlockSparseEighth,
    Pattern::BlockSparseEighth,
    Pattern::BlockSparse { topk: 1 },
];

/// The share of attention mass that stands for `TAU`.
const TAU: f64 = 0.6;
/// How far another order of sums may change a share of mass.
const MARGIN: f64 = 1e-5;

/// Share of the rows whose choice may lie within [`MARGIN`].
const MOST_ROWS_AT_THE_MARGIN: f64 = 0.02;

/// Numbers of queries and keys: a whole prompt, a chunk that begins inside a block, one query.
const SIZES: &[[usize; 2]] = &[[300, 300], [150, 391], [1, 70]];

/// Numbers of queries and keys on the emulator: smaller, but the last block of 64 is still short.
const EMULATED_SIZES: &[[usize; 2]] = &[[180, 180], [90, 235], [1, 70]];

/// Checks each selector at the sizes that it takes, and at the first of them with a NaN in a query too.
pub(crate) fn check_wrappers(report: &mut Report, device: &dyn Device, extent: &Extent) -> Result<()> {
    let mut random = Random(extent.seed);
    let groups = extent.pick(&[1, 2][..], &[1, 2, 3]);
    for &Checked { text: name, sizes } in SELECTORS {
        for (at, &sizes) in sizes.of(extent).iter().enumerate() {
            let kv_heads = random.between(1, 3);
            let heads = match name {
                MIXED => [PATTERNS.len(), 2],
                _ => [kv_heads * random.one_of(groups), kv_heads],
            };
            let shape = CallShape::new(sizes, heads, [64, 128][at % 2]);
            // Some selectors are dense at this size whatever the operands are: the device then has nothing to choose.
            let is_dense = selection_of(shape, name).is_none();
            for has_nan in [false, true] {
                // No selector is dense at its first size. A NaN takes the same way at every size: one is enough.
                if (has_nan || is_dense) && at != 0 {
                    continue;
                }
                let case = Case::draw(shape, name, has_nan, &mut random);
                let row = format!("select_blocks, {}", name.split(':').next().unwrap_or(name));
                let label = format!("{name} {shape:?} NaN: {has_nan}");
                let family = family(device, &shape_of_call(shape), KeySource::Dense);
                let path = format!("{}s", family_name(family));
                report.add_wrapper(&row, &path, &label, case.run(device));
            }
        }
    }
    check_tokens(report, device, extent)?;
    for (label, outcome) in long_choices(device, extent) {
        report.add_wrapper("select_choose, a long row", "kernels", label, outcome);
    }
    for text in CORRECTED {
        for &sizes in &SIZES[..2] {
            let outcome = corrected(device, text, sizes, &mut random);
            report.add_wrapper("correct_by_probes", "kernels", text, outcome);
        }
    }
    Ok(())
}

/// Checks choices among a million entries and more, where f32 sums and counts would be wrong: by mass, with three
/// masses of 1 among many of 1e-9; and by number, with equal masses.
fn long_choices(device: &dyn Device, extent: &Extent) -> [(&'static str, Outcome); 3] {
    // Numbers of entries of the two choices.
    let (by_mass, by_number) = extent.pick((1 << 20, 1 << 16), (1 << 20, (1 << 25) + 5));
    let small = 1e-9;
    let mut masses = vec![small; by_mass];
    for at in [77, 40_000, by_mass - 3] {
        masses[at] = 1.0;
    }
    // The three large masses and two thirds of the small ones.
    let goal = 3.0 + small * (by_mass * 2 / 3) as f32;
    let needed = ((f64::from(goal) - 3.0) / f64::from(small)).ceil() as usize;
    let choice = |masses: &[f32], amount: Amount<'_>| -> Result<Vec<i32>, KernelError> {
        let length = masses.len();
        let scores = device.float(masses, &[1, length], DType::F32);
        let nan_rows = device.int(&[0], &[1]);
        let kept = scores.empty_contiguous(&[1, length.div_ceil(32)], DType::I32);
        let first_and_num_heads = [0, 1];
        LongChoice::new([&scores, &kept, &nan_rows], first_and_num_heads, length, amount).choose()?;
        device.ints(&kept)
    };
    let judge = |words: Result<Vec<i32>, KernelError>, expected: &dyn Fn(usize) -> bool| -> Outcome {
        let words = words?;
        let is_kept = |at: usize| words[at / 32] >> (at % 32) & 1 == 1;
        let wrong_at = (0..words.len() * 32).find(|&at| is_kept(at) != expected(at));
        match wrong_at {
            None => Ok(0.0),
            Some(at) => {
                let count: u32 = words.iter().map(|word| word.count_ones()).sum();
                wrong(format!("entry {at} of those to keep differs; {count} are kept"))
            }
        }
    };
    // Of equal masses the first are kept; two of the large masses lie among them.
    let large = |at: usize| at < by_mass && masses[at] == 1.0;
    let first = |at: usize| at < needed + 2;
    let top = by_number / 2 + 1;
    let equal = vec![0.25; by_number];
    [
        ("by mass", judge(choice(&masses, Amount::Sum { goal, strict: false }), &|at| large(at) || first(at))),
        ("by number", judge(choice(&equal, Amount::Count { top, num_first: 0 }), &|at| at < top)),
        (
            "by number, the first in any case",
            judge(choice(&equal, Amount::Count { top, num_first: 1 }), &|at| at < top),
        ),
    ]
}

/// Checks decode selectors: the keys that a token reads, and the keys that are kept of a prompt.
pub(crate) fn check_tokens(report: &mut Report, device: &dyn Device, extent: &Extent) -> Result<()> {
    let mut random = Random(extent.seed);
    for text in tokens::STEPS {
        let outcome = tokens::check(device, text, &mut random);
        report.add_wrapper("selector_decode, tokens", "kernels", text, outcome);
    }
    let outcome = tokens::long_rows(device, &mut random);
    report.add_wrapper("nsa_choose, long rows", "kernels", "scores of all kinds", outcome);
    for text in heavy::HEAVY {
        let outcome = heavy::check(device, text, &mut random);
        report.add_wrapper("keep_heavy_keys, tokens", "kernels", text, outcome);
    }
    Ok(())
}

/// Selectors that correct attention under their mask by some rows of dense attention.
const CORRECTED: &[&str] = &[
    "delta:gamma=7,base.min_prefill_tokens=0,base.n_local=20,base.n_init=3",
    "delta:gamma=16,dense_tail=false,base.min_prefill_tokens=0,base.n_local=20",
    "delta:mode=recompute,base.min_prefill_tokens=0,base.n_local=20",
    // The kernels that choose its blocks compute its dense rows too, except where a chunk begins between two of them.
    "momo:first_dense_layers=0,gamma=4,chi=32,beta=64,k=2,k_exact=1",
];

/// Compares the device's attention under a selector's mask, corrected as the selector asks, to the CPU's: four query
/// heads, two KV heads, heads 64 wide.
fn corrected(device: &dyn Device, text: &str, [num_queries, num_keys]: [usize; 2], random: &mut Random) -> Outcome {
    let shape = CallShape::new([num_queries, num_keys], [4, 2], 64);
    let q = random.bf16_normals(num_queries * 4 * 64);
    let [k, v] = [(); 2].map(|()| random.bf16_normals(num_keys * 2 * 64));
    let call = Call::new(shape, &q, &k, &v).expect("sizes fit");
    let selector = Selector::parse(&format!("{text},min_prefill_tokens=0"));
    let selector = selector.expect("the names above are right");
    let expected = selector.prefill(&call).expect("a prefill method").output.o;
    let chosen = selector.select_uncorrected(&call);
    let mask = chosen.expect("a prefill method").mask;
    let qkv = separate(device, [&with_context(&q, shape), &k, &v], shape_of_call(shape));
    let scale = shape.softmax_scale();
    let on_device = upload_mask(device, &mask).expect("its own arrays");
    let sparse = qkv.sparse_attention_forward(&on_device, scale)?;
    let (layer, num_layers) = (0, 0);
    let selection = selector.block_selection(shape, layer, num_layers);
    let chosen = selection.map(|of| qkv.select_blocks(&of)).transpose()?;
    let probe_o = chosen.and_then(|chosen| chosen.probe_o);
    let correction = selector.correction(shape, layer).expect("it corrects");
    let dense_rows = mask.dense_rows.first().cloned().unwrap_or(0..0);
    qkv.correct_by_probes(&sparse.o, probe_o.as_ref(), correction, dense_rows, scale)?;
    NEAR.judge("output", &device.floats(&sparse.o)?, &expected, &expected)
}

/// `q` after NaN for the queries of earlier tokens, which a kernel must not read.
pub(crate) fn with_context(q: &[f32], shape: CallShape) -> Vec<f32> {
    let mut all = vec![f32::NAN; shape.context() * shape.num_heads * shape.head_dim];
    all.extend(q);
    all
}

/// One of [`SELECTORS`], with `tau` as its share of attention mass.
fn selector_of(name: &str, tau: f64) -> Selector {
    let text = name.replace("TAU", &tau.to_string());
    let selector = Selector::parse(&format!("{text},min_prefill_tokens=0"));
    let mut selector = selector.expect("the names above are right");
    if let Method::Minference(config) = &mut selector.method
        && name == MIXED
    {
        config.patterns.layers = vec![PATTERNS.map(Some).to_vec()];
    }
    selector
}

/// How a device selects; `None` where the selector is dense at this size.
fn selection_of(shape: CallShape, name: &str) -> Option<BlockSelection> {
    let (layer, num_layers) = (0, 0);
    selector_of(name, TAU).block_selection(shape, layer, num_layers)
}

struct Case {
    shape: CallShape,
    name: &'static str,
    q: Vec<f32>,
    k: Vec<f32>,
}

impl Case {
    /// Draws q and k for the selector `name`; with `has_nan` one number of the first head's last query is NaN.
    fn draw(shape: CallShape, name: &'static str, has_nan: bool, random: &mut Random) -> Self {
        let mut q = random.bf16_normals(shape.num_queries * shape.num_heads * shape.head_dim);
        let k = random.bf16_normals(shape.num_keys * shape.num_kv_heads * shape.head_dim);
        if has_nan {
            // The NaN is in the last query of the first head.
            let at = (shape.num_queries - 1) * shape.num_heads * shape.head_dim;
            q[at + 3] = f32::NAN;
        }
        Self { shape, name, q, k }
    }

    /// The selection on the CPU, with `tau` as the share of attention mass.
    fn on_host(&self, tau: f64) -> Selected {
        let selector = selector_of(self.name, tau);
        let call = match selector.method {
            // These selectors read values, which change their correction but not their lists.
            Method::Momo(..) | Method::Delta(..) => Call::new(self.shape, &self.q, &self.k, &self.k),
            _ => Call::without_values(self.shape, &self.q, &self.k),
        };
        selector.select(&call.expect("sizes fit")).expect("a prefill method")
    }

    /// Selects on the device, with NaN for the queries before the call's, and compares with the CPU.
    fn run(&self, device: &dyn Device) -> Outcome {
        let (q, k) = (with_context(&self.q, self.shape), &self.k);
        let qkv = separate(device, [&q, k, k], shape_of_call(self.shape));
        let selection = selection_of(self.shape, self.name);
        let selection = selection.unwrap_or_else(|| panic!("a device takes {}", self.name));
        let made = qkv.select_blocks(&selection)?.mask;
        self.judge(&download_mask(device, made)?)
    }

    /// Returns the share of rows whose lists differ, relative to the tolerance. A list may differ only by tiles whose
    /// mass lies within [`MARGIN`].
    fn judge(&self, found: &KeyMask) -> Outcome {
        let chosen = [TAU - MARGIN, TAU, TAU + MARGIN].map(|tau| self.on_host(tau));
        let [low, exact, high] = [0, 1, 2].map(|at| &chosen[at].mask);
        let counts = found.counts.as_ref().expect("a device counts what it keeps");
        let nan_heads = counts.nan_rows.iter().filter(|&&rows| rows > 0).count();
        if nan_heads != chosen[1].stats.nan_lists {
            let expected = chosen[1].stats.nan_lists;
            return wrong(format!("{nan_heads} heads with NaN, the CPU has {expected}"));
        }
        let (rows, mut differing) = (exact.tiles.num_query_tiles(), 0);
        for list in 0..exact.num_lists() {
            for i in 0..rows {
                let (place, tiles) = (format!("list {list}, row {i}"), found.row(list, i));
                let expected = exact.row(list, i);
                let inside = low.row(list, i).iter().all(|j| tiles.contains(j))
                    && tiles.iter().all(|j| high.row(list, i).contains(j));
                // A tile that is listed twice would count twice in attention.
                if !inside || !tiles.is_sorted_by(|a, b| a < b) {
                    return wrong(format!("{place}: {tiles:?}, the CPU keeps {expected:?}"));
                }
                differing += usize::from(tiles != expected);
                let at = list * rows + i;
                let (columns, expected) = (found.columns(list, i), exact.columns(list, i));
                if columns != expected {
                    let words = format!("{place}: keys {columns:?}, the CPU keeps {expected:?}");
                    return wrong(words);
                }
                let counted = [counts.tiles[at], counts.pairs[at]].map(|x| x as usize);
                let kept = [tiles.len(), pairs(exact, list, i, tiles, columns)];
                if counted != kept {
                    let ([tiles, pairs], [kept, of]) = (counted, kept);
                    return wrong(format!("{place}: {tiles} tiles, {pairs} pairs; {kept} and {of} are kept"));
                }
            }
        }
        for (what, order, expected) in
            [("keys", found.key_order(), exact.key_order()), ("queries", found.query_order(), exact.query_order())]
        {
            // The host leaves out an order that changes nothing.
            if !expected.is_empty() && order != expected {
                let at = order.iter().zip(expected).position(|(a, b)| a != b);
                return wrong(format!("the order of {what} differs from slot {at:?} on"));
            }
        }
        let share = differing as f64 / (exact.num_lists() * rows) as f64;
        // A share of few rows may be less than one row.
        let allowed = MOST_ROWS_AT_THE_MARGIN.max(1.0 / (exact.num_lists() * rows) as f64);
        Ok((share / allowed) as f32)
    }
}

/// The positions of the keys in some key tiles and single slots of a list. A slot is a place in the list's key order,
/// or the position itself where the mask has no key order.
pub(crate) fn listed_keys<'a>(
    mask: &'a KeyMask,
    list: usize,
    tiles: &'a [i32],
    columns: &'a [i32],
) -> impl Iterator<Item = usize> + 'a {
    let slots = tiles.iter().flat_map(|&tile| mask.tiles.keys(tile as usize));
    let slots = slots.chain(columns.iter().map(|&slot| slot as usize));
    let order = mask.key_order_of(list);
    slots.map(move |slot| order.map_or(slot, |order| order[slot] as usize))
}

/// Number of pairs of a query of the row and a kept key that is not after it.
fn pairs(mask: &KeyMask, list: usize, row: usize, tiles: &[i32], columns: &[i32]) -> usize {
    let head = mask.heads_of(list).start;
    let keys: Vec<usize> = listed_keys(mask, list, tiles, columns).collect();
    let seen = |slot: usize| {
        let position = mask.tiles.context() + mask.query_row(head, slot);
        keys.iter().filter(|&&key| key <= position).count()
    };
    mask.tiles.rows(row).map(seen).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The share of the pairs that a selector keeps in a call of so many queries and keys, drawn as a check draws it;
    /// `None` where it is dense there, so that a device would have nothing to choose.
    fn kept_share(text: &'static str, sizes: [usize; 2]) -> Option<f64> {
        let shape = CallShape::new(sizes, [if text == MIXED { PATTERNS.len() } else { 2 }, 2], 64);
        selection_of(shape, text)?;
        let mask = Case::draw(shape, text, false, &mut Random(7)).on_host(TAU).mask;
        let (lists, rows) = (mask.num_lists(), mask.tiles.num_query_tiles());
        let all = (0..lists).flat_map(|list| (0..rows).map(move |row| (list, row)));
        let kept: usize =
            all.map(|(list, row)| pairs(&mask, list, row, mask.row(list, row), mask.columns(list, row))).sum();
        let [queries, keys] = sizes;
        let causal: usize = (keys - queries + 1..=keys).sum();
        Some(kept as f64 / (lists * causal) as f64)
    }

    /// Whether a device has something to choose at the first of a selector's sizes, in both extents.
    fn chooses(checked: &Checked) -> bool {
        let firsts = match checked.sizes {
            Sizes::Usual => vec![SIZES[0], EMULATED_SIZES[0]],
            Sizes::Own(sizes) => sizes.to_vec(),
        };
        firsts.into_iter().all(|sizes| kept_share(checked.text, sizes).is_some_and(|share| share < 0.999))
    }

    #[test]
    fn each_selector_leaves_pairs_out_at_its_sizes() {
        // The published 1,000 columns and 6,096 diagonals are all of short rows.
        let keeps_all = |checked: &&Checked| checked.text == "minference:first_dense_layers=0";
        let idle = SELECTORS.iter().filter(|checked| !keeps_all(checked) && !chooses(checked));
        let idle: Vec<String> = idle.map(|checked| format!("{} at {:?}", checked.text, checked.sizes)).collect();
        assert!(idle.is_empty(), "these keep every pair, so a device would choose nothing: {idle:#?}");
    }

    /// What happened in silence when sizes were found by words of a selector's text, and the words had changed.
    #[test]
    fn a_selector_with_the_sizes_of_others_is_found() {
        let many = |checked: &&Checked| matches!(checked.sizes, Sizes::Own(sizes) if sizes[0] == [40, 1000]);
        // MInference's diagonals meet every tile of few keys, but leave pairs of a tile out.
        let planted = SELECTORS.iter().filter(many).filter(|checked| checked.text != MIXED);
        let planted: Vec<Checked> = planted.map(|checked| Checked::usual(checked.text)).collect();
        assert_eq!(planted.len(), 3);
        for checked in &planted {
            assert!(!chooses(checked), "{} needs no sizes of its own", checked.text);
        }
    }
}
