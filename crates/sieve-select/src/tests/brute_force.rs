//! Which blocks and keys methods keep, against the definition: plain loops in f64 over each pair of a query tile and
//! a block, which share no code with the methods.

use super::select;
use crate::decode::dam::{DamCapture, DamConfig};
use crate::oracle::expanded_row;
use crate::prefill::minference::{Pattern, PatternFile};
use crate::test_data::TestCall;
use crate::{DecodeSession, Selector, SparseMask};
use sieve_testing::Random;

/// What a definition reads of a call.
pub(super) struct Naive<'a> {
    data: &'a TestCall,
    context: usize,
    block: usize,
}

impl<'a> Naive<'a> {
    pub(super) fn new(data: &'a TestCall, block: usize) -> Self {
        Self {
            data,
            context: data.shape.num_keys - data.shape.num_queries,
            block,
        }
    }

    fn query(&self, head: usize, row: usize) -> Vec<f64> {
        let d = self.data.shape.head_dim;
        let at = (row * self.data.shape.num_heads + head) * d;
        self.data.q[at..at + d].iter().map(|&x| x.into()).collect()
    }

    fn key(&self, kv_head: usize, key: usize) -> Vec<f64> {
        let d = self.data.shape.head_dim;
        let at = (key * self.data.shape.num_kv_heads + kv_head) * d;
        self.data.k[at..at + d].iter().map(|&x| x.into()).collect()
    }

    fn kv_head(&self, head: usize) -> usize {
        head / (self.data.shape.num_heads / self.data.shape.num_kv_heads)
    }

    fn scale(&self) -> f64 {
        1.0 / (self.data.shape.head_dim as f64).sqrt()
    }

    /// Elements of each block of a sequence of `len`; the last may be short.
    fn blocks(&self, len: usize) -> Vec<Vec<usize>> {
        let all: Vec<usize> = (0..len).collect();
        all.chunks(self.block).map(<[usize]>::to_vec).collect()
    }

    fn query_tiles(&self) -> Vec<Vec<usize>> {
        self.blocks(self.data.shape.num_queries)
    }

    fn key_blocks(&self) -> Vec<Vec<usize>> {
        self.blocks(self.data.shape.num_keys)
    }

    /// Position of the last row of a query tile.
    fn last(&self, rows: &[usize]) -> usize {
        self.context + rows[rows.len() - 1]
    }

    /// Blocks that hold the position of a row of the tile.
    fn diagonal(&self, rows: &[usize]) -> Vec<usize> {
        rows.iter().map(|row| (self.context + row) / self.block).collect()
    }

    /// Softmax of one row over the keys up to its position.
    pub(super) fn probabilities(&self, head: usize, row: usize) -> Vec<f64> {
        let query = self.query(head, row);
        let logit = |key| self.scale() * product(&query, &self.key(self.kv_head(head), key));
        softmax(&(0..=self.context + row).map(logit).collect::<Vec<f64>>())
    }
}

fn product(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn mean(tokens: &[Vec<f64>]) -> Vec<f64> {
    (0..tokens[0].len())
        .map(|c| tokens.iter().map(|x| x[c]).sum::<f64>() / tokens.len() as f64)
        .collect()
}

fn variance(tokens: &[Vec<f64>]) -> Vec<f64> {
    let mean = mean(tokens);
    (0..mean.len())
        .map(|c| tokens.iter().map(|x| (x[c] - mean[c]).powi(2)).sum::<f64>() / tokens.len() as f64)
        .collect()
}

fn softmax(logits: &[f64]) -> Vec<f64> {
    let max = logits.iter().copied().fold(f64::MIN, f64::max);
    let sum: f64 = logits.iter().map(|x| (x - max).exp()).sum();
    logits.iter().map(|x| (x - max).exp() / sum).collect()
}

/// Indices by falling score; of equal scores the lower first.
pub(super) fn best_first(scores: &[f64]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]).then(a.cmp(&b)));
    order
}

/// The fewest of the largest shares that hold `tau` of the whole.
fn by_mass(shares: &[f64], tau: f64) -> Vec<usize> {
    let mut sum = 0.0;
    let mut kept = Vec::new();
    for j in best_first(shares) {
        kept.push(j);
        sum += shares[j];
        if sum >= tau * shares.iter().sum::<f64>() {
            break;
        }
    }
    kept
}

fn row_of(mut kept: Vec<usize>) -> Vec<i32> {
    kept.sort_unstable();
    kept.dedup();
    kept.into_iter().map(|j| j as i32).collect()
}

