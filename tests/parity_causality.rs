//! A row of logits does not depend on later tokens, nor on tokens of other documents.
use crate::random_model::{VOCAB_SIZE, ids, kinds, max_difference, random_model, recipe, tokens};
use burn_flex::Flex;
use sieve_core::Attention;
use sieve_nn::{KvCache, LayerContext, Qwen3};
use sieve_ops::Documents;

const LEN: usize = 48;

/// Logits of one row of several documents; `ends` are the positions after each document's last token.
fn logits(model: &Qwen3<Flex>, tokens: &[u32], ends: &[usize]) -> Vec<f32> {
    let (mut start, mut end) = (Vec::new(), Vec::new());
    let mut first = 0;
    for &last in ends {
        start.extend(vec![first as u32; last - first]);
        end.extend(vec![last as u32; last - first]);
        first = last;
    }
    let device = Default::default();
    let documents = Documents::new(&start, &end, [1, tokens.len()], &device);
    let rope = model.rope(tokens.len(), &device);
    let context = LayerContext::new(&documents, &rope);
    let logits = model.logits(ids(tokens), &context);
    logits.into_data().to_vec().expect("f32")
}

/// Asserts that two rows of logits are equal: bit for bit, or within a few units in the last place for DMA, whose key
/// lists group the sums differently.
fn assert_same(model: &Qwen3<Flex>, a: &[f32], b: &[f32], what: &str) {
    let largest = a.iter().fold(0f32, |max, x| max.max(x.abs()));
    match model.shape().attention {
        // Three layers round a few times each.
        Attention::Dma(_) => {
            let difference = max_difference(a, b);
            let tolerance = 32.0 * f32::EPSILON * largest;
            assert!(difference <= tolerance, "{what}: {difference} > {tolerance}");
        }
        _ => assert!(a == b, "{what}: {} apart", max_difference(a, b)),
    }
}

/// `tokens` with every token from `from` on replaced by a different one.
fn changed_from(tokens: &[u32], from: usize) -> Vec<u32> {
    let change =
        |(n, &token): (usize, &u32)| if n < from { token } else { (token + 1 + n as u32 % 90) % VOCAB_SIZE as u32 };
    tokens.iter().enumerate().map(change).collect()
}

#[test]
fn later_tokens_change_no_earlier_row() {
    for [kind, model_lines, attention] in kinds() {
        let model = random_model(&recipe(model_lines, attention), 5);
        let tokens = tokens(LEN, 6);
        let rows = logits(&model, &tokens, &[LEN]);
        for from in [1, 4, 7, 16, 31, 47] {
            let others = logits(&model, &changed_from(&tokens, from), &[LEN]);
            let split = from * VOCAB_SIZE;
            let what = format!("{kind}, changed from {from}");
            assert_same(&model, &rows[..split], &others[..split], &what);
            let own = split..split + VOCAB_SIZE;
            let difference = max_difference(&rows[own.clone()], &others[own]);
            assert!(difference > 0.05, "{what}: its own row did not change");
        }
    }
}

#[test]
fn another_document_of_the_row_changes_nothing() {
    for [kind, model_lines, attention] in kinds() {
        let model = random_model(&recipe(model_lines, attention), 7);
        let all = tokens(LEN, 8);
        // Three documents; the second has one token.
        let ends = [13, 14, LEN];
        let rows = logits(&model, &all, &ends);
        // The last document alone, with positions from 0.
        let alone = logits(&model, &all[14..], &[LEN - 14]);
        let packed = &rows[14 * VOCAB_SIZE..];
        let difference = max_difference(packed, &alone);
        assert!(difference < 1e-4, "{kind}: {difference}");
        // Replaces the tokens before the last document, then the tokens after the first document.
        let mut others = all.clone();
        others[..14].reverse();
        let again = logits(&model, &others, &ends);
        assert_same(&model, packed, &again[14 * VOCAB_SIZE..], kind);
        let changed = logits(&model, &changed_from(&all, 13), &ends);
        let first = 13 * VOCAB_SIZE;
        assert_same(&model, &rows[..first], &changed[..first], kind);
    }
}

#[test]
fn a_decoded_row_depends_on_the_tokens_before_it_alone() {
    for [kind, model_lines, attention] in kinds() {
        let model = random_model(&recipe(model_lines, attention), 9);
        let rope = model.rope(LEN, &Default::default());
        let decode = |tokens: &[u32]| -> Vec<Vec<f32>> {
            let mut cache = KvCache::new(model.layers.len());
            let mut steps = vec![&tokens[..10]];
            steps.extend(tokens[10..].chunks(1));
            steps
                .into_iter()
                .map(|step| model.next_logits(ids(step), &mut cache, &rope))
                .map(|logits| logits.into_data().to_vec().expect("f32"))
                .collect()
        };
        let tokens = tokens(LEN, 10);
        let (rows, others) = (decode(&tokens), decode(&changed_from(&tokens, 30)));
        // Row n holds the logits after 10 + n tokens.
        assert!(rows[..=20] == others[..=20], "{kind}");
        assert!(rows[21] != others[21], "{kind}");
    }
}
