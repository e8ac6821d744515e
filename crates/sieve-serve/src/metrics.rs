//! Counters of the server, in the text form of Prometheus.
use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

/// Numbers since the start, and of this moment.
#[derive(Debug, Default)]
pub(crate) struct Metrics {
    /// Answers by path and status.
    answers: Mutex<BTreeMap<(&'static str, u16), u64>>,
    /// Tokens of prompts that were read.
    pub(crate) prompt_tokens: AtomicU64,
    /// Of these, tokens that an earlier text had read.
    pub(crate) kept_tokens: AtomicU64,
    /// Tokens that were generated.
    pub(crate) new_tokens: AtomicU64,
    /// Texts that ended because their client had gone.
    pub(crate) cancelled: AtomicU64,
    /// Texts that are decoded now.
    pub(crate) open: AtomicU64,
    /// Tokens that fit into the texts' common cache as it is now, in its free rows too.
    pub(crate) cache_room: AtomicU64,
}

impl Metrics {
    pub(crate) fn count_answer(&self, path: &'static str, status: u16) {
        let mut answers = self.answers.lock().unwrap_or_else(PoisonError::into_inner);
        *answers.entry((path, status)).or_default() += 1;
    }

    /// All numbers as text. `waiting` texts are in the queue.
    pub(crate) fn text(&self, waiting: usize) -> String {
        let mut text = "# TYPE sieve_requests_total counter\n".to_owned();
        for ((path, status), count) in self.answers.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            // Writing to a string does not fail.
            let _ = writeln!(text, "sieve_requests_total{{path=\"{path}\",status=\"{status}\"}} {count}");
        }
        let numbers = [
            ("sieve_prompt_tokens_total", "counter", self.prompt_tokens.load(Relaxed)),
            ("sieve_kept_prompt_tokens_total", "counter", self.kept_tokens.load(Relaxed)),
            ("sieve_new_tokens_total", "counter", self.new_tokens.load(Relaxed)),
            ("sieve_cancelled_texts_total", "counter", self.cancelled.load(Relaxed)),
            ("sieve_open_texts", "gauge", self.open.load(Relaxed)),
            ("sieve_waiting_texts", "gauge", waiting as u64),
            ("sieve_common_cache_tokens", "gauge", self.cache_room.load(Relaxed)),
        ];
        for (name, kind, value) in numbers {
            let _ = writeln!(text, "# TYPE {name} {kind}\n{name} {value}");
        }
        text
    }
}
