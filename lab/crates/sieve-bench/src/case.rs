//! The inputs of one attention call, drawn from a seed on the host.
use crate::error::{Result, refused};
use crate::scores::Scores;
use crate::shape::{keys_of, queries_of, values_of};
use burn::tensor::backend::Backend;
use sieve_core::{DmaWindow, FarKeys};
use sieve_cpu::{Documents, dma_select, extend_expire};
use sieve_kernels::{AttentionShape, KernelPolicy};
use sieve_ops::AttentionSpec;
use sieve_testing::{Random, round_bf16};
use std::collections::BinaryHeap;

/// Largest score whose `exp` is the bias; larger scores are clamped to it.
const SCORE_CLAMP: f32 = 60.0;

/// Which keys a query sees, and with what bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Keys {
    /// All keys up to the query's own.
    Dense,
    /// All keys up to the query's own, each with a bias.
    Biased,
    /// The last this many keys, the query's own included.
    Window(usize),
    /// The last this many keys, and others farther away.
    Far(usize, FarKeys),
    /// DMA's choice of this many keys, with a bias each.
    Chosen(DmaWindow),
}

impl Keys {
    /// DMA's choice of this many keys, without a local window.
    pub(crate) fn chosen(keep_window_size: usize) -> Self {
        Self::Chosen(keep_window_size.into())
    }

    /// DMA's choice of this many keys, the last `local_window_size` of them whatever their score.
    pub(crate) fn local(keep_window_size: usize, local_window_size: usize) -> Self {
        Self::Chosen(DmaWindow { keep_window_size, local_window_size })
    }

    /// DMA's choice of this many keys, with a random local window: one key, half of them, all but one, or all.
    pub(crate) fn local_of(keep_window_size: usize, random: &mut Random) -> Self {
        let half = keep_window_size.div_ceil(2);
        let most = keep_window_size.saturating_sub(1).max(1);
        Self::local(keep_window_size, random.one_of(&[1, half, half, most, keep_window_size]))
    }

    /// The name in a report of `kernel`, such as "attention", with these keys.
    pub(crate) fn name_of(self, kernel: &str) -> String {
        let prefix = if matches!(self, Self::Chosen(_)) { "dma_" } else { "" };
        format!("{prefix}{kernel}{}", self.suffix())
    }

    /// What a report appends to the name of a kernel with these keys.
    pub(crate) fn suffix(self) -> &'static str {
        match self {
            Self::Dense => "",
            Self::Biased => ", bias",
            Self::Window(_) => ", window",
            Self::Far(..) => ", bands",
            Self::Chosen(window) if window.local_window_size > 0 => ", local window",
            Self::Chosen(_) => "",
        }
    }
}

impl std::fmt::Display for Keys {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Dense => out.write_str("all keys"),
            Self::Biased => out.write_str("all keys, biased"),
            Self::Window(window) => write!(out, "window {window}"),
            Self::Far(window, far) => {
                let FarKeys { sink_tokens, distances: [first, end], num_bands, first_band } = far;
                write!(out, "window {window}, the first {sink_tokens}, {num_bands} bands of {first}..{end}")?;
                write!(out, " from number {first_band}")
            }
            Self::Chosen(window) => {
                write!(out, "keep {}", window.keep_window_size)?;
                match window.local_window_size {
                    0 => Ok(()),
                    local => write!(out, ", the last {local} always"),
                }
            }
        }
    }
}

/// How rows are divided into documents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cuts {
    /// This number of documents a row, cut at random places.
    Count(usize),
    /// Documents of random lengths up to a half of the row.
    Few,
    /// Documents of random lengths up to a quarter of the row, a third of them of one token.
    Mixed,
    /// Documents of one token.
    Tokens,
}

