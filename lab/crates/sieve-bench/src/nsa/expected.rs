//! Expected results of NSA's ops: the softmax branches by the definition of attention in f64, the other ops by
//! plain-Burn operations in f64; and the same computed by plain code in bf16.
use super::{Choice, Inputs, linear_ops};
use crate::reference::{narrow, shape_of};
use crate::report::Outcome;
use crate::tolerance::{RowTolerance, Tolerance, lost_digits, row_norms};
use burn::tensor::DType;
use sieve_cpu::nsa::slot_starts;
use sieve_cpu::reference::{AttentionCall, Results, Rounding};
use sieve_cpu::{AttentionShape, ChosenBlocks, Documents, Mask};
use sieve_testing::round_bf16;

/// The exact output of a call, and what its tolerance follows from.
struct Output {
    name: &'static str,
    exact: Vec<f32>,
    plain: Vec<f32>,
    /// Size of the terms that each row sums; empty for a log-sum-exp, which is compared number by number.
    terms: Vec<f64>,
    /// Share of the terms that is allowed because f32 logits are large and lose digits.
    lost_digits: f64,
}

/// Every output of a call, and the blocks that the CPU chooses by each rule.
pub(super) struct Expected {
    outputs: Vec<Output>,
    pub(super) choices: Vec<Choice>,
}

impl Expected {
    /// Computes every output beside the CPU's choices.
    pub(super) fn of(inputs: &Inputs, choices: Vec<Choice>) -> Self {
        let [exact, plain] = [DType::F64, DType::BF16].map(|dtype| linear_ops(inputs, dtype));
        let shape = inputs.case.shape;
        let pairs = exact.into_iter().zip(plain);
        let outputs = pairs.map(|((name, exact), (_, plain))| {
            let width = match name {
                "gates dlogits" | "gates dbias" => shape.num_heads * 3,
                _ => shape.head_dim,
            };
            Output { terms: row_norms(&exact, width), name, exact, plain, lost_digits: 0.0 }
        });
        let mut outputs: Vec<Output> = outputs.collect();
        outputs.extend(compressed(inputs));
        let of_selected = ["selected o", "selected lse", "selected dqkv"];
        outputs.extend(selected(inputs, &inputs.chosen, of_selected));
        let of_local = ["with local o", "with local lse", "with local dqkv"];
        outputs.extend(selected(inputs, &inputs.with_local, of_local));
        outputs.push(index_gradient(inputs));
        Self { outputs, choices }
    }

    /// Compares an output with the expected one; returns the ratio of error to tolerance.
    pub(super) fn judge(&self, name: &str, got: &[f32]) -> Outcome {
        let found = self.outputs.iter().find(|output| output.name == name);
        let of = found.expect("the names of this file");
        if of.terms.is_empty() {
            return Tolerance::new(2.0, 1e-4, 1e-4).judge(name, got, &of.plain, &of.exact);
        }
        RowTolerance::of_bf16(of.lost_digits).judge(name, got, &of.plain, &of.exact, &of.terms)
    }

    /// Name and plain bf16 result of every output.
    #[cfg(test)]
    pub(super) fn plain(&self) -> Vec<(&'static str, Vec<f32>)> {
        let of = |output: &Output| (output.name, output.plain.clone());
        self.outputs.iter().map(of).collect()
    }
}

fn documents(inputs: &Inputs) -> Documents<'_> {
    Documents::new(&inputs.case.doc_start, &inputs.case.doc_end)
}

/// Packs q, k and v, `[tokens, heads, width]` each, into `[tokens, heads of q, k and v, width]`.
fn packed(shape: AttentionShape, [q, k, v]: [&[f64]; 3], width: usize) -> Vec<f64> {
    let tokens = shape.batch * shape.seq_len;
    let part = |x: &[f64], token: usize, heads: usize| x[token * heads * width..][..heads * width].to_vec();
    let of_token = |token| {
        let keys = [k, v].map(|x| part(x, token, shape.num_kv_heads));
        [part(q, token, shape.num_heads), keys.concat()].concat()
    };
    (0..tokens).flat_map(of_token).collect()
}

