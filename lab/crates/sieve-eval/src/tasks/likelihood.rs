//! Log-likelihoods of continuations after contexts. Many (context, continuation) pairs go into one forward pass, packed
//! into rows as documents; the prefix that a question's pairs share is computed once. Long prompts go through the KV
//! cache instead.
use super::size::TaskSize;
use crate::EvalError;
use burn::tensor::{Int, Tensor, TensorData};
use serde::Serialize;
use sieve_data::{DataError, Tokenizer};
use sieve_infer::input::{check_vocabulary, ids};
use sieve_infer::pass::LOGIT_TOKENS;
use sieve_infer::rows::Rows;
use sieve_infer::{Continuation, Ending, InferError, Selection, TaskModel, texts_together};
use sieve_nn::{LayerContext, Qwen3, SharedPrompts};
use sieve_ops::{DeviceBackend, Documents, RotaryEmbedding};
use std::cmp::Reverse;
use std::collections::HashMap;
use std::ops::Range;

/// Tokens of one forward pass, with shared prefixes counted once for each pair. More would take memory and gain no
/// time.
const BATCH_TOKENS: usize = 8192;
/// If the pairs of a question share more tokens than this, they go through the KV cache. In a packed forward pass
/// attention would read the prefix once for each pair, which dominates for long prompts.
const LONG_PROMPT: usize = 4096;
/// Tokens of a packed row, at least, so that it holds several pairs.
const MIN_ROW_TOKENS: usize = 512;

/// Likelihood of a text after its context.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Likelihood {
    /// Natural logarithm of the text's probability given its context.
    pub log_likelihood: f64,
    /// Number of tokens of the text.
    pub num_tokens: usize,
    /// Whether greedy decoding gives the text; `None` if the measure does not need it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub is_greedy: Option<bool>,
}

/// How a text becomes tokens: [`Tokenizer::encode_with_bos`], or [`Tokenizer::encode_chat`].
pub(super) type Encode = fn(&Tokenizer, &str) -> Result<Vec<u32>, DataError>;

/// Tokens of a context followed by its continuation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Pair {
    tokens: Vec<u32>,
    /// Number of tokens of the continuation, whose likelihood is asked.
    num_scored: usize,
}

impl Pair {
    /// Tokenises and splits as lm-evaluation-harness does. White space at the context's end belongs to the
    /// continuation. Both are tokenised together, after the BOS token if the tokenizer's template has one. The
    /// continuation begins after as many tokens as the context has alone. An empty context becomes `prefix_id`. `None`
    /// if the continuation has no token.
    pub(super) fn encode(
        tokenizer: &Tokenizer,
        encode: Encode,
        prefix_id: u32,
        [context, continuation]: [&str; 2],
    ) -> Result<Option<Self>, EvalError> {
        if context.is_empty() {
            let mut tokens = tokenizer.encode(continuation)?;
            if tokens.first() != Some(&prefix_id) {
                tokens.insert(0, prefix_id);
            }
            let num_scored = tokens.len() - 1;
            return Ok((num_scored > 0).then_some(Self { tokens, num_scored }));
        }
        let tokens = encode(tokenizer, &format!("{context}{continuation}"))?;
        let before = encode(tokenizer, context.trim_end())?.len();
        let num_scored = tokens.len().saturating_sub(before);
        // before == 0: the first token of a text cannot be scored, as nothing predicts it.
        Ok((num_scored > 0 && before > 0).then_some(Self { tokens, num_scored }))
    }

    /// Number of tokens that the model reads: all but the last.
    pub(super) fn num_inputs(&self) -> usize {
        self.tokens.len() - 1
    }

    fn inputs(&self) -> &[u32] {
        &self.tokens[..self.num_inputs()]
    }

    fn context(&self) -> &[u32] {
        &self.tokens[..self.tokens.len() - self.num_scored]
    }

    fn ending(&self) -> &[u32] {
        &self.tokens[self.tokens.len() - self.num_scored..]
    }

    /// All tokens, and how many at the end are scored.
    #[cfg(test)]
    pub(super) fn parts(&self) -> (&[u32], usize) {
        (&self.tokens, self.num_scored)
    }

    /// Removes tokens at the beginning until the model reads at most `num_inputs`.
    pub(super) fn cut(&mut self, num_inputs: usize) {
        let surplus = self.num_inputs().saturating_sub(num_inputs);
        self.tokens.drain(..surplus);
        self.num_scored = self.num_scored.min(self.num_inputs());
    }
}

