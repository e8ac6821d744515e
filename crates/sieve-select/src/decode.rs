//! Selectors for decoding: which cached keys a new token reads.
//!
//! A [`DecodeSession`] is one layer of one request. `stream` feeds it from token 0, row by row; `prompt` computes the
//! prompt densely and lets the method act at its end. Keys and values stay stored even after a method has evicted them:
//! sessions reproduce a method's sets of keys, not its memory use.

mod cache;
pub mod dam;
pub mod dma;
pub mod exact_top;
pub mod h2o;
pub mod infinitehip;
pub mod infllm;
pub mod quest;
pub mod rope;
pub mod snapkv;
mod step;
pub mod streaming;

pub use cache::LayerShape;
use cache::{Cache, RowAttention};
use rayon::prelude::*;

use crate::attention::AttentionOutput;
use crate::call::Call;
use crate::error::SelectError;
use crate::measure::dense_attention;
use crate::range::Rules;
use crate::selector::{Method, Phase, Selector, names_of};

/// State of a selector that decodes one text in one layer.
#[derive(Clone, Debug)]
pub struct DecodeSession {
    cache: Cache,
    state: State,
    kept: Vec<Vec<u32>>,
    pairs_read: u64,
}

/// What each decode method remembers between tokens.
#[derive(Clone, Debug)]
enum State {
    Dense,
    Streaming(streaming::Streaming),
    H2o(h2o::H2o),
    Snapkv(snapkv::Snapkv),
    Quest(quest::Quest),
    Infllm(infllm::Infllm),
    Dam(dam::Dam),
    ExactTop(exact_top::ExactTopConfig),
    Infinitehip(infinitehip::Infinitehip),
    Dma(dma::Dma),
}

impl DecodeSession {
    /// A session without tokens.
    ///
    /// # Errors
    /// A prefill method; a method that needs a file it was not given.
    pub fn new(selector: &Selector, shape: LayerShape) -> Result<Self, SelectError> {
        // Checks the sizes.
        Call::of_shape(shape.call(0, 0))?;
        let dense = selector.is_dense_layer(shape.layer);
        let state = match &selector.method {
            Method::Dense => State::Dense,
            Method::Streamingllm(config) => State::Streaming(streaming::Streaming::new(config.clone())?),
            Method::H2o(config) => State::H2o(h2o::H2o::new(config.clone(), shape)),
            Method::Snapkv(config) => State::Snapkv(snapkv::Snapkv::new(config.clone(), shape)),
            Method::Quest(config) => State::Quest(quest::Quest::new(config.clone(), shape)),
            Method::Infllm(config) => State::Infllm(infllm::Infllm::new(config.clone(), shape)?),
            Method::Dam(config) => State::Dam(dam::Dam::new(config, shape)?),
            Method::ExactTop(config) => State::ExactTop(config.clone()),
            Method::Infinitehip(config) => {
                State::Infinitehip(infinitehip::Infinitehip::new(config.clone(), selector.common.gqa, shape))
            }
            Method::Dma(config) => State::Dma(dma::Dma::new(config.clone(), shape)?),
            _ => {
                return Rules(selector.name()).fail(
                    "acts in prefill, not while decoding",
                    format!("decode methods are {}", names_of(Phase::Decode).join(", ")),
                );
            }
        };
        Ok(Self {
            cache: Cache { shape, keys: Vec::new(), values: Vec::new(), len: 0 },
            state: if dense { State::Dense } else { state },
            kept: Vec::new(),
            pairs_read: 0,
        })
    }

    /// Number of tokens that the session has seen.
    pub fn len(&self) -> usize {
        self.cache.len
    }

    /// Whether the session has seen no token.
    pub fn is_empty(&self) -> bool {
        self.cache.len == 0
    }

    /// Keys that the last token read, ascending, per KV head (per query head for `exact_top`, `dam` and `infinitehip`).
    pub fn kept(&self) -> &[Vec<u32>] {
        &self.kept
    }

    /// Pairs of a query and a key computed by all steps so far, over all query heads.
    pub fn pairs_read(&self) -> u64 {
        self.pairs_read
    }

    /// Computes a prompt densely, then lets the method act. Only on an empty session.
    ///
    /// # Shapes
    /// - q: `[tokens, num_heads, head_dim]`; k, v: `[tokens, num_kv_heads, head_dim]`
    ///
    /// # Errors
    /// Operands of another size; a session that has tokens already.
    pub fn prompt(&mut self, q: &[f32], k: &[f32], v: &[f32]) -> Result<AttentionOutput, SelectError> {
        let call = self.prompt_call(q, k, v)?;
        let output = dense_attention(&call)?;
        self.take_prompt(q, k, v)?;
        Ok(output)
    }

    /// Adds a prompt whose attention was computed elsewhere, and lets the method act at its end. Only on an empty
    /// session.
    ///
    /// # Errors
    /// Operands of another size; a session that has tokens already.
    pub fn take_prompt(&mut self, q: &[f32], k: &[f32], v: &[f32]) -> Result<(), SelectError> {
        let call = self.prompt_call(q, k, v)?;
        let tokens = call.shape.num_keys;
        self.cache.keys.extend_from_slice(k);
        self.cache.values.extend_from_slice(v);
        self.cache.len = tokens;
        match &mut self.state {
            // These methods choose in each step from the cache alone.
            State::Dense | State::Streaming(_) | State::ExactTop(_) | State::Infinitehip(_) => {}
            State::Dma(state) => state.extend(&self.cache),
            State::Dam(state) => state.prompt(&call),
            State::H2o(state) => state.prompt(&call),
            State::Snapkv(state) => state.prompt(&call),
            State::Quest(state) => state.extend(&self.cache),
            State::Infllm(state) => state.prompt(&call),
        }
        Ok(())
    }

