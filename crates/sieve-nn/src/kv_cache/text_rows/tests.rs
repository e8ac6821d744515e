use super::*;
use crate::Qwen3;
use crate::testing::{kinds, shape};
use burn::tensor::{Int, Tensor, TensorData};
use burn_flex::{Flex, FlexDevice};
use sieve_ops::RotaryEmbedding;
use sieve_testing::Random;

/// Most texts, and most tokens of each.
const MOST: [usize; 2] = [7, 40];

/// A model, and what it reads texts with.
struct Reader {
    model: Qwen3<Flex>,
    rope: RotaryEmbedding<Flex>,
}

impl Reader {
    fn new(attention: sieve_core::Attention) -> Self {
        let model = Qwen3::new(&shape(attention), 1, &FlexDevice);
        Self { rope: model.rope(MOST[1] + 1, &FlexDevice), model }
    }

    /// The logits after more tokens of a text.
    fn read(&self, tokens: &[i32], text: &mut KvCache<Flex>) -> Vec<f32> {
        let ids = TensorData::new(tokens.to_vec(), [1, tokens.len()]);
        let ids = Tensor::<Flex, 2, Int>::from_data(ids, &FlexDevice);
        self.model.next_logits(ids, text, &self.rope).into_data().iter::<f32>().collect()
    }

    fn text_of(&self, random: &mut Random, num_tokens: usize) -> KvCache<Flex> {
        let tokens: Vec<i32> = (0..num_tokens).map(|_| random.below(50) as i32).collect();
        let mut text = KvCache::new(self.model.layers.len());
        self.read(&tokens, &mut text);
        text
    }

    /// Asserts that both caches are of one text: they give the same logits, to the bit.
    fn assert_equal(&self, what: &str, found: &KvCache<Flex>, expected: &KvCache<Flex>) {
        assert_eq!(found.num_tokens, expected.num_tokens, "{what}");
        let [found, expected] = [found, expected].map(|text| self.read(&[3, 7], &mut text.clone()));
        assert_eq!(found, expected, "{what}");
    }
}

/// What a step does to rows that it takes as free: it writes the entries of a first token.
fn write_over_idle_rows(rows: &mut TextRows<Flex>, one_token: &KvCache<Flex>) {
    for (row, length) in rows.lengths().into_iter().enumerate().filter(|(_, length)| *length == 0) {
        assert_eq!(length, 0);
        for (layer, text) in rows.cache.layers.iter_mut().zip(&one_token.layers) {
            put(layer, row, text, 1);
        }
    }
}

#[test]
fn texts_of_every_kind_stay_as_they_are_while_others_come_and_go_and_rows_grow() {
    for attention in kinds(0.5) {
        let (reader, mut random) = (Reader::new(attention), Random(7));
        let what = format!("{attention:?}");
        let mut rows = TextRows::beginning_with([2, 8], MOST, &FlexDevice);
        // Each text's row, its cache apart from the others, and whether it is kept.
        let mut texts: Vec<(usize, KvCache<Flex>, bool)> = Vec::new();
        let one_token = reader.text_of(&mut random, 1);
        let (mut sizes, mut shrunk) = (Vec::new(), Vec::new());
        for _ in 0..80 {
            let at = (!texts.is_empty()).then(|| random.below(texts.len()));
            match (random.below(6), at) {
                (0 | 1, _) if rows.has_free() => {
                    let num_tokens = 1 + random.below(22);
                    let text = reader.text_of(&mut random, num_tokens);
                    texts.push((rows.put(&mut text.clone()), text, false));
                }
                (2, Some(at)) if !texts[at].2 => {
                    rows.keep(texts[at].0);
                    texts[at].2 = true;
                }
                (3, Some(at)) => {
                    let (row, text, _) = texts.swap_remove(at);
                    reader.assert_equal(&what, &rows.take(row), &text);
                }
                (4, Some(at)) if random.below(2) == 0 => rows.free(texts.swap_remove(at).0),
                (5, _) => {
                    let now = rows.shrink();
                    texts.iter_mut().for_each(|(row, ..)| *row = now[*row]);
                    shrunk.push([rows.num_rows(), rows.room()]);
                }
                _ => {}
            }
            if rows.cache.layers.is_empty() || texts.iter().any(|(_, text, _)| text.num_tokens + 2 >= MOST[1]) {
                continue;
            }
            // A step: each open text gets a token, and rows without an open text are written over.
            rows.make_room();
            for (row, text, is_kept) in &mut texts {
                if !*is_kept {
                    let token = [random.below(50) as i32];
                    reader.read(&token, text);
                    let mut longer = rows.take(*row);
                    reader.read(&token, &mut longer);
                    *row = rows.put(&mut longer);
                }
            }
            write_over_idle_rows(&mut rows, &one_token);
            let lengths = rows.lengths();
            for (row, text, is_kept) in &texts {
                assert_eq!(lengths[*row], if *is_kept { 0 } else { text.num_tokens }, "{what}");
            }
            sizes.push([rows.num_rows(), rows.room()]);
        }
        for (row, text, _) in texts {
            reader.assert_equal(&what, &rows.take(row), &text);
        }
        assert!(sizes.iter().all(|[rows, room]| *rows <= MOST[0] && *room <= MOST[1]), "{what}");
        assert!(sizes.iter().any(|[rows, room]| *rows > 2 && *room > 16) && !shrunk.is_empty(), "{what}");
    }
}

