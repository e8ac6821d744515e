//! Cuts documents into the windows that a model reads.
use crate::rows::Rows;
use crate::words::WordUse;
use std::ops::Range;

/// A part of a document that the model reads at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Window {
    /// Range of the document's tokens that the model reads.
    pub(super) input: Range<usize>,
    /// From this input to the last one, the next token is scored. Earlier inputs were scored in an earlier window.
    pub(super) first_scored: usize,
}

impl Window {
    /// Number of predictions that count in this window.
    #[cfg(test)]
    fn num_scored(&self) -> usize {
        self.input.end - self.first_scored
    }
}

/// The tokens of a text, and what is known of each as a prediction.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scored<'a> {
    pub(super) tokens: &'a [u32],
    pub(super) uses: &'a [WordUse],
    /// The tokens that count; `None` for all.
    pub(super) predicted: Option<&'a [Range<usize>]>,
}

impl Scored<'_> {
    fn counts(&self, token: usize) -> bool {
        self.predicted.is_none_or(|ranges| ranges.iter().any(|range| range.contains(&token)))
    }

    /// Whether any prediction of a window counts.
    pub(super) fn counts_in(&self, window: &Window) -> bool {
        (window.first_scored + 1..window.input.end + 1).any(|token| self.counts(token))
    }
}

/// The windows of a document of `len` tokens. Each token but the first is scored in exactly one window.
pub(super) fn windows(len: usize, context: usize, stride: usize) -> impl Iterator<Item = Window> {
    // The last token is no input, since nothing follows it.
    let num_inputs = len.saturating_sub(1);
    let mut start = 0;
    let mut first_scored = 0;
    std::iter::from_fn(move || {
        if first_scored >= num_inputs {
            return None;
        }
        let end = (start + context).min(num_inputs);
        let window = Window { input: start..end, first_scored };
        first_scored = end;
        start += stride;
        Some(window)
    })
}

/// The windows of lm-evaluation-harness's `loglikelihood_rolling` (`get_rolling_token_windows` with a context of one
/// token, then `make_disjoint_window`) over `len` tokens; the first token is the prefix. Each other token is scored
/// in exactly one window. Windows do not overlap, except that the last one begins earlier, so that it is as long as the
/// others.
pub(super) fn rolling_windows(len: usize, context: usize) -> impl Iterator<Item = Window> {
    let num_inputs = len.saturating_sub(1);
    (0..num_inputs).step_by(context).map(move |first_scored| {
        let end = (first_scored + context).min(num_inputs);
        Window { input: end.saturating_sub(context)..end, first_scored }
    })
}

/// What a prediction sees: how many tokens, and how far back its word was last used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// Tokens of the document that the prediction sees.
    pub(super) num_seen: usize,
    /// Last use of the predicted token's word. A word last used before the window counts as new.
    pub(super) word: WordUse,
}