/// Compares all lists; some row must leave a block out, and some must keep one that is neither block 0 nor near.
fn assert_rows(text: &str, mask: &SparseMask, expected: &[Vec<Vec<i32>>]) {
    assert_eq!(mask.num_lists(), expected.len(), "{text}");
    let (mut left_out, mut chosen) = (0, 0);
    for (list, rows) in expected.iter().enumerate() {
        assert_eq!(mask.tiles.num_query_tiles(), rows.len(), "{text}");
        for (i, row) in rows.iter().enumerate() {
            assert_eq!(mask.row(list, i), row, "{text}: list {list}, tile {i}");
            let admissible = mask.tiles.admissible(i) as i32;
            left_out += admissible - row.len() as i32;
            chosen += row.iter().filter(|&&j| j > 0 && j + 3 < admissible).count();
        }
    }
    assert!(left_out > 5 && chosen > 5, "{text}: {left_out}, {chosen}");
}

/// Whole prompts and a chunk whose tiles straddle blocks, with a short last block.
fn calls() -> [TestCall; 3] {
    let mut random = Random(160);
    [
        TestCall::random(&mut random, 250, 250, [4, 2], 16),
        TestCall::random(&mut random, 150, 217, [4, 2], 8),
        TestCall::structured(&mut random, 300, [4, 2], 16),
    ]
}

/// Scores of the admissible blocks of each query tile: products of the means of real rows and real keys, scaled.
fn pooled(naive: &Naive<'_>, head: usize) -> Vec<Vec<f64>> {
    let of_keys = |keys: &Vec<usize>| {
        let keys: Vec<Vec<f64>> = keys.iter().map(|&key| naive.key(naive.kv_head(head), key)).collect();
        mean(&keys)
    };
    let keys: Vec<Vec<f64>> = naive.key_blocks().iter().map(of_keys).collect();
    let of_rows = |rows: &Vec<usize>| {
        let queries: Vec<Vec<f64>> = rows.iter().map(|&row| naive.query(head, row)).collect();
        let query = mean(&queries);
        let admissible = naive.last(rows) / naive.block + 1;
        let score = |key: &Vec<f64>| naive.scale() * product(&query, key);
        keys[..admissible].iter().map(score).collect()
    };
    naive.query_tiles().iter().map(of_rows).collect()
}

/// The rows of one list of `meanpool` or `block_sparse`, from the scores of its tiles.
fn kept_rows(
    naive: &Naive<'_>,
    scores: &[Vec<f64>],
    keep: impl Fn(&[f64]) -> Vec<usize>,
    forced: &[usize],
) -> Vec<Vec<i32>> {
    let tiles = naive.query_tiles();
    let rows = tiles.iter().zip(scores).map(|(rows, scores)| {
        let mut kept = keep(scores);
        kept.extend(naive.diagonal(rows));
        kept.extend(forced);
        row_of(kept)
    });
    rows.collect()
}

#[test]
fn meanpool_keeps_the_mass_of_pooled_scores() {
    for data in calls() {
        let naive = Naive::new(&data, 16);
        let scores: Vec<Vec<Vec<f64>>> = (0..4).map(|head| pooled(&naive, head)).collect();
        let list = |scores: &[Vec<f64>], tau: f64| kept_rows(&naive, scores, |s| by_mass(&softmax(s), tau), &[0]);
        for tau in [0.35, 0.7] {
            let text = format!("meanpool:block=16,tau={tau}");
            let each: Vec<Vec<Vec<i32>>> = scores.iter().map(|scores| list(scores, tau)).collect();
            assert_rows(&text, &select(&text, &data), &each);
            let union: Vec<Vec<Vec<i32>>> = (0..2)
                .map(|kv| {
                    let rows = each[2 * kv].iter().zip(&each[2 * kv + 1]);
                    rows.map(|(a, b)| row_of(a.iter().chain(b).map(|&j| j as usize).collect()))
                        .collect()
                })
                .collect();
            let text = format!("{text},gqa=union");
            assert_rows(&text, &select(&text, &data), &union);
            let mean: Vec<Vec<Vec<i32>>> = (0..2)
                .map(|kv| {
                    let rows = scores[2 * kv].iter().zip(&scores[2 * kv + 1]);
                    let mean = |(a, b): (&Vec<f64>, &Vec<f64>)| -> Vec<f64> {
                        a.iter().zip(b).map(|(a, b)| (a + b) / 2.0).collect()
                    };
                    list(&rows.map(mean).collect::<Vec<_>>(), tau)
                })
                .collect();
            let text = text.replace("union", "mean");
            assert_rows(&text, &select(&text, &data), &mean);
        }
        let text = "meanpool:block=16,top_k=3";
        let top = |s: &[f64]| best_first(s).into_iter().take(3).collect();
        let expected: Vec<Vec<Vec<i32>>> = scores
            .iter()
            .map(|scores| kept_rows(&naive, scores, top, &[0]))
            .collect();
        assert_rows(text, &select(text, &data), &expected);
    }
}