/// Inputs of one attention call. q, k, v and `d_o` are exact in bf16, as kernels read them.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) shape: AttentionShape,
    pub(crate) keys: Keys,
    /// Factor on the dot products `q.k`.
    pub(crate) scale: f32,
    /// Queries, `[batch, seq_len, num_heads, head_dim]`.
    pub(crate) q: Vec<f32>,
    /// Keys, `[batch, seq_len, num_kv_heads, head_dim]`.
    pub(crate) k: Vec<f32>,
    /// Values, `[batch, seq_len, num_kv_heads, head_dim_v]`.
    pub(crate) v: Vec<f32>,
    /// Gradient of the output, `[batch, seq_len, num_heads, head_dim_v]`.
    pub(crate) d_o: Vec<f32>,
    /// DMA's scores of the keys, `[batch, num_kv_heads, seq_len]`; empty unless DMA chooses keys.
    pub(crate) z: Vec<f32>,
    /// Biases of the keys, `[batch, num_kv_heads, seq_len]`; empty where there is no bias.
    pub(crate) delta: Vec<f32>,
    /// First token of each token's document, `[batch, seq_len]`.
    pub(crate) doc_start: Vec<i32>,
    /// End of each token's document, `[batch, seq_len]`.
    pub(crate) doc_end: Vec<i32>,
    /// The mask `active(i, j) <=> j <= i < expire[j]`, `[batch, num_kv_heads, seq_len]`, by the CPU's definition; with
    /// [`Keys::Far`] the end of each key's document.
    pub(crate) expire: Vec<i32>,
    /// Kernel family and order of sums that the ops use.
    pub(crate) policy: KernelPolicy,
}

impl Case {
    /// Draws all inputs of a case from a seed.
    pub(crate) fn draw(shape: AttentionShape, keys: Keys, cuts: Cuts, scores: &Scores, seed: u64) -> Result<Self> {
        let mut random = Random(seed);
        let sizes = [queries_of(shape), keys_of(shape), values_of(shape), shape.output()];
        let [q, k, v, d_o] = sizes.map(|sizes| random.bf16_normals(sizes.iter().product()));
        let (doc_start, doc_end) = documents(shape, cuts, &mut random)?;
        let (rows, seq_len) = (shape.batch * shape.num_kv_heads, shape.seq_len);
        let z = match keys {
            Keys::Chosen(_) => scores.draw(rows, seq_len, &mut random)?,
            _ => Vec::new(),
        };
        let delta = match keys {
            Keys::Chosen(_) => z.iter().map(|z| z.min(SCORE_CLAMP).exp()).collect(),
            Keys::Biased => (0..rows * seq_len).map(|_| random.unit() as f32).collect(),
            _ => Vec::new(),
        };
        let mut case = Self {
            shape,
            keys,
            scale: 1.0 / (shape.head_dim as f32).sqrt(),
            q,
            k,
            v,
            d_o,
            z,
            delta,
            doc_start,
            doc_end,
            expire: Vec::new(),
            policy: KernelPolicy::default(),
        };
        case.expire = case.expire_by_definition();
        Ok(case)
    }

    /// A copy whose ops run under another kernel policy.
    pub(crate) fn under(self, policy: KernelPolicy) -> Self {
        Self { policy, ..self }
    }

    /// The case with queries and keys multiplied by `magnitude`.
    pub(crate) fn magnified(mut self, magnitude: f32) -> Self {
        magnify(&mut self.q, magnitude);
        magnify(&mut self.k, magnitude);
        self
    }

    /// Replaces the biases and, where DMA chooses keys, the scores, and recomputes the mask.
    pub(crate) fn set_biases(&mut self, z: Vec<f32>, delta: Vec<f32>) {
        if matches!(self.keys, Keys::Chosen(_)) {
            self.z = z;
        }
        self.delta = delta;
        self.expire = self.expire_by_definition();
    }

    /// Whether a bias is added to the logits.
    pub(crate) fn has_bias(&self) -> bool {
        !self.delta.is_empty()
    }

    /// Most keys that a query sees; the length of a row where all keys are seen.
    pub(crate) fn window(&self) -> usize {
        match self.keys {
            Keys::Dense | Keys::Biased | Keys::Far(..) => self.shape.seq_len,
            Keys::Window(window) => window,
            Keys::Chosen(window) => window.keep_window_size,
        }
    }

    /// The window of the dense kernels; `None`: no window.
    pub(crate) fn sliding_window(&self) -> Option<usize> {
        match self.keys {
            Keys::Window(window) => Some(window),
            _ => None,
        }
    }