/// The likelihood of every pair, in order. Pairs of one question are in the same forward pass. `observe` is called with
/// the number of pairs done.
pub(super) fn likelihoods<B: DeviceBackend>(
    model: &TaskModel<'_, B>,
    questions: &[Vec<Pair>],
    with_greedy: bool,
    mut selection: Option<&mut Selection>,
    observe: &mut dyn FnMut(usize),
) -> Result<Vec<Likelihood>, EvalError> {
    for pair in questions.iter().flatten() {
        check_vocabulary(&pair.tokens, model.model.shape().vocab_size)?;
    }
    let mut first_pair = 0;
    let questions: Vec<Question> = (questions.iter())
        .map(|pairs| {
            first_pair += pairs.len();
            Question::new(pairs, first_pair - pairs.len())
        })
        .collect();
    let mut found = vec![None; first_pair];
    let mut keep = |pair_idx: usize, ending: Ending, num_tokens: usize| {
        found[pair_idx] = Some(Likelihood {
            log_likelihood: ending.log_likelihood,
            num_tokens,
            is_greedy: with_greedy.then_some(ending.is_greedy),
        });
    };
    let is_long = |question: &&Question| selection.is_some() || question.prefix > LONG_PROMPT;
    let (long, short): (Vec<&Question>, Vec<&Question>) = questions.iter().partition(is_long);
    let mut done = 0;
    for question in long {
        score_after_contexts(model, question.pairs, selection.as_deref_mut(), |n, ending| {
            keep(question.first_pair + n, ending, question.pairs[n].num_scored);
        })?;
        done += question.pairs.len();
        observe(done);
    }
    score_packed(model, short, with_greedy, &mut keep, &mut |num_pairs| {
        done += num_pairs;
        observe(done);
    })?;
    Ok(found.into_iter().map(|found| found.expect("every pair was asked")).collect())
}

/// Scores as many questions in a forward pass as [`BATCH_TOKENS`] hold, packed into rows. `keep` gets the index of each
/// pair, its ending's likelihood and number of scored tokens; `observe` the number of pairs of each pass.
fn score_packed<B: DeviceBackend>(
    model: &TaskModel<'_, B>,
    mut questions: Vec<&Question<'_>>,
    with_greedy: bool,
    keep: &mut impl FnMut(usize, Ending, usize),
    observe: &mut dyn FnMut(usize),
) -> Result<(), EvalError> {
    // Sorted from the longest: memory that is too small shows at once, and short texts fill the ends of rows.
    questions.sort_by_key(|question| Reverse(question.num_repeated));
    let longest = questions.iter().flat_map(|question| question.pairs).map(Pair::num_inputs).max().unwrap_or(0);
    let row_len = longest.max(MIN_ROW_TOKENS.min(model.model.shape().max_seq_len));
    let rope = model.model.rope(row_len, model.device);
    let mut rest = &questions[..];
    while !rest.is_empty() {
        let mut num_tokens = 0;
        let fits = |question: &&&Question| {
            num_tokens += question.num_repeated;
            num_tokens <= BATCH_TOKENS
        };
        let count = rest.iter().take_while(fits).count().max(1);
        let (some, others) = rest.split_at(count);
        let mut layout = Layout::new(row_len);
        for question in some {
            layout.add(question);
        }
        layout.run(model, &rope, with_greedy, keep)?;
        observe(some.iter().map(|question| question.pairs.len()).sum());
        rest = others;
    }
    Ok(())
}

/// Sizes of [`likelihoods`], for an estimate of its memory.
pub(super) fn size(questions: &[Vec<Pair>], with_selector: bool) -> TaskSize {
    let mut size = TaskSize { num_caches: 1, ..TaskSize::default() };
    for pairs in questions {
        let unused_index = 0;
        let question = Question::new(pairs, unused_index);
        let longest = pairs.iter().map(Pair::num_inputs).max().unwrap_or(0);
        size.longest = size.longest.max(longest);
        if with_selector || question.prefix > LONG_PROMPT {
            size.pass = size.pass.max(longest);
            // The cache has room for the last token too, which is no input.
            size.cached = size.cached.max(longest + 1);
            // One cache for the prompt, and one for each ending decoded at the same time.
            let endings = texts_together(longest).min(pairs.len());
            size.num_caches = size.num_caches.max(1 + endings);
        } else {
            size.pass = size.pass.max(question.num_repeated).max(BATCH_TOKENS);
        }
    }
    size
}

/// The (context, text) pairs of one question.
struct Question<'a> {
    pairs: &'a [Pair],
    /// Index of the first pair among the pairs of all questions.
    first_pair: usize,
    /// Number of input tokens that all pairs begin with.
    prefix: usize,
    /// Input tokens of all pairs, with the prefix counted for each pair.
    num_repeated: usize,
}

