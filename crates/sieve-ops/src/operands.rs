//! Checks of the operands of public ops.
use thiserror::Error;

/// Operands that an op does not take. Nothing was computed.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum OperandError {
    /// An operand has another shape than the op's other operands and sizes ask for.
    #[error("{op}: {operand} has shape {got:?} and must be {axes} = {wanted:?}\n  hint: {hint}")]
    Shape {
        /// Name of the op.
        op: &'static str,
        /// Name of the operand.
        operand: &'static str,
        /// Its shape.
        got: Vec<usize>,
        /// Names of the axes.
        axes: &'static str,
        /// The shape that the op takes.
        wanted: Vec<usize>,
        /// How to fix it.
        hint: &'static str,
    },
    /// A size or a setting has a value that the op does not take.
    #[error("{op}: {name} is {got}\n  hint: {hint}")]
    Value {
        /// Name of the op.
        op: &'static str,
        /// Name of the size or the setting.
        name: &'static str,
        /// Its value.
        got: String,
        /// What it may be.
        hint: String,
    },
}

/// The public op whose operands are checked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operands(pub(crate) &'static str);

impl Operands {
    /// Refuses an operand of a different shape. `wanted` is the operand's name, the names of its axes, and their sizes.
    pub(crate) fn shape(
        self,
        (operand, axes, wanted): (&'static str, &'static str, &[usize]),
        got: &[usize],
        hint: &'static str,
    ) -> Result<(), OperandError> {
        if got == wanted {
            return Ok(());
        }
        let (got, wanted) = (got.to_vec(), wanted.to_vec());
        Err(OperandError::Shape { op: self.0, operand, got, axes, wanted, hint })
    }

    /// Refuses a value for which `holds` is false.
    pub(crate) fn value(
        self,
        holds: bool,
        name: &'static str,
        got: impl ToString,
        hint: impl Into<String>,
    ) -> Result<(), OperandError> {
        if holds {
            Ok(())
        } else {
            Err(OperandError::Value { op: self.0, name, got: got.to_string(), hint: hint.into() })
        }
    }
}