    /// DMA's window; a window of all keys, or the sliding window, where DMA does not choose keys.
    pub(crate) fn dma_window(&self) -> DmaWindow {
        match self.keys {
            Keys::Chosen(window) => window,
            _ => self.window().into(),
        }
    }

    /// The sizes for ops on packed q, k and v.
    pub(crate) fn spec(&self, window_size: Option<usize>) -> AttentionSpec {
        AttentionSpec {
            num_heads: self.shape.num_heads,
            num_kv_heads: self.shape.num_kv_heads,
            softmax_scale: f64::from(self.scale),
            window_size,
            far: None,
            policy: self.policy,
        }
    }

    /// First position and end of each token's document, `[batch, seq_len]` each.
    pub(crate) fn bounds(&self) -> [Vec<u32>; 2] {
        [&self.doc_start, &self.doc_end].map(|x| x.iter().map(|&x| x as u32).collect())
    }

    /// The document bounds as ops take them.
    pub(crate) fn documents<B: Backend>(&self, device: &B::Device) -> sieve_ops::Documents<B> {
        let [start, end] = self.bounds();
        let rows = [self.shape.batch, self.shape.seq_len];
        sieve_ops::Documents::new(&start, &end, rows, device)
    }

    /// True for each key that no query sees, `[batch, num_kv_heads, seq_len]`.
    pub(crate) fn never_active(&self) -> Vec<bool> {
        let seq_len = self.shape.seq_len;
        let never = |(at, &expire): (usize, &i32)| expire as usize <= at % seq_len;
        self.expire.iter().enumerate().map(never).collect()
    }

    /// Index of each document's first token in the flattened batch, then the number of tokens.
    pub(crate) fn cu_seqlens(&self) -> Vec<i32> {
        let seq_len = self.shape.seq_len;
        let is_first = |at: &usize| self.doc_start[*at] as usize == at % seq_len;
        (0..self.doc_start.len()).filter(is_first).chain([self.doc_start.len()]).map(|at| at as i32).collect()
    }

    /// The largest bias among the keys that each query sees, `[batch, num_kv_heads, seq_len]`; 0 where it sees no key.
    /// Kernels subtract it from the logits, so a query's log-sum-exp is relative to it.
    pub(crate) fn largest_biases(&self) -> Vec<f32> {
        let seq_len = self.shape.seq_len;
        let mut largest = Vec::with_capacity(self.delta.len());
        for (delta, expire) in self.delta.chunks_exact(seq_len).zip(self.expire.chunks_exact(seq_len)) {
            // Pairs (bias as an ordered integer, key); keys that the query no longer sees are popped.
            let mut seen = BinaryHeap::new();
            for query in 0..seq_len {
                seen.push((order_of(delta[query]), query));
                while seen.peek().is_some_and(|&(_, key)| expire[key] as usize <= query) {
                    seen.pop();
                }
                largest.push(seen.peek().map_or(0.0, |&(_, key)| delta[key]));
            }
        }
        largest
    }

    /// Copies the first row of the batch to all other rows, except in `d_o`.
    pub(crate) fn repeat_first_row(&mut self) {
        fn repeat<T: Copy>(values: &mut [T], batch: usize) {
            let (first, rest) = values.split_at_mut(values.len() / batch);
            // z and delta may be empty, but a chunk has at least one number.
            for row in rest.chunks_exact_mut(first.len().max(1)) {
                row.copy_from_slice(first);
            }
        }
        let batch = self.shape.batch;
        for values in [&mut self.q, &mut self.k, &mut self.v, &mut self.z, &mut self.delta] {
            repeat(values, batch);
        }
        repeat(&mut self.doc_start, batch);
        repeat(&mut self.doc_end, batch);
        self.expire = self.expire_by_definition();
    }

