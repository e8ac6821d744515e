use super::*;

/// Scores of `num_rows` rows: noise around a level of each row's own, plus `effect` at each phase.
fn noisy(num_rows: usize, effect: &[f64], seed: u64) -> Vec<Vec<f64>> {
    let mut random = seeded([seed, 9, 9, 9]);
    let mut noise = || f64::from(random.next_u32()) / f64::from(u32::MAX) - 0.5;
    let row = |_| {
        let level = 3.0 * noise();
        effect.iter().map(|effect| level + noise() + effect).collect()
    };
    (0..num_rows).map(row).collect()
}

fn measured(scores: &[Vec<f64>], better: Better) -> PhaseGap {
    let num_phases = scores[0].len();
    let phases: Vec<usize> = (0..num_phases).collect();
    phase_gap(scores, &phases, num_phases, better, 5).expect("rows and phases")
}

/// Every number is finite, and every interval in order.
fn assert_sound(gap: &PhaseGap) {
    let numbers =
        [gap.gap, gap.chance_median, gap.chance_high, gap.p_gap, gap.chance_band[0], gap.chance_band[1], gap.wave];
    let all = numbers.iter().chain(gap.phases.iter().map(|score| &score.mean));
    assert!(all.chain([&gap.p_wave]).all(|x| x.is_finite()), "{gap:?}");
    let intervals = gap.phases.iter().filter_map(|score| score.interval).chain(gap.gap_interval);
    assert!(intervals.chain([gap.chance_band]).all(|[low, high]| low <= high), "{gap:?}");
    assert!(gap.chance_median <= gap.chance_high && (0.0..=1.0).contains(&gap.p_gap), "{gap:?}");
}

#[test]
fn a_blind_phase_is_found() {
    let mut effect = [0.0; 8];
    effect[3] = -1.0;
    let gap = measured(&noisy(24, &effect, 1), Better::High);
    assert_sound(&gap);
    assert_eq!((gap.worst, gap.verdict), (3, PhaseVerdict::BeyondChance));
    let [low, high] = gap.gap_interval.expect("24 rows");
    assert!(low > gap.chance_high && low < 1.0 && high > 1.0, "{gap:?}");
    // Only the blind phase leaves chance's band on its side.
    let below = gap.phases.iter().filter(|score| score.mean < gap.chance_band[0]);
    assert_eq!(below.map(|score| score.phase).collect::<Vec<_>>(), [3]);
    // The same scores as ranks, of which the low ones are good.
    let ranks = measured(&noisy(24, &effect, 1), Better::Low);
    assert_eq!((ranks.best, ranks.worst, ranks.gap), (3, gap.best, gap.gap));
}

#[test]
fn a_wave_has_its_amplitude_and_is_seen_before_the_gap_is() {
    let of_wave = |height: f64| (0..16).map(|x| height * (TAU * f64::from(x) / 16.0).cos()).collect::<Vec<_>>();
    let pure = measured(&[of_wave(0.5), of_wave(0.5)], Better::High);
    assert!((pure.wave - 0.5).abs() < 1e-12 && (pure.gap - 1.0).abs() < 1e-12, "{pure:?}");
    let small = |seed| measured(&noisy(16, &of_wave(0.08), seed), Better::High);
    let found = |p: fn(&PhaseGap) -> f64| (0..40).filter(|&seed| p(&small(seed)) < LEVEL).count();
    let [by_wave, by_gap] = [found(|gap| gap.p_wave), found(|gap| gap.p_gap)];
    assert!(by_wave >= 20 && by_wave > by_gap + 5, "{by_wave} and {by_gap} of 40");
    // Two phases: half of their difference.
    let two = measured(&[vec![1.0, 0.0], vec![1.0, 0.0]], Better::High);
    assert!((two.wave - 0.5).abs() < 1e-12, "{two:?}");
}

