//! Differences to a baseline, seed by seed. Runs of one seed read their text in the same order and begin with the same
//! draws, so the difference of two of them varies less than either loss does.
use crate::Run;
use crate::groups::{is_dense, name_of, other_text, swept_seeds};
use crate::tables::{best_first, bits_per_byte, digits, escaped, late_loss, mean_and_spread, swatch, validation_loss};
use std::fmt::Write;

/// A loss's title in the table, and the loss of a run.
type Loss = (&'static str, fn(&Run) -> f64);

const LOSSES: [Loss; 3] =
    [("validation loss", validation_loss), ("training loss", late_loss), ("bits per byte", bits_per_byte)];

/// The runs of two groups that have the same seed: `(run, run of the baseline)`.
pub(crate) fn pairs(runs: &[Run], members: &[usize], baseline: &[usize]) -> Vec<(usize, usize)> {
    let seed = |idx: usize| runs[idx].config.get("training.seed");
    let same = |&run: &usize| Some((run, *baseline.iter().find(|&&base| seed(base) == seed(run))?));
    members.iter().filter_map(same).collect()
}

/// The group that the others are compared with: that of the run `against`, else the one group of dense attention, else
/// the first one, which has the lowest loss. `None` if no two groups have several seeds.
pub(crate) fn baseline(runs: &[Run], groups: &[Vec<usize>], against: Option<usize>) -> Option<usize> {
    if groups.iter().filter(|members| swept_seeds(runs, members)).count() < 2 {
        return None;
    }
    if let Some(run) = against {
        return groups.iter().position(|members| members.contains(&run));
    }
    let mut dense = (0..groups.len()).filter(|&group| is_dense(&runs[groups[group][0]]));
    match (dense.next(), dense.next()) {
        (Some(only), None) => Some(only),
        _ => best_first(runs, groups).into_iter().next(),
    }
}

/// The table of differences; empty if nothing can be paired, or if losses do not compare.
pub(crate) fn differences(runs: &[Run], groups: &[Vec<usize>], against: Option<usize>) -> String {
    let Some(base) = baseline(runs, groups, against).filter(|_| other_text(runs).is_none()) else {
        return String::new();
    };
    let has_loss = |(_, of): &&Loss| runs.iter().any(|run| of(run).is_finite());
    let losses: Vec<_> = LOSSES.iter().filter(has_loss).collect();
    let mut rows = String::new();
    for members in groups.iter().enumerate().filter(|(group, _)| *group != base).map(|(_, members)| members) {
        let pairs = pairs(runs, members, &groups[base]);
        if pairs.len() < 2 {
            continue;
        }
        let name = swatch(&name_of(runs, members), members[0]);
        let _ = write!(rows, "<tr><th>{name}</th><td>{}</td>", pairs.len());
        for (_, loss) in &losses {
            let found: Vec<f64> = pairs.iter().map(|&(run, base)| loss(&runs[run]) - loss(&runs[base])).collect();
            let lower = found.iter().filter(|difference| **difference < 0.0).count();
            let _ = write!(rows, "<td>{}</td><td>{lower} of {}</td>", difference_text(&found), found.len());
        }
        rows.push_str("</tr>");
    }
    if rows.is_empty() {
        return String::new();
    }
    let titles = losses.iter().map(|(title, _)| format!("<th>{title}</th><th>lower in</th>")).collect::<String>();
    format!(
        "<h3>Compared with {}, seed by seed</h3><table \
         class=\"wide\"><thead><tr><th>run</th><th>seeds</th>{titles}</tr>\
         </thead><tbody>{rows}</tbody></table><p class=\"hint\">The mean of the differences between runs of \
         the same seed, which read their text in the same order, ± the spread of these differences.</p>",
        escaped(&name_of(runs, &groups[base]))
    )
}

/// `−0.012 ± 0.003`: the mean and the spread of the differences.
fn difference_text(found: &[f64]) -> String {
    let (mean, spread) = mean_and_spread(found);
    let sign = if mean < 0.0 { "−" } else { "+" };
    match spread.filter(|_| mean.is_finite()) {
        Some(spread) => format!("{sign}{:.3} ± {spread:.3}", mean.abs()),
        None => digits(mean),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::tests::{STEP, folder};

    fn run(kind: &str, seed: u32, loss: f64) -> Run {
        let recipe = format!("[attention]\nkind = \"{kind}\"\n[training]\nseed = {seed}\n");
        let metrics = STEP.replace("\"num_steps\":20", "\"num_steps\":10");
        let check = format!("{{\"kind\":\"validation\",\"step\":10,\"loss\":{loss}}}");
        let folder = folder(&recipe, &format!("{metrics}\n{check}\n"));
        Run::open(folder.path(), Some(&format!("kind={kind},seed={seed}"))).unwrap()
    }

    #[test]
    fn seeds_are_paired_so_that_their_common_part_is_no_spread() {
        // The seeds differ by 1, the kinds by 0.1 and 0.12 on each of them.
        let runs = [run("dma", 0, 2.0), run("dma", 1, 3.0), run("mha", 1, 3.1), run("mha", 0, 2.12)];
        let groups = [vec![0, 1], vec![2, 3]];
        assert_eq!(pairs(&runs, &groups[0], &groups[1]), [(0, 3), (1, 2)]);
        let html = differences(&runs, &groups, None);
        assert!(html.contains("Compared with kind=mha, seed by seed"), "{html}");
        assert!(html.contains("<td>−0.110 ± 0.014</td><td>2 of 2</td>"), "{html}");
        let html = differences(&runs, &groups, Some(1));
        assert!(html.contains("Compared with kind=dma") && html.contains("+0.110 ± 0.014"), "{html}");
    }

    #[test]
    fn one_seed_and_other_texts_have_no_difference() {
        let runs = [run("dma", 0, 2.0), run("mha", 0, 2.1), run("mha", 1, 2.2)];
        assert_eq!(differences(&runs, &[vec![0], vec![1, 2]], None), "");
        // Seeds that no other run has.
        let runs = [run("dma", 0, 2.0), run("dma", 1, 2.0), run("mha", 2, 2.1), run("mha", 3, 2.2)];
        assert_eq!(differences(&runs, &[vec![0, 1], vec![2, 3]], None), "");
    }

    #[test]
    fn without_a_dense_group_the_lowest_loss_is_the_baseline() {
        let runs = [run("dma", 0, 2.0), run("dma", 1, 2.0), run("swa", 0, 1.0), run("swa", 1, 1.5)];
        let groups = [vec![0, 1], vec![2, 3]];
        assert_eq!(baseline(&runs, &groups, None), Some(1));
        assert_eq!(baseline(&runs, &groups, Some(0)), Some(0));
        assert_eq!(baseline(&runs, &[vec![0], vec![1], vec![2, 3]], None), None);
    }
}
