//! Accuracy by distance as a picture.
use crate::eval::line_chart::{self, Axis, Curve};
use sieve_eval::{DistanceAnswers, RecallReport};

/// An SVG with one line a kind of sample: accuracy over the distance from value to question, in powers of two.
pub(super) fn accuracy_by_distance(title: &str, report: &RecallReport) -> String {
    let bins = report.kinds.iter().flat_map(|kind| &kind.by_distance);
    let powers: Vec<u32> = bins.map(|bin| bin.from.ilog2()).collect();
    let low = powers.iter().copied().min().unwrap_or(0);
    let high = powers.iter().copied().max().unwrap_or(1).max(low + 1);
    let point = |bin: &DistanceAnswers| (f64::from(bin.from.ilog2()), bin.accuracy);
    let curves = report.kinds.iter().map(|kind| Curve {
        name: format!("{} tokens, {} pairs", kind.seq_len, kind.num_pairs),
        points: kind.by_distance.iter().map(point).collect(),
    });
    let distance = Axis {
        label: "tokens between value and question, at least",
        range: f64::from(low)..f64::from(high),
        most_numbers: (high - low + 1) as usize,
        text: &|power| match power.fract() {
            0.0 => format!("{}", 1u64 << power as u32),
            _ => String::new(),
        },
    };
    let accuracy = Axis {
        label: "accuracy",
        range: 0.0..1.0,
        most_numbers: 6,
        text: &|value| format!("{:.0} %", 100.0 * value),
    };
    let title = format!("MQAR accuracy, {title}");
    line_chart::svg(&title, &distance, &accuracy, &curves.collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;
    use sieve_eval::{Answers, DistanceAnswers, RecallOfKind};

    #[test]
    fn the_picture_holds_every_kind_and_bin() {
        let bin = |from, accuracy| DistanceAnswers {
            from,
            to: 2 * from,
            answers: Answers::default(),
            accuracy,
        };
        let kind = |seq_len, by_distance| RecallOfKind {
            seq_len,
            num_pairs: 4,
            num_samples: 1,
            answers: Answers::default(),
            accuracy: 0.0,
            by_distance,
        };
        let report = RecallReport {
            kinds: vec![kind(64, vec![bin(4, 1.0), bin(32, 0.5)]), kind(8, vec![])],
            all: Answers::default(),
            accuracy: 0.0,
        };
        let svg = accuracy_by_distance("a <b> & c", &report);
        assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n"));
        assert!(svg.contains("a &lt;b&gt; &amp; c"));
        assert!(svg.contains("64 tokens, 4 pairs") && svg.contains("8 tokens, 4 pairs"));
        assert_eq!(svg.matches("<circle").count(), 2);
        for number in ["4", "8", "16", "32", "0 %", "100 %"] {
            assert!(svg.contains(&format!("\n{number}\n")), "{number}: {svg}");
        }
        // Full accuracy is at the top of the left end, half in the middle of the right end.
        let places: Vec<(f64, f64)> = svg
            .lines()
            .filter(|line| line.contains("<circle"))
            .map(|line| {
                let number = |name: &str| {
                    let (_, rest) = line.split_once(name).expect("a place");
                    rest.split('"').next().and_then(|x| x.parse().ok())
                };
                let at = |name| number(name).expect("a number");
                (at("cx=\""), at("cy=\""))
            })
            .collect();
        assert!(places[0].0 < 80.0 && places[0].1 < 50.0, "{places:?}");
        assert!(
            places[1].0 > 600.0 && (200.0..300.0).contains(&places[1].1),
            "{places:?}"
        );
    }
}
