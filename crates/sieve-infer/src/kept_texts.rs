//! Texts that have ended: a prompt that begins with one goes on from its cache and is not read again.
//!
//! `OpenTexts` has them, because they may lie in the rows of its cache.
use crate::Continuation;
use sieve_ops::DeviceBackend;
use std::collections::VecDeque;

/// Texts that have ended, with their caches, the oldest first.
///
/// A prompt is compared with the tokens that a text has read, one by one, so that no other text's cache can be taken.
/// Where a text has the same logits however it was read, which holds on a CPU, a prompt that goes on from a kept text
/// has the logits of one that was read whole, to the bit.
#[derive(Debug)]
pub(crate) struct KeptTexts<'a, B: DeviceBackend> {
    texts: VecDeque<(Vec<u32>, Continuation<'a, B>)>,
}

impl<B: DeviceBackend> Default for KeptTexts<'_, B> {
    fn default() -> Self {
        Self { texts: VecDeque::new() }
    }
}

impl<'a, B: DeviceBackend> KeptTexts<'a, B> {
    /// Keeps a text that has read `tokens`.
    pub(crate) fn keep(&mut self, tokens: Vec<u32>, text: Continuation<'a, B>) {
        self.texts.push_back((tokens, text));
    }

    /// Takes the oldest texts out, until no more than `most` are left.
    pub(crate) fn all_but(&mut self, most: usize) -> impl Iterator<Item = Continuation<'a, B>> {
        let too_many = self.texts.len().saturating_sub(most);
        self.texts.drain(..too_many).map(|(_, text)| text)
    }

    /// Keeps the texts alone for which `is_left` holds.
    pub(crate) fn retain(&mut self, is_left: impl Fn(&Continuation<'a, B>) -> bool) {
        self.texts.retain(|(_, text)| is_left(text));
    }

    /// Takes the longest text that `prompt` begins with, and the number of tokens that it has read. At least one token
    /// of the prompt is left to read.
    pub(crate) fn take(&mut self, prompt: &[u32]) -> Option<(usize, Continuation<'a, B>)> {
        let begins = |tokens: &[u32]| tokens.len() < prompt.len() && prompt.starts_with(tokens);
        let kept = self.texts.iter().enumerate().filter(|(_, (tokens, _))| begins(tokens));
        let (at, _) = kept.max_by_key(|(_, (tokens, _))| tokens.len())?;
        let (tokens, text) = self.texts.remove(at)?;
        Some((tokens.len(), text))
    }

    /// The texts, the oldest first.
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Continuation<'a, B>> {
        self.texts.iter_mut().map(|(_, text)| text)
    }

    /// Number of kept texts.
    pub(crate) fn len(&self) -> usize {
        self.texts.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_model::tiny_model;
    use burn_flex::{Flex, FlexDevice};

    #[test]
    fn the_longest_beginning_is_taken_once_and_the_oldest_go_first() {
        let model = tiny_model(sieve_core::Attention::DENSE, 32);
        let text = || Continuation::<Flex>::new(&model, 32, &FlexDevice);
        let mut kept = KeptTexts::default();
        for tokens in [vec![1, 2], vec![1, 2, 3], vec![9], vec![1, 2, 3, 4]] {
            kept.keep(tokens, text());
        }
        // A text as long as the prompt leaves nothing to read, and one with another token is another text.
        let read = |kept: &mut KeptTexts<'_, Flex>, prompt: &[u32]| kept.take(prompt).map(|(read, _)| read);
        assert_eq!(read(&mut kept, &[1, 2, 3, 4]), Some(3));
        assert_eq!(read(&mut kept, &[1, 2, 3, 4]), Some(2));
        assert_eq!(read(&mut kept, &[1, 2, 3, 4]), None);
        assert_eq!(read(&mut kept, &[1, 2, 3, 5, 6]), None);
        assert_eq!(kept.all_but(1).count(), 1);
        assert_eq!((kept.len(), read(&mut kept, &[9, 9])), (1, None));
        assert_eq!(read(&mut kept, &[1, 2, 3, 4, 5, 6, 7, 8, 9]), Some(4));
        assert_eq!(kept.len(), 0);
    }
}
