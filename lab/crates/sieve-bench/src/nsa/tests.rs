use super::*;
use sieve_testing::refusal;

#[test]
fn another_choice_fails() {
    let none = |_, _: &[usize]| false;
    // Two of three queries differ, which is allowed where there are so few.
    assert!(judge_choice(&[0, 1, 0, 2, 0, 3], &[0, 1, 0, 1, 0, 1], 2, none).is_ok());
    let judge = |found: [i32; 2], is_tied: bool| {
        judge_choice(&[found; 20].concat(), &[[1, 2]; 20].concat(), 2, |_, _: &[usize]| is_tied)
    };
    assert!(judge([0, 2], false).is_err());
    assert!(judge([0, 2], true).is_ok());
    for wrong in [[2, 2], [0, 0], [2, -1], [2, 0]] {
        assert!(judge(wrong, true).is_err(), "{wrong:?}: repeated, left out or not ascending");
    }
}

/// Expected results of a row with one document of 700 tokens. A late token sees hundreds of keys, and few queries see
/// its own key.
fn one_long_document() -> Expected {
    let shape = AttentionShape::new(1, 700, [4, 2], [64, 64]);
    let mut random = Random(4);
    let blocks = NsaBlocks::of([8, 4, 16, 6]);
    let case = Case::draw(shape, Keys::Dense, Cuts::Count(1), &Scores::RANDOM[0], 9).expect("one document");
    Inputs::of(case, blocks, &mut random).expected()
}

/// Scales the last 50 tokens of an output by 0 or 0.95, as a broken kernel might, and requires that the check refuses
/// it.
#[test]
fn a_kernel_that_is_wrong_in_its_late_rows_fails() {
    let expected = one_long_document();
    let plain = expected.plain();
    for (name, values) in &plain {
        let judged = expected.judge(name, values);
        assert!(judged.is_ok(), "{name}: {judged:?}");
    }
    // The packed heads of a token: four of queries, two of keys, two of values.
    let (q, k, v) = (0..4, 4..6, 6..8);
    for (name, per_token, heads, factor) in [
        ("selected o", 4, q.clone(), 0.0),
        ("selected o", 4, q.clone(), 0.95),
        ("selected dqkv", 8, q.clone(), 0.95),
        ("selected dqkv", 8, k, 0.95),
        ("selected dqkv", 8, v, 0.95),
        ("compressed o", 4, q.clone(), 0.95),
        ("compressed dqkv", 8, q.clone(), 0.95),
        ("gates o", 4, q.clone(), 0.95),
        ("gates dselected", 4, q, 0.95),
    ] {
        let (_, values) = plain.iter().find(|(of, _)| *of == name).expect("an output");
        let mut values = values.clone();
        for token in 650..700 {
            for head in heads.clone() {
                let row = &mut values[(token * per_token + head) * 64..][..64];
                row.iter_mut().for_each(|x| *x *= factor);
            }
        }
        refusal(expected.judge(name, &values), "row");
    }
    // `dcompressed` holds keys, then values, each `[slots, 2 heads, 64]`. The late blocks of both heads are scaled.
    let (_, values) = plain.iter().find(|(of, _)| *of == "dcompressed").expect("an output");
    for which in [0, 1] {
        let mut values = values.clone();
        let first = values.len() / 2 * which;
        // 174 whole blocks fit in the row; the last slot is empty.
        for row in 160 * 2..174 * 2 {
            let row = &mut values[first + row * 64..][..64];
            row.iter_mut().for_each(|x| *x *= 0.95);
        }
        refusal(expected.judge("dcompressed", &values), "row");
    }
}

/// A head whose probability lies on one key gives the block of that key a score of exactly 1 in f32. Two such heads
/// make a tie between their blocks.
#[test]
fn blocks_that_f32_cannot_tell_apart_are_tied_and_others_are_not() {
    let shape = AttentionShape::new(1, 64, [2, 1], [64, 64]);
    let case = Case::draw(shape, Keys::Dense, Cuts::Count(1), &Scores::RANDOM[0], 9).expect("one document");
    let mut inputs = Inputs::of(case, NsaBlocks::of([4, 4, 4, 2]), &mut Random(4));
    // The first head of the last token puts almost all its probability on key 3, the second on key 7. The probability
    // of key 5 is 0 in f32.
    let keys = inputs.compressed.len() / 2;
    inputs.compressed[..keys].fill(0.0);
    let token = 63 * 4 * 64; // the last token: before it 63 of 2 query heads, 1 key and 1 value, each 64 wide
    inputs.qkv[token..token + 128].fill(0.0);
    for (head, key, logit) in [(0, 3, 200.0), (1, 7, 240.0)] {
        inputs.qkv[token + head * 64 + key] = logit;
        inputs.compressed[key * 64 + key] = 8.0;
    }
    for rule in [ChoiceRule::WeightedProbability, ChoiceRule::LargestProbability] {
        assert!(inputs.are_tied(63, rule, &[3, 7]), "{rule:?}");
        assert!(inputs.are_tied(63, rule, &[5, 9]), "{rule:?}");
        assert!(!inputs.are_tied(63, rule, &[3, 5]), "{rule:?}");
    }
}
