//! A query's output has the same bits in every tile, among any others, and when it is decoded alone.

use proptest::prelude::*;

use super::decode::{DecodeBias, DecodeKeys, DecodeShape, attention_decode};
use super::sinks::join_sinks;
use super::{ChosenBlocks, Documents, Mask, ScaledShape, attention_forward};
use crate::expire::dma_select;
use crate::simd::tests::on_every_arch;
use sieve_core::FarKeys;
use sieve_testing::{Random, threads};

/// One text, alone in its row, and everything that a query of it may read.
struct Text {
    shape: ScaledShape,
    qkv: Vec<f32>,
    expire: Vec<i32>,
    delta: Vec<f32>,
    /// `[seq_len, num_kv_heads, COUNT]`.
    chosen: Vec<i32>,
    sinks: Vec<f32>,
    window: usize,
    far: FarKeys,
    block_size: usize,
}

/// Blocks that a query chooses.
const COUNT: usize = 3;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Causal,
    Window,
    Far,
    Expire,
    Chosen,
}

const KINDS: [Kind; 5] = [Kind::Causal, Kind::Window, Kind::Far, Kind::Expire, Kind::Chosen];

impl Text {
    fn new(random: &mut Random) -> Self {
        let (kv_heads, group) = (random.between(1, 4), random.one_of(&[1, 2, 3, 5, 9]));
        let head_dim = random.one_of(&[3, 8, 16, 24, 32, 40, 64, 72, 128]);
        let n = random.one_of(&[1, 7, 40, 97, 130, 300]);
        let d_v = if random.chance(0.3) { random.between(1, head_dim + 1) } else { head_dim };
        let shape = ScaledShape::new([1, n], [kv_heads * group, kv_heads], head_dim).with_value_width(d_v);
        // Large queries make some probabilities tiny.
        let size = random.one_of(&[1.0, 6.0]);
        let z: Vec<f32> = (0..kv_heads * n).map(|_| random.below(40) as f32 / 4.0 - 5.0).collect();
        let (window, block_size) = (random.between(1, n + 2), random.one_of(&[4, 16, 112]));
        let (start, end) = (vec![0; n], vec![n as i32; n]);
        let mut expire = vec![0; z.len()];
        dma_select(&z, Documents::new(&start, &end), 1, kv_heads, n, window, &mut expire);
        let chosen = (0..n * kv_heads).flat_map(|list| {
            let own = list / kv_heads / block_size;
            let mut blocks: Vec<i32> = (0..COUNT).map(|_| random.below(own + 1) as i32).chain([own as i32]).collect();
            blocks.sort_unstable();
            blocks.dedup();
            blocks.resize(COUNT + 1, -1);
            blocks
        });
        let chosen = chosen.collect();
        let far = FarKeys {
            sink_tokens: random.below(5),
            distances: [window, window + random.below(n + 2)],
            num_bands: random.between(1, 4),
            first_band: random.below(3),
        };
        Self {
            shape,
            qkv: random.vector(n * shape.token_len()).iter().map(|x| size * x).collect(),
            expire,
            delta: z,
            chosen,
            sinks: random.vector(kv_heads * group),
            window,
            far,
            block_size,
        }
    }