impl<'a> Question<'a> {
    /// Finds the prefix that all pairs share, at most as long as the inputs of the shortest pair.
    fn new(pairs: &'a [Pair], first_pair: usize) -> Self {
        let num_shared = |a: &Pair, b: &Pair| {
            let both = a.tokens.iter().zip(&b.tokens);
            both.take_while(|(a, b)| a == b).count()
        };
        let shortest = pairs.iter().map(Pair::num_inputs).min().unwrap_or(0);
        let shared = pairs.iter().map(|pair| num_shared(pair, &pairs[0])).min();
        Self {
            pairs,
            first_pair,
            prefix: shared.unwrap_or(0).min(shortest),
            num_repeated: pairs.iter().map(Pair::num_inputs).sum(),
        }
    }
}

/// Reads each context into a KV cache, then the continuations after it. Neighbouring pairs with the same context share
/// one reading. `keep` gets the index of each pair and its ending's likelihood. With a prefill selector the context is
/// sparse and later tokens attend to every key; with a decode method the context is dense and later tokens are sparse.
pub(super) fn score_after_contexts<B: DeviceBackend>(
    model: &TaskModel<'_, B>,
    pairs: &[Pair],
    mut selection: Option<&mut Selection>,
    mut keep: impl FnMut(usize, Ending),
) -> Result<(), EvalError> {
    let mut first = 0;
    for same in pairs.chunk_by(|a, b| a.context() == b.context()) {
        let room = same.iter().map(|pair| pair.tokens.len()).max().unwrap_or(0);
        let text = Continuation::new(model.model, room, model.device);
        let mut text = text.with_copy_of(selection.as_deref());
        let logits = text.read(same[0].context())?;
        let endings: Vec<&[u32]> = same.iter().map(Pair::ending).collect();
        for (n, ending) in text.endings(&logits, &endings, texts_together(room))?.into_iter().enumerate() {
            keep(first + n, ending);
        }
        text.add_totals_to(selection.as_deref_mut());
        first += same.len();
    }
    Ok(())
}

/// The inputs of one forward pass. A prefix that several texts share is computed once outside attention.
struct Layout {
    tokens: Vec<u32>,
    positions: Vec<i32>,
    /// Complete texts as attention reads them, packed into rows; each token is given as its index in `tokens`.
    texts: Rows<()>,
    /// Number of tokens in `texts`.
    num_texts_tokens: usize,
    scored: Vec<ScoredToken>,
    /// (index of the pair, number of its scored tokens).
    pairs: Vec<(usize, usize)>,
}

/// A token of a continuation, whose likelihood is asked.
struct ScoredToken {
    token: u32,
    /// Index in [`Layout::tokens`] of the input that predicts this token.
    input: usize,
    /// Index of its pair among the pairs of all questions.
    pair: usize,
}

impl Layout {
    /// A layout without questions, in rows of `row_len` tokens.
    fn new(row_len: usize) -> Self {
        Self {
            tokens: Vec::new(),
            positions: Vec::new(),
            texts: Rows::new(row_len, usize::MAX),
            num_texts_tokens: 0,
            scored: Vec::new(),
            pairs: Vec::new(),
        }
    }

    /// Adds the inputs of a question: the prefix once, then each pair's own tokens. Attention reads a text for each
    /// pair that has own tokens, or if none has any, the prefix.
    fn add(&mut self, question: &Question<'_>) {
        let prefix = self.append(question.pairs[0].inputs(), 0..question.prefix);
        let has_own = |pair: &Pair| pair.num_inputs() > question.prefix;
        if !question.pairs.iter().any(has_own) {
            self.add_text(&prefix);
        }
        for (n, pair) in question.pairs.iter().enumerate() {
            let mut text = prefix.clone();
            if has_own(pair) {
                text.extend(self.append(pair.inputs(), question.prefix..pair.num_inputs()));
                self.add_text(&text);
            }
            let pair_idx = question.first_pair + n;
            // The inputs lack the last token, so that the last `num_scored` inputs predict the ending.
            let inputs = &text[text.len() - pair.num_scored..];
            let scored = inputs.iter().zip(pair.ending());
            self.scored.extend(scored.map(|(&input, &token)| ScoredToken {
                token,
                input: input as usize,
                pair: pair_idx,
            }));
            self.pairs.push((pair_idx, pair.num_scored));
        }
    }

    /// Appends tokens; returns their indices in `tokens`.
    fn append(&mut self, tokens: &[u32], range: Range<usize>) -> Vec<u32> {
        let first = self.tokens.len() as u32;
        self.tokens.extend_from_slice(&tokens[range.clone()]);
        self.positions.extend(range.map(|position| position as i32));
        (first..self.tokens.len() as u32).collect()
    }

    fn add_text(&mut self, text: &[u32]) {
        // Predictions are listed in `scored`, not in the rows.
        let (whole, first_scored) = (0..text.len(), text.len());
        let fits = self.texts.push(text, whole, first_scored, std::iter::empty());
        assert!(fits, "a text fits a row");
        self.num_texts_tokens += text.len();
    }

