//! Log-probabilities of single tokens, and of every token of several prompts in one pass.
use crate::InferError;
use crate::input::{check_row, ids};
use crate::logits::{NextLogits, on_host};
use crate::pass::LOGIT_TOKENS;
use burn::tensor::{Tensor, TensorData};
use sieve_nn::{LayerContext, Qwen3};
use sieve_ops::{DeviceBackend, Documents};

/// Tokens of the prompts that share a forward pass; a longer prompt has a pass alone.
const PASS_TOKENS: usize = 2048;

/// A token with its natural log-probability, and the likeliest tokens at its position.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenScore {
    /// The token.
    pub token: u32,
    /// Natural logarithm of its probability.
    pub log_probability: f64,
    /// The likeliest tokens with their log-probabilities, likeliest first; of equal logits the lower id comes first.
    pub top: Vec<(u32, f64)>,
}

impl TokenScore {
    /// The score of a token by its log-probability, without others.
    pub fn alone(token: u32, log_probability: f64) -> Self {
        Self { token, log_probability, top: Vec::new() }
    }

    /// The score of a token by its log-probability, beside the `num_top` likeliest tokens of the logits before it.
    pub fn beside(token: u32, log_probability: f64, logits: &[f32], num_top: usize) -> Self {
        let own = logits[token as usize];
        let relative = |(id, logit): (u32, f32)| (id, log_probability + f64::from(logit - own));
        Self { token, log_probability, top: largest(logits, num_top).into_iter().map(relative).collect() }
    }
}

/// The tokens with the `count` largest logits, from the largest; of equal logits the lower token is first.
fn largest(logits: &[f32], count: usize) -> Vec<(u32, f32)> {
    let mut found: Vec<(u32, f32)> = Vec::with_capacity(count + 1);
    if count == 0 {
        return found;
    }
    for (id, &logit) in (0..).zip(logits) {
        if found.len() < count || found.last().is_some_and(|last| logit > last.1) {
            let at = found.partition_point(|one| one.1 >= logit);
            found.insert(at, (id, logit));
            found.truncate(count);
        }
    }
    found
}

/// The scores of a prompt.
#[derive(Clone, Debug)]
pub struct PromptScores<B: DeviceBackend> {
    /// The score of each token but the first.
    pub tokens: Vec<TokenScore>,
    /// The logits of the token after the prompt, one row.
    pub next: NextLogits<B>,
}

/// Scores every token of `prompts` but their first ones. Short prompts share a forward pass. `num_top` tokens are
/// given beside each. Log-probabilities equal those of sieve-eval's `run_task`.
///
/// # Errors
/// A prompt that is empty, too long, or has a token outside the vocabulary; output that is NaN or infinite.
pub fn score_prompts<B: DeviceBackend>(
    model: &Qwen3<B>,
    prompts: &[&[u32]],
    num_top: usize,
    device: &B::Device,
) -> Result<Vec<PromptScores<B>>, InferError> {
    for prompt in prompts {
        check_row(prompt, prompt.len(), model.shape())?;
    }
    let (mut scores, mut rest) = (Vec::with_capacity(prompts.len()), prompts);
    while !rest.is_empty() {
        let mut num_tokens = 0;
        let fits = |prompt: &&&[u32]| {
            num_tokens += prompt.len();
            num_tokens <= PASS_TOKENS.min(model.shape().max_seq_len)
        };
        let count = rest.iter().take_while(fits).count().max(1);
        let (some, others) = rest.split_at(count);
        scores.extend(score_row(model, some, num_top, device)?);
        rest = others;
    }
    Ok(scores)
}