    /// The call of a prompt; refuses a session that has tokens.
    fn prompt_call<'a>(&self, q: &'a [f32], k: &'a [f32], v: &'a [f32]) -> Result<Call<'a>, SelectError> {
        let shape = self.cache.shape;
        if self.cache.len > 0 {
            let problem = format!("a prompt for a session that has {} tokens", self.cache.len);
            let hint = "start a new session, or feed the tokens with step";
            return Err(SelectError::refused(problem, hint));
        }
        let tokens = q.len() / (shape.num_heads * shape.head_dim);
        Ok(Call::new(shape.call(tokens, tokens), q, k, v)?.in_layer(shape.layer, 0))
    }

    /// Decodes one token: stores its key and value, chooses the keys that its query reads and computes its attention.
    /// Returns `[num_heads, head_dim]`.
    ///
    /// # Shapes
    /// - q: `[num_heads, head_dim]`; k, v: `[num_kv_heads, head_dim]`
    ///
    /// # Errors
    /// Operands of another size.
    pub fn step(&mut self, q: &[f32], k: &[f32], v: &[f32]) -> Result<Vec<f32>, SelectError> {
        let o = self.step_uncounted(q, k, v)?;
        let keys: usize = self.kept.iter().map(Vec::len).sum();
        // A list serves one query head, or all query heads of a KV head.
        self.pairs_read += (keys * self.cache.shape.num_heads / self.kept.len().max(1)) as u64;
        Ok(o)
    }

    /// [`step`](Self::step) without counting the computed pairs.
    fn step_uncounted(&mut self, q: &[f32], k: &[f32], v: &[f32]) -> Result<Vec<f32>, SelectError> {
        let shape = self.cache.shape;
        Call::new(shape.call(1, 1), q, k, v)?;
        self.cache.keys.extend_from_slice(k);
        self.cache.values.extend_from_slice(v);
        self.cache.len += 1;
        let cache = &self.cache;
        let all = || -> Vec<Vec<u32>> { vec![(0..cache.len as u32).collect(); shape.num_kv_heads] };
        self.kept = match &mut self.state {
            State::Dense => all(),
            State::Streaming(state) => state.choose(cache),
            State::H2o(state) => state.choose(cache),
            State::Snapkv(state) => state.choose(cache),
            State::Quest(state) => state.choose(cache, q),
            // InfLLM computes its own attention, because it reads far keys at another distance.
            State::Infllm(state) => return Ok(state.step(cache, q, &mut self.kept)),
            State::Dam(state) => state.choose(cache),
            State::ExactTop(config) => exact_top::choose(config, cache, q),
            State::Infinitehip(state) => state.choose(cache, q),
            State::Dma(state) => state.choose(cache),
        };
        let (kept, state) = (&self.kept, &self.state);
        let rows: Vec<RowAttention> = (0..shape.num_heads)
            .into_par_iter()
            .map(|head| {
                let list = &kept[head * kept.len() / shape.num_heads];
                let query = &q[head * shape.head_dim..(head + 1) * shape.head_dim];
                match state {
                    State::Streaming(state) => state.attend(cache, head, query, list),
                    State::Dma(state) => state.attend(cache, head, query, list),
                    _ => cache.attend(head, query, list),
                }
            })
            .collect();
        match &mut self.state {
            State::H2o(state) => state.after(cache, &self.kept, &rows),
            State::Snapkv(state) => state.after(cache, q),
            State::Dam(state) => state.after(cache, &rows),
            _ => {}
        }
        Ok(rows.into_iter().flat_map(|row| row.o).collect())
    }

    /// Decodes tokens one by one; returns `[tokens, num_heads, head_dim]`. Every output depends only on its own and
    /// earlier tokens, except that `infllm` with a `chunk` above 1 chooses blocks by the queries of a whole chunk.
    ///
    /// # Errors
    /// Operands of another size.
    pub fn stream(&mut self, q: &[f32], k: &[f32], v: &[f32]) -> Result<Vec<f32>, SelectError> {
        let shape = self.cache.shape;
        let (q_len, k_len) = (shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim);
        let tokens = q.len() / q_len;
        Call::new(shape.call(tokens, tokens), q, k, v)?;
        let mut o = Vec::with_capacity(q.len());
        let chunk = match &self.state {
            State::Infllm(state) => state.chunk(),
            _ => 1,
        };
        for (index, q) in q.chunks(chunk * q_len).enumerate() {
            if let State::Infllm(state) = &mut self.state {
                state.begin_chunk(&self.cache, q);
            }
            for (row, q) in q.chunks_exact(q_len).enumerate() {
                let at = (index * chunk + row) * k_len;
                o.extend(self.step(q, &k[at..at + k_len], &v[at..at + k_len])?);
            }
            if let State::Infllm(state) = &mut self.state {
                state.end_chunk();
            }
        }
        Ok(o)
    }
}
