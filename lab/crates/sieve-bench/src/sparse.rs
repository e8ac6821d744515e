//! Checks attention under selectors' masks, and under random masks that use every feature of [`KeyMask`], against its
//! definition.
use crate::case::scaled_normals;
use crate::device::{self, Device, family_name, separate, upload_mask};
use crate::error::Result;
use crate::extent::Extent;
use crate::report::{Outcome, Report, wrong};
use crate::select::{listed_keys, with_context};
use crate::shape::shape_of_call;
use crate::tiles;
use crate::tolerance::Tolerance;
use rayon::prelude::*;
use sieve_cpu::reference::Rounding;
use sieve_kernels::{DeviceReport, KernelFamily, KeySource, NeededKernels, SparseKeyReads};
use sieve_select::oracle::{expanded_row, rounded_row};
use sieve_select::{Call, CallShape, KeyMask, Selector, Tiles, TokenWindow};
use sieve_testing::Random;
use std::ops::Range;

/// A selector of every kind of list: tiles alone, small tiles, tiles that go in pairs, aligned tiles, single keys,
/// permuted keys, permuted keys and queries, a window, short key tiles beside long query tiles, all keys.
const SELECTORS: &[&str] = &[
    "meanpool:block=32,tau=0.6",
    "bfla:block=32,group=8,tile=8,local_tokens=16,keep_mass=0.5",
    "bfla:block=128,group=32,tile=64,local_tokens=64,keep_mass=0.5",
    "xattention:block=32,stride=8,tau=0.6,last_dense_rows=37",
    "vertical_slash:vertical=40,slash=70",
    "pbs:block=32,segment=128,tau=0.6",
    "pbs:block=32,segment=128,tau=0.6,permute=both,perm=query",
    "streamingllm:n_init=4,n_local=70",
    "infinitehip:budget=64,prefill_dense_below=0,sink=16,window=64",
    "streamingllm:min_prefill_tokens=100000",
];

/// Queries and keys of the calls of each selector: whole prompts, and a chunk that begins inside a tile.
const SIZES: &[[usize; 2]] = &[[300, 300], [150, 391], [1, 70]];

/// Keys of one TMA copy of a dense row.
const KEYS_OF_A_BOX: usize = 128;

/// Widths of the cases on a GPU.
const WIDTHS: [usize; 3] = [64, 128, 96];

struct Case {
    shape: CallShape,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    mask: KeyMask,
    label: String,
}

/// Exact results, and the results of a plain bf16 computation.
struct Expected {
    o: [Vec<f32>; 2],
    lse: [Vec<f32>; 2],
}

/// Checks the wrapper with each selector's mask and with random masks.
pub(crate) fn check_wrappers(report: &mut Report, device: &dyn Device, extent: &Extent) -> Result<()> {
    let mut random = Random(extent.seed);
    let widths = extent.pick([32, 64, 128], WIDTHS);
    let mut draws = Vec::new();
    for &name in SELECTORS {
        let sizes = extent.pick(&SIZES[1..2], SIZES);
        draws.extend(sizes.iter().map(|&size| (Some(name), size)));
    }
    for case in 0..extent.cases {
        // Every third mask has longer rows, so that the kernel reads several stages of tiles.
        let longest = match case % 3 {
            0 => extent.pick(400, 1500),
            _ => 400,
        };
        let keys = random.between(1, longest);
        draws.push((None, [random.between(1, keys + 1), keys]));
    }
    for (at, (name, sizes)) in draws.into_iter().enumerate() {
        let kv_heads = random.between(1, 3);
        let heads = [kv_heads * random.one_of(&[1, 2, 3]), kv_heads];
        let shape = CallShape::new(sizes, heads, widths[at % widths.len()]);
        let case = Case::draw(shape, name, extent.magnitude_of(at), &mut random);
        let kind = name.map_or("random", |name| name.split(':').next().unwrap_or(name));
        let row = format!("sparse_attention, {kind}");
        let path = family_name(case.family(device));
        report.add_wrapper(&row, path, &case.label, case.run(device));
    }
    tiles::check_wrappers(report, device, extent)
}

/// Every specialisation that checks and benchmarks of attention under selectors' masks launch.
pub(crate) fn sparse_kernels(gpu: &DeviceReport) -> NeededKernels {
    let arch = gpu.arch();
    // MOMO's blocks among the checked selectors, and the shipped size.
    let probed_blocks = [2, 8, 16, 64];
    let mut list = NeededKernels::sparse(&arch, &WIDTHS, &probed_blocks);
    list.extend(NeededKernels::sparse_gradients(&arch, &tiles::WIDTHS));
    list
}