    fn mask(&self, kind: Kind) -> Mask<'_> {
        match kind {
            Kind::Causal => Mask::Causal,
            Kind::Window => Mask::Window(self.window),
            Kind::Far => Mask::Far(self.window, self.far),
            Kind::Expire => Mask::Expire { expire: &self.expire, delta: &self.delta },
            Kind::Chosen => {
                Mask::Chosen(ChosenBlocks { indices: &self.chosen, count: COUNT + 1, block_size: self.block_size })
            }
        }
    }

    /// Output of all tokens, `[seq_len, num_heads, head_dim_v]`, with or without sinks.
    fn whole(&self, kind: Kind, has_sinks: bool) -> Vec<f32> {
        let (n, heads) = (self.shape.seq_len, self.shape.num_heads);
        let (start, end) = (vec![0; n], vec![n as i32; n]);
        let (mut o, mut lse) = (vec![f32::NAN; n * heads * self.shape.head_dim_v], vec![f32::NAN; n * heads]);
        attention_forward(self.shape, &self.qkv, Documents::new(&start, &end), self.mask(kind), &mut o, &mut lse);
        if has_sinks {
            join_sinks(n, &self.sinks, &mut o, &mut lse);
        }
        o
    }

    /// Whether a query sees a key of a KV head.
    fn sees(&self, kind: Kind, kv_head: usize, [query, key]: [usize; 2]) -> bool {
        let list = query * self.shape.num_kv_heads + kv_head;
        let is_seen = match kind {
            Kind::Causal => true,
            Kind::Window => key + self.window > query,
            Kind::Far => {
                let is_far = self.far.band(kv_head).contains(&(query.saturating_sub(key)));
                key + self.window > query || key < self.far.sink_tokens || is_far
            }
            Kind::Expire => self.expire[kv_head * self.shape.seq_len + key] > query as i32,
            Kind::Chosen => {
                let blocks = &self.chosen[list * (COUNT + 1)..][..COUNT + 1];
                blocks.contains(&((key / self.block_size) as i32))
            }
        };
        key <= query && is_seen
    }

    /// Output of one token of each KV head, decoded from a cache whose slots hold the keys in random order.
    fn decoded(&self, kind: Kind, has_sinks: bool, query: usize, random: &mut Random) -> Vec<f32> {
        let ScaledShape { shape, softmax_scale } = self.shape;
        let (d, d_v, group_size) = (shape.head_dim, shape.head_dim_v, shape.group_size());
        let token = |at: usize| &self.qkv[at * shape.token_len()..][..shape.token_len()];
        let mut o = Vec::new();
        for kv_head in 0..shape.num_kv_heads {
            let mut keys: Vec<usize> = (0..=query).filter(|&key| self.sees(kind, kv_head, [query, key])).collect();
            let in_order = random.chance(0.5);
            for at in (1..keys.len()).rev().filter(|_| !in_order) {
                keys.swap(at, random.below(at + 1));
            }
            let k_at = (shape.num_heads + kv_head) * d;
            let v_at = (shape.num_heads + shape.num_kv_heads) * d + kv_head * d_v;
            let k: Vec<f32> = keys.iter().flat_map(|&key| &token(key)[k_at..k_at + d]).copied().collect();
            let v: Vec<f32> = keys.iter().flat_map(|&key| &token(key)[v_at..v_at + d_v]).copied().collect();
            let delta: Vec<f32> = keys.iter().map(|&key| self.delta[kv_head * shape.seq_len + key]).collect();
            let positions: Vec<i32> = keys.iter().map(|&key| key as i32).collect();
            let heads = kv_head * group_size..(kv_head + 1) * group_size;
            let sizes = DecodeShape {
                group_size,
                head_dim: d,
                head_dim_v: d_v,
                capacity: keys.len(),
                kv_len: keys.len(),
                softmax_scale,
            };
            let bias = DecodeBias {
                delta: (kind == Kind::Expire).then_some(&delta[..]),
                sinks: has_sinks.then_some(&self.sinks[heads.clone()]),
            };
            let keys = DecodeKeys { k: &k, v: &v, positions: (!in_order).then_some(&positions[..]) };
            let mut of_group = vec![f32::NAN; group_size * d_v];
            attention_decode(sizes, &token(query)[heads.start * d..heads.end * d], keys, bias, &mut of_group);
            o.extend(of_group);
        }
        o
    }

    /// Output of this text behind another one in a row, with other tokens after it.
    fn among_documents(&self, kind: Kind, before: usize, after: usize, random: &mut Random) -> Vec<f32> {
        let (n, heads) = (self.shape.seq_len, self.shape.num_kv_heads);
        let all = before + n + after;
        let mut shape = self.shape;
        shape.shape.seq_len = all;
        let token_len = shape.token_len();
        let [left, right] = [before, after].map(|tokens| random.vector(tokens * token_len));
        let qkv = [&left[..], &self.qkv, &right[..]].concat();
        let mut start = vec![before as i32; all];
        let mut end = vec![(before + n) as i32; all];
        start[..before].fill(0);
        end[..before].fill(before as i32);
        start[before + n..].fill((before + n) as i32);
        end[before + n..].fill(all as i32);
        let around = |own: &[i32], moved: i32| -> Vec<i32> {
            let of_head = |own: &[i32]| -> Vec<i32> {
                let own = own.iter().map(|at| at + moved);
                (1..=before as i32).chain(own).chain((0..after as i32).map(|at| at + 1 + (before + n) as i32)).collect()
            };
            own.chunks(n).flat_map(of_head).collect()
        };
        let expire = around(&self.expire, before as i32);
        let pad = |count: usize| vec![0.5; count];
        let delta: Vec<f32> =
            self.delta.chunks(n).flat_map(|own| [&pad(before)[..], own, &pad(after)[..]].concat()).collect();
        let own_blocks = |tokens: usize| -> Vec<i32> {
            let of_token = |at: usize| [(at / self.block_size) as i32, -1, -1, -1].repeat(heads);
            (0..tokens).flat_map(of_token).collect()
        };
        let chosen = [own_blocks(before), self.chosen.clone(), own_blocks(after)].concat();
        let mask = match kind {
            Kind::Expire => Mask::Expire { expire: &expire, delta: &delta },
            Kind::Chosen => {
                Mask::Chosen(ChosenBlocks { indices: &chosen, count: COUNT + 1, block_size: self.block_size })
            }
            _ => self.mask(kind),
        };
        let width = shape.num_heads * shape.head_dim_v;
        let (mut o, mut lse) = (vec![f32::NAN; all * width], vec![f32::NAN; all * shape.num_heads]);
        attention_forward(shape, &qkv, Documents::new(&start, &end), mask, &mut o, &mut lse);
        o[before * width..(before + n) * width].to_vec()
    }
}

