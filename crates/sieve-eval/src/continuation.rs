//! A text that a model reads piece by piece, with what it keeps of it.
use crate::input::ids;
use crate::{EvalError, Selection};
use sieve_nn::{KvCache, LayerOperands, Qwen3};
use sieve_ops::{RotaryEmbedding, SieveBackend};

/// A prompt and what follows, through the KV cache. A clone goes its own way from there.
#[derive(Clone, Debug)]
pub(crate) struct Continuation<'a, B: SieveBackend> {
    model: &'a Qwen3<B>,
    device: B::Device,
    rope: RotaryEmbedding<B>,
    cache: KvCache<B>,
    selection: Option<Selection>,
}

impl<'a, B: SieveBackend> Continuation<'a, B> {
    /// Nothing read yet, with room for `max_tokens`.
    pub(crate) fn new(model: &'a Qwen3<B>, max_tokens: usize, device: &B::Device) -> Self {
        Self {
            rope: model.rope(max_tokens, device),
            cache: KvCache::new(model.layers.len()),
            selection: None,
            model,
            device: device.clone(),
        }
    }

    /// The same with a selector: a prefill method for the prompt (tokens after it read everything), a decode method for the
    /// tokens after a dense prompt.
    #[must_use]
    pub(crate) fn with_selection(self, selection: Option<Selection>) -> Self {
        Self { selection, ..self }
    }

    /// The selector with what it has computed.
    pub(crate) fn selection(&self) -> Option<&Selection> {
        self.selection.as_ref()
    }

    /// The keys and values held now.
    pub(crate) fn cache(&self) -> &KvCache<B> {
        &self.cache
    }

    /// Reads the prompt, or one more token; logits of the token that comes next.
    ///
    /// # Errors
    /// Operands that the selector refuses.
    pub(crate) fn read(&mut self, tokens: &[u32]) -> Result<Vec<f32>, EvalError> {
        let ids = ids(tokens, [1, tokens.len()], &self.device);
        let (model, cache, rope) = (self.model, &mut self.cache, &self.rope);
        let logits = match &mut self.selection {
            Some(selection) if selection.acts_in_decode() => {
                let attend = &mut |operands: &LayerOperands<B>| {
                    operands.on_host(|operands| selection.continue_text(operands))
                };
                model.next_logits_attending(ids, cache, rope, attend)?
            }
            Some(selection) if cache.num_tokens == 0 => {
                let attend = &mut |operands: &LayerOperands<B>| selection.attend(operands);
                model.next_logits_attending(ids, cache, rope, attend)?
            }
            _ => model.next_logits(ids, cache, rope),
        };
        Ok(logits.into_data().iter::<f32>().collect())
    }
}
