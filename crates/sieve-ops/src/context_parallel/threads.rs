//! Context parallelism between threads of one process, for tests and for the cases that `sieve-bench` writes.
use super::RankGroup;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, PoisonError};

/// A thread that holds a part as a process does.
#[derive(Debug)]
pub struct ThreadGroup {
    part: usize,
    to: Vec<Sender<Vec<f32>>>,
    from: Vec<Mutex<Receiver<Vec<f32>>>>,
}

impl ThreadGroup {
    /// The links of all parts of a row.
    pub fn all(num_parts: usize) -> Vec<Self> {
        let mut from = (0..num_parts).map(|_| Vec::new()).collect::<Vec<_>>();
        let mut to = (0..num_parts).map(|_| Vec::new()).collect::<Vec<_>>();
        // What part a sends through `to[a][b]`, part b receives from `from[b][a]`.
        for senders in &mut to {
            for receivers in &mut from {
                let (sender, receiver) = channel();
                senders.push(sender);
                receivers.push(Mutex::new(receiver));
            }
        }
        let links = to.into_iter().zip(from).enumerate();
        links.map(|(part, (to, from))| Self { part, to, from }).collect()
    }
}

impl RankGroup for ThreadGroup {
    fn part(&self) -> usize {
        self.part
    }

    fn num_parts(&self) -> usize {
        self.to.len()
    }

    /// Panics when another part's thread has ended.
    fn exchange(&self, values: Vec<Vec<f32>>, counts: &[usize]) -> Vec<Vec<f32>> {
        for (to, values) in self.to.iter().zip(values) {
            to.send(values).expect("the other part's thread listens");
        }
        let from = self.from.iter().zip(counts);
        from.map(|(from, &count)| {
            let from = from.lock().unwrap_or_else(PoisonError::into_inner);
            let values = from.recv().expect("the other part's thread sends");
            assert_eq!(values.len(), count);
            values
        })
        .collect()
    }
}
