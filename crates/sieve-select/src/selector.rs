//! All selectors by name: `NAME:key=value,…` in, a mask or a decoding session out.

pub(crate) mod layers;
mod methods;
mod on_device;
mod parse;
mod sweep;

use std::time::Instant;

#[cfg(test)]
pub(crate) use methods::all_methods;
pub use methods::{ENTRIES, Entry, Method, Phase};
use serde::{Deserialize, Serialize};

use crate::attention::{AttentionOutput, block_sparse_attention};
use crate::call::{Call, Reads};
use crate::error::SelectError;
use crate::gqa::GqaPolicy;
use crate::mask::Selected;
use crate::measure::dense_attention;
use crate::prefill::PrefillMethod;
use crate::range::Rules;

/// A method with its settings.
#[derive(Clone, Debug, PartialEq)]
pub struct Selector {
    /// The method and its own settings.
    pub method: Method,
    /// Settings that all methods have.
    pub common: Common,
}

/// Settings that methods share; [`Selector::common_keys`] says which of them act.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Common {
    /// Prefill calls with fewer tokens run dense.
    pub min_prefill_tokens: usize,
    /// Layers at the start that stay dense.
    pub first_dense_layers: usize,
    /// Rows at the end of a call that are dense.
    pub last_dense_rows: usize,
    /// How the query heads of a group choose.
    pub gqa: GqaPolicy,
}

/// Attention output and mask of a prefill call.
#[derive(Clone, Debug, PartialEq)]
pub struct Prefill {
    /// The attention's output.
    pub output: AttentionOutput,
    /// The mask, and what the selection did.
    pub selected: Selected,
    /// Seconds from q, k, v to the output, selection included.
    pub seconds: f64,
}

