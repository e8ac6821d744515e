//! The texts that requests ask for, on their way to the thread that owns the model.
use crate::error::ApiError;
use sieve_infer::{Grammar, LogitRules, Sampling, StopTexts, TokenScore};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc;
use std::time::Duration;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

/// One text to write.
#[derive(Debug)]
pub(crate) struct Text {
    /// Index of the text among its request's texts.
    pub(crate) index: usize,
    /// At least one token.
    pub(crate) prompt: Arc<[u32]>,
    /// Tokens after the prompt, at most.
    pub(crate) max_tokens: usize,
    pub(crate) sampling: Sampling,
    pub(crate) rules: LogitRules,
    /// What the text must be, until it begins.
    pub(crate) grammar: Option<Grammar>,
    pub(crate) stop: StopTexts,
    /// Whether the text goes on behind an end token.
    pub(crate) ignores_ends: bool,
    /// How many of the likeliest tokens are given beside each token; `None`: no log-probabilities.
    pub(crate) num_top: Option<usize>,
    /// Whether the prompt's tokens are scored too.
    pub(crate) scores_prompt: bool,
    /// Closed when the client has gone. What waits here is bounded by the text's tokens.
    pub(crate) pieces: UnboundedSender<(usize, Piece)>,
}

/// What happens to a text.
#[derive(Debug)]
pub(crate) enum Piece {
    /// The scores of the prompt's tokens but the first.
    Prompt(Vec<TokenScore>),
    /// More text and the scores of its tokens, either of which may be empty.
    More(String, Vec<TokenScore>),
    /// The text has ended after this number of generated tokens, a final end token included.
    End {
        /// Whether an end token or a stop text ended it, not `max_tokens`.
        has_stopped: bool,
        num_tokens: usize,
        /// Tokens of the prompt that were not read again, because an earlier text began with them.
        num_kept: usize,
    },
    /// The text cannot be continued.
    Failed(ApiError),
}

/// The queue's end at which requests arrive.
#[derive(Debug)]
pub(crate) struct Queue {
    /// `None` after the last text.
    texts: mpsc::Sender<Option<Text>>,
    waiting: Waiting,
    most: usize,
}

/// Number of texts that were sent and have not begun.
#[derive(Clone, Debug, Default)]
pub(crate) struct Waiting(Arc<AtomicUsize>);

impl Waiting {
    /// Counts a text that has left the queue.
    pub(crate) fn has_left(&self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

/// The queue's end from which texts are taken.
#[derive(Debug)]
pub(crate) struct Taken {
    texts: mpsc::Receiver<Option<Text>>,
    has_ended: bool,
}

impl Taken {
    /// Waits for the next text; `None` once the queue has ended.
    pub(crate) fn wait(&mut self) -> Option<Text> {
        if !self.has_ended {
            let next = self.texts.recv().ok().flatten();
            self.has_ended = next.is_none();
            return next;
        }
        None
    }

    /// The next text if it arrives within `time`.
    pub(crate) fn within(&mut self, time: Duration) -> Option<Text> {
        if self.has_ended {
            return None;
        }
        match self.texts.recv_timeout(time) {
            Err(mpsc::RecvTimeoutError::Timeout) => None,
            next => {
                let next = next.ok().flatten();
                self.has_ended = next.is_none();
                next
            }
        }
    }

    /// Whether the last text was taken: no further one comes.
    pub(crate) fn has_ended(&self) -> bool {
        self.has_ended
    }

    /// The texts that have arrived.
    pub(crate) fn arrived(&mut self) -> Vec<Text> {
        let mut arrived = Vec::new();
        while let (false, Ok(text)) = (self.has_ended, self.texts.try_recv()) {
            self.has_ended = text.is_none();
            arrived.extend(text);
        }
        arrived
    }
}

impl Queue {
    /// A queue for `most` texts, the end from which they are taken, and their count.
    pub(crate) fn new(most: usize) -> (Self, Taken, Waiting) {
        let (texts, taken) = mpsc::channel();
        let waiting = Waiting::default();
        (Self { texts, waiting: waiting.clone(), most }, Taken { texts: taken, has_ended: false }, waiting)
    }

    /// Ends the queue for the thread that takes texts, also while a request that is still read holds the queue.
    pub(crate) fn end(&self) {
        // Without that thread nothing is left to end.
        let _ = self.texts.send(None);
    }

    /// Number of texts that wait.
    pub(crate) fn len(&self) -> usize {
        self.waiting.0.load(Relaxed)
    }

    /// Most texts that may wait.
    pub(crate) fn most(&self) -> usize {
        self.most
    }

    /// Takes all `count` texts that `text` makes, or none.
    ///
    /// # Errors
    /// The queue has no place for so many; the server is stopping.
    pub(crate) fn send(
        &self,
        count: usize,
        text: impl Fn(usize, UnboundedSender<(usize, Piece)>) -> Text,
    ) -> Result<UnboundedReceiver<(usize, Piece)>, ApiError> {
        let room = |waiting: usize| Some(waiting + count).filter(|sum| *sum <= self.most);
        self.waiting.0.fetch_update(Relaxed, Relaxed, room).map_err(|_| ApiError::queue_full(self.most))?;
        let (pieces, receiver) = unbounded_channel();
        for index in 0..count {
            self.texts.send(Some(text(index, pieces.clone()))).map_err(|_| ApiError::stopping())?;
        }
        Ok(receiver)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(index: usize, pieces: UnboundedSender<(usize, Piece)>) -> Text {
        Text {
            index,
            prompt: Arc::new([1]),
            max_tokens: 1,
            sampling: Sampling { temperature: 0.0, top_p: 1.0, top_k: None, seed: 0 },
            rules: LogitRules::NONE,
            grammar: None,
            stop: StopTexts::default(),
            ignores_ends: false,
            num_top: None,
            scores_prompt: false,
            pieces,
        }
    }

    /// A request whose reading never ends holds the queue, so a queue that ended with its last holder would keep the
    /// process alive.
    #[test]
    fn a_queue_that_is_ended_ends_while_a_request_holds_it() {
        let (queue, mut taken, _) = Queue::new(4);
        let reader = Arc::new(queue);
        let _pieces = reader.send(2, text).expect("room");
        assert_eq!(taken.arrived().len(), 2);
        assert!(taken.within(Duration::from_millis(1)).is_none() && !taken.has_ended(), "no text came");
        let _pieces = reader.send(1, text).expect("room");
        reader.end();
        let _late = reader.send(1, text).expect("room");
        assert!(taken.within(Duration::from_secs(9)).is_some(), "the text before the end");
        assert!(taken.within(Duration::from_secs(9)).is_none() && taken.has_ended());
        assert!(taken.wait().is_none() && taken.wait().is_none() && taken.arrived().is_empty());
        drop(reader);
    }
}
