//! Why a template cannot be read or rendered, and how much it may do.

use std::cell::Cell;
use std::fmt;
use std::time::{Duration, Instant};

/// What a list takes for each of its values, at least.
pub(super) const VALUE_BYTES: usize = 32;

/// Steps of one text: a chat needs thousands, and an endless loop has no end. A step is an expression, an item of a
/// list, or [`BYTES_OF_A_STEP`] bytes of a text.
const MOST_STEPS: u64 = 30_000_000;
/// Bytes of a text that count as one step.
const BYTES_OF_A_STEP: usize = 64;
/// Bytes of all texts and lists that are made for one text.
const MOST_BYTES: u64 = 256 << 20;
/// Time for all texts of one chat. The steps end sooner on any machine that is not overloaded.
const MOST_TIME: Duration = Duration::from_secs(15);
/// Steps between two looks at the clock.
const STEPS_OF_A_LOOK: u64 = 20_000;

/// What is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::chat) struct Fault {
    /// In words.
    pub(in crate::chat) what: String,
    /// Line of the template, from 1; 0 before a place is known.
    pub(in crate::chat) line: u32,
    /// Whose fault it is.
    pub(in crate::chat) kind: FaultKind,
}

/// Whose fault a [`Fault`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::chat) enum FaultKind {
    /// The template is not valid, whatever the messages are.
    Template,
    /// The template asks for more than any chat needs.
    Limit,
    /// The template refuses these messages.
    Messages,
}

/// A result of reading or rendering.
pub(in crate::chat) type Fallible<T> = Result<T, Box<Fault>>;

impl Fault {
    /// The template refuses these messages.
    pub(in crate::chat) fn refused(what: impl Into<String>) -> Box<Self> {
        Box::new(Self { what: what.into(), line: 0, kind: FaultKind::Messages })
    }

    /// The template is not valid at `line`.
    pub(super) fn invalid(what: impl Into<String>, line: u32) -> Box<Self> {
        Box::new(Self { what: what.into(), line, kind: FaultKind::Template })
    }

    /// The template asks for too much.
    pub(super) fn limit(what: impl Into<String>) -> Box<Self> {
        Box::new(Self { what: what.into(), line: 0, kind: FaultKind::Limit })
    }

    /// The fault with a line, unless it has one.
    pub(super) fn at(mut self: Box<Self>, line: u32) -> Box<Self> {
        if self.line == 0 {
            self.line = line;
        }
        self
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)?;
        if self.line > 0 { write!(f, " (line {} of the template)", self.line) } else { Ok(()) }
    }
}

/// What is left of the work that one text may take.
#[derive(Debug)]
pub(in crate::chat) struct Budget {
    steps: Cell<u64>,
    /// The clock is read when fewer steps are left.
    next_look: Cell<u64>,
    bytes: Cell<u64>,
    end: Instant,
}

impl Budget {
    /// The work of one text of a chat whose texts must be there at `end`.
    pub(in crate::chat) fn until(end: Instant) -> Self {
        let next_look = Cell::new(MOST_STEPS - STEPS_OF_A_LOOK);
        Self { steps: Cell::new(MOST_STEPS), next_look, bytes: Cell::new(MOST_BYTES), end }
    }

    /// When the texts of a chat that is begun now must be there.
    pub(in crate::chat) fn end_from_now() -> Instant {
        Instant::now() + MOST_TIME
    }

    /// Takes `count` steps.
    pub(super) fn steps(&self, count: usize) -> Fallible<()> {
        let Some(left) = self.steps.get().checked_sub(count as u64) else {
            return Err(Fault::limit("it takes more steps than any chat needs, so it probably has no end"));
        };
        self.steps.set(left);
        if left < self.next_look.get() {
            self.next_look.set(left.saturating_sub(STEPS_OF_A_LOOK));
            if Instant::now() > self.end {
                let seconds = MOST_TIME.as_secs();
                return Err(Fault::limit(format!("it was not done with one chat after {seconds} seconds")));
            }
        }
        Ok(())
    }

    /// Takes the steps of looking through a text of `len` bytes.
    pub(super) fn scan(&self, len: usize) -> Fallible<()> {
        self.steps(len / BYTES_OF_A_STEP)
    }

    /// Takes the bytes of a text before it is made, and the steps of making it.
    pub(super) fn text(&self, len: usize) -> Fallible<()> {
        let Some(left) = self.bytes.get().checked_sub(len as u64) else {
            let most = MOST_BYTES >> 20;
            return Err(Fault::limit(format!("the texts and lists that it makes take more than {most} MiB")));
        };
        self.bytes.set(left);
        self.scan(len)
    }

    /// Takes the bytes of a list of `len` items before it is made, and a step for each.
    pub(super) fn list(&self, len: usize) -> Fallible<()> {
        self.text(len.saturating_mul(VALUE_BYTES))?;
        self.steps(len)
    }
}
