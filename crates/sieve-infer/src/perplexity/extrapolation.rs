//! The loss on the same tokens after contexts of different lengths, up to more tokens than a training row has.
use super::windows::{Scored, Window};
use super::{EvalDocument, InferError, Pass, check, check_vocabulary};
use crate::words::WordUse;
use serde::Serialize;
use sieve_nn::Qwen3;
use sieve_ops::DeviceBackend;

/// The loss after contexts of one length.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Extrapolation {
    /// Tokens that the model saw, at most.
    pub context: usize,
    /// Tokens predicted, the same ones for every context.
    pub num_tokens: u64,
    /// Mean cross-entropy of a token, in nats.
    pub loss: f64,
    /// Perplexity per token: `exp(loss)`.
    pub perplexity: f64,
    /// This perplexity divided by the first context's. Above 1, the longer context made predictions worse.
    pub ratio: f64,
}

/// Measures the loss on the same tokens after contexts of several lengths. The first length is the baseline.
///
/// Each document is cut into pieces of one token more than the longest context; remainders and shorter documents are
/// left out. In each piece the same tokens at its end are predicted, half as many as the first context has. For each
/// context, the model reads only that many tokens at the end of the piece. `max_pieces` limits the number of pieces.
///
/// # Errors
/// The errors of [`perplexity`](super::perplexity); no document longer than the longest context.
pub fn extrapolation<B: DeviceBackend>(
    model: &Qwen3<B>,
    documents: impl Iterator<Item = Result<EvalDocument, InferError>>,
    contexts: &[usize],
    (batch_tokens, max_pieces): (usize, usize),
    device: &B::Device,
    observe: &mut dyn FnMut(u64),
) -> Result<Vec<Extrapolation>, InferError> {
    let longest = contexts.iter().copied().max().unwrap_or(0);
    let first = contexts.first().copied().unwrap_or(0);
    let stride = longest;
    check(longest, stride, model.shape().max_seq_len)?;
    if let Some(shorter) = contexts.iter().find(|&&context| context < first.max(1)) {
        let what = format!("a context of {shorter} tokens is shorter than the first one, of {first}");
        return Err(InferError::refused(what, "begin with the shortest context, of a token at least"));
    }
    let mut pieces: Vec<Vec<u32>> = Vec::new();
    let (mut num_documents, mut longest_document) = (0, 0);
    for document in documents {
        let document = document?;
        check_vocabulary(&document.tokens, model.shape().vocab_size)?;
        if document.predicted.is_some() {
            let what =
                "longer contexts are measured on whole texts, and of these only the answers are predicted".to_owned();
            return Err(InferError::refused(what, "name plain text, or the column of one by --text-column"));
        }
        num_documents += 1;
        longest_document = longest_document.max(document.tokens.len());
        pieces.extend(document.tokens.chunks_exact(longest + 1).map(<[u32]>::to_vec));
        if pieces.len() >= max_pieces {
            pieces.truncate(max_pieces);
            break;
        }
    }
    if pieces.is_empty() {
        let what =
            format!("no document has {} tokens; the longest of {num_documents} has {longest_document}", longest + 1);
        return Err(InferError::refused(what, "give longer documents, or shorter contexts"));
    }
    let num_scored = first.div_ceil(2);
    let uses = vec![WordUse::NoWord; longest + 1];
    let mut measured: Vec<Extrapolation> = Vec::new();
    let mut num_done = 0;
    for &context in contexts {
        let mut pass = Pass::new(model, context, batch_tokens, device);
        let window = Window { input: longest - context..longest, first_scored: longest - num_scored };
        for piece in &pieces {
            let text = Scored { tokens: piece, uses: &uses, predicted: None };
            if pass.predict(text, &window)? {
                observe(num_done + pass.sums.num_tokens());
            }
        }
        pass.run()?;
        let num_tokens = pass.sums.num_tokens();
        num_done += num_tokens;
        let loss = pass.sums.nats() / num_tokens as f64;
        let base = measured.first().map_or(loss, |first| first.loss);
        measured.push(Extrapolation { context, num_tokens, loss, perplexity: loss.exp(), ratio: (loss - base).exp() });
    }
    Ok(measured)
}