/// Scores prompts in one row, each a document of its own.
fn score_row<B: DeviceBackend>(
    model: &Qwen3<B>,
    prompts: &[&[u32]],
    num_top: usize,
    device: &B::Device,
) -> Result<Vec<PromptScores<B>>, InferError> {
    let tokens = prompts.concat();
    let shape = [1, tokens.len()];
    let (mut start, mut end, mut labels) = (Vec::new(), Vec::new(), Vec::new());
    for prompt in prompts {
        let [first, last] = [start.len(), start.len() + prompt.len()].map(|position| position as u32);
        start.resize(last as usize, first);
        end.resize(last as usize, last);
        // No token follows a prompt's last one; the loss of the 0 in its place is not used.
        labels.extend(prompt[1..].iter().chain([&0]).map(|&token| token as i32));
    }
    let documents = Documents::new(&start, &end, shape, device);
    let rope = model.rope(tokens.len(), device);
    let hidden = model.hidden(ids(&tokens, shape, device), &LayerContext::new(&documents, &rope));
    let labels = Tensor::from_data(TensorData::new(labels, shape), device);
    let losses = model.token_losses_of(hidden.clone(), labels).into_data();
    let losses: Vec<f64> = losses.iter::<f64>().collect();
    let mut found: Vec<PromptScores<B>> = Vec::with_capacity(prompts.len());
    let mut of_prompt = Vec::new();
    for first in (0..tokens.len()).step_by(LOGIT_TOKENS) {
        let count = LOGIT_TOKENS.min(tokens.len() - first);
        let on_device = model.logits_of(hidden.clone().narrow(1, first, count)).flatten::<2>(0, 1);
        let logits = on_host(on_device.clone());
        for (position, logits) in (first..).zip(logits.chunks(model.shape().vocab_size)) {
            if position + 1 == end[position] as usize {
                let on_device = on_device.clone().narrow(0, position - first, 1);
                let next = NextLogits::of_one(on_device, logits.to_vec());
                found.push(PromptScores { tokens: std::mem::take(&mut of_prompt), next });
                continue;
            }
            if !losses[position].is_finite() {
                return Err(InferError::NotFinite(position + 1));
            }
            let score = TokenScore::beside(tokens[position + 1], -losses[position], logits, num_top);
            of_prompt.push(score);
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::logits::log_probability;
    use crate::test_model::{NSA, tiny_model, words};
    use crate::{OpenTexts, logits};
    use sieve_core::{Attention, DmaShape};
    use sieve_testing::assert_close;

    #[test]
    fn prompts_of_one_pass_have_the_scores_of_each_alone() {
        let device = Default::default();
        for attention in [Attention::Mha, Attention::Dma(DmaShape::published(5)), Attention::Nsa(NSA)] {
            let model = tiny_model(attention, 64);
            let prompts = [words(17), words(1), words(40), words(23)];
            let prompts: Vec<&[u32]> = prompts.iter().map(Vec::as_slice).collect();
            let scores = score_prompts(&model, &prompts, 3, &device).expect("prompts");
            for (prompt, scores) in prompts.iter().zip(&scores) {
                let all: Vec<f32> = logits(&model, prompt, &device).expect("a prompt").into_vec().expect("f32");
                let mut rows = all.chunks(31);
                for (token, found) in prompt[1..].iter().zip(&scores.tokens) {
                    let row = rows.next().expect("a row");
                    let alone = TokenScore::beside(*token, log_probability(row, *token), row, 3);
                    assert_close("token", &[found.log_probability], &[alone.log_probability], 1e-5);
                    let ids = |score: &TokenScore| score.top.iter().map(|top| top.0).collect::<Vec<_>>();
                    assert_eq!(ids(found), ids(&alone));
                    let sums = [found, &alone].map(|score| score.top.iter().map(|top| top.1).sum::<f64>());
                    assert_close("top", &sums[..1], &sums[1..], 1e-4);
                }
                assert_eq!(scores.tokens.len(), prompt.len() - 1);
                let next = rows.next().expect("a row");
                assert_close("next", &sieve_testing::wide(scores.next.row(0)), &sieve_testing::wide(next), 1e-4);
            }
        }
    }

    #[test]
    fn texts_that_join_between_tokens_have_the_logits_of_each_alone() {
        let device = Default::default();
        for attention in
            [Attention::Mha, Attention::swa(7), Attention::Dma(DmaShape::published(5)), Attention::Nsa(NSA)]
        {
            let model = tiny_model(attention, 64);
            let text = words(40);
            let mut open = OpenTexts::new(&model, [3, 48], None, &device);
            // The data of a text in `open` are its tokens read so far and the tokens of the whole text.
            let check = |read: usize, logits: &[f32]| {
                let all = crate::logits(&model, &text[..read], &device).expect("a text").to_vec::<f32>().expect("f32");
                let last = &all[(read - 1) * 31..];
                assert_close("next", &sieve_testing::wide(logits), &sieve_testing::wide(last), 1e-4);
            };
            for round in 0..8 {
                if [0, 1, 4].contains(&round) {
                    let len = 9 + 3 * round;
                    let mut begun = open.before(&text[..len]).expect("a prompt");
                    check(len, &begun.read(&text[..len]).expect("a prompt"));
                    open.add(begun, (len, len + 3));
                }
                let token = |(read, end): &(usize, usize)| (read < end).then(|| text[*read]);
                let next = |(read, _): &mut (usize, usize), logits: &[f32]| {
                    *read += 1;
                    check(*read, logits);
                };
                open.step(token, next).expect("tokens");
            }
            assert!(open.is_empty() && open.has_room());
        }
    }

    #[test]
    fn the_largest_come_first_and_of_equals_the_lower_id() {
        assert_eq!(largest(&[1.0, 3.0, 2.0, 3.0], 3), [(1, 3.0), (3, 3.0), (2, 2.0)]);
        assert_eq!(largest(&[1.0, 2.0], 5).len(), 2);
        assert_eq!(largest(&[1.0], 0), []);
    }
}