impl Case {
    /// Draws a call under the mask of the selector `name`; `None`: under a random mask.
    fn draw(shape: CallShape, name: Option<&str>, magnitude: f32, random: &mut Random) -> Self {
        let per_token = shape.head_dim * shape.num_kv_heads;
        let q = scaled_normals(random, shape.num_queries * shape.num_heads * shape.head_dim, magnitude);
        let k = scaled_normals(random, shape.num_keys * per_token, magnitude);
        let v = random.bf16_normals(shape.num_keys * per_token);
        let call = Call::new(shape, &q, &k, &v).expect("sizes fit");
        let mask = match name {
            None => random_mask(shape, random),
            Some(name) => {
                // Selectors are dense below their `min_prefill_tokens`.
                let no_minimum = if name.contains("min_prefill") { "" } else { ",min_prefill_tokens=0" };
                let selector = Selector::parse(&format!("{name}{no_minimum}"));
                let selector = selector.expect("the names above are right");
                selector.select(&call).expect("a prefill method").mask
            }
        };
        let label = format!(
            "{} queries={},keys={},heads={}/{},head_dim={} tiles {}x{}, {} heads a list, q, k x {magnitude}",
            name.unwrap_or("random"),
            shape.num_queries,
            shape.num_keys,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            mask.tiles.query_tile,
            mask.tiles.key_tile,
            mask.heads_per_list,
        );
        Self { shape, q, k, v, mask, label }
    }

    fn family(&self, device: &dyn Device) -> KernelFamily {
        device::family(device, &shape_of_call(self.shape), KeySource::Dense)
    }

    /// Compares o and lse of the launch wrapper with the expected ones, with NaN in all keys that the kernel must not
    /// read.
    fn run(&self, device: &dyn Device) -> Outcome {
        let head_dim = self.shape.head_dim;
        let (expected, seen) = self.expected();
        // Keys that no query sees become NaN below: they must change no result.
        let q = with_context(&self.q, self.shape);
        let [mut k, mut v] = [self.k.clone(), self.v.clone()];
        let mask = match upload_mask(device, &self.mask) {
            Ok(mask) => mask,
            Err(error) => return wrong(error.to_string()),
        };
        let reads_tiles =
            self.family(device) == KernelFamily::Hopper && SparseKeyReads::of(&mask) == SparseKeyReads::Tiles;
        for at in (0..seen.len()).filter(|&at| self.is_unread(at, &seen, reads_tiles)) {
            k[at * head_dim..][..head_dim].fill(f32::NAN);
            v[at * head_dim..][..head_dim].fill(f32::NAN);
        }
        let shape = shape_of_call(self.shape);
        let qkv = separate(device, [&q, &k, &v], shape);
        device.poison(shape);
        let scale = self.shape.softmax_scale();
        let result = qkv.sparse_attention_forward(&mask, scale)?;
        let (o, lse) = (device.floats(&result.o)?, device.floats(&result.lse)?);
        let [exact_o, plain_o] = &expected.o;
        let [exact_lse, plain_lse] = &expected.lse;
        let of_o = Tolerance { norm: self.shape.num_queries >= 64, ..Tolerance::new(2.0, Tolerance::FLOOR, 1e-4) };
        let o = of_o.judge("o", &o, plain_o, exact_o)?;
        let lse = Tolerance::new(2.0, 1e-4, 1e-4).judge("lse", &lse, plain_lse, exact_lse)?;
        Ok(o.max(lse))
    }

    /// Whether the kernel must not read key and KV head number `at`. With permuted queries, and where it reads whole
    /// tiles, it may read listed keys that no query sees.
    fn is_unread(&self, at: usize, seen: &[bool], reads_tiles: bool) -> bool {
        let (key, kv_head) = (at / self.shape.num_kv_heads, at % self.shape.num_kv_heads);
        let mask = &self.mask;
        let list_names = |list: usize| {
            let (row, columns) = (|i| mask.row(list, i), |i| mask.columns(list, i));
            (0..mask.tiles.num_query_tiles())
                .any(|i| listed_keys(mask, list, row(i), columns(i)).any(|listed| listed == key))
        };
        let mut lists =
            (0..mask.num_lists()).filter(|&list| mask.heads_of(list).start / self.shape.group_size() == kv_head);
        let under_dense_rows =
            |rows: &Range<usize>| key < (self.shape.context() + rows.end).next_multiple_of(KEYS_OF_A_BOX);
        let may_read = if reads_tiles {
            lists.any(list_names) || mask.dense_rows.iter().any(under_dense_rows)
        } else {
            !mask.query_order().is_empty() && lists.any(list_names)
        };
        !seen[at] && !may_read
    }

