//! Rows of a check: what was compared, by which path, and how it ended.
use serde::Serialize;
use sieve_kernels::KernelError;
use sieve_ops::{OpPath, Place, op_paths};
use std::collections::BTreeMap;
use std::fmt;

/// Failures shown of one row; the JSON has all.
const SHOWN: usize = 3;

/// One kernel or op, over all its cases.
#[derive(Debug, Default, Serialize)]
pub struct Row {
    /// Kernel or op.
    pub name: String,
    /// Which way its calls went.
    pub path: String,
    /// Cases compared.
    pub cases: usize,
    /// Largest error as a share of what is allowed.
    pub worst: f32,
    /// One line each.
    pub failures: Vec<String>,
    /// Cases that this device has no kernel for.
    pub not_on_this_device: usize,
}

/// The largest error of a case as a share of what is allowed.
pub(crate) type Outcome = Result<f32, Wrong>;

/// Why a case has no such share.
#[derive(Debug, PartialEq, thiserror::Error)]
pub(crate) enum Wrong {
    /// A result that is not what it should be.
    #[error("{0}")]
    Result(String),
    /// A launch that was refused.
    #[error(transparent)]
    Refused(#[from] KernelError),
}

impl From<String> for Wrong {
    fn from(text: String) -> Self {
        Self::Result(text)
    }
}

/// A result that is not what it should be, in words.
pub(crate) fn wrong<T>(text: impl Into<String>) -> Result<T, Wrong> {
    Err(Wrong::Result(text.into()))
}

/// All rows.
#[derive(Debug, Default)]
pub struct Report {
    rows: Vec<Row>,
}

impl Report {
    /// Adds one case's outcome to the row of that name and path.
    pub(crate) fn add(&mut self, name: &str, path: &str, case: &str, outcome: Outcome) {
        let row = self.row(name, path);
        row.cases += 1;
        match outcome {
            Ok(ratio) => row.worst = row.worst.max(ratio),
            Err(reason) => row.failures.push(format!("{case}: {reason}")),
        }
    }

    /// Adds the outcome of one call of an op that has a kernel, in the row `kernel`; a call that took another way is a
    /// failure, or missing where the device is the reason.
    pub(crate) fn add_call(
        &mut self,
        name: &str,
        path: &Path,
        kernel: &str,
        case: &str,
        outcome: impl FnOnce() -> Outcome,
    ) {
        match path {
            Path::Kernel => self.add(name, kernel, case, outcome()),
            Path::Reference(reason) if is_device_limit(reason) => self.add_missing(name, reason),
            Path::Reference(reason) => {
                let failure = wrong(format!("took the reference: {reason}"));
                self.add(name, "reference", case, failure);
            }
            Path::None => self.add(name, "none", case, wrong("no kernel was called")),
        }
    }

    /// Adds the outcome of one call of a launch wrapper; a refusal has a row of its own.
    pub(crate) fn add_wrapper(&mut self, name: &str, path: &str, case: &str, outcome: Outcome) {
        match outcome {
            Err(Wrong::Refused(error)) if is_device_limit(&error.to_string()) => {
                self.add_missing(name, &error.to_string());
            }
            Err(Wrong::Refused(_)) => self.add(name, "refused", case, outcome),
            _ => self.add(name, path, case, outcome),
        }
    }

    /// Notes a case that no kernel of this device takes, with the reason in the path.
    pub(crate) fn add_missing(&mut self, name: &str, reason: &str) {
        self.row(name, reason).not_on_this_device += 1;
    }

    fn row(&mut self, name: &str, path: &str) -> &mut Row {
        let found = self.rows.iter().position(|row| row.name == name && row.path == path);
        let at = found.unwrap_or_else(|| {
            self.rows.push(Row {
                name: name.to_owned(),
                path: path.to_owned(),
                ..Row::default()
            });
            self.rows.len() - 1
        });
        &mut self.rows[at]
    }

    /// Rows so far.
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// Cases compared so far, and those that failed.
    pub(crate) fn counts(&self) -> [usize; 2] {
        let sum = |of: fn(&Row) -> usize| self.rows.iter().map(of).sum();
        [sum(|row| row.cases), sum(|row| row.failures.len())]
    }

    /// Rows with a failure.
    pub fn failed(&self) -> usize {
        self.rows.iter().filter(|row| !row.failures.is_empty()).count()
    }
}

/// The table, a line a row, with the first failures of each.
impl fmt::Display for Report {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            out,
            "{:6} {:34} {:>6} {:>7} {:>16}  path",
            "", "kernel or op", "cases", "failed", "error / allowed"
        )?;
        for row in &self.rows {
            let verdict = if !row.failures.is_empty() {
                "FAIL"
            } else if row.cases == 0 {
                "none"
            } else {
                "ok"
            };
            write!(
                out,
                "\n{verdict:6} {:34} {:>6} {:>7} {:>16.3}  {}",
                row.name,
                row.cases + row.not_on_this_device,
                row.failures.len(),
                row.worst,
                row.path
            )?;
            for failure in row.failures.iter().take(SHOWN) {
                write!(out, "\n         {failure}")?;
            }
        }
        Ok(())
    }
}

/// Which way the ops went between two moments.
pub(crate) struct PathWatch {
    before: BTreeMap<(Place, &'static str), OpPath>,
    is_cuda: bool,
}

/// What a watch saw.
pub(crate) enum Path {
    /// Kernels only.
    Kernel,
    /// An op that has a kernel took the reference, and why.
    Reference(String),
    /// No op with a kernel was called.
    None,
}

impl PathWatch {
    /// Begins to watch; the CPU has no path but its kernels.
    pub(crate) fn start(is_cuda: bool) -> Self {
        let before = op_paths();
        Self { before, is_cuda }
    }

    /// What happened since.
    pub(crate) fn path(&self) -> Path {
        let mut path = if self.is_cuda { Path::None } else { return Path::Kernel };
        // The CPU computes what a GPU is compared with.
        let on_gpu = op_paths().into_iter().filter(|((place, _), _)| *place == Place::Cuda);
        for (key, now) in on_gpu {
            let (kernels, references) = self
                .before
                .get(&key)
                .map_or((0, 0), |was| (was.kernel_calls, was.reference_calls));
            if now.reference_calls > references {
                let reason = now.reason.unwrap_or_default();
                return Path::Reference(format!("{}: {reason}", key.1));
            }
            if now.kernel_calls > kernels {
                path = Path::Kernel;
            }
        }
        path
    }
}

/// Whether a refusal is the device's: its shared memory is too small for any tile of that width.
fn is_device_limit(reason: &str) -> bool {
    reason.contains("over this device's limit")
}