#[test]
fn rows_begin_small_and_grow_to_what_was_asked_for() {
    let reader = Reader::new(sieve_core::Attention::Mha);
    let mut random = Random(3);
    let size = |rows: &TextRows<Flex>| [rows.num_rows(), rows.room()];
    let small = TextRows::<Flex>::new(3, 48, &FlexDevice);
    assert_eq!(size(&small), [3, 48]);
    assert_eq!(size(&TextRows::<Flex>::new(64, 9000, &FlexDevice)), FIRST_SIZE);
    // Equal bits with more rows need five rows at least.
    assert!(FIRST_SIZE[0] >= 5);

    let mut rows = TextRows::beginning_with([2, 10], [5, 36], &FlexDevice);
    let mut text_of = |num_tokens| reader.text_of(&mut random, num_tokens);
    // Number of tokens, and the size of the rows after this text.
    for (num_tokens, expected) in [(10, [2, 10]), (11, [2, 20]), (3, [4, 20]), (21, [4, 36]), (36, [5, 36])] {
        rows.put(&mut text_of(num_tokens));
        assert_eq!(size(&rows), expected);
    }
    assert!(!rows.has_free());
    rows.free(4);
    rows.keep(1);
    rows.make_room();
    assert_eq!(rows.lengths(), [10, 0, 3, 21, 0]);
    // A text of all tokens has its row, but no step may make it longer.
    rows.put(&mut text_of(36));
    let full = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| rows.make_room()));
    assert!(full.is_err());

    let mut rows = TextRows::beginning_with([2, 10], [5, 36], &FlexDevice);
    rows.put(&mut text_of(10));
    rows.make_room();
    assert_eq!(size(&rows), [2, 20]);
}

#[test]
fn one_open_text_leaves_room_to_give_back_while_it_is_shorter_than_a_quarter_of_its_row() {
    let reader = Reader::new(sieve_core::Attention::Mha);
    let mut random = Random(5);
    // As a server of 4 texts of 40 tokens: a text streams beside another one of 30 tokens, which ends.
    let mut roomy_with = |tokens: usize, is_kept: bool| {
        let mut rows = TextRows::beginning_with([8, 2], [4, 40], &FlexDevice);
        let [_, long] = [tokens, 30].map(|tokens| rows.put(&mut reader.text_of(&mut random, tokens)));
        assert_eq!((rows.tokens_held(), rows.is_roomy()), (4 * 32, false));
        if is_kept {
            rows.keep(long)
        } else {
            rows.free(long)
        }
        rows.is_roomy()
    };
    assert_eq!([2, 7, 8, 20].map(|tokens| roomy_with(tokens, false)), [true, true, false, false]);
    assert!(!roomy_with(2, true), "a kept text needs its room");
}

#[test]
fn rows_shrink_to_what_their_texts_need() {
    let reader = Reader::new(sieve_core::Attention::Mha);
    let mut random = Random(3);
    let size = |rows: &TextRows<Flex>| [rows.num_rows(), rows.room()];
    let mut rows = TextRows::beginning_with([2, 10], [8, 40], &FlexDevice);
    assert_eq!((rows.is_roomy(), rows.tokens_held()), (false, 0), "no memory is taken yet");
    let mut texts: Vec<_> = [35, 9, 3, 8, 4].map(|tokens| reader.text_of(&mut random, tokens)).into();
    let held: Vec<usize> = texts.iter().map(|text| rows.put(&mut text.clone())).collect();
    assert_eq!((size(&rows), rows.tokens_held(), rows.is_roomy()), ([8, 40], 320, false));
    // The others fit into two rows of ten tokens, an eighth.
    rows.free(held[0]);
    rows.free(held[2]);
    rows.free(held[3]);
    rows.keep(held[4]);
    assert!(rows.is_roomy());
    let now = rows.shrink();
    assert_eq!((size(&rows), [now[held[1]], now[held[4]]], rows.is_roomy()), ([2, 10], [0, 1], false));
    assert_eq!(rows.lengths(), [9, 0], "one is open, one kept");
    reader.assert_equal("open", &rows.take(0), &texts.remove(1));
    reader.assert_equal("kept", &rows.take(1), &texts.remove(3));
    // Without a text nothing is left.
    rows.put(&mut texts.remove(0));
    rows.free(0);
    assert!(rows.is_roomy());
    rows.shrink();
    assert_eq!((size(&rows), rows.tokens_held(), rows.is_roomy()), ([2, 10], 0, false));
    rows.put(&mut texts.remove(0));
    assert_eq!(rows.lengths(), [3, 0]);
}
