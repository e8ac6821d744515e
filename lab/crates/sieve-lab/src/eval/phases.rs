//! `--phases` of `sieve eval needle` and `mqar`: the period, and what its phases show in words.
use anyhow::{Result, bail};
use sieve_core::ModelShape;
use sieve_eval::{PhaseGap, PhaseVerdict};
use sieve_host::terminal;
use sieve_infer::Selection;
use sieve_select::Selector;

/// The least and the largest period that `--phases` takes.
const PERIODS: std::ops::RangeInclusive<usize> = 2..=256;
/// The period where neither the model nor a selector has blocks.
const WITHOUT_BLOCKS: usize = 64;

/// Parses the value of `--phases`.
pub(super) fn parse(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(period) if PERIODS.contains(&period) => Ok(period),
        _ => Err(format!(
            "a period has {} to {} tokens\n  hint: give the size of a block, or a divisor of it: --phases 16",
            PERIODS.start(),
            PERIODS.end()
        )),
    }
}

/// The period: as asked, or else the one size of the blocks of the model and of the selectors.
pub(super) fn period(asked: Option<usize>, shape: &ModelShape, selections: &[Option<Selection>]) -> Result<usize> {
    if let Some(period) = asked {
        return Ok(period);
    }
    let of_layer =
        |layer| shape.attention_of(layer).as_kind().block_pairs().map(|pairs| pairs.chosen.select_block_size);
    let of_model = (0..shape.num_layers).filter_map(of_layer);
    let selectors = selections.iter().flatten().flat_map(|selection| selection.selectors().iter());
    let mut sizes: Vec<usize> = of_model.chain(selectors.filter_map(Selector::block_size)).collect();
    sizes.sort_unstable();
    sizes.dedup();
    match sizes[..] {
        [] => Ok(WITHOUT_BLOCKS),
        [size] if PERIODS.contains(&size) => Ok(size),
        [size] => bail!(
            "--phases: the blocks have {size} tokens, and a period has {} to {}\n  hint: give a divisor of it: \
             --phases 64",
            PERIODS.start(),
            PERIODS.end()
        ),
        [first, .., last] => bail!(
            "--phases: there are blocks of {first} to {last} tokens, and all are asked with one period\n  hint: give \
             it a number, for example --phases {first}"
        ),
    }
}

/// A score by phase, and how it is written.
pub(super) struct Scored<'a> {
    pub(super) name: &'static str,
    pub(super) gap: &'a PhaseGap,
    /// Numbers are multiplied by this: 100 for percent.
    pub(super) factor: f64,
    /// Unit of a mean, with the space before it.
    pub(super) unit: &'static str,
    /// Digits behind the point.
    pub(super) digits: usize,
}

impl Scored<'_> {
    fn number(&self, value: f64) -> String {
        format!("{:.*}", self.digits, self.factor * value)
    }

    /// The gap and its interval.
    fn gap(&self) -> String {
        let interval = self.gap.gap_interval.map_or(String::new(), |ends| {
            let [low, high] = ends.map(|end| self.number(end));
            format!(", {low} to {high}")
        });
        format!("gap {}{interval}", self.number(self.gap.gap))
    }

    /// The gap in a few words, for a picture.
    pub(super) fn in_short(&self) -> String {
        match self.gap.verdict {
            PhaseVerdict::NoGap => self.verdict(),
            _ => format!("{}; {}", self.gap(), self.verdict()),
        }
    }

    /// What the gap says.
    fn verdict(&self) -> String {
        words(self.gap.verdict, self.gap.p_gap)
    }

    /// Prints two lines: means and gap, then chance.
    pub(super) fn print(&self) {
        let PhaseGap { best, worst, chance_median, chance_high, wave, p_wave, .. } = *self.gap;
        let [at_best, at_worst] = [best, worst].map(|phase| self.number(self.gap.mean_at(phase)));
        let (name, unit) = (self.name, self.unit);
        if self.gap.verdict == PhaseVerdict::NoGap {
            terminal::line(&format!("{name:<16}{at_best}{unit}; {}", self.verdict()));
            return;
        }
        let [median, high, wave] = [chance_median, chance_high, wave].map(|value| self.number(value));
        terminal::line(&format!(
            "{name:<16}{at_best}{unit} at phase {best}, {at_worst}{unit} at phase {worst}: {}\n\
             {:16}rotated: {median}, 95th percentile {high}; {}; wave {wave}, p {p_wave:.3}",
            self.gap(),
            "",
            self.verdict(),
        ));
    }
}

/// A verdict, in the words of `--json`, with the share of rotations that have as large a gap.
fn words(verdict: PhaseVerdict, p_gap: f64) -> String {
    match verdict {
        PhaseVerdict::NoGap => "no gap: every phase has the same mean".to_owned(),
        PhaseVerdict::BeyondChance => format!("the gap is beyond chance, p {p_gap:.3}"),
        PhaseVerdict::WithinChance => format!("the gap is within chance, p {p_gap:.3}"),
    }
}

/// What the words of [`Scored::print`] mean.
pub(super) fn print_legend(rows: &str) {
    terminal::line(&format!(
        "gap: best mean minus worst, with its 95 % interval over {rows}; rotated: the median gap if each of the \
         {rows} is rotated over its phases at random\n\
         wave: amplitude of one period of a wave through the means; p: share of rotations with as large a gap, or \
         wave\n\
         beyond chance: fewer than 5 % of the rotations have as large a gap; within chance: no effect, or too few \
         {rows}"
    ));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_verdict_has_the_words_of_json() {
        for verdict in [PhaseVerdict::NoGap, PhaseVerdict::BeyondChance, PhaseVerdict::WithinChance] {
            let name = serde_json::to_value(verdict).expect("a name");
            let name = name.as_str().expect("a name").replace('_', " ");
            assert!(words(verdict, 0.05).contains(&name), "{name}");
        }
    }
}
