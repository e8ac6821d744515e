//! Simple retrieval tasks: a pass key, key-value pairs, copying, selective copying and induction.
use super::random::Random;
use super::sample::{LongSample, Match, NUM_WRONG, depth, wrong};
use super::text::NOISE;

/// Number of words that the model has to copy.
pub(super) const NUM_COPIED: usize = 8;

/// A pass key of five digits, hidden in filler text.
pub(super) fn passkey(random: &mut Random, parts: usize) -> LongSample {
    let key = random.number(5);
    let place = random.below(parts + 1);
    let mut sentences = vec![NOISE.to_owned(); parts];
    let hidden = format!("The pass key is {key}. Remember it. {key} is the pass key.");
    sentences.insert(place, hidden);
    let context = sentences.join("\n");
    let wrong = wrong(&context, || random.number(5));
    LongSample {
        prompt: format!(
            "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. I will quiz \
             you about the important information there.\n{context}\nWhat is the pass key? The pass key is"
        ),
        references: vec![key],
        matching: Match::All,
        depth: depth(place, parts),
        wrong,
    }
}

/// A JSON object of random UUIDs; the value of one key is asked for (arXiv:2307.03172).
pub(super) fn key_value(random: &mut Random, parts: usize) -> LongSample {
    let pairs: Vec<[String; 2]> = (0..parts).map(|_| [random.uuid(), random.uuid()]).collect();
    let place = random.below(parts);
    let [key, value] = &pairs[place];
    let lines: Vec<String> = pairs.iter().map(|[k, v]| format!("\"{k}\": \"{v}\"")).collect();
    let context = lines.join(",\n ");
    let wrong = wrong(&context, || random.uuid());
    LongSample {
        prompt: format!(
            "Extract the value corresponding to the specified key in the JSON object below.\n\nJSON \
             data:\n{{{context}}}\n\nKey: \"{key}\"\nCorresponding value:"
        ),
        references: vec![value.clone()],
        matching: Match::All,
        depth: depth(place, parts),
        wrong,
    }
}

/// Copying: words at the beginning of filler text, asked for in their order.
pub(super) fn copy(random: &mut Random, parts: usize) -> LongSample {
    let places = vec![0; NUM_COPIED];
    copied(random, parts, places, "The text begins with eight words in brackets.")
}

/// Selective copying (arXiv:2312.00752): words at random places of filler text, asked for in their order.
pub(super) fn select(random: &mut Random, parts: usize) -> LongSample {
    let mut places = random.sample(parts + 1, NUM_COPIED);
    places.sort_unstable();
    copied(random, parts, places, "Eight words in brackets are hidden in the text.")
}

/// `parts` filler sentences with the words to copy before the sentences at `places`, and the question for them.
fn copied(random: &mut Random, parts: usize, places: Vec<usize>, about: &str) -> LongSample {
    // The words to copy, and enough others for the wrong answers.
    let words = random.words(2 * NUM_COPIED + 20 * NUM_WRONG);
    let (copied, others) = words.split_at(NUM_COPIED);
    let mut sentences = vec![NOISE.to_owned(); parts];
    for (place, word) in places.iter().zip(copied).rev() {
        sentences.insert(*place, format!("[{word}]"));
    }
    let context = sentences.join("\n");
    let prompt = format!("{about} Say them again in their order.\n{context}\nThe words in their order:");
    // Wrong answers are other words: the same words in another order would be as likely to a model that ignores order.
    let mut number = 0;
    let mut other = || {
        number += 1;
        let words = others.iter().cycle().skip(number * NUM_COPIED);
        words.take(NUM_COPIED).cloned().collect::<Vec<_>>().join(" ")
    };
    LongSample {
        prompt,
        references: vec![copied.join(" ")],
        matching: Match::All,
        depth: None,
        wrong: wrong(&context, &mut other),
    }
}

/// Induction: random words. The last word occurred before, and the word that followed it then is asked for.
pub(super) fn induce(random: &mut Random, parts: usize) -> LongSample {
    // The words of the text, and 20 others as wrong answers.
    let words = random.words(parts + 1 + 20);
    let (words, others) = words.split_at(parts + 1);
    let place = random.below(parts);
    let context = words.join(" ");
    let (mut others, mut more) = (others.iter().cloned(), 0);
    let wrong = wrong(&context, || {
        others.next().unwrap_or_else(|| {
            more += 1;
            format!("{}{more}", random.letters(b'a', 5))
        })
    });
    debug_assert!(format!(" {context} ").contains(&format!(" {} ", words[place])));
    LongSample {
        prompt: format!("{context} {}", words[place]),
        references: vec![words[place + 1].clone()],
        matching: Match::All,
        depth: depth(place, parts),
        wrong,
    }
}
