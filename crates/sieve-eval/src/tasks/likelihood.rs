//! How likely a model finds texts after their contexts: many pairs in each forward pass, laid into rows as documents.
use super::TaskModel;
use crate::input::{check_vocabulary, ids};
use crate::rows::Rows;
use crate::{EvalError, Selection};
use burn::tensor::{Int, Tensor, TensorData};
use serde::Serialize;
use sieve_data::Tokenizer;
use sieve_nn::{LayerContext, LayerOperands, Qwen3};
use sieve_ops::{Documents, IGNORE_LABEL, SieveBackend};
use std::cmp::Reverse;

/// Tokens of one forward pass; more only takes memory.
const BATCH_TOKENS: usize = 8192;
/// Shorter rows would hold few pairs each.
const MIN_ROW_TOKENS: usize = 512;
/// Positions whose logits are held at once.
const LOGIT_TOKENS: usize = 256;

/// Of a text after its context.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Likelihood {
    /// Natural logarithm of its probability.
    pub log_likelihood: f64,
    /// Its tokens.
    pub num_tokens: usize,
    /// Whether greedy decoding gives it; only asked where a measure needs it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub is_greedy: Option<bool>,
}

/// Tokens of a context and what follows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Pair {
    tokens: Vec<u32>,
    /// Tokens at the end whose likelihood is asked.
    num_scored: usize,
}

impl Pair {
    /// Splits where lm-evaluation-harness does: white space at the context's end goes to the continuation, both are
    /// tokenised
    /// together, and the continuation is what lies behind as many tokens as the context has alone. An empty context is
    /// the
    /// end-of-document token. `None` where nothing is left to score.
    pub(super) fn encode(
        tokenizer: &Tokenizer,
        eos_id: u32,
        context: &str,
        continuation: &str,
    ) -> Result<Option<Self>, EvalError> {
        if context.is_empty() {
            let mut tokens = tokenizer.encode(continuation)?;
            if tokens.first() != Some(&eos_id) {
                tokens.insert(0, eos_id);
            }
            let num_scored = tokens.len() - 1;
            return Ok((num_scored > 0).then_some(Self { tokens, num_scored }));
        }
        let tokens = tokenizer.encode(&format!("{context}{continuation}"))?;
        let before = tokenizer.encode(context.trim_end())?.len();
        let num_scored = tokens.len().saturating_sub(before);
        // A first token has nothing before it that could predict it.
        Ok((num_scored > 0 && before > 0).then_some(Self { tokens, num_scored }))
    }

    /// Tokens that go into the model.
    pub(super) fn num_inputs(&self) -> usize {
        self.tokens.len() - 1
    }

    /// All tokens, and how many at the end are scored.
    #[cfg(test)]
    pub(super) fn parts(&self) -> (&[u32], usize) {
        (&self.tokens, self.num_scored)
    }

    /// Leaves tokens out at the beginning until `num_inputs` go in.
    pub(super) fn cut(&mut self, num_inputs: usize) {
        let surplus = self.num_inputs().saturating_sub(num_inputs);
        self.tokens.drain(..surplus);
        self.num_scored = self.num_scored.min(self.num_inputs());
    }
}

