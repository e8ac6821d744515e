//! The curve of a run's losses, in plain characters: a terminal, a pipe and the log get the same.
use serde::Deserialize;
use sieve_train::RunFolder;

/// Columns and rows of the drawing.
const SIZE: [usize; 2] = [60, 10];
/// Fewer numbers are no curve.
const LEAST_POINTS: usize = 3;

/// A line of `metrics.jsonl`, as far as it is drawn.
#[derive(Deserialize)]
struct Line {
    kind: String,
    step: u64,
    loss: Option<f64>,
}

/// A loss at a step.
type Point = (u64, f64);

/// The curve of the losses in a run's `metrics.jsonl`; `None` if the run has too few of them.
pub(super) fn of_run(folder: &RunFolder) -> Option<String> {
    let text = sieve_files::read_text(&folder.metrics_path()).ok()?;
    let lines = text.lines().filter_map(|line| serde_json::from_str::<Line>(line).ok());
    let (mut training, mut held_out) = (Vec::new(), Vec::new());
    for Line { kind, step, loss } in lines {
        // A loss that is not finite is `null` there, and leaves a gap.
        let Some(loss) = loss.filter(|loss| loss.is_finite()) else {
            continue;
        };
        match kind.as_str() {
            "step" => training.push((step, loss)),
            "validation" => held_out.push((step, loss)),
            _ => {}
        }
    }
    draw(&training, &held_out)
}

/// The two curves. A column shows the mean of its steps' losses.
fn draw(training: &[Point], held_out: &[Point]) -> Option<String> {
    if training.len() < LEAST_POINTS {
        return None;
    }
    let all = || training.iter().chain(held_out);
    let last = all().map(|point| point.0).max()?;
    let (low, high) =
        all().fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), &(_, loss)| (low.min(loss), high.max(loss)));
    let [width, height] = SIZE;
    let column = |step: u64| ((step as f64 / last.max(1) as f64) * (width - 1) as f64).round() as usize;
    let row = |loss: f64| {
        if high > low { ((high - loss) / (high - low) * (height - 1) as f64).round() as usize } else { height - 1 }
    };
    let mut cells = vec![vec![' '; width]; height];
    // Held-out losses are drawn last, over training losses, because they are fewer.
    for (points, mark) in [(training, '*'), (held_out, 'o')] {
        let mut sums = vec![(0.0, 0_usize); width];
        for &(step, loss) in points {
            let (sum, count) = &mut sums[column(step)];
            (*sum, *count) = (*sum + loss, *count + 1);
        }
        for (at, &(sum, count)) in sums.iter().enumerate().filter(|(_, (_, count))| *count > 0) {
            cells[row(sum / count as f64)][at] = mark;
        }
    }
    let mut lines = vec!["loss by step, nats (* training, o held-out text):".to_owned()];
    for (at, cells) in cells.iter().enumerate() {
        let label = match at {
            0 => format!("{high:.3}"),
            at if at == height - 1 => format!("{low:.3}"),
            _ => String::new(),
        };
        let cells = cells.iter().collect::<String>();
        lines.push(format!("{label:>8} |{}", cells.trim_end()).trim_end().to_owned());
    }
    lines.push(format!("{:>8} +{}", "", "-".repeat(width)));
    let last = last.to_string();
    lines.push(format!("{:>8}  0{last:>after$}", "", after = width - 1));
    Some(lines.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_falling_loss_falls_from_left_to_right() {
        let training = (1..=240).map(|step| (step, 5.0 - step as f64 / 60.0)).collect::<Vec<_>>();
        let text = draw(&training, &[(0, 5.5), (240, 1.5)]).expect("a curve");
        let lines = text.lines().collect::<Vec<_>>();
        assert_eq!(lines.len(), 1 + SIZE[1] + 2, "{text}");
        assert_eq!(lines[1], "   5.500 |o", "{text}");
        assert!(lines[10].starts_with("   1.000 |") && lines[10].ends_with('*'), "{text}");
        let places = lines[2..10].iter().filter_map(|line| line.find('*')).collect::<Vec<_>>();
        assert!(places.len() > 5 && places.is_sorted(), "{text}");
        assert!(lines[12].ends_with("240") && lines[12].contains(" 0 "), "{text}");
        assert!(text.lines().all(|line| line.len() <= 80) && text.is_ascii(), "{text}");
    }

    #[test]
    fn too_few_losses_are_no_curve_and_equal_ones_a_line() {
        assert_eq!(draw(&[(1, 2.0), (2, 1.0)], &[(0, 3.0)]), None);
        let text = draw(&[(1, 2.0), (2, 2.0), (3, 2.0)], &[]).expect("a curve");
        assert_eq!(text.matches('*').count(), 1 + 3, "{text}");
    }
}
