//! Checks that selectors' settings are in range.

use crate::error::SelectError;
use crate::gqa::GqaPolicy;

/// Checks of the settings of the selector with this name.
#[derive(Clone, Copy)]
pub(crate) struct Rules(pub(crate) &'static str);

impl Rules {
    /// The error about a setting of this selector, and how to fix it.
    pub(crate) fn fail<T>(self, problem: impl Into<String>, hint: impl Into<String>) -> Result<T, SelectError> {
        Err(SelectError::Value { selector: self.0, problem: problem.into(), hint: hint.into() })
    }

    /// Refuses `gqa=mean`; `problem` says why the method cannot average over the heads of a group.
    pub(crate) fn no_mean(self, gqa: GqaPolicy, problem: &str) -> Result<(), SelectError> {
        match gqa {
            GqaPolicy::Mean => self.fail(problem, "use gqa=per_query or gqa=union"),
            GqaPolicy::PerQuery | GqaPolicy::Union => Ok(()),
        }
    }

    /// Refuses a threshold or share outside [0, 1].
    pub(crate) fn share(self, key: &str, value: f64) -> Result<(), SelectError> {
        if (0.0..=1.0).contains(&value) {
            return Ok(());
        }
        self.fail(format!("{key}={value} is outside [0, 1]"), format!("give {key} a value from 0 to 1"))
    }

    /// Refuses a base of a rotary embedding that is not finite and above 1; `None` passes.
    pub(crate) fn rope_theta(self, value: Option<f64>) -> Result<(), SelectError> {
        match value {
            Some(theta) if !(theta > 1.0 && theta.is_finite()) => self.fail(
                format!("rope_theta={theta} is not a base for RoPE"),
                "give the rope_theta of the model, 10000 or more, or leave it out",
            ),
            _ => Ok(()),
        }
    }

    /// The base of a rotary embedding; refuses `None`.
    pub(crate) fn need_rope_theta(self, value: Option<f64>) -> Result<f64, SelectError> {
        match value {
            Some(theta) => Ok(theta),
            None => self.fail(
                "moves keys to other positions, and the base of their rotation is not known",
                "give rope_theta, as the config.json of a model without rope_scaling has it",
            ),
        }
    }

    /// Refuses a setting of 0.
    pub(crate) fn positive(self, key: &str, value: usize) -> Result<(), SelectError> {
        if value > 0 {
            return Ok(());
        }
        self.fail(format!("{key}=0 makes no sense"), format!("give {key} at least 1"))
    }

    /// Refuses a number that is not above 0.
    pub(crate) fn above_zero(self, key: &str, value: f64, hint: &str) -> Result<(), SelectError> {
        if value > 0.0 { Ok(()) } else { self.fail(format!("{key}={value} is not positive"), hint) }
    }

    /// Refuses sizes of 0, and a `value` that does not divide `whole`.
    pub(crate) fn divides(self, key: &str, value: usize, whole_key: &str, whole: usize) -> Result<(), SelectError> {
        self.positive(key, value)?;
        self.positive(whole_key, whole)?;
        if whole.is_multiple_of(value) {
            return Ok(());
        }
        self.fail(
            format!("{key}={value} does not divide {whole_key}={whole}"),
            format!("choose {key} so that {whole_key} is a multiple of it"),
        )
    }
}
