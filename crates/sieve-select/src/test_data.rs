//! Random, structured and stored inputs of the tests.

use std::ops::Range;

use safetensors::SafeTensors;
use sieve_testing::Random;

use crate::{Call, CallShape};

/// Lists that an independent program computed, with their made-up inputs.
pub(crate) static LISTS: &[u8] = include_bytes!("../../../tests/golden/selectors/lists.safetensors");
/// Queries and keys of trained models.
static CAPTURED: &[u8] = include_bytes!("../../../tests/golden/selectors/captured.safetensors");

/// Operands that own their memory.
#[derive(Clone)]
pub(crate) struct TestCall {
    pub(crate) shape: CallShape,
    pub(crate) q: Vec<f32>,
    pub(crate) k: Vec<f32>,
    pub(crate) v: Vec<f32>,
}

impl TestCall {
    /// A call with normally distributed operands; `heads` are the numbers of query and KV heads.
    pub(crate) fn random(
        random: &mut Random,
        num_queries: usize,
        num_keys: usize,
        heads: [usize; 2],
        head_dim: usize,
    ) -> Self {
        let shape = CallShape::new([num_queries, num_keys], [heads[0], heads[1]], head_dim);
        let kv_len = num_keys * heads[1] * head_dim;
        Self {
            shape,
            q: random.vector(num_queries * heads[0] * head_dim),
            k: random.vector(kv_len),
            v: random.vector(kv_len),
        }
    }

    /// A call like those of trained heads: a sink, a few keys that many queries attend to, and topics that last for 97
    /// tokens and return.
    pub(crate) fn structured(random: &mut Random, num_tokens: usize, heads: [usize; 2], head_dim: usize) -> Self {
        let mut call = Self::random(random, num_tokens, num_tokens, heads, head_dim);
        let topics: Vec<Vec<f32>> = (0..7).map(|_| random.vector(head_dim)).collect();
        for t in 0..num_tokens {
            let topic = &topics[(t / 97) % 7];
            for p in 0..heads[0] {
                let at = (t * heads[0] + p) * head_dim;
                mix_in(&mut call.q[at..at + head_dim], topic);
                call.q[at] = 3.0;
            }
            for h in 0..heads[1] {
                let at = (t * heads[1] + h) * head_dim;
                mix_in(&mut call.k[at..at + head_dim], topic);
                call.k[at] = match t {
                    0 => 12.0,
                    _ if t % 211 == 5 => 8.0,
                    _ => 0.0,
                };
            }
        }
        call
    }

    /// A prompt with the queries and keys of a stored file, and the keys as values too. By name: `random.…` and
    /// `structured.…` are in the file of lists, `trained.…` in that of trained
    /// models.
    pub(crate) fn stored(name: &str) -> Self {
        // Inputs without groups have only the first query head of each KV head.
        let (source, step) = match name {
            "trained.2.2" => ("trained.4.2", 2),
            _ => (name, 1),
        };
        let bytes = if name.starts_with("trained") { CAPTURED } else { LISTS };
        let file = SafeTensors::deserialize(bytes).expect("a stored file");
        let ([num_tokens, heads, head_dim], q) = floats(&file, &format!("{source}/q"));
        let ([_, num_kv_heads, _], k) = floats(&file, &format!("{source}/k"));
        let q = q
            .chunks_exact(head_dim)
            .enumerate()
            .filter(|(at, _)| at % heads % step == 0)
            .flat_map(|(_, q)| q.iter().copied())
            .collect();
        let shape = CallShape::new([num_tokens; 2], [heads / step, num_kv_heads], head_dim);
        Self { shape, q, v: k.clone(), k }
    }

    pub(crate) fn call(&self) -> Call<'_> {
        Call::new(self.shape, &self.q, &self.k, &self.v).expect("the sizes fit")
    }

    /// q, k and v of some tokens of a prompt.
    pub(crate) fn tokens(&self, tokens: Range<usize>) -> [&[f32]; 3] {
        [&self.q, &self.k, &self.v].map(|x| {
            let token = x.len() / self.shape.num_keys;
            &x[tokens.start * token..tokens.end * token]
        })
    }

    /// A prompt of these tokens alone.
    pub(crate) fn part(&self, tokens: Range<usize>) -> Self {
        let shape = CallShape { num_queries: tokens.len(), num_keys: tokens.len(), ..self.shape };
        let [q, k, v] = self.tokens(tokens).map(<[f32]>::to_vec);
        Self { shape, q, k, v }
    }

    /// A copy of a prompt in which `change` has replaced every number of the tokens from `first` on.
    pub(crate) fn changed_from(&self, first: usize, change: impl Fn(f32) -> f32) -> Self {
        let mut other = self.clone();
        for x in [&mut other.q, &mut other.k, &mut other.v] {
            let from = x.len() / self.shape.num_keys * first;
            x[from..].iter_mut().for_each(|x| *x = change(*x));
        }
        other
    }
}

/// A stored tensor of three axes, f32 or bfloat16.
fn floats(file: &SafeTensors<'_>, name: &str) -> ([usize; 3], Vec<f32>) {
    let tensor = file.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}"));
    let shape = tensor.shape().try_into().expect("three axes");
    let values = crate::decode::dma::floats(&tensor).expect("f32 or bfloat16");
    (shape, values)
}

fn mix_in(x: &mut [f32], topic: &[f32]) {
    x.iter_mut().zip(topic).for_each(|(x, topic)| *x = 0.6 * *x + 0.7 * topic);
}