impl Selector {
    /// Name of the method, as in `--selector`.
    pub fn name(&self) -> &'static str {
        self.method.name()
    }

    /// Whether the method acts on prompts or token by token.
    pub fn phase(&self) -> Phase {
        self.method.phase()
    }

    /// Whether the method runs token by token only: decode methods, and `streamingllm` with `reindex`.
    pub fn is_token_by_token(&self) -> bool {
        let reindexed = matches!(&self.method, Method::Streamingllm(config) if config.reindex);
        self.phase() == Phase::Decode || reindexed
    }

    /// The settings of [`Common`] that change what the method does; a selector's text takes and prints only these.
    pub fn common_keys(&self) -> &'static [&'static str] {
        const KEYS: [&str; 4] = ["first_dense_layers", "last_dense_rows", "min_prefill_tokens", "gqa"];
        match self.method.of_prefill() {
            _ if self.method == Method::Dense => &[],
            // Only first_dense_layers.
            _ if self.is_token_by_token() => &KEYS[..1],
            Some(method) if method.takes_gqa() => &KEYS,
            // All but gqa: one list serves all heads, or (delta) the base has a `gqa` of its own.
            _ => &KEYS[..3],
        }
    }

    /// Tokens of the blocks or pages of keys that the method chooses among; `None` where it has none.
    pub fn block_size(&self) -> Option<usize> {
        if let Method::Delta(_, base) = &self.method {
            return base.block_size();
        }
        let settings = self.method.settings();
        let size = settings.get("block").or_else(|| settings.get("page"))?;
        size.as_u64().map(|size| size as usize)
    }

    /// Whether the output at each position depends on no later token. Only then are the probabilities that one prefill
    /// gives to a text's tokens a likelihood of the text.
    pub fn is_causal_map(&self) -> bool {
        match &self.method {
            Method::Dense => true,
            // The queries of a chunk choose blocks together, so an earlier one reads blocks that later ones chose.
            Method::Infllm(config) => config.chunk == 1,
            method => match method.of_prefill() {
                Some(method) => method.is_causal_map(),
                None => self.phase() == Phase::Decode,
            },
        }
    }

    /// Checks all settings.
    ///
    /// # Errors
    /// The first value outside its range.
    pub fn check(&self) -> Result<(), SelectError> {
        match &self.method {
            Method::Delta(config, base) => base.check().and(config.check()),
            Method::H2o(config) => config.check(),
            Method::Snapkv(config) => config.check(),
            Method::Quest(config) => config.check(),
            Method::Infllm(config) => config.check(),
            Method::Dam(config) => config.check(),
            Method::ExactTop(config) => config.check(),
            Method::Dma(config) => config.check(),
            method => match method.of_prefill() {
                Some(method) => method.check(self.common.gqa),
                None => Ok(()),
            },
        }
    }

    /// Sets the base of the model's rotary embedding in methods that rotate keys, unless the user gave one.
    #[must_use]
    pub fn for_rope_theta(mut self, rope_theta: f64) -> Self {
        match &mut self.method {
            Method::Infllm(config) => config.rope_theta = config.rope_theta.or(Some(rope_theta)),
            Method::Streamingllm(config) => config.rope_theta = config.rope_theta.or(Some(rope_theta)),
            _ => {}
        }
        self
    }

    /// Whether the method rotates keys to other positions; it then needs [`for_rope_theta`](Self::for_rope_theta).
    pub fn moves_keys(&self) -> bool {
        match &self.method {
            Method::Infllm(_) => true,
            Method::Streamingllm(config) => config.reindex,
            _ => false,
        }
    }

    /// Refuses settings that cannot work within a context of `max_tokens`.
    ///
    /// # Errors
    /// A segment longer than the context.
    pub fn check_context(&self, max_tokens: usize) -> Result<(), SelectError> {
        let segment = match &self.method {
            Method::Pbs(config) => config.segment,
            Method::BaAtt(config) if config.causal => config.segment,
            Method::Delta(_, base) => return base.check_context(max_tokens),
            _ => return Ok(()),
        };
        if segment <= max_tokens {
            return Ok(());
        }
        Rules(self.name()).fail(
            format!(
                "segment={segment} is longer than the context of {max_tokens} tokens, so every call would be dense"
            ),
            "give a shorter segment or a longer context",
        )
    }

    /// What the selection of a prefill call of `num_queries` rows reads in a layer. A correction by probes, which also
    /// reads all operands, is not counted.
    pub fn reads(&self, layer: usize, num_queries: usize) -> Reads {
        match &self.method {
            _ if self.is_dense(layer, num_queries) => Reads::Nothing,
            Method::Delta(_, base) => base.reads(layer, num_queries),
            method => method.of_prefill().map_or(Reads::Tokens, PrefillMethod::reads),
        }
    }

    /// The first layer from which a selection that [reads nothing](Reads::Nothing) is the same in all layers.
    pub fn first_alike_layer(&self) -> usize {
        let first = self.common.first_dense_layers;
        match &self.method {
            Method::Delta(_, base) => first.max(base.first_alike_layer()),
            _ => first,
        }
    }

    /// Whether a call of `num_queries` rows is dense, whatever its operands are; a call without rows is.
    fn is_dense(&self, layer: usize, num_queries: usize) -> bool {
        num_queries < self.common.min_prefill_tokens.max(1) || self.is_dense_layer(layer)
    }

    /// Whether a layer's attention is dense for every call.
    pub fn is_dense_layer(&self, layer: usize) -> bool {
        matches!(self.method, Method::Dense) || layer < self.common.first_dense_layers
    }

    /// The selection of a prefill call.
    ///
    /// # Errors
    /// A decode method; settings that do not fit the call.
    pub fn select(&self, call: &Call<'_>) -> Result<Selected, SelectError> {
        let mut chosen = self.selected(call)?;
        if let Method::Delta(config, _) = &self.method
            && !chosen.stats.dense_call
        {
            let started = Instant::now();
            config.correct(call, &mut chosen);
            chosen.stats.select_seconds += started.elapsed().as_secs_f64();
        }
        Ok(chosen)
    }

    /// As [`select`](Self::select), without the correction that [`correction`](Self::correction) describes.
    ///
    /// # Errors
    /// As [`select`](Self::select).
    pub fn select_uncorrected(&self, call: &Call<'_>) -> Result<Selected, SelectError> {
        let mut chosen = self.selected(call)?;
        chosen.correction = None;
        Ok(chosen)
    }

    /// The selection and its time, without delta's correction; momo's selection computes its correction itself.
    fn selected(&self, call: &Call<'_>) -> Result<Selected, SelectError> {
        let started = Instant::now();
        let mut chosen = self.select_untimed(call)?;
        let rows = call.shape.num_queries;
        if self.common.last_dense_rows > 0 && !chosen.stats.dense_call {
            chosen.mask.add_dense_rows(rows.saturating_sub(self.common.last_dense_rows)..rows);
        }
        chosen.stats.select_seconds = started.elapsed().as_secs_f64();
        Ok(chosen)
    }

    /// The selection before the common `last_dense_rows`, without its time.
    fn select_untimed(&self, call: &Call<'_>) -> Result<Selected, SelectError> {
        if self.phase() == Phase::Decode {
            return Rules(self.name()).fail(
                "acts while decoding, not in prefill",
                format!(
                    "use it where tokens are generated one by one; prefill methods are {}",
                    names_of(Phase::Prefill).join(", ")
                ),
            );
        }
        if self.is_dense(call.layer, call.shape.num_queries) {
            return Ok(Selected::dense(call.shape));
        }
        if let Method::Delta(config, base) = &self.method {
            let mut chosen = base.select(call)?;
            if let Some(first) = config.tail(call.shape)
                && !chosen.stats.dense_call
            {
                chosen.mask.add_dense_rows(first..call.shape.num_queries);
            }
            return Ok(chosen);
        }
        // Not reached: decode methods, dense and delta have returned.
        let Some(method) = self.method.of_prefill() else {
            return Ok(Selected::dense(call.shape));
        };
        method.check_call(call)?;
        Ok(method.select(call, self.common.gqa))
    }

    /// Selects, then computes the attention. A mask that keeps everything runs dense.
    ///
    /// # Errors
    /// As [`select`](Self::select).
    pub fn prefill(&self, call: &Call<'_>) -> Result<Prefill, SelectError> {
        let started = Instant::now();
        let mut selected = self.select(call)?;
        let output = if selected.correction.is_none() && selected.mask.keeps_everything() {
            selected.stats.dense_call = true;
            dense_attention(call)?
        } else {
            block_sparse_attention(call, &selected)?
        };
        Ok(Prefill { output, selected, seconds: started.elapsed().as_secs_f64() })
    }

    /// As [`prefill`](Self::prefill), in chunks of `chunk_tokens` rows, each over all keys before its end, as a server
    /// with bounded memory runs a prompt. Returns one result per chunk.
    ///
    /// Chunks keep the same keys as the whole call only for methods that guarantee it, and only if chunks are at least
    /// `min_prefill_tokens` long.
    ///
    /// # Errors
    /// As [`select`](Self::select); chunks of no rows.
    pub fn prefill_in_chunks(&self, call: &Call<'_>, chunk_tokens: usize) -> Result<Vec<Prefill>, SelectError> {
        if chunk_tokens == 0 {
            let hint = "give a chunk at least one token";
            return Err(SelectError::refused("chunks of 0 tokens", hint));
        }
        let rows = call.shape.num_queries;
        (0..rows)
            .step_by(chunk_tokens)
            .map(|first| self.prefill(&call.chunk(first..(first + chunk_tokens).min(rows))))
            .collect()
    }
}

/// Names of the methods that act in a phase.
pub fn names_of(phase: Phase) -> Vec<&'static str> {
    ENTRIES.iter().filter(|entry| entry.phase == phase || entry.phase == Phase::Both).map(|entry| entry.name).collect()
}
