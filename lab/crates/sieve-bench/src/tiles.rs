//! Checks gradients of attention under random masks of tiles of 64 or 128 against their definition in f64.
use crate::case::scaled_normals;
use crate::device::{self, Device, family_name, separate, upload_mask};
use crate::error::Result;
use crate::extent::Extent;
use crate::report::{Outcome, Report, wrong};
use crate::shape::{queries_of, shape_of_call};
use crate::tolerance::Tolerance;
use half::bf16;
use sieve_kernels::{AttentionGradients, CudaTensor, DType, KernelPolicy, KeySource, Qkv, SumOrder, TileLists};
use sieve_select::{CallShape, KeyMask, Tiles};
use sieve_testing::Random;

/// Keys of a tile: a list of steps for each KV head and key tile. A step is one tile of queries of which a head sees
/// one of these keys ([`STEP_QUERIES`]).
const TILE_KEYS: usize = 128;
const STEP_QUERIES: usize = 64;
/// Thread blocks that go through the lists, one after the other, where sums have a fixed order.
const BLOCKS: usize = 5;

/// Widths of the cases on a GPU.
pub(crate) const WIDTHS: [usize; 3] = [64, 128, 96];

/// Adds a row for each order of sums.
pub(crate) fn check_wrappers(report: &mut Report, device: &dyn Device, extent: &Extent) -> Result<()> {
    let mut random = Random(extent.seed);
    let widths = extent.pick([32, 64, 128], WIDTHS);
    let longest = extent.pick(260, 900);
    for at in 0..extent.cases.min(24) {
        let kv_heads = random.between(1, 3);
        let heads = [kv_heads * random.one_of(&[1, 2, 3]), kv_heads];
        let drawn = random.between(1, longest);
        let tokens = random.one_of(&[drawn, drawn, 64, 129]);
        let shape = CallShape::new([tokens, tokens], heads, widths[at % widths.len()]);
        let case = Case::draw(shape, random.one_of(&[64, 128]), random.one_of(&[0.05, 0.4, 1.0]), &mut random);
        let path = family_name(device::family(device, &shape_of_call(shape), KeySource::Dense));
        for (suffix, order) in [("", SumOrder::Any), (", fixed order", SumOrder::Fixed)] {
            let row = format!("sparse_attention_backward{suffix}");
            let shares = random.one_of(&[None, Some(1), Some(3)]);
            report.add_wrapper(&row, path, &case.label, case.run(device, order, shares));
        }
    }
    Ok(())
}

struct Case {
    shape: CallShape,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    d_o: Vec<f32>,
    mask: KeyMask,
    label: String,
}

impl Case {
    /// Draws a call under a random causal mask of tiles of `block` tokens, each kept with the probability `density`.
    fn draw(shape: CallShape, block: usize, density: f64, random: &mut Random) -> Self {
        let CallShape { num_queries, num_keys, num_heads, num_kv_heads, head_dim } = shape;
        let tiles = Tiles::new(shape, block, block);
        let rows: Vec<[Vec<i32>; 2]> = (0..num_heads * tiles.num_query_tiles())
            .map(|at| {
                let last = at % tiles.num_query_tiles();
                let kept: Vec<i32> = (0..=last as i32).filter(|_| random.chance(density)).collect();
                [kept, Vec::new()]
            })
            .collect();
        let mask = KeyMask::new(shape, tiles, 1, rows);
        let (queries, keys) = (num_queries * num_heads * head_dim, num_keys * num_kv_heads * head_dim);
        Self {
            shape,
            q: scaled_normals(random, queries, 1.0),
            k: scaled_normals(random, keys, 1.0),
            v: random.bf16_normals(keys),
            d_o: random.bf16_normals(queries),
            mask,
            label: format!("{shape:?} tiles of {block}, density {density}"),
        }
    }

