//! Files of `sieve kernels run nsa | mla | block_sparse` against the definition, computed from their own inputs.
use crate::kernels_cli::Written;
use crate::python;
use crate::tiny_run::TinyRun;
use sieve_testing::cases;

/// `[tokens, heads, width]`.
#[derive(Clone)]
pub(crate) struct Rows {
    values: Vec<f64>,
    heads: usize,
    width: usize,
}

impl Rows {
    fn new(tokens: usize, heads: usize, width: usize) -> Self {
        let values = vec![0.0; tokens * heads * width];
        Self { values, heads, width }
    }

    pub(crate) fn read(written: &Written, name: &str) -> Self {
        let [.., heads, width] = *written.shape(name) else {
            panic!("{name} has heads")
        };
        let values = written.values(name).to_vec();
        Self { values, heads, width }
    }

    fn zeros(&self) -> Self {
        let values = vec![0.0; self.values.len()];
        Self { values, ..self.clone() }
    }

    pub(crate) fn row(&self, token: usize, head: usize) -> &[f64] {
        &self.values[(token * self.heads + head) * self.width..][..self.width]
    }

    fn add(&mut self, token: usize, head: usize, factor: f64, row: &[f64]) {
        let at = (token * self.heads + head) * self.width;
        let own = &mut self.values[at..at + self.width];
        own.iter_mut().zip(row).for_each(|(x, y)| *x += factor * y);
    }

