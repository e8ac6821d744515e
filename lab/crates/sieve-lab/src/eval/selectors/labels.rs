//! Names that distinguish the rows, lines and files of several settings.

use sieve_select::LayerSelectors;

/// Letters of a file's name, at most.
const LONGEST: usize = 120;

/// Each selector in the form that `--selector` reads; repeated ones are numbered.
pub(super) fn of(selectors: &[LayerSelectors]) -> Vec<String> {
    distinct(selectors.iter().map(LayerSelectors::label))
}

/// Labels as names of files, without an ending.
pub(super) fn file_names(labels: &[String]) -> Vec<String> {
    let plain = |x: char| if x.is_ascii_alphanumeric() || "_.=".contains(x) { x } else { '-' };
    distinct(labels.iter().map(|label| label.chars().map(plain).take(LONGEST).collect()))
}

/// The names, each repeated one with a number behind it.
fn distinct(names: impl Iterator<Item = String>) -> Vec<String> {
    let mut all: Vec<String> = Vec::new();
    for name in names {
        let numbered = (2..).map(|n| format!("{name}-{n}"));
        let mut tries = std::iter::once(name.clone()).chain(numbered);
        all.extend(tries.find(|name| !all.contains(name)));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_setting_has_a_label_and_a_file_of_its_own() {
        let texts = ["pbs", "pbs:segment=512,tau=0.5", "pbs", "pbs:tau=0.5,segment=512", "a_shape:n_local=77"];
        let selectors = texts.map(|text| LayerSelectors::parse(text).expect("valid"));
        let labels = of(&selectors);
        assert_eq!(
            labels,
            ["pbs", "pbs:segment=512,tau=0.5", "pbs-2", "pbs:segment=512,tau=0.5-2", "a_shape:n_local=77"]
        );
        let files = file_names(&labels);
        assert_eq!(files[1], "pbs-segment=512-tau=0.5");
        assert_eq!(files[3], "pbs-segment=512-tau=0.5-2");
        let long = ["x/y", "x:y", "x-y-2"].map(|end| format!("{}{end}", "z".repeat(117)));
        let files = file_names(&long);
        assert!(files.iter().all(|name| !name.contains(['/', ':'])));
        assert!(files[0] != files[1] && files[1] != files[2] && files[0] != files[2]);
    }
}