/// Adds a window to a row with enough room; returns false if there is none.
pub(super) fn push(rows: &mut Rows<Place>, text: Scored<'_>, window: &Window) -> bool {
    let places = (window.first_scored..window.input.end).map(|position| {
        let num_seen = position + 1 - window.input.start;
        let word = match text.uses[position + 1] {
            WordUse::Again { distance } if distance as usize > num_seen => WordUse::New,
            used => used,
        };
        text.counts(position + 1).then_some(Place { num_seen, word })
    });
    rows.push(text.tokens, window.input.clone(), window.first_scored, places)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rows::PackedRows;
    use sieve_ops::IGNORE_LABEL;

    #[test]
    fn every_token_but_the_first_is_predicted_once_with_enough_context() {
        for len in 0..40 {
            for context in 1..12 {
                for stride in 1..=context {
                    let mut predicted = vec![0; len];
                    for (n, window) in windows(len, context, stride).enumerate() {
                        assert!(window.input.len() <= context && !window.input.is_empty());
                        assert!(window.num_scored() >= 1);
                        for position in window.first_scored..window.input.end {
                            predicted[position + 1] += 1;
                            let seen = position + 1 - window.input.start;
                            assert!(n == 0 || seen > context - stride, "{len} {context} {stride}");
                        }
                    }
                    let expected: Vec<i32> = (0..len).map(|n| i32::from(n > 0)).collect();
                    assert_eq!(predicted, expected, "{len} {context} {stride}");
                }
            }
        }
    }

    /// A text of this many tokens after a prefix, and its windows by lm-evaluation-harness.
    #[derive(serde::Deserialize)]
    struct Rolling {
        num_tokens: usize,
        context: usize,
        /// For each window, the tokens that the model sees, then the tokens it predicts.
        windows: Vec<[Vec<usize>; 2]>,
    }

    #[test]
    fn rolling_windows_agree_with_lm_evaluation_harness() {
        let cases = include_str!("../../../../tests/golden/rolling_windows.json");
        let cases: Vec<Rolling> = serde_json::from_str(cases).expect("its form");
        assert_eq!(cases.len(), 65);
        for Rolling { num_tokens, context, windows } in cases {
            let ours = rolling_windows(num_tokens + 1, context).map(|window| {
                let seen = window.input.start..window.first_scored + 1;
                let predicted = window.first_scored + 1..window.input.end + 1;
                [seen.collect(), predicted.collect()]
            });
            let ours: Vec<[Vec<usize>; 2]> = ours.collect();
            assert_eq!(ours, windows, "{num_tokens} tokens, context {context}");
        }
    }

    #[test]
    fn windows_share_rows_and_keep_their_bounds() {
        let mut rows = Rows::new(5, 2);
        let window = |input: Range<usize>, first_scored| Window { input, first_scored };
        let tokens = [10, 11, 12, 13, 14, 15];
        let again = |distance| WordUse::Again { distance };
        let (new, none) = (WordUse::New, WordUse::NoWord);
        let uses = [none, new, again(1), again(3), none, again(2)];
        let text = Scored { tokens: &tokens, uses: &uses, predicted: None };
        assert!(push(&mut rows, text, &window(0..3, 0)));
        assert!(push(&mut rows, text, &window(3..5, 4)));
        assert!(push(&mut rows, text, &window(1..4, 1)));
        assert!(!push(&mut rows, text, &window(0..3, 0)), "two rows are full");
        let place = |num_seen, word| Place { num_seen, word };
        let ignored = IGNORE_LABEL;
        assert_eq!(
            rows.batch(),
            Some(PackedRows {
                shape: [2, 5],
                tokens: vec![10, 11, 12, 13, 14, 11, 12, 13, 0, 0],
                labels: vec![11, 12, 13, ignored, 15, 12, 13, 14, ignored, ignored],
                start: vec![0, 0, 0, 3, 3, 0, 0, 0, 3, 3],
                end: vec![3, 3, 3, 5, 5, 3, 3, 3, 5, 5],
                places: vec![
                    place(1, new),
                    place(2, again(1)),
                    place(3, again(3)),
                    place(2, again(2)),
                    // The third window begins after the last use of its second word, which counts as new.
                    place(1, again(1)),
                    place(2, new),
                    place(3, none),
                ],
            })
        );
        rows.clear();
        assert_eq!(rows.batch(), None);
    }

    #[test]
    fn tokens_that_are_not_predicted_are_read_and_have_no_label() {
        let (tokens, uses) = ([10, 11, 12, 13, 14, 15], [WordUse::NoWord; 6]);
        // The first token has no token before it that could predict it.
        let predicted = [0..2, 4..6];
        let text = Scored { tokens: &tokens, uses: &uses, predicted: Some(&predicted) };
        let mut rows = Rows::new(5, 1);
        let whole = Window { input: 0..5, first_scored: 0 };
        assert!(push(&mut rows, text, &whole));
        let batch = rows.batch().expect("a row");
        let ignored = IGNORE_LABEL;
        assert_eq!(batch.labels, [11, ignored, ignored, 14, 15]);
        assert_eq!(batch.places.iter().map(|place| place.num_seen).collect::<Vec<_>>(), [1, 4, 5]);
        for (window, counts) in [(0..3, true), (1..3, false), (3..4, true)] {
            let window = Window { first_scored: window.start, input: window };
            assert_eq!(text.counts_in(&window), counts, "{window:?}");
        }
    }
}