#[test]
fn block_sparse_keeps_the_largest_pooled_scores_and_the_diagonal() {
    for data in calls() {
        let naive = Naive::new(&data, 16);
        for k in [1, 4] {
            let top = |s: &[f64]| best_first(s).into_iter().take(k).collect();
            let expected: Vec<Vec<Vec<i32>>> = (0..4)
                .map(|head| kept_rows(&naive, &pooled(&naive, head), top, &[]))
                .collect();
            let text = format!("block_sparse:block=16,topk={k}");
            assert_rows(&text, &select(&text, &data), &expected);
        }
    }
}

#[test]
fn oracle_topk_keeps_the_blocks_with_the_most_dense_mass() {
    for data in calls() {
        let naive = Naive::new(&data, 16);
        let masses = |head: usize| -> Vec<Vec<f64>> {
            let of_tile = |rows: &Vec<usize>| {
                let mut mass = vec![0.0; naive.last(rows) / 16 + 1];
                for &row in rows {
                    for (key, p) in naive.probabilities(head, row).into_iter().enumerate() {
                        mass[key / 16] += p;
                    }
                }
                mass
            };
            naive.query_tiles().iter().map(of_tile).collect()
        };
        let all: Vec<Vec<Vec<f64>>> = (0..4).map(masses).collect();
        let top = |s: &[f64]| best_first(s).into_iter().take(5).collect();
        let rows = all.iter().map(|masses| kept_rows(&naive, masses, top, &[]));
        let text = "oracle_topk:block=16,k=5";
        assert_rows(text, &select(text, &data), &rows.collect::<Vec<_>>());
        let share = |s: &[f64]| by_mass(s, 0.6);
        let rows = all.iter().map(|masses| kept_rows(&naive, masses, share, &[]));
        let text = "oracle_topk:block=16,tau=0.6";
        assert_rows(text, &select(text, &data), &rows.collect::<Vec<_>>());
    }
}

/// Slots of a sequence by rising norm inside each whole range of `segment`; with `partial` inside the rest too.
fn by_norm(tokens: &[Vec<f64>], segment: usize, partial: bool) -> Vec<usize> {
    let slots: Vec<usize> = (0..tokens.len()).collect();
    let sorted = slots.chunks(segment).flat_map(|range| {
        let mut range = range.to_vec();
        if partial || range.len() == segment {
            let norm = |i: usize| product(&tokens[i], &tokens[i]);
            range.sort_by(|&a, &b| norm(a).total_cmp(&norm(b)));
        }
        range
    });
    sorted.collect()
}

/// What one setting of `ba_att` keeps, from its equations: orders by norm, block means, the second-order term, the
/// number kept.
struct BaAtt {
    sort_q: bool,
    sort_k: bool,
    sparsity: f64,
    /// Factors on `var_q var_k`, and on the two terms of a mean and a variance.
    terms: [f64; 2],
    /// Tokens of a segment; the whole sequence in the bidirectional form.
    segment: Option<usize>,
}

