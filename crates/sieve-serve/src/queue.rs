//! The texts that requests ask for, on their way to the thread that owns the model.
use crate::error::ApiError;
use sieve_infer::{Sampling, StopTexts, TokenScore};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc;
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
    pub(crate) stop: StopTexts,
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
    },
    /// The text cannot be continued.
    Failed(ApiError),
}

/// The queue's end at which requests arrive.
#[derive(Debug)]
pub(crate) struct Queue {
    texts: mpsc::Sender<Text>,
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

impl Queue {
    /// A queue for `most` texts, the end from which they are taken, and their count.
    pub(crate) fn new(most: usize) -> (Self, mpsc::Receiver<Text>, Waiting) {
        let (texts, taken) = mpsc::channel();
        let waiting = Waiting::default();
        (Self { texts, waiting: waiting.clone(), most }, taken, waiting)
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
            self.texts.send(text(index, pieces.clone())).map_err(|_| ApiError::stopping())?;
        }
        Ok(receiver)
    }
}