    /// Expected results, and for each key and KV head whether some query sees it.
    fn expected(&self) -> (Expected, Vec<bool>) {
        let call = Call::new(self.shape, &self.q, &self.k, &self.v).expect("sizes fit");
        let CallShape { num_queries, num_keys, num_heads, num_kv_heads, head_dim: d } = self.shape;
        let rows: Vec<_> = (0..num_heads * num_queries)
            .into_par_iter()
            .map(|at| {
                let (head, row) = (at / num_queries, at % num_queries);
                let shown = expanded_row(&self.mask, head, row);
                let rows =
                    [Rounding::None, Rounding::Bf16].map(|rounding| rounded_row(&call, head, row, &shown, rounding));
                (rows, shown)
            })
            .collect();
        let zeros = |width: usize| vec![0.0; num_queries * num_heads * width];
        let mut all = Expected { o: [zeros(d), zeros(d)], lse: [zeros(1), zeros(1)] };
        let mut seen = vec![false; num_keys * num_kv_heads];
        for (at, (rows, shown)) in rows.iter().enumerate() {
            let (head, row) = (at / num_queries, at % num_queries);
            let to = call.query_at(head, row);
            for (which, (o, lse)) in rows.iter().enumerate() {
                for (to, &x) in all.o[which][to..to + d].iter_mut().zip(o) {
                    *to = x as f32;
                }
                all.lse[which][at] = *lse as f32;
            }
            for (key, _) in shown.iter().enumerate().filter(|(_, shown)| **shown) {
                seen[key * num_kv_heads + call.kv_head(head)] = true;
            }
        }
        (all, seen)
    }
}

/// A random mask: tiles of any size, rows without keys, single keys, permuted keys and queries, windows and dense rows;
/// or tiles of a multiple of 64 keys, which the Hopper kernel reads whole.
fn random_mask(shape: CallShape, random: &mut Random) -> KeyMask {
    let whole_tiles = shape.num_keys > 400 || random.chance(0.3);
    let (query_tiles, key_tiles): (&[usize], &[usize]) = if whole_tiles {
        (&[64, 64, 64, 128, 128, 100, 192], &[64, 128, 192])
    } else {
        (&[1, 16, 64, 100, 128, 130, 192], &[1, 16, 48, 64, 128, 192])
    };
    let (query_tile, key_tile) = (random.one_of(query_tiles), random.one_of(key_tiles));
    let tiles = Tiles {
        query_offset: random.one_of(&[0, shape.context() % query_tile]),
        ..Tiles::new(shape, query_tile, key_tile)
    };
    let heads_per_list = random.one_of(&[1, shape.group_size()]);
    let num_lists = shape.num_heads / heads_per_list;
    let has_singles = !whole_tiles && random.chance(0.5);
    let density = random.one_of(&[0.02, 0.3, 0.8]);
    let mut row = |_| -> [Vec<i32>; 2] {
        let kept: Vec<i32> = (0..tiles.num_key_tiles() as i32).filter(|_| random.chance(density)).collect();
        let singles = (0..shape.num_keys as i32).filter(|_| has_singles && random.chance(0.1));
        let singles = singles.collect();
        [kept, singles]
    };
    let rows: Vec<_> = (0..num_lists * tiles.num_query_tiles()).map(&mut row).collect();
    let mut mask = KeyMask::new(shape, tiles, heads_per_list, rows);
    if !whole_tiles && random.chance(0.4) {
        let heads = random.one_of(&[shape.num_kv_heads, shape.num_heads]);
        mask.set_key_order(&orders(heads, shape.num_keys, random));
    }
    if random.chance(0.4) {
        mask.set_query_order(&orders(shape.num_heads, shape.num_queries, random));
    }
    if random.chance(0.3) {
        let window = |random: &mut Random| TokenWindow {
            init: random.between(0, 20) as i32,
            local: random.one_of(&[1, 40, 100, i32::MAX]),
        };
        let windows: Vec<TokenWindow> = (0..num_lists).map(|_| window(random)).collect();
        mask.set_windows(&windows);
    }
    if random.chance(0.3) {
        let first = random.below(shape.num_queries);
        mask.add_dense_rows(first..first + random.between(1, 140));
        mask.add_dense_rows(0..1);
    }
    mask
}

/// A random permutation of `len` tokens for each head.
fn orders(heads: usize, len: usize, random: &mut Random) -> Vec<i32> {
    let mut all = Vec::with_capacity(heads * len);
    for _ in 0..heads {
        let mut order: Vec<i32> = (0..len as i32).collect();
        for at in (1..len).rev() {
            order.swap(at, random.below(at + 1));
        }
        all.extend(order);
    }
    all
}