impl BaAtt {
    fn rows(&self, data: &TestCall) -> Vec<Vec<Vec<i32>>> {
        let naive = Naive::new(data, 16);
        let n = data.shape.num_keys;
        assert_eq!(naive.context, 0);
        let segment = self.segment.unwrap_or(n);
        (0..data.shape.num_heads)
            .map(|head| {
                let kv_head = naive.kv_head(head);
                let queries: Vec<Vec<f64>> = (0..n).map(|row| naive.query(head, row)).collect();
                let keys: Vec<Vec<f64>> = (0..n).map(|key| naive.key(kv_head, key)).collect();
                let in_order: Vec<usize> = (0..n).collect();
                let sigma = match self.sort_q {
                    true => by_norm(&queries, segment, true),
                    false => in_order.clone(),
                };
                let pi = match self.sort_k {
                    true => by_norm(&keys, segment, false),
                    false => in_order,
                };
                let of = |slots: &[usize], order: &[usize], tokens: &[Vec<f64>]| {
                    let tokens: Vec<Vec<f64>> = slots.iter().map(|&slot| tokens[order[slot]].clone()).collect();
                    (mean(&tokens), variance(&tokens))
                };
                let blocks = naive.key_blocks();
                let k: Vec<_> = blocks.iter().map(|slots| of(slots, &pi, &keys)).collect();
                let square = |x: &[f64]| x.iter().map(|x| x * x).collect::<Vec<f64>>();
                let row = |slots: &Vec<usize>| {
                    let (q_mean, q_variance) = of(slots, &sigma, &queries);
                    let logit = |(k_mean, k_variance): &(Vec<f64>, Vec<f64>)| {
                        let d = data.shape.head_dim as f64;
                        let crossed = product(&square(&q_mean), k_variance) + product(&q_variance, &square(k_mean));
                        naive.scale() * product(&q_mean, k_mean)
                            + self.terms[0] * product(&q_variance, k_variance) / d
                            + self.terms[1] * crossed / d
                    };
                    let logits: Vec<f64> = k.iter().map(logit).collect();
                    let last = slots.iter().map(|&slot| sigma[slot]).max().expect("rows");
                    // Blocks of earlier segments compete; those of the own segment stay where a key is visible.
                    let earlier = match self.segment {
                        Some(segment) => slots[0] / segment * (segment / 16),
                        None => blocks.len(),
                    };
                    let kappa = ((1.0 - self.sparsity) * earlier as f64 - 1e-9).ceil() as usize;
                    let mut kept = best_first(&logits[..earlier]);
                    kept.truncate(kappa);
                    kept.extend((earlier..blocks.len()).filter(|&j| {
                        let end = (slots[0] / segment + 1) * segment;
                        blocks[j][0] < end && blocks[j].iter().any(|&slot| pi[slot] <= last)
                    }));
                    row_of(kept)
                };
                naive.query_tiles().iter().map(row).collect()
            })
            .collect()
    }
}

#[test]
fn ba_att_keeps_the_largest_compensated_scores_of_sorted_blocks() {
    let mut random = Random(161);
    let even = TestCall::random(&mut random, 384, 384, [4, 2], 16);
    let odd = TestCall::random(&mut random, 377, 377, [4, 2], 16);
    let paper = BaAtt {
        sort_q: true,
        sort_k: true,
        sparsity: 0.5,
        terms: [1.0, 0.0],
        segment: Some(64),
    };
    let check = |text: &str, definition: BaAtt, data: &TestCall| {
        let text = format!("ba_att:block=16,segment=64,{text}");
        assert_rows(&text, &select(&text, data), &definition.rows(data));
    };
    check("", BaAtt { ..paper }, &even);
    check(
        "beta=2.5",
        BaAtt {
            terms: [2.5, 0.0],
            ..paper
        },
        &even,
    );
    check(
        "compensation=variance,sparsity=0.7",
        BaAtt {
            terms: [0.5, 0.5],
            sparsity: 0.7,
            ..paper
        },
        &even,
    );
    let plain = BaAtt {
        terms: [0.0, 0.0],
        ..paper
    };
    check("compensate_layers=none", BaAtt { ..plain }, &even);
    check("sort=q,compensate_layers=none", BaAtt { sort_k: false, ..plain }, &even);
    for data in [&even, &odd] {
        check("sort=k", BaAtt { sort_q: false, ..paper }, data);
        check(
            "sort=none,sparsity=0.8",
            BaAtt {
                sort_q: false,
                sort_k: false,
                sparsity: 0.8,
                ..paper
            },
            data,
        );
    }
    check(
        "causal=false,sparsity=0.7",
        BaAtt {
            segment: None,
            sparsity: 0.7,
            ..paper
        },
        &even,
    );
}

/// Each head keeps what the method of its pattern keeps; vertical-slash is compared with an independent program's
/// lists elsewhere.
#[test]
fn minference_gives_each_head_the_keys_of_its_pattern() {
    let data = TestCall::structured(&mut Random(163), 700, [4, 2], 8);
    let vertical_slash = Pattern::VerticalSlash {
        vertical: 40,
        slash: 60,
    };
    let patterns = [
        (Pattern::BlockSparse { topk: 3 }, "block_sparse:topk=3"),
        (vertical_slash, "vertical_slash:vertical=40,slash=60"),
        (
            Pattern::AShape { n_init: 9, n_local: 70 },
            "a_shape:n_init=9,n_local=70",
        ),
        (Pattern::BlockSparse { topk: 2 }, "block_sparse:topk=2"),
    ];
    let file = PatternFile {
        layers: vec![patterns.iter().map(|(pattern, _)| Some(*pattern)).collect()],
    };
    let path = std::env::temp_dir().join(format!("sieve-brute-{}.json", std::process::id()));
    std::fs::write(&path, file.to_json()).expect("a temporary file");
    let mask = select(&format!("minference:pattern={}", path.display()), &data);
    std::fs::remove_file(&path).expect("it was there");
    for (head, (_, text)) in patterns.iter().enumerate() {
        let alone = select(text, &data);
        let mut hidden = 0;
        for row in 0..700 {
            let shown = expanded_row(&mask, head, row);
            assert_eq!(shown, expanded_row(&alone, head, row), "{text}, row {row}");
            hidden += shown[..=row].iter().filter(|&&shown| !shown).count();
        }
        assert!(hidden > 50_000, "{text}: {hidden}");
    }
}