    /// Whether a head's tile of queries, which begin at `query`, lists the key.
    fn lists(&self, head: usize, query: usize, key: usize) -> bool {
        let tiles = &self.mask.tiles;
        self.mask.row(head, query / tiles.query_tile).contains(&((key / tiles.key_tile) as i32))
    }

    /// The list of steps of each share of a KV head's query heads and key tile, in the layout that
    /// `kernels/common/tile_steps.cuh` describes.
    fn tile_lists(&self, head_shares: usize) -> Vec<i32> {
        let CallShape { num_keys, num_heads, num_kv_heads, .. } = self.shape;
        let (num_shares, heads) = (num_kv_heads * head_shares, num_heads / (num_kv_heads * head_shares));
        let halves_of = |head: usize, query: usize, tile: usize| {
            let half = |half: usize| {
                let key = tile * TILE_KEYS + half * TILE_KEYS / 2;
                usize::from(key < num_keys && self.lists(head, query, key))
            };
            half(0) + 2 * half(1)
        };
        let (mut starts, mut steps) = (vec![0i32], Vec::new());
        for share in 0..num_shares {
            for tile in 0..num_keys.div_ceil(TILE_KEYS) {
                for step in (0..num_keys.div_ceil(STEP_QUERIES)).rev() {
                    for at in 0..heads {
                        let (head, query) = (share * heads + at, step * STEP_QUERIES);
                        let halves = halves_of(head, query, tile);
                        let turn = (0..tile).filter(|&before| halves_of(head, query, before) > 0).count();
                        if halves > 0 {
                            steps.extend([(step << 2 | halves) as i32, (at << 16 | turn) as i32]);
                        }
                    }
                }
                starts.push((steps.len() / 2) as i32);
            }
        }
        let order = 0..starts.len() as i32 - 1;
        let mut words = vec![BLOCKS as i32];
        words.extend(starts);
        words.extend(order.clone().chain(std::iter::repeat(-1)).take(order.len().next_multiple_of(BLOCKS)));
        words.resize(words.len().next_multiple_of(2), 0);
        words.extend(steps);
        words
    }

    /// Compares dq, dk and dv of the launch wrapper with the expected ones.
    fn run(&self, device: &dyn Device, sums: SumOrder, blocks_per_tile: Option<usize>) -> Outcome {
        let shape = shape_of_call(self.shape);
        let [exact, plain] = [false, true].map(|rounds| self.expected(rounds));
        let mask = match upload_mask(device, &self.mask) {
            Ok(mask) => mask,
            Err(error) => return wrong(error.to_string()),
        };
        // Keys that no query sees become NaN: they must change no result.
        let [mut k, mut v] = [self.k.clone(), self.v.clone()];
        for at in self.unseen() {
            k[at * shape.head_dim..][..shape.head_dim].fill(f32::NAN);
            v[at * shape.head_dim..][..shape.head_dim].fill(f32::NAN);
        }
        let given = separate(device, [&self.q, &k, &v], shape);
        let q = given.q.tensor().clone();
        let policy = KernelPolicy { sums, blocks_per_tile, ..q.policy() };
        let qkv = Qkv::separate(&q.under(policy), given.k.tensor(), given.v.tensor());
        let d_o = device.float(&self.d_o, &queries_of(shape), DType::BF16);
        let group = self.shape.num_heads / self.shape.num_kv_heads;
        // All shares that there are, of one head each, or one.
        let head_shares = if sums == SumOrder::Fixed { group } else { 1 };
        let lists = self.tile_lists(head_shares);
        let lists = device.int(&lists, &[lists.len()]);
        let result = qkv.sparse_attention_forward(&mask, self.shape.softmax_scale())?;
        let nan = |like: &CudaTensor| device.float(&vec![f32::NAN; like.num_elements()], like.shape(), DType::BF16);
        let grads = Qkv::separate(&nan(qkv.q.tensor()), &nan(qkv.k.tensor()), &nan(qkv.v.tensor()));
        AttentionGradients {
            qkv: &qkv,
            result: &result,
            d_o: &d_o,
            grads: &grads,
            softmax_scale: self.shape.softmax_scale(),
        }
        .sparse_attention_backward(&mask, TileLists { words: &lists, head_shares })?;
        let got = [&grads.q, &grads.k, &grads.v].map(|heads| device.floats(heads.tensor()));
        let tolerance = Tolerance { norm: self.shape.num_queries >= 64, ..Tolerance::new(2.0, 1e-3, 1.0 / 128.0) };
        let mut worst = 0.0f32;
        for ((name, got), (plain, exact)) in ["dq", "dk", "dv"].into_iter().zip(got).zip(plain.iter().zip(&exact)) {
            worst = worst.max(tolerance.judge(name, &got?, plain, exact)?);
        }
        Ok(worst)
    }