    /// Runs the forward pass and gives `keep` the likelihood of each pair.
    fn run<B: DeviceBackend>(
        self,
        task_model: &TaskModel<'_, B>,
        rope: &RotaryEmbedding<B>,
        with_greedy: bool,
        keep: &mut impl FnMut(usize, Ending, usize),
    ) -> Result<(), EvalError> {
        let TaskModel { model, device, .. } = *task_model;
        let hidden = self.hidden_of_scored(task_model, rope);
        let labels = self.scored.iter().map(|scored| scored.token as i32);
        let labels = indices::<B>(labels, device).unsqueeze::<2>();
        let losses = model.token_losses_of(hidden.clone(), labels).into_data();
        let likeliest = if with_greedy { likeliest(model, hidden) } else { Vec::new() };
        let mut endings = HashMap::<usize, Ending>::new();
        for (n, (loss, scored)) in losses.iter::<f64>().zip(&self.scored).enumerate() {
            let ending = endings.entry(scored.pair).or_default();
            ending.log_likelihood -= loss;
            // Without `with_greedy` it stays true, and is not reported.
            ending.is_greedy &= likeliest.get(n).is_none_or(|&first| first == i64::from(scored.token));
        }
        for (pair, num_scored) in self.pairs {
            let ending = endings[&pair];
            if !ending.log_likelihood.is_finite() {
                return Err(InferError::NotFinite(self.tokens.len()).into());
            }
            keep(pair, ending, num_scored);
        }
        Ok(())
    }

    /// The model's output at the input before each scored token, `[1, scored, d_model]`.
    fn hidden_of_scored<B: DeviceBackend>(&self, model: &TaskModel<'_, B>, rope: &RotaryEmbedding<B>) -> Tensor<B, 3> {
        let TaskModel { model, device, .. } = *model;
        let batch = self.texts.batch().expect("one text at least");
        // Where each of `tokens` lies in the packed rows.
        let mut places = vec![None; self.tokens.len()];
        for (place, &token) in batch.tokens.iter().enumerate() {
            // `get_or_insert` keeps the first place of each token. Padding also has index 0, but comes after token 0.
            places[token as usize].get_or_insert(place);
        }
        let place = |place: &Option<usize>| place.expect("every token is part of a text");
        let places: Vec<usize> = places.iter().map(place).collect();
        let documents = Documents::new(&batch.start, &batch.end, batch.shape, device);
        let inputs = self.scored.iter().map(|scored| scored.input);
        // Without a shared prefix, the model simply reads the packed rows.
        let is_shared = self.num_texts_tokens > self.tokens.len();
        let (hidden, rows) = if is_shared {
            let shape = [1, self.tokens.len()];
            let whole = Documents::whole_rows(shape, device);
            let positions = TensorData::new(self.positions.clone(), shape);
            let shared = SharedPrompts::new(documents, &batch.tokens, &places, device);
            let context = LayerContext {
                positions: Tensor::from_data(positions, device),
                shared: Some(&shared),
                ..LayerContext::new(&whole, rope)
            };
            let rows: Vec<i32> = inputs.map(|input| input as i32).collect();
            (model.hidden(ids(&self.tokens, shape, device), &context), rows)
        } else {
            let tokens: Vec<u32> = (batch.tokens.iter()).map(|&token| self.tokens[token as usize]).collect();
            let context = LayerContext::new(&documents, rope);
            let rows: Vec<i32> = inputs.map(|input| places[input] as i32).collect();
            (model.hidden(ids(&tokens, batch.shape, device), &context), rows)
        };
        let hidden: Tensor<B, 2> = hidden.flatten(0, 1);
        hidden.select(0, indices(rows, device)).unsqueeze()
    }
}

/// A tensor of indices, `[indices]`.
fn indices<B: DeviceBackend>(values: impl IntoIterator<Item = i32>, device: &B::Device) -> Tensor<B, 1, Int> {
    let values: Vec<i32> = values.into_iter().collect();
    let len = values.len();
    Tensor::from_data(TensorData::new(values, [len]), device)
}

/// The likeliest next token at each position of `hidden`, `[1, positions, d_model]`.
fn likeliest<B: DeviceBackend>(model: &Qwen3<B>, hidden: Tensor<B, 3>) -> Vec<i64> {
    let [_, num_places, _] = hidden.dims();
    let mut tokens = Vec::with_capacity(num_places);
    for first in (0..num_places).step_by(LOGIT_TOKENS) {
        let count = LOGIT_TOKENS.min(num_places - first);
        let rows = hidden.clone().narrow(1, first, count);
        let logits = model.logits_of(rows);
        tokens.extend(logits.argmax(2).into_data().iter::<i64>());
    }
    tokens
}
