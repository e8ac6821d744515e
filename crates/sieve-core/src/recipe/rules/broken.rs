//! Collects the mistakes of a recipe that its rules find.

use crate::keys::{Bound, Number, Section, short_number};
use crate::recipe::mistake::Mistake;

/// Collects the rules that a recipe breaks.
pub(crate) struct Rules<'a>(pub(super) &'a mut Vec<Mistake>);

impl Rules<'_> {
    /// Reports a mistake at `key` unless the rule `holds`; `what` is wrong and `hint` says how to fix it.
    pub(crate) fn require(&mut self, holds: bool, key: &str, what: impl Into<String>, hint: impl Into<String>) {
        if !holds {
            self.0.push(Mistake::new(key, what, hint));
        }
    }

    /// Checks the numbers of a section against the bounds of its keys; `owner` is the section's path in the recipe.
    pub(crate) fn bounds<T: Section>(&mut self, owner: &str, section: &T) {
        for (key, number) in T::KEYS.iter().zip(section.numbers()) {
            let (Some(bound), Some(number)) = (key.bound, number) else {
                continue;
            };
            let key = format!("{owner}.{}", key.name);
            match (bound, number) {
                (Bound::Within(least, most, hint), Number::Whole(value)) => self.require(
                    (least as u64..=most as u64).contains(&value),
                    &key,
                    format!("is {value}, outside {least} to {most}"),
                    hint,
                ),
                (Bound::AtLeastOne, Number::Whole(value)) => self.at_least_one(&key, value),
                (Bound::Between(least, most, hint), Number::Real(value)) => self.require(
                    (least..=most).contains(&value),
                    &key,
                    {
                        let [value, least, most] = [value, least, most].map(short_number);
                        format!("is {value}, outside {least} to {most}")
                    },
                    hint,
                ),
                (Bound::Share(range, hint), Number::Real(value)) => self.require(
                    (0.0..=1.0).contains(&value)
                        && (value > 0.0 || range.starts_with('['))
                        && (value < 1.0 || range.ends_with(']')),
                    &key,
                    format!("is {value}, outside {range}"),
                    hint,
                ),
                _ => unreachable!("{key} has a bound of a different number type"),
            }
        }
    }

    pub(super) fn at_least_one(&mut self, key: &str, value: u64) {
        self.require(value > 0, key, "is 0", "the smallest is 1");
    }
}