/// The likelihood of every pair, in their order. `observe` hears how many are done.
pub(super) fn likelihoods<B: SieveBackend>(
    model: &TaskModel<'_, B>,
    pairs: &[Pair],
    with_greedy: bool,
    mut selection: Option<&mut Selection>,
    observe: &mut dyn FnMut(usize),
) -> Result<Vec<Likelihood>, EvalError> {
    let TaskModel { model, device, .. } = *model;
    let shape = model.shape();
    for pair in pairs {
        check_vocabulary(&pair.tokens, shape.vocab_size)?;
    }
    let longest = pairs.iter().map(Pair::num_inputs).max().unwrap_or(0);
    let row_len = longest.max(MIN_ROW_TOKENS.min(shape.max_seq_len));
    let rope = model.rope(row_len, device);
    // The longest first: a full memory is met at once, and short pairs fill the rows' ends.
    let mut order: Vec<usize> = (0..pairs.len()).collect();
    order.sort_by_key(|&n| Reverse(pairs[n].num_inputs()));
    let none = Likelihood {
        log_likelihood: 0.0,
        num_tokens: 0,
        is_greedy: with_greedy.then_some(true),
    };
    let mut found = vec![none; pairs.len()];
    let mut rows = Rows::new(row_len, (BATCH_TOKENS / row_len.max(1)).max(1));
    let mut done = 0;
    let mut run = |rows: &mut Rows<usize>, end: usize| {
        let Some(batch) = rows.batch() else {
            return Ok(());
        };
        let documents = Documents::new(&batch.start, &batch.end, batch.shape, device);
        let context = LayerContext::new(&documents, &rope);
        let ids = ids(&batch.tokens, batch.shape, device);
        let hidden = match &mut selection {
            None => model.hidden(ids, &context),
            Some(selection) => {
                let attend = &mut |operands: &LayerOperands<B>| selection.attend(operands);
                model.hidden_attending(ids, &context, attend)?
            }
        };
        let labels = TensorData::new(batch.labels.clone(), batch.shape);
        let labels = Tensor::from_data(labels, device);
        let (head, embed) = (&model.head, &model.embed_tokens);
        let losses = head.token_losses(hidden.clone(), labels, embed).into_data();
        let scored = |n: &usize| batch.labels[*n] != IGNORE_LABEL;
        let scored: Vec<usize> = (0..batch.labels.len()).filter(scored).collect();
        let losses: Vec<f64> = losses.iter::<f64>().collect();
        for (&at, &place) in scored.iter().zip(&batch.places) {
            found[place].log_likelihood -= losses[at];
            found[place].num_tokens += 1;
        }
        if with_greedy {
            let likeliest = likeliest(model, hidden, &scored, device);
            for ((&at, &place), likeliest) in scored.iter().zip(&batch.places).zip(likeliest) {
                if likeliest != i64::from(batch.labels[at]) {
                    found[place].is_greedy = Some(false);
                }
            }
        }
        for &n in &order[done..end] {
            if !found[n].log_likelihood.is_finite() {
                let num_tokens = pairs[n].num_inputs();
                return Err(EvalError::NotFinite { num_tokens });
            }
        }
        done = end;
        observe(done);
        rows.clear();
        Ok(())
    };
    for (before, &n) in order.iter().enumerate() {
        let pair = &pairs[n];
        let input = 0..pair.num_inputs();
        let first_scored = pair.tokens.len() - 1 - pair.num_scored;
        let places = || std::iter::repeat_n(n, pair.num_scored);
        if !rows.push(&pair.tokens, input.clone(), first_scored, places()) {
            run(&mut rows, before)?;
            let fits = rows.push(&pair.tokens, input, first_scored, places());
            assert!(fits, "a pair fits a row");
        }
    }
    run(&mut rows, order.len())?;
    Ok(found)
}

/// The likeliest token after each of some positions.
fn likeliest<B: SieveBackend>(
    model: &Qwen3<B>,
    hidden: Tensor<B, 3>,
    positions: &[usize],
    device: &B::Device,
) -> Vec<i64> {
    let hidden: Tensor<B, 2> = hidden.flatten(0, 1);
    let mut tokens = Vec::with_capacity(positions.len());
    for some in positions.chunks(LOGIT_TOKENS) {
        let at: Vec<i32> = some.iter().map(|&at| at as i32).collect();
        let at = Tensor::<B, 1, Int>::from_data(TensorData::new(at, [some.len()]), device);
        let rows = hidden.clone().select(0, at).unsqueeze::<3>();
        let logits = model.head.logits(rows, &model.embed_tokens);
        tokens.extend(logits.argmax(2).into_data().iter::<i64>());
    }
    tokens
}
