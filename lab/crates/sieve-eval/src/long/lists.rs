//! RULER's tasks about the whole text: variable tracking, and counting words.
use super::random::Random;
use super::sample::{LongSample, Match, Size, wrong};
use super::text::NOISE;
use crate::seeded::different;

/// Assignments in a chain of RULER's variable tracking, one for each variable.
pub(super) const CHAIN: usize = 5;
/// Most common words that are asked for.
pub(super) const NUM_COMMON: usize = 10;
/// Coded words of a text, at least: with fewer, the three most frequent ones would not differ in number.
pub(super) const FEWEST_CODED: usize = 34;
/// Below this number of tokens RULER's word lists repeat words less often.
const SHORT: usize = 4096;
/// Below this number of tokens there is no room for a solved example.
const NO_EXAMPLE: usize = 1024;

/// Variable tracking: a value is assigned from variable to variable, and all variables with that value are asked for.
pub(super) fn variable_tracking(random: &mut Random, size: Size) -> LongSample {
    let (text, variables) = chain(random, size.parts, 5);
    let example = match size.length {
        0..NO_EXAMPLE => String::new(),
        length => {
            let noises = if length < SHORT { CHAIN } else { 2 * CHAIN };
            let (example, variables) = chain(random, noises, 3);
            format!("{example} {}\n\n\n\n", variables.join(" "))
        }
    };
    let prompt = format!("{example}{text}");
    let wrong = wrong(&prompt, || random.letters(b'A', 5));
    LongSample { prompt, references: variables, matching: Match::All, depth: None, wrong }
}

/// A text of `noises` filler sentences with its question, and the variables of `letters` letters that answer it.
fn chain(random: &mut Random, noises: usize, letters: usize) -> (String, Vec<String>) {
    let variables = different(CHAIN, || random.letters(b'A', letters));
    let value = random.number(5);
    let mut places = random.sample(noises, CHAIN);
    places.sort_unstable();
    let noise = format!("{NOISE}\n");
    let mut sentences = vec![noise.as_str(); noises];
    let lines: Vec<String> = (0..CHAIN)
        .map(|n| match n {
            0 => format!("VAR {} = {value}", variables[0]),
            _ => format!("VAR {} = VAR {} ", variables[n], variables[n - 1]),
        })
        .collect();
    for (place, line) in places.iter().zip(&lines).rev() {
        sentences.insert(*place, line);
    }
    let context = sentences.join(" ");
    let text = format!(
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\nQuestion: \
         Find all variables that are assigned the value {value} in the text above. Answer: According to the chain(s) \
         of variable assignment in the text above, {CHAIN} variables are assgined the value {value}, they are:"
    );
    (text, variables)
}

/// A numbered list of words, in which ten words occur more often than the others. These ten are asked for.
pub(super) fn common_words(random: &mut Random, size: Size) -> LongSample {
    // How often a common word and another word occur. The example has its own numbers, after its number of words.
    let (often, seldom, in_example) = match size.length {
        0..SHORT => (6, 1, (20, 3, 1)),
        _ => (30, 3, (40, 10, 3)),
    };
    let example = match size.length {
        0..NO_EXAMPLE => String::new(),
        _ => {
            let (num_words, often_in_example, seldom_in_example) = in_example;
            let (text, common) = word_list(random, num_words, often_in_example, seldom_in_example);
            format!("{text} {}\n", numbered(&common))
        }
    };
    let (text, common) = word_list(random, size.parts, often, seldom);
    let prompt = format!("{example}{text}");
    let mut others = random.words(20 * NUM_COMMON + NUM_COMMON).into_iter();
    let wrong = wrong(&prompt, || others.next().unwrap_or_else(|| random.letters(b'a', 6)));
    LongSample { prompt, references: common, matching: Match::All, depth: None, wrong }
}

/// The shuffled list of `words` words with its question, and the common words. These occur `often` times, others
/// `seldom` times.
fn word_list(random: &mut Random, words: usize, often: usize, seldom: usize) -> (String, Vec<String>) {
    let words = random.words(words);
    let (common, others) = words.split_at(NUM_COMMON);
    let common_words = common.iter().flat_map(|word| std::iter::repeat_n(word, often));
    let other_words = others.iter().flat_map(|word| std::iter::repeat_n(word, seldom));
    let mut list: Vec<&String> = common_words.chain(other_words).collect();
    random.shuffle(&mut list);
    let context = numbered(&list);
    let text = format!(
        "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that \
         appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list? Answer: The top \
         10 words that appear most often in the list are:"
    );
    (text, common.to_vec())
}

fn numbered<T: AsRef<str>>(words: &[T]) -> String {
    let words = words.iter().enumerate();
    let words = words.map(|(n, word)| format!("{}. {}", n + 1, word.as_ref()));
    words.collect::<Vec<_>>().join(" ")
}

/// Random words, where the k-th most frequent one occurs `N k^-2 / zeta(2)` times. The first is "..."; the second,
/// third and fourth are asked for.
pub(super) fn frequent_words(random: &mut Random, size: Size) -> LongSample {
    let num_words = (size.length / 50).max(4);
    let mut words: Vec<String> = vec!["...".to_owned()];
    while words.len() < num_words {
        words.push(random.letters(b'a', 6));
    }
    let zeta_2 = std::f64::consts::PI.powi(2) / 6.0;
    let count = |parts: usize, rank: usize| (parts as f64 / (rank * rank) as f64 / zeta_2) as usize;
    // If rounding down made the fourth word as frequent as the fifth, the question would have two answers.
    let mut parts = size.parts.max(FEWEST_CODED);
    while count(parts, 4) == count(parts, 5) {
        parts -= 1;
    }
    let ranked = words.iter().enumerate();
    let mut coded: Vec<&str> =
        ranked.flat_map(|(n, word)| std::iter::repeat_n(word.as_str(), count(parts, n + 1))).collect();
    random.shuffle(&mut coded);
    let prompt = format!(
        "Read the following coded text and track the frequency of each coded word. Find the three most frequently \
         appeared coded words. {}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are \
         the three most frequently appeared words in the above coded text? Answer: According to the coded text above, \
         the three most frequently appeared words are:",
        coded.join(" ")
    );
    let wrong = wrong(&prompt, || random.letters(b'a', 6));
    LongSample { prompt, references: words[1..4].to_vec(), matching: Match::All, depth: None, wrong }
}