fn check(seed: u64) {
    let mut random = Random(seed);
    let text = Text::new(&mut random);
    let width = text.shape.num_heads * text.shape.head_dim_v;
    for kind in KINDS {
        for has_sinks in [false, true] {
            let whole = text.whole(kind, has_sinks);
            for _ in 0..8 {
                let query = random.below(text.shape.seq_len);
                let alone = text.decoded(kind, has_sinks, query, &mut random);
                let what = format!("seed {seed}, {kind:?}, sinks: {has_sinks}, query {query} of {:?}", text.shape);
                assert_eq!(alone, whole[query * width..][..width], "{what}");
            }
        }
        let (before, after) = (random.below(120), random.below(60));
        let others = text.among_documents(kind, before, after, &mut random);
        assert_eq!(others, text.whole(kind, false), "seed {seed}, {kind:?}: {before} tokens before the text");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn a_query_has_the_same_bits_in_every_tile_and_when_it_is_decoded_alone(seed in any::<u64>()) {
        threads(1).install(|| check(seed));
    }
}

#[test]
fn a_query_has_the_same_bits_on_every_instruction_set() {
    on_every_arch(|| (0..12).for_each(check));
}

#[test]
fn logits_beyond_every_power_count_as_the_largest_and_infinite_ones_become_nan() {
    on_every_arch(|| {
        // The last query's logits are size, -size^2 and size^2; from 2^21 on they count as 2^21.
        for (size, last) in [(1e4, 4.0), (1e6, 4.0), (1e9, 3.0), (f32::INFINITY, f32::NAN)] {
            let shape = ScaledShape::new([1, 3], [1, 1], 1);
            // Query, key and value of each token.
            let qkv = [1.0, 1.0, 2.0, 1.0, -size, 3.0, size, size, 4.0];
            let (mut o, mut lse) = ([0.0; 3], [0.0; 3]);
            let documents = Documents::new(&[0; 3], &[3; 3]);
            attention_forward(shape, &qkv, documents, Mask::Causal, &mut o, &mut lse);
            assert_eq!(o[..2], [2.0, 2.0], "{size}");
            assert!((o[2] - last).abs() < 1e-5 || (o[2].is_nan() && last.is_nan()), "{size}: {o:?}");
        }
    });
}