#[test]
fn exact_top_keeps_the_keys_with_the_largest_logits() {
    let data = TestCall::random(&mut Random(164), 90, 90, [4, 2], 8);
    let naive = Naive::new(&data, 1);
    for (text, number) in [("exact_top:k=6", None), ("exact_top:k=0.2", Some(0.2))] {
        let shape = crate::test_data::layer([4, 2], 8, 0);
        let selector = Selector::parse(text).expect("valid");
        let mut session = DecodeSession::new(&selector, shape).expect("valid");
        for t in 0..90 {
            let [q, k, v] = super::decode::tokens(&data, t..t + 1);
            session.step(q, k, v).expect("valid");
            let number = match number {
                Some(share) => ((share * (t + 1) as f64).round() as usize).max(1),
                None => 6,
            };
            for head in 0..4 {
                let p = naive.probabilities(head, t);
                let mut kept = best_first(&p);
                kept.truncate(number);
                let expected: Vec<u32> = row_of(kept).into_iter().map(|j| j as u32).collect();
                assert_eq!(session.kept()[head], expected, "{text}: token {t}");
            }
        }
    }
}

/// The share of pairs with the most mean attention, sink and diagonal; then the columns and distances that are on in
/// most of their rows.
#[test]
fn dam_maps_are_the_pairs_with_the_most_mean_attention() {
    let (n, density, matching, sink) = (40, 0.3, 0.75, 2);
    let mut random = Random(165);
    let sequences = [0; 3].map(|_| TestCall::structured(&mut random, n, [2, 1], 8));
    let calibration = DamConfig {
        capture: n,
        density,
        matching,
        sink,
        ..DamConfig::default()
    };
    let mut capture = DamCapture::new(calibration, 2).expect("valid");
    for data in &sequences {
        capture.add(&data.call()).expect("valid");
    }
    for (head, map) in capture.maps().iter().enumerate() {
        let pairs: Vec<(usize, usize)> = (0..n).flat_map(|i| (0..=i).map(move |j| (i, j))).collect();
        let attention = |&(i, j): &(usize, usize)| -> f64 {
            let each = sequences.iter().map(|data| Naive::new(data, 1));
            each.map(|naive| naive.probabilities(head, i)[j]).sum()
        };
        let means: Vec<f64> = pairs.iter().map(attention).collect();
        let mut on = vec![vec![false; n]; n];
        let wanted = (density * pairs.len() as f64).ceil() as usize;
        for at in best_first(&means).into_iter().take(wanted) {
            on[pairs[at].0][pairs[at].1] = true;
        }
        for (i, row) in on.iter_mut().enumerate() {
            row[..sink.min(i)].fill(true);
            row[i] = true;
        }
        for (i, row) in on.iter().enumerate() {
            let expected: Vec<u32> = (0..=i as u32).filter(|&j| row[j as usize]).collect();
            assert_eq!(map.rows[i], expected, "head {head}, row {i}");
        }
        let often = |hits: usize, of: usize| hits as f64 >= matching * of as f64;
        // Beyond an eighth from the end too few rows speak for a column or a distance.
        let limit = n - n / 8;
        let columns: Vec<u32> = (0..limit)
            .filter(|&j| often((j..n).filter(|&i| on[i][j]).count(), n - j))
            .map(|j| j as u32)
            .collect();
        let offsets: Vec<u32> = (0..limit)
            .filter(|&o| often((o..n).filter(|&i| on[i][i - o]).count(), n - o))
            .map(|o| o as u32)
            .collect();
        assert_eq!((&map.columns, &map.offsets), (&columns, &offsets), "head {head}");
        assert!(columns.len() > sink && !offsets.is_empty(), "{columns:?} {offsets:?}");
    }
}