    /// The mask `expire` by the CPU's definition: DMA's selection by rank, extended by the local window; without DMA, a
    /// key expires where the window or its document ends.
    fn expire_by_definition(&self) -> Vec<i32> {
        let AttentionShape { batch, seq_len, num_kv_heads, .. } = self.shape;
        let documents = Documents::new(&self.doc_start, &self.doc_end);
        let mut expire = vec![0; batch * num_kv_heads * seq_len];
        if let Keys::Chosen(window) = self.keys {
            let kept = window.num_ranked();
            dma_select(&self.z, documents, batch, num_kv_heads, seq_len, kept, &mut expire);
            let local = window.local_window_size;
            extend_expire(&mut expire, documents, num_kv_heads, seq_len, local);
            return expire;
        }
        for (row, expire) in expire.chunks_exact_mut(seq_len).enumerate() {
            let end = &self.doc_end[row / num_kv_heads * seq_len..][..seq_len];
            for (j, (expire, &end)) in expire.iter_mut().zip(end).enumerate() {
                *expire = end.min((j + self.window()) as i32);
            }
        }
        expire
    }
}

/// An integer for each f32, in the order of [`f32::total_cmp`]: of negative numbers all bits but the sign are flipped.
fn order_of(x: f32) -> i32 {
    let bits = x.to_bits() as i32;
    bits ^ (((bits >> 31) as u32) >> 1) as i32
}

/// Multiplies numbers by `magnitude` and rounds them to bf16.
pub(crate) fn magnify(values: &mut [f32], magnitude: f32) {
    values.iter_mut().for_each(|x| *x = round_bf16(*x * magnitude));
}

/// Normal numbers times `factor`, rounded to bf16 before and after.
pub(crate) fn scaled_normals(random: &mut Random, count: usize, factor: f32) -> Vec<f32> {
    let mut values = random.bf16_normals(count);
    magnify(&mut values, factor);
    values
}

/// First position, and end (one past the last position), of each token's document: `[batch, seq_len]` each.
fn documents(shape: AttentionShape, cuts: Cuts, random: &mut Random) -> Result<(Vec<i32>, Vec<i32>)> {
    let seq_len = shape.seq_len;
    if let Cuts::Count(count) = cuts
        && !(1..=seq_len).contains(&count)
    {
        return refused(format!("--documents {count}: a row of {seq_len} tokens holds 1 to {seq_len} documents"));
    }
    let (mut starts, mut ends) = (Vec::new(), Vec::new());
    for _ in 0..shape.batch {
        let mut firsts = vec![0];
        match cuts {
            Cuts::Count(count) => {
                while firsts.len() < count {
                    let at = random.between(1, seq_len);
                    if !firsts.contains(&at) {
                        firsts.push(at);
                    }
                }
                firsts.sort_unstable();
            }
            Cuts::Few | Cuts::Mixed | Cuts::Tokens => {
                let longest = match cuts {
                    Cuts::Few => seq_len / 2,
                    Cuts::Mixed => seq_len / 4,
                    _ => 1,
                };
                loop {
                    let length =
                        if cuts == Cuts::Mixed && random.chance(0.3) { 1 } else { 1 + random.below(longest.max(1)) };
                    let next = firsts[firsts.len() - 1] + length;
                    if next >= seq_len {
                        break;
                    }
                    firsts.push(next);
                }
            }
        }
        for (index, &first) in firsts.iter().enumerate() {
            let end = firsts.get(index + 1).copied().unwrap_or(seq_len);
            starts.resize(starts.len() + end - first, first as i32);
            ends.resize(ends.len() + end - first, end as i32);
        }
    }
    Ok((starts, ends))
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(crate) fn shape() -> AttentionShape {
        AttentionShape::new(2, 37, [4, 2], [16, 16])
    }

    #[test]
    fn equal_scores_make_dma_a_window_and_falling_ones_hide_keys() {
        let case = Case::draw(shape(), Keys::Window(5), Cuts::Count(1), &Scores::Tied, 9).expect("one document");
        let tied = Case::draw(shape(), Keys::chosen(5), Cuts::Count(1), &Scores::Tied, 9).expect("one document");
        assert_eq!(case.expire, tied.expire, "tied scores are a window");
        assert!(!case.never_active().contains(&true));
        let falling = Case::draw(shape(), Keys::chosen(5), Cuts::Count(1), &Scores::Falling, 9).expect("one document");
        assert!(falling.never_active().contains(&true));
    }
}
