//! Plans for caches of any number of keys up to the planned one, so that a growing cache needs no new plan for each
//! token.
use crate::ops::Call;
use crate::plan::Plan;
use crate::request::{PlanError, Request};
use sieve_gpu::Step;

/// Planned numbers of keys are multiples of this; decode kernels round their splits of the keys to smaller multiples.
const PLANNED_KEYS: usize = 256;

/// The axis of a cache that counts keys.
const KEYS_AXIS: usize = 2;

/// The keys of a plan's caches, and the launches' scalar arguments (words) that count them.
#[derive(Debug, Clone)]
pub struct Capacity {
    /// The input, `[batch, KV heads, keys, width]`, whose number of keys each run gives; values follow it.
    pub input: usize,
    /// Most keys that a run may give.
    pub keys: usize,
    /// The words that are the number of keys plus a constant: index of the step, and of the word in its launch.
    words: Vec<[usize; 2]>,
}

impl Capacity {
    /// Rounds the caches of a request up, so that one plan serves several numbers of keys. `None` if the op does
    /// not decode against a cache, or the request has no `k_cache` whose number of keys can be rounded.
    pub(crate) fn planned(request: &mut Request) -> Option<Self> {
        let (Call::CachedDecode(_) | Call::AttentionDecode(_)) = request.call else {
            return None;
        };
        let input = request.tensors.iter().position(|tensor| tensor.name == "k_cache")?;
        let keys = *request.tensors[input].shape.get(KEYS_AXIS)?;
        // Caches of different sizes are refused as they are: rounded, they would look alike.
        let mut caches = request.tensors.iter().filter(|tensor| tensor.name.ends_with("_cache"));
        if caches.any(|cache| cache.shape.get(KEYS_AXIS) != Some(&keys)) {
            return None;
        }
        let keys = keys.max(1).checked_next_multiple_of(PLANNED_KEYS)?;
        let mut capacity = Self { input, keys, words: Vec::new() };
        capacity.resize(request, keys);
        Some(capacity)
    }

    /// The request for one key less: its launches differ in the words that count keys alone.
    pub(crate) fn with_one_key_less(&mut self, mut request: Request) -> Request {
        self.resize(&mut request, self.keys - 1);
        request
    }

    /// Sets the number of keys of all caches of a request.
    fn resize(&mut self, request: &mut Request, keys: usize) {
        for tensor in request.tensors.iter_mut().filter(|tensor| tensor.name.ends_with("_cache")) {
            if let Some(size) = tensor.shape.get_mut(KEYS_AXIS) {
                *size = keys;
            }
        }
    }

    /// Finds the words that count keys: those that are smaller by one in `less`, the steps for one key less.
    pub(crate) fn find_words(&mut self, steps: &[Step], less: &[Step]) {
        assert_eq!(steps.len(), less.len(), "launches depend on the number of keys");
        for (index, pair) in steps.iter().zip(less).enumerate() {
            let (Step::Launch(launch), Step::Launch(less)) = pair else {
                continue;
            };
            assert_eq!((launch.grid, launch.words.len()), (less.grid, less.words.len()), "a grid of keys");
            for (word, (&more, &less)) in launch.words.iter().zip(&less.words).enumerate() {
                assert!(more == less || more == less + 1, "word {word} is not a number of keys");
                self.words.extend((more != less).then_some([index, word]));
            }
        }
    }

    /// Sets the words of a step's launch for caches of so many keys.
    pub(crate) fn set(&self, step: usize, words: &mut [u64], keys: usize) {
        for &[_, word] in self.words.iter().filter(|[of, _]| *of == step) {
            words[word] -= (self.keys - keys) as u64;
        }
    }

    /// Checks the number of keys that a run was given.
    pub(crate) fn checked(&self, keys: u64) -> Result<usize, PlanError> {
        let keys = usize::try_from(keys).ok().filter(|keys| (1..=self.keys).contains(keys));
        keys.ok_or_else(|| PlanError::Call(format!("the caches must hold 1 to {} keys, as planned", self.keys)))
    }
}

impl Plan {
    /// The plan for caches of exactly `keys` keys.
    ///
    /// # Errors
    /// More than planned, or 0.
    pub fn at_capacity(mut self, keys: usize) -> Result<Self, PlanError> {
        let Some(capacity) = self.capacity.take() else {
            // The op has no caches whose number of keys could differ.
            return Ok(self);
        };
        let keys = capacity.checked(keys as u64)?;
        for (index, step) in self.steps.iter_mut().enumerate() {
            if let Step::Launch(launch) = step {
                capacity.set(index, &mut launch.words, keys);
            }
        }
        // The buffers of the keys and of the values.
        for cache in capacity.input..capacity.input + 2 {
            self.buffers[cache] = self.buffers[cache] / capacity.keys * keys;
        }
        Ok(self)
    }
}