    /// Indices into k, by key and KV head, of the keys that no query sees.
    fn unseen(&self) -> Vec<usize> {
        let CallShape { num_queries, num_keys, num_heads, num_kv_heads, .. } = self.shape;
        let group = num_heads / num_kv_heads;
        let sees = |at: usize| {
            let (key, kv_head) = (at / num_kv_heads, at % num_kv_heads);
            let mut heads = kv_head * group..(kv_head + 1) * group;
            // Kernels read tiles whole: a key counts as seen where its tile is listed.
            heads.any(|head| (0..num_queries).step_by(STEP_QUERIES).any(|query| self.lists(head, query, key)))
        };
        (0..num_keys * num_kv_heads).filter(|&at| !sees(at)).collect()
    }

    /// dq, dk and dv by their definition; `rounds`: with o, P and dS rounded to bf16, as a plain computation has them.
    fn expected(&self, rounds: bool) -> [Vec<f32>; 3] {
        let CallShape { num_queries, num_heads, num_kv_heads, head_dim: d, .. } = self.shape;
        let round = |x: f64| if rounds { f64::from(bf16::from_f64(x).to_f32()) } else { x };
        let scale = f64::from(self.shape.softmax_scale());
        let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>();
        let [mut dq, mut dk, mut dv] = [&self.q, &self.k, &self.v].map(|x| vec![0.0f64; x.len()]);
        for head in 0..num_heads {
            for query in 0..num_queries {
                let at = (query * num_heads + head) * d;
                let (q, d_o) = (&self.q[at..][..d], &self.d_o[at..][..d]);
                let keys: Vec<usize> = (0..=query).filter(|&key| self.lists(head, query, key)).collect();
                let place = |key: usize| (key * num_kv_heads + head / (num_heads / num_kv_heads)) * d;
                let logits: Vec<f64> = keys.iter().map(|&key| scale * dot(q, &self.k[place(key)..][..d])).collect();
                let largest = logits.iter().fold(f64::NEG_INFINITY, |m, &x| m.max(x));
                let sum: f64 = logits.iter().map(|x| (x - largest).exp()).sum();
                let p: Vec<f64> = logits.iter().map(|x| (x - largest).exp() / sum).collect();
                let dp: Vec<f64> = keys.iter().map(|&key| dot(d_o, &self.v[place(key)..][..d])).collect();
                let o = |c: usize| {
                    let terms = keys.iter().zip(&p).map(|(&key, p)| round(*p) * f64::from(self.v[place(key) + c]));
                    round(terms.sum())
                };
                let row_sum: f64 = (0..d).map(|c| o(c) * f64::from(d_o[c])).sum();
                for ((&key, &p), &dp) in keys.iter().zip(&p).zip(&dp) {
                    let (weight, ds) = (round(p), round(round(p) * (dp - row_sum)));
                    for c in 0..d {
                        dq[at + c] += scale * ds * f64::from(self.k[place(key) + c]);
                        dk[place(key) + c] += scale * ds * f64::from(q[c]);
                        dv[place(key) + c] += weight * f64::from(d_o[c]);
                    }
                }
            }
        }
        [dq, dk, dv].map(|x| x.into_iter().map(|x| round(x) as f32).collect())
    }
}