#[test]
fn without_an_effect_one_in_twenty_is_called_beyond_chance() {
    let is_beyond = |seed: &u64| {
        let gap = measured(&noisy(12, &[0.0; 8], *seed), Better::High);
        assert_sound(&gap);
        gap.verdict == PhaseVerdict::BeyondChance
    };
    let called = (0..200).filter(is_beyond).count();
    assert!((2..=16).contains(&called), "{called} of 200");
}

#[test]
fn smooth_rows_that_disagree_are_no_effect() {
    // Each row is a full wave with a crest of its own, as where the distance to the question acts.
    let rows = |seed| {
        let mut random = seeded([seed, 8, 8, 8]);
        let mut row = || {
            let crest = below(&mut random, 16);
            (0..16).map(|phase| (TAU * (phase + crest) as f64 / 16.0).cos()).collect()
        };
        (0..4).map(|_| row()).collect::<Vec<Vec<f64>>>()
    };
    let called =
        |p: fn(&PhaseGap) -> f64| (0..200).filter(|&seed| p(&measured(&rows(seed), Better::High)) < LEVEL).count();
    let [by_gap, by_wave] = [called(|gap| gap.p_gap), called(|gap| gap.p_wave)];
    assert!(by_gap <= 16 && by_wave <= 16, "{by_gap} and {by_wave} of 200");
}

#[test]
fn the_gap_of_noise_has_an_interval_that_reaches_what_chance_gives() {
    // The plain percentiles of resampled gaps would lie above the observed gap in nearly all of these.
    let reaches = |seed: &u64| {
        let gap = measured(&noisy(12, &[0.0; 8], *seed), Better::High);
        gap.gap_interval.is_some_and(|[low, _]| low <= gap.chance_median)
    };
    let count = (0..100).filter(reaches).count();
    assert!(count >= 90, "{count} of 100");
}

#[test]
fn the_same_seed_gives_the_same_numbers() {
    let scores = noisy(6, &[0.0, 0.4, 0.0, 0.0, 0.0], 3);
    assert_eq!(measured(&scores, Better::High), measured(&scores, Better::High));
    let other = phase_gap(&scores, &[0, 1, 2, 3, 4], 5, Better::High, 6).expect("rows and phases");
    let first = measured(&scores, Better::High);
    assert_eq!((first.gap, first.wave), (other.gap, other.wave));
    assert_ne!(first.chance_band, other.chance_band);
}

#[test]
fn one_row_says_nothing_of_a_phase() {
    let gap = measured(&noisy(1, &[0.0, 0.0, 9.0, 0.0], 2), Better::High);
    assert_sound(&gap);
    // Each rotation of one row has the same gap.
    assert_eq!((gap.gap_interval, gap.p_gap, gap.verdict), (None, 1.0, PhaseVerdict::WithinChance));
    assert!(gap.phases.iter().all(|score| score.interval.is_none()));
}

#[test]
fn more_phases_than_rows_are_measured() {
    let gap = measured(&noisy(2, &[0.0; 256], 4), Better::High);
    assert_sound(&gap);
    assert_eq!((gap.phases.len(), gap.verdict), (256, PhaseVerdict::WithinChance));
}

#[test]
fn equal_scores_have_no_gap() {
    // All found, none found, and a rank whose sum rounds.
    for score in [1.0, 0.0, 0.1] {
        let gap = measured(&vec![vec![score; 5]; 7], Better::High);
        assert_sound(&gap);
        assert_eq!((gap.gap, gap.chance_high, gap.verdict), (0.0, 0.0, PhaseVerdict::NoGap));
        assert_eq!((gap.gap_interval, gap.best, gap.worst), (Some([0.0, 0.0]), 0, 0));
        assert_eq!((gap.p_gap, gap.p_wave), (1.0, 1.0));
    }
}

#[test]
fn without_rows_or_phases_there_is_nothing() {
    assert!(phase_gap(&[], &[0, 1], 2, Better::High, 0).is_none());
    assert!(phase_gap(&[vec![1.0]], &[0], 2, Better::High, 0).is_none());
}