/// The compressed branch by the definition of attention: each compressed key takes the position of its block's last
/// token, so that queries from that token on see it.
fn compressed(inputs: &Inputs) -> Vec<Output> {
    let (shape, blocks) = (shape_of(&inputs.case), inputs.blocks);
    let (n, d, heads, kv_heads) = (shape.seq_len, shape.head_dim, shape.num_heads, shape.num_kv_heads);
    let starts = slot_starts(blocks, shape.batch, n, documents(inputs));
    let num_slots = blocks.num_slots(n);
    // Pairs (slot, that is, index of a compressed block; index in the batch of the last token of the slot's block).
    let ends = starts.iter().enumerate().filter(|(_, start)| **start >= 0);
    let ends =
        ends.map(|(slot, &start)| (slot, slot / num_slots * n + start as usize + blocks.compress_block_size - 1));
    let ends: Vec<(usize, usize)> = ends.collect();
    // A key expires at its own position, seen by no query, unless a block ends there.
    let mut expire: Vec<i32> = (0..shape.batch * kv_heads).flat_map(|_| 0..n as i32).collect();
    let mut qkv = inputs.qkv.clone();
    let (token_len, rows) = (shape.token_len(), inputs.rows());
    qkv.chunks_exact_mut(token_len).for_each(|token| token[heads * d..].fill(0.0));
    for &(slot, token) in &ends {
        for kv_head in 0..kv_heads {
            expire[(token / n * kv_heads + kv_head) * n + token % n] = inputs.case.doc_end[token];
        }
        for which in [0, 1] {
            let from = (which * rows + slot * kv_heads) * d;
            let to = token * token_len + (heads + which * kv_heads) * d;
            qkv[to..to + kv_heads * d].copy_from_slice(&inputs.compressed[from..from + kv_heads * d]);
        }
    }
    let delta = vec![0.0; expire.len()];
    let mask = Mask::Expire { expire: &expire, delta: &delta };
    let call = AttentionCall::packed(shape, &qkv, documents(inputs), mask, &inputs.case.d_o);
    let [exact, plain] = [Rounding::None, Rounding::Bf16].map(|rounding| call.run(rounding));
    // Moves gradients from the blocks' last tokens back to the slots.
    let slots = |parts: [&[f64]; 2], width: usize| -> Vec<f64> {
        let mut all = vec![0.0; 2 * rows * width];
        for (which, x) in parts.into_iter().enumerate() {
            for &(slot, token) in &ends {
                let to = (which * rows + slot * kv_heads) * width;
                all[to..to + kv_heads * width].copy_from_slice(&x[token * kv_heads * width..][..kv_heads * width]);
            }
        }
        all
    };
    let queries = |dq: &[f64], width: usize| {
        let zeros = vec![0.0; shape.batch * n * kv_heads * width];
        packed(*shape, [dq, &zeros, &zeros], width)
    };
    let terms = &exact.terms;
    let of_queries = [queries(&exact.dq, d), queries(&plain.dq, d), queries(&terms.dq, 1)];
    let of_slots =
        [slots([&exact.dk, &exact.dv], d), slots([&plain.dk, &plain.dv], d), slots([&terms.dk, &terms.dv], 1)];
    let gradients = [("compressed dqkv", of_queries), ("dcompressed", of_slots)];
    outputs_of_branch(["compressed o", "compressed lse"], exact, plain, gradients)
}