    pub(crate) fn gap(&self, other: &Self) -> f64 {
        let pairs = self.values.iter().zip(&other.values);
        pairs.fold(0.0, |gap, (a, b)| gap.max((a - b).abs()))
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// The output, and for its gradient those of q, k and v. `seen` are the keys of a query's KV head.
fn attention(qkv: [&Rows; 3], d_o: &Rows, scale: f64, seen: impl Fn(usize, usize) -> Vec<usize>) -> [Rows; 4] {
    biased_attention(qkv, d_o, scale, seen, |_, _| 0.0).0
}

/// The same with the bias of a key added to its logits; then the log-sum-exp of each query, less the largest bias that
/// it sees, and the gradient of the biases.
pub(crate) fn biased_attention(
    [q, k, v]: [&Rows; 3],
    d_o: &Rows,
    scale: f64,
    seen: impl Fn(usize, usize) -> Vec<usize>,
    bias: impl Fn(usize, usize) -> f64,
) -> ([Rows; 4], Rows, Rows) {
    let [mut o, mut dq, mut dk, mut dv] = [d_o.zeros(), q.zeros(), k.zeros(), v.zeros()];
    let tokens = q.values.len() / (q.heads * q.width);
    let [mut lse, mut d_bias] = [q.heads, k.heads].map(|heads| Rows::new(tokens, heads, 1));
    for token in 0..tokens {
        for head in 0..q.heads {
            let kv = head / (q.heads / k.heads);
            let keys = seen(token, kv);
            let biases = keys.iter().map(|&key| bias(key, kv));
            let base = biases.fold(f64::NEG_INFINITY, f64::max);
            let weight = |&key: &usize| (scale * dot(q.row(token, head), k.row(key, kv)) + bias(key, kv) - base).exp();
            let weights: Vec<f64> = keys.iter().map(weight).collect();
            let total: f64 = weights.iter().sum();
            lse.add(token, head, 1.0, &[total.ln()]);
            for (&key, weight) in keys.iter().zip(&weights) {
                o.add(token, head, weight / total, v.row(key, kv));
            }
            let gradient = d_o.row(token, head);
            let mean = dot(gradient, o.row(token, head));
            for (&key, weight) in keys.iter().zip(&weights) {
                let p = weight / total;
                let ds = p * (dot(gradient, v.row(key, kv)) - mean);
                dv.add(key, kv, p, gradient);
                dq.add(token, head, ds * scale, k.row(key, kv));
                dk.add(key, kv, ds * scale, q.row(token, head));
                d_bias.add(key, kv, 1.0, &[ds]);
            }
        }
    }
    ([o, dq, dk, dv], lse, d_bias)
}

fn run(tiny: &TinyRun, words: &str) -> Written {
    let words = format!("kernels run {words} --seed 5 --out file.safetensors --device cpu");
    tiny.prints(&words);
    Written::read(&tiny.path("file.safetensors"))
}

/// `W_2 relu(W_1 flatten(block + positions))` of keys or values of a file.
struct BlockMlp {
    of: &'static str,
    positions: Vec<f64>,
    up: Vec<f64>,
    down: Vec<f64>,
}

impl BlockMlp {
    fn read(written: &Written, of: &'static str) -> Self {
        let values = |name: &str| written.values(&format!("{of}_{name}")).to_vec();
        Self {
            of,
            positions: values("positions"),
            up: values("up"),
            down: values("down"),
        }
    }

    /// The block with its positions, and the hidden numbers.
    fn hidden(&self, block: &[f64]) -> [Vec<f64>; 2] {
        let x: Vec<f64> = block.iter().zip(&self.positions).map(|(x, p)| x + p).collect();
        let hidden = self.up.chunks_exact(x.len()).map(|row| dot(row, &x).max(0.0));
        let hidden = hidden.collect();
        [x, hidden]
    }

    fn forward(&self, block: &[f64]) -> Vec<f64> {
        let [_, hidden] = self.hidden(block);
        self.down
            .chunks_exact(hidden.len())
            .map(|row| dot(row, &hidden))
            .collect()
    }

    /// The gradient of a block; adds those of the weights.
    fn backward(&self, block: &[f64], dy: &[f64], sums: &mut Self) -> Vec<f64> {
        let [x, hidden] = self.hidden(block);
        let mut dx = vec![0.0; x.len()];
        for (at, &h) in hidden.iter().enumerate() {
            let mut d_hidden = 0.0;
            for (row, dy) in dy.iter().enumerate() {
                d_hidden += dy * self.down[row * hidden.len() + at];
                sums.down[row * hidden.len() + at] += dy * h;
            }
            if h > 0.0 {
                for (column, x) in x.iter().enumerate() {
                    dx[column] += d_hidden * self.up[at * dx.len() + column];
                    sums.up[at * dx.len() + column] += d_hidden * x;
                }
            }
        }
        sums.positions.iter_mut().zip(&dx).for_each(|(sum, dx)| *sum += dx);
        dx
    }

    fn zeros(&self) -> Self {
        let zeros = |x: &[f64]| vec![0.0; x.len()];
        Self {
            of: self.of,
            positions: zeros(&self.positions),
            up: zeros(&self.up),
            down: zeros(&self.down),
        }
    }

    /// The largest difference of these sums from the gradients of a file.
    fn gap(&self, written: &Written) -> f64 {
        let parts = [("positions", &self.positions), ("up", &self.up), ("down", &self.down)];
        parts.into_iter().fold(0.0, |gap, (name, own)| {
            let found = written.values(&format!("d{}_{name}", self.of));
            own.iter()
                .zip(found)
                .fold(gap, |gap: f64, (a, b)| gap.max((a - b).abs()))
        })
    }
}

/// The blocks of some tokens, one after the other.
fn block_of(x: &Rows, tokens: std::ops::Range<usize>, head: usize) -> Vec<f64> {
    tokens.flat_map(|token| x.row(token, head).to_vec()).collect()
}

#[test]
fn nsa_s_file_agrees_with_its_definition() {
    let sizes = "heads=4,kv_heads=2,head_dim=16";
    agrees_with_nsa(1100, &format!("--shape seq_len=1100,{sizes}"), ["32 16 64 16", "mean"]);
    let form = "--blocks 8,4,16,3";
    agrees_with_nsa(
        150,
        &format!("--shape seq_len=150,{sizes} {form}"),
        ["8 4 16 3", "mean"],
    );
    agrees_with_nsa(
        150,
        &format!("--shape seq_len=150,{sizes} {form} --pool mlp"),
        ["8 4 16 3", "mlp"],
    );
}

fn agrees_with_nsa(n: usize, words: &str, [sizes, pool]: [&str; 2]) {
    let tiny = TinyRun::dma();
    let written = run(&tiny, &format!("nsa {words} --window 40"));
    assert_eq!([&written.metadata["blocks"], &written.metadata["pool"]], [sizes, pool]);
    let mlps = (pool == "mlp").then(|| ["k", "v"].map(|of| BlockMlp::read(&written, of)));
    let blocks: Vec<usize> = written.metadata["blocks"]
        .split(' ')
        .map(|x| x.parse().expect("a number"))
        .collect();
    let [size, stride, select, count] = *blocks else {
        panic!("{blocks:?}")
    };
    let rows = |name: &str| Rows::read(&written, name);
    let [q, k, v, d_o] = ["q", "k", "v", "do"].map(rows);
    let (scale, slots) = (written.scale(), n.div_ceil(stride));
    let is_whole = |slot: usize| slot * stride + size <= n;

    // One key, and one value, of each block.
    let tokens_of = |slot: usize| slot * stride..slot * stride + size;
    let means = [0, 1].map(|which| {
        let x = [&k, &v][which];
        let mut means = Rows::new(slots, x.heads, x.width);
        for slot in (0..slots).filter(|&slot| is_whole(slot)) {
            for head in 0..x.heads {
                if let Some(mlps) = &mlps {
                    let block = block_of(x, tokens_of(slot), head);
                    means.add(slot, head, 1.0, &mlps[which].forward(&block));
                    continue;
                }
                for token in tokens_of(slot) {
                    means.add(slot, head, 1.0 / size as f64, x.row(token, head));
                }
            }
        }
        means
    });
    let written_means: Vec<f64> = means.iter().flat_map(|x| x.values.clone()).collect();
    let pairs = written_means.iter().zip(written.values("compressed"));
    assert!(pairs.fold(0.0f64, |gap, (a, b)| gap.max((a - b).abs())) < 1e-5);

    // A choice: the first block, the last two, none twice, none later than the query.
    let choice = |token: usize, kv: usize| -> Vec<usize> {
        let all = &written.values("block_indices")[(token * k.heads + kv) * count..][..count];
        all.iter().filter(|&&x| x >= 0.0).map(|&x| x as usize).collect()
    };
    for token in 0..n {
        let (own, chosen) = (token / select, choice(token, 1));
        assert!(chosen.windows(2).all(|pair| pair[0] < pair[1]));
        assert_eq!(chosen.len(), count.min(own + 1));
        for block in [0, own.saturating_sub(1), own] {
            assert!(chosen.contains(&block), "{token}: {chosen:?}");
        }
    }

    // Gates.
    let (logits, bias) = (written.values("gate_logits"), written.values("gate_bias"));
    let gate = |token: usize, head: usize, branch: usize| {
        let at = head * 3 + branch;
        1.0 / (1.0 + (-logits[token * q.heads * 3 + at] - bias[at]).exp())
    };
    let gated = |branch: usize| {
        let mut gradient = d_o.zeros();
        for token in 0..n {
            for head in 0..q.heads {
                let g = gate(token, head, branch);
                gradient.add(token, head, g, d_o.row(token, head));
            }
        }
        gradient
    };
    let branches = [
        attention([&q, &means[0], &means[1]], &gated(0), scale, |token, _| {
            let ends = |slot: &usize| is_whole(*slot) && slot * stride + size <= token + 1;
            (0..slots).filter(ends).collect()
        }),
        attention([&q, &k, &v], &gated(1), scale, |token, kv| {
            let of_block = |block| block * select..(block + 1) * select;
            let keys = choice(token, kv).into_iter().flat_map(of_block);
            keys.filter(|&key| key <= token).collect()
        }),
        attention([&q, &k, &v], &gated(2), scale, |token, _| {
            ((token + 1).saturating_sub(40)..=token).collect()
        }),
    ];
    let mut o = d_o.zeros();
    let mut d_logits = vec![0.0; logits.len()];
    let names = ["compressed", "selected", "window"];
    for (branch, ([out, ..], name)) in branches.iter().zip(names).enumerate() {
        assert!(out.gap(&rows(&format!("{name}_o"))) < 2e-5, "{name}");
        assert!(gated(branch).gap(&rows(&format!("{name}_do"))) < 2e-5, "{name}");
        for token in 0..n {
            for head in 0..q.heads {
                let g = gate(token, head, branch);
                o.add(token, head, g, out.row(token, head));
                let slope = g * (1.0 - g) * dot(d_o.row(token, head), out.row(token, head));
                d_logits[(token * q.heads + head) * 3 + branch] = slope;
            }
        }
    }
    assert!(o.gap(&rows("o")) < 2e-5);
    let pairs = d_logits.iter().zip(written.values("dgate_logits"));
    assert!(pairs.fold(0.0f64, |gap, (a, b)| gap.max((a - b).abs())) < 1e-4);
    let gates = q.heads * 3;
    for (at, &found) in written.values("dgate_bias").iter().enumerate() {
        let sum: f64 = d_logits.iter().skip(at).step_by(gates).sum();
        assert!((sum - found).abs() < 1e-3, "{at}: {found}, {sum}");
    }

    // Gradients of all branches, and of the blocks.
    let [mut dq, mut dk, mut dv] = [q.zeros(), k.zeros(), v.zeros()];
    let mut sums = mlps.as_ref().map(|mlps| mlps.each_ref().map(BlockMlp::zeros));
    for (branch, [_, branch_dq, branch_dk, branch_dv]) in branches.iter().enumerate() {
        dq.values.iter_mut().zip(&branch_dq.values).for_each(|(x, y)| *x += y);
        for (which, (sum, part)) in [(&mut dk, branch_dk), (&mut dv, branch_dv)].into_iter().enumerate() {
            for kv in 0..k.heads {
                if branch > 0 {
                    (0..n).for_each(|token| sum.add(token, kv, 1.0, part.row(token, kv)));
                    continue;
                }
                for slot in (0..slots).filter(|&slot| is_whole(slot)) {
                    if let (Some(mlps), Some(sums)) = (&mlps, &mut sums) {
                        let block = block_of([&k, &v][which], tokens_of(slot), kv);
                        let dx = mlps[which].backward(&block, part.row(slot, kv), &mut sums[which]);
                        for (token, dx) in tokens_of(slot).zip(dx.chunks_exact(k.width)) {
                            sum.add(token, kv, 1.0, dx);
                        }
                        continue;
                    }
                    for token in tokens_of(slot) {
                        sum.add(token, kv, 1.0 / size as f64, part.row(slot, kv));
                    }
                }
            }
        }
    }
    for (name, own) in [("dq", &dq), ("dk", &dk), ("dv", &dv)] {
        let gap = own.gap(&rows(name));
        assert!(gap < 2e-4, "{name}: {gap}");
    }
    for sums in sums.into_iter().flatten() {
        let gap = sums.gap(&written);
        assert!(gap < 2e-4, "{}: {gap}", sums.of);
    }
}

/// Each rank's tensors against attention over whole rows: the border holds every earlier key that its queries see, with
/// the ranks of the scores, and outputs and gradients are those of the whole rows.
#[test]
fn a_file_of_two_ranks_agrees_with_its_definition() {
    let tiny = TinyRun::dma();
    let (n, kept, kv_heads, d) = (96usize, 11, 2, 16);
    let shape = format!("--shape seq_len={n},heads=4,kv_heads={kv_heads},head_dim={d} --documents 3");
    for (words, num_parts) in [
        ("dma --window 11 --local-window 3 --parts 2", 2),
        ("swa --window 11 --parts 3", 3),
    ] {
        let (written, len) = (run(&tiny, &format!("{words} {shape}")), n / num_parts);
        let rows = |name: &str| Rows::read(&written, name);
        let [q, k, v, d_o] = ["q", "k", "v", "do"].map(rows);
        let starts = written.values("cu_seqlens").to_vec();
        let document = |token: usize| {
            let end = starts
                .iter()
                .position(|&start| start > token as f64)
                .expect("the row's end");
            starts[end - 1] as usize..starts[end] as usize
        };
        // z = a softplus(v w_dt): what DMA ranks keys by.
        let is_dma = words.starts_with("dma");
        let rank = |token: usize, head: usize| -> f64 {
            let (w_dt, a) = (written.values("w_dt"), written.values("a"));
            let values = block_of(&v, token..token + 1, 0)
                .into_iter()
                .chain(v.row(token, 1).to_vec());
            let x: f64 = values.enumerate().map(|(at, v)| v * w_dt[at * kv_heads + head]).sum();
            a[head] * x.exp().ln_1p()
        };
        let seen = |token: usize, head: usize| -> Vec<usize> {
            let all: Vec<usize> = (document(token).start..=token).collect();
            if !is_dma {
                return all.into_iter().filter(|key| key + kept > token).collect();
            }
            let recent = (token + 1).saturating_sub(3);
            let mut older: Vec<usize> = all.iter().copied().filter(|&key| key < recent).collect();
            older.sort_by(|&a, &b| rank(b, head).total_cmp(&rank(a, head)).then(b.cmp(&a)));
            older.truncate(kept - 3);
            older.extend(all.into_iter().filter(|&key| key >= recent));
            older
        };
        let bias = |key: usize, head: usize| if is_dma { rank(key, head).min(60.0).exp() } else { 0.0 };
        let ([o, dq, ..], ..) = biased_attention([&q, &k, &v], &d_o, written.scale(), seen, bias);
        for part in 0..num_parts {
            let (first, of) = (part * len, |name: &str| rows(&format!("part{part}.{name}")));
            for (name, whole) in [("o", &o), ("dq", &dq)] {
                let own = of(name);
                for (token, head) in (0..len).flat_map(|token| (0..4).map(move |head| (token, head))) {
                    let pairs = own.row(token, head).iter().zip(whole.row(first + token, head));
                    let gap = pairs.fold(0.0f64, |gap, (a, b)| gap.max((a - b).abs()));
                    assert!(gap < 1e-4, "{words}: {name} of part {part}, token {token}: {gap}");
                }
            }
            if part == 0 {
                assert!(!written.tensors.contains_key("part0.border"));
                continue;
            }
            let border = of("border");
            let slots = written.shape(&format!("part{part}.border"))[1];
            for head in 0..kv_heads {
                let needed = (first..first + len)
                    .flat_map(|token| seen(token, head))
                    .filter(|&key| key < first);
                for key in needed {
                    let slot = (0..slots).find(|&slot| border.row(slot, head) == k.row(key, head));
                    let slot = slot.unwrap_or_else(|| panic!("{words}: part {part} lacks key {key}"));
                    assert_eq!(border.row(slot, kv_heads + head), v.row(key, head));
                    if is_dma {
                        let ranks = written.values(&format!("part{part}.border_ranks"));
                        assert!((ranks[head * slots + slot] - rank(key, head)).abs() < 1e-5);
                    }
                }
            }
        }
    }
}

#[test]
fn an_eight_bit_product_s_file_agrees_with_its_definition() {
    let tiny = TinyRun::dma();
    let (rows, inner, outer) = (48, 64, 32);
    let written = run(
        &tiny,
        &format!(
            "fp8 --shape batch=2,seq_len={},heads=4,kv_heads=2,head_dim=16",
            rows / 2
        ),
    );
    let operand = |name: &str| -> Vec<f64> {
        let scale = written.values(&format!("{name}_scale"))[0];
        let numbers = written.values(&format!("{name}_rounded"));
        let (largest, digits) = if name == "dy" { (57344.0, 2) } else { (448.0, 3) };
        assert!(numbers.iter().any(|x| x.abs() == largest), "{name}");
        let values = written.values(name).iter().zip(numbers).map(|(x, number)| {
            // As many digits behind the first one, and rounded by half a step of it at most.
            let step = 2f64.powi((number.abs().log2().floor() as i32).max(if digits == 2 { -14 } else { -6 }) - digits);
            assert!(*number == 0.0 || (number / step).fract() == 0.0, "{name}: {number}");
            assert!(
                (x / scale - number).abs() <= 0.501 * step,
                "{name}: {x} as {number} times {scale}"
            );
            number * scale
        });
        values.collect()
    };
    let [x, weight, dy] = ["x", "weight", "dy"].map(operand);
    let product = |sizes: [usize; 3], a: &dyn Fn(usize, usize) -> f64, b: &dyn Fn(usize, usize) -> f64| -> Vec<f64> {
        let [m, n, k] = sizes;
        let at = |i: usize, j: usize| (0..k).map(|c| a(i, c) * b(j, c)).sum();
        (0..m)
            .flat_map(|i| (0..n).map(move |j| (i, j)))
            .map(|(i, j)| at(i, j))
            .collect()
    };
    let (x, weight, dy) = (
        |i: usize, c: usize| x[i * inner + c],
        |j: usize, c: usize| weight[j * inner + c],
        |i: usize, j: usize| dy[i * outer + j],
    );
    for (name, expected) in [
        ("y", product([rows, outer, inner], &x, &weight)),
        ("dx", product([rows, inner, outer], &dy, &|c, j| weight(j, c))),
        (
            "dweight",
            product([outer, inner, rows], &|j, i| dy(i, j), &|c, i| x(i, c)),
        ),
    ] {
        let gaps = expected.iter().zip(written.values(name)).map(|(a, b)| (a - b).abs());
        let gap = gaps.fold(0.0, f64::max);
        assert!(gap < 1e-4, "{name}: {gap}");
    }
}

#[test]
fn mla_s_file_agrees_with_its_definition() {
    let tiny = TinyRun::dma();
    let (n, heads, d, rope) = (90, 3, 16, 8);
    let shape = format!("seq_len={n},heads={heads},head_dim={},head_dim_v={d}", d + rope);
    let written = run(&tiny, &format!("mla --shape {shape}"));
    let theta: f64 = written.metadata["rope_theta"].parse().expect("a number");
    // Pairs of columns half the rotated part apart turn by the token's place.
    let turn = |row: &[f64], token: usize, back: bool| -> Vec<f64> {
        let mut turned = row.to_vec();
        for i in 0..rope / 2 {
            let angle = token as f64 / theta.powf(2.0 * i as f64 / rope as f64);
            let (sin, cos) = if back { -angle } else { angle }.sin_cos();
            let (a, b) = (row[i], row[i + rope / 2]);
            turned[i] = a * cos - b * sin;
            turned[i + rope / 2] = b * cos + a * sin;
        }
        turned
    };
    let (q_rows, kv_rows, shared) = (written.values("q"), written.values("kv"), written.values("k_rope"));
    let [mut q, mut k, mut v] = [d + rope, d + rope, d].map(|width| Rows::new(n, heads, width));
    for token in 0..n {
        for head in 0..heads {
            let row = &q_rows[(token * heads + head) * (d + rope)..][..d + rope];
            let turned = [&row[..d], &turn(&row[d..], token, false)].concat();
            q.add(token, head, 1.0, &turned);
            let row = &kv_rows[(token * heads + head) * 2 * d..][..2 * d];
            let key = turn(&shared[token * rope..][..rope], token, false);
            k.add(token, head, 1.0, &[&row[..d], &key[..]].concat());
            v.add(token, head, 1.0, &row[d..]);
        }
    }
    let d_o = Rows::read(&written, "do");
    let scale = written.scale();
    let [o, dq, dk, dv] = attention([&q, &k, &v], &d_o, scale, |token, _| (0..=token).collect());
    assert!(o.gap(&Rows::read(&written, "o")) < 2e-5);
    let mut worst = 0.0f64;
    for token in 0..n {
        let mut d_shared = vec![0.0; rope];
        for head in 0..heads {
            let row = dq.row(token, head);
            let expected = [&row[..d], &turn(&row[d..], token, true)].concat();
            let found = &written.values("dq")[(token * heads + head) * (d + rope)..];
            worst = expected.iter().zip(found).fold(worst, |m, (a, b)| m.max((a - b).abs()));
            let expected = [&dk.row(token, head)[..d], dv.row(token, head)].concat();
            let found = &written.values("dkv")[(token * heads + head) * 2 * d..];
            worst = expected.iter().zip(found).fold(worst, |m, (a, b)| m.max((a - b).abs()));
            let turned = turn(&dk.row(token, head)[d..], token, true);
            d_shared.iter_mut().zip(turned).for_each(|(x, y)| *x += y);
        }
        let found = &written.values("dk_rope")[token * rope..];
        worst = d_shared.iter().zip(found).fold(worst, |m, (a, b)| m.max((a - b).abs()));
    }
    assert!(worst < 1e-4, "{worst}");
}

#[test]
fn sizes_that_the_ops_have_not_are_refused() {
    let tiny = TinyRun::dma();
    for [words, reason] in cases(
        r#"
        nsa --shape seq_len=20,heads=2,head_dim=16 => --window
        nsa --shape seq_len=20,heads=2,head_dim=16,head_dim_v=8 --window 4 => one width
        nsa --shape seq_len=20,heads=2,head_dim=16 --window 4 --blocks 8,4,8 => four whole numbers
        nsa --shape seq_len=20,heads=2,head_dim=16 --window 4 --blocks 8,3,8,2 => stride of 3
        mla --shape seq_len=20,heads=2,head_dim=24,head_dim_v=16 --pool mlp => --blocks and --pool are for nsa
        fp8 --shape seq_len=20,heads=2,head_dim=16 --window 4 => leave --window out
        mla --shape seq_len=20,heads=2,head_dim=24,head_dim_v=16 --parts 2 => --parts is for dma and swa
        swa --shape seq_len=20,heads=2,head_dim=16 --window 4 --parts 3 => --parts 3: rows of 20 tokens
        swa --shape seq_len=20,heads=2,head_dim=16 --window 4 --magnitude 0 => 1e-6 to 1e6
        mla --shape seq_len=20,heads=2,head_dim=16 => wider than values
        mla --shape seq_len=20,heads=2,head_dim=24,head_dim_v=16 --window 4 => all keys
        mla --shape seq_len=20,heads=2,kv_heads=1,head_dim=24,head_dim_v=16 => keys of its own
    "#,
    ) {
        let words = format!("kernels run {words} --out file --device cpu");
        tiny.refuses(&words, reason);
    }
}

/// Methods whose masks have every kind of array, and the share of the pairs that they keep, from and to.
const MASKS: &[(&str, &[&str], [f64; 2])] = &[
    (
        "meanpool:block=16,tau=0.5,min_prefill_tokens=0",
        &["row_ptr"],
        [0.2, 0.9],
    ),
    (
        "bfla:block=32,tile=16,group=16,keep_mass=0.5,local_tokens=0,last_dense_rows=9,min_prefill_tokens=0",
        &["row_ptr"],
        [0.2, 0.9],
    ),
    (
        "vertical_slash:vertical=30,slash=40,min_prefill_tokens=0",
        &["col_ptr"],
        [0.2, 0.99],
    ),
    (
        "pbs:block=16,segment=64,tau=0.4,min_prefill_tokens=0",
        &["key_order"],
        [0.2, 0.95],
    ),
    (
        "ba_att:block=16,segment=64,sparsity=0.6,min_prefill_tokens=0",
        &["key_order", "query_order"],
        [0.2, 0.95],
    ),
    (
        "streamingllm:n_init=4,n_local=40,min_prefill_tokens=0",
        &["windows"],
        [0.2, 0.6],
    ),
    // A correction is not of the mask.
    (
        "delta:gamma=8,dense_tail=false,base.n_local=20,base.min_prefill_tokens=0,min_prefill_tokens=0",
        &["windows"],
        [0.05, 0.9],
    ),
    (
        "momo:gamma=8,beta=16,chi=32,k=4,k_exact=2,first_dense_layers=0,min_prefill_tokens=0",
        &["row_ptr"],
        [0.1, 0.99],
    ),
    // All keys: too few tokens.
    ("xattention", &[], [1.0, 1.0]),
];

#[test]
fn a_masked_file_agrees_with_its_mask_in_python() {
    let test = "a_masked_file_agrees_with_its_mask_in_python";
    let Some(interpreter) = python::interpreter(test, "import array, json, struct") else {
        return;
    };
    let tiny = TinyRun::dma();
    let mut files = Vec::new();
    for (at, (selector, arrays, _)) in MASKS.iter().enumerate() {
        let file = format!("{at}.safetensors");
        let shape = "seq_len=150,heads=4,kv_heads=2,head_dim=16";
        let words = format!("kernels run block_sparse --shape {shape} --selector {selector}");
        tiny.prints(&format!("{words} --out {file} --device cpu"));
        let written = Written::read(&tiny.path(&file));
        for array in *arrays {
            assert!(written.tensors.contains_key(*array), "{selector}: {array}");
        }
        let name = selector.split(':').next().expect("a name");
        assert!(written.metadata["selector"].starts_with(name));
        assert_eq!(written.metadata["chosen_on"], "CPU");
        files.push(tiny.path(&file).display().to_string());
    }
    let printed = python::run(&interpreter, "masked_attention.py", &files);
    assert_eq!(printed.lines().count(), MASKS.len(), "{printed}");
    for (line, (selector, _, [least, most])) in printed.lines().zip(MASKS) {
        let numbers: Vec<f64> = line.split(' ').skip(1).map(|x| x.parse().expect("a number")).collect();
        let [o, lse, density] = *numbers else { panic!("{line}") };
        assert!(o < 2e-5 && lse < 2e-5, "{selector}: {line}");
        assert!(density >= *least && density <= *most, "{selector}: {line}");
    }
}

#[test]
fn calls_without_a_mask_are_refused() {
    let tiny = TinyRun::dma();
    for [words, told] in cases(
        r#"
        block_sparse => block_sparse needs --selector
        block_sparse --selector quest => quest acts while decoding
        block_sparse --selector bfla --window 5 => leave --window out
        attention --selector bfla => --selector is for block_sparse
        block_sparse --selector nosuch => nosuch
    "#,
    ) {
        let shape = "--shape seq_len=30,heads=2,kv_heads=1,head_dim=16 --out file --device cpu";
        let words = format!("kernels run {words} {shape}");
        tiny.refuses(&words, told);
        assert!(!tiny.path("file").exists(), "{words}");
    }
}
