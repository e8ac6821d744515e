//! The report of a check: one row for each kernel or op and path, with its largest error and its failures.
use serde::Serialize;
use sieve_kernels::KernelError;
use sieve_ops::{OpPath, Place, op_paths};
use std::collections::BTreeMap;
use std::fmt;

/// Most failures of a row that the printed table shows; the JSON has all.
const SHOWN: usize = 3;

/// The results of one kernel or op over all its cases.
#[derive(Debug, Default, Serialize)]
pub struct Row {
    /// Name of the kernel or op.
    pub name: String,
    /// The path that its calls took: a kernel family, or the reference.
    pub path: String,
    /// Number of cases compared.
    pub cases: usize,
    /// Largest error as a share of its tolerance.
    pub worst: f32,
    /// Error text of each failed case.
    pub failures: Vec<String>,
    /// Cases that this device has no kernel for.
    pub not_on_this_device: usize,
}

/// The largest error of a case as a share of its tolerance, or why the case failed.
pub(crate) type Outcome = Result<f32, Wrong>;

/// Why a case failed.
#[derive(Debug, PartialEq, thiserror::Error)]
pub(crate) enum Wrong {
    /// A result outside its tolerance, or otherwise wrong.
    #[error("{0}")]
    Result(String),
    /// The launch wrapper refused the call.
    #[error(transparent)]
    Refused(#[from] KernelError),
}

impl From<String> for Wrong {
    fn from(text: String) -> Self {
        Self::Result(text)
    }
}

/// Fails a case with this error text.
pub(crate) fn wrong<T>(text: impl Into<String>) -> Result<T, Wrong> {
    Err(Wrong::Result(text.into()))
}

/// The results of a check: one row for each kernel or op.
#[derive(Debug, Default)]
pub struct Report {
    rows: Vec<Row>,
}

impl Report {
    /// Adds one case's outcome to the row of this name and path.
    pub(crate) fn add(&mut self, name: &str, path: &str, case: &str, outcome: Outcome) {
        let row = self.row(name, path);
        row.cases += 1;
        match outcome {
            Ok(ratio) => row.worst = row.worst.max(ratio),
            Err(reason) => row.failures.push(format!("{case}: {reason}")),
        }
    }

    /// Adds one case of ops that should have run on `path`. `reference` says why one of them took the reference
    /// instead; `None`: none did. With a reason `outcome` does not count: the case is a kernel that this device
    /// lacks where a limit of the device is the reason, else a failure.
    pub(crate) fn add_call(&mut self, name: &str, path: &str, reference: Option<&str>, case: &str, outcome: Outcome) {
        match reference {
            None => self.add(name, path, case, outcome),
            Some(reason) if is_device_limit(reason) => self.add_missing(name, reason),
            Some(reason) => {
                let failure = wrong(format!("took the reference: {reason}"));
                self.add(name, "reference", case, failure);
            }
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

    /// Adds all rows of another report.
    pub(crate) fn merge(&mut self, other: Report) {
        for mut theirs in other.rows {
            let ours = self.row(&theirs.name, &theirs.path);
            ours.cases += theirs.cases;
            ours.not_on_this_device += theirs.not_on_this_device;
            ours.worst = ours.worst.max(theirs.worst);
            ours.failures.append(&mut theirs.failures);
        }
    }

    /// Counts a case that no kernel of this device takes; the row's path is the reason.
    pub(crate) fn add_missing(&mut self, name: &str, reason: &str) {
        self.row(name, reason).not_on_this_device += 1;
    }

    /// The row of this name and path, added at the end where there is none yet.
    fn row(&mut self, name: &str, path: &str) -> &mut Row {
        let found = self.rows.iter().position(|row| row.name == name && row.path == path);
        let at = found.unwrap_or_else(|| {
            self.rows.push(Row { name: name.to_owned(), path: path.to_owned(), ..Row::default() });
            self.rows.len() - 1
        });
        &mut self.rows[at]
    }

    /// The rows so far.
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// Numbers of cases compared so far and of failed ones.
    pub(crate) fn counts(&self) -> [usize; 2] {
        let sum = |of: fn(&Row) -> usize| self.rows.iter().map(of).sum();
        [sum(|row| row.cases), sum(|row| row.failures.len())]
    }

    /// Number of rows with a failed case.
    pub fn failed(&self) -> usize {
        self.rows.iter().filter(|row| !row.failures.is_empty()).count()
    }
}

/// The table, a line a row, with the first failures of each.
impl fmt::Display for Report {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{:6} {:34} {:>6} {:>7} {:>16}  path", "", "kernel or op", "cases", "failed", "error / allowed")?;
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

/// Finds an op on a GPU that took its reference since [`start`](Self::start). Ops on the CPU do not count: they
/// compute what the GPU is compared with.
pub(crate) struct PathWatch {
    before: BTreeMap<(Place, &'static str), OpPath>,
}

impl PathWatch {
    /// Starts counting which paths ops take.
    pub(crate) fn start() -> Self {
        let before = op_paths();
        Self { before }
    }

    /// An op that took its reference since [`start`](Self::start), and why; `None` if all took kernels.
    pub(crate) fn reference(&self) -> Option<String> {
        let on_gpu = op_paths().into_iter().filter(|((place, _), _)| *place == Place::Cuda);
        let calls_before = |key: &(Place, &'static str)| self.before.get(key).map_or(0, |was| was.reference_calls);
        let mut taken = on_gpu.filter(|(key, now)| now.reference_calls > calls_before(key));
        taken.next().map(|((_, op), now)| format!("{op}: {}", now.reason.unwrap_or_default()))
    }
}

/// Whether a refusal comes from a limit of the device, whose shared memory is too small for any tile of that width.
fn is_device_limit(reason: &str) -> bool {
    reason.contains("over this device's limit")
}