/// Output, log-sum-exp and gradient of attention over these blocks, by its definition.
fn selected(inputs: &Inputs, indices: &[i32], [o, lse, dqkv]: [&'static str; 3]) -> Vec<Output> {
    let (shape, d) = (shape_of(&inputs.case), inputs.case.shape.head_dim);
    let mask = Mask::Chosen(ChosenBlocks {
        indices,
        count: inputs.blocks.num_selected_blocks,
        block_size: inputs.blocks.select_block_size,
    });
    let call = AttentionCall::packed(shape, &inputs.qkv, documents(inputs), mask, &inputs.case.d_o);
    let [exact, plain] = [Rounding::None, Rounding::Bf16].map(|rounding| call.run(rounding));
    let gradient = |x: &Results| packed(*shape, [&x.dq, &x.dk, &x.dv], d);
    let terms = &exact.terms;
    let terms = packed(*shape, [&terms.dq, &terms.dk, &terms.dv], 1);
    let gradients = [(dqkv, [gradient(&exact), gradient(&plain), terms])];
    outputs_of_branch([o, lse], exact, plain, gradients)
}

/// The gradient of an indexer's loss over the blocks `inputs.chosen`, by its definition: `dS = I - mean_h P^h` over the
/// tokens that a query reads, with I the indexer's probabilities and P^h head h's probabilities; then `dS k` and `dS^T
/// q`. The plain computation rounds dS and the results to bf16.
fn index_gradient(inputs: &Inputs) -> Output {
    let (shape, blocks) = (shape_of(&inputs.case), inputs.blocks);
    let (count, size) = (blocks.num_selected_blocks, blocks.select_block_size);
    let (n, d, heads, groups) = (shape.seq_len, shape.head_dim, shape.num_heads, shape.num_kv_heads);
    let (group, width) = (heads / groups, groups + 2);
    let scale = f64::from(inputs.case.scale);
    let factor = scale * f64::from(Inputs::INDEX_WEIGHT);
    let index = |token: usize, head: usize| &inputs.index[(token * width + head) * d..][..d];
    let qkv = |token: usize, head: usize| &inputs.qkv[(token * (heads + 2 * groups) + head) * d..][..d];
    let product = |a: &[f32], b: &[f32]| -> f64 { a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum() };
    let rows = shape.batch * n * width;
    let (mut exact, mut plain, mut terms) = (vec![0.0f64; rows * d], vec![0.0f64; rows * d], vec![0.0f64; rows]);
    let mut largest_lse = 0.0f64;
    for token in 0..shape.batch * n {
        let (row, i) = (token / n * n, token % n);
        let start = inputs.case.doc_start[token] as usize;
        for r in 0..groups {
            let chosen = &inputs.chosen[(token * groups + r) * count..][..count];
            let blocks = chosen.iter().filter_map(|&block| usize::try_from(block).ok());
            let keys: Vec<usize> = blocks
                .flat_map(|block| start + block * size..start + (block + 1) * size)
                .filter(|&key| key <= i)
                .collect();
            if keys.is_empty() {
                continue;
            }
            let mut probabilities = |scores: &mut dyn Iterator<Item = f64>| -> Vec<f64> {
                let scores: Vec<f64> = scores.map(|x| x * scale).collect();
                let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let sum: f64 = scores.iter().map(|x| (x - most).exp()).sum();
                largest_lse = largest_lse.max((most + sum.ln()).abs());
                scores.iter().map(|x| (x - most).exp() / sum).collect()
            };
            let q = index(token, r);
            let student = probabilities(&mut keys.iter().map(|key| product(q, index(row + key, groups))));
            let mut teacher = vec![0.0; keys.len()];
            for head in r * group..(r + 1) * group {
                let q = qkv(token, head);
                let p = probabilities(&mut keys.iter().map(|key| product(q, qkv(row + key, heads + r))));
                teacher.iter_mut().zip(p).for_each(|(mean, p)| *mean += p / group as f64);
            }
            for (at, key) in keys.iter().enumerate() {
                let k = index(row + key, groups);
                let ds = student[at] - teacher[at];
                let rounded = f64::from(round_bf16(ds as f32));
                let [to_q, to_k] = [token * width + r, (row + key) * width + groups];
                for (x, (&k, &q)) in k.iter().zip(q).enumerate() {
                    for (all, ds) in [(&mut exact, ds), (&mut plain, rounded)] {
                        all[to_q * d + x] += factor * ds * f64::from(k);
                        all[to_k * d + x] += factor * ds * f64::from(q);
                    }
                }
                let size = factor.powi(2) * (student[at].powi(2) + teacher[at].powi(2));
                terms[to_q] += size * product(k, k);
                terms[to_k] += size * product(q, q);
            }
        }
    }
    let exact = narrow(exact);
    Output {
        name: "index gradient",
        plain: plain.iter().map(|&x| round_bf16(x as f32)).collect(),
        terms: terms.into_iter().map(f64::sqrt).collect(),
        lost_digits: lost_digits(&[largest_lse as f32]),
        exact,
    }
}

/// The outputs of a softmax branch, whose o and lse have these names. `gradients` holds, for each gradient, the exact
/// values, the plain ones, and the size of each row's terms.
fn outputs_of_branch<const N: usize>(
    [o, lse]: [&'static str; 2],
    exact: Results,
    plain: Results,
    gradients: [(&'static str, [Vec<f64>; 3]); N],
) -> Vec<Output> {
    let exact_lse = narrow(exact.lse);
    let lost_digits = lost_digits(&exact_lse);
    let rows = [(o, [exact.o, plain.o, exact.terms.o])];
    let rows = rows.into_iter().chain(gradients);
    let mut outputs: Vec<Output> = rows
        .map(|(name, [exact, plain, terms])| Output {
            name,
            exact: narrow(exact),
            plain: narrow(plain),
            terms,
            lost_digits,
        })
        .collect();
    outputs.push(Output { name: lse, exact: exact_lse, plain: narrow(plain.lse), terms: Vec::new(), lost_digits });
    outputs
}
